"""How wide intervals have to be, by what was predicted of the trainings under a root and what they came to.

`tula recommend` asks it of all runs, so no more is read than that, as plain JSON.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tula_cli.errors import TulaError
from tula_cli.models.time.calibration import Tried, calibration
from tula_cli.run import files, parsed_spec
from tula_cli.run.records.recommendations import Calibration
from tula_cli.services.progress.listing import read_plain_record
from tula_cli.spec.methods import METHODS

Plain = Mapping[str, Any]


def calibrated(run: Path, kind: str) -> tuple[Calibration, tuple[str, ...]]:
    """Return how wide intervals have to be by the trainings that ended beside a run, and what cannot be read of them.

    Args:
        run: a run directory, or that of a node type in one: what lies under the same root counts.
        kind: of cluster, which trainings have to share.
    """
    return calibrated_under(run.parents[2] if run.parent.name == "types" else run.parent, kind)


def calibrated_under(root: Path, kind: str) -> tuple[Calibration, tuple[str, ...]]:
    """Return how wide intervals have to be by the trainings that ended under a root, and what cannot be read of them."""
    problems = list[str]()
    steps: list[Tried] = []
    hours: list[Tried] = []
    try:
        runs = parsed_spec.list_run_folders(root)
    except TulaError as error:
        return Calibration(), (f"intervals are not calibrated: {error.message}",)
    for one in runs:
        try:
            for summary, first, newest in _ended(one, kind):
                steps += _tried_step(one, summary, newest)
                hours += _tried_hours(one, summary, first)
        except TulaError as error:
            problems.append(f"intervals are calibrated without {one.name}: {error.message}")
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):  # records are read as plain JSON
            problems.append(f"intervals are calibrated without {one.name}: one of its records is damaged")
    return calibration(steps, hours), tuple(problems)


def _ended(run: Path, kind: str) -> Iterator[tuple[Plain, Plain, Plain]]:
    """Yield the summary, the first and the newest task of each training that has ended and was predicted as what it is."""
    types = [run / "types" / name for name in files.list_names(run / "types")]
    trained = [(part, name) for part in (run, *types) for name in files.list_names(part / "train")]
    measured = read_plain_record(run / "spec.json", "spec") if trained else None
    for part, name in trained:
        summary = read_plain_record(part / "train" / name / "summary.json", "signature", "causes", "attempts")
        if summary is None or summary.get("predicted_step") is None:
            continue
        first, newest = (load_task(part, name, number) for number in (1, len(summary["causes"]) + 1))
        if first is not None and newest is not None and _as_measured(first["spec"], measured, kind):
            yield summary, first, newest


def load_task(part: Path, name: str, number: int) -> Plain | None:
    """Return the task of an attempt of a training, as plain JSON; None where it is not there."""
    return read_plain_record(part / f"tasks/train-{name}-{number}.json", "spec", "ladder")


def _as_measured(trained: Plain, measured: Plain | None, kind: str) -> bool:
    """Return whether a training's own method was measured: `tula compare` trains others, which probes say little of."""
    method = trained["train"]["method"]
    facts = METHODS.get(method)
    if facts is None or facts.tunes or facts.measured_as or trained["cluster"]["kind"] != kind:
        return False
    return measured is None or measured["spec"]["train"]["method"] == method


def _tried_step(run: Path, summary: Plain, task: Plain) -> Iterator[Tried]:
    found = prediction_in_task(task)
    if found is not None and summary.get("actual_step"):
        yield from _tried(run, found, ("step_time", "step_low", "step_high", "step_widened"), summary["actual_step"])


def prediction_in_task(task: Plain) -> Plain | None:
    """Return what was predicted of the steps of an attempt, its micro-batches as they are cut; None where nothing was."""
    rung, cut = task["ladder"][0], task.get("splits", 1)
    prediction: Plain | None = rung.get("prediction") if cut == 1 else rung.get("cut", {}).get(str(cut))
    return prediction


def _tried_hours(run: Path, summary: Plain, task: Plain) -> Iterator[Tried]:
    """Yield the whole time where one attempt took it; of one that `train.until` ended, as if it had gone on."""
    found, predicted = task["ladder"][0].get("prediction"), summary.get("predicted_hours")
    if found and predicted and summary["attempts"] == 1 and found.get("market", "on_demand") == "on_demand":
        whole = summary["actual_hours"] * found["hours"] / predicted
        yield from _tried(run, found, ("hours", "hours_low", "hours_high", "hours_widened"), whole)


def _tried(run: Path, prediction: Plain, names: Sequence[str], actual: float) -> Iterator[Tried]:
    predicted, low, high = (prediction.get(name) for name in names[:3])
    if predicted and low and high and low < predicted < high and actual > 0:
        alike = run.name, prediction["nodes"], prediction["batch"], predicted
        yield Tried(alike, predicted, low, high, actual, prediction.get(names[3], 1.0))
