"""`tula compare`: methods, batches and seeds of one job beside each other, as Table I of the paper.

Each cell of the grid is an ordinary training of the run, with the job's method, seed and batch replaced: it resumes, goes
on after an out-of-memory and is attached to as `tula train` does, and is never trained twice.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tula_cli.cluster.scripts.values import learning_rate
from tula_cli.cluster.slurm import first_job
from tula_cli.errors import BadMeasurements, Problem, SpecError, require_positive
from tula_cli.models.cost import price_words
from tula_cli.presets import DIVIDING
from tula_cli.run.code import choose
from tula_cli.run.directory import RunDir
from tula_cli.run.imports import import_strings
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.results import Cell, Comparison
from tula_cli.run.snapshot import Snapshot
from tula_cli.services import train
from tula_cli.services.comparison import rounds, scripted
from tula_cli.services.comparison.rounds import Standing
from tula_cli.services.comparison.rows import REFERENCE, VARIANTS, own_row, variant_of
from tula_cli.services.train import TrainPlan
from tula_cli.spec.job import JobSpec, misfit, warmup_epochs
from tula_cli.spec.load import validate
from tula_cli.spec.methods import METHODS
from tula_cli.spec.signature import train_signature

OF_SGD, OF_DIVIDING, OF_OTHERS = ("lbt", "ags", "ramp"), ("lbt", "sqrt", "ramp"), ("lbt", "ramp")
"""Rows that are compared with the job's own method by default, by its optimizer (`presets.DIVIDING`)."""
METHODS_OF_SCRIPTS = ("lbt", "lrs", "sqrt", "ags")
"""The same for a script of the user's own, as far as it takes them."""
CONTROLS = ("lbt-x2", "lbt-x4")
"""A large batch whose learning rate was raised by hand: what a method has to beat to be worth anything. Beside the default rows
there is one: the second from 8 times the reference batch on."""
A_START = 15.0
"""Seconds after which a training that does not run yet is said to wait."""
Inspect = Callable[[JobSpec], Inspection]
State = Literal["done", "diverged", "failed", "cancelled", "lost", "held", "running", "queued", "missing"]
FINISHED: tuple[State, ...] = ("done", "diverged")
ENDED: tuple[State, ...] = ("failed", "cancelled", "lost", "held")


@dataclass(frozen=True)
class Grid:
    """What is compared; `batches` are global."""

    methods: tuple[str, ...]
    batches: tuple[int, ...]
    seeds: int
    nodes: int
    controls: bool | tuple[str, ...] = True  # all, none or these
    halving: bool = False  # all rows in a short training, and the best of them in full (`comparison.rounds`)

    def __post_init__(self) -> None:
        for method in self.methods:
            variant_of(method)
        if not self.batches:
            raise SpecError("batch: none given")
        for batch in self.batches:
            require_positive(batch=batch)
        require_positive(seeds=self.seeds, nodes=self.nodes)

    def rows(self, reference: int) -> list[tuple[str, int]]:
        """Return (method, batch) of every row, the reference first; controls only where a batch is large."""
        found = [(REFERENCE, reference)]
        for batch in self.batches:
            found += [(method, batch) for method in self.methods]
            if batch > reference:
                controls = CONTROLS if self.controls is True else self.controls or ()
                found += [(method, batch) for method in controls]
        return list(dict.fromkeys(found))


