"""Time and cost of training, Eq. 4a and 4b.

    T = E floor(D / B) t_step, plus evaluation, scaling factors, checkpoints and start-up
    C = T x price

T is wall-clock time, so that it can be compared with a deadline and a bill. The number of epochs is the spec's at every
batch size: that a large batch may need more epochs is not modelled. On spot nodes T is the expected time: interruptions
are a Poisson process (Daly 2006), and each costs the work since the newest checkpoint and a restart.

Every formula takes a number, or an array with one value for each of many configurations. numpy is imported in the
functions that need it, so that commands which only show a price start without it.
"""

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tula_cli.models import refresh, self_tuning
from tula_cli.models.choice.grid import Number
from tula_cli.run.records.base import Market
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Overheads
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.results import ScriptCheckpointSave
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import BILLING_UNIT, UNPRICED_PRICING, Pricing
from tula_cli.spec.schedules import RELATIVE_TOLERANCE
from tula_cli.spec.scripts.script import Script
from tula_cli.words import format_count, format_duration

if TYPE_CHECKING:
    from tula_cli.models.choice.candidates import Floats
    from tula_cli.models.overheads import OverheadColumns

GB = 10**9
"""Bytes of the GB in a price: decimal, as in cloud price lists and GPU data sheets."""

DAY_SECONDS = 24 * 3600.0

INTERRUPTION_SECONDS = DAY_SECONDS
"""Mean time between interruptions (a failed node, maintenance) for which checkpoints are spaced on all kinds of
nodes."""

MIN_CHECKPOINT_SECONDS = 30.0

_MAX_EXPONENT = 20.0
"""Expected interruptions in one restart and segment above which the training never ends (e^20 attempts)."""

Hours = TypeVar("Hours", float, "Floats")


def compute_interruption_rate(pricing: Pricing, nodes: Number) -> Number:
    """Return the interruptions per second of a job on spot nodes: any of its nodes being reclaimed interrupts it."""
    return 0.0 if pricing.spot is None else pricing.spot.interruptions_per_day * nodes / DAY_SECONDS


def compute_checkpoint_interval(save_seconds: Number | None, *, rate: Number = 0.0) -> Number:
    """Return the seconds between checkpoints that minimise lost time, sqrt(2 x save x MTBF) (Young 1974, Daly 2006).

    Args:
        save_seconds: duration of writing one checkpoint; None if it was not measured.
        rate: interruptions per second in addition to those of any node (`INTERRUPTION_SECONDS`).

    Returns:
        At least MIN_CHECKPOINT_SECONDS; infinite if the saving time is unknown, so that only the checkpoint at the end
        of an epoch is assumed.
    """
    if save_seconds is None:
        return math.inf
    import numpy as np

    between = 1 / (1 / INTERRUPTION_SECONDS + rate)
    return np.maximum(MIN_CHECKPOINT_SECONDS, np.sqrt(2 * np.maximum(0.0, save_seconds) * between))


@dataclass(frozen=True)
class TrainingWork:
    """Number of steps, evaluations and refreshes of a training run at one configuration, or at each of many."""

    epochs: int
    steps: Number  # optimizer steps per epoch; with a ramp, the number at the final batch that takes as long
    eval_batches: Number  # batches of one evaluation on each rank
    refreshes: Number  # separate updates of the scaling factors in the whole run
    branches: Number = 0  # branches that a self-tuning training compares
    branch_steps: Number = 0  # optimizer steps of all branches
    branch_evals: Number = 0  # evaluation batches of one branch, on each rank
    changes: Number = 0  # changes of the number of nodes (train.ramp_nodes); each restarts the ranks
    queued: Number = 0.0  # total seconds that these restarts wait for nodes


