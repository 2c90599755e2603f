"""What training takes in time and money, Eq. 4a and 4b.

    T = E floor(D / B) t_step, and beside the steps: evaluation, scaling factors, checkpoints, start-up
    C = T x price

T is wall-clock time, so that it can be held against a deadline and a bill. The number of epochs is the spec's at every
batch size: that a large batch may need more of them is not modelled. On spot nodes T is the expected time: interruptions
come as a Poisson process (Daly 2006), each costs what came after the newest checkpoint and a restart.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tula_cli.models import halving, refresh
from tula_cli.run.records.base import Market
from tula_cli.run.records.probes import Overheads
from tula_cli.run.records.recommendations import TimeParts
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import UNPRICED, Pricing

GB = 10**9
"""Bytes of the GB in a price: the decimal one, as in cloud price lists and on the GPU's data sheet."""

DAY = 24 * 3600.0

INTERRUPTION_SECONDS = DAY
"""Mean time between interruptions (a failed node, maintenance) that checkpoints are spaced for on any nodes."""

MIN_CHECKPOINT_SECONDS = 30.0

_HOPELESS = 20.0
"""Interruptions to be expected in one restart and segment, beyond which the training never ends (e^20 attempts)."""


def interruption_rate(pricing: Pricing, nodes: int) -> float:
    """Return how often a second spot nodes interrupt a job: with the first of its nodes that is taken away."""
    return 0.0 if pricing.spot is None else pricing.spot.interruptions_per_day * nodes / DAY


def checkpoint_interval(save_seconds: float | None, *, rate: float = 0.0) -> float:
    """Return the seconds between checkpoints that lose the least time, sqrt(2 x save x MTBF) (Young 1974, Daly 2006).

    Args:
        save_seconds: what writing one checkpoint takes; None where it was not measured.
        rate: interruptions a second that come beside those that any node has.

    Returns:
        At least MIN_CHECKPOINT_SECONDS, however fast saving is; infinite where that is not known, so that only the end of an
        epoch is counted on.
    """
    if save_seconds is None:
        return math.inf
    between = 1 / (1 / INTERRUPTION_SECONDS + rate)
    return max(MIN_CHECKPOINT_SECONDS, math.sqrt(2 * max(0.0, save_seconds) * between))


@dataclass(frozen=True)
class Work:
    """How much a training run has to do at one configuration."""

    epochs: int
    steps: int  # optimizer steps an epoch
    eval_batches: int  # one evaluation, on each rank
    refreshes: int  # of the scaling factors, in the whole run, beside those that every step has
    branches: int = 0  # that a self-tuning training compares
    branch_steps: int = 0  # optimizer steps of all of them
    branch_evals: int = 0  # evaluation batches of one branch, on each rank


def work(
    spec: JobSpec, *, batch: int, world: int, dataset_size: int, eval_size: int | None, eval_batch_size: int | None
) -> Work:
    """Count steps (Eq. 4a with whole steps: the last, partial batch is dropped), evaluations and refreshes.

    Args:
        spec: epochs, method and refresh interval.
        batch: samples an optimizer step over all GPUs.
        world: GPUs over all nodes.
        dataset_size: training samples.
        eval_size: held-out samples; None where they are not known: no evaluation is counted then.
        eval_batch_size: evaluation samples of one rank at a time; None likewise.
    """

    def evals(samples: int | None) -> int:
        return 0 if samples is None or eval_batch_size is None else math.ceil(samples / (world * eval_batch_size))

    epochs, steps = spec.train.epochs, dataset_size // batch
    tuning = halving.plan(spec, batch=batch, dataset_size=dataset_size)
    return Work(
        epochs=epochs,
        steps=steps,
        eval_batches=evals(eval_size),
        refreshes=refresh.count(spec, batch=batch, steps=steps),
        branches=tuning.branches,
        branch_steps=tuning.steps,
        branch_evals=evals(tuning.holdout),
    )


def training_seconds(
    work: Work,
    *,
    step_time: float,
    overheads: Overheads,
    checkpoint_every: float | None = None,
    rate: float = 0.0,
    wait: float = 0.0,
) -> float:
    """Return the wall-clock time of a whole training run, Eq. 4a and what comes beside the steps.

    Args:
        work: what there is to do.
        step_time: seconds an optimizer step.
        overheads: seconds of the rest, from a probe; what was not measured is left out.
        checkpoint_every: seconds from one checkpoint to the next within an epoch, which ends with one in any case; None for
            `checkpoint_interval`.
        rate: interruptions a second; with them this is the expected time.
        wait: seconds until an interrupted job has nodes again.

    Returns:
        Seconds; infinite where interruptions leave no time to get anywhere.
    """
    save, restart, eval_batch = overheads.checkpoint or 0.0, overheads.startup, overheads.eval_batch or 0.0
    interval = checkpoint_interval(overheads.checkpoint, rate=rate) if checkpoint_every is None else checkpoint_every
    stepping = work.steps * step_time + work.refreshes / work.epochs * (overheads.refresh or 0.0)
    # The checkpoint at the end of an epoch starts the clock anew.
    within = math.floor(stepping / interval)
    done = within * interval if within else 0.0
    rest = stepping - done + work.eval_batches * eval_batch
    epoch = _expected(rest + save, restart=restart, rate=rate, wait=wait)
    if within:
        epoch += within * _expected(interval + save, restart=restart, rate=rate, wait=wait)
    tuning = 0.0
    if work.branches:  # each begins anew after an interruption
        branch = work.branch_steps / work.branches * step_time + work.branch_evals * eval_batch
        tuning = work.branches * _expected(branch, restart=restart, rate=rate, wait=wait)
    return _expected(restart, restart=0.0, rate=rate, wait=wait) + work.epochs * epoch + tuning


