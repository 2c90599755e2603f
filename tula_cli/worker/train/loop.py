"""The training loop, which probes, the training run and a relaunch all use.

`run_steps` yields after every optimizer step. A probe takes some steps and stops; the training run takes them all, and
evaluates and saves when an epoch ends. There is no other training loop.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tula_cli.models.loss_level import LossLevel
from tula_cli.models.ramp import Ramp
from tula_cli.optim import TulaOptimizer
from tula_cli.run.records.tasks import LoopTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import Workers
from tula_cli.worker.build import zoo
from tula_cli.worker.build.activation_checkpointing import apply_activation_checkpointing
from tula_cli.worker.build.batches import BatchSizes, ModelCall, slice_batch
from tula_cli.worker.build.compiled import compile_model, disable_compilation
from tula_cli.worker.build.loaders import MicroBatchSampler, TrainingPosition, build_train_loader
from tula_cli.worker.build.parameter_groups import make_parameter_groups
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.device import (
    Clock,
    Mark,
    convert_to_channels_last,
    make_autocast_context,
    move_to_device,
    should_use_channels_last,
)
from tula_cli.worker.methods.plain import Configuration, Plain
from tula_cli.worker.methods.table import get_method
from tula_cli.worker.parallel.sharding import Parallel, wrap_model
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.seeding import compute_stable_seed, seed_torch
from tula_cli.worker.train.batch_partition import compute_batch_sizes
from tula_cli.worker.train.learning_rate import compute_learning_rate


@dataclass(frozen=True)
class Step:
    """One optimizer step, as reported to the caller."""

    loss: torch.Tensor  # 0-dim, this rank's mean over the local batch; still on the device
    batch: int  # global batch
    lr: float  # learning rate of the schedule; a parameter group may have a multiple of it
    start: Mark
    loaded: Mark  # time at which the first micro-batch was loaded
    end: Mark
    refreshed: bool  # whether this step refreshed the AGS factors although not every step does
    epoch_ended: bool


@dataclass
class Trainer:
    """All objects with which a rank trains."""

    spec: JobSpec
    ranks: Ranks
    datasets: Datasets
    parallel: Parallel
    base: torch.optim.Optimizer
    optimizer: torch.optim.Optimizer  # `base`, or the method's wrapper around it
    method: Plain
    scaler: torch.amp.GradScaler
    call: ModelCall
    sizes: BatchSizes  # batches of all stages; `position` determines the current one
    workers: int
    clock: Clock
    lr_ratios: Sequence[float]  # ratio of each parameter group's learning rate to the spec's
    beta2s_at: Mapping[int, Sequence[float]]  # batch -> beta2 of each group; empty: unchanged
    channels_last: bool = False  # whether images and convolution weights are in channels-last format
    position: TrainingPosition = field(default_factory=TrainingPosition)
    losses: LossLevel = field(default_factory=LossLevel)  # level of the losses up to `position`, on rank 0
    refresh_each_epoch: bool = True
    until: int | None = None  # epoch at whose end `run_steps` stops; None: the spec's last
    lr_factor: Callable[[float], float] = lambda _: 1.0  # fractional epoch -> factor on the scheduled learning rate
    apart: bool = False  # whether the replicas differ since their last average (post-local SGD)
    synchronise: bool = True  # False: only local work is measured, and the replicas diverge
    after_backward: Callable[[], None] | None = None  # reads a probe's finished gradient, which is then discarded
    on_backward: Callable[[], None] | None = None  # called when a step's gradient has been reduced
    on_gradient: "Callable[[Trainer], object] | None" = None  # sees each gradient before it is clipped and used
    # The newest micro-batch, or its first part if it is split; AGS draws its small batch from it.
    last_batch: Any = None

    @property
    def samples_passed(self) -> int:
        """Samples of the completed epochs, including those dropped at their ends, and of the current epoch so far."""
        return self.position.epoch * len(self.datasets.train) + self.position.done

    @property
    def batch(self) -> int:
        """The global batch of the coming step."""
        return self.sizes.ramp.find_batch(self.samples_passed)

    @property
    def splits(self) -> int:
        """Number of parts in which each micro-batch of train.accumulate is computed."""
        return self.sizes.splits[self.batch]

    @property
    def beta2s(self) -> Sequence[float]:
        """The beta2 of each parameter group in the coming step; empty: beta2 is not changed."""
        return self.beta2s_at[self.batch]

    def move_to_position(self, position: TrainingPosition) -> None:
        """Move to a position; if its batch differs from the current one, the method is updated."""
        previous_batch, self.position = self.batch, position
        if self.batch != previous_batch:
            self.method.change_batch(self)

    @property
    def local_batch(self) -> int:
        return self.batch // self.ranks.world

    @property
    def micro_batch(self) -> int:
        return self.local_batch // self.parts

    @property
    def largest_micro_batch(self) -> int:
        """Samples that a GPU processes at a time at the largest batch of this attempt, and in evaluations."""
        return self.sizes.largest // (self.ranks.world * self.sizes.parts[self.sizes.largest])

    @property
    def parts(self) -> int:
        """Micro-batches per optimizer step, with each part of a split micro-batch counted."""
        return self.sizes.parts[self.batch]

    @property
    def is_local_sgd(self) -> bool:
        """Whether each rank takes the coming step by itself: post-local SGD after its switch."""
        return self.method.is_local(self)

    @property
    def ags(self) -> TulaOptimizer | None:
        return self.method.get_scaling_optimizer(self.optimizer)

    @property
    def lr(self) -> float:
        """Return the learning rate of the next step."""
        return compute_learning_rate(self.spec, self.epoch, self.batch) * self.lr_factor(self.epoch)

    @property
    def epoch(self) -> float:
        """Return the fractional epoch, on which every schedule depends."""
        return self.position.epoch + self.position.done / len(self.datasets.train)


def build_trainer(
    task: LoopTask, ranks: Ranks, datasets: Datasets, *, batch: int, workers: Workers, refresh: bool
) -> Trainer:
    """Build the trainer of a task at a global batch.

    Args:
        refresh: whether AGS refreshes by itself (a probe times a refresh separately).

    Raises:
        SpecError: the batch does not divide among ranks and micro-batches, or is larger than the dataset.
    """
    spec = task.spec
    sizes = compute_batch_sizes(task, batch=batch, world=ranks.world, dataset_size=len(datasets.train))
    seed_torch(compute_stable_seed(spec.train.seed), ranks.device)
    model = zoo.build_model(spec, datasets.classes)
    if not spec.train.is_sharded:  # a sharded model is moved block by block
        model = model.to(ranks.device)
    if spec.train.activation_checkpointing:
        apply_activation_checkpointing(model)
    channels_last = should_use_channels_last(spec.train, model, ranks.device)
    if channels_last:
        convert_to_channels_last(model)
    loss = zoo.build_loss(spec)
    if isinstance(loss, nn.Module):  # it may hold tensors, such as class weights
        loss = loss.to(ranks.device)
    call = zoo.make_model_call(spec, model, loss)
    compile_model(model, spec.train, shapes=len(sizes.splits))
    parallel = wrap_model(model, spec.train, ranks.device)
    method = get_method(spec)
    base = method.build_base_optimizer(spec, make_parameter_groups(spec.optimizer, model))
    return Trainer(
        spec=spec,
        ranks=ranks,
        datasets=datasets,
        parallel=parallel,
        base=base,
        optimizer=method.wrap_optimizer(
            base, parallel, Configuration(spec, sizes.ramp.find_batch(0), ranks.world, refresh)
        ),
        method=method,
        scaler=torch.amp.GradScaler(ranks.device.type, enabled=spec.train.precision == "fp16"),
        call=call,
        sizes=sizes,
        workers=spec.train.count_loaders(ranks.count_cores()) if workers == "auto" else workers,
        clock=Clock(ranks.device),
        lr_ratios=zoo.compute_lr_ratios(base, spec.optimizer.lr),
        beta2s_at={batch: zoo.compute_beta2_by_group(base, spec, batch) for batch in sizes.splits},
        channels_last=channels_last,
        refresh_each_epoch=refresh,
    )


def run_steps(trainer: Trainer) -> Generator[Step, None, None]:
    """Train from the trainer's position to the last epoch, yielding after each optimizer step.

    The time between a step's `start` and `end` is the complete wall time: waiting for data, forward, backward,
    synchronisation and update. Work of the caller between two steps is not included.
    """
    size = len(trainer.datasets.train)
    epochs = trainer.spec.train.epochs if trainer.until is None else trainer.until
    stream = load_micro_batches(trainer, epochs)
    trainer.parallel.train()
    while (position := trainer.position).epoch < epochs:
        stages = list(trainer.sizes.ramp.list_epoch_steps(position.epoch, samples_done=position.done, size=size))
        remaining = sum(count for _, count in stages)
        for _, count in stages:
            if trainer.ags and trainer.refresh_each_epoch:
                trainer.ags.start_epoch(remaining, rest=trainer.position.done > 0)
            for _ in range(count):
                remaining -= 1
                step = _train_step(trainer, stream, epoch_ends=remaining == 0)
                position = trainer.position.advance(step.batch)
                trainer.move_to_position(position.start_next_epoch() if step.epoch_ended else position)
                yield step
        if not stages:  # resumed when less than one batch of the epoch is left
            trainer.move_to_position(position.start_next_epoch())


def load_micro_batches(trainer: Trainer, epochs: int, ramp: Ramp | None = None) -> Iterator[Any]:
    """Return this rank's micro-batches from the trainer's position to the end of `epochs`; `ramp` None: the
    trainer's."""
    batches = MicroBatchSampler(
        len(trainer.datasets.train),
        ramp=ramp or trainer.sizes.ramp,
        parts=trainer.sizes.parts,
        rank=trainer.ranks.rank,
        world=trainer.ranks.world,
        seed=trainer.spec.train.seed,
        epochs=epochs,
        start=trainer.position,
        order=trainer.datasets.train.draw_epoch_order,
    )
    pin, collate = trainer.ranks.device.type == "cuda", trainer.datasets.collate
    return iter(build_train_loader(trainer.datasets.train, batches, workers=trainer.workers, pin=pin, collate=collate))


