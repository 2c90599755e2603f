"""Partition of a batch: among ranks, into micro-batches, and those into parts after an out-of-memory error."""

from collections.abc import Callable, Sequence

from tula_cli.errors import SpecError
from tula_cli.models.out_of_memory import list_splits
from tula_cli.models.ramp import Ramp, build_ramp, list_stages_below_batch
from tula_cli.run.records.recommendations import Stage
from tula_cli.run.records.results import MicroBatches, Splits
from tula_cli.run.records.tasks import LoopTask, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.batches import BatchSizes
from tula_cli.worker.build.norms import count_batch_norm_micro_batches, list_micro_batch_limits
from tula_cli.worker.methods.plain import Configuration, Loop
from tula_cli.worker.methods.table import get_method


def compute_batch_sizes(task: LoopTask, *, batch: int, world: int, dataset_size: int) -> BatchSizes:
    """Return the batches of a task; only a training has more than one.

    Raises:
        SpecError: a batch does not divide among ranks and micro-batches, or is larger than the dataset.
    """
    spec = task.spec
    splits = task.micro_batch_splits
    _check_batch(spec, batch, world=world, splits=splits, dataset_size=dataset_size)
    largest = max((stage.batch for stage in task.ramp_stages if stage.nodes == task.nodes), default=batch)
    ramp = build_ramp_from_stages(task, task.stages, world, dataset_size) if isinstance(task, TrainTask) else None
    stages = {stage.batch: 1 for stage in ramp.stages} if ramp else {}
    if splits > 1:
        stages = {stage: _choose_splits_for_stage(spec, stage, batch, world=world, splits=splits) for stage in stages}
    for stage, micro_batches_of_stage in stages.items():
        _check_batch(spec, stage, world=world, splits=micro_batches_of_stage, dataset_size=dataset_size)
    return BatchSizes(
        ramp or Ramp.from_constant_batch(batch), spec.train.accumulate, {**stages, batch: splits}, min(batch, largest)
    )


def _choose_splits_for_stage(spec: JobSpec, stage: int, batch: int, *, world: int, splits: int) -> int:
    """Return the parts per micro-batch of a stage: the fewest with at most the samples of a part of the full batch."""
    micro_batches_in_all = world * spec.train.accumulate
    micro_batch, max_samples = stage // micro_batches_in_all, batch // (micro_batches_in_all * splits)
    least = get_method(spec).compute_min_samples(Configuration(spec, stage, world))
    sizes = ((n, micro_batch // n) for n in range(1, micro_batch + 1) if not micro_batch % n)
    fitting = (n for n, size in sizes if least <= size <= max_samples)
    return next(fitting, 1)


def build_ramp_from_stages(task: TrainTask, stages: Sequence[Stage], world: int, dataset_size: int) -> Ramp:
    """Return the batches of a training from the stages already decided, or if there are none, from the job's settings.

    Raises:
        SpecError: as `build_ramp`.
    """
    micro_batches_in_all = world * task.spec.train.accumulate
    if stages and stages[0].nodes is not None:
        return _build_ramp_on_nodes(task, stages, micro_batches_in_all)
    return build_ramp(
        task.spec, batch=task.batch, divisor=micro_batches_in_all, dataset_size=dataset_size, decided=stages
    )


def _build_ramp_on_nodes(task: TrainTask, stages: Sequence[Stage], micro_batches_in_all: int) -> Ramp:
    """Return the batches of a training that starts on fewer nodes (`train.ramp_nodes`), the same on any of them.

    Batches of stages on fewer nodes need not divide among these nodes: only an unreadable checkpoint leads back to such
    a stage, and then the first batch of these nodes is used.
    """
    stages_below = [*list_stages_below_batch(stages, task.batch)]
    first_batch = next(stage.batch for stage in stages_below if (stage.nodes or 0) >= task.nodes)
    fitting = [stage.batch if stage.batch % micro_batches_in_all == 0 else first_batch for stage in stages_below]
    return Ramp(
        tuple(stage.model_copy(update={"batch": fit}) for stage, fit in zip(stages_below, fitting, strict=True))
    )


def _check_batch(spec: JobSpec, batch: int, *, world: int, splits: int, dataset_size: int) -> None:
    micro_batches_in_all = world * spec.train.accumulate * splits
    if batch % micro_batches_in_all:
        raise SpecError(f"batch {batch} is not divisible by {micro_batches_in_all} (ranks x train.accumulate)")
    if batch > dataset_size:
        raise SpecError(f"batch {batch} is larger than the dataset, which has {dataset_size} training samples")


def list_micro_batch_splits(
    loop: Loop, batches: Sequence[int], jobs: Callable[[int], Sequence[JobSpec]]
) -> MicroBatches:
    """Return the ways in which the micro-batches of each batch may be split after an out-of-memory error.

    Args:
        jobs: returns the jobs that may be trained at a batch; with method auto one per arm, which differ in their
            method.
    """
    world, model = loop.ranks.world, loop.parallel.module
    micro_batches, norms = loop.spec.train.accumulate, list_micro_batch_limits(model, world=world)
    splits: list[Splits] = []
    for batch in batches:
        limit = _make_method_limit(jobs(batch), batch, world)
        micro_batch = batch // world // micro_batches
        splits.append(list_splits(batch, micro_batch=micro_batch, micro_batches=micro_batches, limits=[limit, *norms]))
    return MicroBatches(splits=tuple(splits), normalised=count_batch_norm_micro_batches(model, world=world))


def _make_method_limit(specs: Sequence[JobSpec], batch: int, world: int) -> tuple[Callable[[int], bool], str]:
    """Return the condition that the methods of jobs impose on a micro-batch, and its description."""
    fewest = max(get_method(spec).compute_min_samples(Configuration(spec, batch, world)) for spec in specs)
    return (
        lambda micro_batch: micro_batch >= fewest,
        f"the training method needs micro-batches of at least {fewest} samples",
    )
