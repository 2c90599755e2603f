"""The accuracy of the rows of a comparison: the table of their metrics and gaps to the small batch, the best row, and the
evidence that the method of the job keeps the accuracy at a batch.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from tula_cli.cluster.scripts.metrics import is_lower_better
from tula_cli.diagnostics import Diagnostic
from tula_cli.models.time.noise import Z90
from tula_cli.run.directory import Run
from tula_cli.run.frames import make_frame, render_html
from tula_cli.run.records.recommendations import Accuracy
from tula_cli.run.records.results import Cell, Comparison
from tula_cli.run.training_run import TrainingRun
from tula_cli.services import messages
from tula_cli.services.compare import (
    FINISHED_STATES,
    UNFINISHED_END_STATES,
    CellState,
    compute_mean_hours_by_row,
    estimate_hours,
)
from tula_cli.services.comparison import rounds
from tula_cli.services.comparison.rows import REFERENCE_METHOD, make_row_of_job
from tula_cli.services.plans import sum_hours
from tula_cli.services.status import JobStatus
from tula_cli.spec.job import JobSpec
from tula_cli.words import format_count, format_duration, format_method_label, format_number

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class CellReport:
    """The result of one training.

    Accuracies are percentages after the last epoch; `batch` is the one at the end of the training. `samples` counts all
    samples trained on, including the branches of a self-tuning training. `metrics` holds what a script has reported, in
    its units: the last value of each metric, and the best one under `best_`; for tula's training loop, the metrics of
    `train.metrics` and the perplexity of a language model. A script has no accuracies.
    """

    cell: Cell
    state: CellState
    reason: str = ""
    top1: float | None = None
    top5: float | None = None
    loss: float | None = None
    best_top1: float | None = None
    batch: int | None = None
    samples: int | None = None
    hours: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    normalised: str = ""  # number of samples of BatchNorm statistics after an out-of-memory, in words; else empty

    @property
    def finished(self) -> bool:
        return self.state in FINISHED_STATES

    def get_metric(self, metric: str) -> float | None:
        """Return top1, top5, loss or another metric; None if the training does not report it."""
        values = {"top1": self.top1, "top5": self.top5, "loss": self.loss}
        return {**values, **self.metrics}.get(metric)


@dataclass(frozen=True)
class SeedStatistics:
    """Statistics over seeds; `sd` is the sample standard deviation, None for one seed."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class ComparisonRow:
    """A method at a batch, over its seeds."""

    method: str
    batch: int
    reference: bool
    cells: tuple[CellReport, ...]
    top1: SeedStatistics | None
    top5: SeedStatistics | None
    loss: SeedStatistics | None
    gap: float | None = None  # how much worse than the reference (percentage points, or loss), over common seeds
    # share of lbt's gap at this batch that is recovered; None if that gap is noise or unknown
    recovered: float | None = None
    samples: float | None = None  # mean number of samples trained on
    hours: float | None = None  # mean wall-clock hours of all attempts
    # metrics of a script or train.metrics, by name
    metrics: Mapping[str, SeedStatistics] = dataclasses.field(default_factory=dict)
    dropped: str = ""  # why the row was dropped; empty if it was not

    def get_statistics(self, metric: str) -> SeedStatistics | None:
        """Return the statistics of top1, top5, loss or another metric; None if no training reports it."""
        stats = {"top1": self.top1, "top5": self.top5, "loss": self.loss}
        return {**stats, **self.metrics}.get(metric)

    @property
    def seeds(self) -> int:
        """Number of seeds that the means are over."""
        first_stat = self.top1 or self.loss or next(iter(self.metrics.values()), None)
        return 0 if first_stat is None else first_stat.n

    def count_trainings(self, *states: CellState) -> int:
        return sum(cell.state in states for cell in self.cells)

    @property
    def note(self) -> str:
        """The reason why the row was dropped, and the number of trainings in each state other than finished."""
        states: Iterable[CellState] = get_args(CellState)
        counts = [f"{count} {state}" for state in states if state != "done" and (count := self.count_trainings(state))]
        return ", ".join([*([self.dropped] if self.dropped else []), *counts])


