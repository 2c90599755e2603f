"""Launcher and lock of jobs on this machine."""

import contextlib
import importlib.util
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tula_cli.cluster.allocation import POLL_SECONDS
from tula_cli.cluster.scheduler import JobRequest, LocalScheduler, SchedulerState
from tula_cli.errors import JobFailed
from tula_cli.host import devices, machine_lock
from tula_cli.host.processes import is_process_running
from tula_cli.run import package
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.records.tasks import Task
from tula_cli.run.snapshot import Snapshot
from tula_cli.version import __version__
from tula_cli.words import format_count, format_local_time

JOB_MODULE, SUPERVISOR = "tula_cli.cluster.job_main", "tula_cli.cluster.supervise"
"""Modules started by name: the command line never runs them in its process."""
MAX_HEARTBEAT_AGE_SECONDS = 3600.0
"""Seconds without a heartbeat (one per minute) after which a job on another machine is considered lost."""


class LocalLauncher:
    """Launcher of jobs on this machine: what a run records about them; `LocalScheduler` starts, finds and kills them.

    Probes that share a GPU or a core run one at a time, in order of their start; all other jobs run at once.
    """

    scheduler = LocalScheduler()

    def render_script(self, run: RunDir, task: Task) -> str:
        """Return a description of the processes that a job on this machine starts."""
        from tula_cli.cluster.rank_programs import make_rank_program  # imported here because only a dry run needs it

        description = f"{task.job} in {run.path.name}: {format_count(task.ranks, 'rank')} on this machine"
        command = make_rank_program(run, task).preview_command()
        return f"{description}\n{command}" if command else description

    def submit(self, run: RunDir, task: Task) -> Job:
        """Start a job that outlives this process, its terminal and Ctrl-C.

        Raises:
            JobFailed: torch is not installed here.
            SchedulerError: the process could not be started.
        """
        if importlib.util.find_spec("torch") is None:
            raise JobFailed(f"{sys.executable} has no torch", "pip install 'tula-cli[torch]'")
        earlier, submitted_at = run.find_job(task.job), time.time()
        folder = run.path.resolve()
        path = make_environment_with_package(folder)["PYTHONPATH"]
        command = shlex.join([sys.executable, "-m", JOB_MODULE, "local", str(folder), task.id])
        setup = (f"export PYTHONPATH={shlex.quote(path)}",)
        job = JobRequest(task.job, command, folder=Path(task.workdir), logs=run.submitit_dir.absolute(), setup=setup)
        script = run.write_script(task.job, self.scheduler.render_script(job))
        pid, _, started = self.scheduler.submit(script, job).partition("-")
        return Job(
            id=task.job,
            scheduler="local",
            scheduler_id=pid,
            nodes=task.nodes,
            submitted_at=submitted_at,
            submissions=earlier.submissions + 1 if earlier else 1,
            folder=str(folder),
            process_started=float(started) or None,
            host=socket.gethostname(),
            tula=__version__,
        )

    def query_states(self, snapshot: Snapshot, jobs: Sequence[Job]) -> dict[str, SchedulerState]:
        """Return the states of jobs: a job runs while the kernel lists its process with the recorded start time."""
        return {job.id: self._get_job_state(snapshot, job) for job in jobs}

    def _get_job_state(self, snapshot: Snapshot, job: Job) -> SchedulerState:
        if job.host not in ("", socket.gethostname()):
            return _get_state_on_other_machine(snapshot, job)
        if not is_process_running(int(job.scheduler_id), job.process_started):
            return SchedulerState("ended")
        if attempts := list_attempts_of_submission(snapshot, job):
            trainings = ", ".join(attempts[-1].disturbed_by)
            return SchedulerState("running", f"{trainings} may have disturbed the measured times" if trainings else "")
        waiting_text = machine_lock.describe_queue_position(_describe_ticket_holder(snapshot.resolved_path, job.id))
        return SchedulerState("pending", waiting_text or "starting")

    def cancel(self, run: RunDir, job: Job) -> None:
        """Mark a job as cancelled and wait until its supervisor has exited; kill its processes after 30 s."""
        run.mark_job_cancelled(job.id)
        deadline = time.monotonic() + 30
        while is_process_running(int(job.scheduler_id), job.process_started):
            if time.monotonic() >= deadline:
                self.scheduler.cancel([f"{job.scheduler_id}-{job.process_started:.0f}"])
                return
            time.sleep(0.1)


