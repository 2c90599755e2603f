from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_results import MIB, Truth, as_script_probe, make_footprint, make_probe

from tula_cli.errors import BadMeasurements
from tula_cli.models.memory import fit_memory_model
from tula_cli.run.records.probes import Components, Footprint, Measured, ModelStates, PeakMemory

TRUTHS = st.builds(
    Truth, model_bytes=st.integers(MIB, 2000 * MIB), sample_bytes=st.integers(20_000, 50 * MIB), accumulate=st.just(1)
)


@given(TRUTHS, st.integers(1, 4096))
def test_finds_eq_3_from_two_measured_batches(truth: Truth, local_batch: int) -> None:
    model = fit_memory_model([make_probe(truth, 2, 8), make_probe(truth, 4, 64)])
    assert model.compute_peak(local_batch) == pytest.approx(truth.peak(local_batch), rel=0.01, abs=MIB)


@given(TRUTHS, st.integers(10 * MIB, 100_000 * MIB), st.floats(0, 0.5))
def test_the_largest_batch_fits_and_the_next_does_not(truth: Truth, capacity: int, margin: float) -> None:
    model = fit_memory_model([make_footprint(truth, 8), make_footprint(truth, 64)])
    largest = model.compute_largest_local_batch(capacity, margin=margin)
    assert largest is not None
    assert largest == 0 or model.compute_reserved_memory(largest) <= capacity * (1 - margin) + 2
    assert model.compute_reserved_memory(largest + 1) >= capacity * (1 - margin) - 2


def test_components_add_up_to_the_peak() -> None:
    truth = Truth()
    model = fit_memory_model([make_probe(truth, 2, 32), make_probe(truth, 2, 128)])
    assert set(model.states.model_dump().values()) == {truth.model_bytes}
    assert model.fixed_bytes == pytest.approx(4 * truth.model_bytes, rel=1e-6)
    assert model.bytes_per_sample == pytest.approx(truth.sample_bytes, rel=1e-6)


def test_one_measured_batch_takes_activations_as_proportional() -> None:
    truth = Truth()
    model = fit_memory_model([make_probe(truth, 2, 32), make_probe(truth, 4, 32)])
    assert model.compute_peak(128) == pytest.approx(truth.peak(128), rel=1e-6)
    assert model.error is None


def test_memory_goes_by_the_micro_batch() -> None:
    plain, split = Truth(), Truth(accumulate=4)
    model = fit_memory_model([make_probe(split, 2, 32), make_probe(split, 2, 128)], accumulate=4)
    assert model.compute_peak(512) == pytest.approx(plain.peak(128), rel=1e-6)
    largest = model.compute_largest_local_batch(16 * 1024 * MIB, margin=0.1)
    assert largest is not None and largest % 4 == 0


def test_what_is_measured_above_the_estimate_is_added_as_fixed() -> None:
    truth, process = Truth(), 300 * MIB
    seen = make_probe(truth, 2, 32)
    memory = seen.memory.model_copy(
        update={
            "peak": seen.memory.peak + process,
            "reserved": seen.memory.peak + process,
            "activations": seen.memory.activations + process,
        }
    )
    model = fit_memory_model(
        [seen.model_copy(update={"memory": memory}), make_footprint(truth, 16), make_footprint(truth, 64)]
    )
    assert model.compute_peak(32) == pytest.approx(memory.peak, rel=1e-6)
    assert model.compute_peak(256) == pytest.approx(truth.peak(256) + process, rel=1e-6)


def test_what_is_measured_below_the_estimate_scales_the_activations() -> None:
    truth, lean = Truth(), Truth(sample_bytes=MIB)
    model = fit_memory_model([make_probe(lean, 2, 32), make_footprint(truth, 16), make_footprint(truth, 64)])
    assert model.compute_peak(256) == pytest.approx(lean.peak(256), rel=0.01)


def test_two_measured_batches_make_the_estimate_void() -> None:
    wrong, truth = Truth(model_bytes=900 * MIB, sample_bytes=9 * MIB), Truth()
    model = fit_memory_model(
        [make_footprint(wrong, 16), make_footprint(wrong, 64), make_probe(truth, 2, 32), make_probe(truth, 2, 64)]
    )
    assert model.compute_peak(512) == pytest.approx(truth.peak(512), rel=1e-6)
    assert model.warning is not None and model.warning.code == "memory-grows-differently"
    assert model.warning.values["factor"] == pytest.approx(0.2, abs=0.05)
    assert not fit_memory_model(
        [make_footprint(truth, 16), make_footprint(truth, 64), make_probe(truth, 2, 32), make_probe(truth, 2, 64)]
    ).warning


