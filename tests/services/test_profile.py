"""`tula profile` as a service: what is missing, what it may cost, what is submitted."""

import contextlib
import dataclasses
from pathlib import Path

import make_runs
import pytest
from make_results import make_inspection
from make_runs import FakeLauncher

from tula_cli.errors import BadMeasurements, Diverged, Infeasible, JobFailed, OutOfMemoryAtMinimum, SchedulerError
from tula_cli.models.cost import compute_max_cost
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.imports import Source
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.probes import Components, Footprint
from tula_cli.run.records.tasks import ProbeTask, TrainTask, make_probe_id
from tula_cli.services import profile, profile_plan, profile_report
from tula_cli.services.events import JobsProgress, WarningEvent
from tula_cli.services.plans import ProfilePlan
from tula_cli.services.status import read_run_status
from tula_cli.services.waiting import _NewProbeResults, wait_for_jobs
from tula_cli.show import live
from tula_cli.spec.job import JobSpec

MIB = 2**20


def inspection(**changes: object) -> Inspection:
    """Return an inspection of a model that takes 100 MiB and 1 MiB a sample, where a GPU has 1000 MiB."""
    footprints = tuple(
        Footprint(
            local_batch=local,
            memory=Components(
                parameters=40 * MIB, gradients=40 * MIB, optimizer=20 * MIB, factors=0, batch=0,
                activations=local * MIB, peak=(100 + local) * MIB, reserved=(100 + local) * MIB,
            ),
        )
        for local in (8, 16)
    )  # fmt: skip
    return make_inspection(**{"footprints": footprints, "capacity": 1000 * MIB, **changes})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    search = {"nodes": [1, 2], "min_batch": 32, "strategy": "full", "max_minutes": 30}
    return RunDir.create(tmp_path, make_runs.spec(search=search, pricing={"price": 3.0}))


def batches(plan: ProfilePlan) -> dict[int, tuple[int, ...]]:
    return {task.nodes: task.local_batches for task in plan.tasks}


def test_the_grid_ends_where_the_estimate_says_memory_does(run: RunDir) -> None:
    # 1000 MiB less 10 % leave 800 samples beside the 100 MiB, so 512 is the largest power of two.
    plan = profile_plan.plan_probes(Run(run.path, run.read_spec()), inspection())
    assert batches(plan) == {1: (32, 64, 128, 256, 512), 2: (16, 32, 64, 128, 256, 512)}
    assert (plan.total, plan.done, plan.missing_count) == (11, 0, 11)


def test_without_a_capacity_the_dataset_bounds_the_grid(run: RunDir) -> None:
    plan = profile_plan.plan_probes(Run(run.path, run.read_spec()), inspection(capacity=None))
    assert batches(plan)[1][-1] == 1024


def test_cost_at_most_is_nodes_times_minutes(run: RunDir) -> None:
    plan = profile_plan.plan_probes(Run(run.path, run.read_spec()), inspection())
    assert plan.minutes_at_most == 60
    assert plan.node_hours_at_most == pytest.approx((1 + 2) * 0.5)
    assert plan.price_at_most == pytest.approx(1.5 * 3.0)


def test_only_what_has_no_result_is_planned(run: RunDir) -> None:
    for local in (32, 64, 128, 256, 512):
        make_runs.add_measured(run, 1, local)
    make_runs.add_measured(run, 2, 16)
    make_runs.add_out_of_memory(run, 2, 512)
    make_runs.add_failed(run, 2, 64)
    plan = profile_plan.plan_probes(Run(run.path, run.read_spec()), inspection())
    assert batches(plan) == {2: (32, 64, 128, 256)}
    assert (plan.done, plan.missing_count) == (7, 4)


def test_a_model_that_does_not_fit_at_all_is_infeasible(run: RunDir) -> None:
    with pytest.raises(Infeasible, match="memory"):
        profile_plan.plan_probes(Run(run.path, run.read_spec()), inspection(capacity=50 * MIB))


def test_jobs_are_submitted_with_their_task_written_first(run: RunDir) -> None:
    launcher = FakeLauncher()
    plan = profile_plan.plan_probes(Run(run.path, run.read_spec()), inspection())
    profile.submit_probes(run, plan, launcher)
    assert launcher.submitted == ["probe-n001", "probe-n002"]
    task = run.read_task("probe-n002")
    assert isinstance(task, ProbeTask)
    assert task.local_batches == (16, 32, 64, 128, 256, 512)
    assert [job.id for job in run.read_jobs()] == launcher.submitted


