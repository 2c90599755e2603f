"""The queue beside the run: `--objective result-time`."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from tula_cli.cluster.slurm.accounting.waits import Estimate, SlurmQueue, WaitHistory, with_limit
from tula_cli.errors import SpecError
from tula_cli.models.choice.objective import Objective
from tula_cli.models.choice.offers import Offers
from tula_cli.models.queue.result_time import LinkWaits, limits_to_try, result_columns
from tula_cli.models.queue.size_classes import at_least, wait_bound
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.services.recommendation.measured import TypeMeasurements
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import Slurm
from tula_cli.words import duration, plural

MOST_ASKED = 24
"""Estimates of the scheduler's that one answer asks for."""


class Queue(Protocol):
    """Who knows of waits; tests have one that makes them up."""

    def history(self, run: RunDir, spec: JobSpec, *, now: float) -> WaitHistory:
        """Return waits of others, in the last 14 days."""
        ...

    def estimate(self, run: RunDir, spec: JobSpec, *, nodes: int, minutes: int, now: float) -> Estimate:
        """Return the scheduler's own estimate of a wait."""
        ...


def with_waits(
    rows: Offers,
    all_measurements: Sequence[TypeMeasurements],
    *,
    objective: Objective,
    now: float,
    queue: Queue | None = None,
) -> tuple[Offers, tuple[str, ...]]:
    """Return forecasts with their time to the result, and what waits rest on; without them where no objective asks for it.

    Args:
        rows: within the limits.
        all_measurements: of each type of nodes.
        objective: what is chosen by.
        now: Unix time.
        queue: who knows of waits; SLURM where nothing is said.

    Raises:
        SpecError: there is no queue.
    """
    if objective != "result-time":
        return rows, ()
    asked = queue or SlurmQueue()
    waits: dict[tuple[str, int], list[LinkWaits]] = {}
    words: list[str] = []
    for measurements in all_measurements:
        spec = measurements.part.spec
        if spec.cluster.kind != "slurm":
            raise SpecError(
                f"--objective result-time: cluster.kind is {spec.cluster.kind}, "
                + (
                    "where no job waits in a queue"
                    if spec.cluster.kind == "local"
                    else "of whose waits nothing is told"
                ),
                "choose by time",
            )
        counts = sorted({int(nodes) for nodes in rows.nodes[rows.type == measurements.type]})
        found, told = _of_type(measurements, counts, asked, now)
        waits |= {(measurements.type, nodes): of for nodes, of in found.items()}
        words += [f"{measurements.prefix}{text}" for text in told]
    restart = max(_restart(measurements) for measurements in all_measurements)
    return replace(rows, result_time=result_columns(rows, waits, restart=restart)), tuple(words)


def _of_type(
    measurements: TypeMeasurements, counts: Sequence[int], queue: Queue, now: float
) -> tuple[dict[int, list[LinkWaits]], list[str]]:
    """Return the waits on each number of nodes, by time limit, and what they rest on."""
    part = measurements.part
    slurm, restart = part.spec.cluster.slurm or Slurm(), _restart(measurements) / 60
    limits = {nodes: limits_to_try(slurm.job_minutes(nodes), restart=restart) for nodes in counts}
    history = queue.history(part.run, part.spec, now=now)
    found: dict[int, list[LinkWaits]] = {nodes: [] for nodes in counts}
    estimates: list[Estimate] = []
    # The job's own limit first: where there are many numbers of nodes, estimates are asked for no others.
    for minutes in sorted({minutes for own in limits.values() for minutes in own}, reverse=True):
        for nodes in [nodes for nodes in counts if minutes in limits[nodes]]:
            bound = wait_bound(history.waits, nodes=nodes, minutes=minutes, now=now)
            told = None
            if len(estimates) < MOST_ASKED:
                estimates.append(queue.estimate(part.run, part.spec, nodes=nodes, minutes=minutes, now=now))
                told = estimates[-1].wait
            later = bound.seconds if bound else told or 0.0
            first = later if told is None else told
            found[nodes].append(LinkWaits(minutes, first, later, at_least(bound, told) or 0.0))
    return found, [_basis(history), _estimated(estimates)]


def _basis(history: WaitHistory) -> str:
    if not history.waits:
        return f"no wait is known ({history.words}): bounds are the scheduler's own lower estimates, and may well be too low"
    return f"bounds of 90 % by waits of {history.words}"


def _estimated(estimates: Sequence[Estimate]) -> str:
    told = [one for one in estimates if one.wait is not None]
    if not told:
        why = estimates[0].words if estimates else "nothing was asked"
        return f"the scheduler estimates no start ({why})"
    return f"the first job's wait by sbatch --test-only, {len(told)} of {plural(len(estimates), 'question')} answered"


def _restart(measurements: TypeMeasurements) -> float:
    """Return the seconds that a job takes before it trains."""
    starts = [result.overheads.startup for result in measurements.results if isinstance(result, Measured)]
    return statistics.median(starts) if starts else 0.0


def wait_words(choice: Prediction, basis: Sequence[str]) -> str:
    """Say what the wait of the choice is taken to be, bounded by, and rests on; empty where the queue was not asked."""
    found = choice.result_time
    if found is None:
        return ""
    jobs = f"{plural(found.links, 'job')} of {found.minutes} min"
    return (
        f"; the result is there after {duration(3600 * found.hours)}, of which {duration(3600 * found.wait)} in the queue "
        f"(90 % bound {duration(3600 * found.bound)}) for {jobs}; {'; '.join(basis)}"
    )


def told_of(found: Recommendation, basis: tuple[str, ...]) -> dict[str, Any]:
    """Return what waits rest on, as fields of an answer."""
    return {"queue": basis, "reason": f"{found.reason}{wait_words(found.choice, basis)}"}


def as_chosen(spec: JobSpec, choice: Prediction | None) -> JobSpec:
    """Return a job with the time limit that its choice goes with, where the queue had a part in that."""
    return spec if choice is None or choice.result_time is None else with_limit(spec, choice.result_time.minutes)


def first_bound(found: Recommendation | None, *, nodes: int, batch: int) -> float | None:
    """Return what the wait of a training's first job was bounded by, seconds; None where it is not the recommended one."""
    choice = found.choice if found is not None else None
    if choice is None or choice.result_time is None or (choice.nodes, choice.batch) != (nodes, batch):
        return None
    return 3600 * choice.result_time.first_bound
