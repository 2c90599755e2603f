import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from make_results import (
    MIB,
    Truth,
    as_script_probe,
    make_footprint,
    make_inspection,
    make_out_of_memory,
    make_probe,
    make_probes,
    make_spec,
)
from read_diagnostics import codes, values

from tula_cli.errors import BadMeasurements, Infeasible
from tula_cli.models import messages
from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.models.observations import TooFewMeasurements
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Failed, GpuState, Host, Measured, OutOfMemory
from tula_cli.services.search import choose_probes

SWEEP = {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 256)}


def inspection(truth: Truth, *, capacity: int | None) -> Inspection:
    footprints = (make_footprint(truth, 16), make_footprint(truth, 64))
    return make_inspection(
        dataset_size=truth.dataset_size, eval_size=truth.eval_size, footprints=footprints, capacity=capacity
    )


@given(
    st.builds(Truth, fixed=st.floats(0.001, 0.5), slope=st.floats(1e-5, 0.01), sync=st.floats(0.001, 0.5)),
    st.sampled_from(["partial", "sweep", "full"]),
)
@example(Truth(fixed=0.001, slope=1e-05, sync=0.1875), "partial")  # an undamped fit goes astray here
@settings(max_examples=20)
def test_every_strategy_finds_a_truth_without_noise_or_overlap(truth: Truth, strategy: str) -> None:
    """Eq. 2 to the letter is not what the model expects of a cluster: the more probes, the more it believes them."""
    far = {"partial": 0.6, "sweep": 0.3, "full": 0.1}[strategy]
    job = make_spec(search={"strategy": strategy})
    plan = choose_probes(job, dataset_size=truth.dataset_size, max_local_batch=1024)
    rows = Estimator.fit(job, make_probes(truth, plan)).predict_candidates().make_predictions()
    assert {row.nodes for row in rows} == {2, 4, 8, 16}
    for row in rows:
        expected = truth.step_time(row.nodes, row.local_batch)
        if row.local_batch <= 1024:  # larger ones are extrapolated
            assert row.step_time == pytest.approx(expected, rel=1e-6 if row.measured else far)
        assert row.hours * 3600 > 10 * (truth.dataset_size // row.batch) * row.step_time


def test_the_fastest_recommended_is_within_five_per_cent_of_the_optimum_under_noise() -> None:
    regrets = []
    for seed in range(20):
        truth = Truth(noise=0.03, jitter=0.02)
        results = make_probes(truth, SWEEP, seed=seed)
        best = Estimator.fit(make_spec(), results).predict_candidates().make_predictions()[0]
        exact = Truth()
        optimum = min(
            exact.step_time(row.nodes, row.local_batch) * (truth.dataset_size // row.batch)
            for row in Estimator.fit(make_spec(), results).predict_candidates().make_predictions()
        )
        chosen = exact.step_time(best.nodes, best.local_batch) * (truth.dataset_size // best.batch)
        regrets.append(chosen / optimum - 1)
    assert np.max(regrets) < 0.05


def test_a_measured_step_time_is_used_as_it_is() -> None:
    results = make_probes(Truth(), SWEEP)
    slow = [
        result.model_copy(update={"step_times": (0.5,) * 20}) if result.local_batch == 64 else result
        for result in results
    ]
    forecast = Estimator.fit(make_spec(), slow)
    row = forecast.predict(Config(2, 128))
    assert row.measured and row.step_time == 0.5
    other = forecast.predict(Config(4, 256))
    assert not other.measured and other.step_time < 0.5


def test_a_prediction_carries_memory_cost_and_interval() -> None:
    truth = Truth(noise=0.02, reserved_over_peak=1.1)
    forecast = Estimator.fit(make_spec(), make_probes(truth, SWEEP))
    row = forecast.predict(Config(8, 1024))
    assert row.local_batch == 128
    assert row.peak_memory == pytest.approx(1.1 * truth.peak(128), rel=1e-5)
    assert row.headroom == pytest.approx(1 - 1.1 * truth.peak(128) / (16 * 1024 * MIB), rel=1e-5)
    assert row.hours_low is not None and row.hours_high is not None
    assert row.hours_low < row.hours < row.hours_high
    assert row.cost == pytest.approx(row.hours * 8 * 2.0)


def test_the_price_of_memory_goes_by_what_is_reserved() -> None:
    truth = Truth(reserved_over_peak=1.5)
    forecast = Estimator.fit(make_spec(pricing={"kind": "gb_hour", "price": 0.15}), make_probes(truth, SWEEP))
    row = forecast.predict(Config(8, 1024))
    assert row.cost == pytest.approx(row.hours * 8 * 1.5 * truth.peak(128) / 1e9 * 0.15, rel=1e-5)


@pytest.mark.parametrize("assumed", [False, True])
def test_an_out_of_memory_masks_its_local_batch_and_larger_ones_everywhere(assumed: bool) -> None:
    results = [
        *make_probes(Truth(capacity=None), {2: (16, 32, 64), 16: (2, 8)}),
        make_out_of_memory(2, 128, assumed=assumed),
    ]
    forecast = Estimator.fit(make_spec(), results)
    assert max(row.local_batch for row in forecast.predict_candidates().make_predictions()) == 64
    assert "128 ran out of memory" in forecast.describe_why_infeasible(Config(8, 8 * 256))
    with pytest.raises(Infeasible, match="128 ran out of memory"):
        forecast.predict(Config(4, 512))


def test_a_probe_that_ran_is_believed_over_an_out_of_memory_elsewhere() -> None:
    results = [*make_probes(Truth(), {2: (16, 32), 16: (2, 64)}), make_out_of_memory(2, 64)]
    forecast = Estimator.fit(make_spec(), results)
    assert forecast.predict(Config(16, 1024)).measured
    assert forecast.describe_why_infeasible(Config(8, 512))


def test_memory_and_margin_mask_what_was_not_measured() -> None:
    # 300 samples fill 1000 MiB, and 250 leave a tenth free.
    for mib, largest in ((1100, 256), (1000, 128)):
        forecast = Estimator.fit(make_spec(), make_probes(Truth(capacity=mib * MIB), {2: (16, 32), 16: (2, 8)}))
        assert max(row.local_batch for row in forecast.predict_candidates().make_predictions()) == largest, mib
    assert "10 %" in forecast.describe_why_infeasible(Config(2, 512))


def test_an_inspection_tells_capacity_and_growth_where_the_probes_do_not() -> None:
    truth = Truth(capacity=None)
    results = [make_probe(truth, 2, 16), make_probe(truth, 4, 16)]
    open_ended = Estimator.fit(make_spec(), results)
    assert open_ended.capacity is None and not open_ended.describe_why_infeasible(Config(2, 4096))
    bounded = Estimator.fit(make_spec(), results, inspection=inspection(truth, capacity=1000 * MIB))
    assert bounded.describe_why_infeasible(Config(2, 4096))
    assert Estimator.fit(make_spec(cluster={"memory_per_gpu": "1000MiB"}), results).capacity == 1000 * MIB


def test_no_batch_is_larger_than_the_dataset_or_broken_among_the_gpus() -> None:
    forecast = Estimator.fit(make_spec(), make_probes(Truth(dataset_size=1000, gpus_per_node=1), SWEEP))
    assert max(row.batch for row in forecast.predict_candidates().make_predictions()) == 512
    assert "larger than the dataset" in forecast.describe_why_infeasible(Config(2, 1024))
    assert "is not divisible" in forecast.describe_why_infeasible(Config(3, 32))


def test_out_of_memory_everywhere_is_infeasible() -> None:
    results: list[OutOfMemory] = [make_out_of_memory(2, 16), make_out_of_memory(4, 8)]
    with pytest.raises(Infeasible, match="down to local batch 8"):
        Estimator.fit(make_spec(), results)


def test_nothing_measured_is_too_few() -> None:
    with pytest.raises(TooFewMeasurements, match="no probe"):
        Estimator.fit(make_spec(), [])
    failed = Failed(id="a", nodes=2, gpus_per_node=1, local_batch=16, outcome="user", message="KeyError: 'x'")
    with pytest.raises(TooFewMeasurements, match="KeyError"):
        Estimator.fit(make_spec(), [failed, make_out_of_memory(2, 32)])
    assert TooFewMeasurements("").exit_code == BadMeasurements("").exit_code == 4


def test_different_hardware_is_not_mixed() -> None:
    results = [make_probe(Truth(), 2, 16), make_probe(Truth(hardware="Other GPU"), 4, 16)]
    with pytest.raises(BadMeasurements, match="Test GPU: probe-n002-l000016; Other GPU: probe-n004-l000016"):
        Estimator.fit(make_spec(), results)


def probe_on(*nodes: Host) -> Measured:
    probe = make_probe(Truth(), len(nodes), 16)
    return probe.model_copy(update={"environment": probe.environment.model_copy(update={"nodes": nodes})})


def test_different_hardware_within_a_probe_is_refused() -> None:
    alike = Host(name="n1", ranks=4, hardware=("A100",), driver="550")
    other = Host(name="n2", ranks=4, hardware=("V100",), driver="550")
    both = Host(name="n3", ranks=4, hardware=("A100", "V100"), driver="550")
    Estimator.fit(make_spec(), [probe_on(alike, alike.model_copy(update={"name": "n4"}))])
    for nodes, words in (((alike, other), "n1: A100; n2: V100"), ((both,), "n3: A100 and V100")):
        with pytest.raises(BadMeasurements, match=f"different hardware \\({words}\\)"):
            Estimator.fit(make_spec(), [probe_on(*nodes)])


def test_nodes_with_different_drivers_are_reported() -> None:
    nodes = [Host(name=f"n{driver}", ranks=1, hardware=("A100",), driver=driver) for driver in ("550", "535")]
    assert "software-differs" not in codes(Estimator.fit(make_spec(), [probe_on(nodes[0])]).warnings)
    assert "software-differs" in codes(Estimator.fit(make_spec(), [probe_on(*nodes)]).warnings)


def test_one_number_of_nodes_leaves_the_others_out() -> None:
    forecast = Estimator.fit(make_spec(), make_probes(Truth(), {4: (8, 64, 256)}))
    assert {row.nodes for row in forecast.predict_candidates().make_predictions()} == {4}
    assert "one number of nodes" in forecast.describe_why_unknown(Config(8, 512))


def test_one_probe_predicts_only_itself() -> None:
    forecast = Estimator.fit(make_spec(), [make_probe(Truth(), 4, 64)])
    assert [(row.nodes, row.local_batch) for row in forecast.predict_candidates().make_predictions()] == [(4, 64)]


def test_doubtful_measurements_are_named() -> None:
    results = make_probes(Truth(), SWEEP)
    results[0] = results[0].model_copy(update={"oversubscribed": True, "data_wait": 0.03, "allocator_retries": 3})
    other = results[1].environment.model_copy(update={"torch": "2.7"})
    results[1] = results[1].model_copy(update={"environment": other})
    warnings = Estimator.fit(make_spec(), results).warnings
    assert values(warnings, "oversubscribed") == {"nodes": [2], "shared": "GPUs"}
    assert values(warnings, "waiting-for-data")["where"] == "2 nodes at local batch 16"
    assert values(warnings, "allocator-thrashed")["retries"] == 3
    versions = values(warnings, "software-differs")["versions"]
    assert "torch 2.6" in versions[0] and "torch 2.7" in versions[1]
    assert not Estimator.fit(make_spec(), make_probes(Truth(), SWEEP)).warnings


def test_a_loader_slower_than_the_steps_is_named_with_its_figures() -> None:
    results = make_probes(Truth(), SWEEP)
    results[0] = results[0].model_copy(update={"cached_time": 0.02, "loader_time": 0.2})
    results[1] = results[1].model_copy(update={"cached_time": 0.02, "loader_time": 0.025})
    warnings = Estimator.fit(make_spec(), results).warnings
    assert codes(warnings) == ["waiting-for-data"]
    waiting = values(warnings, "waiting-for-data")
    assert waiting["where"] == "2 nodes at local batch 16" and waiting["slowest"] == "2 nodes, local batch 16"
    assert (waiting["loader_ms"], waiting["step_ms"]) == (200, 20)


def test_clocks_that_were_held_down_are_named() -> None:
    results = make_probes(Truth(), SWEEP)
    free = GpuState(sm_mhz=1980, watts=400, held_down=())
    capped = GpuState(sm_mhz=1305, watts=698, held_down=("heat", "power cap"))
    results[0] = results[0].model_copy(update={"gpus": (free, capped)})
    results[1] = results[1].model_copy(update={"gpus": (free, free)})
    assert Estimator.fit(make_spec(), results).warnings == (
        messages.gpus_throttled(
            reasons=["heat", "power cap"], where="2 nodes at local batch 16", megahertz=1305, watts=698
        ),
    )


@pytest.mark.parametrize(
    ("chosen", "modelled", "told"),
    [("tree", "ring", True), ("ring", "tree", True), ("ring", "ring", False), ("nvls", "ring", False)],
)
def test_a_shape_that_nccl_did_not_choose_is_reported(chosen: str, modelled: str, told: bool) -> None:
    results = make_probes(Truth(), SWEEP)
    most = max(results, key=lambda probe: probe.nodes)
    requested = most.environment.model_copy(update={"allreduce": {8: "pat, ll", 2**25: f"{chosen}, simple"}})
    results[results.index(most)] = most.model_copy(update={"environment": requested})
    warnings = Estimator.fit(make_spec(cluster={"collective": modelled}), results).warnings
    assert ("other-collective" in codes(warnings)) == told


def test_forecasts_of_post_local_sgd_are_named_as_upper_bounds() -> None:
    polo = make_spec(train={"epochs": 10, "method": "polo"})
    bounds = messages.times_are_upper_bounds(method="polo")
    assert bounds in Estimator.fit(polo, make_probes(Truth(), SWEEP)).warnings
    alone = [probe.model_copy(update={"nodes": 1, "gpus_per_node": 1}) for probe in make_probes(Truth(), SWEEP)[:1]]
    assert bounds not in Estimator.fit(polo, alone).warnings


def test_the_ladder_goes_down_to_the_smallest_batch() -> None:
    forecast = Estimator.fit(make_spec(search={"min_batch": 64}), make_probes(Truth(), SWEEP))
    ladder = forecast.list_oom_fallbacks(4, 512)
    assert [rung.batch for rung in ladder] == [512, 256, 128, 64]
    for rung in ladder:
        assert rung.prediction == forecast.predict(Config(4, rung.batch))


def test_the_ladder_starts_at_any_batch_and_skips_what_does_not_fit() -> None:
    results = [*make_probes(Truth(), {2: (16, 32), 16: (2, 8)}), make_out_of_memory(2, 64)]
    forecast = Estimator.fit(make_spec(), results)
    ladder = forecast.list_oom_fallbacks(2, 1000)
    assert [rung.batch for rung in ladder] == [1000, 64, 32]
    assert ladder[0].prediction is None and ladder[1].prediction is not None


def test_the_ladder_has_rungs_where_the_step_time_is_unknown() -> None:
    forecast = Estimator.fit(make_spec(), [make_probe(Truth(), 4, 64)])
    assert [(rung.batch, rung.prediction is None) for rung in forecast.list_oom_fallbacks(4, 256)] == [
        (256, False), (128, True), (64, True), (32, True),
    ]  # fmt: skip


def test_overheads_come_from_the_nearest_local_batch_and_start_up_from_the_nearest_nodes() -> None:
    slow_start = Truth().overheads.model_copy(update={"startup": 3600.0})
    large_eval = Truth().overheads.model_copy(update={"startup": 3600.0, "eval_batch": 36.0})
    results = [
        *make_probes(Truth(), {2: (16,)}),
        make_probe(Truth(), 16, 16, overheads=slow_start),
        make_probe(Truth(), 16, 256, overheads=large_eval),
    ]
    forecast = Estimator.fit(make_spec(), results)

    def hours(nodes: int, local_batch: int) -> float:
        return forecast.predict(Config(nodes, nodes * local_batch)).hours

    assert hours(2, 32) < 1 < hours(16, 32) < 2
    evaluations = 10 * 36 / 3600  # hours, one batch on each rank
    assert 50 * evaluations < hours(2, 256) < 51 * evaluations  # ceil(10000 / (2 x 100)) batches
    assert 1 + 7 * evaluations < hours(16, 128) < 2


def test_ranks_that_may_be_taken_away_save_more_often() -> None:
    """Also on demand: the ranks do not know which nodes they are on."""
    truth = Truth(dataset_size=2_000_000, overheads=Truth().overheads.model_copy(update={"checkpoint": 20.0}))

    def hours(per_day: float | None) -> float:
        spot = None if per_day is None else {"discount": 0.5, "interruptions_per_day": per_day}
        job = make_spec(pricing={"price": 1.0, "spot": spot})
        return Estimator.fit(job, make_probes(truth, SWEEP)).predict(Config(2, 64)).hours

    assert hours(None) == hours(0.0) < hours(50.0)


# --- probes of a script, which do not tell everything

LBT = make_spec(train={"method": "lbt"})  # nothing to refresh


def test_a_script_is_forecast_by_its_steps_start_up_and_peaks() -> None:
    truth = Truth()
    grid = {1: (16, 32, 64, 128, 256), 2: (16, 256), 4: (8,), 8: (4, 256)}
    forecast = Estimator.fit(
        make_spec(search={"nodes": [1, 2, 4, 8]}, train={"method": "lbt"}),
        [as_script_probe(p) for p in make_probes(truth, grid)],
    )
    for nodes, batch in ((2, 128), (4, 512), (8, 1024)):
        row = forecast.predict(Config(nodes, batch))
        assert not row.measured
        assert row.step_time == pytest.approx(truth.step_time(nodes, batch // nodes), rel=0.15)
        steps = 10 * (truth.dataset_size // batch)
        assert 3600 * row.hours == pytest.approx(truth.overheads.startup + steps * row.step_time)
        assert row.peak_memory == pytest.approx(truth.peak(batch // nodes), rel=1e-6)
        assert row.refresh_share == 0.0
    assert forecast.eval_size is None
    assert forecast.compute_largest_local_batch(1) == (int(16 * 1024 * 0.9) - 400) // 2


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, ["evaluation", "checkpoints"]),
        ({"overheads": Truth().overheads}, ["evaluation"]),
        (
            {"overheads": Truth().overheads.model_copy(update={"checkpoint": None}), "eval_size": 10},
            ["checkpoints"],
        ),
        ({"overheads": Truth().overheads, "eval_size": 10}, None),
    ],
)
def test_what_is_left_out_of_time_and_cost_is_said(changes: dict[str, object], missing: list[str] | None) -> None:
    probes = [as_script_probe(probe, **changes) for probe in make_probes(Truth(), SWEEP)]
    warnings = Estimator.fit(LBT, probes).warnings
    assert [w.values["missing"] for w in warnings if w.code == "times-exclude"] == ([missing] if missing else [])
    one_tells = [*probes[1:], make_probe(Truth(), 2, 16)]
    assert "times-exclude" not in codes(Estimator.fit(LBT, one_tells).warnings)


def test_on_spot_nodes_it_is_said_what_an_interruption_is_taken_to_lose() -> None:
    spot = {"price": 2.0, "spot": {"discount": 0.6, "interruptions_per_day": 2.0}}
    probes = [as_script_probe(probe) for probe in make_probes(Truth(), SWEEP)]
    on_spot = Estimator.fit(make_spec(pricing=spot, train={"method": "lbt"}), probes)
    lost = [
        values(forecast.warnings, "times-exclude")["epochs_lost_on_spot"]
        for forecast in (on_spot, Estimator.fit(LBT, probes))
    ]
    assert lost == [True, False]


def test_what_peaks_do_not_tell_of_a_gpu_is_said() -> None:
    probes = [as_script_probe(probe) for probe in make_probes(Truth(), SWEEP)]
    assert messages.library_memory_not_measured(margin=0.1) in Estimator.fit(LBT, probes).warnings
    unbounded = Estimator.fit(LBT, [p.model_copy(update={"capacity": None}) for p in probes])
    assert messages.gpu_memory_unknown(largest_local_batch=256) in unbounded.warnings
    full = Estimator.fit(LBT, make_probes(Truth(), SWEEP))
    assert not {"library-memory-not-measured", "gpu-memory-unknown"} & set(codes(full.warnings))


@pytest.mark.parametrize(("parts", "held"), [(2, 128), (4, 64), (16, 16)])
def test_a_batch_in_more_micro_batches_takes_the_local_work_of_each_and_one_synchronisation(
    parts: int, held: int
) -> None:
    truth = Truth()
    forecast = Estimator.fit(make_spec(), make_probes(truth, SWEEP))
    row = forecast.predict_split(Config(2, 512), parts)
    whole = forecast.predict(Config(2, 512))
    assert row is not None and (row.batch, row.local_batch, row.measured) == (512, 256, False)
    work = truth.fixed + truth.slope * held
    assert row.step_time == pytest.approx(truth.step_time(2, held) + (parts - 1) * work)
    assert row.step_low < row.step_time < row.step_high
    assert row.hours > whole.hours and row.cost > whole.cost
    assert row.peak_memory == pytest.approx(truth.peak(held), rel=1e-6) and row.headroom > whole.headroom


def test_what_was_not_measured_of_it_comes_from_the_fit() -> None:
    truth = Truth()
    forecast = Estimator.fit(make_spec(), make_probes(truth, SWEEP))
    row = forecast.predict_split(Config(8, 1024), 2)
    work = truth.fixed + truth.slope * 64
    assert row is not None and row.step_time == pytest.approx(truth.step_time(8, 64) + work, rel=0.3)


def test_unequal_parts_and_an_unknown_step_are_not_forecast() -> None:
    forecast = Estimator.fit(make_spec(), make_probes(Truth(), SWEEP))
    assert forecast.predict_split(Config(2, 6), 2) is None
    alone = Estimator.fit(make_spec(), [make_probe(Truth(), 4, 64)])
    assert alone.predict_split(Config(4, 256), 2) is None


def test_the_first_rung_knows_its_cuts() -> None:
    results = make_probes(Truth(), SWEEP)
    first, *rest = Estimator.fit(make_spec(), results).list_oom_fallbacks(4, 64)
    assert list(first.cut) == [2, 4, 8, 16] and not any(rung.cut for rung in rest)
    (shrunk, *_) = Estimator.fit(make_spec(train={"oom_policy": "shrink"}), results).list_oom_fallbacks(4, 64)
    assert not shrunk.cut and shrunk.prediction == first.prediction
