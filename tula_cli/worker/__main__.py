"""One rank: `python -m tula_cli.worker RUN TASK ATTEMPT` runs one task of a run directory.

If possible, ranks are forked from a process that has already imported this module (`preloaded`); otherwise they are
executed.

A failure is written to the run directory, where the supervisor reads it, with its class and this rank's traceback. The
exit code only shows that there was a failure (torchrun would not pass on more), except that of a full disk.
"""

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tula_cli.errors import DiskFull, JobFailed, SpecError, TulaError
from tula_cli.host.failure_texts import (
    classify_failure,
    find_device_fault,
    find_line_of_failure,
    find_signal,
    find_user_exception,
)
from tula_cli.host.network import get_node_name
from tula_cli.host.processes import set_parent_death_signal, tag_lines
from tula_cli.run.directory import RunDir
from tula_cli.run.files import pin_run
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.tasks import (
    CheckTask,
    EvaluateTask,
    ProbeTask,
    RateSearchTask,
    Task,
    TrainTask,
)
from tula_cli.run.shortages import get_shortage

_LOADER_ERROR_PREFIX = re.compile(r"Caught \w+ in (?:DataLoader worker process|pin memory thread)")
"""Start of the message with which torch raises an error of a data-loader process again; its traceback follows."""
_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+(?::|$))")
_HINT = "HINT: "


def main(*, entered: Callable[[], None] | None = None) -> None:
    """Run the task that the command-line arguments name.

    Args:
        entered: called once the user's code can be imported and before any of it is.
    """
    set_parent_death_signal()
    tag_lines(int(os.environ.get("RANK", "0")))
    run, task_id, attempt = RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    task = run.read_task(task_id)
    assert task is not None, f"{run.path} has no task {task_id}"
    pin_run(run.path)
    try:
        change_to_job_folder(task, run)
        if entered is not None:
            entered()
        run_task(task, run, attempt)
    except Exception as error:  # noqa: BLE001 - the process boundary: any error is recorded, and the rank exits
        exit_with_failure(error, task, run, attempt)
    sys.stdout.flush()


def change_to_job_folder(task: Task, run: RunDir) -> None:
    """Change to the folder the job was submitted from, and put the submitted code before that folder on `sys.path`.

    Data-loader processes inherit this path, however they are started.

    Raises:
        JobFailed: the snapshot of the submitted code is missing.
    """
    home = run.get_code_dir(task.code).resolve()
    os.chdir(task.workdir)
    if not task.code:
        return
    snapshot = run.read_code(task.code)
    if snapshot is None or not home.is_dir():
        raise JobFailed(
            f"the snapshot of the submitted code is missing: {home}",
            "submit the job again with tula profile or tula train",
        )
    folder = Path.cwd()  # the same path as in the lookup of import strings
    inherited_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [*(home / root for root in snapshot.roots), *(folder / root for root in (".", *snapshot.roots))]
    # Python resolved relative entries in the folder where this process was started.
    path += [folder / entry for entry in inherited_path if entry and not Path(entry).is_absolute()]
    sys.path[:] = dict.fromkeys([*map(str, path), *sys.path])


def run_task(task: Task, run: RunDir, attempt: int) -> None:
    # Imported here so that a failing import (e.g. a library missing on one node) is recorded like any other failure.
    from tula_cli.worker import device
    from tula_cli.worker import ranks as worker_ranks
    from tula_cli.worker.build.data import build_datasets
    from tula_cli.worker.entry import run_training
    from tula_cli.worker.measure.node_report import check_nodes
    from tula_cli.worker.measure.probe import run_probes
    from tula_cli.worker.train.evaluation import evaluate_checkpoint

    if isinstance(task, CheckTask):
        check_nodes(task, run, attempt=attempt)
        return
    rendezvous_file = run.get_rendezvous_path(task.id, attempt)
    with worker_ranks.join_process_group(
        task.spec.cluster, rendezvous_file=rendezvous_file, listen=task.is_timed
    ) as ranks:
        device.configure_device(task.spec.train, ranks.device)
        datasets = build_datasets(task.spec)
        limit = task.spec.cluster.memory_per_gpu
        if limit is not None:
            device.limit_gpu_memory(limit, ranks.device) if ranks.device.type == "cuda" else device.limit_memory(limit)
        match task:
            case ProbeTask():
                record = run.read_attempt(task.id, attempt)
                run_probes(task, run, ranks, datasets, started_at=record.started_at if record else time.time())
            case TrainTask():
                run_training(task, run, ranks, datasets, attempt=attempt)
            case EvaluateTask():
                evaluate_checkpoint(task, run, ranks, datasets)
            case RateSearchTask():
                from tula_cli.worker.train.rate_search import run_rate_search  # here: other tasks train no branches

                run_rate_search(task, run, ranks, datasets)


