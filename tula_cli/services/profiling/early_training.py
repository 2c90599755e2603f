"""`tula profile --progress`: the first epochs of the training at its reference batch, for the gradient noise they end with.

The probes see the noise at the weights that training starts from, which tells little of some jobs. After a tenth of the
epochs it tells what a large batch will cost (docs/how-it-measures.md, "The same progress").
"""

from dataclasses import dataclass

from tula_cli.errors import SpecError
from tula_cli.models.efficiency import Noise, epochs_before_measurement
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import JobFile
from tula_cli.services import train
from tula_cli.services.compare import Inspect, job_of_cell
from tula_cli.services.comparison.rows import REFERENCE
from tula_cli.services.events import Note, WarningEvent, Work
from tula_cli.services.recommendation.gradient_noise_of import noise_near_tenth
from tula_cli.services.recommendation.site_charges import with_site_billing
from tula_cli.services.waiting import Dependencies, DetachedJobs, WaitPolicy
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate


@dataclass(frozen=True)
class EarlyNoise:
    """What the first epochs told."""

    noise: Noise | None  # None where they did not
    epochs: int  # that were trained
    of: int
    batch: int
    signature: str  # of the training


def early_spec(spec: JobSpec) -> JobSpec:
    """Return the job of these epochs: the plain small batch, whose schedule is that of the whole training.

    Raises:
        SpecError: a script's loop cannot be asked.
    """
    if spec.script is not None:
        raise SpecError(
            "profile --progress: a script's own loop cannot be asked for its gradient noise between two epochs",
            "tula recommend --objective accuracy-time goes by what its probes tell",
        )
    content = job_of_cell(spec, REFERENCE, spec.train.seed).model_dump(mode="json", exclude_unset=True)
    epochs = epochs_before_measurement(spec.train.epochs)
    content["train"] |= {"until": {"epochs": epochs}, "gradient_noise": {"every": epochs, "batches": 64}}
    return validate(content, source="the job's first epochs")


def prepare(run: RunDir, spec: JobSpec, inspect: Inspect) -> Work[train.PreparedTraining]:
    """Decide where to train these epochs: on the fewest nodes that divide the reference batch; nothing is written.

    Raises:
        SpecError: a script's job, or no number of nodes divides the batch.
    """
    part = run.parts(with_site_billing(spec, run.path.parent), None)[0]
    own, batch = early_spec(part.spec), spec.train.reference_batch
    each = part.spec.cluster.gpus_per_node * spec.train.accumulate
    nodes = next((nodes for nodes in sorted(spec.search.nodes) if batch % (nodes * each) == 0), None)
    if nodes is None:
        raise SpecError(
            f"train.reference_batch {batch} does not divide among the GPUs of any of search.nodes"
            f" {list(spec.search.nodes)} (GPUs a node x train.accumulate: {each})",
            "add a smaller number of nodes to search.nodes",
        )
    found = train.plan_training(part.run, own, nodes=nodes, batch=batch, inspect=inspect)
    for text in found.code.warnings:
        yield WarningEvent(text)
    epochs, whole = epochs_before_measurement(spec.train.epochs), spec.train.epochs
    yield Note(f"trains {epochs} of {whole} epochs at batch {batch} ({epochs / whole:.0%} of the training's samples)")
    return train.PreparedTraining(run, spec, part, found, rehearse=False)


def work(
    prepared: train.PreparedTraining,
    dependencies: Dependencies,
    wait_policy: WaitPolicy,
    *,
    file: JobFile | None = None,
) -> Work[EarlyNoise | DetachedJobs]:
    """Train these epochs, or attach to them where they are under way, and return the noise.

    Raises:
        TulaError: as `train.work`.
    """
    found = yield from train.run_training(prepared, dependencies, wait_policy, file=file)
    if isinstance(found, DetachedJobs):
        return found
    return told(prepared)


def told(prepared: train.PreparedTraining) -> EarlyNoise:
    """Return what a finished one has told."""
    task = prepared.plan.task
    training = prepared.part.run.training(task.signature)
    noise = noise_near_tenth([training], reference=task.batch, epochs=task.spec.train.epochs)
    return EarlyNoise(
        noise, epochs_before_measurement(task.spec.train.epochs), task.spec.train.epochs, task.batch, task.signature
    )
