"""Whole jobs by tula's commands: the quickstart, and a training that is killed and resumed."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from gpu.product import find_newest_run, run_tula, set_arguments, start_tula, wait_for_tula
from gpu.stage import Stage, round_result
from tula_cli.run.records.probes import Measured
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.sections import Train

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
TRAINING_SAMPLES = 1438
"""Samples of the quickstart's training set."""


def quickstart(stage: Stage) -> None:
    """Check, profile, recommend and train the quickstart on one GPU; then request two GPUs on a machine with one."""
    changed = [f"cluster.device={stage.device}", "search.nodes=[1]", "train.epochs=20"]
    changed += ["train.epochs=2", "search.max_batch=64"] if stage.tiny else []
    job, folder = [str(QUICKSTART), *set_arguments(changed)], stage.folder
    codes = {
        "check": run_tula("check", *job, folder=folder).code,
        "profile": run_tula("profile", *job, "--yes", folder=folder).code,
    }
    stage.tell(rc=codes)
    codes["recommend"] = run_tula("recommend", "--objective", "knee", folder=folder).code
    trained = run_tula("train", "--yes", folder=folder)
    codes["train"] = trained.code
    stage.tell(rc=codes)
    stage.require(not any(codes.values()), f"commands ended with {codes}: {trained.error}")
    if any(codes.values()):
        return
    check_run(stage)
    two = run_tula("check", str(QUICKSTART), *set_arguments([changed[0], "search.nodes=[1,2]"]), folder=folder)
    stage.tell(check_refuses_two=two.code != 0, check_says=two.error)
    stage.require_on_card(
        "check_refuses_two", two.code != 0 or count_gpus() > 1, "check allows two ranks on a machine of one GPU"
    )


def check_run(stage: Stage) -> None:
    """Check the measurements of the run, and compare the training with its prediction."""
    run = find_newest_run(stage.folder)
    probes = [result for result in run.read_results() if isinstance(result, Measured)]
    (signature,) = run.list_train_signatures()
    summary = run.get_training(signature).read_summary()
    assert summary is not None
    predicted, actual = summary.predicted_step, summary.actual_step
    error = predicted / actual - 1 if predicted and actual else None
    seen = probes[0].environment
    stage.tell(
        device=seen.device,
        backend=seen.backend,
        hardware=seen.hardware,
        top1=round_result(summary.best_top1, 2),
        step_error=round_result(error),
        libraries_mib=max(probe.memory.libraries or 0 for probe in probes) // 2**20,
        batches=[probe.batch for probe in probes],
        step_ms=[round_result(1000 * sorted(probe.step_times)[len(probe.step_times) // 2], 3) for probe in probes],
    )
    wanted = ("cuda", "nccl") if stage.on_card else ("cpu", "gloo")
    stage.require((seen.device, seen.backend) == wanted, f"measured on {seen.device} by {seen.backend}")
    top1 = summary.best_top1 or 0.0
    stage.require_on_card("top1", top1 >= 97, f"top-1 {top1:.2f} %")
    stage.require_on_card(
        "step_error", error is not None and abs(error) <= 0.1, f"the step time was predicted {error or 0:+.0%} off"
    )


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


# --- killed, and resumed


def resume(stage: Stage) -> None:
    """Kill a training in its second epoch and resume it by the same command; compare it with an uninterrupted training."""
    kinds: dict[str, dict[str, Any]] = {"as it comes": {}}
    if "deterministic" in Train.model_fields:
        kinds["deterministic"] = {"deterministic": True}
    else:
        stage.leave_open("with deterministic algorithms (tula has no train.deterministic yet)")
    for kind, extra in kinds.items():
        place = stage.inside(kind.replace(" ", "-"))
        whole = train(stage, place / "whole", extra, killed=False)
        broken = train(stage, place / "killed", extra, killed=True)
        if whole is None or broken is None:
            continue
        samples = [outcome.read_result().samples for outcome in (whole, broken)]  # type: ignore[union-attr]
        resumed = [attempt.samples for attempt in broken.read_attempts()]
        tops = [result.read_result().metrics["top1"] for result in (whole, broken)]  # type: ignore[union-attr]
        record = {"samples": samples, "resumed_at": resumed, "equal_bits": are_weights_equal(whole, broken)}
        stage.tell(resume={kind: {**record, "top1_diff": round_result(tops[1] - tops[0], 2)}})
        stage.require(samples[0] == samples[1], f"{kind}: {samples[1]} samples trained, {samples[0]} undisturbed")
        stage.require(max(at or 0 for at in resumed) > 0, f"{kind}: it began anew after the kill")


def train(stage: Stage, folder: Path, extra: dict[str, Any], *, killed: bool) -> TrainingRun | None:
    """Train four epochs of the quickstart's job; return its training directory."""
    folder.mkdir(parents=True, exist_ok=True)
    values = [f"cluster.device={stage.device}", "search.nodes=[1]", "train.epochs=4"]
    values += [f"train.{name}={str(value).lower()}" for name, value in extra.items()]
    values += ["train.checkpoint_every=0.01"]
    batch = "8" if stage.on_card else "32"  # on a GPU, epochs of the usual batch would end before they are noticed
    words = ["train", str(QUICKSTART), "--nodes", "1", "--batch", batch, "--yes", *set_arguments(values)]
    if killed:
        started = start_tula(*words, folder=folder)
        if not kill_in_second_epoch(folder, started[0]):
            stage.require(False, "it could not be killed in its second epoch: it was over before")
        wait_for_tula(started)
    ended = run_tula(*words, folder=folder)
    stage.require(ended.code == 0, f"train ended with {ended.code}: {ended.error}")
    if ended.code:
        return None
    run = find_newest_run(folder)
    return run.get_training(run.list_train_signatures()[0])


def kill_in_second_epoch(folder: Path, command: "subprocess.Popen[str]") -> bool:
    """Kill supervisor and ranks, as the loss of a node does, when a checkpoint of the second epoch exists."""
    while command.poll() is None:
        with contextlib.suppress(Exception):  # the checkpoint does not exist yet
            run = find_newest_run(folder)
            for signature in run.list_train_signatures():
                training = run.get_training(signature)
                if training.read_result() is not None:
                    return False
                if training.find_newest_checkpoint_samples() > TRAINING_SAMPLES:
                    return kill_ranks(training)
        time.sleep(0.02)
    return False


def kill_ranks(training: TrainingRun) -> bool:
    """Kill the process that started the ranks; the kernel then kills the ranks."""
    for attempt in training.read_attempts():
        if attempt.ended_at is None and attempt.pid:
            os.kill(attempt.pid, signal.SIGKILL)
            return True
    return False


def are_weights_equal(first: TrainingRun, second: TrainingRun) -> bool:
    """Return whether the final weights of two trainings are bitwise equal."""
    import torch

    states = [
        torch.load(result.list_checkpoints()[0], map_location="cpu", weights_only=True) for result in (first, second)
    ]
    a, b = (state["model"] for state in states)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