def test_a_second_call_attaches_to_what_is_under_way(run: RunDir) -> None:
    launcher = FakeLauncher()
    plan = profile_plan.plan_probes(Run(run.path, run.read_spec()), inspection())
    profile.submit_probes(run, plan, launcher)
    launcher.says["probe-n001"] = "ended"
    profile.submit_probes(run, plan, launcher)
    assert launcher.submitted == ["probe-n001", "probe-n002", "probe-n001"]


def test_profiling_again_takes_a_cancellation_back(run: RunDir) -> None:
    run.mark_job_cancelled("probe-n001")
    profile.submit_probes(run, profile_plan.plan_probes(Run(run.path, run.read_spec()), inspection()), FakeLauncher())
    assert not run.is_cancelled("probe-n001")


def test_the_report_says_what_is_there(run: RunDir) -> None:
    plan = profile_plan.plan_probes(Run(run.path, run.read_spec()), inspection())
    make_runs.add_measured(run, 1, 32)
    make_runs.add_out_of_memory(run, 1, 512)
    make_runs.add_failed(run, 1, 64)
    report = profile_report.make_profile_report(run, plan)
    assert [len(part) for part in (report.measured, report.out_of_memory, report.failed, report.missing)] == [
        1,
        1,
        1,
        8,
    ]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        ("failed", JobFailed),
        ("diverged", Diverged),
        ("oom", OutOfMemoryAtMinimum),
        ("nothing", BadMeasurements),
    ],
)
def test_nothing_measured_is_an_error_of_its_class(run: RunDir, result: str, error: type[Exception]) -> None:
    plan = profile_plan.plan_probes(Run(run.path, run.read_spec()), inspection())
    if result == "failed":
        make_runs.add_failed(run, 1, 32, "ValueError: mine")
    if result == "diverged":
        make_runs.add_failed(run, 1, 32, "Diverged: not finite", outcome="diverged")
    if result == "oom":
        make_runs.add_out_of_memory(run, 1, 32)
    with pytest.raises(error):
        profile_report.make_profile_report(run, plan)


# --- rounds


@pytest.fixture
def rounds(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, long_job())


def long_job(**search: object) -> JobSpec:
    """Return a job in rounds that is worth many probes."""
    rounds = {"nodes": [1, 2, 4], "min_batch": 32, "strategy": "adaptive", "max_minutes": 30}
    return make_runs.spec(search={**rounds, **search}, train={"epochs": 1_000_000})


def measure(run: RunDir, plan: ProfilePlan) -> None:
    """Write the tasks of a plan and their results."""
    for task in plan.tasks:
        run.write_task(task)
        for local in task.local_batches:
            make_runs.add_measured(run, task.nodes, local)


def test_each_round_follows_from_the_results_of_those_before(rounds: RunDir) -> None:
    plan = profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())
    assert batches(plan) == {1: (32, 128, 512), 4: (8,)} and len(plan.reasons) == 1
    seen = 0
    while plan.missing_count:
        measure(rounds, plan)
        assert profile_report.is_plan_measured(rounds, plan)
        seen += plan.missing_count
        plan = profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())
        assert plan.done == seen
    assert 4 <= seen < 18 and "Measuring all configurations" in plan.certainty


def plan_after(plan: ProfilePlan) -> ProfilePlan:
    """Return a further round, with a job of the same id as one of the round before."""
    return dataclasses.replace(plan, tasks=(plan.tasks[0].model_copy(update={"local_batches": (64,)}),))


def submit_all(run: RunDir, plan: ProfilePlan, launcher: FakeLauncher) -> None:
    profile.submit_probes(run, plan, launcher)
    assert set(launcher.says.values()) == {"running"}


def test_a_round_waits_until_finished_jobs_of_the_round_before_have_exited(rounds: RunDir) -> None:
    launcher = FakeLauncher()
    plan = profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())
    submit_all(rounds, plan, launcher)
    measure(rounds, plan)
    pauses: list[float] = []

    def exit_after_three_pauses(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            launcher.says.update(dict.fromkeys(launcher.says, "ended"))

    after = plan_after(plan)
    profile.wait_for_job_exits(rounds, launcher, after, sleep=exit_after_three_pauses)
    assert len(pauses) == 3
    launcher.submitted.clear()
    profile.submit_probes(rounds, after, launcher)
    assert launcher.submitted == list(after.job_ids)


def test_no_round_waits_for_a_job_that_is_still_measuring(rounds: RunDir) -> None:
    launcher = FakeLauncher()
    plan = profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())
    submit_all(rounds, plan, launcher)
    profile.wait_for_job_exits(rounds, launcher, plan, sleep=lambda _: pytest.fail("it waits"))


