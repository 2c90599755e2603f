"""Output of `tula recommend`: the choice, all predictions and the Pareto front."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tula_cli.show.tables import describe_measured_trainings, describe_prediction_row, make_table, make_table_of_lines
from tula_cli.words import (
    choose_size_unit,
    choose_time_unit,
    format_count,
    format_duration,
    format_interval_of_hours,
    format_local_time,
    format_number,
    format_percent,
    format_size,
    is_interval_too_wide,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tula_cli.models.summaries import RegressionSummary
    from tula_cli.run.records.recommendations import Prediction, Recommendation


MAX_TABLE_ROWS = 1000
"""Maximum number of predictions shown in one table, because laying out very many takes minutes."""

TEXT_COLUMNS = ("", "type", "accuracy\nrisk", "source")
"""Headings of the columns of text in tables of configurations."""

ALL_ROWS_HINT = "--all shows the others and writes them to results.csv"


def render_recommendation(
    recommendation: "Recommendation",
    *,
    every: bool = False,
    more: str = ALL_ROWS_HINT,
) -> Iterator["RenderableType"]:
    """Yield the choice compared with today's configuration, and the table of configurations.

    Args:
        every: show all feasible configurations.
        more: note on where the configurations left out can be found.
    """
    yield from _render_headline(recommendation)
    yield from _describe_expected_start(recommendation)
    yield from _describe_other_market(recommendation)
    if recommendation.objective == "accuracy-time":
        yield from _describe_same_progress(recommendation)
    yield ""
    if recommendation.objective == "accuracy-time":
        yield from _render_table_with_legend(render_same_progress(recommendation))
        yield ""
        yield "With the job's number of epochs at every batch:"
    yield from _render_table_with_legend(make_predictions_table(recommendation, every=every))
    if not every:
        shown, total = len(_select_rows(recommendation)), _count_configurations(recommendation)
        yield from [f"{shown} of {total} configurations; {more}"] if shown < total else ()
    yield ""
    marks = ["* chosen", *(["2, 3 ... runners-up"] if recommendation.runners_up else [])]
    yield "; ".join([*marks, f"P: nothing is {_describe_pareto_dominance(recommendation.rows)}"])
    yield from (f"price: {line}" for line in recommendation.price.splitlines())


DEMO_CITATION = (
    "ResNet-18 on CIFAR-10, with one T4 GPU of each node (AWS g4dn.12xlarge). Step times and gradient noise were measured by"
    " the authors of Pollux (OSDI 2021); memory is estimated by tula. Times for starting a job and for evaluation were not"
    " published and are not included."
)
"""The source of the numbers of `--demo`; benchmarks/replay/demo_run.py makes its run."""


def render_demo_lines() -> tuple[list[str], list[str]]:
    """Return the lines before and after the answer of `--demo`: the source of its numbers, and how to get one's own."""
    advice = "For your own job: tula init writes job.yaml; then tula profile job.yaml and tula recommend."
    return [f"Demo: {DEMO_CITATION}", ""], ["", advice]


def _render_headline(recommendation: "Recommendation") -> Iterator["RenderableType"]:
    """Yield the choice compared with today's configuration; without a comparison, its time and cost."""
    from rich.text import Text

    headline, choice = recommendation.headline, recommendation.choice
    if headline is None:
        energy = "" if choice.kwh is None else f", {format_number(choice.kwh)} kWh"
        costs = f"{format_duration(3600 * choice.hours)}, {format_number(choice.cost)} {recommendation.currency}"
        yield Text.assemble((f"{describe_prediction_row(choice)}: {costs}{energy}", "bold green"))
        return
    yield Text.assemble((headline.text, "bold green"))
    yield f"{headline.comparison} {headline.interval}".rstrip()
    yield from [headline.preference] if headline.preference else ()
    yield from [f"accuracy: {recommendation.accuracy.words}"] if recommendation.accuracy is not None else ()


