"""The training loop: what it computes, what it repeats, and what leaves no trace in it."""

import math
import os
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worker_jobs import are_equal, copy_weights, make_spec, make_train_task, make_trainer, train_to_end

from tula_cli.errors import SpecError
from tula_cli.models.refresh import compute_small_batch_size
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import zoo
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.loaders import TrainingPosition, make_epoch_permutation
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.seeding import compute_stable_seed
from tula_cli.worker.train import checkpoint, evaluation, hessian
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.learning_rate import compute_learning_rate

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
AGS = {"train": {"method": "ags"}, "ags": {"delta": "inf"}}  # scales in every step once there are factors
DROPOUT = {"args": {"dropout": 0.3}}


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name} {text}"
        )


# --- what it computes


def reference(job: JobSpec, data: Datasets, batch: int) -> dict[str, torch.Tensor]:
    """Train as one would by hand."""
    torch.manual_seed(compute_stable_seed(job.train.seed))
    model = zoo.SmallCNN(10, in_channels=1, width=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.optimizer.lr, momentum=0.9, fused=True)
    size = len(data.train)
    for epoch in range(job.train.epochs):
        order = make_epoch_permutation(size, seed=job.train.seed, epoch=epoch).tolist()
        for begin in range(0, size // batch * batch, batch):
            pairs = [data.train[epoch, index] for index in order[begin : begin + batch]]
            images, labels = torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])
            optimizer.param_groups[0]["lr"] = compute_learning_rate(job, epoch + begin / size, batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model.state_dict()


def test_the_loop_is_plain_sgd_bit_for_bit(alone: Ranks) -> None:
    job = make_spec(
        model={"name": "small_cnn", "args": {"in_channels": 1, "width": 4}},
        dataset={"name": "digits", "eval_fraction": 0.9},
        schedule={"kind": "cosine", "warmup_epochs": 0.5},
    )
    data = build_datasets(job)
    ours, _ = train_to_end(job, alone, batch=32, datasets=data)
    assert are_equal(ours, reference(job, data, 32))


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_is_one_batch(alone: Ranks, parts: int) -> None:
    whole, one_loss = train_to_end(make_spec(), alone)
    split, other_loss = train_to_end(make_spec(train={"accumulate": parts}), alone)
    close(split, whole)
    assert [float(step.loss) for step in other_loss] == pytest.approx([float(s.loss) for s in one_loss], abs=1e-3)


def test_ags_at_or_below_the_reference_batch_is_the_base_bit_for_bit(alone: Ranks) -> None:
    plain, _ = train_to_end(make_spec(), alone)
    idle, steps = train_to_end(make_spec(**{**AGS, "ags": {"delta": "inf", "b_small": 16}}), alone)
    assert are_equal(idle, plain)
    assert not any(step.refreshed for step in steps)


def test_ags_acts_above_it_and_refreshes_at_the_end_of_each_epoch(alone: Ranks) -> None:
    plain, _ = train_to_end(make_spec(), alone)
    scaled, steps = train_to_end(make_spec(**AGS), alone)
    assert not are_equal(scaled, plain)
    assert [step.refreshed for step in steps] == [step.epoch_ended for step in steps] == ([False] * 5 + [True]) * 2


def test_ags_refreshes_every_k_steps(alone: Ranks) -> None:
    _, steps = train_to_end(make_spec(**{**AGS, "ags": {"refresh": {"every": 5}}}), alone)
    assert [number for number, step in enumerate(steps, 1) if step.refreshed] == [5, 10]


@pytest.mark.parametrize("refresh", [True, False], ids=["training", "probe"])
def test_a_refresh_in_every_step_is_a_part_of_each(alone: Ranks, refresh: bool) -> None:
    job = make_spec(**{**AGS, "ags": {"refresh": {"every": 1}}})
    subject = worker_train_loop.build_trainer(
        make_train_task(job), alone, build_datasets(job), batch=16, workers=0, refresh=refresh
    )
    steps = list(islice(worker_train_loop.run_steps(subject), 4))
    assert not any(step.refreshed for step in steps)
    assert subject.ags is not None
    assert subject.ags.report()["refreshes"] == 4


@pytest.mark.parametrize(
    ("batch", "small"), [(4, 4), (8, 8), (16, 4), (32, 8), (1024, 8)], ids=lambda value: str(value)
)
def test_the_small_batch_is_the_reference_but_at_most_a_quarter(batch: int, small: int) -> None:
    assert compute_small_batch_size(make_spec(), batch) == small


@pytest.mark.parametrize("method", ["lbt", "ags"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(alone: Ranks, precision: str, method: str) -> None:
    job = make_spec(train={"precision": precision, "method": method}, model={"args": {"norm": True}})
    state, steps = train_to_end(job, alone)
    assert float(steps[-1].loss) < 0.5 * float(steps[0].loss)
    assert all(value.dtype == torch.float32 for name, value in state.items() if "weight" in name)


@pytest.mark.parametrize(
    "train",
    [{"method": method, "precision": precision} for method in ("lbt", "ags") for precision in ("fp32", "fp16")],
    ids=lambda train: " ".join(train.values()),
)
def test_gradients_are_clipped(alone: Ranks, train: dict[str, str]) -> None:
    job = make_spec(train={**train, "max_grad_norm": 1e-3}, optimizer={"momentum": None}, ags={"delta": "inf"})
    subject = make_trainer(job, alone)
    parameters = [p.detach() for p in subject.parallel.parameters()]
    before = torch.cat([p.flatten() for p in parameters])
    for _ in islice(worker_train_loop.run_steps(subject), 8):
        after = torch.cat([p.flatten() for p in parameters])
        assert float((after - before).norm()) == pytest.approx(1e-3 * job.optimizer.lr, rel=1e-2)
        before = after


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_work_without_synchronisation_is_the_same_on_one_rank(alone: Ranks, precision: str) -> None:
    job = make_spec(train={"precision": precision})
    subject = make_trainer(job, alone)
    subject.synchronise = False
    steps = list(worker_train_loop.run_steps(subject))
    assert are_equal(copy_weights(subject), train_to_end(job, alone)[0])
    assert len(steps) == 12


def test_activation_checkpointing_changes_no_weight(alone: Ranks) -> None:
    for model in ({"name": "worker_jobs:blocks"}, {"name": "small_cnn", "args": {"in_channels": 1, "width": 4}}):
        plain, _ = train_to_end(make_spec(model=model), alone)
        recomputed, _ = train_to_end(make_spec(model=model, train={"activation_checkpointing": True}), alone)
        close(recomputed, plain)


# --- the learning rate


@pytest.mark.parametrize(
    "start", [TrainingPosition(), TrainingPosition(epoch=1, done=36, samples=132, steps=9)], ids=["0", "1.36"]
)
def test_the_learning_rate_goes_by_samples(alone: Ranks, start: TrainingPosition) -> None:
    job = make_spec(schedule={"kind": "cosine", "warmup_epochs": 0.4})
    subject = make_trainer(job, alone)
    subject.position = start
    rates = [step.lr for step in worker_train_loop.run_steps(subject)]
    epochs = [0.16 * k for k in range(6)] + [1 + 0.16 * k for k in range(6)]
    if start.epoch:
        epochs = [1.36, 1.52, 1.68, 1.84]
    assert rates == pytest.approx([compute_learning_rate(job, epoch, 16) for epoch in epochs])
    assert subject.optimizer.param_groups[0]["lr"] == rates[-1]


def two_rates(captured: bool, **changes: dict[str, Any]) -> JobSpec:
    """Return a job with a warm-up whose biases train at twice the learning rate, 0.2 when it is whole."""
    optimizer = {"name": "worker_jobs:two_rates", "args": {"captured": captured}}
    schedule = {"kind": "cosine", "warmup_epochs": 1.2, "min_lr": 1e-3}
    return make_spec(**{"optimizer": optimizer, "schedule": schedule, **changes})


def rates(subject: worker_train_loop.Trainer) -> list[float]:
    return [float(group["lr"]) for group in subject.optimizer.param_groups]


@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
@pytest.mark.parametrize("method", ["lbt", "ags"])
def test_parameter_groups_keep_their_ratio(alone: Ranks, method: str, captured: bool) -> None:
    job = two_rates(captured, train={"method": method}, ags={"delta": "inf"})
    subject = make_trainer(job, alone)
    places = [group["lr"] for group in subject.base.param_groups]
    epochs = [epoch + 0.16 * k for epoch in range(2) for k in range(6)]
    for epoch, step in zip(epochs, worker_train_loop.run_steps(subject), strict=True):
        assert step.lr == pytest.approx(compute_learning_rate(job, epoch, 16))
        assert rates(subject) == pytest.approx([step.lr, 2 * step.lr])
    if captured:
        assert all(group["lr"] is place for group, place in zip(subject.base.param_groups, places, strict=True))


@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
@pytest.mark.parametrize("after", [3, 9], ids=["in the warm-up", "after it"])
def test_parameter_groups_keep_their_ratio_when_resumed(
    alone: Ranks, tmp_path: Path, after: int, captured: bool
) -> None:
    job = two_rates(captured)
    whole, _ = train_to_end(job, alone)
    assert are_equal(interrupted(job, alone, tmp_path / "c.pt", after=after), whole)
    other = make_trainer(two_rates(captured, schedule={"kind": "constant"}), alone)
    checkpoint.restore_checkpoint(other, torch.load(tmp_path / "c.pt", weights_only=True))
    next(worker_train_loop.run_steps(other))
    assert rates(other) == pytest.approx([0.1, 0.2])


# --- what is repeated


def interrupted(job: JobSpec, ranks: Ranks, path: Path, *, after: int) -> dict[str, torch.Tensor]:
    """Train with a break after some steps, as a fresh process would go on."""
    first = make_trainer(job, ranks)
    for _ in islice(worker_train_loop.run_steps(first), after):
        pass
    checkpoint.write_checkpoint(path, checkpoint.make_checkpoint_state(first, best={}))
    torch.manual_seed(after)
    random.seed(after)
    second = make_trainer(job, ranks)
    checkpoint.restore_checkpoint(second, torch.load(path, weights_only=True))
    for _ in worker_train_loop.run_steps(second):
        pass
    return copy_weights(second)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": DROPOUT},
        {**AGS, "model": DROPOUT},
        {
            "model": DROPOUT,
            "train": {"method": "ags", "max_grad_norm": 0.5, "accumulate": 2},
            "ags": {"delta": "inf", "refresh": {"every": 5}},
        },
        {**AGS, "model": {"args": {"dropout": 0.3, "norm": True}}, "train": {"method": "ags", "precision": "fp16"}},
    ],
    ids=["lbt", "ags", "ags, accumulated", "ags, fp16"],
)
def test_a_run_interrupted_after_any_step_ends_at_the_same_weights(
    alone: Ranks, tmp_path: Path, changes: dict[str, dict[str, Any]]
) -> None:
    job = make_spec(**changes)
    whole, steps = train_to_end(job, alone)
    for after in {1, *random.sample(range(2, len(steps)), 3), 6, len(steps)}:
        resumed = interrupted(job, alone, tmp_path / "c.pt", after=after)
        assert are_equal(resumed, whole), f"after step {after}"


def test_a_run_is_the_same_twice_and_another_with_another_seed(alone: Ranks) -> None:
    first, again = (train_to_end(make_spec(model=DROPOUT), alone)[0] for _ in range(2))
    other, _ = train_to_end(make_spec(model=DROPOUT, train={"seed": 4}), alone)
    assert are_equal(first, again)
    assert not are_equal(first, other)


def test_a_step_draws_as_after_torchs_own_seeding_by_its_position(alone: Ranks) -> None:
    subject = make_trainer(make_spec(), alone)  # in which nothing draws after the seeding
    for before, _ in zip(range(0, 192, 16), worker_train_loop.run_steps(subject), strict=False):
        state = torch.get_rng_state()
        torch.manual_seed(compute_stable_seed(3, before, 0))
        assert torch.equal(torch.get_rng_state(), state)


def test_a_step_seeds_its_generators_and_not_every_device(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.manual_seed costs some 90 times as much, and seeds the GPUs of the node's other ranks."""
    job = make_spec(train={"method": "ags"}, ags={"delta": "inf", "refresh": {"every": 1}}, model=DROPOUT)

    def refuse(*_: object) -> None:
        raise AssertionError("every device is seeded")

    for place in (torch, torch.random, torch.cuda):
        for name in ("manual_seed", "manual_seed_all"):
            monkeypatch.setattr(place, name, refuse, raising=False)
    first, resumed = make_trainer(job, alone), make_trainer(job, alone)
    stream = worker_train_loop.run_steps(first)
    for _ in islice(stream, 4):
        hessian.measure_curvature(first, samples=20)
    checkpoint.write_checkpoint(tmp_path / "c.pt", checkpoint.make_checkpoint_state(first, best={}))
    checkpoint.restore_checkpoint(resumed, torch.load(tmp_path / "c.pt", weights_only=True))
    assert len([*stream]) == len([*worker_train_loop.run_steps(resumed)]) == 8
    assert are_equal(copy_weights(resumed), copy_weights(first))


def test_loader_processes_change_nothing(alone: Ranks) -> None:
    job = make_spec(**AGS, model=DROPOUT)
    assert are_equal(train_to_end(job, alone, workers=2)[0], train_to_end(job, alone, workers=0)[0])


def test_where_less_than_a_batch_is_left_the_next_epoch_begins(alone: Ranks) -> None:
    subject = make_trainer(make_spec(**AGS), alone)
    subject.position = TrainingPosition(epoch=0, done=90, samples=90, steps=6)
    assert len(list(worker_train_loop.run_steps(subject))) == 6
    assert subject.position == TrainingPosition(epoch=2, done=0, samples=90 + 96, steps=12)


# --- what is refused


def test_a_batch_beyond_the_dataset_is_refused(alone: Ranks) -> None:
    with pytest.raises(SpecError, match="batch 128 is larger than the dataset, which has 100"):
        make_trainer(make_spec(), alone, batch=128)


def test_a_batch_that_does_not_divide_is_refused(alone: Ranks) -> None:
    with pytest.raises(SpecError, match="batch 16 is not divisible by 3"):
        make_trainer(make_spec(train={"accumulate": 3}), alone, batch=16)


# --- evaluation


def test_evaluation_counts_each_sample_once(alone: Ranks) -> None:
    subject = make_trainer(make_spec(dataset={"args": {"eval_size": 37}}), alone)
    result = evaluation.Evaluator(subject).evaluate()
    pairs = [subject.datasets.eval[index] for index in range(37)]
    images, labels = torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])
    with torch.no_grad():
        scores = subject.parallel.module(images)
    assert result.samples == 37
    assert result.loss == pytest.approx(float(nn.functional.cross_entropy(scores, labels)), rel=1e-5)
    assert result.top1 == pytest.approx(100 * float((scores.argmax(1) == labels).float().mean()))
    assert result.top5 == 100


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_leaves_training_as_it_was(alone: Ranks, workers: int) -> None:
    job = make_spec(model={"args": {"dropout": 0.3, "norm": True}})
    subject = make_trainer(job, alone, workers=workers)
    evaluator = evaluation.Evaluator(subject)
    for _ in worker_train_loop.run_steps(subject):
        before = copy_weights(subject), torch.get_rng_state(), random.getstate()
        evaluator.evaluate()
        assert are_equal(copy_weights(subject), before[0])
        assert torch.equal(torch.get_rng_state(), before[1])
        assert random.getstate() == before[2]
        assert all(module.training for module in subject.parallel.modules())
    assert are_equal(copy_weights(subject), train_to_end(job, alone)[0])


