"""Record the runs that the golden cases read: `python tests/golden/record.py [NAME ...]` (about three minutes for all).

Each run is made by the commands of a user on small jobs of `work/`, and stored in `runs/`. Its times were measured once, so
that values computed from them can be compared to nine digits. Record a run again only if the format of runs has changed, and
then update the expected outcomes (`make golden`).
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]

import recorded_runs  # noqa: E402
from fake_slurm import FakeSlurm  # noqa: E402

SRUN = """#!/bin/sh
# The command of a job script, as task 0 of 1 on this machine.
while [ "${1#-}" != "$1" ]; do
    case "$1" in --output | --error) shift 2 ;; *) shift ;; esac
done
exec "$@"
"""


class Folder:
    """The folder of a recording, in which commands run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {
            **os.environ,
            "TMPDIR": str(path.parent),
            "XDG_CACHE_HOME": str(path.parent / "cache"),
            "PYTHONPATH": str(HERE.parents[1]),
        }
        recorded_runs.copy_jobs(path)

    def tula(self, words: str, code: int = 0) -> None:
        """Run a command; fail if it exits with another code."""
        print(f"tula {words}", flush=True)
        command = [sys.executable, "-m", "tula_cli", *words.split()]
        done = subprocess.run(
            command, cwd=self.path, env=self.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode != code:
            raise SystemExit(f"tula {words}: exit {done.returncode}\n{done.stdout}{done.stderr}")

    def slurm(self) -> FakeSlurm:
        """Put the commands of a fake SLURM on PATH."""
        slurm = FakeSlurm(self.path / "slurm")
        self.environment |= {"FAKE_SLURM": str(slurm.folder), "PATH": f"{slurm.folder}/bin:/usr/bin:/bin"}
        return slurm


def measured(folder: Folder) -> None:
    folder.tula("profile measured.yaml --yes")


def trained(folder: Folder) -> None:
    folder.tula("profile trained.yaml --yes")
    folder.tula("recommend --objective time --save")
    folder.tula("train --yes")
    folder.tula("evaluate --yes")


def memory(folder: Folder) -> None:
    folder.tula("profile memory.yaml --yes")
    folder.tula("train --nodes 1 --batch 64 --yes")


def largest(folder: Folder) -> None:
    folder.tula("profile largest.yaml --largest --yes")


def rates(folder: Folder) -> None:
    folder.tula("compare trained.yaml --batches --batch 32 --yes --set train.epochs=60")


def failed(folder: Folder) -> None:
    folder.tula("profile failed.yaml --yes", code=6)
    folder.tula("train --nodes 1 --batch 16 --yes", code=6)


def types(folder: Folder) -> None:
    folder.tula("profile types.yaml --yes")


def script(folder: Folder) -> None:
    folder.tula("profile script.yaml --yes")
    folder.tula("recommend --objective time --save")
    folder.tula("train --yes")


def observed(folder: Folder) -> None:
    for batch in (8, 32):
        command = f"python own_train.py --batch {batch} --lr 0.1 --epochs 40 --seed 0 --out ."
        folder.tula(f"observe -- {command.replace('python', sys.executable)}")


def comparison(folder: Folder) -> None:
    folder.tula("profile comparison.yaml --yes")
    folder.tula("compare --methods lbt,ags --batch 32 --seeds 2 --no-controls --yes")


def ramped(folder: Folder) -> None:
    folder.tula("profile ramped.yaml --yes")
    folder.tula("train --nodes 1 --batch 32 --yes")


def pending(folder: Folder) -> None:
    slurm = folder.slurm()
    folder.tula("profile queued.yaml --yes")
    slurm.set("1000", "PENDING", "Resources")
    slurm.set("1001", "PENDING", "QOSMaxJobsPerUserLimit")


def chain(folder: Folder) -> None:
    """Record a chain whose first job trains until its time limit while the second job is pending."""
    slurm = folder.slurm()
    folder.tula("train queued.yaml --nodes 1 --batch 32 --yes")
    (folder.path / "srun").write_text(SRUN)
    (folder.path / "srun").chmod(0o755)
    shutil.copy(folder.path / "srun", slurm.folder / "bin" / "srun")
    first, *others = [str(job["id"]) for job in slurm.jobs()]
    slurm.set(first, "RUNNING", node_list="n1")
    names = {
        "JOB_ID": first,
        "JOBID": first,
        "JOB_NUM_NODES": "1",
        "NTASKS": "1",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
        "JOB_NODELIST": "n1",
        "NODELIST": "n1",
        "SUBMIT_DIR": str(folder.path),
    }
    environment = {**folder.environment, **{f"SLURM_{name}": value for name, value in names.items()}}
    job = subprocess.Popen(
        ["bash", "-c", slurm.script(first)], cwd=folder.path, env=environment, start_new_session=True
    )
    while not list(folder.path.glob("tula-runs/*/train/*/checkpoints/*")):
        time.sleep(0.05)
        if job.poll() is not None:
            raise SystemExit(f"the job ended with {job.returncode} before its first checkpoint")
    slurm.set(first, "TIMEOUT", "TimeLimit", node_list="n1", accounted="TIMEOUT")
    assert "submitit" in Path(f"/proc/{job.pid}/cmdline").read_text(), "the shell has become its last command"
    os.kill(job.pid, signal.SIGTERM)
    print("the job ended with", job.wait(timeout=60))
    slurm.set(others[0], "PENDING", "Priority")


RECORDINGS: tuple[Callable[[Folder], None], ...] = (
    measured, trained, memory, largest, rates, failed, types, script, observed, comparison, ramped, pending, chain,
)  # fmt: skip


def main() -> None:
    wanted = sys.argv[1:]
    for recording in RECORDINGS:
        if not wanted or recording.__name__ in wanted:
            with tempfile.TemporaryDirectory() as folder:
                print(f"== {recording.__name__}", flush=True)
                recording(Folder(Path(folder).resolve()))
                recorded_runs.store_run(
                    Path(folder).resolve(), recording.__name__, ("tula-runs", "tula-observed", "slurm")
                )


if __name__ == "__main__":
    main()
