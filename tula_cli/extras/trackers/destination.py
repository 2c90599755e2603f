"""Destinations of recorded runs, and the interface of the exporters that send there."""

import hashlib
import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import unquote

from pydantic import TypeAdapter

from tula_cli.errors import SpecError, TrackerError
from tula_cli.plugins import load
from tula_cli.run.files import list_files, open_file, read_error, read_record, write_record
from tula_cli.run.records.base import Record
from tula_cli.services.tracking import FOLDER
from tula_cli.spec.sections import TRACKERS, without_password

Scalar = str | int | float | bool
State = Literal["running", "finished", "failed", "killed"]


@dataclass(frozen=True)
class TrackerRun:
    """One run at a tracker: the whole run of tula, one of its probes, or one of its trainings."""

    key: str  # within tula's run: "run", "probe-n001-l000032", "train-ab12cd34"
    kind: Literal["run", "probe", "training"]
    group: str  # tula's run that it is of: its name
    started: float  # Unix time
    parent: str | None = None  # the tracker's id of the run that it is inside; None of the whole

    @property
    def name(self) -> str:
        """Return the run's name at the tracker."""
        return self.group if self.kind == "run" else f"{self.group}/{self.key}"


@dataclass(frozen=True)
class Point:
    """Values at one moment of a training. The x-axis of every curve is the number of samples trained."""

    samples: int
    time: float  # Unix time
    values: Mapping[str, float]  # finite


class TrackedRun(Protocol):
    """A run that is open at a tracker. Each method may raise `TrackerError`; the values are then sent again later."""

    @property
    def id(self) -> str:
        """The tracker's id of the run, with which it can be opened again."""
        ...

    def params(self, values: Mapping[str, Scalar]) -> None:
        """Log parameters. A parameter that was sent before may have another value."""
        ...

    def tags(self, values: Mapping[str, str]) -> None:
        """Set text tags, such as outcomes of attempts and the reason of a choice; later values replace earlier ones."""
        ...

    def points(self, points: Sequence[Point]) -> None:
        """Log points of curves, ascending by samples."""
        ...

    def summary(self, values: Mapping[str, float], *, at: Point | None) -> None:
        """Log single numbers of the whole run; later values replace earlier ones.

        Args:
            values: finite numbers.
            at: the last point of the run's curves; None if it has none.
        """
        ...

    def rewind(self, samples: int) -> bool:
        """Remove the points beyond `samples`, which are trained again; return False if the tracker keeps them."""
        ...

    def artifact(self, path: Path) -> None:
        """Upload a file; one of the same name is replaced."""
        ...

    def close(self, state: State, *, at: float) -> None:
        """Send buffered values, and set the state of the run.

        Args:
            state: "running" if more values will follow.
            at: Unix time of its end so far.
        """
        ...


class Exporter(Protocol):
    """The interface of a tracker."""

    def open(self, run: TrackerRun, *, known: str | None, after: int | None) -> TrackedRun:
        """Start a run, or open an existing one again.

        Args:
            run: the run.
            known: the tracker's id of the run if it was started before.
            after: samples up to which its points were sent; None if none were. The tracker may have points beyond that
                if a process was killed while it sent them.

        Raises:
            TrackerError: the tracker does not respond, or refuses.
        """
        ...


# --- What was sent


class RunExportRecord(Record):
    """The values of one run that a tracker has received."""

    id: str  # the tracker's
    settled: dict[str, str] = {}  # digests of its settings, words, single numbers and state
    artifacts: dict[str, str] = {}  # digest of each file by its name
    starts: tuple[float, ...] = ()  # times of its rows of kind "start"
    samples: int = -1  # of the newest point


class ExportRecord(Record):
    """The destination of a run, and the values that were sent there."""

    to: str
    uri: str
    project: str
    runs: dict[str, RunExportRecord] = {}  # by their keys in tula's run
    problem: str = ""  # why the newest try has failed; empty where it has not


_SENT = TypeAdapter(ExportRecord)


def read(path: Path) -> ExportRecord | None:
    """Return the record of what was sent to a tracker; None if there is no such file."""
    return read_record(path, _SENT)


def describe_problems(folder: Path) -> list[str]:
    """Return a message for each tracker to which the last export failed, from the records in a run's export folder."""
    records = [read(path) for path in list_files(folder)]
    return [
        f"export to {record.to}: {record.problem}; tula export sends what was missed"
        for record in records
        if record and record.problem
    ]


def write(path: Path, sent: ExportRecord) -> None:
    write_record(path, sent)


def compute_digest(content: Any) -> str:
    """Return a digest of 16 hexadecimal digits of plain values, or of bytes."""
    data = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True, default=str).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def list_rows_to_send(path: Path, *, whole: bool) -> list[dict[str, Any]]:
    """Return the rows of a training's metrics.jsonl whose positions are complete.

    Args:
        path: path of metrics.jsonl.
        whole: no more rows will follow. If False, the rows of the newest position are held back, so that all rows of a
            position are sent as one point.

    Raises:
        TulaError: the file cannot be read.
    """
    try:
        with open_file(path) as file:
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_error(path, error) from error
    if lines and not lines[-1].endswith(b"\n"):  # still being written
        lines.pop()
    rows = [row for row in map(_parse_row, lines) if row]
    return rows if whole else rows[: _find_newest_position(rows)]


