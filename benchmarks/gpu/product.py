"""Runs commands of tula as a user does, and reads their results."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tula_cli.host.machine import read_shared_memory
from tula_cli.models.memory import estimate_data_memory
from tula_cli.run.directory import RunDir


@dataclass(frozen=True)
class CommandOutcome:
    """The outcome of a command."""

    code: int
    answer: dict[str, Any]  # output of --json; empty if there was none
    text: str  # end of its other output

    @property
    def error(self) -> str:
        """The message of the error; empty if there was none."""
        result = self.answer.get("error") or {}
        return str(result.get("message", "")) or (self.text.strip().splitlines() or [""])[-1]


def run_tula(*words: str, folder: Path, python: str = sys.executable, **environment: str) -> CommandOutcome:
    """Run a command of tula in a folder, with its own TMPDIR."""
    return CommandOutcome(*_read_outcome(start_tula(*words, folder=folder, python=python, **environment)))


def start_tula(
    *words: str, folder: Path, python: str = sys.executable, **environment: str
) -> "tuple[subprocess.Popen[str], Any]":
    """Start a command of tula; `_ended` waits for it."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `finish` closes it
    process = subprocess.Popen(
        [python, "-m", "tula_cli", *words, "--json"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "tmp"), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    return process, errors


def _read_outcome(started: "tuple[subprocess.Popen[str], Any]") -> tuple[int, dict[str, Any], str]:
    process, errors = started
    output, _ = process.communicate()
    errors.seek(0)
    text = errors.read()[-2000:]
    errors.close()
    sys.stderr.write(text)
    try:
        answer = json.loads(output)
    except ValueError:
        return process.returncode, {}, output[-2000:] + text
    return process.returncode, answer if isinstance(answer, dict) else {}, text


def wait_for_tula(started: "tuple[subprocess.Popen[str], Any]") -> CommandOutcome:
    """Wait for a started command."""
    return CommandOutcome(*_read_outcome(started))


def write_job(folder: Path, content: dict[str, Any]) -> Path:
    """Write a job.yaml."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def limit_loader_processes(wanted: int, *, batch: int, trainings: int = 1) -> int:
    """Return the requested number of loader processes, or 0 if /dev/shm is too small for their prefetched batches.

    Args:
        wanted: number per training.
        batch: bytes.
        trainings: that run at a time.
    """
    needed = trainings * estimate_data_memory([1], sample=batch, ranks=1, workers=wanted, on_gpu=True).shared
    return wanted if needed <= (read_shared_memory() or 0) else 0


def find_newest_run(folder: Path) -> RunDir:
    """Return the newest run in a folder."""
    return RunDir.find_newest(folder / "tula-runs")


def set_arguments(values: Sequence[str]) -> list[str]:
    """Return the command-line arguments of --set."""
    return [word for value in values for word in ("--set", value)]