EXPLAIN_HINT = "--explain shows why, intervals, memory and the fit"


def render_explanation(
    recommendation: "Recommendation", regressions: Mapping[str, Sequence["RegressionSummary"]]
) -> Iterator["RenderableType"]:
    """Yield the reason of the choice, intervals and memory, the fit, and its regressions by node type."""
    yield ""
    yield f"choice: {recommendation.reason}"
    yield from () if recommendation.objective == "accuracy-time" else _describe_same_progress(recommendation)
    yield from _describe_refreshes(recommendation)
    yield from _explain_progress_stages_and_checkpoints(recommendation)
    yield ""
    yield from _render_table_with_legend(make_details_table(recommendation))
    yield ""
    yield from (f"fit: {line}" for line in recommendation.fit.splitlines())
    yield from describe_measured_trainings(recommendation)
    yield from (f"energy: {line}" for line in recommendation.power.splitlines())
    for kind, summaries in regressions.items():
        for each in summaries:
            yield ""
            yield f"{f'{kind}: ' * bool(kind)}{each.name}: {each.about}"
            yield from [_make_coefficients_table(each)] if each.coefficients else []


_COEFFICIENT_NAMES = {
    "slope": "compute per sample",
    "floor": "minimum compute per step",
    "level": "sync time",
    "growth": "sync time: growth with nodes",
    "log_sync_within_node": "sync time within a node",
    "forward": "forward pass: share of compute",
    "exposed": "sync never overlapped: share",
    "shared": "sync time: growth with GPUs per node",
    "inner": "sync time within a node: growth with GPUs",
    "floor_growth_with_gpus": "minimum compute: growth with GPUs per node",
}
"""Names of the parameters of the step-time model (`Priors`) on the screen."""


def _make_coefficients_table(regression: "RegressionSummary") -> "Table":
    table = make_table(["coefficient", "value", "90 % interval"])
    for parameter, row in regression.coefficients.items():
        name = _COEFFICIENT_NAMES.get(parameter, parameter)
        # Coordinates that the probes do not determine are at the mean of their prior, 0, up to rounding.
        value, low, high = (format_number(round(number, 9) + 0.0) for number in (row.value, row.low, row.high))
        table.add_row(name, value, f"{low} to {high}")
    return table


def _explain_progress_stages_and_checkpoints(recommendation: "Recommendation") -> Iterator[str]:
    explanations = {
        "same progress": recommendation.efficiency,
        "stages": recommendation.ramp,
        "checkpoints": recommendation.interruption,
    }
    yield from (f"{name}: {words}" for name, words in explanations.items() if words)


def _describe_expected_start(recommendation: "Recommendation") -> Iterator[str]:
    """Yield the scheduler's estimate of when a training of the choice would start."""
    estimate = recommendation.start_estimate
    if estimate is None:
        return
    job = f"sbatch --test-only, {format_count(estimate.nodes)}, {estimate.minutes} min"
    if estimate.wait is None:
        yield f"start: the scheduler gives no estimate ({job}: {estimate.reason})"
        return
    yield (
        f"start: in {format_duration(estimate.wait)} by the scheduler's estimate at {format_local_time(estimate.asked_at)} ({job}); jobs of"
        " higher priority may come first"
    )


def _describe_pareto_dominance(rows: Iterable["Prediction"]) -> str:
    """Describe the condition under which one configuration beats another on the Pareto front of these rows."""
    if all(row.kwh is not None for row in rows):
        return "at least equal in time, cost and energy, and better in one of them"
    return "both faster and cheaper"


def describe_unsaved_answer(known: "Recommendation | None") -> str:
    """Explain that an answer is not saved, and what `tula train` uses instead: the saved answer `known`, if any."""
    if known is None:
        return "not stored, because of --set; add --save to store it for tula train"
    kept = f"{describe_prediction_row(known.choice)} ({known.criteria}; {format_local_time(known.created_at)})"
    return (
        "not stored, because it answers another question than the stored recommendation: tula train still uses"
        f" {kept}. To store the new one, add --save"
    )


