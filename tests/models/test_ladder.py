"""The ladder of an out-of-memory: the same batch in smaller micro-batches, then a smaller batch."""

import pytest

from tula_cli.models.out_of_memory import (
    describe_why_not_splittable,
    find_next_fallback,
    list_divisors,
    list_splits,
    make_batch_norm_limit,
)
from tula_cli.run.records.failures import Fallback
from tula_cli.run.records.results import MicroBatches
from tula_cli.spec.load import validate_job

SCRIPT = {"length": {"samples": 1600}, "reference": {"batch": 16}}


def ladder(batches: tuple[int, ...], known: MicroBatches | None, **how: str) -> list[tuple[int, int]]:
    """Return (batch, parts) of each start of a training that never fits."""
    result, splits = [(batches[0], 1)], 1
    while (step := find_next_fallback(batches, splits, known, **how)) is not None:
        batches, splits = batches[step.rung :], step.splits
        result.append((batches[0], splits))
    return result


def known(*batches: int, world: int = 2, accumulate: int = 1, norm: bool = False, normalised: int = 0) -> MicroBatches:
    limits = [make_batch_norm_limit()] if norm else []
    return MicroBatches(
        splits=tuple(
            list_splits(b, micro_batch=b // world // accumulate, micro_batches=accumulate, limits=limits)
            for b in batches
        ),
        normalised=normalised,
    )


@pytest.mark.parametrize(
    ("micro_batch", "into"), [(1, ()), (2, (2,)), (8, (2, 4, 8)), (12, (2, 4, 12)), (7, (7,)), (15, (3, 15)), (0, ())]
)
def test_parts_are_all_of_one_size(micro_batch: int, into: tuple[int, ...]) -> None:
    splits = list_splits(micro_batch, micro_batch=micro_batch, micro_batches=1)
    assert splits.into == into and splits.limit == "they have one sample each"


def test_a_huge_micro_batch_is_cut_as_quickly() -> None:
    splits = list_splits(3**3 * 10**12, micro_batch=3**3 * 10**12, micro_batches=1)
    assert splits.into[:3] == (2, 4, 8) and splits.into[-1] == 3**3 * 10**12
    assert (
        list_divisors(1) == [1] and list_divisors(28) == [1, 2, 4, 7, 14, 28] and list_divisors(999_983) == [1, 999_983]
    )


@pytest.mark.parametrize(
    ("limit", "into"),
    [
        (make_batch_norm_limit(), (2, 4, 8)),
        (make_batch_norm_limit(ranks=4), (2, 4, 8, 16, 32)),
    ],
)
def test_batch_norm_keeps_eight_samples(limit, into: tuple[int, ...]) -> None:
    splits = list_splits(64, micro_batch=64, micro_batches=1, limits=[limit])
    assert splits.into == into and "fewer than 8 samples" in splits.limit


def test_the_batch_stays_while_it_can_be_cut_and_nothing_that_is_no_smaller_is_tried() -> None:
    assert ladder((32, 16, 8), known(32, 16, 8)) == [(32, 1), (32, 2), (32, 4), (32, 8), (32, 16)]
    norm = known(128, 64, 32, 16, 8, norm=True)
    assert ladder((128, 64, 32, 16, 8), norm) == [(128, 1), (128, 2), (128, 4), (128, 8), (8, 1)]


def test_a_smaller_batch_is_cut_as_far_as_it_has_to_be() -> None:
    # 14 samples a GPU are taken 7 at a time and then no fewer; the 12 of the next batch 6 at a time
    splits = list_splits(28, micro_batch=14, micro_batches=1, limits=[(lambda samples: samples > 2, "for a reason")])
    rungs = MicroBatches(splits=(splits, *known(24, 16).splits), normalised=0)
    step = find_next_fallback((28, 24, 16), 2, rungs)
    words = "out of memory at batch 28 in micro-batches of 7, which are not split further: for a reason"
    assert step == Fallback(rung=1, splits=2, batch=28, failed_micro_batch=7, limit="for a reason")
    assert step.description == words


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ({}, "out of memory at batch 128: each rank now computes a step in 2 micro-batches of 32"),
        ({"accumulate": 4}, "out of memory at batch 128: each rank now computes a step in 8 micro-batches of 8"),
        (
            {"normalised": 2},
            "out of memory at batch 128: each rank now computes a step in 2 micro-batches of 32, with BatchNorm's statistics over 64 samples",
        ),
    ],
)
def test_the_cause_says_what_is_done(of: dict[str, int], words: str) -> None:
    step = find_next_fallback((128, 64), 1, known(128, 64, **of))
    assert step is not None and step.description == words
    assert step.batch_norm_text == ("BatchNorm's statistics over 64 samples" if "normalised" in of else "")


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (
            "train.oom_policy is shrink",
            "out of memory at batch 64; its micro-batches are not split: train.oom_policy is shrink",
        ),
        (
            "",
            "out of memory at batch 64; its micro-batches are not split: the ranks ended before they reported how far micro-batches can be split",
        ),
        ("for a reason", "out of memory at batch 64; its micro-batches are not split: for a reason"),
    ],
)
def test_without_cutting_the_next_smaller_batch_follows(why: str, words: str) -> None:
    step = find_next_fallback((64, 32), 1, None, why_not=why)
    assert step is not None and (step.rung, step.splits, step.description) == (1, 1, words)
    assert ladder((64, 32, 16), None, why_not=why) == [(64, 1), (32, 1), (16, 1)]


@pytest.mark.parametrize(
    ("command", "oom", "words"),
    [
        ("train.py -b {micro_batch} -a {accumulate}", "accumulate", ""),
        ("train.py -b {micro_batch} -a {accumulate_total}", "accumulate", ""),
        ("train.py -b {micro_batch} -a {accumulate}", "shrink", "train.oom_policy is shrink"),
        ("train.py -b {local_batch}", "accumulate", "the command has no {micro_batch}"),
        ("train.py -b {local_batch} -a {accumulate}", "accumulate", "the command has no {micro_batch}"),
    ],
)
def test_a_script_needs_both_placeholders(command: str, oom: str, words: str) -> None:
    spec = validate_job({"script": {"command": command, **SCRIPT}, "train": {"oom_policy": oom}}, source="test")
    result = describe_why_not_splittable(spec)
    assert result.startswith(words) and bool(result) is bool(words)


def test_an_out_of_memory_in_a_stage_cuts_what_that_stage_takes() -> None:
    """Batch 512 in micro-batches of 256; a stage of 64 takes 32 at a time, which 128, 64 or 32 would leave as they are."""
    step = find_next_fallback((512, 256), 1, known(512, 256), stage=64)
    assert step is not None and (step.rung, step.splits) == (0, 16)
    assert step.description.startswith(
        "out of memory at batch 64, in a stage before batch 512: each rank now computes a step in 16 micro-batches of 16"
    )
    assert find_next_fallback((512, 256), 1, known(512, 256)).splits == 2  # type: ignore[union-attr]
    last = find_next_fallback((512, 256), 1, known(512, 256, norm=True), stage=16)
    assert last is None, "a smaller batch's micro-batches of 8 are no smaller than the stage's"
    assert find_next_fallback((512,), 1, None, stage=64) is None
