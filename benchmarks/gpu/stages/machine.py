"""The machine: versions, state of the GPU, its copy and matrix rates; and the data loader."""

import itertools
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu.rig import ConstantBatchTrainer, join_alone, make_job
from gpu.stage import Stage, round_result
from tula_cli.worker.device import Clock, get_nccl_version, read_driver_version

MINIMUM_RATES = {"H200": (3.5, 600.0), "H100": (2.5, 600.0)}
"""Minimum TB/s of a copy and bf16 TFLOP/s by GPU; measured times of slower GPUs are not used."""
NVIDIA_SMI_FIELDS = (
    "name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,ecc.mode.current,mig.mode.current"
)


def env(stage: Stage) -> None:
    """Record the machine, and whether its times are valid."""
    device = torch.device(stage.device)
    status = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    stage.tell(
        torch=torch.__version__,
        cuda=torch.version.cuda or torch.version.hip or "",
        nccl=get_nccl_version(),
        driver=read_driver_version(),
        gpu=torch.cuda.get_device_name() if stage.on_card else "",
        memory_mib=torch.cuda.get_device_properties(0).total_memory // 2**20 if stage.on_card else 0,
        cores=len(os.sched_getaffinity(0)),
        shm_gib=round_result(status.f_bavail * status.f_frsize / 2**30, 1) if status else 0.0,
        card=read_gpu_state(),
    )
    size = 2**21 if stage.tiny else 2**29  # numbers of 4 bytes
    side = 256 if stage.tiny else 8192
    stage.tell(
        copy_tbs=round_result(measure_copy_rate(device, size)),
        h2d_gbs=round_result(measure_upload_rate(device, size // 4), 2),
    )
    stage.tell(bf16_tflops=round_result(measure_matrix_rate(device, side), 2), card_after=read_gpu_state())
    name = stage.figures["gpu"]
    floor = next((rates for part, rates in MINIMUM_RATES.items() if part in name), None)
    stage.require(not stage.on_card or floor is not None, f"no figures are known of {name!r} to hold its speed against")
    copies, multiplies = floor or (0.0, 0.0)
    figures = stage.figures
    stage.require_on_card(
        "copy_tbs", figures["copy_tbs"] >= copies, f"copies {figures['copy_tbs']:.2f} TB/s, a sound card {copies:g}"
    )
    stage.require_on_card(
        "bf16_tflops",
        figures["bf16_tflops"] >= multiplies,
        f"multiplies at {figures['bf16_tflops']:.0f} TFLOP/s, a sound card at {multiplies:g}",
    )


def read_gpu_state() -> dict[str, str]:
    """Return the current state of the GPU from the driver's tool; empty without a GPU."""
    try:
        command = ["nvidia-smi", f"--query-gpu={NVIDIA_SMI_FIELDS}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    first = done.stdout.strip().splitlines()[:1]
    return (
        dict(zip(NVIDIA_SMI_FIELDS.split(","), (word.strip() for word in first[0].split(",")), strict=False))
        if first
        else {}
    )


def measure_seconds(device: torch.device, work: Callable[[], Any], repeats: int = 10) -> float:
    """Return the median seconds of a function call after a warm-up."""
    clock = Clock(device)
    for _ in range(3):
        work()
    marks = [clock.mark()]
    for _ in range(repeats):
        work()
        marks.append(clock.mark())
    return statistics.median(clock.measure_seconds(a, b) for a, b in itertools.pairwise(marks))


def measure_copy_rate(device: torch.device, size: int) -> float:
    """Return TB/s, counting bytes read and bytes written."""
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    return 8 * size / measure_seconds(device, lambda: target.copy_(source)) / 1e12


def measure_upload_rate(device: torch.device, size: int) -> float:
    """Return GB/s from pinned host memory."""
    source = torch.randn(size, pin_memory=device.type == "cuda")
    target = torch.empty(size, device=device)
    return 4 * size / measure_seconds(device, lambda: target.copy_(source, non_blocking=True)) / 1e9


def measure_matrix_rate(device: torch.device, side: int) -> float:
    """Return TFLOP/s of a product of random bf16 matrices."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / measure_seconds(device, lambda: a @ b) / 1e12


def loader(stage: Stage) -> None:
    """Record the loader's images per second by its number of processes, and the consumption of the device. There is no limit."""
    folder = stage.inside("images")
    count, side = (32, 64) if stage.tiny else (256, 500)
    write_images(folder, count=count, side=side)
    crop = 32 if stage.tiny else 224
    with join_alone(stage.device) as me:
        for workers in (0, 1) if stage.tiny else (0, 2, 8, 14):
            rate = measure_loader_rate(folder, workers, crop=crop, least=1.0 if stage.tiny else 3.0)
            stage.tell(by_workers={str(workers): round_result(rate, 1)})
        model, batch = ("small_cnn", 16) if stage.tiny else ("resnet50", 256)
        spec = make_job(model, image=crop, batch=batch, device=stage.device, classes=10, precision="bf16")
        fixed = ConstantBatchTrainer.of(spec, me, batch=batch)
        fixed.warm_up()
        clock, steps = fixed.trainer.clock, 3 if stage.tiny else 20
        start = clock.mark()
        for _ in range(steps):
            fixed.step()
        stage.tell(
            gpu=round_result(steps * batch / clock.measure_seconds(start, clock.mark()), 1),
            cores=len(os.sched_getaffinity(0)),
        )
        del fixed


def write_images(folder: Path, *, count: int, side: int) -> None:
    """Write JPEG files of smooth noise, with the file size of photographs, in two classes."""
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(0)
    for split, share_ in (("train", count), ("val", 4)):
        for number in range(share_):
            place = folder / split / f"class{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(drawn.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8))
            coarse.resize((side, 3 * side // 4)).save(place / f"{number:05d}.jpg", quality=90)


def measure_loader_rate(folder: Path, workers: int, *, crop: int, least: float) -> float:
    """Return the images per second of tula's loader, measured for at least `least` seconds after its first batches."""
    from tula_cli.models.ramp import Ramp
    from tula_cli.spec.job import JobSpec
    from tula_cli.worker.build.data import build_datasets
    from tula_cli.worker.build.loaders import MicroBatchSampler, TrainingPosition, build_train_loader

    spec = JobSpec.model_validate({
        "model": {"name": "resnet18"},
        "dataset": {"name": "ImageFolder", "root": str(folder)},
        "transforms": {"train": [{"RandomResizedCrop": {"size": crop}}, "RandomHorizontalFlip", "ToTensor"]},
        "optimizer": {"lr": 0.1},
        "train": {"epochs": 1},
    })  # fmt: skip
    images, batch = build_datasets(spec).train, 16
    everything = MicroBatchSampler(
        len(images),
        ramp=Ramp.from_constant_batch(batch),
        parts={batch: 1},
        rank=0,
        world=1,
        seed=0,
        epochs=10**6,
        start=TrainingPosition(),
    )
    stream = iter(build_train_loader(images, everything, workers=workers, pin=torch.cuda.is_available()))
    for _ in range(max(1, 2 * workers)):  # batches that were prefetched while the processes started
        next(stream)
    began, batches = time.perf_counter(), 0
    while time.perf_counter() - began < least:
        next(stream)
        batches += 1
    return batches * batch / (time.perf_counter() - began)
