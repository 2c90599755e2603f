"""CPU seconds and files read of one `tula status` and one `tula list`, without a cluster.

    python benchmarks/status/status.py [--jobs 66 250 1000] [--runs 300] [--json]

For each number of jobs, a run directory with this number of finished SLURM trainings (a task, a job, an attempt, a result and a summary
each) is created in a temporary folder and read once as by `tula status`, in this process; squeue is replaced by a function that answers
"ended" for all. `files` is the number of files in the run, `reads` how many of them were opened. For each number of runs, `tula list`
lists a folder with this number of runs with eight results each; its CPU seconds are those of the whole process, the minimum of three.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.cluster.slurm import queue, submit
from tula_cli.run import files
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.records.probes import OutOfMemory
from tula_cli.run.records.results import Summary, TrainResult
from tula_cli.run.records.tasks import Rung, TrainTask, make_probe_id
from tula_cli.services import run_list, status
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job

JOB = {
    "name": "looked-at",
    "model": {"name": "resnet18"},
    "dataset": {"name": "digits"},
    "optimizer": {"lr": 0.1},
    "train": {"epochs": 4},
    "search": {"nodes": [1, 2], "max_node_hours": 10},
    "cluster": {"kind": "slurm", "minutes": 10},
}
START = 1_700_000_000.0  # Unix time


@dataclass(frozen=True)
class Cost:
    """The cost of one command."""

    what: str
    count: int
    files: int
    reads: int
    cpu: float  # seconds


def main() -> None:
    options = _parse_arguments()
    # The files need not survive a crash, and syncing would take most of the time.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "fsync"):
        costs = [_measure_status(Path(folder) / f"status-{count}", count) for count in options.jobs]
        costs += [_measure_list(Path(folder) / f"list-{count}", count) for count in options.runs]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs]))
        return
    print(f"{'':8}{'count':>7}{'files':>8}{'reads':>8}{'CPU s':>9}")
    for cost in costs:
        print(f"{cost.what:8}{cost.count:7}{cost.files:8}{cost.reads:8}{cost.cpu:9.2f}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[66, 250, 1000])
    parser.add_argument("--runs", type=int, nargs="+", default=[300])
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _measure_status(root: Path, jobs: int) -> Cost:
    run = make_run(root, jobs)

    def ended(ids: Sequence[str], **_: bool) -> dict[str, SchedulerState]:
        return {id_: SchedulerState("ended") for id_ in ids}

    with mock.patch.object(queue, "query_states", ended):
        look = _make_measurement("status", lambda: status.read_run_status(run, submit.SlurmLauncher(), now=START + 999))
    return look(jobs, run.path)


def _measure_list(root: Path, runs: int) -> Cost:
    spec = validate_job(JOB, source="benchmark")
    for number in range(runs):
        run = RunDir.create(root, spec.model_copy(update={"name": f"run-{number:04d}"}))
        for size in range(8):
            run.write_result(_make_result(2**size))
    cost = _make_measurement("list", lambda: run_list.list_runs(root))(runs, root)
    return replace(cost, cpu=min(_measure_process("list", "--run-dir", str(root)) for _ in range(3)))


def _measure_process(*arguments: str) -> float:
    """Return the CPU seconds of a tula command in a separate process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([sys.executable, "-m", "tula_cli", *arguments], check=True, capture_output=True, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _make_measurement(what: str, look: Callable[[], object]) -> Callable[[int, Path], Cost]:
    with count_reads() as reads:
        before = time.process_time()
        look()
        cpu = time.process_time() - before
    return lambda count, folder: Cost(what, count, sum(p.is_file() for p in folder.rglob("*")), len(reads), cpu)


@contextmanager
def count_reads() -> Iterator[list[Path]]:
    """Collect the files of runs that are read by the enclosed code, one entry per read."""
    reads: list[Path] = []
    content = files.read_content

    def counting(path: Path) -> bytes:
        reads.append(path)
        return content(path)

    with mock.patch.object(files, "read_content", counting):
        yield reads


def make_run(root: Path, jobs: int) -> RunDir:
    """Return a run with `jobs` finished SLURM trainings, each with all its files."""
    spec = validate_job(JOB, source="benchmark")
    run = RunDir.create(root, spec)
    for number in range(jobs):
        _add_training(run, spec, f"{number:08x}", scheduler_id=str(1000 + number))
    return run


def _add_training(run: RunDir, spec: JobSpec, signature: str, *, scheduler_id: str) -> None:
    name, numbers = f"train-{signature}", {"loss": 0.9, "top1": 81.0}
    run.write_task(
        TrainTask(
            id=f"{name}-1", job=name, spec=spec, workdir="/", nodes=2, signature=signature, attempt=1,
            ladder=(Rung(batch=128), Rung(batch=64)), workers=2,
        )
    )  # fmt: skip
    run.write_job(Job(id=name, scheduler="slurm", scheduler_id=scheduler_id, nodes=2, submitted_at=START))
    run.write_attempt(Attempt(task=f"{name}-1", number=1, started_at=START + 5, ended_at=START + 65, host="n1"))
    run.write_train_result(
        TrainResult(
            signature=signature, nodes=2, batch=128, samples=5120, steps=60, epochs=4, metrics=numbers, best_top1=81.0,
            best_epoch=3, step_time=0.1, finished_at=START + 60,
        )
    )  # fmt: skip
    run.write_summary(
        Summary(
            signature=signature, nodes=2, start_batch=128, batch=128, attempts=1, predicted_hours=0.1, actual_hours=0.1,
            predicted_cost=0.2, actual_cost=0.2, predicted_step=0.1, actual_step=0.1, metrics=numbers, best_top1=81.0,
            best_epoch=3, currency="USD",
        )
    )  # fmt: skip


def _make_result(local: int) -> OutOfMemory:
    return OutOfMemory(
        id=make_probe_id(1, local),
        nodes=1,
        gpus_per_node=1,
        local_batch=local,
        assumed=False,
        message="CUDA out of memory",
    )


if __name__ == "__main__":
    main()