def count_training_work(
    spec: JobSpec,
    *,
    batch: Number,
    world: Number,
    dataset_size: int,
    eval_size: int | None,
    eval_batch_size: Number | None,
) -> TrainingWork:
    """Count steps (Eq. 4a with whole steps: the last, partial batch is dropped), evaluations and refreshes.

    Args:
        batch: samples per optimizer step over all GPUs.
        world: GPUs over all nodes.
        eval_size: held-out samples; None if unknown, so that no evaluation is counted.
        eval_batch_size: evaluation samples of one rank at a time; None (0 in an array) if unknown, likewise.
    """
    import numpy as np

    from tula_cli.models.choice.candidates import apply_to_distinct_values

    def count_evaluations(samples: int | None) -> Number:
        if samples is None or eval_batch_size is None:
            return 0
        return np.where(eval_batch_size > 0, -(-samples // np.maximum(1, world * eval_batch_size)), 0)[()]

    work = TrainingWork(
        epochs=spec.train.max_epochs,
        steps=dataset_size // batch,
        eval_batches=count_evaluations(eval_size),
        refreshes=apply_to_distinct_values(
            lambda global_batch: refresh.count_separate_refreshes(
                spec, batch=global_batch, steps=dataset_size // global_batch
            ),
            batch,
        ),
    )
    if not spec.train.training_method.is_self_tuning:
        return work
    tuning = functools.cache(
        lambda global_batch: self_tuning.plan_tuning(spec, batch=global_batch, dataset_size=dataset_size)
    )
    return replace(
        work,
        branches=apply_to_distinct_values(lambda global_batch: tuning(global_batch).branches, batch),
        branch_steps=apply_to_distinct_values(lambda global_batch: tuning(global_batch).steps, batch),
        branch_evals=count_evaluations(self_tuning.count_holdout_samples(dataset_size)),
    )


def compute_training_seconds(
    work: TrainingWork,
    *,
    step_time: Number,
    overheads: "Overheads | OverheadColumns",
    checkpoint_every: Number | None = None,
    rate: Number = 0.0,
) -> Number:
    """Return the wall-clock time of a whole training run: Eq. 4a and the overheads in addition to the steps.

    Args:
        step_time: seconds per optimizer step.
        overheads: seconds of the overheads, from a probe; those not measured are left out.
        checkpoint_every: seconds between checkpoints within an epoch, which always ends with one; None for
            `compute_checkpoint_interval`.
        rate: interruptions per second; if above 0 the result is the expected time.

    Returns:
        Seconds; infinite if interruptions are so frequent that the training never ends.
    """
    import numpy as np

    save, eval_batch = (_replace_unmeasured(seconds) for seconds in (overheads.checkpoint, overheads.eval_batch))
    restart, interval = overheads.startup, checkpoint_every
    if interval is None:
        interval = compute_checkpoint_interval(overheads.checkpoint, rate=rate)
    stepping = work.steps * step_time + work.refreshes / work.epochs * _replace_unmeasured(overheads.refresh)
    # The checkpoint at the end of an epoch restarts the interval.
    checkpoints = np.floor(stepping / interval)
    segment = np.where(checkpoints > 0, interval, 0.0)
    uninterrupted = stepping - checkpoints * segment + work.eval_batches * eval_batch
    epoch = _compute_expected_time(uninterrupted + save, restart=restart, rate=rate)
    epoch = epoch + _multiply_or_zero(checkpoints, _compute_expected_time(segment + save, restart=restart, rate=rate))
    # An interrupted branch restarts from its beginning.
    branch = work.branch_steps / np.maximum(1, work.branches) * step_time + work.branch_evals * eval_batch
    tuning = _multiply_or_zero(work.branches, _compute_expected_time(branch, restart=restart, rate=rate))
    starts = (1 + work.changes) * _compute_expected_time(restart, restart=0.0, rate=rate)
    return starts + work.queued + work.epochs * epoch + tuning


def _replace_unmeasured(seconds: Number | None) -> Number:
    """Return the measured seconds, with 0 for unmeasured values (None; nan in an array)."""
    if seconds is None or isinstance(seconds, float):
        return seconds or 0.0
    import numpy as np

    return np.nan_to_num(seconds)


def _multiply_or_zero(count: Number, value: Number) -> Number:
    """Return count x value, with 0 if the count is 0 even if the value is infinite."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        return np.where(np.greater(count, 0), np.multiply(count, value), 0.0)


@dataclass(frozen=True)
class TrainingTime:
    """Wall-clock time as a function of the step time, at one configuration or at each of many.

    On spot nodes it is the expected time.
    """

    work: TrainingWork
    overheads: "Overheads | OverheadColumns"
    checkpoint_every: Number  # seconds between checkpoints
    rate: Number = 0.0  # interruptions per second

    def compute_hours(self, step_time: Number) -> Number:
        """Return the hours at a step time (seconds); infinite if interruptions prevent the training from ending."""
        seconds = compute_training_seconds(
            self.work,
            step_time=step_time,
            overheads=self.overheads,
            checkpoint_every=self.checkpoint_every,
            rate=self.rate,
        )
        return seconds / 3600

    def compute_parts(self, step_time: Number, *, data_wait: Number | None) -> dict[str, Number]:
        """Return the breakdown of the time without interruptions, in seconds by the fields of a `TimeParts`.

        Args:
            data_wait: seconds of each step spent waiting for the data loader; None (nan in an array) if unknown.
        """
        import numpy as np

        work, overheads = self.work, self.overheads
        stepping = work.steps * step_time + work.refreshes / work.epochs * _replace_unmeasured(overheads.refresh)
        saves = work.epochs * (1 + np.floor(stepping / self.checkpoint_every))
        eval_batch = _replace_unmeasured(overheads.eval_batch)
        return {
            "steps": work.epochs * stepping,
            "data": None if data_wait is None else work.epochs * work.steps * data_wait,
            "evaluation": work.epochs * work.eval_batches * eval_batch,
            "checkpoints": saves * _replace_unmeasured(overheads.checkpoint),
            "branches": work.branch_steps * step_time + work.branches * work.branch_evals * eval_batch,
            "rest": (1 + work.changes) * overheads.startup + work.queued,
        }


def compute_script_seconds(
    stepping: Number,
    *,
    overheads: "Overheads | OverheadColumns",
    interval: Number,
    rate: Number = 0.0,
) -> Number:
    """Return the expected wall-clock time of a whole training by a script, which resumes only from its own checkpoints.

    Args:
        stepping: seconds of all its steps.
        overheads: only the start-up time is used.
        interval: seconds of steps between two checkpoints; infinite if the script cannot resume from one.
        rate: interruptions per second.

    Returns:
        Seconds; infinite if interruptions are so frequent that the training never ends.
    """
    import numpy as np

    segment, restart = np.minimum(interval, stepping), overheads.startup
    whole_segments = np.where(segment > 0, np.floor(stepping / np.where(segment > 0, segment, 1.0)), 0.0)
    steps = _compute_expected_time(stepping - whole_segments * segment, restart=restart, rate=rate)
    steps = steps + _multiply_or_zero(whole_segments, _compute_expected_time(segment, restart=restart, rate=rate))
    return _compute_expected_time(restart, restart=0.0, rate=rate) + steps


def _compute_expected_time(seconds: Number, *, restart: Number, rate: Number) -> Number:
    """Return the expected time of a segment that starts again at every interruption, after a restart.

    e^(rate x restart) / rate (e^(rate x seconds) - 1), exact for a Poisson process: Daly's complete model (Bougeret et
    al. 2011, proposition 1, without a wait for nodes).
    """
    import numpy as np

    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        lasts = np.exp(rate * restart) * np.divide(1.0, rate) * np.expm1(rate * seconds)
        return np.where(rate == 0, seconds, np.where(rate * (seconds + restart) > _MAX_EXPONENT, np.inf, lasts))


_UNITS: Mapping[str, str] = {
    "node_hour": "node-hour",
    "gpu_hour": "GPU-hour",
    "gb_hour": "hour and GB of reserved GPU memory",
    "billing": "billing-hour",
}


def compute_cost(
    pricing: Pricing,
    *,
    hours: Hours,
    nodes: Number,
    gpus_per_node: int,
    reserved: Number,
    market: Market = "on_demand",
) -> Hours:
    """Return the cost of `hours` in the currency of the pricing (Eq. 4b; priced by memory: section IV-C-2).

    Args:
        reserved: peak reserved memory of one GPU, bytes.
    """
    gpus = nodes * gpus_per_node
    units = {
        "node_hour": nodes,
        "gpu_hour": gpus,
        "gb_hour": gpus * reserved / GB,
        "billing": compute_hourly_charge(pricing, nodes),
    }
    discount = pricing.spot.discount if pricing.spot is not None and market == "spot" else 0.0
    price: Hours = hours * pricing.price * (1 - discount) * units[pricing.kind]
    return price


def shorten_prediction(prediction: Prediction, *, epochs: int, all_epochs: int) -> Prediction:
    """Return the prediction for the first epochs of a training; starts, exits and branches are not shortened."""
    share, parts = epochs / all_epochs, prediction.parts
    ratio = share
    if parts is not None:
        steps = parts.steps * _compute_step_time_share(prediction, share)
        data = None if parts.data is None else parts.data * steps / parts.steps if parts.steps else 0.0
        others = {name: share * getattr(parts, name) for name in ("evaluation", "checkpoints")}
        shortened = parts.model_copy(update={"steps": steps, "data": data, **others})
        ratio = shortened.total / parts.total if parts.total else share
        parts = shortened
    names = ("hours", "hours_low", "hours_high", "cost", "node_hours", "kwh", "kwh_low", "kwh_high")
    shortened_values = {name: value * ratio for name in names if (value := getattr(prediction, name)) is not None}
    return prediction.model_copy(update={**shortened_values, "parts": parts})


def _compute_step_time_share(prediction: Prediction, epoch_share: float) -> float:
    """Return the share of the time of all steps for the first `epoch_share` of the epochs.

    With a growing batch, the first epochs have more steps, which are shorter.
    """
    assert prediction.parts is not None
    smaller = sum(stage.steps * stage.step_time for stage in prediction.stages)
    if not smaller:
        return epoch_share
    early = sum(stage.steps * stage.batch for stage in prediction.stages)
    later_steps = (prediction.parts.steps - smaller) / prediction.step_time * prediction.batch
    grown = early / (early + later_steps)  # share of the epochs trained before the last stage
    seconds = smaller * min(1.0, epoch_share / grown)
    if epoch_share > grown:
        seconds += (prediction.parts.steps - smaller) * (epoch_share - grown) / (1 - grown)
    return seconds / prediction.parts.steps


def compute_remaining_time_share(prediction: Prediction, epoch_share: float) -> float:
    """Return the share of a training's time for the last `epoch_share` of its epochs; less if the batch has grown."""
    parts = prediction.parts
    if parts is None or not prediction.stages or not parts.total:
        return epoch_share
    stepping = parts.steps * (1 - _compute_step_time_share(prediction, 1 - epoch_share))
    return (stepping + epoch_share * (parts.total - parts.steps)) / parts.total


def compute_attempt_cost(task: TrainTask, attempt: Attempt, prediction: Prediction | None, now: float | None) -> float:
    """Return the cost of an attempt of a training on its nodes, in the currency of the pricing.

    Args:
        attempt: the attempt; an open one lasts until `now` (Unix time), or is not counted.
        prediction: the prediction for the training, with its memory and market; None if there is none.
    """
    return compute_cost(
        task.spec.pricing,
        hours=attempt.compute_duration_seconds(now) / 3600,
        nodes=task.nodes + attempt.idle_nodes,
        gpus_per_node=task.spec.cluster.gpus_per_node,
        reserved=(prediction.peak_memory if prediction else None) or 0,
        market=prediction.market if prediction else "on_demand",
    )


def compute_hourly_charge(pricing: Pricing, nodes: Number) -> Number:
    """Return the units that SLURM charges for an hour of a job on `nodes` nodes; 0 if the pricing has another unit.

    The job's billing, truncated to whole numbers as SLURM stores it, times the QOS's usage factor.
    """
    billing = pricing.slurm_billing
    if billing is None:
        assert pricing.kind != "billing", "the billing of a job was not queried"
        return 0.0
    import numpy as np

    billed = np.multiply(nodes, billing.node) + billing.job
    units = np.floor(billed * (1 + RELATIVE_TOLERANCE)) * billing.usage_factor
    return float(units) if np.ndim(units) == 0 else units


@dataclass(frozen=True, kw_only=True)
class MaxCost:
    """An upper bound of the cost of jobs, and the price that it is based on."""

    node_hours_at_most: float
    price_at_most: float | None  # None if it depends on an unknown memory size
    currency: str
    price: str  # description with unit, source and date


def compute_max_cost(spec: JobSpec, node_hours: float, capacity: int | None) -> MaxCost:
    """Return the maximum cost of jobs that take at most `node_hours`.

    Args:
        capacity: memory of one GPU, bytes; None if it is unknown.
    """
    pricing, max_cost = spec.pricing, None
    # SLURM truncates the billing of each job, so this is an upper bound
    if (billing := pricing.slurm_billing) is not None:
        max_cost = node_hours * (billing.node + billing.job) * billing.usage_factor * pricing.price
    elif pricing.kind != "gb_hour" or capacity is not None:
        gpus = spec.cluster.gpus_per_node
        max_cost = compute_cost(pricing, hours=node_hours, nodes=1, gpus_per_node=gpus, reserved=capacity or 0)
    return MaxCost(
        node_hours_at_most=node_hours,
        price_at_most=max_cost,
        currency=pricing.currency,
        price=describe_price(pricing),
    )


def describe_price(pricing: Pricing) -> str:
    """Return the price with its unit."""
    if pricing == UNPRICED_PRICING:
        return "pricing.price is not set, so costs are in node-hours"
    description = f"{pricing.price:g} {pricing.currency} per {_UNITS[pricing.kind]}"
    if pricing.kind == "billing" and (pricing.price, pricing.currency) == (1.0, BILLING_UNIT):
        description = f"{BILLING_UNIT} (billing-hours as SLURM counts them)"
    if (bill := pricing.slurm_billing) is not None:
        description += f"; a node is billed {bill.node:g} ({bill.words})"
    if pricing.spot is None:
        return description
    spot = pricing.spot
    return f"{description}; spot {100 * spot.discount:.0f} % off, {spot.interruptions_per_day:g} interruptions per day and node"


@dataclass(frozen=True)
class CheckpointSchedule:
    """Interval of the checkpoints that a script can resume from, in one of four units; all None if unknown."""

    resumes: bool  # whether the script resumes from checkpoints
    save_request: str = "none"  # script.save
    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None
    samples: int | None = None
    dataset_size: int | None = None  # samples of an epoch; known if `samples` are

    @property
    def is_known(self) -> bool:
        """Whether the cost of an interruption is known."""
        return not self.resumes or any(
            value is not None for value in (self.epochs, self.steps, self.seconds, self.samples)
        )

    def compute_hours_on_spot(self, training: TrainingTime, step_time: Any) -> Any:
        """Return the expected hours on spot nodes of a training by a script that alone decides when it saves."""
        work, interval = training.work, self.compute_interval(step_time, epoch_steps=training.work.steps)
        if interval is None:
            return math.inf
        stepping, overheads = work.epochs * work.steps * step_time, training.overheads
        return compute_script_seconds(stepping, overheads=overheads, interval=interval, rate=training.rate) / 3600

    def compute_interval(self, step_time: Any, *, epoch_steps: Any) -> Any | None:
        """Return the seconds between two checkpoints; infinite if the script cannot resume, None if unknown.

        Args:
            step_time: seconds; a number, or an array with one for each of many configurations.
            epoch_steps: steps per epoch at the batch that is trained; likewise.
        """
        if not self.resumes:
            return math.inf
        if self.epochs is not None:
            return self.epochs * epoch_steps * step_time
        if self.samples is not None and self.dataset_size is not None:
            return self.samples / self.dataset_size * epoch_steps * step_time
        return self.seconds if self.steps is None else self.steps * step_time

    def describe_lost_work(self, step_time: float | None, *, epoch_steps: float | None) -> str:
        """Describe the work that an interruption loses.

        Args:
            step_time: seconds; None before it is measured.
            epoch_steps: steps per epoch at the batch that is trained; None likewise.
        """
        if not self.resumes:
            return "the script cannot resume (no script.resume), so an interruption loses all progress"
        if not self.is_known:
            return f"the checkpoint interval is unknown until the script trains{self._setting_text}"
        seconds = self.seconds
        if step_time is not None and epoch_steps is not None:
            seconds = self.compute_interval(step_time, epoch_steps=epoch_steps)
        loss = "half of this interval" if seconds is None else format_duration(seconds / 2)
        duration = f" ({format_duration(seconds)})" if seconds is not None and self.seconds is None else ""
        return f"saves {self._interval_text}{duration}, so an interruption costs {loss} on average{self._setting_text}"

    @property
    def _interval_text(self) -> str:
        if self.epochs is not None:
            return "each epoch" if self.epochs == 1 else f"every {format_count(self.epochs, 'epoch')}"
        if self.steps is not None:
            return "each step" if self.steps == 1 else f"every {format_count(self.steps, 'step')}"
        if self.samples is not None:
            return f"every {format_count(self.samples, 'sample')}"
        return f"every {format_duration(self.seconds)}"

    @property
    def _setting_text(self) -> str:
        if self.save_request == "none":
            return "; tula cannot request a checkpoint before a time limit (script.save: none)"
        return f"; before a time limit, tula requests a checkpoint ({self.save_request})"


def find_checkpoint_schedule(
    script: Script, saves: Iterable[ScriptCheckpointSave], *, dataset_size: int | None
) -> CheckpointSchedule:
    """Return how often a script saves, as observed in its trainings.

    Args:
        saves: checkpoints that its trainings have written, those of the newest batch last. Only several batches can
            show that it counts samples, not steps.
        dataset_size: samples of an epoch; None if unknown.
    """
    resume, observed_saves = script.resume, list(saves)
    if resume is None and not observed_saves:  # a script without script.resume may still have resumed by itself
        return CheckpointSchedule(resumes=False, save_request=script.save)
    if not observed_saves:
        return CheckpointSchedule(True, script.save)
    by_batch: dict[int, list[ScriptCheckpointSave]] = {}
    for save in observed_saves:
        by_batch.setdefault(save.batch, []).append(save)
    newest_saves = by_batch[observed_saves[-1].batch]
    if epochs := _find_whole_epochs(newest_saves, dataset_size):
        return CheckpointSchedule(True, script.save, epochs=epochs)
    steps, samples = [save.steps for save in newest_saves], [save.samples for save in newest_saves]
    usual_steps, times = statistics.mode(steps), [save.seconds for save in newest_saves if save.seconds is not None]
    if dataset_size and _compute_interval_spread(by_batch, "samples") < _compute_interval_spread(by_batch, "steps"):
        return CheckpointSchedule(True, script.save, samples=statistics.mode(samples), dataset_size=dataset_size)
    if times and 2 * steps.count(usual_steps) < len(steps):
        return CheckpointSchedule(True, script.save, seconds=statistics.median(times))
    return CheckpointSchedule(True, script.save, steps=usual_steps)


def _compute_interval_spread(
    by_batch: Mapping[int, Sequence[ScriptCheckpointSave]], unit: Literal["steps", "samples"]
) -> float:
    """Return the ratio of the longest and the shortest interval between checkpoints at different batches.

    It is infinite if a script counts no steps or samples between checkpoints.
    """
    medians: list[float] = [statistics.median(getattr(save, unit) for save in saves) for saves in by_batch.values()]
    return max(medians) / min(medians) if min(medians) > 0 else math.inf


def _find_whole_epochs(saves: list[ScriptCheckpointSave], dataset_size: int | None) -> int | None:
    """Return the most frequent number of epochs between saves; None if most saves do not fit it.

    A save fits if it is within one batch per epoch of a whole number of epochs.
    """
    if not dataset_size:
        return None
    epoch_counts = [round(save.samples / dataset_size) for save in saves]
    epochs = statistics.mode(epoch_counts)
    near = [abs(save.samples - epochs * dataset_size) <= epochs * save.batch for save in saves]
    return epochs if epochs and 2 * sum(near) >= len(saves) else None
