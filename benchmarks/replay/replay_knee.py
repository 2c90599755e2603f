"""Compare rules for the knee: how reproducible each is, what it costs, and how well it is predicted."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from replay_baselines import MODELS
from replay_data import MeasuredSet, Where
from replay_score import (
    MIN_KNEE_BATCHES,
    STRATEGIES,
    choose_knee,
    fit_predictor,
    list_true_predictions,
    make_predictions,
    run_strategy,
    smooth_observations,
)

from tula_cli.models.choice import objective
from tula_cli.run.records.recommendations import Prediction

Floats = NDArray[np.float64]
Rule = Callable[[Sequence[Prediction]], int]
"""Takes the best configuration of each batch, ascending by batch, and returns the batch at the knee."""

NOISE = 0.02  # relative standard deviation of a repeated step time
DRAWS = 40  # draws of that noise per set


def _make_rule(choose: Callable[[Floats, Floats], int]) -> Rule:
    """Make a rule from a function of log2 batch and time that returns an index."""

    def rule(line: Sequence[Prediction]) -> int:
        batches = [row.batch for row in line]
        return batches[choose(np.log2(batches), np.array([row.hours for row in line]))]

    return rule


def _make_chord_rule(scale: Callable[[Floats], Floats]) -> Rule:
    """Return the rule of the point farthest below the chord, which Kneedle computes before its threshold."""

    def choose(x: Floats, time: Floats) -> int:
        y = scale(time)
        return int(np.argmax(y[0] + (y[-1] - y[0]) * (x - x[0]) / (x[-1] - x[0]) - y))

    return _make_rule(choose)


def _apply_kneedle(line: Sequence[Prediction]) -> int:
    """Kneedle over log2 batch and linear time; the smallest batch within 10 % of the best if it finds none."""
    from kneed import KneeLocator

    times = [row.hours for row in line]
    x = [math.log2(row.batch) for row in line]
    result = KneeLocator(x, times, S=1.0, curve="convex", direction="decreasing", online=False).knee
    if result is None:
        return next(row.batch for row in line if row.hours <= min(times) * (1 + objective.MAX_EXCESS_WITHOUT_KNEE))
    return min(line, key=lambda row: abs(math.log2(row.batch) - result)).batch


def _make_last_saving_rule(share: float) -> Rule:
    """Return the rule of the last doubling that saves at least a share of the time."""

    def choose(_: Floats, time: Floats) -> int:
        saves = np.flatnonzero(time[1:] <= time[:-1] * (1 - share))
        return int(saves[-1]) + 1 if len(saves) else 0

    return _make_rule(choose)


def _make_least_rule(power: float) -> Rule:
    """Return the rule of the least time x batch^power."""
    return _make_rule(lambda x, time: int(np.argmin(np.log2(time) + power * x)))


RULES: Mapping[str, Rule] = {
    "product": lambda line: choose_knee(line),
    "Kneedle, linear time": _apply_kneedle,
    "chord, linear time": _make_chord_rule(lambda time: time),
    "chord, log time": _make_chord_rule(np.log2),
    "last doubling saves 20%": _make_last_saving_rule(0.2),
    "last doubling saves 29%": _make_last_saving_rule(0.29),
    "least time x batch^0.3": _make_least_rule(0.3),
    "least time x batch^0.5": _make_least_rule(0.5),
    "least time x batch^0.7": _make_least_rule(0.7),
}


@dataclass(frozen=True)
class RuleScore:
    """One rule over all sets, as shares; slowness is time at the knee relative to the least time."""

    rule: str
    repeats: float  # how often the batch stays the same under noise
    repeats_within_one: float
    slowness: float
    slowness_worst: float
    at_the_largest: float  # share of the sets
    constant: float  # share of exact matches of the best constant answer
    constant_within_one: float
    predicted: Mapping[str, tuple[float, float, float]]  # by strategy: exact, within one step, additional time


def list_true_curve(measured: MeasuredSet) -> list[Prediction]:
    """Return the measured curve; empty if it has too few batches."""
    line = list(objective.find_envelope(list_true_predictions(measured)))
    return line if len(line) >= MIN_KNEE_BATCHES else []


def list_predicted_curve(measured: MeasuredSet, strategy: str) -> list[Prediction]:
    """Return the curve that tula predicts after the probes of a strategy."""
    meter = run_strategy(measured, STRATEGIES[strategy])
    places = list(measured.offer.candidates)
    predict = fit_predictor(measured, strategy, "tula")
    times = dict(zip(places, predict(places), strict=True)) | smooth_observations(meter.seen, predict)
    return _select_best_by_batch(make_predictions(measured, times))


def _select_best_by_batch(rows: Sequence[Prediction]) -> list[Prediction]:
    """Return the best configuration of each batch, with the least fitted time of that batch."""

    def least(batch: int) -> float:
        return min(r.hours * (r.step_fitted or r.step_time) / r.step_time for r in rows if r.batch == batch)

    line = objective.find_envelope(rows)
    return [r.model_copy(update={"step_fitted": r.step_time * least(r.batch) / r.hours}) for r in line]


def judge(sets: Iterable[MeasuredSet], strategies: Iterable[str]) -> list[RuleScore]:
    curves = {each: line for each in sets if (line := list_true_curve(each))}
    noisy = {each: _simulate_repeats(each) for each in curves}
    guesses = {strategy: {each: list_predicted_curve(each, strategy) for each in curves} for strategy in strategies}
    return [_judge(name, rule, curves, noisy, guesses) for name, rule in RULES.items()]


def _simulate_repeats(measured: MeasuredSet) -> list[list[Prediction]]:
    """Return the curve, and DRAWS repetitions of it with noise; each fitted."""
    random, places = np.random.default_rng(0), sorted(measured.batches)
    noise = [np.ones(len(places)), *np.exp(NOISE * random.standard_normal((DRAWS, len(places))))]
    return [_apply_noise(measured, dict(zip(places, factors, strict=True))) for factors in noise]


def _apply_noise(measured: MeasuredSet, factors: Mapping[Where, float]) -> list[Prediction]:
    seen = {
        place: replace(o, step_times=(o.seconds * f,), compute_time=o.compute_time * f)
        for place, f in factors.items()
        if (o := measured.truth[place])
    }
    times = smooth_observations(seen, MODELS["tula"](list(seen.values()), measured.collective))
    return _select_best_by_batch(make_predictions(measured, times))


Curves = Mapping[MeasuredSet, list[Prediction]]


def _judge(
    name: str,
    rule: Rule,
    curves: Curves,
    noisy: Mapping[MeasuredSet, list[list[Prediction]]],
    guesses: Mapping[str, Curves],
) -> RuleScore:
    knees = {each: rule(line) for each, line in curves.items()}
    again = [[_steps(rule(line), rule(noisy[each][0])) for line in noisy[each][1:]] for each in curves]
    slow = [_hours(line, knees[each]) / min(row.hours for row in line) for each, line in curves.items()]
    exact, within = _best_constant(curves, knees)
    return RuleScore(
        rule=name,
        repeats=float(np.mean([np.mean([steps == 0 for steps in outcome]) for outcome in again])),
        repeats_within_one=float(np.mean([np.mean([abs(steps) <= 1 for steps in result]) for result in again])),
        slowness=float(np.mean(slow)),
        slowness_worst=max(slow),
        at_the_largest=float(np.mean([knees[each] == line[-1].batch for each, line in curves.items()])),
        constant=exact,
        constant_within_one=within,
        predicted={strategy: _matches(rule, knees, curves, guess) for strategy, guess in guesses.items()},
    )


def _steps(batch: int, other: int) -> int:
    return round(math.log2(batch / other))


def _hours(line: Sequence[Prediction], batch: int) -> float:
    return next(row.hours for row in line if row.batch == batch)


def _best_constant(curves: Curves, knees: Mapping[MeasuredSet, int]) -> tuple[float, float]:
    """Return how often the best answer without probes is right: always the k-th batch from one of the ends."""
    answers = []
    for place in range(max(len(line) for line in curves.values())):
        for end in (place, -1 - place):
            off = [abs(_steps(_clip_index(line, end), knees[each])) for each, line in curves.items()]
            answers.append((float(np.mean([o == 0 for o in off])), float(np.mean([o <= 1 for o in off]))))
    return max(answers)


def _clip_index(line: Sequence[Prediction], place: int) -> int:
    return line[max(-len(line), min(place, len(line) - 1))].batch


def _matches(
    rule: Rule, knees: Mapping[MeasuredSet, int], curves: Curves, guesses: Curves
) -> tuple[float, float, float]:
    results = {each: rule(guesses[each]) for each in curves}
    off = [abs(_steps(results[each], knees[each])) for each in curves]
    lost = [max(0.0, _hours(line, results[each]) / _hours(line, knees[each]) - 1) for each, line in curves.items()]
    return float(np.mean([o == 0 for o in off])), float(np.mean([o <= 1 for o in off])), float(np.mean(lost))


def format_table(sets: Iterable[MeasuredSet], strategies: Sequence[str]) -> str:
    """Return the rules side by side."""
    head = f"{'':24} under 2% noise  time over least    at the  best constant"
    names = f"{'rule of the knee':24} exact    +-1     mean     worst  largest   exact   +-1"
    head += "".join(f"  {strategy:>18}" for strategy in strategies)
    names += "   exact   +-1   lost" * len(strategies)
    return "\n".join([head, names, *(_format_row(judged) for judged in judge(sets, strategies))])


def _format_row(judged: RuleScore) -> str:
    return (
        f"{judged.rule:24} {judged.repeats:5.0%}  {judged.repeats_within_one:5.0%}"
        f"  {judged.slowness:6.2f}x  {judged.slowness_worst:7.1f}x   {judged.at_the_largest:5.0%}"
        f"   {judged.constant:5.0%} {judged.constant_within_one:5.0%}"
        + "".join(f"   {exact:5.0%} {near:5.0%} {lost:6.1%}" for exact, near, lost in judged.predicted.values())
    )


# A page with a plot of each set


def write_page(sets: Iterable[MeasuredSet], path: Path, strategy: str = "sweep") -> None:
    """Write the measured and predicted curves of all sets, with the knee of each rule."""
    figures = [_make_figure(each, line, strategy) for each in sets if (line := list_true_curve(each))]
    parts = [figure.to_html(full_html=False, include_plotlyjs=place == 0) for place, figure in enumerate(figures)]
    title = f"Time against global batch: measured, and predicted from the probes of {strategy}"
    body = "\n".join(parts)
    path.write_text(f'<!doctype html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>\n{body}\n')


def _make_figure(measured: MeasuredSet, line: Sequence[Prediction], strategy: str) -> go.Figure:
    guess = list_predicted_curve(measured, strategy)
    chosen = choose_knee(guess)
    best = min(row.hours for row in line)
    figure = go.Figure()
    low = [(row.hours if row.hours_low is None else row.hours_low) / best for row in guess]
    high = [(row.hours if row.hours_high is None else row.hours_high) / best for row in guess]
    batches = [row.batch for row in guess]
    figure.add_scatter(
        x=[*batches, *batches[::-1]], y=[*high, *low[::-1]], fill="toself", line={"width": 0}, name="90 % interval"
    )
    figure.add_scatter(x=batches, y=[row.hours / best for row in guess], name="predicted", line={"dash": "dash"})
    figure.add_scatter(
        x=[row.batch for row in line],
        y=[row.hours / best for row in line],
        name="measured",
        mode="lines+markers",
        text=[f"{row.nodes} x {row.local_batch}" for row in line],
    )
    for place, (name, rule) in enumerate(RULES.items()):
        batch = rule(line)
        figure.add_scatter(
            x=[batch],
            y=[_hours(line, batch) / best],
            name=f"knee: {name} ({batch})",
            mode="markers",
            marker={"symbol": place, "size": 14, "line": {"width": 1}},
        )
    # plotly would place an annotation of the line, and scale the axis, as if its logarithm were the batch.
    figure.add_vline(x=chosen, line={"dash": "dot"})
    ends = [math.log10(min(batches)) - 0.1, math.log10(max(batches)) + 0.1]
    figure.update_xaxes(type="log", title="global batch", tickvals=batches, range=ends)
    figure.update_yaxes(type="log", title="time over the least")
    figure.update_layout(title=f"{measured.name} (dotted: batch {chosen}, chosen after {strategy})", height=480)
    return figure
