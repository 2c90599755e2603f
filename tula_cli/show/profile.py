"""Output of `tula profile`: its plan and its result."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tula_cli.show.tables import describe_max_cost, join_numbers, make_table, render_each_type, render_scripts
from tula_cli.words import (
    choose_size_unit,
    describe_configuration,
    format_bytes,
    format_count,
    format_number,
    format_size,
    get_first_line,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tula_cli.run.records.probes import Result
    from tula_cli.services.largest_batch import LargestBatch
    from tula_cli.services.plans import ProfilePlan, UpperBoundPlan
    from tula_cli.services.profile import DryRun
    from tula_cli.services.profile_report import ProfileReport


def _render_total_upper_bound(plans: "Sequence[ProfilePlan | UpperBoundPlan]") -> Iterator["RenderableType"]:
    """Yield the upper bound of profiling all node types together, if there are several."""
    if len(plans) > 1:
        prices = [plan.price_at_most for plan in plans]
        known = [price for price in prices if price is not None]
        price = sum(known) if len(known) == len(prices) else None
        hours = sum(plan.node_hours_at_most for plan in plans)
        yield ""
        yield f"all node types together: {describe_max_cost(None, hours, price, plans[0].currency)}"


def render_plans(plans_by_type: "Mapping[str | None, ProfilePlan | UpperBoundPlan]") -> Iterator["RenderableType"]:
    """Show the plan for each node type and its upper bound."""
    yield from render_each_type(plans_by_type, render_plan)
    yield from _render_total_upper_bound(list(plans_by_type.values()))


def render_dry_run(dry_runs: "Mapping[str | None, DryRun]") -> Iterator["RenderableType"]:
    """Show the plan for each node type with the scripts that would be submitted."""
    yield from render_each_type(dry_runs, lambda dry_run: render_plan(dry_run.plan, scripts=dry_run.scripts))
    yield from _render_total_upper_bound([dry_run.plan for dry_run in dry_runs.values()])


def render_plan(
    profile_plan: "ProfilePlan | UpperBoundPlan", *, scripts: Sequence[str] = ()
) -> Iterator["RenderableType"]:
    """Show the plan for one node type and its upper bound, then the job scripts."""
    from tula_cli.services.plans import ProfilePlan

    yield from (
        _render_final_plan(profile_plan)
        if isinstance(profile_plan, ProfilePlan)
        else render_upper_bound_plan(profile_plan)
    )
    yield from render_scripts(scripts)


def render_upper_bound_plan(plan: "UpperBoundPlan") -> Iterator["RenderableType"]:
    """Show the upper bound that is known before a node has built the model and the dataset."""
    if plan.why:
        yield plan.why
        yield f"the first job builds the model and the dataset on 1 node, in at most {plan.first_job_minutes:g} min, and determines the probes"
    more = " in the first round" if plan.adaptive else ""
    yield f"then probes on {join_numbers(plan.nodes)} nodes, at most {format_number(plan.probe_node_hours)} node-h{more}"
    cap = "" if plan.cap is None else "; probes beyond search.max_node_hours are not started"
    yield f"{describe_max_cost(None, plan.node_hours_at_most, plan.price_at_most, plan.currency)}{cap}"
    yield f"price: {plan.price}"


def render_round(plans_by_type: "Mapping[str | None, ProfilePlan | UpperBoundPlan]") -> Iterator["RenderableType"]:
    """Yield, per node type, the probes of a further round of a search and the reason for each."""
    from tula_cli.services.plans import ProfilePlan

    unfinished = {
        name: plan for name, plan in plans_by_type.items() if isinstance(plan, ProfilePlan) and plan.missing_count
    }
    yield from render_each_type(unfinished, _render_added_probes)


def _render_added_probes(plan: "ProfilePlan") -> Iterator[str]:
    done = f", {plan.done} of {plan.total} done already" if plan.done else ""
    yield f"{format_count(plan.missing_count, 'probe')} in {format_count(len({task.job for task in plan.tasks}), 'job')}{done}"
    yield from plan.reasons
    yield from [plan.certainty] * bool(plan.certainty)


def _render_final_plan(plan: "ProfilePlan") -> Iterator["RenderableType"]:
    if not plan.missing_count:
        yield f"all {format_count(plan.total, 'probe')} already have results"
        yield from [plan.certainty] * bool(plan.certainty)
        return
    table = make_table(("job", "nodes", "probes", "batches", "batches per GPU"), left=(0, 3, 4))
    for task in plan.tasks:
        batches = join_numbers(local * task.ranks for local in task.local_batches)
        table.add_row(
            task.job, str(task.nodes), str(len(task.local_batches)), batches, join_numbers(task.local_batches)
        )
    yield table
    yield ""
    yield from _render_added_probes(plan)
    if any(task.bounds for task in plan.tasks):
        yield "All trials run in one job, each in new processes. The result of each trial determines the next trial."
    elif plan.reasons:
        limit = "; all stay within search.max_node_hours" * (plan.tasks[0].spec.search.max_node_hours is not None)
        yield f"Whether further rounds follow depends on the results{limit}."
    yield describe_max_cost(plan.minutes_at_most / 60, plan.node_hours_at_most, plan.price_at_most, plan.currency)
    yield f"price: {plan.price}"


def render_report(report: "ProfileReport | LargestBatch") -> Iterator["RenderableType"]:
    """Show the measurements, or the largest batch that fits."""
    from tula_cli.services.profile_report import ProfileReport

    return render_profile_report(report) if isinstance(report, ProfileReport) else _render_largest_batch(report)


def _render_largest_batch(largest: "LargestBatch") -> Iterator["RenderableType"]:
    """Yield a table with one row per trial, then the largest batch, its headroom and the next step."""
    yield from _render_results(largest)
    yield ""
    configuration_text = describe_configuration(largest.nodes, largest.batch, largest.local_batch)
    headroom_text = ""
    if largest.headroom is not None and largest.capacity is not None:
        headroom_text = f"; {100 * largest.headroom:.0f} % of {format_bytes(largest.capacity)} per GPU remains free"
    yield f"largest batch that fits: {configuration_text}{headroom_text}"
    if largest.too_large is not None:
        yield f"local batch {largest.too_large} does not fit"
    elif largest.local_batch == largest.limit:
        yield "no larger batch is possible, because of search.max_batch or the size of the dataset"
    if (count := largest.local_batch_with_margin) is not None:
        batches = f"batches up to {count} per GPU leave" if count else "no batch leaves"
        yield f"{batches} {100 * largest.margin:.0f} % of the memory free, as tula recommend requires"
    if not largest.finished:
        yield "the search is not finished; run tula profile --largest again"
    yield ""
    yield "next: tula profile, then tula recommend"


def render_profile_report(report: "ProfileReport") -> Iterator["RenderableType"]:
    """Yield a table with one row per probe, then failures, notes and the next step."""
    yield from _render_results(report)
    yield from (f"note: {note}" for note in report.notes)
    if report.missing:
        yield f"missing: {', '.join(report.missing)}; run tula profile again"
    yield from [report.certainty] * bool(report.certainty)
    yield ""
    yield "next: tula recommend"


def _render_results(report: "ProfileReport | LargestBatch") -> Iterator["RenderableType"]:
    """Yield a table with one row per probe, then the messages of failed probes."""
    byte, memory = choose_size_unit(max((row.memory.peak for row in report.measured), default=None))
    table = make_table(
        ("nodes", "batch", "batch\n/GPU", "step\n(ms)", "exposed\ncomm (ms)", "data wait\n(ms)", "samples/s", f"memory\n({memory}/GPU)", "outcome"),
        left=(8,),
    )  # fmt: skip
    results: list[Result] = [*report.measured, *report.out_of_memory, *report.failed]
    for row in sorted(results, key=lambda row: (row.nodes, row.local_batch)):
        table.add_row(*_make_probe_row(row, byte))
    yield table
    yield from (f"{row.id} failed ({row.outcome}): {get_first_line(row.message)}" for row in report.failed)


def describe_probe(result: "Result") -> str:
    """Describe the result of a probe in one line."""
    batch = result.local_batch * result.nodes * result.gpus_per_node
    configuration_text = describe_configuration(result.nodes, batch, result.local_batch)
    match result.kind:
        case "measured":
            from tula_cli.models.time.noise import compute_trimmed_mean

            step = compute_trimmed_mean(result.step_times)
            memory = "" if result.memory.peak is None else f", {format_bytes(result.memory.peak)}/GPU"
            rate = f"{format_number(result.batch / step)} samples/s"
            return f"{configuration_text}: {format_milliseconds(step)} ms/step, {rate}{memory}"
        case "out_of_memory":
            return f"{configuration_text}: out of memory"
        case _:
            return f"{configuration_text}: failed ({result.outcome}): {get_first_line(result.message)}"


def _make_probe_row(row: "Result", byte: float) -> tuple[str, ...]:
    where = (str(row.nodes), str(row.local_batch * row.nodes * row.gpus_per_node), str(row.local_batch))
    match row.kind:
        case "measured":
            from tula_cli.models.time.noise import split_step_time

            parts = split_step_time(row)
            times = map(format_milliseconds, (parts.step, parts.sync, parts.data))
            outcome = "oversubscribed" if row.oversubscribed else "measured"
            return (*where, *times, format_number(row.batch / parts.step), format_size(row.memory.peak, byte), outcome)
        case "out_of_memory":
            outcome = "out of memory (assumed)" if row.assumed else "out of memory"
            return (*where, "-", "-", "-", "-", "-", outcome)
        case _:
            return (*where, "-", "-", "-", "-", "-", "failed")


def format_milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds without the unit; "-" if unknown."""
    return format_number(None if seconds is None else 1000 * seconds)