def cell_spec(spec: JobSpec, method: str, seed: int) -> JobSpec:
    """Return the job of one cell.

    Args:
        spec: the job.
        method: of train.method, a variant, or one of your own; with settings, if any (`comparison.rows`).
        seed: of the cell.

    Raises:
        SpecError: the job's other settings do not go with the method.
    """
    variant = variant_of(method)
    content = spec.model_dump(mode="json", exclude_unset=True)
    own = dict(content.get("train", {}))
    if variant.method != spec.train.method or variant.method == REFERENCE:
        own.pop("lr_scaling", None)  # it was chosen for the job's own method: others scale as they do, lbt does not
    if not variant.facts.ramps:
        own.pop("ramp", None)  # what a row is held against is trained at one batch
        own.pop("ramp_noise", None)
    content["train"] = {**own, "method": variant.method, "seed": seed, **variant.train}
    if spec.script is not None and not variant.facts.reads_ags:
        content.pop("ags", None)  # a script is not told what means nothing to it
    if spec.script is None:
        content["optimizer"] = {**content["optimizer"], "lr": spec.optimizer.lr * variant.lr, **variant.optimizer}
        names_kind = any(setting.startswith("schedule.kind=") for setting in variant.settings)
        if not variant.facts.constant_schedule and not names_kind:  # the same for all rows, not each method's default
            content["schedule"] = spec.schedule.model_dump(mode="json")
        if variant.schedule:
            content["schedule"] = {**content.get("schedule", {}), **variant.schedule}
    elif own_settings := (*variant.optimizer, *variant.schedule):
        raise SpecError(f"{method} sets {', '.join(own_settings)} of the optimizer, which a script has for itself")
    elif variant.lr != 1.0:
        content["script"] = scripted.with_lr(content["script"], spec.script, factor=variant.lr)
    if variant.preset:
        kept = spec.ags.model_dump(include={"consensus", "apply_to", "parameters", "exclude"})
        content["ags"] = {"preset": variant.preset, **kept}
    return validate(variant.content(content), source=f"the job with method {method}")


# --- what there is to do


@dataclass(frozen=True)
class ComparePlan:
    """A comparison before anything is submitted."""

    comparison: Comparison
    spec: JobSpec  # the job that the cells change
    standing: Standing
    missing: tuple[Cell, ...]  # of what is wanted, in the order of their worth
    hours: Mapping[tuple[str, int], float | None]  # expected for one training of each row; None where nothing tells
    currency: str
    price: str
    first: TrainPlan | None  # what is trained first, None where nothing is missing
    warnings: tuple[str, ...] = ()

    @property
    def hours_left(self) -> float | None:
        """Hours of all that is missing, one after the other, at most; None where nothing tells."""
        return total_hours((*self.missing, *self.standing.undecided), self.hours)


def total_hours(cells: Iterable[Cell], hours: Mapping[tuple[str, int], float | None]) -> float | None:
    """Return the expected hours of some cells; rows of which nothing is known count as the mean of those that are."""
    expected = [(hours.get((cell.method, cell.batch)), cell.share) for cell in cells]
    known = [value for value in hours.values() if value is not None]
    if not expected or not known:
        return None if expected else 0.0
    return sum(share * (statistics.fmean(known) if value is None else value) for value, share in expected)


def plan(run: RunDir, spec: JobSpec, grid: Grid, *, inspect: Inspect, now: float) -> ComparePlan:
    """Decide what is trained, in which order: every row's first seed before any second one.

    Args:
        run: the run, which may not be there yet.
        spec: the job.
        grid: what is compared.
        inspect: tells the dataset's size where no probe has.
        now: Unix time.

    Raises:
        SpecError: a batch cannot be trained on that many nodes, is larger than the dataset, methods do not go with the
            job's settings, or its script tells no metric or takes no seed.
    """
    if spec.script is not None:
        scripted.require_comparable(spec.script, seeds=grid.seeds)
    _refuse_misfits(spec, grid)
    _look_at_own_code(run, spec, grid, inspect)
    inspect = functools.partial(once, inspect, {})
    comparison, twins = _comparison(run, spec, grid, now=now)
    plans = {}
    for cell in comparison.cells:  # another seed changes neither time nor what is allowed
        if (cell.method, cell.batch) not in plans and not cell.short and not has_ended(run, cell):
            plans[cell.method, cell.batch] = cell_plan(run, spec, cell, inspect)
    took = durations(run, comparison)
    predicted = {row: p.prediction.hours for row, p in plans.items() if p.prediction is not None}
    rows = {(cell.method, cell.batch) for cell in comparison.cells}
    hours = {row: expected_hours(row, took, predicted) for row in rows}
    standing = rounds.decide_standing(run, comparison, spec, hours=hours)
    missing = tuple(cell for cell in standing.wanted if not has_ended(run, cell))
    return ComparePlan(
        comparison=comparison,
        spec=spec,
        standing=standing,
        missing=missing,
        hours=hours,
        currency=spec.pricing.currency,
        price=price_words(spec.pricing),
        first=cell_plan(run, spec, missing[0], inspect) if missing else None,
        warnings=(
            *dict.fromkeys(text for p in plans.values() for text in p.code.warnings),
            *(
                f"{row} is the same training as {other}: it is trained once, as that row"
                for row, other in twins.items()
            ),
            *_doing_little(spec, grid),
        ),
    )


