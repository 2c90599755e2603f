"""Answers of SLURM, by calling its commands: those of a fake, in the words of four versions."""

import json
import time
from pathlib import Path

import pytest
from fake_slurm import VERSIONS, FakeSlurm, format_time

from tula_cli.cluster.chains import derive_chain_state
from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.cluster.slurm import command as slurm_command
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.cluster.slurm.queue import find_end_time, find_job_outcome, list_live_jobs, query_states
from tula_cli.cluster.slurm.scheduler import SlurmScheduler, make_refusal_error
from tula_cli.errors import SchedulerError
from tula_cli.run.records.jobs import Job

RECORDED = Path(__file__).parents[2] / "fixtures/slurm_22_05.json"


@pytest.fixture(params=VERSIONS)
def versions(request, tmp_path, monkeypatch):
    return installed(tmp_path / "slurm", monkeypatch, request.param)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return installed(tmp_path / "slurm", monkeypatch, "22.05")


def installed(folder, monkeypatch, version):
    fake = FakeSlurm(folder, version)
    fake.use(monkeypatch)
    monkeypatch.setattr(scheduler, "_recent_states", {})
    return fake


# --- a real one's answers


@pytest.fixture
def recorded(slurm, monkeypatch):
    """The jobs of a real cluster by what became of them, and its answers to the same questions."""
    slurm.fault(recorded=str(RECORDED))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield json.loads(RECORDED.read_text())["jobs"]
    monkeypatch.undo()
    time.tzset()


def test_how_jobs_of_a_real_cluster_stand(recorded):
    states = query_states(list(recorded.values()))
    results = {what: states[id_] for what, id_ in recorded.items() if id_ in states}
    assert {what: state.state for what, state in results.items()} == {
        "done": "ended", "failed": "ended", "oom": "ended", "timeout": "ended", "unshared": "ended", "cancelled": "ended",
        "requeued": "ended", "preempted": "ended", "running": "running", "waiting": "pending", "link": "pending",
        "closed": "pending", "never": "pending", "node_fail": "running",
    }  # fmt: skip
    assert (results["waiting"].reason, results["link"].reason) == ("Resources", "Dependency")
    assert results["waiting"].starts_at == find_end_time(recorded["running"], {}) == 1_795_262_039
    assert "will not start" in results["closed"].reason
    assert "could not be started on the node" in results["unshared"].reason
    assert query_states([recorded["unknown"]]) == {}


def test_how_allocations_of_a_real_cluster_ended(recorded):
    names = (
        "done",
        "failed",
        "unshared",
        "oom",
        "timeout",
        "cancelled",
        "preempted",
        "node_fail",
        "waiting",
        "unknown",
    )
    assert [find_job_outcome(recorded[name]) for name in names] == [
        None, None, None, "host_oom", "time_limit", "cancelled", "preempted", "node_failure", None, None,
    ]  # fmt: skip
    assert find_job_outcome(recorded["requeued"], restart=0) == "preempted"


def test_accounting_of_a_real_cluster_tells_the_same(recorded):
    names = ("done", "failed", "oom", "timeout", "cancelled", "preempted", "node_fail")
    assert [scheduler._derive_job_outcome(scheduler._list_sacct_rows(recorded[name], None)) for name in names] == [
        None, None, "host_oom", "time_limit", "cancelled", "preempted", "node_failure",
    ]  # fmt: skip


# --- how jobs stand


def test_one_question_tells_how_all_jobs_stand(versions):
    running, waiting = versions.add("a", "RUNNING"), versions.add("b", "PENDING", "Resources", starts=format_time(2e9))
    done, failed = versions.add("c", "COMPLETED"), versions.add("d", "FAILED", "NonZeroExitCode")
    states = query_states([running, waiting, done, failed])
    assert states[running] == SchedulerState("running")
    assert states[waiting] == SchedulerState("pending", "Resources", 2e9)
    assert states[done] == SchedulerState("ended")
    assert (states[failed].state, states[failed].reason) == (
        "ended",
        "FAILED: the script of the job ended with an error",
    )
    assert len(versions.calls("squeue")) == 1
    assert not versions.calls("sacct")


