"""The training run: its rows, its checkpoints, its result, and going on where it was broken off."""

import json
import math
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_runs
import pytest
import torch
from worker_jobs import (
    Interrupted,
    are_equal,
    load_final_weights,
    make_prediction,
    make_spec,
    make_train_task,
    read_rows,
)

from tula_cli.errors import Diverged
from tula_cli.run.directory import RunDir
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.loaders import make_epoch_permutation
from tula_cli.worker.build.zoo import build_model
from tula_cli.worker.entry import run_training
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train.learning_rate import compute_learning_rate
from tula_cli.worker.train.training import Training

AGS = {"train": {"method": "ags"}, "ags": {"delta": "inf"}}
EVERY_STEP = {"checkpoint_every": 1e-9}


def train(run: RunDir, ranks: Ranks, task: TrainTask) -> None:
    run_training(task, run, ranks, build_datasets(task.spec))


def interrupt(run: RunDir, ranks: Ranks, *, after: int, batch: int = 16, **changes: dict[str, Any]) -> TrainTask:
    """Train until some samples are loaded; return the task that goes on from there."""
    job = make_spec(**changes)
    dataset = changes.get("dataset", {})
    ending = make_spec(**{**changes, "dataset": {**dataset, "args": {**dataset.get("args", {}), "ends_after": after}}})
    task = make_train_task(job, batch=batch)
    with pytest.raises(Interrupted):
        train(run, ranks, make_train_task(ending, batch=batch, signature=task.signature))
    return task


def whole(tmp_path: Path, ranks: Ranks, job: JobSpec) -> dict[str, torch.Tensor]:
    """Return the weights of an uninterrupted run."""
    other, task = RunDir.create(tmp_path / "other", job), make_train_task(job)
    train(other, ranks, task)
    return load_final_weights(other, task)


def files(run: RunDir) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}


# --- a run without a break


def test_a_run_leaves_rows_checkpoints_and_a_result(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec(train={"epochs": 4}))
    train(run, alone, task)
    result = run.get_training(task.signature).read_result()
    assert result is not None
    assert (result.samples, result.steps, result.epochs, result.batch) == (384, 24, 4, 16)
    assert 0 <= result.metrics["top1"] <= result.best_top1 <= 100
    (start,) = read_rows(run, task, "start")
    assert (start["samples"], start["batch"], start["attempt"], start["lr"]) == (0, 16, 1, 0.1)
    epochs = list(read_rows(run, task, "epoch"))
    assert [(row["epoch"], row["samples"]) for row in epochs] == [(1, 96), (2, 192), (3, 288), (4, 384)]
    assert epochs[result.best_epoch - 1]["top1"] == max(row["top1"] for row in epochs) == result.best_top1
    assert epochs[-1]["eval_loss"] == result.metrics["eval_loss"]
    assert 0 < result.step_time == pytest.approx(statistics.fmean(row["step_time"] for row in epochs))
    best = 96 * result.best_epoch
    assert {int(path.stem) for path in run.get_training(task.signature).list_checkpoints()} == {384, 288, best}
    weights = run.get_training(task.signature).find_weights()
    assert weights is not None
    build_model(task.spec, classes=3).load_state_dict(torch.load(weights, weights_only=True)["model"])
    assert (run.get_training(task.signature).path / "best").readlink() == Path(f"checkpoints/{best:012d}.pt")
    assert (run.get_training(task.signature).path / "last").readlink() == Path("checkpoints/000000000384.pt")


def test_a_finished_run_does_nothing(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec())
    train(run, alone, task)
    before = files(run)
    train(run, alone, task)
    assert files(run) == before


def test_the_loss_falls_and_the_step_rows_tell_it(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec(train={"epochs": 4}))
    train(run, alone, task)
    steps = list(read_rows(run, task, "step"))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(row["step_time"] >= row["data_wait"] >= 0 and row["eta"] >= 0 for row in steps)
    assert steps[-1]["eta"] == 0


def test_the_step_rows_tell_steps_without_their_refreshes_and_where_it_ran(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec(train={"method": "ags", "epochs": 3}, ags={"b_small": 8, "refresh": {"every": 2}}))
    train(run, alone, task)
    steps = list(read_rows(run, task, "step"))
    count, refreshed = (sum(row[name] for row in steps) for name in ("count", "refreshed"))
    result = run.get_training(task.signature).read_result()
    assert result is not None and count == result.steps and 0 < refreshed < count
    assert all((row["plain_time"] is None) == (row["refreshed"] == row["count"]) for row in steps)
    (where,) = read_rows(run, task, "environment")
    assert where["oversubscribed"] is False


