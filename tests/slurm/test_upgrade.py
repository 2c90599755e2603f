"""tula is upgraded in place between the submission of a job and its start."""

import shutil
import subprocess
from pathlib import Path

import pytest
from cluster import SlurmCluster
from driver import Tula

from tula_cli.version import __version__

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.proof]

PACKAGE = Path(__file__).parents[2] / "tula_cli"


def upgrade(installed: Path) -> None:
    """Make another tula of the one that is installed, whose supervisors and ranks do nothing but fail."""
    (installed / "version.py").write_text('__version__ = "9.9"\n')
    for name in ("cluster/supervise.py", "worker/__main__.py", "worker/train/loop.py"):
        (installed / name).write_text('raise SystemExit("of another tula")\n')


@pytest.mark.promise(
    "the command line",
    "tula is upgraded in place while a chain runs",
    "the jobs of the chain use the version that submitted them",
)
def test_a_job_runs_the_tula_that_it_was_submitted_with(tula: Tula, on_slurm: SlurmCluster, tmp_path: Path) -> None:
    installed = tmp_path / "installed/tula_cli"
    shutil.copytree(PACKAGE, installed, ignore=shutil.ignore_patterns("__pycache__"))
    tula.environment["PYTHONPATH"] = str(installed.parent)
    kept = ("--set", "train.epochs=1", "--set", "cluster.slurm.extra.hold=true")
    tula("train", "job.yaml", "--nodes", "1", "--batch", "128", *kept)
    run = tula.run()
    (job,) = run.read_jobs()
    assert job.tula == __version__ and run.read_attempts() == []
    upgrade(installed)
    subprocess.run(["scontrol", "release", job.scheduler_ids[0]], check=True)
    (done,) = tula.wait_until(lambda: [attempt for attempt in run.read_attempts() if attempt.ended_at is not None])
    assert (done.outcome, done.tula) == ("done", __version__)
