"""The first job of a run whose model and dataset cannot be built here: it builds them on a node, as the jobs will."""

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from tula_cli.cluster.inspection import PROGRAM, interpreter, not_started, understood
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.cluster.slurm.sbatch import parameters
from tula_cli.cluster.slurm.submit import YOUNG, submit_script
from tula_cli.errors import SchedulerError
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_text, write_atomic
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.tasks import CheckTask
from tula_cli.spec.job import JobSpec

LOOK = 2.0  # seconds between two looks at the queue
LAG = 10.0  # seconds that a file may take from a node to here, once its job is over
_KEPT = "inspection.json"


def kept_inspection(run: RunDir) -> Inspection | None:
    """Return what an earlier first job of this run found; the run's name covers all that it depends on."""
    text = read_text(run.path / _KEPT)
    return Inspection.model_validate_json(text) if text else None


def inspect_on_node(run: RunDir, spec: JobSpec, *, sleep: Callable[[float], None] = time.sleep) -> Inspection:
    """Build the model and the dataset in a job of its own on one node, wait for it, and keep what it tells.

    The job asks for what a job of one node asks for, with the same set-up and the same interpreter.

    Raises:
        SpecError, JobFailed: as `inspection.inspect`, from the node.
        SchedulerError: the job was refused, or waits for what waiting does not bring.
    """
    id_ = submit_script(run, f"tula-{run.id}-inspection", _script(run, spec))
    try:
        log = _outcome(run, id_, sleep)
    except BaseException:  # Ctrl-C above all: nobody would read what it tells
        scheduler.cancel([id_])
        raise
    told, complaint = read_text(log), read_text(log.with_suffix(".err"))
    if not told.strip():
        raise not_started(interpreter(spec), complaint)
    found = understood(told, complaint)
    write_atomic(run.path / _KEPT, found.model_dump_json())
    return found


def _script(run: RunDir, spec: JobSpec) -> str:
    from tula_cli.cluster.slurm.script import ScriptWriter

    task = CheckTask(id="inspection", job="inspection", spec=spec, workdir=str(Path.cwd()), nodes=1)
    path = run.submitit_dir.absolute() / "inspection-spec.json"
    write_atomic(path, spec.model_dump_json())
    writer = ScriptWriter(folder=run.submitit_dir.absolute())
    writer.update_parameters(**{**parameters(run, task), "job_name": f"tula-{run.id}-inspection", "ntasks_per_node": 1})
    return writer.text(f"{interpreter(spec)} -m {PROGRAM} {shlex.quote(str(path))}")


def _outcome(run: RunDir, id_: str, sleep: Callable[[float], None]) -> Path:
    """Wait until the job has answered or is over; return the log of its first task.

    Raises:
        SchedulerError: it will never start.
    """
    log, since = run.submitit_dir / f"{id_}_0_log.out", time.monotonic()
    over: float | None = None
    while over is None or time.monotonic() - over < LAG:
        if over is not None and len(read_text(log).splitlines()) > 1:
            break
        state = scheduler.ask([id_]).get(id_)
        if state is not None and state.hopeless:
            raise SchedulerError(f"the job that builds the model and the dataset {state.reason}")
        young = time.monotonic() - since < YOUNG
        if over is None and ((state is None and not young) or (state is not None and state.state == "ended")):
            over = time.monotonic()
        sleep(LOOK if over is None else LOOK / 4)
    return log
