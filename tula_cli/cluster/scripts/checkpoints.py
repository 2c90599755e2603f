"""The checkpoints of a script: where they are, and which of them is whole."""

import glob
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tula_cli.run.files import is_regular
from tula_cli.spec.scripts.own_script import Resume
from tula_cli.spec.scripts.placeholders import fill

SETTLED = 2.0
"""Seconds without a change after which a checkpoint is taken to be written."""
_ZIPPED = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""What torch.save writes is a ZIP file, with its table of contents at the end."""
_NUMBER = re.compile(r"\d+")


def newest(
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
    names = glob.iglob(pattern(resume, values, workdir=workdir), recursive=True)  # noqa: PTH207 - an absolute pattern
    found = ((path, changed(path)) for path in map(Path, names))
    useless, until = left_out
    by_age = sorted(
        ((when, path) for path, when in found if when >= since and not (str(path) == useless and when <= until)),
        reverse=True,
    )
    paths = [path for _, path in by_age]
    sound = [path for path in paths if whole(path)]
    best = next((path for number, path in enumerate(sound) if not _lacks_files(path, sound[number + 1 :])), None)
    return best, paths if best is None else paths[: paths.index(best)]


def _lacks_files(path: Path, older: Iterable[Path]) -> bool:
    """Return whether a folder lacks files that the next older one of such a name has; numbers in names do not count."""
    before = next((one for one in older if _unnumbered(one.name) == _unnumbered(path.name)), None)
    return before is not None and path.is_dir() and before.is_dir() and bool(_names(before) - _names(path))


def _names(folder: Path) -> set[str]:
    return {_unnumbered(str(file.relative_to(folder))) for file in _files(folder)}


def _unnumbered(name: str) -> str:
    """Return a name without the step, or the rank, that it was written by: of fewer ranks there are fewer files."""
    return _NUMBER.sub("#", name)


def pattern(resume: Resume, values: Mapping[str, str | float], *, workdir: Path) -> str:
    """Return the absolute pattern of a script's checkpoints; of brackets and stars the user's own alone act, no folder's."""
    literal = {name: glob.escape(value) if isinstance(value, str) else value for name, value in values.items()}
    return str(Path(glob.escape(str(workdir))) / fill(resume.checkpoint, literal))


def changed(path: Path) -> float:
    """Return when a checkpoint was written last (Unix time): of a folder, the newest of its files; 0 where it is gone."""
    return max((_changed(file) for file in _files(path)), default=0.0)


def whole(path: Path) -> bool:
    """Return whether a checkpoint was written to its end, as far as its files tell: the process may have been killed."""
    return all(_is_whole(file) for file in _files(path))


def _files(path: Path) -> Iterable[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _is_whole(file: Path) -> bool:
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
