"""Whether a node has the memory that data takes on its way to the ranks: in /dev/shm, and in all."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tula_cli.host.capacity import machine_memory, shared_memory
from tula_cli.models.memory.host_memory import DataMemory, data_memory
from tula_cli.run.directory import RunDir
from tula_cli.run.records.cluster_reports import ClusterReport
from tula_cli.run.records.inspections import Inspection
from tula_cli.services.profiling.computing import loader_process_range
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import Slurm, option
from tula_cli.words import amount, plural

HOW_TO_GET_SHARED = "a container gets more by --shm-size or --ipc=host"
HOW_TO_NEED_LESS = "fewer train.workers, or more train.accumulate, take less"


@dataclass(frozen=True)
class NodeMemory:
    """What a node has for the ranks' data. Bytes; None where that is not known."""

    shared: int | None  # of /dev/shm
    memory: int | None
    source: str = "the machine has"  # of `memory`, in words

    @classmethod
    def of_nodes(cls, spec: JobSpec, run: RunDir | None) -> "NodeMemory":
        """Return this machine's, or of SLURM's nodes what the job asks for and the newest check of them has told."""
        if spec.cluster.kind == "local":
            return cls(shared_memory(), machine_memory())
        report = None if run is None else _newest_check(run)
        shared = min((node.shared for node in report.nodes if node.shared), default=None) if report else None
        if (requested := _requested_memory(spec)) is not None:
            return cls(shared, requested, "cluster.slurm asks for")
        return cls(shared, min(node.memory for node in report.nodes) if report else None, "a node has")


def _newest_check(run: RunDir) -> ClusterReport | None:
    reports = [(run.checks.report(task.id), int(task.id.rpartition("-")[2])) for task in run.check_tasks()]
    return max(((number, report) for report, number in reports if report), key=lambda pair: pair[0], default=(0, None))[
        1
    ]


def _requested_memory(spec: JobSpec) -> int | None:
    """Return the bytes of a node that the job asks SLURM for; None where it asks for all, or for none in particular."""
    slurm, ranks = spec.cluster.slurm or Slurm(), spec.cluster.gpus_per_node
    extra = {option(name): str(value) for name, value in slurm.extra.items()}
    forms = (
        (slurm.memory, 1),
        (extra.get("mem-per-gpu"), ranks),
        (extra.get("mem-per-cpu"), (slurm.cpus_per_task or 0) * ranks),
    )
    return next((size * count for text, count in forms if count and (size := _parse_size(text)) is not None), None)


def _parse_size(text: str | None) -> int | None:
    """Return the bytes of sbatch's --mem; None where all of a node's is asked for."""
    match = re.match(r"(\d+)([KMGT]?)", (text or "").upper())
    if match is None or int(match[1]) == 0:
        return None
    factor: int = 1024 ** (1 + "KMGT".index(match[2] or "M"))
    return int(match[1]) * factor


@dataclass(frozen=True)
class _Job:
    """What the data of one measuring job takes on a node. Bytes."""

    ranks: int  # of a node
    workers: int  # of a rank, at most
    processes: int  # what the ranks hold before they have any data
    data: dict[int, DataMemory]  # by local batch, ascending

    def total(self, data: DataMemory) -> int:
        return self.processes + data.total

    @property
    def description(self) -> str:
        return f"{plural(self.ranks, 'rank')}, {self.workers} train.workers each"


def check_memory(
    spec: JobSpec, inspection: Inspection | None, jobs: Mapping[int, Sequence[int]], room: NodeMemory
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what of a search cannot run for want of a node's memory, and what of it may not, in words.

    Args:
        spec: the job.
        inspection: tells the size of a sample; where there is none, or a script's own loader, nothing is known.
        jobs: number of nodes to ascending local batches.
        room: what a node has.
    """
    if inspection is None or not inspection.sample_bytes or not jobs:
        return (), ()
    planned = [_measuring_job(spec, inspection, nodes, sizes) for nodes, sizes in jobs.items()]
    impossible = tuple(_impossible_problems(planned, room.shared))
    return impossible, () if impossible else (
        *_shared_memory_warnings(planned, room.shared),
        *_total_memory_warnings(planned, room),
    )


def _measuring_job(spec: JobSpec, inspection: Inspection, nodes: int, local_batches: Sequence[int]) -> _Job:
    cluster = spec.cluster
    ranks = cluster.gpus_per_node * (nodes if cluster.kind == "local" else 1)  # on this machine all are here
    workers = loader_process_range(spec, inspection, ranks=ranks)[1]
    on_gpu = cluster.device != "cpu" and (cluster.kind != "local" or inspection.device == "cuda")
    sizes = [size // spec.train.accumulate for size in local_batches]
    data = {
        size: data_memory(sizes[:end], sample=inspection.sample_bytes, ranks=ranks, workers=workers, on_gpu=on_gpu)
        for end, size in enumerate(local_batches, 1)
    }
    return _Job(ranks, workers, ranks * inspection.process, data)


def _impossible_problems(jobs: Sequence[_Job], room: int | None) -> Iterator[str]:
    """Yield that in no job even one batch of each rank fits: the processes that write it would be killed (SIGBUS)."""
    job = min(jobs, key=lambda job: min(data.batches for data in job.data.values()))
    size, least = min(job.data.items())
    if room is not None and job.workers and least.batches > room:
        yield (
            f"/dev/shm has {amount(room)} free, and one batch of each of {plural(job.ranks, 'rank')} takes"
            f" {amount(least.batches)} there at local batch {size}: {HOW_TO_GET_SHARED}; train.workers: 0 takes none"
        )


def _shared_memory_warnings(jobs: Sequence[_Job], room: int | None) -> Iterator[str]:
    excess = _find_excess(jobs, lambda _, data: data.shared, room)
    if excess is not None and room is not None:
        yield (
            f"from local batch {excess.first} on the data loaders may fill /dev/shm, which has {amount(room)} free: they keep"
            f" up to {amount(excess.most.shared)} there at local batch {excess.size} ({excess.job.description}); {HOW_TO_GET_SHARED}; {HOW_TO_NEED_LESS}"
        )


def _total_memory_warnings(jobs: Sequence[_Job], room: NodeMemory) -> Iterator[str]:
    excess = _find_excess(jobs, _Job.total, room.memory)
    if excess is not None and room.memory is not None:
        pinned = f", {amount(excess.most.pinned)} pinned for the GPUs" if excess.most.pinned else ""
        yield (
            f"from local batch {excess.first} on the ranks may take more than the {amount(room.memory)} that {room.source},"
            f" beside the model: up to {amount(excess.job.total(excess.most))} at local batch {excess.size} ({excess.job.description};"
            f" {amount(excess.most.shared)} in /dev/shm{pinned}); {HOW_TO_NEED_LESS}"
        )


@dataclass(frozen=True)
class _Excess:
    """Where more is needed than there is."""

    first: int  # the smallest local batch at which it is
    job: _Job  # that needs most
    size: int  # the local batch at which it does
    most: DataMemory


def _find_excess(jobs: Sequence[_Job], need: Callable[[_Job, DataMemory], int], room: int | None) -> _Excess | None:
    needs = [(need(job, data), size, job, data) for job in jobs for size, data in job.data.items()]
    beyond = [entry for entry in needs if room is not None and entry[0] > room]
    if not beyond:
        return None
    _, size, job, most = max(beyond, key=lambda entry: entry[0])
    return _Excess(min(entry[1] for entry in beyond), job, size, most)