def run_supervisor(path: str, task_id: str) -> None:
    """Run the supervisor; called by submitit in a job on SLURM."""
    import importlib

    environ = {name: value for name, value in os.environ.items() if not name.startswith("SUBMITIT_")}
    supervise: Callable[..., None] = importlib.import_module(SUPERVISOR).supervise
    supervise(Path(path), task_id, environ=environ)
    if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
        raise SystemExit(0)  # else submitit would write a file with an empty result per supervisor


def make_environment_with_package(run: Path | None = None) -> dict[str, str]:
    """Return an environment in which processes import this tula, even from a checkout that is not installed.

    Args:
        run: run of a job, whose processes import an archived copy of tula as it is now, whatever is installed later.

    Raises:
        TulaError: the archive cannot be written into the run.
    """
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package_root, os.environ.get("PYTHONPATH", "")])
    archive = None if run is None else package.write_package_archive(run.resolve())
    return {**os.environ, "PYTHONPATH": package.prepend_archive_to_path(archive, path)}


def _get_state_on_other_machine(snapshot: Snapshot, job: Job) -> SchedulerState:
    """Return the state of a job on another machine from shared files, as its processes are visible only there."""
    attempts = list_attempts_of_submission(snapshot, job)
    if not attempts:
        return SchedulerState("running", f"waiting or ended on {job.host}; only commands on {job.host} see which")
    if attempts[-1].ended_at is not None:
        return SchedulerState("ended", f"on {job.host}, according to its files")
    heard = snapshot.read_last_log_time(attempts[-1])
    if heard is not None and time.time() - heard > MAX_HEARTBEAT_AGE_SECONDS:
        return SchedulerState("ended", f"on {job.host}, without a heartbeat since {format_local_time(heard)}")
    return SchedulerState("running", f"on {job.host}, according to its files")


def list_attempts_of_submission(snapshot: Snapshot, job: Job) -> list[Attempt]:
    """Return the attempts of a job since its last submission."""
    return snapshot.list_attempts_of_job(job.id, since=job.submitted_at - 1)


@contextlib.contextmanager
def register_job_on_machine(run: RunDir, task: Task) -> Iterator[machine_lock.TicketHolder | None]:
    """Yield the ticket of a job in the machine's measuring lock; a probe waits for its turn, other jobs only register.

    The kernel releases the ticket when this process exits. A probe that is cancelled while it waits proceeds without
    its turn, and then exits as cancelled. Yields None if no ticket can be drawn.
    """
    measures, ranks = task.is_timed, task.ranks
    gpus = [] if task.spec.cluster.device == "cpu" else [f"gpu {name}" for name in devices.list_gpu_lock_names(ranks)]
    # Loader processes of a training would disturb a probe on CPUs.
    cores = [] if gpus and measures else machine_lock.list_core_devices()
    try:
        ticket = machine_lock.TicketHolder(
            _describe_ticket_holder(run.path, task.job), [*gpus, *cores], measures=measures
        )
    except OSError as error:
        if measures:
            sys.stderr.write(
                f"tula: warning: {error}: this probe cannot wait for other probes on this machine, so they may disturb the measured times\n"
            )
        yield None
        return
    try:
        while measures and not run.is_cancelled(task.job):
            with contextlib.suppress(OSError):  # e.g. no file descriptor is left: the conflicts remain unknown
                if not ticket.list_probes_to_wait_for():
                    break
            time.sleep(POLL_SECONDS)
        yield ticket
    finally:
        ticket.close()


def _describe_ticket_holder(run: Path, job: str) -> str:
    return f"{job} of {run}"