def run_step_on_batch(trainer: Trainer, batch: Any) -> Step:
    """Take a step in which every micro-batch is `batch`."""
    return _train_step(trainer, itertools.repeat(batch), epoch_ends=False)


def list_upcoming_micro_batches(trainer: Trainer) -> Generator[Any, None, None]:
    """Yield the micro-batches that would be trained next at the current batch size, over two epochs at most."""
    for batch in load_micro_batches(trainer, trainer.position.epoch + 2, Ramp.from_constant_batch(trainer.batch)):
        yield move_batch_to_device(trainer, batch)


def _train_step(trainer: Trainer, stream: Iterator[Any], *, epoch_ends: bool) -> Step:
    """Take one optimizer step: accumulate, refresh the factors if due, update."""
    start = trainer.clock.mark()
    lr = trainer.lr
    zoo.set_lr(trainer.optimizer, lr, trainer.lr_ratios)
    zoo.set_beta2(trainer.optimizer, trainer.beta2s)  # a loaded state may have the beta2 of another batch
    # The seed of random layers depends only on the position, so that a resumed run equals an uninterrupted one.
    seed = compute_stable_seed(trainer.spec.train.seed, trainer.position.samples, trainer.ranks.rank)
    seed_torch(seed, trainer.ranks.device)
    trainer.method.before_backward(trainer)
    loss, loaded = _run_backward(trainer, stream, start)
    refreshed = _refresh_scaling_factors(trainer)
    _update_weights(trainer)
    trainer.method.after_step(trainer)
    return Step(loss, trainer.batch, lr, start, loaded, trainer.clock.mark(), refreshed, epoch_ends)


