"""The headline of a recommendation: its choice compared with today's configuration, the baseline.

The baseline is section `baseline` of the job; by default `train.reference_batch` (of a script: the batch of its command) on
the fewest nodes of the search.
"""

import math
from dataclasses import dataclass

import numpy as np

from tula_cli.models import efficiency
from tula_cli.models.choice.candidates import Candidates, convert_to_columns
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.knee import MAX_EQUAL_DIFFERENCE, MIN_SAVING_UP_TO_KNEE
from tula_cli.models.choice.objective import INTERVAL_WIDTH_SD, Choice, describe_uncertain_alternative
from tula_cli.models.efficiency import Noise
from tula_cli.models.estimator import Estimator
from tula_cli.models.ramp import MAX_NOISE_SCALE
from tula_cli.models.time.noise import Z90
from tula_cli.query import QUANTITIES, Objective
from tula_cli.run.records.recommendations import Accuracy, Change, Headline, Prediction, RiskBasis
from tula_cli.run.records.results import Summary
from tula_cli.spec.job import JobSpec
from tula_cli.words import (
    choose_time_unit,
    describe_interval_of_hours,
    format_count,
    format_duration,
    format_number,
    is_cost_in_node_hours,
)

MAX_RATIO_ABOUT_EQUAL = 0.10
"""Maximum relative difference that may be called none if it is within noise; a larger one within noise is uncertain."""
MIN_SHARE_OF_OTHER = 1e-9
"""Share of the other value that stands for a cost of 0 in a ratio, which must be finite."""


@dataclass(frozen=True)
class Baseline:
    """Today's configuration with its forecast on demand, on the node type of the choice."""

    config: Config
    prediction: Prediction | None  # None if it cannot run, or its step time is unknown
    problem: str = ""  # why there is no forecast; empty if there is one

    @property
    def configuration_text(self) -> str:
        """The configuration as text: number of nodes, node type if the job has several types, and batch."""
        if self.prediction is not None:
            return _describe_nodes_and_batch(self.prediction)
        return f"{format_count(self.config.nodes)}, batch {self.config.batch}"


def predict_baseline(estimator: Estimator, noise: Noise | None, *, node_type: str) -> Baseline:
    """Return the baseline of a job with its forecast, to the same progress too if the gradient noise is known."""
    spec = estimator.spec
    config = Config(spec.baseline.nodes or min(spec.search.nodes), spec.baseline.batch or spec.train.reference_batch)
    if problem := estimator.describe_why_infeasible(config) or estimator.describe_why_unknown(config):
        return Baseline(config, None, problem)
    forecast = estimator.predict_configurations(*convert_to_columns([config])).with_columns({"type": node_type})
    if noise is not None:
        epochs = spec.workload.count_epochs(estimator.dataset_size)
        reference = spec.train.reference_batch
        forecast = efficiency.add_same_progress(forecast, epochs=epochs, reference=reference, noise=noise)
    return Baseline(config, forecast.make_prediction(0))


def make_risk_basis(spec: JobSpec, noise: Noise | None, *, dataset_size: int) -> RiskBasis:
    """Return the inputs of the accuracy risk of a batch: the noise scale over the training, and the method.

    A scale that cannot be told from infinity is replaced by the lower end of its interval.
    """
    scale, is_bounded = None, True
    if noise is not None:
        is_bounded = math.isfinite(noise.high)
        epochs = spec.workload.count_epochs(dataset_size)
        scale = efficiency.compute_equivalent_constant_noise(
            noise.scale if is_bounded else noise.low,
            reference=spec.train.reference_batch,
            epochs=epochs,
            measured_at=noise.epoch,
        )
    return RiskBasis(
        reference_batch=spec.train.reference_batch,
        noise_scale=None if scale is None else min(scale, MAX_NOISE_SCALE),
        is_lower_bound=not is_bounded,
        batch_grows=spec.train.stages is not None or spec.train.training_method.is_self_tuning,
    )


