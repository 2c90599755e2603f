"""Estimate and measure the peak memory of training steps on the CPU; JSON cases on stdin, results on stdout.

Runs in a separate process, because the peak of a process covers its whole lifetime.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from tula_cli.optim import SmallBatch, TulaOptimizer
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import zoo
from tula_cli.worker.build.activation_checkpointing import apply_activation_checkpointing
from tula_cli.worker.build.batches import slice_batch
from tula_cli.worker.device import make_autocast_context, read_process_memory
from tula_cli.worker.measure import fake_tensor_step
from tula_cli.worker.methods.table import get_method

CLASSES = 10


def measure_growth(spec: JobSpec, batch: Any, size: int) -> int:
    """Return the growth of the process in bytes over three optimizer steps under DDP with `size` samples."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = read_process_memory("VmRSS")
    batch = tree_map(torch.clone, batch)
    model = zoo.build_model(spec, CLASSES)
    if spec.train.activation_checkpointing:
        apply_activation_checkpointing(model)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = get_method(spec).build_base_optimizer(spec, list(model.parameters()))
    call = zoo.make_model_call(spec, model, zoo.build_loss(spec))
    if spec.train.method == "ags":
        factors = SmallBatch(refresh=1)
        optimizer = TulaOptimizer(optimizer, model=ddp, b_large=size, b_small=size // 4, factors=factors)
    for _ in range(3):
        with make_autocast_context(spec.train, torch.device("cpu")):
            loss = call.compute_loss(ddp, batch)
        loss.backward()
        if isinstance(optimizer, TulaOptimizer):
            optimizer.small_batch(lambda n: call.compute_loss(model, slice_batch(batch, samples=size, stop=n)))
        optimizer.step()
        optimizer.zero_grad()
    return read_process_memory("VmHWM") - before


def run_case(request: dict) -> dict[str, int]:
    """Return the estimated and the measured peak of one spec, batch and input shape."""
    spec, size = JobSpec.model_validate(request["spec"]), request["batch"]
    batch, item = _make_text(size, request["length"]) if "length" in request else _make_images(size, request["shape"])
    estimate = fake_tensor_step.build_fake_step(spec, item, classes=CLASSES).measure_memory(size)
    measure_growth(spec, slice_batch(batch, samples=size, stop=8), 8)  # once before, for the memory of the libraries
    return {"estimated": estimate.peak, "measured": measure_growth(spec, batch, size)}


def _make_images(size: int, shape: list[int]) -> tuple[Any, Any]:
    inputs, targets = torch.rand(size, *shape), torch.zeros(size, dtype=torch.int64)
    return (inputs, targets), (inputs[0], 0)


def _make_text(size: int, length: int) -> tuple[Any, Any]:
    ids = torch.randint(0, 256, (size, length))
    return {"input_ids": ids, "labels": ids}, {"input_ids": ids[0], "labels": ids[0]}


def main() -> None:
    requests = json.load(sys.stdin)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    json.dump({name: run_case(request) for name, request in requests.items()}, sys.stdout)
    gc.collect()  # a living DDP object and gloo would wait for each other
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