def has_ended(run: RunDir, cell: Cell) -> bool:
    """Return whether a training has nothing left to do; one that has diverged would do so again."""
    return run.training(cell.signature).summary() is not None or run.training(cell.signature).diverged() is not None


def _refuse_misfits(spec: JobSpec, grid: Grid) -> None:
    """Refuse methods that do not go with the job's optimizer, all at once: in the queue each would fail for itself."""
    found = {method: why_not(spec, method) for method in grid.methods}
    problems = tuple(Problem(method, why) for method, why in found.items() if why)
    if problems:
        fitting = ",".join(method for method, why in found.items() if not why) or "lbt"
        raise SpecError("methods: some do not go with the job", f"--methods {fitting}", problems=problems)


def _look_at_own_code(run: RunDir, spec: JobSpec, grid: Grid, inspect: Inspect) -> None:
    """Have built what rows name beside the job's own import strings; nothing else than that tells whether it can be.

    Raises:
        SpecError: it cannot.
    """
    known = set(import_strings(spec))
    if first_job.kept_inspection(run, spec) is not None:
        return  # a job on a node told of the model: this machine cannot build it
    for method in grid.methods:
        own = cell_spec(spec, method, spec.train.seed)
        if set(import_strings(own)) - known:
            try:
                inspect(own)
            except SpecError as error:
                raise SpecError(f"method {method}: {error.message}", error.hint, problems=error.problems) from None


def why_not(spec: JobSpec, method: str) -> str:
    """Return why a method cannot be a row of a job's comparison; empty where it can.

    Args:
        spec: the job.
        method: a row of the table.

    Raises:
        SpecError: settings of tula's own loop do not go with it.
    """
    try:
        return misfit(cell_spec(spec, method, spec.train.seed))
    except SpecError as error:
        if spec.script is None:
            raise
        return "; ".join(problem.message for problem in error.problems) or error.message


def _doing_little(spec: JobSpec, grid: Grid) -> Iterator[str]:
    """Say which methods cannot be judged by this job."""
    facts = [variant_of(method).facts for method in grid.methods if method not in VARIANTS]
    reference = spec.train.reference_batch
    key = "train.reference_batch" if spec.script is None else "script.reference.batch"
    for batch in grid.batches:
        if batch <= reference:
            how = "below" if batch < reference else "not above"
            yield f"batch {batch} is {how} the reference batch, {reference} ({key}): its rows have no gap of a large batch to recover"
    if grid.nodes * spec.cluster.gpus_per_node == 1:
        yield from (own.on_one_gpu for own in facts if own.on_one_gpu)
    if spec.script is not None:  # the warm-up is the script's own
        yield from scripted.left_out(spec.script, controls=CONTROLS)
        return
    for method in grid.methods:
        warmup = warmup_epochs(cell_spec(spec, method, spec.train.seed))
        if warmup >= spec.train.epochs:
            yield f"{method} never leaves its {warmup:g} epochs of warm-up: train.epochs is {spec.train.epochs}"


def once(inspect: Inspect, remembered: dict[str, Inspection], spec: JobSpec) -> Inspection:
    """Inspect the first spec that is asked for: all cells have the same model and dataset."""
    if not remembered:
        remembered["all"] = inspect(spec)
    return remembered["all"]


