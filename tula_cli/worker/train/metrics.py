"""The rows of metrics.jsonl and of steps.jsonl."""

import json
import math
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.run.directory import RunDir
from tula_cli.run.files import append_json_line, open_file, open_to_append, read_lines, write_atomic
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.secrets import remove_secrets
from tula_cli.run.step_series import MOST_ROWS, StepRow, format_rows, join_neighbours
from tula_cli.run.training_run import TrainingRun, is_row
from tula_cli.worker.build.data import Position

# --- The file of steps
#
# Rows are added between steps, never in one. Before each checkpoint all rows are written, so that none has steps from both
# sides of it; those beyond the checkpoint that a training resumes from are dropped, since their steps are made again.

ROWS_PER_LINE = 32
"""Rows that are written at once, so that the start of a line is short compared with them."""


class StepFile:
    """The file of steps of one training; used on rank 0 alone.

    Args:
        training: whose steps are written.
        most: number of rows beyond which neighbouring rows are joined.
    """

    def __init__(self, training: TrainingRun, *, most: int = MOST_ROWS) -> None:
        self.training, self.most = training, most
        self.count = 0  # rows in the file
        self.width = 1  # steps of a row to come
        self.complete_rows: list[StepRow] = []  # full, and not written yet
        self.open: list[StepRow] = []  # the steps of a row that is not full yet, joined
        self.last: StepRow | None = None  # where a training resumes: the newest row, with the newest norm

    def resume(self, samples: int) -> None:
        """Drop the rows beyond `samples`, and continue after the others."""
        if not self.training.steps_path.exists():
            return
        rows = [row for row in self.training.read_step_rows() if row.samples <= samples]
        widest = max((row.steps for row in rows), default=1)
        self.width = 2 ** (widest - 1).bit_length()
        self.complete_rows, self.open, complete = [], [], [row for row in rows if row.last is not None]
        # What GradScaler has skipped has no norm, and no part in the change of the next.
        self.last = complete[-1]._replace(samples=rows[-1].samples) if complete else None
        self._rewrite(rows)

    def add(self, steps: Sequence[StepRow], *, close: bool) -> None:
        """Add steps, and write the full rows if they are enough for a line.

        Args:
            steps: the newest ones.
            close: write all rows, including the last one even if it is not full.
        """
        for step in steps:
            self.complete_rows += self._add_to_open_row(step)
        if close and self.open:
            self.complete_rows.append(self.open.pop())
        if not self.complete_rows or (len(self.complete_rows) < ROWS_PER_LINE and not close):
            return
        rows, self.complete_rows = self.complete_rows, []
        with open_to_append(self.training.steps_path) as file:
            file.write(format_rows(rows).encode())
        self.count += len(rows)
        if self.count > self.most:
            self._join_neighbours()

    def _add_to_open_row(self, step: StepRow) -> list[StepRow]:
        """Add a step to the open row; return the rows that become full."""
        full: list[StepRow] = []
        if self.open and not step.follows(self.open[0]):
            full.append(self.open.pop())
        self.open = [self.open[0].join(step) if self.open else step]
        if self.open[0].steps >= self.width:
            full.append(self.open.pop())
        return full

    def _join_neighbours(self) -> None:
        """Join neighbouring rows, except those on both sides of a checkpoint: a training may resume from it."""
        marks = sorted(int(path.stem) for path in self.training.list_checkpoints())

        def are_apart(first: int, after: int) -> bool:
            return any(first <= mark < after for mark in marks)

        self.width *= 2
        self._rewrite(join_neighbours(self.training.read_step_rows(), most=self.width, must_stay_apart=are_apart))

    def _rewrite(self, rows: Sequence[StepRow]) -> None:
        write_atomic(self.training.steps_path, format_rows(rows))
        self.count = len(rows)


# --- The file of metrics

LOG_SECONDS = 1.0
"""At most one step row per second: enough for a live view, and a small load on a shared file system."""


class MetricsFile:
    """metrics.jsonl: one JSON object per line, appended by rank 0; other ranks write nothing.

    Rows beyond `samples`, from which the run resumes, are dropped: those steps are trained again. A damaged row before
    that is kept: `tula status` reports it as long as it exists.
    """

    def __init__(self, run: RunDir, task: TrainTask, *, is_first: bool, samples: int) -> None:
        self.path = run.get_training(task.signature).metrics_path
        self.run, self.task, self.first, self.samples = run, task, is_first, samples
        self.steps = StepFile(run.get_training(task.signature))  # of every one

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
            **remove_secrets(_replace_non_finite(values)),
        }
        append_json_line(self.path, row)


def compute_mean_step_time(rows: Iterable[dict[str, Any]], configuration: tuple[int, int, int]) -> float | None:
    """Return the step time (s) over all epochs of all attempts at these nodes, batch and micro-batch; None without any.

    A late epoch alone may have only two steps, and a speed that differs from the training that was predicted.
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
    return compute_trimmed_mean(times) if times else None


def _replace_non_finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with nan and infinity replaced by null, because JSON cannot represent them."""
    return {
        name: _replace_non_finite(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in values.items()
    }
