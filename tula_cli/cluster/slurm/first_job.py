"""The first job of a run whose model and dataset cannot be built here: it builds them on a node, as the jobs will."""

import contextlib
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from tula_cli.cluster.inspection import (
    INSPECTION_TIMEOUT,
    PROGRAM,
    Inspect,
    interpreter,
    limit_exceeded,
    not_started,
    understood,
)
from tula_cli.cluster.kept_inspection import KeptInspection, other_settings
from tula_cli.cluster.launcher import submitting
from tula_cli.cluster.scheduling.batch_launcher import in_queue, submit_script
from tula_cli.cluster.scheduling.chains import YOUNG, folder_patience
from tula_cli.cluster.scheduling.protocol import JobRequest
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.cluster.slurm.path_patterns import require_plain
from tula_cli.cluster.slurm.sbatch import parameters
from tula_cli.cluster.slurm.scheduler import SlurmScheduler
from tula_cli.errors import Interruption, JobFailed, Pending, SchedulerError, TulaError
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_record, read_text, write_atomic, write_record
from tula_cli.run.records.inspections import FirstJob, Inspection
from tula_cli.run.records.tasks import CheckTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import digest
from tula_cli.spec.slurm_options import ROOM

LOOKS = (2.0, 10.0)
"""Seconds between two looks at the queue: as long as the job runs, and what it grows to while it waits."""
LAG = 10.0  # seconds that a file may take from a node to here, once its job is over
MINUTES = math.ceil(INSPECTION_TIMEOUT / 60) + ROOM
"""The job's time limit: it is on one node, so this bounds its node-hours too."""
_JOB = "first_job.json"


def kept_inspection(run: RunDir, spec: JobSpec) -> Inspection | None:
    """Return what an earlier first job of this run found with these settings."""
    return read_record(kept_at(run, spec), TypeAdapter(Inspection)) or _left_behind(run, spec)


def _left_behind(run: RunDir, spec: JobSpec) -> Inspection | None:
    """Return what a job has found whose command line was gone by then."""
    job = _newest(run)
    if job is None or job.awaited != kept_at(run, spec).name:
        return None
    try:
        return understood(read_text(_log(run, job.scheduler_id)), "")
    except (
        TulaError,
        ValueError,
    ):  # it runs, or ended before its answer, or with an error, which the next one may not see
        return None


def kept_at(run: RunDir, spec: JobSpec) -> Path:
    """Return where it is kept what a first job found: the run's name covers what it depends on, but for some settings."""
    return run.path / f"inspection-{digest(other_settings(spec))}.json"


def or_told(inspect: Inspect, run: RunDir) -> Inspect:
    """Return what knows what a first job of the run told, and inspects where none did or it is to be known anew.

    It is asked first: where there was a first job, this machine could not build the model, and would try in vain.
    """
    kept = inspect if isinstance(inspect, KeptInspection) else None

    def build_anew(spec: JobSpec) -> Inspection:
        found = inspect(spec)
        if kept and kept.keep:
            with contextlib.suppress(OSError):  # a folder that cannot be written costs this command nothing
                kept_at(run, spec).unlink(missing_ok=True)  # from now on the newer one counts
        return found

    def recall_or_build(spec: JobSpec) -> Inspection:
        if (told := kept_inspection(run, spec)) is None:
            return inspect(spec)
        if kept:
            kept.note("the model and the dataset are as a job built them on a node (--fresh builds them anew)")
        return told

    return build_anew if kept and kept.fresh else recall_or_build


def node_hours(run: RunDir) -> float:
    """Return the node-hours that first jobs of this run have taken, at most."""
    job = _newest(run)
    return job.node_hours if job is not None else 0.0


def newest_node_hours(run: RunDir) -> float:
    """Return the node-hours that the last first job of this run has taken, at most."""
    job = _newest(run)
    return job.node_hours - job.earlier if job is not None else 0.0


def _newest(run: RunDir) -> FirstJob | None:
    return read_record(run.path / _JOB, TypeAdapter(FirstJob))


def _log(run: RunDir, id_: str) -> Path:
    """Return where the first task of a job writes."""
    return run.submitit_dir / f"{id_}_0_log.out"


def script(run: RunDir, spec: JobSpec) -> str:
    """Return what would be submitted, as text; touches nothing."""
    from tula_cli.cluster.slurm.script import ScriptWriter

    task = CheckTask(id="inspection", job="inspection", spec=spec, workdir=str(Path.cwd()), nodes=1)
    require_plain(run.path)
    writer = ScriptWriter(run.submitit_dir, patience=folder_patience(task))
    own = {"job_name": _name(run), "ntasks_per_node": 1, "time": MINUTES}
    writer.update_parameters(**{**parameters(run, task), **own})
    return writer.text(f"{interpreter(spec)} -m {PROGRAM} {shlex.quote(str(_spec_path(run)))}")


def _name(run: RunDir) -> str:
    return f"tula-{run.id}-inspection"


def _spec_path(run: RunDir) -> Path:
    return run.submitit_dir.absolute() / "inspection-spec.json"


