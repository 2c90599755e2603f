"""The choice of a configuration by an objective: time, cost, the knee, time to the same progress, or energy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from tula_cli.models.choice.candidates import Candidates, Floats, Ints
from tula_cli.models.choice.knee import (
    MAX_EQUAL_DIFFERENCE,
    MIN_BATCHES_FOR_KNEE,
    MIN_SAVING_UP_TO_KNEE,
    compute_knee_probabilities,
    find_knee,
    run_kneedle,
)
from tula_cli.models.time.noise import Z90
from tula_cli.models.time.step_time import StepTimeFit
from tula_cli.query import QUANTITIES, Curve, Objective, Quantity, get_quantity
from tula_cli.run.records.recommendations import Prediction
from tula_cli.words import format_count, format_number, is_interval_too_wide

# relative tolerance without a knee: the smallest batch within it of the best value is chosen
MAX_EXCESS_WITHOUT_KNEE = 0.1
_MAX_RUNNERS_UP = 3
_MIN_PROBABILITY_NAMED = 0.01  # batches that are the knee of a smaller share of the curves are not reported
_MAX_ROWS_DRAWN = 64
"""Maximum configurations that are sampled jointly: their covariance grows with the square of their number."""
INTERVAL_WIDTH_SD = 2 * Z90
"""Width of a 90 % interval in standard deviations."""

_MAX_CAUTION_FACTOR = 5.0
_ROUNDING = 0.0005
"""Relative difference that tables do not show."""


@dataclass(frozen=True)
class Choice:
    """The chosen configuration, the reason, and the runners-up."""

    prediction: Prediction
    reason: str
    runners_up: tuple[Prediction, ...]


def choose_configuration(
    candidates: Candidates,
    *,
    objective: Objective,
    curve: Curve = "time",
    among: str = "feasible",
    unlimited: Candidates | None = None,
) -> Choice:
    """Choose among feasible configurations.

    Args:
        candidates: at least one.
        objective: time and cost minimise that quantity; knee selects the batch beyond which `curve` hardly falls;
            accuracy-time minimises the time to the same progress, and energy the kWh, which every prediction must then
            have.
        curve: the curve in which the knee is sought; ignored by the other objectives.
        among: property that the configurations share, for the wording of the reason.
        unlimited: the configurations without the limits on time and cost, if there are such limits. The knee is sought
            among these, because the limits cut off a part of the curve; ignored by the other objectives.
    """
    assert len(candidates), "choose among at least one configuration"
    quantity = get_quantity(objective, curve)
    if objective != "knee":
        return _choose_lowest_value(candidates, quantity, among)
    return _choose_knee(candidates, quantity, unlimited)


def find_envelope(rows: Sequence[Prediction], quantity: Quantity = QUANTITIES["time"]) -> tuple[Prediction, ...]:
    """Return the best configuration (fastest, cheapest ...) of each batch, ascending by batch."""
    return tuple(rows[index] for index in find_best_of_each_batch(Candidates.from_predictions(rows), quantity))


def find_best_of_each_batch(rows: Candidates, quantity: Quantity) -> Ints:
    """Return the indices of the best row at each batch, ascending by batch."""
    order = _argsort_rows(rows, quantity)
    indices: Ints = order[np.unique(rows["batch"][order], return_index=True)[1]]
    return indices


def find_best_rows(rows: Candidates, quantity: Quantity, *, max_rows: int) -> Ints:
    """Return the indices of at most `max_rows` rows, an equal number of the best at each batch, in their order."""
    if len(rows) <= max_rows:
        return np.arange(len(rows))
    order = _argsort_rows(rows, quantity)
    by_batch = order[np.argsort(rows["batch"][order], kind="stable")]
    first = np.unique(rows["batch"][by_batch], return_index=True, return_inverse=True)
    rank = np.arange(len(rows)) - first[1][first[2]]
    return np.sort(by_batch[rank < max(1, max_rows // len(first[1]))])


def describe_knee_uncertainty(steps: StepTimeFit, rows: Candidates, *, gpus_per_node: int, quantity: Quantity) -> str:
    """Describe with which probability each batch is the knee, from curves sampled from the posterior of the fit.

    Empty if there are too few batches for a knee, or none of them is likely.

    Args:
        steps: the fit of the step time.
        rows: configurations of one node type on one market.
        gpus_per_node: number of GPUs per node of these configurations.
        quantity: the quantity in whose curve the knee is sought.
    """
    if len(np.unique(rows["batch"])) < MIN_BATCHES_FOR_KNEE:
        return ""
    rows = rows.select_rows(find_best_rows(rows, quantity, max_rows=_MAX_ROWS_DRAWN))
    sampled_log_times = steps.draw_samples(rows["nodes"], np.full(len(rows), gpus_per_node), rows["local_batch"])
    # Time and cost are proportional to the step time.
    sampled_log_values = sampled_log_times + np.log(rows[quantity.column]) - np.log(rows["step_time"])
    probability_by_batch = compute_knee_probabilities(rows["batch"], sampled_log_values)
    likely = sorted(
        (batch for batch, probability in probability_by_batch.items() if probability >= _MIN_PROBABILITY_NAMED),
        key=lambda batch: (-probability_by_batch[batch], batch),
    )
    if not likely:
        return ""
    first, *others = likely
    text = f"; given the uncertainty of the probes, the knee is at batch {first} with a probability of"
    text += f" {100 * probability_by_batch[first]:.0f} %"
    if others:
        text += f" ({', '.join(f'{batch}: {100 * probability_by_batch[batch]:.0f} %' for batch in others)})"
    return text


def _argsort_rows(rows: Candidates, quantity: Quantity) -> Ints:
    """Return the indices that sort rows by cautious value; ties by the other value, then fewer nodes and a smaller batch."""
    other = rows["hours"] if quantity.name == "cost" else rows["cost"]
    return np.lexsort((rows["batch"], rows["nodes"], other, _compute_cautious_values(rows, quantity)))


def _compute_cautious_values(rows: Candidates, quantity: Quantity) -> Floats:
    """Return the values, increased by their uncertainty.

    All quantities except kWh have the relative uncertainty of the hours. Among many uncertain forecasts the minimum is
    more often one that is too low by error than the best. A factor exp(variance of ln time) compensates for that:
    negligible for intervals within 5 %, 6 % for an interval of +-50 %.
    """
    low, high = rows[f"{quantity.interval}_low"], rows[f"{quantity.interval}_high"]
    has_interval = (low > 0) & (high > 0)  # False for nan
    sd = np.log(np.where(has_interval, high, 1.0) / np.where(has_interval, low, 1.0)) / INTERVAL_WIDTH_SD
    cautious: Floats = rows[quantity.column] * np.exp(np.minimum(sd**2, _MAX_CAUTION_FACTOR))
    return cautious


def _get_value(row: Prediction, quantity: Quantity) -> float:
    value: float | None = attrgetter(quantity.attribute)(row)
    assert value is not None, "choose among the configurations whose value is known"
    return value


def _choose_lowest_value(rows: Candidates, quantity: Quantity, among: str) -> Choice:
    best = rows.make_prediction(int(_argsort_rows(rows, quantity)[0]))
    ascending = np.lexsort((rows["batch"], rows["nodes"], rows[quantity.column]))[: 1 + _MAX_RUNNERS_UP]
    others = [row for row in rows.select_rows(ascending).make_predictions() if row != best][:_MAX_RUNNERS_UP]
    count = f"the only {among} configuration" if len(rows) == 1 else f"of {len(rows)} {among} configurations"
    reason = f"the {quantity.lowest} {count}{_describe_noise_range(rows, quantity)}" if len(rows) > 1 else count
    alternative = describe_uncertain_alternative(best, rows, quantity)
    reason += f"; {alternative}" * bool(alternative) + _describe_equal_batches(best, rows, quantity)
    return Choice(best, reason, tuple(others))


def describe_uncertain_alternative(chosen: Prediction, rows: Candidates, quantity: Quantity) -> str:
    """Describe the configuration that is predicted to be better than the chosen one but is less certain; empty if none is."""
    least = rows.make_prediction(int(np.lexsort((rows["batch"], rows["nodes"], rows[quantity.column]))[0]))
    value, least_value = _get_value(chosen, quantity), _get_value(least, quantity)
    if least_value >= value * (1 - _ROUNDING):
        return ""
    saved = f"{format_number(100 * (1 - least_value / value), 2)} % less {quantity.saving}"
    configuration = f"{format_count(least.nodes)}, batch {least.batch}"
    return f"{configuration} is predicted to need {saved}, but this prediction is less certain; add the configuration to the search to measure it"


def _describe_noise_range(rows: Candidates, quantity: Quantity) -> str:
    """Describe the best batches at both ends of the range due to the growth of the gradient noise."""
    if quantity.name != "accuracy-time":
        return ""
    ends = (rows["same_progress_epochs_lossy"], rows["same_progress_epochs_alike"])
    best_batches = sorted({int(rows["batch"][np.argmin(rows["hours"] * epochs)]) for epochs in ends})
    if len(best_batches) == 1:
        return f" (batch {best_batches[0]} over the whole range of the gradient noise)"
    return f" (the best batch is {best_batches[0]} to {best_batches[1]} over the range of the gradient noise)"


def _choose_knee(rows: Candidates, quantity: Quantity, unlimited: Candidates | None) -> Choice:
    """Choose the batch nearest to the knee of the curve without limits on time and cost, and its best configuration."""
    best = rows.select_rows(find_best_of_each_batch(rows, quantity))
    line = best.make_predictions()
    if unlimited is None:
        knee, reason = _find_knee_of_rows(rows, best, quantity)
    else:
        best_unlimited = unlimited.select_rows(find_best_of_each_batch(unlimited, quantity))
        knee, reason = _find_knee_of_rows(unlimited, best_unlimited, quantity)
    chosen = min(line, key=lambda row: (abs(math.log2(row.batch / knee)), row.batch))
    if chosen.batch != knee:
        reason = f"the batch nearest to {knee} that is within the limits; without them, {knee} would be {reason}"
    chosen = _find_undominated_configuration(chosen, rows)
    order = np.argsort(_argsort_rows(best, quantity))
    others = sorted(
        (index for index, row in enumerate(line) if row.batch != chosen.batch),
        key=lambda index: (abs(math.log2(line[index].batch / chosen.batch)), order[index]),
    )
    reason += _describe_equal_batches(chosen, rows, quantity)
    return Choice(chosen, reason, tuple(line[index] for index in others[:_MAX_RUNNERS_UP]))


def _find_knee_of_rows(rows: Candidates, best: Candidates, quantity: Quantity) -> tuple[int, str]:
    """Return the batch of the knee, or the smallest almost as good as the best if there is none, and the reason."""
    line, values = best.make_predictions(), _find_lowest_fitted_values(rows, best, quantity)
    batches = [row.batch for row in line]
    batch = find_knee(batches, values)
    if batch is None:
        chosen, reason = _choose_batch_without_knee(line, quantity)
        return chosen.batch, reason
    chosen = next(row for row in line if row.batch == batch)
    reason = f"the knee of {quantity.name} against batch{_describe_gain(chosen, line, quantity)}"
    other = run_kneedle(batches, values)
    if other not in (None, batch):
        reason += f"; the Kneedle algorithm, on the searched part of the curve, finds batch {other}"
    return batch, reason


def _find_undominated_configuration(chosen: Prediction, rows: Candidates) -> Prediction:
    """Return the cheapest configuration of the chosen batch that is predicted to be no slower than the chosen one.

    The chosen one may only be more certain, which is no reason to pay more for the same batch. Intervals that are too
    wide to decide by do not count.
    """
    is_better = (rows["batch"] == chosen.batch) & (rows["hours"] <= chosen.hours) & (rows["cost"] < chosen.cost)
    better = [rows.make_prediction(index) for index in np.flatnonzero(is_better).tolist()]
    certain = [row for row in better if not is_interval_too_wide(row.hours_low, row.hours_high)]
    return min(certain, key=lambda row: row.cost, default=chosen)


def _find_lowest_fitted_values(rows: Candidates, best: Candidates, quantity: Quantity) -> list[float]:
    """Return the least fitted value at each batch: measured values contain a single job's noise, which moves a knee."""
    values = rows[quantity.column] * np.where(
        np.isnan(rows["step_fitted"]), 1.0, rows["step_fitted"] / rows["step_time"]
    )
    return [float(values[rows["batch"] == batch].min()) for batch in best["batch"]]


