"""With which batch a script may go on, from planted traces: the figures are those of scripts that were tried."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from tula_cli.cluster.scripts.resume_test import (
    count_trained_steps,
    find_error_line,
    find_observed_schedule,
    read_learning_rate_curve,
)
from tula_cli.models.resuming import ResumeVerdict, judge_resume_test
from tula_cli.run.records.scripts import ObservedStart, Schedule
from tula_cli.spec.scripts.script import Length


def start(phase: Any, batch: int, samples: int, **more: Any) -> ObservedStart:
    """Return a start of three epochs of 1,280 samples."""
    given = {
        "ended": "killed" if phase == "begin" else "ended",
        "seconds": 30.0,
        "steps": samples // batch,
        "dataset_size": 1280,
    } | more
    return ObservedStart(phase=phase, batch=batch, length=Length(epochs=3), whole=3840, samples=samples, **given)


def begin(saved: int = 1280, **more: Any) -> ObservedStart:
    return start("begin", 32, saved + 160, saved_steps=saved // 32, saved_samples=saved, **more)


SAME = start("same", 32, 2560)


def test_a_right_script_may_go_on_from_where_it_was_seen_to() -> None:
    half = start("half", 16, 2560)
    assert judge_resume_test([begin(), SAME, half], lr_ratio=1.0).verdict == "epoch"
    middle = judge_resume_test([begin(640), start("same", 32, 3200), start("half", 16, 3200)], lr_ratio=1.0)
    assert middle.verdict == "any" and not middle.faults
    assert middle.reasons[1] == "at batch 16 it resumes from its checkpoint, up to 3840 of the 3840 samples of the test"


def test_a_trainer_that_counts_its_steps_at_the_old_batch_trains_17_percent_too_many() -> None:
    result = judge_resume_test([begin(), SAME, start("half", 16, 3200)], lr_ratio=None)
    assert result.verdict == "same"
    words = "at batch 16 it trains 4480 samples in total instead of 3840: 16.7 % too many"
    assert result.faults == (words,) and result.reasons[-1] == words


def test_of_a_resume_that_has_taken_no_step_nothing_is_known() -> None:
    result = judge_resume_test([begin(), start("same", 32, 0, ended="cut", seconds=76.6)], lr_ratio=1.0)
    assert (result.verdict, result.reasons) == (None, ("not tested at batch 32: no step within 76.6 s",))


def test_what_a_dropped_last_batch_leaves_out_is_no_fault() -> None:
    less = [begin(1248, dataset_size=1270), start("same", 32, 2496, dataset_size=1270), start("half", 16, 2528)]
    assert judge_resume_test(less, lr_ratio=1.0).verdict == "epoch"


@pytest.mark.parametrize(
    ("saved", "more", "other_nodes", "words"),
    [
        (1280, {}, True, "at batch 32 on 2 nodes instead of 1 it resumes from its checkpoint, up to 3840 of the 3840 samples of the test"),
        (1280, {"samples": 1280}, False, "2 nodes instead of 1 it trains 2560 samples in total instead of 3840: 1280 too few"),
        (1280, {"first_lr": 0.2}, False, "on 2 nodes instead of 1 its learning rate is 0.2000 after the checkpoint"),
        (1280, {"rates": ((32, 0.1), (2560, 0.2))}, False, "learning rate is 0.2000 after 2560 samples instead of 0.1000"),
        (1280, {"ended": "failed", "outcome": "user", "why": "no rng-1.pt"}, False, "its own checkpoint: no rng-1.pt"),
        (1280, {"ended": "failed", "outcome": "device_oom", "why": "no memory"}, None, "instead of 1: no memory"),
        (1280, {"ended": "cut", "samples": 800}, None, "the script trains, but did not finish"),
        (1280, {"whole": None}, None, "were not compared"),
        (64, {"samples": 3776}, None, "only 64 samples, too few to notice samples counted per rank"),
    ],
)  # fmt: skip
def test_a_script_resumes_on_other_nodes_if_samples_and_learning_rates_are_those_of_the_same(
    saved: int, more: dict[str, Any], other_nodes: bool | None, words: str
) -> None:
    same = start("same", 32, 3840 - saved, first_lr=0.1, rates=((32, 0.1), (2560, 0.1)))
    on_two = start("more", 32, 2560, nodes=2).model_copy(update=more)
    result = judge_resume_test([begin(saved, next_lr=0.1), same, on_two, start("half", 16, 2560)], lr_ratio=1.0)
    assert result.other_nodes is other_nodes and words in result.reasons[-1], result
    assert (result.reasons[-1] in result.faults) == (other_nodes is False)
    assert saved < 1280 or result.verdict == "epoch", "of which batches it resumes at, other nodes tell nothing"


def test_a_checkpoint_that_cannot_be_loaded_is_of_no_use() -> None:
    failed = start("same", 32, 0, ended="failed", outcome="user", why="UnpicklingError: no")
    result = judge_resume_test([begin(), failed], lr_ratio=None)
    assert result.verdict == "none"
    assert result.faults == ("at batch 32 it cannot resume from its own checkpoint: UnpicklingError: no",)


def test_what_the_machine_did_says_nothing_of_the_script() -> None:
    failed = start("same", 32, 0, ended="failed", outcome="device_oom", why="CUDA out of memory")
    assert judge_resume_test([begin(), failed], lr_ratio=None).verdict is None
    half = start("half", 16, 0, ended="failed", outcome="device_fault", why="Xid 79")
    assert judge_resume_test([begin(), SAME, half], lr_ratio=None).verdict == "same"


def test_a_script_that_begins_anew_is_distinguished_from_one_that_repeats_a_part() -> None:
    anew = judge_resume_test([begin(), start("same", 32, 3840)], lr_ratio=None)
    assert anew.verdict == "none" and "starts from the beginning: all 3840 samples" in anew.faults[0]
    part = judge_resume_test([begin(640), start("same", 32, 3520), start("half", 16, 3200)], lr_ratio=None)
    assert part.verdict == "same" and "8.3 % too many" in part.faults[0]


def test_samples_that_are_left_out_are_reported() -> None:
    result = judge_resume_test([begin(), SAME, start("half", 16, 1280)], lr_ratio=None)
    assert result.verdict == "same" and result.faults == (
        "at batch 16 it trains 2560 samples in total instead of 3840: 1280 too few",
    )


def test_what_was_not_reached_is_reported_and_not_assumed() -> None:
    cut = start("half", 16, 800, ended="cut")
    result = judge_resume_test([begin(), SAME, cut], lr_ratio=None)
    assert result.verdict == "same" and not result.faults
    assert "did not finish (800 of 2560 samples in 30.0 s)" in result.reasons[-1]
    unknown = judge_resume_test([begin(), SAME.model_copy(update={"whole": None})], lr_ratio=None)
    assert unknown.verdict == "same" and "were not compared" in unknown.reasons[0]
    assert unknown.reasons[-1] == "not tested at another batch"


def test_of_a_resume_that_was_cut_short_only_what_was_compared_is_said() -> None:
    cut = start("same", 32, 800, ended="cut", first_lr=0.1)
    result = judge_resume_test([begin(next_lr=0.1), cut], lr_ratio=1.0)
    assert result.verdict is None and "from which it resumed is unknown: raise search.max_minutes" in result.reasons[0]
    result = judge_resume_test([begin(next_lr=0.2), cut], lr_ratio=1.0)
    assert result.verdict == "same" and "learning rate is 0.1000" in result.faults[0], "its learning rate was compared"


def test_a_checkpoint_that_comes_too_early_to_tell_a_fault_is_no_proof() -> None:
    early = begin(64)
    result = judge_resume_test([early, start("same", 32, 3776), start("half", 16, 3776)], lr_ratio=1.0)
    assert result.verdict == "same" and "too few to notice" in result.reasons[-1] and not result.faults


def test_a_start_that_was_cut_off_beyond_what_was_left_has_trained_too_many() -> None:
    result = judge_resume_test([begin(), SAME, start("half", 16, 5200, ended="cut")], lr_ratio=None)
    assert "trains at least 6480 samples" in result.faults[0]


@pytest.mark.parametrize(
    ("first", "ratio", "fault"),
    [
        (0.05, 0.5, ""),
        (0.1, 0.5, "its learning rate is 0.1000 after the checkpoint, but should be 0.05000"),
        (0.1, 1.0, ""),
        (0.01, 1.0, "its learning rate is 0.01000 after the checkpoint, but was 0.1000 at that point in the first run"),
        (0.05, None, ""),
        (0.1 * math.sqrt(0.5), None, ""),
        (0.083, None, "was 0.1000 at that point in the first run"),
    ],
)
def test_the_learning_rate_is_held_against_what_was_asked_for(first: float, ratio: float | None, fault: str) -> None:
    half = start("half", 16, 2560, first_lr=first)
    result = judge_resume_test([begin(next_lr=0.1, lr_step=0.001), SAME, half], lr_ratio=ratio)
    assert result.verdict == ("same" if fault else "epoch")
    assert all(fault in message for message in result.faults) and bool(result.faults) == bool(fault)


@pytest.mark.parametrize(
    ("beginning", "words"),
    [
        (start("begin", 32, 3840, ended="ended"), "ended without a checkpoint that"),
        (start("begin", 32, 0, ended="ended"), "at batch 32 no step of a torch optimizer was observed"),
        (start("begin", 32, 0, ended="cut"), "at batch 32 no step of a torch optimizer was observed"),
        (begin(3840, ended="ended"), "the script's only checkpoint is from the end of the training"),
        (start("begin", 32, 640, ended="cut"), "no checkpoint within 30.0 s at batch 32; raise search.max_minutes"),
        (
            start("begin", 32, 64, ended="failed", outcome="user", why="KeyError: 1"),
            "the script failed before it could resume: KeyError",
        ),
    ],
)
def test_without_a_checkpoint_there_is_no_verdict(beginning: ObservedStart, words: str) -> None:
    result = judge_resume_test([beginning], lr_ratio=None)
    assert result.verdict is None and words in result.reasons[0] and result.reasons[0].startswith("not tested: ")


def rows(*samples: int | None) -> list[dict[str, Any]]:
    return [{"step": step, "samples": number} for step, number in enumerate(samples, 1)]


def test_a_step_trains_its_batch_at_most() -> None:
    assert count_trained_steps(rows(8, 16, 20), 8) == (3, 20)
    assert count_trained_steps(rows(16, 24, 24), 8) == (3, 24), "a loader that is one batch ahead"
    assert count_trained_steps(rows(808, 816, 824), 8) == (3, 24), (
        "what it skipped was not trained on, but for what looks ahead of its step"
    )
    assert count_trained_steps(rows(None, None), 8) == (2, 16)
    assert count_trained_steps([*rows(8, 16), {"step": 2, "samples": 16}], 8) == (2, 16)
    assert count_trained_steps([*rows(8, 16), *rows(8)], 8) == (1, 8), "counted anew"


WEIGHTS_ONLY = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    state = torch.load(path)
_pickle.UnpicklingError: Weights only load failed. This file can still be loaded.
\t(1) In PyTorch 2.6, we changed the default value of the `weights_only` argument in `torch.load`.
\tWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default. Please use `x`.

Check the documentation of torch.load to learn more.
"""