def make_headline(
    choice: Choice,
    baseline: Baseline,
    candidates: Candidates,
    estimator: Estimator,
    noise: Noise | None,
    *,
    objective: Objective,
    accuracy: Accuracy | None,
) -> Headline:
    """Compare the choice with the baseline.

    Args:
        baseline: on the node type of the choice.
        candidates: the feasible configurations that it was chosen among.
        estimator: the models of the node type of the choice.
        noise: the gradient noise, if it was measured.
        objective: of the query; accuracy-time compares time and cost to the same progress.
        accuracy: result of `tula compare` at the batch of the choice, if there is one.
    """
    spec, chosen = estimator.spec, choice.prediction
    basis = make_risk_basis(spec, noise, dataset_size=estimator.dataset_size)
    risk = basis.assess_batch(chosen.batch, accuracy)
    chosen_row, baseline_row = (_convert_to_same_progress(row, objective) for row in (chosen, baseline.prediction))
    assert chosen_row is not None
    currency = spec.pricing.currency
    has_price = not is_cost_in_node_hours(chosen.cost, chosen.all_node_hours, currency)
    is_baseline = Config(chosen.nodes, chosen.batch) == baseline.config and chosen.market == "on_demand"
    time = cost = energy = None
    if baseline_row is not None and not is_baseline:
        deviation = math.hypot(_compute_log_deviation(chosen_row), _compute_log_deviation(baseline_row))
        time = _make_change(baseline_row.hours, chosen_row.hours, deviation)
        cost = _make_change(baseline_row.cost, chosen_row.cost, deviation) if has_price else None
        if objective == "energy" and baseline_row.kwh and chosen_row.kwh:
            energy = _make_change(baseline_row.kwh, chosen_row.kwh, deviation)
    progress = " to the same progress" * (objective == "accuracy-time" and chosen.same_progress is not None)
    changes = [
        *([f"{_describe_time_change(time)}{progress}"] if time else []),
        *([_describe_cost_change(cost, currency)] if cost else []),
        *([_describe_energy_change(energy)] if energy else []),
    ]
    values = (
        f"{format_duration(3600 * chosen_row.hours)}{progress}"
        + f", {format_number(chosen_row.cost)} {currency}" * has_price
    )
    configuration = _describe_nodes_and_batch(chosen)
    if is_baseline:
        text = f"{configuration}: today's configuration is the choice ({values})"
    else:
        text = ", ".join([f"{configuration}: {', '.join(changes) or values}", risk.text])
    return Headline(
        text=text,
        comparison=_describe_comparison(baseline, spec, chosen, is_baseline=is_baseline),
        length=spec.workload.describe_length(),
        interval=_describe_interval(chosen_row),
        preference=_describe_preference(chosen, candidates, objective, reference_batch=spec.train.reference_batch),
        nodes=baseline.config.nodes,
        batch=baseline.config.batch,
        baseline=baseline.prediction,
        problem=baseline.problem,
        is_baseline=is_baseline,
        baseline_predicted=baseline.prediction is not None and not baseline.prediction.measured,
        choice_predicted=not chosen.measured,
        time=time,
        cost=cost,
        energy=energy,
        risk=risk,
        risk_basis=basis,
    )


def _convert_to_same_progress(row: Prediction | None, objective: Objective) -> Prediction | None:
    """Return a forecast with time and cost to the same progress, if the objective compares those."""
    if row is None or row.same_progress is None or objective != "accuracy-time":
        return row
    names = ("hours", "hours_low", "hours_high", "cost")
    return row.model_copy(update={name: getattr(row.same_progress, name) for name in names})


def _compute_log_deviation(row: Prediction) -> float:
    """Return the standard deviation of the logarithm of a forecast's hours; 0 if it has no interval."""
    if row.hours_low is None or row.hours_high is None:
        return 0.0
    return math.log(row.hours_high / row.hours_low) / INTERVAL_WIDTH_SD if row.hours_low > 0 else math.inf


def prefer_baseline(choice: Choice, baseline: Baseline, candidates: Candidates) -> Choice:
    """Return today's configuration as the choice if it is a candidate that is as good as the knee, else the choice."""
    today, knee = baseline.prediction, choice.prediction
    if today is None or Config(knee.nodes, knee.batch) == baseline.config:
        return choice
    same = candidates.select_matching_rows(type=today.type, market="on_demand", nodes=today.nodes, batch=today.batch)
    if not len(same) or not is_not_clearly_worse(today, knee):
        return choice
    baseline_prediction = same.make_prediction(0)
    others = [knee, *(row for row in choice.runners_up if row != baseline_prediction)]
    reason = f"today's configuration is at least as good as {_describe_nodes_and_batch(knee)}, the choice without section baseline: {choice.reason}"
    return Choice(baseline_prediction, reason, tuple(others[: max(1, len(choice.runners_up))]))


