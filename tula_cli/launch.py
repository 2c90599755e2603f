"""Starting jobs and asking what became of them, and the inspection of model and dataset in a process of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tula_cli.errors import JobFailed, Problem, SchedulerError, SpecError
from tula_cli.processes import die_with_parent, started
from tula_cli.records import Attempt, Inspection, Job, ProbeTask, TrainTask
from tula_cli.rundir import RunDir
from tula_cli.sbatch import parameters
from tula_cli.scheduler import SchedulerState, ask, refused
from tula_cli.spec import JobSpec

INSPECTION_TIMEOUT = 600.0  # seconds; a first download of a dataset is part of it
SUPERVISOR = "tula_cli.supervise"
"""Started by its name: the command line never runs it in its own process."""
_MONTHS = 60 * 24 * 90  # minutes; submitit ends a local job after its time limit, our supervisor keeps its own


class Launcher(Protocol):
    """Submits jobs; the tests pass one that runs nothing."""

    def script(self, run: RunDir, task: ProbeTask | TrainTask) -> str:
        """Return what would be submitted, as text; touches nothing."""
        ...

    def submit(self, run: RunDir, task: ProbeTask | TrainTask) -> Job:
        """Submit a job whose task is written already.

        Raises:
            SchedulerError: the job was refused.
        """
        ...

    def state(self, run: RunDir, job: Job) -> SchedulerState:
        """Ask what became of a job."""
        ...

    def cancel(self, run: RunDir, job: Job) -> None:
        """End a job and everything it started."""
        ...


def launcher_for(spec: JobSpec) -> Launcher:
    """Return the launcher of the spec's cluster.

    Raises:
        SchedulerError: this version cannot submit there.
    """
    if spec.cluster.kind == "local":
        return LocalLauncher()
    if shutil.which("sbatch") is None:
        raise SchedulerError(
            "cluster.kind is slurm, but there is no sbatch here", "run tula on a login node, or set cluster.kind: local"
        )
    return SlurmLauncher()


class LocalLauncher:
    """Jobs on this machine through submitit's local executor; one at a time, in the order they get the machine."""

    def script(self, run: RunDir, task: ProbeTask | TrainTask) -> str:
        """Return in words what a job on this machine starts."""
        world = task.nodes * task.spec.cluster.gpus_per_node
        return f"{task.job} in {run.path.name}: torchrun on this machine, {world} rank{'s' * (world > 1)}"

    def submit(self, run: RunDir, task: ProbeTask | TrainTask) -> Job:
        """Start a job that outlives this process, its terminal and Ctrl-C.

        submitit's controller would stay in our process group, where Ctrl-C reaches it: it is started from a process
        with a session of its own.
        """
        earlier, now = run.job(task.job), time.time()
        program = "import sys; from tula_cli import launch; launch.submit_from_own_session(*sys.argv[1:])"
        command = [sys.executable, "-c", program, str(run.path.resolve()), task.id]
        # Files, not pipes: the job inherits them, and a pipe would stay open until it ends.
        with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as complaint:
            code = subprocess.call(command, stdout=told, stderr=complaint, start_new_session=True, env=_with_package())
            told.seek(0)
            complaint.seek(0)
            if code:
                raise SchedulerError(f"the job could not be started: {complaint.read().strip() or f'exit code {code}'}")
            pid = int(told.read().split()[-1])
        return Job(
            id=task.job,
            scheduler="local",
            scheduler_id=str(pid),
            nodes=task.nodes,
            submitted_at=now,
            submissions=earlier.submissions + 1 if earlier else 1,
            process_started=started(pid),
            log_dir=str(run.submitit_dir),
        )

    def state(self, run: RunDir, job: Job) -> SchedulerState:
        """Ask the kernel: the process that submitit started is there and is the same one, or it is not."""
        if not _alive(job):
            return SchedulerState("ended")
        if any(attempt.started_at >= job.submitted_at - 1 for attempt in _attempts(run, job)):
            return SchedulerState("running")
        return SchedulerState("pending", "starting, or waiting for another tula job on this machine")

    def cancel(self, run: RunDir, job: Job) -> None:
        """Mark it: the supervisor sees the mark, ends its ranks and then itself. Wait until it has."""
        run.cancel(job.id)
        deadline = time.monotonic() + 30
        while _alive(job) and time.monotonic() < deadline:
            time.sleep(0.1)
        if _alive(job):
            os.kill(int(job.scheduler_id), signal.SIGKILL)


