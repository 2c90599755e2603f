"""Convert probe results to observations for the fits, and warn about measurements that make the fits doubtful."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tula_cli.errors import BadMeasurements, Infeasible
from tula_cli.models import claims, refresh
from tula_cli.models.out_of_memory import LESS_MEMORY, LESS_MEMORY_FOR_SCRIPT
from tula_cli.models.ramp.by_noise import NoisePath, warn_missing_noise
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.models.time.steptime import Observation
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import describe_probe_place, format_count

T = TypeVar("T", Measured, OutOfMemory, Failed)

Probe = tuple[int, int]
"""Nodes and local batch of a probe."""

_PIN = "pin one kind of node (cluster.slurm.constraint), delete the other kind's results, and run tula profile again"

_WAITING = 0.3  # a loader that a step waits for this share of its time sets the pace


@dataclass(frozen=True)
class OtherSizes:
    """Measurements of the same job on the same nodes with other numbers of GPUs; only the step-time model uses them."""

    probes: tuple[Measured, ...] = ()
    trained: tuple[TrainedSteps, ...] = ()


NO_OTHER_SIZES = OtherSizes()


class TooFew(BadMeasurements):
    """Too few probes were measured: wait for those under way, or run `tula profile` again."""


def as_observation(probe: Measured) -> Observation:
    return Observation(
        nodes=probe.nodes,
        gpus_per_node=probe.gpus_per_node,
        local_batch=probe.local_batch,
        step_times=probe.step_times,
        compute_time=math.nan if probe.compute_time is None else probe.compute_time,
    )


def warn_limits(spec: JobSpec, measured: Sequence[Measured], noise: NoisePath | None) -> list[str]:
    """Return warnings about upper bounds and omissions of the forecast, and about probes that contradict the job."""
    return [
        *warn_upper_bounds(spec, measured),
        *warn_other_algorithm(spec, measured),
        *claims.describe_doubts(measured),
        *warn_not_measured(spec, measured),
        *warn_missing_noise(spec, noise),
    ]


def warn_upper_bounds(spec: JobSpec, measured: Iterable[Measured]) -> list[str]:
    """Return the warning of a method whose forecast time is known to be an upper bound."""
    if not spec.train.facts.measured_as or not any(probe.nodes * probe.gpus_per_node > 1 for probe in measured):
        return []
    return [spec.train.facts.measured_as]


def warn_other_algorithm(spec: JobSpec, measured: Iterable[Measured]) -> list[str]:
    """Warn if NCCL's algorithm for its largest all-reduce on the most nodes (ring or tree) is not the modelled one."""
    probes = [probe for probe in measured if probe.environment.allreduce]
    if not probes:
        return []
    probe = max(probes, key=lambda probe: probe.nodes)
    chosen = probe.environment.allreduce[max(probe.environment.allreduce)].partition(",")[0]
    modelled = spec.cluster.collective
    if {chosen, modelled} != {"ring", "tree"}:
        return []
    return [
        f"NCCL chose a {chosen} for its largest all-reduces on {format_count(probe.nodes)}, and times are modelled as a"
        f" {modelled}'s: set cluster.collective: {chosen}"
    ]


def warn_not_measured(spec: JobSpec, measured: Sequence[Measured]) -> list[str]:
    """Return warnings about what the forecast leaves out because the probes did not measure it."""
    return [
        *_warn_left_out(spec, measured),
        *_warn_unknown_memory(spec, measured),
        *_warn_unknown_stages(spec, measured),
    ]


def _warn_unknown_stages(spec: JobSpec, measured: Sequence[Measured]) -> list[str]:
    if not spec.train.stages or len({probe.local_batch for probe in measured}) > 1:
        return []
    return [
        "the stages of train.ramp are taken to have steps as long as those of the batch after them, because one local batch was"
        " measured: times and costs are upper bounds"
    ]


