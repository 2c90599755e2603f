"""Which arms there are, which survive a rung, and what that takes."""

import math
from typing import Any

import pytest

from tula_cli.errors import SpecError
from tula_cli.models import cost, halving
from tula_cli.models.halving import Turn
from tula_cli.run.records.probes import Overheads
from tula_cli.run.records.results import Branch
from tula_cli.spec.ags import Arm
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate
from tula_cli.spec.signature import train_signature


def job(**sections: dict[str, Any]) -> JobSpec:
    base: dict[str, Any] = {
        "model": {"name": "small_cnn"},
        "dataset": {"name": "digits"},
        "optimizer": {"lr": 0.1},
        "train": {"epochs": 20, "method": "auto", "reference_batch": 32},
    }
    return validate({**base, **{k: {**base.get(k, {}), **v} for k, v in sections.items()}}, source="test")


def branch(arm: str, *, top1: float | None = 50.0, loss: float | None = 1.0, diverged: bool = False) -> Branch:
    return Branch(arm=arm, rung=1, epochs=1, samples=96, loss=loss, top1=top1, diverged=diverged, seconds=1.0)


def play(names: list[str], merit: dict[str, float]) -> tuple[list[Turn], str]:
    """Train branches as they come, each better the greater its arm's merit; return the turns and the winner."""
    turns: list[Turn] = []
    branches: list[Branch] = []
    while True:
        turn, winner = halving.standing(names, branches)
        if turn is None:
            assert winner is not None
            return turns, winner
        turns.append(turn)
        name = names[turn.arm]
        branches.append(branch(name, loss=100 - merit[name]).model_copy(update={"rung": turn.rung}))


# --- arms


def test_default_arms_are_the_control_faster_ones_up_to_linear_scaling_and_ags() -> None:
    arms = halving.arms(job(), 256)
    assert arms[0] == Arm(name="lbt")
    assert [arm.lr_factor for arm in arms if arm.method == "lbt"] == pytest.approx([1, 2, 8])
    assert [arm.lr_factor for arm in arms if arm.method == "ortho"] == pytest.approx([4, 8])
    assert [arm.lr_factor for arm in arms if arm.method == "ags"] == pytest.approx([1, 1, 1])
    assert all(arm.warmup_epochs for arm in arms if arm.lr_factor > 1)
    scaled = {(job.granularity, job.refresh == "epoch", job.b_small) for job in _resolved(arms)}
    assert scaled == {("element", True, "auto"), ("tensor", True, 8), ("tensor", False, "auto")}
    assert len({arm.name for arm in arms}) == len(arms) == 8


def _resolved(arms: tuple[Arm, ...]) -> list[Any]:
    return [halving.tuned(job(), arm).ags.resolved() for arm in arms if arm.method == "ags"]


@pytest.mark.parametrize(("batch", "names"), [(32, []), (16, []), (64, ["1.26", "2"]), (32 * 4096, ["4", "64"])])
def test_the_faster_arms_follow_the_batch(batch: int, names: list[str]) -> None:
    found = [arm.name for arm in halving.arms(job(), batch) if arm.method == "lbt"]
    assert found == ["lbt", *(f"lbt-x{name}" for name in names)]


def test_an_optimizer_other_than_sgd_has_no_turned_steps_and_scales_its_updates() -> None:
    arms = halving.arms(job(optimizer={"name": "AdamW", "lr": 0.1}), 256)
    assert [arm.lr_factor for arm in arms if arm.method == "lbt"] == pytest.approx([1, 2, 4, 8])
    assert [arm.lr_factor for arm in arms if arm.method == "ags"] == pytest.approx([1, 1, 1, 8**0.5])
    assert {arm.ags.apply_to for arm in arms if arm.ags is not None} == {"update"}
    assert len(arms) == 8


def test_an_arm_alone_says_what_happens_to_the_learning_rate() -> None:
    arm = Arm(name="turned", method="ortho", lr_factor=4)
    tuned = halving.tuned(job(), arm)
    assert (tuned.train.lr_scaling, tuned.schedule.warmup_epochs) == ("none", 0.0)
    assert halving.tuned(job(schedule={"warmup_epochs": 3}), arm).schedule.warmup_epochs == 3


def test_own_arms_replace_the_default_ones_but_not_the_control() -> None:
    mine = {"name": "mine", "method": "ags", "ags": {"delta": 0.2}}
    spec = job(auto={"arms": [mine]}, ags={"delta": 0.7})
    assert [arm.name for arm in halving.arms(spec, 256)] == ["lbt", "mine"]
    tuned = halving.tuned(spec, halving.arms(spec, 256)[1])
    assert (tuned.train.method, tuned.ags.resolved().delta) == ("ags", 0.2)
    assert halving.tuned(spec, Arm(name="as-given", method="ags")).ags.delta == 0.7


