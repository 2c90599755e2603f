"""One attempt of a task: starting, monitoring and terminating its ranks together."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from tula_cli.cluster import failures
from tula_cli.cluster.allocation import POLL_SECONDS, TERMINATED_MESSAGES, Allocation
from tula_cli.cluster.directory_watcher import ChangeWatcher
from tula_cli.cluster.failures import RankExit, find_supervisor_failure
from tula_cli.cluster.rank_processes import (
    RankCommand,
    RankGroup,
    RankSpawner,
    get_first_rank,
    list_visible_gpus,
)
from tula_cli.cluster.rank_program import RankMonitor, RankProgram
from tula_cli.cluster.rank_programs import make_rank_program
from tula_cli.errors import JobFailed, RunGone
from tula_cli.host.devices import has_gpu
from tula_cli.host.failures import has_cause
from tula_cli.host.leftovers import MARK_VARIABLE, GpuMemory, kill_leftovers
from tula_cli.host.network import get_node_name
from tula_cli.run.directory import RunDir
from tula_cli.run.files import is_pinned_run_gone, open_file_to_append, read_last_bytes
from tula_cli.run.records.failures import Failure, Relaunch, Requeue, Stop
from tula_cli.run.records.jobs import Attempt, LeaderCommand
from tula_cli.run.records.tasks import Task
from tula_cli.spec.signature import compute_cluster_signature
from tula_cli.version import __version__

PEER_GRACE_SECONDS = 5.0
"""Seconds that the other ranks have, after one failed, to exit by themselves and report why."""
SIGKILL_DELAY_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL of child processes."""
LOG_CHECK_SECONDS = 1.0
"""Seconds between two checks of the size of the ranks' log."""
HEARTBEAT_SECONDS = 60.0
"""Seconds between two heartbeats of a job on this machine."""
TERMINATION_SIGKILL_DELAY_SECONDS = 25.0
"""The same if the scheduler ends the allocation: SLURM kills all processes after KillWait, 30 s by default."""


def open_attempt(run: RunDir, allocation: Allocation, task: Task) -> Attempt:
    """Record the start of a new attempt of a task and return it."""
    training = run.find_training(task)
    attempt = Attempt(
        task=task.id,
        number=max((earlier.number for earlier in run.read_attempts(task.id)), default=0) + 1,
        started_at=time.time(),
        host=get_node_name(),
        pid=os.getpid(),
        allocation=allocation.id,
        hosts=allocation.hosts,
        idle_nodes=max(0, (allocation.nodes or 0) - task.nodes) if len(task.node_counts) > 1 else 0,
        cluster=compute_cluster_signature(task.spec.cluster),
        samples=training.find_newest_checkpoint_samples() if training else None,
        tuned=training.count_tuned_samples() if training else 0,
        tula=__version__,
    )
    run.write_attempt(attempt)
    return attempt


def close_attempt(
    run: RunDir,
    attempt: Attempt,
    failure: Failure | None,
    decision: Relaunch | Requeue | Stop,
    *,
    reached: int | None = None,
) -> None:
    """Record that an attempt ends now.

    Args:
        failure: why it ended; None after a success.
        reached: samples trained when it ended; None before a first step.
    """
    update = {
        "ended_at": time.time(),
        "failure": None if failure is None else failure.model_copy(update={"detail": ""}),
        "decision": decision,
        "host": (failure.host if failure is not None else "") or attempt.host,
        "reached": reached,
    }
    run.write_attempt(attempt.model_copy(update=update))


