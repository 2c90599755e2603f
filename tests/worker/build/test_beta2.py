"""Adam's second moment by its half-life in samples."""

import math
from itertools import islice
from typing import Any

import pytest
import torch
from worker_jobs import are_equal, copy_weights, make_spec, make_train_task, make_trainer, read_rows

from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.services.compare import explain_unsupported_method
from tula_cli.spec.job import JobSpec, compute_beta2
from tula_cli.spec.signature import compute_measurement_signature, compute_train_signature
from tula_cli.worker.build import zoo
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.measure.inspect import inspect_job
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.loop import Trainer


class Lion(torch.optim.Adam):
    """Has two betas, as the optimizer of that name."""


def adam(half_life: Any = "auto", *, name: str = "AdamW", method: str = "lbt", **changes: Any) -> JobSpec:
    optimizer = {"name": name, "lr": 1e-3, "momentum": None, "beta2_half_life": half_life, **changes}
    return make_spec(optimizer=optimizer, train={"method": method})


def beta2(subject: Trainer) -> list[float]:
    return [group["betas"][1] for group in subject.base.param_groups]


def stepped(subject: Trainer, steps: int) -> Trainer:
    for _ in islice(worker_train_loop.run_steps(subject), steps):
        pass
    return subject


# --- the arithmetic


@pytest.mark.parametrize("batch", [1, 8, 64, 4096])
def test_the_half_life_in_samples_is_that_of_the_reference_batch(batch: int) -> None:
    half_life = 8 * math.log(0.5) / math.log(0.999)  # reference batch 8
    kept = compute_beta2(adam(), 0.999, batch)
    assert batch * math.log(0.5) / math.log(kept) == pytest.approx(half_life)
    assert compute_beta2(adam(half_life), 0.9, batch) == pytest.approx(kept), (
        "samples that are given leave nothing to the optimizer's own"
    )


def test_half_is_left_after_so_many_samples_and_without_one_beta2_stays() -> None:
    assert compute_beta2(adam(640), 0.999, 64) ** 10 == pytest.approx(0.5)
    assert compute_beta2(adam(64), 0.999, 64) == 0.5
    assert compute_beta2(adam(None), 0.95, 4096) == 0.95


@pytest.mark.parametrize(
    ("name", "method"), [("AdamW", "lbt"), ("NAdam", "ags"), ("Adam", "lamb"), ("Adamax", "static")]
)
def test_every_group_keeps_its_own_at_the_batch(name: str, method: str, alone: Ranks) -> None:
    groups = [{"parameters": ["biases"], "weight_decay": 0}]
    job = adam(name=name, method=method, groups=groups, args={"betas": [0.8, 0.99]})
    subject = stepped(make_trainer(job, alone, batch=32), 1)
    assert beta2(subject) == [pytest.approx(0.99**4)] * 2
    assert [group["betas"][0] for group in subject.base.param_groups] == [0.8, 0.8]


def test_without_a_half_life_betas_are_left_alone(alone: Ranks) -> None:
    subject = make_trainer(adam(None, args={"betas": [0.8, 0.99]}), alone, batch=32)
    before = subject.base.param_groups[0]["betas"]
    assert stepped(subject, 1).base.param_groups[0]["betas"] is before


def test_scaled_updates_leave_the_second_moment_to_the_batches(alone: Ranks) -> None:
    """The small batch of AGS is compared, not stepped with: the moments see each batch once."""
    job = make_spec(
        optimizer={"name": "AdamW", "momentum": None, "beta2_half_life": 100},
        train={"method": "ags"},
        ags={"delta": "inf", "refresh": {"every": 1}, "b_small": 4},
    )
    subject = stepped(make_trainer(job, alone, batch=32), 5)
    assert subject.ags is not None and not subject.ags.identity and beta2(subject) == [0.5**0.32]
    assert {float(state["step"]) for state in subject.base.state.values()} == {5.0}


# --- another batch, and going on


