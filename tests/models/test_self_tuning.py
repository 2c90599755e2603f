"""Which arms there are, which of them wins, and what that takes."""

import math
from typing import Any

import pytest

from tula_cli.errors import SpecError
from tula_cli.models import cost, self_tuning
from tula_cli.run.records.probes import Overheads
from tula_cli.run.records.results import Branch
from tula_cli.spec.ags import Arm
from tula_cli.spec.job import JobSpec, compute_lr_scale
from tula_cli.spec.load import validate_job
from tula_cli.spec.signature import compute_train_signature


def job(**sections: dict[str, Any]) -> JobSpec:
    base: dict[str, Any] = {
        "model": {"name": "small_cnn"},
        "dataset": {"name": "digits"},
        "optimizer": {"lr": 0.1},
        "train": {"epochs": 20, "method": "auto", "reference_batch": 32},
    }
    return validate_job({**base, **{k: {**base.get(k, {}), **v} for k, v in sections.items()}}, source="test")


def branch(arm: str, *, top1: float | None = 50.0, loss: float | None = 1.0, diverged: bool = False) -> Branch:
    return Branch(arm=arm, epochs=1, samples=96, loss=loss, top1=top1, diverged=diverged, seconds=1.0)


def branches_of(**losses: float) -> list[Branch]:
    return [branch(name.replace("_", "-"), loss=loss) for name, loss in losses.items()]


# --- arms


def test_default_arms_are_the_control_the_ramp_a_gentler_one_and_one_with_more_decay() -> None:
    arms = self_tuning.list_arms_of_training(job(optimizer={"weight_decay": 5e-4}), 256)
    assert [(arm.name, arm.method, arm.lr_factor, arm.decay_factor) for arm in arms] == [
        ("lbt", "lbt", 1, 1), ("ramp", "ramp", 1, 1), ("ramp-x0.5", "ramp", 0.5, 1), ("ramp-decay4", "ramp", 1, 4),
    ]  # fmt: skip
    assert arms[0] == Arm(name="lbt")
    groups = [{"parameters": ["norms"], "weight_decay": 0.1}]
    assert len(self_tuning.list_arms_of_training(job(optimizer={"groups": groups}), 256)) == 4
    assert [arm.name for arm in self_tuning.list_arms_of_training(job(), 256)] == ["lbt", "ramp", "ramp-x0.5"], (
        "nothing to decay by"
    )


@pytest.mark.parametrize("batch", [32, 16])
def test_at_the_reference_batch_the_control_is_alone(batch: int) -> None:
    assert self_tuning.list_arms_of_training(job(), batch) == (Arm(name="lbt"),)


def test_an_arm_s_decay_is_that_of_the_job_and_of_its_groups() -> None:
    groups = [{"parameters": ["norms"], "weight_decay": 0.1}, {"parameters": ["biases"], "lr_factor": 2}]
    spec = job(optimizer={"weight_decay": 0.01, "groups": groups})
    optimizer = self_tuning.make_job_of_arm(spec, Arm(name="more", decay_factor=4)).optimizer
    assert (optimizer.weight_decay, [group.weight_decay for group in optimizer.groups]) == (0.04, [0.4, None])
    assert self_tuning.make_job_of_arm(spec, Arm(name="as-it-is")).optimizer == spec.optimizer


@pytest.mark.parametrize(("optimizer", "factor"), [("SGD", 4), ("AdamW", 2)])
def test_a_ramp_s_learning_rate_is_that_of_the_batch_in_use(optimizer: str, factor: float) -> None:
    spec = job(optimizer={"name": optimizer})
    ramp, plain = (self_tuning.make_job_of_arm(spec, Arm(name=name, method=name)) for name in ("ramp", "lbt"))
    assert [compute_lr_scale(ramp, batch) for batch in (32, 128)] == [1, factor]
    assert compute_lr_scale(plain, 128) == 1


def test_an_arm_alone_says_what_happens_to_the_learning_rate() -> None:
    arm = Arm(name="turned", method="ortho", lr_factor=4)
    tuned = self_tuning.make_job_of_arm(job(), arm)
    assert (tuned.train.lr_scaling, tuned.schedule.warmup_epochs) == ("none", 0.0)
    assert self_tuning.make_job_of_arm(job(schedule={"warmup_epochs": 3}), arm).schedule.warmup_epochs == 3