def test_default_arms_scale_the_update_where_the_optimizer_would_divide_a_factor_out() -> None:
    arms = halving.arms(job(optimizer={"name": "AdamW"}), 256)
    assert {arm.ags.resolved().apply_to for arm in arms if arm.ags is not None} == {"update"}
    assert {found.apply_to for found in _resolved(halving.arms(job(), 256))} == {"gradient"}


def test_the_factor_grows_in_the_warm_up_and_then_stays() -> None:
    arm = Arm(name="x5", lr_factor=5, warmup_epochs=2)
    assert [halving.lr_factor(arm, epoch, start=1) for epoch in (1, 2, 3, 9)] == [1, 3, 5, 5]
    assert halving.lr_factor(Arm(name="x5", lr_factor=5), 1, start=1) == 5


def test_a_branch_cools_down_in_its_second_half() -> None:
    found = [halving.cooling(epoch, start=1, length=4) for epoch in (1, 3, 4, 4.5, 5, 6)]
    assert found == [1, 1, 0.5, 0.25, 0, 0]


def test_a_smaller_batch_bounds_the_factor_by_linear_scaling() -> None:
    assert halving.within(Arm(name="x8", lr_factor=8), 4).lr_factor == 4
    assert halving.within(Arm(name="x8", lr_factor=8), 0.5).lr_factor == 1
    assert halving.within(Arm(name="slow", lr_factor=0.5), 4).lr_factor == 0.5


def test_branches_end_with_the_training() -> None:
    short = job(train={"epochs": 4, "method": "auto", "reference_batch": 32}, auto={"epochs": 2})
    assert [halving.epochs(short, rung) for rung in (1, 2, 3)] == [2, 3, 3]


def test_hardly_above_the_reference_batch_no_two_arms_share_a_name() -> None:
    names = [arm.name for arm in halving.arms(job(), 33)]
    assert len(set(names)) == len(names)


def test_naming_the_control_alone_tries_nothing_else() -> None:
    assert halving.arms(job(auto={"arms": [{"name": "lbt"}]}), 256) == (Arm(name="lbt"),)


def test_a_job_is_measured_as_its_dearest_arm() -> None:
    assert halving.dearest(job()).train.method == "ags"
    assert halving.dearest(job()).ags.resolved().granularity == "element"
    assert halving.dearest(job(auto={"arms": [{"name": "x2", "lr_factor": 2}]})).train.method == "lbt"
    plain = job(train={"method": "lrs"})
    assert halving.dearest(plain) is plain


# --- rungs


@pytest.mark.parametrize(("count", "sizes"), [(1, ()), (2, (2,)), (3, (3, 2)), (5, (5, 3, 2)), (8, (8, 4, 2))])
def test_each_rung_trains_half_of_the_one_before(count: int, sizes: tuple[int, ...]) -> None:
    names = ["lbt", *(f"a{i}" for i in range(count - 1))]
    turns, _ = play(names, {name: float(i) for i, name in enumerate(names)})
    assert halving.sizes(count) == sizes
    assert [sum(turn.rung == rung for turn in turns) for rung in range(1, len(sizes) + 1)] == list(sizes)


def test_the_best_arm_wins_and_the_control_stays_to_the_end() -> None:
    names = ["lbt", "a", "b", "c", "d", "e", "f", "g"]
    turns, winner = play(names, dict(zip(names, (10, 90, 20, 80, 30, 70, 40, 60), strict=True)))
    assert winner == "a"
    assert [names[turn.arm] for turn in turns if turn.rung == 2] == ["lbt", "a", "c", "e"]
    assert [names[turn.arm] for turn in turns if turn.rung == 3] == ["lbt", "a"]


def test_the_control_wins_where_nothing_beats_it() -> None:
    assert play(["lbt", "a", "b"], {"lbt": 60, "a": 50, "b": 55})[1] == "lbt"


def final(arm: str, merit: float) -> Branch:
    return branch(arm, loss=100 - merit).model_copy(update={"rung": 2})


