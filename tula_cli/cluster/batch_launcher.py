"""Jobs that wait in a queue: a training as a chain of them, whatever the scheduler is."""

import hashlib
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tula_cli.cluster.chains import (
    YOUNG_WORDS,
    get_chain_state,
    get_folder_patience,
    get_time_limit,
    list_chain_tasks,
    list_nodes_of_links,
)
from tula_cli.cluster.local import list_attempts_of_submission
from tula_cli.cluster.scheduler import JobRequest, Queued, Scheduler, SchedulerState
from tula_cli.errors import SchedulerError
from tula_cli.run import file_changes, package
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_end
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import Task, TrainTask
from tula_cli.run.snapshot import Snapshot, is_moved
from tula_cli.spec.resources import OwnScheduler
from tula_cli.version import __version__

PROGRAM = "tula_cli.cluster.job_main"
"""The command of every task of a job, if the scheduler starts tula itself."""
_BAD_ID = re.compile(r"[\s/_]")


class BatchLauncher:
    """Jobs on a scheduler with a queue: it starts one supervisor a rank, or one a node.

    Args:
        scheduler: who takes the jobs.
        kind: `cluster.kind` of the jobs.
    """

    def __init__(self, scheduler: Scheduler, kind: str) -> None:
        self.scheduler = scheduler
        self.kind = kind

    @property
    def forgotten(self) -> str:
        return f"{self.scheduler.name} has forgotten it"

    def script(self, run: RunDir, task: Task) -> str:
        """Return the text that would be submitted; later links of a chain wait for the one before them as well."""
        from tula_cli.cluster.scripts.start import preview_command  # for a dry run alone, not for each look at the jobs

        text = self.script_text(run, self.request(run, task, self._link_names(run, task)[0]), task)
        if not (preview_text := preview_command(run, task)):
            return text
        return f"{text.rstrip()}\n\n# where tula then starts, on each GPU or node: {preview_text}\n"

    def submit(self, run: RunDir, task: Task) -> Job:
        """Submit a job, a training with all links of its chain; what is in the queue already is taken as it is.

        Raises:
            SchedulerError: it was refused, in the scheduler's own words, or nobody answers.
        """
        earlier, names, nodes = run.job(task.job), self._link_names(run, task), list_nodes_of_links(task)
        if earlier is not None and is_moved(earlier, run.path.resolve()):
            self.scheduler.cancel(earlier.ids[::-1])  # what still waits would find no run directory
        queued = self.queued_jobs(run, task, names)
        if earlier and any(job.id in earlier.ids for job in queued.values()):
            return earlier
        ids = [queued[name].id for name in names if name in queued]
        for id_ in ids:
            self.prepare(run, task, id_)  # whoever submitted it may have been killed before that
        submitted_at = min((_get_script_write_time(job) for job in queued.values()), default=time.time())
        file_changes.prepare_folders(
            run.path, *([f"train/{task.signature}/checkpoints"] if isinstance(task, TrainTask) else [])
        )
        new = list(zip(list_chain_tasks(task), names, strict=True))[_count_submitted_links(names, queued) :]
        ids += self._submit_links(
            run, new, after=self.jobs_to_name(run, task, queued, ids), rehearsal=_resume_test_jobs(run, task)
        )
        submissions = earlier.submissions if earlier else 0
        return Job(
            id=task.job,
            scheduler=self.kind,
            scheduler_id=ids[0],
            nodes=task.nodes,
            link_nodes=nodes if len(set(nodes)) > 1 else (),
            submitted_at=submitted_at,
            submissions=max(1, submissions) if queued else submissions + 1,
            links=tuple(ids) if len(names) > 1 else (),
            folder=str(run.path.resolve()),
            tula=__version__,
        )

    def patient(self) -> "BatchLauncher":
        """Return this one: what other schedulers are asked is not shared among commands that wait."""
        return self

    def states(self, look: Snapshot, jobs: Sequence[Job]) -> dict[str, SchedulerState]:
        """Ask for all jobs at once. A job that nobody knows is over, unless it is too young to be known."""
        states = self.scheduler.ask([id_ for job in jobs for id_ in job.ids])
        return {
            job.id: _add_error_output(look, job, self._explain_missing_log(look, job, self._state(look, job, states)))
            for job in jobs
        }

    def _state(self, snapshot: Snapshot, job: Job, states: Mapping[str, SchedulerState]) -> SchedulerState:
        state = get_chain_state(job, states, forgotten=self.forgotten, released=snapshot.released_links(job.id))
        if state.state == "pending" and is_moved(job, snapshot.here):
            return SchedulerState("ended", f"the run was at {job.folder} when it was submitted, and was moved since")
        if state.reason == YOUNG_WORDS and any(
            attempt.ended_at is None for attempt in list_attempts_of_submission(snapshot, job)
        ):
            return SchedulerState("running", "the queue does not know it")
        return state

    def _explain_missing_log(self, snapshot: Snapshot, job: Job, state: SchedulerState) -> SchedulerState:
        """Add to a job without any log that its nodes probably do not see the run directory."""
        ran = not state.reason or state.reason.startswith(("FAILED", self.forgotten))
        if not (state.without_log or (state.state == "ended" and ran)) or list_attempts_of_submission(snapshot, job):
            return state
        if snapshot.started_logs(job.ids):
            return state
        reason = (
            f"it left no log: its nodes probably do not see {snapshot.path.resolve()}; choose a folder on a file system that "
            "all nodes share with --run-dir"
        )
        return replace(state, reason=f"{state.reason}; {reason}" if state.reason else reason)

    def cancel(self, run: RunDir, job: Job) -> None:
        """Mark it, so that no supervisor starts anything more, and cancel its allocations; only our own ids.

        Raises:
            SchedulerError: the scheduler did not do it.
        """
        run.cancel(job.id)
        # The last first: the end of one link would start the next.
        if complaint := self.scheduler.cancel(job.ids[::-1]):
            raise SchedulerError(
                f"{self.scheduler.cancel_command or self.scheduler.name}: {complaint}",
                f"{job.id} is marked and starts nothing more; run tula cancel again",
            )

    # --- one job

    def request(self, run: RunDir, task: Task, name: str, after: Sequence[str] = ()) -> JobRequest:
        """Return what the scheduler is asked for: a job in which every task starts a supervisor."""
        cluster = task.spec.cluster
        scheduler_section = cluster.own_scheduler or OwnScheduler()
        arguments = (PROGRAM, self.kind, str(run.path.resolve()), task.id, json.dumps(scheduler_section.options))
        return JobRequest(
            name=name,
            command=f"{scheduler_section.python or shlex.quote(sys.executable)} -m {shlex.join(arguments)}",
            nodes=task.nodes,
            tasks_per_node=1 if task.spec.task_per_node else cluster.gpus_per_node,
            gpus_per_node=0 if cluster.device == "cpu" else cluster.gpus_per_node,
            minutes=get_time_limit(task),
            after=tuple(after),
            folder=Path(task.workdir),
            logs=run.submitit_dir.absolute(),
            setup=(*scheduler_section.setup, *package.make_shell_lines(run.path)),
            patience=get_folder_patience(task),
        )

    def script_text(self, run: RunDir, job: JobRequest, task: Task) -> str:
        """Return the script of one job."""
        return self.scheduler.script(job)

    def prepare(self, run: RunDir, task: Task, id_: str) -> None:
        """Leave what a submitted job needs and its script does not say: nothing, where the scheduler starts tula itself."""

    def name_of_first_job(self, run: RunDir, task: Task) -> str:
        """Return the name of a task's first job: by the run's place, for the queue may not tell which script a job has."""
        return f"tula-{run.id}-{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:6]}-{task.job}"

    def queued_jobs(self, run: RunDir, task: Task, names: Sequence[str]) -> dict[str, Queued]:
        """Return the jobs of a task's chain that are in the queue, by their names as of `_link_names`."""
        return find_queued(self.scheduler, run, names)

    def jobs_to_name(self, run: RunDir, task: Task, there: Mapping[str, Queued], ids: Sequence[str]) -> Sequence[str]:
        """Return which of the jobs in the queue the next link of their chain has to name."""
        return ids

    def jobs_waited_for(self, after: Sequence[str], ids: Sequence[str]) -> Sequence[str]:
        """Return which jobs a link waits for: of those that were in the queue, and of those submitted now."""
        return (*after, *ids)

    def _link_names(self, run: RunDir, task: Task) -> list[str]:
        """Return the names of the jobs to submit: they find a job again of which nobody told the id."""
        first_name = self.name_of_first_job(run, task)
        return [first_name, *(f"{first_name}.{number}" for number in range(2, len(list_chain_tasks(task)) + 1))]

    def _submit_link(self, run: RunDir, task: Task, name: str, *, after: Sequence[str]) -> str:
        """Submit one job; return its id.

        Raises:
            SchedulerError: it was refused, or nobody answered and nothing is in the queue.
        """
        run.lock.heartbeat()
        job = self.request(run, task, name, after)
        id_ = submit_script(self.scheduler, run, job, self.script_text(run, job, task))
        self.prepare(run, task, id_)
        return id_

    def _submit_links(
        self, run: RunDir, named: Sequence[tuple[Task, str]], *, after: Sequence[str], rehearsal: Sequence[str]
    ) -> list[str]:
        """Submit jobs, each with its name, to start when all before it have ended; return their ids.

        All: the end of one that waits (scancel) must not start the next beside one that runs.

        Raises:
            SchedulerError: the first one was refused.
        """
        ids: list[str] = []
        for task, name in named:
            try:
                ids.append(self._submit_link(run, task, name, after=(*rehearsal, *self.jobs_waited_for(after, ids))))
            except SchedulerError:
                if not ids and not after:
                    raise
                break  # the queue takes no more of this user's jobs; those that it took go as far as they come
        return ids


