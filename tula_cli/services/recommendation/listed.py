"""Select the configurations within the limits and the site's wall-time bins, and those of them that are listed."""

import math
from collections.abc import Sequence

import numpy as np

from tula_cli.cluster.chains import MAX_LINKS, SPARE_LINKS
from tula_cli.errors import Infeasible
from tula_cli.models import efficiency
from tula_cli.models.choice.candidates import Candidates, Limit, list_limits
from tula_cli.models.choice.columns import Flags, Floats
from tula_cli.models.choice.objective import Choice, Quantity, find_best_of_each_batch
from tula_cli.models.efficiency import Noise
from tula_cli.models.estimator import Estimator
from tula_cli.query import Query
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Prediction
from tula_cli.services.allowed_nodes import describe_bins
from tula_cli.services.recommendation.measured import TypeMeasurements
from tula_cli.spec.slurm_options import Slurm
from tula_cli.spec.workload import get_workload
from tula_cli.words import format_count, format_duration, format_number

MAX_ROWS_LISTED = 40
"""Maximum number of configurations that are all listed by default."""

_MAX_FRONT_ROWS = 200


def select_rows(rows: Candidates, choice: Choice, quantity: Quantity) -> Flags:
    """Return which rows are listed, shape (n,); of each configuration, all markets or none.

    If there are many, these are the choice and the runners-up, the Pareto front (thinned out from the fastest to the
    cheapest if it is large), measured configurations, and the best of each batch.

    Args:
        rows: at least one row, fastest first, with the Pareto front marked.
        choice: the choice among them.
        quantity: the quantity that the best of a batch minimises.
    """
    numbers = rows.number_configurations()
    if numbers.max() < MAX_ROWS_LISTED:
        return np.ones(len(rows), dtype=bool)
    worth = rows["measured"].copy()
    (front,) = np.nonzero(rows["pareto"])
    worth[front[np.unique(np.linspace(0, len(front) - 1, _MAX_FRONT_ROWS).round().astype(int))]] = True
    worth[find_best_of_each_batch(rows, quantity)] = True
    for row in (choice.prediction, *choice.runners_up):
        worth |= (rows["nodes"] == row.nodes) & (rows["batch"] == row.batch) & (rows["type"] == row.type)
    return np.isin(numbers, numbers[worth])


def _with_progress(rows: Candidates, measurements: TypeMeasurements, noise: Noise | None) -> Candidates:
    """Return forecasts with the time and cost of the same progress added, if the gradient noise is known."""
    if noise is None:
        return rows
    spec = measurements.part.spec
    epochs = get_workload(spec).count_epochs(measurements.estimator.dataset_size)
    return efficiency.with_same_progress(rows, epochs=epochs, reference=spec.train.reference_batch, noise=noise)


def select_offers_within_limits(
    all_measurements: Sequence[TypeMeasurements], query: Query, noise: Noise | None = None
) -> Candidates:
    """Return the forecasts within the limits, fastest first.

    Raises:
        Infeasible: there is none; the message names the first limit that excludes all, and the configuration closest to
            it.
    """
    remaining = Candidates.concatenate(
        [_with_progress(measurements.candidates(query), measurements, noise) for measurements in all_measurements]
    )
    if not len(remaining):
        raise _describe_nothing_fits(all_measurements[0].estimator, query)
    remaining = select_within_bins(remaining, all_measurements)
    satisfying = remaining.satisfying(query)
    if not len(satisfying):
        raise _describe_binding_limit(remaining, query, all_measurements[0].part.spec.pricing.currency)
    return satisfying.ordered()


def _describe_binding_limit(candidates: Candidates, query: Query, currency: str) -> Infeasible:
    """Return an error with the first limit that excludes all candidates that are left, and the closest of these."""
    limits = list_limits(query)
    for limit in limits:
        within = candidates[limit.column] <= limit.maximum
        if not within.any():
            break
        candidates = candidates.take(within)
    closest = candidates.prediction(int(np.lexsort((candidates["hours"], candidates[limit.column]))[0]))
    if query.same_progress and closest.same_progress is not None:
        progress = closest.same_progress
        closest = closest.model_copy(update={"hours": progress.hours, "cost": progress.cost})
    return Infeasible(
        f"no configuration is within {_describe_limit(limit, query)}; the closest is {describe_configuration(closest, currency)}",
        "relax that limit, or search other numbers of nodes and batches",
    )


def _describe_limit(limit: Limit, query: Query) -> str:
    progress = " to the same progress" if query.same_progress else ""
    if limit.option == "max_nodes":
        return f"at most {limit.maximum:g} nodes"
    if limit.option == "max_batch":
        return f"a batch of at most {limit.maximum:g}"
    if limit.option == "budget":
        return f"a budget of {limit.maximum:g}{progress}"
    duration = format_duration(
        3600 * limit.maximum
    )  # as it was given, and in the unit in which durations are displayed
    deadline = f"{limit.maximum:g} h" if duration.endswith(" h") else f"{limit.maximum:g} h ({duration})"
    return f"a deadline of {deadline}{progress}"


