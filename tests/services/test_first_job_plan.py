"""A model and a dataset that only a node can build: the first job is planned, asked for and counted with the probes."""

import dataclasses
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from make_results import Truth, make_footprint, make_probe
from pydantic import TypeAdapter
from read_diagnostics import values

from tula_cli.cluster.inspection import CachedInspection, NotInspectable
from tula_cli.cluster.scheduler import QueuedJob, SchedulerState
from tula_cli.cluster.slurm import first_job
from tula_cli.errors import Interruption, JobFailed, OverBudget, Pending, SchedulerError
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_record, write_record
from tula_cli.run.records.inspections import FirstJob, Inspection
from tula_cli.services import check as services_check
from tula_cli.services import profile, profile_plan, train
from tula_cli.services.estimate import estimate_memory_on_all_node_types
from tula_cli.services.events import Event, ProfilePlanned, WarningEvent, run_work
from tula_cli.services.waiting import Submission
from tula_cli.show import check as show_check
from tula_cli.show import profile as show_profile
from tula_cli.spec.job import JobSpec

TOLD = Inspection(
    dataset_size=300, eval_size=50, classes=10, sample_shape=(1, 8, 8), parameters=1000, footprints=(),
    estimate_error="", device="cpu", hardware="cpu", capacity=None, cpus=2,
)  # fmt: skip


def spec(**search: Any) -> JobSpec:
    search = {"nodes": [1, 2], "min_batch": 32, "max_minutes": 20, "max_node_hours": 2, **search}
    return make.spec(search=search, cluster={"kind": "slurm"})


