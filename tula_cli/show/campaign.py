"""Output of `tula recommend --trainings`: a plan for many trainings."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tula_cli.query import QUANTITIES
from tula_cli.show.tables import describe_cost, make_table
from tula_cli.words import choose_time_unit, format_count, format_duration, format_interval_of_hours, format_number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.models.choice.campaign import Campaign


def render_campaign(plan: "Campaign") -> Iterator["RenderableType"]:
    """Yield the duration and cost of the plan, the comparison with each training at its fastest, and the table."""
    from rich.text import Text

    cost = describe_cost(plan.node_hours, plan.cost, plan.currency)
    energy = "" if plan.kwh is None else f", {format_number(plan.kwh)} kWh"
    interval = format_interval_of_hours(plan.hours_low, plan.hours_high)
    trainings = f"{format_count(plan.trainings, 'training')} on at most {format_count(plan.max_nodes)}"
    batch = "" if plan.batch is None else f", batch {plan.batch}"
    yield Text.assemble(
        (f"PLAN  {trainings}{batch}: {format_duration(3600 * plan.hours)}{interval}, {cost}{energy}", "bold green")
    )
    if plan.bound_hours is not None:
        yield _describe_choice(plan, plan.bound_hours)
    if plan.lower_bound is not None:
        yield _describe_choice_of_jobs(plan, plan.lower_bound)
    yield _describe_comparison_with_fastest(plan)
    yield ""
    yield _make_waves_table(plan)


def _describe_limits(plan: "Campaign") -> str:
    limits = [] if plan.deadline_hours is None else [format_duration(3600 * plan.deadline_hours)]
    limits += [] if plan.budget is None else [f"a budget of {plan.budget:g} {plan.currency}"]
    return f" within {' and '.join(limits)}" if limits else ""


def _describe_choice(plan: "Campaign", bound_hours: float) -> str:
    batch = "" if plan.max_batch is None else f", at most {plan.max_batch}"
    node_type = plan.waves[0].node_type
    nodes = f" on {node_type} nodes" if node_type else ""
    bound = f"no plan with this batch{nodes} finishes before {format_duration(3600 * bound_hours)}."
    return (
        f"This is {_describe_minimum(plan)}{_describe_limits(plan)}; all trainings have the same batch{batch}."
        f" Within the limits, {bound}"
    )


def _describe_minimum(plan: "Campaign") -> str:
    return "the shortest plan" if plan.minimises == "time" else f"the plan of {QUANTITIES[plan.minimises].lowest}"


def _describe_choice_of_jobs(plan: "Campaign", lower_bound: float) -> str:
    unit = QUANTITIES[plan.minimises].unit or plan.currency
    bound = f"{'costs' if plan.minimises == 'cost' else 'needs'} less than {format_number(lower_bound, 4)} {unit}"
    if plan.minimises == "time":
        bound = f"takes less than {format_duration(3600 * lower_bound)}"
    nodes = f" on {plan.node_type} nodes" if plan.node_type else ""
    is_best = "" if plan.is_optimal else f" that was found; none{nodes} {bound}"
    return (
        f"This is {_describe_minimum(plan)}{_describe_limits(plan)}{is_best}."
        " All trainings of a job have the same batch."
    )


def _describe_comparison_with_fastest(plan: "Campaign") -> str:
    fastest, configuration = plan.at_fastest, ""
    if fastest.nodes is not None:
        concurrency_text = (
            "one after the other" if fastest.side_by_side == 1 else f"{fastest.side_by_side} side by side"
        )
        configuration = f" ({format_count(fastest.nodes)}, batch {fastest.batch}, {concurrency_text})"
    cost = describe_cost(fastest.node_hours, fastest.cost, plan.currency)
    return f"Each training on its fastest configuration{configuration}: {format_duration(3600 * fastest.hours)}, {cost}.{_describe_gain(plan)}"


def _describe_gain(plan: "Campaign") -> str:
    """Return the sentence on speed and node-hours compared with each at its fastest; empty if both are equal."""
    is_as_fast = f"{plan.speedup:.2f}" == "1.00"
    percent = f"{100 * plan.node_hours / plan.at_fastest.node_hours:.0f}"
    if is_as_fast and percent == "100":
        return ""
    faster, slower = f"{format_number(plan.speedup)}x faster", f"{format_number(1 / plan.speedup)}x slower"
    speed = "takes as long" if is_as_fast else f"is {faster if plan.speedup > 1 else slower}"
    share = "the same node-hours" if percent == "100" else f"{percent} % of the node-hours"
    return f" The plan {speed} and needs {share}."


def _make_waves_table(plan: "Campaign") -> "RenderableType":
    names = [wave.node_type + " spot" * (wave.market == "spot") for wave in plan.waves]
    divisor, unit = choose_time_unit(3600 * plan.hours)
    jobs = [[wave.job, str(wave.batch)] for wave in plan.waves] if len(plan.jobs) > 1 else []
    hours = [f"start\n({unit})", f"end\n({unit})"]
    each = [f"each\n({unit})", f"each\n({plan.currency})"]
    kinds = ["node\ntype"] if any(names) else []
    of_jobs = ["job", "batch"] if jobs else []
    table = make_table(
        [*of_jobs, "trainings", "side by\nside", "nodes\neach", *kinds, "local\nbatch", *each, *hours],
        left=(0,) if jobs else (),
    )
    for index, (wave, name) in enumerate(zip(plan.waves, names, strict=True)):
        times = [wave.training_hours, wave.start, wave.end]
        each_time, start, end = (format_number(3600 * value / divisor) for value in times)
        table.add_row(
            *(jobs[index] if jobs else []),
            str(wave.trainings), str(wave.side_by_side), str(wave.nodes), *([name] if kinds else []),
            str(wave.local_batch), each_time, format_number(wave.training_cost), start, end,
        )  # fmt: skip
    return table