def describe_configuration(row: Prediction, currency: str) -> str:
    """Return nodes, batch, duration and cost of a configuration in words."""
    kind = f" of type {row.type}" * bool(row.type) + " on spot" * (row.market == "spot")
    return (
        f"{format_count(row.nodes)}{kind}, batch {row.batch} (local batch {row.local_batch}): {format_duration(3600 * row.hours)},"
        f" {row.cost:.4g} {currency}"
    )


def _describe_nothing_fits(estimator: Estimator, query: Query) -> Infeasible:
    """Return an error with the reason why the first candidate on the requested nodes cannot run, or is not known."""
    on = f" on {format_count(query.nodes)}" if query.nodes is not None else ""
    tried = estimator.configurations(query.node_counts)
    whys = (estimator.why_not_begun(config) or estimator.why_unknown(config) for config in tried)
    why = next(filter(None, whys), "no batch divides among its GPUs")
    hint = (
        "tula recommend without --nodes shows those that are" if on else "tula check tells what is searched, and where"
    )
    return Infeasible(f"no configuration is feasible{on}: {why}", hint)


# --- Bins of wall time (`cluster.slurm.limits`)

LINKS = int((MAX_LINKS - SPARE_LINKS) / 1.5)
"""Maximum number of jobs that a training may need: the number submitted is half as many again, and two."""
_MARGIN = 1.5
"""Minutes at the end of a job in which it is signalled to save and exit."""


def find_restart_seconds(measurements: TypeMeasurements) -> tuple[float, float]:
    """Return the seconds of a job start and of a checkpoint, the longest that were measured."""
    overheads = [result.overheads for result in measurements.results if isinstance(result, Measured)]
    return max((overhead.startup for overhead in overheads), default=0.0), max(
        (overhead.checkpoint or 0.0 for overhead in overheads), default=0.0
    )


def fits_wall_time(rows: Candidates, measurements: TypeMeasurements) -> Flags:
    """Return which configurations of one node type can be trained within the wall-time bins, shape (n,).

    A training fits in one job, or in a chain with no more jobs than are submitted, each of which has time left after
    its start and checkpoint.
    """
    slurm = measurements.part.spec.cluster.slurm or Slurm()
    if not slurm.limits:
        return np.ones(len(rows), dtype=bool)
    start, save = (seconds / 60 for seconds in find_restart_seconds(measurements))
    limits: Floats = np.array([slurm.job_minutes(int(nodes)) for nodes in rows["nodes"]], dtype=float)
    minutes = 60 * rows["hours"]
    useful = limits - start - save - _MARGIN
    most = limits + (LINKS - 1) * np.maximum(0.0, useful)
    fits: Flags = (limits > 0) & ((minutes <= limits) | ((useful > 0) & (minutes <= most)))
    return fits


def select_within_bins(rows: Candidates, measurements: Sequence[TypeMeasurements]) -> Candidates:
    """Return the configurations that can be trained within the wall-time bins of their node type.

    Raises:
        Infeasible: there is none; the message names the fastest configuration.
    """
    fits = np.zeros(len(rows), dtype=bool)
    for type_measurements in measurements:
        is_of_type = rows["type"] == type_measurements.type
        fits[is_of_type] = fits_wall_time(rows.take(is_of_type), type_measurements)
    if fits.any():
        return rows.take(fits)
    fastest = rows.ordered().prediction(0)
    spec = next(
        type_measurements.part.spec for type_measurements in measurements if type_measurements.type == fastest.type
    )
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
    assert restart < limit, "a job that only restarts never comes to an end"
    return 1 + math.ceil((minutes - limit) / (limit - restart) - 1e-9)


def describe_chain(choice: Prediction, measurements: TypeMeasurements) -> str:
    """Describe the jobs in which the choice trains within its bin, and the time their starts add; empty if no bins."""
    slurm = measurements.part.spec.cluster.slurm or Slurm()
    if not slurm.limits:
        return ""
    limit, most = slurm.job_minutes(choice.nodes), slurm.longest(choice.nodes)
    allowed = f"the site allows {format_count(choice.nodes)} {format_number(most)} min (cluster.slurm.limits)"
    if 60 * choice.hours <= limit:
        return f"; one job of {limit} min: {allowed}"
    start, save = find_restart_seconds(measurements)
    restart_minutes = (start + save) / 60 + _MARGIN
    jobs = count_chain_links(60 * choice.hours, limit, restart=restart_minutes)
    limit_text = "" if slurm.minutes >= most else f", and cluster.slurm.minutes asks for {slurm.minutes}"
    return (
        f"; a chain of {jobs} jobs of {limit} min: {allowed}{limit_text}; their further starts, saves and ends add some"
        f" {format_duration(60 * (jobs - 1) * restart_minutes)}, which is not in the time above"
    )
