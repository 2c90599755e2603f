"""A search replayed on one set: it sees its probes only, a model is fitted to them, all else is judged."""

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

PROBE = Search().estimate_probe_seconds  # a real probe: its warm-up, what it times, and its other looks
START_UP = 30.0  # seconds of one job before its first step
TOLERANCE = search.REGRET_TOLERANCE
FEWEST = 5  # batches that a knee is judged on

Measure = Callable[[Iterable[Where]], list[Observation]]
"""Reveals candidates. One call is one round: its probes of one size share a job."""

Strategy = Callable[[Offer, Measure], None]
"""Measures what it wants, in one round or in several."""


def planned(name: str) -> Strategy:
    """Return a strategy that knows its probes beforehand."""

    def probe(offer: Offer, measure: Measure) -> None:
        chosen = search.STRATEGIES[name](offer.by_size)
        measure(offer.at(size, batch) for size, batches in chosen.items() for batch in batches)

    return probe


def in_rounds(offer: Offer, measure: Measure) -> None:
    """Probe where it is expected to improve the decisions most, until nothing is."""
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
            probe_seconds=offer.size(place) * PROBE(float(seconds)),
            job_seconds=offer.size(place) * START_UP,
            measured=measured.get(place),
        )
        for place, seconds in zip(places, fit.predict_all(*columns).seconds, strict=True)
    ]


STRATEGIES: dict[str, Strategy] = {
    **{name: planned(name) for name in ("partial", "sweep", "full")},
    "adaptive": in_rounds,
}


class Meter:
    """Reveals the candidates of a set as a probe sees them, and adds up what measuring them takes."""

    def __init__(self, measured: MeasuredSet) -> None:
        self._set = measured
        self.seen: dict[Where, Observation] = {}
        self.cost = 0.0  # node-seconds
        self.wall = 0.0  # seconds, where the jobs of a round run side by side

    def __call__(self, places: Iterable[Where]) -> list[Observation]:
        wanted = sorted(set(places))
        assert all(place in self._set.batches for place in wanted), "only candidates can be measured"
        fresh = {place: self._set.probe(place) for place in wanted if place not in self.seen}
        jobs = {size: _job(size, probes) for size, probes in self._jobs(fresh).items()}
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
def metered(measured: MeasuredSet, strategy: Strategy) -> Meter:
    """Return what a strategy measures; the same for every model."""
    meter = Meter(measured)
    strategy(measured.offer, meter)
    return meter


def _job(size: int, probes: Iterable[Observation]) -> float:
    return size * (START_UP + sum(PROBE(probe.seconds) for probe in probes))


def exhaustive(measured: MeasuredSet) -> float:
    """Return what one job for every candidate takes. Node-seconds."""
    offer = measured.offer
    return sum(_job(offer.size(place), [measured.truth[place]]) for place in offer.candidates)


@dataclass(frozen=True)
class Regrets:
    """How much longer, or dearer, the choice is than the best, as a share of the best."""

    free: float
    capped: tuple[float, ...]  # one for every cap on the global batch that leaves a choice


@dataclass(frozen=True)
class KneeMissed:
    steps: int  # of the batch, from the true knee to the one predicted
    lost: float  # how much longer it takes than the true knee, as a share


@dataclass(frozen=True)
class Score:
    """One set under one strategy and one model. Shares."""

    errors: tuple[float, ...]  # at unseen configurations of the sizes offered
    candidates: tuple[float, ...]  # at those of them that may be chosen
    elsewhere: tuple[float, ...]  # at sizes never offered
    covered: tuple[bool, ...]  # by the 90 % interval, of all of these that have one
    refused: int  # configurations the model would not predict
    fastest: Regrets | None  # None where every candidate was measured: there is nothing to regret
    cheapest: Regrets | None
    knee: KneeMissed | None  # None too where there are too few batches
    cost: float  # of probing, relative to exhaustive
    probes: int
    fit_seconds: float  # of processor time

    @property
    def median(self) -> float:
        return float(np.median(self.errors)) if self.errors else math.nan

    @property
    def p90(self) -> float:
        return float(np.percentile(self.errors, 90)) if self.errors else math.nan


