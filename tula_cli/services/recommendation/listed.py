"""Which configurations are within the limits, and which of those are listed: all where they are few, else the most telling."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tula_cli.errors import Infeasible
from tula_cli.models import efficiency
from tula_cli.models.choice.columns import Flags
from tula_cli.models.choice.objective import Choice, Quantity, best_of_each_batch
from tula_cli.models.choice.offers import Offers
from tula_cli.models.efficiency import Noise
from tula_cli.models.forecast import Forecast
from tula_cli.services.recommendation.limits import Limits, describe_limits
from tula_cli.services.recommendation.measured import TypeMeasurements, trained_epochs
from tula_cli.services.recommendation.wall_times import within_bins
from tula_cli.words import plural

MAX_ROWS_LISTED = 40
"""Configurations that are all listed unasked."""

_MAX_FRONT_ROWS = 200


def select_rows(rows: Offers, choice: Choice, quantity: Quantity) -> Flags:
    """Return which rows are listed, shape (n,): of each configuration all markets or none.

    Of many these are the choice and the runners-up, what nothing beats (of very much of it every so many, from the fastest to
    the cheapest), what was measured, and the best of each batch.

    Args:
        rows: fastest first, with their front; at least one.
        choice: of them.
        quantity: what the best of a batch has least of.
    """
    numbers = rows.configurations()
    if numbers.max() < MAX_ROWS_LISTED:
        return np.ones(len(rows), dtype=bool)
    worth = rows.measured.copy()
    (front,) = np.nonzero(rows.pareto)
    worth[front[np.unique(np.linspace(0, len(front) - 1, _MAX_FRONT_ROWS).round().astype(int))]] = True
    worth[best_of_each_batch(rows, quantity)] = True
    for row in (choice.prediction, *choice.runners_up):
        worth |= (rows.nodes == row.nodes) & (rows.batch == row.batch) & (rows.type == row.type)
    return np.isin(numbers, numbers[worth])


def _with_progress(rows: Offers, measurements: TypeMeasurements, noise: Noise | None) -> Offers:
    """Return forecasts with what the same progress takes beside them, where the noise is known."""
    if noise is None:
        return rows
    spec = measurements.part.spec
    epochs = trained_epochs(spec, measurements.forecast.dataset_size)
    progress = efficiency.same_progress(rows, epochs=epochs, reference=spec.train.reference_batch, noise=noise)
    return replace(rows, same_progress=progress)


def offers_within_limits(
    all_measurements: Sequence[TypeMeasurements], limits: Limits, noise: Noise | None = None
) -> Offers:
    """Return the forecasts within the limits, fastest first.

    Raises:
        Infeasible: there is none; names the first limit that leaves nothing and the configuration closest to it.
    """
    remaining = Offers.join(
        [_with_progress(measurements.offers(limits), measurements, noise) for measurements in all_measurements]
    )
    if not len(remaining):
        raise _describe_nothing_fits(all_measurements[0].forecast, limits)
    remaining = within_bins(remaining, all_measurements)
    for bound in limits:
        values = bound.value(remaining)
        if not (values <= bound.most).any():
            closest = remaining.take([np.lexsort((remaining.hours, values))[0]])
            (row,) = replace(closest, hours=limits.hours(closest), cost=limits.cost(closest)).records()
            described = describe_limits(row, all_measurements[0].part.spec.pricing.currency)
            raise Infeasible(
                f"no configuration is within {bound.words}; the closest is {described}",
                "relax that limit, or search other numbers of nodes and batches",
            )
        remaining = remaining.take(values <= bound.most)
    return remaining.ordered()


def _describe_nothing_fits(forecast: Forecast, limits: Limits) -> Infeasible:
    """Say of the smallest batch on the wanted nodes why it cannot run, or why nothing is known of it."""
    on = f" on {plural(limits.nodes)}" if limits.nodes is not None else ""
    tried = forecast.candidates(limits.wanted)
    whys = (forecast.why_not_begun(config) or forecast.why_unknown(config) for config in tried)
    why = next(filter(None, whys), "no batch divides among its GPUs")
    hint = (
        "tula recommend without --nodes shows those that are" if on else "tula check tells what is searched, and where"
    )
    return Infeasible(f"no configuration is feasible{on}: {why}", hint)
