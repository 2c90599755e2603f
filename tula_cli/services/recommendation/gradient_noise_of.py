"""The gradient noise that trainings have measured on their way (`train.gradient_noise`, `tula profile --progress`)."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tula_cli.errors import BadMeasurements
from tula_cli.models.efficiency import EARLY, Noise, noise_scale
from tula_cli.models.ramp.by_noise import MEASURE, UNMEASURED, NoisePath, in_epochs
from tula_cli.models.ramp.stage_nodes import ramp_on
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Failed, GradientStats, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Recommendation, Stage
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.job import JobSpec


def noisy_trainings(run: RunDir) -> list[TrainingRun]:
    """Return the trainings of a run that measure their gradient noise."""
    found = [run.training(signature) for signature in run.train_signatures()]
    return [training for training in found if (task := training.newest_task()) and task.spec.train.noise_measured]


def trained_noise(runs: Iterable[RunDir], spec: JobSpec) -> Noise | None:
    """Return what trainings of runs have measured, as `after_training` has it; None of a script."""
    if spec.script is not None:
        return None
    found = [training for run in runs for training in noisy_trainings(run)]
    return after_training(found, reference=spec.train.reference_batch, epochs=spec.train.epochs)


def after_training(trainings: Iterable[TrainingRun], *, reference: int, epochs: int) -> Noise | None:
    """Return the noise that was measured nearest to a tenth of the epochs, at the reference batch if there is one.

    Args:
        trainings: that measure it.
        reference: the batch whose epochs are counted.
        epochs: of the whole training.

    Returns:
        None where none has measured it yet, or what was measured does not tell it.
    """
    rows = [row for row in _rows(trainings) if row["epoch"] > 0]

    def off(row: dict[str, Any]) -> tuple[bool, float]:
        return row["batch"] != reference, abs(math.log(row["epoch"] / (EARLY * epochs)))

    for row in sorted(rows, key=off):
        noise = noise_scale([GradientStats.model_validate(row["stats"])])
        if noise is not None:
            return replace(noise, epoch=float(row["epoch"]))
    return None


def _rows(trainings: Iterable[TrainingRun]) -> list[dict[str, Any]]:
    return [row for training in trainings for row in training.sampled_metrics() if row["kind"] == "noise"]


def noise_path(
    runs: Iterable[RunDir], spec: JobSpec, results: Iterable[Measured | OutOfMemory | Failed]
) -> NoisePath | None:
    """Return the noise over a training as it is known: at its start by the probes, later by trainings that measure it.

    At each epoch the rows at the reference batch count, or all where there are none.

    Args:
        runs: of the job, one a type of node: the noise is not the hardware's.
        spec: the job.
        results: of its probes.

    Returns:
        None where no stages are to follow from it, or nothing tells it.
    """
    if spec.train.stages != "noise":
        return None
    seen = [found.gradients for found in results if isinstance(found, Measured) and found.gradients is not None]
    stats: dict[float, Sequence[GradientStats]] = {0.0: seen}
    by_epoch = defaultdict(list)
    for row in _rows(training for run in runs for training in noisy_trainings(run)):
        by_epoch[float(row["epoch"])].append(row)
    for epoch, rows in by_epoch.items():
        own = [row for row in rows if row["batch"] == spec.train.reference_batch]
        stats[epoch] = [GradientStats.model_validate(row["stats"]) for row in own or rows]
    scales = {epoch: found.scale for epoch, those in stats.items() if (found := noise_scale(those))}
    return NoisePath.of(scales, reference=spec.train.reference_batch)


def planned_stages(
    run: RunDir, spec: JobSpec, nodes: int, batch: int, dataset_size: int, *, recommended: Recommendation | None
) -> tuple[Stage, ...]:
    """Return the stages of a training that begins, that of its own batch last; none where its batch does not grow.

    Args:
        run: of one type of node.
        spec: the job.
        nodes: number of nodes.
        batch: global.
        dataset_size: training samples.
        recommended: for just this; of several types of nodes it knows what was measured on the others.

    Raises:
        BadMeasurements: they follow from a noise that nothing has measured.
    """
    asked = spec.train.stages
    if asked is None or spec.script is not None:
        return ()
    if asked == "noise" and recommended is not None and recommended.choice.type and recommended.stages:
        return recommended.stages
    noise = noise_path([run], spec, run.results())
    if asked == "noise" and noise is None:
        raise BadMeasurements(UNMEASURED, MEASURE)
    found = ramp_on(spec, batch=batch, nodes=nodes, dataset_size=dataset_size, noise=noise)
    return in_epochs(found.stages, dataset_size)
