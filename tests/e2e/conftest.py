"""Whole jobs on this machine, through the command line, as a user runs them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver import Tula

from tula_cli.run.records.tasks import TrainTask

JOB = """
name: e2e
model: {name: small_cnn, args: {in_channels: 1, width: 8}}
dataset: {name: digits}
optimizer: {name: SGD, lr: 0.05, momentum: 0.9, weight_decay: 5e-4}
schedule: {kind: multistep, milestones: [2], gamma: 0.5}
train: {epochs: 3, reference_batch: 32, workers: 0, method: ags}
search: {nodes: [1, 2], min_batch: 64, max_batch: 256, strategy: sweep, min_steps: 5, min_seconds: 0, max_seconds: 0.001,
         max_node_hours: 5}
"""


class LocalTula(Tula):
    """The command line, with jobs on this machine."""

    def ranks(self, task: TrainTask) -> list[int]:
        """Return the process ids of a task's ranks, found by their command line."""
        return [pid for pid, words in _ranks() if words[4:6] == [str(self.run().path), task.id]]

    def ranks_of(self, run: Path) -> list[int]:
        """Return the process ids of the ranks of any task of a run, which need not be there any more."""
        return [pid for pid, words in _ranks() if words[4] == str(run)]


def _ranks() -> Iterator[tuple[int, list[str]]]:
    for pid, words in _processes():
        if words[1:4] == ["-u", "-m", "tula_cli.worker"] and len(words) > 5:
            yield pid, words


def _processes() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(entry.name), words


@pytest.fixture
def tula(tmp_path: Path) -> Iterator[LocalTula]:
    result = LocalTula(tmp_path, JOB, TMPDIR=str(tmp_path))
    yield result
    _end_all(result)


def _end_all(tula: LocalTula) -> None:
    """Leave no process behind, whatever a test came to."""
    for pid, words in _processes():
        if any(str(tula.folder) in word for word in words) and pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
