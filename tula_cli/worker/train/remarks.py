"""What the user has asked for and what does nothing in this training."""

from tula_cli.spec.job import warmup_epochs
from tula_cli.worker.train.loop import Trainer


def remarks(trainer: Trainer) -> list[str]:
    """Return what the user has asked for and what does nothing in this training."""
    train, found = trainer.spec.train, []
    if (warmup := warmup_epochs(trainer.spec)) >= train.epochs:
        found.append(
            f"the learning rate never reaches its full value: its warm-up of {warmup:g} epochs is not shorter than"
            f" train.epochs {train.epochs}; set schedule.warmup_epochs"
        )
    found += trainer.method.remarks(trainer)
    if train.ghost_batch is not None and trainer.micro_batch <= train.ghost_batch:
        found.append(
            f"train.ghost_batch {train.ghost_batch} changes nothing: a GPU takes {trainer.micro_batch} samples at a time"
        )
    return found
