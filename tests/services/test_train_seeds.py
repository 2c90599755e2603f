"""`tula train --seeds`: the trainings of a plan."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from make_results import Truth, make_probes, make_spec

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import JobFailed, OverBudget, SpecError
from tula_cli.options import TrainRequest
from tula_cli.query import Query
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services.campaign import PLAN_FILE, load_campaign, plan_campaign, save_campaign
from tula_cli.services.events import Event, SeedsPlanned, WarningEvent, run_work
from tula_cli.services.train_seeds import PreparedSeeds, SeedsReport, prepare_seed_trainings, run_seed_trainings
from tula_cli.services.waiting import Submission
from tula_cli.show.campaign import render_campaign
from tula_cli.spec.job import JobSpec

QUEUE = {"kind": "slurm", "minutes": 60}


class Trains(make.FakeLauncher):
    """Finishes each job at once, at a cost of 1; jobs of the seeds in `fails` fail, those in `queues` stay in the queue."""

    def __init__(self, *, fails: tuple[int, ...] = (), queues: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.fails, self.queues, self.tasks = fails, queues, list[TrainTask]()

    def submit(self, run: RunDir, task: Any) -> Any:
        job = super().submit(run, task)
        self.tasks.append(task)
        seed = task.spec.train.seed
        self.says[task.job] = "pending" if seed in self.queues else "ended"
        if seed in self.fails:
            run.write_attempt(make.attempt(task.id, outcome="user", message="KeyError: 'x'"))
        elif seed not in self.queues:
            run.write_train_result(make.train_result(task.signature))
            run.write_summary(make.summary(signature=task.signature, actual_cost=1.0))
        return job


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, make_spec(search={"max_batch": 4096}))
    for result in make_probes(Truth(noise=0.01), {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 256)}):
        run.write_result(result)
    return run


def on_queue(run: RunDir) -> JobSpec:
    job = run.read_spec()
    return job.model_copy(update={"cluster": make_spec(cluster=QUEUE).cluster})


def inspect(_: JobSpec) -> Any:
    raise AssertionError("the probes have recorded the size of the dataset")


def prepare(run: RunDir, job: JobSpec, seeds: int, **request: Any) -> PreparedSeeds:
    return run_work(
        prepare_seed_trainings([Run(run.path, job)], TrainRequest(seeds=seeds, **request), inspect), lambda _: None
    )


def train(
    run: RunDir, launcher: Trains, seeds: int, job: JobSpec | None = None, **policy: Any
) -> tuple[SeedsReport, list[Event]]:
    events: list[Event] = []
    submission = Submission(lambda _: launcher, inspect, lambda _: True, **policy)  # type: ignore[arg-type, return-value]
    prepared = prepare(run, job or run.read_spec(), seeds)
    return run_work(run_seed_trainings(prepared, submission), events.append), events


def test_each_training_has_its_seed_and_all_run_one_after_another_on_this_machine(run: RunDir) -> None:
    launcher = Trains()
    report, events = train(run, launcher, 3)
    first = run.read_spec().train.seed
    assert [task.spec.train.seed for task in launcher.tasks] == [first, first + 1, first + 2]
    assert len({task.signature for task in launcher.tasks}) == 3 and not any(task.follows for task in launcher.tasks)
    assert all(wave.side_by_side == 1 for wave in report.plan.waves) and report.cost == 3.0
    (planned,) = [event for event in events if isinstance(event, SeedsPlanned)]
    assert planned.missing == 3 and planned.node_hours == pytest.approx(report.plan.node_hours)
    frame = report.frame()
    assert list(frame["seed"]) == [first, first + 1, first + 2] and list(frame["cost"]) == [1.0] * 3


def test_the_same_command_resumes_the_stored_plan_and_trains_what_failed(run: RunDir) -> None:
    report, _ = train(run, Trains(fails=(1,)), 3)
    assert [bool(row.problem) for row in report.trainings] == [False, True, False]
    with pytest.raises(JobFailed, match=r"1 of 3 trainings failed: .*KeyError"):
        report.require_none_failed()
    run.write_result(run.read_results()[0].model_copy(update={"measured_at": 1.0}))
    again = Trains()
    repeated, _ = train(run, again, 3)
    assert [task.spec.train.seed for task in again.tasks] == [1] and repeated.plan == report.plan
    assert all(row.summary for row in repeated.trainings)
    nothing = Trains()
    train(run, nothing, 3)[0].require_none_failed()
    assert not nothing.tasks


def test_on_a_cluster_each_waits_for_the_trainings_whose_nodes_it_takes_over(run: RunDir) -> None:
    job = on_queue(run)
    plan = plan_campaign([[Run(run.path, job)]], Query(max_nodes=4), [9])
    save_campaign([run], plan)
    assert load_campaign([run]) == plan
    launcher = Trains(queues=tuple(range(9)))
    report, _ = train(run, launcher, 9, job)
    names = [task.job for task in launcher.tasks]
    assert [task.nodes for task in launcher.tasks] == [scheduled.nodes for scheduled in plan.schedule]
    follows = [scheduled.follows for scheduled in plan.schedule]
    before = [{*indices, *(other for index in indices for other in follows[index])} for indices in follows]
    assert [task.follows for task in launcher.tasks] == [
        tuple(names[index] for index in sorted(all_)) for all_ in before
    ]
    assert any(len(all_) > len(indices) for all_, indices in zip(before, follows, strict=True)), (
        "and for those before them, in case one of these is cancelled"
    )
    assert any(task.follows for task in launcher.tasks) and not any(row.is_over for row in report.trainings)
    launcher.tasks.clear()
    train(run, launcher, 9, job)
    assert not launcher.tasks, "those in the queue are left alone"


def test_a_plan_that_an_earlier_version_has_stored_is_used(run: RunDir) -> None:
    save_campaign([run], plan_campaign([[Run(run.path, run.read_spec())]], Query(), [2], for_seeds=True))
    path = run.path / PLAN_FILE
    stored = json.loads(path.read_text())
    for name in ("node_type", "jobs", "lower_bound", "is_optimal"):
        del stored[name]
    for row in (*stored["waves"], *stored["schedule"]):
        row.pop("job"), row.pop("batch", None)
    path.write_text(json.dumps(stored))
    prepared = prepare(run, run.read_spec(), 2)
    assert prepared.plan == load_campaign([run])
    assert prepared.plan.bound_hours == pytest.approx(prepared.plan.hours), "one after the other at the fastest"
    lines = [str(line) for line in render_campaign(prepared.plan)]
    assert "2 trainings" in lines[0] and "no plan with this batch finishes before" in lines[1]


def test_another_number_of_trainings_than_in_the_stored_plan_is_warned_of(run: RunDir) -> None:
    job = run.read_spec()
    train(run, Trains(), 3)
    events: list[Event] = []
    run_work(prepare_seed_trainings([Run(run.path, job)], TrainRequest(seeds=2), inspect), events.append)
    (warning,) = [event.warning for event in events if isinstance(event, WarningEvent)]
    assert isinstance(warning, Diagnostic) and warning.code == "stored-plan-not-used"


def test_the_budget_is_that_of_all_trainings(run: RunDir) -> None:
    plan = plan_campaign([[Run(run.path, run.read_spec())]], Query(), [2], for_seeds=True)
    save_campaign([run], dataclasses.replace(plan, budget=1.05 * plan.cost))
    report, _ = train(run, Trains(fails=(1,)), 2)
    assert report.cost == 1.0, "more than planned for one"
    with pytest.raises(OverBudget, match="the finished trainings cost 1"):
        prepare(run, run.read_spec(), 2)


def test_options_without_effect_and_scripts_without_a_seed_are_refused(run: RunDir) -> None:
    with pytest.raises(SpecError, match="--nodes, --batch have no effect with --seeds"):
        prepare(run, run.read_spec(), 2, nodes=1, batch=32)
    with pytest.raises(SpecError, match=r"no \{seed\}"):
        prepare(run, make.script_spec(epochs=1), 2)
    with pytest.raises(SpecError, match="--no-wait"):
        train(run, Trains(), 2, wait=False)


def test_after_three_failures_at_the_start_no_further_training_is_started(run: RunDir) -> None:
    launcher = Trains(fails=tuple(range(6)))
    with pytest.raises(JobFailed, match="the first 3 trainings have all failed"):
        train(run, launcher, 5)
    assert len(launcher.tasks) == 3