def _warn_left_out(spec: JobSpec, measured: Sequence[Measured]) -> list[str]:
    overheads = [probe.overheads for probe in measured]
    no_eval = all(overhead.eval_batch is None or overhead.eval_batch_size is None for overhead in overheads)
    no_saves = all(overhead.checkpoint is None for overhead in overheads)
    missing = [
        *(["evaluation"] if no_eval or all(probe.eval_size is None for probe in measured) else []),
        *(["checkpoints"] if no_saves else []),
        *(["refreshes of the scaling factors"] if refresh.is_refresh_time_unknown(spec, measured) else []),
    ]
    if not missing:
        return []
    missing_text = f"no {missing[0]}" if len(missing) == 1 else f"neither {' nor '.join(missing)}"
    unsaved = spec.script is None and spec.train.checkpoint_every == "auto"
    lost = no_saves and spec.pricing.spot is not None and unsaved
    spot = "; on spot nodes an interruption is taken to lose what came since the epoch began" if lost else ""
    return [f"time and cost hold {missing_text} (not measured of the script){spot}"]


def _warn_unknown_memory(spec: JobSpec, measured: Sequence[Measured]) -> list[str]:
    on_gpu = [probe for probe in measured if probe.environment.device == "cuda"]
    if not on_gpu:
        return []
    if find_capacity(spec, measured, None) is None:
        largest = max(probe.local_batch for probe in on_gpu)
        return [
            f"how much memory a GPU has is not known: local batches above {largest}, the largest that ran, may not fit; set"
            " cluster.memory_per_gpu"
        ]
    if all(probe.memory.libraries is not None for probe in on_gpu):
        return []
    return [
        "what CUDA, cuBLAS and NCCL hold of a GPU's memory was not measured: it has to find room in what is kept free"
        f" ({MEMORY_MARGIN:.0%})"
    ]


def require_measurements(
    measured: Sequence[Measured], ooms: Sequence[OutOfMemory], failed: Sequence[Failed], *, script: bool
) -> None:
    if measured:
        return
    if ooms and not failed:
        least = min(oom.local_batch for oom in ooms)
        raise Infeasible(
            f"out of memory in every probe, down to a local batch of {least}",
            LESS_MEMORY_FOR_SCRIPT if script else LESS_MEMORY,
        )
    if failed:
        raise TooFew(
            f"no probe was measured; the one with {format_count(failed[0].nodes, 'node')} and local batch {failed[0].local_batch} failed:"
            f" {failed[0].message}",
            "see tula logs, then run tula profile again",
        )
    raise TooFew("no probe was measured", "run tula profile first")


def require_one_hardware(measured: Sequence[Measured]) -> None:
    if why := describe_mixed_hardware(measured):
        raise BadMeasurements(why, _PIN)


def describe_mixed_hardware(measured: Sequence[Measured]) -> str:
    """Describe probes on different hardware, which belong to different fits; empty if all ran on the same."""
    for probe in measured:
        if probe.environment.mixed:
            return f"{probe.id} ran on different hardware at once ({_get_hardware(probe)}): its times are those of the slowest"
    where: dict[str, list[str]] = {}
    for probe in measured:
        where.setdefault(probe.environment.hardware, []).append(probe.id)
    if len(where) < 2:
        return ""
    description = "; ".join(f"{hardware}: {', '.join(ids)}" for hardware, ids in where.items())
    return f"the probes ran on different hardware and cannot be fitted together ({description})"


def _get_hardware(probe: Measured) -> str:
    return "; ".join(f"{node.name}: {' and '.join(node.hardware)}" for node in probe.environment.nodes)


def find_capacity(spec: JobSpec, measured: Sequence[Measured], inspection: Inspection | None) -> int | None:
    """Return the bytes of one GPU; None if unbounded.

    The smallest that probes found, else the estimated or configured one.
    """
    capacities = [probe.capacity for probe in measured if probe.capacity is not None]
    if capacities:
        return min(capacities)
    return (inspection.capacity if inspection else None) or spec.cluster.memory_per_gpu


def list_measurement_warnings(measured: Sequence[Measured]) -> list[str]:
    """Return warnings about measurements that may not be representative."""
    return [
        *_warn_oversubscribed(measured),
        *_warn_software(measured),
        *_warn_thrashing(measured),
        *_warn_waiting_for_data(measured),
        *_warn_throttled(measured),
    ]


