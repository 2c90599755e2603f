"""After an attempt of a script: its result, from what its ranks have written, or why there is none."""

import dataclasses
import os
import time

from tula_cli.cluster.exit_reason import ExitReason
from tula_cli.cluster.rank_start import runs_script, world_size
from tula_cli.cluster.scripts.rehearsing.script_rehearsal import ResumeTest
from tula_cli.cluster.scripts.script_training import ScriptTraining
from tula_cli.errors import JobFailed
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt, LeaderCommand
from tula_cli.run.records.shim import RankResult
from tula_cli.run.records.tasks import ProbeTask, RehearsalTask, Task, TrainTask
from tula_cli.run.script_attempt import ResumeTestRecords, ScriptAttempt

RESULT_LAG = 30.0
"""Seconds in which a file that a rank on another node has written appears (NFS)."""
POLL = 0.5  # seconds


def leader_command(run: RunDir, task: Task, *, attempt: int, ranks: int, meeting: str) -> LeaderCommand:
    """Return what is started now: of a script also with which batch, and from which checkpoint it goes on."""
    command = LeaderCommand(task=task.id, attempt=attempt, ranks=ranks, meeting=meeting)
    if not runs_script(task):
        return command  # the worker knows its own batch
    update: dict[str, object]
    match task:
        case ProbeTask():
            update = {"batch": (run.current_probe(task) or 0) * world_size(task)}
        case RehearsalTask():
            start = ResumeTest(run, task).first_start()
            update = {"batch": start.batch, "checkpoint": start.checkpoint, "rehearsal": start}
        case _:
            assert isinstance(task, TrainTask)
            update = {"batch": task.batch, "checkpoint": str(ScriptTraining(run, task).newest_checkpoint() or "")}
    return command.model_copy(update=update)


def require_resumable(run: RunDir, task: Task) -> None:
    """Refuse a training that waited for a rehearsal, which has found that its script cannot go on from its checkpoint.

    Raises:
        JobFailed: it cannot.
    """
    if not (isinstance(task, TrainTask) and task.after):
        return
    resume_test = ResumeTestRecords(run.path).read(task.after)
    if resume_test is not None and resume_test.verdict == "none":
        raise JobFailed(
            f"not started: its script cannot go on after an interruption: {'; '.join(resume_test.faults)}",
            "mend its resume; or tula train --no-rehearse, which begins anew after each interruption",
        )


def recover_lost_attempt(run: RunDir, lost: Attempt) -> None:
    """Keep what a training by a script has saved in an attempt whose supervisor was lost: it goes on from there."""
    task = run.task(lost.task)
    if isinstance(task, TrainTask) and runs_script(task):
        ScriptTraining(run, task).recover_lost_attempt(lost)


def settle_attempt(run: RunDir, task: Task, command: LeaderCommand, reason: ExitReason) -> ExitReason:
    """Write what follows from an attempt of a script; return why it ended, once that is known.

    Args:
        run: the run.
        task: what was attempted.
        command: what it was started with.
        reason: how its processes ended.
    """
    if not runs_script(task):
        return reason
    if refused := _refusal_by_method(ScriptAttempt(run.path, task.id, command.attempt)):
        return dataclasses.replace(reason, outcome="user", message=refused, final=True)
    if isinstance(task, TrainTask):
        return ScriptTraining(run, task).settle_attempt(command, reason)
    if isinstance(task, RehearsalTask):
        return ResumeTest(run, task).record_start(command, reason)
    from tula_cli.cluster.scripts.measurement import (  # numpy: not for each command, nor each rank
        NotMeasured,
        build_probe_result,
    )

    assert isinstance(task, ProbeTask)
    attempt = ScriptAttempt(run.path, task.id, command.attempt)
    ranks = _rank_results(attempt, command.ranks, patient=reason.outcome is None and task.spec.cluster.kind != "local")
    stopped = len(ranks) == command.ranks and all(rank.why == "stopped" for rank in ranks)
    if reason.outcome is not None and not stopped:
        return reason
    cores = len(os.sched_getaffinity(0))
    try:
        path, local_batch = run.log_path(task.id, command.attempt), command.batch // command.ranks
        result = build_probe_result(
            task, ranks, local_batch=local_batch, cores=cores, log=path, notes=attempt.put_aside()
        )
        run.write_result(result)
        with run.open_log(path) as log:
            log.write(f"{result.description}\n".encode())
    except NotMeasured as error:
        return dataclasses.replace(reason, outcome="user", message=str(error))
    return ExitReason(None)


def _refusal_by_method(attempt: ScriptAttempt) -> str:
    """Return why the method cannot train this script, which may have gone on, and ended well, all the same."""
    refusals = (failure for failure in attempt.failures() if failure.where == "method")
    return next((failure.description for failure in refusals), "")


def _rank_results(attempt: ScriptAttempt, ranks: int, *, patient: bool) -> list[RankResult]:
    """Return what the ranks have written; those of other nodes are waited for, once there is any."""
    deadline = time.monotonic() + RESULT_LAG
    while len(results := attempt.results()) < ranks and results and patient and time.monotonic() < deadline:
        time.sleep(POLL)
    return results
