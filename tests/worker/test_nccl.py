"""The choices of NCCL, read from its output, which is requested unless the user has requested it."""

import os
from pathlib import Path

import pytest

from tula_cli.worker import environment, nccl

pytestmark = pytest.mark.torch

NAMED = """\
node1:77:80 [0] NCCL INFO AllReduce: 8 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}
node1:77:80 [0] NCCL INFO AllReduce: 26214400 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}
node1:77:80 [0] NCCL INFO Broadcast: 94371840 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..15}
node1:77:80 [0] NCCL INFO AllReduce: 52428800 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..15}
node1:77:80 [0] NCCL INFO AllReduce: 52428800 Bytes -> Algo Tree proto Simple channel{Lo..Hi}={0..15}
"""
NUMBERED = """\
gpu-3:12:12 [0] NCCL INFO AllReduce: 8 Bytes -> Algo 0 proto 0 time 25.200924
gpu-3:12:12 [0] NCCL INFO AllReduce: 1026048 Bytes -> Algo 1 proto 2 time 34.693867
gpu-3:12:12 [0] NCCL INFO 4194304 Bytes -> Algo 4 proto 1 time 60.1
gpu-3:12:12 [0] NCCL INFO AllGather: 9999 Bytes -> Algo 1 proto 2 time 60.1
gpu-3:12:12 [0] NCCL INFO AllReduce: 7 Bytes -> Algo 9 proto 9 time 60.1
"""


def test_what_it_chose_last_for_each_size_of_an_all_reduce() -> None:
    assert nccl.parse_algorithms(NAMED) == {8: "tree, ll", 26214400: "ring, simple", 52428800: "tree, simple"}


def test_numbers_stand_for_names_and_unknown_ones_for_themselves() -> None:
    assert nccl.parse_algorithms(NUMBERED) == {
        7: "9, 9",
        8: "tree, ll",
        1026048: "ring, simple",
        4194304: "nvls, ll128",
    }


def test_the_largest_are_kept() -> None:
    lines = (f"NCCL INFO AllReduce: {size} Bytes -> Algo RING proto LL" for size in range(100, 200))
    assert list(nccl.parse_algorithms("\n".join(lines))) == list(range(200 - nccl.MAX_SIZES, 200))


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in nccl.NCCL_DEBUG_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_it_writes_to_a_file_of_its_own_that_is_gone_afterwards(unasked: pytest.MonkeyPatch) -> None:
    with nccl.record_nccl_output(enabled=True):
        path = Path(os.environ["NCCL_DEBUG_FILE"])
        assert nccl.read_chosen_algorithms() == {}
        path.write_text(NAMED)
        assert nccl.read_chosen_algorithms()[26214400] == "ring, simple"
        assert not set(environment.select_recorded_variables(os.environ)) & set(nccl.NCCL_DEBUG_VARIABLES), (
            "tula's own settings are not the user's"
        )
    assert not path.exists() and not set(os.environ) & set(nccl.NCCL_DEBUG_VARIABLES)


@pytest.mark.parametrize("name", nccl.NCCL_DEBUG_VARIABLES)
def test_a_user_who_asks_nccl_is_answered(unasked: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    (tmp_path / "own.log").write_text(NAMED)
    unasked.setenv(name, str(tmp_path / "own.log"))
    before = dict(os.environ)
    with nccl.record_nccl_output(enabled=True):
        assert dict(os.environ) == before and nccl.read_chosen_algorithms() == {}
    assert environment.select_recorded_variables(os.environ)[name] == before[name]


def test_nothing_is_asked_where_it_is_not_wanted(unasked: pytest.MonkeyPatch) -> None:
    with nccl.record_nccl_output(enabled=False):
        assert not set(os.environ) & set(nccl.NCCL_DEBUG_VARIABLES)
