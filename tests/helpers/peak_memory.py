"""Estimates and measures the peak memory of training steps on the CPU; cases as JSON on stdin, the answers on stdout.

In a process of its own, because the peak of a process is that of all it has ever done.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tula_cli.optim import SmallBatch, TulaOptimizer
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import zoo
from tula_cli.worker.build.recompute import apply_activation_checkpointing
from tula_cli.worker.device import process_memory
from tula_cli.worker.measure import rehearsal
from tula_cli.worker.methods.table import method_of


def measured(spec: JobSpec, inputs: torch.Tensor, targets: torch.Tensor) -> int:
    """Return by how much the process grows over three optimizer steps under DDP. Bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = process_memory("VmRSS")
    inputs, targets = inputs.clone(), targets.clone()
    model = zoo.build_model(spec, 10)
    if spec.train.activation_checkpointing:
        apply_activation_checkpointing(model)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = method_of(spec).base(spec, list(model.parameters()))
    loss = zoo.build_loss(spec)
    if spec.train.method == "ags":
        factors, size = SmallBatch(refresh=1), len(inputs)
        optimizer = TulaOptimizer(optimizer, model=ddp, b_large=size, b_small=size // 4, factors=factors)
    for _ in range(3):
        loss(ddp(inputs), targets).backward()
        if isinstance(optimizer, TulaOptimizer):
            optimizer.small_batch(lambda n: loss(model(inputs[:n]), targets[:n]))
        optimizer.step()
        optimizer.zero_grad()
    return process_memory("VmHWM") - before


def case(request: dict) -> dict[str, int]:
    """Return both peaks of one spec, batch and input shape."""
    spec, size = JobSpec.model_validate(request["spec"]), request["batch"]
    inputs, targets = torch.rand(size, *request["shape"]), torch.zeros(size, dtype=torch.int64)
    estimate = rehearsal.rehearse(spec, (inputs[0], 0), classes=10).measure(size)
    measured(spec, inputs[:8], targets[:8])  # the libraries' own memory, once
    return {"estimated": estimate.peak, "measured": measured(spec, inputs, targets)}


def main() -> None:
    requests = json.load(sys.stdin)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    json.dump({name: case(request) for name, request in requests.items()}, sys.stdout)
    gc.collect()  # a living DDP object and gloo would wait for each other
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
