"""SLURM's estimate of when a training would start, by `sbatch --test-only`."""

import re
import tempfile
from pathlib import Path

from tula_cli.cluster.slurm.command import call_slurm
from tula_cli.cluster.slurm.queue import parse_time
from tula_cli.cluster.slurm.scheduler import make_sbatch_environment
from tula_cli.cluster.slurm.submit import render_job_script
from tula_cli.errors import TulaError
from tula_cli.run.directory import Run
from tula_cli.run.records.recommendations import StartEstimate
from tula_cli.run.records.tasks import Rung, TrainTask

_PATIENCE = 10.0
"""Timeout of sbatch in seconds; short, as the estimate is only a hint."""
_JOB = "start-estimate"


def estimate_start(run: Run, *, nodes: int, batch: int, now: float) -> StartEstimate | None:
    """Return SLURM's estimate of when the first job of a training would start; nothing is submitted.

    SLURM is given the script that would be submitted, and considers running jobs and their time limits. Jobs of higher
    priority may come first, so the estimated wait is a lower bound.

    Args:
        run: the run that the training would belong to; nothing is written there.
        nodes: number of nodes of the training.
        batch: global batch of the training.
        now: Unix time.

    Returns:
        The estimate, without a wait but with a reason if SLURM gives none; None if this machine has no sbatch.
    """
    task = TrainTask(
        id=_JOB, job=_JOB, spec=run.spec, workdir=str(Path.cwd()), nodes=nodes, signature=_JOB, attempt=1,
        ladder=(Rung(batch=batch),), workers=run.spec.train.workers,
    )  # fmt: skip
    minutes = task.time_limit
    try:
        script_text = render_job_script(run, task)
        with tempfile.TemporaryDirectory(prefix="tula-") as folder:
            script = Path(folder) / "job.sh"
            script.write_text(script_text, encoding="utf-8")
            answer = call_slurm(
                "sbatch", "--test-only", str(script), environ=make_sbatch_environment(script), patience=_PATIENCE
            )
    except (TulaError, OSError) as error:
        reason = error.message if isinstance(error, TulaError) else str(error)
        return StartEstimate(nodes=nodes, minutes=minutes, asked_at=now, wait=None, reason=reason)
    if answer.end == "missing":
        return None
    match = re.search(r"to start at (\S+)", f"{answer.text}\n{answer.complaint}")
    start = parse_time(match.group(1)) if match and answer.ok else None
    if start is None:
        reason = (
            answer.complaint.strip().rpartition("\n")[2].removeprefix("sbatch: error: ")
            or "sbatch reported no start time"
        )
        return StartEstimate(nodes=nodes, minutes=minutes, asked_at=now, wait=None, reason=reason)
    return StartEstimate(nodes=nodes, minutes=minutes, asked_at=now, wait=max(0.0, start - now))