class SlurmLauncher:
    """Jobs on SLURM through submitit: srun starts one supervisor a rank."""

    def script(self, run: RunDir, task: ProbeTask | TrainTask) -> str:
        """Return the text that sbatch would be given."""
        executor = _slurm_executor(run, task)
        return str(executor._make_submission_file_text(executor._submitit_command_str, "dry-run"))

    def submit(self, run: RunDir, task: ProbeTask | TrainTask) -> Job:
        """Submit a job.

        Raises:
            SchedulerError: sbatch refused it; in the scheduler's own words.
        """
        import submitit

        executor = _slurm_executor(run, task)
        earlier = run.job(task.job)
        try:
            job = executor.submit(run_supervisor, str(run.path.resolve()), task.id, None)
        except submitit.core.utils.FailedJobError as error:
            raise refused(str(error)) from None
        return Job(
            id=task.job,
            scheduler="slurm",
            scheduler_id=job.job_id,
            nodes=task.nodes,
            submitted_at=time.time(),
            submissions=earlier.submissions + 1 if earlier else 1,
            log_dir=str(run.submitit_dir),
        )

    def state(self, run: RunDir, job: Job) -> SchedulerState:  # noqa: ARG002 - the local launcher needs it
        return ask(job.scheduler_id)

    def cancel(self, run: RunDir, job: Job) -> None:
        """Mark it, so that no supervisor starts anything more, and cancel its allocation; only our own id."""
        run.cancel(job.id)
        subprocess.run(["scancel", job.scheduler_id], check=False, capture_output=True)


def _slurm_executor(run: RunDir, task: ProbeTask | TrainTask) -> Any:
    import submitit

    executor = submitit.SlurmExecutor(folder=run.submitit_dir)
    executor.update_parameters(**parameters(run, task))
    return executor


def submit_from_own_session(path: str, task_id: str) -> None:
    """Submit a supervisor to submitit's local executor and print its process id. Runs in a process of its own."""
    import submitit

    run = RunDir(Path(path))
    executor = submitit.LocalExecutor(folder=run.submitit_dir)
    # submitit hides all GPUs from a local job that asks for none; the ranks get back what was visible here.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    executor.update_parameters(timeout_min=_MONTHS, tasks_per_node=1)
    job = executor.submit(run_supervisor, path, task_id, visible)
    sys.stdout.write(f"{job.job_id}\n")


def run_supervisor(path: str, task_id: str, visible_gpus: str | None) -> None:
    """What submitit calls in the job.

    Args:
        path: the run directory.
        task_id: the task to start with.
        visible_gpus: CUDA_VISIBLE_DEVICES of the command line that submitted a local job; SLURM sets its own.
    """
    import importlib

    if os.environ.get("SUBMITIT_EXECUTOR") == "local":
        die_with_parent()  # submitit's controller is what a user sees and can kill; nothing may outlive it
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SUBMITIT_")}
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":
        environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible_gpus is not None:
            environ["CUDA_VISIBLE_DEVICES"] = visible_gpus
        environ = {name: value for name, value in environ.items() if not name.startswith("SLURM_")}
    supervise: Callable[..., None] = importlib.import_module(SUPERVISOR).supervise
    supervise(Path(path), task_id, environ=environ)


def _with_package() -> dict[str, str]:
    """Return the environment with tula importable, also where it is run from a checkout that is not installed."""
    here = str(Path(__file__).resolve().parent.parent)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _attempts(run: RunDir, job: Job) -> list[Attempt]:
    return [attempt for task in run.tasks() if task.job == job.id for attempt in run.attempts(task.id)]


def _alive(job: Job) -> bool:
    since = started(int(job.scheduler_id))
    return since is not None and since == job.process_started


# --- inspection


def inspect(spec: JobSpec, *, timeout: float = INSPECTION_TIMEOUT) -> Inspection:
    """Build the model and the dataset in a process of its own, and tell what was found.

    Args:
        spec: the job.
        timeout: seconds.

    Raises:
        SpecError: the model, dataset, optimizer ... of the spec cannot be built.
        JobFailed: the user's code failed, or took too long.
    """
    command = [sys.executable, "-m", "tula_cli.worker.inspect"]
    try:
        done = subprocess.run(
            command, input=spec.model_dump_json(), capture_output=True, text=True, timeout=timeout, env=_with_package()
        )
    except subprocess.TimeoutExpired:
        raise JobFailed(f"building the model and the dataset took more than {timeout:g} s") from None
    return _inspection(done.stdout, done.stderr, exit_code=done.returncode)


def _inspection(stdout: str, stderr: str, *, exit_code: int) -> Inspection:
    try:
        answer: Mapping[str, Any] = json.loads(stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = stderr.strip().splitlines()[-1:] or ["no output"]
        raise JobFailed(f"building the model and the dataset ended with exit code {exit_code}: {last[0]}") from None
    error = answer.get("error")
    if error is None:
        return Inspection.model_validate(answer)
    if error["class"] == "SpecError":
        problems = tuple(Problem(**problem) for problem in error["problems"])
        raise SpecError(error["message"], error["hint"], problems=problems)
    raise JobFailed(error["message"], error["hint"])
