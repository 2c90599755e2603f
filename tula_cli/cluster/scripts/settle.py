"""After an attempt of a script: its result, from what its ranks have written, or why there is none."""

import dataclasses
import os
import time

from tula_cli.cluster.exit_reason import ExitReason
from tula_cli.cluster.rank_start import runs_script, world_size
from tula_cli.cluster.scripts.rehearsing.script_rehearsal import ScriptRehearsal
from tula_cli.cluster.scripts.script_training import ScriptTraining
from tula_cli.errors import JobFailed
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt, LeaderCommand
from tula_cli.run.records.shim import RankResult
from tula_cli.run.records.tasks import ProbeTask, RehearsalTask, Task, TrainTask
from tula_cli.run.script_attempt import Rehearsals, ScriptAttempt

LAG = 30.0
"""Seconds in which a file that a rank on another node has written appears (NFS)."""
LOOK = 0.5  # seconds


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
            start = ScriptRehearsal(run, task).begin()
            update = {"batch": start.batch, "checkpoint": start.checkpoint, "rehearsal": start}
        case _:
            assert isinstance(task, TrainTask)
            update = {"batch": task.batch, "checkpoint": str(ScriptTraining(run, task).checkpoint() or "")}
    return command.model_copy(update=update)


def require_resumable(run: RunDir, task: Task) -> None:
    """Refuse a training that waited for a rehearsal, which has found that its script cannot go on from its checkpoint.

    Raises:
        JobFailed: it cannot.
    """
    if not (isinstance(task, TrainTask) and task.after):
        return
    found = Rehearsals(run.path).read(task.after)
    if found is not None and found.verdict == "none":
        raise JobFailed(
            f"not started: its script cannot go on after an interruption: {'; '.join(found.faults)}",
            "mend its resume; or tula train --no-rehearse, which begins anew after each interruption",
        )


def take_up(run: RunDir, lost: Attempt) -> None:
    """Keep what a training by a script has saved in an attempt whose supervisor was lost: it goes on from there."""
    task = run.task(lost.task)
    if isinstance(task, TrainTask) and runs_script(task):
        ScriptTraining(run, task).take_up(lost)


def settled(run: RunDir, task: Task, command: LeaderCommand, reason: ExitReason) -> ExitReason:
    """Write what follows from an attempt of a script; return why it ended, once that is known.

    Args:
        run: the run.
        task: what was attempted.
        command: what it was started with.
        reason: how its processes ended.
    """
    if not runs_script(task):
        return reason
    if refused := _refused(ScriptAttempt(run.path, task.id, command.attempt)):
        return dataclasses.replace(reason, outcome="user", message=refused, final=True)
    if isinstance(task, TrainTask):
        return ScriptTraining(run, task).settled(command, reason)
    if isinstance(task, RehearsalTask):
        return ScriptRehearsal(run, task).settled(command, reason)
    from tula_cli.cluster.scripts.measurement import NotMeasured, measured  # numpy: not for each command, nor each rank

    assert isinstance(task, ProbeTask)
    attempt = ScriptAttempt(run.path, task.id, command.attempt)
    ranks = _results(attempt, command.ranks, patient=reason.outcome is None and task.spec.cluster.kind != "local")
    stopped = len(ranks) == command.ranks and all(rank.why == "stopped" for rank in ranks)
    if reason.outcome is not None and not stopped:
        return reason
    cores = len(os.sched_getaffinity(0))
    try:
        path, local_batch = run.log_path(task.id, command.attempt), command.batch // command.ranks
        result = measured(task, ranks, local_batch=local_batch, cores=cores, log=path, notes=attempt.put_aside())
        run.write_result(result)
        with run.open_log(path) as log:
            log.write(f"{result.told}\n".encode())
    except NotMeasured as error:
        return dataclasses.replace(reason, outcome="user", message=str(error))
    return ExitReason(None)


def _refused(attempt: ScriptAttempt) -> str:
    """Return why the method cannot train this script, which may have gone on, and ended well, all the same."""
    told = (failure for failure in attempt.failures() if failure.where == "method")
    return next((failure.words for failure in told), "")


def _results(attempt: ScriptAttempt, ranks: int, *, patient: bool) -> list[RankResult]:
    """Return what the ranks have written; those of other nodes are waited for, once there is any."""
    deadline = time.monotonic() + LAG
    while len(found := attempt.results()) < ranks and found and patient and time.monotonic() < deadline:
        time.sleep(LOOK)
    return found
