"""Warnings before a job runs: unlikely combinations of settings, precision on GPUs, and memory of data loaders."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tula_cli.diagnostics import Diagnostic
from tula_cli.host.machine import read_machine_memory, read_shared_memory
from tula_cli.models.memory.host_memory import DataMemory, estimate_data_memory
from tula_cli.presets import DIVIDING
from tula_cli.run.directory import RunDir
from tula_cli.run.records.inspections import ClusterReport, Inspection
from tula_cli.services import messages
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import FEWEST_WORKERS, MOST_WORKERS
from tula_cli.spec.slurm_options import Slurm, normalize_option_name
from tula_cli.spec.workload import get_workload
from tula_cli.words import format_count

# --- Computation on a GPU


def describe_computing(spec: JobSpec, inspection: Inspection | None) -> tuple[str, ...]:
    """Return one line per aspect of how the job computes; GPU settings only if the job may run on a GPU.

    Args:
        spec: the job.
        inspection: inspection of its model and dataset; None if there is none yet.
    """
    if spec.script is not None:  # how it computes is its own, and its loader's processes too without {workers}
        return tuple(_describe_loader(spec, inspection)) if get_workload(spec).takes_workers else ()
    loader = (*_describe_loader(spec, inspection), *_describe_scaling(spec))
    if not _may_run_on_gpu(spec, inspection):
        return loader
    description = ", ".join(_describe_gpu_settings(spec, inspection))
    return (f"GPU settings: {description} (section train)", *loader)


def _describe_loader(spec: JobSpec, inspection: Inspection | None) -> Iterator[str]:
    """Yield the number of data-loader processes that `train.workers: auto` resolves to."""
    cluster = spec.cluster
    if spec.train.workers != "auto" or (cluster.kind == "local" and inspection is None):
        return
    ranks = [nodes * cluster.gpus_per_node for nodes in spec.search.nodes]
    fewest, most = (
        count_loader_processes(spec, inspection, ranks=max(ranks))[0],
        count_loader_processes(spec, inspection, ranks=min(ranks))[1],
    )
    cpus = cluster.slurm.cpus_per_task if cluster.slurm is not None else None
    if cluster.kind != "local":
        who = "SLURM" if cluster.kind == "slurm" else "the scheduler"
        why = f"cluster.slurm.cpus_per_task: {cpus}" if cpus else f"from the cores that {who} assigns"
    else:
        assert inspection is not None
        why = f"from its share of {format_count(inspection.cpus, 'core')}"
    number = str(most) if fewest == most else f"{fewest} to {most}"
    yield f"data loader: {number} processes per rank, {why} (train.workers: auto)"


def _describe_scaling(spec: JobSpec) -> Iterator[str]:
    """Yield a line if gradient scaling is applied to the update rather than to the gradient."""
    if spec.train.training_method.scales and spec.ags.resolved().apply_to == "update":
        name = spec.optimizer.name
        why = f", because {name} normalises its gradients" if name in DIVIDING else ""
        yield f"train.method {spec.train.method} scales the updates of {name} instead of its gradients{why} (ags.apply_to: update)"


def count_loader_processes(spec: JobSpec, inspection: Inspection | None, *, ranks: int) -> tuple[int, int]:
    """Return the minimum and maximum number of data-loader processes per rank, with `ranks` ranks on a machine."""
    train, slurm = spec.train, spec.cluster.slurm
    if train.workers != "auto":
        return train.workers, train.workers
    if spec.cluster.kind == "local":
        return (train.loaders(inspection.cpus / ranks),) * 2 if inspection else (FEWEST_WORKERS, MOST_WORKERS)
    cpus_per_task = slurm.cpus_per_task if slurm is not None else None
    return (train.loaders(cpus_per_task),) * 2 if cpus_per_task else (FEWEST_WORKERS, MOST_WORKERS)


def _may_run_on_gpu(spec: JobSpec, inspection: Inspection | None) -> bool:
    """Return whether the jobs may run on GPUs; the memory estimate assumes the same."""
    here = None if inspection is None else inspection.device
    return spec.cluster.backend.may_have_gpu(spec.cluster.device, here=here)


def _describe_gpu_settings(spec: JobSpec, inspection: Inspection | None) -> Iterator[str]:
    train = spec.train
    convolutional = inspection is None or inspection.convolutional
    yield "tf32 (float32 products and convolutions with a mantissa of 10 bits)"
    if convolutional:
        yield "channels_last (2-d convolutions on NVIDIA tensor cores)"
    if train.compile:
        yield "compile" if train.compile is True else f"compile ({train.compile})"
    if train.deterministic:
        yield "deterministic"
    else:
        yield "fastest cuDNN algorithms (NVIDIA)"


# --- Settings that are unlikely together


def warn_unlikely_settings(spec: JobSpec, inspection: Inspection | None) -> list[Diagnostic]:
    """Return warnings about job settings that are valid one by one but unlikely in combination."""
    warnings, epochs, workers = [], spec.train.epochs, spec.train.workers
    if late := [at for at in spec.schedule.milestones if at >= epochs]:
        warnings.append(messages.milestones_after_end(milestones=late, epochs=epochs))
    half_life, reference = spec.optimizer.beta2_half_life, spec.train.reference_batch
    if isinstance(half_life, float) and half_life < reference:
        warnings.append(messages.beta2_half_life_below_batch(half_life=half_life, reference_batch=reference))
    runs_here = inspection is not None and spec.cluster.kind == "local"
    if (
        inspection is not None
        and runs_here
        and workers != "auto"
        and workers * spec.cluster.gpus_per_node > 2 * inspection.cpus
    ):
        processes = workers * spec.cluster.gpus_per_node
        warnings.append(messages.too_many_loader_processes(workers=workers, processes=processes, cores=inspection.cpus))
    return warnings


def warn_ags_on_one_rank(spec: JobSpec) -> list[Diagnostic]:
    """Warn of node counts with one rank, where a script cannot scale gradients unless its loop takes a small batch."""
    alone = [nodes for nodes in spec.search.nodes if nodes * spec.cluster.gpus_per_node == 1]
    if spec.script is None or not spec.train.training_method.scales or not alone:
        return []
    return [messages.ags_on_one_rank(nodes=alone, other_nodes=[n for n in spec.search.nodes if n not in alone])]


# --- Memory of data loaders


@dataclass(frozen=True)
class NodeMemory:
    """The memory of a node that is available for the ranks' data. Bytes; None if unknown."""

    shared: int | None  # of /dev/shm
    memory: int | None
    source: str = "this machine has"  # of `memory`, in words

    @classmethod
    def of_nodes(cls, spec: JobSpec, run: RunDir | None) -> "NodeMemory":
        """Return the memory of this machine; on a cluster, the requested memory and that of the newest node check."""
        if spec.cluster.kind == "local":
            return cls(read_shared_memory(), read_machine_memory())
        report = None if run is None else _find_newest_check(run)
        shared = min((node.shared for node in report.nodes if node.shared), default=None) if report else None
        if (requested := _get_requested_memory(spec)) is not None:
            return cls(shared, requested, "cluster.slurm requests")
        return cls(shared, min(node.memory for node in report.nodes) if report else None, "a node has")


