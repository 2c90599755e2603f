"""Samples are counted in batches of all shapes."""

from collections import UserDict
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from tula_cli.shim.tula_shim.batches import (
    LENGTH_PATH_PART,
    DeliveredBatches,
    compute_content_digest,
    count_epoch_samples,
    find_sample_count_path,
)


class Tensor(NamedTuple):
    """Has a shape; not a tuple to anybody who asks for that first."""

    shape: tuple[int, ...]


IMAGES, LABELS = Tensor((8, 3, 4, 4)), Tensor((8,))


@pytest.mark.parametrize(
    ("batch", "size", "path"),
    [
        ((IMAGES, LABELS), 8, (0,)),
        ([Tensor((1, 3)), LABELS], 8, (1,)),  # something that all samples share comes first
        ({"ids": Tensor((8, 128)), "labels": LABELS}, None, ("ids",)),
        (
            ((Tensor((3, 9, 7)), Tensor((3, 5, 5))), ({"box": Tensor((2, 4))}, {})),
            2,
            (0, LENGTH_PATH_PART),
        ),  # detection
        (IMAGES, None, ()),
        ((Tensor(()), IMAGES), None, (1,)),
        ("text", None, None),
        (7, 7, None),
        (["a", "b"], 2, (LENGTH_PATH_PART,)),
    ],
)
def test_where_the_samples_of_a_batch_are_counted(
    batch: object, size: int | None, path: tuple[object, ...] | None
) -> None:
    assert find_sample_count_path(batch, size) == path


def test_a_last_batch_is_counted_as_the_ones_before() -> None:
    delivered = DeliveredBatches()
    for samples in (8, 8, 5):
        delivered.add_batch(1, [Tensor((1, 3)), Tensor((samples,))], waited=0.5, size=8)
        assert delivered.pop_batch_counts() == {1: [samples, 1, 0.5]}
    assert delivered.count_samples() == 21


def test_a_mapping_that_is_no_dict_is_counted() -> None:
    batch: Mapping[str, Tensor] = UserDict({"ids": LABELS})
    assert find_sample_count_path(batch, None) == ("ids",)


def test_a_batch_of_another_shape_is_looked_at_anew() -> None:
    delivered = DeliveredBatches()
    for batch in ((IMAGES, LABELS), {"image": Tensor((4, 3))}, IMAGES):
        delivered.add_batch(1, batch, waited=0.0, size=None)
    assert delivered.pop_batch_counts()[1][:2] == [8 + 4 + 8, 3]


def test_the_dataset_of_most_steps_is_what_is_find_trained_dataset() -> None:
    delivered = DeliveredBatches()
    delivered.add_batch(2, IMAGES, waited=0.0, size=8)  # a check before the first step
    for _ in range(3):
        delivered.add_batch(1, LABELS, waited=0.0, size=8)
        delivered.pop_batch_counts()
    assert (delivered.training, delivered.count_samples()) == (1, 24)


def test_a_dataset_that_is_made_anew_for_each_epoch_is_trained_on_too() -> None:
    delivered = DeliveredBatches()
    taken = []
    for epoch in (1, 2, 3):
        for _ in range(2):
            delivered.add_batch(epoch, IMAGES, waited=0.0, size=8)
            taken.append(delivered.pop_batch_counts())
    assert [delivered.find_trained_dataset(counts) for counts in taken] == [1, 1, 2, 2, 3, 3]
    assert delivered.find_trained_dataset({}) == 1 and delivered.count_samples() == 48


def test_what_cannot_be_counted_is_unknown_and_not_zero() -> None:
    delivered = DeliveredBatches()
    delivered.add_batch(1, "text", waited=0.0, size=None)
    assert delivered.pop_batch_counts() == {1: [0, 1, 0.0]}
    assert delivered.count_samples() is None and not delivered.can_count_samples(1)


