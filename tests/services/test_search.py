import make_runs as make
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_results import Truth, make_probes, make_spec

from tula_cli.errors import Infeasible
from tula_cli.models.estimator import Estimator
from tula_cli.models.observations import OtherGpuCountMeasurements
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.run.records.tasks import make_probe_id
from tula_cli.services.search import STRATEGIES, choose_next_round, choose_probes, list_feasible_candidates
from tula_cli.spec.job import JobSpec


def plan(
    strategy: str, *, max_local_batch: int | None = 256, dataset_size: int = 50_000, **sections: dict[str, object]
) -> dict[int, tuple[int, ...]]:
    search = {"strategy": strategy, **sections.pop("search", {})}
    return choose_probes(
        make_spec(search=search, **sections), dataset_size=dataset_size, max_local_batch=max_local_batch
    )


def test_full_measures_every_candidate() -> None:
    assert plan("full") == {
        2: (16, 32, 64, 128, 256),
        4: (8, 16, 32, 64, 128, 256),
        8: (4, 8, 16, 32, 64, 128, 256),
        16: (2, 4, 8, 16, 32, 64, 128, 256),
    }


def test_partial_measures_the_four_corners() -> None:
    assert plan("partial") == {2: (16, 256), 16: (2, 256)}


def test_sweep_measures_the_fewest_nodes_the_smallest_batches_and_two_far_ones() -> None:
    assert plan("sweep") == {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 32, 256)}


@pytest.mark.parametrize("strategy", ["auto", "adaptive", "partial", "sweep"])
def test_fewer_gpus_take_two_batches_on_the_fewest_nodes(strategy: str) -> None:
    search = {"strategy": strategy, "gpus_per_node": [1, 2]}
    job = make_spec(search=search, cluster={"gpus_per_node": 2}).split_by_type()["gpus-1"]
    assert choose_probes(job, dataset_size=50_000, max_local_batch=256) == {2: (16, 64)}
    assert choose_probes(job, dataset_size=50_000, max_local_batch=16) == {2: (16,)}


def test_full_measures_fewer_gpus_in_full_too() -> None:
    search = {"strategy": "full", "gpus_per_node": [1, 2]}
    job = make_spec(search=search, cluster={"gpus_per_node": 2}).split_by_type()["gpus-1"]
    assert choose_probes(job, dataset_size=50_000, max_local_batch=256) == plan("full")


def test_the_largest_batch_is_bounded_by_search_and_dataset() -> None:
    assert plan("partial", max_local_batch=None, dataset_size=1000) == {2: (16, 256), 16: (2, 32)}
    assert plan("partial", max_local_batch=None, search={"max_batch": 128}) == {2: (16, 64), 16: (2, 8)}


def test_gpus_a_node_and_accumulation_divide_the_batch() -> None:
    result = plan(
        "full", search={"nodes": [2], "max_batch": 128}, cluster={"gpus_per_node": 4}, train={"accumulate": 8}
    )
    assert result == {2: (8, 16)}


def test_a_number_of_nodes_without_a_batch_is_left_out() -> None:
    assert set(plan("full", search={"nodes": [2, 3, 4]})) == {2, 4}


@given(
    st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=1, max_size=5, unique=True),
    st.integers(1, 4096),
    st.integers(16, 100_000),
    st.sampled_from(["adaptive", *STRATEGIES]),
)
def test_what_is_measured_is_feasible_ascending_and_never_more_than_full(
    nodes: list[int], max_local_batch: int, dataset_size: int, strategy: str
) -> None:
    job = make_spec(search={"nodes": nodes, "min_batch": 8, "strategy": strategy})
    try:
        candidates = list_feasible_candidates(job, dataset_size=dataset_size, max_local_batch=max_local_batch)
    except Infeasible:
        with pytest.raises(Infeasible):
            choose_probes(job, dataset_size=dataset_size, max_local_batch=max_local_batch)
        return
    probes = choose_probes(job, dataset_size=dataset_size, max_local_batch=max_local_batch)
    everything = {(config.nodes, config.compute_local_batch(1)) for config in candidates}
    assert {(count, local) for count, locals_ in probes.items() for local in locals_} <= everything
    assert list(probes) == sorted(probes)
    assert all(list(locals_) == sorted(set(locals_)) and locals_ for locals_ in probes.values())
    assert min(probes) == min(config.nodes for config in candidates)


