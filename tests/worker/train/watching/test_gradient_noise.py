"""The gradient noise scale of a training under way: against explicit gradients, and without a trace in the training."""

import pytest
import torch
from worker_jobs import are_equal, copy_weights, load_final_weights, make_spec, make_train_task, make_trainer, read_rows

from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import GradientStats
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import gradient_noise
from tula_cli.worker.train import loop as worker_train_loop


def test_it_is_that_of_explicit_gradients(alone: Ranks) -> None:
    subject = make_trainer(make_spec(), alone)
    stats = GradientStats.model_validate(gradient_noise.measure_gradient_noise(subject, batches=8)["stats"])
    assert (stats.local_batch, stats.batch, stats.steps) == (16, 32, 4)
    stream = worker_train_loop.list_upcoming_micro_batches(subject)
    singles = []
    for _ in range(8):
        inputs, targets = next(stream)
        subject.parallel.zero_grad()
        torch.nn.functional.cross_entropy(subject.parallel(inputs), targets).backward()
        singles.append(torch.cat([p.grad.flatten() for p in subject.parallel.parameters() if p.grad is not None]))
    assert stats.local_norm_sqr == pytest.approx(float(torch.stack(singles).square().sum(dim=1).mean()), rel=1e-5)
    together = torch.stack(singles).view(4, 2, -1).mean(dim=1)
    assert stats.norm_sqr == pytest.approx(float(together.square().sum(dim=1).mean()), rel=1e-5)


def test_nothing_of_the_trainer_changes(alone: Ranks) -> None:
    subject = make_trainer(make_spec(model={"args": {"norm": True, "dropout": 0.5}}), alone)
    next(worker_train_loop.run_steps(subject))
    before, batch = copy_weights(subject), subject.last_batch
    gradient_noise.measure_gradient_noise(subject, batches=8)
    assert are_equal(copy_weights(subject), before), "BatchNorm's statistics among them"
    assert subject.last_batch is batch and subject.parallel.module.training
    assert all(p.grad is None for p in subject.parallel.parameters())


def test_what_two_epochs_do_not_hold_is_not_asked_for(alone: Ranks) -> None:
    subject = make_trainer(make_spec(dataset={"args": {"size": 80}}), alone)  # 5 batches an epoch
    result = gradient_noise.measure_gradient_noise(subject, batches=64)
    stats = result["stats"]
    assert (stats["steps"], stats["batch"]) == (5, 32), "10 batches in groups of 2, all of one size"
    assert (
        gradient_noise.measure_gradient_noise(
            make_trainer(make_spec(dataset={"args": {"size": 16}}), alone), batches=64
        )["stats"]["steps"]
        == 1
    )


def test_a_training_that_measures_it_ends_with_the_same_weights_and_tells_each_time(run: RunDir, alone: Ranks) -> None:
    results = []
    for requested in (False, True):
        job = make_spec(
            train={"epochs": 4, "diagnostics": ["gradient_noise"] if requested else []},
            model={"args": {"norm": True, "dropout": 0.5}},
        )
        task = make_train_task(job, signature=f"{bool(requested):08d}")
        run_training(task, run, alone, build_datasets(job))
        results.append(load_final_weights(run, task))
    assert are_equal(*results)
    answer = list(read_rows(run, task, "noise"))
    assert [(row["epoch"], row["batch"], row["stats"]["steps"]) for row in answer] == [
        (float(epoch), 16, 4) for epoch in (1, 2, 3, 4)
    ]


def test_a_training_ends_after_the_epochs_that_until_names_by_the_schedule_of_all(run: RunDir, alone: Ranks) -> None:
    rates = []
    for until in (None, {"epochs": 2}):
        job = make_spec(train={"epochs": 4, "early_stopping": until}, schedule={"kind": "cosine"})
        task = make_train_task(job)
        run_training(task, run, alone, build_datasets(job))
        rates.append([row["lr"] for row in read_rows(run, task, "epoch")])
    assert len(rates[0]) == 4 and rates[1] == rates[0][:2]
    result = run.get_training(task.signature).read_result()
    assert result is not None and (result.epochs, result.ended) == (2, "train.early_stopping.epochs is 2")
