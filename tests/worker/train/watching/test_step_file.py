"""steps.jsonl: every step once, whatever happens to a training, and never more than so many rows."""

import functools
from pathlib import Path
from typing import Any

import pytest
from worker_jobs import Interrupted, LeavesAt, make_spec, make_train_task, make_trainer, read_rows

from tula_cli.run.directory import RunDir
from tula_cli.run.files import write_file_atomically
from tula_cli.run.step_series import StepRow
from tula_cli.run.training_run import TrainingRun
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train import training_log
from tula_cli.worker.train.diagnostics import Diagnostics
from tula_cli.worker.train.training_log import StepRecordFile

STEPS, BATCH = 6, 16
EPOCH = STEPS * BATCH
PLAIN = {"method": "lbt", "diagnostics": ["gradient_norms"]}


def job(method: dict[str, Any], *, ends_after: int | None = None) -> Any:
    train = {"epochs": 3, "checkpoint_every": 1e-9, **method}
    return make_spec(dataset={"args": {"ends_after": ends_after}}, train=train, ags={"delta": 0.4})


def steps(count: int, *, start: int = 0) -> list[StepRow]:
    return [
        StepRow.from_step(samples=8 * (start + at + 1), batch=8, lr=0.1, norm=at, delta=None) for at in range(count)
    ]


# --- of a training


@pytest.mark.parametrize("method", [PLAIN, {"method": "ags"}, {"method": "static"}], ids=["lbt", "ags", "static"])
def test_a_broken_training_has_the_rows_of_a_whole_one(
    method: dict[str, Any], alone: Ranks, run: RunDir, tmp_path: Path
) -> None:
    task = make_train_task(job(method))
    ending = job(method, ends_after=EPOCH + 40)
    with pytest.raises(Interrupted):
        run_training(make_train_task(ending, signature=task.signature), run, alone, build_datasets(ending))
    whole = RunDir.create(tmp_path / "whole", task.spec)
    for place in (run, whole):
        run_training(task, place, alone, build_datasets(task.spec))
    broken, unbroken = (place.get_training(task.signature).read_steps() for place in (run, whole))
    assert len(list(read_rows(run, task, "start"))) == 2
    assert broken == unbroken
    assert broken.samples == [BATCH * (at + 1) for at in range(3 * STEPS)]
    assert all(value is not None for value in (*broken.norm, *broken.delta[1:])) and broken.delta[0] is None
    scales = method is not PLAIN
    assert (set(broken.scaled) <= {0.0, 1.0}) if scales else (broken.scaled == [None] * 3 * STEPS)
    assert [value is not None for value in broken.factor] == [bool(value) for value in broken.scaled]


