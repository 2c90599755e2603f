"""Memory of a node used by data: computed by hand, for one batch and for the batches of a process."""

import pytest

from tula_cli.models.memory import count_max_prefetched_batches, estimate_data_memory

MB = 2**20


def test_batches_are_ready_in_two_loaders() -> None:
    assert count_max_prefetched_batches(4) == 2 * (2 * 4 + 1)


def test_on_the_processor_batches_stay_in_shared_memory() -> None:
    data_memory = estimate_data_memory([100], sample=MB, ranks=3, workers=2, on_gpu=False)
    assert (data_memory.batches, data_memory.shared, data_memory.pinned) == (300 * MB, 3 * 10 * 100 * MB, 0)
    assert data_memory.samples == 3 * 2 * 100 * MB  # each process has one in the making


def test_pinned_copies_are_rounded_up_to_powers_of_two() -> None:
    exact, beyond = (
        estimate_data_memory([size], sample=MB, ranks=1, workers=2, on_gpu=True).pinned for size in (128, 129)
    )
    assert (exact, beyond) == (10 * 128 * MB, 10 * 256 * MB)


def test_pinned_memory_of_smaller_batches_is_not_given_back() -> None:
    alone, after = (
        estimate_data_memory(sizes, sample=MB, ranks=1, workers=1, on_gpu=True) for sizes in ([64], [16, 32, 33, 64])
    )
    assert after.pinned - alone.pinned == count_max_prefetched_batches(1) * (16 + 32) * MB  # 33 took a block of 64
    assert after.shared == alone.shared


@pytest.mark.parametrize("on_gpu", [True, False])
def test_without_processes_nothing_goes_through_shared_memory(on_gpu: bool) -> None:
    data_memory = estimate_data_memory([8], sample=MB, ranks=2, workers=0, on_gpu=on_gpu)
    assert (data_memory.shared, data_memory.samples) == (0, 2 * 8 * MB)
    assert data_memory.pinned == (2 * 2 * 8 * MB if on_gpu else 0)
