"""Which trainings of a run tell of its step times, beside the probes, and what."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tula_cli.models.time import stretches
from tula_cli.models.time.stretches import TrainingObservations
from tula_cli.run.code import measured_snapshot
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.run.records.tasks import ProbeTask, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import signature

MAX_TRAININGS = 5
"""Trainings of one configuration that count: more tell next to nothing beside them, of days longer ago."""


def observations_from_trainings(
    run: RunDir, spec: JobSpec, results: Sequence[Measured | OutOfMemory | Failed]
) -> TrainingObservations:
    """Return what the steps of a run's trainings say, ended or not, and why those of some do not count.

    Those of other methods, models or code (which `tula compare` trains beside the job's own) say nothing of this one.

    Args:
        run: one that was measured on one type of nodes.
        spec: the job, which counts where no task tells what the probes were made for.
        results: of the probes; there is one that was measured, or nothing is told.
    """
    measured = [result for result in results if isinstance(result, Measured)]
    names = run.train_signatures()
    if not measured or not names:
        return TrainingObservations()
    tasks = run.tasks()
    probed_job = next((task.spec for task in tasks if isinstance(task, ProbeTask)), spec)
    snapshot = measured_snapshot(run)
    observations: list[TrainedSteps] = []
    left_out: list[str] = []
    for name in sorted(names):
        steps_here = [task for task in tasks if isinstance(task, TrainTask) and task.signature == name]
        if not steps_here or not _trains_alike(
            run, steps_here[-1], probed_job, code="" if snapshot is None else snapshot.digest
        ):
            continue
        training_observations = stretches.observations_from_training(
            steps_here, run.training(name).sampled_metrics(), functools.partial(_why_not_counted, measured)
        )
        observations += training_observations.found
        left_out += [f"training {name}: {why}" for why in training_observations.left_out]
    newest = [
        steps
        for steps_here in stretches.group_by_configuration(observations).values()
        for steps in steps_here[-MAX_TRAININGS:]
    ]
    return TrainingObservations(
        tuple(sorted(newest, key=lambda steps: (steps.nodes, steps.batch, steps.until))), tuple(left_out)
    )


def _trains_alike(run: RunDir, task: TrainTask, probed_job: JobSpec, *, code: str) -> bool:
    """Return whether a training makes the steps that the probes measured."""
    facts, train = task.spec.train.facts, task.spec.train
    if facts.tunes or facts.measured_as or (train.diagnostics and not facts.scales):
        return False
    snapshot = run.code(task.code)
    return (snapshot.digest if snapshot is not None else "") == code and signature(task.spec) == signature(probed_job)


def _why_not_counted(measured: Sequence[Measured], task: TrainTask, environment: Mapping[str, Any] | None) -> str:
    """Say why steps of an attempt do not belong to the probes' fit; where a script's ran is not told."""
    if environment is None:
        return ""
    probe_environment = measured[0].environment
    if environment["hardware"] != probe_environment.hardware:
        return f"it ran on {environment['hardware']}, the probes on {probe_environment.hardware}"
    versions = {probe.environment.torch for probe in measured}
    if environment["torch"] not in versions:
        return f"it ran with torch {environment['torch']}, the probes with {', '.join(sorted(versions))}"
    alike = [probe.oversubscribed for probe in measured if probe.nodes == task.nodes] or [False]
    if environment.get("oversubscribed", False) and not all(alike):
        return "its ranks shared cores or GPUs"
    return ""
