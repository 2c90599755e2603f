"""One rank: `python -m tula_cli.worker RUN TASK ATTEMPT` runs a task of a run directory to its end.

A failure is written where the supervisor finds it, with its class and this rank's story; the exit code says no more than
that there was one (torchrun would not pass more on).
"""

import os
import sys
import time
import traceback
from pathlib import Path

from tula_cli.outcome import classify
from tula_cli.processes import die_with_parent
from tula_cli.records import Failure, ProbeTask, TrainTask
from tula_cli.rundir import RunDir


def main() -> None:
    die_with_parent()
    run, task_id, attempt = RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    task = run.task(task_id)
    assert task is not None, f"{run.path} has no task {task_id}"
    os.chdir(task.workdir)
    try:
        _work(task, run, attempt)
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever happened is written down, then we end
        _fail(error, task, run, attempt)
    sys.stdout.flush()


def _work(task: ProbeTask | TrainTask, run: RunDir, attempt: int) -> None:
    # Inside the boundary: an import that fails (a missing library on one node) is told like any other failure.
    from tula_cli.worker import ranks
    from tula_cli.worker.data import build_datasets
    from tula_cli.worker.probe import run_probes
    from tula_cli.worker.training import run_training

    with ranks.joined(task.spec.cluster, handover=run.handover_path(task.id, attempt)) as me:
        datasets = build_datasets(task.spec)
        limit = task.spec.cluster.memory_per_gpu
        if limit is not None and me.device.type == "cpu":
            ranks.limit_memory(limit)
        match task:
            case ProbeTask():
                started_at = next(a.started_at for a in run.attempts(task.id) if a.number == attempt)
                run_probes(task, run, me, datasets, started_at=started_at)
            case TrainTask():
                run_training(task, run, me, datasets)


def _fail(error: Exception, task: ProbeTask | TrainTask, run: RunDir, attempt: int) -> None:
    """Write what this rank saw and end at once: peers sit in a reduction, so nothing may wait for them."""
    from tula_cli.worker import ranks

    ranks.lift_memory_limit()
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    rank = int(os.environ["RANK"])
    run.write_failure(
        Failure(
            task=task.id,
            attempt=attempt,
            rank=rank,
            host=os.uname().nodename,
            pid=os.getpid(),
            outcome=classify(text, exit_code=1, device=_device(task)),
            message=_last_line(error),
            detail=text,
            local_batch=_local_batch(task, run),
            failed_at=time.time(),
        )
    )
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(1)


def _last_line(error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _device(task: ProbeTask | TrainTask) -> str:
    import torch

    if task.spec.cluster.device != "auto":
        return task.spec.cluster.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _local_batch(task: ProbeTask | TrainTask, run: RunDir) -> int:
    """Return the local batch that was under way: of a probe job, the first one without a result."""
    if isinstance(task, TrainTask):
        return task.batch // (task.nodes * task.spec.cluster.gpus_per_node)
    return run.current_probe(task) or task.local_batches[-1]


if __name__ == "__main__":
    main()
