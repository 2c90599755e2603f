"""Which settings a self-tuning training (`train.method: auto`) tries, and which of them survive (successive halving).

An arm is one way to go on from a common checkpoint. In rung 1 every arm is trained for `auto.epochs`; the better half
begins again from the checkpoint and is trained twice as long, and so on until one is left (Karnin et al. 2013; Jamieson
and Talwalkar 2016). Each rung begins anew, so that no state of a branch has to be kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tula_cli.errors import SpecError
from tula_cli.models.ramp import of_arms
from tula_cli.models.ramp.stages import Ramp
from tula_cli.run.records.results import Branch
from tula_cli.spec.ags import Ags, Arm
from tula_cli.spec.job import JobSpec, with_beta1
from tula_cli.spec.methods import METHODS
from tula_cli.spec.sections import Optimizer, Schedule

CONTROL = "lbt"
"""The large batch as it is: it stays in every rung, so that whatever wins has beaten it at the longest branches."""

FAVOURITE = "ramp"
"""Stays in every rung too, and wins unless another arm is clearly better."""

MARGIN = 0.1
"""Share by which an arm's loss has to be below the favourite's to win: short branches favour gentle learning rates, and after
them the large batch, whose few steps are told only later (short-horizon bias, Wu et al. 2018)."""

WITH_DECAY = "ramp-decay"
"""Begins the names of the favourite with another weight decay."""

CLEARLY = 0.01
"""Share by which the loss with another decay has to be below that with the job's own: they have seen the same samples in the
same order, but what a decay is worth shows late."""

MAX_HOLDOUT = 10_000
"""Samples held out at most: more tell the arms apart no better."""

SHARE = 0.25
"""Of the training's samples, that the branches take together with their beginning."""

AT_ONCE = 4
"""Arms that one rung decides among: halving so few takes more samples than it saves."""

DECAY = 4.0
"""Factor of the weight decay that is tried."""

GENTLER = 0.5
"""Factor of the ramp's learning rate that is tried."""

CHALLENGERS = 3
"""Arms that may meet the control in the last rung: those that got there, and others as long as the control wins."""


@dataclass(frozen=True)
class Turn:
    """A branch to train: arm number `arm` in rung `rung` (from 1)."""

    rung: int
    arm: int


def arms(spec: JobSpec, batch: int) -> tuple[Arm, ...]:
    """Return the arms of a training at a batch: the spec's own, else the default ones; the control first.

    The ramp is the favourite; beside it stand the same with half the learning rate, and with four times the weight decay
    where there is one. At or below the reference batch nothing is lost: the control is alone.

    Args:
        spec: a job with method auto.
        batch: global batch.
    """
    control = Arm(name=CONTROL)
    own = [arm for arm in spec.auto.arms if arm.name != CONTROL]
    if spec.auto.arms or batch <= spec.train.reference_batch:
        return (control, *own)
    ramp = Arm(name=FAVOURITE, method="ramp")
    gentler = Arm(name=f"ramp-x{GENTLER:g}", method="ramp", lr_factor=GENTLER, warmup_epochs=1.0)
    found = [control, ramp, gentler]
    if spec.optimizer.weight_decay or any(group.weight_decay for group in spec.optimizer.groups):
        found.append(Arm(name=f"ramp-decay{DECAY:g}", method="ramp", decay_factor=DECAY))
    return tuple(found)


def tuned(spec: JobSpec, arm: Arm) -> JobSpec:
    """Return the job as an arm trains it; its learning-rate factor is for `lr_factor`, its stages are `ramp.of_arms`'.

    What a method does to the learning rate by itself is left out, but of a ramp, whose learning rate is that of the batch in
    use: the arm says it, and all arms begin alike.
    """
    scaling = "auto" if METHODS[arm.method].ramps else "none"
    train = spec.train.model_copy(update={"method": arm.method, "lr_scaling": scaling, "ramp": "auto"})
    schedule = spec.schedule.model_copy(update={"warmup_epochs": spec.schedule.warmup_epochs or 0.0})
    if arm.decay_from is not None:
        schedule = Schedule(kind="linear", decay_from=arm.decay_from, warmup_epochs=schedule.warmup_epochs)
    changes = {"train": train, "schedule": schedule, "ags": _acting(spec, arm.ags or spec.ags)}
    optimizer = _decayed(spec.optimizer, arm.decay_factor)
    if arm.beta1 is not None:
        optimizer = with_beta1(optimizer, arm.beta1)
    return spec.model_copy(update={**changes, "optimizer": optimizer})


