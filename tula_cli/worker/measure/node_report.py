"""The checks of `tula check --on-cluster` on each rank: its node, its clock, and the network.

Reports are exchanged over gloo, so that nodes without a GPU, or with a broken NCCL, can still report; only the
transfers use the backend of a training.
"""

import json
import math
import os
import platform
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tula_cli.errors import TulaError
from tula_cli.host import network
from tula_cli.host.machine import read_shared_memory
from tula_cli.run.directory import RunDir
from tula_cli.run.records.inspections import ClusterReport, NodeReport, Transfer
from tula_cli.run.records.tasks import CheckTask
from tula_cli.spec.job import JobSpec
from tula_cli.worker import nccl
from tula_cli.worker.device import (
    Clock,
    count_gpus,
    get_gpu_memory,
    get_gpu_name,
    get_gpu_uuid,
    get_nccl_version,
    read_driver_version,
    set_current_gpu,
)
from tula_cli.worker.ranks import Ranks, join_process_group

CLOCK_ROUND_TRIPS = 20  # round trips per measurement of a clock offset
TRANSFER_SIZES = tuple(2**power for power in range(16, 29, 2))  # bytes, 64 KiB to 256 MiB
TRANSFER_REPEATS = 5
LONG_TRANSFER_SECONDS = 0.2  # seconds of one transfer; the next size would take four times as long
LATENCY_REPEATS = (5, 30)  # number of untimed and timed all-reduces of one number
NCCL_TIMEOUT = timedelta(seconds=60)  # for the start of NCCL; the whole check may take three minutes


@dataclass(frozen=True)
class Gpu:
    """A GPU as one rank sees it; `id` is the same on all ranks that see the GPU."""

    id: str
    name: str
    memory: int  # bytes


@dataclass(frozen=True)
class RankReport:
    """The report of one rank about its node."""

    host: str
    gpus: tuple[Gpu, ...]
    gpu_id: str  # id of the GPU that this rank would train on, or empty
    driver: str
    torch: str
    cuda: str
    nccl: str
    python: str
    cpus: int
    memory: int
    shared: int | None
    interface: str
    address: str
    token: str
    write_error: str
    dataset: bool | None
    free_disk: int

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "RankReport":
        content = json.loads(text)
        return cls(**{**content, "gpus": tuple(Gpu(**gpu) for gpu in content["gpus"])})


def check_nodes(task: CheckTask, run: RunDir, *, attempt: int) -> None:
    """Take part in a check; rank 0 writes its report.

    Args:
        run: the run directory, which may be invisible from this node.

    Raises:
        JobFailed: this node has no network interface with the name in cluster.interface.
    """
    write_error = _try_write_token(task, run)  # before the rendezvous, to distinguish missing nodes from failed ones
    over_gloo = task.spec.cluster.model_copy(update={"device": "cpu"})
    with join_process_group(over_gloo, rendezvous_file=run.get_rendezvous_path(task.id, attempt)) as ranks:
        views = [
            RankReport.loads(text) for text in ranks.gather(_make_rank_report(task, run, ranks, write_error).dumps())
        ]
        first_ranks = range(0, ranks.world, task.spec.cluster.gpus_per_node)
        clocks = [_measure_clock_offset(ranks, rank) for rank in first_ranks]
        nodes = [
            _make_node_report(number, views[rank : rank + task.spec.cluster.gpus_per_node], clock)
            for number, (rank, clock) in enumerate(zip(first_ranks, clocks, strict=True))
        ]
        device = _choose_transfer_device(task.spec, ranks, views)
        backend = "nccl" if device.type == "cuda" else "gloo"
        report = ClusterReport(id=task.id, job=task.job, backend=backend, ranks=ranks.world, nodes=tuple(nodes))
        if ranks.is_first:
            run.checks.write_draft_report(report)  # written now because a broken NCCL may kill this process
        report = report.model_copy(update=_measure_network(ranks, first_ranks, backend=backend, device=device))
        if ranks.is_first:
            run.checks.write_report(report)


def _try_write_token(task: CheckTask, run: RunDir) -> str:
    try:
        run.checks.record_sign_in(task.id, int(os.environ["RANK"]), platform.node())
    except TulaError as error:
        return error.message
    return ""