def test_the_allocator_holds_more_than_is_in_use() -> None:
    truth = Truth(reserved_over_peak=1.25)
    model = fit_memory_model([make_probe(truth, 2, 32), make_probe(truth, 2, 128)])
    assert model.compute_reserved_memory(64) == pytest.approx(1.25 * truth.peak(64), rel=1e-6)
    tight = model.compute_largest_local_batch(1600 * MIB, margin=0.0)
    loose = fit_memory_model([make_probe(Truth(), 2, 32), make_probe(Truth(), 2, 128)]).compute_largest_local_batch(
        1600 * MIB, margin=0.0
    )
    assert (tight, loose) == (440, 600)


def test_nothing_fits_or_nothing_bounds() -> None:
    model = fit_memory_model([make_probe(Truth(), 2, 32), make_probe(Truth(), 2, 128)])
    assert model.compute_largest_local_batch(100 * MIB, margin=0.1) == 0
    assert model.compute_largest_local_batch(None, margin=0.1) is None


def test_memory_that_does_not_grow_sets_no_bound() -> None:
    truth = Truth(sample_bytes=0)
    assert (
        fit_memory_model([make_probe(truth, 2, 32), make_probe(truth, 2, 128)]).compute_largest_local_batch(
            10**12, margin=0.1
        )
        is None
    )


def test_batches_larger_than_those_whose_memory_falls_are_predicted_to_need_more() -> None:
    """A user's script, of which only peaks are known: a flat curve would let any batch fit."""
    peaks = {32: 680, 64: 677}
    probes = [
        make_probe(Truth(), 1, batch, memory=PeakMemory(states=None, peak=peak * MIB, reserved=peak * MIB))
        for batch, peak in peaks.items()
    ]
    model = fit_memory_model(probes)
    assert model.warning is not None and model.warning.code == "memory-growth-unknown"
    assert model.compute_peak(64) == 680 * MIB and model.compute_peak(640) == pytest.approx(6800 * MIB)
    assert model.compute_largest_local_batch(6800 * MIB, margin=0.0) == 640


def test_measured_memory_that_falls_against_the_estimate_grows_as_estimated_beyond() -> None:
    probes = [seen_at(128, level=300 * MIB), seen_at(256, scale=0.5)]
    model = fit_memory_model([*BENT, *probes])
    assert model.warning is not None and model.warning.values == {"largest": 256, "estimated": True}
    assert model.compute_peak(1000) >= bent(1000).memory.peak


def test_activations_that_fall_with_the_batch_are_taken_at_their_largest() -> None:
    low, high = make_probe(Truth(), 2, 32), make_probe(Truth(), 2, 128)
    swapped = [low.model_copy(update={"memory": high.memory}), high.model_copy(update={"memory": low.memory})]
    model = fit_memory_model(swapped)
    assert model.activations(32) == model.activations(128) == high.memory.activations


def test_the_error_is_that_of_the_peak() -> None:
    truth = Truth()
    probes = [make_probe(truth, 2, batch) for batch in (32, 64, 128, 256)]
    assert fit_memory_model(probes).error == pytest.approx(0, abs=1e-6)
    assert fit_memory_model(probes[:2]).error is None
    bent = probes[2].memory.model_copy(update={"peak": round(probes[2].memory.peak * 1.2)})
    off = fit_memory_model([*probes[:2], probes[2].model_copy(update={"memory": bent})]).error
    assert off is not None and off < 0.2


# --- an estimate with a bend, corrected by probes


def bent(local_batch: int) -> Footprint:
    """Return an estimate whose activations are 500 MiB up to a batch of 100, then 5 MiB a sample."""
    state, activations = 100 * MIB, max(500, 5 * local_batch) * MIB
    memory = Components(
        parameters=state, gradients=state, optimizer=state, factors=0, batch=0, activations=activations,
        peak=3 * state + activations, reserved=3 * state + activations,
    )  # fmt: skip
    return Footprint(local_batch=local_batch, memory=memory)


def with_memory(rows: Iterable[Footprint], change: Callable[[Components], dict[str, int]]) -> list[Footprint]:
    return [row.model_copy(update={"memory": row.memory.model_copy(update=change(row.memory))}) for row in rows]


def seen_at(local_batch: int, *, level: int = 0, scale: float = 1.0, **memory: int) -> Measured:
    """Return a probe whose activations are those of the bent estimate, stretched and lifted."""
    base = bent(local_batch).memory
    activations = round(level + scale * base.activations)
    peak = 300 * MIB + activations
    update = {"activations": activations, "peak": peak, "reserved": peak, **memory}
    return make_probe(Truth(), 1, local_batch, memory=base.model_copy(update=update))