def inspect_on_node(
    run: RunDir, spec: JobSpec, *, timeout: float | None = None, sleep: Callable[[float], None] = time.sleep
) -> Inspection:
    """Build the model and the dataset in a job of its own on one node, wait for it, and keep what it tells.

    The job asks for what a job of one node asks for, with the same set-up and the same interpreter. One that waits or
    runs already, for the same spec, is taken up. It is cancelled where nobody waits for it any longer, unless this
    process is killed: then it goes on, and what it tells is found by the next command.

    Args:
        run: the run; what the job tells and takes is kept there.
        spec: the job.
        timeout: seconds to wait at most.
        sleep: waits for some seconds.

    Raises:
        SpecError, JobFailed: as `inspection.inspect`, from the node.
        SchedulerError: the job was refused, or waits for what waiting does not bring.
        Pending: the time to wait is over.
        Interruption: Ctrl-C.
    """
    job = _Watched(run, spec, sleep)
    try:
        with submitting(run):
            job.start()
        log = job.outcome(timeout)
    except KeyboardInterrupt:
        job.cancel()
        if not job.id:
            raise Interruption("interrupted", "the same command submits the first job, or takes it up") from None
        told = f"interrupted; job {job.id}, which builds the model and the dataset, was cancelled"
        raise Interruption(told) from None
    except BaseException:
        job.cancel()
        raise
    finally:
        job.note(over=True)
    told, complaint = read_text(log), read_text(log.with_suffix(".err"))
    if not log.exists():
        raise SchedulerError(
            f"job {job.id}, which builds the model and the dataset, has left no log in {log.parent}",
            "its node cannot write there: choose a folder on a file system that all nodes share with --run-dir",
        )
    try:
        if not told.strip():
            raise not_started(interpreter(spec), complaint)
        found = understood(told, complaint)
    except JobFailed as error:
        exceeded = limit_exceeded(error, complaint)
        if exceeded is None or exceeded[0].name != "memory":
            raise
        raise JobFailed(
            f"the job that builds the model and the dataset used up its memory: {exceeded[1]}",
            f"ask for more with {spec.cluster.memory_setting}",
        ) from error
    write_record(kept_at(run, spec), found)
    return found


@dataclass
class _Watched:
    """A job that is waited for. What it takes is counted from the last look at which it did not run yet."""

    run: RunDir
    spec: JobSpec
    sleep: Callable[[float], None]
    id: str = ""  # empty before it is submitted
    age: float = 0.0  # seconds since it was submitted, when it was taken up
    seconds: float = 0.0  # that it has held its node, at most
    earlier: float = 0.0  # node-hours of the jobs before it

    def start(self) -> None:
        """Submit the job and write down that it is there, or take up the one that is; one for another spec is cancelled.

        Raises:
            SchedulerError: it was refused, or SLURM does not answer.
        """
        known, path = _newest(self.run), _spec_path(self.run)
        there, asked = (
            in_queue(SlurmScheduler(), self.run, [_name(self.run)]).get(_name(self.run)),
            self.spec.model_dump_json(),
        )
        self.earlier = known.node_hours if known is not None else 0.0
        if there is not None and read_text(path) == asked:
            self.id, self.age = there.id, max(0.0, time.time() - path.stat().st_mtime)
            if known is not None and known.scheduler_id == there.id:
                self.earlier = known.earlier
        else:
            scheduler.cancel([there.id] if there is not None else [])
            write_atomic(path, asked)
            self.id = submit_script(
                SlurmScheduler(), self.run, JobRequest(_name(self.run), ""), script(self.run, self.spec)
            )
        self.note(over=False)

    def note(self, *, over: bool) -> None:
        """Write down what the job has taken; where it is not over, as much as it may take: this process may be killed."""
        if not self.id:
            return
        hours = self.earlier + (self.seconds / 3600 if over else MINUTES / 60)
        awaited = "" if over else kept_at(self.run, self.spec).name
        job = FirstJob(scheduler_id=self.id, node_hours=hours, earlier=self.earlier, awaited=awaited)
        write_record(self.run.path / _JOB, job)

    def cancel(self) -> None:
        """Cancel the job, if it was submitted."""
        scheduler.cancel([self.id])

    def outcome(self, timeout: float | None) -> Path:
        """Wait until the job has answered or is over; return the log of its first task.

        Raises:
            SchedulerError: it will never start.
            Pending: the time to wait is over.
        """
        log, since = _log(self.run, self.id), time.monotonic()
        started, over, pause, hopeless = since - self.age, None, LOOKS[0], 0
        while over is None or time.monotonic() - over < LAG:
            if over is not None and len(read_text(log).splitlines()) > 1:
                break
            state = scheduler.ask([self.id]).get(self.id)
            now = time.monotonic()
            hopeless = hopeless + 1 if state is not None and state.hopeless else 0
            if state is not None and hopeless > 1:  # it may be so for a moment while the controller is busy
                raise SchedulerError(f"the job that builds the model and the dataset {state.reason}")
            if state is not None and state.state == "pending":
                started, pause = now, min(1.5 * pause, LOOKS[1])
            elif over is None:
                self.seconds, pause = min(now - started, 60.0 * MINUTES), LOOKS[0]
            young = now - since + self.age < YOUNG
            if over is None and ((state is None and not young) or (state is not None and state.state == "ended")):
                over = now
            if over is None and timeout is not None and now - since >= timeout:
                raise Pending(
                    f"the job that builds the model and the dataset is not over after {timeout:g} s; it was cancelled",
                    "the same command starts it again; give it more time with --timeout",
                )
            left = float("inf") if timeout is None else max(0.0, since + timeout - now)
            self.sleep(min(pause, left) if over is None else LOOKS[0] / 4)
        return log
