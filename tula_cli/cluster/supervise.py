"""The supervisor, which the scheduler runs: it starts the ranks as child processes, outlives them, and relaunches them.

A supervisor does not import torch. After a failure it reads what its ranks wrote and starts new processes: after an
out-of-memory the peers hang in a collective, so only a new process group is clean. No tula command has to be running.
The supervisor with index 0 is the leader of a job; the followers execute the commands that it writes.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tula_cli.cluster.allocation import POLL_SECONDS, Allocation
from tula_cli.cluster.attempt import RunningAttempt, close_attempt, open_attempt
from tula_cli.cluster.chains import compute_start_delay_minutes
from tula_cli.cluster.decisions import (
    ALLOCATION_ENDED,
    MAX_STARTUP_SECONDS,
    History,
    attribute_failure,
    decide_next_action,
)
from tula_cli.cluster.directory_watcher import ChangeWatcher
from tula_cli.cluster.failures import (
    append_traceback,
    convert_error_to_failure,
    find_supervisor_failure,
    record_supervisor_errors,
    write_follower_failure,
)
from tula_cli.cluster.full_disk import require_disk_space
from tula_cli.cluster.local import register_job_on_machine
from tula_cli.cluster.rank_processes import RankSpawner, get_first_rank
from tula_cli.cluster.rank_programs import make_rank_program
from tula_cli.cluster.relaunch import (
    apply_decision,
    find_newest_task,
    is_finished_or_cancelled,
    read_history,
    resize_task_to_allocation,
    write_summary,
)
from tula_cli.cluster.scheduler import Scheduler, SupportsStartDelay, exclude_nodes
from tula_cli.cluster.scripts.resume_test import require_resumable_script
from tula_cli.cluster.slurm import sbatch
from tula_cli.errors import JobFailed, OtherFormat, TulaError
from tula_cli.host.leftovers import MARK_VARIABLE, GpuMemory, make_process_mark
from tula_cli.host.machine_lock import TicketHolder
from tula_cli.host.network import get_node_name
from tula_cli.host.processes import is_process_running
from tula_cli.run import format as run_format
from tula_cli.run import shortages
from tula_cli.run.directory import RunDir
from tula_cli.run.files import list_files, pin_run, read_content
from tula_cli.run.records.failures import Failure, Relaunch, Requeue, Stop
from tula_cli.run.records.jobs import Attempt, Job, LeaderCommand
from tula_cli.run.records.tasks import Task

# --- Runs of another format


def require_current_format(run: Path, allocation: Allocation) -> None:
    """Check that a run has the format of this tula; otherwise hold the chain's pending jobs and change nothing else.

    Raises:
        OtherFormat: the run has another format.
        TulaError: the file with the format cannot be read.
    """
    try:
        run_format.require_current_format(run)
    except OtherFormat:
        waiting = _list_later_jobs(run, allocation.job_id) if allocation.is_leader else ()
        if waiting:  # each would exit like this one, and the chain would be used up in a minute
            scheduler = allocation.scheduler
            error_message = scheduler.hold(waiting)
            ids = ",".join(waiting)
            message = (
                f"could not be held: {error_message}"
                if error_message
                else f"are held; to release them: {scheduler.release_command} {ids}"
            )
            sys.stderr.write(f"tula: the waiting jobs of the chain ({ids}) {message}\n")
        raise


def _list_later_jobs(run: Path, job_id: str) -> Sequence[str]:
    """Return the jobs after `job_id` in its chain, from fields that records of any format are expected to have."""
    with contextlib.suppress(TulaError, OSError, ValueError, RecursionError):
        for path in list_files(run / "jobs"):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                chain_jobs = [str(chain_job) for chain_job in json.loads(read_content(path))["links"]]
                if job_id in chain_jobs:
                    return chain_jobs[chain_jobs.index(job_id) + 1 :]
    return ()


# --- The supervisor

FIRST_PAUSE, MAX_PAUSE = 5.0, 300.0
"""First and longest pause in seconds before a relaunch after a storage failure or a limit of the host."""
MAX_NFS_DELAY_SECONDS = 60.0
"""Maximum seconds by which, on NFS, a file may become visible after a file that was written later."""


def supervise(
    path: Path, task_id: str, *, environ: Mapping[str, str] = os.environ, scheduler: Scheduler | None = None
) -> None:
    """Run a task and its relaunches until the job is over.

    Args:
        task_id: the task to start with; replaced by a newer attempt of the same training run, if there is one.
        environ: the environment of the ranks.
        scheduler: scheduler of this job; None: SLURM or this machine, according to the environment.
    """
    try:
        pin_run(path)
        allocation = Allocation.from_environment(environ, scheduler)
        require_current_format(path, allocation)
        allocation.environ = {
            **environ,
            MARK_VARIABLE: make_process_mark(path, task_id, allocation.id, allocation.index),
        }
        supervisor = Supervisor(RunDir(path), allocation)
        with (
            record_supervisor_errors(
                supervisor.run, lambda error: supervisor.record_supervisor_failure(error, task_id)
            ),
            contextlib.closing(supervisor.spawner),
        ):
            supervisor.supervise(task_id)
    except TulaError as error:  # e.g. a full disk: only the scheduler's log can show the error
        sys.stderr.write(f"tula: {error.message}. {error.hint}\n")
        raise SystemExit(error.exit_code) from error


@dataclass
class Supervisor:
    """The supervisor in this process: the leader of a job's supervisors, or a follower.

    Supervisors communicate with each other and with tula commands through the run directory.
    """

    run: RunDir
    allocation: Allocation
    since: float = field(default_factory=time.time)
    spawner: RankSpawner = field(default_factory=RankSpawner)
    memory: GpuMemory = field(default_factory=GpuMemory)
    change_watcher: ChangeWatcher = field(init=False)
    _command_numbers: Iterator[int] = field(default_factory=itertools.count)  # numbers of the leader's commands
    _current_attempt: tuple[Task, Attempt] | None = None
    _undelayed_job: str = ""  # id of the next job of the chain, if its delay was removed; else empty
    _machine_ticket: TicketHolder | None = None  # measuring-lock ticket of a job on this machine

    def __post_init__(self) -> None:
        self.change_watcher = ChangeWatcher(self.run.path, self.allocation)

    def supervise(self, task_id: str) -> None:
        """Run a task and its relaunches until the job is over, as leader or follower.

        Raises:
            TulaError: the run directory cannot be written, or files of other supervisors do not appear in it.
        """
        if self.allocation.is_local:
            self._wait_for_resume_test(find_newest_task(self.run, task_id))
            with register_job_on_machine(self.run, find_newest_task(self.run, task_id)) as self._machine_ticket:
                self._run_as_leader(task_id)
            return
        self.allocation.termination.install_handlers()
        if self.allocation.is_leader:
            self.allocation.ends_at = self.allocation.scheduler.find_end_time(
                self.allocation.job_id, self.allocation.environ
            )
            self._run_as_leader(task_id)
        else:
            self.follow_leader()

    def record_supervisor_failure(self, error: Exception, task_id: str) -> None:
        """Record an error of this supervisor itself, so that it is not mistaken for a killed supervisor."""
        shortages.release_reserve(self.run.path)
        task, attempt = self._current_attempt or (find_newest_task(self.run, task_id), None)
        failure = convert_error_to_failure(error, self.run, task)
        if failure.outcome == "storage" and self._undelayed_job and time.time() < self.since + MAX_STARTUP_SECONDS:
            # Otherwise it would start at once and fail like this one.
            self._delay_job_start(self._undelayed_job, compute_start_delay_minutes(2))
        if not self.allocation.is_leader:
            if attempt is not None:
                rank = get_first_rank(self.allocation, task)
                write_follower_failure(self.run, task, attempt, rank, failure, error)
            return
        attempt = attempt or open_attempt(self.run, self.allocation, task)
        append_traceback(self.run, attempt, self.allocation.index, error)
        decision: Relaunch | Requeue | Stop = Stop(why="batch_failed")
        if task.has_checkpoints:
            decided = decide_next_action(task, failure, self._read_history(task, attempt, failure))
            decision = self._prepare_later_jobs(task, Requeue() if isinstance(decided, Relaunch) else decided, failure)
        else:
            apply_decision(self.run, task, failure, decision)
        close_attempt(self.run, attempt, failure, decision)

    def _wait_for_resume_test(self, task: Task) -> None:
        """Wait for the resume test that precedes a training on this machine; on a scheduler, job dependencies do so."""
        job = self.run.find_job(task.resume_test_job_id) if task.resume_test_job_id else None
        while job is not None and is_process_running(int(job.scheduler_id), job.process_started):
            if self.run.is_cancelled(task.job):
                return
            time.sleep(POLL_SECONDS)

    def _make_running_attempt(
        self, task: Task, attempt: Attempt, command: LeaderCommand, ends: float
    ) -> RunningAttempt:
        if command.rehearsal is not None:
            ends = min(ends, time.monotonic() + command.rehearsal.seconds)
            task = task.model_copy(update={"nodes": command.rehearsal.nodes})
        return RunningAttempt(
            self.run, self.allocation, self.spawner, self.memory, task, attempt, command, ends, self.change_watcher
        )

    # --- the leader

    def _run_as_leader(self, task_id: str) -> None:
        """Run attempts until the job is over, then write the command that ends the followers."""
        if not self.allocation.termination.is_received:
            self._run_attempts_as_leader(find_newest_task(self.run, task_id))
        self._write_command(LeaderCommand(task=None))

    def _run_attempts_as_leader(self, first_task: Task) -> None:
        self._end_start_delay(self._list_later_jobs_of_chain(first_task))
        ends = time.monotonic() + first_task.timeout
        task = self._resume_from_earlier_jobs(first_task)
        if task is not None and not is_finished_or_cancelled(self.run, task):
            task = resize_task_to_allocation(self.run, task, self.allocation.nodes)
        while task is not None and not is_finished_or_cancelled(self.run, task):
            if task.ramp_stages and not self.allocation.has_enough_nodes(task.nodes):
                self._cancel_jobs_with_too_few_nodes(task)
                return  # the next job with enough nodes resumes
            shortages.create_reserve_file(self.run.path)
            attempt = self._record_conflicting_trainings(open_attempt(self.run, self.allocation, task))
            self._current_attempt = (task, attempt)
            program = make_rank_program(self.run, task)
            try:
                require_resumable_script(self.run, task)
                rendezvous = program.find_rank_rendezvous()
            except JobFailed as error:
                refusal = Failure(outcome="user", message=f"{error.message}; {error.hint}", host=get_node_name())
                apply_decision(self.run, task, refusal, Stop(why="batch_failed"))
                close_attempt(self.run, attempt, refusal, Stop(why="batch_failed"))
                self._current_attempt = None
                break
            command = program.make_leader_command(attempt=attempt.number, rendezvous=rendezvous)
            self._write_command(command)
            running = self._make_running_attempt(task, attempt, command, ends)
            failure = running.apply_termination_reason(running.run_ranks_to_exit())
            reached = program.count_samples_reached(command, attempt)
            failure = program.record_attempt_results(command, failure)
            if failure is not None and failure.outcome == "disk":
                shortages.release_reserve(self.run.path)  # frees space to record the failure
            has_ended = failure is not None and (
                self.allocation.termination.is_received or failure.outcome in ALLOCATION_ENDED
            )
            history = self._read_history(task, attempt, failure, reached=reached, allocation_ended=has_ended)
            failure = attribute_failure(task, failure, history)
            decision = self._prepare_later_jobs(task, decide_next_action(task, failure, history), failure)
            # If the scheduler ends this job, the next job applies the decision.
            is_for_next_job = isinstance(decision, Requeue) and (history.allocation_ended or decision.first == "hold")
            next_task = None if is_for_next_job else apply_decision(self.run, task, failure, decision)
            # Done last: once the attempt is recorded as ended, all results that follow from it exist.
            close_attempt(self.run, self._record_conflicting_trainings(attempt), failure, decision, reached=reached)
            self._current_attempt = None
            if isinstance(decision, Requeue):
                # Again, as the submitting command may not have recorded the job's id at the start.
                self._end_start_delay(self._list_later_jobs_of_chain(task))
                return
            if isinstance(decision, Relaunch) and decision.pause:
                self._wait_before_relaunch(task, history.earlier, failure)
            task = next_task
        self._finish_job(task or first_task)

    def _record_conflicting_trainings(self, attempt: Attempt) -> Attempt:
        """Record in a probe's attempt the trainings of this user that now use its GPUs or cores; return the attempt."""
        ticket = self._machine_ticket
        if ticket is None or not ticket.measures:
            return attempt
        holders = [training.holder for training in ticket.list_conflicting_trainings()]
        names = tuple(dict.fromkeys([*attempt.disturbed_by, *holders]))
        if names == attempt.disturbed_by:
            return attempt
        disturbed = attempt.model_copy(update={"disturbed_by": names})
        self.run.write_attempt(disturbed)
        return disturbed

    def _read_history(
        self,
        task: Task,
        attempt: Attempt,
        failure: Failure | None,
        *,
        reached: int | None = None,
        allocation_ended: bool = False,
    ) -> History:
        """Return the history that `decide_next_action` needs when an attempt has ended, in this job or in an earlier one."""
        attempts = self._list_attempts_without_progress(task)
        return read_history(
            self.run,
            task,
            failure,
            attempt,
            attempts=self._list_attempts_of_submission(task) if task.has_checkpoints else (),
            earlier=[each for each in attempts if (each.task, each.number) != (attempt.task, attempt.number)],
            reached=attempt.reached if reached is None else reached,
            allocation=self.allocation.id,
            later_jobs=len(self._list_later_jobs_of_chain(task)),
            allocation_ended=allocation_ended,
        )

    def _prepare_later_jobs(
        self, task: Task, decision: Relaunch | Requeue | Stop, failure: Failure | None
    ) -> Relaunch | Requeue | Stop:
        """Hold or delay the later jobs of the chain, or exclude nodes for them, as a decision requires; return it with the result."""
        if not isinstance(decision, Requeue) or failure is None:
            return decision
        waiting, done = self._list_later_jobs_of_chain(task), dict[str, object]()
        if decision.first == "exclude":
            nodes = sbatch.make_excluded_nodes_option(self.run, task, also=failure.host)
            done = {"nodes": nodes, "complaint": exclude_nodes(self.allocation.scheduler, waiting, nodes)}
        elif decision.first == "hold" and waiting:
            done = {"jobs": tuple(waiting), "complaint": self.allocation.scheduler.hold(waiting)}
        elif decision.first == "delay" and waiting:
            done = {"jobs": (waiting[0],), "complaint": self._delay_job_start(waiting[0], decision.minutes)}
        return decision.model_copy(update=done)

    def _wait_before_relaunch(self, task: Task, earlier: Sequence[Attempt], failure: Failure | None) -> None:
        """Wait before a relaunch after a storage failure or a limit of the host, longer after each repetition."""
        outcome = None if failure is None else failure.outcome
        refused = sum((attempt.outcome, attempt.allocation) == (outcome, self.allocation.id) for attempt in earlier)
        deadline = time.monotonic() + min(FIRST_PAUSE * 4**refused, MAX_PAUSE)
        while time.monotonic() < deadline:
            if self.allocation.termination.is_received or self.run.is_cancelled(task.job):
                return
            time.sleep(POLL_SECONDS)

    def _cancel_jobs_with_too_few_nodes(self, task: Task) -> None:
        """Cancel later jobs with too few nodes for the rest of the training; one that still starts exits at once."""
        job = self._find_job(task)
        if job is not None:
            waiting = self._list_later_jobs_of_chain(task)
            large_enough = [chain_job for chain_job in waiting if job.get_nodes(chain_job) >= task.nodes]
            self._undelayed_job = ""  # another job of the chain is next after the cancellation
            self._end_start_delay(large_enough)
            too_small = [chain_job for chain_job in waiting if chain_job not in large_enough]
            self._cancel_jobs_of_chain(job, too_small, f"the training now needs {task.nodes} nodes")

    def _end_start_delay(self, waiting: Sequence[str]) -> None:
        """Remove the start delay of the next job of the chain, which is needed only if this job cannot start tula."""
        scheduler = self.allocation.scheduler
        if self._undelayed_job or not waiting or not isinstance(scheduler, SupportsStartDelay):
            return
        self._undelayed_job = waiting[0]
        if error_message := scheduler.end_delay(waiting[0], self.allocation.job_id):
            sys.stderr.write(f"tula: job {waiting[0]} may start some minutes late: {error_message}\n")

    def _delay_job_start(self, id_: str, minutes: int) -> str:
        """Delay the start of a job until at least `minutes` from now; return an error message, or empty."""
        scheduler = self.allocation.scheduler
        if isinstance(scheduler, SupportsStartDelay):
            return scheduler.delay(id_, minutes)
        return f"{scheduler.name} cannot delay jobs"

    def _list_later_jobs_of_chain(self, task: Task) -> Sequence[str]:
        """Return the ids of the jobs after this one in the chain."""
        job = self._find_job(task)
        return () if job is None else job.links[job.links.index(self.allocation.job_id) + 1 :]

    def _finish_job(self, task: Task) -> None:
        """Write a summary that is still missing, and cancel the jobs of the chain that are not needed."""
        training = self.run.find_training(task)
        if training is None:
            return
        if training.read_result() and not training.read_summary():
            write_summary(self.run, task)
        job = self._find_job(task)
        if job is not None:
            why = "the training is finished" if training.read_result() else "later jobs would fail in the same way"
            other_jobs = [chain_job for chain_job in job.links if chain_job != self.allocation.job_id]
            self._cancel_jobs_of_chain(job, other_jobs, why)

    def _cancel_jobs_of_chain(self, job: Job, chain_jobs: Sequence[str], why: str) -> None:
        """Cancel jobs of the chain, and record why for those after this one; finished jobs are not affected."""
        later_jobs = job.links[job.links.index(self.allocation.job_id) + 1 :]
        waiting = [chain_job for chain_job in chain_jobs if chain_job in later_jobs]
        if waiting and not self.run.is_cancelled(job.id):
            with contextlib.suppress(OSError):  # the jobs are cancelled even if the reason cannot be recorded
                self.run.record_released_jobs(job.id, waiting, why)
        self.allocation.scheduler.cancel(chain_jobs)

    def _write_command(self, command: LeaderCommand) -> None:
        number = next(self._command_numbers)
        if self.allocation.count > 1:
            self.run.write_leader_command(self.allocation.id, number, command)

    # --- a follower

    def follow_leader(self) -> None:
        """Execute the commands of the leader until its command to end the job.

        If the leader is killed, the scheduler ends this process too.

        Raises:
            TulaError: the task or attempt of a command does not appear in the run directory.
        """
        deadlines: dict[str, float] = {}
        for number in itertools.count():
            self.change_watcher.force_check()
            while (
                not self.change_watcher.is_due()
                or (command := self.run.read_leader_command(self.allocation.id, number)) is None
            ):
                if self.allocation.termination.is_received:
                    return
                self.change_watcher.pause()
            if command.task is None:
                return
            task, attempt = self._read_task_and_attempt(command.task, command.attempt)
            if get_first_rank(self.allocation, task) >= command.ranks:
                continue  # this node is not needed: fewer nodes are measured
            ends = deadlines.setdefault(task.id, time.monotonic() + task.timeout)
            self._current_attempt = (task, attempt)
            self._make_running_attempt(task, attempt, command, ends).run_ranks_to_exit()
            self._current_attempt = None

    def _read_task_and_attempt(self, task_id: str, number: int) -> tuple[Task, Attempt]:
        """Return task and attempt of a command; they are written before it, but may become visible later on NFS.

        Raises:
            TulaError: they do not appear within MAX_NFS_DELAY_SECONDS seconds.
        """
        patience_ends = time.monotonic() + MAX_NFS_DELAY_SECONDS
        while True:
            task, attempt = self.run.read_task(task_id), self.run.read_attempt(task_id, number)
            if task is not None and attempt is not None:
                return task, attempt
            if time.monotonic() > patience_ends:
                raise TulaError(
                    f"task {task_id}, attempt {number}, named by the leader, cannot be read after {MAX_NFS_DELAY_SECONDS:g} s"
                )
            time.sleep(POLL_SECONDS)

    # --- Resumption after earlier allocations

    def _resume_from_earlier_jobs(self, task: Task) -> Task | None:
        """Return the task with which to resume after earlier jobs of the chain; None if it must not resume."""
        self._close_lost_attempts(task)
        if not task.has_checkpoints:
            return task
        job = self._find_job(task)
        if job is not None and self._is_predecessor_cancelled(job, task):
            self.run.mark_job_cancelled(task.job, by=self.allocation.scheduler.cancel_command)
        earlier = self._list_attempts_of_submission(task)
        if not earlier or earlier[-1].task != task.id:
            return task  # first job of the submission, or the relaunch is already recorded
        last_attempt = self._correct_exit_reason(earlier[-1])
        if last_attempt.outcome == "cancelled":
            self.run.mark_job_cancelled(task.job, by=self.allocation.scheduler.cancel_command)
        if last_attempt.failure is None or isinstance(last_attempt.decision, Stop):
            return None
        history = self._read_history(task, last_attempt, last_attempt.failure)
        decision = decide_next_action(task, last_attempt.failure, history)
        if isinstance(decision, Stop):
            self.run.write_attempt(last_attempt.model_copy(update={"decision": decision}))
        elif last_attempt.outcome == "disk":
            require_disk_space(self.run, last_attempt)
        return apply_decision(self.run, task, last_attempt.failure, decision, granted=self.allocation.nodes)

    def _correct_exit_reason(self, last_attempt: Attempt) -> Attempt:
        """Replace a bare signal as the exit reason by the scheduler's reason, if it reports one, and store the attempt."""
        if last_attempt.outcome != "signal" or last_attempt.allocation in ("", self.allocation.id):
            return last_attempt
        termination = self.allocation.find_termination_reason(last_attempt.allocation)
        if termination.outcome == "signal":
            return last_attempt
        corrected = last_attempt.model_copy(update={"failure": termination})
        self.run.write_attempt(corrected)
        return corrected

    def _find_job(self, task: Task) -> Job | None:
        """Return the job record that contains this allocation; None until the submitting command has written it."""
        job = self.run.find_job(task.job)
        return job if job is not None and self.allocation.job_id in job.links else None

    def _is_predecessor_cancelled(self, job: Job, task: Task) -> bool:
        """Return whether the user cancelled the previous job of the chain (e.g. by scancel), so that it must end.

        Jobs with too few nodes belong to an earlier stage, after which tula cancelled them; they are ignored.
        """
        earlier = job.links[: job.links.index(self.allocation.job_id)]
        predecessors = [chain_job for chain_job in earlier if job.get_nodes(chain_job) >= task.nodes]
        return bool(predecessors) and self.allocation.scheduler.find_end_reason(predecessors[-1]) == "cancelled"

    def _list_attempts_of_submission(self, task: Task) -> list[Attempt]:
        """Return the attempts of a task in this submission; attempts of earlier submissions do not count."""
        job = self._find_job(task)
        chain_jobs = job.links if job is not None else (self.allocation.job_id,)
        return [
            attempt
            for attempt in self.run.read_attempts_of_task(task)
            if attempt.scheduler_id in chain_jobs  # on this machine, the id of all submissions is empty
            and (attempt.scheduler_id or attempt.started_at >= self.since)
        ]

    def _list_attempts_without_progress(self, task: Task) -> list[Attempt]:
        """Return the attempts of this job so far; of a training, those without a newer checkpoint since."""
        training = self.run.find_training(task)
        if training is None:
            return [attempt for attempt in self.run.read_attempts(task.id) if attempt.started_at >= self.since]
        progress = training.count_trained_samples()
        return [attempt for attempt in self._list_attempts_of_submission(task) if attempt.progress == progress]

    def _close_lost_attempts(self, task: Task) -> None:
        """Close attempts whose supervisor was killed: at the last change of their log, with the scheduler's reason."""
        run = self.run
        for lost in run.read_attempts_of_task(task):
            if lost.ended_at is not None:
                continue
            make_rank_program(run, run.read_task(lost.task) or task).recover_lost_attempt(lost)
            log = run.get_log_path(lost.task, lost.number)
            ended_at = log.stat().st_mtime if log.exists() else lost.started_at
            killed = Failure(outcome="signal", message="its supervisor was killed")
            failure = self.allocation.find_termination_reason(lost.allocation) if lost.allocation else killed
            failure = (find_supervisor_failure(run, lost) if failure.outcome == "signal" else None) or failure
            update = {"ended_at": ended_at, "failure": failure.model_copy(update={"detail": ""})}
            run.write_attempt(lost.model_copy(update=update))
