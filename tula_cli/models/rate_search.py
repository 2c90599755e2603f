"""The search for the learning rate of a large batch by short branches from one checkpoint (`tula compare --learning-rates`).

The checkpoint is trained on a few per cent of a training's samples at the reference batch. From it, each branch trains
the large batch with another rule of `train.lr_scaling`, and is evaluated on held-out training samples (a script: by the
loss of its last steps, as only the script could evaluate it). Short branches
favour low learning rates (Wu et al. 2018), so the highest rate wins whose loss is close to the best. The critical batch
is the gradient noise scale at the checkpoint (McCandlish et al. 2018).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.errors import SpecError
from tula_cli.models import self_tuning
from tula_cli.run.records.results import RateBranch
from tula_cli.spec.job import JobSpec, compute_lr_scale
from tula_cli.spec.methods import SEARCHABLE_METHODS, LrRule
from tula_cli.spec.sections import NOISE_BATCHES

LR_SCALING_RULES: tuple[LrRule, ...] = ("none", "sqrt", "linear")
"""Values of `train.lr_scaling`, by their learning rate: 1, sqrt(k) and k times `optimizer.lr` at k times the batch."""

START_SHARE = 0.02
"""Share of a training's samples after which the branches start."""

BRANCH_SHARE = 0.02
"""Largest share of a training's samples in a branch."""

BRANCHES_SHARE = 0.07
"""Largest share of a training's samples in all branches together, unless they would be shorter than `MIN_STEPS`."""

MIN_STEPS = 5
"""Minimum optimizer steps of a branch."""

MAX_EARLY_CHECKPOINT_SHARE = 0.05
"""Share of the samples before the branches by which the checkpoint of a script may be earlier."""

NOISE_SHARE, MIN_NOISE_BATCHES = 0.01, 8
"""Largest share of a training's samples from which the gradient noise is measured; and its minimum micro-batches per rank."""

LOSS_MARGIN, MAX_LOSS_MARGIN, PROGRESS_MARGIN = 0.25, 0.05, 0.5
"""How far the loss of a branch may exceed the lowest one for its higher learning rate to be chosen: at most this share of it,
this value, and this share of what the best branch has gained.

A cross-entropy 0.05 higher is a likelihood 5 % lower: a quarter of the large loss of a language model would be too much, and
where branches gain little, so would 0.05 (`benchmarks/learning_rates`).
"""


@dataclass(frozen=True)
class RateArm:
    """A batch and a rule for its learning rate, to be tried in a branch."""

    batch: int
    rule: LrRule
    factor: float  # factor of optimizer.lr


@dataclass(frozen=True)
class SearchPlan:
    """The samples that a search trains on."""

    start: int  # samples up to the checkpoint from which the branches start
    length: int  # samples of one branch
    branches: int
    noise_batches: int  # micro-batches of the reference batch per rank, for the gradient noise
    samples: int  # samples of the whole search
    total: int  # samples of one training

    @property
    def training_share(self) -> float:
        """The cost of the search as a share of a training, in samples."""
        return self.samples / self.total

    def count_start_steps(self, batch: int) -> int:
        """Return the first step after which branches can start from a script's checkpoint; epochs may drop their last batches."""
        return max(1, math.floor((1 - MAX_EARLY_CHECKPOINT_SHARE) * self.start / batch))

    def count_branch_steps(self, batch: int) -> int:
        """Return the optimizer steps of a branch at a global batch."""
        return round(self.length / batch)


def require_searchable(spec: JobSpec, batch: int) -> None:
    """Check that a learning rate can be searched for a job's batch.

    Raises:
        SpecError: the batch is not above the reference batch, or the method, a sharded model, or train.ramp: decay does
            not allow a search.
    """
    train, reference = spec.train, spec.train.reference_batch
    key, rate = spec.workload.reference_key, spec.workload.reference_lr_key
    if batch <= reference:
        raise SpecError(
            f"batch {batch} is not above {key} {reference}, whose learning rate is {rate}",
            f"give a larger batch with [[--batch]], or set {key} to the batch that {rate} was tuned for",
        )
    if train.method not in SEARCHABLE_METHODS:
        raise SpecError(
            f"a learning rate cannot be searched for train.method {train.method}, which sets the learning rate by a rule",
            f"use one of {', '.join(SEARCHABLE_METHODS)}, for example [[--set train.method=lrs]]",
        )
    if train.stages == "decay":
        raise SpecError(
            "a learning rate cannot be searched with train.ramp: decay, which sets the learning rate",
            "add [[--set train.ramp=auto]]",
        )
    if train.is_sharded:
        raise SpecError(
            "a learning rate cannot be searched with train.parallel: fsdp, which divides the training state among the GPUs",
            "search with a smaller model and [[--set train.parallel=ddp]], or compare short trainings: tula compare --methods lbt,sqrt,lrs",
        )


def make_job_of_rule(spec: JobSpec, rule: LrRule) -> JobSpec:
    """Return the job with a rule of `train.lr_scaling`, and the method that has it."""
    name = spec.train.training_method.get_name_with_rule(rule)
    train = spec.train.model_copy(update={"method": name, "lr_scaling": rule})
    return spec.model_copy(update={"train": train})


