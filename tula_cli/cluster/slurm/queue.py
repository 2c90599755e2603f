"""Job states as reported by SLURM: hints, never used to decide about results. SLURM forgets, lags, and may not answer.

Only output that is the same in all versions from 20.11 on is read: named fields, without headings, one job per line. A
command that is missing, hangs, fails or prints unknown output gives an unknown state, and raises no error.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tula_cli.cluster.scheduler import QueuedJob, SchedulerState
from tula_cli.cluster.slurm.command import call_slurm_command, parse_record
from tula_cli.errors import SchedulerError, StorageFailed
from tula_cli.run.records.base import OutcomeClass
from tula_cli.words import format_local_time

# --- The states of jobs

SQUEUE_UNREACHABLE_MESSAGE = "squeue does not answer"
ALREADY_ENDED = re.compile("Invalid job id|already completing or completed", re.IGNORECASE)
"""Errors of scancel about jobs that have already ended."""
ACCOUNTING_PAUSE = 60.0
"""Minimum seconds between two queries of sacct for the same job, as its database is shared by all users."""
PENDING_STATES = (
    "PENDING", "CONFIGURING", "POWER_UP_NODE", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD",
)  # fmt: skip
RUNNING_STATES = ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
_SUSPENDED_EXPLANATION = """suspended by an administrator or for a job of higher priority: ask the administrators to resume the job
(scontrol resume {id}), or cancel the job with tula cancel and start again""".replace("\n", " ")
COMMENT_PREFIX = "tula: "
WAITS, GAVE_UP, DELAYED = f"{COMMENT_PREFIX}waits", f"{COMMENT_PREFIX}gave up", f"{COMMENT_PREFIX}delayed"
"""Prefixes of the comments in the queue by which a job that cannot open its log reports its state."""
_NOT_LAUNCHED = """the script of the job could not be started on the node (disk, unknown user or failed prolog): ask the
administrators to look for job {id} in slurmd.log of the node""".replace("\n", " ")
_NODES_UNAVAILABLE = re.compile(r"ReqNodeNotAvail\W+Unavailable|Nodes required for job are DOWN|^NodeDown")
"""squeue's reasons for jobs whose nodes are down or drained."""
_MAINTENANCE = re.compile(r"Reserved for maintenance|ReqNodeNotAvail(?!\W+Unavailable)")
"""squeue's reasons for jobs that would still run when a reservation of their nodes starts."""
RESERVATIONS_COMMAND = ("scontrol", "--oneliner", "show", "reservation")
_ADVICE_ON_MISSING_NODES = "the job starts when these nodes return (sinfo --list-reasons shows why they are down); to use other nodes, change section cluster.slurm"
END_STATE_DESCRIPTIONS = {
    "COMPLETED": "",
    "FAILED": "the script of the job ended with an error",
    "CANCELLED": "the job was cancelled by scancel or by an administrator",
    "TIMEOUT": "the time limit of the job was reached",
    "DEADLINE": "the deadline of the job was reached",
    "NODE_FAIL": "a node of the job failed",
    "BOOT_FAIL": "a node of the job did not boot",
    "LAUNCH_FAILED": "the job could not be launched on its nodes",
    "RECONFIG_FAIL": "the nodes of the job could not be configured",
    "PREEMPTED": "a job of higher priority took the nodes",
    "OUT_OF_MEMORY": "the job used more memory than it requested",
    "REVOKED": "another cluster of the federation runs the job",
}
"""SLURM's states of ended jobs, and their meaning."""
_LIMITED_ENTITIES = {"qos": "the QOS", "assoc": "the account", "association": "the account"}
_RESOURCES = {
    "Cpu": "many CPUs", "CPU": "many CPUs", "Node": "many nodes", "GRES": "many GPUs (or other GRES)", "License": "many licenses",
    "Billing": "many billing units", "Mem": "much memory", "Memory": "much memory", "WallDuration": "much time",
    "Energy": "much energy", "BB": "much burst buffer",
}  # fmt: skip
"""Resources by their names in SLURM's reasons; other names are shown as 'many resources'."""
_RELEASE_COMMAND = "scontrol release {id}"
HOPELESS = tuple((re.compile(form), why) for form, why in {
    # Limits per job and budgets; the names consist of who limits what, and per what.
    "(?P<who>QOS|Assoc)Max(?P<what>[A-Za-z]+?)MinutesPerJob(?:Limit)?": "{who} does not allow this {what} for this long in one job",
    "(?P<who>QOS|Assoc)Max(?P<what>[A-Za-z]+?)PerJob(?:Limit)?": "{who} does not allow this {what}",
    "(?P<who>QOS|Assoc)Max(?P<what>[A-Za-z]+?)PerNode": "{who} does not allow this {what} per node",
    "(?P<who>QOS)Min(?P<what>[A-Za-z]+?)(?:NotSatisfied)?": "{who} does not allow this {few} in one job",
    "(?P<who>QOS|Assoc)Grp(?!\\w*Run)(?P<what>[A-Za-z]+?)Minutes(?:Limit)?": "the budget of {who} is used up or too small for this job: see sacctmgr show assoc, qos",
    "(?P<who>QOS|Assoc)GrpWallLimit": "the time budget of {who} is used up",
    "(?P<who>QOS|Association)TimeLimit": "{who} does not allow this much time, or its time budget is used up",
    "(?P<who>QOS)UsageThreshold": "the account's share of the machine is below the minimum of {who}",
    ".*exceeds (?P<who>QOS|assoc)\\w*.* group (?:max TRES.* minutes|wall limit).*": "the budget of {who} is used up",
    ".*exceeds (?P<who>QOS|assoc)\\w*.* max TRES.* minutes.*": "{who} does not allow this many resources for this long in one job",
    "MaxMemPerLimit": "the partition does not allow this much memory per node or CPU: lower cluster.slurm.memory",
    # The requested resource does not exist, or this user may not use it.
    "PartitionConfig": "the partition does not allow this many nodes or resources",
    "PartitionNodeLimit": "the partition does not allow this many nodes",
    "PartitionTimeLimit": "the partition does not allow this much time",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node satisfies the constraints",
    "AccountNotAllowed": "the account may not use the partition",
    "QOSNotAllowed": "the QOS is not allowed on this partition",
    "InvalidAccount": "the account does not exist",
    "InvalidQOS": "the QOS does not exist",
    "Inva(?:lid|ild)Reason": "of a reason that SLURM does not name",
    ".*not (?:in group )?permitted to use this partition.*": "the account, the QOS or you may not use the partition",
    "Reservation(?:Deleted|Invalid)|Reservation .* (?:was deleted|is invalid|has ended)": "the reservation of the job no longer exists",
    "DeadLine": "the job cannot end before its deadline",
    "DependencyNeverSatisfied": "the job depends on a job that failed",
    "BurstBufferOperation|Burst buffer .*error.*": "the burst buffer of the job failed",
    # Holds that a user or administrator has to release.
    "JobHoldMaxRequeue|.*requeued held": f"SLURM holds the job after it failed to start; release it with {_RELEASE_COMMAND}",
    "JobHeldAdmin": f"an administrator holds the job: ask them to release it ({_RELEASE_COMMAND})",
    "JobHeldUser|.*in held state.*": f"you hold the job; release it with {_RELEASE_COMMAND}",
}.items())  # fmt: skip
"""Patterns of squeue's reasons for jobs that will never start, with explanations; other jobs may start.

Limits on running jobs (Grp without Minutes, RunMinutes, PerUser, PerAccount, Jobs, SubmitJobs) are satisfied again when
other jobs have ended; limits on a single job or on total use are not.
"""

