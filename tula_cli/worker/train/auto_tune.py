"""Self-tuning (`train.method: auto`), the auto-tuning that the paper leaves to future work.

Besides the training, short branches are trained with different settings on the training set without a held-out part,
and are evaluated on that part; `models.self_tuning` says which arms there are and which one wins. The branches start
from the state of a training at the reference batch, also without the held-out part, at the point where the arms branch,
so no evaluated weights have seen the samples that they are evaluated on. A branch leaves nothing but its line in
tuning.json: the training continues with the winner's settings from its own checkpoint, on the whole training set, as if
it had been configured with them.
"""

import contextlib
import copy
import functools
import gc
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import Subset

from tula_cli.models import self_tuning
from tula_cli.models.ramp import Stages, plan_stages_of_branch, plan_stages_of_training
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import Branch, Tuning
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.ags import BRANCHING_EPOCH, Arm
from tula_cli.spec.job import JobSpec
from tula_cli.worker import messages
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.loaders import TrainingPosition, make_epoch_permutation
from tula_cli.worker.build.samples import Datasets, EvaluationDataset, SeededDataset
from tula_cli.worker.build.weights import load_weights
from tula_cli.worker.preemption import Preempted, PreemptionHandler
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint, evaluation, loop
from tula_cli.worker.train.batch_partition import compute_batch_sizes
from tula_cli.worker.train.evaluation import Evaluation
from tula_cli.worker.train.loop import Trainer
from tula_cli.worker.train.training import TrainContext, Training, replace_infinite
from tula_cli.worker.train.training_log import MetricsFile

# --- Trials

MAX_EPOCHS_BEHIND = 2
"""Successive epochs that end behind the control after which a chosen arm counts as broken down."""

STEPS_BETWEEN_CHECKS = 20
"""Steps between two checks of whether a branch has diverged; each check waits for the device."""

BATCH_NORM_MICRO_BATCHES = 8
"""Micro-batches per rank over which BatchNorm's statistics are averaged before a branch is evaluated."""

_HOLDOUT_SEED_EPOCH = -1
"""Stands for the epoch in the seed of the split; no epoch has this number."""


@dataclass(frozen=True)
class ArmChoice:
    """The arm that a training continues with, and the sample at which the arms branch."""

    arm: Arm
    epoch: float
    start: int = 0  # samples of the checkpoint at the branching point, kept while the arm may break down
    branch_epochs: float = 0.0  # length of the branches in epochs
    limit: float | None = None  # loss of the control after its branch; None if unknown
    broken: tuple[str, ...] = ()  # names of the chosen arms that have broken down

    def is_behind(self, loss: float, *, epoch: float) -> bool:
        """Return whether a training has fallen behind: its loss is above that of the control's branch after
        twice the number of epochs. Always False for the control itself, and if the control's loss is unknown."""
        if self.arm.name == self_tuning.CONTROL_ARM or self.limit is None:
            return False
        return epoch - self.epoch >= 2 * self.branch_epochs and not loss <= self.limit

    def make_task(self, task: TrainTask, *, size: int) -> TrainTask:
        """Return the task as the arm trains it, with `size` samples per epoch."""
        return make_task_of_arm(
            task, self.arm, plan_stages_of_training(task.spec, self.arm, batch=task.batch, size=size)
        )


def make_task_of_arm(task: TrainTask, arm: Arm, stages: Stages) -> TrainTask:
    """Return a task as an arm trains it, with the given stages of its batch."""
    return task.model_copy(update={"spec": self_tuning.make_job_of_arm(task.spec, arm), "stages": stages})


CONTROL = Arm(name=self_tuning.CONTROL_ARM)