class World(make.FakeLauncher):
    """Jobs that take no time, a login node that cannot build the model, and a user who is asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.run = RunDir.from_spec(folder, spec())
        self.confirmed: list[Any] = []
        self.events: list[Event] = []
        self.first_jobs = self.tried = 0
        self.said: list[str] = []
        self.answer, self.here = True, False
        self.queue: dict[str, QueuedJob] = {}
        monkeypatch.setattr(first_job, "submit_script", self._submit_first_job)
        monkeypatch.setattr(first_job, "find_queued_jobs", lambda *_: self.queue)
        monkeypatch.setattr(first_job.slurm_queue, "query_states", lambda ids: {ids[0]: SchedulerState("ended")})

    def _submit_first_job(self, _: object, run: RunDir, *__: object) -> str:
        self.first_jobs += 1
        log = run.submitit_dir / "7_0_log.out"
        log.write_text(f"begun\n{TOLD.model_dump_json()}\n")
        return "7"

    def submit(self, run: RunDir, task: Any) -> Any:
        self.says[task.job] = "ended"
        for local in task.local_batches:
            run.write_result(make_probe(Truth(gpus_per_node=1), task.nodes, local))
        return super().submit(run, task)

    def _inspect(self, _: JobSpec) -> Inspection:
        self.tried += 1
        if self.here:
            return TOLD
        raise NotInspectable("python cannot build the model: no torch", "hint")

    def inspector(self, *, fresh: bool = False) -> CachedInspection:
        """Return what inspects as the commands do, but keeps nothing that was built here."""
        root = self.run.path.parent
        return CachedInspection(root, self._inspect, fresh=fresh, keep=False, note=self.said.append, facts=lambda _: {})

    def means(self, *, fresh: bool = False) -> Submission:
        def confirm(planned: Any) -> bool:
            self.confirmed.append(planned)
            return self.answer

        return Submission(lambda _: self, self.inspector(fresh=fresh), confirm, wait=True)

    def profile(self, job: JobSpec | None = None, *, fresh: bool = False) -> Any:
        work = profile.run_profile([self.run.with_spec(job or spec())], self.means(fresh=fresh))
        return run_work(work, self.events.append)

    def planned(self) -> list[ProfilePlanned]:
        return [event for event in self.events if isinstance(event, ProfilePlanned)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path / "runs", monkeypatch)


def test_the_first_job_and_the_probes_are_shown_and_asked_for_once(world: World) -> None:
    result = world.profile()
    assert len(result.reports[None].measured) == 7
    (requested,) = world.confirmed
    first, settled = world.planned()
    assert first == requested, "what it has settled is shown, not asked again"
    assert requested.node_hours == pytest.approx(first_job.INSPECTION_JOB_MINUTES / 60 + (1 + 2) * 22 / 60)
    assert settled.node_hours <= requested.plans[None].probe_node_hours, "it is within what was allowed"
    shown = [line for line in show_profile.render_plans(requested.plans) if isinstance(line, str)]
    assert shown[0] == "python cannot build the model: no torch"
    assert f"on 1 node, in at most {first_job.INSPECTION_JOB_MINUTES} min" in shown[1]
    assert "on 1 2 nodes, at most 1.10 node-h" in shown[2]
    tried = world.tried
    world.profile()
    assert world.first_jobs == 1, "start is resume"
    assert world.tried == tried, "what could not be built here is not tried again"
    assert "found by a job on a node" in world.said[-1] and "--fresh" in world.said[-1]


def test_a_reference_batch_above_the_dataset_size_is_warned_of_once(world: World) -> None:
    world.here = True
    job = spec()
    train_section = job.train.model_copy(update={"reference_batch": TOLD.dataset_size + 1})
    world.profile(job.model_copy(update={"train": train_section}))
    codes = [event.warning.code for event in world.events if isinstance(event, WarningEvent)]
    assert codes.count("reference-batch-exceeds-dataset") == 1


def test_nothing_is_submitted_where_the_answer_is_no(world: World) -> None:
    world.answer = False
    with pytest.raises(OverBudget, match="not confirmed"):
        world.profile()
    assert (world.first_jobs, world.submitted, world.run.exists) == (0, [], False)


def test_a_cap_below_the_first_job_refuses_it_before_anybody_is_asked(world: World) -> None:
    with pytest.raises(OverBudget, match=r"the job that builds the model and the dataset may take 0\.200 node-hours"):
        world.profile(spec(max_node_hours=0.1))
    assert (world.first_jobs, world.confirmed) == (0, [])


def test_probes_that_go_beyond_the_cap_with_the_first_job_are_refused_once_they_are_settled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_job, "count_newest_node_hours", lambda _: 0.1)
    with pytest.raises(OverBudget, match="the probes and the job that builds the model"):
        world.profile(spec(max_node_hours=1))
    assert world.confirmed[0].node_hours == 1, "no more than the cap was ever asked for"
    assert (world.first_jobs, world.submitted) == (1, [])
    assert first_job.load_inspection(world.run, spec()) == TOLD, "what it told is kept for a higher cap"


def test_what_first_jobs_took_counts_towards_the_cap_of_later_rounds(world: World) -> None:
    world.run.path.mkdir(parents=True)
    assert profile_plan.count_measured_node_hours(world.run) == 0
    write_record(world.run.path / "first_job.json", FirstJob(scheduler_id="7", node_hours=0.15))
    assert profile_plan.count_measured_node_hours(world.run) == pytest.approx(0.15)


def test_fresh_renews_what_the_first_job_told(world: World) -> None:
    world.profile()
    old = TOLD.model_copy(update={"dataset_size": 1})
    write_record(first_job.get_inspection_path(world.run, spec()), old)
    world.profile(fresh=True)
    assert world.first_jobs == 2
    assert first_job.load_inspection(world.run, spec()) == TOLD
    write_record(first_job.get_inspection_path(world.run, spec()), old)
    world.here = True
    anew = dataclasses.replace(world.inspector(fresh=True), keep=True)
    assert first_job.reuse_stored_inspection(anew, world.run)(spec()) == TOLD
    assert first_job.reuse_stored_inspection(world.inspector(), world.run)(spec()) == TOLD, (
        "what is built here is not overruled by it"
    )


@pytest.mark.parametrize(("min_batch", "again"), [(32, False), (4, True)])
def test_what_a_first_job_told_holds_for_the_settings_that_it_has_read(
    world: World, min_batch: int, again: bool
) -> None:
    def job(*nodes: int) -> JobSpec:
        return make.spec(
            search={"nodes": list(nodes), "min_batch": min_batch, "max_minutes": 20, "max_node_hours": 2},
            cluster={"kind": "slurm"},
            train={"epochs": 4},
        )

    world.profile(job(1, 2))
    world.profile(job(1, 2, 4))  # whether BatchNorm trains on one sample a rank was looked at for two nodes
    assert world.first_jobs == 1 + again
    world.profile(job(1, 2))
    assert world.first_jobs == 1 + again


def test_a_dry_run_shows_the_first_job_and_touches_nothing(world: World) -> None:
    would = run_work(profile.make_dry_run([world.run], world.means()), world.events.append)
    (text,) = would[None].scripts
    assert "-m tula_cli.worker.measure.inspect" in text
    assert f"#SBATCH --time={first_job.INSPECTION_JOB_MINUTES}" in text
    assert text in list(show_profile.render_dry_run(would))
    assert (world.first_jobs, world.confirmed, world.run.exists) == (0, [], False)


# --- check


def test_check_tells_what_the_first_job_may_cost(world: World) -> None:
    report = services_check.check_job(spec(), inspector=world._inspect)
    assert report.unsettled is not None
    assert report.node_hours_at_most == pytest.approx(first_job.INSPECTION_JOB_MINUTES / 60 + 1.1)
    assert not report.problems
    assert any("first job" in line for line in show_check.render_check(report, {}) if isinstance(line, str))
    tight = services_check.check_job_on_all_node_types(
        [world.run.with_spec(spec(max_node_hours=0.1))], inspector=world._inspect
    )
    over = "The job that builds the model and the dataset may take 0.200 node-hours"
    with pytest.raises(OverBudget, match=re.escape(over)):  # as profile says it
        tight.require_sound("job.yaml")
    some = services_check.check_job_on_all_node_types(
        [world.run.with_spec(spec(max_node_hours=1))], inspector=world._inspect
    )
    some.require_sound("job.yaml")
    assert values(some.reports[None].warnings, "first-search-may-exceed-cap") == {
        "node_hours": pytest.approx(1.3),
        "cap": 1,
    }


def test_what_the_first_job_told_is_known_to_check_estimate_and_train(world: World) -> None:
    with pytest.raises(NotInspectable):
        train.plan_training(world.run, nodes=1, batch=64, inspect=world._inspect)
    write_record(first_job.get_inspection_path(world.run, spec()), TOLD)
    report = services_check.check_job_on_all_node_types([world.run], inspector=world._inspect).reports[None]
    assert (report.inspection, report.unsettled) == (TOLD, None)
    elsewhere = [RunDir.from_spec(world.run.path / "elsewhere", spec())]
    assert (
        services_check.check_job_on_all_node_types(elsewhere, inspector=world._inspect).reports[None].unsettled
        is not None
    )
    assert train.plan_training(world.run, nodes=1, batch=64, inspect=world._inspect).task.batch == 64
    answer = TOLD.model_copy(update={"footprints": tuple(make_footprint(Truth(), size) for size in (8, 16))})
    write_record(first_job.get_inspection_path(world.run, spec()), answer)
    assert estimate_memory_on_all_node_types([world.run], inspector=world._inspect)[None].inspection == answer
    fresh = world.inspector(fresh=True)
    assert services_check.check_job_on_all_node_types([world.run], inspector=fresh).reports[None].unsettled is not None
    for anew in (
        lambda: train.plan_training(world.run, nodes=1, batch=64, inspect=fresh),
        lambda: estimate_memory_on_all_node_types([world.run], inspector=fresh),
    ):
        with pytest.raises(NotInspectable):
            anew()


# --- waiting for it


class Clock:
    """Time that passes while one sleeps."""

    def __init__(self, states: Iterator[SchedulerState | None]) -> None:
        self.now, self.states = 1000.0, states

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def ask(self, ids: list[str]) -> dict[str, SchedulerState]:
        state = next(self.states)
        if state is None:
            raise KeyboardInterrupt
        return {ids[0]: state}


def wait(world: World, monkeypatch: pytest.MonkeyPatch, *states: SchedulerState | None, **options: Any) -> list[str]:
    """Wait for a first job that goes through these states, one a look; return what was cancelled."""
    clock = Clock(itertools.chain(states, itertools.repeat(SchedulerState("ended"))))
    monkeypatch.setattr(first_job.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(first_job.slurm_queue, "query_states", clock.ask)
    cancelled: list[str] = []
    monkeypatch.setattr(first_job.slurm_queue, "cancel_jobs", cancelled.extend)
    try:
        first_job.inspect_job_on_node(world.run, spec(), sleep=clock.sleep, **options)
    except (Pending, Interruption) as error:
        cancelled.append(type(error).__name__)
    return cancelled


PENDING, RUNNING = SchedulerState("pending"), SchedulerState("running")


def test_the_time_on_the_node_is_counted_and_not_that_in_the_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wait(world, monkeypatch, *[PENDING] * 100, *[RUNNING] * 29) == []
    assert first_job.count_node_hours(world.run) == pytest.approx((10 + 29 * 2) / 3600), (
        "from the last look at the queue on"
    )
    wait(world, monkeypatch, *[PENDING] * 2, *[RUNNING] * 29)
    assert first_job.count_node_hours(world.run) == pytest.approx((10 + 4.5 + 58 * 2) / 3600), "all first jobs together"


def test_looks_at_the_queue_are_fewer_the_longer_a_first_job_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[SchedulerState | None] = [PENDING] * 20
    assert wait(world, monkeypatch, *looks, None, timeout=140.0) == ["7", "Pending"], "140 s are over before 20 looks"


def test_a_first_job_that_will_never_start_is_cancelled_at_the_second_look_that_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopeless = SchedulerState("pending", "PartitionDown", hopeless=True)
    assert wait(world, monkeypatch, hopeless, PENDING, hopeless, RUNNING) == [], "it may be so for a moment"
    with pytest.raises(SchedulerError, match="PartitionDown"):
        wait(world, monkeypatch, PENDING, hopeless, hopeless)


@pytest.mark.parametrize(
    ("states", "options", "error"),
    [([RUNNING] * 9, {"timeout": 10.0}, "Pending"), ([RUNNING] * 6 + [None], {}, "Interruption")],
)
def test_a_first_job_that_nobody_waits_for_is_cancelled_and_counted(
    world: World, monkeypatch: pytest.MonkeyPatch, states: list[Any], options: dict[str, float], error: str
) -> None:
    assert wait(world, monkeypatch, *states, **options) == ["7", error]
    assert first_job.count_node_hours(world.run) == pytest.approx(10 / 3600)
    assert first_job.load_inspection(world.run, spec()) is None


def test_ctrl_c_while_a_first_job_is_submitted_leaves_none_that_is_not_written_down(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*told: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        return world._submit_first_job(*told)

    monkeypatch.setattr(first_job, "submit_script", pressed)
    assert wait(world, monkeypatch, RUNNING) == ["7", "Interruption"]
    assert first_job.count_node_hours(world.run) == 0 and not (world.run.path / "lock").exists()
    assert read_record(world.run.path / "first_job.json", TypeAdapter(FirstJob)) == FirstJob(
        scheduler_id="7", node_hours=0
    )


def test_ctrl_c_before_a_first_job_is_submitted_starts_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first_job, "find_queued_jobs", pressed)
    with pytest.raises(Interruption, match="run the same command again to submit the first job"):
        first_job.inspect_job_on_node(world.run, spec())
    assert world.first_jobs == 0 and not (world.run.path / "first_job.json").exists()


def left_behind(world: World) -> Path:
    """Submit a first job as a command does that is killed after that; return the file of what it is asked."""
    first_job._WatchedJob(world.run, spec(), lambda _: None).submit_or_adopt()
    name = f"tula-{world.run.id}-inspection"
    world.queue[name] = QueuedJob("7", name, "")
    return world.run.submitit_dir / "inspection-spec.json"


@pytest.mark.parametrize(("age", "seconds"), [(0, 20), (100, 120), (86400, 60 * first_job.INSPECTION_JOB_MINUTES)])
def test_a_first_job_whose_command_was_killed_is_taken_up(
    world: World, monkeypatch: pytest.MonkeyPatch, age: float, seconds: float
) -> None:
    requested = left_behind(world)
    assert first_job.count_node_hours(world.run) == first_job.INSPECTION_JOB_MINUTES / 60, (
        "it may take as much, and nobody looks"
    )
    os.utime(requested, (time.time() - age,) * 2)
    assert wait(world, monkeypatch, *[RUNNING] * 9) == []
    assert world.first_jobs == 1
    assert first_job.count_node_hours(world.run) == pytest.approx(seconds / 3600, abs=2 / 3600), (
        "from its submission on, at most"
    )


def test_a_first_job_that_waits_for_another_spec_is_cancelled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    left_behind(world).write_text(spec(max_minutes=5).model_dump_json())
    assert wait(world, monkeypatch) == ["7"]
    assert world.first_jobs == 2


def test_what_a_first_job_told_nobody_is_found_later(world: World) -> None:
    left_behind(world)
    log = world.run.submitit_dir / "7_0_log.out"
    assert first_job.load_inspection(world.run, spec()) == TOLD
    decaying = make.spec(cluster={"kind": "slurm"}, train={"epochs": 4}, optimizer={"lr": 0.1, "weight_decay": 0.1})
    assert first_job.load_inspection(world.run, decaying) is None, "it was asked with other settings"
    whole = log.read_text()
    refused = {"error": {"class": "SpecError", "message": "no such model", "hint": "", "problems": []}}
    for other in ("", "begun\n", whole[:-20], f"begun\n{json.dumps(refused)}\n", "begun\n{}\n"):
        log.write_text(other)
        assert first_job.load_inspection(world.run, spec()) is None


def test_a_job_that_tells_nothing_is_an_error_with_its_words(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: object, run: RunDir, *__: object) -> str:
        (run.submitit_dir / "8_0_log.out").write_text("")
        (run.submitit_dir / "8_0_log.err").write_text("ModuleNotFoundError: No module named 'torch'\n")
        return "8"

    monkeypatch.setattr(first_job, "submit_script", silent)
    monkeypatch.setattr(first_job, "LOG_LAG_SECONDS", 0.0)
    with pytest.raises(JobFailed, match="No module named 'torch'"):
        first_job.inspect_job_on_node(world.run, spec(), sleep=lambda _: None)
