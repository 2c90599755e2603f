"""Jobs on any scheduler with a queue; a training is submitted as a chain of jobs."""

import hashlib
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tula_cli.cluster.chains import derive_chain_state, list_chain_tasks, list_nodes_of_chain_jobs
from tula_cli.cluster.local import list_attempts_of_submission
from tula_cli.cluster.scheduler import JobRequest, QueuedJob, Scheduler, SchedulerState
from tula_cli.errors import SchedulerError
from tula_cli.run import files, package
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_change_time, read_last_bytes
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import Task
from tula_cli.run.snapshot import Snapshot, has_run_moved
from tula_cli.version import __version__

PROGRAM = "tula_cli.cluster.job_main"
"""Module that every task of a job runs, if the scheduler starts tula directly."""
_INVALID_ID_CHARACTERS = re.compile(r"[\s/_]")


class BatchLauncher:
    """Launcher of jobs on a scheduler with a queue, which starts one supervisor per rank or per node."""

    def __init__(self, scheduler: Scheduler, kind: str) -> None:
        self.scheduler = scheduler
        self.kind = kind

    def render_script(self, run: RunDir, task: Task) -> str:
        """Return the script of the first job of a task; the scripts of later jobs also wait for earlier ones."""
        from tula_cli.cluster.rank_programs import make_rank_program  # imported here because only a dry run needs it

        text = self.render_job_script(run, self.make_request(run, task, self._list_job_names(run, task)[0]), task)
        if not (preview_text := make_rank_program(run, task).preview_command()):
            return text
        return f"{text.rstrip()}\n\n# started by tula on each GPU or node: {preview_text}\n"

    def submit(self, run: RunDir, task: Task) -> Job:
        """Submit a task, a training as all jobs of its chain; jobs that are already in the queue are reused.

        Raises:
            SchedulerError: the job was refused (with the scheduler's message), or the scheduler does not answer.
        """
        earlier, names, nodes = run.find_job(task.job), self._list_job_names(run, task), list_nodes_of_chain_jobs(task)
        if earlier is not None and has_run_moved(earlier, run.path.resolve()):
            self.scheduler.cancel(earlier.scheduler_ids[::-1])  # pending jobs would find no run directory
        queued = self.list_queued_jobs(run, task, names)
        if earlier and any(job.id in earlier.scheduler_ids for job in queued.values()):
            return earlier
        ids = [queued[name].id for name in names if name in queued]
        for id_ in ids:
            self.write_job_files(run, task, id_)  # the submitting command may have been killed before this
        written_at = [
            read_change_time(Path(job.script)) for job in queued.values() if job.script
        ]  # just before submission
        submitted_at = min((when or time.time() for when in written_at), default=time.time())
        folders = [f"train/{task.trained_signature}/checkpoints"] if task.has_checkpoints else []
        files.create_polled_folders(run.path, *folders)
        # Jobs before the last queued one have run, or must not run.
        submitted = max((names.index(name) + 1 for name in queued), default=0)
        new = list(zip(list_chain_tasks(task), names, strict=True))[submitted:]
        preceding = [
            id_ for name in task.awaited_job_ids if (job := run.find_job(name)) is not None for id_ in job.scheduler_ids
        ]
        ids += self._submit_jobs_of_chain(run, new, queued=tuple(ids), preceding=preceding)
        submissions = earlier.submissions if earlier else 0
        return Job(
            id=task.job,
            scheduler=self.kind,
            scheduler_id=ids[0],
            nodes=task.requested_nodes,
            link_nodes=nodes if len(set(nodes)) > 1 else (),
            submitted_at=submitted_at,
            submissions=max(1, submissions) if queued else submissions + 1,
            links=tuple(ids) if len(names) > 1 else (),
            folder=str(run.path.resolve()),
            tula=__version__,
        )

    def query_states(self, snapshot: Snapshot, jobs: Sequence[Job]) -> dict[str, SchedulerState]:
        """Query the states of all jobs at once. An unknown job has ended, unless it was submitted only seconds ago."""
        reported_states = self.scheduler.query_states([id_ for job in jobs for id_ in job.scheduler_ids])
        states: dict[str, SchedulerState] = {}
        for job in jobs:
            state = _explain_missing_log(snapshot, job, self._get_job_state(snapshot, job, reported_states))
            states[job.id] = _add_error_output(snapshot, job, state)
        return states

    def _get_job_state(self, snapshot: Snapshot, job: Job, states: Mapping[str, SchedulerState]) -> SchedulerState:
        forgotten = f"{self.scheduler.name} no longer knows it"
        state = derive_chain_state(job, states, forgotten=forgotten, released=snapshot.read_released_jobs(job.id))
        if state.state == "pending" and has_run_moved(job, snapshot.resolved_path):
            return SchedulerState("ended", f"the run was moved from {job.folder} after the job was submitted")
        if state.young and any(attempt.ended_at is None for attempt in list_attempts_of_submission(snapshot, job)):
            return SchedulerState("running", "the queue does not list the job")
        return state

    def cancel(self, run: RunDir, job: Job) -> None:
        """Mark a job as cancelled, so that its supervisors start nothing more, and cancel its allocations by their ids.

        Raises:
            SchedulerError: the scheduler did not cancel the allocations.
        """
        run.mark_job_cancelled(job.id)
        # In reverse order, as the end of one job of the chain would start the next.
        if error_message := self.scheduler.cancel(job.scheduler_ids[::-1]):
            raise SchedulerError(
                f"{self.scheduler.cancel_command or self.scheduler.name}: {error_message}",
                f"{job.id} will not start another attempt, but may still be running; run tula cancel again",
            )

    # --- one job

    def make_request(self, run: RunDir, task: Task, name: str, after: Sequence[str] = ()) -> JobRequest:
        """Return the resources and command to request from the scheduler: each task of the job starts a supervisor."""
        cluster = task.spec.cluster
        arguments = (PROGRAM, self.kind, str(run.path.resolve()), task.id, json.dumps(cluster.options))
        return JobRequest(
            name=name,
            command=f"{cluster.python or shlex.quote(sys.executable)} -m {shlex.join(arguments)}",
            nodes=task.nodes,
            tasks_per_node=1 if task.spec.starts_one_task_per_node else cluster.gpus_per_node,
            gpus_per_node=0 if cluster.device == "cpu" else cluster.gpus_per_node,
            minutes=task.time_limit_minutes,
            after=tuple(after),
            folder=Path(task.workdir),
            logs=run.submitit_dir.absolute(),
            setup=(*(cluster.setup or ()), *package.make_package_path_lines(run.path)),
            patience=task.folder_timeout,
        )

    def render_job_script(self, run: RunDir, job: JobRequest, task: Task) -> str:
        return self.scheduler.render_script(job)

    def write_job_files(self, run: RunDir, task: Task, id_: str) -> None:
        """Write files that a submitted job needs besides its script: none if the scheduler starts tula directly."""

    def make_first_job_name(self, run: RunDir, task: Task) -> str:
        """Return the name of a task's first job; has a hash of the run's path, as queues may not report scripts."""
        return f"tula-{run.id}-{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:6]}-{task.job}"

    def list_queued_jobs(self, run: RunDir, task: Task, names: Sequence[str]) -> dict[str, QueuedJob]:
        """Return the jobs of a task's chain that are in the queue, by the names that `_list_job_names` gives."""
        return find_queued_jobs(self.scheduler, run, names)

    def select_awaited_jobs(self, ids: Sequence[str]) -> Sequence[str]:
        """Return those of the earlier jobs of a chain that the next job has to name in its dependency."""
        return ids

    def _list_job_names(self, run: RunDir, task: Task) -> list[str]:
        """Return the names of the jobs to submit, by which a job is found again if its id was not recorded."""
        first_name = self.make_first_job_name(run, task)
        return [first_name, *(f"{first_name}.{number}" for number in range(2, len(list_chain_tasks(task)) + 1))]

    def _submit_job_of_chain(self, run: RunDir, task: Task, name: str, *, after: Sequence[str]) -> str:
        """Submit one job; return its id.

        Raises:
            SchedulerError: the job was refused, or the scheduler did not answer and the job is not in the queue.
        """
        run.lock.renew()
        job = self.make_request(run, task, name, after)
        id_ = submit_script(self.scheduler, run, job, self.render_job_script(run, job, task))
        self.write_job_files(run, task, id_)
        return id_

    def _submit_jobs_of_chain(
        self, run: RunDir, named: Sequence[tuple[Task, str]], *, queued: Sequence[str], preceding: Sequence[str]
    ) -> list[str]:
        """Submit named jobs, each to start when all earlier jobs have ended; return their ids.

        A job depends on all earlier ones, so cancelling a pending one does not start the next beside a running one.

        Raises:
            SchedulerError: the first job was refused and no earlier job is in the queue.
        """
        ids: list[str] = []
        for task, name in named:
            after = (*preceding, *self.select_awaited_jobs([*queued, *ids]))
            try:
                ids.append(self._submit_job_of_chain(run, task, name, after=after))
            except SchedulerError:
                if not ids and not queued:
                    raise
                break  # the queue accepts no more jobs of this user; the chain is shorter then
        return ids


