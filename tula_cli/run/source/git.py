"""What git knows of the user's files. Where there is no git, or no repository, it knows nothing."""

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from tula_cli.errors import TulaError
from tula_cli.run.source.keys import is_private

MAX_DIFF = 1_000_000  # characters
GIT_TIMEOUT = 10.0  # seconds
LISTING_TIMEOUT = 60.0  # of a listing, without which there is no telling what the code is


def files(folder: Path) -> tuple[Path, dict[Path, bool]] | None:
    """Return the repository that a folder is in, and its files: whether git tracks each, or has not been told to ignore it.

    Repositories inside of it count as its own files. What is listed need not exist; None where there is no repository.

    Args:
        folder: absolute, without symbolic links.

    Raises:
        TulaError: git takes too long.
    """
    top = _git(folder, "rev-parse", "--show-toplevel").rstrip("\n")
    return (Path(top), _files(Path(top))) if top else None


def _files(top: Path) -> dict[Path, bool]:
    found: dict[Path, bool] = {}
    for options, tracked in ((["--others", "--exclude-standard"], False), (["--cached"], True)):
        for name in filter(None, _listing(top, *options).split("\0")):
            path = top / name
            if (path / ".git").exists():  # a submodule, or another checkout
                found.update(_files(path))
            else:
                found[path] = tracked
    return found


def _listing(top: Path, *options: str) -> str:
    try:
        return _asked(top, "ls-files", "-z", *options, timeout=LISTING_TIMEOUT)
    except subprocess.TimeoutExpired:
        # Without them the code would be taken for other code.
        raise TulaError(
            f"git has not listed the files of {top} within {LISTING_TIMEOUT:g} s",
            "see what keeps it: git status; script.code: none does without",
        ) from None
    except (OSError, subprocess.SubprocessError):
        return ""


def state(base: Path, paths: Iterable[Path]) -> tuple[str, bool, str]:
    """Return (commit, whether the paths differ from it, how, but for private files); empty where there is no repository.

    Args:
        base: a folder of the repository.
        paths: files and folders, relative to it.
    """
    commit = _git(base, "rev-parse", "--verify", "HEAD").strip()
    if not commit:
        return "", False, ""
    asked = [f":(literal){path}" for path in _of_this_repository(base, paths)]
    dirty = bool(_git(base, "status", "--porcelain", "--", *asked).strip())
    diff = _diff(base, asked)
    if len(diff) > MAX_DIFF:
        diff = f"{diff[:MAX_DIFF]}\n[cut: {len(diff) - MAX_DIFF} more characters]\n"
    return commit, dirty, diff


def _diff(base: Path, asked: Sequence[str]) -> str:
    """Return how paths differ from the commit, without files that may hold secrets: a package's folder is asked for whole."""
    options = ["--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--relative", "HEAD", "--"]
    changed = [name for name in _git(base, "diff", "--name-only", "-z", *options, *asked).split("\0") if name]
    private = [f":(exclude,literal){name}" for name in changed if is_private(Path(name))]
    # Where the names are not told, neither is what is in them.
    return _git(base, "diff", *options, *asked, *private) if len(changed) > len(private) else ""


def _of_this_repository(base: Path, paths: Iterable[Path]) -> Sequence[str]:
    """Return the paths, with a repository inside of this one in place of its files, of which this one knows none."""
    inside: dict[Path, Path | None] = {Path(): None}

    def holder(folder: Path) -> Path | None:
        if folder not in inside:
            above = holder(folder.parent)
            inside[folder] = above or (folder if (base / folder / ".git").exists() else None)
        return inside[folder]

    return sorted({str(holder(path.parent) or path) for path in paths})


def _git(folder: Path, *arguments: str) -> str:
    """Return what git prints; empty where it fails."""
    try:
        return _asked(folder, *arguments, timeout=GIT_TIMEOUT)
    except (OSError, subprocess.SubprocessError):
        return ""


def _asked(folder: Path, *arguments: str, timeout: float) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout,
        check=True,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_LITERAL_PATHSPECS": "0"},
    )
    return done.stdout.decode(errors="replace")
