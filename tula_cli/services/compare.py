"""`tula compare`: train methods, batches and seeds of one job and compare them, as in Table I of the paper.

Each cell of the grid is an ordinary training of the run with the method, seed and batch replaced. Like any `tula
train`, it resumes, continues after an out-of-memory error and can be attached to; no cell is trained twice.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tula_cli.cluster.inspection import Inspect
from tula_cli.cluster.scripts.start import compute_script_learning_rate
from tula_cli.cluster.slurm import first_job
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, Problem, SpecError
from tula_cli.models.cost import describe_price
from tula_cli.options import require_positive
from tula_cli.presets import NORMALISING_OPTIMIZERS
from tula_cli.run.code import choose_code
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.imports import list_import_strings
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.results import Cell, Comparison
from tula_cli.run.snapshot import Snapshot
from tula_cli.services import messages, train
from tula_cli.services.comparison import rounds
from tula_cli.services.comparison.rows import (
    REFERENCE_METHOD,
    VARIANTS,
    make_row_of_job,
    parse_row,
    require_comparable_script,
    require_script_lr,
    warn_missing_controls,
)
from tula_cli.services.plans import ComparePlan, TrainPlan
from tula_cli.spec.job import JobSpec, describe_method_conflict
from tula_cli.spec.load import validate_job
from tula_cli.spec.merge import apply_overrides
from tula_cli.spec.methods import METHODS
from tula_cli.spec.signature import compute_train_signature

ROWS_OF_SGD, ROWS_OF_ADAM, ROWS_OF_OTHERS = ("lbt", "ags", "ramp"), ("lbt", "sqrt", "ramp"), ("lbt", "ramp")
"""Rows that are compared with the job's method by default, by its optimizer (`presets.NORMALISING_OPTIMIZERS`)."""
METHODS_OF_SCRIPTS = ("lbt", "lrs", "sqrt", "ags")
"""Default rows of a job with a training script, as far as the script supports them."""
CONTROLS = ("lbt-x2", "lbt-x4")
"""Large batches whose learning rate was raised by hand: the baseline that a method has to beat to be of benefit.

One control is added to the default rows: the second if the batch is at least 8 times the reference batch, else the
first.
"""
CellState = Literal["done", "diverged", "failed", "cancelled", "lost", "held", "running", "queued", "missing"]
FINISHED_STATES: tuple[CellState, ...] = ("done", "diverged")
UNFINISHED_END_STATES: tuple[CellState, ...] = ("failed", "cancelled", "lost", "held")


@dataclass(frozen=True)
class Grid:
    """The rows, batches (global) and seeds of a comparison."""

    methods: tuple[str, ...]
    batches: tuple[int, ...]
    seeds: int
    nodes: int
    controls: bool | tuple[str, ...] = True  # True: all controls, False: none, otherwise these
    halving: bool = False  # train all rows briefly first, then only the best in full (`comparison.rounds`)

    def __post_init__(self) -> None:
        for method in self.methods:
            parse_row(method)
        if not self.batches:
            raise SpecError("batch: none given")
        for batch in self.batches:
            require_positive(batch=batch)
        require_positive(seeds=self.seeds, nodes=self.nodes)

    def list_rows(self, reference: int) -> list[tuple[str, int]]:
        """Return (method, batch) of every row, the reference first; controls only for batches above the reference."""
        rows = [(REFERENCE_METHOD, reference)]
        for batch in self.batches:
            rows += [(method, batch) for method in self.methods]
            if batch > reference:
                controls = CONTROLS if self.controls is True else self.controls or ()
                rows += [(method, batch) for method in controls]
        return list(dict.fromkeys(rows))


