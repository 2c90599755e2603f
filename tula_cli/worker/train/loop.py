"""The one training loop: probes, the training run and a relaunch all run it.

`steps` yields after every optimizer step. A probe takes some steps and leaves; the training run takes them all, and
evaluates and saves when an epoch ends. Nothing else trains.
"""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tula_cli.errors import SpecError
from tula_cli.models.refresh import small_batch
from tula_cli.optim import Static, TulaOptimizer
from tula_cli.optim.adascale_sgd import AdaScale
from tula_cli.optim.orthogonal import Ortho
from tula_cli.optim.parts.indicators import squared_norm
from tula_cli.optim.parts.small_batch import draw_counts
from tula_cli.optim.post_local_sgd import SWITCH_EPOCHS, average_due, average_replicas, synchronise_gradients
from tula_cli.run.records.tasks import ProbeTask, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import zoo
from tula_cli.worker.build.ghost import apply_ghost_batch_norm, check_ghost_batch, check_small_batch
from tula_cli.worker.build.recompute import apply_activation_checkpointing
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.build.sampling import Batches, Position, steps_left, train_loader
from tula_cli.worker.device import Clock, Mark
from tula_cli.worker.methods.scaling import settings
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.seeding import seed_torch, stable_seed
from tula_cli.worker.train.learning_rate import learning_rate

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Step:
    """One optimizer step, seen from outside."""

    loss: torch.Tensor  # 0-dim, this rank's mean over the local batch; still on the device
    lr: float  # the schedule's; a parameter group may have a multiple of it
    start: Mark
    loaded: Mark  # when the first micro-batch was here
    end: Mark
    refreshed: bool  # this step also refreshed the AGS factors, as not every step does
    epoch_ended: bool


@dataclass
class Trainer:
    """Everything a rank trains with."""

    spec: JobSpec
    ranks: Ranks
    datasets: Datasets
    ddp: DistributedDataParallel
    base: torch.optim.Optimizer
    optimizer: torch.optim.Optimizer  # what the method wraps around base (TulaOptimizer, AdaScale, Ortho), else base
    scaler: torch.amp.GradScaler
    loss: LossFunction
    batch: int
    workers: int
    clock: Clock
    lr_ratios: Sequence[float]  # of each parameter group's learning rate to the spec's
    position: Position = field(default_factory=Position)
    refresh_each_epoch: bool = True
    until: int | None = None  # the epoch at whose end `steps` ends; None: the spec's last
    lr_factor: Callable[[float], float] = lambda _: 1.0  # of the schedule's learning rate, at fractional epochs
    apart: bool = False  # the replicas differ, since their last average (post-local SGD)
    synchronise: bool = True  # False measures a step's local work; the replicas drift apart
    after_backward: Callable[[], None] | None = None  # a probe's look at a finished gradient, which is then dropped
    on_gradient: "Callable[[Trainer], None] | None" = None  # sees each gradient before it is clipped and used
    last_batch: tuple[torch.Tensor, torch.Tensor] | None = None  # the newest micro-batch, for the memory count

    @property
    def local_batch(self) -> int:
        return self.batch // self.ranks.world

    @property
    def micro_batch(self) -> int:
        return self.local_batch // self.parts

    @property
    def parts(self) -> int:
        """Micro-batches an optimizer step."""
        return micro_batches(self.spec, self.ranks.world)

    @property
    def local_sgd(self) -> bool:
        """Whether the coming step is each rank's own: post-local SGD after its switch."""
        return self.spec.train.method == "polo" and self.ranks.world > 1 and self.position.epoch >= SWITCH_EPOCHS

    @property
    def ags(self) -> TulaOptimizer | None:
        return self.optimizer if isinstance(self.optimizer, TulaOptimizer) else None

    @property
    def lr(self) -> float:
        """Return the learning rate of the next step."""
        return learning_rate(self.spec, self.epoch, self.batch) * self.lr_factor(self.epoch)

    @property
    def epoch(self) -> float:
        """Return the fractional epoch: samples are the clock of every schedule."""
        return self.position.epoch + self.position.done / len(self.datasets.train)


