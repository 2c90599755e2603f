"""Leaving before the end: saved on the way out, agreed on by all ranks, and nothing of it in the weights."""

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from worker_jobs import LeavesAt, are_equal, load_final_weights, make_spec, make_train_task, read_rows

from tula_cli.run.directory import RunDir
from tula_cli.worker import preemption
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.preemption import Preempted, PreemptionHandler
from tula_cli.worker.ranks import Ranks

pytestmark = pytest.mark.torch
CALLS = 2 * (100 // 16 + 1)  # of check: after each step and each batch of an evaluation, over two epochs


@pytest.fixture
def straight(alone: Ranks, tmp_path: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and the epochs' losses of a run without a break."""
    task = make_train_task(make_spec(train={"method": "ags"}, ags={"delta": "inf"}))
    run = RunDir.create(tmp_path / "straight", task.spec)
    run_training(task, run, alone, build_datasets(task.spec))
    return load_final_weights(run, task), [row["eval_loss"] for row in read_rows(run, task, "epoch")]


@pytest.mark.parametrize("calls", range(1, CALLS + 1))
def test_a_run_that_had_to_leave_anywhere_goes_on_as_if_it_had_not(
    alone: Ranks, run: RunDir, straight: tuple[dict[str, torch.Tensor], list[float]], calls: int
) -> None:
    task = make_train_task(make_spec(train={"method": "ags"}, ags={"delta": "inf"}))
    data = build_datasets(task.spec)
    run_training(task, run, alone, data, attempt=4, preemption=LeavesAt(alone, calls))
    assert run.read_stop_reason(task.id, 4) == "time_limit"
    run_training(task, run, alone, data)
    weights, losses = straight
    assert are_equal(load_final_weights(run, task), weights)
    assert [row["eval_loss"] for row in read_rows(run, task, "epoch")] == losses
    result = run.get_training(task.signature).read_result()
    assert result is not None
    assert result.samples == 2 * 96


def test_an_evaluation_left_before_its_end_is_made_up_for(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec())
    data = build_datasets(task.spec)
    run_training(task, run, alone, data, preemption=LeavesAt(alone, 6))
    assert run.get_training(task.signature).find_newest_checkpoint_samples() == 96
    assert not list(read_rows(run, task, "epoch"))
    run_training(task, run, alone, data, preemption=LeavesAt(alone, 2))
    assert [row["samples"] for row in read_rows(run, task, "epoch")] == [96]


def test_sigterm_is_heard_between_steps(alone: Ranks) -> None:
    before = signal.getsignal(signal.SIGTERM)
    subject = PreemptionHandler(alone, environ={})
    try:
        subject.install()
        subject.stop_if_requested(reserve=0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted) as error:
            for _ in range(preemption.MAX_STEPS_BETWEEN_CHECKS + 1):
                subject.stop_if_requested(reserve=0.0)
        assert error.value.reason == "signal"
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("seconds", "reserve", "leaves"), [(30.0, 0.0, False), (1.5, 0.0, True), (30.0, 60.0, True)])
def test_the_clock_says_when_saving_would_come_too_late(
    alone: Ranks, seconds: float, reserve: float, leaves: bool
) -> None:
    subject = PreemptionHandler(alone, environ={"TULA_LEAVE_AT": str(time.time() + seconds)})
    if leaves:
        with pytest.raises(Preempted, match="time_limit"):
            subject.stop_if_requested(reserve=reserve)
    else:
        subject.stop_if_requested(reserve=reserve)


def test_quick_steps_are_not_slowed_by_a_question_each(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    monkeypatch.setattr(Ranks, "compute_elementwise_max", lambda _, values: requests.append(values) or values)
    subject = PreemptionHandler(alone, environ={})
    communicated = 0
    for _ in range(200):
        time.sleep(0.001)
        communicated += subject.stop_if_requested(reserve=0.0)
    assert communicated == len(requests) and 0 < communicated <= 5


def test_ranks_communicate_at_the_same_intervals_however_long_a_step_takes(
    alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now)
    subject = PreemptionHandler(alone, environ={})
    for step_time in (preemption.CHECK_SECONDS / 8, preemption.CHECK_SECONDS / 4):
        communicated = []
        for step in range(64):
            now += step_time
            communicated += [step] * subject.stop_if_requested(reserve=0.0)
        gaps = {after - before for before, after in itertools.pairwise(communicated[-4:])}
        assert gaps == {round(preemption.CHECK_SECONDS / step_time)}


def test_two_ranks_leave_after_the_same_step(two_ranks: Path) -> None:
    counts = [json.loads((two_ranks / f"{rank}.json").read_text())["leave_on_signal"] for rank in range(2)]
    assert counts[0] == counts[1]
    assert counts[0]["reason"] == "signal"