def make_job_of_cell(spec: JobSpec, method: str, seed: int | None = None) -> JobSpec:
    """Return the job of one cell.

    Args:
        method: a value of train.method, a variant or a user-defined method; with settings, if any (`comparison.rows`).
        seed: the seed; None for that of the job.

    Raises:
        SpecError: the job's other settings are not compatible with the method.
    """
    variant = parse_row(method)
    content = spec.model_dump(mode="json", exclude_unset=True)
    replaced = variant.training_method.list_replaced_train_keys(spec.train.method)
    train = {key: value for key, value in content.get("train", {}).items() if key not in replaced}
    seed = spec.train.seed if seed is None else seed
    content["train"] = {**train, "method": variant.method, "seed": seed, **variant.train}
    if spec.script is None:
        content["optimizer"] = {**content["optimizer"], "lr": spec.optimizer.lr * variant.lr, **variant.optimizer}
        names_kind = any(setting.startswith("schedule.kind=") for setting in variant.settings)
        if not variant.training_method.describe_schedule_conflict(spec.schedule.kind) and not names_kind:
            # all rows use the job's schedule, not their method's default
            content["schedule"] = spec.schedule.model_dump(mode="json")
    else:
        if not variant.training_method.uses_section("ags"):
            content.pop("ags", None)  # the section has no effect with this method
        if variant.optimizer:
            raise SpecError(
                f"{method} sets {', '.join(variant.optimizer)}, but tula cannot change the optimizer or schedule of a script",
                f"remove {method} from [[--methods]]",
            )
        if variant.lr != 1.0:
            content["script"]["reference"]["lr"] = require_script_lr(spec) * variant.lr
    if variant.preset:
        retained_ags = spec.ags.model_dump(include={"apply_to", "parameters"})
        content["ags"] = {"preset": variant.preset, **retained_ags}
    apply_overrides(content, variant.settings, {})
    return validate_job(content, source=f"the job with method {method}")


# --- The plan


def plan_comparison(run: Run, grid: Grid, *, inspect: Inspect, now: float) -> ComparePlan:
    """Return the plan of a comparison: its trainings, with the first seed of every row before any second seed.

    Args:
        now: Unix time.

    Raises:
        SpecError: a batch cannot be trained on that many nodes or is larger than the dataset; methods are not
            compatible with the job's settings; or the job's script reports no metric or takes no seed.
    """
    spec = run.spec
    require_comparable_script(spec, seeds=grid.seeds)
    _require_fitting_methods(spec, grid)
    _inspect_user_code(run, grid, inspect)
    inspect = cache_first_inspection(inspect)
    comparison, first_row_by_duplicate = _build_comparison(run, grid, now=now)
    plans = {}
    for cell in comparison.cells:  # the seed affects neither duration nor validity
        if (cell.method, cell.batch) not in plans and not cell.short and not has_cell_ended(run, cell):
            plans[cell.method, cell.batch] = plan_cell(run, cell, inspect)
    mean_hours_by_row = compute_mean_hours_by_row(run, comparison)
    predicted = {row: p.prediction.hours for row, p in plans.items() if p.prediction is not None}
    rows = {(cell.method, cell.batch) for cell in comparison.cells}
    hours = {row: estimate_hours(row, mean_hours_by_row, predicted) for row in rows}
    comparison_state = rounds.compute_comparison_state(run, comparison, spec, hours=hours)
    missing = tuple(cell for cell in comparison_state.wanted if not has_cell_ended(run, cell))
    return ComparePlan(
        comparison=comparison,
        spec=spec,
        state=comparison_state,
        missing=missing,
        hours=hours,
        currency=spec.pricing.currency,
        price=describe_price(spec.pricing),
        first=plan_cell(run, missing[0], inspect) if missing else None,
        warnings=(
            *{warning.text: warning for p in plans.values() for warning in p.code.warnings}.values(),  # each once
            *(messages.duplicate_row(row=row, twin=twin) for row, twin in first_row_by_duplicate.items()),
            *_warn_ineffective_methods(spec, grid),
        ),
    )


def has_cell_ended(run: RunDir, cell: Cell) -> bool:
    """Return whether a cell needs no further training: it has finished, or diverged and would diverge again."""
    training = run.get_training(cell.signature)
    return training.read_summary() is not None or training.find_diverged_attempt() is not None


def _require_fitting_methods(spec: JobSpec, grid: Grid) -> None:
    """Reject the methods that are incompatible with the job in one error, before they fail one by one in the queue."""
    reasons = {method: explain_unsupported_method(spec, method) for method in grid.methods}
    problems = tuple(Problem(method, why) for method, why in reasons.items() if why)
    if problems:
        fitting = ",".join(method for method, why in reasons.items() if not why) or "lbt"
        raise SpecError("some methods are incompatible with the job", f"use [[--methods]] {fitting}", problems=problems)


