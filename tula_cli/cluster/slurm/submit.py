"""Submission of jobs on SLURM: submitit writes the scripts and starts the supervisors."""

import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tula_cli.cluster.batch_launcher import BatchLauncher
from tula_cli.cluster.chains import compute_start_delay_minutes, list_chain_tasks
from tula_cli.cluster.local import run_supervisor
from tula_cli.cluster.scheduler import JobRequest, QueuedJob
from tula_cli.cluster.slurm.command import call_slurm_command
from tula_cli.cluster.slurm.queue import parse_time
from tula_cli.cluster.slurm.sbatch import make_submitit_parameters
from tula_cli.cluster.slurm.scheduler import SlurmScheduler, make_sbatch_environment, require_plain_path
from tula_cli.errors import TulaError
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.recommendations import StartEstimate
from tula_cli.run.records.tasks import Rung, Task, TrainTask


class SlurmLauncher(BatchLauncher):
    """Launcher of jobs on SLURM through submitit: srun starts one supervisor per rank, or one per node.

    All jobs of a chain have the same name, of which SLURM runs one at a time in order (`singleton`), and each job
    depends on the previous one (`afterany`). The dependency alone is not enough: a job that is cancelled while pending
    satisfies `afterany`, and the next one would start while another runs. A dependency on all earlier jobs would name
    49 for the last of 50.

    Each job also starts minutes after the start of the previous one (`after:ID+MINUTES`), unless the supervisor of that
    job removed the delay: if SLURM cannot start a job, tula does not run, and the chain would fail within seconds.
    """

    def __init__(self) -> None:
        super().__init__(SlurmScheduler(), "slurm")

    def make_request(self, run: RunDir, task: Task, name: str, after: Sequence[str] = ()) -> JobRequest:
        """Return a request with the name of the script; other options come from `sbatch.make_submitit_parameters`."""
        return JobRequest(name, "", nodes=task.nodes, after=tuple(after), logs=run.submitit_dir)

    def render_job_script(self, run: RunDir, job: JobRequest, task: Task) -> str:
        chained = len(list_chain_tasks(task)) > 1
        waits_for = [*([f"afterany:{':'.join(job.after)}"] if job.after else []), *(["singleton"] if chained else [])]
        number = job.name.removeprefix(self.make_first_job_name(run, task)).lstrip(".")
        if number and job.after:
            waits_for.append(f"after:{job.after[-1]}+{compute_start_delay_minutes(int(number))}")
        name = make_chain_name(run, task) if chained else job.name
        return render_job_script(run, task, name=name, dependency=",".join(waits_for) or None)

    def write_job_files(self, run: RunDir, task: Task, id_: str) -> None:
        _write_pickled_call(run, task, id_)

    def make_first_job_name(self, run: RunDir, task: Task) -> str:
        """Return the name of a task's first job; has no hash of the run's path, as SLURM reports each job's script."""
        return f"tula-{run.id}-{task.job}"

    def list_queued_jobs(self, run: RunDir, task: Task, names: Sequence[str]) -> dict[str, QueuedJob]:
        folder = run.submitit_dir.resolve()
        queued = self.scheduler.list_queued_jobs([*names, make_chain_name(run, task)])
        scripts = {Path(job.script): job for job in queued}
        listed_jobs = {path.stem: job for path, job in scripts.items() if path.parent.resolve() == folder}
        return {name: job for name, job in listed_jobs.items() if name in names}

    def select_awaited_jobs(self, ids: Sequence[str]) -> Sequence[str]:
        return ids[-1:]  # `singleton` makes it wait for the other jobs of the same name


def make_chain_name(run: RunDir, task: Task) -> str:
    """Return the name of all jobs of a chain in the queue; it has a hash of the path of the run."""
    path_digest = hashlib.sha256(os.fsencode(run.path.resolve())).hexdigest()[:8]
    return f"tula-{run.id}-{task.job}-{path_digest}"


def render_job_script(run: RunDir, task: Task, *, name: str | None = None, dependency: str | None = None) -> str:
    from tula_cli.cluster.slurm.script import ScriptWriter  # imported here: submitit is only needed to submit

    require_plain_path(run.path)
    writer = ScriptWriter(run.submitit_dir, timeout=task.folder_timeout, python=task.spec.cluster.python)
    writer.update_parameters(**make_submitit_parameters(run, task, name=name, dependency=dependency))
    return writer.render_text()


def _write_pickled_call(run: RunDir, task: Task, id_: str) -> None:
    """Write the pickled call of a job to the file for which submitit waits, up to a minute, after its start."""
    from submitit.core.utils import DelayedSubmission, JobPaths

    path = JobPaths(run.submitit_dir, job_id=id_).submitted_pickle
    if not path.exists():
        call = DelayedSubmission(run_supervisor, str(run.path.resolve()), task.id)
        draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
        call.dump(draft)
        draft.replace(path)


# --- SLURM's estimate of when a training would start, by `sbatch --test-only`

_ESTIMATE_TIMEOUT_SECONDS = 10.0
"""Timeout of sbatch in seconds; short, as the estimate is only a hint."""
_ESTIMATE_JOB = "start-estimate"


def estimate_job_start(run: Run, *, nodes: int, batch: int, now: float) -> StartEstimate | None:
    """Return SLURM's estimate of when the first job of a training would start; nothing is submitted.

    SLURM is given the script that would be submitted, and considers running jobs and their time limits. Jobs of higher
    priority may come first, so the estimated wait is a lower bound.

    Args:
        run: the run that the training would belong to; nothing is written there.

    Returns:
        The estimate, without a wait but with a reason if SLURM gives none; None if this machine has no sbatch.
    """
    task = TrainTask(
        id=_ESTIMATE_JOB, job=_ESTIMATE_JOB, spec=run.spec, workdir=str(Path.cwd()), nodes=nodes, signature=_ESTIMATE_JOB, attempt=1,
        ladder=(Rung(batch=batch),), workers=run.spec.train.workers,
    )  # fmt: skip
    minutes = task.time_limit_minutes
    try:
        script_text = render_job_script(run, task)
        with tempfile.TemporaryDirectory(prefix="tula-") as folder:
            script = Path(folder) / "job.sh"
            script.write_text(script_text, encoding="utf-8")
            answer = call_slurm_command(
                "sbatch",
                "--test-only",
                str(script),
                environ=make_sbatch_environment(script),
                timeout=_ESTIMATE_TIMEOUT_SECONDS,
            )
    except (TulaError, OSError) as error:
        reason = error.message if isinstance(error, TulaError) else str(error)
        return StartEstimate(nodes=nodes, minutes=minutes, asked_at=now, wait=None, reason=reason)
    if answer.end == "missing":
        return None
    match = re.search(r"to start at (\S+)", f"{answer.text}\n{answer.error_message}")
    start = parse_time(match.group(1)) if match and answer.has_succeeded else None
    if start is None:
        last_error = answer.error_message.rpartition("\n")[2].removeprefix("sbatch: error: ")
        reason = last_error or "sbatch reported no start time"
        return StartEstimate(nodes=nodes, minutes=minutes, asked_at=now, wait=None, reason=reason)
    return StartEstimate(nodes=nodes, minutes=minutes, asked_at=now, wait=max(0.0, start - now))
