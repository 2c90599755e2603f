"""`tula list --accuracy`: what was predicted of each training under a root, and what it came to."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tula_cli.errors import TulaError
from tula_cli.run import files, parsed_spec
from tula_cli.run.records.recommendations import Calibration
from tula_cli.services.progress.held_against import calibrated_under, load_task, prediction_in_task
from tula_cli.services.progress.listing import read_plain_record, run_folders

BASES = ("training", "probe", "fit")
"""What a predicted step time may have been known by."""


@dataclass(frozen=True)
class Outcome:
    """One finished training. Errors are shares of the actual value: 0.1 where it was predicted to take a tenth longer."""

    run: str
    signature: str
    nodes: int
    batch: int
    predicted_step: float | None  # seconds
    actual_step: float | None
    predicted_hours: float | None
    actual_hours: float
    step_error: float | None
    time_error: float | None
    by: str = ""  # what the step time was known by: "training" (an earlier one of this configuration), "probe" or "fit"
    inside: bool | None = None  # whether the step time was inside its 90 % interval; None where it had none


@dataclass(frozen=True)
class Ledger:
    """Predicted against actual over all trainings; medians of the errors without their signs."""

    outcomes: tuple[Outcome, ...]
    step_error: float | None  # None where no training had a prediction
    time_error: float | None
    problems: tuple[str, ...] = ()  # what cannot be read
    step_errors: Mapping[str, float] = field(default_factory=dict)  # of the step time, by what it was known by
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)  # of the next intervals, by kind of cluster


def ledger(root: Path) -> Ledger:
    """Return what was predicted of the trainings under `root` and what they came to, by run.

    Raises:
        TulaError: `root` cannot be read.
    """
    found: list[Outcome] = []
    problems: list[str] = []
    kinds: set[str] = set()
    for run in parsed_spec.list_run_folders(root):
        try:
            for outcome, kind in _of_run(run):
                found.append(outcome)
                kinds |= {kind} - {""}
        except TulaError as error:
            problems.append(f"{run.name} cannot be read: {error.message}")
    return Ledger(
        tuple(found),
        _middle([outcome.step_error for outcome in found]),
        _middle([outcome.time_error for outcome in found]),
        tuple(problems),
        {
            by: middle
            for by in BASES
            if (middle := _middle([one.step_error for one in found if one.by == by])) is not None
        },
        {kind: calibrated_under(root, kind)[0] for kind in sorted(kinds)},
    )


def _of_run(run: Path) -> Iterator[tuple[Outcome, str]]:
    """Yield what became of the trainings of a run, with the kind of cluster (empty where that is not known any more)."""
    needed = ("signature", "nodes", "batch", "actual_hours")
    for part in run_folders(run):
        for name in files.list_names(part / "train"):
            summary = read_plain_record(part / "train" / name / "summary.json", *needed)
            if summary is not None:
                task = load_task(part, name, len(summary.get("causes", ())) + 1)
                yield _outcome(run.name, summary, task), "" if task is None else task["spec"]["cluster"]["kind"]


def _known_by(prediction: Mapping[str, Any] | None) -> str:
    if prediction is None:
        return ""
    return "training" if prediction.get("trained") else "probe" if prediction.get("measured") else "fit"


def _inside(prediction: Mapping[str, Any] | None, actual: float | None) -> bool | None:
    low, high = (prediction.get(name) if prediction else None for name in ("step_low", "step_high"))
    return None if low is None or high is None or not actual else bool(low <= actual <= high)


def _outcome(run: str, summary: Mapping[str, Any], task: Mapping[str, Any] | None) -> Outcome:
    prediction = None if task is None or summary.get("predicted_step") is None else prediction_in_task(task)
    predicted, actual, hours = (summary.get(key) for key in ("predicted_step", "actual_step", "predicted_hours"))
    return Outcome(
        run=run,
        signature=summary["signature"],
        nodes=summary["nodes"],
        batch=summary["batch"],
        predicted_step=predicted,
        actual_step=actual,
        predicted_hours=hours,
        actual_hours=summary["actual_hours"],
        step_error=_error(predicted, actual),
        time_error=_error(hours, summary["actual_hours"]),
        by=_known_by(prediction),
        inside=_inside(prediction, actual),
    )


def _error(predicted: float | None, actual: float | None) -> float | None:
    return None if predicted is None or not actual else predicted / actual - 1


def _middle(errors: Sequence[float | None]) -> float | None:
    known = [abs(error) for error in errors if error is not None]
    return median(known) if known else None
