"""The first job of a run whose model and dataset cannot be built on this machine: it inspects them on a node."""

import contextlib
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tula_cli.cluster.batch_launcher import find_queued_jobs, submit_script
from tula_cli.cluster.chains import YOUNG_SECONDS
from tula_cli.cluster.inspection import (
    INSPECTION_MODULE,
    INSPECTION_TIMEOUT,
    CachedInspection,
    Inspect,
    NotInspectable,
    find_exceeded_limit,
    get_python_command,
    list_unmeasured_settings,
    make_interpreter_error,
    parse_inspection,
)
from tula_cli.cluster.launcher import lock_submission
from tula_cli.cluster.scheduler import JobRequest
from tula_cli.cluster.slurm import queue as slurm_queue
from tula_cli.cluster.slurm.sbatch import make_submitit_parameters
from tula_cli.cluster.slurm.scheduler import SlurmScheduler, require_plain_path
from tula_cli.errors import Interruption, JobFailed, Pending, SchedulerError, TulaError
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_record, read_text, write_file_atomically, write_record
from tula_cli.run.records.inspections import FirstJob, Inspection
from tula_cli.run.records.tasks import CheckTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_digest
from tula_cli.spec.slurm_options import EXTRA_MINUTES

POLL_INTERVALS = (2.0, 10.0)
"""Seconds between two queries of the queue: while the job runs, and the maximum while it is pending."""
LOG_LAG_SECONDS = 10.0  # seconds until a file of a finished job becomes visible on this machine
INSPECTION_JOB_MINUTES = math.ceil(INSPECTION_TIMEOUT / 60) + EXTRA_MINUTES
"""Time limit of the job in minutes; it uses one node, so this also limits its node-hours."""
_JOB_FILE = "first_job.json"


def load_inspection(run: RunDir, spec: JobSpec) -> Inspection | None:
    """Return the inspection by an earlier first job of this run with these settings, or None."""
    return read_record(get_inspection_path(run, spec), Inspection) or _read_inspection_of_lost_command(run, spec)


def _read_inspection_of_lost_command(run: RunDir, spec: JobSpec) -> Inspection | None:
    """Return the inspection by a job whose tula command exited before the job finished, or None."""
    job = _find_newest_job(run)
    if job is None or job.awaited != get_inspection_path(run, spec).name:
        return None
    try:
        return parse_inspection(read_text(_get_log_path(run, job.scheduler_id)), "")
    except (TulaError, ValueError):  # the job runs, ended without an answer, or failed (the next may not)
        return None


def get_inspection_path(run: RunDir, spec: JobSpec) -> Path:
    """Return the file of a first job's inspection; its name has a hash of settings that are not in the run's name."""
    return run.path / f"inspection-{compute_digest(list_unmeasured_settings(spec))}.json"


def reuse_stored_inspection(inspect: Inspect, run: RunDir) -> Inspect:
    """Return a function that returns the inspection by a first job of the run, or else inspects on this machine.

    The stored inspection is tried first, as a first job means that this machine could not build the model. With
    `fresh`, the job is inspected anew, and the stored inspection is removed if inspections may be written.
    """
    cached = inspect if isinstance(inspect, CachedInspection) else None

    def inspect_anew(spec: JobSpec) -> Inspection:
        inspection = inspect(spec)
        if cached and cached.keep:
            with contextlib.suppress(OSError):  # an unwritable folder does not affect this command
                get_inspection_path(run, spec).unlink(missing_ok=True)  # replaced by the newer inspection
        return inspection

    def load_or_inspect(spec: JobSpec) -> Inspection:
        if (stored := load_inspection(run, spec)) is None:
            return inspect(spec)
        if cached:
            cached.note("using the model and dataset sizes found by a job on a node (--fresh repeats that job)")
        return stored

    return inspect_anew if cached and cached.fresh else load_or_inspect


def inspect_job_if_possible(spec: JobSpec, inspect: Inspect) -> Inspection | NotInspectable:
    """Return the inspection of a job's model and dataset, or the error if only a node can inspect them.

    Raises:
        SpecError: they cannot be built.
        JobFailed: the user's code fails.
        NotInspectable: they cannot be inspected here, and no job can do so on a node.
    """
    try:
        return inspect(spec)
    except NotInspectable as error:
        if not spec.cluster.backend.inspects_on_node:
            raise
        return error