def _acting(spec: JobSpec, ags: Ags) -> Ags:
    """Return settings of AGS that act through the job's optimizer: others than SGD may divide a gradient's factor out."""
    if spec.optimizer.name == "SGD":
        return ags
    return ags.model_copy(update={"apply_to": ags.apply_to or spec.ags.apply_to or "update"})


def _decayed(optimizer: Optimizer, factor: float) -> Optimizer:
    groups = [
        group if group.weight_decay is None else group.model_copy(update={"weight_decay": factor * group.weight_decay})
        for group in optimizer.groups
    ]
    return optimizer.model_copy(update={"weight_decay": factor * optimizer.weight_decay, "groups": groups})


def specs(spec: JobSpec, batch: int) -> list[JobSpec]:
    """Return the job as each arm trains it at a batch."""
    return [tuned(spec, arm) for arm in arms(spec, batch)]


def dearest(spec: JobSpec) -> JobSpec:
    """Return what to measure a job as: with method auto, as the arm that takes the most memory, and its time."""
    if not spec.train.facts.tunes:
        return spec
    found = specs(spec, 4 * spec.train.reference_batch)
    return max(found, key=_dearness)


def _dearness(spec: JobSpec) -> tuple[bool, ...]:
    facts = spec.train.facts
    return facts.scales, facts.scales and spec.ags.resolved().granularity == "element", facts.file != "plain"


def lr_factor(arm: Arm, epoch: float, *, start: float) -> float:
    """Return what an arm multiplies the learning rate by: from 1 at its start to its factor after the warm-up.

    Args:
        arm: the arm.
        epoch: fractional epochs done.
        start: those at which the arms part.
    """
    if epoch - start >= arm.warmup_epochs:
        return arm.lr_factor
    return 1 + (arm.lr_factor - 1) * max(0.0, epoch - start) / arm.warmup_epochs


def cooling(epoch: float, *, start: float, length: float) -> float:
    """Return what a branch multiplies its learning rate by: from 1 at its half to 0 at its end.

    Arms with a high learning rate are further than they seem while it is high: their noise goes when it falls, as it
    will in the training.

    Args:
        epoch: fractional epochs done.
        start: those at which the branch begins.
        length: its epochs.
    """
    return min(1.0, max(0.0, 2 * (start + length - epoch) / length))


def within(arm: Arm, limit: float) -> Arm:
    """Return an arm with a learning-rate factor of at most `limit` (linear scaling), for a batch that became smaller."""
    return arm.model_copy(update={"lr_factor": min(arm.lr_factor, max(1.0, limit))})


def sizes(count: int) -> tuple[int, ...]:
    """Return how many arms each rung trains: (8, 4) of eight, (4,) of four; none where there is nothing to choose."""
    found = []
    while count > 1:
        found.append(count)
        count = math.ceil(count / 2) if count > AT_ONCE else 1
    return tuple(found)


def epochs(spec: JobSpec, rung: int, count: int) -> float:
    """Return how long the branches of a rung are trained, in epochs of the training set without the held-out part.

    At most to the end of the training: there are no later epochs in its schedule.

    Args:
        spec: a job with method auto.
        rung: from 1.
        count: arms of the first rung.
    """
    first = _first_epochs(spec, count) if spec.auto.epochs == "auto" else spec.auto.epochs
    return min(first * 2.0 ** (rung - 1), float(spec.train.epochs - spec.auto.after))


def _first_epochs(spec: JobSpec, count: int) -> float:
    """Return the epochs of a branch in the first rung with which all take their share of the training."""
    each = sum(number * 2.0**rung for rung, number in enumerate(sizes(count)))
    return max(0.0, SHARE * spec.train.epochs / (1 - spec.auto.holdout) - spec.auto.after) / max(1.0, each)


def holdout_size(dataset_size: int, share: float) -> int:
    """Return how many training samples are held out while the arms are compared."""
    return min(MAX_HOLDOUT, max(1, round(share * dataset_size)))