def _choose_batch_without_knee(line: Sequence[Prediction], quantity: Quantity) -> tuple[Prediction, str]:
    best = min(_get_value(row, quantity) for row in line)
    chosen = next(row for row in line if _get_value(row, quantity) <= best * (1 + MAX_EXCESS_WITHOUT_KNEE))
    few_text = f"there {'is' if len(line) == 1 else 'are'} only {format_count(len(line), 'batch')}"
    why = few_text if len(line) < MIN_BATCHES_FOR_KNEE else _describe_curve_without_knee(line, quantity)
    return (
        chosen,
        f"the smallest batch within {100 * MAX_EXCESS_WITHOUT_KNEE:.0f} % of the best, because {quantity.name} has no knee ({why})",
    )


def _describe_curve_without_knee(line: Sequence[Prediction], quantity: Quantity) -> str:
    first, before, last = (_get_value(line[index], quantity) for index in (0, -2, -1))
    if last <= before * (1 - MIN_SAVING_UP_TO_KNEE):
        return f"{quantity.name} still falls by {100 * (1 - last / before):.0f} % at the largest batch"
    change = (last / first) ** (1 / (len(line) - 1)) - 1
    return f"{quantity.name} changes steadily, by {change:+.0%} per doubling of the batch"


def _describe_gain(chosen: Prediction, line: Sequence[Prediction], quantity: Quantity) -> str:
    """Describe the change of the value to the batches before and after the knee."""
    index = line.index(chosen)
    if not 0 < index < len(line) - 1:
        return ""
    before, here, after = (_get_value(row, quantity) for row in line[index - 1 : index + 2])
    return f": {quantity.name} {before / here - 1:+.0%} at the next smaller batch, {after / here - 1:+.0%} at the next larger one"


