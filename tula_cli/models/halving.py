"""Which settings a self-tuning training (`train.method: auto`) tries, and which of them survive (successive halving).

An arm is one way to go on from a common checkpoint. In rung 1 every arm is trained for `auto.branch_epochs`; the better half
begins again from the checkpoint and is trained twice as long, and so on until one is left (Karnin et al. 2013; Jamieson
and Talwalkar 2016). Each rung begins anew, so that no state of a branch has to be kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tula_cli.errors import SpecError
from tula_cli.models.ramp import stages
from tula_cli.models.ramp.stages import Ramp
from tula_cli.run.records.results import Branch
from tula_cli.spec.ags import Ags, Arm
from tula_cli.spec.job import JobSpec
from tula_cli.spec.methods import METHODS
from tula_cli.spec.sections import Optimizer

CONTROL_ARM = "lbt"
"""The large batch as it is: it stays in every rung, so that whatever wins has beaten it at the longest branches."""

FAVOURITE_ARM = "ramp"
"""Stays in every rung too, and wins unless another arm is clearly better."""

LOSS_MARGIN = 0.1
"""Share by which an arm's loss has to be below the favourite's to win: short branches favour gentle learning rates, and after
them the large batch, whose few steps are told only later (short-horizon bias, Wu et al. 2018)."""

WITH_DECAY = "ramp-decay"
"""Begins the names of the favourite with another weight decay."""

MIN_ADVANTAGE = 0.01
"""Share by which the loss with another decay has to be below that with the job's own: they have seen the same samples in the
same order, but what a decay is worth shows late."""

HOLDOUT_SHARE = 0.1
"""Of the training samples, on which the arms are compared; at most `MAX_HOLDOUT` of them."""
MAX_HOLDOUT = 10_000
"""Samples held out at most: more tell the arms apart no better."""

TRAINING_SHARE = 0.25
"""Of the training's samples, that the branches take together with their beginning."""

MAX_FINAL_ARMS = 4
"""Arms that one rung decides among: halving so few takes more samples than it saves."""

DECAY_FACTOR = 4.0
"""Factor of the weight decay that is tried."""

GENTLER_LR_FACTOR = 0.5
"""Factor of the ramp's learning rate that is tried."""

MAX_CHALLENGERS = 3
"""Arms that may meet the control in the last rung: those that got there, and others as long as the control wins."""


@dataclass(frozen=True)
class BranchRequest:
    """A branch to train: arm number `arm` in rung `rung` (from 1)."""

    rung: int
    arm: int


def list_arms_of_training(spec: JobSpec, batch: int) -> tuple[Arm, ...]:
    """Return the arms of a training at a batch: the spec's own, else the default ones; the control first.

    The ramp is the favourite; beside it stand the same with half the learning rate, and with four times the weight decay
    where there is one. At or below the reference batch nothing is lost: the control is alone.

    Args:
        spec: a job with method auto.
        batch: global batch.
    """
    control = Arm(name=CONTROL_ARM)
    given_arms = [Arm.model_validate(arm.model_dump()) for arm in spec.auto.arms if arm.name != CONTROL_ARM]
    if spec.auto.arms or batch <= spec.train.reference_batch:
        return (control, *given_arms)
    ramp = Arm(name=FAVOURITE_ARM, method="ramp")
    gentler = Arm(name=f"ramp-x{GENTLER_LR_FACTOR:g}", method="ramp", lr_factor=GENTLER_LR_FACTOR, warmup_epochs=1.0)
    arms = [control, ramp, gentler]
    if spec.optimizer.weight_decay or any(group.weight_decay for group in spec.optimizer.groups):
        arms.append(Arm(name=f"ramp-decay{DECAY_FACTOR:g}", method="ramp", decay_factor=DECAY_FACTOR))
    return tuple(arms)


def make_job_of_arm(spec: JobSpec, arm: Arm) -> JobSpec:
    """Return the job as an arm trains it; its learning-rate factor is for `compute_lr_factor`, its stages are `ramp.of_arms`'.

    What a method does to the learning rate by itself is left out, but of a ramp, whose learning rate is that of the batch in
    use: the arm says it, and all arms begin alike.
    """
    scaling = "auto" if METHODS[arm.method].ramps else "none"
    train = spec.train.model_copy(update={"method": arm.method, "lr_scaling": scaling, "ramp": "auto"})
    schedule = spec.schedule.model_copy(update={"warmup_epochs": spec.schedule.warmup_epochs or 0.0})
    optimizer = _with_decay(spec.optimizer, arm.decay_factor)
    changes = {"train": train, "schedule": schedule, "ags": _make_acting_ags(spec), "optimizer": optimizer}
    return spec.model_copy(update=changes)


