"""MLflow export: a run of tula with its probes and trainings as nested runs, by mlflow or mlflow-skinny."""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from tula_cli.errors import TrackerError
from tula_cli.extras.trackers.destination import Point, Scalar, State, TrackerRun

# A tool that only writes has nothing to tell of its use; and a server that is down is tried again by the next look.
for _name, _value in (
    ("MLFLOW_DISABLE_TELEMETRY", "true"),
    ("MLFLOW_LOGGING_LEVEL", "WARNING"),
    ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),
    ("MLFLOW_HTTP_REQUEST_TIMEOUT", "30"),
    ("MLFLOW_ALLOW_FILE_STORE", "true"),  # who names a folder means it
):
    os.environ.setdefault(_name, _value)

from mlflow.entities import Metric, Param, RunTag  # noqa: E402 - it reads these when it is imported
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository  # noqa: E402
from mlflow.tracking import MlflowClient  # noqa: E402

T = TypeVar("T")
FILES = "mlartifacts"
"""Folder of artifacts next to a local database, or in a local file store."""
_METRICS, _OTHERS = 1000, 100
"""Maximum numbers of metrics, and of parameters or tags, per call."""
_LONGEST = 500
"""Maximum length of a value, in characters, that every server version accepts."""
_STATES = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


class MlflowRun:
    """A run of MLflow; logged points cannot be removed, so steps that are trained again are not sent again."""

    def __init__(self, client: MlflowClient, run_id: str, *, new: bool) -> None:
        self.client, self._id = client, run_id
        self.newest: dict[str, int] = {}  # step of each metric that MLflow was asked for
        with _convert_errors():
            existing = client.get_run(run_id)
        self.place: str = existing.info.artifact_uri
        self.given = dict(existing.data.params)  # parameters cannot be changed
        # metrics that may hold more than is known to be sent
        self.before: frozenset[str] = frozenset(() if new else existing.data.metrics)

    @property
    def id(self) -> str:
        return self._id

    def _newest_step(self, metric: str) -> int:
        """Return the newest step that existed when the run was opened; -1 if there was none."""
        if metric not in self.before:
            return -1
        if metric not in self.newest:
            history = self.client.get_metric_history(self._id, metric)
            self.newest[metric] = max((point.step for point in history), default=-1)
        return self.newest[metric]

    def params(self, values: Mapping[str, Scalar]) -> None:
        words = {_make_key(name): _format_value(value) for name, value in values.items()}
        new = [Param(name, value) for name, value in words.items() if name not in self.given]
        with _convert_errors():
            for some in _split_into_chunks(new, _OTHERS):
                self.client.log_batch(self._id, params=some)
        self.given |= {param.key: param.value for param in new}
        self.tags({f"param.{name}": value for name, value in words.items() if self.given[name] != value})

    def tags(self, values: Mapping[str, str]) -> None:
        with _convert_errors():
            for some in _split_into_chunks(
                [RunTag(_make_key(name), value[:_LONGEST]) for name, value in values.items()], _OTHERS
            ):
                self.client.log_batch(self._id, tags=some)

    def points(self, points: Sequence[Point]) -> None:
        metrics = (
            Metric(_make_key(name), value, round(1000 * point.time), point.samples)
            for point in points
            for name, value in point.values.items()
            if point.samples > self._newest_step(_make_key(name))
        )
        with _convert_errors():
            for some in _split_into_chunks(metrics, _METRICS):
                self.client.log_batch(self._id, metrics=some)

    def summary(self, values: Mapping[str, float], *, at: Point | None) -> None:
        step, now = at.samples if at else 0, round(1000 * time.time())
        with _convert_errors():
            for some in _split_into_chunks(
                [Metric(_make_key(name), value, now, step) for name, value in values.items()], _METRICS
            ):
                self.client.log_batch(self._id, metrics=some)

    def rewind(self, samples: int) -> bool:
        del samples
        return False

    def artifact(self, path: Path) -> None:
        with _convert_errors():
            if self.place.startswith("file:"):  # the client takes a copied run, whose ids are the same, for the first
                files: Any = get_artifact_repository(self.place)
                files.log_artifact(str(path))
            else:
                self.client.log_artifact(self._id, str(path))

    def close(self, state: State, *, at: float) -> None:
        with _convert_errors():
            if state == "running":
                self.client.update_run(self._id, status=_STATES[state])
            else:
                self.client.set_terminated(self._id, _STATES[state], end_time=round(1000 * at))