def test_sacct_tells_of_jobs_that_squeue_has_forgotten(versions):
    running, over = versions.add("a", "RUNNING"), versions.add("b", "TIMEOUT", forgotten=True)
    states = query_states([running, over])
    assert states[running].state == "running"
    assert states[over] == SchedulerState("ended", "TIMEOUT: the time limit of the job was reached")


def test_a_single_job_that_squeue_calls_invalid_is_asked_of_sacct(versions):
    over = versions.add("b", "CANCELLED by 1000", forgotten=True)
    assert query_states([over])[over].reason.startswith("CANCELLED by 1000: ")


def test_a_squeue_that_fails_for_one_unknown_job_is_asked_for_all_of_ours(slurm):
    running, over = slurm.add("a", "RUNNING"), slurm.add("b", "COMPLETED", forgotten=True)
    foreign = slurm.add("c", "RUNNING", user=4711)
    slurm.fault(squeue="refuses unknown")
    states = query_states([running, over])
    assert (states[running].state, states[over].state) == ("running", "ended")
    assert foreign not in states


def test_a_job_that_nobody_knows_is_not_in_the_answer(versions):
    assert query_states(["4711"]) == {}
    assert query_states([]) == {}


@pytest.mark.parametrize("sacct", ["disabled", "unreachable", "knows nothing"])
def test_without_sacct_squeue_has_to_do(slurm, sacct):
    done, forgotten = slurm.add("a", "COMPLETED"), slurm.add("b", "COMPLETED", forgotten=True)
    slurm.fault(sacct=sacct)
    assert query_states([done, forgotten]) == {done: SchedulerState("ended")}


def test_squeue_outweighs_an_sacct_that_calls_a_requeued_job_over(slurm):
    again = slurm.add("a", "RUNNING", restarts=1, accounted="NODE_FAIL")
    assert query_states([again])[again].state == "running"


def test_an_sacct_that_lags_does_not_bring_a_job_back_to_life(slurm):
    over = slurm.add("a", "COMPLETED", forgotten=True, accounted="RUNNING")
    assert query_states([over])[over] == SchedulerState(
        "unknown", "sacct reports RUNNING, and squeue no longer lists the job"
    )


@pytest.mark.parametrize("squeue", ["unreachable", "timeout"])
def test_a_silent_controller_says_nothing_about_jobs(slurm, squeue):
    running, over = slurm.add("a", "RUNNING", accounted="RUNNING"), slurm.add("b", "COMPLETED")
    slurm.fault(squeue=squeue)
    states = query_states([running, over, "4711"])
    assert (states[running].state, states["4711"].state) == ("unknown", "unknown")
    assert "squeue does not answer: slurm_load_jobs error" in states[running].reason
    assert states[over].state == "ended", "sacct knows the end"


def test_a_command_that_hangs_is_given_up(slurm, monkeypatch):
    job = slurm.add("a", "RUNNING")
    slurm.fault(squeue="hang", sacct="hang", scontrol="hang")
    monkeypatch.setattr(slurm_command, "COMMAND_TIMEOUT", 0.2)
    assert "took more than 0.2 s" in query_states([job])[job].reason
    assert find_job_outcome(job) is None
    assert find_end_time(job, {}) is None


def test_missing_commands_are_no_error(slurm):
    job = slurm.add("a", "RUNNING")
    for command in ("squeue", "sacct", "scontrol", "scancel"):
        slurm.without(command)
    assert query_states([job])[job].state == "unknown"
    assert (find_job_outcome(job), find_end_time(job, {})) == (None, None)
    assert scheduler.cancel_jobs([job]) == "scancel: No such file or directory"


def test_garbage_is_no_error(slurm):
    job = slurm.add("a", "RUNNING")
    slurm.fault(squeue="garbage", scontrol="garbage")
    assert query_states([job])[job].state == "unknown"
    assert (find_job_outcome(job), find_end_time(job, {})) == (None, None)


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("COMPLETING", "running"),
        ("SUSPENDED", "running"),
        ("CONFIGURING", "pending"),
        ("POWER_UP_NODE", "pending"),
        ("REQUEUE_HOLD", "pending"),
        ("CANCELLED+", "ended"),
        ("OUT_OF_ME+", "ended"),
        ("CANCELLED by 0", "ended"),
        ("EXPEDITING", "unknown"),
        ("", "unknown"),
        ("+", "unknown"),
    ],
)
def test_states_by_their_first_word_and_an_unknown_one_is_not_over(slurm, words, state):
    job = slurm.add("a", words)
    assert query_states([job])[job].state == state