def test_the_change_after_another_batch_is_unknown(alone: Ranks, run: RunDir) -> None:
    first, second = make_train_task(job(PLAIN)), make_train_task(job(PLAIN), batch=BATCH // 2)
    context = job(PLAIN, ends_after=EPOCH + 40)
    with pytest.raises(Interrupted):
        run_training(make_train_task(context, signature=first.signature), run, alone, build_datasets(context))
    relaunched = second.model_copy(update={"signature": first.signature})
    run_training(relaunched, run, alone, build_datasets(second.spec))
    result = run.get_training(first.signature).read_steps()
    assert set(result.batch) == {BATCH, BATCH // 2} and result.samples[-1] == 3 * EPOCH
    assert [at for at, value in enumerate(result.delta) if value is None] == [0, result.batch.index(BATCH // 2)]


def test_who_neither_scales_nor_asks_keeps_no_steps(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec())
    run_training(task, run, alone, build_datasets(task.spec))
    training = run.get_training(task.signature)
    assert not training.steps_path.exists() and training.read_steps().samples == []


def test_a_training_that_leaves_keeps_what_it_has_done(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(job(PLAIN | {"checkpoint_every": 3600}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tula_cli.worker.entry.PreemptionHandler", lambda ranks, **_: LeavesAt(ranks, 5))
        run_training(task, run, alone, build_datasets(task.spec))
    assert run.get_training(task.signature).read_result() is None
    assert (
        run.get_training(task.signature).read_steps().samples[-1]
        == run.get_training(task.signature).find_newest_checkpoint_samples()
        > 0
    )


@pytest.mark.parametrize("method", [PLAIN, {"method": "ags"}, {"method": "static"}], ids=["lbt", "ags", "static"])
def test_following_a_step_does_not_wait_for_the_device(method: dict[str, Any], alone: Ranks) -> None:
    from operations import count_operations, simulate_gpu

    with simulate_gpu():
        subject = make_trainer(job(method), alone)
        result = Diagnostics.attach(subject)
        assert result is not None
        stream = worker_train_loop.run_steps(subject)
        done = [next(stream) for _ in range(STEPS + 1)]  # factors are there
        with count_operations() as seen:
            result.record_step(subject, done[-1])
        assert not seen.waits
        with count_operations() as seen:
            result.pop_rows()
        assert seen.waits  # there they are read


# --- its size


def test_a_long_training_is_thinned_out_and_no_step_is_lost(tmp_path: Path) -> None:
    training = TrainingRun(tmp_path, "ab12cd34")
    file = StepRecordFile(training, max_rows=40)
    for first in range(0, 1000, 7):
        file.add_steps(steps(min(7, 1000 - first), start=first), close=first % 49 == 0)
        assert len(training.read_step_rows()) == file.count <= 40
    file.add_steps([], close=True)
    result = training.read_steps()
    assert sum(result.steps) == 1000 and result.samples[-1] == 8000
    assert file.width == max(result.steps) == 32
    assert max(value for value in result.norm_high if value is not None) == 6


def test_no_row_has_steps_from_both_sides_of_a_checkpoint(tmp_path: Path) -> None:
    training = TrainingRun(tmp_path, "ab12cd34")
    file = StepRecordFile(training, max_rows=10)
    for first in range(0, 60, 5):
        file.add_steps(steps(5, start=first), close=True)
        if first in (20, 35, 50):
            write_file_atomically(training.get_checkpoint_path(8 * (first + 5)), b"")
    for path in training.list_checkpoints():
        again = StepRecordFile(training, max_rows=10)
        again.resume(int(path.stem))
        result = training.read_steps()
        assert 8 * sum(result.steps) == result.samples[-1] == int(path.stem)
        assert again.width == file.width or len(result.samples) < 10


def test_a_line_that_a_kill_has_cut_is_dropped_before_others_follow(tmp_path: Path) -> None:
    training = TrainingRun(tmp_path, "ab12cd34")
    StepRecordFile(training).add_steps(steps(3), close=True)
    with training.steps_path.open("a") as file:
        file.write('{"samples":32,"ba')
    again = StepRecordFile(training)
    again.resume(24)
    again.add_steps(steps(2, start=3), close=True)
    assert training.read_steps().samples == [8, 16, 24, 32, 40]


def test_metrics_cut_the_rows_also_where_nobody_adds_any(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(make_spec())
    StepRecordFile(run.get_training(task.signature)).add_steps(steps(5), close=True)
    with training_log.MetricsFile(run, task, is_first=True, samples=16):
        assert run.get_training(task.signature).read_steps().samples == [8, 16]


def test_a_training_that_is_thinned_out_goes_on_where_it_was(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_log, "StepRecordFile", functools.partial(StepRecordFile, max_rows=4))
    task, ending = make_train_task(job(PLAIN)), job(PLAIN, ends_after=EPOCH + 40)
    with pytest.raises(Interrupted):
        run_training(make_train_task(ending, signature=task.signature), run, alone, build_datasets(ending))
    run_training(task, run, alone, build_datasets(task.spec))
    result = run.get_training(task.signature).read_steps()
    assert sum(result.steps) == 3 * STEPS and result.samples[-1] == 3 * EPOCH
    assert max(result.steps) > 1
