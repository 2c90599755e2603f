"""`tula compare`: methods, batches and seeds of one job beside each other, as Table I of the paper.

Each cell of the grid is an ordinary training of the run, with the job's method, seed and batch replaced: it resumes, goes
on after an out-of-memory and is attached to as `tula train` does, and is never trained twice.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tula_cli import status, train
from tula_cli.code import choose
from tula_cli.errors import BadMeasurements, Diverged, JobFailed, Problem, SpecError, TulaError
from tula_cli.launch import Launcher
from tula_cli.models.cost import price_words
from tula_cli.plugins import nearest
from tula_cli.records import Cell, Comparison, Inspection
from tula_cli.rundir import RunDir
from tula_cli.spec import JobSpec, Train, misfit, train_signature, validate, warmup_epochs
from tula_cli.status import JobStatus, RunStatus, TrainingStatus
from tula_cli.train import TrainPlan

DEFAULT_METHODS = ("lbt", "lrs", "lars", "polo", "ags")
"""Those of the paper's Table I."""
REFERENCE = "lbt"
"""At train.reference_batch, with the learning rate that was tuned for it: the small batch of the comparison."""
CONTROLS = ("lbt-x2", "lbt-x4")
"""A large batch whose learning rate was raised by hand: what a method has to beat to be worth anything."""
A_START = 15.0
"""Seconds after which a training that does not run yet is said to wait."""
HOPELESS = 3
"""Failures after which a comparison ends of which no training has worked."""

Inspect = Callable[[JobSpec], Inspection]
State = Literal["done", "diverged", "failed", "cancelled", "lost", "running", "queued", "missing"]
FINISHED: tuple[State, ...] = ("done", "diverged")
ENDED: tuple[State, ...] = ("failed", "cancelled", "lost")


@dataclass(frozen=True)
class Variant:
    """A row of the table that is more than a method: what else it changes of the job."""

    method: str
    lr: float = 1.0  # factor of optimizer.lr
    train: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    preset: str = ""  # of ags; of what else the job's section says only what its optimizer and ranks need is kept


VARIANTS: dict[str, Variant] = {
    "lbt-x2": Variant("lbt", lr=2.0),
    "lbt-x4": Variant("lbt", lr=4.0),
    "sqrt": Variant("lrs", train={"lr_scaling": "sqrt"}),
    "robust": Variant("ags", preset="robust"),
}


def known_methods() -> tuple[str, ...]:
    """Return what a row may be: every train.method, and the variants."""
    return (*get_args(Train.model_fields["method"].annotation), *VARIANTS)


@dataclass(frozen=True)
class Grid:
    """What is compared; `batches` are global."""

    methods: tuple[str, ...]
    batches: tuple[int, ...]
    seeds: int
    nodes: int
    controls: bool = True

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in known_methods():
                raise SpecError(
                    f"--methods: {method!r} is no method",
                    nearest(method, known_methods()) or f"there are: {', '.join(known_methods())}",
                )
        for option, numbers in (("--batch", self.batches), ("--seeds", (self.seeds,)), ("--nodes", (self.nodes,))):
            if not numbers or min(numbers) < 1:
                raise SpecError(f"{option}: {', '.join(map(str, numbers)) or 'nothing'} given, must be 1 or more")

    def rows(self, reference: int) -> list[tuple[str, int]]:
        """Return (method, batch) of every row, the reference first; controls only where a batch is large."""
        found = [(REFERENCE, reference)]
        for batch in self.batches:
            found += [(method, batch) for method in self.methods]
            if self.controls and batch > reference:
                found += [(method, batch) for method in CONTROLS]
        return list(dict.fromkeys(found))


def cell_spec(spec: JobSpec, method: str, seed: int) -> JobSpec:
    """Return the job of one cell.

    Args:
        spec: the job.
        method: of train.method, or a variant.
        seed: of the cell.

    Raises:
        SpecError: the job's other settings do not go with the method.
    """
    variant = VARIANTS.get(method, Variant(method))
    content = spec.model_dump(mode="json", exclude_unset=True)
    own = dict(content["train"])
    if variant.method != spec.train.method or variant.method == REFERENCE:
        own.pop("lr_scaling", None)  # it was chosen for the job's own method: others scale as they do, lbt does not
    content["train"] = {**own, "method": variant.method, "seed": seed, **variant.train}
    content["optimizer"] = {**content["optimizer"], "lr": spec.optimizer.lr * variant.lr}
    if variant.preset:
        content["ags"] = {"preset": variant.preset, "consensus": spec.ags.consensus, "apply_to": spec.ags.apply_to}
    return validate(content, source=f"the job with method {method}")


