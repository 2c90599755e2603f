"""One attempt: the ranks are started, watched, and ended together."""

import os
import socket
import sys
import time
from pathlib import Path

from tula_cli.cluster import ending as judge
from tula_cli.cluster.allocation import (
    NOTICE_GRACE,
    POLL,
    TAKEN_WORDS,
    Supervisor,
    finished,
    overdue,
    taken,
    time_limit,
)
from tula_cli.cluster.ending import Ending, Seen
from tula_cli.cluster.forkserver import Start
from tula_cli.cluster.group import Group
from tula_cli.cluster.slurm import sbatch
from tula_cli.host import network
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt, Order
from tula_cli.run.records.tasks import Task, TrainTask

PEER_GRACE = 5.0
"""Seconds the other ranks get to end by themselves once one has failed, and to say why."""
END_GRACE = 10.0
"""Seconds between asking child processes to end and killing them."""


def open_attempt(me: Supervisor, task: Task) -> Attempt:
    attempt = Attempt(
        task=task.id,
        number=max((earlier.number for earlier in me.run.attempts(task.id)), default=0) + 1,
        started_at=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        allocation=me.place.allocation,
        hosts=me.place.hosts,
        samples=me.run.training(task.signature).newest_samples() if isinstance(task, TrainTask) else None,
        tuned=me.run.training(task.signature).tuned_samples() if isinstance(task, TrainTask) else 0,
    )
    me.run.write_attempt(attempt)
    return attempt


def closing(me: Supervisor, task: Task, attempt: Attempt, ending: Ending) -> Ending:
    """Tell the end of an attempt by the scheduler's words where it has ended the allocation."""
    if me.notice.given and not finished(me.run, task):
        ending = taken(me.place.allocation)
        if me.run.cancelled(task.job):
            return Ending("cancelled", "cancelled by the user")
        if ending.outcome == "cancelled":
            me.run.cancel(task.job, by="scancel")
        return ending
    # A rank may lose its peers on the way out: they have left and saved all the same.
    if ending.outcome in ("unknown", "peer", "signal") and me.run.stopped(task.id, attempt.number) == "time_limit":
        return Ending("time_limit", TAKEN_WORDS["time_limit"].format(me.place.job_id))
    return ending


def close_attempt(run: RunDir, attempt: Attempt, ending: Ending) -> None:
    update = {
        "ended_at": time.time(),
        "outcome": ending.outcome or "done",
        "message": ending.message,
        "rank": ending.rank,
        "host": ending.host or attempt.host,
    }
    run.write_attempt(attempt.model_copy(update=update))


def run_attempt(me: Supervisor, task: Task, attempt: Attempt, order: Order, deadline: float) -> Ending:
    """Start the ranks of this supervisor and wait for their end."""
    log = me.run.log_path(task.id, attempt.number, me.place.index).resolve()
    kills = judge.oom_kills()
    starts = _starts(me, task, order, log)
    with me.run.open_log(log) as output:
        try:
            group = me.starter.start(
                starts, output, give_up=lambda: me.notice.given or bool(_unwanted(me, task, deadline))
            )
        except OSError as error:  # the wrapper, or the folder where the job was submitted, is not on this node
            words = f"cannot start {starts[0].command[0]} in {starts[0].folder}: {error.strerror}"
            own = Ending("user", words, host=socket.gethostname())
            judge.report(me.run, task, attempt, Seen(127, False, log, first_rank(me, task)), own)
            return own
        stopped = _wait(me, task, attempt, group, deadline)
    if stopped:
        return stopped
    place, code = group.failed() or (0, 0)
    return _judge(me, task, attempt, Seen(code, judge.oom_kills() > kills, log, first_rank(me, task) + place))


def _judge(me: Supervisor, task: Task, attempt: Attempt, seen: Seen) -> Ending:
    if seen.exit_code == 0:
        return Ending(None) if finished(me.run, task) else Ending("unknown", "the ranks ended without a result")
    own = judge.own_ending(me.run, task, attempt, seen)
    if me.place.alone or me.notice.given:
        return own
    judge.report(me.run, task, attempt, seen, own)
    if me.place.index:
        return own
    time.sleep(PEER_GRACE)  # for what the other ranks have to say
    return judge.told_by_all(me.run, task, attempt, own)


def _wait(me: Supervisor, task: Task, attempt: Attempt, group: Group, deadline: float) -> Ending | None:
    """Wait for the ranks; end them when the user cancels or their time is over. None: they ended by themselves."""
    failed_at: float | None = None
    while group.running():
        if unwanted := _unwanted(me, task, deadline):
            group.end(END_GRACE)
            return unwanted
        if me.notice.given:
            group.end(NOTICE_GRACE)
            return None
        failed = group.failed() is not None
        if failed_at is None and (failed or me.run.failures(task.id, attempt.number)):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + PEER_GRACE:
            return _given_up(me, task, attempt, group)
        if isinstance(task, TrainTask) and not me.place.alone and me.run.superseded(task):
            group.kill()  # this node was given up for lost, and lives: two would write one run
            return Ending("node_failure", "another allocation has taken over")
        pause(me)
    return None


