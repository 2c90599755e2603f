"""Names in `pricing.qos_factors` and `pricing.partition_factors` that SLURM does not know: their factors count for no job."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tula_cli.cluster.slurm.command import call_slurm
from tula_cli.cluster.slurm.partitions import COMMAND_TIMEOUT
from tula_cli.cluster.slurm.site_facts import ALL_PARTITIONS, ALL_QOS, Call, first_fields
from tula_cli.plugins import nearest
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import Pricing


@dataclass(frozen=True)
class UnknownName:
    """A name that has a factor and is none of the site's."""

    about: str  # the key of the spec
    message: str
    advice: str


def unknown_names(
    pricing: Pricing, *, qos: Collection[str] | None, partitions: Collection[str] | None
) -> Iterator[UnknownName]:
    """Yield the names with a factor that are none of the site's.

    Args:
        pricing: has the factors.
        qos: of the site; None: nothing tells them.
        partitions: the same.
    """
    any_case = {name.lower() for name in qos or ()}  # as SLURM reads names of QOS
    for name, factor in pricing.qos_factors.items():
        if qos and name.lower() not in any_case:
            yield _unknown_factor("qos_factors", "QOS", name, factor, qos)
    for name, factor in pricing.partition_factors.items():
        if partitions and name not in partitions:
            yield _unknown_factor("partition_factors", "partition", name, factor, partitions)


def _unknown_factor(key: str, kind: str, name: str, factor: float, known_names: Collection[str]) -> UnknownName:
    message = f"SLURM knows no {kind} {name!r}, so its factor {factor:g} counts for no job"
    return UnknownName(f"pricing.{key}", message, nearest(name, known_names) or f"there are: {', '.join(known_names)}")


def warn_unknown_factors(spec: JobSpec, *, ask: Call = call_slurm) -> list[str]:
    """Return what to say of a job's factors; nothing where SLURM does not answer.

    Args:
        spec: the job; SLURM is asked only where it has factors.
        ask: what calls a command.
    """
    pricing = spec.pricing
    if spec.cluster.kind != "slurm":
        return []
    unknown_ = unknown_names(
        pricing,
        qos=_known_names(ask, ALL_QOS) if pricing.qos_factors else None,
        partitions=_known_names(ask, ALL_PARTITIONS) if pricing.partition_factors else None,
    )
    return [f"{unknown.about}: {unknown.message} ({unknown.advice})" for unknown in unknown_]


def _known_names(ask: Call, command: tuple[str, ...]) -> tuple[str, ...] | None:
    answer = ask(*command, patience=COMMAND_TIMEOUT)
    return first_fields(answer.text) if answer.ok else None