# --- Report of a node


def _make_rank_report(task: CheckTask, run: RunDir, ranks: Ranks, write_error: str) -> RankReport:
    gpus = tuple(Gpu(get_gpu_uuid(index), get_gpu_name(index), get_gpu_memory(index)) for index in range(count_gpus()))
    # The interface configured for gloo by the spec or by the site's environment.
    address = network.find_node_address(os.environ.get("GLOO_SOCKET_IFNAME") or task.spec.cluster.interface)
    return RankReport(
        host=platform.node(),
        gpus=gpus,
        gpu_id=gpus[ranks.local_rank % len(gpus)].id if gpus else "",
        driver=read_driver_version() if gpus else "",
        torch=torch.__version__,
        cuda=torch.version.cuda or torch.version.hip or "",
        nccl=get_nccl_version(),
        python=platform.python_version(),
        cpus=len(os.sched_getaffinity(0)),
        memory=_read_node_memory(),
        shared=read_shared_memory(),
        interface=network.find_interface(address) or "",
        address=address,
        token=run.checks.read_token(task.id),
        write_error=write_error,
        dataset=is_dataset_readable(task.spec),
        free_disk=shutil.disk_usage(run.path).free,
    )


def _read_node_memory() -> int:
    match = re.search(r"^MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    assert match
    return int(match[1]) * 1024


def is_dataset_readable(spec: JobSpec) -> bool | None:
    """Return whether the dataset's folder can be read on this node; None if the dataset has no known folder."""
    if spec.script is not None or spec.dataset.name in ("digits", "FakeData") or ":" in spec.dataset.name:
        return None
    return os.access(Path(spec.dataset.root).expanduser(), os.R_OK | os.X_OK)


def _make_node_report(number: int, views: Sequence[RankReport], clock: tuple[float, float]) -> NodeReport:
    """Combine the reports of one node's ranks, each of which may see all GPUs or one."""
    first_view = views[0]
    gpus = {gpu.id: gpu for view in views for gpu in view.gpus}
    gpu_ids = [view.gpu_id for view in views]
    return NodeReport(
        node=number,
        host=first_view.host,
        ranks=len(views),
        gpus=tuple(gpu.name for gpu in gpus.values()),
        gpu_memory=min((gpu.memory for gpu in gpus.values()), default=None),
        shared_gpus=tuple(
            tuple(rank for rank, name in enumerate(gpu_ids) if name == gpu)
            for gpu in dict.fromkeys(filter(None, gpu_ids))
            if gpu_ids.count(gpu) > 1
        ),
        clock_offset=clock[0],
        clock_error=clock[1],
        write_error=next((view.write_error for view in views if view.write_error), ""),
        **{name: getattr(first_view, name) for name in _FIELDS_OF_BOTH_REPORTS},
    )


_FIELDS_OF_BOTH_REPORTS = (
    "driver", "torch", "cuda", "nccl", "python", "cpus", "memory", "shared", "interface", "address", "token", "dataset",
    "free_disk",
)  # fmt: skip


# --- Measurements between nodes


def _measure_clock_offset(ranks: Ranks, rank: int) -> tuple[float, float]:
    """Return, on rank 0, how far the clock of `rank` is ahead of rank 0's, and the error bound. Seconds.

    The shortest of several round trips counts: the answer was sent in its middle, give or take half of its length.
    """
    best = (math.inf, 0.0)
    for _ in range(CLOCK_ROUND_TRIPS if rank else 0):
        if ranks.is_first:
            best = min(best, _measure_round_trip(rank))
        elif ranks.rank == rank:
            dist.recv(torch.zeros(1, dtype=torch.float64), src=0)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=0)
    length, offset = best
    return (offset, length / 2) if rank and ranks.is_first else (0.0, 0.0)


def _measure_round_trip(rank: int) -> tuple[float, float]:
    """Return the length of the round trip, and how far the other clock is ahead of this one at its middle. Seconds."""
    answer = torch.zeros(1, dtype=torch.float64)
    start = time.time()
    dist.send(answer, dst=rank)
    dist.recv(answer, src=rank)
    end = time.time()
    return end - start, float(answer.item()) - (start + end) / 2


