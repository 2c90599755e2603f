"""Every row of the table of methods is trained, probed, resumed, relaunched at another batch, and estimated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_jobs import (
    Interrupted,
    are_equal,
    load_final_weights,
    make_probe_task,
    make_spec,
    make_train_task,
    read_rows,
)

from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.methods import METHODS, TrainingMethod, get_training_method
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.measure.inspect import inspect_job
from tula_cli.worker.measure.probe import run_probes
from tula_cli.worker.methods import schedule_free
from tula_cli.worker.methods.plain import Loop
from tula_cli.worker.ranks import Ranks

OWN = "own_method:Lookahead"
each = pytest.mark.parametrize("name", [*METHODS, OWN])
STEPS, BATCH = 6, 16
EPOCH = STEPS * BATCH


def sections(name: str, **changes: Any) -> dict[str, Any]:
    """Return a job of a method with an optimizer that it takes: 3 epochs, a network with BatchNorm and dropout."""
    adam = {"name": "AdamW", "lr": 0.01, "momentum": None, "weight_decay": 0.01}
    optimizer = {} if "SGD" in (get_training_method(name).replaced_optimizers or ("SGD",)) else adam
    train = {"epochs": 3, "checkpoint_every": 1e-9, "method": name}
    model = {"args": {"norm": True, "dropout": 0.3}}
    auto = {"arms": [{"name": "lbt-x2", "lr_factor": 2.0}]}
    return {"model": model, "optimizer": optimizer, "train": train, "auto": auto, **changes}


def train(run: RunDir, ranks: Ranks, task: TrainTask) -> None:
    run_training(task, run, ranks, build_datasets(task.spec))


def broken_off(run: RunDir, ranks: Ranks, name: str) -> TrainTask:
    """Train until the middle of the second epoch; return the task that goes on."""
    task = make_train_task(make_spec(**sections(name)))
    after = EPOCH + 40 if not get_training_method(name).is_self_tuning else EPOCH - 10  # its branches load samples too
    ending = make_spec(**sections(name, dataset={"args": {"ends_after": after}}))
    with pytest.raises(Interrupted):
        train(run, ranks, make_train_task(ending, signature=task.signature))
    return task


def check_that_it_resumes(name: str, ranks: Ranks, run: RunDir, whole: Path) -> None:
    task = broken_off(run, ranks, name)
    train(run, ranks, task)
    assert len(list(read_rows(run, task, "start"))) > 1
    unbroken = RunDir.create(whole, task.spec)
    train(unbroken, ranks, task)
    assert are_equal(load_final_weights(run, task), load_final_weights(unbroken, task))


@each
def test_a_broken_run_ends_at_the_same_weights(name: str, alone: Ranks, run: RunDir, tmp_path: Path) -> None:
    check_that_it_resumes(name, alone, run, tmp_path / "whole")


@each
def test_a_relaunch_at_another_batch_goes_on(name: str, alone: Ranks, run: RunDir) -> None:
    task = broken_off(run, alone, name)
    train(run, alone, make_train_task(task.spec, batch=BATCH // 2, signature=task.signature))
    result = run.get_training(task.signature).read_result()
    assert result is not None
    assert (result.epochs, result.batch, result.samples) == (3, BATCH // 2, 3 * EPOCH)


@each
def test_micro_batches_that_are_cut_teach_the_same(name: str, alone: Ranks, run: RunDir, tmp_path: Path) -> None:
    job = make_spec(**sections(name, model={"args": {}}, ags={"delta": "inf"}))
    whole, task = RunDir.create(tmp_path / "whole", job), make_train_task(job)
    train(whole, alone, task)
    known = whole.get_training(task.signature).read_micro_batches()
    assert known is not None
    (expected_value,) = known.splits
    assert expected_value.into == {"ags": (2, 4)}.get(name, (2, 4, 8, 16)), expected_value.limit
    parts = expected_value.into[-1]
    train(run, alone, task.model_copy(update={"splits": parts}))
    (start, *_) = read_rows(run, task, "start")
    assert start["micro_batch"] == expected_value.micro_batch // parts
    results = [place.get_training(task.signature).read_result() for place in (run, whole)]
    steps = 3 * STEPS + {"ramp": 1, "auto": STEPS}.get(
        name, 0
    )  # the first two have, or the first epoch has, half the batch
    assert [result and (result.samples, result.steps) for result in results] == [(3 * EPOCH, steps)] * 2
    for key, value in load_final_weights(run, task).items():
        torch.testing.assert_close(value, load_final_weights(whole, task)[key], rtol=1e-3, atol=1e-4)


@each
def test_it_is_probed_and_estimated(name: str, alone: Ranks, run: RunDir) -> None:
    job = make_spec(**sections(name))
    inspection = inspect_job(job)
    assert not inspection.estimate_error
    assert inspection.footprints[0].memory.peak > inspection.footprints[0].memory.parameters > 0
    task = make_probe_task(job, BATCH)
    run_probes(task, run, alone, build_datasets(job), started_at=0.0)
    result = run.read_result(f"probe-n001-l{BATCH:06d}")
    assert isinstance(result, Measured)
    assert result.memory.optimizer == pytest.approx(inspection.footprints[0].memory.optimizer, rel=0.01)
    assert result.memory.factors == inspection.footprints[0].memory.factors


def test_a_row_without_its_file_fails(alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "lbt", TrainingMethod("lbt", "nowhere"))
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        inspect_job(make_spec(**sections("lbt")))
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        train(run, alone, make_train_task(make_spec(**sections("lbt"))))


def test_a_method_that_forgets_a_part_of_its_state_fails(
    alone: Ranks, run: RunDir, tmp_path: Path, plant: Callable[..., None]
) -> None:
    class Forgetful(schedule_free.ScheduleFree):
        def own_state(self, loop: Loop) -> dict[str, Any]:
            return {}

    plant("schedule_free", Forgetful, replaced_optimizers=("SGD",))
    with pytest.raises(AssertionError):
        check_that_it_resumes("schedule_free", alone, run, tmp_path / "whole")


# --- one of the user's own, by an import string


def test_a_method_of_ones_own_trains_as_it_says(alone: Ranks, run: RunDir) -> None:
    plain, value = (
        make_train_task(make_spec(**sections("lbt"))),
        make_train_task(make_spec(**sections("own_method:METHOD"))),
    )
    for task in (plain, value):
        train(run, alone, task)
    assert [row["lookahead"] for row in read_rows(run, value, "epoch")] == [6, 12, 18]
    assert not are_equal(load_final_weights(run, plain), load_final_weights(run, value))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_method:NO_METHOD", "train.method own_method:NO_METHOD is not a training method but of type dict"),
        ("own_method:Loop", "is not a training method but class"),
        ("own_method:Lookahed", "own_method has no 'Lookahed'"),
        ("own_methud:Lookahead", "there is no module 'own_methud'"),
        ("own_method:NeedsArguments", "the class cannot be called without arguments"),
        ("own_method:Refuses", "needs a scaled learning rate"),
    ],
)
def test_what_is_no_method_is_refused_where_the_job_is_inspected(name: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        inspect_job(make_spec(**sections(name)))