def _find_newest_check(run: RunDir) -> ClusterReport | None:
    reports = [(run.checks.report(task.id), int(task.id.rpartition("-")[2])) for task in run.check_tasks()]
    return max(((number, report) for report, number in reports if report), key=lambda pair: pair[0], default=(0, None))[
        1
    ]


def _get_requested_memory(spec: JobSpec) -> int | None:
    """Return the bytes per node that the job requests from SLURM; None if it requests all memory, or no amount."""
    slurm, ranks = spec.cluster.slurm or Slurm(), spec.cluster.gpus_per_node
    extra = {normalize_option_name(name): str(value) for name, value in slurm.extra.items()}
    forms = (
        (slurm.memory, 1),
        (extra.get("mem-per-gpu"), ranks),
        (extra.get("mem-per-cpu"), (slurm.cpus_per_task or 0) * ranks),
    )
    return next((size * count for text, count in forms if count and (size := _parse_memory(text)) is not None), None)


def _parse_memory(text: str | None) -> int | None:
    """Return the bytes of a value of sbatch's --mem; None for all memory of a node, or if it is no such value."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", (text or "").upper())
    if match is None or int(match[1]) == 0:
        return None
    factor: int = 1024 ** (1 + "KMGT".index(match[2] or "M"))
    return int(match[1]) * factor


@dataclass(frozen=True)
class _JobMemory:
    """The memory on a node that the data of one profiling job needs. Bytes."""

    ranks: int  # of a node
    workers: int  # of a rank, at most
    processes: int  # what the ranks hold before they have any data
    data: dict[int, DataMemory]  # by local batch, ascending

    def total(self, data: DataMemory) -> int:
        return self.processes + data.total


def check_memory(
    spec: JobSpec, inspection: Inspection | None, jobs: Mapping[int, Sequence[int]], room: NodeMemory
) -> tuple[tuple[Diagnostic, ...], tuple[Diagnostic, ...]]:
    """Return messages about what a search cannot run for lack of node memory, and about what it may not be able to run.

    Args:
        spec: the job.
        inspection: provides the size of a sample; without it, or with a script's data loader, nothing is checked.
        jobs: map from number of nodes to ascending local batches.
        room: available memory of a node.
    """
    if inspection is None or not inspection.sample_bytes or not jobs:
        return (), ()
    planned = [_make_measuring_job(spec, inspection, nodes, sizes) for nodes, sizes in jobs.items()]
    impossible = tuple(_list_impossible_problems(planned, room.shared))
    return impossible, () if impossible else (
        *_list_shared_memory_warnings(planned, room.shared),
        *_list_total_memory_warnings(planned, room),
    )


def _make_measuring_job(spec: JobSpec, inspection: Inspection, nodes: int, local_batches: Sequence[int]) -> _JobMemory:
    cluster = spec.cluster
    ranks = cluster.backend.count_ranks_per_machine(nodes * cluster.gpus_per_node, gpus_per_node=cluster.gpus_per_node)
    workers = count_loader_processes(spec, inspection, ranks=ranks)[1]
    on_gpu = _may_run_on_gpu(spec, inspection)
    sizes = [size // spec.train.accumulate for size in local_batches]
    data = {
        size: estimate_data_memory(
            sizes[:end], sample=inspection.sample_bytes, ranks=ranks, workers=workers, on_gpu=on_gpu
        )
        for end, size in enumerate(local_batches, 1)
    }
    return _JobMemory(ranks, workers, ranks * inspection.process, data)


def _list_impossible_problems(jobs: Sequence[_JobMemory], room: int | None) -> Iterator[Diagnostic]:
    """Yield a problem if one batch per rank does not fit in any job: processes that write it are killed (SIGBUS)."""
    job = min(jobs, key=lambda job: min(data.batches for data in job.data.values()))
    size, least = min(job.data.items())
    if room is not None and job.workers and least.batches > room:
        yield messages.shared_memory_too_small(
            free_bytes=room, ranks=job.ranks, needed_bytes=least.batches, local_batch=size
        )


def _list_shared_memory_warnings(jobs: Sequence[_JobMemory], room: int | None) -> Iterator[Diagnostic]:
    excess = _find_excess(jobs, lambda _, data: data.shared, room)
    if excess is not None and room is not None:
        yield messages.shared_memory_may_fill(
            first_local_batch=excess.first,
            free_bytes=room,
            needed_bytes=excess.most.shared,
            local_batch=excess.size,
            ranks=excess.job.ranks,
            workers=excess.job.workers,
        )


def _list_total_memory_warnings(jobs: Sequence[_JobMemory], room: NodeMemory) -> Iterator[Diagnostic]:
    excess = _find_excess(jobs, _JobMemory.total, room.memory)
    if excess is not None and room.memory is not None:
        yield messages.memory_may_run_out(
            first_local_batch=excess.first,
            available_bytes=room.memory,
            source=room.source,
            needed_bytes=excess.job.total(excess.most),
            local_batch=excess.size,
            ranks=excess.job.ranks,
            workers=excess.job.workers,
            shared_bytes=excess.most.shared,
            pinned_bytes=excess.most.pinned,
        )


@dataclass(frozen=True)
class _MemoryExcess:
    """The jobs and batches that need more memory than there is."""

    first: int  # the smallest local batch at which it is
    job: _JobMemory  # that needs most
    size: int  # the local batch at which it does
    most: DataMemory


def _find_excess(
    jobs: Sequence[_JobMemory], need: Callable[[_JobMemory, DataMemory], int], room: int | None
) -> _MemoryExcess | None:
    needs = [(need(job, data), size, job, data) for job in jobs for size, data in job.data.items()]
    beyond = [entry for entry in needs if room is not None and entry[0] > room]
    if not beyond:
        return None
    _, size, job, most = max(beyond, key=lambda entry: entry[0])
    return _MemoryExcess(min(entry[1] for entry in beyond), job, size, most)