def test_the_line_that_tells_is_that_of_the_exception() -> None:
    error_line = find_error_line(WEIGHTS_ONLY, "_pickle.UnpicklingError")
    assert error_line.startswith(
        "_pickle.UnpicklingError: Unsupported global: GLOBAL argparse.Namespace was not an allowed"
    )
    assert "weights_only=False" in error_line
    keys = "Traceback (most recent call last):\n  File 'a'\nKeyError: 'optimizer'\n"
    assert find_error_line(keys, "KeyError") == "KeyError: 'optimizer'"
    assert find_error_line("", "SystemExit") == "SystemExit"


TOTAL, SAVED = 3840, 1280
"""Samples of three epochs, and of the first."""


def cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def wave(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


Curve = Callable[[float, int], float]
"""A learning rate, by the share of the training that is over and the batch: of 32, or of 16 after it went on from 32."""


def by_steps(schedule: Callable[[float], float]) -> Curve:
    """A schedule that counts steps of 32 samples: at 16 it goes on twice as fast from the checkpoint."""
    at = SAVED / TOTAL
    return lambda share, batch: schedule(at + (share - at) * 32 / batch)


def by_new_total(schedule: Callable[[float], float]) -> Curve:
    """A schedule that keeps its count of steps, and takes the total of the new batch."""
    at = SAVED / TOTAL
    return lambda share, batch: schedule(share if batch == 32 else at / 2 + (share - at))


def of_samples(schedule: Callable[[float], float], factor: float = 1.0) -> Curve:
    return lambda share, batch: schedule(share) * (1.0 if batch == 32 else factor)


STEPWISE: dict[str, Callable[[float], float]] = {
    "cosine": cosine,
    "a wave that rises again": wave,
    "linear": lambda share: max(0.0, 1 - share),
    "halves": lambda share: 0.1 ** (share // 0.25),
    "exponential": lambda share: 0.01**share,
    "restarts": lambda share: cosine(share % 0.5 * 2),
    "stable, then decay": lambda share: min(1.0, max(0.0, (1 - share) / 0.25)),
    "inverse root": lambda share: 1 / math.sqrt(1 + 120 * share),
    "slow, of a long training": lambda share: cosine(share / 1000),
    "warm-up": lambda share: min(1.0, share / 0.9),
}
EPOCHS = {
    "cosine by epochs": lambda share: cosine(int(share * 3) / 3),
    "steps by epochs": lambda share: 0.1 ** int(share * 3),
}


def resumed(batch: int, curve: Curve) -> ObservedStart:
    steps = range((TOTAL - SAVED) // batch)
    rates = tuple((batch * (step + 1), 0.1 * curve((SAVED + batch * step) / TOTAL, batch)) for step in steps)
    return start("same" if batch == 32 else "half", batch, TOTAL - SAVED, first_lr=rates[0][1], rates=rates)


def curves_judged(curve: Curve, ratio: float | None = 1.0) -> ResumeVerdict:
    after = [0.1 * curve((SAVED + 32 * step) / TOTAL, 32) for step in (0, 2)]
    return judge_resume_test(
        [begin(SAVED, next_lr=after[0], lr_step=abs(after[1] - after[0])), resumed(32, curve), resumed(16, curve)],
        lr_ratio=ratio,
    )


@pytest.mark.parametrize("name", STEPWISE)
@pytest.mark.parametrize("ratio", [1.0, None])
def test_a_schedule_that_counts_the_old_steps_goes_on_at_the_same_batch_alone(name: str, ratio: float | None) -> None:
    result = curves_judged(by_steps(STEPWISE[name]), ratio)
    assert result.verdict == "same" and len(result.faults) == 1 and "at batch 16 its learning rate" in result.faults[0]


@pytest.mark.parametrize("name", ["cosine", "linear", "exponential", "inverse root"])
def test_a_count_of_steps_that_is_kept_beside_a_new_total_is_found(name: str) -> None:
    assert curves_judged(by_new_total(STEPWISE[name]), None).verdict == "same"


@pytest.mark.parametrize("name", [*STEPWISE, *EPOCHS])
@pytest.mark.parametrize(("factor", "ratio"), [(1.0, 1.0), (0.5, 0.5), (0.5, None), (math.sqrt(0.5), None)])
def test_a_schedule_of_samples_or_epochs_may_go_on_at_another_batch(
    name: str, factor: float, ratio: float | None
) -> None:
    result = curves_judged(of_samples({**STEPWISE, **EPOCHS}[name], factor), ratio)
    assert result.verdict == "epoch" and not result.faults, result.faults


def test_a_least_learning_rate_that_is_not_scaled_is_no_fault() -> None:
    def floored(share: float, batch: int) -> float:
        return 0.01 + ((1.0 if batch == 32 else 0.5) - 0.01) * cosine(share)

    assert curves_judged(floored, 0.5).verdict == "epoch"


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        ((24, 24, True, True), "same"),  # beyond what a short training shows
        ((24, 24, True, None), "same"),
        ((24, 24, True, False), "epoch"),  # constant from here on
        ((24, 48, True, True), "epoch"),  # counted anew, by the new batch
        ((1, 1, False, True), "epoch"),  # epochs
    ],
)
def test_a_scheduler_that_goes_on_at_the_step_of_the_old_batch_is_found(
    seen: tuple[int, int, bool, bool | None], verdict: str
) -> None:
    before, after, per_step, moves = seen

    def stands(at: int) -> Schedule:
        return Schedule(name="StepLR", at=at, per_step=per_step, moves=moves)

    starts = [
        begin(schedule=stands(before)),
        SAME.model_copy(update={"schedule": stands(before)}),
        start("half", 16, 2560, schedule=stands(after)),
    ]
    result = judge_resume_test(starts, lr_ratio=1.0)
    assert result.verdict == verdict and all("StepLR" in fault for fault in result.faults)


def test_a_schedule_that_is_not_restored_is_found_although_its_learning_rate_is_right() -> None:
    before, after = (Schedule(name="LambdaLR", at=at, per_step=True, moves=True) for at in (24, 0))
    result = judge_resume_test([begin(schedule=before), SAME.model_copy(update={"schedule": after})], lr_ratio=1.0)
    assert result.faults == ("at batch 32 its schedule (LambdaLR) resumes at step 0 instead of 24",)


def test_what_rows_tell_of_a_schedule() -> None:
    def told(step: int, at: int) -> dict[str, Any]:
        return {"step": step, "lr": 0.1 * step, "schedule": {"name": "torch.optim.StepLR", "at": at, "moves": True}}

    by_step = [told(step, step - 1) for step in range(1, 9)]
    assert find_observed_schedule(by_step, after=4) == Schedule(name="StepLR", at=4, per_step=True, moves=True)
    by_epoch = [told(step, step // 4) for step in range(1, 9)]
    assert find_observed_schedule(by_epoch, after=0) == Schedule(name="StepLR", at=0, per_step=False, moves=True)
    assert find_observed_schedule([{"step": 1, "lr": 0.1}], after=0) is None
    many = read_learning_rate_curve([{"step": step, "lr": step / 1e4} for step in range(1, 1001)], 32)
    assert len(many) <= 401 and many[0] == (32, 1e-4) and many[-1] == (32_000, 0.1)
