"""Joining the group of ranks: what it leaves in the environment."""

import os
from pathlib import Path

import pytest
import torch
from worker_jobs import spec

from tula_cli.spec.resources import Cluster
from tula_cli.worker.ranks import joined

pytestmark = pytest.mark.torch


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a single rank."""
    # The interface is set, so that `joined` adds nothing that would outlive the test.
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    for name, value in {**names, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def algorithm(collective: str, handover: Path) -> str | None:
    """Return NCCL_ALGO as a rank has it that has joined."""
    cluster = Cluster.model_validate({**spec().cluster.model_dump(), "collective": collective})
    with joined(cluster, handover=handover):
        return os.environ.get("NCCL_ALGO")


@pytest.mark.parametrize("collective", ["ring", "tree"])
def test_nccl_chooses_its_algorithm(one_rank: pytest.MonkeyPatch, tmp_path: Path, collective: str) -> None:
    assert algorithm(collective, tmp_path / "handover") is None


def test_an_algorithm_that_the_user_has_set_is_left_alone(one_rank: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one_rank.setenv("NCCL_ALGO", "allreduce:tree")
    assert algorithm("ring", tmp_path / "handover") == "allreduce:tree"
