"""A run knows its place: a copy of it is another run, and nothing grows where it was before it was moved."""

import shutil

import pytest
from driver import slow_training_options

pytestmark = [pytest.mark.e2e, pytest.mark.torch]


@pytest.mark.promise(
    "the run directory", "the run is copied", "commands on the copy neither show nor cancel the jobs of the original"
)
@pytest.mark.promise(
    "the run directory",
    "the run is moved while a training runs",
    "the job exits with a message and writes nothing at the old path; the same command resumes it at the new path",
)
@pytest.mark.proof
def test_a_copy_touches_no_job_of_the_run_and_a_run_that_is_moved_goes_on_where_it_is(tula) -> None:
    command = ("train", "job.yaml", "--nodes", "1", "--batch", "64", *slow_training_options(tula, 14, pause=0.02))
    process = tula.start(*command)
    tula.wait_until(tula.epochs_done)
    run, signature = tula.run(), tula.task().signature
    copy = tula.folder / "copies" / run.id
    shutil.copytree(run.path, copy, symlinks=True)

    assert tula("cancel", "--run", str(copy))["data"]["cancelled"] == []
    answer = tula("status", "--run", str(copy))
    assert answer["data"]["jobs"] == []
    assert any(f"a copy of {run.path}" in warning for warning in answer["data"]["warnings"])
    assert not run.is_cancelled(tula.task().job), "the job of the run itself goes on"

    moved = tula.folder / "moved" / run.id
    moved.parent.mkdir()
    run.path.rename(moved)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 1, words
    assert f"{run.id} was moved or removed, so its jobs stop" in words
    tula.wait_until(lambda: not tula.ranks_of(run.path))
    assert not run.path.exists(), "nothing grows where the run was"

    summary = tula("train", "--run", str(moved), "--nodes", "1", "--batch", "64")["data"]
    assert (summary["signature"], summary["attempts"]) == (signature, 2), "from its own newest checkpoint"
    assert not run.path.exists()