def _inspect_user_code(run: Run, grid: Grid, inspect: Inspect) -> None:
    """Inspect the user code of each method that the job itself does not use: only building it shows whether it works.

    Skipped if the job's model was inspected in a job on a node, because then this machine cannot build it.
    """
    spec = run.spec
    known_imports = set(list_import_strings(spec))
    if first_job.load_inspection(run, spec) is not None:
        return
    for method in grid.methods:
        cell_job = make_job_of_cell(spec, method)
        if set(list_import_strings(cell_job)) - known_imports:
            try:
                inspect(cell_job)
            except SpecError as error:
                raise SpecError(f"method {method}: {error.message}", error.hint, problems=error.problems) from None


def explain_unsupported_method(spec: JobSpec, method: str) -> str:
    """Return why a method cannot be a row of a job's comparison, or an empty string if it can.

    Raises:
        SpecError: settings of tula's training loop are not compatible with the method.
    """
    try:
        return describe_method_conflict(make_job_of_cell(spec, method))
    except SpecError as error:
        if spec.script is None:
            raise
        return "; ".join(problem.message for problem in error.problems) or error.message


def _warn_ineffective_methods(spec: JobSpec, grid: Grid) -> Iterator[Diagnostic]:
    """Yield warnings about rows that this job cannot assess, such as batches not above the reference batch."""
    methods = [parse_row(method).training_method for method in grid.methods if method not in VARIANTS]
    reference = spec.train.reference_batch
    key = spec.workload.reference_key
    for batch in grid.batches:
        if batch <= reference:
            yield messages.batch_not_above_reference(batch=batch, reference=reference, key=key)
    if grid.nodes * spec.cluster.gpus_per_node == 1:
        yield from (
            messages.method_needs_several_gpus(reason=why) for method in methods if (why := method.single_gpu_conflict)
        )
    yield from warn_missing_controls(spec, controls=CONTROLS)
    for method in grid.methods:
        warmup = make_job_of_cell(spec, method).workload.warmup_epochs
        if warmup >= spec.train.epochs:
            yield messages.only_warmup(method=method, warmup_epochs=warmup, epochs=spec.train.epochs)


def cache_first_inspection(inspect: Inspect) -> Inspect:
    """Return an inspector that inspects only the first spec: all trainings share the model and dataset."""
    inspections: list[Inspection] = []

    def inspect_first(spec: JobSpec) -> Inspection:
        if not inspections:
            inspections.append(inspect(spec))
        return inspections[0]

    return inspect_first


def _build_comparison(run: Run, grid: Grid, *, now: float) -> tuple[Comparison, dict[str, str]]:
    """Return the comparison, and a map from each row that trains the same as an earlier row to that row."""
    spec = run.spec
    reference = spec.train.reference_batch
    codes: dict[tuple[str, ...], str] = {}
    cells_by_signature: dict[str, Cell] = {}
    first_row_by_duplicate: dict[str, str] = {}

    def compute_signature(job: JobSpec, batch: int) -> str:
        if (names := list_import_strings(job)) not in codes:
            codes[names] = choose_code(run, job, Path.cwd(), keep=False).identity
        return compute_train_signature(job, nodes=grid.nodes, batch=batch, code=codes[names])

    for number in range(grid.seeds):
        seed = spec.train.seed + number
        for method, batch in _list_rows_of_grid(spec, grid):
            signature = compute_signature(make_job_of_cell(spec, method, seed), batch)
            is_reference = (method, batch) == (REFERENCE_METHOD, reference)
            cell = Cell(
                method=method, batch=batch, seed=seed, nodes=grid.nodes, signature=signature, reference=is_reference
            )
            # Rows that resolve to the same training (a variant that equals the job's settings) are one row.
            first_method = cells_by_signature.setdefault(signature, cell).method
            if first_method != method and (parse_row(method).settings or parse_row(first_method).settings):
                first_row_by_duplicate[method] = first_method
    job_rows = (
        cells_by_signature.get(compute_signature(make_job_of_cell(spec, make_row_of_job(spec)), batch))
        for batch in grid.batches
    )
    job_row = next((cell.method for cell in job_rows if cell is not None and not cell.reference), "")
    short: list[Cell] = []
    for batch in grid.batches if grid.halving else ():
        cells = [
            cell for cell in cells_by_signature.values() if cell.batch == batch and cell.method != REFERENCE_METHOD
        ]
        short += _make_short_cells(run, cells, job_row, compute_signature)
    grid_fields = {name: value for name, value in dataclasses.asdict(grid).items() if name != "halving"}
    return Comparison(
        **grid_fields, cells=(*short, *cells_by_signature.values()), created_at=now, job_row=job_row
    ), first_row_by_duplicate