def _make_acting_ags(spec: JobSpec) -> Ags:
    """Return the settings of AGS so that they act through the job's optimizer: others than SGD may divide a gradient's factor out."""
    if spec.optimizer.name == "SGD":
        return spec.ags
    return spec.ags.model_copy(update={"apply_to": spec.ags.apply_to or "update"})


def _with_decay(optimizer: Optimizer, factor: float) -> Optimizer:
    groups = [
        group if group.weight_decay is None else group.model_copy(update={"weight_decay": factor * group.weight_decay})
        for group in optimizer.groups
    ]
    return optimizer.model_copy(update={"weight_decay": factor * optimizer.weight_decay, "groups": groups})


def make_jobs_of_arms(spec: JobSpec, batch: int) -> list[JobSpec]:
    """Return the job as each arm trains it at a batch."""
    return [make_job_of_arm(spec, arm) for arm in list_arms_of_training(spec, batch)]


def find_most_expensive_job(spec: JobSpec) -> JobSpec:
    """Return what to measure a job as: with method auto, as the arm that takes the most memory, and its time."""
    if not spec.train.facts.tunes:
        return spec
    jobs = make_jobs_of_arms(spec, 4 * spec.train.reference_batch)
    return max(jobs, key=_rank_by_expense)


def _rank_by_expense(spec: JobSpec) -> tuple[bool, ...]:
    facts = spec.train.facts
    return facts.scales, facts.scales and spec.ags.resolved().granularity == "element", facts.file != "plain"


def compute_lr_factor(arm: Arm, epoch: float, *, start: float) -> float:
    """Return what an arm multiplies the learning rate by: from 1 at its start to its factor after the warm-up.

    Args:
        arm: the arm.
        epoch: fractional epochs done.
        start: those at which the arms part.
    """
    if epoch - start >= arm.warmup_epochs:
        return arm.lr_factor
    return 1 + (arm.lr_factor - 1) * max(0.0, epoch - start) / arm.warmup_epochs


def compute_cooldown_factor(epoch: float, *, start: float, length: float) -> float:
    """Return what a branch multiplies its learning rate by: from 1 at its half to 0 at its end.

    Arms with a high learning rate are further than they seem while it is high: their noise goes when it falls, as it
    will in the training.

    Args:
        epoch: fractional epochs done.
        start: those at which the branch begins.
        length: its epochs.
    """
    return min(1.0, max(0.0, 2 * (start + length - epoch) / length))


def with_limited_lr_factor(arm: Arm, limit: float) -> Arm:
    """Return an arm with a learning-rate factor of at most `limit` (linear scaling), for a batch that became smaller."""
    return arm.model_copy(update={"lr_factor": min(arm.lr_factor, max(1.0, limit))})


def list_rung_sizes(count: int) -> tuple[int, ...]:
    """Return how many arms each rung trains: (8, 4) of eight, (4,) of four; none where there is nothing to choose."""
    sizes = []
    while count > 1:
        sizes.append(count)
        count = math.ceil(count / 2) if count > MAX_FINAL_ARMS else 1
    return tuple(sizes)


def compute_branch_epochs(spec: JobSpec, rung: int, count: int) -> float:
    """Return how long the branches of a rung are trained, in epochs of the training set without the held-out part.

    At most to the end of the training: there are no later epochs in its schedule.

    Args:
        spec: a job with method auto.
        rung: from 1.
        count: arms of the first rung.
    """
    first_epochs = _compute_first_epochs(spec, count) if spec.auto.branch_epochs == "auto" else spec.auto.branch_epochs
    return min(first_epochs * 2.0 ** (rung - 1), float(spec.train.epochs - spec.auto.after))


def _compute_first_epochs(spec: JobSpec, count: int) -> float:
    """Return the epochs of a branch in the first rung with which all take their share of the training."""
    epochs_in_all = sum(number * 2.0**rung for rung, number in enumerate(list_rung_sizes(count)))
    return max(0.0, TRAINING_SHARE * spec.train.epochs / (1 - HOLDOUT_SHARE) - spec.auto.after) / max(
        1.0, epochs_in_all
    )


def count_holdout_samples(dataset_size: int) -> int:
    """Return how many training samples are held out while the arms are compared."""
    return min(MAX_HOLDOUT, max(1, round(HOLDOUT_SHARE * dataset_size)))