def check_size(spec: JobSpec, *, batch: int, dataset_size: int) -> None:
    """Check that the arms of a job have a batch to train on; jobs of other methods have.

    Raises:
        SpecError: the training set without the held-out part is smaller than the batch.
    """
    if not spec.train.facts.tunes:
        return
    left = dataset_size - holdout_size(dataset_size, spec.auto.holdout)
    if left < batch:
        raise SpecError(
            f"auto.holdout {spec.auto.holdout:g}: {left} of {dataset_size} training samples are left to compare settings"
            f" on, fewer than the batch of {batch}",
            "hold out less, or train with a smaller batch",
        )


def branch_samples(spec: JobSpec, rung: int, count: int, size: int) -> int:
    """Return the samples that a branch passes, of `size` an epoch: the last step may end half a batch from it.

    Args: as of `epochs`; size: training samples without the held-out part.
    """
    return max(1, round(epochs(spec, rung, count) * size))


@dataclass(frozen=True)
class Plan:
    """What tuning takes beside the training itself."""

    branches: int
    steps: int  # steps of the training's batch that hold as many samples
    holdout: int  # samples evaluated after each branch
    samples: int = 0  # trained in all branches and in their common beginning, where batches divide among the ranks


def plan(spec: JobSpec, *, batch: int, dataset_size: int) -> Plan:
    """Count branches and their samples, at least; none where the method is not auto.

    Args:
        spec: the job.
        batch: global batch.
        dataset_size: training samples.
    """
    if not spec.train.facts.tunes:
        return Plan(0, 0, 0)
    found = arms(spec, batch)
    rungs, holdout = sizes(len(found)), holdout_size(dataset_size, spec.auto.holdout)
    if not rungs:
        return Plan(0, 0, holdout)
    size, after = dataset_size - holdout, spec.auto.after
    beginning = Ramp(of_arms.of_training(spec, found[0], batch=batch, size=size)).steps(size=size, epochs=after)
    samples = _counted(beginning)
    for rung, number in enumerate(rungs, 1):
        # Of a further rung nobody knows the arms yet; all of a rung take nearly as many.
        samples += sum(branch_trained(spec, arm, batch=batch, rung=rung, size=size) for arm in found[:number])
    return Plan(sum(rungs), math.ceil(samples / batch), holdout, samples)


def branch_trained(spec: JobSpec, arm: Arm, *, batch: int, rung: int, size: int) -> int:
    """Return the samples that a branch is trained on: what epochs' ends leave out does not count.

    Args: as of `plan`; arm: of the branch; size: training samples without the held-out part.
    """
    start = spec.auto.after * size
    length = branch_samples(spec, rung, len(arms(spec, batch)), size)
    ramp = Ramp(of_arms.of_branch(spec, arm, batch=batch, start=start, length=length))
    epoch, done, trained = spec.auto.after, 0, 0
    while True:
        steps = next(ramp.of_epoch(epoch, done=done, size=size), None)
        if steps is None:
            epoch, done = epoch + 1, 0
            if epoch * size - start >= length:
                return trained
            continue
        done, trained = done + steps[0], trained + steps[0]
        ended = next(ramp.of_epoch(epoch, done=done, size=size), None) is None
        epoch, done = (epoch + 1, 0) if ended else (epoch, done)
        if has_ended(epoch * size + done - start, length, ramp.batch_at(epoch * size + done)):
            return trained


def has_ended(passed: int, length: int, batch: int) -> bool:
    """Return whether a branch ends here: the next step would take it further from its length than it is."""
    return passed + batch / 2 > length


def _counted(steps: Mapping[int, int]) -> int:
    return sum(batch * count for batch, count in steps.items())


class Measured(Protocol):
    """A training whose loss was evaluated; None if it was not finite."""

    @property
    def loss(self) -> float | None: ...
    @property
    def diverged(self) -> bool: ...


M = TypeVar("M", bound=Measured)


def ranked(branches: Sequence[M]) -> list[M]:
    """Return the branches of one rung, best first, by their loss on the held-out part; diverged ones are last.

    The loss and not the accuracy: on some hundred samples the accuracies of good arms are the same but for chance.
    """
    return sorted(branches, key=lambda branch: (branch.diverged, math.inf if branch.loss is None else branch.loss))


