"""The rounds of a comparison (successive halving): short trainings of all rows, then the best of them in full.

No decision is stored: each follows from the trainings that have ended, so an interrupted comparison resumes where it
was. At each large batch:

1. every row but lbt is trained for a quarter of the epochs, with a schedule of that length and the first seed;
2. the best two, lbt and the job's row are trained in full.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tula_cli.cluster.scripts.metrics import is_lower_better
from tula_cli.models.self_tuning import sort_branches
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import Cell, Comparison
from tula_cli.run.snapshot import Snapshot
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job
from tula_cli.words import format_number

SHORT_EPOCH_DIVISOR = 4
"""Epochs of the job per epoch of a short training."""
ROWS_ADVANCED_PER_BATCH = 2
"""Number of rows per batch that advance from the first to the second round, in addition to those that always do."""
EPOCH_KEYS = ("epochs", "branch_epochs", "warmup_epochs", "milestones", "patience")
"""Keys of a job that count epochs and are scaled with the length of the training."""


def compute_short_epochs(spec: JobSpec) -> int:
    """Return the epochs of a short training; those of the job if it cannot be shorter."""
    epochs = spec.workload.short_epochs
    return spec.train.epochs if epochs is None else math.ceil(epochs / SHORT_EPOCH_DIVISOR)


def shorten_job_to_epochs(spec: JobSpec, epochs: int) -> JobSpec:
    """Return a job with `epochs` epochs, and all settings counted in epochs shortened in proportion.

    Raises:
        SpecError: the settings are not valid for so few epochs.
    """
    content = spec.model_dump(mode="json", exclude_unset=True)
    if spec.script is not None:
        content["script"]["length"]["epochs"] = epochs
    else:
        share = epochs / spec.train.epochs
        content |= {
            name: _scale_epoch_counts(content[name], share) for name in ("schedule", "train", "auto") if name in content
        }
        content["train"]["epochs"] = epochs
    return validate_job(content, source=f"the job with {epochs} of its {spec.train.epochs} epochs")


def _scale_epoch_counts(value: Any, share: float, counts: bool = False) -> Any:
    """Multiply the values that count epochs by `share`; integers are rounded up."""
    if isinstance(value, dict):
        return {k: _scale_epoch_counts(v, share, k in EPOCH_KEYS) for k, v in value.items()}
    if isinstance(value, list):
        return [_scale_epoch_counts(entry, share, counts) for entry in value]
    if not counts or not isinstance(value, int | float):
        return value
    return math.ceil(share * value) if isinstance(value, int) else share * value


@dataclass(frozen=True)
class TrainingOutcome:
    """The result of a training that has ended. A lower `loss` is better, whatever the metric; None if it diverged."""

    cell: Cell
    loss: float | None
    metric: str = ""
    eval_loss: float = 0.0  # tie-breaker, lower is better: accuracies are often equal early in training

    @property
    def diverged(self) -> bool:
        return self.loss is None

    def describe_gap(self, best: "TrainingOutcome") -> str:
        if self.loss is None or best.loss is None:
            return f"no {self.metric} to compare" if self.metric else "diverged"
        if self.loss == best.loss:
            return f"{self.metric} equals that of {best.cell.method}, but the loss is higher"
        return f"{self.metric} is {format_number(self.loss - best.loss)} worse than that of {best.cell.method}"


def read_outcome(run: RunDir | Snapshot, cell: Cell, spec: JobSpec) -> TrainingOutcome | None:
    """Return the result of a training; None if it has not ended."""
    training = run.get_training(cell.signature)
    summary = training.read_summary()
    if summary is None:
        return None if training.find_diverged_attempt() is None else TrainingOutcome(cell, None)
    script_metric = next(iter(spec.workload.reported_metrics), "")
    metric = script_metric or ("top1" if "top1" in summary.metrics else "loss")
    value = summary.metrics.get("eval_loss" if metric == "loss" and not script_metric else metric)
    if value is None or (not script_metric and "eval_loss" not in summary.metrics):  # a missing value was not finite
        return TrainingOutcome(cell, None, script_metric)
    loss = value if is_lower_better(metric) else -value
    return TrainingOutcome(cell, loss, metric, summary.metrics.get("eval_loss", 0.0))


@dataclass(frozen=True)
class ComparisonState:
    """The trainings of a comparison, as far as the results so far determine them."""

    wanted: tuple[Cell, ...]  # trained whatever the other results, including those already trained; most useful first
    undecided: tuple[Cell, ...] = ()  # upper bound of the trainings that may follow, of the slowest rows
    reasons: Mapping[tuple[str, int], str] = field(default_factory=dict)  # why a row (method, batch) was dropped

    @property
    def max_trainings(self) -> int:
        return len(self.wanted) + len(self.undecided)


def compute_comparison_state(
    run: RunDir | Snapshot,
    comparison: Comparison,
    spec: JobSpec,
    *,
    failed: Collection[str] = (),
    hours: Mapping[tuple[str, int], float | None],
) -> ComparisonState:
    """Return the trainings to run, those that may follow, and the reasons why rows are dropped.

    Args:
        failed: signatures of trainings that have failed and are not waited for.
        hours: expected hours of each row; None if unknown.
    """
    batches = {cell.batch for cell in comparison.cells if cell.short}
    if not batches:
        return ComparisonState(comparison.cells)
    outcomes = {
        cell.signature: outcome for cell in comparison.cells if (outcome := read_outcome(run, cell, spec)) is not None
    }
    states = [
        _decide_trainings_at_batch(comparison, batch, outcomes, {*outcomes, *failed}, hours)
        for batch in sorted(batches)
    ]
    wanted = {cell.signature for state in states for cell in state.wanted} | set(outcomes)
    wanted |= {cell.signature for cell in comparison.cells if cell.reference or cell.batch not in batches}
    missing = {(cell.method, cell.batch) for cell in comparison.cells if cell.signature not in wanted}
    return ComparisonState(
        tuple(cell for cell in comparison.cells if cell.signature in wanted),
        tuple(cell for state in states for cell in state.undecided if cell.signature not in wanted),
        {row: why for state in states for row, why in state.reasons.items() if row in missing},
    )


def _decide_trainings_at_batch(
    comparison: Comparison,
    batch: int,
    outcomes_by_signature: Mapping[str, TrainingOutcome],
    ended_signatures: Collection[str],
    hours: Mapping[tuple[str, int], float | None],
) -> ComparisonState:
    """Return the trainings of one batch that are to run, that may follow, and the rows that are dropped."""

    def list_cells(methods: Iterable[str]) -> list[Cell]:
        return [cell for method in methods for cell in full[method]]

    cells = [cell for cell in comparison.cells if cell.batch == batch and not cell.reference]
    short = [cell for cell in cells if cell.short]
    full = {cell.method: [c for c in cells if c.method == cell.method and not c.short] for cell in cells}
    rivals = [cell.method for cell in short if cell.method != comparison.job_row]
    rows_trained_in_full = [method for method in full if method not in rivals]
    if any(cell.signature not in ended_signatures for cell in short):
        slowest_rivals = sorted(rivals, key=lambda method: hours.get((method, batch)) or 0.0, reverse=True)
        return ComparisonState(
            (*short, *list_cells(rows_trained_in_full)), tuple(list_cells(slowest_rivals[:ROWS_ADVANCED_PER_BATCH]))
        )

    results = [outcomes_by_signature[cell.signature] for cell in short if cell.signature in outcomes_by_signature]
    results = sort_branches(sorted(results, key=lambda result: result.eval_loss))  # sorting is stable
    best = [result.cell.method for result in results if not result.diverged][:ROWS_ADVANCED_PER_BATCH]
    reasons = {}
    for position, result in enumerate(results, 1):
        if result.cell.method in rivals and result.cell.method not in best:
            why = f"place {position} of {len(results)}, {result.describe_gap(results[0])}"
            reasons[result.cell.method, batch] = f"dropped in round 1: {why}"
    return ComparisonState((*short, *list_cells(dict.fromkeys([*rows_trained_in_full, *best]))), (), reasons)
