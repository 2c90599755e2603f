"""Joining the group of ranks: what it leaves in the environment."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worker_jobs import make_spec

from tula_cli.host.machine import read_cpu_quota
from tula_cli.host.network import find_free_port
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt
from tula_cli.spec.resources import Cluster
from tula_cli.spec.sections import Train
from tula_cli.worker import nccl, ranks
from tula_cli.worker.ranks import find_min_cores, join_process_group

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


def algorithm(collective: str, rendezvous_file: Path) -> str | None:
    """Return NCCL_ALGO as a rank has it that has joined."""
    cluster = Cluster.model_validate({**make_spec().cluster.model_dump(), "collective": collective})
    with join_process_group(cluster, rendezvous_file=rendezvous_file):
        return os.environ.get("NCCL_ALGO")


@pytest.mark.parametrize("collective", ["ring", "tree"])
def test_nccl_chooses_its_algorithm(one_rank: pytest.MonkeyPatch, tmp_path: Path, collective: str) -> None:
    assert algorithm(collective, tmp_path / "handover") is None


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_rank_0_tells_the_supervisor_its_device(
    one_rank: pytest.MonkeyPatch, tmp_path: Path, *, by_torchrun: bool
) -> None:
    run = RunDir(tmp_path)
    if by_torchrun:
        one_rank.setenv("MASTER_ADDR", "127.0.0.1")
        one_rank.setenv("MASTER_PORT", str(find_free_port()))
    rendezvous_file = run.get_rendezvous_path("train-s-1", 1)
    with join_process_group(make_spec().cluster, rendezvous_file=rendezvous_file):
        assert rendezvous_file.read_text().split()[2:] == ["cpu"]
    attempt = Attempt(task="train-s-1", number=1, started_at=1.0)
    assert not run.has_seen_gpus(attempt)
    ranks._publish_address(rendezvous_file, "node1", 4711, torch.device("cuda", 0))
    assert run.has_seen_gpus(attempt)


def test_an_algorithm_that_the_user_has_set_is_left_alone(one_rank: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one_rank.setenv("NCCL_ALGO", "allreduce:tree")
    assert algorithm("ring", tmp_path / "handover") == "allreduce:tree"


class Started(Exception):
    """Raised in place of a group of GPUs, with what it was asked for."""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_group_of_gpus_is_bound_to_its_device_and_waits_longer_in_a_collective_than_at_the_start(
    one_rank: pytest.MonkeyPatch, tmp_path: Path, rank: str
) -> None:
    def start(backend: str, **given: object) -> None:
        raise Started({"backend": backend, "asks": os.environ.get("NCCL_DEBUG_SUBSYS"), **given})

    one_rank.setenv("RANK", rank)
    one_rank.setenv("WORLD_SIZE", "2")
    for name in nccl.NCCL_DEBUG_VARIABLES:
        one_rank.delenv(name, raising=False)
    one_rank.setattr(ranks, "choose_device", lambda *place, **world: torch.device("cuda", 0))
    one_rank.setattr(ranks, "_make_store", lambda *place, **ranks: dist.HashStore())
    one_rank.setattr(torch.accelerator, "set_device_index", lambda device: None)
    one_rank.setattr(dist, "init_process_group", start)
    with (
        pytest.raises(Started) as started,
        join_process_group(make_spec().cluster, rendezvous_file=tmp_path / "handover", listen=True),
    ):
        pass
    (requested,) = started.value.args
    assert (requested["backend"], requested["device_id"]) == ("nccl", torch.device("cuda", 0))
    assert requested["timeout"] > ranks.RENDEZVOUS_TIMEOUT
    assert requested["asks"] == ("TUNING" if rank == "0" else None), "rank 0 is told what NCCL chooses"
    assert "NCCL_DEBUG_SUBSYS" not in os.environ


# --- the cores of a rank


ALL, HALF = list(range(8)), list(range(4))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([("a", ALL, None)], 8),
        ([("a", ALL, None)] * 4, 2),  # all of a node's ranks may run on all of its cores
        ([("a", HALF, None), ("a", [4, 5, 6, 7], None)], 4),  # SLURM has bound each to its own
        ([("a", ALL, None), ("b", ALL, None)], 8),
        ([("a", ALL, None), ("b", HALF, None)], 4),  # all take as many as the one that has fewest
        ([("a", HALF, None), ("a", ALL, None)], 2),
        ([("a", ALL, 3.0)], 3),
        ([("a", ALL, 3.0)] * 2, 1.5),
        ([("a", ALL, 30.0)], 8),
    ],
)
def test_shared_cores_are_divided_and_the_poorest_rank_counts(told: list[Any], expected: float) -> None:
    assert find_min_cores(told) == expected


@pytest.mark.parametrize(("cores", "expected"), [(1, 2), (2, 2), (3.5, 2), (4, 3), (9, 8), (64, 8)])
def test_a_data_loader_takes_all_cores_but_one_within_bounds(cores: float, expected: int) -> None:
    assert Train(epochs=1).count_loaders(cores) == expected
    assert Train(epochs=1, workers=5).count_loaders(cores) == 5


@pytest.mark.parametrize(("text", "expected"), [("150000 100000", 1.5), ("max 100000", None), (None, None)])
def test_a_containers_share_of_the_processor(tmp_path: Path, text: str | None, expected: float | None) -> None:
    path = tmp_path / "cpu.max"
    if text:
        path.write_text(text)
    assert read_cpu_quota(path) == expected
