"""steps.jsonl: what is kept of every step, bounded in size, cut where a training resumes.

Rows are added between steps, never in one. Before each checkpoint all rows are written, so that none has steps from both
sides of it; those beyond the checkpoint that a training resumes from are dropped, since their steps are made again.
"""

from collections.abc import Sequence

from tula_cli.run.files import open_to_append, write_atomic
from tula_cli.run.series.step_series import MOST_ROWS, StepRow, format_rows, join_neighbours
from tula_cli.run.training_run import TrainingRun

ROWS_PER_LINE = 32
"""Rows that are written at once, so that what a line begins with is little beside them."""


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
        self.held: list[StepRow] = []  # full, and not written yet
        self.open: list[StepRow] = []  # the steps of a row that is not full yet, joined
        self.last: StepRow | None = None  # where a training resumes: the newest row, with the newest norm

    def resume(self, samples: int) -> None:
        """Drop the rows beyond so many samples, and go on behind the others."""
        if not self.training.steps_path.exists():
            return
        rows = [row for row in self.training.step_rows() if row.samples <= samples]
        widest = max((row.steps for row in rows), default=1)
        self.width = 2 ** (widest - 1).bit_length()
        self.held, self.open, complete = [], [], [row for row in rows if row.last is not None]
        # What GradScaler has skipped has no norm, and no part in the change of the next.
        self.last = complete[-1]._replace(samples=rows[-1].samples) if complete else None
        self._rewrite(rows)

    def add(self, steps: Sequence[StepRow], *, close: bool) -> None:
        """Take steps, and write the rows that are full where they are enough for a line.

        Args:
            steps: the newest ones.
            close: write them all, the last row although it is not full.
        """
        for step in steps:
            self.held += self._add_to_open_row(step)
        if close and self.open:
            self.held.append(self.open.pop())
        if not self.held or (len(self.held) < ROWS_PER_LINE and not close):
            return
        rows, self.held = self.held, []
        with open_to_append(self.training.steps_path) as file:
            file.write(format_rows(rows).encode())
        self.count += len(rows)
        if self.count > self.most:
            self._join_neighbours()

    def _add_to_open_row(self, step: StepRow) -> list[StepRow]:
        """Add a step to the open row; return the rows that are full by that."""
        full: list[StepRow] = []
        if self.open and not step.follows(self.open[0]):
            full.append(self.open.pop())
        self.open = [self.open[0].join(step) if self.open else step]
        if self.open[0].steps >= self.width:
            full.append(self.open.pop())
        return full

    def _join_neighbours(self) -> None:
        """Join neighbours, but none that a checkpoint stands between: a training may resume from that."""
        marks = sorted(int(path.stem) for path in self.training.checkpoints())

        def apart(first: int, after: int) -> bool:
            return any(first <= mark < after for mark in marks)

        self.width *= 2
        self._rewrite(join_neighbours(self.training.step_rows(), most=self.width, must_stay_apart=apart))

    def _rewrite(self, rows: Sequence[StepRow]) -> None:
        write_atomic(self.training.steps_path, format_rows(rows))
        self.count = len(rows)
