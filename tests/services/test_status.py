import contextlib
import itertools
import json
import math
import os
import tempfile
from functools import partial
from pathlib import Path

import make_runs as make
import pytest
from rich.console import Console

from tula_cli.errors import SchedulerError, SpecError
from tula_cli.run import files
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_runs_of_job
from tula_cli.run.records.results import Cell, Comparison, CountedEnergy, EvaluationRecord
from tula_cli.run.records.tasks import JobSize, Rung
from tula_cli.services import cancel, run_list, status, waiting
from tula_cli.services import status as services_status
from tula_cli.show import status as show_status

START = make.START
NOBODY = 65534  # the user without rights


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "tula-runs", make.spec())


def shown(*parts):
    console = Console(width=200)
    with console.capture() as message:
        for part in parts:
            console.print(part)
    return message.get()


def only_job(run, launcher=None, *, now=START + 100):
    return services_status.read_run_status(run, launcher or make.FakeLauncher(), now=now).jobs[0]


# --- one moment


def test_a_run_without_jobs(run):
    now = services_status.read_run_status(run, make.FakeLauncher(), now=START)
    assert (now.jobs, now.training, now.attempts, now.recommendation) == ((), None, (), None)
    assert not now.has_active_jobs()


def test_evaluations_of_every_training_are_shown(run):
    for number, signature in enumerate(("ab12cd34", "ef56ab78")):
        make.add_training(run, signature=signature, at=START + number)
        record = EvaluationRecord(
            signature=signature, key="00", weights="best", path="w", samples=640, test=False, dataset="digits", size=9,
            metrics={"top1": 90.0 + number}, nodes=1, local_batch=32, seconds=1, evaluated_at=START + 50 - number,
        )  # fmt: skip
        run.get_training(signature).write_evaluation(record)
    now = services_status.read_run_status(run, make.FakeLauncher(), now=START + 100)
    assert now.training.signature == "ef56ab78"
    assert [record.signature for record in now.evaluations] == ["ef56ab78", "ab12cd34"]
    lines = shown(*show_status.render_status(now)).splitlines()
    assert [line for line in lines if line.startswith("evaluated")] == [
        "evaluated best at 640 samples on the validation set: top1 91.00",
        "evaluated training ab12cd34: best at 640 samples on the validation set: top1 90.00",
    ]


def test_a_queued_job_says_what_it_waits_for(run):
    name = make.add_probes(run, 2, (16, 32))
    job = only_job(run, make.FakeLauncher({name: "pending"}, reason="Resources"))
    assert (job.state, job.reason, job.total, job.done) == ("queued", "Resources", 2, 0)
    assert job.now == status.ProbeConfiguration(nodes=2, local_batch=16, batch=32)
    assert (job.elapsed, job.left, job.node_hours) == (None, None, 0)


def test_a_job_that_is_held_for_a_full_disk_says_so_and_is_not_waited_for(run):
    name = make.add_training(run)
    words = "no space left on device: 0 B of 1.00 GiB are free on the disk of /scratch; jobs held: 12 to 14"
    run.write_attempt(make.attempt(f"{name}-1", end=START + 9, outcome="disk", message=words))
    launcher = make.FakeLauncher({name: "pending"}, reason="JobHeldUser: will not start", flags={"on_hold": True})
    now = services_status.read_run_status(run, launcher, now=START + 20)
    (job,) = now.jobs
    assert (job.state, now.has_active_jobs()) == ("held", False)
    assert job.reason.startswith(words) and "free some space" in job.reason
    other = make.FakeLauncher({name: "pending"}, reason="Priority")
    assert only_job(run, other).state == "queued"


@pytest.mark.promise("the scheduler", "a job is suspended", "`tula status` shows this and how the job can be resumed")
def test_a_suspended_job_is_not_said_to_run_and_is_waited_for(run):
    name = make.add_training(run)
    run.write_attempt(make.attempt(f"{name}-1"))
    reason = "suspended by an administrator or for a job of higher priority"
    launcher = make.FakeLauncher({name: "running"}, reason=reason, flags={"suspended": True})
    now = services_status.read_run_status(run, launcher, now=START + 100)
    (job,) = now.jobs
    assert (job.state, job.reason, job.elapsed, now.has_active_jobs()) == ("suspended", reason, 100, True)
    answer = shown(*show_status.render_status(now))
    assert "suspended by an administrator" in answer and "running" not in answer and "lost" not in answer


def test_an_attempt_of_a_job_that_is_done_is_never_lost(run):
    name = make.add_probes(run, 1, (32,))
    make.add_measured(run, 1, 32)
    run.write_attempt(make.attempt(name, number=1, start=START - 50))  # its supervisor was killed
    run.write_attempt(make.attempt(name, number=2))
    now = services_status.read_run_status(run, make.FakeLauncher({name: "ended"}), now=START + 100)
    lines = shown(show_status.make_attempts_table(now)).splitlines()
    states = [line.split()[-1] for line in lines if line.startswith("probe-")]
    assert (now.jobs[0].state, states) == ("done", ["lost", "done"])


@pytest.mark.parametrize("outcome", ["done", "device_oom"])
@pytest.mark.parametrize("apart", [-3.0, 0.0, 30.0])
def test_a_job_that_has_just_ended_well_is_not_lost_before_its_results_are_here(run, outcome, apart):
    name = make.add_probes(run, 1, (32,))
    run.write_job(make.scheduler_job(name, scheduler="slurm"))
    run.write_attempt(make.attempt(name, end=START + 100 - apart, outcome=outcome))
    launcher = make.FakeLauncher({name: "ended"})
    job = only_job(run, launcher)
    assert (job.state, job.reason) == ("running", "the job has finished, but its results are not visible here yet")
    assert only_job(run, launcher, now=START + 200).state == "lost"


