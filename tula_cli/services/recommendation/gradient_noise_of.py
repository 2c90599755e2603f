"""The gradient noise that trainings have measured on their way (`train.gradient_noise`)."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tula_cli.errors import BadMeasurements
from tula_cli.models.efficiency import EARLY_SHARE, Noise, noise_scale
from tula_cli.models.ramp.by_noise import HOW_TO_MEASURE, NOISE_NOT_MEASURED, NoisePath, with_epochs
from tula_cli.models.ramp.stage_nodes import ramp_on_nodes
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Failed, GradientStats, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Recommendation, Stage
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.job import JobSpec


def noisy_trainings(run: RunDir) -> list[TrainingRun]:
    """Return the trainings of a run that measure their gradient noise."""
    trainings = [run.training(signature) for signature in run.train_signatures()]
    return [training for training in trainings if (task := training.newest_task()) and task.spec.train.measures_noise]


def noise_from_trainings(runs: Iterable[RunDir], spec: JobSpec) -> Noise | None:
    """Return what trainings of runs have measured, as `noise_near_tenth` has it; None of a script."""
    if spec.script is not None:
        return None
    trainings = [training for run in runs for training in noisy_trainings(run)]
    return noise_near_tenth(trainings, reference=spec.train.reference_batch, epochs=spec.train.epochs)


def noise_near_tenth(trainings: Iterable[TrainingRun], *, reference: int, epochs: int) -> Noise | None:
    """Return the noise that was measured nearest to a tenth of the epochs, at the reference batch if there is one.

    Args:
        trainings: that measure it.
        reference: the batch whose epochs are counted.
        epochs: of the whole training.

    Returns:
        None where none has measured it yet, or what was measured does not tell it.
    """
    rows = [row for row in _noise_rows(trainings) if row["epoch"] > 0]

    def off(row: dict[str, Any]) -> tuple[bool, float]:
        return row["batch"] != reference, abs(math.log(row["epoch"] / (EARLY_SHARE * epochs)))

    for row in sorted(rows, key=off):
        noise = noise_scale([GradientStats.model_validate(row["stats"])])
        if noise is not None:
            return replace(noise, epoch=float(row["epoch"]))
    return None


def _noise_rows(trainings: Iterable[TrainingRun]) -> list[dict[str, Any]]:
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
    gradient_stats = [
        noise.gradients for noise in results if isinstance(noise, Measured) and noise.gradients is not None
    ]
    stats: dict[float, Sequence[GradientStats]] = {0.0: gradient_stats}
    by_epoch = defaultdict(list)
    for row in _noise_rows(training for run in runs for training in noisy_trainings(run)):
        by_epoch[float(row["epoch"])].append(row)
    for epoch, rows in by_epoch.items():
        reference_rows = [row for row in rows if row["batch"] == spec.train.reference_batch]
        stats[epoch] = [GradientStats.model_validate(row["stats"]) for row in reference_rows or rows]
    scales = {epoch: noise.scale for epoch, stats_at_epoch in stats.items() if (noise := noise_scale(stats_at_epoch))}
    return NoisePath.from_measurements(scales, reference=spec.train.reference_batch)


def plan_stages(
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
    stages_setting = spec.train.stages
    if stages_setting is None or spec.script is not None:
        return ()
    if stages_setting == "noise" and recommended is not None and recommended.choice.type and recommended.stages:
        return recommended.stages
    noise = noise_path([run], spec, run.results())
    if stages_setting == "noise" and noise is None:
        raise BadMeasurements(NOISE_NOT_MEASURED, HOW_TO_MEASURE)
    ramp = ramp_on_nodes(spec, batch=batch, nodes=nodes, dataset_size=dataset_size, noise=noise)
    return with_epochs(ramp.stages, dataset_size)