def test_a_training_that_diverges_ends_at_once_and_leaves_readable_files(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec(optimizer={"lr": 1e30}))
    with pytest.raises(Diverged, match=r"the loss is not finite at epoch 0.\d+, step [1-6], \d+ samples") as caught:
        train(run, alone, task)
    assert "optimizer.lr" in caught.value.hint
    assert (
        run.get_training(task.signature).read_result() is None
        and not run.get_training(task.signature).list_checkpoints()
    )
    assert list(read_rows(run, task, "step"))[-1]["loss"] is None and not list(read_rows(run, task, "epoch"))


def test_the_newest_checkpoint_is_from_before_the_loss_was_no_number(alone: Ranks, run: RunDir) -> None:
    """The 51st sample of the first epoch is of step 4."""
    task = make_train_task(make_spec(train=EVERY_STEP))
    datasets = build_datasets(task.spec)
    datasets.train.samples.images[make_epoch_permutation(100, seed=3, epoch=0)[50]] = math.nan  # type: ignore[attr-defined]
    with pytest.raises(Diverged, match=r"the loss is not finite at epoch 0\.64, step 4, 64 samples"):
        run_training(task, run, alone, datasets)
    assert run.get_training(task.signature).find_newest_checkpoint_samples() == 48
    assert all(value.isfinite().all() for value in load_final_weights(run, task).values())


def test_a_ramp_that_diverges_restarts_once_from_before_with_half_the_factor(alone: Ranks, run: RunDir) -> None:
    """The data has a fault at one sample, which the second start does not meet, or does."""
    job = make_spec(train={**EVERY_STEP, "method": "ramp", "epochs": 4})
    task = make_train_task(job, batch=32)
    run.write_task(task)
    faulty, last = build_datasets(job), make_epoch_permutation(100, seed=3, epoch=3)[40]
    faulty.train.samples.images[last] = math.nan  # type: ignore[attr-defined]
    diverged = Failure(outcome="diverged", message="Diverged: the loss is not finite")
    with pytest.raises(Diverged):
        run_training(task, run, alone, faulty)
    (row,) = read_rows(run, task, "diverged")
    stays = run.get_training(task.signature).find_newest_checkpoint_samples()
    assert row["lr_factor"] == 4 and 0 < stays <= row["sound"] < row["samples"]
    assert all(value.isfinite().all() for value in load_final_weights(run, task).values())
    again = make_runs.execute_reaction(run, task, diverged)
    assert isinstance(again, TrainTask) and again.max_lr_factor == 2
    assert (
        again.cause
        == "Diverged: the loss is not finite; restarted from the previous checkpoint with train.max_lr_factor: 2"
    )
    with pytest.raises(Diverged):
        run_training(again, run, alone, faulty)
    assert make_runs.execute_reaction(run, again, diverged) is None, "once"
    train(run, alone, again)
    start = list(read_rows(run, task, "start"))[-1]
    assert start["lr"] == pytest.approx(0.2) and start["cause"] == again.cause
    assert run.get_training(task.signature).read_result() is not None


def test_an_evaluation_that_is_not_finite_is_said_once_and_the_training_goes_on(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec())
    datasets = build_datasets(task.spec)
    datasets.eval.samples.images[0] = math.nan  # type: ignore[attr-defined]
    run_training(task, run, alone, datasets)
    result = run.get_training(task.signature).read_result()
    assert result is not None
    assert "eval_loss" not in result.metrics and result.epochs == 2
    (text,) = [row["message"] for row in read_rows(run, task, "warning")]
    assert "The evaluation loss is not finite at epoch 1" in text


def test_a_regression_keeps_the_epoch_of_the_least_loss(alone: Ranks, run: RunDir) -> None:
    regression = {"dataset": {"args": {"real": True}}, "loss": {"name": "worker_jobs:square_error"}}
    job = make_spec(**regression, model={"args": {"num_classes": 1}}, optimizer={"lr": 0.02}, train={"epochs": 4})
    task = make_train_task(job)
    train(run, alone, task)
    result = run.get_training(task.signature).read_result()
    assert result is not None
    losses = [row["eval_loss"] for row in read_rows(run, task, "epoch")]
    assert result.best_epoch == 1 + losses.index(min(losses))
    assert "top1" not in result.metrics


def test_ags_reports_itself_and_says_where_it_is_the_identity(alone: Ranks, run: RunDir) -> None:
    acting, idle = make_train_task(make_spec(**AGS)), make_train_task(make_spec(**AGS), batch=8)
    train(run, alone, acting)
    train(run, alone, idle)
    assert not any("does not change the gradients" in row["message"] for row in read_rows(run, acting, "warning"))
    assert [row["ags"]["refreshes"] for row in read_rows(run, acting, "epoch")] == [1, 2]
    (warning,) = read_rows(run, idle, "warning")
    assert warning["message"].startswith("AGS does not change the gradients, because ")
    assert [row["ags"] for row in read_rows(run, idle, "epoch")] == [None, None]


