"""Two ranks on one device: with gloo, with NCCL if it allows this, and with one rank that runs out of memory."""

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu.product import find_newest_run, run_tula, write_job
from gpu.shared import DEVICE
from gpu.stage import Stage, round_result
from gpu.two_ranks import SETTINGS
from gpu.watch import list_rank_processes as ranks_alive

TIMEOUT_SECONDS = {"gloo": 100.0, "nccl": 50.0}
"""Time limits in seconds of two ranks; gloo copies all gradients through host memory, and NCCL may hang."""
MAX_GROWTH_MIB = 4.0  # MiB of reserved memory
MAX_ALIVE_SECONDS = 7.0  # seconds that a rank survives its peer


def ranks(stage: Stage) -> None:
    """Train with two ranks on one device with each backend; kill one rank; request an algorithm that NCCL does not have."""
    methods = list(SETTINGS)
    message, text = run_pair(stage, "gloo", methods)
    stage.tell(gloo=message)
    stage.require(
        set(message) == set(methods), f"gloo: of {methods} only {list(message)} came to an end: {text[-300:]}"
    )
    for name, row in message.items():
        stage.require(row["equal_weights"], f"gloo, {name}: the ranks end with different weights")
        growth = row["reserved_growth_mib"]
        stage.require_on_card(
            "reserved_growth", growth <= MAX_GROWTH_MIB, f"gloo, {name}: the allocator took {growth} MiB more in {row['steps']} steps"
        )  # fmt: skip
    check_lost_peer(stage)
    if not stage.on_card:
        return stage.leave_open("NCCL (needs a GPU)")
    message, text = run_pair(stage, "nccl", methods)  # NCCL calls two ranks on one GPU unsafe and may reject them
    stage.tell(nccl=message or {"refused": text[-2000:]})
    for name, row in message.items():
        stage.require(row["equal_weights"], f"nccl, {name}: the ranks end with different weights")
    _, text = run_pair(stage, "nccl", ["ags"], NCCL_ALGO="tree")
    stage.tell(tree_text=text[-2000:])
    return None


def run_pair(stage: Stage, backend: str, methods: list[str], **environment: str) -> tuple[dict[str, Any], str]:
    """Run two ranks; return the results of rank 0 and the output of both."""
    folder = stage.inside(f"{backend}{len(list(stage.folder.iterdir()))}")
    command = [sys.executable, "-m", "gpu.two_ranks", str(folder), backend, stage.device]
    command += ["tiny" if stage.tiny else "whole", *methods]
    processes = []
    with open(folder / "log.txt", "wb") as log:
        for rank in range(2):
            settings = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"}
            settings |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN", **environment}
            processes.append(subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log))
        ends = time.monotonic() + stage.patience(TIMEOUT_SECONDS[backend])
        while time.monotonic() < ends and all(process.poll() is None for process in processes):
            time.sleep(0.1)
        if all(
            process.poll() in (0, None) for process in processes
        ):  # one has finished; the other one may still report
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in processes:
                    process.wait(max(0.1, min(10.0, ends - time.monotonic())))
        for process in processes:
            process.kill()
            process.wait()
    path = folder / "told.json"
    return json.loads(path.read_text()) if path.exists() else {}, (folder / "log.txt").read_text(errors="replace")


def check_lost_peer(stage: Stage) -> None:
    """Let one rank of a training run out of memory, and measure how long the other one keeps the device."""
    folder = stage.inside("lost")
    content = {
        "name": "lost",
        "model": {"name": "gpu.lost:Net"},
        "dataset": {"name": "gpu.images:dataset", "args": {"side": 8, "count": 256}},
        "optimizer": {"lr": 0.01},
        "train": {"epochs": 1, "method": "lbt", "workers": 0},
        "search": {"nodes": [2], "min_batch": 32},
        "cluster": {"kind": "local", "device": stage.device},
    }
    words = ["train", str(write_job(folder, content)), "--nodes", "2", "--batch", "32", "--yes"]
    device = "cuda:0" if stage.on_card else "cpu"
    python = write_interpreter(folder)
    shared = {DEVICE: device, f"{DEVICE}_PYTHON": python}
    ended = run_tula(*words, folder=folder, python=python, **shared)
    if not (folder / "tula-runs").is_dir():
        return stage.require(False, f"two ranks on one device could not be started: {ended.error}")
    run = find_newest_run(folder)
    (signature,) = run.list_train_signatures()
    attempts = run.get_training(signature).read_attempts()
    failures = [failure for attempt in attempts for failure in run.read_failures(attempt.task, attempt.number)]
    first = min((failure.failed_at for failure in failures), default=0.0)
    outlived = (attempts[0].ended_at or 0.0) - first if attempts else None
    remaining = ranks_alive()
    stage.tell(
        lost={
            "rc": ended.code,
            "texts": [f"rank {failure.rank}: {failure.outcome}: {failure.message}" for failure in failures],
            "outcome": attempts[0].outcome if attempts else None,
            "peer_dead_after_s": round_result(outlived, 2),
            "left": len(remaining),
        }
    )
    record = {failure.rank: failure.outcome for failure in failures[:1]}
    stage.require(record == {1: "device_oom"}, f"the lost rank is told as {record}: {ended.error}")
    stage.require(
        outlived is not None and 0 <= outlived <= MAX_ALIVE_SECONDS, f"the other rank was there for {outlived} s more"
    )  # fmt: skip
    stage.require(not remaining, f"{len(remaining)} ranks are left")
    return None


def write_interpreter(folder: Path) -> str:
    """Write a `python` that makes ranks share a device; return its path."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -u -m gpu.shared "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
