"""The resources that SLURM allocates to a job on each node, from its request and `scontrol`'s partitions and nodes.

As observed with SLURM 22.05 and documented for 24.11: a job with exclusive nodes is allocated all their CPUs and GPUs,
but only the memory that it requests; without a request, the default of the partition or cluster, or else all memory.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tula_cli.models.tres import parse_count, parse_tres
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import Slurm, normalize_option_name

_BARE = re.compile(r"^\d+$")


def parse_config(text: str) -> dict[str, str]:
    """Return the settings in the output of `scontrol show config`, one per line."""
    rows = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, equals, value in rows if equals}


@dataclass(frozen=True)
class Node:
    """The resources of one node that SLURM tracks."""

    tres: Mapping[str, float]  # CfgTRES
    partitions: tuple[str, ...]
    features: tuple[str, ...]
    gres: str
    threads: int  # a core

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> "Node":
        """Return the node from a record of `scontrol show node`."""
        tres = parse_tres(record.get("CfgTRES", ""))
        cpus = record.get("CPUEfctv") or record.get("CPUTot", "0")
        tres.setdefault("cpu", float(cpus) if _BARE.match(cpus) else 0.0)
        tres.setdefault("mem", parse_count("mem", record.get("RealMemory", "0")) or 0.0)
        threads = record.get("ThreadsPerCore", "1")
        return cls(
            tres={**tres, "node": 1.0},
            partitions=tuple(filter(None, record.get("Partitions", "").split(","))),
            features=tuple(filter(None, record.get("AvailableFeatures", "").split(","))),
            gres=record.get("Gres", ""),
            threads=int(threads) if _BARE.match(threads) else 1,
        )

    def can_run(self, spec: JobSpec, partition: str) -> bool:
        """Return whether a job can run on this node, by partition, GPU type and plain constraint (`a&b`)."""
        slurm = spec.cluster.slurm or Slurm()
        constraint = slurm.constraint or ""
        plain = re.fullmatch(r"[\w.-]+(&[\w.-]+)*", constraint)
        featured = not plain or set(constraint.split("&")) <= set(self.features)
        kind = slurm.gpu_type.lower() if slurm.gpu_type and _asks_for_gpus(spec) else ""
        types = re.findall(r"(?:^|,)gpu:([^:,(]+)", self.gres.lower())  # "gpu:a100:4(S:0-1)": a10 is another one
        return partition in self.partitions and featured and (not kind or kind in types)


def _asks_for_gpus(spec: JobSpec) -> bool:
    return spec.cluster.device != "cpu" and (spec.cluster.slurm or Slurm()).gpus != "none"


def compute_allocated_tres(
    spec: JobSpec, node: Node, partition: Mapping[str, str], config: Mapping[str, str]
) -> dict[str, float]:
    """Return the TRES that a job is allocated on one node.

    Args:
        spec: the job.
        node: the node that it runs on.
        partition: record of the partition.
        config: settings of the cluster.
    """
    slurm, ranks = spec.cluster.slurm or Slurm(), spec.cluster.gpus_per_node
    is_exclusive = slurm.exclusive or partition.get("OverSubscribe", "").startswith("EXCLUSIVE")
    gpus = ranks if _asks_for_gpus(spec) else 0
    if is_exclusive:
        tres = {name: count for name, count in node.tres.items() if name not in ("billing", "mem")}
        gpus = int(node.tres.get("gres/gpu", gpus))
    else:
        tres = {"cpu": _count_cpus_on_shared_node(spec, node, config), "node": 1.0, **_count_gpus(spec, node, gpus)}
    return {**tres, "mem": _compute_memory_on_shared_node(spec, node, partition, config, cpus=tres["cpu"], gpus=gpus)}


def _count_gpus(spec: JobSpec, node: Node, gpus: int) -> dict[str, float]:
    """Return the number of GPUs by TRES name, only for names that SLURM tracks on the node."""
    slurm = spec.cluster.slurm or Slurm()
    typed = [name for name in node.tres if name.startswith("gres/gpu:")]
    matching = [name for name in typed if not slurm.gpu_type or name == f"gres/gpu:{slurm.gpu_type.lower()}"]
    names = [name for name in node.tres if name == "gres/gpu"] + matching[:1]
    return {name: float(gpus) for name in names if gpus}


def _count_cpus_on_shared_node(spec: JobSpec, node: Node, config: Mapping[str, str]) -> float:
    """Return the CPUs of a job on a shared node: those of its tasks, in whole cores unless SLURM allocates CPUs."""
    slurm, ranks = spec.cluster.slurm or Slurm(), spec.cluster.gpus_per_node
    per_gpu = _get_extra_option(slurm, "cpus-per-gpu")
    cpus = ranks * (slurm.cpus_per_task or int(per_gpu or 1))
    if spec.task_per_node and slurm.cpus_per_task is None and not per_gpu:
        cpus = 1
    by_threads = re.search(r"CR_CPU", config.get("SelectTypeParameters", "").upper())
    return float(cpus if by_threads else node.threads * math.ceil(cpus / node.threads))


def _compute_memory_on_shared_node(
    spec: JobSpec, node: Node, partition: Mapping[str, str], config: Mapping[str, str], *, cpus: float, gpus: int
) -> float:
    slurm = spec.cluster.slurm or Slurm()
    requests = [
        ("Node", 1.0, slurm.memory),
        ("CPU", cpus, _get_extra_option(slurm, "mem-per-cpu")),
        ("GPU", float(gpus), _get_extra_option(slurm, "mem-per-gpu")),
    ]
    for _, times, text in requests:
        if text and (size := parse_count("mem", text)) is not None:
            return times * size or node.tres["mem"]  # 0 is all of it
    for record in (partition, config):
        defaults = dict(re.findall(r"(\w+)=(\d+)", record.get("JobDefaults", "")))
        for name, times, _ in requests:
            text = defaults.get(f"DefMemPer{name}") or record.get(f"DefMemPer{name}", "")
            if (size := parse_count("mem", text)) and times:
                return min(times * size, node.tres["mem"])
    return node.tres["mem"]


def _get_extra_option(slurm: Slurm, name: str) -> str:
    values = [str(value) for key, value in slurm.extra.items() if normalize_option_name(key) == name and value]
    return values[0] if values else ""


def list_requested_licenses(spec: JobSpec) -> dict[str, float]:
    """Return the licenses that a job requests (`extra: {licenses: "matlab:2"}`), as TRES of the whole job."""
    text = _get_extra_option(spec.cluster.slurm or Slurm(), "licenses")
    entries: Iterable[str] = filter(None, re.split(r"[,;|\s]+", text.strip("[]'")))
    pairs = [entry.replace("=", ":").partition(":") for entry in entries]
    return {
        f"license/{name.partition('@')[0]}": float(count or 1) for name, _, count in pairs if (count or "1").isdigit()
    }
