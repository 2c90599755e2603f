"""What training takes in time and money, Eq. 4a and 4b.

    T = E floor(D / B) t_step, and beside the steps: evaluation, scaling factors, checkpoints, start-up
    C = T x price

T is wall-clock time, so that it can be held against a deadline and a bill. The number of epochs is the spec's at every
batch size: that a large batch may need more of them is not modelled.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tula_cli.records import Overheads
from tula_cli.spec import Every, JobSpec, Pricing

GB = 10**9
"""Bytes of the GB in a price: the decimal one, as in cloud price lists and on the GPU's data sheet."""

INTERRUPTION_SECONDS = 24 * 3600.0
"""Mean time between interruptions (a failed node, preemption, maintenance) that checkpoints are spaced for."""

MIN_CHECKPOINT_SECONDS = 30.0


def checkpoint_interval(save_seconds: float) -> float:
    """Return the seconds between checkpoints that lose the least time, sqrt(2 x save x MTBF) (Young 1974, Daly 2006).

    Args:
        save_seconds: what writing one checkpoint takes.

    Returns:
        At least MIN_CHECKPOINT_SECONDS, however fast saving is.
    """
    return max(MIN_CHECKPOINT_SECONDS, math.sqrt(2 * max(0.0, save_seconds) * INTERRUPTION_SECONDS))


@dataclass(frozen=True)
class Work:
    """How much a training run has to do at one configuration."""

    epochs: int
    steps: int  # optimizer steps an epoch
    eval_batches: int  # one evaluation, on each rank
    refreshes: int  # of the scaling factors, in the whole run


def work(spec: JobSpec, *, batch: int, world: int, dataset_size: int, eval_size: int, eval_batch_size: int) -> Work:
    """Count steps (Eq. 4a with whole steps: the last, partial batch is dropped), evaluations and refreshes.

    Args:
        spec: epochs, method and refresh interval.
        batch: samples an optimizer step over all GPUs.
        world: GPUs over all nodes.
        dataset_size: training samples.
        eval_size: held-out samples.
        eval_batch_size: evaluation samples of one rank at a time.
    """
    epochs, steps = spec.train.epochs, dataset_size // batch
    refresh = spec.ags.refresh
    refreshes = epochs * steps // refresh.every if isinstance(refresh, Every) else epochs
    return Work(
        epochs=epochs,
        steps=steps,
        eval_batches=math.ceil(eval_size / (world * eval_batch_size)),
        refreshes=refreshes if spec.train.method == "ags" else 0,
    )


def training_seconds(
    work: Work, *, step_time: float, overheads: Overheads, checkpoint_every: float | None = None
) -> float:
    """Return the wall-clock time of a whole training run, Eq. 4a and what comes beside the steps.

    Args:
        work: what there is to do.
        step_time: seconds an optimizer step.
        overheads: seconds of the rest, from a probe.
        checkpoint_every: seconds from one checkpoint to the next within an epoch, which ends with one in any case; None for
            `checkpoint_interval`.
    """
    stepping = work.steps * step_time
    interval = checkpoint_interval(overheads.checkpoint) if checkpoint_every is None else checkpoint_every
    # The one at the end of an epoch starts the clock anew.
    checkpoints = 1 + math.floor(stepping / interval)
    epoch = stepping + work.eval_batches * overheads.eval_batch + checkpoints * overheads.checkpoint
    return overheads.startup + work.epochs * epoch + work.refreshes * overheads.refresh


_UNITS: Mapping[str, str] = {
    "node_hour": "node-hour",
    "gpu_hour": "GPU-hour",
    "gb_hour": "hour and GB of reserved GPU memory",
}


def cost(pricing: Pricing, *, hours: float, nodes: int, gpus_per_node: int, reserved: float) -> float:
    """Return what `hours` cost, in the currency of the pricing (Eq. 4b; by memory: section IV-C-2).

    Args:
        pricing: price and what it is for.
        hours: wall-clock hours.
        nodes: number of nodes.
        gpus_per_node: GPUs of one node.
        reserved: peak reserved memory of one GPU, bytes.
    """
    gpus = nodes * gpus_per_node
    units = {"node_hour": nodes, "gpu_hour": gpus, "gb_hour": gpus * reserved / GB}
    return hours * pricing.price * units[pricing.kind]


def price_at_most(spec: JobSpec, node_hours: float, capacity: int | None) -> float | None:
    """Return what jobs of so many node-hours cost at most; None where that depends on memory that is not known.

    Args:
        spec: pricing and GPUs a node.
        node_hours: of all jobs together.
        capacity: memory of one GPU, bytes.
    """
    if spec.pricing.kind == "gb_hour" and capacity is None:
        return None
    gpus = spec.cluster.gpus_per_node
    return cost(spec.pricing, hours=node_hours, nodes=1, gpus_per_node=gpus, reserved=capacity or 0)


def price_words(pricing: Pricing) -> str:
    """Return the price with its unit and its source."""
    source = f" ({pricing.source})" if pricing.source else ""
    return f"{pricing.price:g} {pricing.currency} per {_UNITS[pricing.kind]}{source}"
