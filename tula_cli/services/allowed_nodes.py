"""Wall-time bins of the site (`cluster.slurm.limits`): which searched node counts and profiling jobs they allow."""

from collections.abc import Sequence

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.services import messages
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import ROOM, Slurm
from tula_cli.words import format_count


def describe_bins(spec: JobSpec) -> str:
    """Return a description of the site's bins."""
    limits = (spec.cluster.slurm or Slurm()).limits
    return ", ".join(f"{limit.hours:g} h for up to {format_count(limit.nodes)}" for limit in limits)


def list_allowed_nodes(spec: JobSpec) -> tuple[list[int], list[Diagnostic]]:
    """Return the node counts of the search that a bin allows, and a warning about the others, if any."""
    slurm = spec.cluster.slurm or Slurm()
    allowed = [nodes for nodes in spec.search.nodes if slurm.longest(nodes)]
    beyond = [nodes for nodes in spec.search.nodes if nodes not in allowed]
    return allowed, [messages.nodes_beyond_site_limit(nodes=beyond, limits=describe_bins(spec))] if beyond else []


def require_allowed_nodes(spec: JobSpec, nodes: int) -> None:
    """Reject a training on more nodes than any bin allows.

    Raises:
        SpecError: no bin allows that many nodes.
    """
    if not (spec.cluster.slurm or Slurm()).longest(nodes):
        raise SpecError(
            f"the site allows no job on {format_count(nodes)} (cluster.slurm.limits: {describe_bins(spec)})"
        )


def warn_too_short(spec: JobSpec, nodes: Sequence[int]) -> list[Diagnostic]:
    """Return a warning, with advice, for each number of nodes whose bin is too short for a profiling job."""
    slurm, needed_minutes = spec.cluster.slurm or Slurm(), spec.search.max_minutes + ROOM
    return [
        messages.time_limit_too_short(
            nodes=count, needed_minutes=needed_minutes, margin=ROOM, allowed_minutes=slurm.longest(count)
        )
        for count in nodes
        if slurm.longest(count) < needed_minutes
    ]
