"""What SLURM tells of waits: of those of others, by its accounting, and of a job that would be submitted now.

A hint like all that it says: where sacct or sbatch tells nothing, that is said, and no error is raised.
"""

import datetime
import os
import pwd
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from tula_cli.cluster.scheduling.chains import time_limit
from tula_cli.cluster.slurm import command
from tula_cli.cluster.slurm.accounting.site_bill import with_environment_defaults
from tula_cli.cluster.slurm.command import call_slurm
from tula_cli.cluster.slurm.queue import parse_time
from tula_cli.cluster.slurm.scheduler import sbatch_environment
from tula_cli.cluster.slurm.submit import job_script
from tula_cli.errors import TulaError
from tula_cli.models.queue.size_classes import DAYS, PastWait
from tula_cli.run import files
from tula_cli.run.directory import RunDir
from tula_cli.run.records.base import Record
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import Slurm

KEPT_SECONDS = 600.0
"""Seconds for which an estimate stands: each costs the controller a search through all that runs."""
FIELDS = ("Submit", "Eligible", "Start", "NNodes", "Timelimit", "Partition", "QOS", "State", "User")
_NEVER = ("CANCELLED", "FAILED", "DEADLINE", "REVOKED")
_ESTIMATES = "queue.json"


class Estimate(Record):
    """What `sbatch --test-only` told of a job."""

    nodes: int
    minutes: int  # its time limit
    partition: str  # empty: the site's own choice
    asked_at: float  # Unix time
    wait: float | None  # seconds from then on; None where it told nothing
    words: str = ""  # why not


class Estimates(Record):
    """Those of a run: what `queue.json` holds."""

    estimates: tuple[Estimate, ...] = ()


_RECORD: TypeAdapter[Estimates] = TypeAdapter(Estimates)


@dataclass(frozen=True)
class WaitHistory:
    """Waits of jobs, and what they are in words."""

    waits: Sequence[PastWait]
    words: str


class SlurmQueue:
    """The queue of the site that this machine submits to."""

    def history(self, run: RunDir, spec: JobSpec, *, now: float) -> WaitHistory:
        """Return the waits of the last 14 days that sacct shows of the job's partition and QOS, else those of the run's own jobs.

        Args:
            run: whose jobs count where accounting tells nothing.
            spec: names partition and QOS, or leaves them to SBATCH_PARTITION and SBATCH_QOS, or to the site: then all count.
            now: Unix time.
        """
        slurm = with_environment_defaults(spec).cluster.slurm or Slurm()
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now - DAYS * 86400))
        chosen = [f"--partition={slurm.partition}"] if slurm.partition else []
        answer = call_slurm(
            "sacct", "--allusers", "--allocations", "--noheader", "--parsable2", f"--starttime={since}", *chosen,
            f"--format={','.join(FIELDS)}",
        )  # fmt: skip
        rows = [
            dict(zip(FIELDS, line.split("|"), strict=True))
            for line in answer.text.splitlines()
            if line.count("|") == len(FIELDS) - 1
        ]
        rows = [row for row in rows if not slurm.qos or row["QOS"].lower() == slurm.qos.lower()]
        waits = [wait for row in rows if (wait := _past_wait(row)) is not None] if answer.ok else []
        if not waits:
            run_waits = waits_of_run(run)
            why = answer.complaint.splitlines()[0] if answer.complaint else "sacct shows no jobs"
            return WaitHistory(run_waits, f"{len(run_waits)} jobs of this run alone ({why})")
        where = f"partition {slurm.partition}" if slurm.partition else "all partitions"
        users = {row["User"] for row in rows}
        alone = users == {pwd.getpwuid(os.getuid()).pw_name}
        whose = ", your own alone: sacct shows no others (PrivateData?)" if alone else ""
        return WaitHistory(waits, f"{len(waits)} jobs of {where} by sacct, {DAYS:g} days{whose}")

    def estimate(self, run: RunDir, spec: JobSpec, *, nodes: int, minutes: int, now: float) -> Estimate:
        """Return when SLURM itself would start a training on so many nodes, by `sbatch --test-only` with its very script.

        It looks at what runs and at its time limits, so others may come before: a lower estimate. Asked once, and kept for
        ten minutes in the run.
        """
        partition = (with_environment_defaults(spec).cluster.slurm or Slurm()).partition or ""
        path = run.path / _ESTIMATES
        stored = files.read_record(path, _RECORD) or Estimates()
        young = tuple(estimate_ for estimate_ in stored.estimates if 0 <= now - estimate_.asked_at < KEPT_SECONDS)
        key = (nodes, minutes, partition)
        if estimate := next(
            (estimate_ for estimate_ in young if (estimate_.nodes, estimate_.minutes, estimate_.partition) == key), None
        ):
            return estimate
        wait, reason = _test_start(run, _training_task(spec, nodes, minutes), now)
        estimate = Estimate(nodes=nodes, minutes=minutes, partition=partition, asked_at=now, wait=wait, words=reason)
        files.write_record(path, Estimates(estimates=(*young, estimate)))
        return estimate


