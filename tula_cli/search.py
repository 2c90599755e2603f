"""Which configurations to measure: the paper's full and partial search (III-A-2), and the sweep between them.

A probe is a number of nodes and a local batch; all local batches of one number of nodes are one job, ascending.
"""

from collections.abc import Callable, Mapping, Sequence

from tula_cli.errors import Infeasible
from tula_cli.grid import Config, candidates
from tula_cli.models import memory
from tula_cli.records import Inspection
from tula_cli.spec import JobSpec

ByNodes = Mapping[int, Sequence[int]]
"""Number of nodes (ascending) to local batches (ascending); no entry is empty."""


def probes(spec: JobSpec, *, dataset_size: int, max_local_batch: int | None) -> dict[int, tuple[int, ...]]:
    """Return what the spec's strategy measures: number of nodes to ascending local batches.

    A number of nodes on which no batch is feasible is left out.

    Args:
        spec: search and cluster are read.
        dataset_size: training samples; no batch is larger.
        max_local_batch: the largest local batch that fits one GPU; None where memory sets no bound.

    Raises:
        Infeasible: no batch is feasible on any number of nodes; names the bound.
    """
    found = feasible(spec, dataset_size=dataset_size, max_local_batch=max_local_batch)
    by_nodes: dict[int, list[int]] = {}
    for config in found:
        by_nodes.setdefault(config.nodes, []).append(config.local_batch(spec.cluster.gpus_per_node))
    chosen = STRATEGIES[spec.search.strategy](by_nodes)
    return {nodes: tuple(sorted(local_batches)) for nodes, local_batches in sorted(chosen.items())}


def largest_local_batch(spec: JobSpec, inspection: Inspection) -> int | None:
    """Return the largest local batch that the memory estimate lets fit, less the margin.

    Returns:
        0 where not even one sample fits, None where nothing bounds it.
    """
    if inspection.capacity is None or not inspection.footprints:
        return None
    model = memory.fit(inspection.footprints, accumulate=spec.train.accumulate)
    return model.largest_local_batch(inspection.capacity, margin=spec.search.memory_margin)


def feasible(spec: JobSpec, *, dataset_size: int, max_local_batch: int | None) -> list[Config]:
    """Return the candidates within all bounds, ordered by nodes, then batch.

    Raises:
        Infeasible: there is none; names the bound.
    """
    largest = min(dataset_size, spec.search.max_batch or dataset_size)
    found = _candidates(spec, max_batch=largest, max_local_batch=max_local_batch)
    if not found:
        raise _infeasible(spec, dataset_size=dataset_size, max_local_batch=max_local_batch)
    return found


def _candidates(spec: JobSpec, *, max_batch: int, max_local_batch: int | None) -> list[Config]:
    return candidates(
        spec.search.nodes,
        gpus_per_node=spec.cluster.gpus_per_node,
        min_batch=spec.search.min_batch,
        max_batch=max_batch,
        max_local_batch=max_local_batch,
        accumulate=spec.train.accumulate,
    )


def _infeasible(spec: JobSpec, *, dataset_size: int, max_local_batch: int | None) -> Infeasible:
    """Name the bound that leaves nothing: the dataset, the division among the GPUs, or memory."""
    search = spec.search
    if search.min_batch > dataset_size:
        return Infeasible(
            f"the smallest batch, {search.min_batch}, is larger than the dataset ({dataset_size} training samples)",
            f"lower search.min_batch to at most {dataset_size}",
        )
    largest = min(dataset_size, search.max_batch or dataset_size)
    divisible = _candidates(spec, max_batch=largest, max_local_batch=None)
    if not divisible:
        step = min(search.nodes) * spec.cluster.gpus_per_node * spec.train.accumulate
        return Infeasible(
            f"no batch {search.min_batch} x 2^k up to {largest} divides among {min(search.nodes)} nodes x"
            f" {spec.cluster.gpus_per_node} GPUs x {spec.train.accumulate} accumulation steps",
            f"set search.min_batch to a multiple of {step}, or search fewer nodes",
        )
    least = min(config.local_batch(spec.cluster.gpus_per_node) for config in divisible)
    return Infeasible(
        f"out of memory before anything ran: at most {max_local_batch} samples fit one GPU, the smallest local batch is"
        f" {least}",
        "search more nodes, lower search.min_batch, or use train.accumulate, train.activation_checkpointing or"
        " train.precision: bf16",
    )


def _full(by_nodes: ByNodes) -> dict[int, set[int]]:
    """Every candidate."""
    return {nodes: set(local_batches) for nodes, local_batches in by_nodes.items()}


def _partial(by_nodes: ByNodes) -> dict[int, set[int]]:
    """The four corners: smallest and largest batch on the fewest and on the most nodes."""
    return {nodes: {by_nodes[nodes][0], by_nodes[nodes][-1]} for nodes in (min(by_nodes), max(by_nodes))}


def _sweep(by_nodes: ByNodes) -> dict[int, set[int]]:
    """Every batch on the fewest nodes, the smallest on the others, and the largest on the most."""
    chosen = {nodes: {local_batches[0]} for nodes, local_batches in by_nodes.items()}
    chosen[max(by_nodes)].add(by_nodes[max(by_nodes)][-1])
    chosen[min(by_nodes)] = set(by_nodes[min(by_nodes)])
    return chosen


STRATEGIES: Mapping[str, Callable[[ByNodes], dict[int, set[int]]]] = {
    "full": _full,
    "partial": _partial,
    "sweep": _sweep,
}