@dataclass(frozen=True)
class CompareReport:
    """The table of a comparison, which may be incomplete."""

    rows: tuple[ComparisonRow, ...]
    metric: str  # metric of the gap: top1, loss without classes, or the first script.metric
    columns: tuple[str, ...]  # metrics in the table
    reference_batch: int
    nodes: int
    total: int
    finished: int
    hours_left: float | None  # expected hours of the missing trainings, one after the other; None if unknown
    warnings: tuple[Diagnostic, ...]
    undecided: int = 0  # trainings of the total that may not be needed
    first_round: tuple[ComparisonRow, ...] = ()  # rows after the short trainings; `rows` has those after all epochs
    epochs: tuple[int, int] | None = None  # epochs of the first round and of the job; None without rounds
    answer: str = ""  # the best row of the largest batch, and the rows that cannot be distinguished from it

    def __repr__(self) -> str:
        return f"<CompareReport: {self._describe_progress()}{f'; {self.answer}' * bool(self.answer)}>"

    def _repr_html_(self) -> str:
        """Return the answer and a row per method and batch, for a notebook."""
        rows = [
            (
                format_method_label(row.method, reference=row.reference),
                str(row.batch),
                str(row.seeds),
                *(format_mean_and_deviation(row.get_statistics(name)) for name in self.columns),
                format_number(row.gap),
                format_duration(None if row.hours is None else 3600 * row.hours),
            )
            for row in self.rows
        ]
        columns = ["method", "batch", "seeds", *self.columns, f"gap in {self.metric}", "time"]
        notes = [
            self._describe_progress(),
            f"mean ± standard deviation over seeds; gap: how much worse than lbt at batch {self.reference_batch}",
            *(warning.text for warning in self.warnings),
        ]
        return render_html(self.answer or "No training has finished", columns, rows, notes=notes)

    def _describe_progress(self) -> str:
        return f"{self.finished} of {format_count(self.total, 'training')} finished"

    def frame(self) -> "pd.DataFrame":
        """Return one row per method and batch: seeds, mean and standard deviation of each metric, gap, hours."""
        columns = ("method", "batch", "reference", "seeds", "gap", "recovered", "samples", "hours")
        metric_names = dict.fromkeys(("top1", "top5", "loss", *self.columns))
        return make_frame(
            [
                {**{name: getattr(row, name) for name in columns}, **_list_metric_columns(row, metric_names)}
                for row in self.rows
            ]
        )

    @property
    def has_script_metrics(self) -> bool:
        """Whether the metrics are those of a script, in its names and units; the table has last and best values."""
        return f"best_{self.metric}" in self.columns

    @property
    def less_is_better(self) -> bool:
        return is_lower_better(self.metric)

    @property
    def complete(self) -> bool:
        return self.finished == self.total


def _list_metric_columns(row: ComparisonRow, metrics: Iterable[str]) -> dict[str, float | None]:
    stats = {name: row.get_statistics(name) for name in metrics}
    return {
        f"{name}_{statistic_name}": None if stat is None else getattr(stat, statistic_name)
        for name, stat in stats.items()
        for statistic_name in ("mean", "sd")
    }


