"""Where a curve over the batch bends (models/choice/knee.py)."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tula_cli.models.choice.knee import compute_knee_probabilities, find_knee, find_relative_extrema, run_kneedle

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
    assert compute_knee_probabilities(batches, np.array(draws)) == {256: 0.75, 512: 0.25}


def test_where_every_doubling_halves_the_time_no_batch_is_the_knee() -> None:
    assert compute_knee_probabilities(np.array(BATCHES), np.log([[1.0 / batch for batch in BATCHES]])) == {}


@pytest.mark.parametrize("comparator", [np.greater_equal, np.less_equal, np.greater])
def test_relative_extrema_are_those_of_scipy(comparator: np.ufunc) -> None:
    from scipy.signal import argrelextrema

    random = np.random.default_rng(0)
    for size in (1, 2, 3, 10, 200):
        values = random.integers(0, 4, size).astype(float)
        np.testing.assert_array_equal(
            find_relative_extrema(values, comparator), argrelextrema(values, comparator), strict=True
        )


def test_the_knee_is_that_of_kneed_with_all_its_imports() -> None:
    code = """
import sys
import subprocess
import sys

import numpy as np
from tula_cli.models.choice.knee import run_kneedle
random = np.random.default_rng(0)
batches = [32 * 2**k for k in range(8)]
curves = [np.cumprod(np.r_[1.0, random.uniform(0.5, 1.0, 7)]).tolist() for _ in range(50)]
if len(sys.argv) > 1:
    import kneed
else:
    run_kneedle(batches, curves[0])
    assert not {"kneed", "matplotlib", "scipy.signal"} & sys.modules.keys()
print([run_kneedle(batches, curve) for curve in curves])
"""
    answers = [
        subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
        for words in ((), ("complete",))
    ]
    assert answers[0] == answers[1]
    assert any(knee is not None for knee in json.loads(answers[0].replace("None", "null")))
