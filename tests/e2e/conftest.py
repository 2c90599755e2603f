"""Whole jobs on this machine, through the command line, as a user runs them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tula_cli.records import TrainTask
from tula_cli.rundir import RunDir

JOB = """
name: e2e
model: {name: small_cnn, args: {in_channels: 1, width: 8}}
dataset: {name: digits}
optimizer: {name: SGD, lr: 0.05, momentum: 0.9, weight_decay: 5e-4}
schedule: {kind: multistep, milestones: [2], gamma: 0.5}
train: {epochs: 3, reference_batch: 32, workers: 0}
search: {nodes: [1, 2], min_batch: 64, max_batch: 256, steps: 5, warmup_steps: 2, max_node_hours: 5}
"""
PATIENCE = 180.0  # seconds; a loaded machine starts ranks slowly


class Tula:
    """The command line in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The lock that keeps jobs of one machine apart lies in TMPDIR: the tests do not wait for the user's jobs.
        self.environment = {**os.environ, "TMPDIR": str(folder), "COLUMNS": "120"}
        (folder / "job.yaml").write_text(JOB)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tula_cli", *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def __call__(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Run a command with --json to its end and return what it answered."""
        process = self.start(*arguments, "--json")
        answer, told = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, f"exit {process.returncode}: {answer}\n{told}\n{self.logs()}"
        found: dict[str, Any] = json.loads(answer)
        return found

    def run(self) -> RunDir:
        return RunDir.newest(self.folder / "tula-runs")

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("tula-runs/*/logs/*"))

    def until(self, true: Callable[[], Any]) -> Any:
        """Wait until something is so, and return it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if found := true():
                return found
            time.sleep(0.05)
        raise AssertionError(f"waited in vain\n{self.logs()}")

    def epochs_done(self) -> int:
        runs = RunDir.all(self.folder / "tula-runs")
        rows = [
            row
            for run in runs
            for name in run.train_signatures()
            for row in run.metrics(name)
            if row["kind"] == "epoch"
        ]
        return len(rows)

    def ranks(self, task: TrainTask) -> list[int]:
        """Return the process ids of a task's ranks, found by their command line; torchrun's begins otherwise."""
        return [
            pid for pid, words in _processes() if words[1:4] == ["-u", "-m", "tula_cli.worker"] and task.id in words
        ]


def _processes() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(entry.name), words


@pytest.fixture
def tula(tmp_path: Path) -> Iterator[Tula]:
    found = Tula(tmp_path)
    yield found
    _end_all(found)


def _end_all(tula: Tula) -> None:
    """Leave no process behind, whatever a test came to."""
    for pid, words in _processes():
        if any(str(tula.folder) in word for word in words) and pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
