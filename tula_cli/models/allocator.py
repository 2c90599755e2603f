"""Simulation of PyTorch's CUDA allocator: device memory of a sequence of allocations, with segments and splits.

The allocator requests segments from the driver and hands out blocks of them. Requests are rounded up to 512 bytes;
those up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, larger ones have their own segment in
multiples of 2 MiB. A freed block is merged with its free neighbours and reused for the next request that it fits best;
nothing is returned to the device. The constants and rules are those of c10/cuda/CUDACachingAllocator.cpp with its
default settings.
"""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BLOCK_ALIGNMENT_BYTES = 512
MAX_SMALL_REQUEST_BYTES = 2**20
"""Largest request of the small pool, and smallest remainder that is split off in the large pool."""
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
MIN_DEDICATED_SEGMENT = 10 * 2**20  # requests of at least this size get their own segment
SEGMENT_UNIT = 2 * 2**20


@dataclass(frozen=True)
class AllocatorPeaks:
    """Peaks over a sequence of allocations. Bytes."""

    allocated: int  # peak of allocated blocks
    reserved: int  # peak of segments reserved on the device
    flushes: int = 0  # how often the last iteration released the cache to make space
    fits: bool = True  # False if memory was insufficient even after releasing the cache


class DeviceMemoryExhausted(Exception):
    """The device has no space for a segment."""


class _Block:
    """A piece of a segment; its neighbours are the adjacent pieces of the same segment."""

    __slots__ = ("after", "before", "free", "number", "size", "small")

    def __init__(self, number: int, size: int, *, small: bool) -> None:
        self.number, self.size, self.small = number, size, small
        self.before: _Block | None = None
        self.after: _Block | None = None
        self.free = False


