"""The trackers to which a run can be sent, and the interface of their exporters."""

import contextlib
import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast
from urllib.parse import unquote

from tula_cli.entry_points import make_install_hint
from tula_cli.errors import SpecError, TrackerError, TulaError
from tula_cli.plugins import load_named_object
from tula_cli.run.directory import Run
from tula_cli.services.tracking import FOLDER
from tula_cli.spec.sections import TRACKERS, Export, strip_password

Scalar = str | int | float | bool
State = Literal["running", "finished", "failed", "killed"]


@dataclass(frozen=True)
class TrackerRun:
    """One run at a tracker: the whole run of tula, or one of its trainings."""

    key: str  # key within tula's run, such as "run" or "train-ab12cd34"
    kind: Literal["run", "training"]
    group: str  # name of tula's run
    started: float  # Unix time
    parent: str | None = None  # the tracker's id of the enclosing run; None for kind "run"

    @property
    def name(self) -> str:
        """Return the run's name at the tracker."""
        return self.group if self.kind == "run" else f"{self.group}/{self.key}"


@dataclass(frozen=True)
class Point:
    """Values at one moment of a training. The x-axis of every curve is the number of samples trained."""

    samples: int
    time: float  # Unix time
    values: Mapping[str, float]  # finite values by name of the curve


class TrackedRun(Protocol):
    """A run that is open at a tracker. If a method raises an error, the same values are sent again later."""

    @property
    def id(self) -> str:
        """The tracker's id of the run, with which it can be opened again."""

    def params(self, values: Mapping[str, Scalar]) -> None:
        """Log parameters. A parameter that was sent before may have another value."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Set text tags, such as outcomes of attempts and the reason of a choice; later values replace earlier ones."""

    def points(self, points: Sequence[Point]) -> None:
        """Log points of curves, ascending by samples. Positions that a resumed training repeats are not logged again."""

    def summary(self, values: Mapping[str, float], *, samples: int) -> None:
        """Log single finite numbers of the whole run, which has trained `samples`; later values replace earlier ones."""

    def artifact(self, path: Path) -> None:
        """Upload a file; one of the same name is replaced."""

    def close(self, state: State, *, at: float) -> None:
        """Send buffered values, and set the state of the run.

        Args:
            state: "running" if more values will follow.
            at: Unix time of its end so far.
        """


class Exporter(Protocol):
    """The interface of a tracker, which a callable with the arguments `uri` and `project` returns."""

    def open(self, run: TrackerRun, *, known: str | None) -> TrackedRun:
        """Start a run, or open it again if it was started before, with the tracker's id `known`."""


def compute_digest(content: Any) -> str:
    """Return a digest of 16 hexadecimal digits of plain values, or of bytes."""
    data = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True, default=str).encode()
    return hashlib.sha256(data).hexdigest()[:16]


@dataclass(frozen=True)
class Destination:
    """A tracker, with the address and project there."""

    to: str  # mlflow, wandb, tensorboard, or an import string
    uri: str  # valid from every working directory
    project: str
    folder: Path  # the run's folder of exports; an address in it is recorded relative to it, since runs are moved

    @property
    def record_path(self) -> Path:
        """Return the file of the run that records what was sent to this destination."""
        word = re.sub(r"\W+", "_", self.to)
        uri = self.uri.replace(f"{self.folder}/", f"{FOLDER}/")
        return self.folder / f"{word}-{compute_digest([self.to, uri, self.project])[:8]}.json"

    @property
    def is_offline(self) -> bool:
        """Whether values are only written to a folder that the user uploads: W&B without an address."""
        return self.to == "wandb" and "://" not in self.uri

    def make_exporter(self) -> Exporter:
        """Return the exporter for this destination.

        Raises:
            TrackerError: its package is not installed or cannot be imported, or the tracker does not respond.
            SpecError: there is no such user-defined module or callable.
        """
        with self.convert_errors():
            if self.to in TRACKERS:  # only these modules need optional packages
                make = importlib.import_module(f"{__package__}.{self.to}").exporter
            else:
                make = load_named_object(self.to, {}, kind="exporter")
            return cast(Exporter, make(uri=self.uri, project=self.project))

    @contextlib.contextmanager
    def convert_errors(self) -> Iterator[None]:
        """Convert errors of the tracker's library, or of a user-defined tracker, to TrackerError; a TulaError is raised unchanged."""
        try:
            yield
        except TulaError:
            raise
        except ImportError as error:
            hint = make_install_hint("trackers") if self.to in TRACKERS else f"install what {self.to} imports"
            raise TrackerError(f"{self.to}: {error}", hint) from error
        except Exception as error:  # networks, databases and user code raise errors of any type
            reason = (str(error).strip().splitlines() or [""])[0]
            raise TrackerError(f"{self.to}: {type(error).__name__}: {reason[:200]}") from error


def resolve_destination(export: Export, run: Run) -> Destination:
    """Return the destination to send a run to; by default a folder or database in the run, under the job's name.

    Raises:
        SpecError: the address contains a password.
    """
    folder = run.path.absolute() / FOLDER
    try:
        uri = strip_password(export.uri) if export.uri else _get_default_address(export.to, folder)
    except ValueError as error:
        raise SpecError(f"[[--uri]]: {error}") from None
    return Destination(export.to, _make_absolute_address(export.to, uri), export.project or run.job_name, folder)


def _get_default_address(to: str, folder: Path) -> str:
    if to == "mlflow":
        return strip_password(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}")
    return str(folder / to) if to in TRACKERS else ""


def _make_absolute_address(to: str, uri: str) -> str:
    """Return an address that is valid from every working directory."""
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    if uri.startswith("file:///") and to in ("tensorboard", "wandb"):  # these trackers take a path, not a file URL
        uri = unquote(uri.removeprefix("file://"))
    if "://" in uri or to not in TRACKERS or (to == "mlflow" and uri.startswith("databricks")):
        return uri
    return str(Path(uri).expanduser().absolute())