def test_a_reason_that_waiting_does_not_cure_is_reported(versions):
    job = versions.add("a", "PENDING", "PartitionDown")
    assert query_states([job])[job].reason == "PartitionDown: will not start, because the partition is down"


@pytest.mark.promise(
    "the scheduler",
    "the next job of the chain is held, or its nodes are down or drained",
    "`tula status` shows the reason and what to do, even while another job of the chain runs",
)
@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobHeldUser", "JobHeldUser: will not start, because you hold the job; release it with scontrol release {id}"),
        ("JobHeldAdmin", "an administrator holds the job: ask them to release it (scontrol release {id})"),
        (
            "ReqNodeNotAvail, UnavailableNodes:node[1-2]",
            "the job starts when these nodes return (sinfo --list-reasons shows why",
        ),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "when these nodes return",
        ),
        ("ReqNodeNotAvail, Reserved for maintenance", "ReqNodeNotAvail, Reserved for maintenance"),
    ],
)
def test_what_keeps_a_job_is_reported_with_what_to_do_also_while_the_link_before_it_runs(versions, reason, words):
    first, second, third = (
        versions.add("a", "RUNNING"),
        versions.add("b", "PENDING", reason),
        versions.add("c", "PENDING", "Dependency"),
    )
    message = query_states([first, second])[second].reason
    assert message.startswith(reason) and words.format(id=second) in message
    job = Job(id="j", scheduler="slurm", scheduler_id=first, nodes=1, submitted_at=0, links=(first, second, third))
    now = derive_chain_state(job, query_states(job.links), forgotten="")
    assert now.state == "running"
    kept = "Reserved" not in reason  # which ends by itself
    assert now.reason == (f"the next job {second}: {message}" if kept else "")


@pytest.mark.parametrize("word", ["SUSPENDED", "STOPPED"])
def test_a_job_that_stands_still_says_so_and_how_it_goes_on(versions, word):
    job = versions.add("a", word)
    state = query_states([job])[job]
    assert (state.state, state.suspended) == ("running", True)
    assert state.suspended and f"scontrol resume {job}" in state.reason
    assert "\n" not in state.reason


def test_a_job_that_could_not_start_on_its_node_says_so(slurm):
    job = slurm.add("a", "FAILED", "JobLaunchFailure")
    assert "could not be started on the node" in query_states([job])[job].reason


def test_sacct_is_asked_once_a_minute_about_a_job(slurm, monkeypatch):
    first, second = slurm.add("a", "RUNNING", forgotten=True), slurm.add("b", "RUNNING", forgotten=True)
    now = [1000.0]
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: now[0])
    for _ in range(5):
        query_states([first])
    assert len(slurm.calls("sacct")) == 1
    query_states([first, second])
    assert [call.arguments[2] for call in slurm.calls("sacct")] == [f"--jobs={first}", f"--jobs={second}"]
    now[0] += 61
    slurm.set(first, "COMPLETED", forgotten=True)
    assert query_states([first, second])[first].state == "ended"
    assert len(slurm.calls("sacct")) == 3
    now[0] += 3600
    assert query_states([first])[first].state == "ended"
    assert len(slurm.calls("sacct")) == 3, "an end is final"


def test_a_users_own_formats_and_an_allocations_variables_are_kept_out(slurm, monkeypatch):
    job = slurm.add("a", "RUNNING")
    for name in ("SQUEUE_FORMAT", "SACCT_FORMAT", "SLURM_TIME_FORMAT", "SLURM_JOB_ID", "SUBMITIT_EXECUTOR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/other.conf")
    query_states([job, "4711"])
    called = [*slurm.calls("squeue"), *slurm.calls("sacct")]
    assert [call.environ for call in called] == [{"SLURM_CONF": "/etc/slurm/other.conf"}] * 2