def list_rule_overrides(spec: JobSpec, rule: LrRule) -> list[str]:
    """Return what `--set` has to change in a job so that it trains with a rule."""
    train = make_job_of_rule(spec, rule).train
    method = [] if train.method == spec.train.method else [f"train.method={train.method}"]
    lr_scaling = "auto" if train.training_method.with_rule else rule
    return [*method, *([] if spec.train.lr_scaling == lr_scaling else [f"train.lr_scaling={lr_scaling}"])]


def list_rate_arms(spec: JobSpec, batch: int) -> list[RateArm]:
    """Return the learning rates to try at a batch, ascending; of rules with equal factors (train.max_lr_factor), one is tried."""
    arms = {
        (factor := compute_lr_scale(make_job_of_rule(spec, rule), batch)): RateArm(batch, rule, factor)
        for rule in reversed(LR_SCALING_RULES)
    }
    return sorted(arms.values(), key=lambda arm: arm.factor)


def plan_rate_search(spec: JobSpec, batches: Sequence[int], *, dataset_size: int, save_every: int = 0) -> SearchPlan:
    """Count the samples of a search.

    Args:
        batches: the batch whose learning rate is searched, and others to compare with it, global.
        save_every: samples between two checkpoints of a script, one of which the branches start from; 0 if any.
    """
    total, reference = spec.workload.count_samples(dataset_size), spec.train.reference_batch
    branches = len(list_rate_arms(spec, batches[0])) + len(batches) - 1
    start = max(reference * MIN_STEPS, round(START_SHARE * total))
    start = max(1, round(start / save_every)) * save_every if save_every else start
    length = max(MIN_STEPS * max(batches), round(min(BRANCH_SHARE, BRANCHES_SHARE / branches) * total))
    noise_batches = max(MIN_NOISE_BATCHES, min(NOISE_BATCHES, round(NOISE_SHARE * total / reference)))
    if spec.workload.restarts_for_branch:
        noise_batches = 0  # the first branch measures the noise
    samples = start + branches * length + noise_batches * reference
    return SearchPlan(start, length, branches, noise_batches, samples, total)


def list_other_batches(spec: JobSpec, batch: int, *, divisor: int, dataset_size: int) -> tuple[int, ...]:
    """Return half and double the batch, as far as they divide among the GPUs and fit into the dataset."""
    max_batch = dataset_size - self_tuning.count_holdout_samples(dataset_size)
    return tuple(
        other
        for other in (batch // 2, 2 * batch)
        if spec.train.reference_batch <= other <= max_batch
        and other % divisor == 0
        and (other > batch or batch % 2 == 0)
    )


def find_next_arm(
    spec: JobSpec, batches: Sequence[int], branches: Sequence[RateBranch], start_loss: float
) -> RateArm | None:
    """Return the next branch to train; None after the last.

    First all learning rates at the first batch, then the other batches with the rule that was chosen there.
    """
    trained = {(branch.batch, branch.rule) for branch in branches}
    arms = list_rate_arms(spec, batches[0])
    chosen = find_branch_with_highest_lr([branch for branch in branches if branch.batch == batches[0]], start_loss)
    if chosen is not None and len(trained) >= len(arms):
        arms += [
            RateArm(batch, chosen.rule, compute_lr_scale(make_job_of_rule(spec, chosen.rule), batch))
            for batch in batches[1:]
        ]
    return next((arm for arm in arms if (arm.batch, arm.rule) not in trained), None)


def list_close_branches(branches: Sequence[RateBranch], start_loss: float) -> list[RateBranch]:
    """Return the branches whose held-out loss is close to the lowest one, without those that diverged.

    Args:
        branches: with equal numbers of samples.
        start_loss: held-out loss where they start.
    """
    losses = {branch: branch.loss for branch in branches if not branch.diverged and branch.loss is not None}
    if not losses:
        return []
    lowest = min(losses.values())
    highest = lowest + compute_loss_margin(lowest, start_loss)
    return [branch for branch, loss in losses.items() if loss <= highest]


def compute_loss_margin(lowest: float, start_loss: float) -> float:
    """Return how far a loss may exceed the lowest one and still count as close to it."""
    return min(LOSS_MARGIN * abs(lowest), MAX_LOSS_MARGIN, PROGRESS_MARGIN * max(0.0, start_loss - lowest))


def find_branch_with_highest_lr(branches: Sequence[RateBranch], start_loss: float) -> RateBranch | None:
    """Return the branch with the highest learning rate among those close to the lowest loss; None if all diverged."""
    return max(list_close_branches(branches, start_loss), key=lambda branch: branch.factor, default=None)


def find_branch_with_largest_batch(branches: Sequence[RateBranch], start_loss: float) -> RateBranch | None:
    """Return the branch with the largest batch among those close to the lowest loss; None if all diverged."""
    return max(list_close_branches(branches, start_loss), key=lambda branch: branch.batch, default=None)