def build_compare_report(run: Run, comparison: Comparison, *, jobs: Iterable[JobStatus] = ()) -> CompareReport:
    """Return the table of the trainings so far.

    Args:
        jobs: status of the run's jobs, for cells that are not finished.
    """
    states, snapshot = {job.id: job for job in jobs}, run.read_snapshot()
    measured_hours = compute_mean_hours_by_row(snapshot, comparison)
    hours = {
        row: estimate_hours(row, measured_hours, {}) for row in {(cell.method, cell.batch) for cell in comparison.cells}
    }
    spec = run.spec
    comparison_state = rounds.compute_comparison_state(snapshot, comparison, spec, hours=hours)
    cells = [
        _make_cell_report(snapshot.get_training(cell.signature), cell, states.get(f"train-{cell.signature}"), spec)
        for cell in comparison_state.wanted
    ]
    columns = _list_metric_names(cells, spec)
    metric = columns[0]
    full = [report for report in cells if not report.cell.short]
    short = [report for report in cells if report.cell.short]
    rows = [
        _mark_dropped_row(row, comparison_state.reasons) for row in _compare_with_reference(_group_rows(full), metric)
    ]
    second = {(row.method, row.batch) for row in rows}
    first_round = [
        row if (row.method, row.batch) in second else _mark_dropped_row(row, comparison_state.reasons)
        for row in _group_rows(short)
    ]
    table = CompareReport(
        rows=tuple(rows),
        metric=metric,
        columns=columns,
        reference_batch=spec.train.reference_batch,
        nodes=comparison.nodes,
        total=comparison_state.max_trainings,
        finished=sum(cell.finished for cell in cells),
        hours_left=sum_hours([*(c.cell for c in cells if not c.finished), *comparison_state.undecided], hours),
        warnings=(*_list_comparison_warnings([*rows, *first_round], metric), *snapshot.training_warnings),
        undecided=len(comparison_state.undecided),
        first_round=tuple(first_round),
        epochs=next((report.cell.short for report in short), None),
    )
    return dataclasses.replace(table, answer=describe_best_row(table, takes_seed="seed" in spec.workload.settings))


def _mark_dropped_row(row: ComparisonRow, reasons: Mapping[tuple[str, int], str]) -> ComparisonRow:
    return dataclasses.replace(row, dropped=reasons.get((row.method, row.batch), ""))


def _list_metric_names(cells: Sequence[CellReport], spec: JobSpec) -> tuple[str, ...]:
    """Return the metrics in the table; the first one is the one that is compared."""
    if spec.workload.reported_metrics:
        return tuple(column for name in spec.workload.reported_metrics for column in (name, f"best_{name}"))
    finished = any(cell.finished for cell in cells)
    names: tuple[str, ...] = (
        ("loss", "perplexity") if any("perplexity" in cell.metrics for cell in cells) else ("loss",)
    )
    if not finished or any(cell.top1 is not None for cell in cells):
        # with up to five classes, top-5 is always 100 %
        few_classes = finished and all(cell.top5 in (None, 100.0) for cell in cells)
        names = ("top1",) if few_classes else ("top1", "top5")
    return (*names, *spec.train.metrics)


def _make_cell_report(training: TrainingRun, cell: Cell, job: JobStatus | None, spec: JobSpec) -> CellReport:
    """Return the result of a training from its files; without a summary, its state from the status of its job."""
    summary = training.read_summary()
    if summary is None:
        if attempt := training.find_diverged_attempt():
            return CellReport(cell, "diverged", attempt.message)
        if job is None or job.state == "done":  # the job is done but its summary is missing: the cell is trained again
            return CellReport(cell, "missing")
        return CellReport(cell, "running" if job.state == "suspended" else job.state, job.reason)
    result, tuning = training.read_result(), training.read_tuning()
    cell_report = CellReport(
        cell=cell,
        state="done",
        batch=summary.batch,
        samples=None if result is None else result.samples + (tuning.samples if tuning is not None else 0),
        hours=summary.actual_hours,
        normalised=next(
            (fallback.batch_norm_text for fallback in reversed(summary.fallbacks) if fallback.normalised), ""
        ),
    )
    if not spec.workload.evaluates_held_out_data:
        name = next(iter(spec.workload.reported_metrics), "")
        cell_report = dataclasses.replace(cell_report, metrics=summary.metrics)
        if name not in summary.metrics and f"best_{name}" in summary.metrics:
            reason = f"the last value of {name} was not finite"
            return dataclasses.replace(cell_report, state="diverged", reason=reason)
        return cell_report
    loss = summary.metrics.get("eval_loss")
    return dataclasses.replace(
        cell_report,
        # Metrics contain finite numbers only, so a missing loss was not finite.
        state="done" if loss is not None else "diverged",
        top1=summary.metrics.get("top1"),
        top5=summary.metrics.get("top5"),
        loss=loss,
        best_top1=summary.best_top1 if "top1" in summary.metrics else None,
        metrics={name: value for name, value in summary.metrics.items() if name in ("perplexity", *spec.train.metrics)},
    )


