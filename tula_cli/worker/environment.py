"""The environment of a measurement: hosts, hardware, driver, versions, environment variables."""

import json
import os
import platform
from collections.abc import Iterable, Mapping

import torch
import torchvision

from tula_cli.host.machine import read_processor_name
from tula_cli.run.records.probes import Environment, Host
from tula_cli.run.secrets import may_be_secret
from tula_cli.spec.resources import Cluster
from tula_cli.version import __version__
from tula_cli.worker import nccl
from tula_cli.worker.device import get_gpu_name, get_gpu_uuid, get_nccl_version, read_driver_version
from tula_cli.worker.ranks import Ranks

RECORDED_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "GLOO_",
    "GPU_MAX_HW_QUEUES", "HIP_", "HSA_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "OMP_", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "RCCL_", "ROCR_VISIBLE_DEVICES", "SLURM_",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_NCCL_",
)  # fmt: skip
"""Prefixes of the names of environment variables that are recorded; all others may hold secrets."""


def collect_environment(ranks: Ranks, *, workers: int | None = None) -> Environment:
    """Describe the hardware and software that is measured; every rank must call this."""
    cuda = ranks.device.type == "cuda"
    hardware = get_gpu_name(ranks.device) if cuda else read_processor_name()
    driver = read_driver_version() if cuda else ""
    rank_hardware = [json.loads(text) for text in ranks.gather(json.dumps([platform.node(), hardware, driver]))]
    nodes = _group_hardware_by_host(rank_hardware)
    return Environment(
        hosts=tuple(node.name for node in nodes),
        device=ranks.device.type,
        hardware=" + ".join(sorted({name for node in nodes for name in node.hardware})),
        driver=" + ".join(sorted({node.driver for node in nodes})),
        backend="nccl" if cuda else "gloo",
        python=platform.python_version(),
        torch=torch.__version__,
        torchvision=torchvision.__version__,
        tula=__version__,
        nodes=nodes,
        cuda=torch.version.cuda or torch.version.hip or "",
        nccl=get_nccl_version(),
        system=f"{_read_linux_distribution()}, {platform.system()} {platform.release()}".lstrip(", "),
        allreduce=nccl.read_chosen_algorithms(),
        variables=select_recorded_variables(os.environ),
        workers=workers,
    )


def _group_hardware_by_host(rank_hardware: Iterable[tuple[str, str, str]]) -> tuple[Host, ...]:
    """Group the (host, hardware, driver) of all ranks by host, in the order of ranks."""
    by_host: dict[str, list[tuple[str, str]]] = {}
    for host, hardware, driver in rank_hardware:
        by_host.setdefault(host, []).append((hardware, driver))
    return tuple(
        Host(name=host, ranks=len(hosts), hardware=tuple(sorted({name for name, _ in hosts})), driver=hosts[0][1])
        for host, hosts in by_host.items()
    )


def _read_linux_distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:  # a container may lack the file
        return ""


def select_recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that are recorded: those of the allow-list, without the secrets among SLURM's.

    SLURM_JWT may hold a token, and SLURM_EXPORT_ENV the arguments of sbatch --export, with values. Variables by which
    tula itself has configured NCCL are left out, because they are no settings of the user.
    """
    left_out = (
        "SLURM_JWT",
        "SLURM_EXPORT",
        "SLURM_SPANK",
        *(nccl.NCCL_DEBUG_VARIABLES if nccl.get_nccl_log_path(environ) else ()),
    )
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(RECORDED_VARIABLES) and not name.startswith(left_out) and not may_be_secret(name, value)
    }


def count_local_ranks(ranks: Ranks, cluster: Cluster) -> int:
    """Return the number of ranks per machine; in a local cluster, whose nodes are sets of processes here, all ranks."""
    return cluster.backend.count_ranks_per_machine(ranks.world, gpus_per_node=cluster.gpus_per_node)


def is_oversubscribed(ranks: Ranks, *, ranks_here: int) -> bool:
    """Return whether ranks share cores (one thread per rank) or GPUs; step times then do not apply to a cluster.

    Every rank must call this: a rank that sees only its own GPU does not know how many there are.
    """
    if ranks.device.type != "cuda":
        return ranks_here > len(os.sched_getaffinity(0))
    placements = ranks.gather(json.dumps([platform.node(), get_gpu_uuid()]))
    return len(set(placements)) < len(placements)
