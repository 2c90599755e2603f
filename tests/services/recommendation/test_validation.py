"""How well a run's own probes foresee each other (services/recommendation/validation.py)."""

import pytest
from make_results import Truth, probe_all, spec

from tula_cli.errors import BadMeasurements
from tula_cli.services.recommendation.validation import validate

FULL = {n: tuple(batch // n for batch in (64, 128, 256, 512, 1024)) for n in (2, 4, 8)}


def test_each_strategy_is_judged_by_the_probes_that_it_does_not_take() -> None:
    judged = {one.strategy: one for one in validate(spec(), probe_all(Truth(noise=0.01, jitter=0.01), FULL))}
    assert {name: (one.probes, one.unseen) for name, one in judged.items()} == {
        "partial": (4, 11), "five": (5, 10), "sweep": (8, 7), "full": (15, 15),
    }  # fmt: skip
    assert judged["full"].left_out_once and not judged["sweep"].left_out_once
    assert judged["full"].median < 0.05 and judged["sweep"].median < judged["partial"].median + 0.05
    assert all(one.median <= one.p90 and 0.5 <= one.held <= 1 for one in judged.values())


def test_of_a_sweep_that_was_measured_each_probe_is_left_out_once() -> None:
    swept = {2: FULL[2], 4: FULL[4][:1], 8: (FULL[8][0], FULL[8][2])}
    judged = {one.strategy: one for one in validate(spec(), probe_all(Truth(), swept))}
    assert judged["sweep"].left_out_once and "full" not in judged, "it would take the very same probes"


def test_probes_of_one_place_foresee_nothing() -> None:
    with pytest.raises(BadMeasurements, match="follows from 1 probe"):
        validate(spec(), probe_all(Truth(), {2: (32,)}))
