"""Reports on observed jobs: the parts of a step, memory, and predictions for other numbers of GPUs.

With a single configuration, predictions are mostly based on the priors of the step-time model (`step_model.PRIORS`);
`benchmarks/observe` compares them with published measurements. Further jobs of the same script are fitted together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements
from tula_cli.models import messages
from tula_cli.models.claims import join_steps
from tula_cli.models.time.noise import Z90
from tula_cli.models.time.step_time import Observation, StepTimeFit, fit_step_time
from tula_cli.run.records.scripts import Heartbeat, RankResult
from tula_cli.spec.sections import MEMORY_MARGIN, MIN_TIMED_STEPS

MAX_ADVISED_COST_RATIO = 0.9
"""Share of the node-hours that a smaller request may need to be advised, with `MIN_ADVISED_CHANCE` as the least probability."""
MIN_ADVISED_CHANCE = 0.6
DATA_WAIT, LONG_TRAINING = 0.1, 60.0
"""Share of the training time above which the wait for data is pointed out, and seconds of the shortest such training: in
a shorter one, most of the wait is the start of the data loader."""
JOB_DIFFERENCE_SHARE = 0.05
"""Share by which the step time of another job differs for no reason that the model has."""
WARMUP_STEPS = 10
"""Steps of an observed job before those that are timed."""
MAX_TIMED_STEPS = 100
"""Most steps that are timed; synchronisation is measured in the steps after them."""
MIN_ADVISED_GROWTH = 1.5
"""Factor on the local batch from which free memory is pointed out."""


@dataclass(frozen=True)
class AlternativeRequest:
    """The same training at the same batch per GPU on another number of GPUs, relative to the observed job.

    Ratios are of the time and the node-hours for the same number of samples, each with a 90 % interval.
    """

    nodes: int
    gpus_per_node: int
    batch: int | None  # global batch; None if unknown
    step_seconds: float
    time_ratio: float
    time_low: float
    time_high: float
    node_hours_ratio: float
    node_hours_low: float
    node_hours_high: float
    saving_chance: float  # probability that it needs at most `MAX_ADVISED_COST_RATIO` of the node-hours


@dataclass(frozen=True)
class ObservedReport:
    """The measurements of one observed job. Seconds and bytes; None for what the job does not show."""

    script: str
    job: str
    nodes: int
    gpus_per_node: int  # GPUs per node, or processes per node on the CPU
    hardware: str
    local_batch: int | None  # samples per optimizer step on one GPU
    batch: int | None
    steps: int  # optimizer steps so far
    is_complete: bool  # whether the script ended by itself; if not, steps and shares are those of the last heartbeat
    step_seconds: float
    compute_seconds: float | None  # per step, without synchronisation and waits for data
    sync_seconds: float | None  # per step, not hidden by the backward pass
    data_seconds: float | None  # wait for data per step
    samples_per_second: float | None
    exposed_communication: float | None  # share of a step that is synchronisation
    training_seconds: float | None  # since the first step
    shares: dict[str, float]  # shares of that time: data, eval, epoch, save
    peak_bytes: int
    capacity_bytes: int | None
    batch_growth: float | None  # factor by which the local batch can grow within the memory of the GPU
    jobs_fitted: int  # observed jobs of this script that `other_requests` is based on
    configurations_fitted: int  # different configurations of these jobs: nodes, GPUs per node and batch
    other_requests: tuple[AlternativeRequest, ...]
    observed_at: float  # Unix time of the last record of the job
    notes: tuple[str, ...]  # quantities that were not measured, and why
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True)
class MeasuredJob:
    """The steps of one observed job, of all its ranks."""

    script: str
    job: str
    ranks: tuple[RankResult, ...]
    heartbeats: tuple[Heartbeat, ...]
    step_times: tuple[float, ...]
    data_seconds: float | None
    sync_seconds: float | None
    samples: float | None  # samples per step over all ranks
    observed_at: float

    @classmethod
    def from_records(
        cls, script: str, job: str, ranks: Sequence[RankResult], heartbeats: Sequence[Heartbeat], observed_at: float
    ) -> "MeasuredJob":
        """Return the measurements in the records of a job's ranks.

        Raises:
            BadMeasurements: there are too few steps, or not all ranks have written.
        """
        if not ranks:
            trained = max((heartbeat.step for heartbeat in heartbeats), default=0)
            raise BadMeasurements(
                f"{script}/{job}: no step has been measured yet ({trained} steps so far)",
                "run the same command again after the job has trained for half a minute",
            )
        if len(ranks) < ranks[0].world:
            raise BadMeasurements(
                f"{script}/{job}: only {len(ranks)} of {ranks[0].world} ranks have written their measurements",
                "all ranks must write to the same folder: put the folder on a shared file system (--folder), or start all ranks with srun or one torchrun",
            )
        steps = [step for step in join_steps(ranks) if not step.causes]
        if len(steps) < MIN_TIMED_STEPS:
            raise BadMeasurements(
                f"{script}/{job}: only {len(steps)} of {max(rank.steps for rank in ranks)} steps could be timed, but {MIN_TIMED_STEPS} are"
                f" needed (without evaluation or checkpoint, after the first {WARMUP_STEPS})",
                "observe a longer part of the training",
            )
        waits = [step.wait for step in steps if step.wait is not None]
        samples = [step.samples for step in steps if step.samples is not None]
        return cls(
            script=script,
            job=job,
            ranks=tuple(ranks),
            heartbeats=tuple(heartbeats),
            step_times=tuple(step.seconds for step in steps),
            data_seconds=median(waits) if len(waits) == len(steps) else None,
            sync_seconds=_compute_sync_seconds(ranks),
            samples=median(samples) if len(samples) == len(steps) else None,
            observed_at=observed_at,
        )

    @property
    def world(self) -> int:
        return self.ranks[0].world

    @property
    def nodes(self) -> int:
        return len({rank.host for rank in self.ranks})

    @property
    def gpus_per_node(self) -> int:
        return max(1, self.world // self.nodes)

    @property
    def local_batch(self) -> int | None:
        return None if self.samples is None else max(1, round(self.samples / self.world))

    @property
    def steps(self) -> int:
        """Steps so far."""
        return max([self.ranks[0].steps, *(heartbeat.step for heartbeat in self.heartbeats)])

    @property
    def step_seconds(self) -> float:
        return median(self.step_times)

    @property
    def kind(self) -> tuple[str, int | None]:
        """Hardware and number of parameters; jobs of a script are fitted together if both are equal."""
        return self.ranks[0].hardware, self.ranks[0].parameters

    def convert_to_observation(self) -> Observation:
        """Return the job as an observation of the step-time model."""
        compute_seconds = None if self.sync_seconds is None else self.step_seconds - self.sync_seconds
        return Observation(
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            local_batch=self.local_batch or 1,
            step_times=self.step_times,
            compute_time=math.nan if compute_seconds is None or compute_seconds <= 0 else compute_seconds,
        )


def _compute_sync_seconds(ranks: Sequence[RankResult]) -> float | None:
    """Return the seconds per step that the slowest rank spends on synchronisation: the others also wait for that rank."""
    if ranks[0].world == 1:
        return 0.0
    medians = [median(rank.split.sync) for rank in ranks if rank.split is not None and rank.split.sync]
    return min(medians) if len(medians) == len(ranks) else None


def make_observed_report(job: MeasuredJob, others: Sequence[MeasuredJob] = ()) -> ObservedReport:
    """Return the report on a job.

    Args:
        others: further jobs of the same script. Those on the same hardware are included in the fit, unless the batch is known
            for only one of the two jobs.
    """
    knows_batch = job.local_batch is not None
    comparable_jobs = [
        other for other in others if other.kind == job.kind and (other.local_batch is not None) == knows_batch
    ]
    fitted_jobs = [job, *comparable_jobs]
    configurations = {(other.nodes, other.gpus_per_node, other.local_batch) for other in fitted_jobs}
    seconds, sync = job.step_seconds, job.sync_seconds
    compute = None if sync is None else max(0.0, seconds - sync - (job.data_seconds or 0.0))
    peak, growth = _compute_peak_memory_and_growth(job)
    totals = [heartbeat.totals for heartbeat in job.heartbeats if heartbeat.totals is not None]
    training = max((total.get("training", 0.0) for total in totals), default=None)
    shares = {
        kind: max(total.get(kind, 0.0) for total in totals) / training
        for kind in ("data", "eval", "epoch", "save")
        if training
    }
    exposed_communication = None if sync is None else min(1.0, sync / seconds)
    requests = predict_alternative_requests(job, fitted_jobs)
    is_long = training is not None and training >= LONG_TRAINING
    return ObservedReport(
        script=job.script,
        job=job.job,
        nodes=job.nodes,
        gpus_per_node=job.gpus_per_node,
        hardware=job.ranks[0].hardware,
        local_batch=job.local_batch,
        batch=None if job.samples is None else round(job.samples),
        steps=job.steps,
        is_complete=all(rank.why == "ended" for rank in job.ranks),
        step_seconds=seconds,
        compute_seconds=compute,
        sync_seconds=sync,
        data_seconds=job.data_seconds,
        samples_per_second=None if job.samples is None else job.samples / seconds,
        exposed_communication=exposed_communication,
        training_seconds=training,
        shares=shares,
        peak_bytes=peak,
        capacity_bytes=min((rank.capacity or 0 for rank in job.ranks), default=0) or None,
        batch_growth=growth,
        jobs_fitted=len(fitted_jobs),
        configurations_fitted=len(configurations) if knows_batch else 0,
        other_requests=requests,
        observed_at=job.observed_at,
        notes=tuple(_list_report_notes(job)),
        warnings=tuple(_list_advice(job, exposed_communication, requests, shares if is_long else {}, growth)),
    )


def _list_report_notes(job: MeasuredJob) -> list[str]:
    notes = list(dict.fromkeys(job.ranks[0].notes))
    if job.sync_seconds is None and not notes:
        notes.append(
            f"The times for computing and for exchanging gradients were not measured, because the training has only {job.steps} steps. Train at least {WARMUP_STEPS + MAX_TIMED_STEPS} steps."
        )
    return notes


def _compute_peak_memory_and_growth(job: MeasuredJob) -> tuple[int, float | None]:
    """Return the peak memory in bytes, and the factor by which the local batch can grow; None if that is unknown.

    Parameters, gradients and optimizer state stay as they are, and all other memory grows with the batch.
    """
    peak = max((peak.allocated for rank in job.ranks for peak in rank.peak.values()), default=0)
    capacities = [rank.capacity for rank in job.ranks if rank.capacity]
    states = [sum(rank.bytes.values()) for rank in job.ranks if rank.bytes]
    if not capacities or not states or peak <= max(states):
        return peak, None
    return peak, max(0.0, (1 - MEMORY_MARGIN) * min(capacities) - max(states)) / (peak - max(states))


def list_alternative_sizes(nodes: int, gpus_per_node: int) -> list[tuple[int, int]]:
    """Return the nodes and GPUs per node to compare with: a quarter, half and twice as many."""
    if nodes > 1:
        return [(count, gpus_per_node) for count in sorted({max(1, nodes // 4), nodes // 2, 2 * nodes})]
    return [(1, count) for count in sorted({max(1, gpus_per_node // 4), max(1, gpus_per_node // 2)} - {gpus_per_node})]


def predict_alternative_requests(
    job: MeasuredJob, fitted_jobs: Sequence[MeasuredJob]
) -> tuple[AlternativeRequest, ...]:
    """Return what the job would need on other numbers of GPUs, with the same batch per GPU."""
    observations = [other.convert_to_observation() for other in fitted_jobs]
    return tuple(
        predict_alternative_request(observations, job.convert_to_observation(), nodes, gpus, samples=job.samples)
        for nodes, gpus in list_alternative_sizes(job.nodes, job.gpus_per_node)
    )


def predict_alternative_request(
    observations: Sequence[Observation],
    observed: Observation,
    nodes: int,
    gpus_per_node: int,
    *,
    samples: float | None = None,
) -> AlternativeRequest:
    """Return the request of other nodes, relative to the observed one.

    If several nodes were observed and one is requested, the speed of the gradient exchange inside a node is unknown.
    The prediction is then the mean of two: with all GPUs of a node as one replica, and with each GPU as a replica.

    Args:
        samples: samples per step of the observed job.
    """
    fits = [fit_step_time(observations, collective="ring")]
    nodes_and_gpus = [(nodes, gpus_per_node)]
    if nodes == 1 and observed.nodes > 1 and gpus_per_node > 1:
        single = [
            replace(observation, nodes=observation.nodes * observation.gpus_per_node, gpus_per_node=1)
            for observation in observations
        ]
        fits.append(fit_step_time(single, collective="ring"))
        nodes_and_gpus.append((nodes * gpus_per_node, 1))
    logs, variances = zip(
        *(
            _predict_log_step_time(fit, nodes_and_gpus_of_fit, observed.local_batch)
            for fit, nodes_and_gpus_of_fit in zip(fits, nodes_and_gpus, strict=True)
        ),
        strict=True,
    )
    log_seconds = float(np.mean(logs))
    deviation = math.sqrt(float(np.mean(variances)) + float(np.var(logs)))
    low, middle, high = (math.exp(log_seconds + z * deviation) / observed.seconds for z in (-Z90, 0.0, Z90))
    more = (observed.nodes * observed.gpus_per_node) / (nodes * gpus_per_node)
    hours = nodes / observed.nodes * more
    chance = NormalDist(log_seconds - math.log(observed.seconds), deviation or 1e-9).cdf(
        math.log(MAX_ADVISED_COST_RATIO / hours)
    )
    if more > 1:  # a step on fewer GPUs computes as much and synchronises less
        low, middle, high = min(low, 1.0), min(middle, 1.0), min(high, 1.0 + JOB_DIFFERENCE_SHARE)
    return AlternativeRequest(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        batch=None if samples is None else round(samples / more),
        step_seconds=middle * observed.seconds,
        time_ratio=middle * more,
        time_low=low * more,
        time_high=high * more,
        node_hours_ratio=middle * hours,
        node_hours_low=low * hours,
        node_hours_high=high * hours,
        saving_chance=chance,
    )


def _predict_log_step_time(fit: StepTimeFit, nodes_and_gpus: tuple[int, int], local_batch: int) -> tuple[float, float]:
    estimate = fit.predict(*nodes_and_gpus, local_batch)
    if estimate.low is None or estimate.high is None:
        return math.log(estimate.seconds), math.inf
    return math.log(estimate.seconds), (math.log(estimate.high / estimate.low) / (2 * Z90)) ** 2


def should_advise_request(request: AlternativeRequest) -> bool:
    """Return whether a smaller request probably saves a tenth of the node-hours (`benchmarks/observe` measures how often)."""
    return request.saving_chance >= MIN_ADVISED_CHANCE


def _list_advice(
    job: MeasuredJob,
    exposed_communication: float | None,
    requests: Sequence[AlternativeRequest],
    shares: dict[str, float],
    growth: float | None,
) -> list[Diagnostic]:
    """Return what to change, the most important first."""
    advice = []
    smaller = [request for request in requests if request.nodes * request.gpus_per_node < job.world]
    cheaper = [request for request in smaller if should_advise_request(request)]
    if cheaper and job.nodes > 1:
        best = max(cheaper, key=lambda request: request.nodes)
        advice.append(
            messages.fewer_nodes_are_cheaper(
                nodes=job.nodes,
                exposed_communication=exposed_communication,
                fewer=best.nodes,
                time_ratio=best.time_ratio,
                node_hours_ratio=best.node_hours_ratio,
                low=best.node_hours_low,
                high=best.node_hours_high,
            )
        )
    if shares.get("data", 0.0) > DATA_WAIT:
        loader = job.ranks[0].loader
        workers = None if loader is None else loader.workers
        advice.append(messages.data_waits_are_long(share=shares["data"], workers=workers))
    if growth is not None and growth >= MIN_ADVISED_GROWTH:
        advice.append(messages.larger_batch_fits(growth=growth, local_batch=job.local_batch))
    return advice
