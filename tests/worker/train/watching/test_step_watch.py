"""Changes of the step time as the ranks see them, and how they are reported."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worker_jobs import make_spec, make_train_task, read_rows

from tula_cli.models.time.changes import describe_step_change
from tula_cli.run.directory import RunDir
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.device import Clock
from tula_cli.worker.entry import run_training
from tula_cli.worker.preemption import PreemptionHandler
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop
from tula_cli.worker.train.loop import Step
from tula_cli.worker.train.step_watch import StepWatch

DATA, WORK = 0.001, 0.05  # seconds of a step
HOG = range(60, 130)  # steps that a CPU hog makes slower
STEPS = 220


class MeetsEachStep(PreemptionHandler):
    """The ranks look after every step."""

    def stop_if_requested(self, *, reserve: float) -> bool:
        return True


class HoggedClock(Clock):
    """Time as it would pass: three marks a step, and a CPU hog that is started and ended in mid-training."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.marks, self.now = 0, 0.0

    def mark(self) -> float:
        step, moment = divmod(self.marks, 3)  # start, loaded, end
        self.marks += 1
        self.now += (0.0, DATA, WORK * (1.6 if step in HOG else 1.0) * (1 + 0.02 * (step % 5)))[moment]
        return self.now


class Whole(torch.nn.Linear):
    """A model whose communication cannot be timed apart."""

    separates_communication = False


@pytest.fixture
def hogged(alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A training of 220 steps, beside which a CPU hog was started and ended."""
    monkeypatch.setattr(loop, "Clock", HoggedClock)
    job = make_spec(
        train={"epochs": 2}, dataset={"args": {"size": STEPS * 4}}, search={"min_batch": 8}, pricing={"price": 2.0}
    )
    task = make_train_task(job, batch=8)
    run_training(task, run, alone, build_datasets(task.spec), preemption=MeetsEachStep(alone))
    yield SimpleNamespace(run=run, task=task)


def test_a_hog_is_reported_once_when_it_comes_and_once_when_it_goes(
    hogged: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    slower, faster = hogged.run.get_training(hogged.task.signature).read_step_changes()
    assert slower.parts == faster.parts == ("compute",)
    assert [abs(change.samples // 8 - step) <= 1 for change, step in ((slower, HOG.start), (faster, HOG.stop))] == [
        True
    ] * 2
    assert slower.after.step == pytest.approx(1.6 * slower.before.step, rel=0.05)
    assert faster.after.step == pytest.approx(slower.before.step, rel=0.05)
    remaining = [change.seconds_left / change.seconds_left_before for change in (slower, faster)]
    assert remaining == pytest.approx([1.6, 1 / 1.6], rel=0.1)
    assert slower.cost_more > 0 > faster.cost_more
    assert not list(read_rows(hogged.run, hogged.task, "warning"))


def test_it_is_said_in_words(hogged: Any) -> None:
    slower, faster = map(describe_step_change, hogged.run.get_training(hogged.task.signature).read_step_changes())
    assert ": the nodes compute more slowly; computing 8" in slower and " USD more" in slower
    assert ": the nodes compute faster; computing 5" in faster and " USD less" in faster


def fake(world: int = 2, *, others: tuple[float, float, float] = (0.0, 0.0, -9.0)) -> Any:
    """Return a trainer of which a watch needs no more than this; `others` is what the other rank brings to a maximum."""

    def maxima(values: list[float]) -> list[float]:
        return [max(pair) for pair in zip(values, others, strict=False)]

    job = make_spec(train={"compile": False})
    return SimpleNamespace(
        ranks=SimpleNamespace(world=world, is_first=True, compute_elementwise_max=maxima), clock=Clock(torch.device("cpu")), spec=job,
        position=SimpleNamespace(samples=0), epoch=0.0, is_local_sgd=False, parallel=Whole(1, 1), on_backward=None,
    )  # fmt: skip


def step(*, data: float, whole: float, refreshed: bool = False) -> Step:
    return Step(torch.zeros(()), 16, 0.1, 0.0, data, whole, refreshed, epoch_ended=False)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> StepWatch:
    monkeypatch.setattr(StepWatch, "can_time_communication", True)
    return StepWatch(fake(others=(0.03, 0.2, -0.01)))


def test_the_slowest_rank_counts_and_the_one_that_waits_least(watch: StepWatch) -> None:
    for _ in range(3):
        watch.record_step(step(data=0.02, whole=0.30))
        watch.timer.exposed.append((0.0, 0.18))
    watch.record_step(step(data=0.02, whole=9.0, refreshed=True))
    watch.detect_level_change()
    seen = watch.newest
    assert seen is not None and (seen.step, seen.data, seen.sync) == (0.30, 0.03, 0.01)
    assert seen.compute == pytest.approx(0.2), "this rank's 0.1 are less"


def test_hooks_are_there_for_three_steps_after_a_look(watch: StepWatch) -> None:
    def hooks() -> int:
        return sum(len(p._backward_hooks or ()) for p in watch.trainer.parallel.parameters())

    seen = []
    for _ in range(4):
        seen.append((hooks(), watch.trainer.on_backward is not None))
        watch.record_step(step(data=0.0, whole=0.1))
        watch.timer.exposed.append((0.0, 0.01))
    assert seen == [(2, True), (2, True), (2, True), (0, False)]
    watch.detect_level_change()
    assert hooks() == 2


def test_steps_without_others_are_all_computing() -> None:
    alone = StepWatch(fake(world=1))
    alone.record_step(step(data=0.02, whole=0.3))
    alone.detect_level_change()
    seen = alone.newest
    assert seen is not None and seen.compute is None, "not DDP: nothing tells it apart"


def test_a_look_at_refreshed_steps_alone_says_nothing() -> None:
    watch = StepWatch(fake(world=1))
    watch.record_step(step(data=0.02, whole=0.3, refreshed=True))
    assert watch.detect_level_change() is None and watch.newest is None
