"""A batch size that grows over the first epochs (`train.ramp`): its stages, and the batch at each position.

The clock is samples passed: those of completed epochs, including samples dropped at their ends, and those done in the
current epoch. A stage ends with the first step that reaches its end or passes it, so that batches remain successive
slices of an epoch's order: at a change no sample is skipped, and none is trained twice. The batch depends on the
position only, so that a training can resume in any stage, and one that continues at a smaller batch keeps the stages
below it.

By default the batch of stage k is reference_batch x 2^k, up to the training's own: in the first epochs the gradient's
noise is small, and a larger batch averages little out (McCandlish et al. 2018). With `ramp: noise` the length of each
stage follows from the measured noise, B(t) = min(B, B_noise(t)): the stages are fixed before the training starts. With
`ramp: decay` the batch grows where the schedule would lower the learning rate.

The stages of many configurations are arrays of shape (n, stages), see `StageTable`. Positions are float64, which holds
whole numbers of samples up to 2^53 exactly; beyond that, where int64 would overflow, they are rounded.
"""

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from typing import TYPE_CHECKING

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.models import messages
from tula_cli.models.choice.grid import describe_nearest_multiples, list_batches
from tula_cli.run.records.recommendations import Stage
from tula_cli.spec.ags import BRANCHING_EPOCH, Arm
from tula_cli.spec.job import JobSpec
from tula_cli.spec.methods import METHODS
from tula_cli.spec.schedules import RELATIVE_TOLERANCE, compute_lr_decay_factor
from tula_cli.spec.sections import MIN_STAGE_SHARE, RampStage, Schedule
from tula_cli.words import format_number

if TYPE_CHECKING:
    from tula_cli.models.choice.candidates import Floats, Ints

# --- Stages

STAGE_EPOCH_SHARE = 0.05
"""Share of the training's epochs for each stage of `auto`."""
MAX_STAGES_EPOCH_SHARE = 0.5
"""Maximum share of the training's epochs for all stages of `auto` below its own batch together."""

NOISE_GROWTH_EXPONENT = 0.65
"""Exponent of the noise scale over the epochs, fitted to six applications (benchmarks/replay/efficiency.py fits it with
each of them left out: 0.60 to 0.70)."""

MAX_NOISE_SCALE = 1e12
"""Noise scale, in samples, that is assumed if the gradient cannot be distinguished from its noise."""
NOISE_NOT_MEASURED = "train.ramp: noise needs the gradient noise scale, which was not measured"
MEASURE_NOISE_HINT = "train once with train.diagnostics: [gradient_noise] to measure the scale, or set train.ramp: auto"