@dataclass
class RunningAttempt:
    """One attempt as run by one supervisor, whose child processes are the ranks that it starts."""

    run: RunDir
    allocation: Allocation
    spawner: RankSpawner
    memory: GpuMemory  # memory use of this supervisor's GPUs, compared over all attempts
    task: Task
    attempt: Attempt
    command: LeaderCommand
    deadline: float  # monotonic time at which the task times out
    change_watcher: ChangeWatcher
    _last_heartbeat: float = 0.0  # monotonic time of the last heartbeat in the log
    _log_truncated_at: float = 0.0

    def run_ranks_to_exit(self) -> Failure | None:
        """Start the ranks of this supervisor, wait until they exit, and return why they failed; None after a success."""
        log = self._log
        kills = failures.count_oom_kills()
        try:
            starts = self._program.make_starter(self.allocation, self.command).make_rank_commands(log)
        except JobFailed as error:  # raised for a script if this node lacks the network interface
            return self._report_not_started(f"{error.message}; {error.hint}")
        with open_file_to_append(log) as output:
            output.write("".join(f"tula: {line}\n" for line in self._clean_up_earlier_attempts(starts)).encode())
            output.flush()
            try:
                group = self.spawner.spawn_ranks(starts, output, give_up=self._has_reason_not_to_start)
            except OSError as error:  # the wrapper, or the folder where the job was submitted, is not on this node
                output_text = f"cannot start {starts[0].command[0]} in {starts[0].folder}: {error.strerror}"
                return self._report_not_started(output_text)
            self._monitor.record_start()
            stopped = self._watch_ranks(group)
            if moved := self._monitor.undo_file_changes():
                output.write(f"tula: {moved}\n".encode())
        if stopped is not None:
            return stopped
        child, code = group.find_first_failure() or (0, 0)
        was_oom_kill = failures.count_oom_kills() > kills
        rank = get_first_rank(self.allocation, self.task) + child
        return self._find_exit_failure(RankExit(code, was_oom_kill, read_last_bytes(log, LOG_TAIL_BYTES), rank))

    @cached_property
    def _log(self) -> Path:
        return self.run.get_log_path(self.task.id, self.attempt.number, self.allocation.index).resolve()

    @cached_property
    def _program(self) -> RankProgram:
        return make_rank_program(self.run, self.task)

    @cached_property
    def _monitor(self) -> RankMonitor:
        return self._program.make_monitor(self.allocation, self.command)

    def _report_not_started(self, message: str) -> Failure:
        failure = Failure(outcome="user", message=message, host=get_node_name())
        exited = RankExit(127, False, message, get_first_rank(self.allocation, self.task))
        failures.write_exit_report(self.run, self.task, self.attempt, exited, failure)
        return failure

    def _clean_up_earlier_attempts(self, starts: Sequence[RankCommand]) -> Iterator[str]:
        """Kill leftovers of earlier attempts on this node, wait for their GPU memory, and yield messages to log."""
        mark = self.allocation.environ.get(MARK_VARIABLE)
        if mark is None:
            return
        if killed := kill_leftovers(mark, spare=self.spawner.list_surviving_processes()):
            yield f"killed processes of an earlier attempt: {', '.join(map(str, killed))}"
        if self.task.spec.cluster.device != "cpu" and has_gpu():
            memory_holders = self.memory.wait_until_memory_is_free(
                list_visible_gpus(starts), mark, give_up=self._has_reason_not_to_start
            )
            if memory_holders:
                yield f"GPU memory of an earlier attempt is still in use: {memory_holders}"

    def apply_termination_reason(self, failure: Failure | None) -> Failure | None:
        """Return why an attempt ended, which may be another reason than the failure of its ranks.

        It is the scheduler's reason if that ended the allocation. If the ranks stopped early (time limit, end of a
        stage), it is that instead of a lost peer or a signal. Cancels the job if the scheduler reports that the user
        did.
        """
        if self.allocation.termination.is_received and not self.run.is_finished(self.task):
            if self.run.is_cancelled(self.task.job):
                return Failure(outcome="cancelled", message="cancelled by the user")
            termination = self.allocation.find_termination_reason()
            if termination.outcome == "cancelled":
                self.run.mark_job_cancelled(self.task.job, by=self.allocation.scheduler.cancel_command)
            # If a follower fails, the scheduler terminates the leader too.
            reported = find_supervisor_failure(self.run, self.attempt) if termination.outcome == "signal" else None
            return reported or termination
        if failure is None or failure.outcome not in ("unknown", "peer", "signal"):
            return failure
        # If the ranks have saved to stop early, a peer lost during the exit is not the reason of the end.
        stopped = self.run.read_stop_reason(self.task.id, self.attempt.number)
        if stopped == "time_limit":
            return self._make_time_limit_failure()
        if stopped == "stage_end":
            return Failure(outcome="stage_end", message="the next stage of train.ramp has more nodes")
        return failure

    def _make_time_limit_failure(self) -> Failure:
        message = TERMINATED_MESSAGES["time_limit"].format(self.allocation.job_id)
        return Failure(outcome="time_limit", message=message)

    def _watch_ranks(self, group: RankGroup) -> Failure | None:
        """Wait for the ranks; terminate them on cancellation, at a deadline, or after a failed peer.

        Returns:
            Why this supervisor terminated the ranks; None if they have exited by themselves.

        Raises:
            RunGone: the run directory was moved or removed, so that no result of the ranks would be found.
        """
        failed_at: float | None = None
        self.change_watcher.force_check()
        while group.is_running():
            is_due = self.change_watcher.is_due()
            if is_due and is_pinned_run_gone(self.run.path):
                group.kill()
                raise RunGone(self.run.path)
            self._touch_log()
            self._truncate_log()
            if (unwanted := self._find_reason_to_stop(is_due)) is not None:
                group.end_ranks(SIGKILL_DELAY_SECONDS)
                return unwanted
            if self.allocation.termination.is_received:
                self._end_ranks(group, deadline=time.monotonic() + TERMINATION_SIGKILL_DELAY_SECONDS)
                return None
            if (remaining := self._compute_seconds_to_exit(is_due)) is not None:
                self._end_ranks(group, deadline=time.monotonic() + remaining)
                return self._make_time_limit_failure()
            failed = group.find_first_failure() is not None
            self._monitor.record_progress()
            if (stuck := self._monitor.find_reason_to_kill()) is not None:
                group.kill()
                return stuck
            if failed_at is None and (
                failed or (is_due and self.run.list_failed_ranks(self.task.id, self.attempt.number))
            ):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + PEER_GRACE_SECONDS:
                return self._end_waiting_ranks(group)
            if is_due and self.run.is_superseded(self.task):
                group.kill()  # this node was considered lost: two allocations would write to one run
                return Failure(outcome="node_failure", message="another allocation has taken over this job")
            self.change_watcher.pause(self._monitor.get_poll_interval(self.allocation))
        return None

    def _touch_log(self) -> None:
        """Touch the log of a local job each minute, as a heartbeat for other machines that see the run directory."""
        if self.allocation.is_local and time.monotonic() >= self._last_heartbeat + HEARTBEAT_SECONDS:
            self._last_heartbeat = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.run.get_log_path(self.task.id, self.attempt.number))

    def _truncate_log(self) -> None:
        """Limit the size of the ranks' log, such that all logs of a node together have at most MAX_LOG_BYTES bytes."""
        # At most ten checks per second by all supervisors of a job.
        if time.monotonic() < self._log_truncated_at + max(LOG_CHECK_SECONDS, self.allocation.count / 10):
            return
        self._log_truncated_at = time.monotonic()
        max_bytes = MAX_LOG_BYTES * (self.allocation.nodes or 1) // self.allocation.count
        truncate_log(self._log, max_bytes=max_bytes, keep=self._program.log_patterns)

    @cached_property
    def _exit_deadline(self) -> float | None:
        """Unix time at which to leave before the time limit, computed once; None without a limit, and for followers."""
        ends_at = self.allocation.ends_at
        return None if ends_at is None else self.allocation.compute_exit_deadline(ends_at)

    def _compute_seconds_to_exit(self, is_due: bool) -> float | None:
        """Return the seconds that a script has left to save before the time limit, or None if it need not save yet.

        None also for tula's worker, which saves by itself. Followers learn the time from a file that the leader writes,
        which they read only if a poll is due.
        """
        if not self._monitor.can_save:
            return None
        if self._exit_deadline is not None and time.time() >= self._exit_deadline:
            self._monitor.write_allocation_end(self.allocation.ends_at or 0.0)
            is_due = True
        ends_at = self._monitor.read_allocation_end() if is_due else None
        return None if ends_at is None else max(0.0, ends_at - SIGKILL_DELAY_SECONDS - time.time())

    def _end_ranks(self, group: RankGroup, *, deadline: float) -> None:
        """Ask the ranks to save and exit, and kill what remains at the deadline (monotonic clock).

        A script that can save is first asked to do so in the way that its job configures.
        """
        if self._monitor.can_save:
            asked_at = time.time()
            self._monitor.request_checkpoint()
            while group.is_running() and time.monotonic() < deadline:
                if self._monitor.has_saved_since(since=asked_at):
                    break
                time.sleep(POLL_SECONDS)
                self._monitor.record_progress()
            deadline = max(deadline, time.monotonic() + 1.0)
        group.end_ranks(deadline - time.monotonic())

    def _end_waiting_ranks(self, group: RankGroup) -> Failure | None:
        """Kill ranks that wait in a collective for a failed rank; None if the failed rank is one of this supervisor."""
        has_failed_rank = group.find_first_failure() is not None
        group.kill()
        # This supervisor's ranks have a failure of their own to report.
        if has_failed_rank:
            return None
        peer = Failure(outcome="peer")
        if not self.allocation.is_leader:
            return peer
        return failures.find_root_cause(self.run, self.task, self.attempt, peer)

    def _has_reason_not_to_start(self) -> bool:
        is_due = self.change_watcher.is_due()
        return self.allocation.termination.is_received or self._find_reason_to_stop(is_due) is not None

    def _find_reason_to_stop(self, is_due: bool) -> Failure | None:
        """Return why the ranks must stop: cancelled (checked only if a poll is due) or past the deadline; else None."""
        if is_due and self.run.is_cancelled(self.task.job):
            return Failure(outcome="cancelled", message="cancelled by the user")
        if time.monotonic() <= self.deadline:
            return None
        explanations = filter(None, [self.task.timeout_message, self._monitor.describe_missing_step()])
        return Failure(outcome="cancelled", message=", and ".join(explanations))

    def _find_exit_failure(self, exited: RankExit) -> Failure | None:
        self._monitor.record_final_reports()
        if exited.exit_code == 0:
            return self._program.find_clean_exit_failure()
        failure = failures.find_rank_failure(self.run, self.task, self.attempt, exited)
        if self.allocation.is_local or self.allocation.termination.is_received:
            return failure
        failures.write_exit_report(self.run, self.task, self.attempt, exited, failure)
        if not self.allocation.is_leader:
            return failure
        self._wait_for_reports()
        return failures.find_root_cause(self.run, self.task, self.attempt, failure)

    def _wait_for_reports(self) -> None:
        """Wait, at most PEER_GRACE_SECONDS, for the reports of all supervisors: the root cause may be on another one.

        A rank that lost its peer reports so at once. Under torchrun its supervisor reports only when torchrun has
        exited, so reports of lost peers alone do not name the cause yet.
        """
        deadline, ranks_each = time.monotonic() + PEER_GRACE_SECONDS, self.task.ranks_per_supervisor
        supervisors = set(range(0, self.command.ranks, ranks_each))
        while time.monotonic() < deadline:
            failed = self.run.list_failed_ranks(self.task.id, self.attempt.number)
            reported = supervisors <= {rank - rank % ranks_each for rank in failed}
            if reported and has_cause(self.run.read_failures(self.task.id, self.attempt.number)):
                return
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))