@dataclass(frozen=True)
class TrainingTime:
    """The wall-clock time of a training at one configuration, by its step time; on spot nodes the expected one."""

    work: Work
    overheads: Overheads
    checkpoint_every: float  # seconds
    rate: float = 0.0  # interruptions a second
    wait: float = 0.0  # seconds

    def hours(self, step_time: float) -> float:
        """Return the hours at a step time (seconds); infinite where interruptions leave no time to get anywhere."""
        seconds = training_seconds(
            self.work,
            step_time=step_time,
            overheads=self.overheads,
            checkpoint_every=self.checkpoint_every,
            rate=self.rate,
            wait=self.wait,
        )
        return seconds / 3600

    def parts(self, step_time: float, *, data_wait: float | None) -> TimeParts:
        """Return where the time goes, without interruptions: the parts of `training_seconds`.

        Args:
            step_time: seconds.
            data_wait: of it, waiting for the data loader; None where that is not known.
        """
        work, beside = self.work, self.overheads
        stepping = work.steps * step_time + work.refreshes / work.epochs * (beside.refresh or 0.0)
        saves = work.epochs * (1 + math.floor(stepping / self.checkpoint_every))
        return TimeParts(
            steps=work.epochs * stepping,
            data=None if data_wait is None else work.epochs * work.steps * data_wait,
            evaluation=work.epochs * work.eval_batches * (beside.eval_batch or 0.0),
            checkpoints=saves * (beside.checkpoint or 0.0),
            branches=work.branch_steps * step_time + work.branches * work.branch_evals * (beside.eval_batch or 0.0),
            rest=beside.startup,
        )


def script_seconds(
    stepping: float, *, overheads: Overheads, interval: float, rate: float = 0.0, wait: float = 0.0
) -> float:
    """Return the expected wall-clock time of a whole training by a script, whose own checkpoints are all that it goes on from.

    Args:
        stepping: seconds of all its steps.
        overheads: of which the start-up counts.
        interval: seconds of steps from one checkpoint to the next; infinite where it goes on from none.
        rate: interruptions a second.
        wait: seconds until an interrupted job has nodes again.

    Returns:
        Seconds; infinite where interruptions leave no time to get anywhere.
    """
    segment = min(interval, stepping)
    whole = math.floor(stepping / segment) if segment else 0
    parts = [(1, stepping - whole * segment), (whole, segment)]
    steps = sum(
        count * _expected(seconds, restart=overheads.startup, rate=rate, wait=wait) for count, seconds in parts if count
    )
    return _expected(overheads.startup, restart=0.0, rate=rate, wait=wait) + steps


def _expected(seconds: float, *, restart: float, rate: float, wait: float) -> float:
    """Return the expected time of a segment that begins again at every interruption, after a wait and a restart.

    e^(rate x restart) (1/rate + wait) (e^(rate x seconds) - 1), exact for a Poisson process that spares the wait alone
    (Bougeret et al. 2011, proposition 1; without wait it is Daly's complete model).
    """
    if rate == 0:
        return seconds
    if rate * (seconds + restart) > _HOPELESS:
        return math.inf
    return math.exp(rate * restart) * (1 / rate + wait) * math.expm1(rate * seconds)


_UNITS: Mapping[str, str] = {
    "node_hour": "node-hour",
    "gpu_hour": "GPU-hour",
    "gb_hour": "hour and GB of reserved GPU memory",
}


def cost(
    pricing: Pricing, *, hours: float, nodes: int, gpus_per_node: int, reserved: float, market: Market = "on_demand"
) -> float:
    """Return what `hours` cost, in the currency of the pricing (Eq. 4b; by memory: section IV-C-2).

    Args:
        pricing: price and what it is for.
        hours: wall-clock hours that are paid for.
        nodes: number of nodes.
        gpus_per_node: GPUs of one node.
        reserved: peak reserved memory of one GPU, bytes.
        market: spot takes the discount off.
    """
    gpus = nodes * gpus_per_node
    units = {"node_hour": nodes, "gpu_hour": gpus, "gb_hour": gpus * reserved / GB}
    discount = pricing.spot.discount if pricing.spot is not None and market == "spot" else 0.0
    return hours * pricing.price * (1 - discount) * units[pricing.kind]


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
    """Return the price with its unit, its source and its date."""
    if pricing == UNPRICED:
        return "none is given (pricing.price), so cost is a number of node-hours"
    told = ", ".join(word for word in (pricing.source, pricing.date) if word)
    words = f"{pricing.price:g} {pricing.currency} per {_UNITS[pricing.kind]}" + (f" ({told})" if told else "")
    if pricing.spot is None:
        return words
    spot = pricing.spot
    wait = f", {spot.wait_minutes:g} min to replace one" if spot.wait_minutes else ""
    return f"{words}; spot {spot.discount:.0%} off, {spot.interruptions_per_day:g} interruptions a day and node{wait}"