def test_a_job_that_never_exits_is_waited_for_only_so_long(rounds: RunDir) -> None:
    launcher = FakeLauncher()
    plan = profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())
    submit_all(rounds, plan, launcher)
    measure(rounds, plan)
    pauses: list[float] = []
    profile.wait_for_job_exits(rounds, launcher, plan_after(plan), sleep=pauses.append)
    assert profile.MAX_EXIT_SECONDS <= sum(pauses) < 2 * profile.MAX_EXIT_SECONDS


def test_what_auto_comes_to_is_kept_with_its_probes(tmp_path: Path) -> None:
    search = {"nodes": [1, 2, 4], "min_batch": 32, "strategy": "auto", "max_minutes": 30}
    short, long = (make_runs.spec(search=search, train={"epochs": epochs}) for epochs in (1, 1_000_000))
    run = RunDir.create(tmp_path, short)
    plan = profile_plan.plan_probes(Run(run.path, short), inspection())
    assert plan.in_rounds and batches(plan) == {1: (32, 128, 512), 4: (8,)}
    assert {task.spec.search.strategy for task in plan.tasks} == {"adaptive"}
    assert plan.reasons[0] == "search.strategy: auto chose adaptive"
    sweep = profile_plan.plan_probes(Run(run.path, long), inspection())
    assert (
        not sweep.in_rounds
        and not sweep.reasons
        and batches(sweep) == {1: (32, 64, 128, 256, 512), 2: (16,), 4: (8, 64, 256)}
    )
    submit_all(run, sweep, FakeLauncher())
    assert batches(profile_plan.plan_probes(Run(run.path, short), inspection())) == batches(sweep), (
        "a search goes on as it has begun"
    )


def test_a_round_that_is_under_way_is_the_plan_until_it_is_done(rounds: RunDir) -> None:
    plan = profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())
    submit_all(rounds, plan, FakeLauncher())
    make_runs.add_measured(rounds, 1, 32)
    again = profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())
    assert batches(again) == {1: (128, 512), 4: (8,)} and not profile_report.is_plan_measured(rounds, plan)
    make_runs.add_measured(rounds, 1, 128)
    make_runs.add_failed(rounds, 1, 512)
    make_runs.add_measured(rounds, 4, 8)
    again = profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())
    assert batches(again) == {1: (256, 512)}, "what failed, and what stands in for it to start from"
    assert batches(
        profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection(), repeat_failed=False)
    ) == {1: (256,)}


class _NoScheduler(FakeLauncher):
    """Refuses every job."""

    def submit(self, run: RunDir, task: ProbeTask | TrainTask) -> Job:
        raise SchedulerError("squeue does not answer", "nothing was submitted")


def test_probes_that_were_not_submitted_are_planned_again(rounds: RunDir) -> None:
    run = Run(rounds.path, rounds.read_spec())
    plan = profile_plan.plan_probes(run, inspection())
    with pytest.raises(SchedulerError):
        profile.submit_probes(rounds, plan, _NoScheduler())
    again = profile_plan.plan_probes(run, inspection())
    assert (batches(again), again.reasons) == (batches(plan), plan.reasons)


def test_a_later_round_that_was_not_submitted_is_planned_again(rounds: RunDir) -> None:
    run = Run(rounds.path, rounds.read_spec())
    first = profile_plan.plan_probes(run, inspection())
    submit_all(rounds, first, FakeLauncher())
    measure(rounds, first)
    plan = profile_plan.plan_probes(run, inspection())
    assert plan.tasks
    with pytest.raises(SchedulerError):
        profile.submit_probes(rounds, plan, _NoScheduler({task.job: "ended" for task in first.tasks}))
    assert batches(profile_plan.plan_probes(run, inspection())) == batches(plan)


def test_a_round_whose_probes_all_fail_is_not_measured(rounds: RunDir) -> None:
    plan = profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())
    for nodes, local in ((1, 32), (1, 128), (1, 512), (4, 8)):
        make_runs.add_failed(rounds, nodes, local)
    assert not profile_report.is_plan_measured(rounds, plan)
    make_runs.add_measured(rounds, 1, 32)
    assert profile_report.is_plan_measured(rounds, plan)


