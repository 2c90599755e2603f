"""steps.jsonl: what is kept of every step, bounded in size, cut where a training resumes.

Rows are added between steps, never in one. Before each checkpoint all rows are written, so that none has steps from both
sides of it; those beyond the checkpoint that a training resumes from are dropped, since their steps are made again.
"""

from collections.abc import Sequence
from dataclasses import replace

from tula_cli.run.files import open_to_add, write_atomic
from tula_cli.run.series.step_series import MOST_ROWS, StepRow, thinned, written
from tula_cli.run.training_run import TrainingRun


class StepFile:
    """The file of one training; rank 0's alone.

    Args:
        training: whose it is.
        most: rows from which on neighbours are joined.
    """

    def __init__(self, training: TrainingRun, *, most: int = MOST_ROWS) -> None:
        self.training, self.most = training, most
        self.count = 0  # rows in the file
        self.width = 1  # steps of a row to come
        self.open: list[StepRow] = []  # the steps of a row that is not full yet, joined
        self.last: StepRow | None = None  # where a training resumes: the newest row, with the newest norm

    def resume(self, samples: int) -> None:
        """Drop the rows beyond so many samples, and go on behind the others."""
        if not self.training.steps_path.exists():
            return
        rows = [row for row in self.training.step_rows() if row.samples <= samples]
        widest = max((row.steps for row in rows), default=1)
        self.width = 2 ** (widest - 1).bit_length()
        self.open, known = [], [row for row in rows if row.last is not None]
        # What GradScaler has skipped has no norm, and no part in the change of the next.
        self.last = replace(known[-1], samples=rows[-1].samples) if known else None
        self._rewrite(rows)

    def add(self, steps: Sequence[StepRow], *, close: bool) -> None:
        """Take steps, and write the rows that are full.

        Args:
            steps: the newest ones.
            close: write the last row although it is not full.
        """
        rows: list[StepRow] = []
        for step in steps:
            rows += self._next(step)
        if close and self.open:
            rows.append(self.open.pop())
        if not rows:
            return
        with open_to_add(self.training.steps_path) as file:
            file.write(written(rows).encode())
        self.count += len(rows)
        if self.count > self.most:
            self._thin()

    def _next(self, step: StepRow) -> list[StepRow]:
        """Add a step to the open row; return the rows that are full by that."""
        full: list[StepRow] = []
        if self.open and not step.follows(self.open[0]):
            full.append(self.open.pop())
        self.open = [self.open[0].joined(step) if self.open else step]
        if self.open[0].steps >= self.width:
            full.append(self.open.pop())
        return full

    def _thin(self) -> None:
        """Join neighbours, but none that a checkpoint stands between: a training may resume from that."""
        marks = sorted(int(path.stem) for path in self.training.checkpoints())

        def apart(before: int, after: int) -> bool:
            return any(before <= mark < after for mark in marks)

        self.width *= 2
        self._rewrite(thinned(self.training.step_rows(), most=self.width, apart=apart))

    def _rewrite(self, rows: Sequence[StepRow]) -> None:
        write_atomic(self.training.steps_path, written(rows))
        self.count = len(rows)
