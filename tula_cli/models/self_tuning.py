"""The settings (arms) that a self-tuning training (`train.method: auto`) tries in short branches, and which of them wins.

An arm is one way to continue from a common checkpoint. Every arm is trained from there for `auto.branch_epochs`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tula_cli.errors import SpecError
from tula_cli.models import ramp
from tula_cli.models.ramp import Ramp
from tula_cli.run.records.results import Branch
from tula_cli.spec.ags import BRANCHING_EPOCH, Ags, Arm
from tula_cli.spec.job import JobSpec
from tula_cli.spec.methods import METHODS
from tula_cli.spec.sections import Optimizer

CONTROL_ARM = "lbt"
"""The large batch without changes, which is always tried: the winner has beaten it."""

FAVOURITE_ARM = "ramp"
"""Wins unless another arm is clearly better."""

LOSS_MARGIN = 0.1
"""Share by which an arm's loss has to be below the favourite's to win: short branches favour gentle learning rates, and
the unchanged large batch, whose fewer steps show their effect only later (short-horizon bias, Wu et al. 2018)."""

DECAY_ARM = "ramp-decay"
"""Prefix of the names of the favourite's variants with another weight decay."""

MIN_ADVANTAGE = 0.01
"""Share by which the loss with another weight decay has to be below that with the job's: both have seen the same
samples in the same order, but the effect of a weight decay shows late."""

HOLDOUT_SHARE = 0.1
"""Share of the training samples on which the arms are compared, up to `MAX_HOLDOUT` samples."""
MAX_HOLDOUT = 10_000
"""Maximum held-out samples: more do not distinguish the arms better."""

TRAINING_SHARE = 0.25
"""Share of the training's samples that the branches use together with their common beginning."""

DECAY_FACTOR = 4.0
"""Factor on the weight decay of the weight-decay arm."""

GENTLER_LR_FACTOR = 0.5
"""Factor on the learning rate of the gentler ramp arm."""


def list_arms_of_training(spec: JobSpec, batch: int) -> tuple[Arm, ...]:
    """Return the arms of a training at a batch, the control first: those of the spec, else the default ones.

    The defaults are the ramp (the favourite), the ramp with half the learning rate, and, if there is a weight decay,
    the ramp with four times the weight decay. At or below the reference batch the control is the only arm, since
    nothing is lost there. A job with another method than auto has no arms.
    """
    if not spec.train.training_method.is_self_tuning:
        return ()
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
    """Return the job with the settings of an arm; its learning-rate factor is applied by `compute_lr_factor`.

    The arm sets the factor in place of a rule of the method (except for a ramp), and all arms start equal.
    """
    scaling = METHODS[arm.method].choose_rule_of_arm(spec.train.lr_scaling)
    train = spec.train.model_copy(update={"method": arm.method, "lr_scaling": scaling, "ramp": "auto"})
    schedule = spec.schedule.model_copy(update={"warmup_epochs": spec.schedule.warmup_epochs or 0.0})
    optimizer = _scale_weight_decay(spec.optimizer, arm.decay_factor)
    changes = {"train": train, "schedule": schedule, "ags": _make_effective_ags(spec), "optimizer": optimizer}
    return spec.model_copy(update=changes)


def _make_effective_ags(spec: JobSpec) -> Ags:
    """Return AGS settings that take effect with the job's optimizer.

    Optimizers other than SGD may divide out a factor on the gradient.
    """
    if spec.optimizer.name == "SGD":
        return spec.ags
    return spec.ags.model_copy(update={"apply_to": spec.ags.apply_to or "update"})


def _scale_weight_decay(optimizer: Optimizer, factor: float) -> Optimizer:
    groups = [
        group if group.weight_decay is None else group.model_copy(update={"weight_decay": factor * group.weight_decay})
        for group in optimizer.groups
    ]
    return optimizer.model_copy(update={"weight_decay": factor * optimizer.weight_decay, "groups": groups})


def list_jobs_of_training(spec: JobSpec, batch: int) -> list[JobSpec]:
    """Return the job itself, or if it tunes itself, the job with the settings of each arm at a batch."""
    return [make_job_of_arm(spec, arm) for arm in list_arms_of_training(spec, batch)] or [spec]