BENT = [bent(2**power) for power in range(12)] + [bent(100)]


def test_probes_below_the_bend_do_not_hide_what_comes_after() -> None:
    model = fit_memory_model([*BENT, seen_at(16, level=40 * MIB), seen_at(32, level=40 * MIB)])
    assert model.compute_peak(64) == pytest.approx(840 * MIB, rel=1e-6)
    assert model.compute_peak(400) == pytest.approx((340 + 2000) * MIB, rel=1e-6)
    assert model.compute_largest_local_batch(2340 * MIB, margin=0.0) == 400


@given(st.integers(0, 300 * MIB), st.floats(0.3, 1.5))
def test_two_telling_probes_find_level_and_scale(level: int, scale: float) -> None:
    model = fit_memory_model([*BENT, *(seen_at(batch, level=level, scale=scale) for batch in (32, 200))])
    assert model.compute_peak(1000) == pytest.approx(seen_at(1000, level=level, scale=scale).memory.peak, rel=1e-6)


def test_the_model_is_never_below_a_measurement() -> None:
    probes = [seen_at(batch) for batch in (128, 256, 512, 1024)]
    odd = seen_at(512, scale=1.3)
    model = fit_memory_model([*BENT, *probes, odd])
    assert model.compute_peak(512) >= odd.memory.peak
    assert all(model.compute_peak(batch) <= model.compute_peak(batch + 1) for batch in range(400, 700))
    assert model.compute_peak(2048) < 1.15 * bent(2048).memory.peak, "one outlier does not lift what is far from it"


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(0.5, 2)), min_size=1, max_size=6), st.booleans())
def test_measurements_bound_the_model_and_it_never_falls(seen: list[tuple[int, float]], estimated: bool) -> None:
    probes = [seen_at(batch, scale=scale) for batch, scale in seen]
    model = fit_memory_model([*probes, *(BENT if estimated else [])])
    for probe in probes:
        assert model.compute_peak(probe.local_batch) >= probe.memory.peak - 2
    sizes = [model.compute_peak(batch) for batch in range(1, 3000, 41)]
    assert sizes == sorted(sizes)


@given(st.integers(1100 * MIB, 40_000 * MIB), st.integers(0, 800 * MIB), st.floats(1, 1.2))
def test_the_largest_batch_leaves_room_for_libraries_and_allocator(capacity: int, libraries: int, room: float) -> None:
    rows = with_memory(BENT, lambda _: {"libraries": libraries})
    model = fit_memory_model(row.model_copy(update={"room": round(room * row.memory.peak)}) for row in rows)
    largest = model.compute_largest_local_batch(capacity, margin=0.1)
    assert largest is not None
    assert model.compute_needed_memory(largest + 1) > capacity * 0.9 - 2
    assert largest == 0 or model.compute_needed_memory(largest) <= capacity * 0.9 + 2
    assert model.compute_needed_memory(512) == pytest.approx(room * bent(512).memory.peak + libraries, rel=1e-6)


def test_measured_libraries_win() -> None:
    estimate = with_memory(BENT, lambda _: {"libraries": 700 * MIB})
    probe = seen_at(32, libraries=450 * MIB)
    assert fit_memory_model(estimate).libraries == 700 * MIB
    assert fit_memory_model([*estimate, probe]).libraries == 450 * MIB


