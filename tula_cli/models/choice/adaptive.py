"""Choose the next probes: those expected to improve the decisions most per node-second.

The decisions are the fastest and the cheapest configuration, without and with every bound on the batch, and the knee.
The fitted step-time model gives every candidate's step time and the covariance of their errors. From these follow, for
each decision, the expected regret of deciding now and the value of a probe: the expected improvement of the decision
after it (the knowledge gradient).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tula_cli.models.choice.candidates import Flags, Floats
from tula_cli.models.choice.knee import MIN_BATCHES_FOR_KNEE
from tula_cli.models.time.noise import Z90
from tula_cli.models.time.step_time import DEFAULT_REPEAT_SD, StepTimeFit, draw_posterior_samples
from tula_cli.words import describe_probe_configuration, format_percent, join_words

# assumed outcomes of a probe, in standard deviations
_OUTCOME_QUANTILES = np.array([-1.5, -0.8, -0.25, 0.25, 0.8, 1.5])
_MIN_BENEFIT_SHARE = 0.5  # minimum expected benefit of a probe, as a share of the tolerance
_REALISED_BENEFIT_SHARE = 0.1
"""Share of a probe's expected benefit that is compared with its cost: the benefit sums over all decisions, of which the
user asks for one, and on measured clusters choices were only a fifth to a tenth as far off as expected
(benchmarks/replay/replay.py)."""


@dataclass(frozen=True)
class Candidate:
    """A configuration that may be chosen, and the cost of probing it."""

    nodes: int
    gpus_per_node: int
    local_batch: int
    batch: int  # global
    node_or_gpu_count: int  # multiplier of seconds to node-seconds: nodes, or GPUs within one node
    steps: float  # optimizer steps of the whole training
    price: float  # price of its nodes for one hour
    probe_seconds: float  # node-seconds of the probe within a running job
    job_seconds: float  # node-seconds of starting a job on its nodes
    measured: float | None  # measured seconds per step; None if it was not probed
    log_sd: float = 0.0  # standard deviation of ln(measured)


@dataclass(frozen=True)
class ProposedProbe:
    """A probe worth running, and the reason in one line."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Proposal:
    """The next round of probes, best first (run in parallel; those on the same number of nodes in one job)."""

    picks: tuple[ProposedProbe, ...]  # empty if every decision is settled or everything is probed
    regrets: dict[str, float]  # expected regret of deciding now, by objective: time, cost, knee
    summary: str  # how certain the decisions are, in one line


