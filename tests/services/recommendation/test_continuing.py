"""Going on with a training at what its own steps recommend: the same training, its next attempt, from its newest checkpoint."""

from pathlib import Path

import make_runs
import pytest
from make_results import inspected
from make_runs import FakeLauncher

from tula_cli.cluster import relaunch
from tula_cli.errors import SchedulerError, SpecError
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.files import write_atomic
from tula_cli.run.records.recommendations import Continuation, Recommendation
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services import messages, train
from tula_cli.services.train import warn_interrupted_training
from tula_cli.spec.job import JobSpec


def plan(
    run: RunDir, spec: JobSpec | None = None, *, nodes: int | None = None, batch: int | None = None
) -> train.TrainPlan:
    return train.plan_training(
        Run(run.path, spec or run.read_spec()), nodes=nodes, batch=batch, inspect=lambda _: inspected()
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A training on 2 nodes at batch 128 stands at 640 samples; its steps recommend 1 node at batch 256."""
    run = RunDir.create(tmp_path, make_runs.spec(search={"nodes": [1, 2], "min_batch": 32}))
    task = plan(run, nodes=2, batch=128).task
    run.write_task(task)
    checkpoint = run.training(task.signature).checkpoint_path(640)
    checkpoint.parent.mkdir(parents=True)
    write_atomic(checkpoint, b"")
    run.write_recommendation(recommended(task))
    return run


def recommended(task: TrainTask) -> Recommendation:
    rest = Continuation(
        signature=task.signature, attempt=task.attempt, nodes=2, batch=128, samples=700, left=0.5, moves=True, hours=1.0,
        cost=2.0, hours_as_it_is=2.0, cost_as_it_is=8.0,
    )  # fmt: skip
    choice = make_runs.prediction(1, 256)
    return make_runs.recommendation(choice=choice, continuation=rest, options=("--from-training",))


def first(run: RunDir) -> TrainTask:
    return next(task for task in run.tasks() if isinstance(task, TrainTask))


def test_it_is_the_next_attempt_of_the_same_training(run: RunDir) -> None:
    planned, begun = plan(run), first(run)
    task = planned.task
    assert (task.id, task.job, task.signature) == (f"{begun.job}-2", begun.job, begun.signature)
    assert (task.attempt, task.nodes, task.batch) == (2, 1, 256)
    assert [rung.batch for rung in task.ladder] == [256, 128, 64, 32]
    assert planned.resumes == 640 and planned.prediction == make_runs.prediction(1, 256)
    assert task.cause.startswith("continues on 1 node at batch 256 instead of 2 nodes at 128")


def test_the_same_command_again_attaches_to_it(run: RunDir) -> None:
    launcher = FakeLauncher()
    job = train.submit_training(run, plan(run), launcher)
    again = plan(run)
    assert again.task.attempt == 2 and train.submit_training(run, again, launcher) == job
    assert launcher.submitted == [job]
    assert relaunch.find_newest_task(run, f"{job}-1").nodes == 1, "what a supervisor starts next"


def test_an_out_of_memory_there_goes_down_from_there(run: RunDir) -> None:
    task = plan(run).task
    run.write_task(task)
    smaller = task.model_copy(update={"id": f"{task.job}-3", "attempt": 3, "ladder": task.ladder[1:]})
    run.write_task(smaller)
    assert (plan(run).task.id, plan(run).task.batch) == (smaller.id, 128)


def test_one_under_way_has_to_end_first(run: RunDir) -> None:
    begun, launcher = first(run), FakeLauncher()
    run.write_job(launcher.submit(run, begun))
    with pytest.raises(SchedulerError, match="is running on 2 nodes at batch 128") as caught:
        train.submit_training(run, plan(run), launcher)
    assert "tula cancel" in caught.value.hint
    assert run.training(begun.signature).newest_task() == begun
    run.cancel(begun.job)
    launcher.says[begun.job] = "ended"
    train.submit_training(run, plan(run), launcher)
    assert not run.is_cancelled(begun.job) and launcher.submitted == [begun.job] * 2


def test_other_settings_do_not_go_on_in_it(run: RunDir) -> None:
    with pytest.raises(SpecError, match="has other settings or code"):
        plan(run, make_runs.spec(search={"nodes": [1, 2], "min_batch": 32}, optimizer={"lr": 0.7}))


def test_other_nodes_or_an_ended_training_are_a_training_of_their_own(run: RunDir) -> None:
    assert plan(run, nodes=1, batch=64).task.signature != first(run).signature
    run.write_train_result(make_runs.train_result(first(run).signature))
    task = plan(run).task
    assert (task.signature != first(run).signature, task.attempt, task.nodes) == (True, 1, 1)


def test_each_part_of_a_training_is_paid_for_its_own_nodes(run: RunDir) -> None:
    begun = first(run)
    run.write_task(task := plan(run).task)
    run.write_train_result(make_runs.train_result(begun.signature))
    hour = 3600.0
    run.write_attempt(make_runs.attempt(begun.id, start=make_runs.START, end=make_runs.START + hour))
    run.write_attempt(make_runs.attempt(task.id, start=make_runs.START + hour, end=make_runs.START + 3 * hour))
    relaunch.write_summary(run, task)
    summary = run.training(begun.signature).summary()
    assert summary is not None and summary.actual_hours == pytest.approx(3)
    price = run.read_spec().pricing.price
    assert summary.actual_cost == pytest.approx(price * (2 * 1 + 1 * 2))


def test_a_training_that_other_settings_make_one_of_its_own_says_what_it_leaves_behind(run: RunDir) -> None:
    begun = first(run)
    ended = run.read_spec().model_copy(update={"train": run.read_spec().train.model_copy(update={"epochs": 11})})
    assert warn_interrupted_training(run, plan(run, ended, nodes=2, batch=128).task) == [
        messages.earlier_training_other_settings(training=begun.signature, samples=640, keys=["train.epochs"])
    ]
    assert not warn_interrupted_training(run, begun), "it is begun"
    assert not warn_interrupted_training(run, plan(run, ended, nodes=1, batch=128).task), (
        "another configuration is meant to be another"
    )
