"""Wall-time bins of the site (`cluster.slurm.limits`): which nodes, profiling jobs and trainings they allow."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import Infeasible, SpecError
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Prediction
from tula_cli.services import messages
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import MAX_LINKS, ROOM, SPARE_LINKS, Slurm
from tula_cli.words import format_count, format_duration, format_number

if TYPE_CHECKING:  # the models, which other commands do not need
    from tula_cli.models.choice.candidates import Candidates
    from tula_cli.models.choice.columns import Flags, Floats
    from tula_cli.services.recommendation.measurements import Results, TypeMeasurements


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


# --- The candidates that can be trained within the bins

LINKS = int((MAX_LINKS - SPARE_LINKS) / 1.5)
"""Maximum number of jobs that a training may need: the number submitted is half as many again, and two."""
_MARGIN = 1.5
"""Minutes at the end of a job in which it is signalled to save and exit."""


def find_restart_seconds(results: "Results") -> tuple[float, float]:
    """Return the seconds of a job start and of a checkpoint, the longest that were measured."""
    overheads = [result.overheads for result in results if isinstance(result, Measured)]
    return max((overhead.startup for overhead in overheads), default=0.0), max(
        (overhead.checkpoint or 0.0 for overhead in overheads), default=0.0
    )


def _fits_wall_time(rows: "Candidates", spec: JobSpec, results: "Results") -> "Flags":
    """Return which configurations of one node type can be trained within the wall-time bins, shape (n,).

    A training fits in one job, or in a chain with no more jobs than are submitted, each of which has time left after
    its start and checkpoint.
    """
    import numpy as np  # only recommend needs it

    slurm = spec.cluster.slurm or Slurm()
    if not slurm.limits:
        return np.ones(len(rows), dtype=bool)
    start, save = (seconds / 60 for seconds in find_restart_seconds(results))
    limits: Floats = np.array([slurm.job_minutes(int(nodes)) for nodes in rows["nodes"]], dtype=float)
    minutes = 60 * rows["hours"]
    useful = limits - start - save - _MARGIN
    most = limits + (LINKS - 1) * np.maximum(0.0, useful)
    fits: Flags = (limits > 0) & ((minutes <= limits) | ((useful > 0) & (minutes <= most)))
    return fits


def select_within_bins(rows: "Candidates", all_measurements: "Sequence[TypeMeasurements]") -> "Candidates":
    """Return the configurations that can be trained within the wall-time bins of their node type.

    Raises:
        Infeasible: there is none; the message names the fastest configuration.
    """
    import numpy as np

    fits = np.zeros(len(rows), dtype=bool)
    for measurements in all_measurements:
        is_of_type = rows["type"] == measurements.type
        fits[is_of_type] = _fits_wall_time(rows.take(is_of_type), measurements.run.spec, measurements.results)
    if fits.any():
        return rows.take(fits)
    fastest = rows.ordered().prediction(0)
    spec = next(measurements.run.spec for measurements in all_measurements if measurements.type == fastest.type)
    raise Infeasible(
        f"no configuration can be trained within the site's bins of wall time (cluster.slurm.limits: {describe_bins(spec)}): the"
        f" fastest takes {format_duration(3600 * fastest.hours)} on {format_count(fastest.nodes)}, and a training has at most {LINKS} jobs",
        "search numbers of nodes with longer bins, or train fewer epochs",
    )


def count_chain_links(minutes: float, limit: float, *, restart: float = 0.0) -> int:
    """Return the number of jobs with a time limit that a training takes.

    Args:
        minutes: duration of the training.
        limit: time limit of a job in minutes.
        restart: minutes that each job after the first needs to resume where the previous one ended.
    """
    if minutes <= limit:
        return 1
    assert restart < limit, "jobs of this length only restart and never finish the training"
    return 1 + math.ceil((minutes - limit) / (limit - restart) - 1e-9)


def describe_chain(choice: Prediction, spec: JobSpec, results: "Results") -> str:
    """Describe the jobs in which the choice trains within its bin, and the time their starts add; empty if no bins."""
    slurm = spec.cluster.slurm or Slurm()
    if not slurm.limits:
        return ""
    limit, most = slurm.job_minutes(choice.nodes), slurm.longest(choice.nodes)
    allowed = f"the site allows {format_count(choice.nodes)} {format_number(most)} min (cluster.slurm.limits)"
    if 60 * choice.hours <= limit:
        return f"; one job of {limit} min: {allowed}"
    start, save = find_restart_seconds(results)
    restart_minutes = (start + save) / 60 + _MARGIN
    jobs = count_chain_links(60 * choice.hours, limit, restart=restart_minutes)
    limit_text = "" if slurm.minutes >= most else f", and cluster.slurm.minutes is {slurm.minutes}"
    return (
        f"; a chain of {jobs} jobs of {limit} min: {allowed}{limit_text}; restarts add about"
        f" {format_duration(60 * (jobs - 1) * restart_minutes)}, which the time above does not include"
    )
