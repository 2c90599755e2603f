"""The judgement of pairs of steps, with the shim's hooks and without (benchmarks/script_cases/step_cost.py)."""

import pytest
from script_cases.step_cost import summarise_pairs


def test_a_script_is_more_expensive_by_the_median_of_neighbours_whatever_others_did_meanwhile() -> None:
    pairs = [[0.1 * busy, 0.1 * busy + 0.002] for busy in (1.0,) * 15 + (3.0,) * 5]
    result = summarise_pairs([*pairs, [0.1, 5.0]])
    assert result["pairs"] == 21 and result["step_cpu_ms"] == pytest.approx(100)
    for name in ("percent", "low_percent", "high_percent"):
        assert result[name] == pytest.approx(2.0), "one step that held an evaluation counts no more than another"


def test_the_interval_is_as_wide_as_the_pairs_are_at_odds() -> None:
    result = summarise_pairs([[1.0, 1.0 + (index - 20) / 100] for index in range(41)])
    assert result["percent"] == pytest.approx(0.0)
    assert -8 < result["low_percent"] < -4 and 4 < result["high_percent"] < 8