def _comparison(run: RunDir, spec: JobSpec, grid: Grid, *, now: float) -> tuple[Comparison, dict[str, str]]:
    """Return the comparison, and of rows that are the same training as another, where either has settings, which that is."""
    reference = spec.train.reference_batch
    codes: dict[tuple[str, ...], str] = {}
    found: dict[str, Cell] = {}
    twins: dict[str, str] = {}

    def sign(own: JobSpec, batch: int) -> str:
        if (names := import_strings(own)) not in codes:
            codes[names] = choose(run, own, Path.cwd(), keep=False).identity
        return train_signature(own, nodes=grid.nodes, batch=batch, code=codes[names])

    for number in range(grid.seeds):
        seed = spec.train.seed + number
        for method, batch in _rows(spec, grid):
            signature = sign(cell_spec(spec, method, seed), batch)
            is_reference = (method, batch) == (REFERENCE, reference)
            cell = Cell(
                method=method, batch=batch, seed=seed, nodes=grid.nodes, signature=signature, reference=is_reference
            )
            # Two rows that are one and the same training (a variant that the job's own settings make) are one row.
            other = found.setdefault(signature, cell).method
            if other != method and (variant_of(method).settings or variant_of(other).settings):
                twins[method] = other
    as_it_is = (found.get(sign(cell_spec(spec, own_row(spec), spec.train.seed), batch)) for batch in grid.batches)
    job_row = next((cell.method for cell in as_it_is if cell is not None and not cell.reference), "")
    short: list[Cell] = []
    for batch in grid.batches if grid.halving else ():
        cells = [cell for cell in found.values() if cell.batch == batch and cell.method != REFERENCE]
        short += _make_short_cells(run, spec, cells, job_row, sign)
    asked = {name: value for name, value in dataclasses.asdict(grid).items() if name != "halving"}
    return Comparison(**asked, cells=(*short, *found.values()), created_at=now, job_row=job_row), twins


def _make_short_cells(
    run: RunDir, spec: JobSpec, cells: Sequence[Cell], job_row: str, sign: Callable[[JobSpec, int], str]
) -> list[Cell]:
    """Return the first round of a batch; none if it saves nothing.

    Args:
        run: a row that has full trainings in it, and no short one, is in the second round anyway.
        spec: the job.
        cells: of the batch in full, without lbt.
        job_row: the row that trains the job as it is.
        sign: returns the signature of a training at a batch.
    """
    epochs, made = rounds.get_short_epochs(spec), list[Cell]()
    firsts = [cell for cell in cells if cell.seed == spec.train.seed]
    for cell in firsts if epochs < spec.train.epochs else ():
        try:
            signature = sign(rounds.shorten(cell_spec(spec, cell.method, cell.seed), epochs), cell.batch)
        except SpecError:  # its settings do not fit so few epochs
            continue
        short = cell.model_copy(update={"signature": signature, "short": (epochs, spec.train.epochs)})
        in_full = any(has_ended(run, other) for other in cells if other.method == cell.method)
        if cell.method == job_row or not in_full or has_ended(run, short):
            made.append(short)
    saved = (len(made) - rounds.PLACES) * len({cell.seed for cell in cells}) * spec.train.epochs
    return made if saved > len(made) * epochs else []


def _rows(spec: JobSpec, grid: Grid) -> list[tuple[str, int]]:
    """Return (method, batch) of every row; a script's without the controls that another row is at the same learning rate."""
    rows = grid.rows(spec.train.reference_batch)
    if spec.script is None or not scripted.takes_lr(spec.script):
        return rows

    def lr(method: str, batch: int) -> tuple[int, str]:
        return batch, f"{learning_rate(cell_spec(spec, method, spec.train.seed), batch):.9g}"

    plain = {lr(method, batch) for method, batch in rows if method not in CONTROLS and not _scales(method)}
    return [row for row in rows if row[0] not in CONTROLS or lr(*row) not in plain]