def build(
    task: ProbeTask | TrainTask, ranks: Ranks, datasets: Datasets, *, batch: int, workers: int, refresh: bool
) -> Trainer:
    """Build the trainer of a task at a global batch.

    Args:
        refresh: whether AGS refreshes by itself (a probe times a refresh apart).

    Raises:
        SpecError: the batch does not divide among ranks and micro-batches, or is larger than the dataset.
    """
    spec = task.spec
    _check_batch(spec, batch, ranks, datasets)
    seed_torch(stable_seed(spec.train.seed), ranks.device)
    model = zoo.build_model(spec, datasets.classes).to(ranks.device)
    if spec.train.ghost_batch is not None:
        apply_ghost_batch_norm(model, spec.train.ghost_batch)
    if spec.train.activation_checkpointing:
        apply_activation_checkpointing(model)
    ids = [ranks.device] if ranks.device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    base = zoo.build_optimizer(spec, [p for p in model.parameters() if p.requires_grad])
    return Trainer(
        spec=spec,
        ranks=ranks,
        datasets=datasets,
        ddp=ddp,
        base=base,
        optimizer=_wrapped(base, ddp, spec, batch, ranks, refresh),
        scaler=torch.amp.GradScaler(ranks.device.type, enabled=spec.train.precision == "fp16"),
        loss=_loss(spec, ranks.device),
        batch=batch,
        workers=workers,
        clock=Clock(ranks.device),
        lr_ratios=zoo.lr_ratios(base, spec.optimizer.lr),
        refresh_each_epoch=refresh,
    )


def _check_batch(spec: JobSpec, batch: int, ranks: Ranks, datasets: Datasets) -> None:
    parts, size = ranks.world * micro_batches(spec, ranks.world), len(datasets.train)
    if batch % parts:
        why = "ranks x train.accumulate" if parts == ranks.world * spec.train.accumulate else "AdaScale's half batches"
        raise SpecError(f"batch {batch} does not divide by {parts} ({why})")
    if batch > size:
        raise SpecError(f"batch {batch} is larger than the dataset, which has {size} training samples")
    check_ghosts(spec, batch, world=ranks.world)


