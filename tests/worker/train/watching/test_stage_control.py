"""Stages that the gradient noise puts off while a training is under way (`train.ramp: noise`), and that a kill changes nothing."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_jobs import Interrupted, LeavesAt, final_weights, less_noise, rows, same, spec, staged, train_task

from tula_cli.models.ramp.by_noise import describe_decision
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import StageDecision
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.training_run import TrainingRun
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.preemption import PreemptionHandler
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import gradient_noise


def train(run: RunDir, ranks: Ranks, task: TrainTask, preemption: PreemptionHandler | None = None) -> None:
    run_training(task, run, ranks, build_datasets(task.spec), preemption=preemption)


def told(run: RunDir, task: TrainTask) -> list[tuple[int, int, str, int]]:
    return [(row.passed, row.batch, row.verdict, row.begin) for row in run.training(task.signature).stage_decisions()]


def content(run: RunDir, task: TrainTask) -> bytes:
    return (run.training(task.signature).path / "stages.jsonl").read_bytes()


DECIDED = [(100, 16, "put off", 201), (200, 16, "put off", 301), (300, 16, "begins", 301), (600, 32, "begins", 601)]
"""Of epochs of 100 samples: at 150 a batch of 16 was planned, which was to last for 300."""


@pytest.fixture(scope="module", autouse=True)
def little_noise() -> Iterator[None]:
    with less_noise():
        yield


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, alone: Ranks) -> tuple[RunDir, TrainTask]:
    """A training that nobody has interrupted."""
    task = staged()
    run = RunDir.create(tmp_path_factory.mktemp("unbroken"), task.spec)
    train(run, alone, task)
    return run, task


def test_a_stage_waits_for_the_noise_and_those_after_it_move(
    unbroken: tuple[RunDir, TrainTask], capsys: pytest.CaptureFixture[str]
) -> None:
    run, task = unbroken
    assert told(run, task) == DECIDED
    results = [(row["batch"], row["stage"], row["samples"]) for row in rows(run, task, "stage")]
    assert [stage[:2] for stage in results] == [(8, 1), (16, 2), (32, 3)]
    # 12 batches of 8 fit into each of three epochs, and the fourth begins with one
    assert [row["steps"] if "steps" in row else row["samples"] for row in rows(run, task, "epoch")][:3] == [
        96,
        192,
        288,
    ]
    assert results[1][2] == 288 + 8
    assert len(list(rows(run, task, "noise"))) == 8, "as the job asks for"


def test_every_rank_is_reported_and_so_is_the_user(
    alone: Ranks, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    task = staged(epochs=3)
    train(run, alone, task)
    row, *_ = run.training(task.signature).stage_decisions()
    assert f"stages: {describe_decision(row)}" in capsys.readouterr().out
    assert describe_decision(row).startswith("batch 16 is delayed to epoch 2.01: gradient noise scale")


class Killed(Exception):
    """Ends a start."""


def test_a_decision_that_is_written_and_not_yet_in_effect_is_what_the_next_start_takes(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch, unbroken: tuple[RunDir, TrainTask]
) -> None:
    task, write, measure = staged(), TrainingRun.write_stage_decisions, gradient_noise.measure_gradient_noise
    for number in range(1, 5):

        def written(files: TrainingRun, decisions: list[StageDecision]) -> None:
            write(files, decisions)
            raise Killed

        monkeypatch.setattr(TrainingRun, "write_stage_decisions", written)
        with pytest.raises(Killed):
            train(run, alone, task)
        assert told(run, task) == DECIDED[:number]
    monkeypatch.undo()
    # what a start measures at the same place another time, on other GPUs say, changes nothing of what was decided
    monkeypatch.setattr(
        gradient_noise,
        "measure_gradient_noise",
        lambda *args, **named: {**measure(*args, **named), "scale": 1e9, "high": 1e9},
    )
    train(run, alone, task)
    assert content(run, task) == content(*unbroken)
    assert same(final_weights(run, task), final_weights(*unbroken))


def broken(run: RunDir, ranks: Ranks, task: TrainTask, rng: random.Random) -> None:
    """Start a training that ends somewhere: between two steps, in a measurement, or in an evaluation."""
    if rng.random() < 0.5:
        train(run, ranks, task, LeavesAt(ranks, rng.randint(1, 60)))
        return
    job = task.spec.model_copy(update={"dataset": spec(dataset={"args": {"ends_after": rng.randint(1, 500)}}).dataset})
    with contextlib.suppress(Interrupted):
        train(run, ranks, task.model_copy(update={"spec": job}))


def check_kills(ranks: Ranks, folder: Path, task: TrainTask, *, kills: int, seed: str) -> None:
    """Break a training off at random places, and hold its end against one that nobody has interrupted."""
    rng = random.Random(seed)
    whole, run = (RunDir.create(folder / name, task.spec) for name in ("whole", "run"))
    train(whole, ranks, task)
    for _ in range(kills):
        broken(run, ranks, task, rng)
    train(run, ranks, task)
    assert content(run, task) == content(whole, task)
    assert same(final_weights(run, task), final_weights(whole, task))
    batches = [[(row["batch"], row["samples"]) for row in rows(item, task, "epoch")] for item in (run, whole)]
    assert batches[0] == batches[1]


@pytest.mark.parametrize("method", ["lrs", pytest.param("ags", marks=pytest.mark.proof)])
def test_random_kills_change_no_bit(method: str, alone: Ranks, tmp_path: Path) -> None:
    check_kills(alone, tmp_path, staged(method=method), kills=3, seed=f"quick {method}")


@pytest.mark.proof
@pytest.mark.parametrize("method", ["adascale", "ramp", "static"])
def test_many_random_kills_change_no_bit(method: str, alone: Ranks, tmp_path: Path) -> None:
    check_kills(alone, tmp_path, staged(method=method), kills=8, seed=method)


def test_after_an_out_of_memory_what_was_put_off_stays_so(alone: Ranks, run: RunDir) -> None:
    task = staged()
    ending = task.model_copy(update={"spec": staged(ends_after=24 * 8 + 3 * 32 * 8).spec})
    with pytest.raises(Interrupted):
        train(run, alone, ending)
    before = told(run, task)
    assert before and before == DECIDED[: len(before)]
    train(run, alone, task.model_copy(update={"ladder": train_task(task.spec, batch=24).ladder}))
    result = told(run, task)
    assert result[:3] == DECIDED[:3] and result[3][1] == 32, "that batch 24 begins where 32 would have"
    assert [row["batch"] for row in rows(run, task, "stage")][-2:] == [16, 24]


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every measurement tell less noise than any batch has samples."""
    row: dict[str, Any] = {"scale": 1.0, "low": 0.5, "high": 2.0, "stats": {}, "seconds": 0.0}
    monkeypatch.setattr(gradient_noise, "measure_gradient_noise", lambda *args, **named: row)


