"""The site's bins of wall time (`cluster.slurm.limits`): which of the searched nodes they allow, and for which measuring jobs."""

from collections.abc import Sequence

from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import ROOM, Slurm
from tula_cli.words import format_count, format_number


def describe_bins(spec: JobSpec) -> str:
    """Return the bins in words."""
    limits = (spec.cluster.slurm or Slurm()).limits
    return ", ".join(f"up to {format_count(limit.nodes)} {limit.hours:g} h" for limit in limits)


def list_allowed_nodes(spec: JobSpec) -> tuple[list[int], list[str]]:
    """Return the searched numbers of nodes that a bin holds, and what to say of the others."""
    slurm = spec.cluster.slurm or Slurm()
    allowed = [nodes for nodes in spec.search.nodes if slurm.longest(nodes)]
    beyond = [nodes for nodes in spec.search.nodes if nodes not in allowed]
    advice = f"search.nodes {beyond}: left out, the site lets no job have so many (cluster.slurm.limits: {describe_bins(spec)})"
    return allowed, [advice] if beyond else []


def require_allowed_nodes(spec: JobSpec, nodes: int) -> None:
    """Refuse a training on more nodes than any bin allows.

    Raises:
        SpecError: no bin holds so many.
    """
    if not (spec.cluster.slurm or Slurm()).longest(nodes):
        raise SpecError(
            f"{format_count(nodes)}: the site lets no job have so many (cluster.slurm.limits: {describe_bins(spec)})"
        )


def warn_too_short(spec: JobSpec, nodes: Sequence[int]) -> list[str]:
    """Return on which numbers of nodes no measuring job fits into its bin, and what to do about it."""
    slurm, needed_minutes = spec.cluster.slurm or Slurm(), spec.search.max_minutes + ROOM
    return [
        f"a measuring job takes up to {format_number(needed_minutes)} min (search.max_minutes and {ROOM} to end it), and the site allows"
        f" {format_count(count)} {format_number(slurm.longest(count))} min (cluster.slurm.limits): lower search.max_minutes"
        for count in nodes
        if slurm.longest(count) < needed_minutes
    ]