def test_where_the_control_wins_others_meet_it_at_that_length() -> None:
    names = ["lbt", "a", "b", "c"]
    first = [branch(name, loss=loss) for name, loss in (("lbt", 2.0), ("a", 1.0), ("b", 1.5), ("c", 3.0))]
    duel = [*first, final("lbt", 50), final("a", 10)]
    assert halving.standing(names, duel) == (Turn(2, 2), None), "b was better than lbt in the first rung"
    assert halving.standing(names, [*duel, final("b", 60)]) == (None, "b")
    assert halving.standing(names, [*duel, final("b", 40)]) == (None, "lbt"), "c never was better than lbt"


def test_a_challenger_does_not_come_where_the_control_has_lost() -> None:
    names = ["lbt", "a", "b", "c"]
    first = [branch(name, loss=loss) for name, loss in (("lbt", 2.0), ("a", 1.0), ("b", 1.5), ("c", 1.7))]
    assert halving.standing(names, [*first, final("lbt", 50), final("a", 51)]) == (None, "a")


def test_challengers_are_few_and_none_has_diverged() -> None:
    names = ["lbt", *"abcdefg"]
    first = [branch("lbt", loss=9.0), *(branch(name, loss=i, diverged=name == "b") for i, name in enumerate("abcdefg"))]
    second = [b.model_copy(update={"rung": 2}) for b in first if b.arm in ("lbt", "a", "c")]
    second.append(branch("d", loss=1.0).model_copy(update={"rung": 2}))
    last = [
        b.model_copy(update={"rung": 3, "loss": b.loss + 10 * (b.arm != "lbt")}) for b in first if b.arm in ("lbt", "a")
    ]
    met = []
    branches = [*first, *second, *last]
    while (turn := halving.standing(names, branches)[0]) is not None:
        met.append(names[turn.arm])
        branches.append(branch(met[-1], loss=99.0).model_copy(update={"rung": turn.rung}))
    assert met == ["d", "c"], "d was the better one in the longer branches"
    assert halving.standing(names, branches) == (None, "lbt")


def test_the_loss_decides_with_and_without_accuracies() -> None:
    found = [branch("a", top1=60, loss=0.9), branch("b", loss=None), branch("c", top1=None, loss=0.8)]
    found.append(branch("d", loss=0.1, diverged=True))
    assert [b.arm for b in halving.ranked(found)] == ["c", "a", "b", "d"]


def test_a_diverged_arm_never_survives() -> None:
    gone = [branch(name, loss=0.1, diverged=True) for name in "abc"]
    assert halving.survivors([branch("lbt", loss=1), *gone]) == ["lbt"]
    assert halving.survivors([branch("lbt", loss=1), *gone, branch("d", loss=2)]) == ["lbt", "d"]


def test_where_all_diverge_the_control_is_left() -> None:
    found = [branch(name, loss=None, top1=None, diverged=True) for name in ("a", "lbt", "b")]
    assert halving.survivors(found) == ["lbt"]


def rung(number: int, **losses: float) -> list[Branch]:
    found = [branch(name.replace("_", "-"), loss=loss) for name, loss in losses.items()]
    return [b.model_copy(update={"rung": number}) for b in found]


def test_the_favourite_stays_to_the_end_beside_the_control_and_the_best() -> None:
    names = ["lbt", "a", "b", "c", "ortho-x4", "ortho-x8", "d", "e"]
    first = rung(1, lbt=9, a=1, b=2, c=3, ortho_x4=8, ortho_x8=4, d=5, e=6)
    assert halving.survivors(first) == ["a", "b", "ortho-x4", "lbt"]
    second = rung(2, lbt=9, a=2, b=1, ortho_x4=8)
    assert halving.survivors(second) == ["b", "ortho-x4", "lbt"], "one more than half"
    assert halving.standing(names, [*first, *second]) == (Turn(3, 0), None)
    assert halving.survivors(rung(2, lbt=9, a=2, b=3, ortho_x4=1)) == ["ortho-x4", "lbt"]


@pytest.mark.parametrize(
    ("losses", "winner"),
    [
        ({"lbt": 2.0, "a": 1.0, "ortho_x4": 1.19}, "ortho-x4"),
        ({"lbt": 2.0, "a": 1.0, "ortho_x4": 1.21}, "a"),
        ({"lbt": 2.3, "a": 2.1, "ortho_x4": 2.2}, "a"),
        ({"lbt": 2.0, "a": 3.0, "ortho_x4": 1.0}, "ortho-x4"),
        ({"lbt": 1.0, "ortho_x4": 1.01}, "lbt"),
        ({"lbt": 1.0, "a": 1.2, "ortho_x4": 1.01}, "lbt"),
    ],
)
def test_the_favourite_wins_where_it_gains_nearly_as_much_as_the_best(losses: dict[str, float], winner: str) -> None:
    last = rung(1, **losses)
    names = [b.arm for b in last]
    assert halving.survivors(last) == [winner]
    assert halving.standing(names, last) == (None, winner)


