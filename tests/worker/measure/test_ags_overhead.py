"""The measurement of what AGS costs (benchmarks/overhead/ags_overhead.py)."""

import statistics
import sys
from collections.abc import Iterator

import ags_overhead
import pytest
import torch
from ags_overhead import (
    ORTHO,
    PLAIN_VARIANT,
    SECOND_PLAIN_VARIANT,
    VARIANTS,
    Bench,
    Refresh,
    StepTimes,
    compare_with_plain,
    find_largest_batch,
    measure_refresh,
    summarise_rounds,
)

from tula_cli.worker.ranks import Ranks


@pytest.fixture(scope="module")
def bench(alone: Ranks) -> Bench:
    made = Bench("shufflenet_v2_x0_5", image=32, classes=5, batch=8, me=alone, names=[*VARIANTS, ORTHO])
    made.warm_up()
    return made


@pytest.fixture
def reports(bench: Bench) -> Iterator[None]:
    """Start the counts of all variants anew."""
    for trainer in bench.trainers.values():
        if trainer.ags:
            trainer.ags.report()
    yield


def test_each_variant_does_what_its_name_says(bench: Bench, reports: None) -> None:
    result = bench.rounds(3)
    counts = {name: 6 if f"{name} refresh" in result else 3 for name in VARIANTS}
    shares = {}
    for name in VARIANTS:
        ags = bench.trainers[name].ags
        assert ags is not None
        before = ags.gate._mark[0]
        shares[name] = ags.report()
        assert ags.gate._mark[0] - before == counts[name]
    assert {name: message["scaled"] for name, message in shares.items()} == dict.fromkeys(VARIANTS, 1.0) | {
        "unscaled": 0.0
    }
    assert shares["element"]["refreshes"] == shares["tensor"]["refreshes"] == 4  # one to warm up
    assert shares["robust"]["refreshes"] == 2 + 3
    assert all(len(times) == 3 and min(t.step for t in times) > 0 for times in result.values())
    assert all(timed.step > timed.update > 0 for times in result.values() for timed in times)


def test_all_variants_share_model_batch_and_base(bench: Bench) -> None:
    assert len({id(trainer.parallel) for trainer in bench.trainers.values()}) == 1
    assert len({id(trainer.base) for trainer in bench.trainers.values()}) == 1
    assert bench.trainers[PLAIN_VARIANT].optimizer is bench.trainers[PLAIN_VARIANT].base
    defaults = bench.plain.base.defaults
    assert defaults["fused"] and defaults["momentum"] == 0.9  # what the product trains with


def test_the_times_of_one_process_are_what_it_computed(alone: Ranks) -> None:
    made = Bench("shufflenet_v2_x0_5", image=32, classes=5, batch=8, me=alone, names=[], cpu_time=True)
    torch.set_num_threads(1)
    assert 0 < made.step(PLAIN_VARIANT)().step < 60


def timed(steps: list[float], updates: list[float]) -> list[StepTimes]:
    return [StepTimes(step, update) for step, update in zip(steps, updates, strict=True)]


def test_a_ratio_is_to_the_plain_steps_of_the_same_round() -> None:
    """A machine that is twice as slow in some rounds changes nothing."""
    plain, updates = [1.0, 2.0, 1.0, 2.0, 1.0], [0.1, 0.2, 0.1, 0.2, 0.1]
    expected_value = timed([1.05 * value for value in plain], [value + 0.03 for value in updates])
    row = compare_with_plain("element", expected_value, plain, updates)
    assert (row.ratio, row.low, row.high) == pytest.approx((1.05, 1.05, 1.05))
    assert row.by_update == pytest.approx(1.03)
    assert row.milliseconds == pytest.approx(30.0)


def test_the_interval_is_of_the_median_and_holds_it() -> None:
    ratios = [1.0 + 0.01 * k for k in range(21)]
    low, high = ags_overhead.bootstrap_interval(ratios)
    assert 1.0 < low < statistics.median(ratios) < high < 1.2


def test_the_share_of_a_refresh_is_over_a_hundred_steps() -> None:
    result = measure_refresh("tensor", timed([1.1] * 3, [0.1] * 3), timed([1.6] * 3, [0.6] * 3), 1.0)
    assert result == Refresh("tensor", pytest.approx(500.0), pytest.approx(0.5), pytest.approx(0.5 / 100.5))


def test_the_outcome_takes_the_mean_of_both_plain_steps(bench: Bench) -> None:
    results = {name: timed([2.0] * 3, [0.2] * 3) for name in (*VARIANTS, ORTHO, "element refresh", "tensor refresh")}
    results |= {PLAIN_VARIANT: timed([1.9] * 3, [0.1] * 3), SECOND_PLAIN_VARIANT: timed([2.1] * 3, [0.3] * 3)}
    answer = summarise_rounds(bench, results, model="m", image=32, memory=[])
    assert answer.control == pytest.approx(2.1 / 1.9)
    assert {row.ratio for row in answer.rows} == {1.0}
    assert [row.variant for row in answer.rows] == [*VARIANTS, ORTHO]
    assert [item.variant for item in answer.refreshes] == ["element", "tensor"]
    assert any("x1.0000" in line for line in ags_overhead.format_outcome(answer))


@pytest.mark.parametrize(("limit", "found"), [(100, 64), (64, 64), (31, 0), (10**9, 2**16)])
def test_the_largest_batch_is_the_last_power_of_two_that_fits(limit: int, found: int) -> None:
    assert find_largest_batch(lambda batch: batch <= limit, start=32) == found


@pytest.mark.parametrize(
    "arguments",
    [
        ["--models", "resnet5"],
        ["--batch", "2"],
        ["--cpu-time", "--threads", "2"],
        ["--cpu-time", "--device", "cuda"],
        ["--variants", "element,none"],
    ],
)
def test_wrong_input_is_answered_in_a_line(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ags_overhead.py", *arguments])
    with pytest.raises(SystemExit) as error:
        ags_overhead.parse_arguments()
    assert error.value.code == 2


@pytest.mark.parametrize("more", [[], ["--threads", "1"], ["--device", "cpu"]])
def test_cpu_time_is_taken_on_the_cpu_with_one_thread(monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ags_overhead.py", "--cpu-time", *more])
    options = ags_overhead.parse_arguments()
    assert (options.device, options.threads, options.cpu_time) == ("cpu", 1, True)


def test_threads_and_device_are_as_given_without_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ags_overhead.py"])
    options = ags_overhead.parse_arguments()
    assert (options.device, options.threads) == ("auto", None)