def test_the_result_of_a_probe_is_reported_once_as_soon_as_it_is_there(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, make_runs.spec())
    name = make_runs.add_probes(run, 1, (32, 64, 128))
    make_runs.add_measured(run, 1, 32)
    make_runs.add_failed(run, 1, 64, "no route to host")
    statuses = _NewProbeResults(run)
    now = read_run_status(run, make_runs.FakeLauncher({name: "running"}), now=0.0)
    assert list(statuses.list_events(now)) == [], "these were there before"
    make_runs.add_measured(run, 1, 64)
    make_runs.add_failed(run, 1, 128, "no route to host")
    again, failed = statuses.list_events(now)
    assert (again.result.id, again.result.kind, again.number, again.total) == (make_probe_id(1, 64), "measured", 2, 3)
    assert (failed.result.kind, failed.number) == ("failed", 3)
    assert list(statuses.list_events(now)) == []


def test_why_a_probe_of_a_script_failed_is_reported_once_with_what_to_do(tmp_path: Path) -> None:
    value = make_runs.script_spec(samples=1000)
    run = RunDir.create(tmp_path, value)
    why = "the command was given a batch of 32 and a step trains on 8 samples"
    name = make_runs.add_probes(run, 1, (32,))
    make_runs.add_failed(run, 1, 32, why)
    launcher = make_runs.FakeLauncher(says={name: "ended"})
    messages = []
    waiting_for = wait_for_jobs(run, launcher, [name])
    with contextlib.suppress(StopIteration):
        while True:
            messages.append(next(waiting_for))
    assert not [event for event in messages if isinstance(event, WarningEvent)], "the error says it"
    (job,) = next(event for event in messages if isinstance(event, JobsProgress)).status.jobs
    assert job.state == "failed" and why not in live._describe_job(job)
    plan = ProfilePlan(
        tuple(run.read_tasks()), 1, 0, 20, Source(Path(), ""), **vars(compute_max_cost(run.read_spec(), 0.3, None))
    )
    with pytest.raises(JobFailed, match="a step trains on 8 samples") as error:
        profile_report.make_profile_report(run, plan)
    assert error.value.hint.startswith("read the output of the script with tula logs")
    make_runs.add_measured(run, 1, 64)
    assert any(isinstance(event, WarningEvent) for event in wait_for_jobs(run, launcher, [name]))


def test_a_further_round_stays_within_the_cap_on_node_hours(rounds: RunDir) -> None:
    def capped(cap: float) -> ProfilePlan:
        return profile_plan.plan_probes(Run(rounds.path, long_job(max_node_hours=cap)), inspection())

    assert capped(1.0).missing_count == 4  # the command line refuses the start where it is over the cap
    measure(rounds, capped(1.0))
    for nodes in (1, 4):
        start = make_runs.START
        rounds.write_attempt(make_runs.attempt(f"probe-n{nodes:03d}", start=start, end=start + 3600))
    assert capped(100.0).missing_count
    stopped = capped(5.1)
    assert not stopped.missing_count and "5 of 5.1 are spent. To continue, raise the limit" in stopped.certainty


def test_what_is_no_longer_searched_is_not_tried_again(rounds: RunDir) -> None:
    plan = profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())
    submit_all(rounds, plan, FakeLauncher())
    for local in (32, 128, 512):
        make_runs.add_measured(rounds, 1, local)
    make_runs.add_failed(rounds, 4, 8)
    assert batches(profile_plan.plan_probes(Run(rounds.path, rounds.read_spec()), inspection())) == {4: (8, 16)}
    fewer = long_job(nodes=[1, 2])
    assert set(batches(profile_plan.plan_probes(Run(rounds.path, fewer), inspection()))) == {2}


def test_the_cap_counts_what_other_node_types_take(rounds: RunDir) -> None:
    job = long_job(max_node_hours=10)
    measure(rounds, profile_plan.plan_probes(Run(rounds.path, job), inspection()))
    assert profile_plan.plan_probes(Run(rounds.path, job), inspection(), node_hours_of_other_types=1.0).missing_count
    assert not profile_plan.plan_probes(
        Run(rounds.path, job), inspection(), node_hours_of_other_types=9.9
    ).missing_count
