"""Out of memory: a training with too large a batch, and a probe of the same batch."""

import itertools
import time
from pathlib import Path
from typing import Any

from gpu.product import find_newest_run, limit_loader_processes, run_tula, write_job
from gpu.rig import SHORT_SEARCH
from gpu.rig import make_job as fixed_job
from gpu.stage import Stage, round_result
from gpu.trials import Trials
from gpu.watch import MIB, MemoryHolder, MemorySampler, read_bytes_in_use
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt

FREE_BYTES = 8 * 2**30
"""Bytes of the GPU that remain free."""
RELEASED_SLACK_BYTES = 256 * MIB
"""The memory counts as released when at most this many bytes more than before are in use."""
MAX_HELD_SECONDS = 2.0  # in seconds


def oom(stage: Stage) -> None:
    """Let a training and a probe run out of memory; check their fallbacks, and when the memory is released."""
    remaining, batch = (800 * MIB, 1024) if stage.tiny else (FREE_BYTES, 256)
    content = make_job(stage, remaining, batch=batch)
    seconds = "0" if stage.tiny else "0.02"
    with MemoryHolder(stage.device, remaining), MemorySampler(stage.device) as watch:
        time.sleep(2 * 0.2)
        base = read_bytes_in_use(stage.device) + RELEASED_SLACK_BYTES
        place = stage.inside("train")
        path = write_job(place, content)
        words = ["train", str(path), "--nodes", "1", "--batch", str(batch), "--yes"]
        ended = run_tula(*words, folder=place, GPU_IMAGE_SECONDS=seconds)
        stage.require(ended.code == 0, f"train ended with {ended.code}: {ended.error}")
        if not (place / "tula-runs").is_dir():
            return
        attempts = check_attempts(stage, find_newest_run(place), watch, base)
        if not attempts:
            return
        final = attempts[-1].batch
        try_final_batch(stage, content, remaining, final)
        check_probe(stage, content, batch, final, GPU_IMAGE_SECONDS=seconds)


def make_job(stage: Stage, left: int, *, batch: int) -> dict[str, Any]:
    """Return the job; on the CPU, a memory limit of the process replaces the full GPU."""
    side = 64 if stage.tiny else 224
    workers = limit_loader_processes(1 if stage.tiny else 4, batch=batch * 3 * side**2 * 4)
    stage.tell(workers=workers)
    content: dict[str, Any] = {
        "name": "oom",
        "model": {"name": "small_cnn", "args": {"width": 8}} if stage.tiny else {"name": "resnet50"},
        "dataset": {"name": "gpu.images:dataset", "args": {"side": side, "count": 2 * batch}},
        "optimizer": {"lr": 1e-3, "momentum": 0.9},
        "train": {"epochs": 1, "method": "lbt", "oom_policy": "shrink", "workers": workers},
        "search": {"nodes": [1], "min_batch": batch // 4, "max_batch": batch, "max_node_hours": 1, **SHORT_SEARCH},
        "cluster": {"kind": "local", "device": stage.device},
    }
    if not stage.on_card:
        content["cluster"]["memory_per_gpu"] = left
    return content


class AttemptReport:
    """An attempt and its batch."""

    def __init__(self, attempt: Attempt, batch: int) -> None:
        self.attempt, self.batch = attempt, batch


def check_attempts(stage: Stage, run: RunDir, watch: MemorySampler, base: int) -> list[AttemptReport]:
    """Check the outcome of each attempt and how long its memory remained in use; return the attempts."""
    signatures = run.list_train_signatures()
    if not signatures:
        return []
    training = run.get_training(signatures[0])
    batches = {task.id: task.batch for task in training.read_tasks()}
    results = [AttemptReport(attempt, batches[attempt.task]) for attempt in training.read_attempts()]
    kept, relaunch, texts = [], [], []
    for report, following in itertools.pairwise(results):
        failures = run.read_failures(report.attempt.task, report.attempt.number)
        died = failures[0].failed_at if failures else report.attempt.ended_at or 0.0
        texts += [f"{failure.outcome}: {failure.message}" for failure in failures] or [report.attempt.message]
        back = watch.back_after(died, base, until=following.attempt.ended_at or time.time())
        kept.append(back)
        relaunch.append(following.attempt.started_at - died)
        wrong = [failure.outcome for failure in failures if failure.outcome != "device_oom"]
        stage.require(not wrong and report.attempt.outcome == "device_oom", f"batch {report.batch} ended as {wrong or report.attempt.outcome}")  # fmt: skip
        stage.require_on_card(
            "held_seconds",
            back is not None and back <= MAX_HELD_SECONDS,
            f"after batch {report.batch} the memory was "
            + (f"back after {back:.1f} s" if back else "not seen to come back"),
        )
        at_start = watch.most(following.attempt.started_at - 0.5, following.attempt.started_at + 0.5)
        stage.tell(held_mib={str(report.batch): max(0, at_start - base) // MIB})
    stage.tell(
        attempts=len(results),
        batches=[message.batch for message in results],
        held_seconds=[round_result(value, 2) for value in kept],
        relaunch_seconds=[round_result(value, 2) for value in relaunch],
        texts=texts,
    )
    stage.require(len(results) > 1, "the first batch did not run out of memory: nothing was tried")
    return results


def try_final_batch(stage: Stage, content: dict[str, Any], left: int, final: int) -> None:
    """Try the final batch of the training and twice this batch in separate processes."""
    spec = fixed_job(
        content["model"]["name"],
        image=content["dataset"]["args"]["side"],
        batch=64,
        classes=10,
        device=stage.device,
        model=content["model"],
    )
    with Trials(spec, capacity=None if stage.on_card else left) as trial:
        fits, double = trial(final).fits, trial(2 * final).fits
    stage.tell(fits_truth={str(final): fits, str(2 * final): double})
    # On the CPU, the limit includes the threads and the heap of the process, which need as much as small batches.
    stage.require_on_card(
        "fits_truth", fits and not double, f"trained at {final}; alone {final} fits: {fits}, {2 * final}: {double}"
    )


def check_probe(stage: Stage, content: dict[str, Any], batch: int, final: int, **environment: str) -> None:
    """Probe the same batches, and check that the results report which of them fit."""
    place: Path = stage.inside("probe")
    ended = run_tula("profile", str(write_job(place, content)), "--yes", folder=place, **environment)
    results = {str(result.local_batch): result.kind for result in find_newest_run(place).read_results()}
    stage.tell(probe={"rc": ended.code, "results": results})
    wanted = {str(size): "measured" if size <= final else "out_of_memory" for size in (batch // 4, batch // 2, batch)}
    right = ended.code == 0 and results == wanted
    stage.require_on_card("probe", right, f"probes told {results}, the training {wanted}")
