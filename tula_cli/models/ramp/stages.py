"""The stages of a training whose batch grows over its first epochs (`train.ramp`): from where on it has which batch.

The clock is samples passed: those of whole epochs, with what their ends leave out, and those done of the epoch under way. A
stage ends with the first step that comes to its end or beyond, so that batches stay slices of an epoch's order, one after the
other: at a change no sample is left out, and none is trained twice. The batch follows from the position alone, so that a
training resumes in any stage, and one that goes on at a smaller batch keeps the stages below that.

By default the batch of stage k is reference_batch x 2^k, up to the training's own: in the first epochs the gradient's noise
is small, and a larger batch averages little out (McCandlish et al. 2018). With `ramp: noise` the noise that was measured tells
how long each lasts (`by_noise`), with `ramp: decay` the schedule of the learning rate: it is spent as batch.
"""

import functools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from tula_cli.errors import SpecError
from tula_cli.models.ramp.by_noise import NoisePath, plan_stages_by_noise
from tula_cli.run.records.recommendations import Stage
from tula_cli.spec.ags import Arm
from tula_cli.spec.job import JobSpec, get_warmup_epochs
from tula_cli.spec.methods import METHODS
from tula_cli.spec.schedules import ROUNDING, compute_decayed_share
from tula_cli.spec.sections import MIN_STAGE_SHARE, RampStage, Schedule

# --- Stages

EPOCH_SHARE = 0.05
"""Of the training, that each stage of `auto` lasts."""
MAX_SHARE = 0.5
"""Of the training, that all stages of `auto` below its own batch last together."""