@pytest.mark.parametrize(
    ("sections", "max_local_batch", "dataset_size", "message"),
    [
        ({}, None, 20, "larger than the dataset"),
        ({"search": {"nodes": [3]}}, None, 50_000, "is divisible by 3 nodes"),
        ({"search": {"nodes": [64], "max_batch": 32}}, None, 50_000, "up to 32 is divisible by 64 nodes"),
        ({}, 1, 50_000, "at most 1 samples fit on one GPU, but the smallest local batch is 2"),
        ({}, 0, 50_000, "at most 0 samples"),
    ],
)
def test_where_nothing_is_feasible_the_bound_is_named(
    sections: dict[str, dict[str, object]], max_local_batch: int | None, dataset_size: int, message: str
) -> None:
    with pytest.raises(Infeasible, match=message) as caught:
        plan("sweep", max_local_batch=max_local_batch, dataset_size=dataset_size, **sections)
    assert caught.value.hint and caught.value.exit_code == 3


# --- rounds


def inspected(truth: Truth, *, capacity: int | None = None) -> Inspection:
    return Inspection(
        dataset_size=truth.dataset_size, eval_size=truth.eval_size, classes=10, sample_shape=(3, 8, 8), parameters=1000,
        footprints=(), estimate_error="", device="cuda", hardware=truth.hardware, capacity=capacity, cpus=8,
    )  # fmt: skip


ADAPTIVE = make_spec(search={"strategy": "adaptive", "max_batch": 4096}, train={"epochs": 5000})


def test_rounds_start_from_four_probes_and_say_so() -> None:
    result = choose_next_round(ADAPTIVE, [], inspection=inspected(Truth()))
    assert result.probes == {2: (16, 256, 2048), 16: (2,)} == probes_of(ADAPTIVE)
    assert result.reasons[0].startswith("initial probes: 2 nodes, local batch 16; ") and result.words == ""


def test_rounds_start_with_the_far_corner_where_compute_is_not_measured_apart() -> None:
    job = make_spec(search={"strategy": "adaptive", "max_batch": 4096}, train={"epochs": 5000, "parallel": "fsdp"})
    assert probes_of(job) == {2: (16, 256, 2048), 16: (2, 256)}
    assert choose_next_round(job, [], inspection=inspected(Truth())).probes == {2: (16, 256, 2048), 16: (2, 256)}


def test_probes_that_time_whole_steps_alone_are_followed_by_the_far_corner() -> None:
    whole = [probe.model_copy(update={"compute_time": None}) for probe in make_probes(Truth(), probes_of(ADAPTIVE))]
    result = choose_next_round(ADAPTIVE, whole, inspection=inspected(Truth()))
    assert result.probes == {16: (256,)} and result.reasons == ("initial probes: 16 nodes, local batch 256",)


@pytest.mark.parametrize(("mebibytes", "is_small"), [(1, True), (100, False)])
def test_small_gradients_are_followed_by_the_far_corner(mebibytes: int, is_small: bool) -> None:
    probes = [
        probe.model_copy(update={"memory": probe.memory.model_copy(update={"gradients": mebibytes << 20})})
        for probe in make_probes(Truth(), probes_of(ADAPTIVE))
    ]
    reasons = choose_next_round(ADAPTIVE, probes, inspection=inspected(Truth())).reasons
    assert (reasons == ("initial probes: 16 nodes, local batch 256",)) == is_small


def probes_of(job: JobSpec) -> dict[int, tuple[int, ...]]:
    return choose_probes(job, dataset_size=Truth().dataset_size, max_local_batch=None)