# --- The size of a log

LOG_TAIL_BYTES = 20_000
"""Bytes at the end of a log from which the failure of ranks that wrote no record is found."""
MAX_LOG_BYTES = 128 * 2**20
"""Maximum bytes of the logs of a node in one attempt; the middle of a longer log is dropped."""
_MAX_LINE_BYTES = 65_536  # bytes; longer lines are cut
_READ_BYTES = 2**22  # bytes of a log that are searched in one read
_DROPPED_LINE = b"tula: %d bytes of this log were dropped here: it had grown beyond %d MiB\n"
_DROPPED_BYTES_PATTERN = re.compile(rb"^tula: ([0-9]+) bytes of this log were dropped here: .*\n", re.MULTILINE)


def truncate_log(log: Path, *, max_bytes: int = MAX_LOG_BYTES, keep: Sequence[str] = ()) -> None:
    """Drop the middle of a log that is too large, so that endless output does not fill the disk.

    Ranks open the log in append mode and can write while it is cut. A line in its place reports how much was dropped.

    Args:
        log: the file, which may not exist.
        max_bytes: maximum size in bytes; about an eighth of it is kept from the start and a quarter from the end of the log.
        keep: patterns of lines to keep from the middle too; the newest of them, up to a quarter of `max_bytes`.
    """
    try:
        if log.stat().st_size <= max_bytes:
            return
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(log, flags), "r+b", 0) as file:
            size = os.fstat(file.fileno()).st_size
            beginning = os.pread(file.fileno(), max_bytes // 8 + 256, 0)
            earlier = _DROPPED_BYTES_PATTERN.search(beginning)
            head_end = earlier.start() if earlier else beginning.rfind(b"\n", 0, max_bytes // 8) + 1
            until = max(head_end, size - max_bytes // 4)
            until += os.pread(file.fileno(), _MAX_LINE_BYTES, until).find(b"\n") + 1
            kept_lines = b"".join(_find_matching_lines(file, head_end, until, keep)) if keep else b""
            if len(kept_lines) > max_bytes // 4:
                kept_lines = kept_lines[kept_lines.find(b"\n", -max_bytes // 4) + 1 :]
            file.seek(until)
            end = file.read() or b""
            dropped = until - head_end - len(kept_lines) + (int(earlier[1]) - len(earlier[0]) if earlier else 0)
            file.truncate(head_end)
            file.write(_DROPPED_LINE % (dropped, max_bytes >> 20) + kept_lines + end)
    except OSError as error:
        sys.stderr.write(
            f"tula: {log} is larger than {max_bytes >> 20} MiB and cannot be truncated: {error.strerror}\n"
        )


def _find_matching_lines(file: BinaryIO, begin: int, end: int, patterns: Sequence[str]) -> Iterator[bytes]:
    """Yield the lines between two offsets of a file that match any of the patterns."""
    expressions, incomplete = [re.compile(pattern, re.MULTILINE) for pattern in patterns], b""
    for at in range(begin, end, _READ_BYTES):
        block = incomplete + os.pread(file.fileno(), min(_READ_BYTES, end - at), at)
        *lines, incomplete = block.splitlines(keepends=True)
        lines += [incomplete] if at + _READ_BYTES >= end else []
        for line in lines:
            if any(expression.search(line.decode(errors="replace")) for expression in expressions):
                yield line