# --- what there is to do


@dataclass(frozen=True)
class ComparePlan:
    """A comparison before anything is submitted."""

    comparison: Comparison
    spec: JobSpec  # the job that the cells change
    missing: tuple[Cell, ...]  # in the order of their worth
    hours: Mapping[tuple[str, int], float | None]  # expected for one training of each row; None where nothing tells
    currency: str
    price: str
    first: TrainPlan | None  # what is trained first, None where nothing is missing
    warnings: tuple[str, ...] = ()

    @property
    def hours_left(self) -> float | None:
        """Hours of all that is missing, one after the other; None where nothing tells."""
        return total_hours(self.missing, self.hours)


def total_hours(cells: Iterable[Cell], hours: Mapping[tuple[str, int], float | None]) -> float | None:
    """Return the expected hours of some cells; rows of which nothing is known count as the mean of those that are."""
    found = [hours.get((cell.method, cell.batch)) for cell in cells]
    known = [value for value in hours.values() if value is not None]
    if not found or not known:
        return None if found else 0.0
    return sum(statistics.fmean(known) if value is None else value for value in found)


def plan(run: RunDir, spec: JobSpec, grid: Grid, *, inspect: Inspect, now: float) -> ComparePlan:
    """Decide what is trained, in which order: every row's first seed before any second one.

    Args:
        run: the run, which may not be there yet.
        spec: the job.
        grid: what is compared.
        inspect: tells the dataset's size where no probe has.
        now: Unix time.

    Raises:
        SpecError: a batch cannot be trained on that many nodes, is larger than the dataset, or methods do not go with
            the job's settings.
    """
    inspect = functools.partial(_once, inspect, {})
    _refuse_misfits(spec, grid)
    comparison = _comparison(run, spec, grid, now=now)
    missing = tuple(cell for cell in comparison.cells if not _has_ended(run, cell))
    plans = {}
    for cell in missing:
        if (cell.method, cell.batch) not in plans:  # another seed changes neither time nor what is allowed
            plans[cell.method, cell.batch] = _cell_plan(run, spec, cell, inspect)
    took = durations(run, comparison)
    predicted = {row: p.prediction.hours for row, p in plans.items() if p.prediction is not None}
    rows = {(cell.method, cell.batch) for cell in comparison.cells}
    return ComparePlan(
        comparison=comparison,
        spec=spec,
        missing=missing,
        hours={row: expected_hours(row, took, predicted) for row in rows},
        currency=spec.pricing.currency,
        price=price_words(spec.pricing),
        first=next(iter(plans.values()), None),
        warnings=(*dict.fromkeys(text for p in plans.values() for text in p.code.warnings), *_doing_little(spec, grid)),
    )


def _has_ended(run: RunDir, cell: Cell) -> bool:
    """Return whether a training has nothing left to do; one that has diverged would do so again."""
    return run.summary(cell.signature) is not None or run.diverged(cell.signature) is not None


def _refuse_misfits(spec: JobSpec, grid: Grid) -> None:
    """Refuse methods that do not go with the job's optimizer, all at once: in the queue each would fail for itself."""
    found = {method: misfit(cell_spec(spec, method, spec.train.seed)) for method in grid.methods}
    problems = tuple(Problem(method, why) for method, why in found.items() if why)
    if problems:
        raise SpecError("--methods: some do not go with the job", "leave them out", problems=problems)


def _doing_little(spec: JobSpec, grid: Grid) -> Iterator[str]:
    """Say which methods cannot be judged by this job."""
    if "polo" in grid.methods and grid.nodes * spec.cluster.gpus_per_node == 1:
        yield "polo on one GPU is plain SGD with a warm-up: there are no replicas to average"
    for method in grid.methods:
        warmup = warmup_epochs(cell_spec(spec, method, spec.train.seed))
        if warmup >= spec.train.epochs:
            yield f"{method} never leaves its {warmup:g} epochs of warm-up: train.epochs is {spec.train.epochs}"


def _once(inspect: Inspect, remembered: dict[str, Inspection], spec: JobSpec) -> Inspection:
    """Inspect the first spec that is asked for: all cells have the same model and dataset."""
    if not remembered:
        remembered["all"] = inspect(spec)
    return remembered["all"]