def test_own_arms_replace_the_default_ones_but_not_the_control() -> None:
    mine = {"name": "mine", "method": "ags"}
    spec = job(auto={"arms": [mine]}, ags={"delta": 0.7})
    assert [arm.name for arm in self_tuning.list_arms_of_training(spec, 256)] == ["lbt", "mine"]
    tuned = self_tuning.make_job_of_arm(spec, self_tuning.list_arms_of_training(spec, 256)[1])
    assert (tuned.train.method, tuned.ags.fill_from_preset().delta) == ("ags", 0.7)


@pytest.mark.parametrize(
    "setting", [{"decay_from": 0.7}, {"beta1": 0.8}, {"ags": {"delta": 0.2}}, {"warmup_epochs": 1}, {"decay_factor": 4}]
)
def test_settings_that_arms_have_no_more_are_refused_with_what_to_do(setting: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        job(auto={"arms": [{"name": "late", "method": "ramp", **setting}]})
    (problem,) = caught.value.problems
    assert (
        problem.path == f"auto.arms[0].{next(iter(setting))}"
        and problem.message == "this key no longer exists: delete it"
    )
    assert problem.hint


def test_records_of_arms_with_more_settings_are_read() -> None:
    old = {
        "name": "late",
        "method": "ramp",
        "lr_factor": 2,
        "decay_from": 0.7,
        "beta1": None,
        "ags": None,
        "decay_factor": 4,
    }
    assert Arm.model_validate(old) == Arm(name="late", method="ramp", lr_factor=2, decay_factor=4)


def test_arms_of_ags_scale_the_update_where_the_optimizer_would_divide_a_factor_out() -> None:
    arm = Arm(name="ags", method="ags")
    assert (
        self_tuning.make_job_of_arm(job(optimizer={"name": "AdamW"}), arm).ags.fill_from_preset().apply_to == "update"
    )
    assert self_tuning.make_job_of_arm(job(), arm).ags.fill_from_preset().apply_to == "gradient"


def test_the_factor_grows_in_the_warm_up_and_then_stays() -> None:
    arm = Arm(name="x5", lr_factor=5, warmup_epochs=2)
    assert [self_tuning.compute_lr_factor(arm, epoch, start=1) for epoch in (1, 2, 3, 9)] == [1, 3, 5, 5]
    assert self_tuning.compute_lr_factor(Arm(name="x5", lr_factor=5), 1, start=1) == 5


def test_a_branch_cools_down_in_its_second_half() -> None:
    results = [self_tuning.compute_cooldown_factor(epoch, start=1, length=4) for epoch in (1, 3, 4, 4.5, 5, 6)]
    assert results == [1, 1, 0.5, 0.25, 0, 0]


def test_a_smaller_batch_bounds_the_factor_by_linear_scaling() -> None:
    assert self_tuning.limit_lr_factor(Arm(name="x8", lr_factor=8), 4).lr_factor == 4
    assert self_tuning.limit_lr_factor(Arm(name="x8", lr_factor=8), 0.5).lr_factor == 1
    assert self_tuning.limit_lr_factor(Arm(name="slow", lr_factor=0.5), 4).lr_factor == 0.5


def test_branches_end_with_the_training() -> None:
    short, shorter = (job(train={"epochs": epochs}, auto={"branch_epochs": 2}) for epochs in (4, 2))
    assert [self_tuning.compute_branch_epochs(spec, 8) for spec in (short, shorter)] == [2, 1]


def test_hardly_above_the_reference_batch_no_two_arms_share_a_name() -> None:
    names = [arm.name for arm in self_tuning.list_arms_of_training(job(), 33)]
    assert len(set(names)) == len(names)


def test_naming_the_control_alone_tries_nothing_else() -> None:
    assert self_tuning.list_arms_of_training(job(auto={"arms": [{"name": "lbt"}]}), 256) == (Arm(name="lbt"),)


def test_a_job_is_measured_as_its_dearest_arm() -> None:
    assert self_tuning.find_most_expensive_job(job()).train.method == "ramp"
    arms = [{"name": name, "method": name} for name in ("ramp", "ags")]
    assert self_tuning.find_most_expensive_job(job(auto={"arms": arms})).train.method == "ags"
    assert (
        self_tuning.find_most_expensive_job(job(auto={"arms": [{"name": "x2", "lr_factor": 2}]})).train.method == "lbt"
    )
    plain = job(train={"method": "lrs"})
    assert self_tuning.find_most_expensive_job(plain) is plain


# --- the winner


@pytest.mark.parametrize("count", [1, 2, 9])
def test_each_arm_trains_one_branch_in_turn(count: int) -> None:
    names = ["lbt", *(f"a{i}" for i in range(count - 1))]
    trained: list[Branch] = []
    while (name := self_tuning.find_next_arm(names, trained)) is not None:
        trained.append(branch(name))
    assert [result.arm for result in trained] == (names if count > 1 else [])


def test_the_loss_decides_with_and_without_accuracies() -> None:
    results = [branch("a", top1=60, loss=0.9), branch("b", loss=None), branch("c", top1=None, loss=0.8)]
    results.append(branch("d", loss=0.1, diverged=True))
    assert [b.arm for b in self_tuning.sort_branches(results)] == ["c", "a", "b", "d"]


def test_a_diverged_arm_never_wins() -> None:
    gone = [branch(name, loss=0.1, diverged=True) for name in "abcx"]
    assert self_tuning.find_winning_arm([branch("lbt", loss=1), *gone]) == "lbt"
    assert self_tuning.find_winning_arm([branch("lbt", loss=2), *gone, branch("d", loss=1)]) == "d"


def test_where_all_diverge_the_control_is_left() -> None:
    results = [branch(name, loss=None, top1=None, diverged=True) for name in ("a", "lbt", "b")]
    assert self_tuning.find_winning_arm(results) == "lbt"


def test_after_arms_that_broke_down_the_best_of_the_rest_wins() -> None:
    results = branches_of(lbt=4, a=1, b=2, c=3)
    assert [self_tuning.find_next_best_arm(results, tuple("abc"[:broken])) for broken in (1, 2, 3)] == ["b", "c", "lbt"]


@pytest.mark.parametrize(
    ("losses", "winner"),
    [
        ({"lbt": 2.0, "a": 0.91, "ramp": 1.0}, "ramp"),
        ({"lbt": 2.0, "a": 0.89, "ramp": 1.0}, "a"),
        ({"lbt": 1.0, "a": 1.2, "ramp": 1.1}, "ramp"),
        ({"lbt": 1.0, "a": 1.2, "ramp": 1.2}, "lbt"),
        ({"lbt": 1.0, "ramp": 0.9, "ramp_decay4": 0.89}, "ramp-decay4"),
        ({"lbt": 1.0, "ramp": 0.9, "ramp_decay4": 0.895}, "ramp"),
        ({"lbt": 1.0, "ramp": 2.0, "ramp_decay4": 1.9}, "lbt"),
        ({"lbt": 1.0, "a": 0.9}, "a"),
    ],
)
def test_the_favourite_wins_unless_another_is_clearly_better_and_so_does_the_job_s_decay(
    losses: dict[str, float], winner: str
) -> None:
    assert self_tuning.find_winning_arm(branches_of(**losses)) == winner


def test_a_favourite_that_diverged_does_not_win() -> None:
    gone = branch("ramp", loss=None, diverged=True)
    assert self_tuning.find_winning_arm([*branches_of(lbt=2, a=1), gone]) == "a"


# --- what it takes


@pytest.mark.parametrize(
    ("epochs", "batch", "size", "reference", "at_most"),
    [
        (20, 2048, 10_240, 128, 0.3),
        (20, 1024, 10_240, 128, 0.3),
        (40, 512, 1437, 32, 0.3),
        (100, 4096, 50_000, 128, 0.26),
    ],
)
def test_branches_take_at_most_so_much_of_the_training(
    epochs: int, batch: int, size: int, reference: int, at_most: float
) -> None:
    train = {"epochs": epochs, "reference_batch": reference, "method": "auto"}
    planned = self_tuning.plan_tuning(
        job(train=train, optimizer={"weight_decay": 5e-4}), batch=batch, dataset_size=size
    )
    assert planned.branches == 4
    assert 0.1 < planned.samples / (epochs * size) <= at_most


def test_the_plan_counts_every_sample() -> None:
    """20 epochs of 10,240 samples at 2048: an epoch of 128, and four branches of 1.14 epochs of the 9,216 that are left."""
    spec = job(train={"epochs": 20, "reference_batch": 128, "method": "auto"}, optimizer={"weight_decay": 5e-4})
    planned = self_tuning.plan_tuning(spec, batch=2048, dataset_size=10_240)
    assert self_tuning.count_branch_samples(spec, 4, 9216) == 10_496  # (0.25 x 20 / 0.9 - 1) / 4 epochs
    lbt = 5 * 2048  # four steps of an epoch, whose last 1,024 samples are left out, and one of the next
    # 1,749 samples a stage, each ending at or beyond its end; then as lbt
    ramp = 7 * 256 + 4 * 512 + 2 * 1024 + 1 * 2048 + 1 * 2048
    assert [self_tuning.count_trained_samples(spec, arm, batch=2048, size=9216) for arm in self_tuning.list_arms_of_training(spec, 2048)] == [
        lbt, ramp, ramp, ramp,
    ]  # fmt: skip
    assert planned.samples == 72 * 128 + lbt + 3 * ramp
    assert planned.steps == math.ceil(planned.samples / 2048)
    assert planned.holdout == 1024


def test_a_short_branch_has_one_step_and_the_holdout_is_bounded() -> None:
    short = job(auto={"branch_epochs": 0.01})
    assert self_tuning.count_trained_samples(short, Arm(name="lbt"), batch=256, size=1300) == 256
    assert self_tuning.count_holdout_samples(1_000_000) == 10_000
    assert self_tuning.count_holdout_samples(5) == 1


def test_branches_grow_with_the_training() -> None:
    assert self_tuning.compute_branch_epochs(job(auto={"epochs": 0.5}), 8) == 0.5
    assert self_tuning.compute_branch_epochs(job(train={"epochs": 250}), 4) > 10 * self_tuning.compute_branch_epochs(
        job(), 4
    )
    assert self_tuning.compute_branch_epochs(job(), 8) == self_tuning.compute_branch_epochs(job(), 4) / 2
    assert self_tuning.compute_branch_epochs(job(train={"epochs": 2}), 4) == 0, "of a step at least, as above"


def test_other_methods_take_no_branches() -> None:
    assert self_tuning.plan_tuning(
        job(train={"method": "ags"}), batch=256, dataset_size=1437
    ) == self_tuning.TuningPlan(0, 0, 0)


def test_the_predicted_time_has_the_branches_in_it() -> None:
    overheads = Overheads(startup=10, eval_batch=0.5, eval_batch_size=32, checkpoint=0, refresh=0)

    def seconds(method: str, rate: float = 0.0) -> float:
        result = cost.count_training_work(
            job(train={"method": method}), batch=256, world=2, dataset_size=1280, eval_size=64, eval_batch_size=32
        )
        return cost.compute_training_seconds(result, step_time=0.1, overheads=overheads, rate=rate)

    planned = self_tuning.plan_tuning(job(), batch=256, dataset_size=1280)
    extra = planned.steps * 0.1 + planned.branches * math.ceil(128 / 64) * 0.5
    assert seconds("auto") - seconds("ags") == pytest.approx(extra)
    assert seconds("auto", rate=1e-3) - seconds("ags", rate=1e-3) > extra


# --- the spec


@pytest.mark.parametrize(
    ("auto", "words"),
    [
        ({"arms": [{"name": "a"}, {"name": "a", "lr_factor": 2}]}, "a different name"),
        ({"arms": [{"name": "lbt", "lr_factor": 2}]}, "the large batch without other changes"),
        ({"branch_epochs": 0}, "branch_epochs"),
    ],
)
def test_what_cannot_be_meant_is_refused(auto: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(auto=auto)
    assert words in " ".join(f"{p.path} {p.message}" for p in caught.value.problems)


def test_a_training_that_ends_before_its_branches_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        job(train={"epochs": 1})
    assert "set train.epochs to 2 or more" in caught.value.problems[0].message


def test_arms_scale_the_learning_rate_alone() -> None:
    with pytest.raises(SpecError) as caught:
        job(train={"lr_scaling": "linear"})
    assert "which tries several learning rates itself" in caught.value.problems[0].message


def test_the_signature_depends_on_the_arms_only_with_method_auto() -> None:
    def signed(method: str, epochs: int) -> str:
        return compute_train_signature(
            job(train={"method": method}, auto={"branch_epochs": epochs}), nodes=1, batch=256
        )

    assert signed("auto", 1) != signed("auto", 2)
    assert signed("ags", 1) == signed("ags", 2)