def _parse_row(line: bytes) -> dict[str, Any]:
    """Return the object of a line; empty if the line is incomplete, for example after the loss of a node."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    is_row = isinstance(row, dict) and isinstance(row.get("kind"), str)
    placed = is_row and all(_is_number(row.get(name)) for name in ("time", "samples"))
    return row if placed else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def _find_newest_position(rows: Sequence[dict[str, Any]]) -> int:
    """Return the index of the first row at the newest position."""
    begin = len(rows)
    while begin and rows[begin - 1]["samples"] == rows[-1]["samples"]:
        begin -= 1
    return begin


# --- Destinations

_EXTRAS = "tula_cli.extras.trackers"
_BUILTINS = {name: f"{_EXTRAS}.{name}:exporter" for name in ("mlflow", "wandb", "tensorboard")}
"""Import strings of the built-in exporters; only their modules import the optional packages."""
_PACKAGES = {"mlflow": "mlflow-skinny", "wandb": "wandb", "tensorboard": "tensorboard"}


@dataclass(frozen=True)
class Destination:
    """A tracker, with the address and project there."""

    to: str
    uri: str  # resolved: no relative path
    project: str
    home: str = (
        ""  # the run's folder of exports: a place in it is known by where it is there, for runs are moved and copied
    )

    @property
    def name(self) -> str:
        """Return the name of the files that record what was sent."""
        word = self.to if self.to in TRACKERS else re.sub(r"\W+", "_", self.to)
        place = self.uri.replace(f"{self.home}/", f"{FOLDER}/") if self.home else self.uri
        return f"{word}-{compute_digest([self.to, place, self.project])[:8]}"

    @property
    def gone(self) -> bool:
        """Whether the destination is a database or folder on this machine that does not exist (any more)."""
        path = self.uri.removeprefix("sqlite:///").removeprefix("file://")
        return self.to in TRACKERS and "://" not in path and path.startswith("/") and not Path(path).exists()

    @property
    def offline(self) -> bool:
        """Whether values are only written to a folder that the user uploads: W&B without an address."""
        return self.to == "wandb" and "://" not in self.uri

    @property
    def words(self) -> str:
        return f"{self.to} at {self.uri}"

    def record(self, run: Path) -> Path:
        """Return the file of a run that records what was sent to this destination."""
        return run / FOLDER / f"{self.name}.json"

    def exporter(self) -> Exporter:
        """Return the exporter for this destination.

        Raises:
            TrackerError: its package is not installed or cannot be imported, or the tracker does not respond.
            SpecError: there is no such user-defined module or callable.
        """
        if self.to not in _BUILTINS:
            return make_exporter(load(self.to, {}, kind="exporter"), self)
        module, _, attribute = _BUILTINS[self.to].partition(":")
        try:
            make = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            package = _PACKAGES[self.to]
            raise TrackerError(
                f"{self.to}: there is no package {error.name}",
                f"pip install 'tula-cli[trackers]' (or {package}); tula export sends what was missed",
            ) from error
        except ImportError as error:  # it is there, and what it needs is of another version
            raise TrackerError(f"{self.to}: its package cannot be imported: {error}", "install it anew") from error
        return make_exporter(make, self)


def make_exporter(make: Callable[..., Exporter], destination: Destination) -> Exporter:
    """Return the exporter that a callable makes for a destination.

    Raises:
        SpecError: `make` is not callable, takes other arguments, or returns an object without `open`.
    """
    hint = "it is called with uri=... and project=..., and returns an object with open"
    if not callable(make):
        raise SpecError(f"exporter {destination.to!r} is no callable", hint)
    given = {"uri": destination.uri, "project": destination.project}
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        raise SpecError(f"exporter {destination.to!r} cannot be called: {error}", hint) from error
    from_command = make(**given)
    if not callable(getattr(from_command, "open", None)):
        raise SpecError(f"exporter {destination.to!r} returns a {type(from_command).__name__} that has no open", hint)
    return from_command


def resolve_destination(
    to: str, *, uri: str | None, project: str | None, run: Path, job: str, environ: Mapping[str, str] = os.environ
) -> Destination:
    """Return the destination to send a run to.

    Args:
        to: mlflow, wandb, tensorboard, or an import string.
        uri: address of the tracker; None for the default of the tracker, or else a folder or database in the run.
        project: project at the tracker; None for the job's name.
        run: the run directory.
        job: the job's name.
        environ: environment with the settings of the trackers.

    Raises:
        SpecError: the address contains a password.
    """
    try:
        place = without_password(uri) if uri else _get_default_place(to, run / FOLDER, environ)
    except ValueError as error:
        raise SpecError(f"--uri: {error}") from None
    return Destination(to, _make_absolute(to, place), project or job, home=str(run / FOLDER))


def _get_default_place(to: str, folder: Path, environ: Mapping[str, str]) -> str:
    if to == "mlflow":
        return without_password(environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}")
    return str(folder / to) if to in TRACKERS else ""


def _make_absolute(to: str, uri: str) -> str:
    """Return an address that is valid from every working directory."""
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    if uri.startswith("file:///") and to in ("tensorboard", "wandb"):  # they take no URL of a folder
        uri = unquote(uri.removeprefix("file://"))
    if "://" in uri or to not in TRACKERS or (to == "mlflow" and uri.startswith("databricks")):
        return uri
    return str(Path(uri).expanduser().absolute())