def submit_script(scheduler: Scheduler, run: RunDir, job: JobRequest, text: str) -> str:
    """Submit a script under a name by which its job can be found again; return the job's id.

    Raises:
        SchedulerError: the job was refused, the scheduler did not answer and the job is not in the queue, or the
            scheduler returned an invalid id.
    """
    package.write_package_archive(run.path.resolve())
    id_ = scheduler.submit(run.write_script(job.name, text), job)
    # Schedulers of users are not type-checked.
    if not isinstance(id_, str) or not id_ or _INVALID_ID_CHARACTERS.search(id_):
        raise SchedulerError(
            f"{scheduler.name} gave a job the id {id_!r}",
            "make submit() return text without '/', '_' and white space; check the queue, because the job may already have been submitted",
        )
    return id_


def find_queued_jobs(scheduler: Scheduler, run: RunDir, names: Sequence[str]) -> dict[str, QueuedJob]:
    """Return this run's jobs in the queue, by their names.

    Jobs of the same names that belong to another run folder are recognised by the folder of their script.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    folder = run.submitit_dir.resolve()
    jobs = scheduler.list_queued_jobs(names)
    return {job.name: job for job in jobs if not job.script or Path(job.script).parent.resolve() == folder}


def _explain_missing_log(snapshot: Snapshot, job: Job, state: SchedulerState) -> SchedulerState:
    """Return the state of a job; if its log is missing, with the reason that its nodes do not see the run directory."""
    has_started = state.state == "ended" and (not state.reason or state.failed or state.forgotten)
    if not (state.without_log or has_started):
        return state
    if list_attempts_of_submission(snapshot, job) or snapshot.list_started_logs(job.scheduler_ids):
        return state
    reason = f"the job wrote no log, so its nodes probably do not see {snapshot.path.resolve()}; set --run-dir to a folder on a file system that all nodes share"
    return replace(state, reason=f"{state.reason}; {reason}" if state.reason else reason)


def _add_error_output(snapshot: Snapshot, job: Job, state: SchedulerState) -> SchedulerState:
    """Add the last error line of the scheduler log to the state of a chain that failed before a supervisor started."""
    if state.state != "ended" or not state.failed:
        return state
    started = {attempt.scheduler_id for attempt in list_attempts_of_submission(snapshot, job)}
    last_link = max(
        (id_ for id_ in job.scheduler_ids if snapshot.list_started_logs([id_])),
        key=job.scheduler_ids.index,
        default=None,
    )
    if last_link is None or last_link in started:
        return state
    for path in reversed(snapshot.list_scheduler_logs([last_link])):
        lines = [line.strip() for line in read_last_bytes(path, 2**16).splitlines()]
        errors = [line for line in lines if line and "Exited with exit code" not in line and "submitit" not in line]
        if errors and path.suffix == ".err":
            return replace(state, reason=f"{state.reason}: {errors[-1]} ({path})")
    return state
