"""The store of MLflow in a run that was moved or copied: it holds absolute paths, of where the run was."""

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import yaml

from tula_cli.errors import TrackerError
from tula_cli.run.files import write_atomic

_PATHS = (("experiments", "artifact_location"), ("runs", "artifact_uri"))
FILES = "mlartifacts"
"""The folder of files beside a database on this machine, or in a folder that is a store."""


def bring_along(store: Path, run: Path) -> None:
    """Let the files of a run's own store lie beside it, where the run is now: MLflow has no call for that.

    Args:
        store: of MLflow, in the run: a database or a folder, which need not be there.
        run: the run directory.

    Raises:
        TrackerError: it cannot be read or written.
        TulaError: a file of the folder cannot be written.
    """
    here = (store if store.is_dir() else store.parent) / FILES
    move = _Move(inside=quote(f"/{here.relative_to(run)}/"), here=here)
    try:
        if store.is_dir():
            _in_folder(store, move)
        elif store.is_file():
            _in_database(store, move)
    except (sqlite3.Error, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise TrackerError(
            f"mlflow: cannot bring the paths in {store} to where the run is now: {error}",
            "name another place with --uri, or remove that one: then all is sent again",
        ) from error


@dataclass(frozen=True)
class _Move:
    """Where the folder of files is now, and what a place in it holds wherever the run was."""

    inside: str
    here: Path

    def of(self, place: object) -> str | None:
        """Return what a place is now; None where it has not changed, or is none of the run's."""
        before, found, rest = place.rpartition(self.inside) if isinstance(place, str) else ("", "", "")
        if not found or not before.startswith("file://"):
            return None
        old = Path(unquote(urlsplit(before + found).path))
        return None if old.resolve() == self.here.resolve() else f"{self.here.as_uri()}/{rest}"


def _in_database(path: Path, move: _Move) -> None:
    with contextlib.closing(sqlite3.connect(path)) as store, store:
        tables = {name for (name,) in store.execute("SELECT name FROM sqlite_master")}
        # MLflow makes its tables one by one, so that a killed process may have left some of them
        for table, column in (found for found in _PATHS if found[0] in tables):
            places = [place for (place,) in store.execute(f"SELECT DISTINCT {column} FROM {table}")]
            changed = [(now, place) for place in places if (now := move.of(place)) is not None]
            store.executemany(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", changed)


def _in_folder(store: Path, move: _Move) -> None:
    for path in (*store.glob("*/meta.yaml"), *store.glob("*/*/meta.yaml")):
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        values = told if isinstance(told, dict) else {}
        changed = {name: now for _, name in _PATHS if (now := move.of(values.get(name))) is not None}
        if changed:
            write_atomic(path, yaml.safe_dump({**values, **changed}, allow_unicode=True))