def test_what_small_probes_hold_in_reserve_does_not_bound_large_batches() -> None:
    kept = with_memory(BENT, lambda memory: {"reserved": round(1.1 * memory.peak)})
    rows = [row.model_copy(update={"room": round(1.02 * row.memory.peak)}) for row in kept]
    loose = seen_at(32).memory.peak * 3 // 2
    model = fit_memory_model(
        [*rows, seen_at(32, reserved=loose), seen_at(200, reserved=seen_at(200).memory.peak * 3 // 2)]
    )
    assert model.compute_reserved_memory(1000) == pytest.approx(1.5 * model.compute_peak(1000), rel=1e-3), (
        "what is paid for"
    )
    assert model.compute_needed_memory(1000) == pytest.approx(1.02 * model.compute_peak(1000), rel=1e-3), (
        "what must be there"
    )


def test_probes_below_the_reference_batch_do_not_hide_the_factors() -> None:
    rows = with_memory(BENT, lambda memory: {"factors": 100 * MIB, "peak": memory.peak + 100 * MIB})
    assert fit_memory_model([*rows, seen_at(16), seen_at(32)]).states.factors == 100 * MIB
    assert fit_memory_model([*rows, seen_at(16, factors=90 * MIB)]).states.factors == 90 * MIB


def test_flat_probes_below_the_estimate_do_not_shrink_what_comes_after() -> None:
    model = fit_memory_model([*BENT, seen_at(8, scale=0.7), seen_at(16, scale=0.7)])
    assert model.compute_peak(1000) == pytest.approx(bent(1000).memory.peak, rel=1e-6)


def test_no_point_is_refused() -> None:
    with pytest.raises(BadMeasurements):
        fit_memory_model([])


# --- peaks alone, as of a script of the user's own


def peak(local_batch: int, bytes_: int, *, counted: int | None = 0, reserved: int | None = None) -> Measured:
    """A probe that tells its peak; `counted` bytes are model states."""
    states = None if counted is None else ModelStates(parameters=counted, gradients=0, optimizer=0, factors=0)
    memory = PeakMemory(states=states, peak=bytes_, reserved=reserved or bytes_)
    return as_script_probe(make_probe(Truth(), 2, local_batch), memory=memory)


@given(TRUTHS, st.integers(1, 4096), st.booleans())
def test_two_peaks_are_a_line(truth: Truth, local_batch: int, counted: bool) -> None:
    probes = [as_script_probe(make_probe(truth, nodes, batch)) for nodes, batch in ((2, 8), (4, 64))]
    if not counted:
        probes = [p.model_copy(update={"memory": p.memory.model_copy(update={"states": None})}) for p in probes]
    model = fit_memory_model(probes)
    assert model.compute_peak(local_batch) == pytest.approx(truth.peak(local_batch), rel=0.01, abs=MIB)
    largest = model.compute_largest_local_batch(truth.peak(1000), margin=0.0)
    assert largest == pytest.approx(1000, abs=1 + MIB / truth.sample_bytes)


def test_peaks_bound_the_micro_batch() -> None:
    split = Truth(accumulate=4)
    model = fit_memory_model(
        [as_script_probe(make_probe(split, 2, 32)), as_script_probe(make_probe(split, 2, 128))], accumulate=4
    )
    assert model.compute_peak(512) == pytest.approx(Truth().peak(128), rel=1e-6)
    assert model.compute_largest_local_batch(Truth().peak(100), margin=0.0) == 400


def test_one_peak_grows_by_what_is_beside_the_counted_states() -> None:
    model = fit_memory_model([as_script_probe(make_probe(Truth(), 2, 32))])
    assert model.compute_peak(128) == pytest.approx(Truth().peak(128), rel=1e-6)
    assert fit_memory_model([peak(32, 600 * MIB, counted=None)]).compute_peak(64) == 1200 * MIB, (
        "nothing tells what stays"
    )


def test_more_may_be_counted_than_is_there_at_the_peak() -> None:
    """Gradients are made after the peak: the line stays what the peaks are, and no batch is promised more room."""
    model = fit_memory_model([peak(32, 364 * MIB, counted=350 * MIB), peak(128, 556 * MIB, counted=350 * MIB)])
    assert model.compute_peak(512) == pytest.approx(1324 * MIB, rel=1e-6)
    assert model.compute_largest_local_batch(1324 * MIB, margin=0.0) == pytest.approx(512, abs=1)
    alone = fit_memory_model([peak(32, 300 * MIB, counted=350 * MIB)])  # more than there was: not believed
    assert alone.compute_largest_local_batch(600 * MIB, margin=0.0) == 64


def test_what_the_allocator_holds_beyond_a_peak_counts() -> None:
    model = fit_memory_model([peak(b, (300 + b) * MIB, reserved=2 * (300 + b) * MIB) for b in (32, 64)])
    assert model.compute_reserved_memory(128) == pytest.approx(2 * 428 * MIB, rel=1e-6)
    assert model.compute_largest_local_batch(2 * 400 * MIB, margin=0.0) == 100


def test_peaks_tell_no_components() -> None:
    with pytest.raises(BadMeasurements, match="not its components"):
        fit_memory_model([as_script_probe(make_probe(Truth(), 2, 32))]).compute_footprint(64)
    assert (
        fit_memory_model([as_script_probe(make_probe(Truth(), 2, 32)), make_footprint(Truth(), 16)])
        .compute_footprint(64)
        .memory.batch
        > 0
    )


# --- a process on the CPU


def on_cpu(local_batch: int, peak: float, *, capacity: int | None = None, libraries: int = 0) -> Measured:
    """Return a probe of a process on the CPU, of 40 MiB of model states."""
    seen = make_probe(Truth(model_bytes=10 * MIB), 1, local_batch)
    size = round(peak * MIB)
    memory = seen.memory.model_copy(
        update={"batch": 0, "activations": size - 40 * MIB, "peak": size, "reserved": size, "libraries": libraries}
    )
    environment = seen.environment.model_copy(update={"device": "cpu"})
    return seen.model_copy(update={"memory": memory, "environment": environment, "capacity": capacity})


def estimates(slope: float) -> list[Footprint]:
    """Return estimates that grow by so many MiB a sample."""
    rows = []
    for local_batch in (1, 16, 128):
        row = make_footprint(Truth(model_bytes=10 * MIB), local_batch)
        size = 40 * MIB + round(slope * local_batch * MIB)
        memory = row.memory.model_copy(
            update={"batch": 0, "activations": size - 40 * MIB, "peak": size, "reserved": size, "libraries": 0}
        )
        rows.append(row.model_copy(update={"memory": memory, "room": round(1.5 * size)}))
    return rows


def test_a_process_without_a_limit_has_all_of_it_for_its_tensors() -> None:
    probes = [on_cpu(size, 57.3 + 19.5 * size, libraries=530 * MIB) for size in (4, 8, 32, 64)]
    model = fit_memory_model([*probes, *estimates(15)])
    assert model.libraries == 0 and model.compute_needed_memory(64) == model.compute_peak(64)
    largest = model.compute_largest_local_batch(1300 * MIB, margin=0.1)
    assert largest == pytest.approx((1170 - 57.3) / 19.5, abs=3)
    limited = [on_cpu(size, 57.3 + 19.5 * size, capacity=1300 * MIB, libraries=530 * MIB) for size in (4, 8, 32, 64)]
    assert fit_memory_model([*limited, *estimates(15)]).libraries == 530 * MIB, "a limit counts it"


def test_libraries_that_grow_with_the_batch_on_the_cpu_leave_smaller_batches_their_memory() -> None:
    probes = [
        on_cpu(size, 40 + size / 8, capacity=300 * MIB, libraries=(60 + size // 16) * MIB) for size in (128, 640, 1280)
    ]
    model = fit_memory_model([*probes, *estimates(1 / 8)])
    assert model.libraries == 68 * MIB
    for probe in probes:
        needed = probe.memory.peak + (probe.memory.libraries or 0)
        assert model.compute_needed_memory(probe.local_batch) == pytest.approx(needed, rel=0.03)


def test_an_estimate_on_the_cpu_keeps_room_for_holes_until_probes_have_measured_them() -> None:
    before, after = (
        fit_memory_model(estimates(15)),
        fit_memory_model([*estimates(15), *(on_cpu(size, 57 + 19.5 * size) for size in (8, 64))]),
    )
    assert before.compute_needed_memory(64) == pytest.approx(1.5 * before.compute_peak(64), rel=1e-6)
    assert after.compute_needed_memory(64) == after.compute_peak(64)


@pytest.mark.parametrize(
    ("peaks", "slope", "actual"),
    [((73, 110), 4.85, 538), ((161, 166), 1.73, 318), ((41, 61), 3.1, 357)],
    ids=["ViT", "ResNet-18", "Swin"],
)
def test_small_probes_with_holes_in_their_peaks_do_not_set_the_growth(
    peaks: tuple[int, int], slope: float, actual: int
) -> None:
    """Peaks at batches 4, 8 and 64, and the estimated growth in MiB a sample, as measured."""
    first, second = peaks
    model = fit_memory_model([*estimates(slope), on_cpu(4, first), on_cpu(8, second)])
    assert model.compute_peak(64) / MIB == pytest.approx(actual, rel=0.11)


def test_probes_far_apart_on_the_cpu_set_the_growth_themselves() -> None:
    model = fit_memory_model([*estimates(15), on_cpu(8, 60 + 40 * 8), on_cpu(64, 60 + 40 * 64)])
    assert model.compute_peak(128) / MIB == pytest.approx(60 + 40 * 128, rel=0.01)


def test_one_probe_on_the_cpu_is_taken_for_holes_first_and_then_for_what_is_fixed() -> None:
    holes, fixed = (fit_memory_model([*estimates(15), on_cpu(4, peak)]) for peak in (40 + 1.2 * 60, 40 + 1.5 * 60 + 30))
    assert holes.compute_peak(64) / MIB == pytest.approx(40 + 1.2 * 15 * 64, rel=1e-6)
    assert fixed.compute_peak(64) / MIB == pytest.approx(40 + 30 + 1.5 * 15 * 64, rel=1e-6)
