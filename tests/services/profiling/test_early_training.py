"""The first epochs of a training, for their gradient noise (tula profile --progress)."""

from pathlib import Path

import make_runs
import pytest
from make_results import inspected

from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.services.profiling import early_training
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import train_signature


def prepared(tmp_path: Path, job: JobSpec):
    """Return what is prepared, and what is said on the way."""
    work, said = early_training.prepare(RunDir.create(tmp_path, job), job, lambda _: inspected(dataset_size=4096)), []
    while True:
        try:
            said.append(next(work))
        except StopIteration as end:
            return end.value, said


def test_it_is_the_plain_small_batch_by_the_schedule_of_the_whole_training(tmp_path: Path) -> None:
    job = make_runs.spec(
        train={"epochs": 40, "method": "ags", "reference_batch": 64}, search={"nodes": [2, 4, 64, 128]}
    )
    found, said = prepared(tmp_path, job)
    task = found.plan.task
    assert (task.nodes, task.batch, task.spec.train.method) == (2, 64, "lbt")
    assert (task.spec.train.epochs, task.spec.train.until.epochs, task.spec.train.epochs_at_most) == (40, 4, 4)
    assert found.spec == job, "the run's job stays what it is"
    assert [note.text for note in said] == ["trains 4 of 40 epochs at batch 64 (10% of the training's samples)"]


def test_no_number_of_nodes_that_divides_the_batch_is_told(tmp_path: Path) -> None:
    job = make_runs.spec(train={"epochs": 4, "reference_batch": 64}, search={"nodes": [3, 6]})
    with pytest.raises(SpecError, match=r"reference_batch 64 does not divide among .* search.nodes \[3, 6\]"):
        prepared(tmp_path, job)


def test_a_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a script's own loop cannot be asked"):
        prepared(tmp_path, make_runs.script_spec(epochs=4))


def test_counted_epochs_change_the_signature_of_no_other_training() -> None:
    plain, asked, counted = (
        make_runs.spec(train={"epochs": 9, "until": until})
        for until in (None, {"metric": "top1", "at_least": 0.7}, {"metric": "top1", "at_least": 0.7, "epochs": 3})
    )
    names = [train_signature(job, nodes=1, batch=64) for job in (plain, asked, counted)]
    assert len(set(names)) == 3
    noisy = make_runs.spec(train={"epochs": 9, "gradient_noise": True})
    assert train_signature(noisy, nodes=1, batch=64) == names[0], (
        "what is measured beside a training changes no weights"
    )