OUTCOMES: dict[str, OutcomeClass] = {
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preempted",
    "REQUEUED": "preempted",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "CANCELLED": "cancelled",
    "OUT_OF_MEMORY": "host_oom",
}
"""Outcomes of an allocation by SLURM's state. COMPLETED and FAILED result from the job itself."""
OOM_KILLED = "0:125"
"""Exit code of a step in which the kernel's out-of-memory killer killed a process."""
STORAGE_FAILED = f"{StorageFailed.exit_code}:0"
"""Exit code of the steps of a job whose supervisor could no longer write to the file system."""


# --- Queries of job states

_SQUEUE_COMMAND = ("squeue", "--noheader", "--states=all", "--format=%i|%T|%r|%S|%k")


def query_states(ids: Sequence[str]) -> dict[str, SchedulerState]:
    """Return the states of jobs as reported by SLURM; unknown jobs are missing from the result.

    squeue is queried once for all jobs, and sacct for those that squeue has forgotten. squeue takes precedence, as
    sacct reports a requeued job as ended while it runs again.
    """
    requested_ids = list(dict.fromkeys(ids))
    queue, silence = _query_squeue(requested_ids) if requested_ids else ({}, "")
    states = {id_: row for id_ in requested_ids if (row := queue.get(id_))}
    for id_, state_name in _query_sacct([id_ for id_ in requested_ids if id_ not in states]).items():
        state = _parse_state(state_name)
        # The job has left the queue but is not ended in sacct, which lags, and may never see the end of a job.
        if state.state != "ended":
            state = SchedulerState("unknown", f"sacct reports {state_name}, and squeue no longer lists the job")
        states[id_] = state
    if any(_MAINTENANCE.search(state.reason) for state in states.values() if state.state == "pending"):
        states = _add_maintenance_start(states)
    if silence:
        unheard = {id_: SchedulerState("unknown", silence, silent=True) for id_ in requested_ids}
        states = {**unheard, **{id_: state for id_, state in states.items() if state.state != "unknown"}}
    return states


