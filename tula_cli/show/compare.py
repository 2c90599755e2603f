"""Output of `tula compare`: plan and result, of a comparison of methods or of a search for the learning rate."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tula_cli.show.tables import make_table, make_table_of_lines, render_scripts
from tula_cli.words import (
    choose_time_unit,
    describe_sample_share,
    format_count,
    format_duration,
    format_method_label,
    format_number,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tula_cli.services.comparison.accuracy import CompareReport, ComparisonRow, SeedStatistics
    from tula_cli.services.comparison.learning_rates import LearningRateReport
    from tula_cli.services.plans import ComparePlan, LearningRateSearchPlan


def render_compare_plan(plan: "ComparePlan", *, scripts: Sequence[str] = ()) -> Iterator["RenderableType"]:
    """Yield the grid in training order, with the expected time and cost."""
    divisor, unit = choose_time_unit(
        max((3600 * hours for hours in plan.hours.values() if hours is not None), default=0.0)
    )
    todo = {cell.signature for cell in plan.missing}
    lines = []
    for index, cell in enumerate(plan.state.wanted, 1):
        hours = plan.hours.get((cell.method, cell.batch))
        expected = format_number(hours and 3600 * cell.epoch_share * hours / divisor)
        lines.append(
            {
                "": str(index),
                "method": format_method_label(cell.method, reference=cell.reference),
                "batch": str(cell.batch),
                "local\nbatch": str(cell.batch // (cell.nodes * plan.spec.cluster.gpus_per_node)),
                "nodes": str(cell.nodes),
                "seed": str(cell.seed),
                "epochs": str(cell.short[0] if cell.short else plan.spec.train.epochs),
                "run": f"train-{cell.signature}",
                f"expected\n({unit})": expected if cell.signature in todo else "done",
            }
        )
    yield make_table_of_lines(lines, left=("method", "run"))
    yield ""
    done, total = len(plan.state.wanted) - len(todo), plan.state.max_trainings
    bound_text = "at most " if plan.state.undecided else ""
    yield f"{bound_text}{format_count(total - done, 'training')} to do, {done} of {total} done"
    short = next((cell.short for cell in plan.comparison.cells if cell.short), None)
    if short is not None:
        epochs = sum(cell.epoch_share for cell in (*plan.state.wanted, *plan.state.undecided))
        yield (
            f"Round 1 trains all rows except lbt for {short[0]} of {short[1]} epochs. Round 2 trains the best two rows of each"
            " batch, lbt and the job's own method for all epochs. Together they cost at most as much as"
            f" {format_number(epochs)} full trainings, instead of {sum(not cell.short for cell in plan.comparison.cells)} without rounds."
        )
    yield from _describe_costs(plan)
    yield from render_scripts(scripts)


def _describe_costs(plan: "ComparePlan") -> Iterator[str]:
    hours = plan.hours_left
    if not plan.missing:
        return
    if hours is None:
        yield "no estimate of time and cost: nothing has been measured or trained yet"
        return
    node_hours = hours * plan.comparison.nodes
    # With pricing.kind gb_hour, the cost depends on measured memory and is predicted for each training only.
    yield f"{'at most' if plan.state.undecided else 'about'} {format_duration(3600 * hours)} with one training at a time, {format_number(node_hours)} node-h"
    yield f"price: {plan.price}"


def render_comparison(compare_report: "CompareReport") -> Iterator["RenderableType"]:
    """Yield Table I of the paper for the user's job."""
    if compare_report.first_round and compare_report.epochs is not None:
        yield f"round 1: {compare_report.epochs[0]} of {compare_report.epochs[1]} epochs, one seed; do not compare these values with full trainings"
        yield make_comparison_table(compare_report, compare_report.first_round)
        yield ""
        yield f"round 2: all {compare_report.epochs[1]} epochs"
    yield make_comparison_table(compare_report, compare_report.rows)
    yield ""
    if any(row.seeds for row in compare_report.rows):
        yield compare_report.answer
    bound_text = "at most " if compare_report.undecided else ""
    yield f"{compare_report.finished} of {bound_text}{format_count(compare_report.total, 'training')} done" + (
        ""
        if compare_report.complete or compare_report.hours_left is None
        else f", about {format_duration(3600 * compare_report.hours_left)} left with one training at a time"
    )
    moment_words = "last and best reported value" if compare_report.has_script_metrics else "after the last epoch"
    yield (
        f"mean ± standard deviation over n seeds, {moment_words}; gap: {describe_gap_meaning(compare_report)} relative to lbt at batch"
        f" {compare_report.reference_batch}; recovered: share of lbt's gap at the same batch that the method recovers (-: this gap is"
        " within noise, or unknown because there is one seed or no lbt)"
    )


def list_column_headings(compare_report: "CompareReport") -> tuple[str, ...]:
    """Return the headings of the metric columns; a script's metrics have their own names and no unit."""
    if compare_report.has_script_metrics:
        return tuple(metric.replace("best_", "best ", 1) for metric in compare_report.columns)
    return tuple({"top1": "top-1 (%)", "top5": "top-5 (%)"}.get(metric, metric) for metric in compare_report.columns)


