"""Expected loss of an interrupted script training, from the checkpoints of the run's earlier trainings."""

from tula_cli.models.interruptions import find_checkpoint_schedule
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.results import Save
from tula_cli.spec.job import JobSpec


def find_newest_saves(run: RunDir) -> tuple[Save, ...]:
    """Return the checkpoints of the training that saved most recently; empty if none has saved."""
    saves_by_training = [run.training(signature).script_saves().saves for signature in run.train_signatures()]
    return max(filter(None, saves_by_training), key=lambda saves: saves[-1].saved_at, default=())


def describe_interruption_cost(
    run: RunDir | None, spec: JobSpec, *, batch: int | None = None, step_time: float | None = None
) -> str:
    """Describe the cost of an interruption; empty for tula's training loop, which saves before it exits.

    Args:
        run: the run, which need not exist yet; None for no run.
        spec: the job.
        batch: global batch of the training; None if it is not chosen yet.
        step_time: seconds per step at that batch; None if it is not known.
    """
    if spec.script is None:
        return ""
    results = () if run is None else run.results()
    measured = next((result.dataset_size for result in results if isinstance(result, Measured)), None)
    size = spec.script.known_dataset_size or measured
    schedule = find_checkpoint_schedule(spec.script, () if run is None else find_newest_saves(run), dataset_size=size)
    return schedule.describe_loss(step_time, epoch_steps=size // batch if size and batch else None)