@pytest.mark.promise(
    "a node", "the clock of a node is wrong", "elapsed and remaining time are measured by the clock of the file system"
)
@pytest.mark.parametrize("off", [-200.0, 120.0])
def test_a_host_whose_clock_is_off_changes_neither_elapsed_time_nor_time_left(run, off):
    began, now = START + 300, START + 360  # by the clock of the file system, and of who asks
    name = make.add_training(run)
    rows = [{**row, "time": began + 55 + off} for row in make.metrics() if row["kind"] == "step"]
    run.get_training("ab12cd34").metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.write_attempt(make.attempt(f"{name}-1", start=began + off, allocation="4711.0"))
    run.write_job(make.scheduler_job(name, scheduler="slurm", at=began - 1))
    os.utime(run.path / "attempts" / f"{name}-1.001.json", (began, began))
    os.utime(run.get_training("ab12cd34").metrics_path, (began + 55, began + 55))
    seen = services_status.read_run_status(run, make.FakeLauncher({name: "running"}), now=now)
    assert seen.training.eta == pytest.approx(rows[-1]["eta"] - 5)
    assert (seen.jobs[0].elapsed, seen.attempts[0].attempt.started_at) == (60, began)
    ended = make.attempt(
        f"{name}-1", start=began + off, end=now + off, outcome="user", message="no", allocation="4711.0"
    )
    run.write_attempt(ended)
    assert only_job(run, make.FakeLauncher({name: "ended"})).reason == "no", "it is of this submission all the same"


def test_a_queued_job_says_when_it_is_expected_to_start(run):
    name = make.add_probes(run, 2, (16, 32))
    assert only_job(run, make.FakeLauncher({name: "pending"}, starts_at=START + 500)).starts_at == START + 500
    assert only_job(run, make.FakeLauncher({name: "running"}, starts_at=START + 500)).starts_at is None


def test_the_scheduler_is_asked_once_for_all_jobs(run):
    launcher = make.FakeLauncher()
    for nodes in (1, 2, 4):
        make.add_probes(run, nodes, (32,))
    services_status.read_run_status(run, launcher, now=START)
    assert launcher.asked == 1


def test_a_damaged_result_is_a_warning_and_the_others_are_shown(run):
    name = make.add_probes(run, 1, (32, 64, 128))
    make.add_measured(run, 1, 32)
    make.add_measured(run, 1, 128)
    damaged = run.path / "results/probe-n001-l000064.json"
    damaged.write_text('{"kind": "measured"')
    now = services_status.read_run_status(run, make.FakeLauncher({name: "running"}), now=START)
    assert (now.measured, now.jobs[0].done, now.jobs[0].now.local_batch) == (2, 2, 64)
    (warning,) = now.warnings
    assert warning.code == "damaged-record" and str(damaged) in str(warning.values["problem"])


def test_a_running_job_names_the_probe_that_runs_and_what_is_left(run):
    name = make.add_probes(run, 2, (16, 32, 64, 128))
    run.write_attempt(make.attempt(name))
    make.add_measured(run, 2, 16, at=START + 30)
    make.add_measured(run, 2, 32, at=START + 50)
    job = only_job(run, make.FakeLauncher({name: "running"}), now=START + 60)
    assert (job.state, job.done, job.total) == ("running", 2, 4)
    assert job.now == status.ProbeConfiguration(nodes=2, local_batch=64, batch=128)
    assert job.elapsed == 60
    assert job.left == pytest.approx(2 * 25)  # two probes took 50 s
    assert job.node_hours == pytest.approx(2 * 60 / 3600)
    assert job.node_hours_left == pytest.approx(2 * 50 / 3600)


def test_a_pause_between_two_sessions_is_not_time_of_a_probe(run):
    name, other = make.add_probes(run, 2, (8, 16, 32, 64, 128)), make.add_probes(run, 1, (32,))
    day = 86_400
    run.write_attempt(make.attempt(name, end=START + 25, outcome="signal"))
    run.write_attempt(make.attempt(name, number=2, start=START + day))
    run.write_attempt(make.attempt(other, start=START + day + 15))
    for local, seconds in ((8, 10), (16, 20), (32, day + 10), (64, day + 20)):
        make.add_measured(run, 2, local, at=START + seconds)
    seen = services_status.read_run_status(run, make.FakeLauncher({name: "running"}), now=START + day + 20)
    assert next(job for job in seen.jobs if job.id == name).left == pytest.approx(10)


def test_probes_that_do_not_fit_are_done(run):
    name = make.add_probes(run, 1, (32, 64, 128))
    run.write_attempt(make.attempt(name, end=START + 40, outcome="device_oom"))
    make.add_measured(run, 1, 32)
    make.add_out_of_memory(run, 1, 64)
    make.add_out_of_memory(run, 1, 128, assumed=True)
    job = only_job(run)
    assert (job.state, job.done, job.now, job.left) == ("done", 3, None, None)
    assert job.elapsed == 40


def test_a_diverged_training_is_reported_with_its_place_and_what_to_do(run):
    name = make.add_training(run)
    run.write_attempt(
        make.attempt(f"{name}-1", end=START + 9, outcome="diverged", message="Diverged: the loss, step 4")
    )
    job = only_job(run)
    assert job.state == "diverged"
    assert job.reason.startswith("Diverged: the loss, step 4; ") and "lower optimizer.lr" in job.reason


def test_complete_results_outweigh_a_scheduler_that_lags(run):
    name = make.add_probes(run, 1, (32,))
    make.add_measured(run, 1, 32)
    assert only_job(run, make.FakeLauncher({name: "running"})).state == "done"


def test_a_failed_probe_fails_its_job_with_its_message(run):
    make.add_probes(run, 1, (32, 64))
    make.add_measured(run, 1, 32)
    make.add_failed(run, 1, 64, "ValueError: bad")
    job = only_job(run)
    assert (job.state, job.reason, job.done) == ("failed", "ValueError: bad", 1)


def test_a_failed_probe_that_is_run_again_is_what_runs(run):
    name = make.add_probes(run, 1, (32, 64))
    make.add_measured(run, 1, 32)
    make.add_failed(run, 1, 64)
    job = only_job(run, make.FakeLauncher({name: "running"}))
    assert (job.state, job.now.local_batch) == ("running", 64)


def test_an_attempt_that_ended_explains_a_job_that_ended(run):
    name = make.add_probes(run, 1, (32, 64))
    make.add_measured(run, 1, 32)
    run.write_attempt(make.attempt(name, end=START + 20, outcome="user", message="KeyError: 'x'"))
    job = only_job(run)
    assert (job.state, job.reason) == ("failed", "KeyError: 'x'")


def test_a_job_that_ended_without_a_word_is_lost(run):
    name = make.add_probes(run, 1, (32, 64))
    run.write_attempt(make.attempt(name))
    make.add_measured(run, 1, 32, at=START + 25)
    job = only_job(run, now=START + 9999)
    assert job.state == "lost"
    assert job.elapsed == 25, "nobody knows how long it lived after its last result"