def test_rounds_end_before_everything_is_measured_and_find_the_best() -> None:
    truth = Truth(noise=0.01, jitter=0.01)
    results: dict[str, Measured] = {}
    rounds = 0
    while (result := choose_next_round(ADAPTIVE, list(results.values()), inspection=inspected(truth))).probes:
        fresh = make_probes(truth, dict(result.probes), seed=rounds)
        assert not {probe.id for probe in fresh} & results.keys()
        assert len(result.reasons) == (len(fresh) if rounds else 1)  # one for all initial probes
        results |= {probe.id: probe for probe in fresh}
        rounds += 1
    assert "Measuring all configurations" in result.words
    everything = list_feasible_candidates(ADAPTIVE, dataset_size=truth.dataset_size, max_local_batch=None)
    assert rounds >= 2 and len(results) < len(everything) / 2
    rows = Estimator.fit(ADAPTIVE, list(results.values())).predict_candidates().make_predictions()
    best = min(truth.step_time(row.nodes, row.local_batch) / row.batch for row in rows)
    assert truth.step_time(rows[0].nodes, rows[0].local_batch) / rows[0].batch < 1.03 * best


def test_what_was_out_of_memory_is_not_proposed_again() -> None:
    truth = Truth()
    oom = OutOfMemory(
        id=make_probe_id(2, 2048), nodes=2, gpus_per_node=1, local_batch=2048, assumed=False, message="no"
    )
    result = choose_next_round(ADAPTIVE, [oom], inspection=inspected(truth))
    assert result.probes == {2: (16, 128, 1024), 16: (2,)}
    seen = [oom, *make_probes(truth, {2: (16, 128, 1024), 16: (2,)})]
    later = choose_next_round(ADAPTIVE, seen, inspection=inspected(truth))
    assert all(size < 2048 for sizes in later.probes.values() for size in sizes)


def test_a_training_shorter_than_a_job_is_worth_no_further_probe() -> None:
    short = make_spec(search={"strategy": "adaptive", "max_batch": 4096}, train={"epochs": 1})
    seen = make_probes(Truth(), {2: (16, 256, 2048), 16: (2,)})
    assert choose_next_round(ADAPTIVE, seen, inspection=inspected(Truth())).probes
    assert not choose_next_round(short, seen, inspection=inspected(Truth())).probes


def test_trainings_and_other_sizes_count_in_the_rounds_and_what_they_measured_is_not_probed() -> None:
    seen = make_probes(Truth(), {2: (16, 256, 2048), 16: (2,)})
    first = choose_next_round(ADAPTIVE, seen, inspection=inspected(Truth()))
    nodes, local = next((nodes, sizes[0]) for nodes, sizes in first.probes.items())
    seconds = Truth().step_time(nodes, local)
    training = TrainedSteps(
        signature="ab", nodes=nodes, gpus_per_node=1, batch=nodes * local, step_time=seconds, step_times=(seconds,) * 5,
        compute=None, sync=None, data_wait=None, steps=100, changed=0.0, noise=0.015, since=0.0, until=1.0,
    )  # fmt: skip
    later = choose_next_round(ADAPTIVE, seen, inspection=inspected(Truth()), trained=[training])
    assert local not in later.probes.get(nodes, ())
    others = OtherGpuCountMeasurements(tuple(make_probes(Truth(gpus_per_node=2), {1: (16, 256), 2: (16,)})))
    answer = choose_next_round(ADAPTIVE, seen, inspection=inspected(Truth()), others=others)
    assert answer.words != first.words


def test_a_number_of_nodes_on_which_the_script_fails_is_not_measured_again() -> None:
    alone = make_probes(Truth(), {2: (16, 256, 2048)})
    failure = Failure(outcome="user", message="2 ranks should have started")
    failed = Failed(**make.probe_identity(16, 2), failure=failure)
    by_script = ADAPTIVE.model_copy(update={"script": make.script_spec(epochs=3).script})
    for job, results, fails in (
        (by_script, alone, False),
        (by_script, [*alone, failed], True),
        (ADAPTIVE, [*alone, failed], False),
    ):
        following = choose_next_round(job, results, inspection=inspected(Truth()))
        assert (16 in following.probes) != fails
    broken = failed.model_copy(update={"failure": failure.model_copy(update={"outcome": "peer"})})
    assert 16 in choose_next_round(by_script, [*alone, broken], inspection=inspected(Truth())).probes