@dataclass(frozen=True)
class BranchContext:
    """The state that every branch starts from."""

    task: TrainTask
    ranks: Ranks
    datasets: Datasets  # training set without the held-out part, which is the evaluation set
    beginning: int  # samples trained at the reference batch before the branches start
    epoch: float  # fractional epoch at which the arms branch
    preemption: PreemptionHandler | None  # checked between steps; None: not checked, an interrupted branch is lost
    control: Arm = CONTROL

    @functools.cached_property
    def branching_checkpoint(self) -> dict[str, Any]:
        """The checkpoint from which every arm branches. The first use trains up to it, without the held-out samples."""
        stages = plan_stages_of_branch(
            self.task.spec, self.control, batch=self.task.batch, start=self.beginning, length=0
        )
        trainer = _build_arm_trainer(self, make_task_of_arm(self.task, self.control, stages))
        load_weights(self.task.spec.model, trainer.parallel.module, first=self.ranks.is_first)
        self.train(trainer, self.beginning)
        return copy.deepcopy(checkpoint.make_checkpoint_state(trainer, best={}))

    @property
    def size(self) -> int:
        """Samples of an epoch."""
        return len(self.datasets.train)

    def stop_if_requested(self) -> None:
        """Stop if the ranks have to; called between steps, on every rank at the same time."""
        if self.preemption is not None:
            self.preemption.stop_if_requested(reserve=0.0)  # there is nothing to save

    def build_branch_trainer(self, task: TrainTask, arm: Arm, length: int) -> Trainer:
        """Return a new trainer at the point where the arms branch, for a branch of `length` samples at the batch of `task`."""
        position, size = TrainingPosition(**self.branching_checkpoint["position"]), self.size
        passed = position.epoch * size + position.done
        stages = plan_stages_of_branch(task.spec, arm, batch=task.batch, start=passed, length=length)
        trainer = _build_arm_trainer(self, make_task_of_arm(task, arm, stages))
        # an optimizer does not copy the tensors of a loaded state
        checkpoint.restore_checkpoint(trainer, copy.deepcopy(self.branching_checkpoint))
        begin = trainer.epoch
        trainer.lr_factor = lambda epoch: (
            self_tuning.compute_lr_factor(arm, epoch, start=begin)
            * self_tuning.compute_cooldown_factor(epoch, start=begin, length=length / size)
        )
        return trainer

    def train(self, trainer: Trainer, length: int) -> bool:
        """Train for `length` samples; return False, early, as soon as a loss is found that is not finite, else True."""
        begin = trainer.samples_passed
        with contextlib.closing(loop.run_steps(trainer)) as stream:
            for count, step in enumerate(stream, 1):
                self.stop_if_requested()
                is_finished = self_tuning.is_branch_finished(trainer.samples_passed - begin, length, trainer.batch)
                if count % STEPS_BETWEEN_CHECKS == 0 or is_finished:
                    finite = math.isfinite(float(step.loss))
                    if self.ranks.max(float(not finite)):
                        return False
                if is_finished:
                    break
        return True

    def evaluate(self, trainer: Trainer) -> Evaluation:
        """Evaluate a trainer's weights on the held-out samples."""
        # The running statistics lag about ten steps behind the weights, which is most of a short branch.
        evaluation.recompute_batch_norm_statistics(
            trainer, batches=BATCH_NORM_MICRO_BATCHES, after_batch=self.stop_if_requested
        )
        return evaluation.Evaluator(trainer).evaluate(after_batch=self.stop_if_requested)

    def train_branch(self, task: TrainTask, arm: Arm, length: int, *, control: float | None) -> Branch:
        """Train one branch and evaluate it.

        Args:
            length: samples.
            control: loss of the control; None if it is not known.
        """
        began = time.monotonic()
        trainer = self.build_branch_trainer(task, arm, length)
        start = trainer.position.samples
        result = self.evaluate(trainer) if self.train(trainer, length) else None
        samples = trainer.position.samples - start
        return Branch(
            arm=arm.name,
            epochs=samples / self.size,
            samples=samples,
            loss=replace_infinite(result.loss) if result else None,
            top1=replace_infinite(result.top1) if result else None,
            diverged=result is None or has_diverged(result, self.datasets.classes, control),
            seconds=time.monotonic() - began,
        )


