"""What `tula compare` shows before it starts, and the table of its answer."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tula_cli.show.plots import comparison_plot
from tula_cli.show.tables import table
from tula_cli.words import duration, method_label, number, plural, time_unit

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tula_cli.services.compare import ComparePlan
    from tula_cli.services.comparison.accuracy import CompareReport, Row, Stat


def compare_plan(plan: "ComparePlan", *, scripts: Sequence[str] = ()) -> Iterator["RenderableType"]:
    """The grid in the order it is trained, and what it may take."""
    todo = {cell.signature for cell in plan.missing}
    made = table(
        ("", "method", "batch", "local\nbatch", "nodes", "seed", "run", f"expected\n({_plan_unit(plan)[1]})"),
        left=(1, 6),
    )
    divisor = _plan_unit(plan)[0]
    for place_, cell in enumerate(plan.comparison.cells, 1):
        hours = plan.hours.get((cell.method, cell.batch))
        local = cell.batch // (cell.nodes * plan.spec.cluster.gpus_per_node)
        made.add_row(
            str(place_),
            method_label(cell.method, reference=cell.reference),
            str(cell.batch),
            str(local),
            str(cell.nodes),
            str(cell.seed),
            f"train-{cell.signature}",
            "done" if cell.signature not in todo else "-" if hours is None else number(3600 * hours / divisor),
        )
    yield made
    yield ""
    done = len(plan.comparison.cells) - len(todo)
    yield f"{plural(len(todo), 'training')} to do, {done} of {len(plan.comparison.cells)} done"
    yield from _compare_costs(plan)
    for script in scripts:
        yield ""
        yield script


def _plan_unit(plan: "ComparePlan") -> tuple[float, str]:
    return time_unit(max((3600 * hours for hours in plan.hours.values() if hours is not None), default=0.0))


def _compare_costs(plan: "ComparePlan") -> Iterator[str]:
    hours = plan.hours_left
    if not plan.missing:
        return
    if hours is None:
        yield "no estimate of time and cost: nothing was measured or trained yet"
        return
    node_hours = hours * plan.comparison.nodes
    # Memory has a price only where it was measured, so gb_hour is left to each training's own prediction.
    yield f"about {duration(3600 * hours)} one after the other, {number(node_hours)} node-h"
    yield f"price: {plan.price}"


def compared(found: "CompareReport", *, width: int, color: bool) -> Iterator["RenderableType"]:
    """Table I for the user's own job, and accuracy (or loss) against the batch."""
    yield comparison_table(found)
    yield ""
    yield f"{found.finished} of {plural(found.total, 'training')} done" + (
        ""
        if found.complete or found.hours_left is None
        else f", about {duration(3600 * found.hours_left)} one after the other left"
    )
    what = "top-1" if found.metric == "top1" else "loss"
    yield (
        f"mean ± standard deviation over n seeds, after the last epoch; gap: {what} lost against lbt at batch"
        f" {found.reference_batch}, over the seeds of both; recovered: share of lbt's gap at the same batch, - where that"
        " is within the noise or not known (one seed, no lbt)"
    )
    drawn = comparison_plot(found, width=width, color=color)
    if drawn:
        from rich.text import Text

        yield ""
        yield Text.from_ansi(drawn)


def comparison_table(found: "CompareReport") -> "Table":
    """One row a method at a batch."""
    divisor, unit = time_unit(3600 * max((row.hours or 0.0 for row in found.rows), default=0.0))
    accuracy = found.metric == "top1"
    metrics = ("top-1 (%)", "top-5 (%)") if accuracy else ("loss",)
    shown = [row for row in found.rows if row.cells]
    made = table(
        ("batch", "method", "n", *metrics, "gap", "recovered\n(%)", "samples", f"time\n({unit})", "note"),
        left=(1, 6 + len(metrics) + 1),
    )
    batch = None
    for row in shown:
        stats = (row.top1, row.top5) if accuracy else (row.loss,)
        made.add_row(
            str(row.batch) if row.batch != batch else "",
            method_label(row.method, reference=row.reference),
            str(row.seeds),
            *(spread(value, 2 if accuracy else 4) for value in stats),
            "-" if row.gap is None else f"{row.gap:.{2 if accuracy else 4}f}",
            "-" if row.recovered is None else f"{100 * row.recovered:.0f}",
            "-" if row.samples is None else f"{row.samples:.0f}",
            "-" if row.hours is None else number(3600 * row.hours / divisor),
            comparison_note(row),
        )
        batch = row.batch
    return made


def spread(value: "Stat | None", digits: int) -> str:
    """Return "62.43 ± 0.86"; one seed has no spread."""
    if value is None:
        return "-"
    return f"{value.mean:.{digits}f}" + ("" if value.sd is None else f" ± {value.sd:.{digits}f}")


def comparison_note(row: "Row") -> str:
    """Return what of a row has not ended well, or not at all."""
    words = ("diverged", "failed", "cancelled", "lost", "running", "queued", "missing")
    return ", ".join(f"{count} {word}" for word in words if (count := row.count(word)))  # type: ignore[arg-type]
