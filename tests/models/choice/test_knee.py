"""Where a curve over the batch bends (models/choice/objective.py)."""

import numpy as np
import pytest

from tula_cli.models.choice.objective import count_knee_shares, find_knee, run_kneedle

BATCHES = [32, 64, 128, 256, 512, 1024, 2048]


def bent(at: int) -> list[float]:
    """Time that halves with every doubling up to a batch, and then stays."""
    return [1.0 / min(batch, at) for batch in BATCHES]


@pytest.mark.parametrize("at", [64, 256])
def test_both_rules_find_a_sharp_bend(at: int) -> None:
    assert find_knee(BATCHES, bent(at)) == at == run_kneedle(BATCHES, bent(at))


def test_kneedle_depends_on_where_the_curve_is_cut_off_and_the_knee_does_not() -> None:
    times = [1.0 * 0.6**k for k in range(3)] + [0.36 * 0.8**k for k in range(1, 9)]
    batches = [32 * 2**k for k in range(len(times))]
    whole, part = find_knee(batches, times), find_knee(batches[:6], times[:6])
    assert whole == part == 128
    assert run_kneedle(batches, times) is not None


def test_a_flat_curve_has_none() -> None:
    assert find_knee(BATCHES, [1.0] * 7) is None and run_kneedle(BATCHES, [1.0] * 7) is None


def test_shares_tell_how_often_each_batch_is_the_knee() -> None:
    batches = np.array(BATCHES * 2)
    draws = [np.log([*bent(256), *(3 * time for time in bent(512))])] * 3 + [np.log(bent(512) * 2)]
    assert count_knee_shares(batches, np.array(draws)) == {256: 0.75, 512: 0.25}


def test_where_every_doubling_halves_the_time_no_batch_is_the_knee() -> None:
    assert count_knee_shares(np.array(BATCHES), np.log([[1.0 / batch for batch in BATCHES]])) == {}