def test_an_attempt_that_its_killed_supervisor_left_open_counts_until_it_last_wrote(run):
    name = make.add_training(run)
    run.write_attempt(make.attempt(f"{name}-1", start=START))
    os.utime(run.path / f"attempts/{name}-1.001.json", (START, START))
    log = run.get_log_path(f"{name}-1", 1)
    log.parent.mkdir(exist_ok=True)
    log.write_text("step 1\n")
    os.utime(log, (START + 1800, START + 1800))
    job = only_job(run, now=START + 6000)
    assert (job.state, job.elapsed, job.node_hours) == ("lost", 1800, job.nodes / 2)


@pytest.mark.parametrize(("kind", "state"), [("local", "failed"), ("slurm", "queued")])
def test_after_a_faulty_device_only_a_chain_goes_on(tmp_path, kind, state):
    allocation = "" if kind == "local" else "1.0"
    run = RunDir.create(tmp_path / kind, make.spec(cluster={"kind": kind}))
    name = make.add_training(run)
    attempt = make.attempt(f"{name}-1", end=START + 10, outcome="device_fault", message="ECC", allocation=allocation)
    run.write_attempt(attempt)
    assert only_job(run, make.FakeLauncher({name: "unknown"})).state == state


def test_an_attempt_of_an_earlier_submission_explains_nothing(run):
    name = make.add_probes(run, 1, (32,), at=START + 5000)
    run.write_attempt(make.attempt(name, end=START + 20, outcome="user", message="old"))
    assert only_job(run, now=START + 6000).state == "lost"


def test_the_schedulers_verdict_is_reported(run):
    name = make.add_probes(run, 1, (32, 64))
    verdict = make.FakeLauncher({name: "ended"}, reason="TIMEOUT: the time limit of the job was reached")
    assert (only_job(run, verdict).state, only_job(run, verdict).reason) == ("lost", verdict.reason)
    run.write_attempt(make.attempt(name, end=START + 9, outcome="signal", message="terminated"))
    job = only_job(run, verdict)
    assert (job.state, job.reason) == (
        "failed",
        "terminated (its scheduler: TIMEOUT: the time limit of the job was reached)",
    )
    failed = make.FakeLauncher(
        {name: "ended"}, reason="FAILED: the script of the job ended with an error", flags={"failed": True}
    )
    assert only_job(run, failed).reason == "terminated", "which says more"


@pytest.mark.parametrize(
    ("outcome", "state"), [("time_limit", "queued"), ("node_failure", "queued"), ("user", "failed")]
)
def test_a_silent_scheduler_does_not_end_a_chain_between_two_links(run, outcome, state):
    name = make.add_training(run)
    run.write_attempt(make.attempt(f"{name}-1", end=START + 9, outcome=outcome, message="it ended"))
    assert only_job(run, make.FakeLauncher({name: "unknown"}, reason="squeue does not answer")).state == state


def test_a_cancelled_job(run):
    name = make.add_probes(run, 1, (32,))
    run.mark_job_cancelled(name)
    assert only_job(run).state == "cancelled"
    assert only_job(run, make.FakeLauncher({name: "running"})).state == "cancelled"


def test_a_scheduler_that_forgot_the_job_is_not_believed(run):
    name = make.add_probes(run, 1, (32,))
    forgetful = make.FakeLauncher({name: "unknown"})
    assert only_job(run, forgetful).state == "queued"
    run.write_attempt(make.attempt(name))
    assert only_job(run, forgetful).state == "running"
    run.write_attempt(make.attempt(name, end=START + 9, outcome="peer", message="gone"))
    assert only_job(run, forgetful).state == "failed"


def test_a_damaged_job_is_a_warning_and_the_others_are_shown_and_cancelled(run):
    good, bad = make.add_probes(run, 1, (32,)), make.add_probes(run, 2, (32,))
    damaged = run.path / f"jobs/{bad}.json"
    damaged.write_text("{")
    launcher = make.FakeLauncher({good: "running", bad: "running"})
    now = services_status.read_run_status(run, launcher, now=START)
    assert [job.id for job in now.jobs] == [good]
    (warning,) = now.warnings
    assert warning.code == "damaged-job" and f"{damaged} is damaged" in str(warning.values["problem"])
    assert cancel.cancel_jobs(open_runs_of_job(run), lambda _: launcher) == [good] and launcher.cancelled == [good]


@pytest.mark.parametrize("folder", ["attempts", "tasks"])
def test_a_damaged_record_of_a_job_does_not_keep_another_job_from_being_cancelled(run, folder):
    over, running = make.add_probes(run, 1, (32,)), make.add_probes(run, 2, (32,))
    run.write_attempt(make.attempt(over, end=START + 9))
    (damaged,) = (path for path in (run.path / folder).iterdir() if "n001" in path.name)
    damaged.write_text("{")
    launcher = make.FakeLauncher({over: "ended", running: "running"})
    assert cancel.cancel_jobs(open_runs_of_job(run), lambda _: launcher) == [running]
    (warning,) = run.read_snapshot().record_warnings
    assert str(damaged) in str(warning.values["problem"])


# --- training


@pytest.mark.parametrize(
    ("length", "epochs", "asked"),
    [({"epochs": 9}, 9, None), ({"steps": 10}, None, 2560), ({"samples": 700}, None, 700)],
)
def test_a_training_of_a_script_is_as_long_as_its_section_says(tmp_path, length, epochs, asked):
    value = RunDir.create(tmp_path, make.script_spec(**length))
    make.add_training(value, rows=make.metrics(START + 60))
    train = services_status.read_run_status(value, make.FakeLauncher(), now=START + 60).training
    assert (train.epochs, train.samples_asked) == (epochs, asked)