def _comparison(run: RunDir, spec: JobSpec, grid: Grid, *, now: float) -> Comparison:
    reference = spec.train.reference_batch
    code = choose(run, spec, Path.cwd(), keep=False).digest
    found: dict[str, Cell] = {}
    for number in range(grid.seeds):
        seed = spec.train.seed + number
        for method, batch in grid.rows(reference):
            own = cell_spec(spec, method, seed)
            signature = train_signature(own, nodes=grid.nodes, batch=batch, code=code)
            is_reference = (method, batch) == (REFERENCE, reference)
            cell = Cell(
                method=method, batch=batch, seed=seed, nodes=grid.nodes, signature=signature, reference=is_reference
            )
            # Two rows that are one and the same training (a variant that the job's own settings make) are one row.
            found.setdefault(signature, cell)
    return Comparison(**dataclasses.asdict(grid), cells=tuple(found.values()), created_at=now)


def _cell_plan(run: RunDir, spec: JobSpec, cell: Cell, inspect: Inspect) -> TrainPlan:
    own = cell_spec(spec, cell.method, cell.seed)
    try:
        return train.plan(run, own, nodes=cell.nodes, batch=cell.batch, inspect=inspect)
    except SpecError as error:
        what = "the reference" if cell.reference else f"method {cell.method}"
        raise SpecError(f"{what}: {error.message}", error.hint, problems=error.problems) from None


def durations(run: RunDir, comparison: Comparison) -> dict[tuple[str, int], float]:
    """Return the mean hours that the finished trainings of each row took."""
    found: dict[tuple[str, int], list[float]] = {}
    for cell in comparison.cells:
        if summary := run.summary(cell.signature):
            found.setdefault((cell.method, cell.batch), []).append(summary.actual_hours)
    return {row: statistics.fmean(hours) for row, hours in found.items()}


def expected_hours(
    row: tuple[str, int], took: Mapping[tuple[str, int], float], predicted: Mapping[tuple[str, int], float]
) -> float | None:
    """Return what a training takes: as the row's own did, as predicted, or as others did at its batch."""
    alike = [hours for (_, batch), hours in took.items() if batch == row[1]] or list(took.values())
    return took.get(row) or predicted.get(row) or (statistics.fmean(alike) if alike else None)


def default_nodes(run: RunDir, spec: JobSpec) -> int:
    """Return the recommended number of nodes, else the smallest that is searched."""
    found = run.recommendation()
    return found.choice.nodes if found is not None else min(spec.search.nodes)


def default_batches(run: RunDir) -> tuple[int, ...]:
    """Return the recommended batch.

    Raises:
        BadMeasurements: there is none.
    """
    found = run.recommendation()
    if found is None:
        raise BadMeasurements(
            f"{run.id} has no recommendation, and --batch not given",
            "name the large batches: tula compare job.yaml --batch 1024,4096",
        )
    return (found.choice.batch,)


# --- doing it


@dataclass(frozen=True)
class Progress:
    """Where a comparison stands while one waits. Seconds."""

    total: int
    done: int  # finished, diverged ones too
    failed: int  # those that this call started, or waited for
    cell: Cell | None  # what runs; None between two and where several run side by side
    training: TrainingStatus | None
    left: float | None
    running: int = 0
    ended: Cell | None = None  # what has just come to its end
    problem: str = ""  # why that failed
    waits: str = ""  # what the cell has been waiting for, longer than a start takes


def submit(run: RunDir, plan: ComparePlan, cell: Cell, launcher: Launcher, *, inspect: Inspect) -> str:
    """Submit the training of a cell, or find it under way. Returns the job's id.

    Raises:
        TulaError: the user's code has changed since the comparison was planned.
    """
    planned = _cell_plan(run, plan.spec, cell, inspect)
    if planned.task.signature != cell.signature:
        raise TulaError(
            "the code that the job names has changed since the comparison was started",
            "run the same command again to compare with the code as it is now",
        )
    return train.start(run, planned, launcher)


def submit_all(run: RunDir, plan: ComparePlan, launcher: Launcher, *, inspect: Inspect) -> list[str]:
    """Submit everything that is missing, in the order of its worth; a scheduler runs it side by side."""
    inspect = functools.partial(_once, inspect, {})
    return [submit(run, plan, cell, launcher, inspect=inspect) for cell in plan.missing]


