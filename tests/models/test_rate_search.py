"""The search for a learning rate: what is tried, what it costs, and the choice."""

from typing import Any

import make_runs as make
import pytest

from tula_cli.errors import SpecError
from tula_cli.models import rate_search
from tula_cli.run.records.results import RateBranch
from tula_cli.spec.job import JobSpec
from tula_cli.spec.methods import LrRule
from tula_cli.spec.sections import NOISE_BATCHES


def job(**train: Any) -> JobSpec:
    return make.spec(train={"method": "lrs", "epochs": 30, "reference_batch": 64, **train})


def branch(
    loss: float | None,
    rule: LrRule = "none",
    *,
    batch: int = 512,
    factor: float = 1.0,
    diverged: bool = False,
) -> RateBranch:
    return RateBranch(
        arm="a", epochs=0.1, samples=100, loss=loss, top1=None, diverged=diverged, seconds=1.0, batch=batch,
        rule=rule, factor=factor, lr=0.1 * factor,
    )  # fmt: skip


def test_the_learning_rate_of_the_reference_batch_its_root_multiple_and_its_multiple_are_tried() -> None:
    arms = rate_search.list_rate_arms(job(), 256)
    assert [(arm.rule, arm.factor) for arm in arms] == [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)]


def test_rules_that_a_limit_makes_equal_are_tried_once() -> None:
    assert [arm.factor for arm in rate_search.list_rate_arms(job(max_lr_factor=1.5), 256)] == [1.0, 1.5]


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ([0.14, 0.10, 0.12], "linear"),  # within a quarter of 0.10
        ([0.14, 0.10, 0.13], "sqrt"),
        ([3.03, 2.96, 3.00], "linear"),  # within 0.05
        ([3.03, 2.96, 3.02], "sqrt"),
        ([0.30, 0.29, None], "sqrt"),  # the highest one diverged
        ([0.30, None, None], "none"),
        ([-1.0, -2.0, -1.96], "linear"),  # a loss may be negative
        ([None, None, None], None),
    ],
)
def test_the_highest_learning_rate_close_to_the_lowest_loss_is_chosen(
    losses: list[float | None], chosen: str | None
) -> None:
    branches = [
        branch(loss, arm.rule, factor=arm.factor, diverged=loss is None)
        for loss, arm in zip(losses, rate_search.list_rate_arms(job(), 512), strict=True)
    ]
    choice = rate_search.find_branch_with_highest_lr(branches, 3.5)
    assert (choice and choice.rule) == chosen


def test_where_branches_gain_little_the_margin_is_half_of_the_gain() -> None:
    branches = [branch(2.02, "none"), branch(2.03, "sqrt", factor=2.0), branch(2.05, "linear", factor=4.0)]
    assert [close.rule for close in rate_search.list_close_branches(branches, 2.04)] == ["none", "sqrt"]
    assert [close.rule for close in rate_search.list_close_branches(branches, 2.01)] == ["none"]


def test_other_batches_are_tried_with_the_rule_that_was_chosen() -> None:
    spec, batches = job(), (512, 256, 1024)
    branches: list[RateBranch] = []
    while (arm := rate_search.find_next_arm(spec, batches, branches, 1.0)) is not None:
        loss = 0.3 if arm.rule == "sqrt" else 0.9
        branches.append(branch(loss, arm.rule, batch=arm.batch, factor=arm.factor))
    assert [(tried.batch, tried.rule) for tried in branches] == [
        (512, "none"), (512, "sqrt"), (512, "linear"), (256, "sqrt"), (1024, "sqrt"),
    ]  # fmt: skip
    assert branches[-1].factor == 4.0
    assert (largest := rate_search.find_branch_with_largest_batch(branches[3:], 1.0)) is not None
    assert largest.batch == 1024


def test_where_every_learning_rate_diverges_no_other_batch_is_tried() -> None:
    lost = [branch(None, rule, diverged=True) for rule in rate_search.LR_SCALING_RULES]
    assert rate_search.find_next_arm(job(), (512, 256, 1024), lost, 1.0) is None


@pytest.mark.parametrize("others", [(), (256, 1024)])
def test_a_search_costs_at_most_a_tenth_of_a_training(others: tuple[int, ...]) -> None:
    plan = rate_search.plan_rate_search(job(), (512, *others), dataset_size=50_000)
    assert plan.branches == 3 + len(others)
    assert 0.05 < plan.training_share <= 0.1
    assert plan.samples == plan.start + plan.branches * plan.length + plan.noise_batches * 64
    assert plan.start == round(0.02 * plan.total)
    assert plan.noise_batches == min(NOISE_BATCHES, round(0.01 * plan.total / 64)) > rate_search.MIN_NOISE_BATCHES
    assert plan.length == round(min(0.02, 0.07 / plan.branches) * plan.total)


def test_in_a_short_training_a_branch_still_takes_some_steps() -> None:
    plan = rate_search.plan_rate_search(job(epochs=2), (512,), dataset_size=2000)
    assert (plan.start, plan.length) == (rate_search.MIN_STEPS * 64, rate_search.MIN_STEPS * 512)
    assert plan.noise_batches == rate_search.MIN_NOISE_BATCHES and plan.training_share > 1


@pytest.mark.parametrize(
    ("batch", "size", "batches"),
    [(512, 50_000, (256, 1024)), (64, 50_000, (128,)), (512, 1000, (256,)), (66, 50_000, (132,))],
)
def test_half_and_twice_the_batch_must_divide_and_fit(batch: int, size: int, batches: tuple[int, ...]) -> None:
    assert rate_search.list_other_batches(job(), batch, divisor=2, dataset_size=size) == batches


@pytest.mark.parametrize(
    ("train", "batch", "message"),
    [
        ({}, 64, "not above train.reference_batch 64"),
        ({"method": "auto"}, 512, "train.method auto"),
        ({"method": "lars"}, 512, "train.method lars"),
        ({"parallel": "fsdp"}, 512, "train.parallel: fsdp"),
    ],
)
def test_what_cannot_be_searched_is_refused(train: dict[str, Any], batch: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        rate_search.require_searchable(job(**train), batch)


@pytest.mark.parametrize(
    ("train", "rule", "overrides"),
    [
        ({"method": "lrs"}, "linear", ["train.lr_scaling=linear"]),
        ({"method": "lrs", "lr_scaling": "sqrt"}, "sqrt", []),
        ({"method": "lrs", "lr_scaling": "sqrt"}, "none", ["train.method=lbt", "train.lr_scaling=auto"]),
        ({"method": "lbt"}, "none", []),
        ({"method": "lbt"}, "sqrt", ["train.method=lrs", "train.lr_scaling=sqrt"]),
        ({"method": "ags"}, "none", ["train.lr_scaling=none"]),
        ({"method": "ramp"}, "sqrt", ["train.lr_scaling=sqrt"]),
    ],
)
def test_the_overrides_train_with_the_rule(train: dict[str, Any], rule: LrRule, overrides: list[str]) -> None:
    spec = job(**train)
    assert rate_search.list_rule_overrides(spec, rule) == overrides
    settings = dict(override.removeprefix("train.").split("=") for override in overrides)
    changed = job(**{**train, **settings})  # valid, and at the learning rate of the rule
    (factor,) = {arm.factor for arm in rate_search.list_rate_arms(spec, 256) if arm.rule == rule}
    assert rate_search.compute_lr_scale(changed, 256) == factor