def _choose_transfer_device(spec: JobSpec, ranks: Ranks, views: Sequence[RankReport]) -> torch.device:
    """Return the device of the transfers: a GPU if every rank of every node has a separate one, else the CPU."""
    if spec.cluster.device == "cpu" or not has_gpu_per_rank(views):
        return torch.device("cpu")
    device = torch.device("cuda", ranks.local_rank % count_gpus())
    set_current_gpu(device)
    return device


def has_gpu_per_rank(views: Sequence[RankReport]) -> bool:
    """Return whether every rank has a GPU that no other rank uses: NCCL refuses two ranks on one GPU."""
    return len({(view.host, view.gpu_id) for view in views if view.gpu_id}) == len(views)


def _measure_network(ranks: Ranks, first_ranks: Sequence[int], *, backend: str, device: torch.device) -> dict[str, Any]:
    """Return the report's fields on the network's speed, or why it cannot be measured; every rank must call this."""
    fields: dict[str, Any] = {}
    error = ""
    with nccl.record_nccl_output(enabled=backend == "nccl", to="nccl_warnings"):
        try:
            everyone = _make_process_group(range(ranks.world), backend=backend)
            assert everyone is not None
            fields["latency"] = _measure_latency(everyone, device)
            if len(first_ranks) > 1:
                fields["transfers"] = tuple(_measure_pair_transfers(first_ranks[:2], backend=backend, device=device))
            if backend == "nccl" and len(first_ranks) < ranks.world:
                fields["inside"] = tuple(_measure_pair_transfers((0, 1), backend=backend, device=device))
        except RuntimeError as failure:  # torch raises RuntimeError for failures of a backend
            error = "; ".join([str(failure).strip().splitlines()[0], *nccl.list_nccl_warnings()])
    errors = [text for text in ranks.gather(error) if text]  # over gloo, the backend of the rendezvous
    return {"network_error": errors[0]} if errors else fields


def _measure_latency(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the median seconds of an all-reduce of one number."""
    number = torch.zeros(1, device=device)
    warmup, timed = LATENCY_REPEATS
    _time_calls(lambda: dist.all_reduce(number, group=group), warmup, device)
    return statistics.median(_time_calls(lambda: dist.all_reduce(number, group=group), timed, device))


def _measure_pair_transfers(pair: Sequence[int], *, backend: str, device: torch.device) -> list[Transfer]:
    """Return transfers between two ranks; the other ranks only take part in creating the group."""
    group = _make_process_group(pair, backend=backend)
    return [] if group is None else list(_measure_transfers(group, device))


def _make_process_group(members: Sequence[int], *, backend: str) -> dist.ProcessGroup | None:
    """Create a group, which every rank must take part in; return None on a rank that is not a member."""
    group = dist.new_group(list(members), backend=backend, timeout=NCCL_TIMEOUT)
    return group if isinstance(group, dist.ProcessGroup) else None


def _measure_transfers(pair: dist.ProcessGroup, device: torch.device) -> Iterator[Transfer]:
    """Yield transfers of increasing sizes until one takes longer than LONG_TRANSFER_SECONDS."""
    for size in TRANSFER_SIZES:
        transfer = _measure_transfer(size, pair, device)
        yield transfer
        if transfer.seconds > LONG_TRANSFER_SECONDS:
            return


def _measure_transfer(size: int, pair: dist.ProcessGroup, device: torch.device) -> Transfer:
    """Return the fastest of TRANSFER_REPEATS all-reduces; between two ranks, each sends and receives the tensor once."""
    tensor = torch.zeros(size // 4, device=device)
    seconds = min(_time_calls(lambda: dist.all_reduce(tensor, group=pair), TRANSFER_REPEATS, device))
    # Both ranks use the slower time, so that they stop at the same size.
    slower = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slower, op=dist.ReduceOp.MAX, group=pair)
    return Transfer(size=size, seconds=float(slower.item()))


def _time_calls(act: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Return the seconds of each of `count` calls, including the work that they queue on the device."""
    seconds, clock = [], Clock(device)
    for _ in range(count):
        start = time.perf_counter()
        act()
        clock.wait_for_device()
        seconds.append(time.perf_counter() - start)
    return seconds
