"""What the nodes of a cluster told, read: what keeps jobs from running on them, and what spoils measurements."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tula_cli.run.directory import RunDir
from tula_cli.run.records.cluster_reports import ClusterReport, NodeReport
from tula_cli.run.records.tasks import CheckTask
from tula_cli.services.profiling.loader_memory import HOW_TO_GET_SHARED
from tula_cli.spec.job import JobSpec
from tula_cli.words import amount, plural

MAX_FILE_LAG = {"local": 2.0, "slurm": 30.0}
"""Seconds that a file of another node may take to be seen here (NFS keeps what it knows of a folder for that long)."""
SLOW_INSIDE = 8 * 32e9
"""Bits a second between two GPUs of one node, in each direction: PCIe 4.0 with 16 lanes. NVLink is faster from V100 on."""
SMALL_SHARED = 2**30
"""Bytes of /dev/shm below which large batches of a few loader processes do not fit; containers have 64 MiB unasked."""
MAX_CLOCK_OFFSET = 1.0
"""Seconds by which the clocks of two nodes may differ."""


def file_lag(scheduler: str) -> float:
    """Return the seconds that a file of another node may take to be seen here, by what the job runs on."""
    return MAX_FILE_LAG["local" if scheduler == "local" else "slurm"]


def silent_nodes(run: RunDir, report: ClusterReport) -> list[NodeReport]:
    """Return the nodes of which nothing that they wrote is seen here, although they say that they did."""
    ranks, signed_in = report.ranks // len(report.nodes), run.checks.signed_in(report.id)
    return [node for node in report.nodes if not node.write_error and node.node * ranks not in signed_in]


def node_problems(run: RunDir, task: CheckTask, report: ClusterReport) -> Iterator[str]:
    """Yield what keeps jobs from running on these nodes."""
    written, folder = run.checks.token(task.id), run.path.resolve()
    for node in report.nodes:
        if node.token != written:
            content = "another file" if node.token else "nothing"
            yield f"{node.host} reads {content} where {folder} has what was written here: it does not share that folder"
        if node.write_error:
            yield f"{node.host} cannot write into the run directory: {node.write_error}"
    for node in silent_nodes(run, report):
        yield f"what {node.host} wrote into {folder} is not seen here after {file_lag(task.spec.cluster.kind):g} s"
    yield from _dataset_problems(task, report)
    yield from _gpu_problems(task.spec, report)
    if report.network_error:
        yield f"the ranks cannot exchange tensors through {report.backend}: {report.network_error}"


def _dataset_problems(task: CheckTask, report: ClusterReport) -> Iterator[str]:
    without = [node.host for node in report.nodes if node.dataset is False]
    if without and not _is_yet_to_come(task):
        yield f"{list_hosts(without)} cannot read dataset.root, {_dataset_folder(task)}"


def _dataset_folder(task: CheckTask) -> Path:
    return Path(task.workdir, Path(task.spec.dataset.root).expanduser())


def _is_yet_to_come(task: CheckTask) -> bool:
    """Return whether the dataset is to be downloaded before the first job."""
    return task.spec.dataset.download and not os.access(_dataset_folder(task), os.R_OK)


def _gpu_problems(spec: JobSpec, report: ClusterReport) -> Iterator[str]:
    without = [node.host for node in report.nodes if not node.gpus]
    needed = spec.cluster.device == "cuda" or (spec.cluster.device == "auto" and len(without) < len(report.nodes))
    if not needed:
        return
    if without:
        yield f"torch sees no GPU on {list_hosts(without)}: check the driver, torch's CUDA version and how GPUs are asked for"
    for host, nodes in _by_host(report.nodes):
        ranks, gpus = sum(node.ranks for node in nodes), max(len(node.gpus) for node in nodes)
        if 0 < gpus < ranks:
            yield f"{ranks} ranks on {host} see {plural(gpus, 'GPU')}: each rank needs one of its own"
        else:
            yield from _shared_gpu_problems(nodes)


def _shared_gpu_problems(nodes: Iterable[NodeReport]) -> Iterator[str]:
    """Yield which ranks of a node were bound to one GPU, although there are enough."""
    for node in nodes:
        for ranks in node.shared_gpus:
            yield (
                f"ranks {', '.join(map(str, ranks))} of {node.host} would train on one GPU, of the {len(node.gpus)} that its"
                " ranks see: the scheduler binds them so (cluster.slurm.gpus, --gpu-bind)"
            )


def _by_host(nodes: Iterable[NodeReport]) -> Iterator[tuple[str, list[NodeReport]]]:
    """Yield the nodes of each host; on this machine all sets of ranks are on one."""
    for host, nodes_of_host in itertools.groupby(nodes, key=lambda node: node.host):
        yield host, list(nodes_of_host)


def node_warnings(task: CheckTask, report: ClusterReport) -> Iterator[str]:
    """Yield what spoils measurements, or what one would want to know."""
    aspects: dict[str, Callable[[NodeReport], str]] = {
        "GPU": lambda node: " + ".join(sorted(set(node.gpus))) or "none",
        "GPU driver": lambda node: node.driver or "none",
        "torch": lambda node: node.torch,
        "CUDA": lambda node: node.cuda or "none",
        "NCCL": lambda node: node.nccl or "none",
        "Python": lambda node: node.python,
    }
    for name, aspect in aspects.items():
        if differences := _differences(report.nodes, aspect):
            yield f"the nodes differ in {name}: {differences}"
    if report.inside and report.inside[-1].speed < SLOW_INSIDE:
        yield (
            f"two GPUs of {report.nodes[0].host} exchange {report.inside[-1].speed / 8e9:.1f} GB/s each way: that is no NVLink;"
            " where they have one, cluster.slurm.gpus: gpus_per_task hides GPUs of a node from each other"
        )
    for host, shared in {node.host: node.shared for node in report.nodes}.items():
        if shared is not None and shared < SMALL_SHARED:
            yield (
                f"{host} has {amount(shared)} free in /dev/shm, through which loader processes and NCCL hand data over:"
                f" {HOW_TO_GET_SHARED}; tula check tells which batches fit"
            )
    for node in report.nodes:
        if abs(node.clock_offset) > MAX_CLOCK_OFFSET:
            direction = "ahead of" if node.clock_offset > 0 else "behind"
            first_host = report.nodes[0].host
            yield f"the clock of {node.host} is {abs(node.clock_offset):.1f} s {direction} that of {first_host}; times in logs and results will be apart"  # fmt: skip
    if (
        task.spec.cluster.device == "auto"
        and task.spec.cluster.kind != "local"
        and not any(n.gpus for n in report.nodes)
    ):
        yield "torch sees no GPU on any node: jobs will run on the CPU (cluster.device: auto)"
    if _is_yet_to_come(task) and any(node.dataset is False for node in report.nodes):
        yield f"dataset.root, {_dataset_folder(task)}, is not there yet: it is downloaded before the first job"


def _differences(nodes: Sequence[NodeReport], aspect: Callable[[NodeReport], str]) -> str:
    """Return what is where in words, where it is not the same everywhere."""
    hosts_by_value: dict[str, list[str]] = {}
    for node in nodes:
        hosts_by_value.setdefault(aspect(node), []).append(node.host)
    return (
        ""
        if len(hosts_by_value) < 2
        else "; ".join(f"{value} on {list_hosts(hosts)}" for value, hosts in hosts_by_value.items())
    )


def list_hosts(hosts: Iterable[str]) -> str:
    """Return hosts in words, each once."""
    return ", ".join(dict.fromkeys(hosts))