def describe_gap_meaning(compare_report: "CompareReport") -> str:
    """Describe the meaning of a positive gap."""
    if not compare_report.has_script_metrics:
        return "top-1 lost" if compare_report.metric == "top1" else "loss added"
    return f"{compare_report.metric} added" if compare_report.less_is_better else f"{compare_report.metric} lost"


def choose_metric_digits(compare_report: "CompareReport", metric: str) -> int:
    """Return the decimals with which a metric is shown.

    The unit of a script's metric is unknown: its largest value is shown with four significant digits.
    """
    if not compare_report.has_script_metrics:
        return 4 if metric == "loss" else 2
    largest = max((abs(stat.mean) for row in compare_report.rows if (stat := row.get_statistics(metric))), default=0.0)
    return max(0, 3 - math.floor(math.log10(largest))) if largest else 2


def make_comparison_table(compare_report: "CompareReport", rows: "Sequence[ComparisonRow]") -> "Table":
    """Build the table of a comparison, with one row per method and batch."""
    divisor, unit = choose_time_unit(3600 * max((row.hours or 0.0 for row in compare_report.rows), default=0.0))
    shown = [row for row in rows if row.cells]
    table = make_table(
        (
            "batch",
            "method",
            "n",
            *list_column_headings(compare_report),
            "gap",
            "recovered\n(%)",
            "samples",
            f"time\n({unit})",
            "note",
        ),
        left=(1, 6 + len(compare_report.columns) + 1),
    )
    batch = None
    for row in shown:
        table.add_row(
            str(row.batch) if row.batch != batch else "",
            format_method_label(row.method, reference=row.reference),
            str(row.seeds),
            *(
                format_spread(row.get_statistics(metric), choose_metric_digits(compare_report, metric))
                for metric in compare_report.columns
            ),
            "-" if row.gap is None else f"{row.gap:.{choose_metric_digits(compare_report, compare_report.metric)}f}",
            "-" if row.recovered is None else f"{100 * row.recovered:.0f}",
            "-" if row.samples is None else f"{row.samples:.0f}",
            "-" if row.hours is None else format_number(3600 * row.hours / divisor),
            row.note,
        )
        batch = row.batch
    return table


def format_spread(value: "SeedStatistics | None", digits: int) -> str:
    """Format a mean with its spread, such as "62.43 ± 0.86"; the spread is omitted for a single seed."""
    if value is None:
        return "-"
    return f"{value.mean:.{digits}f}" + ("" if value.sd is None else f" ± {value.sd:.{digits}f}")


# --- The learning rate of a batch


def render_search_plan(search: "LearningRateSearchPlan", *, scripts: Sequence[str] = ()) -> Iterator[str]:
    """Describe the branches of a search for a learning rate, and their cost."""
    spec, plan = search.task.spec, search.plan
    batch, *others = search.task.batches
    base = spec.workload.reference_lr
    rates = ", ".join(format_number(arm.factor * (base or 1.0)) for arm in search.arms)
    described = f"learning rates {rates}" if base else f"{rates} times the learning rate"
    yield f"batch {batch} on {format_count(search.task.nodes)}: branches with {described}"
    if others:
        yield f"then with the chosen rule at batch {' and '.join(map(str, others))}"
    yield (
        f"each branch trains on {plan.length} samples, starting from a checkpoint taken after {plan.start} samples at batch"
        f" {spec.train.reference_batch}"
    )
    share = f"{plan.samples} samples in total: {describe_sample_share(plan.training_share)}"
    if search.hours is None or search.training_hours is None or search.node_hours is None:
        yield f"{share}; no estimate of time and cost: nothing has been measured yet"
    else:
        whole = format_duration(3600 * search.training_hours)
        yield f"{share}, about {format_duration(3600 * search.hours)} (training: {whole}), {format_number(search.node_hours)} node-h"
        yield f"price: {search.price}"
    yield from render_scripts(scripts)


def render_learning_rates(report: "LearningRateReport") -> Iterator["RenderableType"]:
    """Yield the branches of a search, the learning rate to use, and how to train with it."""
    from tula_cli.services.comparison.learning_rates import describe_critical_batch

    has_classes = any(branch.top1 is not None for branch in report.branches)
    lines = [
        {
            "batch": str(branch.batch),
            "rule": branch.rule,
            "factor": f"{branch.factor:.3g}",
            "learning\nrate": format_number(branch.lr),
            "loss": format_number(branch.loss, 4),
            "top-1 (%)": format_number(branch.top1, 4) if has_classes else None,
            "note": "diverged" if branch.diverged else "chosen" if branch == report.chosen else "",
        }
        for branch in report.branches
    ]
    yield make_table_of_lines(lines, left=("rule", "note"))
    if report.too_large is not None:
        yield f"batch {report.too_large} does not fit into GPU memory"
    yield ""
    yield f"{report.answer} This is the highest learning rate whose loss exceeds the lowest loss by at most {format_number(report.loss_margin, 2)}."
    if report.best_batch is not None:
        yield f"largest batch whose loss is within this margin after the same number of samples: {report.best_batch}"
    yield describe_critical_batch(report)
    losses = (
        "loss and top-1 are on held-out training samples"
        if report.held_out
        else "each loss is the mean over the last quarter of the branch"
    )
    yield f"cost: {describe_sample_share(report.share)}; {losses}"
    yield ""
    yield f"next: {report.command}"
