"""Damaged files of a run and their consequences, for the warnings of every command that reads them."""

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements
from tula_cli.run import messages
from tula_cli.run.checkpoint_integrity import describe_checkpoint_problem
from tula_cli.run.files import read_link_target
from tula_cli.run.training_run import TrainingRun
from tula_cli.words import format_number_ranges

_MAX_RANGES = 5
_CONSEQUENCE_BY_RECORD = {
    "spec.yaml": "the job is read from spec.json",
    "job_file.json": "changes of the job file are not noticed",
    "variant.json": "the runs on other hardware of the same job are not found",
    "results/*": "this configuration counts as not measured",
    "recommendation.json": "no recommendation is shown until tula recommend has run again",
    "comparison.json": "the request of tula compare is unknown and its table is not shown",
    "tasks/*": "its job is not shown",
    "attempts/*": "this attempt and its exit reason are not shown",
    "failures/*": "this error of a rank is not shown",
    "script/*": "this resume test of the script is not shown",
    "train/*/result.json": "the training counts as not finished",
    "train/*/summary.json": "its predicted and actual values are not compared",
    "train/*/tuning.json": "the settings that this training tried, and the one that it chose, are unknown",
    "train/*/energy.json": "the measured energy is not shown",
    "train/*/evaluations/*": "this result of tula evaluate is not shown",
    "train/*/saves.json": "the progress that the script has saved and lost is unknown",
    "train/*/script.json": "the newest checkpoint of the script is unknown",
    "train/*/micro_batches.json": "the limit for splitting micro-batches after an out-of-memory error is unknown",
}
"""Consequence of a damaged record for the reader, by its path in the run."""
_LOST_WEIGHTS = {
    "best": "the best weights cannot be evaluated or used",
    "last": "the newest weights cannot be used; a restart resumes from an older checkpoint or from the beginning",
}


def warn_damaged_record(run: Path, path: Path, error: BadMeasurements) -> Diagnostic:
    """Return a warning about a damaged record, with its consequence and what to do."""
    name = path.relative_to(run).as_posix()
    consequence = next(
        (text for pattern, text in _CONSEQUENCE_BY_RECORD.items() if fnmatchcase(name, pattern)), "it is skipped"
    )
    return messages.damaged_record(problem=error.message, consequence=consequence, advice=error.hint)


def list_curve_warnings(training: TrainingRun) -> Iterator[Diagnostic]:
    """Yield warnings about damaged rows and damaged weights of a training."""
    for path, lines, consequence in (
        (training.metrics_path, training.find_damaged_metrics_lines(), "predictions, charts and exports do not include"),
        (training.steps_path, training.find_damaged_step_lines(), "charts and exports of every step do not include"),
    ):  # fmt: skip
        if lines:
            yield messages.damaged_lines(
                path=str(path), lines=_describe_line_ranges(lines), count=len(lines), consequence=consequence
            )
    yield from _warn_lost_weights(training)


def _describe_line_ranges(numbers: Sequence[int]) -> str:
    """Format ascending line numbers in words: `lines 5-7, 12`."""
    ranges = format_number_ranges(numbers).split(", ")[:_MAX_RANGES]
    last_shown = int(ranges[-1].rpartition("-")[2])
    hidden_lines = sum(number > last_shown for number in numbers)
    name = "line" if len(numbers) == 1 else "lines"
    return f"{name} {', '.join(ranges)}{f' and {hidden_lines} more' if hidden_lines else ''}"


def _warn_lost_weights(training: TrainingRun) -> Iterator[Diagnostic]:
    links = {name: training.path / name for name in _LOST_WEIGHTS}
    damage: dict[str, list[str]] = {}
    for name, link in links.items():
        for _ in range(2):  # a rank may have redirected the link meanwhile, and removed its old target
            target = read_link_target(link)
            why = _describe_link_problem(link, target) if os.path.lexists(link) else ""
            if not why or target == read_link_target(link):
                break
        if why:
            damage.setdefault(why, []).append(_LOST_WEIGHTS[name])
    for why, lost in damage.items():
        yield messages.damaged_weights(problem=why, consequence=" and ".join(lost))


def _describe_link_problem(link: Path, target: Path) -> str:
    if target != link and not os.path.lexists(target):
        return f"{link} is damaged: it points to {link.readlink()}, which is missing"
    why = describe_checkpoint_problem(target)
    return f"{target} is damaged: {why}" if why else ""
