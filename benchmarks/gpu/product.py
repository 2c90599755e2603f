"""The product's commands, run as a user runs them, and what they leave behind."""

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
class Answer:
    """How a command ended."""

    code: int
    answer: dict[str, Any]  # of --json; empty where it gave none
    text: str  # the end of what it said beside that

    @property
    def error(self) -> str:
        """What it said was wrong; empty where nothing was."""
        result = self.answer.get("error") or {}
        return str(result.get("message", "")) or (self.text.strip().splitlines() or [""])[-1]


def tula(*words: str, folder: Path, python: str = sys.executable, **environment: str) -> Answer:
    """Run a command of tula in a folder, with a TMPDIR of the folder's own."""
    return Answer(*_ended(start(*words, folder=folder, python=python, **environment)))


def start(
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


def _ended(started: "tuple[subprocess.Popen[str], Any]") -> tuple[int, dict[str, Any], str]:
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


def finish(started: "tuple[subprocess.Popen[str], Any]") -> Answer:
    """Wait for a command that was started."""
    return Answer(*_ended(started))


def write_job(folder: Path, content: dict[str, Any]) -> Path:
    """Write a job.yaml."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def loader_processes(wanted: int, *, batch: int, trainings: int = 1) -> int:
    """Return the loader processes that are wanted, or none where /dev/shm does not hold what they make ahead.

    Args:
        wanted: of each training.
        batch: bytes.
        trainings: at a time.
    """
    needed = trainings * estimate_data_memory([1], sample=batch, ranks=1, workers=wanted, on_gpu=True).shared
    return wanted if needed <= (read_shared_memory() or 0) else 0


def newest(folder: Path) -> RunDir:
    """Return the run that commands in a folder have made."""
    return RunDir.find_newest(folder / "tula-runs")


def settings(values: Sequence[str]) -> list[str]:
    """Return the words of --set."""
    return [word for value in values for word in ("--set", value)]
