import dataclasses

import numpy as np
import pytest

from tula_cli.models.choice import adaptive
from tula_cli.models.choice.adaptive import Candidate, Proposal, choose_first_probes, describe_regrets, propose_probes
from tula_cli.models.time.step_time import Observation, StepTimeFit, draw_posterior_samples, fit_step_time

SAMPLES = 1e8  # of one training
START = 30.0  # seconds


def seconds(nodes: int, local_batch: int) -> float:
    compute, traffic = 0.02 + 0.001 * local_batch, 0.2 * (1 - 1 / nodes)
    return compute / 3 + max(compute * 2 / 3, traffic) + 0.05 * traffic


def observation(nodes: int, local_batch: int, *, noise: float = 1.0) -> Observation:
    time = seconds(nodes, local_batch) * noise
    return Observation(nodes, 1, local_batch, (time,) * 10, 0.02 + 0.001 * local_batch)


def places(
    nodes: tuple[int, ...] = (1, 2, 4, 8), batches: tuple[int, ...] = (64, 128, 256, 512, 1024)
) -> list[tuple[int, int]]:
    return [(n, batch // n) for n in nodes for batch in batches]


def candidates(grid: list[tuple[int, int]], probed: set[tuple[int, int]]) -> list[Candidate]:
    return [
        Candidate(
            nodes=n, gpus_per_node=1, local_batch=b, batch=n * b, node_or_gpu_count=n, steps=SAMPLES / (n * b), price=float(n),
            probe_seconds=n * 50 * seconds(n, b), job_seconds=n * START,
            measured=seconds(n, b) if (n, b) in probed else None,
        )
        for n, b in grid
    ]  # fmt: skip


def fitted(probed: set[tuple[int, int]]) -> StepTimeFit:
    return fit_step_time([observation(*place) for place in probed], collective="ring")


def search(grid: list[tuple[int, int]]) -> tuple[set[tuple[int, int]], list[Proposal]]:
    """Follow the proposals to their end."""
    by_nodes = {n: tuple(b for m, b in grid if m == n) for n, _ in grid}
    probed, message = set(choose_first_probes(by_nodes.items())), []
    while True:
        proposal = propose_probes(fitted(probed), candidates(grid, probed), tolerance=0.01)
        message.append(proposal)
        if not proposal.picks:
            return probed, message
        probed |= {(pick.candidate.nodes, pick.candidate.local_batch) for pick in proposal.picks}


def test_starts_from_four_probes() -> None:
    assert choose_first_probes([(2, (16, 32, 64)), (8, (4, 8)), (4, (8, 16))]) == [(2, 16), (2, 32), (2, 64), (8, 4)]
    assert choose_first_probes([(2, (16, 32))]) == [(2, 16), (2, 32)]
    assert choose_first_probes([(2, (16,))]) == [(2, 16)]


def test_ends_near_the_optimum_with_a_part_of_the_probes() -> None:
    grid = places()
    probed, message = search(grid)
    assert len(probed) < 0.7 * len(grid)
    model = fitted(probed)

    def lost(price: int) -> float:
        """Return what the predicted best loses against the true best; price 1 counts nodes."""
        known = {place: seconds(*place) for place in probed}
        guess = {p: known.get(p, model.predict(p[0], 1, p[1]).seconds) * p[0] ** price / (p[0] * p[1]) for p in grid}
        true = {p: seconds(*p) * p[0] ** price / (p[0] * p[1]) for p in grid}
        return true[min(grid, key=lambda p: guess[p])] / min(true.values()) - 1

    assert lost(0) < 0.02 and lost(1) < 0.02
    assert all("Measuring all configurations" in proposal.summary for proposal in message)


@pytest.mark.parametrize(
    ("regrets", "expected"),
    [
        (
            {"time": 0.05, "cost": 1.0},
            "Measuring all configurations would improve the choice by about 5.0 % (objective time) and 100.0 % (cost).",
        ),
        ({"time": 3.0, "cost": 2.0}, "The choice is uncertain, because time and cost are not known precisely enough."),
        (
            {"time": 0.05, "cost": 2.0},
            "Measuring all configurations would improve the choice by about 5.0 % (objective time)."
            " The choice is uncertain, because cost is not known precisely enough.",
        ),
    ],
)
def test_no_gain_is_above_100_percent(regrets: dict[str, float], expected: str) -> None:
    assert describe_regrets(regrets) == expected


def test_with_all_configurations_measured_only_noise_remains() -> None:
    words = describe_regrets({"time": 0.05}, all_measured=True)
    assert (
        words
        == "All configurations are measured; because of noise, the best one may be better by about 5.0 % (objective time)."
    )


def test_never_proposes_what_was_probed_or_the_same_twice() -> None:
    grid = places()
    probed = {(1, 64), (1, 1024), (8, 8)}
    picks = propose_probes(fitted(probed), candidates(grid, probed), tolerance=0.01).picks
    chosen = [(pick.candidate.nodes, pick.candidate.local_batch) for pick in picks]
    assert chosen and len(set(chosen)) == len(chosen) and not set(chosen) & probed


def test_every_pick_says_where_and_why_in_one_line() -> None:
    probed = {(1, 64), (1, 1024), (8, 8)}
    for pick in propose_probes(fitted(probed), candidates(places(), probed), tolerance=0.01).picks:
        nodes = "1 node" if pick.candidate.nodes == 1 else f"{pick.candidate.nodes} nodes"
        assert pick.reason.startswith(f"{nodes}, local batch {pick.candidate.local_batch}: ")
        assert "\n" not in pick.reason and "%" in pick.reason


def test_nothing_is_left_to_propose_when_all_is_probed() -> None:
    grid = places((1, 2), (64, 128))
    proposal = propose_probes(fitted(set(grid)), candidates(grid, set(grid)), tolerance=0.01)
    assert proposal.picks == () and proposal.regrets.keys() == {"time", "cost"}  # too few batches for a knee


def test_a_wider_tolerance_ends_sooner() -> None:
    probed = {(1, 64), (1, 1024), (8, 8)}
    grid = candidates(places(), probed)
    assert propose_probes(fitted(probed), grid, tolerance=0.005).picks
    assert not propose_probes(fitted(probed), grid, tolerance=5.0).picks


def test_a_short_training_is_worth_no_probe() -> None:
    probed = {(1, 64), (1, 1024), (8, 8)}
    short = [dataclasses.replace(c, steps=c.steps / 1e5) for c in candidates(places(), probed)]
    proposal = propose_probes(fitted(probed), short, tolerance=0.01)
    assert not proposal.picks and "a further probe would cost more" in proposal.summary
    assert "The training takes" in proposal.summary


def test_probing_lowers_the_expected_regret() -> None:
    grid = places()
    few, many = {(1, 64), (1, 1024), (8, 8)}, {(n, b) for n, b in grid if n in (1, 2, 8)}
    before = propose_probes(fitted(few), candidates(grid, few), tolerance=0.01).regrets
    after = propose_probes(fitted(many), candidates(grid, many), tolerance=0.01).regrets
    assert sum(after.values()) < 0.5 * sum(before.values())


def test_of_probes_that_tell_the_same_the_cheaper_is_chosen() -> None:
    probed = {(1, 64), (1, 1024), (8, 8)}
    grid = candidates(places(), probed)
    free = propose_probes(fitted(probed), grid, tolerance=0.01).picks[0].candidate
    dear = [dataclasses.replace(c, probe_seconds=1e4 * c.probe_seconds) if c.nodes == free.nodes else c for c in grid]
    assert propose_probes(fitted(probed), dear, tolerance=0.01).picks[0].candidate.nodes != free.nodes


def test_batches_of_one_number_of_nodes_share_the_start_of_a_job() -> None:
    candidate = candidates([(4, 16)], set())[0]
    alone = adaptive._compute_probe_node_seconds(candidate, set())
    assert alone - adaptive._compute_probe_node_seconds(candidate, {(4, 1)}) == pytest.approx(4 * START)


def test_the_belief_after_a_measurement_is_that_of_the_normal_distribution() -> None:
    rng = np.random.default_rng(0)
    root = rng.standard_normal((4, 4))
    belief = adaptive._Posterior(np.zeros(4), root @ root.T, np.full(4, 0.3))
    after = belief.add_expected_measurement(2)
    row = belief.covariance[2]
    expected = belief.covariance - np.outer(row, row) / (row[2] + 0.3)
    assert after.covariance == pytest.approx(expected)
    draws = draw_posterior_samples(belief.mean, belief.covariance)
    assert np.cov(draws.T) == pytest.approx(belief.covariance, abs=0.8)


def test_the_knee_is_the_least_of_time_times_the_root_of_the_batch() -> None:
    batches = np.array([64, 128, 256, 512, 1024])
    knee = adaptive._Knee.from_batches(np.zeros(5), batches)
    assert knee.find_knee(np.log([1.0, 0.5, 0.45, 0.42, 0.4])) == 1
    assert knee.find_knee(np.log([1.0, 0.5, 0.25, 0.24, 0.23])) == 2
    known = np.log([1.0, 0.5, 0.45, 0.42, 0.4])
    assert knee.compute_regret(known, np.log([[1.0, 0.5, 0.25, 0.24, 0.23]])) == pytest.approx(2**0.5 - 1)
    assert knee.compute_regret(known, known[None]) == 0
