"""Moldable trainings: each job of the chain requests a range of nodes and uses what the scheduler grants.

The batch, the samples and their order are the same on every number of nodes, so the weights are those of a training on a
fixed number, up to the rounding of sums.
"""

import math
from collections.abc import Iterator

from tula_cli.errors import Infeasible, SpecError
from tula_cli.models.choice.grid import Config, list_batches
from tula_cli.models.estimator import Estimator
from tula_cli.models.out_of_memory import list_allowed_splits
from tula_cli.models.ramp_costs import compute_batch_divisor, list_nodes_named_by_stages
from tula_cli.options import NodeRange
from tula_cli.run.records.base import Market
from tula_cli.run.records.recommendations import Prediction, QueryLimits, Recommendation
from tula_cli.run.records.tasks import JobSize, Rung
from tula_cli.spec.job import JobSpec
from tula_cli.words import join_words

MIN_NODES_SHARE = 1 / 8
"""Smallest share of the upper bound of nodes on which a job starts if no lower bound is given. In simulations this value
gave the shortest turnaround: `benchmarks/moldable`."""


def require_moldable(spec: JobSpec) -> None:
    """Check that the jobs of a training can run on any number of nodes that the scheduler grants.

    Raises:
        SpecError: they cannot, for the reason in the message.
    """
    slurm = spec.cluster.slurm_options
    if slurm is None:
        why = f"only SLURM grants a number of nodes within a range, and cluster.kind is {spec.cluster.kind}"
    elif list_nodes_named_by_stages(spec) or (spec.train.stages is not None and spec.train.ramp_nodes == "auto"):
        why = "the stages of train.ramp have their own numbers of nodes (train.ramp_nodes)"
    elif spec.train.training_method.weights_depend_on_ranks:
        why = f"train.method: {spec.train.method} gives different weights on a different number of GPUs"
    elif slurm.gpus == "gpus_per_task" and spec.cluster.device != "cpu":
        why = "cluster.slurm.gpus: gpus_per_task fixes the number of tasks"
    else:
        return
    raise SpecError(f"[[--nodes]] cannot be a range: {why}", "give one number: [[--nodes]] 4")


def choose_job_sizes(
    spec: JobSpec,
    bounds: NodeRange,
    batch: int,
    *,
    estimator: Estimator | None,
    recommendation: Recommendation | None,
    market: Market = "on_demand",
) -> tuple[JobSize, ...]:
    """Return the numbers of nodes that each job of a training may use, ascending.

    They are those among which the batch divides and, if there are measurements, on which it fits the memory, in smaller
    micro-batches if necessary. A lower bound that is not given is the fewest nodes within the deadline of the
    recommendation, or without one a share of the upper bound. An upper bound that is not given is the largest number with
    the minimum efficiency of the recommendation, or else the recommended number.

    Args:
        estimator: the models; None without measurements.
        recommendation: the recommendation; None only if the upper bound is given.

    Raises:
        SpecError: the job cannot use what it is granted.
        Infeasible: there is no such number of nodes.
    """
    require_moldable(spec)
    limits = QueryLimits() if recommendation is None else recommendation.limits
    deadline = limits.deadline_hours if bounds.least is None else None
    efficiency = limits.min_efficiency if bounds.most is None else None
    max_nodes = bounds.most or _find_upper_bound(spec, recommendation)
    begins_at_share = bounds.least is None and deadline is None
    min_nodes = bounds.least or (
        math.ceil(MIN_NODES_SHARE * max_nodes) if begins_at_share and efficiency is None else 1
    )
    if min_nodes > max_nodes:
        raise Infeasible(
            f"the range contains no number of nodes: its lower bound is {min_nodes}, and its upper bound from the recommendation is {max_nodes}",
            f"give both bounds: [[--nodes]] {min_nodes}-{2 * min_nodes}",
        )
    node_counts = range(min_nodes, min(max_nodes, batch) + 1)  # on more nodes, some GPUs would have no sample
    counts = [nodes for nodes in node_counts if batch % compute_batch_divisor(spec, nodes) == 0]
    sizes = [size for nodes in counts for size in _list_job_size(spec, Config(nodes, batch), estimator, market)]
    if estimator is not None and (bounds.least is None or bounds.most is None):
        sizes = [
            size
            for size in sizes
            if _is_prediction_within_limits(size.prediction, deadline=deadline, efficiency=efficiency)
        ]
    if sizes and begins_at_share:
        sizes = [size for size in sizes if size.nodes >= MIN_NODES_SHARE * sizes[-1].nodes]
    if not sizes:
        where = f"only among {join_words(counts)} nodes, where this batch exceeds the memory or a limit of the recommendation"
        why = (
            f"batch {batch} can be divided {where}"
            if counts
            else f"batch {batch} is not divisible by their numbers of GPUs"
        )
        raise Infeasible(
            f"no number of nodes from {min_nodes} to {max_nodes} can be used: {why}",
            "widen the range, or choose another batch with [[--batch]]",
        )
    return tuple(sizes)


def _find_upper_bound(spec: JobSpec, recommendation: Recommendation | None) -> int:
    assert recommendation is not None, (
        "there is no recommendation, so give the upper bound, for example tula train --nodes 2-8"
    )
    limits = recommendation.limits
    if limits.min_efficiency is not None:
        return limits.nodes or limits.max_nodes or max(spec.search.nodes)
    return recommendation.choice.nodes


def _is_prediction_within_limits(
    prediction: Prediction | None, *, deadline: float | None, efficiency: float | None
) -> bool:
    """Return whether there is a prediction, and it is within the limits."""
    if prediction is None or (deadline is not None and prediction.hours > deadline):
        return False
    return efficiency is None or (prediction.scaling_efficiency or 0.0) >= efficiency


def _list_job_size(spec: JobSpec, config: Config, estimator: Estimator | None, market: Market) -> Iterator[JobSize]:
    """Yield a number of nodes with its micro-batch and out-of-memory fallbacks; nothing if no micro-batch fits."""
    accumulate, local_batch = spec.train.accumulate, config.compute_local_batch(spec.cluster.gpus_per_node)
    splits = _count_splits(spec, config, estimator)
    if splits is None:
        return
    if estimator is not None:
        first_rung, *smaller = estimator.list_oom_fallbacks(config.nodes, config.batch, market=market)
        if splits > 1 and splits not in first_rung.cut and (row := estimator.predict_split(config, splits, market)):
            first_rung = first_rung.model_copy(update={"cut": {**first_rung.cut, splits: row}})
    else:
        first_rung = Rung(batch=config.batch)
        smaller = [Rung(batch=batch) for batch in reversed(list_batches(spec.search.min_batch, config.batch - 1))]
    divisor = compute_batch_divisor(spec, config.nodes)
    fallbacks = [fallback for fallback in smaller if fallback.batch % divisor == 0]
    yield JobSize(
        nodes=config.nodes,
        micro_batch=local_batch // accumulate // splits,
        splits=splits,
        ladder=(first_rung, *fallbacks),
    )


def _count_splits(spec: JobSpec, config: Config, estimator: Estimator | None) -> int | None:
    """Return the fewest parts of each micro-batch that fit the memory; None if no number of them does."""
    if estimator is None or not estimator.describe_why_too_large(config):
        return 1
    for parts in list_allowed_splits(spec, config):
        if not estimator.describe_why_too_large(Config(config.nodes, config.batch // parts)):
            return parts
    return None
