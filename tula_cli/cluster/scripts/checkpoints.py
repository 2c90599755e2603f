"""The checkpoints of a script: where they are, and which of them is whole."""

import glob
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tula_cli.run.files import is_regular
from tula_cli.spec.scripts.own_script import Resume
from tula_cli.spec.scripts.placeholders import fill

SETTLED_SECONDS = 2.0
"""Seconds without a change after which a checkpoint is taken to be written."""
_ZIPPED = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""What torch.save writes is a ZIP file, with its table of contents at the end."""
_NUMBER = re.compile(r"\d+")


def find_newest(
    resume: Resume,
    values: Mapping[str, str | float],
    *,
    workdir: Path,
    since: float,
    left_out: tuple[str, float] = ("", 0.0),
) -> tuple[Path | None, list[Path]]:
    """Return the newest checkpoint that is whole (None where there is none), and the damaged ones that are newer.

    A folder that lacks files which the one before it has is half of one: its process was killed between two files.

    Args:
        resume: where they are.
        values: of the placeholders in its pattern.
        workdir: what a relative path starts from.
        since: Unix time; what is older is of another training.
        left_out: path of one that is of no use, as it was at a time (Unix time).
    """
    names = glob.iglob(checkpoint_pattern(resume, values, workdir=workdir), recursive=True)  # noqa: PTH207 - an absolute pattern
    candidates = ((path, changed_at(path)) for path in map(Path, names))
    useless, unusable_since = left_out
    by_age = sorted(
        (
            (when, path)
            for path, when in candidates
            if when >= since and not (str(path) == useless and when <= unusable_since)
        ),
        reverse=True,
    )
    paths = [path for _, path in by_age]
    sound = [path for path in paths if is_complete(path)]
    best = next((path for number, path in enumerate(sound) if not _lacks_files(path, sound[number + 1 :])), None)
    return best, paths if best is None else paths[: paths.index(best)]


def _lacks_files(path: Path, older: Iterable[Path]) -> bool:
    """Return whether a folder lacks files that the next older one of such a name has; numbers in names do not count."""
    older_folder = next(
        (folder for folder in older if _without_numbers(folder.name) == _without_numbers(path.name)), None
    )
    return (
        older_folder is not None
        and path.is_dir()
        and older_folder.is_dir()
        and bool(_file_names(older_folder) - _file_names(path))
    )


def _file_names(folder: Path) -> set[str]:
    return {_without_numbers(str(file.relative_to(folder))) for file in _files_of(folder)}


def _without_numbers(name: str) -> str:
    """Return a name without the step, or the rank, that it was written by: of fewer ranks there are fewer files."""
    return _NUMBER.sub("#", name)


def checkpoint_pattern(resume: Resume, values: Mapping[str, str | float], *, workdir: Path) -> str:
    """Return the absolute pattern of a script's checkpoints; of brackets and stars the user's own alone act, no folder's."""
    literal = {name: glob.escape(value) if isinstance(value, str) else value for name, value in values.items()}
    return str(Path(glob.escape(str(workdir))) / fill(resume.checkpoint, literal))


def changed_at(path: Path) -> float:
    """Return when a checkpoint was written last (Unix time): of a folder, the newest of its files; 0 where it is gone."""
    return max((_changed_at(file) for file in _files_of(path)), default=0.0)


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint was written to its end, as far as its files tell: the process may have been killed."""
    return all(_is_complete_file(file) for file in _files_of(path))


def _files_of(path: Path) -> Iterable[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _changed_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _is_complete_file(file: Path) -> bool:
    try:
        if not is_regular(file) or file.stat().st_size == 0:
            return False
        with open(file, "rb") as opened:
            head = opened.read(4)
        if file.suffix not in _ZIPPED:
            return True
        # zeros are blocks that a lost node has never written
        return zipfile.is_zipfile(file) if head == b"PK\x03\x04" else head != b"\0\0\0\0"
    except OSError:
        return False
