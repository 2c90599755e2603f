"""Whether a large batch keeps the accuracy of the small one, by what `tula compare` has trained of the same job."""

from typing import TYPE_CHECKING, Literal

from tula_cli.models.time.noise import Z90
from tula_cli.run.directory import RunDir
from tula_cli.run.records.recommendations import Accuracy
from tula_cli.spec.job import JobSpec
from tula_cli.words import number, plural

if TYPE_CHECKING:
    from tula_cli.services.comparison.accuracy import ComparisonRow

MAX_POINTS_LOST = 1.0
"""Percentage points of accuracy within which a large batch keeps it: what seeds differ by in short trainings."""
MAX_SHARE_LOST = 0.02
"""The same of any other metric, as a share of the small batch's value."""


def accuracy_evidence(run: RunDir, spec: JobSpec, *, batch: int) -> Accuracy | None:
    """Return what a run's comparison tells of the job's method at a batch; None where it has trained nothing like it.

    A batch that was not trained is judged by the next larger one that was. It keeps the accuracy where even the upper end of
    the 90 % interval of the gap is within a point (of other metrics 2 %); one seed has no interval, and its gap counts as it is.

    Args:
        run: the run, of the choice's type of node.
        spec: the job.
        batch: global.
    """
    comparison = run.comparison()
    if comparison is None:
        return None
    from tula_cli.services.comparison import accuracy  # half of what tula compare and tula train consist of
    from tula_cli.services.comparison.rows import row_of_job

    table = accuracy.build_compare_report(run, comparison, spec)
    reference = next((row for row in table.rows if row.reference), None)
    rows = [row for row in table.rows if row.method == row_of_job(spec) and row.batch >= batch and row.gap is not None]
    if reference is None or not rows:
        return None
    return _judge_accuracy(reference, min(rows, key=lambda row: row.batch), table.metric)


def _judge_accuracy(reference: "ComparisonRow", row: "ComparisonRow", metric: str) -> Accuracy:
    from tula_cli.services.comparison.accuracy import standard_error

    small, large = reference.stat(metric), row.stat(metric)
    assert small is not None and large is not None and row.gap is not None  # of which the gap is
    error, percent = standard_error(small, large), metric in ("top1", "top5")
    within = MAX_POINTS_LOST if percent else MAX_SHARE_LOST * abs(small.mean)
    keeps = row.gap + (Z90 * error if error is not None else 0.0) <= within
    unit = " points of" if percent else " of"
    spread = f" +- {number(error)}" if error is not None else ""
    description = f"{number(abs(row.gap))}{spread}{unit} {metric} {'worse' if row.gap > 0 else 'better'} than batch {reference.batch}"
    seeds = min(small.n, large.n)
    outcome: Literal["keeps", "may lose"] = "keeps" if keeps else "may lose"
    return Accuracy(
        outcome=outcome,
        batch=row.batch,
        reference_batch=reference.batch,
        metric=metric,
        gap=row.gap,
        error=error,
        seeds=seeds,
        words=f"{outcome} it: {row.method} at batch {row.batch} came out {description} (tula compare, {plural(seeds, 'seed')})",
    )
