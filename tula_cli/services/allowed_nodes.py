"""Wall-time bins of the site (`cluster.slurm.limits`): which searched node counts and profiling jobs they allow."""

from collections.abc import Sequence

from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import ROOM, Slurm
from tula_cli.words import format_count, format_number


def describe_bins(spec: JobSpec) -> str:
    """Return a description of the site's bins."""
    limits = (spec.cluster.slurm or Slurm()).limits
    return ", ".join(f"up to {format_count(limit.nodes)} {limit.hours:g} h" for limit in limits)


def list_allowed_nodes(spec: JobSpec) -> tuple[list[int], list[str]]:
    """Return the node counts of the search that a bin allows, and a warning about the others, if any."""
    slurm = spec.cluster.slurm or Slurm()
    allowed = [nodes for nodes in spec.search.nodes if slurm.longest(nodes)]
    beyond = [nodes for nodes in spec.search.nodes if nodes not in allowed]
    advice = f"search.nodes {beyond}: left out, the site lets no job have so many (cluster.slurm.limits: {describe_bins(spec)})"
    return allowed, [advice] if beyond else []


def require_allowed_nodes(spec: JobSpec, nodes: int) -> None:
    """Reject a training on more nodes than any bin allows.

    Raises:
        SpecError: no bin allows that many nodes.
    """
    if not (spec.cluster.slurm or Slurm()).longest(nodes):
        raise SpecError(
            f"{format_count(nodes)}: the site lets no job have so many (cluster.slurm.limits: {describe_bins(spec)})"
        )


def warn_too_short(spec: JobSpec, nodes: Sequence[int]) -> list[str]:
    """Return a warning, with advice, for each number of nodes whose bin is too short for a profiling job."""
    slurm, needed_minutes = spec.cluster.slurm or Slurm(), spec.search.max_minutes + ROOM
    return [
        f"a measuring job takes up to {format_number(needed_minutes)} min (search.max_minutes and {ROOM} to end it), and the site allows"
        f" {format_count(count)} {format_number(slurm.longest(count))} min (cluster.slurm.limits): lower search.max_minutes"
        for count in nodes
        if slurm.longest(count) < needed_minutes
    ]
