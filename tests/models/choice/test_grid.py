"""Which configurations there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_cli.models.choice.grid import Config, describe_nearest_multiples, list_batches, list_candidates


def test_batches_double_up_to_the_maximum():
    assert list_batches(32, 300) == [32, 64, 128, 256]
    assert list_batches(32, 256)[-1] == 256
    assert list_batches(32, 31) == []


def test_candidates_are_ordered_and_divide_among_the_gpus():
    candidates = list_candidates([4, 1], gpus_per_node=2, min_batch=4, max_batch=16)
    assert candidates == [Config(1, 4), Config(1, 8), Config(1, 16), Config(4, 8), Config(4, 16)]


def test_memory_bounds_the_local_batch():
    candidates = list_candidates([1, 2], gpus_per_node=1, min_batch=32, max_batch=256, max_local_batch=64)
    assert candidates == [Config(1, 32), Config(1, 64), Config(2, 32), Config(2, 64), Config(2, 128)]


def test_local_batch_divides_by_the_accumulation():
    candidates = list_candidates([2], gpus_per_node=1, min_batch=6, max_batch=48, accumulate=4)
    assert candidates == [Config(2, 24), Config(2, 48)]


def test_node_count_given_twice_counts_once():
    assert len(list_candidates([2, 2], gpus_per_node=1, min_batch=32, max_batch=32)) == 1


def test_the_nearest_multiples_of_a_batch_are_named_once():
    assert describe_nearest_multiples(34, 4) == "the nearest are 32 and 36"
    assert describe_nearest_multiples(3, 4) == "the nearest is 4"


positive = st.integers(1, 40)


@given(
    nodes=st.lists(positive, min_size=1, max_size=5),
    gpus=st.integers(1, 8),
    minimum=positive,
    maximum=st.integers(1, 5000),
    local=st.none() | st.integers(0, 300),
    accumulate=st.integers(1, 4),
)
def test_every_candidate_is_within_all_bounds(nodes, gpus, minimum, maximum, local, accumulate):
    candidates = list_candidates(
        nodes, gpus_per_node=gpus, min_batch=minimum, max_batch=maximum, max_local_batch=local, accumulate=accumulate
    )
    assert candidates == sorted(set(candidates))
    for config in candidates:
        assert config.nodes in nodes
        assert minimum <= config.batch <= maximum
        assert config.compute_local_batch(gpus) * config.nodes * gpus == config.batch
        assert config.compute_local_batch(gpus) % accumulate == 0
        assert local is None or config.compute_local_batch(gpus) <= local


@pytest.mark.parametrize("gpus", [1, 4])
def test_no_feasible_candidate_is_left_out(gpus):
    candidates = list_candidates([1, 2, 3], gpus_per_node=gpus, min_batch=12, max_batch=96)
    expected = {
        Config(nodes, batch) for nodes in (1, 2, 3) for batch in (12, 24, 48, 96) if batch % (nodes * gpus) == 0
    }
    assert set(candidates) == expected