def _make_short_cells(
    run: Run, cells: Sequence[Cell], job_row: str, compute_signature: Callable[[JobSpec, int], str]
) -> list[Cell]:
    """Return the short trainings of the first round for one batch, or an empty list if rounds may cost more.

    Args:
        run: the run; a row that has full trainings and no short one takes part in the second round in any case.
        cells: full trainings of the batch, without lbt.
    """
    spec = run.spec
    epochs, short_cells = rounds.compute_short_epochs(spec), list[Cell]()
    firsts = [cell for cell in cells if cell.seed == spec.train.seed]
    for cell in firsts if epochs < spec.train.epochs else ():
        try:
            signature = compute_signature(
                rounds.shorten_job_to_epochs(make_job_of_cell(spec, cell.method, cell.seed), epochs), cell.batch
            )
        except SpecError:  # the settings are invalid for so few epochs
            continue
        short = cell.model_copy(update={"signature": signature, "short": (epochs, spec.train.epochs)})
        has_full_training = any(
            has_cell_ended(run, full_cell) for full_cell in cells if full_cell.method == cell.method
        )
        if cell.method == job_row or not has_full_training or has_cell_ended(run, short):
            short_cells.append(short)
    rivals = [cell for cell in short_cells if cell.method != job_row]
    saved = (len(rivals) - rounds.ROWS_ADVANCED_PER_BATCH) * len({cell.seed for cell in cells}) * spec.train.epochs
    return short_cells if saved >= len(short_cells) * epochs else []


def _list_rows_of_grid(spec: JobSpec, grid: Grid) -> list[tuple[str, int]]:
    """Return (method, batch) of every row.

    For a script, controls are left out if their learning rate equals that of another row without gradient scaling.
    """
    rows = grid.list_rows(spec.train.reference_batch)
    if spec.script is None or "lr" not in spec.workload.settings:
        return rows

    def compute_batch_and_lr(method: str, batch: int) -> tuple[int, str]:
        return batch, f"{compute_script_learning_rate(make_job_of_cell(spec, method), batch):.9g}"

    plain = {
        compute_batch_and_lr(method, batch)
        for method, batch in rows
        if method not in CONTROLS and not _scales_gradients(method)
    }
    return [row for row in rows if row[0] not in CONTROLS or compute_batch_and_lr(*row) not in plain]


def _scales_gradients(method: str) -> bool:
    return parse_row(method).training_method.scales_gradients


def plan_cell(run: Run, cell: Cell, inspect: Inspect) -> TrainPlan:
    job = make_job_of_cell(run.spec, cell.method, cell.seed)
    try:
        job = job if cell.short is None else rounds.shorten_job_to_epochs(job, cell.short[0])
        return train.plan_training(run.with_spec(job), nodes=cell.nodes, batch=cell.batch, inspect=inspect)
    except SpecError as error:
        description = "the reference" if cell.reference else f"method {cell.method}"
        raise SpecError(f"{description}: {error.message}", error.hint, problems=error.problems) from None


def compute_mean_hours_by_row(run: RunDir | Snapshot, comparison: Comparison) -> dict[tuple[str, int], float]:
    """Return the mean hours of the full trainings of each row; scaled from its short trainings if there are none."""
    by_length: dict[bool, dict[tuple[str, int], list[float]]] = {True: {}, False: {}}
    for cell in comparison.cells:
        if summary := run.get_training(cell.signature).read_summary():
            row = by_length[cell.short is None].setdefault((cell.method, cell.batch), [])
            row.append(summary.actual_hours / cell.epoch_share)
    return {row: statistics.fmean(hours) for row, hours in {**by_length[False], **by_length[True]}.items()}


