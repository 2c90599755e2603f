"""Replay a search on one set: it sees only its probes, a model is fitted to them, and all else is evaluated."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from replay_baselines import MODELS, Model, Predictor
from replay_data import MeasuredSet, Offer, Where

from tula_cli.models.choice import adaptive, objective
from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.time import step_time
from tula_cli.models.time.step_time import Estimate, Observation
from tula_cli.query import Curve
from tula_cli.run.records.recommendations import Prediction
from tula_cli.services import search
from tula_cli.spec.sections import Search

PROBE_SECONDS = Search().estimate_probe_seconds  # duration of a real probe: warm-up, timed steps and other measurements
START_SECONDS = 30.0  # seconds of one job before its first step
TOLERANCE = search.REGRET_TOLERANCE
MIN_KNEE_BATCHES = 5  # minimum number of batches to evaluate a knee

Measure = Callable[[Iterable[Where]], list[Observation]]
"""Reveals the times of candidates. One call is one round, in which the probes of one size share a job."""

Strategy = Callable[[Offer, Measure], None]
"""Measures candidates in one or several rounds."""


def make_planned_strategy(name: str) -> Strategy:
    """Return a strategy with fixed probes."""

    def probe(offer: Offer, measure: Measure) -> None:
        chosen = search.STRATEGIES[name](offer.by_size)
        measure(offer.at(size, batch) for size, batches in chosen.items() for batch in batches)

    return probe


def probe_in_rounds(offer: Offer, measure: Measure) -> None:
    """Probe the candidates that are expected to improve the decisions most, until there is none."""
    start = adaptive.choose_first_probes(offer.by_size.items(), whole_steps=offer.whole_steps)
    seen = measure(offer.at(size, batch) for size, batch in start)
    while True:
        fit = step_time.fit_step_time(seen, collective=offer.collective)
        picks = adaptive.propose_probes(fit, _open_candidates(offer, fit, seen), tolerance=TOLERANCE).picks
        if not picks:
            return
        seen += measure(Where(p.candidate.nodes, p.candidate.gpus_per_node, p.candidate.local_batch) for p in picks)


def _open_candidates(offer: Offer, fit: step_time.StepTimeFit, seen: Iterable[Observation]) -> list[adaptive.Candidate]:
    places = offer.candidates
    columns = ([p.nodes for p in places], [p.gpus_per_node for p in places], [p.local_batch for p in places])
    measured = {Where(o.nodes, o.gpus_per_node, o.local_batch): o.seconds for o in seen}
    return [
        adaptive.Candidate(
            nodes=place.nodes,
            gpus_per_node=place.gpus_per_node,
            local_batch=place.local_batch,
            batch=offer.batches[place],
            node_or_gpu_count=offer.size(place),
            steps=offer.samples / (place.replicas * place.local_batch),
            price=float(offer.size(place)),
            probe_seconds=offer.size(place) * PROBE_SECONDS(float(seconds)),
            job_seconds=offer.size(place) * START_SECONDS,
            measured=measured.get(place),
        )
        for place, seconds in zip(places, fit.predict_step_times(*columns).seconds, strict=True)
    ]


STRATEGIES: dict[str, Strategy] = {
    **{name: make_planned_strategy(name) for name in ("partial", "sweep", "full")},
    "adaptive": probe_in_rounds,
}


class Meter:
    """Reveals the times of the candidates of a set as a probe sees them, and adds up the cost of measuring."""

    def __init__(self, measured: MeasuredSet) -> None:
        self._set = measured
        self.seen: dict[Where, Observation] = {}
        self.cost = 0.0  # node-seconds
        self.wall = 0.0  # seconds, with the jobs of a round in parallel

    def __call__(self, places: Iterable[Where]) -> list[Observation]:
        wanted = sorted(set(places))
        assert all(place in self._set.batches for place in wanted), "only candidates can be measured"
        fresh = {place: self._set.probe(place) for place in wanted if place not in self.seen}
        jobs = {size: _job_seconds(size, probes) for size, probes in self._jobs(fresh).items()}
        self.cost += sum(jobs.values())
        self.wall += max((taken / size for size, taken in jobs.items()), default=0.0)
        self.seen |= fresh
        return [self.seen[place] for place in wanted]

    def _jobs(self, fresh: Mapping[Where, Observation]) -> dict[int, list[Observation]]:
        jobs: dict[int, list[Observation]] = defaultdict(list)
        for place, observation in fresh.items():
            jobs[self._set.offer.size(place)].append(observation)
        return jobs


@cache
def run_strategy(measured: MeasuredSet, strategy: Strategy) -> Meter:
    """Return the measurements of a strategy, which are the same for all models."""
    meter = Meter(measured)
    strategy(measured.offer, meter)
    return meter


def _job_seconds(size: int, probes: Iterable[Observation]) -> float:
    return size * (START_SECONDS + sum(PROBE_SECONDS(probe.seconds) for probe in probes))


def exhaustive_cost(measured: MeasuredSet) -> float:
    """Return the cost of one job per candidate in node-seconds."""
    offer = measured.offer
    return sum(_job_seconds(offer.size(place), [measured.truth[place]]) for place in offer.candidates)


@dataclass(frozen=True)
class Regrets:
    """How much longer, or more expensive, the choice is than the best, relative to the best."""

    free: float
    capped: tuple[float, ...]  # one for each cap on the global batch that leaves a choice


@dataclass(frozen=True)
class KneeError:
    steps: int  # from the true to the predicted knee, in steps of the batch
    lost: float  # relative additional time compared with the true knee


@dataclass(frozen=True)
class Score:
    """One set under one strategy and one model, as shares."""

    errors: tuple[float, ...]  # at unseen configurations of the offered sizes
    candidates: tuple[float, ...]  # at the candidates among them
    elsewhere: tuple[float, ...]  # at sizes that were not offered
    covered: tuple[bool, ...]  # by the 90 % interval, for all of these with an interval
    refused: int  # number of configurations without a prediction
    fastest: Regrets | None  # None if all candidates were measured, so that there is no regret
    cheapest: Regrets | None
    knee: KneeError | None  # also None with too few batches
    cost: float  # cost of probing relative to `exhaustive`
    probes: int
    fit_seconds: float  # of processor time

    @property
    def median(self) -> float:
        return float(np.median(self.errors)) if self.errors else math.nan

    @property
    def p90(self) -> float:
        return float(np.percentile(self.errors, 90)) if self.errors else math.nan


def score_set(measured: MeasuredSet, strategy: str | Strategy, model: str | Model) -> Score:
    """Probe a set by a strategy, fit a model to the probes, and evaluate it on all else."""
    meter = run_strategy(measured, STRATEGIES[strategy] if isinstance(strategy, str) else strategy)
    began = time.process_time()
    predict = (MODELS[model] if isinstance(model, str) else model)(list(meter.seen.values()), measured.collective)
    fit_seconds = time.process_time() - began
    unseen = [place for place in sorted(measured.truth) if place not in meter.seen]
    estimates = dict(zip(unseen, predict(unseen), strict=True)) if unseen else {}
    offered = [place for place in unseen if measured.offer.size(place) in measured.offered_sizes]
    remaining = [place for place in measured.offer.candidates if place not in meter.seen]
    judged = bool(remaining or measured.first)  # otherwise the choice uses the reference itself
    choice = Choices(measured, {**estimates, **smooth_observations(meter.seen, predict)})
    return Score(
        errors=_errors(measured, estimates, offered),
        candidates=_errors(measured, estimates, remaining),
        elsewhere=_errors(measured, estimates, [place for place in unseen if place not in set(offered)]),
        covered=_covered(measured, estimates),
        refused=sum(math.isnan(estimate.seconds) for estimate in estimates.values()),
        fastest=choice.regrets("time") if judged else None,
        cheapest=choice.regrets("cost") if judged else None,
        knee=choice.knee_missed() if judged else None,
        cost=meter.cost / exhaustive_cost(measured),
        probes=len(meter.seen),
        fit_seconds=fit_seconds,
    )


def smooth_observations(seen: Mapping[Where, Observation], predict: Predictor) -> dict[Where, Estimate]:
    """Return the measured configurations with the predictions of the model."""
    fitted = predict(list(seen))
    return {
        place: Estimate(seen[place].seconds, fitted=None if math.isnan(model.seconds) else model.seconds)
        for place, model in zip(seen, fitted, strict=True)
    }


def _errors(measured: MeasuredSet, estimates: Mapping[Where, Estimate], places: Iterable[Where]) -> tuple[float, ...]:
    errors = [abs(estimates[place].seconds / measured.truth[place].seconds - 1) for place in places]
    return tuple(error for error in errors if not math.isnan(error))


def _covered(measured: MeasuredSet, estimates: Mapping[Where, Estimate]) -> tuple[bool, ...]:
    return tuple(
        estimate.low <= measured.truth[place].seconds <= estimate.high
        for place, estimate in estimates.items()
        if estimate.low is not None and estimate.high is not None
    )


@dataclass(frozen=True)
class Choices:
    """The choices of tula among the candidates of a set for given step times."""

    measured: MeasuredSet
    believed: Mapping[Where, Estimate] = field(repr=False)

    def regrets(self, wanted: Curve) -> Regrets:
        believed, true = make_predictions(self.measured, self.believed), list_true_predictions(self.measured)
        regrets = []
        for cap in sorted({row.batch for row in true}):
            actual = {(row.nodes, row.batch): _objective_value(row, wanted) for row in true if row.batch <= cap}
            if len(actual) > 1:
                rows = [row for row in believed if row.batch <= cap]
                chosen = objective.choose_configuration(Candidates.from_predictions(rows), objective=wanted).prediction
                regrets.append(actual[chosen.nodes, chosen.batch] / min(actual.values()) - 1)
        return Regrets(regrets[-1], tuple(regrets[:-1]))

    def knee_missed(self) -> KneeError | None:
        """Return the distance of the predicted knee from the true one; None with too few batches."""
        true = choose_true_knee(self.measured)
        if true is None:
            return None
        result = choose_knee(make_predictions(self.measured, self.believed))
        times = {row.batch: row.hours for row in objective.find_envelope(list_true_predictions(self.measured))}
        return KneeError(round(math.log2(result / true)), max(0.0, times[result] / times[true] - 1))


def _objective_value(row: Prediction, wanted: Curve) -> float:
    return row.hours if wanted == "time" else row.cost


def choose_knee(rows: Sequence[Prediction]) -> int:
    """Return the global batch that tula chooses for the objective knee."""
    return objective.choose_configuration(Candidates.from_predictions(rows), objective="knee").prediction.batch


@cache
def choose_true_knee(measured: MeasuredSet) -> int | None:
    """Return the knee of the measured times; None with too few batches."""
    rows = list_true_predictions(measured)
    return choose_knee(rows) if len({row.batch for row in rows}) >= MIN_KNEE_BATCHES else None


@cache
def list_true_predictions(measured: MeasuredSet) -> list[Prediction]:
    """Return the candidates with their measured times."""
    return make_predictions(measured, {place: Estimate(measured.truth[place].seconds) for place in measured.batches})


def make_predictions(measured: MeasuredSet, times: Mapping[Where, Estimate]) -> list[Prediction]:
    """Return the candidates as predictions of tula, without those that have no step time."""
    return [
        _make_prediction(measured, place, times[place])
        for place in measured.offer.candidates
        if not math.isnan(times[place].seconds)
    ]


def _make_prediction(measured: MeasuredSet, place: Where, step: Estimate) -> Prediction:
    size, hours = measured.offer.size(place), measured.offer.samples / (place.replicas * place.local_batch) / 3600
    return Prediction(
        nodes=size,
        batch=measured.batches[place],
        local_batch=place.local_batch,
        step_time=step.seconds,
        step_low=step.low,
        step_high=step.high,
        hours=hours * step.seconds,
        hours_low=None if step.low is None else hours * step.low,
        hours_high=None if step.high is None else hours * step.high,
        cost=size * hours * step.seconds,
        peak_memory=None,
        headroom=None,
        measured=False,
        step_fitted=step.fitted,
    )


def fit_predictor(measured: MeasuredSet, strategy: str, model: str) -> Predictor:
    """Return a model fitted to the probes of a strategy."""
    meter = run_strategy(measured, STRATEGIES[strategy])
    return MODELS[model](list(meter.seen.values()), measured.collective)