def load_arm_choice(task: TrainTask, run: RunDir, ranks: Ranks) -> ArmChoice | None:
    """Return the choice recorded in tuning.json, read by rank 0, on every rank; None if branches are missing.

    A choice made at a larger batch (before an out-of-memory error) is kept, with the learning-rate factor limited to
    linear scaling.
    """
    stored = run.get_training(task.signature).read_tuning() if ranks.is_first else None
    is_chosen = stored is not None and stored.chosen is not None
    if not ranks.broadcast(int(is_chosen)):
        return None
    tuning = Tuning.model_validate_json(ranks.gather(stored.model_dump_json() if stored is not None else "")[0])
    assert tuning.chosen is not None
    arm = tuning.chosen
    if task.batch != tuning.batch:
        arm = self_tuning.limit_lr_factor(arm, task.batch / task.spec.train.reference_batch)
    control = self_tuning.find_control_branch(tuning.branches)
    branch_epochs = max((branch.epochs for branch in tuning.branches), default=0.0)
    limit = control.loss if control is not None else None
    return ArmChoice(arm, tuning.epoch, tuning.start, branch_epochs, limit, tuning.broken)


class ArmDiverged(Exception):
    """The chosen arm has broken down, after `samples` samples; raised on every rank."""

    def __init__(self, samples: int) -> None:
        self.samples = samples


def choose_next_arm(task: TrainTask, run: RunDir, ranks: Ranks, *, samples: int) -> None:
    """Return to the point where the arms branch, and choose the next best arm; the control is chosen last.

    Later checkpoints are removed first: a training interrupted in between breaks down again.

    Args:
        samples: position of the training at the breakdown.
    """
    if ranks.is_first:
        tuning = run.get_training(task.signature).read_tuning()
        assert tuning is not None and tuning.chosen is not None
        checkpoint.delete_checkpoints_after(run, task.signature, tuning.start)
        broken = (*tuning.broken, tuning.chosen.name)
        name = self_tuning.find_next_best_arm(tuning.branches, broken)
        chosen = next(arm for arm in tuning.arms if arm.name == name)
        lost = tuning.lost + samples - tuning.start
        run.write_tuning(tuning.model_copy(update={"broken": broken, "chosen": chosen, "lost": lost}))
    ranks.broadcast(0)  # no rank searches for a checkpoint before rank 0 has deleted the later ones


def run_tuning(task: TrainTask, training: TrainContext, datasets: Datasets, metrics: MetricsFile) -> ArmChoice:
    """Train a branch with each arm, for a training at the branching point; recorded branches are reused.

    Args:
        training: its rank 0 decides, and writes tuning.json in the run directory after each branch.
        datasets: `hold_out_samples` of the task's datasets.
        metrics: gets a row of kind "branch" for each branch.

    Raises:
        Preempted: the ranks stop; the current branch is lost.
    """
    run, ranks = training.run, training.ranks
    newest = checkpoint.load_newest_checkpoint_on_all_ranks(run, task.signature, ranks)
    assert newest is not None
    position = TrainingPosition(**newest["position"])
    context = BranchContext(
        task=task,
        ranks=ranks,
        datasets=datasets,
        beginning=BRANCHING_EPOCH * len(datasets.train),
        epoch=position.epoch + position.done / (len(datasets.train) + len(datasets.eval)),
        preemption=training.preemption,
    )
    arms = self_tuning.list_arms_of_training(task.spec, task.batch)
    length = self_tuning.count_branch_samples(task.spec, len(arms), context.size)
    tuning = _load_tuning_record(context, run, position, arms)
    if ranks.is_first:
        run.write_tuning(tuning)
    while (arm := _find_next_arm(tuning, ranks)) is not None:
        control = self_tuning.find_control_branch(tuning.branches)
        branch = context.train_branch(task, arm, length, control=control.loss if control else None)
        tuning = tuning.model_copy(update={"branches": (*tuning.branches, branch)})
        if ranks.is_first:
            run.write_tuning(tuning)
            row = branch.model_dump(exclude={"samples"})  # "samples" of a row are those of the training
            eta = _estimate_seconds_left(context, tuning)
            metrics.add_row("branch", position, context.epoch, **row, trained=branch.samples, eta=eta)
    if ranks.is_first:
        winner = self_tuning.find_winning_arm(tuning.branches) if tuning.branches else arms[0].name
        run.write_tuning(tuning.model_copy(update={"chosen": next(arm for arm in arms if arm.name == winner)}))
    choice = load_arm_choice(task, run, ranks)
    assert choice is not None
    return choice