def test_that_ags_hardly_acts_is_said_once(tmp_path: Path, alone: Ranks) -> None:
    """With delta 0 no step is scaled, in any of the epochs."""
    job = make_spec(train={"method": "ags", "epochs": 8}, ags={"delta": 0, "b_small": 4})
    run, task = RunDir.create(tmp_path / "run", job), make_train_task(job)
    train(run, alone, task)
    (text,) = (row for row in read_rows(run, task, "warning") if row["message"].startswith("AGS scaled only 0 % of"))
    assert text["epoch"] > 1 and "delta" in text["message"], "one epoch has six steps, too few to judge by"


# --- the prediction


def test_fewer_steps_than_a_probe_took_are_not_compared(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(
        make_spec(search={"nodes": [1], "min_steps": 1000, "max_seconds": 1000}),
        prediction=make_prediction(step_time=0.5, low=1e-9, high=2e-9),
    )
    train(run, alone, task)
    assert [row["within"] for row in read_rows(run, task, "epoch")] == [None] * 2


@pytest.mark.parametrize(
    ("low", "high", "within"), [(1e-9, 2e-9, False), (1e3, 2e3, False), (1e-9, 1e3, True), (None, None, None)]
)
def test_a_step_outside_the_prediction_warns(
    alone: Ranks, run: RunDir, low: float | None, high: float | None, within: bool | None
) -> None:
    task = make_train_task(make_spec(), prediction=make_prediction(step_time=0.5, low=low, high=high))
    train(run, alone, task)
    assert [row["within"] for row in read_rows(run, task, "epoch")] == [within] * 2
    warnings = [row["message"] for row in read_rows(run, task, "warning")]
    assert len(warnings) == (1 if within is False else 0), "on leaving the interval, not in every epoch outside"
    assert all("predicted 500.0" in text for text in warnings)


def test_without_a_prediction_nothing_warns(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec())
    train(run, alone, task)
    assert not list(read_rows(run, task, "warning"))
    assert [row["within"] for row in read_rows(run, task, "epoch")] == [None] * 2


# --- broken off and resumed


@pytest.mark.parametrize("changes", [AGS, {"model": {"args": {"dropout": 0.3}}}], ids=["ags", "dropout"])
def test_a_resumed_run_ends_at_the_same_weights(
    alone: Ranks, run: RunDir, tmp_path: Path, changes: dict[str, dict[str, Any]]
) -> None:
    changes = {**changes, "train": {"epochs": 3, **changes.get("train", {})}}
    task = interrupt(run, alone, after=170, **changes)
    train(run, alone, task)
    assert [row["samples"] for row in read_rows(run, task, "start")] == [0, 96]
    assert are_equal(load_final_weights(run, task), whole(tmp_path, alone, task.spec))


def test_a_run_saved_in_mid_epoch_resumes_there(alone: Ranks, run: RunDir, tmp_path: Path) -> None:
    task = interrupt(run, alone, after=170, train=EVERY_STEP)
    assert [int(path.stem) for path in run.get_training(task.signature).list_checkpoints()][:2] == [160, 144]
    train(run, alone, task)
    assert [row["samples"] for row in read_rows(run, task, "start")] == [0, 160]
    assert are_equal(load_final_weights(run, task), whole(tmp_path, alone, task.spec))


def test_without_a_set_interval_a_short_run_saves_at_epochs_alone(alone: Ranks, run: RunDir) -> None:
    task = interrupt(run, alone, after=170)
    assert [int(path.stem) for path in run.get_training(task.signature).list_checkpoints()] == [96]


def test_rows_beyond_the_checkpoint_are_cut(alone: Ranks, run: RunDir) -> None:
    task = interrupt(run, alone, after=230, train={"epochs": 3})
    with open(run.get_training(task.signature).metrics_path, "a") as file:
        file.write(json.dumps({"kind": "step", "samples": 224, "loss": -1.0}) + "\n" + '{"kind": "torn')
    run.get_training(task.signature).list_checkpoints()[0].unlink()
    train(run, alone, task)
    result = run.get_training(task.signature).read_metrics()
    assert [row["samples"] for row in result] == sorted(row["samples"] for row in result)
    assert [row["epoch"] for row in result if row["kind"] == "epoch"] == [1, 2, 3]
    assert not any(row.get("loss") == -1.0 for row in result)


def test_damaged_rows_before_the_checkpoint_stay_to_be_named(alone: Ranks, run: RunDir) -> None:
    task = interrupt(run, alone, after=230, train={"epochs": 3})
    training = run.get_training(task.signature)
    first, *others = training.metrics_path.read_bytes().splitlines(keepends=True)
    training.metrics_path.write_bytes(first + first[:-20] + b"\n" + b"".join(others) + b'{"kind": "torn\n')
    train(run, alone, task)
    assert training.find_damaged_metrics_lines() == [2]
    assert [row["samples"] for row in training.read_metrics("epoch")] == [96, 192, 288]


def test_a_run_broken_off_before_its_first_checkpoint_starts_anew(alone: Ranks, run: RunDir, tmp_path: Path) -> None:
    task = interrupt(run, alone, after=50)
    train(run, alone, task)
    assert [row["samples"] for row in read_rows(run, task, "epoch")] == [96, 192]
    assert are_equal(load_final_weights(run, task), whole(tmp_path, alone, task.spec))


def test_a_truncated_checkpoint_falls_back_to_the_one_before(alone: Ranks, run: RunDir, tmp_path: Path) -> None:
    task = interrupt(run, alone, after=170, train=EVERY_STEP)
    newest = run.get_training(task.signature).list_checkpoints()[0]
    newest.write_bytes(newest.read_bytes()[:-100])
    train(run, alone, task)
    assert [row["samples"] for row in read_rows(run, task, "start")] == [0, 144]
    assert are_equal(load_final_weights(run, task), whole(tmp_path, alone, task.spec))


def test_a_run_broken_off_before_its_result_still_owes_it(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec(train={"epochs": 4}))
    train(run, alone, task)
    first = run.get_training(task.signature).read_result()
    assert first is not None
    (run.get_training(task.signature).path / "result.json").unlink()
    train(run, alone, task)
    again = run.get_training(task.signature).read_result()
    assert again is not None
    assert again.model_dump(exclude={"finished_at"}) == first.model_dump(exclude={"finished_at"})


def test_a_relaunch_at_half_the_batch_trains_each_sample_of_the_epoch_once(alone: Ranks, run: RunDir) -> None:
    changes = {**AGS, "dataset": {"args": {"size": 230}}, "schedule": {"kind": "cosine", "warmup_epochs": 1}}
    changes = {**changes, "train": {"method": "ags", **EVERY_STEP}}
    first = interrupt(run, alone, after=150, batch=64, **changes)
    task = make_train_task(first.spec, batch=32, signature=first.signature)
    train(run, alone, task)
    starts = list(read_rows(run, task, "start"))
    assert [(row["samples"], row["batch"]) for row in starts] == [(0, 64), (128, 32)]
    assert starts[1]["lr"] == pytest.approx(compute_learning_rate(task.spec, 128 / 230, 32))
    epochs = list(read_rows(run, task, "epoch"))
    assert [row["samples"] for row in epochs] == [128 + 96, 128 + 96 + 224]
    rates = [compute_learning_rate(task.spec, epoch, 32) for epoch in (192 / 230, 1 + 192 / 230)]
    assert [row["lr"] for row in epochs] == pytest.approx(rates)
    result = run.get_training(task.signature).read_result()
    assert result is not None
    assert (result.batch, result.steps) == (32, 2 + 3 + 7)
    assert result.step_time == pytest.approx(statistics.fmean(row["step_time"] for row in epochs))


def test_the_step_time_is_that_of_the_last_batch_alone(alone: Ranks, run: RunDir) -> None:
    first = interrupt(run, alone, after=150, batch=16, train={"epochs": 3})
    task = make_train_task(first.spec, batch=32, signature=first.signature)
    train(run, alone, task)
    result, epochs = run.get_training(task.signature).read_result(), list(read_rows(run, task, "epoch"))
    assert result is not None and len(epochs) == 3
    assert result.step_time == pytest.approx(statistics.fmean(row["step_time"] for row in epochs[1:]))


def test_where_every_step_refreshes_the_factors_none_is_timed(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec(train={"method": "ags"}, ags={"b_small": 8}), batch=96)
    train(run, alone, task)
    result = run.get_training(task.signature).read_result()
    assert result is not None and result.steps == 2
    assert result.step_time is None


@pytest.mark.parametrize(("per_day", "due"), [(0.0, False), (10.0, True)])
def test_checkpoints_are_closer_on_nodes_that_are_taken_away(per_day: float, due: bool) -> None:
    job = make_spec(pricing={"price": 1.0, "spot": {"discount": 0.5, "interruptions_per_day": per_day}})
    task = SimpleNamespace(spec=job, nodes=4)
    training = SimpleNamespace(task=task, log=SimpleNamespace(save_time=10.0), last_save=time.monotonic() - 600)
    assert Training._is_checkpoint_due(training) == due, "every 22 minutes, or every 3.4 minutes"  # type: ignore[arg-type]