def estimate_hours(
    row: tuple[str, int], mean_hours_by_row: Mapping[tuple[str, int], float], predicted: Mapping[tuple[str, int], float]
) -> float | None:
    """Return the expected hours of a training of `row`, or None if nothing is known.

    The estimate is the mean of the row's trainings, else the prediction, else the mean of the rows at the same batch,
    else the mean of all rows.
    """
    if hours_of_row := mean_hours_by_row.get(row) or predicted.get(row):
        return hours_of_row
    hours_at_batch = [hours for (_, batch), hours in mean_hours_by_row.items() if batch == row[1]]
    known_hours = hours_at_batch or list(mean_hours_by_row.values())
    return statistics.fmean(known_hours) if known_hours else None


def choose_default_nodes(run: Run) -> int:
    """Return the recommended number of nodes, or the smallest one of the search if there is no recommendation."""
    recommendation = run.read_recommendation()
    return recommendation.choice.nodes if recommendation is not None else min(run.spec.search.nodes)


@dataclass(frozen=True)
class DefaultRows:
    """The default rows of a comparison: those that are compatible with the job, including its current method."""

    method: str
    methods: tuple[str, ...]
    refused: Mapping[str, str]  # reason by method that is not compatible with the job
    others: tuple[str, ...]  # compatible methods that are not default rows

    @property
    def description(self) -> str:
        """Text that lists the rows and the reasons why others are left out."""
        why = "".join(f"; without {method}, which {reason}" for method, reason in self.refused.items())
        return (
            f"compares the methods that fit this job: {', '.join(self.methods)} ({self.method} is the method of the job){why}."
            f" To choose others, use --methods; available: {', '.join(self.others)}"
        )


def list_default_rows(spec: JobSpec, *, nodes: int) -> DefaultRows:
    """Return the rows of a comparison if none are given; a row that trains the same as the job's method is left out.

    For scripts on one GPU, rows that scale gradients are left out unless the job's method scales, since wrapping the
    optimizer scales nothing there.
    """
    job_row = make_row_of_job(spec)
    job_of_row = make_job_of_cell(spec, job_row).model_dump()
    rows: list[str] = []
    refused: dict[str, str] = {}
    for method in _list_candidate_rows(spec, nodes):
        if method == job_row:
            rows.append(method)
        elif why := _describe_why_not_default_row(spec, method):
            refused[method] = why
        elif make_job_of_cell(spec, method).model_dump() != job_of_row:
            rows.append(method)
    if job_row not in rows:
        rows.append(job_row)
    others = (
        name
        for name in METHODS
        if name not in (*rows, spec.train.method) and not _describe_why_not_default_row(spec, name)
    )
    return DefaultRows(job_row, tuple(rows), refused, tuple(others))


def _list_candidate_rows(spec: JobSpec, nodes: int) -> tuple[str, ...]:
    name = spec.workload.optimizer_name
    if name is None:
        scales = nodes * spec.cluster.gpus_per_node > 1 or spec.effective_ags is not None
        return tuple(method for method in METHODS_OF_SCRIPTS if scales or not _scales_gradients(method))
    return ROWS_OF_SGD if name == "SGD" else ROWS_OF_ADAM if name in NORMALISING_OPTIMIZERS else ROWS_OF_OTHERS


def _describe_why_not_default_row(spec: JobSpec, method: str) -> str:
    try:
        cell_job = make_job_of_cell(spec, method)
    except SpecError as error:
        return "; ".join(problem.message for problem in error.problems) or error.message
    warmup = cell_job.workload.warmup_epochs
    never = f"would not finish its {warmup:g} epochs of warm-up, because train.epochs is {spec.train.epochs}"
    return describe_method_conflict(cell_job) or (never if warmup >= spec.train.epochs else "")


def choose_default_control(spec: JobSpec, batches: Sequence[int]) -> tuple[str, ...]:
    """Return the control that is added to the default rows."""
    return CONTROLS[1:] if max(batches) >= 8 * spec.train.reference_batch else CONTROLS[:1]


def read_recommended_batch(run: RunDir) -> int:
    """Return the recommended batch.

    Raises:
        BadMeasurements: the run has no recommendation.
    """
    recommendation = run.read_recommendation()
    if recommendation is None:
        raise BadMeasurements(
            f"{run.id} has no recommendation, and [[--batch]] is not given",
            "give the large batch, for example tula compare job.yaml --batch 1024",
        )
    return recommendation.choice.batch