def _add_maintenance_start(states: Mapping[str, SchedulerState]) -> dict[str, SchedulerState]:
    """Add the start of the maintenance window to the reason of jobs that wait for it, with advice on shorter jobs."""
    answer, now = call_slurm_command(*RESERVATIONS_COMMAND), time.time()
    coming = [start for start in _parse_maintenance_starts(answer.text if answer.has_succeeded else "") if start > now]
    if not coming:
        return dict(states)
    start = min(coming)
    window = f"a maintenance window starts {format_local_time(start)}, in {int((start - now) // 60)} min"
    advice = f"{window}; shorter jobs start before it (cluster.minutes, search.max_minutes)"
    return {
        id_: replace(state, reason=f"{state.reason}; {advice}") if _MAINTENANCE.search(state.reason) else state
        for id_, state in states.items()
    }


def _parse_maintenance_starts(text: str) -> list[float]:
    """Return the starts (Unix times) of the maintenance windows in the output of `RESERVATIONS_COMMAND`."""
    rows = [parse_record(line) for line in text.splitlines()]
    starts = [parse_time(row.get("StartTime", "")) for row in rows if "MAINT" in row.get("Flags", "").split(",")]
    return [start for start in starts if start is not None]


def _query_squeue(ids: Sequence[str]) -> tuple[dict[str, SchedulerState], str]:
    """Return the states of jobs that squeue knows, even recently ended ones, and why it does not answer, or empty.

    squeue fails if it is queried for a single unknown job; for several jobs, that depends on its version.
    """
    answer = call_slurm_command(*_SQUEUE_COMMAND, f"--jobs={','.join(ids)}")
    if "Invalid job id" in answer.error_message:
        if len(ids) == 1:
            return {}, ""
        answer = call_slurm_command(*_SQUEUE_COMMAND, f"--user={os.getuid()}")
    if not answer.has_succeeded:
        return {}, f"{SQUEUE_UNREACHABLE_MESSAGE}: {answer.error_message}"
    return _parse_rows(answer.text), ""


def _parse_rows(text: str) -> dict[str, SchedulerState]:
    rows = [line.split("|", 4) for line in text.splitlines()]
    return {
        row[0]: _parse_state(row[1], row[2], parse_time(row[3]), row[4], id_=row[0]) for row in rows if len(row) == 5
    }


def _parse_state(
    state_text: str, reason: str = "", starts_at: float | None = None, comment: str = "", *, id_: str = ""
) -> SchedulerState:
    """Return the state of a job from that of SLURM; an unrecognised state does not count as ended."""
    name, without_log = _parse_state_name(state_text), comment.startswith((WAITS, GAVE_UP, DELAYED))
    if name in PENDING_STATES:
        why = explain_hopeless_reason(reason, id_)
        explanation = "" if reason == "None" else f"{reason}: will not start, because {why}" if why else reason
        away = bool(_NODES_UNAVAILABLE.search(reason))
        explanation += f": {_ADVICE_ON_MISSING_NODES}" if away else ""
        explanation += f" ({comment.removeprefix(COMMENT_PREFIX)})" if comment.startswith(DELAYED) else ""
        return SchedulerState(
            "pending",
            explanation,
            starts_at,
            on_hold=reason == "JobHeldUser",
            hopeless=bool(why),
            without_nodes=away,
            without_log=without_log,
        )
    if name in RUNNING_STATES:
        stopped = name in ("STOPPED", "SUSPENDED")
        waiting_text = comment.removeprefix(COMMENT_PREFIX) if comment.startswith(WAITS) else ""
        reason = _SUSPENDED_EXPLANATION.format(id=id_) if stopped else waiting_text
        return SchedulerState("running", reason, suspended=stopped, without_log=bool(waiting_text))
    if name in END_STATE_DESCRIPTIONS:
        meaning = _NOT_LAUNCHED.format(id=id_) if reason == "JobLaunchFailure" else END_STATE_DESCRIPTIONS[name]
        meaning = comment.removeprefix(COMMENT_PREFIX) if comment.startswith(GAVE_UP) else meaning
        return SchedulerState("ended", f"{state_text}: {meaning}" if meaning else "", failed=name == "FAILED")
    return SchedulerState("unknown", f"SLURM calls it {state_text}")