def exit_with_failure(error: Exception, task: Task, run: RunDir, attempt: int) -> None:
    """Record this rank's failure and exit at once: its peers wait in a collective, so nothing may wait for them."""
    from tula_cli.worker import device

    device.lift_memory_limit()
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # the log may be on the full disk
        sys.stderr.write(text)
        sys.stderr.flush()
    rank = int(os.environ["RANK"])
    outcome = classify_failure(text, exit_code=1, device=_find_local_device_type(task))
    message = _summarize_error(error, text)
    failure = Failure(
        task=task.id,
        attempt=attempt,
        rank=rank,
        host=get_node_name(),
        pid=os.getpid(),
        outcome=outcome,
        message=message,
        detail=text,
        signal=find_signal(text) if outcome == "signal" else "",
        fault=find_device_fault(message) if outcome == "device_fault" else None,
        local_batch=_find_current_local_batch(task, run),
        shortage=get_shortage(error),
        # Samples are the same on every node; any other SpecError may be due to this node, such as a missing folder.
        permanent=isinstance(error, SpecError) and _is_data_loader_error(error),
        failed_at=time.time(),
    )
    with contextlib.suppress(OSError):
        try:
            run.write_failure(failure)
        except TulaError as unwritten:  # full disk or removed run: only the log's end may show the failure
            sys.stderr.write(f"{unwritten}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    # If not even the log can be written, the exit code shows a full disk.
    os._exit(DiskFull.exit_code if failure.outcome == "disk" else 1)


def _summarize_error(error: Exception, text: str) -> str:
    """Return the error in one line, or that of an earlier cause in its traceback if the cause decides its class."""
    line, last = find_line_of_failure(text), _find_last_error_line(error)
    return line if line and classify_failure(last) != classify_failure(text) else last


def _find_last_error_line(error: Exception) -> str:
    """Return the class, message and hint of an error; of an error that a loader process has sent, those of the original."""
    lines = str(error).strip().splitlines()
    original, hint = "", error.hint if isinstance(error, TulaError) else ""
    if _is_data_loader_error(error):  # torch keeps only the text of the original error
        original = find_user_exception(str(error))
        hints = [line.removeprefix(_HINT) for line in lines if line.startswith(_HINT)]
        hint = hints[-1] if hints and isinstance(error, TulaError) else ""
    message = _MODULE.sub("", original) or ": ".join(filter(None, [type(error).__name__, *lines[:1]]))
    # NCCL's message starts with the kind of error; the description follows this line.
    first_line = lines.index("Last error:") + 1 if "Last error:" in lines else 0
    if 0 < first_line < len(lines):
        return f"{message}: {lines[first_line]}"
    return f"{message} ({hint})" if hint else message


def _is_data_loader_error(error: Exception) -> bool:
    return _LOADER_ERROR_PREFIX.match(str(error)) is not None


def _find_local_device_type(task: Task) -> str:
    from tula_cli.worker.device import count_gpus

    if task.spec.cluster.device != "auto":
        return task.spec.cluster.device
    return "cuda" if count_gpus() else "cpu"


def _find_current_local_batch(task: Task, run: RunDir) -> int | None:
    """Return the local batch that was running; for a probe task, the first one without a result."""
    current = run.find_current_probe(task) if isinstance(task, ProbeTask) else None
    return current or task.samples_per_rank


if __name__ == "__main__":
    main()
