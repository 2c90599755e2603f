"""The database of MLflow in a run that was moved or copied: it holds absolute paths, of where the run was."""

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from tula_cli.errors import TrackerError

_PATHS = (("experiments", "artifact_location"), ("runs", "artifact_uri"))
FILES = "mlartifacts"
"""The folder of files beside a store on this machine."""


def bring_along(database: Path, run: Path) -> None:
    """Let the files of a run's own database lie beside it, where the run is now: MLflow has no call for that.

    Args:
        database: of MLflow, in the run; it need not be there.
        run: the run directory.

    Raises:
        TrackerError: it cannot be read or written.
    """
    if not database.is_file():
        return
    here = database.parent / FILES
    inside = quote(f"/{here.relative_to(run)}/")
    try:
        with contextlib.closing(sqlite3.connect(database)) as store, store:
            tables = {name for (name,) in store.execute("SELECT name FROM sqlite_master")}
            # MLflow makes its tables one by one, so that a killed process may have left some of them
            for table, column in (found for found in _PATHS if found[0] in tables):
                places = [place for (place,) in store.execute(f"SELECT DISTINCT {column} FROM {table}")]
                for old in {_before(place, inside) for place in places} - {""}:
                    if Path(unquote(urlsplit(old).path)).resolve() != here.resolve():
                        store.execute(
                            f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                            (f"{here.as_uri()}/", len(old) + 1, len(old), old),
                        )
    except sqlite3.Error as error:
        raise TrackerError(
            f"mlflow: cannot bring the paths in {database} to where the run is now: {error}",
            "name another place with --uri, or remove that file: then all is sent again",
        ) from error


def _before(place: str | None, inside: str) -> str:
    """Return a place up to the folder of files that is in it; empty of any other place."""
    before, found, _ = (place or "").rpartition(inside)
    return before + found if before.startswith("file://") else ""