def explain_hopeless_reason(reason: str, id_: str) -> str:
    """Return why a pending job with this reason of squeue will never start; empty if it may."""
    for form, why in HOPELESS:
        if match := form.fullmatch(reason):
            groups = match.groupdict("")
            resource = _RESOURCES.get(groups.get("what", ""), "many resources")
            little = resource.replace("many", "few").replace("much", "little")
            who = _LIMITED_ENTITIES.get(groups.get("who", "").lower(), "")
            return why.format(id=id_, who=who, what=resource, few=little)
    return ""


def _parse_state_name(state_text: str) -> str:
    """Return the name of a state without additions and truncation: "CANCELLED by 1000", "CANCELLED+", "OUT_OF_ME+"."""
    first_word = next(iter(state_text.split()), "")
    start = first_word.rstrip("+")
    if start in ("", first_word):
        return start
    names = (*PENDING_STATES, *RUNNING_STATES, *END_STATE_DESCRIPTIONS)
    return next((name for name in names if name.startswith(start)), start)


_recent_states: dict[str, tuple[float, str]] = {}
"""Time of the last query of sacct for a job (monotonic clock), and the state that it returned."""


def _query_sacct(ids: Sequence[str]) -> dict[str, str]:
    """Return the states that sacct reports; jobs that are due are queried at once."""
    now = time.monotonic()
    due = [id_ for id_ in ids if _is_query_due(id_, now)]
    if due:
        answer = call_slurm_command(
            "sacct", "--noheader", "--parsable2", f"--jobs={','.join(due)}", "--format=JobID,State"
        )
        rows = [line.split("|") for line in answer.text.splitlines()] if answer.has_succeeded else []
        states = {row[0]: row[1] for row in rows if len(row) == 2}
        _recent_states.update({id_: (now, states.get(id_, "")) for id_ in due})
    return {id_: state_text for id_ in ids if (state_text := _recent_states[id_][1])}


def _is_query_due(id_: str, now: float) -> bool:
    at, state_text = _recent_states.get(id_, (float("-inf"), ""))
    return _parse_state_name(state_text) not in END_STATE_DESCRIPTIONS and now - at >= ACCOUNTING_PAUSE


# --- The end of an allocation


def find_end_time(job_id: str, environ: Mapping[str, str]) -> float | None:
    """Return the Unix time at which an allocation ends; None if unknown or unlimited.

    Args:
        environ: environment of the allocation, which contains the time from SLURM 23.02 on.
    """
    end_time = environ.get("SLURM_JOB_END_TIME", "")
    end = float(end_time) if end_time.isdigit() else None
    if end is None:
        answer = call_slurm_command("squeue", "--noheader", f"--jobs={job_id}", "--format=%e")
        end = parse_time(answer.text.splitlines()[0]) if answer.has_succeeded and answer.text else None
    never = time.time() + 10 * 365 * 86400  # SLURM reports an end in about a hundred years for unlimited jobs
    return end if end is not None and end < never else None


def parse_time(text: str) -> float | None:
    """Return the Unix time of a local time in the format of SLURM; None for N/A, Unknown and the like."""
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def find_job_outcome(job_id: str, *, restart: int | None = None) -> OutcomeClass | None:
    """Return why an allocation was ended from outside; None if it still runs, is unknown, or exited by itself.

    Args:
        restart: how often the job had been requeued before this allocation; None: its last allocation. An administrator
            may requeue a job, which then runs again under the same id.
    """
    record = _read_controller_record(job_id)
    restart_count = record.get("Restarts", "")
    restarts = int(restart_count) if restart_count.isdigit() else 0
    if restart is not None and restart < restarts:
        # Requeued since: the job itself did not end that allocation.
        return _derive_job_outcome(_list_sacct_rows(job_id, restart)) or "preempted"
    state = _parse_state_name(record.get("JobState", ""))
    if state in PENDING_STATES or (state in RUNNING_STATES and state != "COMPLETING"):
        return None
    if state in OUTCOMES or state == "COMPLETED":
        return OUTCOMES.get(state)
    if record.get("DerivedExitCode") == STORAGE_FAILED and not restarts:
        return "storage"
    # DerivedExitCode of an earlier run is kept when a job is requeued.
    if record.get("DerivedExitCode") == OOM_KILLED and not restarts:
        return "host_oom"
    return _derive_job_outcome(_list_sacct_rows(job_id, restart))


