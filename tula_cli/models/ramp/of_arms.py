"""How the batch grows in a self-tuning training (`train.method: auto`): in its beginning, as each arm, and in their branches.

All begin at the reference batch, which is the first stage of a ramp: the network is past its first steps there, in which a
large batch learns little. Batches that do not divide among the ranks are rounded where a trainer is built.
"""

from tula_cli.models.ramp.stages import EPOCH_SHARE, MAX_SHARE
from tula_cli.run.records.recommendations import Stage
from tula_cli.spec.ags import Arm
from tula_cli.spec.job import JobSpec
from tula_cli.spec.methods import METHODS

Stages = tuple[Stage, ...]


def stages_of_training(spec: JobSpec, arm: Arm, *, batch: int, size: int) -> Stages:
    """Return the stages of the whole training as an arm, that of its own batch last.

    Args:
        spec: a job with method auto.
        arm: the control has the beginning, and then its own batch at once.
        batch: of the training, global.
        size: samples of an epoch.
    """
    parting = spec.auto.after * size
    doubled = _batches_between(spec, arm, batch)
    length = min(EPOCH_SHARE, MAX_SHARE / (1 + len(doubled))) * spec.train.epochs * size
    begins = [max(parting, round(number * length)) for number in range(1, len(doubled) + 2)]
    return _build_stages(spec, [*doubled, batch], begins)


def stages_of_branch(spec: JobSpec, arm: Arm, *, batch: int, start: int, length: int) -> Stages:
    """Return the stages of a branch: a ramp goes through all of its own in the first half, as short as that makes them.

    Args:
        spec: a job with method auto.
        arm: of the branch.
        batch: of the training, global.
        start: samples passed where the arms part.
        length: samples of the branch.
    """
    doubled = _batches_between(spec, arm, batch)
    samples_per_stage = MAX_SHARE * length / max(1, len(doubled))
    begins = [start + round(number * samples_per_stage) for number in range(len(doubled) + 1)]
    return _build_stages(spec, [*doubled, batch], begins)


def _batches_between(spec: JobSpec, arm: Arm, batch: int) -> list[int]:
    """Return the batches between the reference and the training's own that an arm goes through."""
    reference = spec.train.reference_batch
    ramps = METHODS[arm.method].ramps
    return [reference << k for k in range(1, batch.bit_length()) if reference << k < batch] if ramps else []


def _build_stages(spec: JobSpec, batches: list[int], begins: list[int]) -> Stages:
    """Return the beginning and what follows; of stages that begin at once the last one stays."""
    batch_by_begin = {0: min(spec.train.reference_batch, batches[-1])} | dict(zip(begins, batches, strict=True))
    return tuple(Stage(begin=begin, batch=batch) for begin, batch in batch_by_begin.items())
