"""A batch that grows over the first epochs (`train.ramp`): what is trained, resumed, told, and what goes on at a smaller batch."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_jobs import (
    Interrupted,
    are_equal,
    copy_weights,
    load_final_weights,
    make_prediction,
    make_spec,
    make_train_task,
    make_trainer,
    read_rows,
)

from tula_cli.errors import SpecError
from tula_cli.models.ramp import Ramp, Stage
from tula_cli.optim import Ortho
from tula_cli.run.directory import RunDir
from tula_cli.run.records.recommendations import StageSteps
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.loaders import MicroBatchSampler, TrainingPosition, make_epoch_permutation
from tula_cli.worker.entry import run_training
from tula_cli.worker.methods import ags
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.step_watch import StepWatch

RAMP = [{"epochs": 0.4, "batch": 8}, {"epochs": 1.25, "batch": 16}]
"""Of epochs of 100 samples: 5 steps of 8, one of 16 x 3 in the first epoch, and a change in the middle of the second."""
ADAM = {"name": "AdamW", "lr": 0.01, "momentum": None}


def job(method: str = "lrs", *, ramp: Any = RAMP, ends_after: int | None = None, **sections: Any) -> JobSpec:
    """Return a job of 4 epochs with a network that draws random numbers and takes statistics of its batches."""
    train = {"method": method, "ramp": ramp, "epochs": 4, "checkpoint_every": 1e-9, **sections.pop("train", {})}
    model = {"args": {"norm": True, "dropout": 0.3}}
    dataset = {"args": {"ends_after": ends_after}}
    return make_spec(**{"model": model, "dataset": dataset, "train": train, **sections})


def train(run: RunDir, ranks: Ranks, task: TrainTask) -> None:
    run_training(task, run, ranks, build_datasets(task.spec))


def steps_of(subject: worker_train_loop.Trainer) -> list[worker_train_loop.Step]:
    return list(worker_train_loop.run_steps(subject))


# --- what is trained


def test_stages_end_with_the_first_step_at_or_beyond_their_end(alone: Ranks) -> None:
    steps = steps_of(make_trainer(job(), alone, batch=32))
    # 40 + 3 x 16 = 88 of 100; the second stage ends at 165 passed: 88 -> 100, and 5 x 16 = 180 of the second epoch
    assert [step.batch for step in steps] == [8] * 5 + [16] * 3 + [16] * 5 + [32] * 6
    assert [number for number, step in enumerate(steps, 1) if step.epoch_ended] == [8, 13, 16, 19]


def test_the_learning_rate_follows_the_batch_in_use_and_may_be_capped(alone: Ranks) -> None:
    rates = {step.batch: step.lr for step in steps_of(make_trainer(job(), alone, batch=32))}
    assert rates == pytest.approx({8: 0.1, 16: 0.2, 32: 0.4})  # without a warm-up beside
    plain = {step.batch: step.lr for step in steps_of(make_trainer(job("lbt"), alone, batch=32))}
    assert set(plain.values()) == {0.1}
    capped = job(train={"max_lr_factor": 3})
    assert {step.batch: step.lr for step in steps_of(make_trainer(capped, alone, batch=32))}[32] == pytest.approx(0.3)


def test_adam_has_the_root_and_its_second_moment_lasts_as_many_samples(alone: Ranks) -> None:
    by_muon = make_trainer(job("ramp", optimizer={"name": "Muon", "momentum": None}), alone, batch=32)
    assert by_muon.optimizer is by_muon.base, "Muon orthogonalises by itself"
    subject = make_trainer(job("ramp", optimizer=ADAM, schedule={"kind": "constant"}), alone, batch=32)
    assert isinstance(subject.optimizer, Ortho), "its steps are orthogonalised"
    seen = {}
    for step in worker_train_loop.run_steps(subject):
        seen[step.batch] = (step.lr, subject.base.param_groups[0]["betas"][1])
    assert [seen[batch][0] for batch in (8, 16, 32)] == pytest.approx([0.01, 0.01 * 2**0.5, 0.02])
    assert [seen[batch][1] for batch in (8, 16, 32)] == pytest.approx([0.999, 0.999**2, 0.999**4])


@pytest.mark.parametrize(("batch", "betas", "beta1"), [(256, None, 0.8), (64, None, 0.9), (256, [0.7, 0.99], 0.7)])
def test_beta1_of_a_ramp_follows_the_batch_that_it_comes_to(
    alone: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batch: int, betas: list[float] | None, beta1: float
) -> None:
    optimizer = {**ADAM, "args": {"betas": betas} if betas else {}}
    seen: list[TrainTask] = []
    monkeypatch.setattr("tula_cli.worker.entry._train_or_tune", lambda task, context: seen.append(task))
    monkeypatch.setattr("tula_cli.worker.entry.TrainingEnergy.save_energy", lambda self: None)
    spec = job("ramp", ramp="auto", optimizer=optimizer, train={"reference_batch": 8})
    train(RunDir.create(tmp_path, spec), alone, make_train_task(spec, batch=batch))
    built = make_trainer(seen[0].spec, alone, batch=64).base
    assert [group["betas"][0] for group in built.param_groups] == [beta1]


def test_method_ramp_at_the_reference_batch_is_ortho(alone: Ranks) -> None:
    at_once = {"schedule": {"warmup_epochs": 0}, "train": {"reference_batch": 16, "max_grad_norm": None}}
    plain, ramped = (make_trainer(job(name, ramp=None, **at_once), alone, batch=16) for name in ("ortho", "ramp"))
    steps_of(plain), steps_of(ramped)
    assert are_equal(copy_weights(plain), copy_weights(ramped))
    assert not are_equal(copy_weights(plain), copy_weights(make_trainer(plain.spec, alone, batch=16)))


COUNTS = st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True)


@given(counts=COUNTS, world=st.integers(1, 3), seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_no_sample_is_left_out_or_seen_twice_wherever_it_is_killed(counts: list[int], world: int, seed: int) -> None:
    size, epochs, rng = 97, 4, random.Random(seed)
    begins = sorted(rng.sample(range(1, 3 * size), len(counts) - 1))
    stages = [
        Stage(begin=begin, batch=count * world) for begin, count in zip([0, *begins], sorted(counts), strict=True)
    ]
    ramp, parts = Ramp(tuple(stages)), {stage.batch: 1 for stage in stages}
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    position = TrainingPosition()
    while position.epoch < epochs:  # a start each, which takes some steps
        value = {"ramp": ramp, "parts": parts, "world": world, "seed": 3, "epochs": epochs, "start": position}
        every = zip(*(MicroBatchSampler(size, rank=rank, **value) for rank in range(world)), strict=True)
        for _, of_ranks in zip(range(rng.randint(1, 12)), every, strict=False):
            (epoch,) = {key[0] for keys in of_ranks for key in keys}
            while position.epoch < epoch:
                position = position.start_next_epoch()
            assert sum(map(len, of_ranks)) == ramp.find_batch(epoch * size + position.done)
            interleaved = [of_ranks[place % world][place // world][1] for place in range(world * len(of_ranks[0]))]
            seen[epoch] += interleaved
            position = position.advance(len(interleaved))
        if ramp.find_batch(position.epoch * size + position.done) > size - position.done:
            position = position.start_next_epoch()
    for epoch, indices in seen.items():
        assert indices == make_epoch_permutation(size, seed=3, epoch=epoch)[: len(indices)].tolist()
        assert size - len(indices) < ramp.find_batch(epoch * size + len(indices))


# --- resuming


@pytest.mark.parametrize("method", ["ramp", "ags", "static"])
def test_kills_around_the_changes_change_no_bit(method: str, alone: Ranks, run: RunDir, tmp_path: Path) -> None:
    value = {"ags": {"delta": "inf"}} if method == "ags" else {}
    task = make_train_task(job(method, **value), batch=32)
    rng, loaded = random.Random(method), 0
    # changes come after 40 samples and after 168, an epoch's end after 88, 168, 264
    for at in (40, 88, 168):
        after = at + rng.choice([0, 8, 16, 24, 40]) - loaded
        with pytest.raises(Interrupted):
            ending = job(method, ends_after=after, **value)
            train(run, alone, make_train_task(ending, batch=32, signature=task.signature))
        loaded = max(int(path.stem) for path in run.get_training(task.signature).list_checkpoints())
    train(run, alone, task)
    assert len(list(read_rows(run, task, "start"))) == 4
    unbroken = RunDir.create(tmp_path / "whole", task.spec)
    train(unbroken, alone, task)
    assert are_equal(load_final_weights(run, task), load_final_weights(unbroken, task))
    assert loss(run, task) == loss(unbroken, task)


def loss(run: RunDir, task: TrainTask) -> float:
    result = run.get_training(task.signature).read_result()
    assert result is not None and result.batch == 32
    return result.metrics["eval_loss"]


def test_a_change_in_the_process_is_that_of_a_resumed_one(alone: Ranks) -> None:
    """AGS's state of another batch is void, and the first step at the new one refreshes."""
    subject = make_trainer(job("ags", ags={"delta": "inf"}), alone, batch=32)
    stream, refreshes = worker_train_loop.run_steps(subject), []
    for step in stream:
        assert subject.ags is not None
        refreshes.append((step.batch, step.refreshed))
        assert (subject.ags.setup.b_large, subject.ags.setup.b_small) == (
            subject.batch, {8: 8, 16: 4, 32: 8}[subject.batch],
        )  # fmt: skip
    # at the reference batch it is the identity; then the first step of a stage, and the last of each epoch
    assert [at for at, (_, refreshed) in enumerate(refreshes, 1) if refreshed] == [6, 8, 13, 14, 16, 19]


