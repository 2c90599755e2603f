"""Convert probe results to observations for the fits, and warn about measurements that make the fits doubtful."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, Infeasible
from tula_cli.models import claims, messages, refresh
from tula_cli.models.ramp import NoisePath, warn_missing_noise
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.models.time.step_time import Observation
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import describe_probe_configuration, format_count

_PIN_HARDWARE_HINT = "set cluster.slurm.constraint to request one kind of node, delete the results of the other nodes in results/ of the run, and run tula profile again"

_MIN_WAITING_SHARE = 0.3  # share of a step spent waiting for the loader from which on the loader is the bottleneck


@dataclass(frozen=True)
class OtherGpuCountMeasurements:
    """Measurements of the same job on the same nodes with other numbers of GPUs; only the step-time model uses them."""

    probes: tuple[Measured, ...] = ()
    trained: tuple[TrainedSteps, ...] = ()


NO_OTHER_SIZES = OtherGpuCountMeasurements()


class TooFewMeasurements(BadMeasurements):
    """Too few probes were measured: wait for those under way, or run `tula profile` again."""


def convert_to_observation(probe: Measured) -> Observation:
    """Return a probe as an observation of the step-time model; the compute time is nan if it was not measured."""
    return Observation(
        nodes=probe.nodes,
        gpus_per_node=probe.gpus_per_node,
        local_batch=probe.local_batch,
        step_times=probe.step_times,
        compute_time=math.nan if probe.compute_time is None else probe.compute_time,
    )


def warn_forecast_limits(spec: JobSpec, measured: Sequence[Measured], noise: NoisePath | None) -> Iterator[Diagnostic]:
    """Yield warnings about upper bounds and omissions of the forecast, and about probes that contradict the job."""
    if spec.train.training_method.probes_overestimate and any(p.nodes * p.gpus_per_node > 1 for p in measured):
        yield messages.times_are_upper_bounds(method=spec.train.method)
    # of the probes that recorded the algorithm that NCCL chose by the size of an all-reduce
    widest = max(measured, key=lambda probe: probe.nodes if probe.environment.allreduce else 0, default=None)
    if widest is not None and (algorithms := widest.environment.allreduce):
        chosen, modelled = algorithms[max(algorithms)].partition(",")[0], spec.cluster.collective
        if {chosen, modelled} == {"ring", "tree"}:
            yield messages.other_collective(chosen=chosen, modelled=modelled, nodes=widest.nodes)
    yield from claims.warn_inconsistent_probes(measured)
    overheads = [probe.overheads for probe in measured]
    no_eval = all(overhead.eval_batch is None or overhead.eval_batch_size is None for overhead in overheads)
    no_saves = all(overhead.checkpoint is None for overhead in overheads)
    missing = [
        *(["evaluation"] if no_eval or all(probe.eval_size is None for probe in measured) else []),
        *(["checkpoints"] if no_saves else []),
        *(["updates of the AGS factors"] if refresh.is_refresh_time_unknown(spec, measured) else []),
    ]
    if missing:
        unsaved = spec.script is None and spec.train.checkpoint_every == "auto"
        lost = no_saves and spec.pricing.spot is not None and unsaved
        yield messages.times_exclude(missing=missing, epochs_lost_on_spot=lost)
    if on_gpu := [probe for probe in measured if probe.environment.device == "cuda"]:
        if find_capacity(spec, measured, None) is None:
            yield messages.gpu_memory_unknown(largest_local_batch=max(probe.local_batch for probe in on_gpu))
        elif any(probe.memory.libraries is None for probe in on_gpu):
            yield messages.library_memory_not_measured(margin=MEMORY_MARGIN)
    if spec.train.stages and len({probe.local_batch for probe in measured}) == 1:
        yield messages.stage_times_not_measured()
    if spec.train.stages == "noise":
        yield from warn_missing_noise(noise)


def require_measurements(
    spec: JobSpec, measured: Sequence[Measured], ooms: Sequence[OutOfMemory], failed: Sequence[Failed]
) -> None:
    if measured:
        return
    if ooms and not failed:
        least = min(oom.local_batch for oom in ooms)
        raise Infeasible(
            f"every probe ran out of memory, down to local batch {least}",
            spec.workload.less_memory_hint,
        )
    if failed:
        raise TooFewMeasurements(
            f"no probe was measured; the one on {describe_probe_configuration(failed[0].nodes, failed[0].local_batch)} failed:"
            f" {failed[0].message}",
            "read the log with tula logs, correct the cause, and run tula profile again",
        )
    raise TooFewMeasurements("no probe was measured", "run tula profile first")


def require_same_hardware(measured: Sequence[Measured]) -> None:
    if why := describe_mixed_hardware(measured):
        raise BadMeasurements(why, _PIN_HARDWARE_HINT)


def describe_mixed_hardware(measured: Sequence[Measured]) -> str:
    """Describe probes on different hardware, which belong to different fits; empty if all ran on the same."""
    for probe in measured:
        if probe.environment.is_mixed:
            nodes = "; ".join(f"{node.name}: {' and '.join(node.hardware)}" for node in probe.environment.nodes)
            return f"{probe.id} ran on nodes with different hardware ({nodes}), so the slowest determined its times"
    where: dict[str, list[str]] = {}
    for probe in measured:
        where.setdefault(probe.environment.hardware, []).append(probe.id)
    if len(where) < 2:
        return ""
    description = "; ".join(f"{hardware}: {', '.join(ids)}" for hardware, ids in where.items())
    return f"the probes ran on different hardware, so one model cannot describe them ({description})"


def find_capacity(spec: JobSpec, measured: Sequence[Measured], inspection: Inspection | None) -> int | None:
    """Return the bytes of one GPU; None if unbounded.

    The smallest that probes found, else the estimated or configured one.
    """
    capacities = [probe.capacity for probe in measured if probe.capacity is not None]
    if capacities:
        return min(capacities)
    return (inspection.capacity if inspection else None) or spec.cluster.memory_per_gpu


def list_measurement_warnings(measured: Sequence[Measured]) -> Iterator[Diagnostic]:
    """Yield warnings about measurements that may not be representative."""
    if shared_node_counts := sorted({probe.nodes for probe in measured if probe.oversubscribed}):
        on_gpus = any(probe.environment.device == "cuda" for probe in measured)
        yield messages.oversubscribed(nodes=shared_node_counts, shared="GPUs" if on_gpus else "cores")
    versions = sorted({f"torch {probe.environment.torch}, driver {probe.environment.driver}" for probe in measured})
    if len(versions) > 1 or any(len({node.driver for node in p.environment.nodes}) > 1 for p in measured):
        yield messages.software_differs(versions=versions)
    for probe in measured:
        if probe.allocator_retries:
            where = describe_probe_configuration(probe.nodes, probe.local_batch)
            yield messages.allocator_thrashed(where=where, retries=probe.allocator_retries)
    if waiting_probes := [probe for probe in measured if _is_waiting_for_data(probe)]:
        yield _warn_waiting_for_data(waiting_probes)
    if throttled := [(probe, state) for probe in measured for state in probe.gpus or () if state.held_down]:
        slowest = min((state for _, state in throttled), key=lambda state: state.sm_mhz)
        reasons = sorted({reason for _, state in throttled for reason in state.held_down})
        where = _describe_configurations(list({probe.id: probe for probe, _ in throttled}.values()))
        yield messages.gpus_throttled(reasons=reasons, where=where, megahertz=slowest.sm_mhz, watts=slowest.watts)


def _warn_waiting_for_data(waiting_probes: Sequence[Measured]) -> Diagnostic:
    """Warn about steps limited by the data loader. Each rank has its own loader, so more nodes bring more loaders."""
    timed = [probe for probe in waiting_probes if probe.loader_time is not None and probe.cached_time]
    slowest = max(timed, key=lambda probe: (probe.loader_time or 0.0) / (probe.cached_time or 1.0), default=None)
    return messages.waiting_for_data(
        share=_MIN_WAITING_SHARE,
        where=_describe_configurations(waiting_probes),
        loader_ms=None if slowest is None else 1000 * (slowest.loader_time or 0.0),
        step_ms=None if slowest is None else 1000 * (slowest.cached_time or 0.0),
        slowest="" if slowest is None else describe_probe_configuration(slowest.nodes, slowest.local_batch),
    )


def _is_waiting_for_data(probe: Measured) -> bool:
    """Return whether the loader limits the step time.

    Also if its workers deliver in bursts, so that most steps do not wait.
    """
    if probe.data_wait is not None and probe.data_wait > _MIN_WAITING_SHARE * compute_trimmed_mean(probe.step_times):
        return True
    loader_time, cached = probe.loader_time, probe.cached_time
    return loader_time is not None and cached is not None and cached < (1 - _MIN_WAITING_SHARE) * loader_time


def _describe_configurations(probes: Iterable[Measured]) -> str:
    """List the configurations of probes, grouped by nodes."""
    sizes: dict[int, list[str]] = {}
    for probe in probes:
        sizes.setdefault(probe.nodes, []).append(str(probe.local_batch))
    return "; ".join(f"{format_count(n)} at local batch {', '.join(batches)}" for n, batches in sizes.items())
