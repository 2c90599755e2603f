"""What the probes of two runs were measured on: software, hardware, clocks."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tula_cli.run.records.probes import Measured
from tula_cli.services.comparison.between_runs.differing import FieldDifference, compare_mappings, join_distinct
from tula_cli.words import amount

_MIN_CLOCK_DIFFERENCE = 0.03
_MIN_WATT_DIFFERENCE = 0.1
"""Shares: a GPU's clock and draw are never twice the same to the last digit."""


def environment_differences(
    before: Sequence[Measured], after: Sequence[Measured], *, part: str = ""
) -> tuple[FieldDifference, ...]:
    """Return what two sets of probes were not measured alike on; nothing where either is empty.

    Args:
        before: probes of the one run, on one type of node.
        after: those of the other.
        part: the type of node.
    """
    if not before or not after:
        return ()
    differences = compare_mappings(_describe_software(before), _describe_software(after), part=part)
    return (*differences, *_compare_gpu_states(before, after, part), *_compare_variables(before, after, part))


def _describe_software(probes: Sequence[Measured]) -> dict[str, str | None]:
    """Return what the probes tell of their surroundings, each value once, in words."""
    environments = [probe.environment for probe in probes]
    scripts = [probe.script for probe in probes if probe.script is not None]
    reserved = [probe.capacity for probe in probes if probe.capacity is not None]
    return {
        "hardware": join_distinct(environment.hardware for environment in environments),
        "device": join_distinct(environment.device for environment in environments),
        "GPU driver": join_distinct(environment.driver for environment in environments),
        "torch": join_distinct(environment.torch for environment in environments),
        "torchvision": join_distinct(environment.torchvision for environment in environments),
        "CUDA": join_distinct(environment.cuda for environment in environments),
        "NCCL": join_distinct(environment.nccl for environment in environments),
        "backend": join_distinct(environment.backend for environment in environments),
        "all-reduce": join_distinct(how for environment in environments for how in environment.allreduce.values()),
        "Python": join_distinct(environment.python for environment in environments),
        "tula": join_distinct(environment.tula for environment in environments),
        "system": join_distinct(environment.system for environment in environments),
        "data-loader processes": join_distinct(environment.workers for environment in environments),
        "memory for a rank": join_distinct(map(amount, reserved)),
        "samples of the dataset": join_distinct(probe.dataset_size for probe in probes),
        "optimizer of the script": join_distinct(environment.optimizer for environment in scripts),
        "parameters of the script": join_distinct(environment.parameters for environment in scripts),
        "hosts": join_distinct(sorted({host for environment in environments for host in environment.hosts})),
    }


def _compare_gpu_states(
    before: Sequence[Measured], after: Sequence[Measured], part: str
) -> tuple[FieldDifference, ...]:
    """Return how clocks, power and what holds clocks down differ, as NVML told at the end of the probes' timed steps."""
    states_before, states_after = ([probe.gpus[1] for probe in probes if probe.gpus] for probes in (before, after))
    if not states_before or not states_after:
        return ()
    differences = []
    clocks = [statistics.median(state.sm_mhz for state in states) for states in (states_before, states_after)]
    if clocks[0] and abs(clocks[1] / clocks[0] - 1) > _MIN_CLOCK_DIFFERENCE:
        differences.append(FieldDifference("GPU clocks (MHz)", round(clocks[0]), round(clocks[1]), part))
    watts = [statistics.median(state.watts for state in states) for states in (states_before, states_after)]
    if watts[0] and abs(watts[1] / watts[0] - 1) > _MIN_WATT_DIFFERENCE:
        differences.append(FieldDifference("GPU power (W)", round(watts[0]), round(watts[1]), part))
    limits = [
        join_distinct(sorted({why for state in states for why in state.held_down}))
        for states in (states_before, states_after)
    ]
    if limits[0] != limits[1]:
        differences.append(FieldDifference("clocks held down by", limits[0], limits[1], part))
    return tuple(differences)


def _compare_variables(before: Sequence[Measured], after: Sequence[Measured], part: str) -> tuple[FieldDifference, ...]:
    variables_before, variables_after = (_merge_variables(probes) for probes in (before, after))
    return tuple(
        FieldDifference(f"variable {difference.about}", difference.before, difference.after, part)
        for difference in compare_mappings(variables_before, variables_after, part=part)
    )


def _merge_variables(probes: Sequence[Measured]) -> Mapping[str, Any]:
    names = dict.fromkeys(name for probe in probes for name in probe.environment.variables)
    return {name: join_distinct(probe.environment.variables.get(name) for probe in probes) for name in names}