class Ragged:
    """Has no shape to tell, as nested tensors have none."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("of different sizes")


def test_a_type_that_cannot_be_asked_is_not_counted_and_does_no_harm() -> None:
    delivered = DeliveredBatches()
    for batch in (Ragged(), IMAGES):
        delivered.add_batch(1, (batch, LABELS), waited=0.0, size=8)
    assert delivered.pop_batch_counts() == {1: [0, 2, 0.0]}
    assert delivered.count_samples() is None


class Iterator:
    """Stands for one of a data loader."""


def play(events: str) -> list[list[float]]:
    """Return what each step counts of a sequence of events, and at the end what is left.

    A capital begins the iterator of that name, its small letter delivers 8 samples of it; | is a backward pass, . a step.
    """
    delivered, iterators, steps = DeliveredBatches(), {}, []
    for event in events.replace(" ", ""):
        if event.isupper():
            iterators[event.lower()] = Iterator()
            delivered.begin_pass(1, iterators[event.lower()])
        elif event == "|":
            delivered.count_backward()
        elif event == ".":
            steps.append(delivered.pop_batch_counts().get(1, [0, 0])[0] / 8)
        else:
            delivered.add_batch(1, IMAGES, waited=0.0, size=8, iterator=iterators[event])
    return steps


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        ("A a|. a|. B b|.", [1, 1, 1]),
        ("A a B b|. b|.", [1, 1]),  # next(iter(loader)), then an epoch
        ("A a|. a|. B b C c|. c|.", [1, 1, 1, 1]),  # at each epoch
        ("A aaaa B b|. b|.", [1, 1]),  # a pass that takes mean and deviation
        ("A aa B bb C c|. c|.", [1, 1]),  # twice
        ("A a a|a|. a|a|.", [3, 2]),  # micro-batches; one of them without a backward pass of its own
        ("A a|. B b|. C c|.", [1, 1, 1]),  # an iterator for each batch
        ("A a B b|. C c D d|. E e F f|.", [1, 2, 2]),  # two of them a step: known from the second step on
        ("A B a b|. a b|.", [2, 2]),  # two at once
        ("A a B b|. a b|. a b|.", [1, 3, 2]),  # the same, begun in turn
        ("A a. a. B b.", [1, 1, 1]),  # no backward pass of torch
        ("A a|. a B b|. b|.", [1, 2, 1]),  # one batch ahead, over the end of an epoch
    ],
)
def test_a_batch_that_is_only_looked_at_does_not_count(events: str, steps: list[float]) -> None:
    assert play(events) == steps


class Loader:
    """A stand-in for torch's DataLoader with the attributes that `facts` reads."""

    def __init__(self, dataset: object, size: int | None, *, drop_last: bool = False, order: object = None) -> None:
        self.dataset, self.batch_size, self.drop_last, self.num_workers = dataset, size, drop_last, 0
        self.sampler = order if order is not None else dataset
        self.batch_sampler = self

    def __len__(self) -> int:
        count, size = len(self.sampler), self.batch_size or 1  # type: ignore[arg-type]
        return count // size if self.drop_last else -(-count // size)


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (Loader(range(100), 32, drop_last=True), 96),
        (Loader(range(100), 32), 100),
        (Loader(range(100), 32, order=range(52)), 52),  # a DistributedSampler that repeats some
        (Loader(range(100), 32, drop_last=True, order=range(50)), 32),
        (Loader(range(100), None), None),
    ],
)
def test_an_epoch_holds_what_its_loader_delivers(loader: Loader, samples: int | None) -> None:
    assert count_epoch_samples(loader) == samples


class Holding:
    def __init__(self, **held: object) -> None:
        vars(self).update(held)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (Holding(indices=range(0, 10, 2)), Holding(indices=range(1, 10, 2)), False),
        (Holding(files=["a", "c"]), Holding(files=["b", "d"]), False),
        (Holding(_fingerprint="1"), Holding(_fingerprint="2"), False),
        (Holding(dataset=Holding(indices=[0])), Holding(dataset=Holding(indices=[1])), False),
        (Holding(files=["a"], rank=0), Holding(files=["a"], rank=1), True),  # of one dataset, on two ranks
        (Holding(rank=0), Holding(rank=1), True),  # nothing to compare
    ],
)
def test_parts_of_a_dataset_are_reported_apart(one: object, other: object, alike: bool) -> None:
    assert (compute_content_digest(one) == compute_content_digest(other)) is alike
