"""Ownership of runs: another user's run may be read if its permissions allow, and is never written to."""

import errno
import os
import pwd
import shlex
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tula_cli.errors import NotYours, SpecError

ACCESS_ERRNOS = (errno.EACCES, errno.EPERM)
"""Error numbers for missing permissions."""
_SPEC_FILE = "spec.yaml"
_OTHER_FOLDER_HINT = "[[--run-dir]] FOLDER names another folder for runs"


def find_other_owner(path: Path) -> str:
    """Return the name of the other user who owns a path; empty if it is the current user's, or not accessible."""
    try:
        status = path.lstat()
    except OSError:
        return ""
    if status.st_uid == os.geteuid() or _owns_all_new_files(status.st_uid, path):
        return ""
    return _get_user_name(status.st_uid)


def require_ownership(run: Path) -> None:
    """Refuse to write into another user's run, even if permissions allow it: that user's jobs depend on it.

    Raises:
        NotYours: it belongs to another user.
    """
    if owner := find_other_owner(run):
        raise _make_not_yours_error(run, owner, change=True)


def require_readable_run(path: Path) -> None:
    """Check that a path is a readable run directory.

    Raises:
        SpecError: there is no such folder, it is not a run directory, or it is not readable.
        NotYours: it belongs to another user and is not readable.
    """
    spec_file = path / _SPEC_FILE
    try:
        is_run = stat.S_ISDIR(path.stat().st_mode) and stat.S_ISREG(spec_file.stat().st_mode)
        refused = is_run and not (_has_access(path, os.R_OK | os.X_OK) and _has_access(spec_file, os.R_OK))
    except PermissionError:
        is_run = refused = True
    except OSError:
        is_run = refused = False
    if refused:
        raise make_ownership_error(spec_file) or SpecError(
            f"no permission to read {path}", f"chmod -R u+rwX {shlex.quote(str(path))}"
        )
    if not path.exists():
        raise SpecError(f"there is no run {path}", "tula list shows all runs")
    if not is_run:
        raise SpecError(f"{path} is not a run: it contains no {_SPEC_FILE}", "tula list shows all runs")


def make_ownership_error(path: Path, *, change: bool = False) -> NotYours | None:
    """Return the error for a run's file that is inaccessible because it belongs to another user, else None.

    Args:
        path: of the file, which need not exist or be visible.
        change: whether it was to be written.
    """
    for entry in (path, *path.parents):
        try:
            mode = entry.lstat().st_mode
        except OSError:  # missing, or in a folder that only its owner can read
            continue
        closed = stat.S_ISDIR(mode) and not _has_access(entry, os.R_OK | os.X_OK)
        if (owner := find_other_owner(entry)) and (closed or _is_in_run(entry)):
            return _make_not_yours_error(entry, owner, change=change)
        return None
    return None


def describe_left_out_runs(folders: Iterable[Path]) -> str:
    """Describe the folders that only their owners may enter; empty if there are none."""
    closed = [folder for folder in folders if not _has_access(folder, os.X_OK) and folder.is_dir()]
    owners = [owner for folder in closed if (owner := find_other_owner(folder))]
    if not owners:
        return ""
    runs = "a run" if len(owners) == 1 else f"{len(owners)} runs"
    return f"not shown: {runs} of {', '.join(sorted(set(owners)))}, which you may not read"


def _make_not_yours_error(path: Path, owner: str, *, change: bool) -> NotYours:
    return NotYours(
        f"{path} belongs to {owner}: you may not {'change' if change else 'read'} it",
        f"ask {owner} to run the command, or use your own run: {_OTHER_FOLDER_HINT}"
        if change
        else f"ask {owner} for a copy or for access (chmod -R go+rX); {_OTHER_FOLDER_HINT}",
    )


def _is_in_run(entry: Path) -> bool:
    return any(os.path.exists(folder / _SPEC_FILE) for folder in (entry, *entry.parents))  # noqa: PTH110 - raises no PermissionError


def _has_access(path: Path, access_mode: int) -> bool:
    return os.access(path, access_mode, effective_ids=os.access in os.supports_effective_ids)


def _owns_all_new_files(user: int, path: Path) -> bool:
    """Return whether new files in a folder always belong to this user (root on NFS, anyone on CIFS).

    Ownership then has no meaning.
    """
    folder = path if path.is_dir() else path.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as new_file:
            return os.fstat(new_file.fileno()).st_uid == user
    except OSError:
        return False


def _get_user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
