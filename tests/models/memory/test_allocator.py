"""The simulation of PyTorch's CUDA allocator: its rules one by one, and what holds for any sequence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_cli.models.allocator import (
    CachingAllocator,
    DeviceMemoryExhausted,
    compute_peak_without_allocator,
    replay_allocations,
)

MIB = 2**20


def test_requests_are_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator()
    for name, size in enumerate((1, 512, 513, 0)):
        allocator.allocate_block(name, size)
    assert allocator.allocated == 512 + 512 + 1024


@pytest.mark.parametrize(
    ("size", "segment"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB + 1, 12), (100 * MIB, 100)],
)
def test_segments_have_the_sizes_that_torch_asks_for(size: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate_block(0, size)
    assert allocator.reserved == segment * MIB


def test_small_requests_share_a_segment_and_large_ones_another() -> None:
    allocator = CachingAllocator()
    for name in range(4):
        allocator.allocate_block(name, MIB // 2)
    assert allocator.reserved == 2 * MIB
    for name in range(4, 8):
        allocator.allocate_block(name, 5 * MIB)
    assert allocator.reserved == 22 * MIB


def test_a_remainder_of_a_mebibyte_stays_with_its_block() -> None:
    allocator = CachingAllocator()
    allocator.allocate_block(0, 19 * MIB)  # a segment of its own, 20 MiB in whole 2 MiB
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 20 * MIB)


def test_freed_neighbours_join() -> None:
    allocator = CachingAllocator()
    for name in range(4):
        allocator.allocate_block(name, 5 * MIB)
    for name in (0, 2, 1):
        allocator.release_block(name)
    allocator.allocate_block(4, 15 * MIB)
    assert allocator.reserved == 20 * MIB


def test_the_block_that_fits_best_is_taken() -> None:
    allocator = CachingAllocator()
    allocator.allocate_block(0, 40 * MIB)
    allocator.allocate_block(1, 20 * MIB)
    allocator.release_block(0)
    allocator.release_block(1)
    allocator.allocate_block(2, 20 * MIB)
    allocator.allocate_block(3, 40 * MIB)
    assert allocator.reserved == 60 * MIB


def test_near_the_limit_whole_free_segments_are_given_back() -> None:
    allocator = CachingAllocator(64 * MIB)
    allocator.allocate_block(0, 40 * MIB)
    allocator.release_block(0)
    allocator.allocate_block(1, 50 * MIB)
    assert (allocator.flushes, allocator.reserved, allocator.peak_reserved) == (1, 50 * MIB, 50 * MIB)
    with pytest.raises(DeviceMemoryExhausted):
        allocator.allocate_block(2, 20 * MIB)


def test_a_segment_that_is_partly_in_use_is_kept() -> None:
    allocator = CachingAllocator()
    for name in range(3):
        allocator.allocate_block(name, 5 * MIB)
    allocator.release_block(0)
    allocator._release_free_segments()
    assert allocator.reserved == 20 * MIB


EVENTS = st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 30)), max_size=60)


@given(EVENTS)
def test_nothing_is_lost_or_handed_out_twice(choices: list[tuple[int, int]]) -> None:
    allocator, live = CachingAllocator(), {}
    for name, (size, drop) in enumerate(choices):
        allocator.allocate_block(name, size)
        live[name] = size
        if drop in live:
            allocator.release_block(drop)
            del live[drop]
        assert sum(live.values()) <= allocator.allocated <= allocator.peak_allocated <= allocator.reserved
        assert sorted(allocator.list_names()) == sorted(live)
    for name in live:
        allocator.release_block(name)
    assert allocator.allocated == 0
    allocator._release_free_segments()
    assert allocator.reserved == 0, "all pieces are whole segments again"


# --- a step


def test_the_second_step_finds_what_the_first_has_left() -> None:
    step, sizes = [2, 3, -2, -3], [MIB, 30 * MIB, 30 * MIB]
    once, often = (replay_allocations([0], [], step, sizes, turns=turns) for turns in (1, 5))
    assert once == often
    assert once.reserved == 2 * MIB + 60 * MIB


def test_state_that_comes_late_breaks_up_what_the_first_step_has_left() -> None:
    step, sizes = [2, -2], [12 * MIB, 30 * MIB]  # number 0 comes late, number 1 is the step's
    early, late = replay_allocations([0], [], step, sizes), replay_allocations([], [0], step, sizes)
    assert early.reserved == 42 * MIB
    assert late.reserved == 60 * MIB
    tight = replay_allocations([], [0], step, sizes, capacity=42 * MIB)
    assert not tight.fits, "the piece in use keeps its whole segment"


def test_what_replaces_late_numbers_has_their_place_in_the_next_turn() -> None:
    step = [3, -1]  # number 2 comes to be beside number 0, which dies
    usage = replay_allocations([1], [0], step, [4 * MIB, MIB, 4 * MIB], turns=6)
    assert usage.allocated == 9 * MIB


def test_a_flush_counts_where_it_comes_back_each_turn() -> None:
    small = [*range(1, 9), *range(-1, -9, -1)]  # the small pool's segments and the large one do not fit side by side
    often = replay_allocations([], [], [*small, 9, -9], [*[MIB] * 8, 44 * MIB], capacity=50 * MIB)
    assert (often.fits, often.flushes) == (True, 2)
    settled = replay_allocations([], [0], [2, -2], [12 * MIB, 30 * MIB], capacity=60 * MIB)
    assert (settled.fits, settled.flushes) == (True, 0)


def test_without_an_allocator_the_peak_is_the_sum() -> None:
    assert compute_peak_without_allocator([0], [2, 3, -2, -3], [10, 100, 1000]) == 1110
    assert compute_peak_without_allocator([0, 1], [], [10, 100]) == 110
