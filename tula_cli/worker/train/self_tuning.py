"""A training that tunes itself (`train.method: auto`): at the reference batch to where the arms part, then as the arm that won.

`worker/entry.py` imports it for such a training alone.
"""

from tula_cli.models import halving
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.ags import Arm
from tula_cli.worker.preemption import Preempted
from tula_cli.worker.train import tuning
from tula_cli.worker.train.metrics import Metrics
from tula_cli.worker.train.training import TrainContext, Training


def train(task: TrainTask, context: TrainContext) -> None:
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
            tuning.give_up(task, context.run, context.ranks, samples=broken.samples)


def _choose(task: TrainTask, context: TrainContext) -> tuning.Choice:
    """Return what the training goes on with; trains up to there, and the branches, where that is missing.

    Raises:
        Preempted: the ranks leave.
    """
    run, ranks, datasets = context.run, context.ranks, context.datasets
    if (found := tuning.chosen(task, run, ranks)) is not None:
        return found
    split = tuning.held_out(task.spec, datasets, batch=task.batch)
    control = tuning.Choice(Arm(name=halving.CONTROL), 0.0).task(task, size=len(datasets.train))
    ahead = halving.plan(task.spec, batch=task.batch, dataset_size=len(datasets.train)).steps
    Training(control, context, until=task.spec.auto.after, ahead=ahead).train()
    with Metrics(run, task, first=ranks.first, samples=run.training(task.signature).newest_samples()) as metrics:
        try:
            return tuning.tune(task, run, ranks, split, preemption=context.preemption, log=metrics.add)
        except Preempted as preempted:
            if ranks.first:
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
        return self.choice.arm.name == halving.CONTROL

    def _announce(self) -> None:
        super()._announce()
        if self.choice.broken:
            before, arm = ", ".join(self.choice.broken), self.choice.arm.name
            self.log.warn(f"broke down after the choice: {before}; goes on as {arm}")

    def _diverged(self, found: str) -> Exception:
        """Return BrokenDown, or Diverged where there is no arm left."""
        if self._is_control:
            return super()._diverged(found)
        return tuning.BrokenDown(self.trainer.position.samples)

    def _judge(self, loss: float) -> None:
        """Raise BrokenDown where the arm has; `loss` is the same on all ranks.

        Judged by the loss of training: the evaluation set has no part in what is trained.
        """
        if self._is_control:
            return
        self.behind = self.behind + 1 if self.choice.is_behind(loss, epoch=self.trainer.epoch) else 0
        if self.behind >= tuning.BEHIND:
            raise tuning.BrokenDown(self.trainer.position.samples)