def find_most_expensive_job(spec: JobSpec) -> JobSpec:
    """Return the job to measure: with method auto, the job of the arm that uses the most memory and time."""
    return max(list_jobs_of_training(spec, 4 * spec.train.reference_batch), key=_make_expense_sort_key)


def _make_expense_sort_key(spec: JobSpec) -> tuple[bool, ...]:
    ags = spec.effective_ags
    is_elementwise = ags is not None and ags.granularity == "element"
    return ags is not None, is_elementwise, spec.train.training_method.file != "plain"


def compute_lr_factor(arm: Arm, epoch: float, *, start: float) -> float:
    """Return the learning-rate factor of an arm: from 1 at its start to its final factor after the warm-up.

    Args:
        epoch: fractional epochs done.
        start: epochs done when the arms branched off.
    """
    if epoch - start >= arm.warmup_epochs:
        return arm.lr_factor
    return 1 + (arm.lr_factor - 1) * max(0.0, epoch - start) / arm.warmup_epochs


def compute_cooldown_factor(epoch: float, *, start: float, length: float) -> float:
    """Return the cool-down factor on a branch's learning rate: from 1 at half its length to 0 at its end.

    Arms with a high learning rate have made more progress than their loss shows: the noise disappears when the rate
    falls, as it will in the training.

    Args:
        epoch: fractional epochs done.
        start: epochs done when the branch starts.
        length: epochs of the branch.
    """
    return min(1.0, max(0.0, 2 * (start + length - epoch) / length))


def limit_lr_factor(arm: Arm, limit: float) -> Arm:
    """Return an arm with its learning-rate factor limited to `limit` (linear scaling), for a batch that was reduced."""
    return arm.model_copy(update={"lr_factor": min(arm.lr_factor, max(1.0, limit))})


def compute_branch_epochs(spec: JobSpec, count: int) -> float:
    """Return the length of each branch, in epochs of the training set without the held-out samples.

    By default all branches and their common beginning use `TRAINING_SHARE` of the training. Limited to the end of the
    training, because its schedule has no later epochs.

    Args:
        count: arms.
    """
    epochs = spec.auto.branch_epochs
    if epochs == "auto":
        epochs = max(0.0, TRAINING_SHARE * spec.train.epochs / (1 - HOLDOUT_SHARE) - BRANCHING_EPOCH) / count
    return min(epochs, float(spec.train.epochs - BRANCHING_EPOCH))


def count_holdout_samples(dataset_size: int) -> int:
    """Return the number of training samples held out while the arms are compared."""
    return min(MAX_HOLDOUT, max(1, round(HOLDOUT_SHARE * dataset_size)))


def require_tuning_samples(spec: JobSpec, *, batch: int, dataset_size: int) -> None:
    """Check that the arms of a job have at least one batch to train on; jobs with other methods always pass.

    Raises:
        SpecError: the training set without the held-out samples is smaller than the batch.
    """
    if not list_arms_of_training(spec, batch):
        return
    remaining = dataset_size - count_holdout_samples(dataset_size)
    if remaining < batch:
        raise SpecError(
            f"train.method auto compares settings on {remaining} of {dataset_size} training samples, fewer than the batch of {batch}",
            "train with a smaller batch, or set another train.method",
        )


def count_branch_samples(spec: JobSpec, count: int, size: int) -> int:
    """Return the length of a branch in samples; its last step may end up to half a batch from there.

    Args: as of `compute_branch_epochs`; size: training samples without the held-out ones.
    """
    return max(1, round(compute_branch_epochs(spec, count) * size))


@dataclass(frozen=True)
class TuningPlan:
    """The cost of tuning in addition to the training."""

    branches: int
    steps: int  # samples of tuning, as a number of steps at the training's batch
    holdout: int  # samples evaluated after each branch
    # samples trained in all branches and their common first part; batches are divisible among the ranks
    samples: int = 0