def test_a_favourite_that_diverged_stays_no_longer() -> None:
    gone = branch("ortho-x4", loss=None, diverged=True)
    assert halving.survivors([*rung(1, lbt=2, a=1, b=3), gone]) == ["a", "lbt"]
    assert halving.survivors([*rung(1, lbt=2, a=1), gone]) == ["a", "lbt"]
    assert halving.winner([*rung(1, lbt=2, a=1), gone]) == "a"


# --- what it takes


def test_the_plan_counts_what_is_played() -> None:
    spec = job(auto={"epochs": 2, "holdout": 0.2})
    names = [arm.name for arm in halving.arms(spec, 256)]
    turns, _ = play(names, {name: float(i) for i, name in enumerate(names)})
    planned = halving.plan(spec, batch=256, dataset_size=1437)
    steps_an_epoch = (1437 - 287) // 256
    assert planned.branches == len(turns) - 1, "the favourite stays beside the best and the control"
    assert planned.holdout == 287
    own = sum(2 * steps_an_epoch * 2 ** (turn.rung - 1) for turn in turns[:-1])
    assert planned.steps == own + steps_an_epoch, "and the epoch that they have in common"


def test_a_short_branch_has_one_step_and_the_holdout_is_bounded() -> None:
    assert halving.branch_steps(job(auto={"epochs": 0.01}), 1, 5) == 1
    assert halving.holdout_size(1_000_000, 0.1) == 10_000
    assert halving.holdout_size(5, 0.1) == 1


def test_branches_grow_with_the_training_and_with_the_rung() -> None:
    assert [halving.epochs(job(train={"epochs": 20}), rung) for rung in (1, 2, 3)] == [1, 2, 4]
    assert halving.epochs(job(train={"epochs": 250}), 1) == 5
    assert halving.epochs(job(auto={"epochs": 0.5}), 2) == 1


def test_other_methods_take_no_branches() -> None:
    assert halving.plan(job(train={"method": "ags"}), batch=256, dataset_size=1437) == halving.Plan(0, 0, 0)


def test_the_predicted_time_has_the_branches_in_it() -> None:
    overheads = Overheads(startup=10, eval_batch=0.5, eval_batch_size=32, checkpoint=0, refresh=0)

    def seconds(method: str, rate: float = 0.0) -> float:
        found = cost.work(
            job(train={"method": method}), batch=256, world=2, dataset_size=1280, eval_size=64, eval_batch_size=32
        )
        return cost.training_seconds(found, step_time=0.1, overheads=overheads, rate=rate)

    planned = halving.plan(job(), batch=256, dataset_size=1280)
    extra = planned.steps * 0.1 + planned.branches * math.ceil(128 / 64) * 0.5
    assert seconds("auto") - seconds("ags") == pytest.approx(extra)
    assert seconds("auto", rate=1e-3) - seconds("ags", rate=1e-3) > extra


# --- the spec


@pytest.mark.parametrize(
    ("auto", "words"),
    [
        ({"arms": [{"name": "a"}, {"name": "a", "lr_factor": 2}]}, "names of their own"),
        ({"arms": [{"name": "lbt", "lr_factor": 2}]}, "the large batch as it is"),
        ({"arms": [{"name": "a", "ags": {"delta": 0.2}}]}, "means nothing to method lbt"),
        ({"arms": [{"name": "a", "warmup_epochs": 1}]}, "means nothing to lr_factor 1"),
        ({"arms": [{"name": "a", "method": "ags", "ags": {"delta": -1}}]}, "delta"),
        ({"after": 20}, "leaves nothing"),
        ({"epochs": 0}, "epochs"),
        ({"holdout": 0.9}, "holdout"),
    ],
)
def test_what_cannot_be_meant_is_refused(auto: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(auto=auto)
    assert words in " ".join(f"{p.path} {p.message}" for p in caught.value.problems)


def test_arms_scale_the_learning_rate_alone() -> None:
    with pytest.raises(SpecError) as caught:
        job(train={"lr_scaling": "linear"})
    assert "arms scale it themselves" in caught.value.problems[0].message


def test_the_signature_depends_on_the_arms_only_with_method_auto() -> None:
    def signed(method: str, after: int) -> str:
        return train_signature(job(train={"method": method}, auto={"after": after}), nodes=1, batch=256)

    assert signed("auto", 1) != signed("auto", 2)
    assert signed("ags", 1) == signed("ags", 2)
