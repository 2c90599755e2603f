"""How well a run's own probes foresee each other (services/recommendation/validation.py)."""

import pytest
from make_results import Truth, probe_all, spec

from tula_cli.errors import BadMeasurements
from tula_cli.models.observations import OtherSizes
from tula_cli.models.time.formulas import PRIORS
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.services.recommendation.validation import TRAININGS, validate_strategies

FULL = {n: tuple(batch // n for batch in (64, 128, 256, 512, 1024)) for n in (2, 4, 8)}


def test_each_strategy_is_judged_by_the_probes_that_it_does_not_take() -> None:
    judged = {
        item.strategy: item
        for item in validate_strategies(spec(), probe_all(Truth(noise=0.01, jitter=0.01), FULL), priors=PRIORS)
    }
    assert {name: (first.probes, first.unseen) for name, first in judged.items()} == {
        "partial": (4, 11), "sweep": (9, 6), "full": (15, 15),
    }  # fmt: skip
    assert judged["full"].left_out_once and not judged["sweep"].left_out_once
    assert judged["full"].median < 0.05 and judged["sweep"].median < judged["partial"].median + 0.05
    assert all(entry.median <= entry.p90 and 0.5 <= entry.held <= 1 for entry in judged.values())


def test_of_a_sweep_that_was_measured_each_probe_is_left_out_once() -> None:
    swept = {2: FULL[2], 4: FULL[4][:1], 8: (FULL[8][0], FULL[8][2], FULL[8][-1])}
    judged = {item.strategy: item for item in validate_strategies(spec(), probe_all(Truth(), swept), priors=PRIORS)}
    assert judged["sweep"].left_out_once and "full" not in judged, "it would take the very same probes"


def trained(nodes: int, local_batch: int, seconds: float) -> TrainedSteps:
    return TrainedSteps(
        signature="ab", nodes=nodes, gpus_per_node=1, batch=nodes * local_batch, step_time=seconds,
        step_times=(seconds,) * 5, compute=None, sync=None, data_wait=None, steps=100, changed=0.0, noise=0.015, since=0.0,
        until=1.0,
    )  # fmt: skip


def test_what_trainings_have_measured_is_foreseen_and_helps_to_foresee() -> None:
    probes = probe_all(Truth(), {2: FULL[2], 4: FULL[4][:1], 8: (FULL[8][0], FULL[8][2])})
    plain = {item.strategy: item for item in validate_strategies(spec(), probes, priors=PRIORS)}
    slow = [trained(nodes, local, 1.3 * Truth().step_time(nodes, local)) for nodes in (4, 8) for local in (64, 128)]
    judged = {first.strategy: first for first in validate_strategies(spec(), probes, trained=slow, priors=PRIORS)}
    assert judged["partial"].unseen == plain["partial"].unseen + len(slow)
    assert judged["partial"].median > plain["partial"].median, "trainings came out slower than the probes tell"
    last = judged[TRAININGS]
    assert list(judged)[-1] == TRAININGS and TRAININGS not in plain
    assert (last.probes, last.unseen, last.left_out_once) == (len(probes), len(probes) + len(slow), True)
    assert last.median < judged["partial"].median, "with the other trainings each is foreseen better"


def test_probes_with_other_gpus_a_node_count() -> None:
    probes = probe_all(Truth(), {2: (32, 64, 256)})
    with pytest.raises(BadMeasurements):
        validate_strategies(spec(), probe_all(Truth(), {2: (32,)}), priors=PRIORS)
    others = OtherSizes(tuple(probe_all(Truth(gpus_per_node=4), {1: (32, 256), 2: (32, 256)})))
    assert validate_strategies(spec(), probes, others=others, priors=PRIORS)[0].median < 0.2


def test_probes_of_one_place_foresee_nothing() -> None:
    with pytest.raises(BadMeasurements, match="predictions with measurements: 1"):
        validate_strategies(spec(), probe_all(Truth(), {2: (32,)}), priors=PRIORS)
