"""How far the micro-batches of a training by a script may be cut: what its shim saw when it was out of memory."""

from tula_cli.cluster.rank_start import world_size
from tula_cli.models import refresh
from tula_cli.models.out_of_memory import batch_norm_limit, splits_of
from tula_cli.run.directory import RunDir
from tula_cli.run.records.micro_batches import MicroBatches, Splits
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.script_attempt import ScriptAttempt


def possible_micro_batches(run: RunDir, task: TrainTask) -> MicroBatches:
    """Return it for each batch of the ladder.

    Where no rank has told whether there is a BatchNorm (it was killed), there is taken to be one, on each rank by itself.
    """
    attempts = run.attempts(task.id)
    number = attempts[-1].number if attempts else 1
    batch_norms = [failure.batch_norm for failure in ScriptAttempt(run.path, task.id, number).failures()]
    norms = {norm for norm in batch_norms if norm is not None} or {"batch"}
    world, micro_batches = world_size(task), task.spec.train.accumulate
    over = [1] * ("batch" in norms) or [world] * ("sync" in norms)
    limits = [batch_norm_limit(ranks=ranks) for ranks in over]

    def of(batch: int) -> Splits:
        micro_batch = batch // world // micro_batches
        fewest = refresh.max_samples_drawn(task.spec, batch, available=micro_batch, world=world)
        ags_limit = (lambda samples: samples >= fewest, f"AGS takes a small batch of {fewest} samples of it")
        return splits_of(batch, micro_batch=micro_batch, micro_batches=micro_batches, limits=[ags_limit, *limits])

    splits = tuple(of(rung.batch) for rung in task.ladder)
    return MicroBatches(splits=splits, normalised=over[0] if over and batch_norms else 0)