def waits_of_run(run: RunDir) -> list[PastWait]:
    """Return how long the first jobs of chains and the probes of a run have waited, by its own files."""
    snapshot = run.read()
    waits = []
    for job in snapshot.jobs:
        tasks = snapshot.tasks_of(job.id)
        starts = [a.started_at for a in snapshot.attempts_of(job.id) if a.job_id == job.scheduler_id]
        if job.scheduler == "slurm" and tasks and starts:
            wait = max(0.0, min(starts) - job.submitted_at)
            waits.append(PastWait(job.submitted_at, wait, job.nodes, time_limit(tasks[-1])))
    return waits


def _past_wait(row: dict[str, str]) -> PastWait | None:
    """Return the wait of a row of sacct; None of one that tells none."""
    submitted, eligible, started = (parse_time(row[name]) for name in ("Submit", "Eligible", "Start"))
    minutes = parse_limit_minutes(row["Timelimit"])
    if submitted is None or minutes is None or not row["NNodes"].isdigit() or row["NNodes"] == "0":
        return None
    waiting_since = max(submitted, eligible or submitted)
    if started is not None:
        return PastWait(waiting_since, max(0.0, started - waiting_since), int(row["NNodes"]), minutes)
    is_held = eligible is None or row["State"].split(" ")[0].rstrip("+") in _NEVER
    return None if is_held else PastWait(waiting_since, float("inf"), int(row["NNodes"]), minutes)


def parse_limit_minutes(text: str) -> float | None:
    """Return a time limit as SLURM writes it, "2-00:00:00" or "01:30:00", in minutes; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return datetime.timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds() / 60


def with_limit(spec: JobSpec, minutes: int) -> JobSpec:
    """Return a job whose training jobs have this time limit, or their own where that is shorter."""
    slurm = spec.cluster.slurm or Slurm()
    shorter = slurm.model_copy(update={"minutes": min(minutes, slurm.minutes)})
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"slurm": shorter})})


def _training_task(spec: JobSpec, nodes: int, minutes: int) -> TrainTask:
    """Return a training whose job asks for what the real one would; what it trains is not in its script."""
    batch = nodes * spec.cluster.gpus_per_node * spec.train.accumulate
    return TrainTask(
        id="queue-test", job="queue-test", spec=with_limit(spec, minutes), workdir=str(Path.cwd()), nodes=nodes, signature="queue-test",
        attempt=1, ladder=(Rung(batch=batch),), workers=spec.train.workers,
    )  # fmt: skip


def _test_start(run: RunDir, task: TrainTask, now: float) -> tuple[float | None, str]:
    """Return the seconds until a job would start, or why nobody tells."""
    try:
        script = run.write_script("queue-test", job_script(run, task))
    except TulaError as error:
        return None, error.message
    answer = call_slurm(
        "sbatch", "--test-only", str(script), environ=sbatch_environment(script), patience=command.COMMAND_TIMEOUT
    )
    match = re.search(r"to start at (\S+)", f"{answer.text}\n{answer.complaint}")
    starts = parse_time(match.group(1)) if match and answer.ok else None
    if starts is None:
        return None, answer.complaint.strip().rpartition("\n")[2].removeprefix(
            "sbatch: error: "
        ) or "sbatch told no start"
    return max(0.0, starts - now), ""
