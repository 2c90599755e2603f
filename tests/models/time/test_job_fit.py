"""Slow ranks are named, and so are waits that the model does not explain (models/time/job_fit.py)."""

import numpy as np
import pytest
from make_results import Truth, make_probe, make_probes, make_shared_storage_probes, make_spec
from read_diagnostics import values

from tula_cli.models.estimator import Estimator
from tula_cli.models.time.job_fit import find_gradient_bytes, find_stragglers, fit_step_time_and_find_stragglers
from tula_cli.run.records.probes import Components, Measured, ModelStates, PeakMemory, RankStepTimes


def with_ranks(nodes: int, *, compute: float = 0.1, waits: float = 0.0, hosts: int | None = None) -> Measured:
    """A probe whose last rank takes `compute` and waits `waits` more, where the others take 0.1 s."""
    usual = [
        RankStepTimes(host=f"n{k % (hosts or nodes)}", compute=0.1 + 0.001 * k, wait=0.01) for k in range(nodes - 1)
    ]
    last = RankStepTimes(host=f"n{(nodes - 1) % (hosts or nodes)}", compute=compute + waits, wait=0.01 + waits)
    return make_probe(Truth(), nodes, 32, ranks=(*usual, last))


def test_a_node_that_computes_slowly_in_most_of_its_probes_is_named() -> None:
    (straggler,) = find_stragglers([with_ranks(4, compute=0.18), with_ranks(4, compute=0.2), with_ranks(2)])
    assert (straggler.name, straggler.probes, straggler.all_probes, straggler.waits) == ("n3", 2, 2, False)
    assert straggler.factor == pytest.approx(1.9, rel=0.05)
    assert (
        straggler.warning.values["factor"] == pytest.approx(1.9, abs=0.05)
        and "cluster.slurm.exclude: n3" in straggler.warning.text
    )


def test_a_node_that_waits_for_its_data_is_distinguished_from_one_that_computes_slowly() -> None:
    (straggler,) = find_stragglers([with_ranks(4, waits=0.1), with_ranks(4, waits=0.1)])
    assert straggler.waits and straggler.warning.values["waits_for_data"] is True


def test_a_rank_of_one_node_is_named_by_its_number() -> None:
    (straggler,) = find_stragglers([with_ranks(4, compute=0.2, hosts=1)] * 2)
    assert straggler.name == "rank 3" and "exclude" not in straggler.warning.text


@pytest.mark.parametrize("probes", [[], [with_ranks(4, compute=0.2)], [with_ranks(4, compute=0.11)] * 4])
def test_one_slow_probe_or_a_few_per_cent_name_nobody(probes: list[Measured]) -> None:
    assert find_stragglers(probes) == []


def test_slow_once_in_many_is_chance() -> None:
    assert find_stragglers([with_ranks(4, compute=0.2)] * 2 + [with_ranks(4)] * 2) == []


def test_steps_that_wait_for_other_ranks_the_longer_the_larger_the_batch_are_recognised() -> None:
    job, inside = make_spec(search={"nodes": [1, 2, 4, 8]}), []
    for seed in range(5):
        everything = make_shared_storage_probes(seed)
        seen = [probe for probe in everything if probe.nodes in (1, 8) or probe.local_batch <= 32]
        fit, message = fit_step_time_and_find_stragglers(job, seen)
        assert values(message, "unexplained-waits")["nodes"] == 8
        for probe in everything:
            if probe not in seen:
                result = fit.predict(probe.nodes, 1, probe.local_batch)
                assert result.low is not None and result.high is not None
                inside.append(result.low <= probe.step_times[0] <= result.high)
        assert Estimator.fit(job, seen).held_up
    assert np.mean(inside) > 0.7


@pytest.mark.parametrize("seed", range(5))
def test_an_ordinary_job_is_not_held_up(seed: int) -> None:
    truth = Truth(noise=0.02, jitter=0.02)
    assert not fit_step_time_and_find_stragglers(
        make_spec(), make_probes(truth, {2: (16, 64, 256), 16: (2, 32, 256)}, seed=seed)
    )[1]


def test_the_gradients_of_the_whole_model_follow_from_what_a_rank_tells() -> None:
    plain = make_probe(Truth(), 4, 32)
    assert isinstance(plain.memory, Components)
    one_copy = plain.memory.gradients
    twice = plain.model_copy(
        update={"accumulate": 4, "memory": plain.memory.model_copy(update={"gradients": 2 * one_copy})}
    )
    assert find_gradient_bytes([plain, twice], sharded=False) == one_copy, "a second copy is no traffic"
    assert find_gradient_bytes([plain], sharded=True) == 4 * one_copy
    assert find_gradient_bytes([], sharded=False) == 0


@pytest.mark.parametrize(
    ("gradients_by_nodes", "whole"), [({1: 800, 4: 800}, 800), ({2: 400, 8: 100}, 800), ({4: None}, 0)]
)
def test_a_script_that_divides_its_model_tells_parts_of_its_gradients(
    gradients_by_nodes: dict[int, int | None], whole: int
) -> None:
    probes = []
    for nodes, gradients in gradients_by_nodes.items():
        states = gradients and ModelStates(parameters=gradients, gradients=gradients, optimizer=0, factors=0)
        memory = PeakMemory(states=states, peak=10_000, reserved=10_000)
        probes.append(make_probe(Truth(), nodes, 32).model_copy(update={"memory": memory}))
    assert find_gradient_bytes(probes, sharded=False) == whole