def require_tuning_samples(spec: JobSpec, *, batch: int, dataset_size: int) -> None:
    """Check that the arms of a job have a batch to train on; jobs of other methods have.

    Raises:
        SpecError: the training set without the held-out part is smaller than the batch.
    """
    if not spec.train.facts.tunes:
        return
    remaining = dataset_size - count_holdout_samples(dataset_size)
    if remaining < batch:
        raise SpecError(
            f"train.method auto compares settings on {remaining} of {dataset_size} training samples, fewer than the batch of {batch}",
            "train with a smaller batch, or another method",
        )


def count_branch_samples(spec: JobSpec, rung: int, count: int, size: int) -> int:
    """Return the samples that a branch passes, of `size` an epoch: the last step may end half a batch from it.

    Args: as of `epochs`; size: training samples without the held-out part.
    """
    return max(1, round(compute_branch_epochs(spec, rung, count) * size))


@dataclass(frozen=True)
class TuningPlan:
    """The cost of tuning in addition to the training."""

    branches: int
    steps: int  # steps of the training's batch that hold as many samples
    holdout: int  # samples evaluated after each branch
    samples: int = 0  # trained in all branches and in their common beginning, where batches divide among the ranks


def plan_tuning(spec: JobSpec, *, batch: int, dataset_size: int) -> TuningPlan:
    """Count branches and their samples, at least; none where the method is not auto.

    Args:
        spec: the job.
        batch: global batch.
        dataset_size: training samples.
    """
    if not spec.train.facts.tunes:
        return TuningPlan(0, 0, 0)
    arms = list_arms_of_training(spec, batch)
    rungs, holdout = list_rung_sizes(len(arms)), count_holdout_samples(dataset_size)
    if not rungs:
        return TuningPlan(0, 0, holdout)
    size, after = dataset_size - holdout, spec.auto.after
    beginning = Ramp(stages.plan_stages_of_training(spec, arms[0], batch=batch, size=size)).remaining_steps(
        size=size, epochs=after
    )
    samples = _count_samples(beginning)
    for rung, number in enumerate(rungs, 1):
        # Of a further rung nobody knows the arms yet; all of a rung take nearly as many.
        samples += sum(count_trained_samples(spec, arm, batch=batch, rung=rung, size=size) for arm in arms[:number])
    return TuningPlan(sum(rungs), math.ceil(samples / batch), holdout, samples)


def count_trained_samples(spec: JobSpec, arm: Arm, *, batch: int, rung: int, size: int) -> int:
    """Return the samples that a branch is trained on: what epochs' ends leave out does not count.

    Args: as of `plan`; arm: of the branch; size: training samples without the held-out part.
    """
    start = spec.auto.after * size
    length = count_branch_samples(spec, rung, len(list_arms_of_training(spec, batch)), size)
    ramp = Ramp(stages.plan_stages_of_branch(spec, arm, batch=batch, start=start, length=length))
    epoch, samples_done, trained = spec.auto.after, 0, 0
    while True:
        steps = next(ramp.steps_of_epoch(epoch, samples_done=samples_done, size=size), None)
        if steps is None:
            epoch, samples_done = epoch + 1, 0
            if epoch * size - start >= length:
                return trained
            continue
        samples_done, trained = samples_done + steps[0], trained + steps[0]
        is_epoch_end = next(ramp.steps_of_epoch(epoch, samples_done=samples_done, size=size), None) is None
        epoch, samples_done = (epoch + 1, 0) if is_epoch_end else (epoch, samples_done)
        if has_ended(epoch * size + samples_done - start, length, ramp.batch_at(epoch * size + samples_done)):
            return trained


def has_ended(passed: int, length: int, batch: int) -> bool:
    """Return whether a branch ends here: the next step would take it further from its length than it is."""
    return passed + batch / 2 > length


def _count_samples(steps: Mapping[int, int]) -> int:
    return sum(batch * count for batch, count in steps.items())


class Measured(Protocol):
    """A training whose loss was evaluated; None if it was not finite."""

    @property
    def loss(self) -> float | None: ...
    @property
    def diverged(self) -> bool: ...


M = TypeVar("M", bound=Measured)


def rank_branches(branches: Sequence[M]) -> list[M]:
    """Return the branches of one rung, best first, by their loss on the held-out part; diverged ones are last.

    The loss and not the accuracy: on some hundred samples the accuracies of good arms are the same but for chance.
    """
    return sorted(branches, key=lambda branch: (branch.diverged, math.inf if branch.loss is None else branch.loss))