@pytest.mark.usefixtures("no_noise")
def test_a_noise_that_never_comes_to_a_batch_stops_the_ramp(alone: Ranks, run: RunDir) -> None:
    task = staged(epochs=4, measured=False)
    train(run, alone, task)
    assert [row["epoch"] for row in rows(run, task, "noise")] == [1, 2, 3], "while a stage is to come"
    assert told(run, task) == [(100, 16, "put off", 201), (200, 16, "put off", 301), (300, 16, "stopped", 400)]
    assert {row["batch"] for row in rows(run, task, "epoch")} == {8}
    result = run.training(task.signature).result()
    assert result is not None and result.batch == 32 and result.steps == 4 * 12


def test_stages_by_another_rule_are_not_looked_at(alone: Ranks, run: RunDir) -> None:
    task = staged(ramp="auto", epochs=2)
    train(run, alone, task)
    assert told(run, task) == [] and not list(rows(run, task, "noise"))


def test_more_nodes_wait_for_a_stage_that_is_put_off(
    alone: Ranks, run: RunDir, unbroken: tuple[RunDir, TrainTask]
) -> None:
    task = staged()
    nodes = {8: 1, 16: 1, 32: 2}
    of_nodes = tuple(stage.model_copy(update={"nodes": nodes[stage.batch]}) for stage in task.stages)
    on_one = task.model_copy(update={"stages": of_nodes})
    train(run, alone, on_one)
    assert run.stop_reason(task.id, 1) == "stage_end" and run.training(task.signature).result() is None
    begun = [row["samples"] for row in rows(unbroken[0], task, "stage")][-1]
    assert told(run, task) == DECIDED and run.training(task.signature).newest_samples() == begun > 450, "as was planned"
    anew = task.model_copy(update={"nodes": 2, "stages": of_nodes, "attempt": 2, "id": f"{task.id}-2"})
    train(run, alone, anew)  # on one rank here, as many samples a step
    assert content(run, task) == content(*unbroken)
    assert same(final_weights(run, task), final_weights(*unbroken))


@pytest.mark.usefixtures("no_noise")
def test_a_ramp_that_stops_never_leaves_for_more_nodes(alone: Ranks, run: RunDir) -> None:
    task = staged(epochs=4, measured=False)
    of_nodes = tuple(stage.model_copy(update={"nodes": 1 if stage.batch < 32 else 2}) for stage in task.stages)
    train(run, alone, task.model_copy(update={"stages": of_nodes}))
    assert [row[2] for row in told(run, task)][-1] == "stopped"
    result = run.training(task.signature).result()
    assert result is not None and result.steps == 4 * 12 and not run.stop_reason(task.id, 1)
