"""Damaged files of a run and their consequences, for the warnings of every command that reads them."""

import json
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, TulaError
from tula_cli.run import messages
from tula_cli.run.files import is_regular_file, read_content
from tula_cli.run.training_run import TrainingRun
from tula_cli.words import format_number_ranges

CHECKSUM_FILE = "sums.json"
"""The file with the checksums of the other files of a sharded checkpoint."""
_MAX_VERIFIED_BYTES = 2**20
"""Bytes of a checkpoint whose checksums are verified; for the rest only the structure is checked, because it would take
minutes."""
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
            target = _read_link_target(link)
            why = _describe_link_problem(link, target) if os.path.lexists(link) else ""
            if not why or target == _read_link_target(link):
                break
        if why:
            damage.setdefault(why, []).append(_LOST_WEIGHTS[name])
    for why, lost in damage.items():
        yield messages.damaged_weights(problem=why, consequence=" and ".join(lost))


def _read_link_target(link: Path) -> Path:
    """Return the direct target of a link, without following further links; the path itself if it is no link."""
    return link.parent / link.readlink() if link.is_symlink() else link


def _describe_link_problem(link: Path, target: Path) -> str:
    if target != link and not os.path.lexists(target):
        return f"{link} is damaged: it points to {link.readlink()}, which is missing"
    why = describe_checkpoint_problem(target)
    return f"{target} is damaged: {why}" if why else ""


def describe_checkpoint_problem(path: Path) -> str:
    """Describe why a checkpoint is damaged; empty if its structure and the verified checksums are right."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return _describe_sharded_problem(path)
        if not is_regular_file(path):
            return "it is not a file"
        if path.stat().st_size == 0:
            return "it is empty"
        is_complete = is_complete_archive(path, max_verified_bytes=_MAX_VERIFIED_BYTES)
        return "" if is_complete else "it is truncated or overwritten"
    except OSError as error:
        return error.strerror or str(error)


def is_complete_archive(path: Path, *, max_verified_bytes: float = float("inf")) -> bool:
    """Return whether a file of torch.save is complete, by its checksums (which torch does not verify).

    Args:
        max_verified_bytes: verify only the checksums of the first members up to this size.
    """
    try:
        if not is_regular_file(path):
            return False
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            # With damaged sizes, reading the members would exhaust the memory.
            if sum(member.file_size for member in members) > path.stat().st_size:
                return False
            total = 0
            for member in members:
                total += member.file_size
                if total > max_verified_bytes:
                    break
                with archive.open(member) as file:
                    while file.read(2**20):
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, UnicodeDecodeError, zlib.error):
        return False
    return True


def _describe_sharded_problem(folder: Path) -> str:
    """Describe the first missing or modified file of a sharded checkpoint; empty if no problem is found."""
    try:
        sums = json.loads(read_content(folder / CHECKSUM_FILE))
        for name, total in sums.items():
            path = folder / name
            size = path.stat().st_size
            if size == 0 or (size <= _MAX_VERIFIED_BYTES and zlib.crc32(read_content(path)) != total):
                return f"its {name} is truncated or overwritten"
    except FileNotFoundError as error:
        return f"its {Path(error.filename).name} is missing"
    except (OSError, ValueError, AttributeError, TulaError) as error:
        return f"its {CHECKSUM_FILE} cannot be read ({error})"
    return ""
