"""Send a run to the trackers of its job file while a command waits; a separate process cannot delay the command."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tula_cli.run.directory import RunDir
from tula_cli.run.files import open_to_append
from tula_cli.services.events import Event, WarningEvent
from tula_cli.services.tracking import FOLDER

PATIENCE = 60.0
"""Seconds that a command waits at its end for the remaining values to be sent."""


class BackgroundExport:
    """A background process that sends a run to trackers while a command waits for its jobs.

    Probes on this machine are timed: there, values are sent after the jobs are over, so that the process does not share
    their cores.

    Args:
        run: the run whose jobs are waited for.
        jobs: ids of these jobs; None for trainings, of which some may not be submitted yet.
    """

    def __init__(self, run: RunDir, jobs: Sequence[str] | None) -> None:
        self.run = run
        self.process: subprocess.Popen[bytes] | None = None
        self.later = not run.read_spec().cluster.backend.has_queue and not _has_training(run, jobs)
        self.told = b""
        if not self.later:
            self._start()

    @property
    def log(self) -> Path:
        """Return the log of the trackers' libraries."""
        return self.run.path / FOLDER / "export.log"

    def _start(self, *how: str) -> None:
        words = [sys.executable, "-m", __package__, str(self.run.path.absolute()), "command", *how]
        with open_to_append(self.log) as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def news(self) -> Iterator[WarningEvent]:
        """Yield the warnings of the process since the last call; none of them is an error of the command."""
        if self.process is None or self.process.stdout is None:
            return
        self.told += self.process.stdout.read() or b""
        *lines, self.told = self.told.split(b"\n")
        for line in lines:
            yield WarningEvent(f"export: {line.decode(errors='replace')}; tula export sends what was missed")

    def end(self, *, patience: float = PATIENCE) -> Iterator[WarningEvent]:
        """Let the process send the remaining values, and yield its warnings.

        Args:
            patience: seconds to wait; after that the process finishes its current update in the background.
        """
        if self.later:
            self._start("once")
        if self.process is None or self.process.stdin is None:
            return
        self.process.stdin.close()
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            yield WarningEvent(f"export: it is still sending after {patience:.0f} s, and goes on by itself")
            return
        events = list(self.news())
        yield from events
        if code and not events:
            yield WarningEvent(
                f"export: it has ended with {code}, {self.log} tells why; tula export sends what was missed"
            )


def _has_training(run: RunDir, jobs: Sequence[str] | None) -> bool:
    """Return whether one of the jobs trains."""
    return jobs is None or any(task.job in jobs for task in run.read().train_tasks)


def export_while_waiting(run: RunDir, jobs: Sequence[str] | None, waiting: Iterable[Event]) -> Iterator[Event]:
    """Yield the events of waiting for jobs, and the warnings of sending the run meanwhile.

    Args:
        run, jobs: as in `BackgroundExport`.
        waiting: events of waiting for the jobs.
    """
    trackers = BackgroundExport(run, jobs)
    try:
        for event in waiting:
            yield event
            yield from trackers.news()
    except BaseException:
        list(trackers.end(patience=0.0))  # it looks once more, and nobody waits for that
        raise
    yield from trackers.end()