def count_node_hours(run: RunDir) -> float:
    """Return an upper bound of the node-hours used by first jobs of this run."""
    job = _find_newest_job(run)
    return job.node_hours if job is not None else 0.0


def count_newest_node_hours(run: RunDir) -> float:
    """Return an upper bound of the node-hours used by the newest first job of this run."""
    job = _find_newest_job(run)
    return job.node_hours - job.earlier if job is not None else 0.0


def _find_newest_job(run: RunDir) -> FirstJob | None:
    return read_record(run.path / _JOB_FILE, FirstJob)


def _get_log_path(run: RunDir, id_: str) -> Path:
    return run.submitit_dir / f"{id_}_0_log.out"


def render_inspection_script(run: RunDir, spec: JobSpec) -> str:
    """Return the sbatch script of the job that builds the model on a node; nothing is written or submitted."""
    from tula_cli.cluster.slurm.script import ScriptWriter

    task = CheckTask(id="inspection", job="inspection", spec=spec, workdir=str(Path.cwd()), nodes=1)
    require_plain_path(run.path)
    writer = ScriptWriter(run.submitit_dir, timeout=task.folder_timeout)
    options = {"job_name": _make_job_name(run), "ntasks_per_node": 1, "time": INSPECTION_JOB_MINUTES}
    writer.update_parameters(**{**make_submitit_parameters(run, task), **options})
    return writer.render_text(
        f"{get_python_command(spec)} -m {INSPECTION_MODULE} {shlex.quote(str(_get_spec_path(run)))}"
    )


def _make_job_name(run: RunDir) -> str:
    return f"tula-{run.id}-inspection"


def _get_spec_path(run: RunDir) -> Path:
    return run.submitit_dir.absolute() / "inspection-spec.json"


def inspect_job_on_node(
    run: RunDir, spec: JobSpec, *, timeout: float | None = None, sleep: Callable[[float], None] = time.sleep
) -> Inspection:
    """Build the model and the dataset in a separate job on one node, wait for it, and store the inspection.

    The job requests the same resources, set-up and interpreter as other jobs on one node. A pending or running job for
    the same spec is adopted. The job is cancelled if this command stops waiting. If this process is killed, the job
    continues, and the next command finds its result.

    Args:
        run: the run, in which the inspection and the node-hours of the job are stored.

    Raises:
        SpecError, JobFailed: as in `inspection.inspect`, from the node.
        SchedulerError: the job was refused, will never start, or left no log.
        Pending: the job is not over after `timeout` seconds.
        Interruption: Ctrl-C.
    """
    job = _WatchedJob(run, spec, sleep)
    try:
        with lock_submission(run):
            job.submit_or_adopt()
        log = job.wait_for_log(timeout)
    except KeyboardInterrupt:
        job.cancel()
        if not job.id:
            hint = "run the same command again to submit the first job, or to follow it"
            raise Interruption("interrupted", hint) from None
        message = f"interrupted; job {job.id}, which builds the model and the dataset, was cancelled"
        raise Interruption(message) from None
    except BaseException:
        job.cancel()
        raise
    finally:
        job.record_node_hours(is_finished=True)
    output, error_message = read_text(log), read_text(log.with_suffix(".err"))
    if not log.exists():
        raise SchedulerError(
            f"job {job.id}, which builds the model and the dataset, wrote no log in {log.parent}",
            "the node of the job cannot write to this folder: set [[--run-dir]] to a folder on a file system that all nodes share",
        )
    try:
        if not output.strip():
            raise make_interpreter_error(get_python_command(spec), error_message)
        inspection = parse_inspection(output, error_message)
    except JobFailed as error:
        exceeded = find_exceeded_limit(error, error_message)
        if exceeded is None or exceeded[0].name != "memory":
            raise
        raise JobFailed(
            f"the job that builds the model and the dataset ran out of memory: {exceeded[1]}",
            f"request more with {spec.cluster.backend.memory_setting}",
        ) from error
    write_record(get_inspection_path(run, spec), inspection)
    return inspection


