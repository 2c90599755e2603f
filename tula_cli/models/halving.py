"""Which settings a self-tuning training (`train.method: auto`) tries, and which of them survive (successive halving).

An arm is one way to go on from a common checkpoint. In rung 1 every arm is trained for `auto.epochs`; the better half
begins again from the checkpoint and is trained twice as long, and so on until one is left (Karnin et al. 2013; Jamieson
and Talwalkar 2016). Each rung begins anew, so that no state of a branch has to be kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.errors import SpecError
from tula_cli.run.records.results import Branch
from tula_cli.spec.ags import Ags, Arm
from tula_cli.spec.job import JobSpec

CONTROL = "lbt"
"""The large batch as it is: it stays in every rung, so that whatever wins has beaten it at the longest branches."""

FAVOURITE = "ortho-"
"""Begins the name of the arm that stays in every rung too, and wins where it is nearly the best: the first of them."""

NEARLY = 0.8
"""Share of what the best arm's loss is below the control's that is enough for the favourite: in short branches high learning
rates look better than they turn out in long trainings, and the favourite's is the lower (short-horizon bias, Wu et al. 2018)."""

MAX_HOLDOUT = 10_000
"""Samples held out at most: more tell the arms apart no better."""

SHARE = 0.02
"""Share of the training's epochs that a branch of the first rung gets, but one epoch at least: eight arms then cost half a
training in all from 50 epochs on, and more than a whole one below 24."""

CHALLENGERS = 3
"""Arms that may meet the control in the last rung: those that got there, and others as long as the control wins."""

MAX_FACTOR = 64
"""The largest learning-rate factor of the default arms."""


@dataclass(frozen=True)
class Turn:
    """A branch to train: arm number `arm` in rung `rung` (from 1)."""

    rung: int
    arm: int


def arms(spec: JobSpec, batch: int) -> tuple[Arm, ...]:
    """Return the arms of a training at a batch: the spec's own, else the default ones; the control first.

    AGS acts mostly as a learning-rate increase of at most sqrt(batch / b_small), so plain increases compete with it, up
    to linear scaling; and, where the optimizer is SGD, steps that are turned as well (method ortho). At or below the
    reference batch nothing is lost: the control is alone.

    Args:
        spec: a job with method auto.
        batch: global batch.
    """
    control = Arm(name=CONTROL)
    own = [arm for arm in spec.auto.arms if arm.name != CONTROL]
    if spec.auto.arms or batch <= spec.train.reference_batch:
        return (control, *own)
    scale = min(batch / spec.train.reference_batch, MAX_FACTOR)
    if spec.optimizer.name == "SGD":
        found = [*_faster("lbt", scale, 1, 3), *_faster("ortho", scale, 2, 3), *_scaled(spec, batch)]
    else:
        found = [*_faster("lbt", scale, 1, 2, 3), *_scaled(spec, batch), _robust_and_faster(spec, scale)]
    # hardly above the reference batch some have the same factor but for what a name shows
    return (control, *{arm.name: arm for arm in found}.values())


def _faster(method: str, scale: float, *thirds: int) -> list[Arm]:
    """Return learning-rate increases by scale^(1/3), scale^(2/3) and linear scaling (2, 4, 8), as many thirds as named."""
    factors = [scale ** (third / 3) for third in thirds]
    return [Arm(name=f"{method}-x{f:.3g}", method=method, lr_factor=f, warmup_epochs=1.0) for f in factors]


