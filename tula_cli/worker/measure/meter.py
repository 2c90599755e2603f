"""Measuring steps: time, memory, gradients, and what it was measured on."""

import itertools
import time

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tula_cli.models.memory.host_memory import AHEAD
from tula_cli.run.records.components import Components
from tula_cli.run.records.probes import Tokens
from tula_cli.worker.build.batches.tokens import TokenCounter
from tula_cli.worker.device import gpu_memory, tensor_bytes
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.loop import Trainer

LOADED = 4
"""The fewest batches by which a data loader is timed."""


def split_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    batch: int,
    factors: int,
    peak: int,
    reserved: int,
    libraries: int = 0,
    accumulate: int = 1,
) -> Components:
    """Split a peak as in Eq. 3: tensors are counted, activations are the rest. Bytes.

    The gradients are DDP's buckets (`gradient_as_bucket_view`). With several micro-batches a step the sum so far is
    beside them until the last one is reduced: a second copy.
    """
    parameters = tensor_bytes([*model.parameters(), *model.buffers()])
    gradients = tensor_bytes(p.grad if p.grad is not None else p for p in model.parameters() if p.requires_grad)
    gradients *= min(2, accumulate)
    state = tensor_bytes(tree_leaves(list(optimizer.state.values())))
    return Components(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        factors=factors,
        batch=batch,
        activations=max(0, peak - parameters - gradients - state - factors - batch),
        peak=peak,
        reserved=reserved,
        libraries=libraries,
    )


def capacity(ranks: Ranks, memory_per_gpu: int | None) -> int | None:
    """Return the bytes one rank may use: the stated limit, else the GPU's memory; None on an unlimited CPU."""
    if memory_per_gpu is not None:
        return memory_per_gpu
    if ranks.device.type == "cuda":
        return gpu_memory(ranks.device)
    return None


def loader(trainer: Trainer) -> tuple[float, Tokens | None]:
    """Return the seconds in which the data loader makes the data of a step, all ranks at once, while nothing else is done.

    And what tokens a sample of it has, where it is text.

    From the first batch on two rounds of all workers: their start is not counted, nor is a batch that was ready before.
    """
    batches = max(LOADED, AHEAD * trainer.workers)
    stream = worker_train_loop.loaded(trainer, trainer.position.epoch + 2 + batches)  # of a batch an epoch at least
    next(stream)
    trainer.ranks.from_first(0)
    began, taken, counter = time.perf_counter(), 0, TokenCounter()
    for batch in itertools.islice(stream, batches):
        counter.add(batch)
        taken += 1
        if time.perf_counter() - began > trainer.spec.search.max_seconds:
            break
    seconds = trainer.ranks.largest((time.perf_counter() - began) / taken * trainer.parts)
    found = counter.of_a_sample()
    return seconds, found and Tokens(length=found[0], real=found[1])
