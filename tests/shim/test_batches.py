"""Samples are counted in batches of all shapes."""

from collections import UserDict
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from tula_cli.shim.tula_shim.hooks.batches import LENGTH, Delivered, find_samples


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
        (((Tensor((3, 9, 7)), Tensor((3, 5, 5))), ({"box": Tensor((2, 4))}, {})), 2, (0, LENGTH)),  # detection
        (IMAGES, None, ()),
        ((Tensor(()), IMAGES), None, (1,)),
        ("text", None, None),
        (7, 7, None),
        (["a", "b"], 2, (LENGTH,)),
    ],
)
def test_where_the_samples_of_a_batch_are_counted(
    batch: object, size: int | None, path: tuple[object, ...] | None
) -> None:
    assert find_samples(batch, size) == path


def test_a_last_batch_is_counted_as_the_ones_before() -> None:
    delivered = Delivered()
    for samples in (8, 8, 5):
        delivered.add(1, [Tensor((1, 3)), Tensor((samples,))], waited=0.5, size=8)
        assert delivered.take() == {1: [samples, 1, 0.5]}
    assert delivered.samples() == 21


def test_a_mapping_that_is_no_dict_is_counted() -> None:
    batch: Mapping[str, Tensor] = UserDict({"ids": LABELS})
    assert find_samples(batch, None) == ("ids",)


def test_a_batch_of_another_shape_is_looked_at_anew() -> None:
    delivered = Delivered()
    for batch in ((IMAGES, LABELS), {"image": Tensor((4, 3))}, IMAGES):
        delivered.add(1, batch, waited=0.0, size=None)
    assert delivered.take()[1][:2] == [8 + 4 + 8, 3]


def test_the_dataset_of_most_steps_is_what_is_trained_on() -> None:
    delivered = Delivered()
    delivered.add(2, IMAGES, waited=0.0, size=8)  # a check before the first step
    for _ in range(3):
        delivered.add(1, LABELS, waited=0.0, size=8)
        delivered.take()
    assert (delivered.training, delivered.samples()) == (1, 24)


def test_a_dataset_that_is_made_anew_for_each_epoch_is_trained_on_too() -> None:
    delivered = Delivered()
    taken = []
    for epoch in (1, 2, 3):
        for _ in range(2):
            delivered.add(epoch, IMAGES, waited=0.0, size=8)
            taken.append(delivered.take())
    assert [delivered.trained_on(counts) for counts in taken] == [1, 1, 2, 2, 3, 3]
    assert delivered.trained_on({}) == 1 and delivered.samples() == 48


def test_what_cannot_be_counted_is_unknown_and_not_zero() -> None:
    delivered = Delivered()
    delivered.add(1, "text", waited=0.0, size=None)
    assert delivered.take() == {1: [0, 1, 0.0]}
    assert delivered.samples() is None and not delivered.counts_samples(1)


class Ragged:
    """Has no shape to tell, as nested tensors have none."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("of different sizes")


def test_a_type_that_cannot_be_asked_is_not_counted_and_does_no_harm() -> None:
    delivered = Delivered()
    for batch in (Ragged(), IMAGES):
        delivered.add(1, (batch, LABELS), waited=0.0, size=8)
    assert delivered.take() == {1: [0, 2, 0.0]}
    assert delivered.samples() is None