def _describe_same_progress(recommendation: "Recommendation") -> Iterator[str]:
    """Describe epochs, time and cost of the choice to the same progress, in addition to those for the spec's epochs."""
    row = recommendation.choice.same_progress
    if row is not None:
        yield (
            f"to the same progress: {format_number(row.epochs)} epochs, {format_duration(3600 * row.hours)}"
            f"{format_interval_of_hours(row.hours_low, row.hours_high)}, {format_number(row.cost)} {recommendation.currency}"
        )


def _describe_refreshes(recommendation: "Recommendation") -> Iterator[str]:
    """Report the share of the choice's time spent on refreshing scaling factors, if it exceeds 1 %."""
    share = recommendation.choice.refresh_share
    if share is not None and share > 0.01:
        yield f"includes {100 * share:.2g} % for updating the scaling factors of AGS (see ags.refresh)"


def render_same_progress(recommendation: "Recommendation") -> "Table":
    """Build a table of the best configuration per batch to the same progress, the fastest first."""
    from tula_cli.models.choice.objective import find_envelope
    from tula_cli.query import QUANTITIES

    envelope = find_envelope(recommendation.rows, QUANTITIES["accuracy-time"])
    rows = [(row, row.same_progress) for row in envelope if row.same_progress is not None]
    rows.sort(key=lambda pair: pair[1].hours)
    divisor, unit = choose_time_unit(3600 * recommendation.choice.hours)
    lines = [
        {
            "": "*" if row == recommendation.choice else "",
            "batch": str(row.batch),
            "nodes": str(row.nodes),
            "epochs": format_number(progress.epochs),
            "range": _format_interval(progress.epochs_low, progress.epochs_high),
            f"time to\nsame\nprogress\n({unit})": _format_caveat_signs(recommendation, row, "progress_within_noise")
            + format_number(3600 * progress.hours / divisor),
            f"range\n({unit})": _format_interval(
                3600 * progress.hours_low / divisor, 3600 * progress.hours_high / divisor
            ),
            f"cost\n({recommendation.currency})": format_number(progress.cost),
        }
        for row, progress in rows
    ]
    return make_table_of_lines(lines, left=TEXT_COLUMNS, chosen="*")


CAVEAT_SIGNS = {"wide_interval": "?", "within_noise": "~", "efficiency_above_110": "!"}
"""Sign before a figure with a caveat, by the keys of `CAVEATS`."""


def _format_caveat_signs(recommendation: "Recommendation", row: "Prediction | None", *names: str) -> str:
    """Return the signs of the named caveats that a row has."""
    from tula_cli.run.records.recommendations import get_caveat_kind, list_caveats

    caveats = () if row is None else list_caveats(row, recommendation.choice)
    return "".join(CAVEAT_SIGNS[get_caveat_kind(name)] for name in names if name in caveats)


def _render_table_with_legend(table: "Table") -> "Iterator[RenderableType]":
    """Yield a table, and the legend of its caveat signs if it has any."""
    from tula_cli.run.records.recommendations import CAVEATS

    yield table
    cells = [str(cell) for column in table.columns for cell in column.cells]
    all_signs = "".join(CAVEAT_SIGNS.values())
    signs = {character for cell in cells for character in cell[: len(cell) - len(cell.lstrip(all_signs))]}
    if signs:
        yield "; ".join(f"{sign} {CAVEATS[name]}" for name, sign in CAVEAT_SIGNS.items() if sign in signs)


MARKET_NAMES = {"on_demand": "on demand", "spot": "on spot"}