def test_a_regression_has_a_loss_and_no_accuracy(alone: Ranks) -> None:
    regression = {"dataset": {"args": {"real": True}}, "loss": {"name": "worker_jobs:square_error"}}
    result = evaluation.Evaluator(
        make_trainer(make_spec(**regression, model={"args": {"num_classes": 1}}), alone)
    ).evaluate()
    assert result.loss > 0
    assert math.isnan(result.top1)
    assert math.isnan(result.top5)


def test_a_loss_with_class_weights_trains(alone: Ranks) -> None:
    weighted, _ = train_to_end(make_spec(loss={"args": {"weight": [1.0, 2.0, 3.0]}}), alone)
    assert not are_equal(weighted, train_to_end(make_spec(), alone)[0])


# --- its data loader


def test_a_rank_alone_has_the_cores_that_it_may_run_on(alone: Ranks) -> None:
    assert 0 < alone.count_cores() <= len(os.sched_getaffinity(0))


def test_workers_that_are_a_number_are_not_asked_of_the_cores(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "count_cores", lambda _: 6.0)
    assert make_trainer(make_spec(), alone, workers="auto").workers == 0  # what the job says
    assert make_trainer(make_spec(train={"workers": "auto"}), alone, workers="auto").workers == 5
    assert (
        make_trainer(make_spec(train={"workers": "auto"}), alone, workers=1).workers == 1
    )  # reduced after an out-of-memory