@dataclass(frozen=True)
class Ramp:
    """The stages of one training, ascending; the last one has its own batch and ends with it."""

    stages: tuple[Stage, ...]
    remarks: tuple[str, ...] = ()  # stages that no rule of the job's named and that are left out, and why

    @classmethod
    def constant(cls, batch: int) -> "Ramp":
        """Return that of a training whose batch stays."""
        return cls((Stage(begin=0, batch=batch),))

    def stage_at(self, passed: int) -> int:
        """Return the number of the stage, from 0, that a training is in when so many samples are passed."""
        return max(0, sum(stage.begin <= passed for stage in self.stages) - 1)

    def batch_at(self, passed: int) -> int:
        """Return the batch, global, of the step that begins when so many samples are passed."""
        return self.stages[self.stage_at(passed)].batch

    def shares(self, total: int) -> dict[int, float]:
        """Return the share of so many samples that pass at each batch."""
        ends = [min(stage.begin, total) for stage in (*self.stages[1:], Stage(begin=total, batch=0))]
        return {stage.batch: max(0, end - stage.begin) / total for stage, end in zip(self.stages, ends, strict=True)}

    def steps_of_epoch(self, epoch: int, *, samples_done: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield (batch, steps) of what is left of an epoch; less than a batch at its end is left out.

        Args:
            epoch: epochs completed.
            done: samples done of the next one.
            size: samples of an epoch.
        """
        while True:
            passed = epoch * size + samples_done
            number = self.stage_at(passed)
            batch, following = self.stages[number].batch, self.stages[number + 1 :]
            steps = max(0, size - samples_done) // batch
            if following:
                steps = min(steps, ceil((following[0].begin - passed) / batch))
            if not steps:
                return
            yield batch, steps
            samples_done += steps * batch

    def remaining_steps(self, *, size: int, epochs: int, epoch: int = 0, samples_done: int = 0) -> dict[int, int]:
        """Return the steps of each batch, ascending, from a position to the last epoch's end.

        Args:
            size: samples of an epoch.
            epochs: of the whole training.
            epoch: epochs completed.
            done: samples done of the next one.
        """
        steps_by_batch = dict.fromkeys((stage.batch for stage in self.stages), 0)
        while epoch < epochs:
            for batch, steps in self.steps_of_epoch(epoch, samples_done=samples_done, size=size):
                steps_by_batch[batch] += steps
            epoch, samples_done = epoch + 1, 0
            number = self.stage_at(epoch * size)
            ends = [stage.begin // size for stage in self.stages[number + 1 : number + 2]]
            alike = max(0, min([epochs, *ends]) - epoch)  # epochs without a change
            steps_by_batch[self.stages[number].batch] += alike * (size // self.stages[number].batch)
            epoch += alike
        return steps_by_batch


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
    """Return the stages of a training; one where its batch does not grow.

    Args:
        spec: the job.
        batch: the training's own, global; stages that are not below it are left out.
        parts: ranks x micro-batches a step: a batch is divided among them.
        dataset_size: training samples.
        noise: of the gradients, for `ramp: noise`; where nothing tells it, stages are those of `auto`.
        decided: the stages as they were before the training began, that of its own batch last; none: they follow anew.
        fewer: parts on fewer nodes, descending, for stages that leave a GPU of those without a sample.

    Raises:
        SpecError: a stage that the job names does not divide, or they last as long as the training.
    """
    stages_setting = spec.train.stages
    if stages_setting is None:
        return Ramp.constant(batch)
    if decided and not isinstance(stages_setting, list):
        return _fit_stages([*list_stages_below(decided, batch)], [divisor])
    if stages_setting == "noise" and noise is not None:
        planned = plan_stages_by_noise(
            noise, batch=batch, factor=get_noise_factor(spec), size=dataset_size, epochs=spec.train.epochs
        )
        return _fit_stages(planned, [divisor, *fewer])
    if stages_setting == "decay":
        planned = plan_stages_by_decay(spec, batch=batch, size=dataset_size)
        return _fit_stages(planned, [divisor, *fewer])
    if not isinstance(stages_setting, list):
        return _plan_auto_stages(spec, batch, [divisor, *fewer], dataset_size)
    return _plan_named_stages(spec, stages_setting, batch, divisor, dataset_size)


def plan_stages_by_decay(spec: JobSpec, *, batch: int, size: int) -> tuple[Stage, ...]:
    """Return the stages of a training whose decay is spent as batch, its own batch last; one it never comes to begins at its end.

    The batch is the reference batch x 2^k from where the schedule leaves 2^-k of the full learning rate (Meterez et al. 2025,
    arXiv 2510.14717, Algorithm 1). In between the rate follows the schedule, so that rate and batch are worth that of the
    reference batch at every point (`job._get_noise_rule`).

    Args:
        spec: the job, with `ramp: decay`.
        batch: the training's own, global.
        size: samples of an epoch.
    """
    reference, total = spec.train.reference_batch, spec.train.epochs * size
    doubled = [reference << k for k in range(1, batch.bit_length()) if reference << k < batch]
    begins = {0: min(reference, batch)}  # of stages that begin at once the last one stays
    schedule, warmup = spec.schedule.model_dump_json(), get_warmup_epochs(spec)
    for following in [*doubled, *([batch] if batch > reference else [])]:
        share = reference / following
        begin = _count_samples_until_decay(
            share, schedule, spec.optimizer.lr, warmup=warmup, epochs=spec.train.epochs, size=size
        )
        begins[begin if begin <= (1 - MIN_STAGE_SHARE) * total else total] = following
    return tuple(Stage(begin=begin, batch=batch_) for begin, batch_ in begins.items())


@functools.lru_cache(maxsize=1024)  # the same for all nodes of a search
def _count_samples_until_decay(share: float, schedule: str, lr: float, *, warmup: float, epochs: int, size: int) -> int:
    """Return the samples passed from which on a schedule leaves at most a share of the full learning rate.

    Args:
        share: of `lr`, above 0.
        schedule: as JSON.
        lr: at the reference batch.
        warmup: epochs.
        epochs: of the whole training.
        size: samples of an epoch.
    """
    rule = Schedule.model_validate_json(schedule)

    def has_decayed(passed: int) -> bool:
        remaining_share = compute_decayed_share(rule, lr, epoch=passed / size, warmup=warmup, epochs=epochs)
        return remaining_share <= share * (1 + ROUNDING)

    return bisect_left(range(epochs * size), True, key=has_decayed)


def get_noise_factor(spec: JobSpec) -> float:
    """Return how many times the gradient noise scale a batch may be (`train.ramp_noise`)."""
    return 1.0 if spec.train.ramp_noise is None else spec.train.ramp_noise


def list_stages_below(stages: Sequence[Stage], batch: int) -> Iterator[Stage]:
    """Yield the stages below a batch, and it where the first of those begins that are not below, or else the last one does."""
    yield from (stage for stage in stages if stage.batch < batch)
    own_stage = next((stage for stage in stages if stage.batch >= batch), stages[-1])
    yield own_stage.model_copy(update={"batch": batch})


def _fit_stages(stages: Sequence[Stage], divisors: Sequence[int]) -> Ramp:
    """Return stages as they divide among the parts on the most nodes on which none is without a sample; else they are left out."""
    *smaller, own_stage = stages
    sizes = [_find_fitting_batch(stage.batch, divisors) for stage in smaller]
    fitting_stages = [
        stage.model_copy(update={"batch": size}) for stage, size in zip(smaller, sizes, strict=True) if size
    ]
    first_stage, *later = (*fitting_stages, own_stage)
    remarks = tuple(
        f"train.ramp leaves batch {stage.batch} out: it has less than one sample for each of {divisors[-1]} (GPUs x micro-batches)"
        for stage, size in zip(smaller, sizes, strict=True)
        if not size
    )
    return Ramp((first_stage.model_copy(update={"begin": 0}), *later), remarks)


def _plan_named_stages(
    spec: JobSpec, named_stages: Sequence[RampStage], batch: int, divisor: int, dataset_size: int
) -> Ramp:
    begin, stages = 0, []
    for stage in named_stages:
        if stage.batch >= batch:  # after an out-of-memory the training's own may be smaller than it was
            break
        divisor_on_nodes = stage.nodes * spec.cluster.gpus_per_node * spec.train.accumulate if stage.nodes else divisor
        if stage.batch % divisor_on_nodes:
            raise SpecError(
                f"train.ramp: batch {stage.batch} does not divide by {divisor_on_nodes} (GPUs x micro-batches of a step)",
                f"the nearest are {stage.batch // divisor_on_nodes * divisor_on_nodes or divisor_on_nodes} and {(stage.batch // divisor_on_nodes + 1) * divisor_on_nodes}",
            )
        stages.append(Stage(begin=begin, batch=stage.batch))
        length = round(stage.epochs * dataset_size)
        if not length:
            raise SpecError(
                f"train.ramp: {stage.epochs:g} epochs at batch {stage.batch} are less than one of the dataset's {dataset_size} samples",
                "leave the stage out, or give it more epochs",
            )
        begin += length
    if begin >= spec.train.epochs * dataset_size:
        raise SpecError(
            f"train.ramp lasts {begin / dataset_size:g} epochs, which leaves nothing of train.epochs {spec.train.epochs} to"
            f" train at batch {batch}"
        )
    return Ramp((*stages, Stage(begin=begin, batch=batch)))


def _plan_auto_stages(spec: JobSpec, batch: int, divisors: Sequence[int], dataset_size: int) -> Ramp:
    reference = spec.train.reference_batch
    doubled = [reference << k for k in range(batch.bit_length()) if reference << k < batch]
    fitting = {doubled_batch: _find_fitting_batch(doubled_batch, divisors) for doubled_batch in doubled}
    fitting_batches = [fitting_batch for fitting_batch in fitting.values() if fitting_batch]
    length = min(EPOCH_SHARE, MAX_SHARE / max(1, len(fitting_batches))) * spec.train.epochs * dataset_size
    remarks = [
        f"train.ramp: auto leaves batch {doubled_batch} out: it has less than one sample for each of {divisors[-1]} (GPUs x micro-batches)"
        for doubled_batch, fitting_batch in fitting.items()
        if not fitting_batch
    ]
    if not doubled:
        remarks.append(f"train.ramp: auto does nothing: batch {batch} is not above train.reference_batch {reference}")
    stages = [
        Stage(begin=round(number * length), batch=fitting_batch)
        for number, fitting_batch in enumerate([*fitting_batches, batch])
    ]
    return Ramp(tuple(stages), tuple(remarks))


def _find_fitting_batch(batch: int, divisors: Sequence[int]) -> int:
    """Return the largest batch up to this one that divides among the first of the parts that each have a sample, else 0."""
    return next((batch // divisor * divisor for divisor in divisors if batch >= divisor), 0)


# --- Stages of trials
#
# All begin at the reference batch, which is the first stage of a ramp: the network is past its first steps there, in which a
# large batch learns little. Batches that do not divide among the ranks are rounded where a trainer is built.

Stages = tuple[Stage, ...]


def plan_stages_of_training(spec: JobSpec, arm: Arm, *, batch: int, size: int) -> Stages:
    """Return the stages of the whole training as an arm, that of its own batch last.

    Args:
        spec: a job with method auto.
        arm: the control has the beginning, and then its own batch at once.
        batch: of the training, global.
        size: samples of an epoch.
    """
    parting = spec.auto.after * size
    doubled = _list_batches_between(spec, arm, batch)
    length = min(EPOCH_SHARE, MAX_SHARE / (1 + len(doubled))) * spec.train.epochs * size
    begins = [max(parting, round(number * length)) for number in range(1, len(doubled) + 2)]
    return _build_stages(spec, [*doubled, batch], begins)


def plan_stages_of_branch(spec: JobSpec, arm: Arm, *, batch: int, start: int, length: int) -> Stages:
    """Return the stages of a branch: a ramp goes through all of its own in the first half, as short as that makes them.

    Args:
        spec: a job with method auto.
        arm: of the branch.
        batch: of the training, global.
        start: samples passed where the arms part.
        length: samples of the branch.
    """
    doubled = _list_batches_between(spec, arm, batch)
    samples_per_stage = MAX_SHARE * length / max(1, len(doubled))
    begins = [start + round(number * samples_per_stage) for number in range(len(doubled) + 1)]
    return _build_stages(spec, [*doubled, batch], begins)


def _list_batches_between(spec: JobSpec, arm: Arm, batch: int) -> list[int]:
    """Return the batches between the reference and the training's own that an arm goes through."""
    reference = spec.train.reference_batch
    ramps = METHODS[arm.method].ramps
    return [reference << k for k in range(1, batch.bit_length()) if reference << k < batch] if ramps else []


def _build_stages(spec: JobSpec, batches: list[int], begins: list[int]) -> Stages:
    """Return the beginning and what follows; of stages that begin at once the last one stays."""
    batch_by_begin = {0: min(spec.train.reference_batch, batches[-1])} | dict(zip(begins, batches, strict=True))
    return tuple(Stage(begin=begin, batch=batch) for begin, batch in batch_by_begin.items())
