"""The factors by which a site multiplies SLURM's billing (pricing.qos_factors, pricing.partition_factors)."""

from collections.abc import Callable

from tula_cli.cluster import messages
from tula_cli.cluster.slurm.command import CommandResult, call_slurm
from tula_cli.cluster.slurm.site import COMMAND_TIMEOUT
from tula_cli.diagnostics import Diagnostic
from tula_cli.plugins import suggest_nearest
from tula_cli.spec.job import JobSpec

Call = Callable[..., CommandResult]
ALL_QOS = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name")
ALL_PARTITIONS = ("sinfo", "--all", "--noheader", "--format=%R")
"""The commands that list all QOS and partitions of a site, also those closed to this user, one name per line."""


def compute_charge_factor(spec: JobSpec, *, qos: str, partition: str) -> float:
    """Return the site's factor on a bill beyond SLURM's (pricing.qos_factors, pricing.partition_factors)."""
    by_qos = {name.lower(): factor for name, factor in spec.pricing.qos_factors.items()}  # as SLURM reads their names
    by_partition = spec.pricing.partition_factors
    dearest = max(by_partition.get(name.strip(), 1.0) for name in partition.split(","))
    return by_qos.get(qos.lower(), 1.0) * dearest


def warn_unknown_factors(spec: JobSpec, *, ask: Call = call_slurm) -> list[Diagnostic]:
    """Return warnings about names in a job's pricing factors that SLURM does not know; empty if it does not answer.

    Args:
        spec: the job; SLURM is queried only if it has factors.
        ask: function that runs a command.
    """
    pricing, warnings = spec.pricing, []
    if spec.cluster.kind != "slurm":
        return []
    for key, kind, factors, command in (
        ("pricing.qos_factors", "QOS", pricing.qos_factors, ALL_QOS),
        ("pricing.partition_factors", "partition", pricing.partition_factors, ALL_PARTITIONS),
    ):
        known = _read_names(ask, command) if factors else []
        same_case = [name.lower() for name in known] if kind == "QOS" else known  # SLURM reads QOS in any case
        for name, factor in factors.items():
            if known and (name.lower() if kind == "QOS" else name) not in same_case:
                advice = suggest_nearest(name, known) or f"there are: {', '.join(known)}"
                warnings.append(
                    messages.unknown_pricing_factor(key=key, kind=kind, name=name, factor=factor, advice=advice)
                )
    return warnings


def _read_names(ask: Call, command: tuple[str, ...]) -> list[str]:
    """Return the lines that a command prints; empty if it fails."""
    answer = ask(*command, patience=COMMAND_TIMEOUT)
    return [line.strip() for line in answer.text.splitlines() if line.strip()] if answer.ok else []
