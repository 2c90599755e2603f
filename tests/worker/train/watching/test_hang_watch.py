"""A step that comes to no end: its rank says where, and ends; one that waits for another rank does not."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_runs as make
import pytest

from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.worker.train import hang_watch
from tula_cli.worker.train.hang_watch import HangWatch, is_waiting_for_peers


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "MIN_HANG_SECONDS", 0.2)
    monkeypatch.setattr(hang_watch, "POLL_SECONDS", 0.02)


class Watched:
    """A watch whose process does not end: `ended` is set where it would have."""

    def __init__(self, folder: Path, world: int = 2) -> None:
        self.run = RunDir.create(folder, make.spec(train={"epochs": 4}))
        make.add_training(self.run)
        task = self.run.get_training("ab12cd34").read_newest_task()
        assert isinstance(task, TrainTask)
        self.task, self.ended = task, threading.Event()
        self.watch = HangWatch(run=self.run, task=task, attempt=3, rank=1, world=world, end=self._end)

    def _end(self, code: int) -> None:
        assert code == 1
        self.ended.set()
        self.watch._finished.set()

    def follow(self, steps: Iterator[Any], pause: float = 0.0) -> int:
        count = 0
        for _ in self.watch.watch_steps(steps):
            time.sleep(pause)
            count += 1
        return count


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def steps(watched: Watched, count: int) -> Iterator[Any]:
    """Yield some steps, then one that stays until its rank would have ended."""
    yield from range(count)
    stands_still(watched)


def stands_still(watched: Watched) -> None:
    watched.ended.wait(3.0)


def test_a_step_without_end_is_reported_with_its_place_and_all_stacks(
    watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    assert watched.follow(steps(watched, 3)) == 3
    assert watched.ended.is_set()
    (failure,) = watched.run.read_failures(watched.task.id, 3)
    assert (failure.outcome, failure.rank) == ("hung", 1)
    assert failure.message.startswith("no step finished for 0 s, although a step takes ")
    assert f"in stands_still, {__file__} line " in failure.message
    log = capfd.readouterr().err
    assert all(line.startswith("[rank1]: ") for line in log.splitlines())
    assert "in stands_still" in log and "in _list_thread_stacks" in log, "of both threads"
    assert failure.detail.splitlines()[-1] in log


def test_neither_the_first_step_nor_what_comes_between_two_is_a_hang(watched: Watched) -> None:
    def late() -> Iterator[int]:
        time.sleep(0.5)
        yield 0
        yield 1

    assert watched.follow(late(), pause=0.5) == 2
    assert not watched.ended.is_set()


def test_slow_steps_may_take_many_times_their_median(watched: Watched) -> None:
    watched.watch._step_seconds.extend([0.1] * 5)
    assert watched.watch.max_step_seconds == pytest.approx(2.0)


def test_who_waits_for_another_rank_does_not_hang(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting() -> Iterator[int]:
        yield 0
        time.sleep(0.6)
        yield 1

    monkeypatch.setattr(hang_watch, "is_waiting_for_peers", lambda frame: True)
    assert watched.follow(waiting()) == 2
    assert not watched.ended.is_set()


def test_a_training_alone_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Watched(tmp_path, world=1)
    monkeypatch.setattr(hang_watch, "is_waiting_for_peers", lambda frame: True)
    alone.follow(steps(alone, 2))
    assert alone.ended.is_set()


@pytest.mark.parametrize(
    ("module", "function", "waits"),
    [
        ("torch.distributed.distributed_c10d", "all_reduce", True),
        ("torch.autograd.graph", "_engine_run_backward", True),
        ("tula_cli.worker.ranks", "maxima", True),
        ("torch.nn.modules.linear", "forward", False),
        ("mine", "forward", False),
    ],
)
def test_waiting_is_reported_by_the_innermost_frame(module: str, function: str, waits: bool) -> None:
    names: dict[str, Any] = {"__name__": module}
    exec(f"import sys\ndef {function}():\n    return sys._getframe()", names)
    assert is_waiting_for_peers(names[function]()) == waits