def test_a_training_whose_submission_was_refused_is_not_submitted_and_has_its_range_of_nodes(tmp_path):
    value = RunDir.create(tmp_path, make.spec())
    job = make.add_training(value)
    (task,) = value.get_training("ab12cd34").read_tasks()
    sizes = tuple(JobSize(nodes=n, micro_batch=128 // n, splits=1, ladder=task.ladder) for n in (2, 4, 8))
    value.write_task(task.model_copy(update={"nodes": 8, "sizes": sizes}))
    line = "training ab12cd34 on 2, 4 or 8 nodes, batch 128"
    for state, start in (
        ("pending", f"{line}, epoch 0.00"),
        ("running", "training ab12cd34 on 8 nodes, batch 128, epoch"),
    ):
        train = services_status.read_run_status(value, make.FakeLauncher({job: state}), now=START).training
        assert show_status.describe_training(train).startswith(start)
    (value.path / "jobs" / f"{job}.json").unlink()
    train = services_status.read_run_status(value, make.FakeLauncher(), now=START).training
    assert show_status.describe_training(train) == f"{line}, not submitted"


@pytest.mark.parametrize("job_of", [make.spec, lambda: make.script_spec(epochs=2)])
def test_time_and_cost_of_a_moldable_training_are_those_of_the_nodes_of_each_attempt(tmp_path, job_of):
    value = RunDir.create(tmp_path, job_of())
    job = make.add_training(value)
    (task,) = value.get_training("ab12cd34").read_tasks()
    sizes = [
        JobSize(
            nodes=nodes,
            micro_batch=128 // nodes,
            splits=1,
            ladder=(Rung(batch=128, prediction=make.prediction(nodes, 128, hours=hours, cost=nodes * hours)),),
        )
        for nodes, hours in ((2, 6.0), (8, 2.0))
    ]
    on_two = task.model_copy(update={"nodes": 2, "sizes": tuple(sizes), "ladder": sizes[0].ladder})
    value.write_task(on_two)
    on_eight = on_two.with_granted_nodes(8).model_copy(update={"id": f"{job}-2", "attempt": 2})
    value.write_task(on_eight)
    value.write_attempt(make.attempt(f"{job}-1", start=START, end=START + 3600))
    value.write_attempt(make.attempt(f"{job}-2", start=START + 7200, idle_nodes=1))
    price = on_two.spec.pricing.price
    for state, hours, node_hours, rest in (
        ("running", 1.5, 2 + 0.5 * 9, [(8, 2.0)]),
        ("pending", 1.0, 2.0, [(2, 6.0), (8, 2.0)]),
    ):
        train = services_status.read_run_status(value, make.FakeLauncher({job: state}), now=START + 9000).training
        spent = train.spent
        assert (spent.hours, spent.node_hours) == (hours, node_hours)
        assert spent.cost == pytest.approx(price * node_hours)
        assert [(part.nodes, part.hours, part.cost) for part in spent.rest] == [(n, h, n * h) for n, h in rest]
    line = show_status.describe_spent_and_remaining_cost(spent)
    log = value.get_log_path(f"{job}-2", 1)  # its supervisor was killed, and the next job of the chain waits
    log.parent.mkdir(exist_ok=True)
    log.write_text("step 1\n")
    os.utime(log, (START + 9000, START + 9000))
    now = services_status.read_run_status(value, make.FakeLauncher({job: "pending"}), now=START + 99_000)
    assert (now.training.spent.hours, now.training.spent.node_hours) == (1.5, 2 + 0.5 * 9)
    assert (now.jobs[0].elapsed, now.jobs[0].node_hours) == (5400, 2 + 0.5 * 9)
    value.write_task(
        on_eight.model_copy(update={"sizes": tuple(sizes[1:])})
    )  # a range with one possible number of nodes
    now = services_status.read_run_status(value, make.FakeLauncher({job: "pending"}), now=START + 99_000)
    assert (now.training.spent.hours, now.training.spent.node_hours) == (1.5, 2 + 0.5 * 9)
    assert (
        line.startswith("so far 60.0 min, 2.00 node-h") and " on 2 nodes or " in line and line.endswith(" on 8 nodes")
    )


def test_the_beta2_of_the_newest_start_is_reported(tmp_path):
    value = RunDir.create(tmp_path, make.spec())
    rows = [
        {**row, "beta2": beta2} for row in make.metrics(START) if row["kind"] == "start" for beta2 in (0.5, 0.9921875)
    ]
    make.add_training(value, rows=[*rows, *(row for row in make.metrics(START + 60) if row["kind"] != "start")])
    train = services_status.read_run_status(value, make.FakeLauncher(), now=START + 60).training
    assert train.beta2 == 0.9921875
    assert ", lr 0.100, beta2 0.992188, " in show_status.describe_training(train)


def test_a_training_run_half_way(run):
    name = make.add_training(run, rows=make.metrics(START + 60))
    run.write_attempt(make.attempt(f"{name}-1"))
    now = services_status.read_run_status(run, make.FakeLauncher({name: "running"}), now=START + 60)
    train = now.training
    assert (train.epoch, train.epochs, train.samples, train.batch) == (1.5, 4, 1920, 128)
    assert (train.loss, train.top1, train.lr, train.step_time, train.predicted_step) == (1.7, 61.0, 0.1, 0.11, 0.1)
    assert train.eta == 70, "80 s, said 10 s ago"
    assert train.beta2 is None
    assert [warning.text for warning in train.warnings] == ["a step takes 120 ms, predicted 90 to 110"]
    assert now.jobs[0].left == 70
    assert now.jobs[0].node_hours_left == pytest.approx(2 * 70 / 3600)


@pytest.mark.parametrize(
    ("said", "flags", "attempts", "left"),
    [
        # the last row is of START + 50 and says 80 s; it is START + 650 now, or START + 70
        ("pending", {}, [{"end": START + 55, "outcome": "preempted"}], 80),
        ("pending", {}, [{"end": START + 55, "outcome": "time_limit"}], 80),
        ("pending", {}, [{"end": START + 55, "outcome": "node_failure"}], 80),
        ("pending", {}, [{}], 80),  # killed with its node: nobody has closed the attempt
        ("pending", {"on_hold": True}, [{"end": START + 55, "outcome": "disk"}], 80),
        ("running", {"suspended": True}, [{}], 80),
        ("running", {}, [{"end": START + 55, "outcome": "preempted"}], 80),  # in its next job, whose ranks start
        ("running", {}, [{"end": START + 55, "outcome": "signal"}, {"start": START + 640}], 80),
        ("unknown", {}, [{"end": START + 55, "outcome": "preempted"}], 80),
        ("unknown", {}, [{"end": START + 55, "outcome": "storage"}, {"start": START + 640}], 80),
        ("running", {}, [{}], 60),
        ("running", {}, [{"end": START + 5, "outcome": "preempted"}, {"start": START + 10}], 60),
        ("unknown", {}, [{}], 60),
    ],
)
def test_the_time_left_counts_down_only_while_steps_are_made(tmp_path, said, flags, attempts, left):
    on_slurm = RunDir.create(tmp_path, make.spec(cluster={"kind": "slurm"}))
    name = make.add_training(on_slurm, rows=make.metrics(START + 60))
    on_slurm.write_job(make.scheduler_job(name, nodes=2, scheduler="slurm"))
    for number, changes in enumerate(attempts, 1):
        on_slurm.write_attempt(make.attempt(f"{name}-1", number=number, **changes))
    now = START + (650 if left == 80 else 70)
    seen = services_status.read_run_status(on_slurm, make.FakeLauncher({name: said}, flags=flags), now=now)
    (job,) = seen.jobs
    assert (job.state in status.ACTIVE_STATES) == (job.left is not None)
    assert job.left in (None, left) and seen.training.eta == job.left
    assert (job.left is None) == bool(flags.get("on_hold")), job.state


def test_a_training_run_before_its_first_row(run):
    name = make.add_training(run)
    train = services_status.read_run_status(run, make.FakeLauncher({name: "pending"}), now=START).training
    assert (train.epoch, train.samples, train.loss, train.eta) == (0, 0, None, None)


def test_a_start_without_a_step_yet_has_no_time_left_of_the_one_before(run):
    rows = make.metrics(START)
    name = make.add_training(run, rows=[*rows, *(row for row in rows if row["kind"] == "start")])
    train = services_status.read_run_status(run, make.FakeLauncher({name: "running"}), now=START + 900).training
    assert train.eta is None
    assert "left" not in show_status.describe_training(train)


def test_a_training_run_that_tunes_itself(run):
    name = make.add_training(run, rows=make.metrics(START + 60)[:3])
    branches = (make.branch("lbt"), make.branch("x2", loss=1.0), make.branch("x4", diverged=True))
    run.write_tuning(make.tuning(branches[:2]))
    snapshot = partial(services_status.read_run_status, run, make.FakeLauncher({name: "running"}), now=START + 60)
    tuning = snapshot().training.tuning
    assert (tuning.arm, tuning.number, tuning.count, tuning.chosen) == ("x4", 3, 3, None)
    assert tuning.branches == branches[:2]
    run.write_tuning(make.tuning(branches))
    tuning = snapshot().training.tuning
    assert (tuning.arm, tuning.chosen) == (None, None)
    with open(run.get_training("ab12cd34").metrics_path, "a") as file:
        file.write(json.dumps({"kind": "branch", "time": START + 50, "samples": 1280, "epoch": 1, "eta": 30.0}) + "\n")
    assert snapshot().training.eta == 20, "a branch's row tells it too"
    run.write_tuning(make.tuning(branches, chosen="x2"))
    tuning = snapshot().training.tuning
    assert (tuning.chosen, tuning.arm) == ("x2", None)


def test_a_finished_training_run_says_at_which_batch_it_ended(run):
    make.add_training(run, rows=make.metrics())
    run.write_train_result(make.train_result())
    run.write_summary(make.summary())
    now = services_status.read_run_status(run, make.FakeLauncher(), now=START + 999)
    assert (now.training.finished, now.training.batch, now.training.eta, now.training.kwh) == (True, 64, 0, None)
    assert now.jobs[0].state == "done"


def test_the_energy_that_was_counted_so_far_is_reported(run):
    make.add_training(run, rows=make.metrics())
    run.write_energy("ab12cd34", CountedEnergy(joules=9e6, seconds=100.0))
    now = services_status.read_run_status(run, make.FakeLauncher(), now=START + 999)
    assert now.training.kwh == 2.5


def test_a_lost_training_run_has_no_time_left(run):
    make.add_training(run, rows=make.metrics())
    now = services_status.read_run_status(run, make.FakeLauncher(), now=START + 61)
    assert now.jobs[0].state == "lost"
    assert now.training.eta is None


def test_the_training_run_that_was_submitted_last_is_shown(run):
    make.add_training(run, signature="00000001", at=START)
    make.add_training(run, signature="ffffffff", at=START + 10)
    make.add_training(run, signature="aaaaaaaa", at=START + 20)
    assert services_status.read_run_status(run, make.FakeLauncher(), now=START).training.signature == "aaaaaaaa"


def test_the_story_of_a_training_names_batches_and_causes(run):
    name = make.add_training(run)
    first = run.read_task(f"{name}-1")
    relaunch = {"id": f"{name}-2", "attempt": 2, "ladder": first.ladder[1:]}
    relaunch["recovery"] = make.out_of_memory_at(128)
    run.write_task(first.model_copy(update=relaunch))
    run.write_attempt(make.attempt(f"{name}-1", end=START + 9, outcome="device_oom", samples=0))
    run.write_attempt(make.attempt(f"{name}-2", start=START + 10, samples=640, allocation="7.0", hosts="n[1-2]"))
    run.write_attempt(make.attempt(f"{name}-2", number=2, start=START + 20, samples=1280))
    story = services_status.read_run_status(run, make.FakeLauncher({name: "running"}), now=START + 60).attempts
    assert [(row.job, row.batch, row.cause) for row in story] == [
        (name, 128, ""),
        (name, 64, "out of memory at batch 128"),
        (name, 64, ""),
    ]
    assert [row.attempt.samples for row in story] == [0, 640, 1280]


# --- waiting


class Clock:
    """Time that passes by sleeping; `events` happen when it is reached."""

    def __init__(self, events=()):
        self.now, self.events, self.pauses = START + 1000, sorted(events, key=lambda event: event[0]), []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0
        self.pauses.append(seconds)
        self.now += seconds
        while self.events and self.events[0][0] <= self.now - (START + 1000):
            self.events.pop(0)[1]()


def watched(run, launcher, jobs, clock, **options):
    result = waiting.watch_jobs(run, launcher, jobs, clock=clock, sleep=clock.sleep, **options)
    return list(itertools.islice(result, 1000))


def test_waits_until_the_results_are_complete(run):
    name = make.add_probes(run, 1, (32, 64))
    clock = Clock([(3, lambda: make.add_measured(run, 1, 32)), (9, lambda: make.add_measured(run, 1, 64))])
    seen = watched(run, make.FakeLauncher({name: "running"}), [name], clock)
    assert [status_.jobs[0].done for status_ in seen] == sorted(status_.jobs[0].done for status_ in seen)
    assert seen[-1].jobs[0].state == "done"
    assert clock.now - START - 1000 < 12


def test_waiting_for_jobs_that_never_start_ends_with_their_reasons(run):
    jobs = [make.add_probes(run, nodes, (32,)) for nodes in (1, 2)]
    reason, clock = "QOSMaxGRESPerJob: will not start, because the QOS does not allow this many GPUs", Clock()
    launcher = make.FakeLauncher(dict.fromkeys(jobs, "pending"), reason, flags={"hopeless": True})
    with pytest.raises(SchedulerError, match=r"probe-n002 will not start: QOSMaxGRESPerJob: will not start"):
        watched(run, launcher, jobs, clock)
    assert clock.now < START + 1000 + 60, "at the second poll"


def test_waiting_goes_on_while_one_job_may_still_end(run):
    never, other = (make.add_probes(run, nodes, (32,)) for nodes in (1, 2))
    launcher = make.FakeLauncher({never: "pending", other: "running"}, flags={"hopeless": True})
    seen = watched(run, launcher, [never, other], Clock(), timeout=300)
    assert len(seen) > 3


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_a_round_of_waiting_reads_what_a_look_reads(run, scheduler, monkeypatch):
    """Not 30 times that on SLURM, where a round takes a minute and looks every two seconds."""
    opened = []
    whole = files.read_content
    monkeypatch.setattr(files, "read_content", lambda path: opened.append(path) or whole(path))
    for nodes in range(1, 9):
        name = make.add_probes(run, nodes, (32, 64))
        run.write_job(make.scheduler_job(name, scheduler=scheduler))
        make.add_measured(run, nodes, 32)
    make.add_training(run)
    launcher, jobs = (
        make.FakeLauncher({job.id: "running" for job in run.read_jobs()}),
        [job.id for job in run.read_jobs()],
    )
    opened.clear()
    services_status.read_run_status(run, launcher, now=START)
    look, clock = len(opened), Clock()
    opened.clear()
    rounds = len(watched(run, launcher, jobs, clock, timeout=600))
    assert look > 20 and rounds > 10
    assert len(opened) <= 1.2 * look * rounds


def test_a_result_is_noticed_within_a_round(run):
    name = make.add_probes(run, 1, (32,))
    run.write_job(make.scheduler_job(name, scheduler="slurm"))
    clock = Clock([(130, lambda: make.add_measured(run, 1, 32))])
    seen = watched(run, make.FakeLauncher({name: "running"}), [name], clock)
    assert seen[-1].jobs[0].state == "done"
    assert clock.now - START - 1000 <= 130 + waiting.FILE_POLL_SECONDS, "and not at its end, up to a minute later"


def test_looks_seldom_and_then_more_seldom(run):
    name = make.add_probes(run, 1, (32,))
    clock = Clock([(20, lambda: make.add_measured(run, 1, 32))])
    watched(run, make.FakeLauncher({name: "running"}), [name], clock)
    assert clock.pauses[0] == 0.5
    assert clock.pauses == sorted(clock.pauses)
    assert clock.pauses[-1] == 2.0


def test_asks_a_slurm_scheduler_politely(run):
    name = make.add_probes(run, 1, (32,))
    run.write_job(make.scheduler_job(name, scheduler="slurm"))
    launcher, clock = make.FakeLauncher({name: "pending"}), Clock()
    watched(run, launcher, [name], clock, timeout=600)
    assert launcher.asked <= 16


def test_ends_at_the_timeout_though_the_job_goes_on(run):
    name = make.add_probes(run, 1, (32,))
    clock = Clock()
    seen = watched(run, make.FakeLauncher({name: "running"}), [name], clock, timeout=7)
    assert seen[-1].has_active_jobs([name])
    assert clock.now - START - 1000 == pytest.approx(7)


def test_a_timeout_of_zero_looks_once(run):
    name = make.add_probes(run, 1, (32,))
    assert len(watched(run, make.FakeLauncher({name: "running"}), [name], Clock(), timeout=0)) == 1


def test_files_of_an_ended_job_may_come_late(run):
    name = make.add_probes(run, 1, (32,))
    clock = Clock([(1.5, lambda: make.add_measured(run, 1, 32))])
    seen = watched(run, make.FakeLauncher({name: "ended"}), [name], clock)
    assert seen[0].jobs[0].state == "lost"
    assert seen[-1].jobs[0].state == "done"


@pytest.mark.parametrize(("scheduler", "grace"), [("local", 2), ("slurm", 60)])
def test_a_lost_job_is_given_up_after_the_grace_period(run, scheduler, grace):
    name = make.add_probes(run, 1, (32,))
    run.write_job(make.scheduler_job(name, scheduler=scheduler))
    clock = Clock()
    seen = watched(run, make.FakeLauncher({name: "ended"}), [name], clock)
    assert seen[-1].jobs[0].state == "lost"
    assert grace <= clock.now - START - 1000 <= 2 * grace


@pytest.mark.parametrize("outcome", ["done", "device_oom"])
def test_results_may_come_later_than_the_end_of_the_attempt_that_wrote_them(run, outcome):
    name = make.add_probes(run, 1, (32,))
    run.write_job(make.scheduler_job(name, scheduler="slurm"))
    run.write_attempt(make.attempt(name, end=START + 1, outcome=outcome))
    clock = Clock([(25, lambda: make.add_measured(run, 1, 32))])
    seen = watched(run, make.FakeLauncher({name: "ended"}), [name], clock)
    assert (seen[0].jobs[0].state, seen[-1].jobs[0].state) == ("lost", "done")
    assert "0 of 1 results are visible" in seen[0].jobs[0].reason


def test_a_failed_job_needs_no_grace(run):
    name = make.add_probes(run, 1, (32,))
    run.write_attempt(make.attempt(name, end=START + 1, outcome="user", message="no"))
    clock = Clock()
    assert len(watched(run, make.FakeLauncher({name: "ended"}), [name], clock)) == 1
    assert clock.pauses == []


def test_other_jobs_are_not_waited_for(run):
    first, second = make.add_probes(run, 1, (32,)), make.add_probes(run, 2, (16,))
    make.add_measured(run, 1, 32)
    seen = watched(run, make.FakeLauncher({first: "ended", second: "running"}), [first], Clock())
    assert len(seen) == 1
    assert [job.id for job in seen[0].jobs] == [first], "nor told of"
    assert not seen[0].has_active_jobs()


def test_who_waits_for_one_of_two_trainings_is_reported_of_that_one(run):
    value, other = (make.add_training(run, signature=signature) for signature in ("00000001", "00000002"))
    launcher = make.FakeLauncher({value: "running", other: "running"})
    for job in (value, other):
        (seen,) = watched(run, launcher, [job], Clock(), timeout=0)
        assert seen.training is not None
        assert (seen.training.job, [result.id for result in seen.jobs]) == (job, [job])


# --- all runs


def test_runs_are_listed_in_the_order_of_the_time_that_is_shown(tmp_path):
    """The job of the one was written last, the other has measured last."""
    for name, at in (("old", START), ("new", START + 50), ("nothing", None), ("newest", START + 100)):
        value = RunDir.create(tmp_path, make.spec(name=name))
        if at is not None:
            value.write_recommendation(make.recommendation(created_at=at))
    (RunDir.create(tmp_path, make.spec(name="old"))).save_job(make.spec(name="old"))
    runs = run_list.list_runs(tmp_path)
    assert [row.id.partition("-")[0] for row in runs] == ["newest", "new", "old", "nothing"]
    assert [row.changed for row in runs] == [START + 100, START + 50, START, None]


def test_lists_runs_also_damaged_ones(tmp_path):
    first = RunDir.create(tmp_path, make.spec(name="first"))
    make.add_measured(first, 1, 32)
    make.add_out_of_memory(first, 1, 64)
    first.write_recommendation(make.recommendation())
    make.add_training(first)
    first.write_train_result(make.train_result())
    second = RunDir.create(tmp_path, make.spec(name="second"))
    (second.path / "spec.yaml").write_text("model: [")
    by_id = {row.id: row for row in run_list.list_runs(tmp_path)}
    row = by_id[first.id]
    assert (row.model, row.dataset, row.measured, row.out_of_memory, row.failed) == ("resnet18", "digits", 1, 1, 0)
    assert (row.trained, row.best_top1, row.changed, row.problem) == (1, 83.0, START + 300, "")
    assert "not valid YAML" in by_id[second.id].problem


def test_runs_without_classes_are_listed_by_their_loss_and_language_models_by_perplexity(tmp_path):
    for name, metrics in (
        ("words", {"eval_loss": 1.0, "perplexity": math.e}),
        ("numbers", {"eval_loss": 1.0}),
        ("old", {"eval_loss": 1.0}),
    ):
        run = RunDir.create(tmp_path, make.spec(name=name))
        known = {"best_top1": 0.0} if name == "old" else {"best_top1": None, "best_loss": 0.5}
        run.write_train_result(make.train_result().model_copy(update={"metrics": metrics, **known}))
    by_name = {row.id.partition("-")[0]: row for row in run_list.list_runs(tmp_path)}
    assert [by_name[name].best_top1 for name in ("words", "numbers", "old")] == [None, None, None]
    assert show_status._describe_best_result(by_name["words"]) == f"perplexity {math.exp(0.5):.3f}"
    assert (
        show_status._describe_best_result(by_name["numbers"]),
        show_status._describe_best_result(by_name["old"]),
    ) == (
        "loss 0.5000",
        "-",
    )


@pytest.mark.parametrize("edited", [False, True])
def test_a_run_of_a_script_is_listed_by_its_file(tmp_path, edited):
    run = RunDir.create(tmp_path, make.script_spec(epochs=3))
    if edited:
        (run.path / "spec.yaml").write_text((run.path / "spec.yaml").read_text() + "# edited\n")
    (row,) = run_list.list_runs(tmp_path)
    assert (row.script, row.model, row.dataset, row.problem) == ("finetune.py", "", "", "")


def test_a_damaged_record_of_a_run_is_named_in_the_list_and_the_others_count(tmp_path):
    run = RunDir.create(tmp_path, make.spec())
    for local in (32, 64):
        make.add_measured(run, 1, local)
    make.add_training(run, rows=make.metrics())
    run.write_train_result(make.train_result())
    (run.path / "results" / "probe-n001-l000032.json").write_text("{")
    (run.path / "recommendation.json").write_text("[]")
    (row,) = run_list.list_runs(tmp_path)
    assert (row.model, row.measured, row.trained, row.recommendation, row.problem) == ("resnet18", 1, 1, None, "")
    assert [words.partition(" is damaged")[0].rpartition("/")[2] for words in row.damaged] == [
        "recommendation.json",
        "probe-n001-l000032.json",
    ]


def test_a_finished_training_shows_the_step_time_that_its_summary_has(tmp_path):
    run = RunDir.create(tmp_path, make.spec())
    make.add_training(run, rows=make.metrics())
    run.write_train_result(make.train_result())
    fake_launcher = make.FakeLauncher()
    last = services_status.read_run_status(run, fake_launcher, now=START).training.step_time
    run.write_summary(make.summary())
    assert (
        services_status.read_run_status(run, fake_launcher, now=START).training.step_time
        == make.summary().actual_step
        != last
    )


def test_no_runs(tmp_path):
    assert run_list.list_runs(tmp_path / "nothing") == ()


@pytest.fixture
def shared():
    """A folder for runs into which other users see; root is one of them for the test."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextlib.contextmanager
def as_another_user():
    me = os.geteuid()
    if me == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(me)


def test_runs_of_another_user_are_left_out_of_a_list(shared):
    value, other = (RunDir.create(shared, make.spec(name=name)) for name in ("own", "other"))
    value.path.chmod(0o755)
    other.path.chmod(0)
    with as_another_user():
        assert (
            [row.id for row in run_list.list_runs(shared)] == [run.id for run in RunDir.list_all(shared)] == [value.id]
        )
        assert RunDir.find_newest(shared).id == value.id  # the other was used last
        assert not other.exists


def test_a_line_says_what_of_its_run_cannot_be_read(shared):
    run = RunDir.create(shared, make.spec())
    make.add_measured(run, 1, 32)
    for path in (run.path, *run.path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (run.path / "results").chmod(0)
    with as_another_user():
        (row,) = run_list.list_runs(shared)
    assert row.problem == f"{run.path / 'results'} belongs to root: you may not read it"


# --- ending


def test_cancels_what_is_queued_or_running_and_nothing_else(run):
    done, queued, running = (make.add_probes(run, nodes, (32,)) for nodes in (1, 2, 4))
    launcher = make.FakeLauncher({done: "ended", queued: "pending", running: "running"})
    assert cancel.cancel_jobs(open_runs_of_job(run), lambda _: launcher) == [queued, running]
    assert launcher.cancelled == [queued, running]
    assert not run.is_cancelled(done)
    assert cancel.cancel_jobs(open_runs_of_job(run), lambda _: launcher) == []


class Refusing(make.FakeLauncher):
    """Does not cancel some jobs, and answers for none where `silent`."""

    refused: tuple[str, ...] = ()
    silent = False

    def query_states(self, snapshot, jobs):
        if self.silent:
            raise SchedulerError("squeue does not answer")
        return super().query_states(snapshot, jobs)

    def cancel(self, run, job):
        if job.id in self.refused:
            raise SchedulerError(f"scancel: {job.id}: Unable to contact slurm controller", "run tula cancel again")
        super().cancel(run, job)


@pytest.fixture
def two_types(tmp_path):
    types = {name: {"pricing": {"price": price}} for name, price in (("a100", 1.0), ("h100", 2.0))}
    parts = make.create_runs(tmp_path, make.spec(node_types=types))
    for part in parts:
        for nodes in (1, 2):
            make.add_probes(part, nodes, (32,))
    return parts


JOBS_OF_TYPES = ["a100/probe-n001", "a100/probe-n002", "h100/probe-n001", "h100/probe-n002"]


@pytest.mark.parametrize(
    ("refused", "silent", "not_cancelled"),
    [
        ({"a100": ("probe-n001",)}, (), JOBS_OF_TYPES[:1]),
        ({"a100": ("probe-n002",)}, (), JOBS_OF_TYPES[1:2]),
        ({"h100": ("probe-n001",)}, (), JOBS_OF_TYPES[2:3]),
        ({"h100": ("probe-n002",)}, (), JOBS_OF_TYPES[3:]),
        ({"a100": ("probe-n001", "probe-n002")}, (), JOBS_OF_TYPES[:2]),
        ({"a100": ("probe-n001",), "h100": ("probe-n002",)}, (), [JOBS_OF_TYPES[0], JOBS_OF_TYPES[3]]),
        ({}, ("a100",), JOBS_OF_TYPES[:2]),
        ({}, ("h100",), JOBS_OF_TYPES[2:]),
        ({"h100": ("probe-n001",)}, ("a100",), JOBS_OF_TYPES[:3]),
        ({"a100": ("probe-n001", "probe-n002"), "h100": ("probe-n001", "probe-n002")}, (), JOBS_OF_TYPES),
    ],
)
def test_what_one_scheduler_does_not_cancel_keeps_none_of_the_others(two_types, refused, silent, not_cancelled):
    launchers = {}
    for part in two_types:
        launchers[part.type] = Refusing(dict.fromkeys(("probe-n001", "probe-n002"), "running"))
        launchers[part.type].refused, launchers[part.type].silent = refused.get(part.type, ()), part.type in silent
    with pytest.raises(SchedulerError) as caught:
        cancel.cancel_jobs(two_types, lambda part: launchers[part.type])
    ended = [f"{name}/{job}" for name, launcher in launchers.items() for job in launcher.cancelled]
    assert ended == [job for job in JOBS_OF_TYPES if job not in not_cancelled]
    for job in not_cancelled:
        name, _, id_ = job.partition("/")
        assert (
            f"all jobs of {name} (squeue does not answer)" if name in silent else f"{job} (scancel: {id_}"
        ) in caught.value.message
    assert caught.value.hint.startswith(f"cancelled: {', '.join(ended) or 'none'}; ") and caught.value.exit_code == 5


def test_a_type_whose_scheduler_is_not_there_keeps_none_of_the_others(two_types):
    launcher = Refusing(dict.fromkeys(("probe-n001", "probe-n002"), "running"))

    def launcher_for(part):
        if part.type == "a100":
            raise SpecError("my.queue cannot be imported")
        return launcher

    with pytest.raises(SchedulerError, match=r"all jobs of a100 \(my.queue cannot be imported\)"):
        cancel.cancel_jobs(two_types, launcher_for)
    assert launcher.cancelled == ["probe-n001", "probe-n002"]


def test_one_job_that_is_not_cancelled_is_reported_as_it_is(run):
    name = make.add_probes(run, 1, (32,))
    launcher = Refusing({name: "running"})
    launcher.refused = (name,)
    with pytest.raises(SchedulerError, match=r"^scancel: probe-n001: Unable"):
        cancel.cancel_jobs(open_runs_of_job(run), lambda _: launcher)


def test_cancels_a_job_the_scheduler_does_not_know(run):
    name = make.add_probes(run, 1, (32,))
    assert cancel.cancel_jobs(open_runs_of_job(run), lambda _: make.FakeLauncher({name: "unknown"})) == [name]
    assert run.is_cancelled(name)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("jobs/probe-n001.json", "submitted_at", [1.0]),
        ("results/probe-n001-l000032.json", "kind", 5),
        ("results/probe-n001-l000032.json", "measured_at", "now"),
        ("recommendation.json", "choice", "large"),
    ],
)
def test_a_record_with_a_value_of_another_type_is_named_in_the_list(tmp_path, name, key, value):
    run = RunDir.create(tmp_path, make.spec())
    make.add_probes(run, 1, (32,))
    make.add_measured(run, 1, 32)
    run.write_recommendation(make.recommendation())
    path = run.path / name
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    (row,) = run_list.list_runs(tmp_path)
    (problem,) = row.damaged
    assert problem == f"{path} is damaged: {key} is no valid value" and row.changed is not None


def test_names_of_a_run_are_read_from_the_yaml_if_the_parsed_job_is_damaged(tmp_path):
    run = RunDir.create(tmp_path, make.spec())
    path = run.path / "spec.json"
    content = json.loads(path.read_text())
    del content["spec"]["model"]["name"]
    path.write_text(json.dumps(content))
    (row,) = run_list.list_runs(tmp_path)
    assert (row.model, row.problem) == ("resnet18", "")


def test_trainings_of_a_comparison_are_named_and_that_of_the_job_is_shown(run):
    make.add_training(run, at=START)
    make.add_training(run, signature="c0c0c0c0", at=START + 10)
    cell = Cell(method="ags", batch=512, seed=1, nodes=1, signature="c0c0c0c0")
    run.write_comparison(
        Comparison(methods=("ags",), batches=(512,), seeds=1, nodes=1, controls=False, cells=(cell,), created_at=START)
    )
    now = status.read_run_status(run, make.FakeLauncher(), now=START + 100)
    assert [job.compared for job in now.jobs] == ["", "ags, batch 512, seed 1"]
    assert now.training.signature == "ab12cd34"
    assert "ags, batch 512, seed 1" in shown(show_status.make_jobs_table(now.jobs))
