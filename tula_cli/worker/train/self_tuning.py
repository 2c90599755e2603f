"""A training that tunes itself (`train.method: auto`): at the reference batch to where the arms part, then as the arm that won.

`worker/entry.py` imports it for such a training alone.
"""

from tula_cli.models import halving
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.ags import Arm
from tula_cli.worker.preemption import Preempted
from tula_cli.worker.train import tuning
from tula_cli.worker.train.metrics import MetricsFile
from tula_cli.worker.train.training import TrainContext, Training


def train_with_tuning(task: TrainTask, context: TrainContext) -> None:
    """Train as tuning chooses; where that breaks down in the training, as it chooses next.

    Raises:
        Preempted: the ranks have saved and leave.
        Diverged: loss or weights of the control are not finite.
    """
    while True:
        choice = _choose(task, context)
        try:
            return ArmTraining(choice, task, context).train()
        except tuning.BrokenDown as broken:
            tuning.choose_next_arm(task, context.run, context.ranks, samples=broken.samples)


def _choose(task: TrainTask, context: TrainContext) -> tuning.Choice:
    """Return what the training goes on with; trains up to there, and the branches, where that is missing.

    Raises:
        Preempted: the ranks leave.
    """
    run, ranks, datasets = context.run, context.ranks, context.datasets
    if (choice := tuning.load_choice(task, run, ranks)) is not None:
        return choice
    split = tuning.hold_out_samples(task.spec, datasets, batch=task.batch)
    control = tuning.Choice(Arm(name=halving.CONTROL_ARM), 0.0).task(task, size=len(datasets.train))
    branch_steps = halving.plan_tuning(task.spec, batch=task.batch, dataset_size=len(datasets.train)).steps
    Training(control, context, until=task.spec.auto.after, ahead=branch_steps).train()
    with MetricsFile(
        run, task, is_first=ranks.is_first, samples=run.training(task.signature).newest_samples()
    ) as metrics:
        try:
            return tuning.tune(task, run, ranks, split, preemption=context.preemption, log=metrics.add)
        except Preempted as preempted:
            if ranks.is_first:
                run.write_stop(task.id, context.attempt, preempted.reason)
            raise


class ArmTraining(Training):
    """A training that goes on as tuning has chosen, and gives way to the next arm where this one breaks down."""

    def __init__(self, choice: tuning.Choice, task: TrainTask, context: TrainContext) -> None:
        super().__init__(choice.task(task, size=len(context.datasets.train)), context)
        self.choice, self.keep = choice, (choice.start,)
        self.trainer.lr_factor = choice.lr_factor
        self.behind = 0  # epochs in a row that ended where the choice should not have led

    @property
    def _is_control(self) -> bool:
        return self.choice.arm.name == halving.CONTROL_ARM

    def _announce(self) -> None:
        super()._announce()
        if self.choice.broken:
            broken_arms, arm = ", ".join(self.choice.broken), self.choice.arm.name
            self.log.warn(f"broke down after the choice: {broken_arms}; goes on as {arm}")

    def _divergence_error(self, found: str) -> Exception:
        """Return BrokenDown, or Diverged where there is no arm left."""
        if self._is_control:
            return super()._divergence_error(found)
        return tuning.BrokenDown(self.trainer.position.samples)

    def _after_evaluation(self, loss: float) -> None:
        """Raise BrokenDown where the arm has; `loss` is the same on all ranks.

        Judged by the loss of training: the evaluation set has no part in what is trained.
        """
        if self._is_control:
            return
        self.behind = self.behind + 1 if self.choice.is_behind(loss, epoch=self.trainer.epoch) else 0
        if self.behind >= tuning.MAX_EPOCH_RATIO:
            raise tuning.BrokenDown(self.trainer.position.samples)
