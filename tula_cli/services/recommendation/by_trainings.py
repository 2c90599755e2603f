"""Which trainings of a run tell of its step times, beside the probes, and what."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tula_cli.models.time import stretches
from tula_cli.models.time.stretches import Told
from tula_cli.run.code import measured_with
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.run.records.tasks import ProbeTask, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import signature

NEWEST = 5
"""Trainings of one configuration that count: more tell next to nothing beside them, of days longer ago."""


def told_by_trainings(run: RunDir, spec: JobSpec, results: Sequence[Measured | OutOfMemory | Failed]) -> Told:
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
        return Told()
    tasks = run.tasks()
    asked = next((task.spec for task in tasks if isinstance(task, ProbeTask)), spec)
    snapshot = measured_with(run)
    found: list[TrainedSteps] = []
    left_out: list[str] = []
    for name in sorted(names):
        own = [task for task in tasks if isinstance(task, TrainTask) and task.signature == name]
        if not own or not _alike(run, own[-1], asked, code="" if snapshot is None else snapshot.digest):
            continue
        told = stretches.told_by(own, run.training(name).sampled_metrics(), functools.partial(_refused, measured))
        found += told.found
        left_out += [f"training {name}: {why}" for why in told.left_out]
    newest = [one for own in stretches.by_place(found).values() for one in own[-NEWEST:]]
    return Told(tuple(sorted(newest, key=lambda one: (one.nodes, one.batch, one.until))), tuple(left_out))


def _alike(run: RunDir, task: TrainTask, asked: JobSpec, *, code: str) -> bool:
    """Return whether a training makes the steps that the probes measured."""
    facts, train = task.spec.train.facts, task.spec.train
    if facts.tunes or facts.measured_as or (train.diagnostics and not facts.scales):
        return False
    known = run.code(task.code)
    return (known.digest if known is not None else "") == code and signature(task.spec) == signature(asked)


def _refused(measured: Sequence[Measured], task: TrainTask, environment: Mapping[str, Any] | None) -> str:
    """Say why steps of an attempt do not belong to the probes' fit; where a script's ran is not told."""
    if environment is None:
        return ""
    known = measured[0].environment
    if environment["hardware"] != known.hardware:
        return f"it ran on {environment['hardware']}, the probes on {known.hardware}"
    versions = {probe.environment.torch for probe in measured}
    if environment["torch"] not in versions:
        return f"it ran with torch {environment['torch']}, the probes with {', '.join(sorted(versions))}"
    alike = [probe.oversubscribed for probe in measured if probe.nodes == task.nodes] or [False]
    if environment.get("oversubscribed", False) and not all(alike):
        return "its ranks shared cores or GPUs"
    return ""