def is_not_clearly_worse(row: Prediction, other: Prediction) -> bool:
    """Return whether a row is neither slower nor more expensive than another, or by less than noise and 10 %."""
    deviation = math.hypot(_compute_log_deviation(row), _compute_log_deviation(other))
    changes = _make_change(row.hours, other.hours, deviation), _make_change(row.cost, other.cost, deviation)
    return all(change.ratio <= 1 or _is_about_equal(change) for change in changes)


def _make_change(before: float, after: float, deviation: float) -> Change:
    """Compare two values whose difference of logarithms has a standard deviation.

    They are equal within noise if the 90 % interval of their ratio includes 1, or if they differ by less than 2 %. A cost may
    be 0, if SLURM bills nothing.
    """
    smallest = MIN_SHARE_OF_OTHER * max(before, after) or 1.0
    ratio = max(before, smallest) / max(after, smallest)
    return Change(
        before=before,
        after=after,
        ratio=ratio,
        within_noise=abs(math.log(ratio)) < max(math.log1p(MAX_EQUAL_DIFFERENCE), Z90 * deviation),
    )


def _is_about_equal(change: Change) -> bool:
    return change.within_noise and abs(math.log(change.ratio)) <= math.log1p(MAX_RATIO_ABOUT_EQUAL)


def _describe_time_change(time: Change) -> str:
    """Describe a change of hours: "2.8x faster (8.7 -> 3.1 min)"."""
    divisor, unit = choose_time_unit(3600 * max(time.before, time.after))
    values = _format_both_values(time, 3600 / divisor, unit)
    if _is_about_equal(time):
        return f"about as fast ({values}{_explain_noise(time)})"
    if time.within_noise:
        return f"time uncertain ({values}, within noise)"
    factor = format_number(max(time.ratio, 1 / time.ratio), 2)
    return f"{factor}x {'faster' if time.ratio > 1 else 'slower'} ({values})"


def _describe_cost_change(cost: Change, currency: str) -> str:
    """Describe a change of cost: "30 % cheaper (0.0145 -> 0.0102 USD)"."""
    return _describe_change(
        cost, currency, "cost", equal="at about the same cost", less="cheaper", more="more expensive"
    )


def _describe_energy_change(energy: Change) -> str:
    return _describe_change(
        energy, "kWh", "energy", equal="about as much energy", less="less energy", more="more energy"
    )


def _describe_change(change: Change, unit: str, noun: str, *, equal: str, less: str, more: str) -> str:
    values = _format_both_values(change, 1.0, unit)
    if _is_about_equal(change):
        return f"{equal} ({values}{_explain_noise(change)})"
    if change.within_noise:
        return f"{noun} uncertain ({values})"
    if not change.before:
        return f"{more} ({values})"
    if change.ratio > 1:
        return f"{format_number(100 * (1 - 1 / change.ratio), 2)} % {less} ({values})"
    if change.ratio > 0.5:
        return f"{format_number(100 * (1 / change.ratio - 1), 2)} % {more} ({values})"
    return f"{format_number(1 / change.ratio, 2)}x {more} ({values})"


def _format_both_values(change: Change, factor: float, unit: str) -> str:
    return f"{format_number(factor * change.before)} -> {format_number(factor * change.after)} {unit}"


def _explain_noise(change: Change) -> str:
    """Return ", within noise" if a difference that is called none is visible in the displayed numbers; else empty."""
    return ", within noise" * (abs(math.log(change.ratio)) >= math.log1p(MAX_EQUAL_DIFFERENCE))


def _describe_nodes_and_batch(row: Prediction) -> str:
    return f"{format_count(row.nodes)}{row.kind_text}, batch {row.batch}"


