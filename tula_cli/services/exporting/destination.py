"""Where a run is sent to: which exporter, of which tracker, and the file in the run that remembers it."""

import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from tula_cli.errors import SpecError, TrackerError
from tula_cli.plugins import load
from tula_cli.services.exporting.exporter import Exporter
from tula_cli.services.exporting.sent import digest
from tula_cli.spec.parts.of_export import TRACKERS, without_password

FOLDER = "exports"
"""Of a run: what was sent to trackers, and the files of those that need no server."""
_EXTRAS = "tula_cli.extras.trackers"
_BUILTINS = {name: f"{_EXTRAS}.{name}:exporter" for name in ("mlflow", "wandb", "tensorboard")}
"""The only place that names the optional package: all else knows `Exporter`."""
_PACKAGES = {"mlflow": "mlflow-skinny", "wandb": "wandb", "tensorboard": "tensorboard"}


@dataclass(frozen=True)
class Destination:
    """A tracker, and the place and the project there."""

    to: str
    uri: str  # resolved: no relative path
    project: str
    home: str = (
        ""  # the run's folder of exports: a place in it is known by where it is there, for runs are moved and copied
    )

    @property
    def name(self) -> str:
        """What the files that remember it are called."""
        word = self.to if self.to in TRACKERS else re.sub(r"\W+", "_", self.to)
        place = self.uri.replace(f"{self.home}/", f"{FOLDER}/") if self.home else self.uri
        return f"{word}-{digest([self.to, place, self.project])[:8]}"

    @property
    def gone(self) -> bool:
        """Whether it is a database or a folder on this machine that is not there (any more)."""
        path = self.uri.removeprefix("sqlite:///").removeprefix("file://")
        return self.to in TRACKERS and "://" not in path and path.startswith("/") and not Path(path).exists()

    @property
    def offline(self) -> bool:
        """Whether what is written there waits for the user to upload it: W&B without an address."""
        return self.to == "wandb" and "://" not in self.uri

    @property
    def words(self) -> str:
        return f"{self.to} at {self.uri}"

    def record(self, run: Path) -> Path:
        """Return the file of a run that tells what was sent."""
        return run / FOLDER / f"{self.name}.json"

    def exporter(self) -> Exporter:
        """Return what sends there.

        Raises:
            TrackerError: its package is not installed or cannot be imported, or it does not answer.
            SpecError: there is no such module or callable of the user's own.
        """
        if self.to not in _BUILTINS:
            return called(load(self.to, {}, kind="exporter"), self)
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
        return called(make, self)


def called(make: Callable[..., Exporter], destination: Destination) -> Exporter:
    """Return the exporter that a callable makes of a place and a project.

    Raises:
        SpecError: it is none, takes other arguments, or makes something else.
    """
    hint = "it is called with uri=... and project=..., and returns an object with open"
    if not callable(make):
        raise SpecError(f"exporter {destination.to!r} is no callable", hint)
    given = {"uri": destination.uri, "project": destination.project}
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        raise SpecError(f"exporter {destination.to!r} cannot be called: {error}", hint) from error
    found = make(**given)
    if not callable(getattr(found, "open", None)):
        raise SpecError(f"exporter {destination.to!r} returns a {type(found).__name__} that has no open", hint)
    return found


def destination(
    to: str, *, uri: str | None, project: str | None, run: Path, job: str, environ: Mapping[str, str] = os.environ
) -> Destination:
    """Return where to send a run.

    Args:
        to: mlflow, wandb, tensorboard, or an import string.
        uri: the place; None for the tracker's own default, a folder or database in the run.
        project: None for the job's name.
        run: the run directory.
        job: the job's name.
        environ: where trackers look for their own settings.

    Raises:
        SpecError: the place holds a password.
    """
    try:
        found = without_password(uri) if uri else _default(to, run / FOLDER, environ)
    except ValueError as error:
        raise SpecError(f"--uri: {error}") from None
    return Destination(to, _absolute(to, found), project or job, home=str(run / FOLDER))


def _default(to: str, folder: Path, environ: Mapping[str, str]) -> str:
    if to == "mlflow":
        return without_password(environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}")
    return str(folder / to) if to in TRACKERS else ""


def _absolute(to: str, uri: str) -> str:
    """Return a place that means the same from every folder."""
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    if uri.startswith("file:///") and to in ("tensorboard", "wandb"):  # they take no URL of a folder
        uri = unquote(uri.removeprefix("file://"))
    if "://" in uri or to not in TRACKERS or (to == "mlflow" and uri.startswith("databricks")):
        return uri
    return str(Path(uri).expanduser().absolute())
