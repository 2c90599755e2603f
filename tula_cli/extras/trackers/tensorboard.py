"""TensorBoard export: event files written by the package tensorboard, without torch or TensorFlow."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text import metadata as text
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from tula_cli.extras.trackers.destination import Point, Scalar, State, TrackerRun

_MAX_TABLE_SETTINGS = 40
"""Maximum number of settings for which a run is shown in the HPARAMS table; a whole job has more and becomes text."""


class TensorBoardRun:
    """A folder of event files."""

    def __init__(self, folder: Path, run: TrackerRun) -> None:
        self.id, self.started = folder.name, run.started
        folder.mkdir(parents=True, exist_ok=True)
        self.writer = EventFileWriter(str(folder))

    def params(self, values: Mapping[str, Scalar]) -> None:
        self._write_text("parameters", _render_table(values))
        if len(values) <= _MAX_TABLE_SETTINGS:
            self._write_summary(hparams.hparams_pb(dict(values), trial_id=self.id, start_time_secs=self.started), at=0)

    def tags(self, values: Mapping[str, str]) -> None:
        self._write_text("notes", _render_table(values))

    def points(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._write_summary(Summary(value=values), at=point.samples, wall_time=point.time)
        self.writer.flush()

    def summary(self, values: Mapping[str, float], *, samples: int) -> None:
        summary_values = [Summary.Value(tag=f"summary/{name}", simple_value=value) for name, value in values.items()]
        self._write_summary(Summary(value=summary_values), at=samples)

    def artifact(self, path: Path) -> None:
        """Record a text file as text; other files are left out, because TensorBoard does not show files."""
        if path.suffix in (".md", ".txt"):
            self._write_text(path.name, path.read_text(encoding="utf-8"))
        elif path.suffix in (".yaml", ".csv"):
            self._write_text(path.name, f"```\n{path.read_text(encoding='utf-8')}\n```")

    def close(self, state: State, *, at: float) -> None:
        del at  # TensorBoard has no event for the end of a run
        if state != "running":
            self._write_text("state", state)
        self.writer.flush()
        self.writer.close()

    def _write_text(self, tag: str, markdown: str) -> None:
        value = Summary.Value(
            tag=tag,
            metadata=text.create_summary_metadata(display_name=tag, description=""),
            tensor=tensor_util.make_tensor_proto([markdown.encode()]),
        )
        self._write_summary(Summary(value=[value]), at=0)

    def _write_summary(self, summary: Summary, *, at: int, wall_time: float | None = None) -> None:
        self.writer.add_event(Event(wall_time=wall_time or time.time(), step=at, summary=summary))


def _render_table(values: Mapping[str, Scalar]) -> str:
    rows = [f"| {name} | {_render_cell(value)} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _render_cell(value: Scalar) -> str:
    return (value if isinstance(value, str) else json.dumps(value)).replace("|", "\\|").replace("\n", " ")


class TensorBoardExporter:
    """A folder for `tensorboard --logdir`, with a subfolder per run of tula, and per training of the run."""

    def __init__(self, *, uri: str, project: str) -> None:
        del project  # TensorBoard has no projects
        self.folder = Path(uri)

    def open(self, run: TrackerRun, *, known: str | None) -> TensorBoardRun:
        del known  # the folder identifies the run
        return TensorBoardRun(self.folder / run.group / run.key, run)


exporter = TensorBoardExporter