def test_a_method_that_does_not_follow_the_batch_fails(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ags.Scaling, "change_batch", lambda self, loop: None)
    with pytest.raises(AssertionError):
        test_a_change_in_the_process_is_that_of_a_resumed_one(alone)


def spent(optimizer: dict[str, Any] | None = None, *, ends_after: int | None = None, **train: Any) -> JobSpec:
    """Return a job of 4 epochs of 100 samples that spends its decay as batch, from 8 to 32: after 200 samples, and after 267."""
    value = {"momentum": 0.9, "name": "SGD", **(optimizer or {})}
    sections = {"schedule": {"kind": "cosine"}, "optimizer": value, "train": train}
    return job("lbt", ramp="decay", ends_after=ends_after, **sections)


def test_a_decay_is_spent_as_batch(alone: Ranks) -> None:
    for optimizer, root in (({}, 1), (ADAM, 0.5)):
        subject = make_trainer(spent(optimizer), alone, batch=32)
        seen = [(step.batch, step.lr) for step in steps_of(subject)]
        # 12 steps of 8 an epoch, which leave 4 samples out; in the third 67 samples from 200 on are 5 steps of 16
        assert [batch for batch, _ in seen] == [8] * 24 + [16] * 5 + [32] * 3
        rate, base = dict(reversed(seen)), subject.spec.optimizer.lr
        assert rate[8] == pytest.approx(base)
        assert rate[16] == pytest.approx(base / 2 * 2**root), "half of the rate, and what twice the batch is worth"
        plain = make_trainer(job("lbt", ramp=None, optimizer=optimizer), alone, batch=8)
        assert len(seen) < 0.7 * len(steps_of(plain))