def hold_out_samples(spec: JobSpec, datasets: Datasets, *, batch: int) -> Datasets:
    """Return the training set without its held-out part, and that part with the evaluation transforms.

    Raises:
        SpecError: the remaining part is smaller than the batch.
    """
    size = len(datasets.train)
    self_tuning.require_tuning_samples(spec, batch=batch, dataset_size=size)
    count = self_tuning.count_holdout_samples(size)
    order = make_epoch_permutation(size, seed=spec.train.seed, epoch=_HOLDOUT_SEED_EPOCH).tolist()
    plain = spec.transforms.model_copy(update={"train": spec.transforms.eval})
    view = datasets.train.samples
    if plain != spec.transforms:
        view = build_datasets(spec.model_copy(update={"transforms": plain})).train.samples
    return Datasets(
        train=SeededDataset(Subset(datasets.train.samples, sorted(order[count:])), seed=spec.train.seed),
        eval=EvaluationDataset(Subset(view, sorted(order[:count]))),
        classes=datasets.classes,
        collate=datasets.collate,
    )


def _load_tuning_record(
    context: BranchContext, run: RunDir, position: TrainingPosition, arms: tuple[Arm, ...]
) -> Tuning:
    """Return the record of this tuning; one of another batch, checkpoint or set of arms is discarded."""
    task = context.task
    fresh = Tuning(
        signature=task.signature,
        batch=task.batch,
        start=position.samples,
        epoch=context.epoch,
        arms=arms,
        beginning=_count_samples_before_branches(context) if len(arms) > 1 else 0,
    )
    tuning = run.get_training(task.signature).read_tuning() if context.ranks.is_first else None
    if tuning is not None and fresh == tuning.model_copy(update={"branches": (), "chosen": None}):
        return tuning
    return fresh


def _count_samples_before_branches(context: BranchContext) -> int:
    """Return the number of samples of the training from which all branches start."""
    control = ArmChoice(CONTROL, 0.0).make_task(context.task, size=context.size)
    sizes = compute_batch_sizes(control, batch=control.batch, world=context.ranks.world, dataset_size=context.size)
    steps = sizes.ramp.count_remaining_steps(size=context.size, epochs=BRANCHING_EPOCH)
    return sum(batch * count for batch, count in steps.items())


def _find_next_arm(tuning: Tuning, ranks: Ranks) -> Arm | None:
    """Return the next arm to train a branch with, decided by rank 0, on every rank; None after the last."""
    names = [arm.name for arm in tuning.arms]
    name = self_tuning.find_next_arm(names, tuning.branches) if ranks.is_first else None
    number = ranks.broadcast(-1 if name is None else names.index(name))
    return None if number < 0 else tuning.arms[number]


def _build_arm_trainer(context: BranchContext, task: TrainTask) -> Trainer:
    """Return a trainer of an arm's task at the start of training, on the samples that are not held out."""
    gc.collect()  # DDP and its model form a cycle: free the previous branch before building this one
    return loop.build_trainer(
        task, context.ranks, context.datasets, batch=task.batch, workers=task.workers, refresh=True
    )


def has_diverged(result: Evaluation, classes: int | None, control: float | None) -> bool:
    """Return whether a branch is no better than guessing, and worse than the control (which may be early itself)."""
    if not math.isfinite(result.loss):
        return True
    if classes is None or math.isnan(result.top1) or control is None:
        return False
    return result.loss > max(math.log(classes), control)