@dataclass(frozen=True)
class NoisePath:
    """The gradient noise scale as a function of the epochs done.

    log(reference + noise) is linear in log(1 + epochs) between measurements, and after the last one continues with the
    exponent of whole trainings (`NOISE_GROWTH_EXPONENT`). A measurement followed by a lower one is reduced to it: a batch
    starts where the noise remains high enough.
    """

    reference: int  # the reference batch
    points: tuple[tuple[float, float], ...]  # (epochs completed, noise scale in samples), ascending, at least one

    @classmethod
    def from_measurements(cls, measured: Mapping[float, float], *, reference: int) -> "NoisePath | None":
        """Return the path through noise scales (samples) by epochs done, or None if there are none."""
        newest_first = sorted(((epoch, min(scale, MAX_NOISE_SCALE)) for epoch, scale in measured.items()), reverse=True)
        scales = accumulate((scale for _, scale in newest_first), min)
        points = tuple(zip((epoch for epoch, _ in newest_first), scales, strict=True))
        return cls(reference, points[::-1]) if points else None

    @property
    def measured_at(self) -> float:
        """Epochs done at the newest measurement."""
        return self.points[-1][0]

    def interpolate_noise(self, epoch: float) -> float:
        """Return the noise scale (samples) after `epoch` epochs."""
        x, line = math.log1p(epoch), self._line
        for (x0, y0), (x1, y1) in pairwise(line):
            if x <= x1:
                return self._convert_to_noise_scale(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        return self._convert_to_noise_scale(line[-1][1] + NOISE_GROWTH_EXPONENT * (x - line[-1][0]))

    def find_first_epoch(self, scale: float) -> float:
        """Return the epochs done from which on the noise scale is at least `scale` (samples)."""
        y, line = math.log(self.reference + scale), self._line
        if y <= line[0][1]:
            return 0.0
        for (x0, y0), (x1, y1) in pairwise(line):
            if y <= y1:
                return math.expm1(x0 + (x1 - x0) * (y - y0) / (y1 - y0))
        return math.expm1(line[-1][0] + (y - line[-1][1]) / NOISE_GROWTH_EXPONENT)

    @property
    def _line(self) -> list[tuple[float, float]]:
        line = [(math.log1p(epoch), math.log(self.reference + scale)) for epoch, scale in self.points]
        x, y = line[0]
        return line if x == 0 else [(0.0, y - NOISE_GROWTH_EXPONENT * x), *line]

    def _convert_to_noise_scale(self, y: float) -> float:
        return max(0.0, math.exp(y) - self.reference)


@dataclass(frozen=True)
class Ramp:
    """The stages of one training, ascending; the last one has the training's own batch and lasts to its end."""

    stages: tuple[Stage, ...]
    remarks: tuple[Diagnostic, ...] = ()  # why stages of the job's rule were left out

    @classmethod
    def from_constant_batch(cls, batch: int) -> "Ramp":
        """Return the ramp of a training with a constant batch."""
        return cls((Stage(begin=0, batch=batch),))

    def find_stage(self, passed: int) -> int:
        """Return the number, from 0, of the stage of a training after `passed` samples."""
        return max(0, bisect_right(self._stage_starts, passed) - 1)

    @functools.cached_property
    def _stage_starts(self) -> list[int]:
        return [stage.begin for stage in self.stages]

    def find_batch(self, passed: int) -> int:
        """Return the global batch of the step that starts after `passed` samples."""
        return self.stages[self.find_stage(passed)].batch

    def list_epoch_steps(self, epoch: int, *, samples_done: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield (batch, steps) of the rest of an epoch; a partial batch at its end is left out.

        Args:
            epoch: epochs completed.
            samples_done: samples done of the next one.
            size: samples per epoch.
        """
        while True:
            passed = epoch * size + samples_done
            number = self.find_stage(passed)
            batch, following = self.stages[number].batch, number + 1
            steps = max(0, size - samples_done) // batch
            if following < len(self.stages):
                steps = min(steps, ceil((self.stages[following].begin - passed) / batch))
            if not steps:
                return
            yield batch, steps
            samples_done += steps * batch

    def count_remaining_steps(self, *, size: int, epochs: int, epoch: int = 0, samples_done: int = 0) -> dict[int, int]:
        """Return the steps at each batch, ascending, from a position (as of `list_epoch_steps`) to the end of all epochs."""
        import numpy as np

        batches = [stage.batch for stage in self.stages]
        ends = np.array([[*self._stage_starts[1:], np.inf]], dtype=float)
        steps = count_steps_of_stages(
            np.array([batches]), ends, size=size, epochs=epochs, epoch=epoch, samples_done=samples_done
        )
        steps_by_batch = dict.fromkeys(batches, 0)  # two stages may have the same batch
        for batch, count in zip(batches, steps[0].tolist(), strict=True):
            steps_by_batch[batch] += int(count)
        return steps_by_batch


def count_steps_of_stages(
    batches: "Ints", ends: "Floats", *, size: int, epochs: int, epoch: int = 0, samples_done: int = 0
) -> "Floats":
    """Return the steps in each stage of many trainings, shape (n, stages), exact up to 2^53 samples in all.

    A stage ends with the first step that reaches its end; at the end of an epoch a partial batch is left out.

    Args:
        batches: batch of each stage, in order, shape (n, stages); 0 for a stage that a training does not have.
        ends: samples passed at which each stage ends, the last one infinite.
        size, epochs, epoch, samples_done: as of `Ramp.count_remaining_steps`.
    """
    import numpy as np

    steps = np.zeros(batches.shape)
    at = np.full(len(batches), float(epoch))  # epochs completed; `done`: samples of the current epoch
    done = np.full(len(batches), float(samples_done))
    for stage in range(batches.shape[1]):
        is_active = (batches[:, stage] > 0) & (at < epochs)
        batch, end = np.maximum(1.0, batches[:, stage]), ends[:, stage]
        steps_left_in_epoch = np.floor(np.maximum(0.0, size - done) / batch)
        needed = np.maximum(0.0, np.ceil((end - at * size - done) / batch))
        ends_here = needed <= steps_left_in_epoch
        whole = np.maximum(0.0, np.minimum(np.floor(end / size), epochs) - at - 1)  # further whole epochs in this stage
        later = at + 1 + whole
        per_epoch = np.floor(size / batch)
        needed_later = np.where(later < epochs, np.maximum(0.0, np.ceil((end - later * size) / batch)), 0.0)
        ends_later = needed_later <= per_epoch
        last = np.minimum(needed_later, per_epoch)
        steps[:, stage] = np.where(
            is_active, np.where(ends_here, needed, steps_left_in_epoch + whole * per_epoch + last), 0.0
        )
        new_at = np.where(ends_here, at, later + ~ends_later)
        new_done = np.where(ends_here, done + needed * batch, np.where(ends_later, last * batch, 0.0))
        at, done = np.where(is_active, new_at, at), np.where(is_active, new_done, done)
    return steps


def build_ramp(
    spec: JobSpec,
    *,
    batch: int,
    divisor: int,
    dataset_size: int,
    noise: NoisePath | None = None,
    decided: Sequence[Stage] = (),
    fewer: Sequence[int] = (),
) -> Ramp:
    """Return the stages of a training; a single one if its batch does not grow.

    Args:
        batch: the training's own, global; stages that are not below it are left out.
        divisor: ranks x micro-batches per step, by which a batch must be divisible.
        noise: of the gradients, for `ramp: noise`; if None, the stages are those of `auto`.
        decided: the stages as decided before the training started, that of its own batch last; empty to compute them
            again.
        fewer: divisors on fewer nodes, descending, for stages that are too small for one sample per GPU.

    Raises:
        SpecError: a stage that the job names is not divisible, or the stages last as long as the training.
    """
    stages_setting = spec.train.stages
    if stages_setting is None:
        return Ramp.from_constant_batch(batch)
    if isinstance(stages_setting, list):
        return _plan_named_stages(spec, stages_setting, batch, divisor, dataset_size)
    if decided:
        return _fit_stages([*list_stages_below_batch(decided, batch)], [divisor])
    if has_auto_stages(spec, noise):
        return _plan_auto_stages(spec, batch, [divisor, *fewer], dataset_size)
    planned = plan_stages_before_fitting(spec, batch, dataset_size=dataset_size, noise=noise)
    return _fit_stages(planned, [divisor, *fewer])


def has_auto_stages(spec: JobSpec, noise: NoisePath | None) -> bool:
    """Return whether the stages are planned as for `auto`: set so, or set to `noise` while the gradient noise is not measured."""
    return spec.train.stages == "auto" or (spec.train.stages == "noise" and noise is None)


def plan_stages_before_fitting(
    spec: JobSpec, batch: int, *, dataset_size: int, noise: NoisePath | None
) -> Sequence[Stage]:
    """Return the stages of a training before their batches are rounded to divide among its ranks; the last has its own batch.

    Those of `auto` all begin at 0, because their lengths depend on how many of them divide (`compute_auto_begins`).
    """
    if isinstance(spec.train.stages, list):
        return _plan_named_stages(spec, spec.train.stages, batch, 1, dataset_size).stages
    if spec.train.stages == "decay":
        return plan_stages_by_decay(spec, batch=batch, size=dataset_size)
    if noise is not None and spec.train.stages == "noise":
        return plan_stages_by_noise(noise, batch=batch, size=dataset_size, epochs=spec.train.epochs)
    smaller = list_batches(spec.train.reference_batch, batch - 1)
    return [Stage(begin=0, batch=stage_batch) for stage_batch in [*smaller, batch]]


def compute_auto_begins(spec: JobSpec, batches: "Ints", *, dataset_size: int) -> "Floats":
    """Return the first samples of the stages of `auto`, shape (n, stages); the training's final batch comes last.

    Args:
        batches: of the stages, shape (n, stages); 0 for a stage that a training does not have.
    """
    import numpy as np

    number = (batches > 0).cumsum(axis=1) - 1
    share = np.minimum(STAGE_EPOCH_SHARE, MAX_STAGES_EPOCH_SHARE / np.maximum(1, number[:, -1:]))
    begins: Floats = np.rint(number * (share * spec.train.epochs * float(dataset_size)))
    return begins


def plan_stages_by_decay(spec: JobSpec, *, batch: int, size: int) -> tuple[Stage, ...]:
    """Return the stages of a training whose learning-rate decay is replaced by batch growth; the last has its own batch.

    If the decay never reaches the training's own batch, its stage starts at the end of the training.

    The batch is the reference batch x 2^k from where the schedule leaves 2^-k of the full learning rate (Meterez et al.
    2025, arXiv 2510.14717, Algorithm 1). In between the rate follows the schedule, so that rate and batch together are
    equivalent to those at the reference batch at every point (`TrainingMethod.choose_rule_of_decay`).

    Args:
        batch: the training's own, global.
        size: samples per epoch.
    """
    reference, total = spec.train.reference_batch, spec.train.epochs * size
    doubled = list_batches(2 * reference, batch - 1)
    begins = {0: min(reference, batch)}  # keyed by `begin`: of stages that begin at the same sample, the last is kept
    schedule, warmup = spec.schedule.model_dump_json(), spec.workload.warmup_epochs
    for following in [*doubled, *([batch] if batch > reference else [])]:
        share = reference / following
        begin = _count_samples_until_decay(
            share, schedule, spec.optimizer.lr, warmup=warmup, epochs=spec.train.epochs, size=size
        )
        begins[begin if begin <= (1 - MIN_STAGE_SHARE) * total else total] = following
    return tuple(Stage(begin=begin, batch=stage_batch) for begin, stage_batch in begins.items())


@functools.lru_cache(maxsize=1024)  # identical for all numbers of nodes in a search
def _count_samples_until_decay(share: float, schedule: str, lr: float, *, warmup: float, epochs: int, size: int) -> int:
    """Return the samples passed from which on a schedule leaves at most `share` of the full learning rate.

    Args:
        share: of `lr`, above 0.
        schedule: as JSON.
        lr: at the reference batch.
        warmup: epochs.
        epochs: of the whole training.
        size: samples per epoch.
    """
    rule = Schedule.model_validate_json(schedule)

    def has_decayed(passed: int) -> bool:
        remaining_share = compute_lr_decay_factor(rule, lr, epoch=passed / size, warmup=warmup, epochs=epochs)
        return remaining_share <= share * (1 + RELATIVE_TOLERANCE)

    return bisect_left(range(epochs * size), True, key=has_decayed)


def list_stages_below_batch(stages: Sequence[Stage], batch: int) -> Iterator[Stage]:
    """Yield the stages below a batch, then a stage with that batch.

    The added stage starts with the first stage that is not below the batch, or else with the last stage.
    """
    yield from (stage for stage in stages if stage.batch < batch)
    stage_of_batch = next((stage for stage in stages if stage.batch >= batch), stages[-1])
    yield stage_of_batch.model_copy(update={"batch": batch})


def _fit_stages(stages: Sequence[Stage], divisors: Sequence[int]) -> Ramp:
    """Return the stages with batches rounded so that they divide; stages that cannot are left out.

    Each is rounded for the most nodes on which every part has at least one sample.
    """
    *smaller, stage_of_batch = stages
    sizes = [_find_fitting_batch(stage.batch, divisors) for stage in smaller]
    fitting = [stage.model_copy(update={"batch": size}) for stage, size in zip(smaller, sizes, strict=True) if size]
    first_stage, *later = (*fitting, stage_of_batch)
    remarks = tuple(
        messages.stage_skipped(setting="train.ramp", batch=stage.batch, micro_batches=divisors[-1])
        for stage, size in zip(smaller, sizes, strict=True)
        if not size
    )
    return Ramp((first_stage.model_copy(update={"begin": 0}), *later), remarks)


def _plan_named_stages(
    spec: JobSpec, named_stages: Sequence[RampStage], batch: int, divisor: int, dataset_size: int
) -> Ramp:
    begin, stages = 0, []
    for stage in named_stages:
        if stage.batch >= batch:  # after an out-of-memory error, the training's batch may be smaller than a stage
            break
        divisor_on_nodes = stage.nodes * spec.cluster.gpus_per_node * spec.train.accumulate if stage.nodes else divisor
        if stage.batch % divisor_on_nodes:
            raise SpecError(
                f"train.ramp: batch {stage.batch} is not divisible by {divisor_on_nodes} (GPUs x micro-batches of a step)",
                describe_nearest_multiples(stage.batch, divisor_on_nodes),
            )
        stages.append(Stage(begin=begin, batch=stage.batch))
        length = round(stage.epochs * dataset_size)
        if not length:
            raise SpecError(
                f"train.ramp: {stage.epochs:g} epochs at batch {stage.batch} are less than one sample of the dataset ({dataset_size} samples)",
                "remove the stage, or give it more epochs",
            )
        begin += length
    if begin >= spec.train.epochs * dataset_size:
        raise SpecError(
            f"train.ramp lasts {begin / dataset_size:g} epochs, so none of the {spec.train.epochs} epochs (train.epochs)"
            f" remains for batch {batch}",
            "shorten the stages, or raise train.epochs",
        )
    return Ramp((*stages, Stage(begin=begin, batch=batch)))


def _plan_auto_stages(spec: JobSpec, batch: int, divisors: Sequence[int], dataset_size: int) -> Ramp:
    reference = spec.train.reference_batch
    doubled = list_batches(reference, batch - 1)
    fitting = {doubled_batch: _find_fitting_batch(doubled_batch, divisors) for doubled_batch in doubled}
    fitting_batches = [fitting_batch for fitting_batch in fitting.values() if fitting_batch]
    share = min(STAGE_EPOCH_SHARE, MAX_STAGES_EPOCH_SHARE / max(1, len(fitting_batches)))
    length = share * spec.train.epochs * dataset_size
    remarks = [
        messages.stage_skipped(setting="train.ramp: auto", batch=doubled_batch, micro_batches=divisors[-1])
        for doubled_batch, fitting_batch in fitting.items()
        if not fitting_batch
    ]
    if not doubled:
        remarks.append(messages.auto_ramp_without_stages(batch=batch, reference_batch=reference))
    stages = [
        Stage(begin=round(number * length), batch=fitting_batch)
        for number, fitting_batch in enumerate([*fitting_batches, batch])
    ]
    return Ramp(tuple(stages), tuple(remarks))


def _find_fitting_batch(batch: int, divisors: Sequence[int]) -> int:
    """Return the batch rounded down to a multiple of the first divisor that does not exceed it; 0 if none."""
    return next((batch // divisor * divisor for divisor in divisors if batch >= divisor), 0)


# --- Stages of trials
#
# All start with the reference batch, as a ramp does, because large batches learn little in the first steps of a
# training. Batches that are not divisible among the ranks are rounded when a trainer is built.

Stages = tuple[Stage, ...]


def plan_stages_of_training(spec: JobSpec, arm: Arm, *, batch: int, size: int) -> Stages:
    """Return the stages of the whole training with an arm's settings; the last stage has the training's own batch.

    Args:
        arm: the control has the common beginning, then its own batch at once.
        size: samples per epoch.
    """
    parting = BRANCHING_EPOCH * size
    doubled = _list_batches_between(spec, arm, batch)
    length = min(STAGE_EPOCH_SHARE, MAX_STAGES_EPOCH_SHARE / (1 + len(doubled))) * spec.train.epochs * size
    begins = [max(parting, round(number * length)) for number in range(1, len(doubled) + 2)]
    return _build_stages(spec, [*doubled, batch], begins)


def plan_stages_of_branch(spec: JobSpec, arm: Arm, *, batch: int, start: int, length: int) -> Stages:
    """Return the stages of a branch: a ramp passes all of its stages in the first half, each shortened accordingly.

    Args:
        start: samples passed when the arms branched off.
        length: samples of the branch.
    """
    doubled = _list_batches_between(spec, arm, batch)
    samples_per_stage = MAX_STAGES_EPOCH_SHARE * length / max(1, len(doubled))
    begins = [start + round(number * samples_per_stage) for number in range(len(doubled) + 1)]
    return _build_stages(spec, [*doubled, batch], begins)


def _list_batches_between(spec: JobSpec, arm: Arm, batch: int) -> list[int]:
    """Return the batches between the reference batch and the training's own that an arm's ramp uses."""
    return list_batches(2 * spec.train.reference_batch, batch - 1) if METHODS[arm.method].grows_batch else []


def _build_stages(spec: JobSpec, batches: list[int], begins: list[int]) -> Stages:
    """Return the common beginning and the following stages; of stages with the same start the last one is kept."""
    batch_by_begin = {0: min(spec.train.reference_batch, batches[-1])} | dict(zip(begins, batches, strict=True))
    return tuple(Stage(begin=begin, batch=batch) for begin, batch in batch_by_begin.items())


def plan_stages_by_noise(path: NoisePath, *, batch: int, size: int, epochs: int) -> tuple[Stage, ...]:
    """Return the stages of a training; the last has its own batch, and starts at the end if the noise never reaches it.

    Args:
        batch: the training's own, global.
        size: samples per epoch.
        epochs: of the whole training.
    """
    total = size * epochs
    batches = [*list_batches(path.reference, batch - 1), batch]
    start = max(0, sum(stage_batch <= path.interpolate_noise(0.0) for stage_batch in batches) - 1)
    stages = [Stage(begin=0, batch=batches[start], noise=path.interpolate_noise(0.0))]
    for following in batches[start + 1 :]:
        begin = math.ceil(max(stages[-1].begin + MIN_STAGE_SHARE * total, path.find_first_epoch(following) * size))
        if begin > (1 - MIN_STAGE_SHARE) * total:
            return (*stages, Stage(begin=total, batch=batch))
        stages.append(Stage(begin=begin, batch=following, noise=path.interpolate_noise(begin / size)))
    return tuple(stages)


def warn_missing_noise(noise: NoisePath | None) -> list[Diagnostic]:
    """Return warnings about missing or limited noise measurements for a job with `ramp: noise`."""
    if noise is None:
        return [messages.noise_not_measured()]
    return [] if noise.measured_at else [messages.noise_only_at_start()]


# --- Descriptions


def add_stage_epochs(stages: Iterable[Stage], size: int) -> tuple[Stage, ...]:
    """Return stages for storage, with the epoch (of `size` samples) in which each starts."""
    return tuple(stage.model_copy(update={"epoch": stage.begin / size}) for stage in stages)


def describe_stages(stages: Sequence[Stage]) -> str:
    """Describe the epoch and the noise scale at which a training reaches each batch; expects stages with epochs."""
    by_noise = any(stage.noise is not None for stage in stages)
    return "; ".join(_describe_stage(stage, by_noise=by_noise) for stage in stages)


def _describe_stage(stage: Stage, *, by_noise: bool) -> str:
    if stage.noise is None:
        never = f"batch {stage.batch}: never, because the noise scale remains below {stage.batch}"
        return never if by_noise else f"batch {stage.batch} from epoch {format_number(stage.epoch)}"
    return f"batch {stage.batch} from epoch {format_number(stage.epoch)}: noise scale {format_number(stage.noise)}"