def _describe_comparison(baseline: Baseline, spec: JobSpec, chosen: Prediction, *, is_baseline: bool) -> str:
    """Name the configuration that the choice is compared with, its origin, and which of the two are predicted."""
    nodes = "baseline.nodes" if spec.baseline.nodes else "the fewest nodes"
    batch = "baseline.batch" if spec.baseline.batch else spec.workload.reference_key
    if is_baseline:
        return f"Today's configuration is {batch} on {nodes}."
    if baseline.prediction is None:
        return f"Not compared with today's configuration, {baseline.configuration_text} ({batch} on {nodes}): {baseline.problem}."
    predicted = ", which is predicted" * (not baseline.prediction.measured)
    if not chosen.measured:
        predicted = (
            ", which is measured; the choice is predicted" if baseline.prediction.measured else "; both are predicted"
        )
    return f"Compared with today's configuration, {baseline.configuration_text} ({batch} on {nodes}){predicted}."


def _describe_interval(row: Prediction) -> str:
    interval = describe_interval_of_hours(row.hours_low, row.hours_high)
    return f"90 % interval of the time: {interval}." if interval else ""


def _describe_preference(
    chosen: Prediction, candidates: Candidates, objective: Objective, *, reference_batch: int
) -> str:
    """Explain why a row was chosen although another is better (for objective knee: faster and cheaper); else empty."""
    if objective != "knee":
        alternative = describe_uncertain_alternative(chosen, candidates, QUANTITIES[objective])
        return f"{alternative}." * bool(alternative)
    less = (candidates["hours"] < chosen.hours * (1 - MAX_EQUAL_DIFFERENCE)) & (
        candidates["cost"] < chosen.cost * (1 - MAX_EQUAL_DIFFERENCE)
    )
    better = candidates.select_rows(less)
    if not len(better):
        return ""
    best = better.make_prediction(int(np.argmin(better["cost"])))
    deviation = math.hypot(_compute_log_deviation(best), _compute_log_deviation(chosen))
    time = _make_change(chosen.hours, best.hours, deviation)
    noise = " (within noise)" if _is_about_equal(time) else " (uncertain)" * time.within_noise
    cheaper = 100 * (1 - best.cost / chosen.cost)
    saved = f"{format_number(100 * (1 - best.hours / chosen.hours), 2)} % faster{noise} and {cheaper:.0f} % cheaper"
    per_doubling = 1 - (best.hours / chosen.hours) ** (1 / max(1.0, math.log2(best.batch / chosen.batch)))
    why = (
        f"each doubling of the batch saves only {100 * per_doubling:.0f} % of the time, less than the {100 * MIN_SAVING_UP_TO_KNEE:.0f} %"
        " that the knee requires"
    )
    why += ", and may cost accuracy" * (best.batch > reference_batch)
    if best.batch <= chosen.batch or per_doubling >= MIN_SAVING_UP_TO_KNEE:
        why = "the knee is based on the fit, not on single measurements"
    return f"{_describe_nodes_and_batch(best)} is {saved}; objective knee prefers {_describe_nodes_and_batch(chosen)}, because {why}."


@dataclass(frozen=True)
class BaselineSaving:
    """The gain of a finished training: its actual time and cost compared with the forecast of the baseline."""

    nodes: int
    batch: int
    time: Change
    cost: Change | None  # None without prices
    text: str


def compute_baseline_saving(headline: Headline | None, summary: Summary, *, length: str) -> BaselineSaving | None:
    """Return the time and cost that a finished training saved compared with the baseline of its recommendation.

    None if there is no forecast of the baseline, if the training used the configuration of the baseline, or if it had
    another `length` than the forecast or ended before its last epoch.
    """
    if headline is None or headline.baseline is None or summary.ended or headline.length not in ("", length):
        return None
    if (summary.nodes, summary.start_batch) == (headline.nodes, headline.batch):
        return None
    baseline = headline.baseline
    time = _make_change(baseline.hours, summary.actual_hours, _compute_log_deviation(baseline))
    has_price = not is_cost_in_node_hours(baseline.cost, baseline.all_node_hours, summary.currency)
    cost = _make_change(baseline.cost, summary.actual_cost, _compute_log_deviation(baseline)) if has_price else None
    changes = [
        _describe_time_change(time),
        *([_describe_cost_change(cost, summary.currency)] if cost else []),
    ]
    configuration = _describe_nodes_and_batch(baseline)
    text = f"Compared with today's configuration, {configuration}: {', '.join(changes)}; predicted -> measured."
    return BaselineSaving(headline.nodes, headline.batch, time, cost, text)
