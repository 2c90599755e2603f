"""The rows of metrics.jsonl, and with them those of steps.jsonl."""

import json
import math
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from tula_cli.models.time.noise import trimmed_mean
from tula_cli.run.directory import RunDir
from tula_cli.run.files import append_json_line, open_file, read_lines, write_atomic
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.source.keys import values_without_secrets
from tula_cli.run.training_run import is_row
from tula_cli.worker.build.sampling import Position
from tula_cli.worker.train.watching.step_file import StepFile

LOG_SECONDS = 1.0
"""At most one step row a second: enough for a live view, little enough for a shared file system."""


class MetricsFile:
    """metrics.jsonl: one JSON object a line, appended by rank 0; other ranks write nothing.

    Rows beyond `samples`, where the run resumes, are dropped: those steps are trained again. A damaged row before that is
    kept: `tula status` names it as long as it is there.
    """

    def __init__(self, run: RunDir, task: TrainTask, *, is_first: bool, samples: int) -> None:
        self.path = run.training(task.signature).metrics_path
        self.run, self.task, self.first, self.samples = run, task, is_first, samples
        self.steps = StepFile(run.training(task.signature))  # of every one

    def __enter__(self) -> "MetricsFile":
        if self.first:
            self._drop_later_rows()
            self.steps.resume(self.samples)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.steps.add([], close=True)  # also of a training that has broken down: its last steps tell why

    def _drop_later_rows(self) -> None:
        if not self.path.exists():
            return
        retained: list[bytes] = []
        damaged: list[bytes] = []  # since the last row that is kept
        with open_file(self.path) as file:
            for line in read_lines(file):
                if not is_row(line):
                    damaged.append(line.strip(b"\0\n") + b"\n")
                elif json.loads(line).get("samples", 0) <= self.samples:
                    retained += [*damaged, line]
                    damaged.clear()
        write_atomic(self.path, b"".join(retained))

    def add(self, kind: str, position: Position, epoch: float, **values: Any) -> None:
        if not self.first:
            return
        row = {
            "kind": kind,
            "time": time.time(),
            "samples": position.samples,
            "epoch": epoch,
            **values_without_secrets(_replace_non_finite(values)),
        }
        append_json_line(self.path, row)


def mean_step_time(rows: Iterable[dict[str, Any]], configuration: tuple[int, int, int]) -> float | None:
    """Return the step time (s) over all epochs at these nodes, batch and micro-batch, of whatever attempt; None without any.

    A late epoch alone may have two steps, and another speed than the training that the prediction is of.
    """
    alike, times = False, []
    _, own_batch, micro_batch = configuration
    for row in rows:
        if row["kind"] == "start":
            # An older tula wrote no micro-batch.
            alike = configuration == (row["nodes"], row["batch"], row.get("micro_batch", micro_batch))
        elif (
            row["kind"] == "epoch"
            and alike
            and row["step_time"] is not None
            and row.get("batch", own_batch) == own_batch
        ):
            times.append(row["step_time"])
    return trimmed_mean(times) if times else None


def _replace_non_finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with nan and infinity as null: JSON has neither."""
    return {
        name: _replace_non_finite(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in values.items()
    }