def survivors(branches: Sequence[Branch]) -> list[str]:
    """Return the arms that go into the next rung, best first: the better half without diverged ones, and those that stay.

    The control stays, the favourite unless it has diverged, and the best one whatever it is. Of a rung of few the winner alone
    is left.

    Args:
        branches: of one rung, all of them.
    """
    order = [branch.arm for branch in ranked(branches) if not branch.diverged or branch.arm == CONTROL]
    staying = [arm for arm in order if arm in (CONTROL, FAVOURITE)]
    if len(branches) <= AT_ONCE:
        return [winner(branches)]
    half = math.ceil(len(branches) / 2)
    others = [arm for arm in order if arm not in staying]
    others = others[: max(half - len(staying), int(order[0] in others))]
    return [arm for arm in order if arm in staying or arm in others]


def winner(branches: Sequence[Branch]) -> str:
    """Return the arm that has won the longest branches: the favourite, unless one is clearly better; else the best."""
    best, known = ranked(branches)[0], {branch.arm: branch.loss for branch in branches if not branch.diverged}
    if best.diverged:
        return CONTROL
    own = known.get(FAVOURITE)
    if own is None or best.loss is None or best.loss < (1 - MARGIN) * own:
        return best.arm
    decays = {arm: loss for arm, loss in known.items() if arm.startswith(WITH_DECAY) and loss is not None}
    other = min(decays, key=decays.__getitem__, default=FAVOURITE)
    return other if decays.get(other, own) < (1 - CLEARLY) * own else FAVOURITE


def next_best(branches: Sequence[Branch], broken: Sequence[str]) -> str:
    """Return the arm to go on with where others broke down: the winner of the longest branches without them."""
    longest = max(branch.rung for branch in branches)
    return winner([b for b in branches if b.rung == longest and (b.arm == CONTROL or b.arm not in broken)])


def control_at_the_end(branches: Sequence[Branch]) -> Branch | None:
    """Return the control's longest branch."""
    own = [branch for branch in branches if branch.arm == CONTROL]
    return max(own, key=lambda branch: branch.rung, default=None)


def standing(names: Sequence[str], branches: Sequence[Branch]) -> tuple[Turn | None, str | None]:
    """Return the next branch to train, or the winner; one of the two is None.

    Where the control beats the arms that came as far as it did, others get a chance against it, at that length: what is
    fastest in short branches may be what breaks down in longer ones.

    Args:
        names: of all arms.
        branches: those trained so far.
    """
    left, rung = _survived(names, branches)
    if len(left) > 1:
        done = [branch.arm for branch in branches if branch.rung == rung]
        return Turn(rung, next(names.index(name) for name in left if name not in done)), None
    last = [branch for branch in branches if branch.rung == rung - 1]
    found = winner(last) if last else left[0]
    if found == CONTROL and (other := _challenger(branches, rung - 1)) is not None:
        return Turn(rung - 1, names.index(other)), None
    return None, found


def _challenger(branches: Sequence[Branch], last: int) -> str | None:
    """Return the arm that may meet the control in the last rung: the best of those that were better than it before."""
    met = {branch.arm for branch in branches if branch.rung == last}
    if len(met) > CHALLENGERS:
        return None
    for rung in range(last - 1, 0, -1):
        order = [branch.arm for branch in ranked([b for b in branches if b.rung == rung])]
        better = order[: order.index(CONTROL)] if CONTROL in order else []
        if waiting := [arm for arm in better if arm not in met]:
            return waiting[0]
    return None


def alive(names: Sequence[str], branches: Sequence[Branch]) -> list[str]:
    """Return the arms of the rung under way, in the order in which they are trained."""
    return _survived(names, branches)[0]


def _survived(names: Sequence[str], branches: Sequence[Branch]) -> tuple[list[str], int]:
    """Return the arms of the first rung that is not complete, and its number."""
    left, rung = list(names), 1
    while len(left) > 1:
        done = {branch.arm: branch for branch in branches if branch.rung == rung}
        if not all(name in done for name in left):
            break
        kept = survivors([done[name] for name in left])
        left, rung = [name for name in names if name in kept], rung + 1
    return left, rung
