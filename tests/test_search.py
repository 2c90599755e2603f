import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_results import spec

from tula_cli.errors import Infeasible
from tula_cli.search import STRATEGIES, feasible, probes


def plan(
    strategy: str, *, max_local_batch: int | None = 256, dataset_size: int = 50_000, **sections: dict[str, object]
) -> dict[int, tuple[int, ...]]:
    search = {"strategy": strategy, **sections.pop("search", {})}
    return probes(spec(search=search, **sections), dataset_size=dataset_size, max_local_batch=max_local_batch)


def test_full_measures_every_candidate() -> None:
    assert plan("full") == {
        2: (16, 32, 64, 128, 256),
        4: (8, 16, 32, 64, 128, 256),
        8: (4, 8, 16, 32, 64, 128, 256),
        16: (2, 4, 8, 16, 32, 64, 128, 256),
    }


def test_partial_measures_the_four_corners() -> None:
    assert plan("partial") == {2: (16, 256), 16: (2, 256)}


def test_sweep_measures_the_fewest_nodes_the_smallest_batches_and_the_far_corner() -> None:
    assert plan("sweep") == {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 256)}


def test_the_largest_batch_is_bounded_by_search_and_dataset() -> None:
    assert plan("partial", max_local_batch=None, dataset_size=1000) == {2: (16, 256), 16: (2, 32)}
    assert plan("partial", max_local_batch=None, search={"max_batch": 128}) == {2: (16, 64), 16: (2, 8)}


def test_gpus_a_node_and_accumulation_divide_the_batch() -> None:
    found = plan("full", search={"nodes": [2], "max_batch": 128}, cluster={"gpus_per_node": 4}, train={"accumulate": 8})
    assert found == {2: (8, 16)}


def test_a_number_of_nodes_without_a_batch_is_left_out() -> None:
    assert set(plan("full", search={"nodes": [2, 3, 4]})) == {2, 4}


@given(
    st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=1, max_size=5, unique=True),
    st.integers(1, 4096),
    st.integers(16, 100_000),
    st.sampled_from(sorted(STRATEGIES)),
)
def test_what_is_measured_is_feasible_ascending_and_never_more_than_full(
    nodes: list[int], max_local_batch: int, dataset_size: int, strategy: str
) -> None:
    job = spec(search={"nodes": nodes, "min_batch": 8, "strategy": strategy})
    try:
        candidates = feasible(job, dataset_size=dataset_size, max_local_batch=max_local_batch)
    except Infeasible:
        with pytest.raises(Infeasible):
            probes(job, dataset_size=dataset_size, max_local_batch=max_local_batch)
        return
    found = probes(job, dataset_size=dataset_size, max_local_batch=max_local_batch)
    everything = {(config.nodes, config.local_batch(1)) for config in candidates}
    assert {(count, local) for count, locals_ in found.items() for local in locals_} <= everything
    assert list(found) == sorted(found)
    assert all(list(locals_) == sorted(set(locals_)) and locals_ for locals_ in found.values())
    assert min(found) == min(config.nodes for config in candidates)


@pytest.mark.parametrize(
    ("sections", "max_local_batch", "dataset_size", "message"),
    [
        ({}, None, 20, "larger than the dataset"),
        ({"search": {"nodes": [3]}}, None, 50_000, "divides among 3 nodes"),
        ({"search": {"nodes": [64], "max_batch": 32}}, None, 50_000, "up to 32 divides among 64 nodes"),
        ({}, 1, 50_000, "at most 1 samples fit one GPU, the smallest local batch is 2"),
        ({}, 0, 50_000, "at most 0 samples"),
    ],
)
def test_where_nothing_is_feasible_the_bound_is_named(
    sections: dict[str, dict[str, object]], max_local_batch: int | None, dataset_size: int, message: str
) -> None:
    with pytest.raises(Infeasible, match=message) as caught:
        plan("sweep", max_local_batch=max_local_batch, dataset_size=dataset_size, **sections)
    assert caught.value.hint and caught.value.exit_code == 3