def _group_rows(cells: Sequence[CellReport]) -> list[ComparisonRow]:
    """Return the rows in the order of the table: the reference first, then by batch, then by order of the methods."""
    reports_by_row: dict[tuple[str, int], list[CellReport]] = {}
    for report in cells:
        reports_by_row.setdefault((report.cell.method, report.cell.batch), []).append(report)
    rows = [_build_row(reports) for reports in reports_by_row.values()]
    return sorted(rows, key=lambda row: (not row.reference, row.batch))  # sorting is stable


def _build_row(reports: Sequence[CellReport]) -> ComparisonRow:
    cell, finished = reports[0].cell, [report for report in reports if report.finished]
    names = dict.fromkeys(name for report in finished for name in report.metrics)
    return ComparisonRow(
        method=cell.method,
        batch=cell.batch,
        reference=cell.reference,
        cells=tuple(reports),
        top1=compute_seed_statistics(report.top1 for report in finished),
        top5=compute_seed_statistics(report.top5 for report in finished),
        loss=compute_seed_statistics(report.loss for report in finished),
        metrics={
            name: metric_stat
            for name in names
            if (metric_stat := compute_seed_statistics(report.get_metric(name) for report in finished))
        },
        samples=_compute_mean(report.samples for report in finished),
        hours=_compute_mean(report.hours for report in finished),
    )


def compute_seed_statistics(values: Iterable[float | None]) -> SeedStatistics | None:
    """Return mean and sample standard deviation of the finite values; None if there are none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    return SeedStatistics(statistics.fmean(finite), statistics.stdev(finite) if len(finite) > 1 else None, len(finite))


def _compute_mean(values: Iterable[float | None]) -> float | None:
    stat = compute_seed_statistics(values)
    return None if stat is None else stat.mean


def _compare_with_reference(rows: Sequence[ComparisonRow], metric: str) -> list[ComparisonRow]:
    """Return the rows with their gap to the reference, and the share of lbt's gap that they recover."""
    reference = next((row for row in rows if row.reference), None)
    plain = {row.batch: row for row in rows if row.method == REFERENCE_METHOD and not row.reference}
    return [row if row.reference else _add_gap(row, reference, plain.get(row.batch), metric) for row in rows]


def _add_gap(
    row: ComparisonRow, reference: ComparisonRow | None, plain: ComparisonRow | None, metric: str
) -> ComparisonRow:
    reference_stats, row_stats = _compute_stats_over_common_seeds(metric, reference, row)
    gap = compute_metric_gap(reference_stats, row_stats, metric)
    if row.method == REFERENCE_METHOD:
        return dataclasses.replace(row, gap=gap)
    reference_stats, plain_stats, row_stats = _compute_stats_over_common_seeds(metric, reference, plain, row)
    recovered = compute_recovered_share(reference_stats, plain_stats, row_stats, metric)
    return dataclasses.replace(row, gap=gap, recovered=recovered)


def _compute_stats_over_common_seeds(metric: str, *rows: ComparisonRow | None) -> list[SeedStatistics | None]:
    """Return each row's metric over the seeds that all rows have, so that no seed counts in only some of them.

    If a finished training lacks the metric, for example because it diverged, all statistics are None.
    """
    values = [
        {} if row is None else {cell.cell.seed: cell.get_metric(metric) for cell in row.cells if cell.finished}
        for row in rows
    ]
    seeds = set.intersection(*(set(values_by_seed) for values_by_seed in values))
    is_complete = all(value is not None for values_by_seed in values for value in values_by_seed.values())
    return [
        compute_seed_statistics(values_by_seed[seed] for seed in sorted(seeds)) if is_complete else None
        for values_by_seed in values
    ]


def compute_metric_gap(reference: SeedStatistics | None, stat: SeedStatistics | None, metric: str) -> float | None:
    """Return how much worse than the reference a metric is: positive is worse, whatever the metric."""
    if reference is None or stat is None:
        return None
    return stat.mean - reference.mean if is_lower_better(metric) else reference.mean - stat.mean