def score(measured: MeasuredSet, strategy: str | Strategy, model: str | Model) -> Score:
    """Let a strategy probe a set, fit a model to that alone, and judge it on all else."""
    meter = metered(measured, STRATEGIES[strategy] if isinstance(strategy, str) else strategy)
    began = time.process_time()
    predict = (MODELS[model] if isinstance(model, str) else model)(list(meter.seen.values()), measured.collective)
    fit_seconds = time.process_time() - began
    unseen = [place for place in sorted(measured.truth) if place not in meter.seen]
    estimates = dict(zip(unseen, predict(unseen), strict=True)) if unseen else {}
    offered = [place for place in unseen if measured.offer.size(place) in measured.offered_sizes]
    remaining = [place for place in measured.offer.candidates if place not in meter.seen]
    judged = bool(remaining or measured.first)  # else the choice is by the truth itself
    choice = Choices(measured, {**estimates, **smoothed(meter.seen, predict)})
    return Score(
        errors=_errors(measured, estimates, offered),
        candidates=_errors(measured, estimates, remaining),
        elsewhere=_errors(measured, estimates, [place for place in unseen if place not in set(offered)]),
        covered=_covered(measured, estimates),
        refused=sum(math.isnan(estimate.seconds) for estimate in estimates.values()),
        fastest=choice.regrets("time") if judged else None,
        cheapest=choice.regrets("cost") if judged else None,
        knee=choice.knee_missed() if judged else None,
        cost=meter.cost / exhaustive(measured),
        probes=len(meter.seen),
        fit_seconds=fit_seconds,
    )


def smoothed(seen: Mapping[Where, Observation], predict: Predictor) -> dict[Where, Estimate]:
    """Return what was measured, with what the model says of it."""
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
    """What the product chooses among the candidates of a set when it believes the given step times."""

    measured: MeasuredSet
    believed: Mapping[Where, Estimate] = field(repr=False)

    def regrets(self, wanted: Curve) -> Regrets:
        believed, true = predictions(self.measured, self.believed), truth(self.measured)
        regrets = []
        for cap in sorted({row.batch for row in true}):
            actual = {(row.nodes, row.batch): _value(row, wanted) for row in true if row.batch <= cap}
            if len(actual) > 1:
                rows = [row for row in believed if row.batch <= cap]
                chosen = objective.choose_configuration(Candidates.from_predictions(rows), objective=wanted).prediction
                regrets.append(actual[chosen.nodes, chosen.batch] / min(actual.values()) - 1)
        return Regrets(regrets[-1], tuple(regrets[:-1]))

    def knee_missed(self) -> KneeMissed | None:
        """Return how far the knee believed in is off the true one; None where there are too few batches."""
        true = true_knee(self.measured)
        if true is None:
            return None
        result = knee(predictions(self.measured, self.believed))
        times = {row.batch: row.hours for row in objective.find_envelope(truth(self.measured))}
        return KneeMissed(round(math.log2(result / true)), max(0.0, times[result] / times[true] - 1))


def _value(row: Prediction, wanted: Curve) -> float:
    return row.hours if wanted == "time" else row.cost


def knee(rows: Sequence[Prediction]) -> int:
    """Return the global batch that the product takes for the objective knee."""
    return objective.choose_configuration(Candidates.from_predictions(rows), objective="knee").prediction.batch


@cache
def true_knee(measured: MeasuredSet) -> int | None:
    """Return the knee of what was measured; None where there are too few batches to judge one on."""
    rows = truth(measured)
    return knee(rows) if len({row.batch for row in rows}) >= FEWEST else None


@cache
def truth(measured: MeasuredSet) -> list[Prediction]:
    """Return the candidates with what was measured."""
    return predictions(measured, {place: Estimate(measured.truth[place].seconds) for place in measured.batches})


def predictions(measured: MeasuredSet, times: Mapping[Where, Estimate]) -> list[Prediction]:
    """Return the candidates as the product's forecasts; those without a step time are left out."""
    return [
        _prediction(measured, place, times[place])
        for place in measured.offer.candidates
        if not math.isnan(times[place].seconds)
    ]


def _prediction(measured: MeasuredSet, place: Where, step: Estimate) -> Prediction:
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


def predictor(measured: MeasuredSet, strategy: str, model: str) -> Predictor:
    """Return a model fitted to what a strategy probes."""
    meter = metered(measured, STRATEGIES[strategy])
    return MODELS[model](list(meter.seen.values()), measured.collective)