@pytest.mark.parametrize("optimizer", [{}, ADAM, {**ADAM, "beta2_half_life": "auto"}])
def test_a_decay_that_is_killed_anywhere_changes_no_bit(
    optimizer: dict[str, Any], alone: Ranks, run: RunDir, tmp_path: Path
) -> None:
    more = {"accumulate": 2, "max_grad_norm": 1.0}
    task, loaded = make_train_task(spent(optimizer, **more), batch=32), 0
    for at in (96, 192, 272):  # within a stage, at its end and in the next one
        with pytest.raises(Interrupted):
            ending = spent(optimizer, ends_after=at + 16 - loaded, **more)
            train(run, alone, make_train_task(ending, batch=32, signature=task.signature))
        loaded = max(int(path.stem) for path in run.get_training(task.signature).list_checkpoints())
    train(run, alone, task)
    assert len(list(read_rows(run, task, "start"))) == 4
    unbroken = RunDir.create(tmp_path / "whole", task.spec)
    train(unbroken, alone, task)
    assert are_equal(load_final_weights(run, task), load_final_weights(unbroken, task))


def test_a_decay_goes_on_at_a_smaller_batch(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(spent(), batch=32)
    with pytest.raises(Interrupted):
        train(run, alone, make_train_task(spent(ends_after=240), batch=32, signature=task.signature))
    train(run, alone, make_train_task(task.spec, batch=16, signature=task.signature))
    assert {row["batch"] for row in read_rows(run, task, "step")} == {8, 16}
    last = list(read_rows(run, task, "step"))[-1]
    assert last["lr"] < 0.02, "the rest of the decay is the learning rate's"


# --- after an out-of-memory


def test_a_smaller_batch_keeps_the_stages_below_it(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(job(), batch=32)
    with pytest.raises(Interrupted):
        train(run, alone, make_train_task(job(ends_after=56), batch=32, signature=task.signature))
    train(run, alone, make_train_task(task.spec, batch=16, signature=task.signature))
    steps = {(row["samples"], row["batch"]) for row in read_rows(run, task, "epoch")}
    assert steps == {(88, 16), (184, 16), (280, 16), (376, 16)}
    assert [row["batch"] for row in read_rows(run, task, "stage")] == [8, 16, 16]


def test_parts_of_micro_batches_are_those_that_the_stage_needs(alone: Ranks) -> None:
    task = make_train_task(job(), batch=32).model_copy(update={"splits": 4})
    subject = worker_train_loop.build_trainer(task, alone, build_datasets(task.spec), batch=32, workers=0, refresh=True)
    assert subject.sizes.splits == {8: 1, 16: 2, 32: 4}
    cut = steps_of(subject)
    assert [step.batch for step in cut] == [step.batch for step in steps_of(make_trainer(task.spec, alone, batch=32))]


def test_a_stage_that_does_not_divide_is_refused(alone: Ranks) -> None:
    with pytest.raises(SpecError, match="batch 9 is not divisible by 2"):
        make_trainer(job(ramp=[{"epochs": 1, "batch": 9}], train={"accumulate": 2}), alone, batch=32)


# --- what is told


def test_rows_know_the_stage_and_are_held_against_what_is_predicted_for_it(
    alone: Ranks, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    value = make_prediction(step_time=4.0, low=3.0, high=5.0).model_copy(
        update={
            "batch": 32,
            "stages": (
                StageSteps(batch=8, steps=5, step_time=1.0, step_low=0.9, step_high=1.1),
                StageSteps(batch=16, steps=8, step_time=2.0, step_low=1.9, step_high=2.1),
            ),
        }
    )
    task = make_train_task(job(), batch=32).model_copy(update={"ladder": (Rung(batch=32, prediction=value),)})
    train(run, alone, task)
    stages = [(row["batch"], row["stage"], row["stages"], row["samples"]) for row in read_rows(run, task, "stage")]
    assert stages == [(8, 1, 3, 0), (16, 2, 3, 40), (32, 3, 3, 168)]
    assert [row["predicted_step"] for row in read_rows(run, task, "epoch")] == [2.0, 2.0, 4.0, 4.0]
    assert all(row["lr"] == pytest.approx(row["batch"] / 80) for row in read_rows(run, task, "step"))
    counts: dict[int, int] = {}
    for row in read_rows(run, task, "step"):
        counts[row["batch"]] = counts.get(row["batch"], 0) + row["count"]
    assert counts == {8: 5, 16: 8, 32: 6}
    # the first row is of one step of 8: four more of them, eight of 16 and six of 32 are left
    first = next(read_rows(run, task, "step"))
    expected = first["step_time"] * (5 - first["count"] + 2 * 8 + 4 * 6)
    assert first["eta"] == pytest.approx(expected, rel=0.2, abs=0.05)
    assert "batch 16 from epoch 0.4 on, sample 40: stage 2 of 3, lr 0.2" in capsys.readouterr().out


def test_batch_norm_over_few_samples_is_reported(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(job(ramp=[{"epochs": 1, "batch": 4}], train={"epochs": 2}), batch=32)
    train(run, alone, task)
    (message,) = [row["message"] for row in read_rows(run, task, "warning")]
    assert "statistics over few samples in the first stages of train.ramp: 4 samples at batch 4" in message


def test_steps_of_another_batch_are_watched_by_themselves(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step time has another level after a change of the batch, and nobody has to look for a cause."""
    begun: list[tuple[int, int]] = []
    original = StepWatch.restart

    def begin_anew(watch: StepWatch) -> None:
        before = watch.levels
        original(watch)
        assert watch.levels is not before and watch.newest is None and watch.steps == []
        begun.append((watch.trainer.batch, watch.trainer.position.samples))

    monkeypatch.setattr(StepWatch, "restart", begin_anew)
    train(run, alone, make_train_task(job(), batch=32))
    assert begun == [(16, 40), (32, 168)]


def test_the_gradient_noise_is_measured_at_the_batch_in_use(alone: Ranks, run: RunDir, tmp_path: Path) -> None:
    """In the first epoch's end the micro-batches that follow have 16 samples, and later ones 32."""
    task = make_train_task(job(train={"diagnostics": ["gradient_noise"]}), batch=32)
    train(run, alone, task)
    assert [row["stats"]["local_batch"] for row in read_rows(run, task, "noise")] == [16, 32, 32, 32]
    unbroken = RunDir.create(tmp_path / "without", job())
    train(unbroken, alone, make_train_task(job(), batch=32, signature=task.signature))
    assert are_equal(load_final_weights(run, task), load_final_weights(unbroken, task))
