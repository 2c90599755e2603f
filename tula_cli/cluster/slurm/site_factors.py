"""The factors by which a site multiplies SLURM's billing (pricing.qos_factors, pricing.partition_factors)."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tula_cli.cluster import messages
from tula_cli.cluster.slurm.command import call_slurm
from tula_cli.cluster.slurm.site import ALL_PARTITIONS, ALL_QOS, COMMAND_TIMEOUT, Call, parse_first_fields
from tula_cli.diagnostics import Diagnostic
from tula_cli.plugins import suggest_nearest
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import Pricing


def compute_charge_factor(spec: JobSpec, *, qos: str, partition: str) -> float:
    """Return the site's factor on a bill beyond SLURM's (pricing.qos_factors, pricing.partition_factors)."""
    by_qos = {name.lower(): factor for name, factor in spec.pricing.qos_factors.items()}  # as SLURM reads their names
    by_partition = spec.pricing.partition_factors
    dearest = max(by_partition.get(name.strip(), 1.0) for name in partition.split(","))
    return by_qos.get(qos.lower(), 1.0) * dearest


# --- Names of factors that SLURM does not know


@dataclass(frozen=True)
class UnknownFactor:
    """A name in pricing factors that does not exist at the site."""

    key: str  # of the spec
    kind: str  # QOS or partition
    name: str
    factor: float
    advice: str  # the nearest name, or all

    @property
    def message(self) -> str:
        return f"SLURM has no {self.kind} {self.name!r}, so the factor {self.factor:g} has no effect"


def list_unknown_factors(
    pricing: Pricing, *, qos: Collection[str] | None, partitions: Collection[str] | None
) -> Iterator[UnknownFactor]:
    """Yield the names in pricing factors that do not exist at the site.

    Args:
        pricing: pricing with the factors.
        qos: names of the QOS of the site; None: unknown, not checked.
        partitions: names of the partitions of the site; None: unknown, not checked.
    """
    any_case = {name.lower() for name in qos or ()}  # as SLURM reads names of QOS
    for name, factor in pricing.qos_factors.items():
        if qos and name.lower() not in any_case:
            yield _make_unknown_factor("qos_factors", "QOS", name, factor, qos)
    for name, factor in pricing.partition_factors.items():
        if partitions and name not in partitions:
            yield _make_unknown_factor("partition_factors", "partition", name, factor, partitions)


def _make_unknown_factor(key: str, kind: str, name: str, factor: float, known_names: Collection[str]) -> UnknownFactor:
    advice = suggest_nearest(name, known_names) or f"there are: {', '.join(known_names)}"
    return UnknownFactor(f"pricing.{key}", kind, name, factor, advice)


def warn_unknown_factors(spec: JobSpec, *, ask: Call = call_slurm) -> list[Diagnostic]:
    """Return warnings about unknown names in a job's pricing factors; empty if SLURM does not answer.

    Args:
        spec: the job; SLURM is queried only if it has factors.
        ask: function that runs a command.
    """
    pricing = spec.pricing
    if spec.cluster.kind != "slurm":
        return []
    unknown_factors = list_unknown_factors(
        pricing,
        qos=_read_known_names(ask, ALL_QOS) if pricing.qos_factors else None,
        partitions=_read_known_names(ask, ALL_PARTITIONS) if pricing.partition_factors else None,
    )
    return [
        messages.unknown_pricing_factor(
            key=unknown.key, kind=unknown.kind, name=unknown.name, factor=unknown.factor, advice=unknown.advice
        )
        for unknown in unknown_factors
    ]


def _read_known_names(ask: Call, command: tuple[str, ...]) -> tuple[str, ...] | None:
    answer = ask(*command, patience=COMMAND_TIMEOUT)
    return parse_first_fields(answer.text) if answer.ok else None