def _describe_other_market(recommendation: "Recommendation") -> Iterator[str]:
    """Describe the time and cost of the choice on the other market, relative to its own market."""
    choice, other = recommendation.choice, recommendation.other_market
    if other is None:
        return
    cost, hours = other.cost / choice.cost - 1 if choice.cost else 0.0, other.hours / choice.hours - 1
    compared = ", ".join(
        [
            _describe_change(cost, "more expensive", "cheaper", equal="at the same cost"),
            _describe_change(hours, "longer", "shorter", equal="in the same time"),
        ]
    )
    expected = " expected" * (other.market == "spot")
    yield (
        f"the same {MARKET_NAMES[other.market]}: {format_duration(3600 * other.hours)}{expected}, {format_number(other.cost)}"
        f" {recommendation.currency} ({compared})"
    )


def _describe_change(change: float, more: str, less: str, *, equal: str) -> str:
    if abs(change) < 0.0005:
        return equal
    return f"{format_number(100 * abs(change), 2)} % {more if change > 0 else less}"


def _select_rows(recommendation: "Recommendation") -> list[dict[str, "Prediction"]]:
    """Select the configurations to list: all of them if they are few.

    Otherwise the choice and runners-up come first, then the Pareto front, then measured configurations.
    """
    from tula_cli.services.recommend import MAX_ROWS_LISTED  # imports numpy, which most commands do not need

    configs = _group_by_config(recommendation.rows)
    if len(configs) <= MAX_ROWS_LISTED and _count_configurations(recommendation) <= MAX_ROWS_LISTED:
        return configs
    marks = _list_row_marks(recommendation)

    def compute_rank(offers: Mapping[str, "Prediction"]) -> int:
        row = next(iter(offers.values()))
        conditions = [
            _get_configuration_key(row) in marks,
            any(offer.pareto for offer in offers.values()),
            row.measured,
        ]
        return conditions.index(True) if any(conditions) else len(conditions)

    ranks = [compute_rank(offers) for offers in configs]
    best = sorted((rank, index) for index, rank in enumerate(ranks) if rank < 3)[:MAX_ROWS_LISTED]
    return [configs[index] for index in sorted(index for _, index in best)]


def describe_saved_table(*, kept: bool) -> str:
    """Describe where to find configurations that no table shows; `kept` states whether results.csv was written."""
    return f"results.csv{'' if kept else ' (with --save)'} and --json contain all of them"


def _count_configurations(recommendation: "Recommendation") -> int:
    if recommendation.candidates is not None:
        return recommendation.candidates
    return len(_group_by_config(recommendation.rows))


def make_predictions_table(recommendation: "Recommendation", *, every: bool = False) -> "Table":
    """Build the table of feasible configurations in the recommendation's order, with time and cost on spot nodes."""
    rows, currency, headline = recommendation.rows, recommendation.currency, recommendation.headline
    divisor, unit = choose_time_unit(3600 * recommendation.choice.hours)  # the unit of the headline
    has_types, has_spot = any(row.type for row in rows), any(row.market == "spot" for row in rows)
    has_energy = any(row.kwh is not None for row in rows)
    has_efficiency = any(row.scaling_efficiency is not None for row in rows)
    baseline = headline if headline is not None and headline.baseline is not None else None
    risk_basis = headline.risk_basis if headline is not None else None
    marks = _list_row_marks(recommendation)

    def format_value(row: "Prediction | None", value: float | None, *caveats: str) -> str:
        return _format_caveat_signs(recommendation, row, *caveats) + format_number(value)

    def format_hours(row: "Prediction | None") -> str:
        hours = None if row is None else 3600 * row.hours / divisor
        return format_value(row, hours, "wide_interval", "time_within_noise")

    def format_cost(row: "Prediction | None") -> str:
        return format_value(row, None if row is None else row.cost, "cost_within_noise")

    lines: list[dict[str, str | None]] = []
    for offers in _group_by_config(rows) if every else _select_rows(recommendation):
        row, on_demand, spot = next(iter(offers.values())), offers.get("on_demand"), offers.get("spot")
        mark = marks.get(_get_configuration_key(row), "")
        speed_up = baseline.compute_speed_up(on_demand) if baseline and on_demand is not None else None
        efficiency = _format_ratio(None if on_demand is None else on_demand.scaling_efficiency)
        efficiency_sign = _format_caveat_signs(recommendation, on_demand, "efficiency_above_110")
        kwh = None if on_demand is None else on_demand.kwh
        lines.append(
            {
                "": f"{mark} P" if any(offer.pareto for offer in offers.values()) else mark,
                "type": row.type if has_types else None,
                "nodes": str(row.nodes),
                "batch": str(row.batch),
                # with the columns of spot prices, the table would exceed 80 characters
                "batch/\nGPU": None if has_spot else str(row.local_batch),
                f"time\n({unit})": format_hours(on_demand),
                "speed-\nup": _format_ratio(speed_up) if baseline else None,
                "scaling\neffi-\nciency": efficiency_sign + efficiency if has_efficiency else None,
                "node-\nhours" if currency == "node-h" else f"cost\n({currency})": format_cost(on_demand),
                "energy\n(kWh)": format_value(on_demand, kwh, "energy_within_noise") if has_energy else None,
                f"spot\ntime\n({unit})": format_hours(spot) if has_spot else None,
                f"spot\ncost\n({currency})": format_cost(spot) if has_spot else None,
                "accuracy\nrisk": risk_basis.assess_batch(row.batch, recommendation.accuracy).level
                if risk_basis
                else None,
                "source": row.source,
            }
        )
    return make_table_of_lines(lines, left=TEXT_COLUMNS, chosen="*")


