"""A whole training on a disk that is really full: told with its place, held, and gone on with once there is room."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster
from driver import Tula, weights_differ

from tula_cli.run.directory import RunDir

from conftest import JOB  # isort: skip

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.proof]
SIZE = 24 * 2**20  # bytes of the whole file system
LEFT = 200 * 2**10  # that a checkpoint does not fit into, and the small files of a run do
MODEL = "model={name: small_cnn, args: {in_channels: 1, width: 32}}"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, in memory."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def on_small(
    needs_slurm: None, own_prefix: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tula]:
    """The command line on a cluster of one node that sees the small file system: it was there before its nodes were."""
    with SlurmCluster(1, prefix=f"{own_prefix}f") as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        yield Tula(tmp_path, JOB)
        cluster.reset()


def fill(folder: Path) -> Path:
    """Leave so little room that nothing large can be written any more."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**14))
        except OSError:
            pass
    with ballast.open("rb+") as file:
        file.truncate(max(0, ballast.stat().st_size - LEFT))
    return ballast


def newest_checkpoint(run: RunDir) -> Path:
    (signature,) = run.list_train_signatures()
    return run.get_training(signature).list_checkpoints()[0]


@pytest.mark.promise(
    "the file system",
    "a training fills the disk, and space is freed later",
    "`tula status` shows the folder and the missing space, and the chain is held. After it resumes, it reaches the"
    " weights of an undisturbed training",
)
def test_a_training_that_fills_its_disk_is_held_and_goes_on_to_the_same_weights(on_small: Tula, small: Path) -> None:
    tula = on_small
    options = ("--nodes", "1", "--batch", "64", "--set", MODEL, "--set", "train.epochs=6")
    tula("train", "job.yaml", *options, "--run-dir", str(small))
    run = RunDir.find_newest(small)
    (signature,) = run.list_train_signatures() or tula.wait_until(run.list_train_signatures)
    training = run.get_training(signature)
    tula.wait_until(training.list_checkpoints)
    ballast = fill(small)
    place = ("--run", str(run.path))
    kept = tula.wait_until(lambda: [job for job in tula("status", *place)["data"]["jobs"] if job["state"] == "held"])
    assert training.read_result() is None
    (job,) = kept
    assert (
        f"free on the disk of {training.path / 'checkpoints'}" in job["reason"]
        and "are missing; jobs held: " in job["reason"]
    )
    last = training.read_attempts()[-1]
    assert (last.outcome, last.host.startswith("t")) == ("disk", True)
    assert last.shortage is not None and (last.shortage.missing or 0) > 0

    refused = tula("train", *place, *options[:4], code=13)["error"]
    assert "there is still too little space" in refused["message"] and refused["code"] == "disk"
    submitted = run.find_job(f"train-{signature}")

    ballast.unlink()
    tula("train", *place, *options[:4])
    tula("train", "job.yaml", *options)  # the same undisturbed, elsewhere, once the node is free
    tula.wait_until(lambda: tula.run().get_training(signature).read_summary())
    assert [attempt.outcome for attempt in training.read_attempts()] == ["disk", "done"]
    assert run.find_job(f"train-{signature}") == submitted, (
        "the held jobs of the chain were let go, and no other submitted"
    )
    assert newest_checkpoint(run).stat().st_size > LEFT
    assert not weights_differ(newest_checkpoint(run), newest_checkpoint(tula.run()))