def plan_tuning(spec: JobSpec, *, batch: int, dataset_size: int) -> TuningPlan:
    """Count the branches and their samples; zeros if the method is not auto. The samples are a lower bound."""
    if not (arms := list_arms_of_training(spec, batch)):
        return TuningPlan(0, 0, 0)
    holdout = count_holdout_samples(dataset_size)
    if len(arms) == 1:
        return TuningPlan(0, 0, holdout)
    size = dataset_size - holdout
    stages = Ramp(ramp.plan_stages_of_training(spec, arms[0], batch=batch, size=size))
    beginning = stages.count_remaining_steps(size=size, epochs=BRANCHING_EPOCH)
    samples = sum(batch_in_use * count for batch_in_use, count in beginning.items())
    samples += sum(count_trained_samples(spec, arm, batch=batch, size=size) for arm in arms)
    return TuningPlan(len(arms), math.ceil(samples / batch), holdout, samples)


def count_trained_samples(spec: JobSpec, arm: Arm, *, batch: int, size: int) -> int:
    """Return the samples that a branch trains on, without those dropped at the end of an epoch.

    Args: as of `plan_tuning`; arm: of the branch; size: training samples without the held-out ones.
    """
    start = BRANCHING_EPOCH * size
    length = count_branch_samples(spec, len(list_arms_of_training(spec, batch)), size)
    stages = Ramp(ramp.plan_stages_of_branch(spec, arm, batch=batch, start=start, length=length))
    epoch, samples_done, trained = BRANCHING_EPOCH, 0, 0
    while True:
        steps = next(stages.list_epoch_steps(epoch, samples_done=samples_done, size=size), None)
        if steps is None:
            epoch, samples_done = epoch + 1, 0
            if epoch * size - start >= length:
                return trained
            continue
        samples_done, trained = samples_done + steps[0], trained + steps[0]
        is_epoch_end = next(stages.list_epoch_steps(epoch, samples_done=samples_done, size=size), None) is None
        epoch, samples_done = (epoch + 1, 0) if is_epoch_end else (epoch, samples_done)
        passed = epoch * size + samples_done
        if is_branch_finished(passed - start, length, stages.find_batch(passed)):
            return trained


def is_branch_finished(passed: int, length: int, batch: int) -> bool:
    """Return whether a branch ends here because the next step would move it further from its length."""
    return passed + batch / 2 > length


class HeldOutResult(Protocol):
    """A branch or training with a held-out loss, which is None if it was not finite."""

    @property
    def loss(self) -> float | None: ...
    @property
    def diverged(self) -> bool: ...


M = TypeVar("M", bound=HeldOutResult)


def sort_branches(branches: Sequence[M]) -> list[M]:
    """Sort branches by their loss on the held-out samples, best first; diverged ones are last.

    The loss is used instead of the accuracy because on a few hundred samples the accuracies of good arms differ only by
    chance.
    """
    return sorted(branches, key=lambda branch: (branch.diverged, math.inf if branch.loss is None else branch.loss))


def find_winning_arm(branches: Sequence[Branch]) -> str:
    """Return the arm that won: the favourite unless another is clearly better, else the best."""
    best, losses = sort_branches(branches)[0], {branch.arm: branch.loss for branch in branches if not branch.diverged}
    if best.diverged:
        return CONTROL_ARM
    favourite_loss = losses.get(FAVOURITE_ARM)
    if favourite_loss is None or best.loss is None or best.loss < (1 - LOSS_MARGIN) * favourite_loss:
        return best.arm
    decays = {arm: loss for arm, loss in losses.items() if arm.startswith(DECAY_ARM) and loss is not None}
    challenger = min(decays, key=decays.__getitem__, default=FAVOURITE_ARM)
    is_better = decays.get(challenger, favourite_loss) < (1 - MIN_ADVANTAGE) * favourite_loss
    return challenger if is_better else FAVOURITE_ARM


def find_next_best_arm(branches: Sequence[Branch], broken: Sequence[str]) -> str:
    """Return the arm to continue with after others broke down: the winner of the branches without them."""
    return find_winning_arm([branch for branch in branches if branch.arm == CONTROL_ARM or branch.arm not in broken])


def find_control_branch(branches: Sequence[Branch]) -> Branch | None:
    """Return the control's branch; None if it has not been trained."""
    return next((branch for branch in branches if branch.arm == CONTROL_ARM), None)


def find_next_arm(names: Sequence[str], branches: Sequence[Branch]) -> str | None:
    """Return the next arm to train a branch with; None if every arm has one, or there is only one arm."""
    trained = {branch.arm for branch in branches}
    return next((name for name in names if name not in trained), None) if len(names) > 1 else None