def make_details_table(recommendation: "Recommendation") -> "Table":
    """Build the table of intervals, step times and memory of the configurations listed."""
    divisor, unit = choose_time_unit(3600 * recommendation.choice.hours)
    byte, memory = choose_size_unit(max((row.peak_memory or 0 for row in recommendation.rows), default=None))
    has_types = any(row.type for row in recommendation.rows)
    marks = _list_row_marks(recommendation)
    lines = []
    for offers in _select_rows(recommendation):
        row = next(iter(offers.values()))
        ends = (None if end is None else 3600 * end / divisor for end in (row.hours_low, row.hours_high))
        lines.append(
            {
                "": marks.get(_get_configuration_key(row), ""),
                "type": row.type if has_types else None,
                "nodes": str(row.nodes),
                "batch": str(row.batch),
                f"time\n({unit})": format_number(3600 * row.hours / divisor),
                f"90 % interval\n({unit})": _format_interval(*ends),
                "step\n(ms)": format_number(1000 * row.step_time),
                f"memory\n({memory}/GPU)": format_size(row.peak_memory, byte),
                "free\n(%)": format_percent(row.headroom),
            }
        )
    return make_table_of_lines(lines, left=TEXT_COLUMNS, chosen="*")


def _get_configuration_key(row: "Prediction") -> tuple[str, int, int]:
    return row.type, row.nodes, row.batch


def _list_row_marks(recommendation: "Recommendation") -> dict[tuple[str, int, int], str]:
    runners_up = {
        _get_configuration_key(row): str(rank) for rank, row in reversed([*enumerate(recommendation.runners_up, 2)])
    }
    return {**runners_up, _get_configuration_key(recommendation.choice): "*"}


def _group_by_config(rows: Iterable["Prediction"]) -> list[dict[str, "Prediction"]]:
    """Group predictions by configuration and market, in the order of the rows."""
    offers_by_configuration: dict[tuple[str, int, int], dict[str, Prediction]] = {}
    for row in rows:
        offers_by_configuration.setdefault(_get_configuration_key(row), {})[row.market] = row
    return list(offers_by_configuration.values())


def _format_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _format_interval(low: float | None, high: float | None) -> str:
    """Format an interval, with a sign if it is too wide for a decision."""
    if low is None or high is None:
        return "-"
    return f"{CAVEAT_SIGNS['wide_interval'] * is_interval_too_wide(low, high)}{format_number(low)} .. {format_number(high)}"