def _warn_oversubscribed(measured: Sequence[Measured]) -> list[str]:
    nodes = sorted({probe.nodes for probe in measured if probe.oversubscribed})
    if not nodes:
        return []
    listed = ", ".join(str(count) for count in nodes)
    shared = "GPUs" if any(probe.environment.device == "cuda" for probe in measured) else "cores"
    return [f"oversubscribed: more ranks than {shared} on {listed} nodes; these step times hold on this machine only"]


def _warn_software(measured: Sequence[Measured]) -> list[str]:
    versions = sorted({f"torch {probe.environment.torch}, driver {probe.environment.driver}" for probe in measured})
    differing = [probe for probe in measured if len({node.driver for node in probe.environment.nodes}) > 1]
    if len(versions) < 2 and not differing:
        return []
    return [f"the probes ran with different software ({'; '.join(versions)})"]


def _warn_thrashing(measured: Sequence[Measured]) -> list[str]:
    return [
        f"{_describe_configuration(probe)} flushed the allocator's cache {probe.allocator_retries} times: its steps are slower than need be"
        for probe in measured
        if probe.allocator_retries
    ]


def _warn_waiting_for_data(measured: Sequence[Measured]) -> list[str]:
    """Warn about steps limited by the data loader. Each rank has its own loader, so more nodes bring more loaders."""
    waits = [probe for probe in measured if _is_waiting_for_data(probe)]
    if not waits:
        return []
    return [
        f"input-bound: steps wait for the data loader for more than {_WAITING:.0%} of their time ({_describe_configurations(waits)}); it sets"
        f" the pace, and faster GPUs or links do not help there; more loader workers (train.workers) may{_describe_rates(waits)}"
    ]


def _is_waiting_for_data(probe: Measured) -> bool:
    """Return whether the loader limits the step time.

    Also if its workers deliver in bursts, so that most steps do not wait.
    """
    if probe.data_wait is not None and probe.data_wait > _WAITING * compute_trimmed_mean(probe.step_times):
        return True
    alone, cached = probe.loader_time, probe.cached_time
    return alone is not None and cached is not None and cached < (1 - _WAITING) * alone


def _describe_rates(waits: Iterable[Measured]) -> str:
    """Describe loader time and cached step time of the probe whose loader is furthest behind.

    Empty for older results.
    """
    rates = [(p.loader_time, p.cached_time, p) for p in waits if p.loader_time is not None and p.cached_time]
    if not rates:
        return ""
    alone, cached, probe = max(rates, key=lambda row: row[0] / row[1])
    return (
        f" (with {describe_probe_place(probe.nodes, probe.local_batch)} it makes the data of a step in {1000 * alone:.3g} ms, and a step on"
        f" data that is there takes {1000 * cached:.3g})"
    )


def _warn_throttled(measured: Sequence[Measured]) -> list[str]:
    """Warn if GPUs ran below their normal clocks during the timed steps."""
    throttled = [(probe, state) for probe in measured for state in probe.gpus or () if state.held_down]
    if not throttled:
        return []
    slowest = min((state for _, state in throttled), key=lambda state: state.sm_mhz)
    reasons = sorted({reason for _, state in throttled for reason in state.held_down})
    where = _describe_configurations(list({probe.id: probe for probe, _ in throttled}.values()))
    return [
        f"throttled: the clocks of GPUs were held down by {' and '.join(reasons)} while steps were timed ({where}; down to"
        f" {slowest.sm_mhz} MHz at {slowest.watts:.0f} W): a cooler GPU, or one with another power limit, takes another time"
    ]


def _describe_configurations(probes: Iterable[Measured]) -> str:
    """List the configurations of probes, grouped by nodes."""
    sizes: dict[int, list[str]] = {}
    for probe in probes:
        sizes.setdefault(probe.nodes, []).append(str(probe.local_batch))
    return "; ".join(f"{format_count(n)} at local batch {', '.join(batches)}" for n, batches in sizes.items())


def _describe_configuration(probe: Measured) -> str:
    return describe_probe_place(probe.nodes, probe.local_batch)
