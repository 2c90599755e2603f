"""Starting jobs and asking what became of them, and the inspection of model and dataset in a process of its own."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tula_cli.errors import JobFailed, Problem, SchedulerError, SpecError
from tula_cli.processes import die_with_parent, started
from tula_cli.records import Attempt, Inspection, Job, ProbeTask, TrainTask
from tula_cli.rundir import RunDir
from tula_cli.spec import JobSpec, Slurm

INSPECTION_TIMEOUT = 600.0  # seconds; a first download of a dataset is part of it
SUPERVISOR = "tula_cli.supervise"
"""Started by its name: the command line never runs it in its own process."""
_MONTHS = 60 * 24 * 90  # minutes; submitit ends a local job after its time limit, our supervisor keeps its own


@dataclass(frozen=True)
class SchedulerState:
    """What the scheduler says of a job; a hint, never the truth about results."""

    state: Literal["pending", "running", "ended", "unknown"]
    reason: str = ""


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
        """Ask squeue, which forgets a job some time after its end; then sacct, which lags, or is not there at all."""
        queue = _told("squeue", "--noheader", f"--jobs={job.scheduler_id}", "--format=%T|%r")
        if queue:
            state, _, reason = queue.splitlines()[0].partition("|")
            return _slurm_state(state, reason)
        account = _told("sacct", "--noheader", "--parsable2", f"--jobs={job.scheduler_id}", "--format=JobID,State")
        rows = [line.split("|") for line in account.splitlines()]
        states = [state for name, state in rows if name == job.scheduler_id]
        if states:
            return _slurm_state(states[-1], "")
        # Neither knows it: over, and forgotten. The grace period for results covers a job too young to be known.
        return SchedulerState("ended")

    def cancel(self, run: RunDir, job: Job) -> None:
        """Mark it, so that no supervisor starts anything more, and cancel its allocation; only our own id."""
        run.cancel(job.id)
        subprocess.run(["scancel", job.scheduler_id], check=False, capture_output=True)


def _slurm_executor(run: RunDir, task: ProbeTask | TrainTask) -> Any:
    import submitit

    executor = submitit.SlurmExecutor(folder=run.submitit_dir)
    executor.update_parameters(**sbatch_parameters(run, task))
    return executor


PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
HOPELESS = {
    "PartitionConfig": "the partition does not allow so many nodes or so much of them",
    "PartitionNodeLimit": "the partition does not allow so many nodes",
    "PartitionTimeLimit": "the partition does not allow so much time",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node satisfies the constraints",
    "DependencyNeverSatisfied": "it waits for a job that failed",
    "AccountNotAllowed": "the account may not use the partition",
    "QOSNotAllowed": "the QOS may not be used here",
    "InvalidAccount": "there is no such account",
    "InvalidQOS": "there is no such QOS",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "you hold it: scontrol release",
}
"""squeue's reasons that waiting does not cure."""


def _slurm_state(state: str, reason: str) -> SchedulerState:
    """Return what a state of SLURM means; an unknown one is not over."""
    name = state.split()[0].rstrip("+")  # sacct writes "CANCELLED by 1000"
    if name in PENDING:
        words = HOPELESS.get(reason)
        return SchedulerState("pending", f"{reason}: will not start, {words}" if words else reason)
    if name in RUNNING:
        return SchedulerState("running")
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL")
    if name in (*ended, "DEADLINE", "REVOKED"):
        return SchedulerState("ended", "" if name == "COMPLETED" else state)
    return SchedulerState("unknown", state)


def _told(*command: str) -> str:
    """Return what a command printed; nothing where it failed or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def sbatch_parameters(run: RunDir, task: ProbeTask | TrainTask) -> dict[str, Any]:
    """Return what submitit is given for a job: what the spec asks for, and nothing else."""
    slurm = task.spec.cluster.slurm or Slurm()
    named = slurm.model_dump(include={"partition", "account", "qos", "constraint", "exclude"}, exclude_none=True)
    extra = {key: value for key, value in slurm.extra.items() if value is not False}
    if slurm.reservation:
        extra["reservation"] = slurm.reservation
    if slurm.memory:
        extra["mem"] = slurm.memory
    if task.spec.cluster.device != "cpu":
        named["gpus_per_node"] = task.spec.cluster.gpus_per_node
    if slurm.cpus_per_task:
        named["cpus_per_task"] = slurm.cpus_per_task
    return {
        **named,
        "job_name": f"tula-{run.id}-{task.job}",
        "nodes": task.nodes,
        "ntasks_per_node": task.spec.cluster.gpus_per_node,
        "time": _minutes(task, slurm),
        "exclusive": True,  # neighbours on a node would spoil the times
        "wckey": None,
        "setup": slurm.setup or None,
        # A rank that dies must not leave the others waiting; SLURM's own requeue would start what tula starts itself.
        "srun_args": ["--kill-on-bad-exit=1", *_cpus(slurm)],
        "additional_parameters": {"no-requeue": True, **extra},
    }


def _cpus(slurm: Slurm) -> list[str]:
    """srun of SLURM 22.05 and later does not inherit --cpus-per-task from sbatch."""
    return [f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task else []


def _minutes(task: ProbeTask | TrainTask, slurm: Slurm) -> int:
    """Return the time limit; a probe job gets room for the supervisor to end it first and write why."""
    return math.ceil(task.spec.search.max_minutes) + 2 if isinstance(task, ProbeTask) else slurm.minutes


def refused(words: str) -> SchedulerError:
    """Return sbatch's refusal in its own words, and what to do about it."""
    told = [line.strip().removeprefix("sbatch: error: ") for line in words.splitlines() if "sbatch:" in line]
    text = "; ".join(told) or words.strip().splitlines()[-1]
    hints = {
        "partition": "set cluster.slurm.partition; sinfo lists them",
        "account": "set cluster.slurm.account; sacctmgr show user $USER withassoc lists yours",
        "qos": "set cluster.slurm.qos; sacctmgr show qos lists them",
        "feature": "set cluster.slurm.constraint; sinfo -o '%f' lists the features",
        "node count": "search fewer nodes, or another partition",
        "time limit": "lower search.max_minutes or cluster.slurm.minutes",
        "memory": "lower cluster.slurm.memory",
        "gres": "check cluster.gpus_per_node against sinfo -o '%G'",
    }
    hint = next((hint for word, hint in hints.items() if word in text.lower()), "check the cluster section of the job")
    return SchedulerError(f"sbatch refused the job: {text}", hint)


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