def _scaled(spec: JobSpec, batch: int) -> list[Arm]:
    """Return ways of AGS: the job's own; per tensor, ungated, from a smaller small batch; robust."""
    smaller = max(1, min(spec.train.reference_batch, batch // 4) // 4)
    tensor = Ags(granularity="tensor", delta="inf", b_small=smaller)
    return [
        Arm(name="ags", method="ags", ags=_acting(spec, spec.ags)),
        Arm(name=f"ags-tensor-b{smaller}", method="ags", ags=_acting(spec, tensor)),
        Arm(name="robust", method="ags", ags=_acting(spec, Ags(preset="robust"))),
    ]


def _robust_and_faster(spec: JobSpec, scale: float) -> Arm:
    ags = _acting(spec, Ags(preset="robust"))
    return Arm(name=f"robust-x{scale**0.5:.3g}", method="ags", ags=ags, lr_factor=scale**0.5, warmup_epochs=1.0)


def _acting(spec: JobSpec, ags: Ags) -> Ags:
    """Return settings of AGS that act through the job's optimizer: others than SGD may divide a gradient's factor out."""
    if spec.optimizer.name == "SGD":
        return ags
    return ags.model_copy(update={"apply_to": spec.ags.apply_to or "update"})


def tuned(spec: JobSpec, arm: Arm) -> JobSpec:
    """Return the job as an arm trains it; its learning-rate factor is for `lr_factor`.

    What a method does to the learning rate by itself is left out: the arm says it, and all arms begin alike.
    """
    train = spec.train.model_copy(update={"method": arm.method, "lr_scaling": "none"})
    schedule = spec.schedule.model_copy(update={"warmup_epochs": spec.schedule.warmup_epochs or 0.0})
    return spec.model_copy(update={"train": train, "schedule": schedule, "ags": arm.ags or spec.ags})


def specs(spec: JobSpec, batch: int) -> list[JobSpec]:
    """Return the job as each arm trains it at a batch."""
    return [tuned(spec, arm) for arm in arms(spec, batch)]


def dearest(spec: JobSpec) -> JobSpec:
    """Return what to measure a job as: with method auto, as the arm that takes the most memory, and its time."""
    if not spec.train.facts.tunes:
        return spec
    found = specs(spec, 4 * spec.train.reference_batch)
    return max(found, key=lambda job: (job.train.facts.scales, job.ags.resolved().granularity == "element"))


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
    """Return how many arms each rung trains: (8, 4, 2) of eight; none where there is nothing to choose."""
    found = []
    while count > 1:
        found.append(count)
        count = math.ceil(count / 2)
    return tuple(found)


def epochs(spec: JobSpec, rung: int) -> float:
    """Return how long the branches of a rung are trained, in epochs of the training set without the held-out part.

    At most to the end of the training: there are no later epochs in its schedule.
    """
    first = max(1.0, SHARE * spec.train.epochs) if spec.auto.epochs == "auto" else spec.auto.epochs
    return min(first * 2.0 ** (rung - 1), float(spec.train.epochs - spec.auto.after))


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


def branch_steps(spec: JobSpec, rung: int, steps_per_epoch: int) -> int:
    """Return the optimizer steps of one branch, at least one."""
    return max(1, round(epochs(spec, rung) * steps_per_epoch))


@dataclass(frozen=True)
class Plan:
    """What tuning takes beside the training itself."""

    branches: int
    steps: int  # optimizer steps, of all branches and of the common beginning
    holdout: int  # samples evaluated after each branch


def plan(spec: JobSpec, *, batch: int, dataset_size: int) -> Plan:
    """Count branches and their steps, at least; none where the method is not auto.

    Args:
        spec: the job.
        batch: global batch.
        dataset_size: training samples.
    """
    if not spec.train.facts.tunes:
        return Plan(0, 0, 0)
    rungs = sizes(len(arms(spec, batch)))
    holdout = holdout_size(dataset_size, spec.auto.holdout)
    each = (dataset_size - holdout) // batch
    steps = sum(n * branch_steps(spec, rung, each) for rung, n in enumerate(rungs, 1))
    steps += spec.auto.after * each if rungs else 0
    return Plan(sum(rungs), steps, holdout)


def ranked(branches: Sequence[Branch]) -> list[Branch]:
    """Return the branches of one rung, best first, by their loss on the held-out part; diverged ones are last.

    The loss and not the accuracy: on some hundred samples the accuracies of good arms are the same but for chance.
    """
    return sorted(branches, key=lambda branch: (branch.diverged, math.inf if branch.loss is None else branch.loss))


def survivors(branches: Sequence[Branch]) -> list[str]:
    """Return the arms that go into the next rung, best first: the better half without diverged ones, and those that stay.

    The control stays, the favourite unless it has diverged, and the best one whatever it is. Of a rung with nothing beside
    these the winner alone is left.

    Args:
        branches: of one rung, all of them.
    """
    order = [branch.arm for branch in ranked(branches) if not branch.diverged or branch.arm == CONTROL]
    favourite = next((branch.arm for branch in branches if branch.arm.startswith(FAVOURITE)), None)
    staying = [arm for arm in order if arm in (CONTROL, favourite)]
    if len(branches) == 2 or (len(branches) == 3 and len(staying) == 2 and favourite in staying):
        return [winner(branches)]
    half = math.ceil(len(branches) / 2)
    others = [arm for arm in order if arm not in staying]
    others = others[: max(half - len(staying), int(order[0] in others))]
    return [arm for arm in order if arm in staying or arm in others]


def winner(branches: Sequence[Branch]) -> str:
    """Return the arm that has won the longest branches: the best, or the favourite where that gains nearly as much.

    Gains are counted from the control's loss; where that is the best, or none, the best it is.
    """
    best, known = ranked(branches)[0], {branch.arm: branch.loss for branch in branches if not branch.diverged}
    favourite = next((arm for arm in known if arm.startswith(FAVOURITE)), None)
    control, near = known.get(CONTROL), None if favourite is None else known[favourite]
    if best.arm == CONTROL or best.loss is None or control is None or near is None:
        return best.arm
    return favourite if favourite and control - near >= NEARLY * (control - best.loss) else best.arm


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
