"""What the probes of two runs were measured on: software, hardware, clocks."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tula_cli.run.records.probes import Measured
from tula_cli.services.comparison.between_runs.differing import Differing, differing, several
from tula_cli.words import amount

_CLOCKS_APART = 0.03
_WATTS_APART = 0.1
"""Shares: a GPU's clock and draw are never twice the same to the last digit."""


def environment_differences(
    before: Sequence[Measured], after: Sequence[Measured], *, part: str = ""
) -> tuple[Differing, ...]:
    """Return what two sets of probes were not measured alike on; nothing where either is empty.

    Args:
        before: probes of the one run, on one type of node.
        after: those of the other.
        part: the type of node.
    """
    if not before or not after:
        return ()
    told = differing(_software(before), _software(after), part=part)
    return (*told, *_gpu_states(before, after, part), *_variables(before, after, part))


def _software(probes: Sequence[Measured]) -> dict[str, str | None]:
    """Return what the probes tell of their surroundings, each value once, in words."""
    found = [probe.environment for probe in probes]
    scripts = [probe.script for probe in probes if probe.script is not None]
    reserved = [probe.capacity for probe in probes if probe.capacity is not None]
    return {
        "hardware": several(one.hardware for one in found),
        "device": several(one.device for one in found),
        "GPU driver": several(one.driver for one in found),
        "torch": several(one.torch for one in found),
        "torchvision": several(one.torchvision for one in found),
        "CUDA": several(one.cuda for one in found),
        "NCCL": several(one.nccl for one in found),
        "backend": several(one.backend for one in found),
        "all-reduce": several(how for one in found for how in one.allreduce.values()),
        "Python": several(one.python for one in found),
        "tula": several(one.tula for one in found),
        "system": several(one.system for one in found),
        "data-loader processes": several(one.workers for one in found),
        "memory for a rank": several(map(amount, reserved)),
        "samples of the dataset": several(probe.dataset_size for probe in probes),
        "optimizer of the script": several(one.optimizer for one in scripts),
        "parameters of the script": several(one.parameters for one in scripts),
        "hosts": several(sorted({host for one in found for host in one.hosts})),
    }


def _gpu_states(before: Sequence[Measured], after: Sequence[Measured], part: str) -> tuple[Differing, ...]:
    """Return how clocks, power and what holds clocks down differ, as NVML told at the end of the probes' timed steps."""
    one, other = ([probe.gpus[1] for probe in probes if probe.gpus] for probes in (before, after))
    if not one or not other:
        return ()
    found = []
    clocks = [statistics.median(state.sm_mhz for state in states) for states in (one, other)]
    if clocks[0] and abs(clocks[1] / clocks[0] - 1) > _CLOCKS_APART:
        found.append(Differing("GPU clocks (MHz)", round(clocks[0]), round(clocks[1]), part))
    watts = [statistics.median(state.watts for state in states) for states in (one, other)]
    if watts[0] and abs(watts[1] / watts[0] - 1) > _WATTS_APART:
        found.append(Differing("GPU power (W)", round(watts[0]), round(watts[1]), part))
    held = [several(sorted({why for state in states for why in state.held_down})) for states in (one, other)]
    if held[0] != held[1]:
        found.append(Differing("clocks held down by", held[0], held[1], part))
    return tuple(found)


def _variables(before: Sequence[Measured], after: Sequence[Measured], part: str) -> tuple[Differing, ...]:
    one, other = (_merged(probes) for probes in (before, after))
    return tuple(
        Differing(f"variable {found.about}", found.before, found.after, part)
        for found in differing(one, other, part=part)
    )


def _merged(probes: Sequence[Measured]) -> Mapping[str, Any]:
    names = dict.fromkeys(name for probe in probes for name in probe.environment.variables)
    return {name: several(probe.environment.variables.get(name) for probe in probes) for name in names}