def _read_controller_record(job_id: str) -> dict[str, str]:
    """Return the controller's record of a job, which it keeps for some minutes after the end; empty if unknown."""
    answer = call_slurm_command("scontrol", "--details", "--oneliner", "show", "job", job_id)
    lines = (
        [line for line in answer.text.splitlines() if line.startswith(f"JobId={job_id} ")]
        if answer.has_succeeded
        else []
    )
    # parse_record keeps the first value of a field: 24.05 and later append the submission's command line.
    return parse_record(lines[-1]) if lines else {}


def _list_sacct_rows(job_id: str, restart: int | None) -> list[list[str]]:
    """Return sacct's rows (id, state, derived exit code) of one run of a job and its steps (None: the last run)."""
    form = "--format=JobID,State,DerivedExitCode"
    answer = call_slurm_command("sacct", "--noheader", "--parsable2", "--duplicates", f"--jobs={job_id}", form)
    runs: list[list[list[str]]] = []
    for row in (line.split("|") for line in answer.text.splitlines() if answer.has_succeeded):
        if len(row) == 3 and row[0] == job_id:
            runs.append([row])
        elif len(row) == 3 and runs and row[0].startswith(f"{job_id}."):
            runs[-1].append(row)
    run_index = len(runs) - 1 if restart is None else restart
    return runs[run_index] if 0 <= run_index < len(runs) else []


def _derive_job_outcome(rows: list[list[str]]) -> OutcomeClass | None:
    """Return why a job was ended; for a failed job, storage or out-of-memory if exit codes show it, else None."""
    if not rows:
        return None
    state_name = _parse_state_name(rows[0][1])
    if state_name in OUTCOMES:
        return OUTCOMES[state_name]
    if state_name == "FAILED" and rows[0][2] == STORAGE_FAILED:
        return "storage"
    killed = any(_parse_state_name(state) == "OUT_OF_MEMORY" or code == OOM_KILLED for _, state, code in rows)
    return "host_oom" if killed and state_name == "FAILED" else None


# --- Finding and changing jobs


def list_live_jobs(names: Sequence[str]) -> list[QueuedJob]:
    """Return this user's pending or running jobs with these names, without jobs that are completing.

    Raises:
        SchedulerError: squeue does not answer, so that the jobs are unknown.
    """
    form = "--format=%i|%T|%j|%o"
    answer = call_slurm_command("squeue", "--noheader", f"--user={os.getuid()}", f"--name={','.join(names)}", form)
    if not answer.has_succeeded:
        raise SchedulerError(
            f"{SQUEUE_UNREACHABLE_MESSAGE}: {answer.error_message}",
            "nothing was submitted; run the same command again later",
        )
    rows = [line.split("|", 3) for line in answer.text.splitlines()]
    end_states = ("COMPLETING", *END_STATE_DESCRIPTIONS)
    return [
        QueuedJob(row[0], row[2], row[3])
        for row in rows
        if len(row) == 4 and row[2] in names and _parse_state_name(row[1]) not in end_states
    ]


def cancel_jobs(ids: Sequence[str]) -> str:
    """Cancel exactly these jobs; return scancel's error message, or empty. Ended jobs are not an error."""
    job_ids = [id_ for id_ in ids if id_.isdigit()]  # scancel would interpret other words differently
    if not job_ids:
        return ""
    answer = call_slurm_command("scancel", *job_ids)
    return "" if answer.has_succeeded or ALREADY_ENDED.search(answer.error_message) else answer.error_message


def change_jobs(order: str, ids: Sequence[str], *settings: str) -> str:
    """Call scontrol with an order ("update", "release" ...) for exactly these jobs; return its error message, or empty."""
    job_ids = [id_ for id_ in ids if id_.isdigit()]
    if not job_ids:
        return ""
    subject = f"JobId={','.join(job_ids)}" if settings else ",".join(job_ids)
    answer = call_slurm_command("scontrol", order, subject, *settings)
    return "" if answer.has_succeeded else answer.error_message or "scontrol failed"
