import io
import sys

import pytest

from tula_cli import words
from tula_cli.host.processes import tag_lines


def test_alternative_numbers_of_nodes():
    assert [words.describe_node_counts(counts) for counts in ((), (1,), (2, 4, 8))] == [
        "no nodes",
        "1 node",
        "2, 4 or 8 nodes",
    ]


def test_progress_leaves_out_what_is_not_known():
    record = {"samples": 640, "batch": 64, "step_time": 0.5}
    assert words.describe_progress(**record, epoch=2.5, all_epochs=4, loss=0.25, remaining=30.0) == (
        "epoch 2.5 of 4, sample 640: batch 64, loss 0.2500, 128 samples/s, 30.0 s left"
    )
    assert (
        words.describe_progress(**record, epoch=None, all_epochs=None, loss=None, remaining=None)
        == "sample 640: batch 64, 128 samples/s"
    )


@pytest.mark.parametrize("rank", [0, 3])
def test_lines_of_other_ranks_tell_their_rank(rank, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), write_through=True))
    tag_lines(rank)
    print("one\ntwo", end="")
    print(" more")
    sys.stdout.flush()
    tag = "[rank3]: " if rank else ""
    assert raw.getvalue().decode() == f"{tag}one\n{tag}two more\n"


LONG = "python train.py --arch resnet50 --batch-size 64 --epochs 90"


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("a", "b", ("a", "b")),
        ("none", LONG, ("none", "python train.py --arch re...")),
        (
            f"{LONG} --lr 0.1 --out a",
            f"{LONG} --lr 0.2 --out a",
            ("...pochs 90 --lr 0.1 --out a", "...pochs 90 --lr 0.2 --out a"),
        ),
        (LONG, f"{LONG} --lr 0.1", ("...e 64 --epochs 90", "...e 64 --epochs 90 --lr 0.1")),
        (LONG.replace("resnet50", "vgg11"), LONG, ("...y --arch vgg11 --batch...", "...y --arch resnet50 --ba...")),
        (LONG, "-", ("python train.py --arch re...", "-")),
    ],
)
def test_two_long_values_are_shown_where_they_differ(before, after, shown):
    pair = words.shorten_around_difference(before, after, 28)
    assert all(len(text) <= 28 for text in pair) and pair[0] != pair[1]
    assert pair == shown