@dataclass
class _WatchedJob:
    """A job whose end is awaited. Its node time is counted from the last query in which it was still pending."""

    run: RunDir
    spec: JobSpec
    sleep: Callable[[float], None]
    id: str = ""  # SLURM job id; empty before the submission
    age: float = 0.0  # seconds between its submission and its adoption by this command
    seconds: float = 0.0  # upper bound of the seconds for which the job has held its node
    earlier: float = 0.0  # node-hours of earlier first jobs of the run

    def submit_or_adopt(self) -> None:
        """Submit and record the job, or adopt a queued one for the same spec; one for another spec is cancelled.

        Raises:
            SchedulerError: the job was refused, or SLURM does not answer.
        """
        newest, path = _find_newest_job(self.run), _get_spec_path(self.run)
        name, content, scheduler = _make_job_name(self.run), self.spec.model_dump_json(), SlurmScheduler()
        queued_job = find_queued_jobs(scheduler, self.run, [name]).get(name)
        self.earlier = newest.node_hours if newest is not None else 0.0
        if queued_job is not None and read_text(path) == content:
            self.id, self.age = queued_job.id, max(0.0, time.time() - path.stat().st_mtime)
            if newest is not None and newest.scheduler_id == queued_job.id:
                self.earlier = newest.earlier
        else:
            slurm_queue.cancel_jobs([queued_job.id] if queued_job is not None else [])
            write_file_atomically(path, content)
            script = render_inspection_script(self.run, self.spec)
            self.id = submit_script(scheduler, self.run, JobRequest(name, ""), script)
        self.record_node_hours(is_finished=False)

    def record_node_hours(self, *, is_finished: bool) -> None:
        """Record the node-hours of the job; while it runs, those of its time limit, because this process may be killed."""
        if not self.id:
            return
        hours = self.earlier + (self.seconds / 3600 if is_finished else INSPECTION_JOB_MINUTES / 60)
        awaited = "" if is_finished else get_inspection_path(self.run, self.spec).name
        job = FirstJob(scheduler_id=self.id, node_hours=hours, earlier=self.earlier, awaited=awaited)
        write_record(self.run.path / _JOB_FILE, job)

    def cancel(self) -> None:
        """Cancel the job, if it was submitted."""
        slurm_queue.cancel_jobs([self.id])

    def wait_for_log(self, timeout: float | None) -> Path:
        """Wait until the job is over; return the log of its first task.

        After the job has ended, its log may take up to LOG_LAG_SECONDS seconds to appear.

        Raises:
            SchedulerError: the job will never start.
            Pending: the job is not over after `timeout`.
        """
        log, since = _get_log_path(self.run, self.id), time.monotonic()
        started, ended, pause, never_starts_polls = since - self.age, None, POLL_INTERVALS[0], 0
        while ended is None or time.monotonic() - ended < LOG_LAG_SECONDS:
            if ended is not None and len(read_text(log).splitlines()) > 1:
                break
            state = slurm_queue.query_states([self.id]).get(self.id)
            now = time.monotonic()
            never_starts_polls = never_starts_polls + 1 if state is not None and state.hopeless else 0
            if state is not None and never_starts_polls > 1:  # a single query may say so while the controller is busy
                raise SchedulerError(
                    f"the job that builds the model and the dataset was cancelled, because it would never start: {state.reason}"
                )
            if state is not None and state.state == "pending":
                started, pause = now, min(1.5 * pause, POLL_INTERVALS[1])
            elif ended is None:
                self.seconds, pause = min(now - started, 60.0 * INSPECTION_JOB_MINUTES), POLL_INTERVALS[0]
            is_just_submitted = now - since + self.age < YOUNG_SECONDS
            has_ended = not is_just_submitted if state is None else state.state == "ended"
            if ended is None and has_ended:
                ended = now
            if ended is None and timeout is not None and now - since >= timeout:
                raise Pending(
                    f"the job that builds the model and the dataset did not finish within {timeout:g} s and was cancelled",
                    "run the same command again to start a new one, with a longer [[--timeout]]",
                )
            remaining = float("inf") if timeout is None else max(0.0, since + timeout - now)
            self.sleep(min(pause, remaining) if ended is None else POLL_INTERVALS[0] / 4)
        return log