def _describe_equal_batches(chosen: Prediction, rows: Candidates, quantity: Quantity) -> str:
    """Name the neighbouring batches that cannot be distinguished from the chosen one.

    The resolution is one step of the batch.
    """
    line = rows.select_rows(find_best_of_each_batch(rows, quantity)).make_predictions()
    larger = [row for row in line if row.batch > chosen.batch][:1]
    smaller = [row for row in line if row.batch < chosen.batch][-1:]
    equal_rows = [row for row in smaller + larger if _are_equally_good(chosen, row, quantity)]
    if not equal_rows:
        return ""
    named = " and ".join(f"batch {row.batch} on {format_count(row.nodes)}" for row in equal_rows)
    return f"; {named} {'is' if len(equal_rows) == 1 else 'are'} equally good within the accuracy of the prediction"


def _are_equally_good(chosen: Prediction, other: Prediction, quantity: Quantity) -> bool:
    value, other_value = _get_value(chosen, quantity), _get_value(other, quantity)
    low = high = value
    least, middle, most = (getattr(chosen, f"{quantity.interval}{end}") for end in ("_low", "", "_high"))
    if least is not None and most is not None and middle:
        low, high = value * least / middle, value * most / middle
    return bool(
        min(low, value * (1 - MAX_EQUAL_DIFFERENCE)) <= other_value <= max(high, value * (1 + MAX_EQUAL_DIFFERENCE))
    )