def check_ghosts(spec: JobSpec, batch: int, *, world: int) -> None:
    """Refuse ghost batches that leave a rest of what a GPU takes at a time, or one sample of its small batch.

    Raises:
        SpecError: they do.
    """
    ghost = spec.train.ghost_batch
    if ghost is None:
        return
    check_ghost_batch(ghost, micro_batch=batch // (world * micro_batches(spec, world)))
    local_norms = spec.ags.resolved().source == "local_norms" and world > 1
    if spec.train.method != "ags" or local_norms:
        return
    shares = draw_counts(small_batch(spec, batch), available(spec, batch, world), world, 0)
    check_small_batch(ghost, shares=shares)  # where AGS is the identity these are micro-batches, which have no rest


def available(spec: JobSpec, batch: int, world: int) -> int:
    """Return the samples that a rank has for AGS's small batch: a micro-batch."""
    return batch // world // spec.train.accumulate


def micro_batches(spec: JobSpec, world: int) -> int:
    """Return the micro-batches of a step; AdaScale compares two sizes of batch, so that one rank alone needs two."""
    halves = 2 if spec.train.method == "adascale" and world == 1 else 1
    return max(spec.train.accumulate, halves)


def _loss(spec: JobSpec, device: torch.device) -> LossFunction:
    """Return the loss; one that is a module may hold tensors, such as class weights."""
    loss = zoo.build_loss(spec)
    return loss.to(device) if isinstance(loss, nn.Module) else loss


def _wrapped(
    base: torch.optim.Optimizer, ddp: DistributedDataParallel, spec: JobSpec, batch: int, ranks: Ranks, refresh: bool
) -> torch.optim.Optimizer:
    """Return what the method makes of the base optimizer."""
    train = spec.train
    if train.method in ("ags", "static"):
        return _scaled(base, ddp, spec, batch, ranks, refresh)
    if train.method == "adascale":
        reference, limit = train.reference_batch, train.max_grad_norm
        return AdaScale(base, model=ddp, batch=batch, reference_batch=reference, max_grad_norm=limit)
    if train.method == "ortho":
        return Ortho(base, model=ddp, max_grad_norm=train.max_grad_norm)
    return base


def _scaled(
    base: torch.optim.Optimizer, ddp: DistributedDataParallel, spec: JobSpec, batch: int, ranks: Ranks, refresh: bool
) -> TulaOptimizer:
    # a probe says itself when, unless every step refreshes: then it is a part of what a step takes
    own = settings(spec.ags, **({} if refresh or spec.ags.resolved().each_step else {"refresh": "epoch"}))
    if spec.train.method == "static":
        own["factors"] = Static(None if spec.ags.factor == "auto" else spec.ags.factor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "AGS leaves the gradients as they are")  # `remarks` tells it
        return TulaOptimizer(
            base,
            model=ddp,
            b_large=batch,
            b_small=small_batch(spec, batch),
            **own,
            max_grad_norm=spec.train.max_grad_norm,
            available=available(spec, batch, ranks.world),
            seed=spec.train.seed,
        )


def steps(trainer: Trainer) -> Generator[Step, None, None]:
    """Train from the trainer's position to the last epoch, yielding after each optimizer step.

    The time between a step's `start` and `end` is whole wall time: waiting for data, forward, backward, synchronisation
    and update. What the caller does between two steps is not in it.
    """
    size = len(trainer.datasets.train)
    epochs = trainer.spec.train.epochs if trainer.until is None else trainer.until
    stream = _loaded(trainer, epochs)
    trainer.ddp.train()
    while trainer.position.epoch < epochs:
        left = steps_left(size, trainer.position.done, trainer.batch)
        if trainer.ags and trainer.refresh_each_epoch and left:
            trainer.ags.start_epoch(left, rest=trainer.position.done > 0)
        for remaining in range(left - 1, -1, -1):
            step = _step(trainer, stream, epoch_ends=remaining == 0)
            trainer.position = trainer.position.advance(trainer.batch)
            if step.epoch_ended:
                trainer.position = trainer.position.next_epoch()
            yield step
        if not left:  # resumed where less than one batch is left of the epoch
            trainer.position = trainer.position.next_epoch()


def _loaded(trainer: Trainer, epochs: int) -> Iterator[Any]:
    """Return this rank's micro-batches from the trainer's position to the end of `epochs`."""
    batches = Batches(
        len(trainer.datasets.train),
        batch=trainer.batch,
        accumulate=trainer.parts,
        rank=trainer.ranks.rank,
        world=trainer.ranks.world,
        seed=trainer.spec.train.seed,
        epochs=epochs,
        start=trainer.position,
    )
    pin = trainer.ranks.device.type == "cuda"
    return iter(train_loader(trainer.datasets.train, batches, workers=trainer.workers, pin=pin))


def inputs(trainer: Trainer) -> Generator[torch.Tensor, None, None]:
    """Yield the inputs that would be trained next, micro-batch by micro-batch, over two epochs at most."""
    for pair in _loaded(trainer, trainer.position.epoch + 2):
        yield to_device(trainer, pair)[0]


def _step(trainer: Trainer, stream: Iterator[Any], *, epoch_ends: bool) -> Step:
    """One optimizer step: accumulate, refresh the factors if it is time, update."""
    start = trainer.clock.mark()
    lr = trainer.lr
    zoo.set_lr(trainer.optimizer, lr, trainer.lr_ratios)
    # Random layers draw from the position, not from what ran before: a resumed run repeats an uninterrupted one.
    seed = stable_seed(trainer.spec.train.seed, trainer.position.samples, trainer.ranks.rank)
    seed_torch(seed, trainer.ranks.device)
    _choose_reduction(trainer)
    loss, loaded = _backward(trainer, stream, start)
    refreshed = _refresh(trainer) and not trainer.spec.ags.resolved().each_step
    _update(trainer)
    _part_or_join(trainer)
    return Step(loss, lr, start, loaded, trainer.clock.mark(), refreshed, epoch_ends)


def _backward(trainer: Trainer, stream: Iterator[Any], start: Mark) -> tuple[torch.Tensor, Mark]:
    """Accumulate the gradient of one local batch; only the last micro-batch is synchronised."""
    parts = trainer.parts
    total, loaded = torch.zeros((), device=trainer.ranks.device), start
    for part in range(parts):
        inputs, targets = trainer.last_batch = to_device(trainer, next(stream))  # the batch before is let go at once
        if part == 0:
            loaded = trainer.clock.mark()
        last = part == parts - 1
        with nullcontext() if last and trainer.synchronise else trainer.ddp.no_sync():
            with autocast(trainer):
                loss = trainer.loss(trainer.ddp(inputs), targets) / parts
            trainer.scaler.scale(loss).backward()
        if part == 0:
            _show_adascale(trainer)
        total += loss.detach()
    if trainer.after_backward:
        trainer.after_backward()
    return total, loaded


def _show_adascale(trainer: Trainer) -> None:
    """Show AdaScale the gradient of the first micro-batch, where no other rank has one to compare with."""
    if trainer.ranks.world > 1 or not isinstance(trainer.optimizer, AdaScale):
        return
    gradients = [p.grad for p in trainer.ddp.parameters() if p.grad is not None]
    unscaled = trainer.parts / trainer.scaler.get_scale()  # the loss was divided by the one and multiplied by the other
    trainer.optimizer.observe(squared_norm(gradients) * unscaled**2, trainer.micro_batch)


def _choose_reduction(trainer: Trainer) -> None:
    """Average gradients over the ranks, as ever, or not, as post-local SGD does after its switch."""
    if trainer.spec.train.method == "polo" and trainer.ranks.world > 1:
        synchronise_gradients(trainer.ddp, wanted=not trainer.local_sgd)


def _part_or_join(trainer: Trainer) -> None:
    """After a step that was each rank's own the replicas differ, until they are averaged."""
    if not trainer.local_sgd:
        return
    trainer.apart = True
    size, done, batch = len(trainer.datasets.train), trainer.position.done, trainer.batch
    if average_due(done, batch=batch, end=done + batch * steps_left(size, done, batch)):
        join_replicas(trainer)


def join_replicas(trainer: Trainer) -> None:
    """Make all replicas the same again, where they differ; every rank takes part."""
    if not trainer.apart:
        return
    average_replicas(trainer.ddp.module, trainer.base)
    if trainer.scaler.is_enabled():  # each rank has found its own overflows
        state = trainer.scaler.state_dict()
        scale, steps = trainer.ranks.maxima([-state["scale"], -state["_growth_tracker"]])
        trainer.scaler.load_state_dict({**state, "scale": -scale, "_growth_tracker": int(-steps)})
    trainer.apart = False


def _refresh(trainer: Trainer) -> bool:
    """Compare the gradient of a small batch with the large one's, when Algorithm 1 asks for it (line 10)."""
    ags = trainer.ags
    if ags is None or not ags.wants_small_batch:
        return False
    assert trainer.last_batch is not None
    inputs, targets = trainer.last_batch

    def small_loss(count: int) -> torch.Tensor:
        with autocast(trainer):
            return trainer.loss(trainer.ddp.module(inputs[:count]), targets[:count])

    ags.small_batch(small_loss, scaler=trainer.scaler)
    return True


def _update(trainer: Trainer) -> None:
    if trainer.after_backward:  # only looked at: the next look is at the same weights
        trainer.optimizer.zero_grad()
        return
    if not trainer.synchronise:  # the base alone: AGS's consensus would synchronise; turning a step is local work
        trainer.scaler.step(trainer.optimizer if isinstance(trainer.optimizer, Ortho) else trainer.base)
        trainer.scaler.update()
        trainer.base.zero_grad()
        return
    if trainer.on_gradient:
        trainer.on_gradient(trainer)
    limit = trainer.spec.train.max_grad_norm
    if limit is not None and trainer.optimizer is trainer.base:  # a wrapper clips by itself, after it took the norm
        trainer.scaler.unscale_(trainer.optimizer)
        nn.utils.clip_grad_norm_(trainer.ddp.parameters(), limit)
    trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()
    trainer.optimizer.zero_grad()


def autocast(trainer: Trainer) -> AbstractContextManager[Any]:
    dtype = _DTYPES.get(trainer.spec.train.precision)
    if dtype is None:
        return nullcontext()
    return torch.autocast(trainer.ranks.device.type, dtype=dtype)


def to_device(trainer: Trainer, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = pair
    device = trainer.ranks.device
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
