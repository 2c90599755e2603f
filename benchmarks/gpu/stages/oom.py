"""Out of memory: a training that starts with too large a batch, and a probe that meets it."""

import itertools
import time
from pathlib import Path
from typing import Any

from gpu.product import loader_processes, newest, tula, write_job
from gpu.rig import SHORT
from gpu.rig import job as fixed_job
from gpu.stage import Stage, share
from gpu.trials import Trials
from gpu.watch import MIB, Hog, Watch, taken
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt

LEFT = 8 * 2**30
"""Bytes of the card that are not taken."""
SLACK = 256 * MIB
"""Bytes above what was in use before, at which it counts as given back."""
MOST_HELD = 2.0  # seconds


def oom(stage: Stage) -> None:
    """Let a training and a probe run out of memory; see what they do next, and when the memory is back."""
    remaining, batch = (800 * MIB, 1024) if stage.tiny else (LEFT, 256)
    content = job(stage, remaining, batch=batch)
    seconds = "0" if stage.tiny else "0.02"
    with Hog(stage.device, remaining), Watch(stage.device) as watch:
        time.sleep(2 * 0.2)
        base = taken(stage.device) + SLACK
        place = stage.inside("train")
        path = write_job(place, content)
        words = ["train", str(path), "--nodes", "1", "--batch", str(batch), "--yes"]
        ended = tula(*words, folder=place, GPU_IMAGE_SECONDS=seconds)
        stage.require(ended.code == 0, f"train ended with {ended.code}: {ended.error}")
        if not (place / "tula-runs").is_dir():
            return
        attempts = told_by_attempts(stage, newest(place), watch, base)
        if not attempts:
            return
        final = attempts[-1].batch
        truth(stage, content, remaining, final)
        probed(stage, content, batch, final, GPU_IMAGE_SECONDS=seconds)


def job(stage: Stage, left: int, *, batch: int) -> dict[str, Any]:
    """Return the job: on the CPU a limit on the process stands for the full card."""
    side = 64 if stage.tiny else 224
    workers = loader_processes(1 if stage.tiny else 4, batch=batch * 3 * side**2 * 4)
    stage.tell(workers=workers)
    content: dict[str, Any] = {
        "name": "oom",
        "model": {"name": "small_cnn", "args": {"width": 8}} if stage.tiny else {"name": "resnet50"},
        "dataset": {"name": "gpu.images:dataset", "args": {"side": side, "count": 2 * batch}},
        "optimizer": {"lr": 1e-3, "momentum": 0.9},
        "train": {"epochs": 1, "method": "lbt", "oom_policy": "shrink", "workers": workers},
        "search": {"nodes": [1], "min_batch": batch // 4, "max_batch": batch, "max_node_hours": 1, **SHORT},
        "cluster": {"kind": "local", "device": stage.device},
    }
    if not stage.on_card:
        content["cluster"]["memory_per_gpu"] = left
    return content


class Told:
    """An attempt with the batch that it trained at."""

    def __init__(self, attempt: Attempt, batch: int) -> None:
        self.attempt, self.batch = attempt, batch


def told_by_attempts(stage: Stage, run: RunDir, watch: Watch, base: int) -> list[Told]:
    """Judge how each attempt ended and how long its memory was held; return them."""
    signatures = run.list_train_signatures()
    if not signatures:
        return []
    training = run.get_training(signatures[0])
    batches = {task.id: task.batch for task in training.read_tasks()}
    results = [Told(attempt, batches[attempt.task]) for attempt in training.read_attempts()]
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
            back is not None and back <= MOST_HELD,
            f"after batch {report.batch} the memory was "
            + (f"back after {back:.1f} s" if back else "not seen to come back"),
        )
        at_start = watch.most(following.attempt.started_at - 0.5, following.attempt.started_at + 0.5)
        stage.tell(held_mib={str(report.batch): max(0, at_start - base) // MIB})
    stage.tell(
        attempts=len(results),
        batches=[message.batch for message in results],
        held_seconds=[share(value, 2) for value in kept],
        relaunch_seconds=[share(value, 2) for value in relaunch],
        texts=texts,
    )
    stage.require(len(results) > 1, "the first batch did not run out of memory: nothing was tried")
    return results


def truth(stage: Stage, content: dict[str, Any], left: int, final: int) -> None:
    """Try the batch that was trained at, and its double, in processes of their own."""
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
    # On the CPU the limit counts the process's threads and heap too, as much as small batches take.
    stage.require_on_card(
        "fits_truth", fits and not double, f"trained at {final}; alone {final} fits: {fits}, {2 * final}: {double}"
    )


def probed(stage: Stage, content: dict[str, Any], batch: int, final: int, **environment: str) -> None:
    """Let a probe meet the same batches: its results have to say which fit."""
    place: Path = stage.inside("probe")
    ended = tula("profile", str(write_job(place, content)), "--yes", folder=place, **environment)
    results = {str(result.local_batch): result.kind for result in newest(place).read_results()}
    stage.tell(probe={"rc": ended.code, "results": results})
    wanted = {str(size): "measured" if size <= final else "out_of_memory" for size in (batch // 4, batch // 2, batch)}
    right = ended.code == 0 and results == wanted
    stage.require_on_card("probe", right, f"probes told {results}, the training {wanted}")