def _given_up(me: Supervisor, task: Task, attempt: Attempt, group: Group) -> Ending | None:
    """End ranks that sit in a reduction with one that is gone. None: that was one of them."""
    own = group.failed() is not None
    group.kill()
    # Not its own end, so not its own report.
    return None if own else judge.told_by_all(me.run, task, attempt, Ending("peer"))


def _unwanted(me: Supervisor, task: Task, deadline: float) -> Ending | None:
    """Tell why the ranks are to run no longer: cancelled, or overdue."""
    if me.run.cancelled(task.job):
        return Ending("cancelled", "cancelled by the user")
    return Ending("cancelled", overdue(task)) if time.monotonic() > deadline else None


def pause(me: Supervisor) -> None:
    """Wait until the next look at the run directory, or until the scheduler ends the job."""
    until = time.monotonic() + me.place.poll
    while not me.notice.given and (left := until - time.monotonic()) > 0:
        time.sleep(min(POLL, left))


# --- how the ranks are started


def world_size(task: Task) -> int:
    return task.nodes * task.spec.cluster.gpus_per_node


def _by_torchrun(task: Task) -> bool:
    """Return whether torchrun starts the ranks of a node; else supervisors start them themselves."""
    cluster = task.spec.cluster
    return cluster.kind == "slurm" and cluster.slurm is not None and cluster.slurm.launcher == "torchrun"


def first_rank(me: Supervisor, task: Task) -> int:
    return me.place.index * (task.spec.cluster.gpus_per_node if _by_torchrun(task) else 1)


def meeting(task: Task) -> str:
    """Return where torchrun's agents meet; a port taken meanwhile is an ending of its own, and another is tried."""
    if not _by_torchrun(task):
        return ""
    return f"{network.own_address(task.spec.cluster.interface)}:{network.free_port()}"


def _starts(me: Supervisor, task: Task, order: Order, log: Path) -> list[Start]:
    """Return what this supervisor starts: torchrun, its own rank, or all ranks of this machine."""
    command, folder = tuple(_command(me, task, order)), _start_folder(me.run, task)
    return [Start(command, environment, folder, str(log)) for environment in _environments(me, task)]


def _command(me: Supervisor, task: Task, order: Order) -> list[str]:
    """Return the command of a rank, or of torchrun, which starts those of a node."""
    worker = ["-m", "tula_cli.worker", str(me.run.path.resolve()), task.id, str(order.attempt)]
    wrapper = [] if me.place.alone else sbatch.wrapper(task.spec, environ=me.environ)
    if not _by_torchrun(task):
        return [*wrapper, sys.executable, "-u", *worker]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=0"]
    address, _, port = order.meeting.rpartition(":")
    place = [f"--nnodes={task.nodes}", f"--node-rank={me.place.index}"]
    meeting = [f"--master-addr={address}", f"--master-port={port}"]
    ranks = f"--nproc-per-node={task.spec.cluster.gpus_per_node}"
    if not wrapper:
        return [*torchrun, *place, *meeting, ranks, *worker]
    return [*torchrun, *place, *meeting, ranks, "--no-python", *wrapper, sys.executable, "-u", *worker]


def _start_folder(run: RunDir, task: Task) -> str:
    """Return where python finds the user's code first: what was submitted is what runs. The ranks then go to workdir."""
    code = run.code_dir(task.code) if task.code else Path(task.workdir)
    return str(code) if code.is_dir() else task.workdir  # the ranks say what is missing


def _environments(me: Supervisor, task: Task) -> list[dict[str, str]]:
    """Return the environment of each process that this supervisor starts."""
    own = {**me.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(_threads(me, task)), **time_limit(me)}
    if _by_torchrun(task):
        return [own]
    # A rendezvous of the site's set-up lines, or of a shell, is not ours.
    own = {name: value for name, value in own.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    world = world_size(task)
    places = [(rank, rank) for rank in range(world)] if me.place.alone else [(me.place.index, me.place.local_index)]
    return [{**own, "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world)} for rank, local in places]


def _threads(me: Supervisor, task: Task) -> int:
    """Return the threads of a rank. On this machine the ranks share its cores, one thread each."""
    if me.place.alone:
        return 1
    threads = int(me.environ.get("SLURM_CPUS_PER_TASK", "1"))
    return max(1, threads // task.spec.cluster.gpus_per_node) if _by_torchrun(task) else threads