def select_survivors(branches: Sequence[Branch]) -> list[str]:
    """Return the arms that go into the next rung, best first: the better half without diverged ones, and those that stay.

    The control stays, the favourite unless it has diverged, and the best one whatever it is. Of a rung of few the winner alone
    is left.

    Args:
        branches: of one rung, all of them.
    """
    order = [branch.arm for branch in rank_branches(branches) if not branch.diverged or branch.arm == CONTROL_ARM]
    staying = [arm for arm in order if arm in (CONTROL_ARM, FAVOURITE_ARM)]
    if len(branches) <= MAX_FINAL_ARMS:
        return [find_winner(branches)]
    half = math.ceil(len(branches) / 2)
    other_arms = [arm for arm in order if arm not in staying]
    other_arms = other_arms[: max(half - len(staying), int(order[0] in other_arms))]
    return [arm for arm in order if arm in staying or arm in other_arms]


def find_winner(branches: Sequence[Branch]) -> str:
    """Return the arm that has won the longest branches: the favourite, unless one is clearly better; else the best."""
    best, losses = rank_branches(branches)[0], {branch.arm: branch.loss for branch in branches if not branch.diverged}
    if best.diverged:
        return CONTROL_ARM
    favourite_loss = losses.get(FAVOURITE_ARM)
    if favourite_loss is None or best.loss is None or best.loss < (1 - LOSS_MARGIN) * favourite_loss:
        return best.arm
    decays = {arm: loss for arm, loss in losses.items() if arm.startswith(WITH_DECAY) and loss is not None}
    challenger = min(decays, key=decays.__getitem__, default=FAVOURITE_ARM)
    return (
        challenger if decays.get(challenger, favourite_loss) < (1 - MIN_ADVANTAGE) * favourite_loss else FAVOURITE_ARM
    )


def find_next_best_arm(branches: Sequence[Branch], broken: Sequence[str]) -> str:
    """Return the arm to go on with where others broke down: the winner of the longest branches without them."""
    longest = max(branch.rung for branch in branches)
    return find_winner([b for b in branches if b.rung == longest and (b.arm == CONTROL_ARM or b.arm not in broken)])


def find_longest_control_branch(branches: Sequence[Branch]) -> Branch | None:
    """Return the control's longest branch."""
    control_branches = [branch for branch in branches if branch.arm == CONTROL_ARM]
    return max(control_branches, key=lambda branch: branch.rung, default=None)


def find_next_branch_or_winner(
    names: Sequence[str], branches: Sequence[Branch]
) -> tuple[BranchRequest | None, str | None]:
    """Return the next branch to train, or the winner; one of the two is None.

    Where the control beats the arms that came as far as it did, others get a chance against it, at that length: what is
    fastest in short branches may be what breaks down in longer ones.

    Args:
        names: of all arms.
        branches: those trained so far.
    """
    remaining_arms, rung = _list_surviving_arms(names, branches)
    if len(remaining_arms) > 1:
        trained_arms = [branch.arm for branch in branches if branch.rung == rung]
        return BranchRequest(rung, next(names.index(name) for name in remaining_arms if name not in trained_arms)), None
    last_rung = [branch for branch in branches if branch.rung == rung - 1]
    leading_arm = find_winner(last_rung) if last_rung else remaining_arms[0]
    if leading_arm == CONTROL_ARM and (challenger := _find_challenger(branches, rung - 1)) is not None:
        return BranchRequest(rung - 1, names.index(challenger)), None
    return None, leading_arm


def _find_challenger(branches: Sequence[Branch], last_rung: int) -> str | None:
    """Return the arm that may meet the control in the last rung: the best of those that were better than it before."""
    met = {branch.arm for branch in branches if branch.rung == last_rung}
    if len(met) > MAX_CHALLENGERS:
        return None
    for rung in range(last_rung - 1, 0, -1):
        order = [branch.arm for branch in rank_branches([b for b in branches if b.rung == rung])]
        better = order[: order.index(CONTROL_ARM)] if CONTROL_ARM in order else []
        if waiting := [arm for arm in better if arm not in met]:
            return waiting[0]
    return None


def list_arms_of_rung(names: Sequence[str], branches: Sequence[Branch]) -> list[str]:
    """Return the arms of the rung under way, in the order in which they are trained."""
    return _list_surviving_arms(names, branches)[0]


def _list_surviving_arms(names: Sequence[str], branches: Sequence[Branch]) -> tuple[list[str], int]:
    """Return the arms of the first rung that is not complete, and its number."""
    remaining_arms, rung = list(names), 1
    while len(remaining_arms) > 1:
        trained = {branch.arm: branch for branch in branches if branch.rung == rung}
        if not all(name in trained for name in remaining_arms):
            break
        surviving = select_survivors([trained[name] for name in remaining_arms])
        remaining_arms, rung = [name for name in names if name in surviving], rung + 1
    return remaining_arms, rung
