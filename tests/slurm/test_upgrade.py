"""tula is upgraded in place between the submission of a job and its start."""

import shutil
from pathlib import Path

import pytest
from cluster import SlurmCluster
from driver import Tula

from tula_cli.version import __version__

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.proof]

PACKAGE = Path(__file__).parents[2] / "tula_cli"
QUICK = ("--set", "train.epochs=1", "--set", "cluster.slurm.extra.begin=now+30")


def upgrade(installed: Path) -> None:
    """Make another tula of the one that is installed, whose supervisors and ranks do nothing but fail."""
    (installed / "version.py").write_text('__version__ = "9.9"\n')
    for name in ("cluster/supervise.py", "worker/__main__.py", "worker/train/loop.py"):
        (installed / name).write_text('raise SystemExit("of another tula")\n')


def test_a_job_runs_the_tula_that_it_was_submitted_with(tula: Tula, on_slurm: SlurmCluster, tmp_path: Path) -> None:
    installed = tmp_path / "installed/tula_cli"
    shutil.copytree(PACKAGE, installed, ignore=shutil.ignore_patterns("__pycache__"))
    tula.environment["PYTHONPATH"] = str(installed.parent)
    tula("train", "job.yaml", "--nodes", "2", "--batch", "128", *QUICK)
    run = tula.run()
    assert run.jobs()[0].tula == __version__ and run.attempts() == []
    upgrade(installed)
    (done,) = tula.until(lambda: [one for one in run.attempts() if one.ended_at is not None])
    assert (done.outcome, done.tula) == ("done", __version__)
    assert tula("status")["data"]["notes"] == []


def test_where_its_archive_is_gone_the_installed_one_runs_and_says_so(
    tula: Tula, on_slurm: SlurmCluster, tmp_path: Path
) -> None:
    installed = tmp_path / "installed/tula_cli"
    shutil.copytree(PACKAGE, installed, ignore=shutil.ignore_patterns("__pycache__"))
    tula.environment["PYTHONPATH"] = str(installed.parent)
    tula("train", "job.yaml", "--nodes", "1", "--batch", "128", *QUICK)
    run = tula.run()
    (archive,) = (run.path / "code").glob("tula-*.zip")
    archive.unlink()
    (installed / "version.py").write_text('__version__ = "9.9"\n')
    (done,) = tula.until(lambda: [one for one in run.attempts() if one.ended_at is not None])
    assert (done.outcome, done.tula) == ("done", "9.9")
    (told,) = tula("status")["data"]["notes"]
    assert f"was submitted with tula {__version__}, and goes on with tula 9.9" in told
    assert f"tula: {told}" in run.log_path(done.task, done.number).read_text()