def choose_first_probes(
    by_nodes: Iterable[tuple[int, Sequence[int]]], *, whole_steps: bool = False
) -> list[tuple[int, int]]:
    """Return the initial probes (nodes, local batch): three batches on the fewest nodes, the smallest on the most.

    Args:
        by_nodes: numbers of nodes with their ascending local batches; at least one.
        whole_steps: probes do not measure compute apart from synchronisation. The largest batch on the most nodes is
            then added: without it the hidden share of the synchronisation is unknown, and no interval is reliable.
    """
    sizes = sorted((nodes, tuple(batches)) for nodes, batches in by_nodes)
    (fewest_nodes, batches), (most_nodes, their) = sizes[0], sizes[-1]
    ends = [(fewest_nodes, batch) for batch in (batches[0], batches[len(batches) // 2], batches[-1])]
    return list(dict.fromkeys([*ends, (most_nodes, their[0]), *([(most_nodes, their[-1])] if whole_steps else [])]))


def propose_probes(fit: StepTimeFit, candidates: Sequence[Candidate], *, tolerance: float) -> Proposal:
    """Return the next probes to run.

    Args:
        fit: to the probes so far.
        candidates: every feasible configuration, probed or not; at least one.
        tolerance: expected regret below which nothing more is measured, as a share of a decision's time or cost.
    """
    belief = _Posterior.from_fit(fit, candidates)
    problem = _SelectionProblem.from_candidates(candidates)
    regrets = problem.compute_regrets(belief)
    unmeasured = np.array([candidate.measured is None for candidate in candidates])
    words = describe_regrets(regrets, all_measured=not unmeasured.any())
    if max(regrets.values()) <= tolerance:
        return Proposal((), regrets, f"The search is finished: further probes would not change the choice. {words}")
    training = problem.compute_fastest_node_seconds(belief.mean)
    picks = tuple(_plan_round(problem, belief, unmeasured, tolerance, training))
    takes = f"The training takes {training / 3600:.2g} node-hours in its fastest configuration."
    return Proposal(
        picks,
        regrets,
        words if picks else f"The search is finished: a further probe would cost more than it saves. {takes} {words}",
    )


def describe_regrets(regrets: Mapping[str, float], *, all_measured: bool = False) -> str:
    """Describe the expected regrets of deciding now, as shares by objective; those above 1 show only that little is known."""
    gains = [f"{format_percent(regret)} % ({name})" for name, regret in regrets.items() if regret <= 1]
    unknown = [name for name, regret in regrets.items() if regret > 1]
    sentences = []
    if gains:
        shares = " and ".join(filter(None, (join_words(gains[:-1]), gains[-1]))).replace("(", "(objective ", 1)
        sentences.append(
            f"All configurations are measured; because of noise, the best one may be better by about {shares}."
            if all_measured
            else f"Measuring all configurations would improve the choice by about {shares}."
        )
    if unknown:
        subject = f"{' and '.join(unknown)} {'are' if unknown[1:] else 'is'}"
        sentences.append(f"The choice is uncertain, because {subject} not known precisely enough.")
    return " ".join(sentences)


@dataclass(frozen=True)
class _Posterior:
    """The posterior of ln step time over the candidates."""

    mean: Floats  # (n,)
    covariance: Floats  # (n, n)
    noise: Floats  # (n,) variance of one measurement

    @classmethod
    def from_fit(cls, fit: StepTimeFit, candidates: Sequence[Candidate]) -> "_Posterior":
        points = fit.make_points(
            [c.nodes for c in candidates], [c.gpus_per_node for c in candidates], [c.local_batch for c in candidates]
        )
        mean, covariance = fit.model.predict_jointly(points)
        noise = fit.model.compute_measurement_noise(points) ** 2
        # The decision uses the measurement of a measured candidate; its uncertainty is the variation between jobs.
        for index, candidate in enumerate(candidates):
            if candidate.measured is not None:
                mean[index] = math.log(candidate.measured)
                covariance[index, :] = covariance[:, index] = 0.0
                covariance[index, index] = max(DEFAULT_REPEAT_SD, candidate.log_sd) ** 2
        return cls(mean, covariance, noise)

    def compute_mean_shift(self, index: int) -> Floats:
        """Return the change of all means if a measurement is one standard deviation above its expectation."""
        moved: Floats = self.covariance[:, index] / math.sqrt(self.covariance[index, index] + self.noise[index])
        return moved

    def add_expected_measurement(self, index: int) -> "_Posterior":
        """Return the belief after a measurement that equals its expectation."""
        shift = self.compute_mean_shift(index)
        return _Posterior(self.mean, self.covariance - np.outer(shift, shift), self.noise)


@dataclass(frozen=True)
class _Decision:
    """Minimise ln step time + `weights` among the `allowed` candidates."""

    objective: str
    weights: Floats  # (n,)
    allowed: Flags  # (n,)
    share: float  # weight of this batch limit among the decisions of the objective

    def compute_log_values(self, log_step: Floats) -> Floats:
        """Return ln of the time or cost, infinite if not allowed; shape as given, (..., n)."""
        return np.where(self.allowed, log_step + self.weights, np.inf)


@dataclass(frozen=True)
class _SelectionProblem:
    """All decisions over the same candidates."""

    candidates: Sequence[Candidate]
    decisions: tuple[_Decision, ...]
    knee: "_Knee | None"

    @classmethod
    def from_candidates(cls, candidates: Sequence[Candidate]) -> "_SelectionProblem":
        log_steps = np.log([c.steps for c in candidates])
        log_price = np.log([max(c.price, 1e-300) for c in candidates])
        batches = np.array([c.batch for c in candidates])
        bounds = sorted(set(batches.tolist()))
        decisions = [
            _Decision(name, weights, batches <= bound, _compute_bound_weight(bound, bounds))
            for name, weights in (("time", log_steps), ("cost", log_steps + log_price))
            for bound in bounds
        ]
        knee = _Knee.from_batches(log_steps, batches) if len(bounds) >= MIN_BATCHES_FOR_KNEE else None
        return cls(candidates, tuple(decisions), knee)

    def compute_regrets(self, belief: _Posterior) -> dict[str, float]:
        """Return the expected regret of deciding now, by objective."""
        samples = draw_posterior_samples(belief.mean, belief.covariance)
        largest = {"time": 0.0, "cost": 0.0}
        for decision, chosen in zip(self.decisions, self.select_candidates(belief.mean), strict=True):
            values = decision.compute_log_values(samples)
            lost = float(np.expm1(values[:, chosen] - values.min(axis=1)).mean())
            largest[decision.objective] += decision.share * lost
        if self.knee is not None:
            largest["knee"] = self.knee.compute_regret(belief.mean, samples)
        return largest

    def select_candidates(self, mean: Floats) -> list[int]:
        """Return the candidate that each decision selects."""
        return [int(np.argmin(decision.compute_log_values(mean))) for decision in self.decisions]

    def compute_fastest_node_seconds(self, mean_log_step_times: Floats) -> float:
        """Return the node-seconds of the fastest training, by which relative savings are converted to node-seconds."""
        seconds = np.exp(mean_log_step_times) * [c.steps for c in self.candidates]
        fastest = int(np.argmin(seconds))
        return float(seconds[fastest]) * self.candidates[fastest].node_or_gpu_count

    def compute_benefit(self, belief: _Posterior, choices: Sequence[int], index: int) -> float:
        """Return the expected improvement of the decisions by a probe over `choices`, as a share of time or cost."""
        outcomes = belief.mean + _OUTCOME_QUANTILES[:, None] * belief.compute_mean_shift(index)
        total = 0.0
        for decision, chosen in zip(self.decisions, choices, strict=True):
            after = decision.compute_log_values(outcomes)
            total += decision.share * float((after[:, chosen] - after.min(axis=1)).mean())
        if self.knee is not None:
            total += self.knee.compute_regret(belief.mean, outcomes)
        return total


def _compute_bound_weight(bound: int, bounds: Sequence[int]) -> float:
    """Return the weight of a bound on the batch: the decision without a bound counts as much as all others together."""
    if len(bounds) == 1:
        return 1.0
    return 0.5 if bound == bounds[-1] else 0.5 / (len(bounds) - 1)


@dataclass(frozen=True)
class _Knee:
    """The knee of the fastest time over the batch: the minimum of time x sqrt(batch).

    `objective` uses the same rule, and another one if the minimum is at the first or the last batch.
    """

    weights: Floats  # (n,)
    members: Flags  # (batches, n)
    log_batch: Floats  # (batches,)

    @classmethod
    def from_batches(cls, weights: Floats, batches: NDArray[np.int_]) -> "_Knee":
        unique = np.unique(batches)
        return cls(weights, batches[None, :] == unique[:, None], np.log(unique))

    def compute_curve(self, log_step: Floats) -> Floats:
        """Return the fastest ln time at each batch, shape (..., batches)."""
        values = np.where(self.members, (log_step + self.weights)[..., None, :], np.inf)
        best: Floats = values.min(axis=-1)
        return best

    def find_knee(self, curve: Floats) -> NDArray[np.intp]:
        """Return the index of the knee of each curve."""
        best: NDArray[np.intp] = np.argmin(curve + self.log_batch / 2, axis=-1)
        return best

    def compute_regret(self, mean: Floats, others: Floats) -> float:
        """Return the mean relative excess over the minimum of each other curve at the knee of the mean curve.

        The value at a knee is time x sqrt(batch).
        """
        chosen = int(self.find_knee(self.compute_curve(mean)))
        curves = self.compute_curve(others) + self.log_batch / 2
        return float(np.expm1(curves[:, chosen] - curves.min(axis=-1)).mean())


def _plan_round(
    problem: _SelectionProblem, belief: _Posterior, unmeasured: Flags, tolerance: float, training: float
) -> Iterable[ProposedProbe]:
    """Yield probes one after the other, each chosen as if the previous ones had come out as expected.

    Probes that cost more node-seconds than they are expected to save of the training are not chosen.
    """
    started: set[tuple[int, int]] = set()
    remaining = [index for index in range(len(unmeasured)) if unmeasured[index]]
    # measurements that equal their expectation do not change the choices
    choices = problem.select_candidates(belief.mean)
    while remaining:
        benefits = np.array([problem.compute_benefit(belief, choices, index) for index in remaining])
        costs = np.array([_compute_probe_node_seconds(problem.candidates[index], started) for index in remaining])
        pays = (benefits >= tolerance * _MIN_BENEFIT_SHARE) & (_REALISED_BENEFIT_SHARE * benefits * training >= costs)
        rates = np.where(pays, benefits / costs, 0.0)
        best = int(np.argmax(rates))
        if rates[best] <= 0:
            return
        index = remaining.pop(best)
        candidate = problem.candidates[index]
        yield ProposedProbe(candidate, _describe_probe_choice(candidate, belief, index, float(benefits[best])))
        started.add((candidate.nodes, candidate.gpus_per_node))
        belief = belief.add_expected_measurement(index)


def _compute_probe_node_seconds(candidate: Candidate, started: set[tuple[int, int]]) -> float:
    shared = (candidate.nodes, candidate.gpus_per_node) in started
    return candidate.probe_seconds + (0.0 if shared else candidate.job_seconds)


def _describe_probe_choice(candidate: Candidate, belief: _Posterior, index: int, benefit: float) -> str:
    spread = math.expm1(Z90 * math.sqrt(belief.covariance[index, index]))
    return f"{describe_probe_configuration(candidate.nodes, candidate.local_batch)}: its step time is uncertain by {100 * spread:.0f} %; a probe of this configuration is expected to improve the decisions by {100 * benefit:.1f} %"
