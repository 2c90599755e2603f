"""Whether a training is finite: which step is told, by all ranks alike, and what does not count."""

import dataclasses
import math
from itertools import islice

import pytest
import torch
from torch import nn
from worker_jobs import make_spec, make_trainer

from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import divergence
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.divergence import DivergenceDetector
from tula_cli.worker.train.loop import Step, Trainer

FP16 = {"train": {"precision": "fp16"}}


@dataclasses.dataclass(frozen=True)
class WithPeer(Ranks):
    """This rank beside another one, which says its part of each reduction."""

    says: tuple[float, ...] = ()

    def compute_elementwise_max(self, values: list[float]) -> list[float]:
        return [max(pair) for pair in zip(values, self.says, strict=True)]


def followed(subject: Trainer, *, bad: tuple[int, ...] = (), steps: int = 5) -> DivergenceDetector:
    """Train some steps; the loss of the `bad` ones (from 1) is told as no number."""
    watch = DivergenceDetector(subject)
    for number, step in enumerate(islice(worker_train_loop.run_steps(subject), steps), 1):
        loss = step.loss * math.nan if number in bad else step.loss
        watch.record_loss(Step(loss, *(getattr(step, field.name) for field in dataclasses.fields(Step)[1:])))
    return watch


def test_the_first_step_whose_loss_is_no_number_is_reported(alone: Ranks) -> None:
    watch = followed(make_trainer(make_spec(), alone), bad=(3, 5))
    assert watch.describe_divergence() == "the loss is not finite at epoch 0.48, step 3, 48 samples"
    assert watch.describe_divergence() == "", "told once, and the weights were never touched"
    assert watch.describe_divergence(weights=True) == ""


def test_every_rank_tells_the_earliest_step_of_all(alone: Ranks) -> None:
    subject = make_trainer(make_spec(), alone)
    watch = followed(subject, bad=(4,))
    subject.ranks = WithPeer(0, 2, 0, alone.device, says=(-2.0, 0.0, 0.0, *divergence.NO_RISE))
    assert watch.describe_divergence() == "the loss is not finite at epoch 0.32, step 2, 32 samples"


def test_what_another_rank_sees_in_its_weights_ends_this_one_too(alone: Ranks) -> None:
    subject = make_trainer(make_spec(), alone)
    watch = followed(subject)
    subject.ranks = WithPeer(0, 2, 0, alone.device, says=(-math.inf, 1.0, 0.0, *divergence.NO_RISE))
    assert watch.describe_divergence().startswith("the weights are not finite at epoch 0.80, step 5, 80 samples")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_was_not_finite_is_in_the_weights(alone: Ranks, value: float) -> None:
    subject = make_trainer(make_spec(), alone)
    watch = followed(subject)
    assert watch.has_finite_weights()
    next(subject.parallel.parameters()).data.view(-1)[-1] = value
    assert watch.describe_divergence() == "", "losses alone are looked at between checkpoints"
    assert not watch.has_finite_weights()
    assert watch.describe_divergence().startswith("the weights are not finite"), (
        "seen by rank 0 alone, told at the next look"
    )


def test_only_what_is_trained_has_to_be_finite() -> None:
    def parameter(*values: complex, trained: bool = True) -> nn.Parameter:
        return nn.Parameter(torch.tensor(values), requires_grad=trained)

    mask = parameter(-math.inf, trained=False)
    assert divergence._are_parameters_finite([mask, nn.Parameter(torch.empty(0)), parameter(1.0), parameter(1 + 2j)])
    assert not divergence._are_parameters_finite([parameter(1.0), parameter(complex(1, math.inf))])
    assert divergence._are_parameters_finite([parameter(3e38, -3e38)]) and divergence._are_parameters_finite([mask])


def test_steps_that_fp16_skips_are_no_divergence_until_none_is_left(alone: Ranks) -> None:
    subject = make_trainer(make_spec(**FP16), alone)
    subject.scaler.load_state_dict({**subject.scaler.state_dict(), "scale": 2.0**120})
    watch = followed(subject)
    assert subject.scaler.get_scale() == 2.0**115, "every step was skipped"
    assert watch.describe_divergence(weights=True) == ""
    subject.scaler.load_state_dict({**subject.scaler.state_dict(), "scale": divergence.MIN_LOSS_SCALE / 2})
    assert (
        watch.describe_divergence()
        == "the gradient overflows fp16 in every step, most recently at epoch 0.80, step 5, 80 samples"
    )


RAMP = {"train": {"method": "ramp", "epochs": 12}}


def blown_up(subject: Trainer, *, at: int) -> tuple[DivergenceDetector, int]:
    """Train to the end with losses that fall from 1 to 0.1, and are 5 from a step on; return the samples before that, too."""
    watch, before = DivergenceDetector(subject), 0
    for number, step in enumerate(worker_train_loop.run_steps(subject), 1):
        before = subject.position.samples if number < at else before
        loss = torch.tensor(5.0 if number >= at else max(0.1, 1 - number / 20))
        watch.record_loss(Step(loss, *(getattr(step, field.name) for field in dataclasses.fields(Step)[1:])))
    return watch, before


def test_a_finite_loss_that_stays_high_is_a_divergence_where_a_ramp_has_raised_the_learning_rate(alone: Ranks) -> None:
    subject = make_trainer(make_spec(**RAMP), alone, batch=16)
    watch, before = blown_up(subject, at=30)
    words = watch.describe_divergence()
    assert words.startswith("the loss rose from 0.100 and has not recovered: 5.00 at epoch 12.00, step "), words
    assert (subject.losses.lr_factor, subject.losses.sound) == (2.0, before)
    for other in (make_spec(train={"epochs": 12}), make_spec(train={**RAMP["train"], "lr_scaling": "none"})):
        assert blown_up(make_trainer(other, alone, batch=16), at=30)[0].describe_divergence() == ""


def test_a_loss_that_rises_with_the_batch_of_a_decay_is_a_divergence_too(alone: Ranks) -> None:
    decay = {"train": {"method": "lbt", "ramp": "decay", "epochs": 12}, "schedule": {"kind": "cosine"}}
    subject = make_trainer(make_spec(**decay), alone, batch=16)
    watch, _ = blown_up(subject, at=76)
    assert watch.describe_divergence().startswith(
        "the loss rose from 0.100 and has not recovered: 5.00 at epoch 12.00, step "
    )
    assert subject.losses.lr_factor == 2.0, "of which half is what a restart takes"
