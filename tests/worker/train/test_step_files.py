"""A step of a training asks the file system nothing: the environment may lie on one that a thousand ranks share."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
HERE = Path(__file__).parents[3]
FIRST, LAST = 60, 160  # steps that are looked at: what is made once is made by then, and no row of steps is due
PROGRAM = """
import os, socket, sys, torch.distributed as dist
from pathlib import Path
import torch
import worker_jobs
from tula_cli.run.directory import RunDir
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import training, training_log

folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
spec = worker_jobs.make_spec(
    dataset={"args": {"size": 3200}}, train={"epochs": 1, "method": sys.argv[4], "checkpoint_every": 3600}
)
task = worker_jobs.make_train_task(spec)
training_log.TrainingLog.write_steps_when_due = lambda *_, **__: None
whole = training.loop.run_steps
seen, stat, watched = [], os.stat, False

def asked(path, *more, **options):
    if watched:
        seen.append(str(path))
    return stat(path, *more, **options)

os.stat = asked
sys.addaudithook(lambda event, arguments: seen.append(f"{event} {arguments}") if watched and event in EVENTS else None)
EVENTS = {"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir"}

def counted(trainer):
    global watched
    for number, step in enumerate(whole(trainer)):
        if number in (first, last):
            os.access(f"/the step {number}", 0)
            watched = number == first
        yield step

training.loop.run_steps = counted
run = RunDir.create(folder / "runs", spec)
run_training(task, run, Ranks(0, 1, 0, torch.device("cpu")), build_datasets(spec))
assert run.get_training(task.signature).read_result().steps > last
print("asked:", *seen, sep="\\n")
os._exit(0)
"""


def started(folder: Path, method: str, *tracer: str) -> str:
    """Run a training, under a tracer where one is given; return what it printed."""
    command = [*tracer, sys.executable, "-c", PROGRAM, str(folder), str(FIRST), str(LAST), method]
    path = f"{HERE}:{HERE / 'tests' / 'helpers'}"
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def traced() -> str:
    """Return strace, where it is there and may trace."""
    result = shutil.which("strace")
    works = (
        result and subprocess.run([result, "-o", "/dev/null", "true"], capture_output=True, check=False).returncode == 0
    )
    return result if result and works else ""


@pytest.mark.parametrize("method", [pytest.param("lbt", marks=pytest.mark.proof), "ags"])
def test_nothing_in_a_step_touches_the_file_system(tmp_path: Path, method: str) -> None:
    trace, tracer = tmp_path / "trace", traced()
    calls = "trace=%file,getdents64,fsync,fdatasync,ftruncate"
    words = [tracer, "-f", "--seccomp-bpf", "-qq", "-e", calls, "-o", str(trace)] if tracer else []
    answer = started(tmp_path, method, *words)
    assert answer.partition("asked:\n")[2] == "", "as Python sees it"
    if not tracer:
        return
    lines = trace.read_text(errors="replace").splitlines()
    first, last = (next(n for n, line in enumerate(lines) if f'"/the step {at}"' in line) for at in (FIRST, LAST))
    between = [line for line in lines[first + 1 : last] if not re.search(r"\bSIG\w+\b|exited", line)]
    assert between == [], f"{len(between)} calls in {LAST - FIRST} steps"
