"""What the user has asked for and what does nothing in this training."""

from tula_cli.optim.adascale_sgd import AdaScale
from tula_cli.optim.post_local_sgd import SWITCH_EPOCHS
from tula_cli.spec.job import warmup_epochs
from tula_cli.worker.train.loop import Trainer


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