# --- how one allocation ends


def test_the_environment_tells_when_an_allocation_ends(slurm):
    assert find_end_time("1", {"SLURM_JOB_END_TIME": "1700000000"}) == 1_700_000_000
    assert find_end_time("1", {"SLURM_JOB_END_TIME": "4294967294"}) is None, "unlimited"
    assert not slurm.calls("squeue")


def test_squeue_tells_when_an_allocation_ends_where_the_environment_does_not(versions):
    end = int(time.time()) + 3600
    job, unlimited = versions.add("a", "RUNNING", ends=format_time(end)), versions.add("b", "RUNNING", ends="N/A")
    assert find_end_time(job, {}) == end
    assert find_end_time(job, {"SLURM_JOB_END_TIME": "soon"}) == end
    assert find_end_time(unlimited, {}) is None
    assert find_end_time("4711", {}) is None


ENDINGS = [
    ("TIMEOUT", "TimeLimit", "time_limit"),
    ("DEADLINE", "DeadLine", "time_limit"),
    ("PREEMPTED", "None", "preempted"),
    ("NODE_FAIL", "NodeDown", "node_failure"),
    ("BOOT_FAIL", "None", "node_failure"),
    ("CANCELLED", "None", "cancelled"),
    ("OUT_OF_MEMORY", "OutOfMemory", "host_oom"),
    ("COMPLETED", "None", None),
    ("FAILED", "NonZeroExitCode", None),
    ("RUNNING", "None", None),
    ("PENDING", "BeginTime", None),
    ("EXPEDITING", "None", None),
]


@pytest.mark.parametrize(("state", "reason", "outcome"), ENDINGS)
def test_the_controller_tells_what_took_an_allocation_away(versions, state, reason, outcome):
    assert find_job_outcome(versions.add("a", state, reason)) == outcome


@pytest.mark.parametrize(("state", "reason", "outcome"), ENDINGS)
def test_sacct_tells_what_took_a_forgotten_allocation_away(slurm, state, reason, outcome):
    words = "CANCELLED by 1000" if state == "CANCELLED" else state
    assert find_job_outcome(slurm.add("a", words, forgotten=True)) == outcome


def test_a_killed_step_shows_that_memory_was_the_reason(versions):
    steps = [["batch", "FAILED"], ["0", "OUT_OF_MEMORY"]]
    job = versions.add("a", "FAILED", "NonZeroExitCode", steps=steps, derived="0:125")
    assert find_job_outcome(job) == "host_oom"
    assert not versions.calls("sacct"), "the controller knows"
    by_steps = versions.add("a", "FAILED", forgotten=True, steps=steps)
    by_code = versions.add("a", "FAILED", forgotten=True, derived="0:125")
    assert [find_job_outcome(by_steps), find_job_outcome(by_code)] == ["host_oom", "host_oom"]


def test_the_exit_code_tells_that_a_supervisor_could_write_nothing(versions):
    known = versions.add("a", "FAILED", "NonZeroExitCode", derived="14:0")
    forgotten = versions.add("b", "FAILED", forgotten=True, derived="14:0")
    assert [find_job_outcome(known), find_job_outcome(forgotten)] == ["storage", "storage"]


def test_a_job_that_cleans_up_has_ended_and_one_that_runs_has_not(versions):
    ended, running = (versions.add("a", state, derived="0:125") for state in ("COMPLETING", "RUNNING"))
    assert (find_job_outcome(ended), find_job_outcome(running)) == ("host_oom", None)


def test_memory_is_no_reason_where_the_time_was_up(slurm):
    job = slurm.add("a", "TIMEOUT", forgotten=True, steps=[["0", "OUT_OF_MEMORY"]])
    assert find_job_outcome(job) == "time_limit"


def test_a_requeued_job_lives_and_what_ended_its_earlier_run_is_known(versions):
    earlier = [{"state": "NODE_FAIL", "derived": "0:0", "steps": [["batch", "CANCELLED"]]}]
    job = versions.add("a", "RUNNING", restarts=1, earlier=earlier, derived="0:125")
    assert find_job_outcome(job) is None
    assert find_job_outcome(job, restart=1) is None
    assert find_job_outcome(job, restart=0) == "node_failure"


