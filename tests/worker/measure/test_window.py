"""How long a probe warms up and times steps, and that a timed step is the training's."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worker_jobs import copy_weights, make_probe_task, make_spec, make_trainer

from tula_cli.run.directory import RunDir
from tula_cli.spec.sections import Search
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.measure import probe
from tula_cli.worker.measure.probe import (
    StepBlocks,
    count_steps_for_median,
    count_steps_to_time,
    count_warm_up_steps,
    run_probes,
)
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop

Rule = Callable[..., int]


def taken(rule: Rule, times: Iterator[float], **search: float) -> list[float]:
    """Return the step times that a rule takes of those to come."""
    result, bounds = [], Search.model_validate(search)
    while count := rule(result, bounds):
        result += itertools.islice(times, count)
    return result


def noisy(seconds: float, share: float) -> Iterator[float]:
    draw = random.Random(0)
    while True:
        yield seconds * (1 + share * draw.gauss(0, 1))


@pytest.mark.parametrize(
    ("seconds", "search", "steps"),
    [
        (0.1, {}, 20),  # for two seconds
        (0.005, {}, 400),
        (1.0, {}, 10),
        (1.0, {"min_steps": 30}, 30),
        (0.1, {"min_seconds": 0}, 10),
        (30.0, {}, 5),  # beyond a minute at once
        (8.0, {}, 8),  # a minute is over with the eighth
        (0.1, {"min_seconds": 0, "max_seconds": 1e-6}, 5),
    ],
)
def test_steady_steps_are_timed_for_as_long_as_is_asked(seconds: float, search: dict[str, float], steps: int) -> None:
    assert len(taken(count_steps_to_time, itertools.repeat(seconds), **search)) == pytest.approx(steps, abs=1)
    assert Search.model_validate(search).estimate_timed_steps(seconds) == steps


@pytest.mark.parametrize("share", [0.03, 0.1])
def test_a_window_ends_when_its_mean_is_known(share: float) -> None:
    times = taken(count_steps_to_time, noisy(1.0, share), min_seconds=0, max_seconds=10_000)
    assert 0.8 * (share / 0.01) ** 2 < len(times) < 4 * (share / 0.01) ** 2 + 10
    assert sum(times) / len(times) == pytest.approx(1, abs=0.03)


def test_steps_that_never_settle_are_timed_for_the_most_seconds_at_few_looks() -> None:
    draw, looks = noisy(0.02, 0.9), []

    def rule(times: list[float], search: Search) -> int:
        looks.append(len(times))
        return count_steps_to_time(times, search)

    times = taken(rule, (max(0.001, value) for value in draw), max_seconds=20)
    assert 20 <= sum(times) < 20.5 and len(looks) < 15


@pytest.mark.parametrize(("spread", "steps"), [(0.0, 5), (0.01, 5), (0.1, 10)])
def test_a_look_at_a_time_takes_as_few_steps_as_the_timed_ones_are_steady(spread: float, steps: int) -> None:
    rng = random.Random(0)
    times = [1 + spread * rng.gauss(0, 1) for _ in range(40)]
    assert count_steps_for_median(times, Search()) == steps
    assert count_steps_for_median(times[:4], Search()) == 10, "four tell nothing"


def test_a_warm_up_lasts_until_steps_are_alike() -> None:
    assert len(taken(count_warm_up_steps, itertools.repeat(0.1))) == 8  # with the first two as many as the setting
    assert len(taken(count_warm_up_steps, itertools.repeat(0.1), min_steps=30)) == 28
    autotuning = itertools.chain([0.5] * 6, itertools.repeat(0.1))
    assert 13 <= len(taken(count_warm_up_steps, autotuning)) <= 18


def test_a_warm_up_uses_up_what_the_loader_has_made_ahead() -> None:
    queue = itertools.chain([0.01] * 16, itertools.repeat(0.1))
    assert 21 <= len(taken(partial(count_warm_up_steps, prefetched=16), queue)) <= 26


def test_a_step_that_stalls_does_not_prolong_a_warm_up() -> None:
    assert len(taken(count_warm_up_steps, itertools.chain([0.1, 0.1, 9.0], itertools.repeat(0.1)))) == 8


def test_a_warm_up_ends_where_steps_are_never_alike() -> None:
    slower = (1.2**number for number in itertools.count())
    assert 60 <= sum(taken(count_warm_up_steps, slower)) < 60 * 1.2**5
    assert len(taken(count_warm_up_steps, itertools.repeat(100.0))) == 5


# --- the blocks


def test_blocks_are_timed_apart_from_what_is_between_them(alone: Ranks) -> None:
    subject, at_work = make_trainer(make_spec(), alone), []
    blocks = StepBlocks(subject, lambda times: [3, 2, 0][sum(map(len, at_work))], at_work=lambda: at_work.append("x"))
    blocks.run_blocks(worker_train_loop.run_steps(subject))
    assert len(blocks.steps) == len(blocks.waits) == 5 and len(at_work) == 2
    assert all(0 <= wait < step for wait, step in zip(blocks.waits, blocks.steps, strict=True))


class Counted(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("nodes", [[1], [1, 2]])
@pytest.mark.parametrize("method", ["lbt", "ags"])
def test_a_timed_step_is_the_trainings_own(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch, method: str, nodes: list[int]
) -> None:
    take, counts = worker_train_loop._train_step, []

    def step(subject: worker_train_loop.Trainer, *args: Any, **given: Any) -> worker_train_loop.Step:
        with Counted() as counted:
            made = take(subject, *args, **given)
        counts.append((counted.count, made.lr, made.refreshed))
        return made

    monkeypatch.setattr(worker_train_loop, "_train_step", step)
    task = make_probe_task(make_spec(train={"method": method}, search={"nodes": nodes}), 16)
    run_probes(task, run, alone, build_datasets(task.spec), started_at=0.0)
    before = 2 + 5  # the job's first steps, and the warm-up
    timed, counts[:] = counts[before : before + 5], []
    list(worker_train_loop.run_steps(make_trainer(task.spec, alone)))
    of_training = {count for count, _, refreshed in counts[2:] if not refreshed}
    assert {count for count, _, _ in timed} <= of_training  # one more where the data begins anew
    assert {rate for _, rate, _ in timed} == {0.0}


def test_the_weights_are_those_that_the_warm_up_has_left(alone: Ranks) -> None:
    subject = make_trainer(make_spec(), alone)
    steps = worker_train_loop.run_steps(subject)
    next(steps)
    before = copy_weights(subject)
    with probe.use_zero_learning_rate(subject):
        list(itertools.islice(steps, 3))
        assert all(torch.equal(value, before[name]) for name, value in copy_weights(subject).items())
    next(steps)
    assert not all(torch.equal(value, before[name]) for name, value in copy_weights(subject).items())


# --- the loader apart


class Clock:
    """Seconds that a dataset lets pass."""

    now = 0.0


def test_the_loader_is_timed_by_the_samples_of_a_step(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    data, clock = build_datasets(make_spec(train={"accumulate": 2})), Clock()
    give = type(data.train).__getitem__

    def give_slowly(dataset: Any, key: Any) -> Any:
        clock.now += 0.5
        return give(dataset, key)

    subject = make_trainer(make_spec(train={"accumulate": 2}), alone, datasets=data)
    next(worker_train_loop.run_steps(subject))
    monkeypatch.setattr(type(data.train), "__getitem__", give_slowly)
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    assert probe.measure_loader_time(subject)[0] == pytest.approx(8.0)  # two micro-batches of 8
    short = make_spec(train={"accumulate": 2}, search={"max_seconds": 3, "min_seconds": 0})
    subject.spec, clock.now = short, 0.0
    assert probe.measure_loader_time(subject)[0] == pytest.approx(8.0)
    assert clock.now == 8.0, "the first, and one beyond the most seconds"


def test_cached_steps_ask_for_no_data(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_trainer(make_spec(train={"accumulate": 2}), alone)
    next(worker_train_loop.run_steps(subject))
    position, batch = subject.position, subject.last_batch
    monkeypatch.setattr(type(subject.datasets.train), "__getitem__", lambda *_: pytest.fail("data was asked for"))
    steps = [worker_train_loop.run_step_on_batch(subject, subject.last_batch) for _ in range(3)]
    assert all(math.isfinite(float(step.loss)) for step in steps)
    assert batch is not None and subject.last_batch is not None
    assert subject.position == position and subject.last_batch[0] is batch[0], "no copy is held beside it"
