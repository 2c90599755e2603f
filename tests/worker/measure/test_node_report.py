"""Ranks report their nodes and network: two real ranks, of which one has a fast clock."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import node_report_rank
import pytest
import torch
from node_report_rank import CLOCK_OFFSET_SECONDS
from start_ranks import read_errors, start_ranks
from worker_jobs import make_spec

from tula_cli.run.directory import RunDir
from tula_cli.run.records.inspections import ClusterReport, Transfer
from tula_cli.run.records.tasks import CheckTask
from tula_cli.worker import device, nccl
from tula_cli.worker.measure import node_report
from tula_cli.worker.measure.node_report import Gpu, RankReport
from tula_cli.worker.ranks import Ranks

pytestmark = pytest.mark.torch

VIEW = RankReport(
    host="node1", gpus=(), gpu_id="", driver="", torch="2.6", cuda="", nccl="", python="3.11", cpus=4, memory=10**9, shared=10**9,
    interface="eth0", address="10.0.0.1", token="t", write_error="", dataset=None, free_disk=10**9,
)  # fmt: skip
A, B = Gpu("a", "A100", 80), Gpu("b", "A100", 40)


def check_task(folder: Path, **dataset: str) -> CheckTask:
    job = make_spec(dataset=dataset) if dataset else make_spec()
    return CheckTask(id="check-n002-1", job="check-n002-1", spec=job, workdir=str(folder), nodes=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run directory in which two ranks have looked around."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "images").mkdir()
    task = check_task(folder, name="ImageFolder", root="images")
    run = RunDir.create(folder / "runs", task.spec)
    run.write_task(task)
    run.checks.write_token(task.id, folder.name)
    (folder / "task").write_text(f"{run.path}\n{task.id}\n")
    assert start_ranks(node_report_rank.__file__, folder, world=2), read_errors(folder, 2)
    return run


@pytest.fixture
def report(run: RunDir) -> ClusterReport:
    result = run.checks.read_report("check-n002-1")
    assert result is not None
    return result


def test_both_ranks_tell_what_they_see(run: RunDir, report: ClusterReport) -> None:
    assert (report.backend, report.ranks, len(report.nodes)) == ("gloo", 2, 2)
    for number, node in enumerate(report.nodes):
        assert (node.node, node.ranks, node.host) == (number, 1, socket.gethostname())
        assert (node.torch, node.token, node.dataset, node.write_error) == (
            torch.__version__,
            run.checks.read_token(report.id),
            True,
            "",
        )
        assert (node.interface, node.address) == ("lo", "127.0.0.1")
        assert node.cpus == len(os.sched_getaffinity(0))
        assert node.memory > 2**28
        assert node.free_disk > 0


def test_a_clock_that_is_ahead_is_seen(report: ClusterReport) -> None:
    first, second = report.nodes
    assert first.clock_offset == 0
    assert second.clock_offset == pytest.approx(CLOCK_OFFSET_SECONDS, abs=0.1)
    assert 0 < second.clock_error < 0.1


def test_transfers_grow_until_one_takes_long(report: ClusterReport) -> None:
    sizes = tuple(transfer.size for transfer in report.transfers)
    assert sizes == node_report.TRANSFER_SIZES[: len(sizes)]
    assert all(transfer.seconds > 0 for transfer in report.transfers)
    assert all(transfer.seconds <= node_report.LONG_TRANSFER_SECONDS for transfer in report.transfers[:-1])
    assert report.transfers[-1].speed < 1e12, "two take part; one alone would not have to send anything"
    assert report.latency is not None and 0 < report.latency < 1
    assert (report.inside, report.network_error) == ((), "")


def test_what_the_nodes_are_is_kept_before_the_network_is_tried(run: RunDir, report: ClusterReport) -> None:
    draft = run.checks.read_draft_report(report.id)
    assert draft is not None
    assert draft == report.model_copy(update={"transfers": (), "latency": None})


def test_each_rank_has_signed_in(run: RunDir) -> None:
    assert run.checks.read_signed_in_hosts("check-n002-1") == dict.fromkeys(range(2), socket.gethostname())


def test_the_first_transfer_that_takes_long_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_report, "_measure_transfer", lambda size, *_: Transfer(size=size, seconds=size / 2**22))
    transfers = list(node_report._measure_transfers(None, torch.device("cpu")))  # type: ignore[arg-type]
    assert [transfer.size for transfer in transfers] == [2**16, 2**18, 2**20]


def test_speed_is_bits_a_second() -> None:
    assert Transfer(size=10**6, seconds=0.5).speed == 16e6


# --- one node


def test_a_rank_that_cannot_write_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    run = RunDir.create(tmp_path, make_spec())
    (run.path / "checks").touch()
    assert "cannot write" in node_report._try_write_token(check_task(tmp_path), run)


def test_ranks_of_a_node_are_one_report() -> None:
    """Each may see one GPU of its own, or all."""
    views = [replace(VIEW, gpus=(A,), gpu_id="a"), replace(VIEW, gpus=(B,), gpu_id="b", write_error="full")]
    node = node_report._make_node_report(3, views, (0.1, 0.2))
    assert (node.node, node.ranks, node.gpus, node.gpu_memory) == (3, 2, ("A100", "A100"), 40)
    assert (node.clock_offset, node.clock_error, node.write_error) == (0.1, 0.2, "full")
    assert node_report._make_node_report(0, [replace(VIEW, gpus=(A, B))] * 2, (0, 0)).gpus == ("A100", "A100")


def test_ranks_of_a_node_that_share_a_gpu_are_named() -> None:
    views = [replace(VIEW, gpus=(A, B), gpu_id=value) for value in ("a", "b", "a", "b")]
    assert node_report._make_node_report(0, views, (0, 0)).shared_gpus == ((0, 2), (1, 3))
    assert node_report._make_node_report(0, views[:2], (0, 0)).shared_gpus == ()
    assert node_report._make_node_report(0, [VIEW, VIEW], (0, 0)).shared_gpus == (), "without GPUs nothing is shared"


def test_what_breaks_a_network_is_reported_and_no_rank_waits_for_another(
    alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(members: object, *, backend: str) -> None:
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(
            "n1:7:7 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory\n"
        )
        raise RuntimeError("NCCL error: unhandled system error\nlong story")

    for name in nccl.NCCL_DEBUG_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node_report, "_make_process_group", broken)
    network = node_report._measure_network(alone, [0], backend="nccl", device=torch.device("cpu"))
    assert network == {
        "network_error": "NCCL error: unhandled system error; Call to ibv_create_cq failed with error Cannot allocate memory"
    }
    assert "NCCL_DEBUG" not in os.environ


def test_two_gpus_of_a_node_are_looked_at_as_well(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = []
    four = replace(alone, world=4)
    monkeypatch.setattr(Ranks, "gather", lambda ranks, text: [text] * ranks.world)
    monkeypatch.setattr(node_report, "_make_process_group", lambda members, *, backend: "group")
    monkeypatch.setattr(node_report, "_measure_latency", lambda group, device: 1e-5)
    monkeypatch.setattr(node_report, "_measure_pair_transfers", lambda pair, **_: pairs.append(tuple(pair)) or [pair])
    network = node_report._measure_network(four, [0, 2], backend="nccl", device=torch.device("cpu"))
    assert pairs == [(0, 2), (0, 1)] and set(network) == {"latency", "transfers", "inside"}
    assert set(node_report._measure_network(four, [0, 2], backend="gloo", device=torch.device("cpu"))) == {
        "latency",
        "transfers",
    }


def test_a_gpu_for_each_rank() -> None:
    first, second = replace(VIEW, gpu_id="a"), replace(VIEW, gpu_id="b")
    assert node_report.has_gpu_per_rank([first, second])
    assert node_report.has_gpu_per_rank([first, replace(first, host="node2")])
    assert not node_report.has_gpu_per_rank([first, first])
    assert not node_report.has_gpu_per_rank([first, replace(VIEW, host="node2")])


def test_a_view_goes_through_text() -> None:
    view = replace(VIEW, gpus=(A, B), dataset=False)
    assert RankReport.loads(view.dumps()) == view


def test_the_gpu_driver_is_the_kernels(tmp_path: Path) -> None:
    nvidia, amd, none = tmp_path / "nvidia", tmp_path / "amd", tmp_path / "none"
    nvidia.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC\n")
    assert device.read_driver_version(nvidia, none) == "550.54.15"
    nvidia.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n")
    assert device.read_driver_version(nvidia, none) == "570.124.06"
    nvidia.write_text("no version\n")
    assert device.read_driver_version(nvidia, none) == ""
    amd.write_text("6.7.0\n")
    assert device.read_driver_version(none, amd) == "6.7.0"
    assert device.read_driver_version(none, none) == ""


def test_a_dataset_without_a_folder_is_not_looked_for(tmp_path: Path) -> None:
    for name in ("digits", "FakeData", "mine:dataset"):
        assert node_report.is_dataset_readable(make_spec(dataset={"name": name})) is None
    assert node_report.is_dataset_readable(make_spec(dataset={"name": "CIFAR10", "root": str(tmp_path)})) is True
    assert (
        node_report.is_dataset_readable(make_spec(dataset={"name": "CIFAR10", "root": str(tmp_path / "none")})) is False
    )


def test_repeats_are_timed_one_by_one() -> None:
    times = node_report._time_calls(lambda: time.sleep(0.01), 3, torch.device("cpu"))
    assert len(times) == 3
    assert min(times) >= 0.01