def _estimate_seconds_left(context: BranchContext, tuning: Tuning) -> float:
    """Return the estimated seconds until the training's end, from the pace of the branches so far."""
    size, epochs = len(context.datasets.train) + len(context.datasets.eval), context.task.spec.train.epochs
    planned = self_tuning.plan_tuning(context.task.spec, batch=context.task.batch, dataset_size=size)
    trained = sum(branch.samples for branch in tuning.branches)
    pace = sum(branch.seconds for branch in tuning.branches) / max(1, trained)  # seconds per sample
    branches = max(0, planned.samples - tuning.samples)
    return pace * (branches + (epochs - context.epoch) * size)


# --- The training that follows


def train_with_tuning(task: TrainTask, context: TrainContext) -> None:
    """Train with the arm that tuning chooses; if it breaks down, continue with the next choice.

    Raises:
        Preempted: the ranks have saved and stop.
        Diverged: loss or weights of the control are not finite.
    """
    while True:
        choice = _choose_arm(task, context)
        try:
            return ArmTraining(choice, task, context).train()
        except ArmDiverged as broken:
            choose_next_arm(task, context.run, context.ranks, samples=broken.samples)


def _choose_arm(task: TrainTask, context: TrainContext) -> ArmChoice:
    """Return the arm to continue with; if there is none yet, train up to the branching point, and the branches.

    Raises:
        Preempted: the ranks stop.
    """
    run, ranks, datasets = context.run, context.ranks, context.datasets
    if (choice := load_arm_choice(task, run, ranks)) is not None:
        return choice
    split = hold_out_samples(task.spec, datasets, batch=task.batch)
    control = ArmChoice(CONTROL, 0.0).make_task(task, size=len(datasets.train))
    branch_steps = self_tuning.plan_tuning(task.spec, batch=task.batch, dataset_size=len(datasets.train)).steps
    Training(control, context, until=BRANCHING_EPOCH, ahead=branch_steps).train()
    samples = run.get_training(task.signature).find_newest_checkpoint_samples()
    with MetricsFile(run, task, is_first=ranks.is_first, samples=samples) as metrics:
        try:
            return run_tuning(task, context, split, metrics)
        except Preempted as preempted:
            if ranks.is_first:
                run.write_stop_reason(task.id, context.attempt, preempted.reason)
            raise


class ArmTraining(Training):
    """A training with the chosen arm; if the arm breaks down, it raises `ArmDiverged`, and the next arm is chosen."""

    def __init__(self, choice: ArmChoice, task: TrainTask, context: TrainContext) -> None:
        super().__init__(choice.make_task(task, size=len(context.datasets.train)), context)
        self.choice, self.keep = choice, (choice.start,)
        self.trainer.lr_factor = partial(self_tuning.compute_lr_factor, choice.arm, start=choice.epoch)
        self.behind = 0  # successive epochs at whose end the arm was behind the control

    @property
    def _is_control(self) -> bool:
        return self.choice.arm.name == self_tuning.CONTROL_ARM

    def _log_start(self) -> None:
        super()._log_start()
        if self.choice.broken:
            self.log.warn(messages.arm_diverged_after_choice(arms=self.choice.broken, chosen=self.choice.arm.name))

    def _make_divergence_error(self, description: str) -> Exception:
        """Return ArmDiverged, or Diverged if no arm is left."""
        if self._is_control:
            return super()._make_divergence_error(description)
        return ArmDiverged(self.trainer.position.samples)

    def _handle_evaluation(self, loss: float) -> None:
        """Raise ArmDiverged if the arm has broken down; `loss` is the same on all ranks.

        The criterion is the training loss: the evaluation set must not influence the training.
        """
        if self._is_control:
            return
        self.behind = self.behind + 1 if self.choice.is_behind(loss, epoch=self.trainer.epoch) else 0
        if self.behind >= MAX_EPOCHS_BEHIND:
            raise ArmDiverged(self.trainer.position.samples)