class CachingAllocator:
    """The allocator's bookkeeping, without memory."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity  # bytes of the device available for segments; None for no limit
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.flushes = 0
        self._block_by_name: dict[int, _Block] = {}
        self._blocks: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, number), ascending
        self._numbers = itertools.count()

    def allocate_block(self, name: int, size: int) -> None:
        """Allocate a block under a name; a size of 0 allocates nothing."""
        if size <= 0:
            return
        rounded = -(-size // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
        block = self._find_block(rounded) or self._request_segment(rounded)
        remainder = block.size - rounded
        if remainder >= BLOCK_ALIGNMENT_BYTES if block.small else remainder > MAX_SMALL_REQUEST_BYTES:
            self._split_block(block, rounded)
        self._block_by_name[name] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def release_block(self, name: int) -> None:
        """Free the block of a name; names without a block are ignored."""
        block = self._block_by_name.pop(name, None)
        if block is None:
            return
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._remove_block_from_pool(neighbour)
                block = _join_blocks(*((neighbour, block) if neighbour is block.before else (block, neighbour)))
        block.free = True
        self._blocks[block.number] = block
        insort(self._free[block.small], (block.size, block.number))

    def rename_block(self, old: int, new: int) -> None:
        """Change the name of a block."""
        self._block_by_name[new] = self._block_by_name.pop(old)

    def list_names(self) -> tuple[int, ...]:
        """Return the names with an allocated block."""
        return tuple(self._block_by_name)

    def _find_block(self, size: int) -> _Block | None:
        """Return the smallest free block that is large enough."""
        free = self._free[size <= MAX_SMALL_REQUEST_BYTES]
        index = bisect_left(free, (size, -1))
        if index == len(free):
            return None
        block = self._blocks[free[index][1]]
        self._remove_block_from_pool(block)
        return block

    def _request_segment(self, requested_bytes: int) -> _Block:
        small = requested_bytes <= MAX_SMALL_REQUEST_BYTES
        if small:
            size = SMALL_SEGMENT
        elif requested_bytes < MIN_DEDICATED_SEGMENT:
            size = LARGE_SEGMENT
        else:
            size = -(-requested_bytes // SEGMENT_UNIT) * SEGMENT_UNIT
        if self.capacity is not None and self.reserved + size > self.capacity:
            self._release_free_segments()
            if self.reserved + size > self.capacity:
                raise DeviceMemoryExhausted
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return _Block(next(self._numbers), size, small=small)

    def _release_free_segments(self) -> None:
        """Return the segments without allocated blocks to the device."""
        self.flushes += 1
        for block in [block for block in self._blocks.values() if block.before is None and block.after is None]:
            self._remove_block_from_pool(block)
            self.reserved -= block.size

    def _split_block(self, block: _Block, size: int) -> None:
        """Return the end of a block to its pool."""
        remainder = _Block(next(self._numbers), block.size - size, small=block.small)
        block.size = size
        remainder.before, remainder.after, block.after = block, block.after, remainder
        if remainder.after is not None:
            remainder.after.before = remainder
        remainder.free = True
        self._blocks[remainder.number] = remainder
        insort(self._free[remainder.small], (remainder.size, remainder.number))

    def _remove_block_from_pool(self, block: _Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.number))]
        del self._blocks[block.number]
        block.free = False


def _join_blocks(before: _Block, second: _Block) -> _Block:
    before.size += second.size
    before.after = second.after
    if before.after is not None:
        before.after.before = before
    return before


def replay_allocations(
    setup: Sequence[int],
    later: Sequence[int],
    step: Sequence[int],
    sizes: Sequence[float],
    *,
    turns: int = 3,
    capacity: int | None = None,
) -> AllocatorPeaks:
    """Run recorded allocations through the caching allocator.

    Args:
        setup: numbers allocated before the first step.
        later: numbers allocated at the end of the first step, among the blocks it has left: the optimizer's state, AGS's
            factors.
        step: n + 1 allocates number n, -(n + 1) releases it. Allocations that replace late numbers take over their
            names for the next turn.
        sizes: bytes of each number.
        capacity: bytes of the device available for segments; None for no limit.
    """
    allocator, flushes_before = CachingAllocator(capacity), 0
    try:
        for number in setup:
            allocator.allocate_block(number, round(sizes[number]))
        for repetition in range(turns):
            flushes_before = allocator.flushes
            _run_events(allocator, step, sizes)
            _rename_allocations(allocator, [*setup, *later], later if repetition else [])
            for number in [] if repetition else later:
                allocator.allocate_block(number, round(sizes[number]))
    except DeviceMemoryExhausted:
        return AllocatorPeaks(allocated=allocator.peak_allocated, reserved=allocator.peak_reserved, fits=False)
    return AllocatorPeaks(
        allocated=allocator.peak_allocated, reserved=allocator.peak_reserved, flushes=allocator.flushes - flushes_before
    )


def _rename_allocations(allocator: CachingAllocator, stays: Sequence[int], replaced: Sequence[int]) -> None:
    """Rename the allocations that a step left over to the numbers it released; release them if the counts differ."""
    allocated = set(allocator.list_names())
    free = [number for number in replaced if number not in allocated]
    unplaced = sorted(allocated.difference(stays))
    if len(unplaced) == len(free):
        for old, new in zip(unplaced, free, strict=True):
            allocator.rename_block(old, new)
    else:
        for number in unplaced:
            allocator.release_block(number)


def compute_peak_without_allocator(setup: Sequence[int], step: Sequence[int], sizes: Sequence[float]) -> int:
    """Return the peak of a step if exactly the requested bytes are allocated. Bytes."""
    bytes_held = sum(sizes[number] for number in setup)
    changes = (sizes[event - 1] if event > 0 else -sizes[-event - 1] for event in step)
    return round(max(itertools.accumulate(changes, initial=bytes_held)))


def _run_events(allocator: CachingAllocator, events: Iterable[int], sizes: Sequence[float]) -> None:
    for event in events:
        if event > 0:
            allocator.allocate_block(event - 1, round(sizes[event - 1]))
        else:
            allocator.release_block(-event - 1)
