"""What profiling a job is expected to take, beside what it may take at most."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.spec.job import JobSpec

ASSUMED_STEP = 0.1
"""Seconds of a step where no probe has told any."""
ASSUMED_START = 20.0
"""Seconds from the start of a job to its first step, the same."""


@dataclass(frozen=True)
class Expectation:
    """What all probes of a search take together."""

    hours: float  # one job after the other
    node_hours: float
    probes: int  # whose step times it follows from; 0: from `ASSUMED_STEP`

    @property
    def basis(self) -> str:
        """What it rests on, in words."""
        if not self.probes:
            return f"where a step takes {ASSUMED_STEP:g} s"
        return "as the probe there is took" if self.probes == 1 else f"as the {self.probes} probes there are took"


def expect_search(spec: JobSpec, jobs: Sequence[tuple[int, Sequence[int]]], run: RunDir | None) -> Expectation:
    """Return what a search is expected to take.

    Args:
        spec: the job.
        jobs: nodes and local batches of each of its jobs.
        run: of the job, whose probes tell how long a step takes; a batch that was not probed takes that of the nearest one.
    """
    return expect_from_probes(spec, jobs, measured_probes_of(run))


def expect_from_probes(
    spec: JobSpec, jobs: Sequence[tuple[int, Sequence[int]]], probes: Sequence[Measured]
) -> Expectation:
    """Return what a search is expected to take by some probes, which may be none; arguments else as of `expectation`."""
    start = statistics.median(probe.overheads.startup for probe in probes) if probes else ASSUMED_START
    most = 60 * spec.search.max_minutes
    seconds = [min(most, start + sum(_probe_seconds(spec, probes, local) for local in batches)) for _, batches in jobs]
    node_seconds = sum(nodes * seconds_of_job for (nodes, _), seconds_of_job in zip(jobs, seconds, strict=True))
    return Expectation(sum(seconds) / 3600, node_seconds / 3600, len(probes))


def nearest_step_time(probes: Sequence[Measured], local_batch: int) -> float | None:
    """Return what a step of the probe nearest to a local batch took, in seconds; None where none was measured."""
    return statistics.median(_nearest_probe(probes, local_batch).step_times) if probes else None


def measured_probes_of(run: RunDir | None) -> list[Measured]:
    """Return the probes of a run, which may not be there yet."""
    return [] if run is None or not run.exists else [r for r in run.results() if isinstance(r, Measured)]


def _probe_seconds(spec: JobSpec, probes: Sequence[Measured], local_batch: int) -> float:
    step = nearest_step_time(probes, local_batch)
    return spec.search.probe_seconds(ASSUMED_STEP if step is None else step)


def _nearest_probe(probes: Sequence[Measured], local_batch: int) -> Measured:
    return min(probes, key=lambda probe: max(probe.local_batch, local_batch) / min(probe.local_batch, local_batch))
