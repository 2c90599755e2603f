"""The process group of a training: rank, device, rendezvous, collectives and shutdown."""

import gc
import json
import math
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from tula_cli.errors import JobFailed
from tula_cli.host import network
from tula_cli.host.machine import read_cpu_quota
from tula_cli.run.files import is_listed, write_file_atomically
from tula_cli.spec.resources import Cluster
from tula_cli.worker import nccl
from tula_cli.worker.device import choose_device, set_current_gpu

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Ranks of one job may start minutes apart on a busy file system; a lost rank must not block the others for longer."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A rank may wait in a collective for another that reads its first batch, writes a checkpoint or compiles, which takes
longer than ranks wait for each other at the start. The supervisor detects ranks that have died, within seconds."""


@dataclass(frozen=True)
class Ranks:
    """This process in its process group. `rank` counts over all nodes, `local_rank` over this one."""

    rank: int
    world: int
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return the elementwise sum over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def max(self, value: float) -> float:
        """Return the largest value over all ranks."""
        return self.compute_elementwise_max([value])[0]

    def compute_elementwise_max(self, values: list[float]) -> list[float]:
        """Return the elementwise maximum over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def broadcast(self, value: int) -> int:
        """Return rank 0's value on every rank."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.broadcast(tensor, src=0)
        return int(tensor.item())

    def count_cores(self) -> float:
        """Return the cores per rank: shared cores are divided among the node's ranks; the minimum over all ranks."""
        node_cores = [platform.node(), sorted(os.sched_getaffinity(0)), read_cpu_quota()]
        return find_min_cores([json.loads(text) for text in self.gather(json.dumps(node_cores))])

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, in the order of ranks."""
        texts: list[str | None] = [None] * self.world
        dist.all_gather_object(texts, text)
        return [entry or "" for entry in texts]


def find_min_cores(ranks: Sequence[tuple[str, Sequence[int], float | None]]) -> float:
    """Return the fewest cores of any rank, from each rank's (node, usable cores, CPU quota of its node in cores)."""
    ranks_using_core = Counter((node, core) for node, cores, _ in ranks for core in cores)
    ranks_of_node = Counter(node for node, _, _ in ranks)
    return min(
        min(
            sum(1 / ranks_using_core[node, core] for core in cores),
            math.inf if quota is None else quota / ranks_of_node[node],
        )
        for node, cores, quota in ranks
    )


@contextmanager
def join_process_group(cluster: Cluster, *, rendezvous_file: Path, listen: bool = False) -> Iterator[Ranks]:
    """Join the process group, and leave it without hanging.

    Args:
        rendezvous_file: the file in which rank 0 publishes its address, for the ranks if torchrun has not set it, and its
            device type, for the supervisor.
        listen: record the algorithms that NCCL chooses, for `nccl.read_chosen_algorithms`.

    Raises:
        JobFailed: this node has no network interface of the configured name.
    """
    # NCCL chooses its algorithm; an interface that the user's environment sets remains.
    for name, interface in network.make_interface_variables(cluster.network_interface).items():
        os.environ.setdefault(name, interface)
    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = choose_device(cluster, local_rank, world=world)
    on_gpu = device.type == "cuda"
    if on_gpu:
        set_current_gpu(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if "MASTER_ADDR" in os.environ:
        store, _, _ = next(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
        if rank == 0:
            _publish_address(rendezvous_file, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], device)
    else:
        store = _make_store(rendezvous_file, cluster.interface, device, rank=rank, world=world)
    with nccl.record_nccl_output(enabled=listen and on_gpu and rank == 0 and world > 1):
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if on_gpu else None,  # NCCL connects and fails here, not in the first step
        )
        yield Ranks(rank, world, local_rank, device)
        # gloo and a living DDP object deadlock in destroy_process_group (the reducer's destructor waits for gloo's
        # thread, which waits for the interpreter): the caller has dropped its objects by now; collect them before parting.
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


def _make_store(
    rendezvous_file: Path, interface: str | None, device: torch.device, *, rank: int, world: int
) -> TCPStore:
    """Return the store of the rendezvous; rank 0 binds a port that the system chooses and publishes it in `rendezvous_file`.

    A port derived from a job id would collide sooner or later.

    Raises:
        JobFailed: rank 0 has published no address within RENDEZVOUS_TIMEOUT.
    """
    if rank == 0:
        host = network.find_node_address(interface)
        store = TCPStore(host, 0, world, is_master=True, timeout=RENDEZVOUS_TIMEOUT, wait_for_workers=False)
        _publish_address(rendezvous_file, host, store.port, device)
        return store
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    while not is_listed(rendezvous_file):
        if time.monotonic() > deadline:
            raise JobFailed(
                f"rank {rank} on {socket.gethostname()} found no address of rank 0 in {rendezvous_file}",
                "check that the run directory is on a file system that all nodes share",
            )
        time.sleep(min(2.0, max(0.1, world / 100)))  # longer for more ranks, which all poll one file system
    host, port, _ = rendezvous_file.read_text(encoding="utf-8").split()
    return TCPStore(host, int(port), world, is_master=False, timeout=RENDEZVOUS_TIMEOUT, wait_for_workers=False)


def _publish_address(rendezvous_file: Path, host: str, port: int | str, device: torch.device) -> None:
    write_file_atomically(rendezvous_file, f"{host} {port} {device.type}\n")