def _scales(method: str) -> bool:
    return variant_of(method).facts.scales


def cell_plan(run: RunDir, spec: JobSpec, cell: Cell, inspect: Inspect) -> TrainPlan:
    job = cell_spec(spec, cell.method, cell.seed)
    try:
        job = job if cell.short is None else rounds.shorten(job, cell.short[0])
        return train.plan(run, job, nodes=cell.nodes, batch=cell.batch, inspect=inspect)
    except SpecError as error:
        what = "the reference" if cell.reference else f"method {cell.method}"
        raise SpecError(f"{what}: {error.message}", error.hint, problems=error.problems) from None


def durations(run: RunDir | Snapshot, comparison: Comparison) -> dict[tuple[str, int], float]:
    """Return the mean hours that a full training of each row took, by short ones where there are no others."""
    by_length: dict[bool, dict[tuple[str, int], list[float]]] = {True: {}, False: {}}
    for cell in comparison.cells:
        if summary := run.training(cell.signature).summary():
            row = by_length[cell.short is None].setdefault((cell.method, cell.batch), [])
            row.append(summary.actual_hours / cell.share)
    return {row: statistics.fmean(hours) for row, hours in {**by_length[False], **by_length[True]}.items()}


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


@dataclass(frozen=True)
class DefaultRows:
    """The default rows of a comparison: those that fit the job, with its own method among them."""

    own: str
    methods: tuple[str, ...]
    refused: Mapping[str, str]  # why a row does not fit
    others: tuple[str, ...]  # methods that would fit too

    @property
    def words(self) -> str:
        """The rows, and which are left out for which reason."""
        why = "".join(f"; without {method}, which {reason}" for method, reason in self.refused.items())
        return (
            f"rows that fit this job: {', '.join(self.methods)} ({self.own} is the job's own){why}; --methods names others, of"
            f" {', '.join(self.others)}"
        )


def default_rows(spec: JobSpec, *, nodes: int) -> DefaultRows:
    """Return the rows of a comparison for which none are named; of rows that train alike, the job's own.

    Around a script's optimizer nothing is scaled on one GPU, unless its loop helps: then the job says so.
    """
    own = own_row(spec)
    if spec.script is not None:
        scales = nodes * spec.cluster.gpus_per_node > 1 or spec.train.facts.scales
        wanted = tuple(method for method in METHODS_OF_SCRIPTS if scales or not _scales(method))
    else:
        name = spec.optimizer.name
        wanted = OF_SGD if name == "SGD" else OF_DIVIDING if name in DIVIDING else OF_OTHERS
    refused = {method: why for method in wanted if method != own and (why := _why_no_default(spec, method))}
    trained = cell_spec(spec, own, spec.train.seed).model_dump()
    rows = dict.fromkeys(
        method
        for method in (*wanted, own)
        if method in (own, *refused) or cell_spec(spec, method, spec.train.seed).model_dump() != trained
    )
    others = (name for name in METHODS if name not in (*rows, spec.train.method) and not _why_no_default(spec, name))
    return DefaultRows(own, tuple(method for method in rows if method not in refused), refused, tuple(others))


def _why_no_default(spec: JobSpec, method: str) -> str:
    try:
        made = cell_spec(spec, method, spec.train.seed)
    except SpecError as error:
        return "; ".join(problem.message for problem in error.problems) or error.message
    warmup = 0.0 if spec.script is not None else warmup_epochs(made)
    never = f"never leaves its {warmup:g} epochs of warm-up: train.epochs is {spec.train.epochs}"
    return misfit(made) or (never if warmup >= spec.train.epochs else "")


def default_control(spec: JobSpec, batches: Sequence[int]) -> tuple[str, ...]:
    """Return the control beside the default rows."""
    return CONTROLS[1:] if max(batches) >= 8 * spec.train.reference_batch else CONTROLS[:1]


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