def compute_recovered_share(
    reference: SeedStatistics | None, plain: SeedStatistics | None, stat: SeedStatistics | None, metric: str
) -> float | None:
    """Return the share of the plain large batch's gap that a method recovers; 1 is all of it, below 0 is worse.

    None if the plain large batch has no gap beyond the noise of the seeds (one standard error of the difference), or if
    there is only one seed and the noise is unknown.
    """
    lost, remaining_gap = compute_metric_gap(reference, plain, metric), compute_metric_gap(reference, stat, metric)
    if reference is None or plain is None or lost is None or remaining_gap is None:
        return None
    error = compute_standard_error(reference, plain)
    return None if error is None or lost <= error else (lost - remaining_gap) / lost


def compute_standard_error(*stats: SeedStatistics) -> float | None:
    """Return the standard error of a difference of means over seeds; None if one of them has only one seed."""
    if any(stat.sd is None for stat in stats):
        return None
    return math.hypot(*((stat.sd or 0.0) / math.sqrt(stat.n) for stat in stats))


def _list_comparison_warnings(rows: Iterable[ComparisonRow], metric: str) -> Iterator[Diagnostic]:
    for row in rows:
        smaller = sorted({cell.batch for cell in row.cells if cell.batch is not None and cell.batch != row.batch})
        if smaller:
            yield messages.row_trained_at_smaller_batch(method=row.method, batch=row.batch, smaller=smaller)
        for normalisation in sorted({cell.normalised for cell in row.cells} - {""}):
            yield messages.row_trained_with_other_normalisation(
                method=row.method, batch=row.batch, normalisation=normalisation
            )
        for cell in row.cells:
            if cell.state in UNFINISHED_END_STATES or (cell.state == "diverged" and cell.reason):
                reason = cell.reason.strip().partition("\n")[0]
                yield messages.job_ended(job=cell.cell.description, state=cell.state, reason=reason)
            elif cell.state == "done" and cell.get_metric(metric) is None:
                yield messages.metric_not_found(training=cell.cell.description, metric=metric)


# --- The answer


def describe_best_row(report: CompareReport, *, takes_seed: bool) -> str:
    """Return a sentence on the best row of the largest batch with results, compared with the reference.

    Args:
        takes_seed: whether the job can be trained with other seeds; a script can if its command takes the seed.
    """
    reference = next((row for row in report.rows if row.reference), None)
    small = None if reference is None else reference.get_statistics(report.metric)
    with_result = [row for row in report.rows if not row.reference and row.get_statistics(report.metric)]
    batch = max((row.batch for row in with_result), default=0)
    candidates = [row for row in with_result if row.batch == batch]
    if small is None or not candidates:
        return f"No result yet: {report.finished} of {format_count(report.total, 'training')} done. Run tula compare to train the others."
    first = find_best_row(candidates, report)
    result = f"{report.metric} {format_mean_and_deviation(first.get_statistics(report.metric))}, where batch {report.reference_batch} has {format_mean_and_deviation(small)}"
    progress = "" if report.complete else f" ({report.finished} of {format_count(report.total, 'training')} done)"
    rows_within_noise = [
        row
        for row in candidates
        if row is not first and not row.dropped and not differs_beyond_noise(first, row, report.metric)
    ]
    if rows_within_noise:
        alternatives = ", ".join(
            f"{row.method} has {format_mean_and_deviation(row.get_statistics(report.metric))}"
            for row in rows_within_noise
        )
        unclear = (
            "the differences between the methods are within the noise of the seeds"
            if first.seeds > 1
            else "the methods cannot be distinguished with one seed"
        )
        seed = "" if takes_seed else "add {seed} to script.command, then"
        remedy = " ".join(filter(None, [seed, f"train more seeds: tula compare --seeds {max(5, 2 * first.seeds)}."]))
        return (
            f"At batch {batch} {unclear}: {first.method} has {result}; {alternatives}"
            f"{progress}. To tell them apart, {remedy}"
        )
    if len(candidates) == 1:
        return f"At batch {batch}, only {first.method} has a result: {result}{progress}."
    return f"At batch {batch} {first.method} is best: {result}{progress}."