def submit_script(scheduler: Scheduler, run: RunDir, job: JobRequest, text: str) -> str:
    """Submit a script under a name that finds its job again; return the job's id.

    Raises:
        SchedulerError: it was refused, or nobody answered and nothing is in the queue.
    """
    package.keep_package(run.path.resolve())
    id_ = scheduler.submit(run.write_script(job.name, text), job)
    if not isinstance(id_, str) or not id_ or _BAD_ID.search(id_):  # classes of users are not type-checked
        raise SchedulerError(
            f"{scheduler.name} gave a job the id {id_!r}",
            "submit() has to return a text without '/', '_' and white space; the job itself may be in the queue",
        )
    return id_


def find_queued(scheduler: Scheduler, run: RunDir, names: Sequence[str]) -> dict[str, Queued]:
    """Return this run's jobs in the queue by their names.

    A run of the same job in another folder may have the same names; its scripts are elsewhere.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    folder = run.submitit_dir.resolve()
    jobs = scheduler.queued(names)
    return {job.name: job for job in jobs if not job.script or Path(job.script).parent.resolve() == folder}


def _get_script_write_time(job: Queued) -> float:
    """Return when the script of a job was written, just before it was submitted."""
    try:
        return Path(job.script).stat().st_mtime if job.script else time.time()
    except OSError:
        return time.time()


def _count_submitted_links(names: Sequence[str], queued: Mapping[str, Queued]) -> int:
    """Return how many links need no submission: a link before one that is there has run, or must not run beside it."""
    return max((names.index(name) + 1 for name in queued), default=0)


def _resume_test_jobs(run: RunDir, task: Task) -> Sequence[str]:
    """Return the jobs that a training waits for before its first link."""
    job = run.job(task.after) if isinstance(task, TrainTask) and task.after else None
    return () if job is None else job.ids


def _add_error_output(snapshot: Snapshot, job: Job, state: SchedulerState) -> SchedulerState:
    """Add what the shell, srun or python said in the last job of a chain that failed before it started a supervisor."""
    if state.state != "ended" or not state.reason.startswith("FAILED"):
        return state
    started = {attempt.job_id for attempt in list_attempts_of_submission(snapshot, job)}
    last_link = max((id_ for id_ in job.ids if snapshot.started_logs([id_])), key=job.ids.index, default=None)
    if last_link is None or last_link in started:
        return state
    for path in reversed(snapshot.scheduler_logs([last_link])):
        lines = [line.strip() for line in read_end(path, 2**16).splitlines()]
        error_lines = [
            line for line in lines if line and "Exited with exit code" not in line and "submitit" not in line
        ]
        if error_lines and path.suffix == ".err":
            return replace(state, reason=f"{state.reason}: {error_lines[-1]} ({path})")
    return state
