"""Which sample is trained when: each exactly once an epoch, whatever the batch, the world and the start."""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_cli.models.memory import LOADERS_AT_A_TIME, estimate_data_memory
from tula_cli.models.ramp import Ramp
from tula_cli.worker.build.loaders import (
    MicroBatchSampler,
    SampleKey,
    TrainingPosition,
    build_eval_loader,
    build_train_loader,
    count_remaining_steps,
    make_epoch_permutation,
)

WORLDS = st.integers(1, 5)


def batches(
    size: int, *, batch: int, rank: int = 0, world: int = 1, accumulate: int = 1, epochs: int = 1, **start: int
) -> list[list[SampleKey]]:
    return list(
        MicroBatchSampler(
            size,
            ramp=Ramp.from_constant_batch(batch),
            parts={batch: accumulate},
            rank=rank,
            world=world,
            seed=3,
            epochs=epochs,
            start=TrainingPosition(**start),
        )
    )


def union(size: int, *, batch: int, world: int, **start: int) -> list[set[SampleKey]]:
    """Return the samples of each global batch, over all ranks."""
    ranks = [batches(size, batch=batch, rank=rank, world=world, **start) for rank in range(world)]
    return [{key for part in parts for key in part} for parts in zip(*ranks, strict=True)]


@given(size=st.integers(1, 300), local=st.integers(1, 9), world=WORLDS, accumulate=st.integers(1, 3), data=st.data())
@settings(max_examples=60)
def test_every_sample_of_the_whole_batches_is_trained_once(
    size: int, local: int, world: int, accumulate: int, data: st.DataObject
) -> None:
    done = data.draw(st.integers(0, size))
    batch = local * world * accumulate
    ranks = [
        batches(size, batch=batch, rank=rank, world=world, accumulate=accumulate, done=done) for rank in range(world)
    ]
    seen = [index for parts in ranks for part in parts for _, index in part]
    count = (size - done) // batch * batch
    assert sorted(seen) == sorted(make_epoch_permutation(size, seed=3, epoch=0)[done : done + count].tolist())
    assert {len(part) for parts in ranks for part in parts} <= {local}
    assert all(len(parts) == (size - done) // batch * accumulate for parts in ranks)


@given(world=WORLDS, done=st.integers(0, 50))
@settings(max_examples=25)
def test_a_global_batch_holds_the_same_samples_in_any_world(world: int, done: int) -> None:
    assert union(200, batch=60, world=world, done=done) == union(200, batch=60, world=1, done=done)


@given(first=st.integers(1, 40), second=st.integers(1, 40), data=st.data())
@settings(max_examples=40)
def test_another_batch_goes_on_where_the_old_one_ended(first: int, second: int, data: st.DataObject) -> None:
    steps = data.draw(st.integers(0, 120 // first))
    before = batches(120, batch=first)[:steps]
    after = batches(120, batch=second, done=steps * first)
    seen = [index for part in before + after for _, index in part]
    assert seen == make_epoch_permutation(120, seed=3, epoch=0)[: len(seen)].tolist()
    assert 120 - len(seen) < second


def test_a_rank_takes_every_world_th_sample_of_the_order() -> None:
    order = make_epoch_permutation(20, seed=3, epoch=0).tolist()
    parts = batches(20, batch=6, rank=1, world=3, done=2)
    assert [index for part in parts for _, index in part] == order[3:20:3]


def test_epochs_follow_without_a_gap_and_a_resumed_one_is_not_repeated() -> None:
    epochs = [key[0] for part in batches(10, batch=4, epochs=3, epoch=1, done=4) for key in part]
    assert epochs == [1] * 4 + [2] * 8


def test_where_less_than_a_batch_is_left_the_epoch_is_over() -> None:
    assert batches(10, batch=4, done=8) == []
    assert batches(10, batch=11, epochs=3) == []


def test_steps_left_counts_whole_batches() -> None:
    assert [count_remaining_steps(10, done, 4) for done in (0, 2, 3, 8, 10, 12)] == [2, 2, 1, 0, 0, 0]


def test_order_differs_between_epochs_and_seeds() -> None:
    orders = [make_epoch_permutation(100, seed=seed, epoch=epoch).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert all(sorted(order) == list(range(100)) for order in orders)


def test_order_is_the_same_in_every_process_and_on_every_machine() -> None:
    digest = hashlib.sha256(make_epoch_permutation(1000, seed=3, epoch=2).numpy().astype("<i8").tobytes()).hexdigest()
    assert digest.startswith("bddccdc986e61c02")
    assert make_epoch_permutation(10, seed=3, epoch=2).tolist() == [9, 4, 2, 3, 5, 0, 6, 7, 1, 8]


def test_order_draws_nothing_from_the_process_generator() -> None:
    before = torch.get_rng_state()
    make_epoch_permutation(10, seed=3, epoch=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_position_counts_samples_and_steps_across_epochs() -> None:
    position = TrainingPosition().advance(4).advance(4).start_next_epoch().advance(2)
    assert position == TrainingPosition(epoch=1, done=2, samples=10, steps=3)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_load_the_same_samples_in_the_same_order() -> None:
    dataset = [torch.tensor(index) for index in range(24)]

    class Keyed(torch.utils.data.Dataset[torch.Tensor]):
        def __getitem__(self, key: SampleKey) -> torch.Tensor:
            return dataset[key[1]]

    plan = MicroBatchSampler(
        24, ramp=Ramp.from_constant_batch(4), parts={4: 2}, rank=0, world=1, seed=3, epochs=2, start=TrainingPosition()
    )
    none, two = (list(build_train_loader(Keyed(), plan, workers=workers, pin=False)) for workers in (0, 2))
    assert [part.tolist() for part in none] == [part.tolist() for part in two]
    assert [part.tolist() for part in none] == [[index for _, index in part] for part in plan]


def test_loader_processes_keep_in_shared_memory_what_the_model_says() -> None:
    class Large(torch.utils.data.Dataset[torch.Tensor]):
        def __getitem__(self, key: SampleKey) -> torch.Tensor:
            return torch.zeros(2048)

    plan = MicroBatchSampler(
        1000,
        ramp=Ramp.from_constant_batch(16),
        parts={16: 1},
        rank=0,
        world=1,
        seed=3,
        epochs=9,
        start=TrainingPosition(),
    )
    text = estimate_data_memory([16], sample=4 * 2048, ranks=1, workers=2, on_gpu=False).shared // LOADERS_AT_A_TIME
    loader = iter(build_train_loader(Large(), plan, workers=2, pin=False))
    before, ends = shared_memory([os.getpid()]), time.monotonic() + 60
    first = next(loader)
    processes = [os.getpid(), *(worker.pid for worker in loader._workers)]
    while (kept := shared_memory(processes) - before) < text:  # what is ahead is on its way
        assert time.monotonic() < ends, (kept, text)
        time.sleep(0.02)
    assert kept == text and len(first) == 16


def shared_memory(processes: Iterable[int]) -> int:
    """Return the bytes of torch's segments of shared memory that processes have open or in their memory."""
    result: dict[int, int] = {}
    for pid in processes:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.readlink(file).startswith("/dev/shm/torch_"):
                    status = file.stat()
                    result[status.st_ino] = status.st_size
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, _, _, _, inode, *name = line.split(maxsplit=5)
            if name and name[0].startswith("/dev/shm/torch_"):
                begin, end = (int(side, 16) for side in place.split("-"))
                result[int(inode)] = end - begin
    return sum(result.values())


@given(size=st.integers(1, 50), world=WORLDS, batch=st.integers(1, 7))
@settings(max_examples=25)
def test_each_evaluation_sample_is_loaded_once(size: int, world: int, batch: int) -> None:
    data = torch.arange(size)
    loaders = [
        build_eval_loader(data, rank=rank, world=world, batch=batch, workers=0, pin=False) for rank in range(world)
    ]
    seen = [int(value) for loader in loaders for part in loader for value in part]
    assert sorted(seen) == list(range(size))
    assert all(len(part) <= batch for loader in loaders for part in loader)
