"""The command line as a user starts it, in a folder of its own: for the tests of whole jobs."""

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

PATIENCE = 240.0  # seconds; a loaded machine starts ranks slowly


def hears_ctrl_c() -> None:
    """Undo what a shell does to commands it starts with `&`, and they pass on to their children: to ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def weights_differ(one: Path, other: Path) -> bool:
    """Return whether two checkpoints' weights differ in a single bit."""
    import torch  # beside other tests this process has imported it already

    first, second = (torch.load(path, weights_only=True)["model"] for path in (one, other))
    assert first.keys() == second.keys()
    return any(not torch.equal(first[key], second[key]) for key in first)


def waiting(tula: "Tula", epochs: int, *, pause: float = 0.05) -> tuple[str, ...]:
    """Return options for a training of so many epochs whose forward passes take a pause (seconds) and no core."""
    shutil.copy(Path(__file__).with_name("emulated.py"), tula.folder)
    model = f"model={{name: 'emulated:Waiting', args: {{pause: {pause}}}}}"
    return "--set", model, "--set", f"train.epochs={epochs}"


class Tula:
    """The command line in a folder that holds job.yaml.

    What building the model and the dataset has told is shared with the folders beside it: many tests use the same job,
    and that it is kept, and when it is not, has tests of its own.
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
            stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=hears_ctrl_c,
        )  # fmt: skip

    def __call__(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Run a command with --json to its end and return what it answered."""
        process = self.start(*arguments, "--json")
        answer, errors = process.communicate(timeout=PATIENCE)
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

    def until(self, true: Callable[[], Any], *, seconds: float = PATIENCE) -> Any:
        """Wait until something is so, and return it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if result := true():
                return result
            time.sleep(0.1)
        raise AssertionError(f"waited in vain\n{self.logs()}")

    def epochs_done(self) -> int:
        runs = RunDir.list_all(self.folder / "tula-runs")
        rows = [
            row for run in runs for name in run.list_train_signatures() for row in run.get_training(name).read_metrics()
        ]
        return sum(row["kind"] == "epoch" for row in rows)
