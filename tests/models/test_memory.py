import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_results import MIB, Truth, footprint, measured

from tula_cli.errors import BadMeasurements
from tula_cli.models.memory import fit

TRUTHS = st.builds(
    Truth, model_bytes=st.integers(MIB, 2000 * MIB), sample_bytes=st.integers(20_000, 50 * MIB), accumulate=st.just(1)
)


@given(TRUTHS, st.integers(1, 4096))
def test_finds_eq_3_from_two_measured_batches(truth: Truth, local_batch: int) -> None:
    model = fit([measured(truth, 2, 8), measured(truth, 4, 64)])
    assert model.peak(local_batch) == pytest.approx(truth.peak(local_batch), rel=0.01, abs=MIB)


@given(TRUTHS, st.integers(10 * MIB, 100_000 * MIB), st.floats(0, 0.5))
def test_the_largest_batch_fits_and_the_next_does_not(truth: Truth, capacity: int, margin: float) -> None:
    model = fit([footprint(truth, 8), footprint(truth, 64)])
    largest = model.largest_local_batch(capacity, margin=margin)
    assert largest is not None
    assert largest == 0 or model.reserved(largest) <= capacity * (1 - margin) + 2
    assert model.reserved(largest + 1) >= capacity * (1 - margin) - 2


def test_components_add_up_to_the_peak() -> None:
    truth = Truth()
    model = fit([measured(truth, 2, 32), measured(truth, 2, 128)])
    assert model.parameters == model.gradients == model.optimizer == model.factors == truth.model_bytes
    assert model.fixed == pytest.approx(4 * truth.model_bytes, rel=1e-6)
    assert model.slope == pytest.approx(truth.sample_bytes, rel=1e-6)


def test_one_measured_batch_takes_activations_as_proportional() -> None:
    truth = Truth()
    model = fit([measured(truth, 2, 32), measured(truth, 4, 32)])
    assert model.peak(128) == pytest.approx(truth.peak(128), rel=1e-6)
    assert model.error is None


def test_memory_goes_by_the_micro_batch() -> None:
    plain, split = Truth(), Truth(accumulate=4)
    model = fit([measured(split, 2, 32), measured(split, 2, 128)], accumulate=4)
    assert model.peak(512) == pytest.approx(plain.peak(128), rel=1e-6)
    largest = model.largest_local_batch(16 * 1024 * MIB, margin=0.1)
    assert largest is not None and largest % 4 == 0


def test_what_is_measured_above_the_estimate_is_added_as_fixed() -> None:
    truth, process = Truth(), 300 * MIB
    seen = measured(truth, 2, 32)
    memory = seen.memory.model_copy(
        update={
            "peak": seen.memory.peak + process,
            "reserved": seen.memory.peak + process,
            "activations": seen.memory.activations + process,
        }
    )
    model = fit([seen.model_copy(update={"memory": memory}), footprint(truth, 16), footprint(truth, 64)])
    assert model.peak(32) == pytest.approx(memory.peak, rel=1e-6)
    assert model.peak(256) == pytest.approx(truth.peak(256) + process, rel=1e-6)


def test_what_is_measured_below_the_estimate_scales_the_activations() -> None:
    truth, lean = Truth(), Truth(sample_bytes=MIB)
    model = fit([measured(lean, 2, 32), footprint(truth, 16), footprint(truth, 64)])
    assert model.peak(256) == pytest.approx(lean.peak(256), rel=0.01)


def test_two_measured_batches_make_the_estimate_void() -> None:
    wrong, truth = Truth(model_bytes=900 * MIB, sample_bytes=9 * MIB), Truth()
    model = fit([footprint(wrong, 16), footprint(wrong, 64), measured(truth, 2, 32), measured(truth, 2, 64)])
    assert model.peak(512) == pytest.approx(truth.peak(512), rel=1e-6)


def test_the_allocator_holds_more_than_is_in_use() -> None:
    truth = Truth(reserved_over_peak=1.25)
    model = fit([measured(truth, 2, 32), measured(truth, 2, 128)])
    assert model.reserved(64) == pytest.approx(1.25 * truth.peak(64), rel=1e-6)
    tight = model.largest_local_batch(1600 * MIB, margin=0.0)
    loose = fit([measured(Truth(), 2, 32), measured(Truth(), 2, 128)]).largest_local_batch(1600 * MIB, margin=0.0)
    assert (tight, loose) == (440, 600)


def test_nothing_fits_or_nothing_bounds() -> None:
    model = fit([measured(Truth(), 2, 32), measured(Truth(), 2, 128)])
    assert model.largest_local_batch(100 * MIB, margin=0.1) == 0
    assert model.largest_local_batch(None, margin=0.1) is None


def test_memory_that_does_not_grow_sets_no_bound() -> None:
    truth = Truth(sample_bytes=0)
    assert fit([measured(truth, 2, 32), measured(truth, 2, 128)]).largest_local_batch(10**12, margin=0.1) is None


def test_activations_that_fall_with_the_batch_are_taken_at_their_largest() -> None:
    low, high = measured(Truth(), 2, 32), measured(Truth(), 2, 128)
    swapped = [low.model_copy(update={"memory": high.memory}), high.model_copy(update={"memory": low.memory})]
    model = fit(swapped)
    assert model.activations_slope == 0 and model.activations_fixed == high.memory.activations


def test_the_error_is_that_of_the_peak() -> None:
    truth = Truth()
    probes = [measured(truth, 2, batch) for batch in (32, 64, 128, 256)]
    assert fit(probes).error == pytest.approx(0, abs=1e-6)
    assert fit(probes[:2]).error is None
    bent = probes[2].memory.model_copy(update={"peak": round(probes[2].memory.peak * 1.2)})
    off = fit([*probes[:2], probes[2].model_copy(update={"memory": bent})]).error
    assert off is not None and off < 0.2


def test_no_point_is_refused() -> None:
    with pytest.raises(BadMeasurements):
        fit([])
