"""MLflow export: a run of tula with its trainings as nested runs, by mlflow or mlflow-skinny."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tula_cli.extras.trackers.destination import Point, Scalar, State, TrackerRun

# Short timeouts, so that a server that is down does not block a command; the next update tries again.
for _name, _value in (
    ("MLFLOW_DISABLE_TELEMETRY", "true"),
    ("MLFLOW_LOGGING_LEVEL", "WARNING"),
    ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),
    ("MLFLOW_HTTP_REQUEST_TIMEOUT", "30"),
    ("MLFLOW_ALLOW_FILE_STORE", "true"),  # a folder as URI was set by the user
):
    os.environ.setdefault(_name, _value)

from mlflow.entities import Metric, Param, RunTag  # noqa: E402 - it reads these when it is imported
from mlflow.tracking import MlflowClient  # noqa: E402

ARTIFACT_FOLDER = "mlartifacts"
"""Folder of artifacts next to a local database."""
_MAX_METRICS_PER_CALL, _MAX_PARAMS_PER_CALL = 1000, 100
"""Maximum numbers of metrics, and of parameters or tags, per call."""
_MAX_VALUE_CHARACTERS = 500
"""Maximum length of a value, in characters, that every server version accepts."""
_STATES = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


class MlflowRun:
    """A run of MLflow."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self.client, self.id = client, run_id
        self.given = set(client.get_run(run_id).data.params)  # parameters cannot be changed

    def params(self, values: Mapping[str, Scalar]) -> None:
        params = [Param(_make_metric_key(name), str(value)[:_MAX_VALUE_CHARACTERS]) for name, value in values.items()]
        self._log_in_batches("params", [param for param in params if param.key not in self.given], _MAX_PARAMS_PER_CALL)
        self.given |= {param.key for param in params}

    def tags(self, values: Mapping[str, str]) -> None:
        tags = [RunTag(_make_metric_key(name), value[:_MAX_VALUE_CHARACTERS]) for name, value in values.items()]
        self._log_in_batches("tags", tags, _MAX_PARAMS_PER_CALL)

    def points(self, points: Sequence[Point]) -> None:
        metrics = [
            Metric(_make_metric_key(name), value, round(1000 * point.time), point.samples)
            for point in points
            for name, value in point.values.items()
        ]
        self._log_in_batches("metrics", metrics, _MAX_METRICS_PER_CALL)

    def summary(self, values: Mapping[str, float], *, samples: int) -> None:
        now = round(1000 * time.time())
        metrics = [Metric(_make_metric_key(name), value, now, samples) for name, value in values.items()]
        self._log_in_batches("metrics", metrics, _MAX_METRICS_PER_CALL)

    def _log_in_batches(self, kind: str, items: Sequence[Any], size: int) -> None:
        for begin in range(0, len(items), size):
            batch: dict[str, Any] = {kind: items[begin : begin + size]}
            self.client.log_batch(self.id, **batch)

    def artifact(self, path: Path) -> None:
        self.client.log_artifact(self.id, str(path))

    def close(self, state: State, *, at: float) -> None:
        if state == "running":
            self.client.update_run(self.id, status=_STATES[state])
        else:
            self.client.set_terminated(self.id, _STATES[state], end_time=round(1000 * at))


class MlflowExporter:
    """An experiment (the project) on a tracking server, in a database or in a folder (the URI)."""

    def __init__(self, *, uri: str, project: str) -> None:
        files = None
        if uri.startswith("sqlite:///"):  # the default is relative to the current folder
            folder = Path(uri.removeprefix("sqlite:///")).parent
            folder.mkdir(parents=True, exist_ok=True)
            files = (folder / ARTIFACT_FOLDER / _make_metric_key(project)).as_uri()
        self.client = MlflowClient(tracking_uri=uri)
        existing = self.client.get_experiment_by_name(project)
        self.experiment = existing.experiment_id if existing else self.client.create_experiment(project, files)

    def open(self, run: TrackerRun, *, known: str | None) -> MlflowRun:
        if known is not None:
            return MlflowRun(self.client, known)
        tags = {"tula.run": run.group, "tula.kind": run.kind, "tula.key": run.key}
        if run.parent is not None:
            tags["mlflow.parentRunId"] = run.parent
        began = round(1000 * run.started)
        tracked = self.client.create_run(self.experiment, start_time=began, tags=tags, run_name=run.name)
        return MlflowRun(self.client, tracked.info.run_id)


exporter = MlflowExporter


def _make_metric_key(name: str) -> str:
    """Replace characters that MLflow does not accept in a name."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]