def test_a_resumed_training_is_as_one_that_was_never_broken_off(alone: Ranks, run: RunDir) -> None:
    whole = stepped(make_trainer(adam(500), alone), 8)
    broken = stepped(make_trainer(adam(500), alone), 5)
    path = checkpoint.save_checkpoint(run, "abcd1234", broken, best={}, is_best=False)
    resumed = make_trainer(adam(500), alone)
    checkpoint.restore_checkpoint(resumed, torch.load(path, weights_only=True))
    assert are_equal(copy_weights(stepped(resumed, 3)), copy_weights(whole))


@pytest.mark.parametrize("method", ["lbt", "ags", "lamb"])
def test_beta2_follows_a_change_of_the_batch(method: str, alone: Ranks, run: RunDir) -> None:
    job = adam(500, name="Adam", method=method)
    path = checkpoint.save_checkpoint(
        run, "abcd1234", stepped(make_trainer(job, alone, batch=32), 2), best={}, is_best=False
    )
    smaller = make_trainer(job, alone, batch=16)
    checkpoint.restore_checkpoint(smaller, torch.load(path, weights_only=True))
    assert beta2(smaller) == [0.5 ** (32 / 500)], "the state brings that of the larger batch"
    assert beta2(stepped(smaller, 1)) == [0.5 ** (16 / 500)]


# --- refused, and told


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adafactor"])
def test_an_optimizer_without_a_second_moment_by_beta2_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=rf"beta2_half_life: {name} has no beta2") as caught:
        inspect_job(adam(name=name))
    assert "AdamW" in caught.value.hint


def test_two_betas_of_another_kind_are_none() -> None:
    with pytest.raises(SpecError, match="Lion has no beta2"):
        zoo.compute_beta2_by_group(Lion([torch.zeros(1)]), adam(), 8)


@pytest.mark.parametrize("half_life", [0, -3, "quick"])
def test_other_values_are_refused(half_life: Any) -> None:
    with pytest.raises(SpecError, match="beta2_half_life"):
        adam(half_life)


def test_check_tells_what_it_comes_to() -> None:
    job = make_spec(
        optimizer={"name": "AdamW", "momentum": None, "beta2_half_life": "auto"},
        search={"nodes": [1], "min_batch": 4, "max_batch": 64},
    )
    (note,) = inspect_job(job).notes
    assert str(note) == (
        "second moment: half-life 5542 samples, so beta2 is 0.9995 at batch 4, 0.999 at batch 8, 0.992028 at"
        " batch 64 (optimizer.beta2_half_life)"
    )
    assert zoo.describe_beta2(adam(None), torch.optim.SGD([torch.zeros(1)], lr=1)) is None


def test_a_comparison_leaves_out_what_has_no_beta2() -> None:
    assert "SGD, which has no beta2" in explain_unsupported_method(make_spec(), "sqrt-beta2")
    assert explain_unsupported_method(adam(None), "sqrt-beta2") == ""


def test_trainings_are_named_by_it_and_measurements_are_not() -> None:
    names = [compute_train_signature(adam(value), nodes=1, batch=8) for value in (None, "auto", 500)]
    assert len(set(names)) == 3
    assert compute_measurement_signature(adam(500)) == compute_measurement_signature(adam(None))


def test_a_start_tells_its_beta2(alone: Ranks, run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    task = make_train_task(adam(500))
    run_training(task, run, alone, build_datasets(task.spec))
    (start,) = read_rows(run, task, "start")
    assert start["beta2"] == 0.5 ** (16 / 500)
    assert "batch 16, beta2 0.978063, from the beginning" in capfd.readouterr().out


def test_beta1_of_an_arm_is_its_own_after_a_checkpoint_of_the_job(alone: Ranks) -> None:
    before, arm = (
        make_trainer(make_spec(optimizer={"name": "AdamW", "momentum": None, "args": {"betas": [beta1, 0.95]}}), alone)
        for beta1 in (0.9, 0.8)
    )
    content = {"model": before.parallel.module.state_dict(), "optimizer": before.optimizer.state_dict()}
    checkpoint._load_unsharded_state(arm, content)
    assert tuple(arm.base.param_groups[0]["betas"]) == (0.8, 0.95)