def test_a_requeued_job_was_taken_away_even_where_nothing_tells_why(slurm):
    job = slurm.add("a", "RUNNING", restarts=2)
    slurm.fault(sacct="disabled")
    assert find_job_outcome(job, restart=1) == "preempted"


def test_the_exit_code_of_an_earlier_run_is_not_the_last_ones(slurm):
    earlier = [{"state": "NODE_FAIL", "derived": "0:125", "steps": []}]
    job = slurm.add("a", "FAILED", restarts=1, earlier=earlier, derived="0:125", accounted="COMPLETED")
    assert find_job_outcome(job) is None


def test_an_unknown_job_did_not_end_in_any_known_way(slurm):
    assert find_job_outcome("4711") is None
    slurm.fault(sacct="disabled", scontrol="unreachable")
    assert find_job_outcome("4711") is None


# --- finding and ending jobs


def test_jobs_are_found_by_their_exact_name_and_owner(versions):
    ours = versions.add("tula-a", "RUNNING")
    versions.add("tula-a.2", "PENDING")
    versions.add("tula-a", "RUNNING", user=4711)
    versions.add("tula-a", "COMPLETED")
    versions.add("tula-a", "COMPLETING")
    odd = versions.add("tula-a", "EXPEDITING")
    assert [job.id for job in list_live_jobs(["tula-a"])] == [ours, odd]
    assert [job.name for job in list_live_jobs(["tula-a", "tula-a.2"])] == ["tula-a", "tula-a.2", "tula-a"]


def test_a_silent_squeue_is_no_empty_queue(slurm):
    slurm.fault(squeue="unreachable")
    with pytest.raises(SchedulerError, match=r"squeue does not answer: .*Unable to contact"):
        list_live_jobs(["tula-a"])


def test_cancels_these_ids_and_nothing_else(slurm):
    first, second, third = (slurm.add("same", "RUNNING") for _ in range(3))
    scheduler.cancel_jobs([first, third, "same", "--user=root", ""])
    assert [job["state"] for job in slurm.jobs()] == ["CANCELLED", "RUNNING", "CANCELLED"]
    assert slurm.calls("scancel")[0].arguments == [first, third]
    scheduler.cancel_jobs([])
    assert len(slurm.calls("scancel")) == 1
    assert slurm.jobs()[1]["id"] == int(second)


# --- refusals


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            "sbatch: error: invalid partition specified: nosuch\nsbatch: error: Batch job submission failed: Invalid partition name specified",
            "invalid partition specified: nosuch",
            "cluster.slurm.partition",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "Invalid account",
            "cluster.slurm.account",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "qos", "cluster.slurm.qos"),
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "QOSMaxSubmitJobPerUserLimit",
            "until some of your jobs have finished",
        ),
        ("sbatch: unrecognized option '--no-such-option=1'", "no-such-option", "section cluster"),
        ("", "without a reason", "section cluster"),
    ],
)  # fmt: skip
def test_a_refusal_keeps_sbatchs_words_and_says_what_to_do(words, message, hint):
    error = make_refusal_error(words)
    assert message in error.message
    assert hint in error.hint


def test_waiting_jobs_are_held_for_their_user_and_released(slurm):
    ids = [slurm.add("tula-a"), slurm.add("tula-b")]
    assert SlurmScheduler().hold(ids) == ""
    assert all(state.on_hold and state.hopeless for state in scheduler.query_states(ids).values())
    assert SlurmScheduler().release(ids) == ""
    assert not any(state.on_hold for state in scheduler.query_states(ids).values())
    slurm.set(ids[0], "RUNNING")
    assert "already finished" in SlurmScheduler().hold(ids[:1])
    assert SlurmScheduler().hold(["a name"]) == "" and SlurmScheduler().release([]) == ""


# --- reasons


REASONS = json.loads(RECORDED.with_name("slurm_reasons.json").read_text())


