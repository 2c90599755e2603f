"""`tula list --accuracy`: what was predicted of each training under a root, and what it came to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tula_cli.errors import TulaError
from tula_cli.run import files, parsed_spec
from tula_cli.services.progress.listing import plain_record, run_folders


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


@dataclass(frozen=True)
class Ledger:
    """Predicted against actual over all trainings; medians of the errors without their signs."""

    outcomes: tuple[Outcome, ...]
    step_error: float | None  # None where no training had a prediction
    time_error: float | None
    problems: tuple[str, ...] = ()  # what cannot be read


def ledger(root: Path) -> Ledger:
    """Return what was predicted of the trainings under `root` and what they came to, by run.

    Raises:
        TulaError: `root` cannot be read.
    """
    found: list[Outcome] = []
    problems: list[str] = []
    for run in parsed_spec.runs(root):
        try:
            found += _of_run(run)
        except TulaError as error:
            problems.append(f"{run.name} cannot be read: {error.message}")
    return Ledger(
        tuple(found),
        _middle([outcome.step_error for outcome in found]),
        _middle([outcome.time_error for outcome in found]),
        tuple(problems),
    )


def _of_run(run: Path) -> list[Outcome]:
    paths = [
        part / "train" / name / "summary.json" for part in run_folders(run) for name in files.names(part / "train")
    ]
    needed = ("signature", "nodes", "batch", "actual_hours")
    return [_outcome(run.name, summary) for path in paths if (summary := plain_record(path, *needed))]


def _outcome(run: str, summary: Mapping[str, Any]) -> Outcome:
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
    )


def _error(predicted: float | None, actual: float | None) -> float | None:
    return None if predicted is None or not actual else predicted / actual - 1


def _middle(errors: Sequence[float | None]) -> float | None:
    known = [abs(error) for error in errors if error is not None]
    return median(known) if known else None