def one_by_one(
    run: RunDir,
    plan: ComparePlan,
    launcher: Launcher,
    *,
    inspect: Inspect,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Train what is missing, one after the other, as on this machine; a failure does not end it.

    Args:
        run: the run.
        plan: the comparison.
        launcher: starts the jobs.
        inspect: tells the dataset's size where no probe has.
        seconds: start nothing that is not expected to end within so many; None for no end.
        clock: seconds.

    Raises:
        JobFailed: the first trainings have all failed.
    """
    inspect = functools.partial(_once, inspect, {})
    began, waiting, failed = clock(), list(plan.missing), 0
    total = len(plan.comparison.cells)
    while waiting:
        hours = _hours_now(run, plan)
        expected = total_hours(waiting[:1], hours)
        if seconds is not None and clock() - began + 3600 * (expected or 0.0) > seconds:
            return
        cell = waiting.pop(0)
        rest = total_hours(waiting, hours)
        job, submitted = submit(run, plan, cell, launcher, inspect=inspect), clock()
        done = total - len(waiting) - 1 - failed
        for now in status.watch(run, launcher, [job]):
            waits = _waits(now, job) if clock() - submitted > A_START else ""
            left = _left(now, job, expected, rest)
            yield Progress(total, done, failed, cell, now.training, left, running=1, waits=waits)
        problem = _problem(run, cell)
        failed += bool(problem)
        if failed == HOPELESS and failed == total - len(waiting):
            raise JobFailed(
                f"the first {failed} trainings have all failed: {problem}", "tula logs shows what they said"
            )
        yield Progress(total, done + (not problem), failed, None, None, _seconds(rest), ended=cell, problem=problem)
        if run.cancelled(job):  # the user wants an end, not the next one
            return


def _waits(now: RunStatus, job: str) -> str:
    return next((found.reason for found in now.jobs if found.id == job and found.state == "queued"), "")


def _hours_now(run: RunDir, plan: ComparePlan) -> dict[tuple[str, int], float | None]:
    """Return the expected hours of each row by what has been trained since the plan was made."""
    took = durations(run, plan.comparison)
    known = {row: hours for row, hours in plan.hours.items() if hours is not None}
    return {row: took.get(row) or (expected_hours(row, took, {}) if took else known.get(row)) for row in plan.hours}


def _left(now: RunStatus, job: str, expected: float | None, rest: float | None) -> float | None:
    """Return the seconds left of all: what the training says of itself, and what is expected of the others."""
    own = now.training.eta if now.training is not None and now.training.job == job else None
    elapsed = next((found.elapsed or 0.0 for found in now.jobs if found.id == job), 0.0)
    if own is None and expected is not None:
        own = max(0.0, 3600 * expected - elapsed)
    return None if own is None or rest is None else own + 3600 * rest


def _seconds(hours: float | None) -> float | None:
    return None if hours is None else 3600 * hours


def _problem(run: RunDir, cell: Cell) -> str:
    """Return why a training has failed; empty where it has not, though it may have diverged."""
    try:
        train.report(run, cell.signature)
    except Diverged:
        return ""
    except TulaError as error:
        return error.message
    return ""


def wait_for_all(
    run: RunDir, plan: ComparePlan, launcher: Launcher, jobs: Sequence[str], *, timeout: float | None = None
) -> Iterator[Progress]:
    """Watch jobs that a scheduler runs side by side until all have ended."""
    cells = {f"train-{cell.signature}": cell for cell in plan.comparison.cells}
    total, over = len(cells), set[str]()
    for now in status.watch(run, launcher, jobs, timeout=timeout):
        states = {job.id: job for job in now.jobs if job.id in cells}
        # What is lost at a first look may be on its way; the table tells in the end.
        going_on = (*status.ACTIVE, "lost")
        ended = [job for job in jobs if job in states and states[job].state not in going_on and job not in over]
        running = sum(job.state == "running" for job in states.values())
        count = functools.partial(_counts, run, plan)
        for job in ended:
            over.add(job)
            done, failed = count(states)
            cell = cells[job]
            yield Progress(total, done, failed, None, None, None, running, ended=cell, problem=_problem(run, cell))
        done, failed = count(states)
        yield Progress(total, done, failed, None, None, None, running)


def _counts(run: RunDir, plan: ComparePlan, states: Mapping[str, JobStatus]) -> tuple[int, int]:
    done = sum(_has_ended(run, cell) for cell in plan.comparison.cells)
    return done, sum(job.state in ENDED for job in states.values())


# --- what came of it


@dataclass(frozen=True)
class CellReport:
    """One training. Accuracies are percentages after the last epoch; `batch` is the one it ended with; `samples` are all
    that it trained on, in the branches of a self-tuning one too."""

    cell: Cell
    state: State
    reason: str = ""
    top1: float | None = None
    top5: float | None = None
    loss: float | None = None
    best_top1: float | None = None
    batch: int | None = None
    samples: int | None = None
    hours: float | None = None

    @property
    def finished(self) -> bool:
        return self.state in FINISHED


@dataclass(frozen=True)
class Stat:
    """Over seeds; `sd` is the sample standard deviation, None for one seed."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """A method at a batch, over its seeds."""

    method: str
    batch: int
    reference: bool
    cells: tuple[CellReport, ...]
    top1: Stat | None
    top5: Stat | None
    loss: Stat | None
    gap: float | None = None  # how much worse than the reference: percentage points, or loss; over the seeds of both
    recovered: float | None = None  # share of lbt's gap at this batch; None where that is within the noise, or unknown
    samples: float | None = None  # mean
    hours: float | None = None  # mean, wall-clock time with all attempts

    def stat(self, metric: str) -> Stat | None:
        found: Stat | None = getattr(self, metric)
        return found

    @property
    def seeds(self) -> int:
        """How many seeds the means are over."""
        known = self.top1 or self.loss
        return 0 if known is None else known.n

    def count(self, *states: State) -> int:
        return sum(cell.state in states for cell in self.cells)


@dataclass(frozen=True)
class CompareReport:
    """The table, whole or partial."""

    rows: tuple[Row, ...]
    metric: Literal["top1", "loss"]  # what the gap is of: loss where there are no classes
    reference_batch: int
    nodes: int
    total: int
    finished: int
    hours_left: float | None  # expected for what is missing, one after the other
    warnings: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return self.finished == self.total


def report(run: RunDir, comparison: Comparison, spec: JobSpec, *, jobs: Iterable[JobStatus] = ()) -> CompareReport:
    """Return the table of what has been trained so far.

    Args:
        run: the run.
        comparison: its cells.
        spec: the job.
        jobs: what is known of the run's jobs, for the cells that are not finished.
    """
    states = {job.id: job for job in jobs}
    cells = [_cell_report(run, cell, states.get(f"train-{cell.signature}")) for cell in comparison.cells]
    metric: Literal["top1", "loss"] = "top1" if any(cell.top1 is not None for cell in cells) else "loss"
    if not any(cell.finished for cell in cells):
        metric = "top1"
    rows = _compared(_rows(cells), metric)
    took = durations(run, comparison)
    hours = {(row.method, row.batch): expected_hours((row.method, row.batch), took, {}) for row in rows}
    return CompareReport(
        rows=tuple(rows),
        metric=metric,
        reference_batch=spec.train.reference_batch,
        nodes=comparison.nodes,
        total=len(cells),
        finished=sum(cell.finished for cell in cells),
        hours_left=total_hours([cell.cell for cell in cells if not cell.finished], hours),
        warnings=tuple(_doubts(rows)),
    )


def _cell_report(run: RunDir, cell: Cell, job: JobStatus | None) -> CellReport:
    summary = run.summary(cell.signature)
    if summary is None:
        if attempt := run.diverged(cell.signature):
            return CellReport(cell, "diverged", attempt.message)
        if job is None or job.state == "done":  # a summary that is gone is trained again
            return CellReport(cell, "missing")
        return CellReport(cell, job.state, job.reason)
    result, tuning = run.train_result(cell.signature), run.tuning(cell.signature)
    loss = summary.metrics.get("eval_loss")
    return CellReport(
        cell=cell,
        # Metrics hold finite numbers only: a loss that is missing was none.
        state="done" if loss is not None else "diverged",
        top1=summary.metrics.get("top1"),
        top5=summary.metrics.get("top5"),
        loss=loss,
        best_top1=summary.best_top1 if "top1" in summary.metrics else None,
        batch=summary.batch,
        samples=None if result is None else result.samples + (tuning.samples if tuning is not None else 0),
        hours=summary.actual_hours,
    )


def _rows(cells: Sequence[CellReport]) -> list[Row]:
    """Return the rows in the order of the table: by batch, the reference first, then as the methods were named."""
    found: dict[tuple[str, int], list[CellReport]] = {}
    for report in cells:
        found.setdefault((report.cell.method, report.cell.batch), []).append(report)
    rows = [_row(own) for own in found.values()]
    return sorted(rows, key=lambda row: (not row.reference, row.batch))  # sorting is stable


def _row(own: Sequence[CellReport]) -> Row:
    cell, finished = own[0].cell, [report for report in own if report.finished]
    return Row(
        method=cell.method,
        batch=cell.batch,
        reference=cell.reference,
        cells=tuple(own),
        top1=stat(report.top1 for report in finished),
        top5=stat(report.top5 for report in finished),
        loss=stat(report.loss for report in finished),
        samples=_mean(report.samples for report in finished),
        hours=_mean(report.hours for report in finished),
    )


def stat(values: Iterable[float | None]) -> Stat | None:
    """Return mean and sample standard deviation of the values there are; None where there are none."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    if not found:
        return None
    return Stat(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


def _mean(values: Iterable[float | None]) -> float | None:
    found = stat(values)
    return None if found is None else found.mean


def _compared(rows: Sequence[Row], metric: str) -> list[Row]:
    """Return the rows with their gap to the reference, and the share of lbt's gap that they recover."""
    reference = next((row for row in rows if row.reference), None)
    plain = {row.batch: row for row in rows if row.method == REFERENCE and not row.reference}
    return [row if row.reference else _beside(row, reference, plain.get(row.batch), metric) for row in rows]


def _beside(row: Row, reference: Row | None, plain: Row | None, metric: str) -> Row:
    small, own = _common(metric, reference, row)
    lost = gap(small, own, metric)
    if row.method == REFERENCE:
        return dataclasses.replace(row, gap=lost)
    small, large, own = _common(metric, reference, plain, row)
    return dataclasses.replace(row, gap=lost, recovered=recovered(small, large, own, metric))


def _common(metric: str, *rows: Row | None) -> list[Stat | None]:
    """Return each row's metric over the seeds that all of them have, so that no seed stands on one side alone.

    A seed that diverged has no loss; of the others alone nothing is said.
    """
    values = [
        {} if row is None else {cell.cell.seed: getattr(cell, metric) for cell in row.cells if cell.finished}
        for row in rows
    ]
    seeds = set.intersection(*(set(found) for found in values))
    whole = all(value is not None for found in values for value in found.values())
    return [stat(found[seed] for seed in sorted(seeds)) if whole else None for found in values]


def gap(reference: Stat | None, own: Stat | None, metric: str) -> float | None:
    """Return how much worse than the reference something is: above 0 is worse, whatever the metric."""
    if reference is None or own is None:
        return None
    return own.mean - reference.mean if metric == "loss" else reference.mean - own.mean


def recovered(reference: Stat | None, plain: Stat | None, own: Stat | None, metric: str) -> float | None:
    """Return the share of the plain large batch's gap that a method wins back; 1 is all of it, below 0 is worse.

    None where the plain large batch has no gap that stands out of the seeds' noise (one standard error of the
    difference), or where one seed tells of no noise: a share of nothing says nothing.
    """
    lost, left = gap(reference, plain, metric), gap(reference, own, metric)
    if reference is None or plain is None or lost is None or left is None:
        return None
    error = _standard_error(reference, plain)
    return None if error is None or lost <= error else (lost - left) / lost


def _standard_error(*stats: Stat) -> float | None:
    if any(found.sd is None for found in stats):
        return None
    return math.sqrt(sum((found.sd or 0.0) ** 2 / found.n for found in stats))


def _doubts(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        smaller = sorted({cell.batch for cell in row.cells if cell.batch is not None and cell.batch != row.batch})
        if smaller:
            yield f"{row.method} at batch {row.batch}: out of memory, some of it was trained at {', '.join(map(str, smaller))}"
        for cell in row.cells:
            if cell.state in ENDED or (cell.state == "diverged" and cell.reason):
                yield f"{cell.cell.words} {cell.state}: {cell.reason.strip().partition(chr(10))[0]}"


# --- what it was like on the way, for the plots


@dataclass(frozen=True)
class Curve:
    """One training as far as it has come: rows of its metrics."""

    cell: Cell
    epochs: tuple[Mapping[str, Any], ...]  # a row at the end of each epoch
    curvature: tuple[Mapping[str, Any], ...] = ()  # with train.hessian


def curves(run: RunDir, comparison: Comparison) -> list[Curve]:
    """Return what every training of a comparison has logged on its way."""
    found = []
    for cell in comparison.cells:
        rows: dict[str, list[Mapping[str, Any]]] = {"epoch": [], "hessian": []}
        for row in run.metrics(cell.signature):
            if row["kind"] in rows:
                rows[row["kind"]].append(row)
        if rows["epoch"]:
            found.append(Curve(cell, tuple(rows["epoch"]), tuple(rows["hessian"])))
    return found