def test_a_reason_is_hopeless_exactly_if_waiting_does_not_cure_it():
    expected = dict.fromkeys(REASONS["never"], True) | dict.fromkeys(REASONS["waits"], False) | REASONS["notes"]
    wrong = {
        reason for reason, never in expected.items() if scheduler._parse_state("PENDING", reason).hopeless != never
    }
    assert not wrong and len(expected) > 230


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxGRESPerJob", "the QOS does not allow this many GPUs (or other GRES)"),
        ("AssocMaxMemPerNode", "the account does not allow this much memory per node"),
        ("AssocMaxCpuMinutesPerJobLimit", "the account does not allow this many CPUs for this long in one job"),
        ("QOSMinMemory", "does not allow this little memory in one job"),
        ("QOSGrpGRESMinutes", "the budget of the QOS is used up"),
        ("QOSMaxSomethingNewPerJob", "the QOS does not allow this many resources"),
        ("launch failed requeued held", "scontrol release 17"),
    ],
)
def test_a_hopeless_reason_is_explained_by_its_form(reason, words):
    assert words in scheduler._parse_state("PENDING", reason, id_="17").reason


@pytest.mark.parametrize(
    ("state", "comment", "words"),
    [
        ("RUNNING", "tula: waits: /run: Read-only file system on n1", "waits: /run: Read-only file system on n1"),
        ("FAILED", "tula: gave up after 600 s: /run: Stale file handle on n1", "FAILED: gave up after 600 s: /run: Stale"),
        ("PENDING", "tula: delayed by 30 min, because job 7 gave up: x", "BeginTime (delayed by 30 min, because job 7"),
        ("RUNNING", "(null)", ""),
        ("FAILED", "a comment | of the user's", "FAILED: the script of the job ended with an error"),
    ],
)  # fmt: skip
def test_a_job_without_a_log_reports_by_its_comment(state, comment, words):
    (message,) = scheduler._parse_rows(f"12|{state}|BeginTime|N/A|{comment}").values()
    assert message.reason.startswith(words) and bool(message.reason) == bool(words)


# --- maintenance

# Recorded with SLURM 22.05.8, cut down; the dates are replaced.
RESERVATION = "ReservationName=maint1 StartTime={begin} EndTime={end} Duration=01:00:00 Nodes=n[1-2] Flags={flags} Users=root State=INACTIVE"


def reservation(minutes, flags="MAINT,IGNORE_JOBS,SPEC_NODES,ALL_NODES"):
    begin = time.time() + 60 * minutes
    return RESERVATION.format(begin=format_time(begin), end=format_time(begin + 3600), flags=flags)


@pytest.mark.parametrize(
    ("reason", "rows", "words"),
    [
        ("ReqNodeNotAvail, Reserved for maintenance", [(90.5,)], "in 90 min; shorter jobs start before it"),
        ("ReqNodeNotAvail, Reserved for maintenance", [(300,), (30.5,)], "in 30 min"),
        ("ReqNodeNotAvail, May be reserved for other job", [(30.5,)], "in 30 min"),
        ("ReqNodeNotAvail", [(30.5, "SPEC_NODES,MAINT")], "in 30 min"),
        ("ReqNodeNotAvail, Reserved for maintenance", [(-10,)], ""),  # it has begun
        ("ReqNodeNotAvail, Reserved for maintenance", [(30, "SPEC_NODES")], ""),  # another user's
        ("ReqNodeNotAvail, Reserved for maintenance", ["No reservations in the system"], ""),
        ("ReqNodeNotAvail, UnavailableNodes:n1", [(30,)], ""),
        ("Resources", [(30,)], ""),
    ],
)
def test_a_job_that_waits_for_a_maintenance_window_is_reported_which_limit_would_start_it(
    monkeypatch, reason, rows, words
):
    answers = {
        "squeue": f"7|PENDING|{reason}|N/A|(null)",
        "scontrol": "\n".join(row if isinstance(row, str) else reservation(*row) for row in rows),
    }
    monkeypatch.setattr(
        scheduler, "call_slurm_command", lambda *command, **_: slurm_command.CommandResult("done", answers[command[0]])
    )
    message = query_states(["7"])["7"].reason
    assert ("a maintenance window starts" in message) == bool(words) and words in message and message.startswith(reason)
