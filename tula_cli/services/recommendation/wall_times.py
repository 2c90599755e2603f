"""The site's bins of wall time (`cluster.slurm.limits`): which trainings they allow, and in how many jobs."""

import math
from collections.abc import Sequence

import numpy as np

from tula_cli.cluster.chains import MAX_LINKS, SPARE_LINKS
from tula_cli.errors import Infeasible
from tula_cli.models.choice.columns import Flags, Floats
from tula_cli.models.choice.offers import Offers
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Prediction
from tula_cli.services.profiling.allowed_nodes import describe_bins
from tula_cli.services.recommendation.measured import TypeMeasurements
from tula_cli.spec.slurm_options import Slurm
from tula_cli.words import duration, number, plural

LINKS = int((MAX_LINKS - SPARE_LINKS) / 1.5)
"""Jobs that a training may need: half as many again are submitted, and two."""
_MARGIN = 1.5
"""Minutes at the end of a job in which it is told to save and leave."""


def restart_seconds(measurements: TypeMeasurements) -> tuple[float, float]:
    """Return the seconds of a start and of a checkpoint, the longest that were measured."""
    overheads = [result.overheads for result in measurements.results if isinstance(result, Measured)]
    return max((overhead.startup for overhead in overheads), default=0.0), max(
        (overhead.checkpoint or 0.0 for overhead in overheads), default=0.0
    )


def fits_wall_time(rows: Offers, measurements: TypeMeasurements) -> Flags:
    """Return which configurations of one type of nodes the bins let train, shape (n,).

    In one job, or in a chain of which each job has time beyond its start and its checkpoint, and that has no more jobs
    than are submitted.
    """
    slurm = measurements.part.spec.cluster.slurm or Slurm()
    if not slurm.limits:
        return np.ones(len(rows), dtype=bool)
    start, save = (seconds / 60 for seconds in restart_seconds(measurements))
    limits: Floats = np.array([slurm.job_minutes(int(nodes)) for nodes in rows.nodes], dtype=float)
    minutes = 60 * rows.hours
    useful = limits - start - save - _MARGIN
    most = limits + (LINKS - 1) * np.maximum(0.0, useful)
    fits: Flags = (limits > 0) & ((minutes <= limits) | ((useful > 0) & (minutes <= most)))
    return fits


def within_bins(rows: Offers, measurements: Sequence[TypeMeasurements]) -> Offers:
    """Return what the bins of its type of nodes let train.

    Raises:
        Infeasible: nothing; names the fastest.
    """
    fits = np.zeros(len(rows), dtype=bool)
    for measurements_ in measurements:
        is_of_type = rows.type == measurements_.type
        fits[is_of_type] = fits_wall_time(rows.take(is_of_type), measurements_)
    if fits.any():
        return rows.take(fits)
    fastest = rows.ordered().record(0)
    spec = next(measurements_.part.spec for measurements_ in measurements if measurements_.type == fastest.type)
    raise Infeasible(
        f"no configuration can be trained within the site's bins of wall time (cluster.slurm.limits: {describe_bins(spec)}): the"
        f" fastest takes {duration(3600 * fastest.hours)} on {plural(fastest.nodes)}, and a training has at most {LINKS} jobs",
        "search numbers of nodes with longer bins, or train fewer epochs",
    )


def chain_links(minutes: float, limit: float, *, restart: float = 0.0) -> int:
    """Return how many jobs of a time limit a training takes.

    Args:
        minutes: of the training.
        limit: of a job, minutes.
        restart: minutes that each job after the first spends on coming to where the one before it ended.
    """
    if minutes <= limit:
        return 1
    assert restart < limit, "a job that only restarts never comes to an end"
    return 1 + math.ceil((minutes - limit) / (limit - restart) - 1e-9)


def describe_chain(choice: Prediction, measurements: TypeMeasurements) -> str:
    """Say in how many jobs the choice trains within its bin, and what their starts add; empty where there are no bins."""
    slurm = measurements.part.spec.cluster.slurm or Slurm()
    if not slurm.limits:
        return ""
    limit, most = slurm.job_minutes(choice.nodes), slurm.longest(choice.nodes)
    allowed = f"the site allows {plural(choice.nodes)} {number(most)} min (cluster.slurm.limits)"
    if 60 * choice.hours <= limit:
        return f"; one job of {limit} min: {allowed}"
    start, save = restart_seconds(measurements)
    restart_minutes = (start + save) / 60 + _MARGIN
    jobs = chain_links(60 * choice.hours, limit, restart=restart_minutes)
    limit_text = "" if slurm.minutes >= most else f", and cluster.slurm.minutes asks for {slurm.minutes}"
    return (
        f"; a chain of {jobs} jobs of {limit} min: {allowed}{limit_text}; their further starts, saves and ends add some"
        f" {duration(60 * (jobs - 1) * restart_minutes)}, which is not in the time above"
    )
