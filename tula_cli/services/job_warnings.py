"""Warnings before a job runs: unlikely combinations of settings, and shared memory of data loaders."""

from collections.abc import Iterator, Mapping, Sequence

from tula_cli.diagnostics import Diagnostic
from tula_cli.presets import NORMALISING_OPTIMIZERS
from tula_cli.run.records.inspections import Inspection
from tula_cli.services import messages
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MAX_AUTO_WORKERS, MIN_AUTO_WORKERS
from tula_cli.words import format_count

# --- Settings that tula chooses


def describe_loader_and_scaling(spec: JobSpec, inspection: Inspection | None) -> tuple[str, ...]:
    """Return a line on the data loader and one on gradient scaling, if the job leaves them to tula."""
    loader_lines = _describe_loader(spec, inspection) if spec.workload.takes_workers else ()
    return (*loader_lines, *_describe_scaling(spec))


def _describe_loader(spec: JobSpec, inspection: Inspection | None) -> Iterator[str]:
    """Yield the number of data-loader processes that `train.workers: auto` resolves to."""
    cluster, assigner = spec.cluster, spec.cluster.backend.core_assigner
    if spec.train.workers != "auto" or not (assigner or inspection):
        return
    ranks = [nodes * cluster.gpus_per_node for nodes in spec.search.nodes]
    fewest, _ = count_loader_processes(spec, inspection, ranks=max(ranks))
    _, most = count_loader_processes(spec, inspection, ranks=min(ranks))
    cpus = cluster.slurm.cpus_per_task if cluster.slurm is not None else None
    if assigner:
        why = f"cluster.slurm.cpus_per_task: {cpus}" if cpus else f"from the cores that {assigner} assigns"
    else:
        assert inspection is not None
        why = f"from the rank's share of {format_count(inspection.cpus, 'core')}"
    number = str(most) if fewest == most else f"{fewest} to {most}"
    yield f"data loader: {number} processes per rank, {why} (train.workers: auto)"


def _describe_scaling(spec: JobSpec) -> Iterator[str]:
    """Yield a line if gradient scaling is applied to the update rather than to the gradient."""
    name = spec.workload.optimizer_name
    if name is not None and spec.effective_ags is not None and spec.effective_ags.apply_to == "update":
        why = f", because {name} normalises its gradients" if name in NORMALISING_OPTIMIZERS else ""
        yield f"train.method {spec.train.method} scales the updates of {name} instead of its gradients{why} (ags.apply_to: update)"


def count_loader_processes(spec: JobSpec, inspection: Inspection | None, *, ranks: int) -> tuple[int, int]:
    """Return the minimum and maximum number of data-loader processes per rank, with `ranks` ranks on a machine."""
    train, slurm = spec.train, spec.cluster.slurm
    if train.workers != "auto":
        return train.workers, train.workers
    if not spec.cluster.backend.core_assigner:
        cores = inspection.cpus / ranks if inspection else None
    else:
        cores = slurm.cpus_per_task if slurm else None
    return (train.count_loaders(cores),) * 2 if cores else (MIN_AUTO_WORKERS, MAX_AUTO_WORKERS)


# --- Unlikely combinations of settings


def warn_unlikely_settings(spec: JobSpec, inspection: Inspection | None) -> list[Diagnostic]:
    """Return warnings about job settings that are valid one by one but unlikely in combination."""
    warnings, epochs, workers = [], spec.train.epochs, spec.train.workers
    if late_milestones := [at for at in spec.schedule.milestones if at >= epochs]:
        warnings.append(messages.milestones_after_end(milestones=late_milestones, epochs=epochs))
    if (warmup := spec.workload.warmup_epochs) > epochs:
        warnings.append(messages.warmup_after_end(warmup_epochs=warmup, epochs=epochs))
    half_life, reference = spec.optimizer.beta2_half_life, spec.train.reference_batch
    if isinstance(half_life, float) and half_life < reference:
        warnings.append(messages.beta2_half_life_below_batch(half_life=half_life, reference_batch=reference))
    if inspection is None:
        return warnings
    warnings += warn_large_reference_batch(spec, inspection.dataset_size)
    processes = 0 if workers == "auto" else workers * spec.cluster.gpus_per_node
    if workers != "auto" and not spec.cluster.backend.core_assigner and processes > 2 * inspection.cpus:
        warnings.append(messages.too_many_loader_processes(workers=workers, processes=processes, cores=inspection.cpus))
    return warnings


def warn_large_reference_batch(spec: JobSpec, dataset_size: int) -> list[Diagnostic]:
    """Return a warning if no training of tula's own loop can use the reference batch, from which it scales learning rates."""
    reference = spec.train.reference_batch
    if spec.script is not None or reference <= dataset_size:
        return []
    return [messages.reference_batch_exceeds_dataset(reference_batch=reference, dataset_size=dataset_size)]


def warn_ags_on_one_rank(spec: JobSpec) -> list[Diagnostic]:
    """Return a warning if the search has runs of a script with one rank, whose gradients tula cannot scale."""
    single_rank_nodes = [nodes for nodes in spec.search.nodes if nodes * spec.cluster.gpus_per_node == 1]
    if spec.script is None or spec.effective_ags is None or not single_rank_nodes:
        return []
    return [
        messages.ags_on_one_rank(
            nodes=single_rank_nodes, other_nodes=[n for n in spec.search.nodes if n not in single_rank_nodes]
        )
    ]


# --- Shared memory of data loaders


def check_shared_memory(
    spec: JobSpec, inspection: Inspection | None, jobs: Mapping[int, Sequence[int]], *, free: int | None
) -> tuple[Diagnostic, ...]:
    """Return a problem if every job has batches too large for /dev/shm: the processes that write them are killed (SIGBUS).

    Args:
        inspection: provides the size of a sample; without it, or with a script's data loader, nothing is checked.
        jobs: map from number of nodes to ascending local batches.
        free: free bytes of /dev/shm on a node; None if unknown.
    """
    if inspection is None or not inspection.sample_bytes or free is None:
        return ()
    needs = []
    for nodes, local_batches in jobs.items():
        gpus = spec.cluster.gpus_per_node
        ranks = spec.cluster.backend.count_ranks_per_machine(nodes * gpus, gpus_per_node=gpus)
        if count_loader_processes(spec, inspection, ranks=ranks)[1]:
            size = local_batches[0]
            needs.append((ranks * (size // spec.train.accumulate) * inspection.sample_bytes, ranks, size))
    needed, ranks, size = min(needs, default=(0, 0, 0))
    if needed <= free:
        return ()
    return (messages.shared_memory_too_small(free_bytes=free, ranks=ranks, needed_bytes=needed, local_batch=size),)