def differs_beyond_noise(a: ComparisonRow, b: ComparisonRow, metric: str) -> bool:
    """Return whether the means of two rows differ beyond noise, by Welch's t-test; False if either has one seed."""
    first_stat, second = a.get_statistics(metric), b.get_statistics(metric)
    if first_stat is None or second is None or first_stat.sd is None or second.sd is None:
        return False
    u, v = first_stat.sd**2 / first_stat.n, second.sd**2 / second.n
    if u + v == 0:
        return first_stat.mean != second.mean
    from scipy.special import stdtrit  # imported here: most commands do not need scipy

    freedom = (u + v) ** 2 / (u**2 / (first_stat.n - 1) + v**2 / (second.n - 1))
    return abs(first_stat.mean - second.mean) > float(stdtrit(freedom, 0.975)) * math.sqrt(u + v)


def find_best_row(rows: Sequence[ComparisonRow], report: CompareReport) -> ComparisonRow:
    def get_mean(row: ComparisonRow) -> float:
        stat = row.get_statistics(report.metric)
        assert stat is not None  # the rows were selected by this metric
        return stat.mean

    return (min if report.less_is_better else max)(rows, key=get_mean)


def format_mean_and_deviation(value: SeedStatistics | None) -> str:
    if value is None:
        return "-"
    return format_number(value.mean, 4) + (f" ± {format_number(value.sd, 2)}" if value.sd is not None else "")


# --- Evidence that a large batch keeps the accuracy

MAX_POINTS_LOST = 1.0
"""Percentage points of accuracy that a large batch may lose and still keep the accuracy.

This is about the difference between seeds in short trainings.
"""
MAX_SHARE_LOST = 0.02
"""The same limit for any other metric, as a share of the small batch's value."""


def find_accuracy_evidence(run: Run, *, batch: int) -> Accuracy | None:
    """Return the evidence of a run's comparison on the accuracy of the job's method at a batch; None if there is none.

    A batch that was not trained is judged by the next larger one that was. It keeps the accuracy if the upper end of
    the 90 % interval of the gap is within a point (for other metrics 2 %); with one seed there is no interval, and the
    gap itself is used.
    """
    comparison = run.read_snapshot().comparison
    if comparison is None:
        return None
    table = build_compare_report(run, comparison)
    reference = next((row for row in table.rows if row.reference), None)
    method = make_row_of_job(run.spec)
    rows = [row for row in table.rows if row.method == method and row.batch >= batch and row.gap is not None]
    if reference is None or not rows:
        return None
    return _judge_accuracy(reference, min(rows, key=lambda row: row.batch), table.metric)


def _judge_accuracy(reference: ComparisonRow, row: ComparisonRow, metric: str) -> Accuracy | None:
    """Return the judgement of a row; None if there is only one seed and it shows no loss, which proves nothing."""
    small, large = reference.get_statistics(metric), row.get_statistics(metric)
    assert small is not None and large is not None and row.gap is not None  # both have the metric of the gap
    error, percent = compute_standard_error(small, large), metric in ("top1", "top5")
    max_gap = MAX_POINTS_LOST if percent else MAX_SHARE_LOST * abs(small.mean)
    is_kept = row.gap + (Z90 * error if error is not None else 0.0) <= max_gap
    if is_kept and error is None:
        return None
    spread, unit = f" ± {format_number(error)}" if error is not None else "", " points" if percent else ""
    if row.gap == 0:
        description = f"equal in {metric} to batch {reference.batch}" + (f" (0{spread}{unit})" if spread else "")
    else:
        direction = "worse" if row.gap > 0 else "better"
        description = (
            f"{format_number(abs(row.gap))}{spread}{unit} {direction} in {metric} than batch {reference.batch}"
        )
    seeds = min(small.n, large.n)
    limit = f"{MAX_POINTS_LOST:g} point" if percent else f"{100 * MAX_SHARE_LOST:g} %"
    return Accuracy(
        outcome="keeps" if is_kept else "may lose",
        batch=row.batch,
        reference_batch=reference.batch,
        metric=metric,
        gap=row.gap,
        error=error,
        seeds=seeds,
        words=f"{'kept within' if is_kept else 'may be worse by more than'} {limit}: {row.method} at batch {row.batch} was {description} (tula compare, {format_count(seeds, 'seed')})",
    )
