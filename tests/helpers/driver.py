"""Starts the command line as a user does, in a folder of its own: for the tests of whole jobs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tula_cli.cluster import inspection
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import TrainTask

TIMEOUT_SECONDS = 240.0  # seconds; a loaded machine starts ranks slowly


def restore_sigint() -> None:
    """Restore the default SIGINT handler: a shell starts commands with `&` with SIGINT ignored, and children inherit this."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def weights_differ(one: Path, other: Path) -> bool:
    """Return whether the weights of two checkpoints differ in any bit."""
    import torch  # other tests have imported it in this process already

    first, second = (torch.load(path, weights_only=True)["model"] for path in (one, other))
    assert first.keys() == second.keys()
    return any(not torch.equal(first[key], second[key]) for key in first)


def slow_training_options(tula: "Tula", epochs: int, *, pause: float = 0.05) -> tuple[str, ...]:
    """Return options for a training of `epochs` epochs whose forward passes sleep for `pause` seconds."""
    shutil.copy(Path(__file__).with_name("emulated.py"), tula.folder)
    model = f"model={{name: 'emulated:Waiting', args: {{pause: {pause}}}}}"
    return "--set", model, "--set", f"train.epochs={epochs}"


class Tula:
    """The command line in a folder with job.yaml.

    The cached inspections of the model and the dataset are shared with the sibling folders, because many tests use the same job;
    the cache has its own tests.
    """

    def __init__(self, folder: Path, job: str, **environment: str) -> None:
        self.folder = folder
        self.environment = {**os.environ, "COLUMNS": "120", **environment}
        (folder / "job.yaml").write_text(job)
        shared = folder.parent / inspection.CACHE_FOLDER
        shared.mkdir(exist_ok=True)
        (folder / "tula-runs").mkdir()
        (folder / "tula-runs" / inspection.CACHE_FOLDER).symlink_to(shared)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tula_cli", *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=restore_sigint,
        )  # fmt: skip

    def __call__(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Run a command with --json to its end, and return its parsed output."""
        process = self.start(*arguments, "--json")
        answer, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == code, f"exit {process.returncode}: {answer}\n{errors}\n{self.logs()}"
        data: dict[str, Any] = json.loads(answer)
        return data

    def run(self) -> RunDir:
        return RunDir.find_newest(self.folder / "tula-runs")

    def task(self) -> TrainTask:
        """Return the newest task of the newest training."""
        run = self.run()
        task = run.get_training(run.list_train_signatures()[0]).read_newest_task()
        assert task is not None
        return task

    def logs(self) -> str:
        paths = [*self.folder.glob("tula-runs/*/logs/*"), *self.folder.glob("tula-runs/*/submitit/*.err")]
        return "\n".join(f"== {path}\n{path.read_text()[-2000:]}" for path in paths)

    def wait_until(self, condition: Callable[[], Any], *, seconds: float = TIMEOUT_SECONDS) -> Any:
        """Wait until a condition is true, and return its value."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if result := condition():
                return result
            time.sleep(0.1)
        raise AssertionError(f"condition still false after {seconds:g} s\n{self.logs()}")

    def epochs_done(self) -> int:
        runs = RunDir.list_all(self.folder / "tula-runs")
        rows = [
            row for run in runs for name in run.list_train_signatures() for row in run.get_training(name).read_metrics()
        ]
        return sum(row["kind"] == "epoch" for row in rows)
