"""Paths in which SLURM would put something else: refused in a sentence, before anything is submitted."""

from pathlib import Path

import make_runs as make
import pytest
from fake_slurm import FakeSlurm

from tula_cli.cluster.slurm.scheduler import require_plain_path
from tula_cli.cluster.slurm.submit import SlurmLauncher
from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import ProbeTask

SLURM = {"kind": "slurm", "device": "cpu", "minutes": 60}


def task(run: RunDir) -> ProbeTask:
    probe_task = ProbeTask(
        id="probe-n001", job="probe-n001", spec=run.read_spec(), workdir="/", nodes=1, local_batches=(32,)
    )
    run.write_task(probe_task)
    return probe_task


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("x %j", "%j"),
        ("x %t y", "%t"),
        ("%4j", "%4"),
        ("100%", "%"),
        ("a\\b", "\\b"),
        ("a b'c \"d", ""),
    ],
)
def test_what_would_be_replaced_is_refused_with_the_path(tmp_path: Path, name: str, refused: str) -> None:
    path = tmp_path / name / "tula-runs" / "job-1234"
    if not refused:
        require_plain_path(path)
        return
    with pytest.raises(SpecError) as error:
        require_plain_path(path)
    assert f"contains {refused}" in error.value.message and str(path) in error.value.message
    assert "\n" not in error.value.message and error.value.hint


def test_a_link_to_such_a_folder_is_one(tmp_path: Path) -> None:
    (tmp_path / "%j").mkdir()
    (tmp_path / "plain").symlink_to(tmp_path / "%j")
    with pytest.raises(SpecError, match="contains %j"):
        require_plain_path(tmp_path / "plain" / "run")


@pytest.mark.promise(
    "the run directory",
    "the path contains a % that SLURM would replace",
    "tula submits nothing, and explains this in an error message. Spaces and quotes are allowed",
)
def test_nothing_is_submitted_where_files_would_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSlurm(tmp_path / "slurm", "22.05")
    fake.use(monkeypatch)
    run = RunDir.create(tmp_path / "x %t %j", make.spec(cluster=SLURM))
    for attempted in (SlurmLauncher().render_script, SlurmLauncher().submit):
        with pytest.raises(SpecError, match="which SLURM would replace"):
            attempted(run, task(run))
    assert not fake.jobs() and not fake.calls("sbatch")


def test_a_folder_with_spaces_and_quotes_is_in_the_script_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm(tmp_path / "slurm", "22.05")
    fake.use(monkeypatch)
    run = RunDir.create(tmp_path / "my job's runs", make.spec(cluster=SLURM))
    job = SlurmLauncher().submit(run, task(run))
    run.write_job(job)
    assert SlurmLauncher().submit(run, task(run)) == job, "it is found again by its script's folder"
    assert len(fake.jobs()) == 1