def _run_backward(trainer: Trainer, stream: Iterator[Any], start: Mark) -> tuple[torch.Tensor, Mark]:
    """Accumulate the gradient of one local batch; only the last micro-batch is synchronised."""
    micro_batches, splits = trainer.parts, trainer.splits
    total, loaded = torch.zeros((), device=trainer.ranks.device), start
    for index in range(micro_batches):
        batch = move_batch_to_device(trainer, next(stream))  # frees the previous batch
        if index == 0:
            loaded = trainer.clock.mark()
        if index <= micro_batches - splits:
            trainer.last_batch = batch
        is_last = index == micro_batches - 1
        with nullcontext() if is_last and trainer.synchronise else trainer.parallel.no_sync():
            with make_autocast_context(trainer.spec.train, trainer.ranks.device):
                loss = trainer.call.compute_loss(trainer.parallel, batch) / micro_batches
            trainer.scaler.scale(loss).backward()
        total += loss.detach()
    if trainer.on_backward:
        trainer.on_backward()
    if trainer.after_backward:
        trainer.after_backward()
    return total, loaded


def _refresh_scaling_factors(trainer: Trainer) -> bool:
    """Run the method's refresh, which only some steps do, on the finished gradient; return whether it was done."""
    assert trainer.last_batch is not None
    samples, train = trainer.micro_batch, trainer.spec.train
    # A refresh per epoch is not worth a compilation, which ranks would do one after the other.
    each_step = trainer.spec.ags.fill_from_preset().refreshes_each_step

    def compute_small_loss(count: int) -> torch.Tensor:
        assert count <= samples, f"{count} samples of a micro-batch of {samples}"
        small = slice_batch(
            trainer.last_batch, samples=samples, stop=count, from_user=trainer.datasets.collate is not None
        )
        compilation = nullcontext() if each_step else disable_compilation(train)
        with compilation, make_autocast_context(train, trainer.ranks.device):
            return trainer.call.compute_loss(trainer.parallel.module, small)

    return trainer.method.refresh(trainer, compute_small_loss)


def _update_weights(trainer: Trainer) -> None:
    if trainer.after_backward:  # the gradient was only read: the weights do not change
        trainer.optimizer.zero_grad()
        return
    if not trainer.synchronise:  # the method's own step might synchronise
        trainer.parallel.prepare_local_step(trainer.base)
        trainer.scaler.step(trainer.method.get_local_optimizer(trainer))
        trainer.scaler.update()
        trainer.base.zero_grad()
        return
    if trainer.on_gradient:
        trainer.on_gradient(trainer)
    limit = trainer.spec.train.max_grad_norm
    if limit is not None and trainer.optimizer is trainer.base:  # a wrapper clips by itself, after computing the norm
        trainer.scaler.unscale_(trainer.optimizer)
        nn.utils.clip_grad_norm_(trainer.parallel.parameters(), limit)
    trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()
    trainer.optimizer.zero_grad()


def move_batch_to_device(trainer: Trainer, batch: Any) -> Any:
    """Return a loader's batch on the model's device; on a GPU the copy overlaps with earlier computation."""
    return move_to_device(batch, trainer.ranks.device, channels_last=trainer.channels_last)
