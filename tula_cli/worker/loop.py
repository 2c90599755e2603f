"""The one training loop: probes, the training run and a relaunch all run it.

`steps` yields after every optimizer step. A probe takes some steps and leaves; the training run takes them all, and
evaluates and saves when an epoch ends. Nothing else trains.
"""

import math
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
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
from tula_cli.records import ProbeTask, TrainTask
from tula_cli.spec import JobSpec, warmup_epochs
from tula_cli.worker import zoo
from tula_cli.worker.data import Datasets
from tula_cli.worker.ghost import apply_ghost_batch_norm, check_ghost_batch, check_small_batch
from tula_cli.worker.meter import Clock, Mark
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.recompute import apply_activation_checkpointing
from tula_cli.worker.sampling import Batches, Position, eval_loader, steps_left, train_loader
from tula_cli.worker.scaling import settings
from tula_cli.worker.schedule import learning_rate
from tula_cli.worker.seeding import seed_torch, stable_seed

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


def remarks(trainer: Trainer) -> list[str]:
    """Return what the user has asked for and what does nothing in this training."""
    train, optimizer, found = trainer.spec.train, trainer.optimizer, []
    found += _small_batch_remarks(trainer)
    if (warmup := warmup_epochs(trainer.spec)) >= train.epochs:
        found.append(
            f"the learning rate never reaches its full value: its warm-up of {warmup:g} epochs is not shorter than"
            f" train.epochs {train.epochs}; set schedule.warmup_epochs"
        )
    if train.method == "polo" and trainer.ranks.world == 1:
        found.append("post-local SGD on one GPU is plain SGD: there are no replicas to average")
    elif train.method == "polo" and train.epochs <= SWITCH_EPOCHS:
        found.append(
            f"post-local SGD never leaves its {SWITCH_EPOCHS} synchronous epochs: train.epochs is {train.epochs}"
        )
    if isinstance(optimizer, AdaScale) and trainer.batch <= train.reference_batch:
        found.append(f"AdaScale has nothing to gain: the batch of {trainer.batch} is not above train.reference_batch")
    if train.ghost_batch is not None and trainer.micro_batch <= train.ghost_batch:
        found.append(
            f"train.ghost_batch {train.ghost_batch} changes nothing: a GPU takes {trainer.micro_batch} samples at a time"
        )
    return found


def _small_batch_remarks(trainer: Trainer) -> list[str]:
    """Say where AGS is the identity, or takes another small batch than it is given."""
    ags = trainer.ags
    if ags is None:
        return []
    if ags.identity:
        return [ags.identity]
    setup = ags.setup
    if setup.small_batch_size == setup.b_small or not ags.factors.reads_b_small:
        return []
    return [
        f"AGS takes a small batch of {setup.small_batch_size} samples, not of b_small {setup.b_small}: with"
        f" train.accumulate {trainer.spec.train.accumulate} the GPUs hold no more at a time"
    ]


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
        yield _to_device(trainer, pair)[0]


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
        inputs, targets = trainer.last_batch = _to_device(trainer, next(stream))  # the batch before is let go at once
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


def _to_device(trainer: Trainer, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = pair
    device = trainer.ranks.device
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


@dataclass(frozen=True)
class Evaluation:
    """Means over the evaluation set. Accuracies are percentages; nan where the output is not one score a class."""

    loss: float
    top1: float
    top5: float
    samples: int


class Evaluator:
    """Evaluates on every rank's share of the evaluation data; keeps its loader's processes between epochs."""

    def __init__(self, trainer: Trainer) -> None:
        ranks = trainer.ranks
        self.trainer = trainer
        self.loader = eval_loader(
            trainer.datasets.eval,
            size=len(trainer.datasets.eval),
            rank=ranks.rank,
            world=ranks.world,
            batch=trainer.micro_batch,
            workers=trainer.workers,
            pin=ranks.device.type == "cuda",
        )

    @torch.no_grad()
    def run(self, max_batches: int | None = None, *, between: Callable[[], None] = lambda: None) -> Evaluation:
        """Evaluate the whole set, or only some batches of each rank where only the time is wanted.

        Args:
            max_batches: at most so many of each rank.
            between: called after each batch that every rank has, so it may communicate; it may raise.
        """
        trainer = self.trainer
        # Each rank's BatchNorm has seen its own samples since the last forward; all evaluate rank 0's, which is saved.
        for buffer in trainer.ddp.module.buffers():
            dist.broadcast(buffer, src=0)
        trainer.ddp.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=trainer.ranks.device)
        common = self._common_batches()
        for index, pair in enumerate(self.loader):
            if index == max_batches:
                break
            sums += self._score(*_to_device(trainer, pair))
            if index < common:
                between()
        trainer.ddp.train()
        loss, top1, top5, samples = trainer.ranks.sum(sums.tolist())
        if not samples:
            return Evaluation(float("nan"), float("nan"), float("nan"), 0)
        return Evaluation(loss / samples, 100 * top1 / samples, 100 * top5 / samples, int(samples))

    def _common_batches(self) -> int:
        """Return how many batches the last rank has; the first ones may have one more."""
        ranks = self.trainer.ranks
        return math.ceil(
            len(range(ranks.world - 1, len(self.trainer.datasets.eval), ranks.world)) / self.trainer.micro_batch
        )

    def _score(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return (loss, top-1 hits, top-5 hits, samples) summed over a batch."""
        with autocast(self.trainer):
            outputs = self.trainer.ddp.module(inputs)
            loss = self.trainer.loss(outputs, targets)
        count = len(inputs)
        if not _is_classification(outputs, targets):
            hits1 = hits5 = torch.tensor(float("nan"))
        else:
            best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
            match = best == targets[:, None]
            hits1, hits5 = match[:, 0].sum(), match.any(dim=1).sum()
        return torch.stack(
            [value.double().to(inputs.device) for value in (loss * count, hits1, hits5, torch.tensor(count))]
        )


def _is_classification(outputs: Any, targets: torch.Tensor) -> bool:
    """Return whether the output is one score a class, and the target a class."""
    scores = isinstance(outputs, torch.Tensor) and outputs.ndim == 2
    return scores and targets.ndim == 1 and not targets.is_floating_point()