class MlflowExporter:
    """An experiment (the project) on a tracking server, in a database or in a folder (the URI)."""

    def __init__(self, *, uri: str, project: str) -> None:
        local = _get_local_folder(uri)
        with _convert_errors():
            if local is not None:
                local.mkdir(parents=True, exist_ok=True)
            self.client = MlflowClient(tracking_uri=uri)
            existing = self.client.get_experiment_by_name(project)
            # A local store would put files below the folder that the command happens to run in.
            place = None if local is None else (local / FILES / _make_key(project)).as_uri()
            self.experiment = existing.experiment_id if existing else self.client.create_experiment(project, place)
        if existing and place is not None:
            _require_unmoved(uri, before=existing.artifact_location, now=place)

    def open(self, run: TrackerRun, *, known: str | None, after: int | None) -> MlflowRun:
        del after  # MLflow is asked for the newest step of each metric
        if known is not None:
            return MlflowRun(self.client, known, new=False)
        tags = {"tula.run": run.group, "tula.kind": run.kind, "tula.key": run.key}
        if run.parent is not None:
            tags["mlflow.parentRunId"] = run.parent
        with _convert_errors():
            began = round(1000 * run.started)
            made = self.client.create_run(self.experiment, start_time=began, tags=tags, run_name=run.name)
        return MlflowRun(self.client, made.info.run_id, new=True)


exporter = MlflowExporter


@contextlib.contextmanager
def _convert_errors() -> Iterator[None]:
    """Convert errors of MLflow, its database or the network to TrackerError."""
    try:
        yield
    except (MlflowException, OSError) as error:
        raise TrackerError(
            f"mlflow: {_shorten_message(str(error))}", "what was not sent is sent by the next tula export"
        ) from error
    except ModuleNotFoundError as error:
        raise TrackerError(
            f"mlflow: there is no package {error.name}, which a database as its store needs",
            "pip install 'tula-cli[trackers]'",
        ) from error


def _require_unmoved(uri: str, *, before: str, now: str) -> None:
    """Reject the store of a run that was moved or copied, because MLflow would write files to the previous folder.

    Args:
        uri: URI of the store.
        before: artifact folder recorded in the store.
        now: artifact folder next to the store.

    Raises:
        TrackerError: the store was moved.
    """
    inside = f"/exports/{now.rpartition('/exports/')[2]}"
    is_elsewhere = before.startswith("file://") and before.endswith(inside) and "/exports/" in now
    if is_elsewhere and _get_path(before).resolve() != _get_path(now).resolve():
        raise TrackerError(
            f"mlflow: the run was moved or copied, and its store {uri} still names {before} for files",
            "remove this store: then all is sent again to a new one; or name another place with --uri",
        )


def _get_path(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


def _shorten_message(text: str) -> str:
    """Return the first line of an error message without connection internals, shortened to 200 characters."""
    line = (text.strip().splitlines() or ["no answer"])[0].partition(" with exception ")[0]
    return line if len(line) <= 200 else f"{line[:197]}..."


def _split_into_chunks(items: Iterator[T] | Sequence[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while some := list(islice(remaining, size)):
        yield some


def _make_key(name: str) -> str:
    """Replace characters that MLflow does not accept in a name."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]


def _format_value(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _get_local_folder(uri: str) -> Path | None:
    """Return the folder of a local store; None for a server."""
    if uri.startswith("sqlite:///"):
        return Path(uri.removeprefix("sqlite:///")).parent
    parts = urlsplit(uri)
    return Path(parts.path) if parts.scheme in ("", "file") and not uri.startswith("databricks") else None
