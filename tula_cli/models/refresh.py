"""The cost of refreshing the scaling factors: how often, and how long if no probe has timed it."""

from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING

from tula_cli.run.records.probes import Measured
from tula_cli.spec.ags import Every
from tula_cli.spec.job import JobSpec

if TYPE_CHECKING:
    from tula_cli.models.choice.columns import Floats, Ints


def compute_small_batch_size(spec: JobSpec, batch: int) -> int:
    """Return b_small of a refresh at a global batch: the batch the learning rate was tuned for, at most a quarter of it.

    Where that is not below the batch there is nothing to scale: AGS then is the identity, and does not refresh.
    """
    if spec.ags.b_small != "auto":
        return min(spec.ags.b_small, batch)
    reference = spec.train.reference_batch
    return batch if batch <= reference else max(1, min(reference, batch // 4))


def has_separate_refreshes(spec: JobSpec, batch: int) -> bool:
    """Return whether some steps at a global batch take a refresh that others do not."""
    ags = spec.ags.resolved()
    return spec.train.facts.refreshes and not ags.each_step and compute_small_batch_size(spec, batch) < batch


def compute_max_samples_drawn(spec: JobSpec, batch: int, *, available: int, world: int) -> int:
    """Return the most samples that one rank gives to a refresh at a global batch; 1 where none takes any.

    Args:
        spec: the job.
        batch: global batch.
        available: samples of a rank's micro-batch.
        world: ranks.
    """
    small = compute_small_batch_size(spec, batch)
    by_norms = world > 1 and spec.ags.resolved().source == "local_norms"
    if not spec.train.facts.scales or by_norms or small >= batch or available < 1:
        return 1
    ranks = min(world, ceil(small / available))  # as `draw_counts` of the optimizer shares it out
    return ceil(min(small, ranks * available) / ranks)


def count_refreshes(spec: JobSpec, *, batch: int, steps: int) -> int:
    """Return the refreshes of a whole run, apart from those that are a part of each step.

    Args:
        spec: epochs, method and refresh interval.
        batch: samples an optimizer step over all GPUs.
        steps: optimizer steps an epoch.
    """
    if not has_separate_refreshes(spec, batch):
        return 0
    refresh = spec.ags.resolved().refresh
    epochs = spec.train.epochs_at_most
    return epochs * steps // refresh.every if isinstance(refresh, Every) else epochs


def compute_refresh_seconds(
    spec: JobSpec, probes: Iterable[Measured], *, nodes: "Ints", local_batch: "Ints", batch: "Ints"
) -> "Floats":
    """Return what one refresh adds to a step at each of many configurations, shape (n,); nan where no probe tells.

    That of the probe whose rank took about as many samples for it, on about as many nodes. Where the probes' batches
    were all too small to scale, the step without synchronisation of the probe with about as many samples: a refresh is
    a forward and a backward pass.

    Args:
        spec: the job.
        probes: those there are.
        nodes, local_batch, batch: of the configurations, shape (n,).
    """
    import numpy as np

    from tula_cli.models.choice.columns import compute_by_value, find_nearest
    from tula_cli.models.choice.columns import compute_ratios as doublings

    refreshed = compute_by_value(lambda size: has_separate_refreshes(spec, size), batch)
    if not refreshed.any():
        return np.zeros(len(batch))
    probes_, accumulate = list(probes), spec.train.accumulate
    share = np.minimum(
        compute_by_value(lambda size: compute_small_batch_size(spec, size), batch),
        np.maximum(1, local_batch // accumulate),
    )
    timed = [
        probe for probe in probes_ if has_separate_refreshes(spec, probe.batch) and probe.overheads.refresh is not None
    ]
    local = [probe for probe in probes_ if _get_time_without_sync(probe) is not None]
    if timed:
        unlike = (
            doublings([_count_samples_per_rank(spec, probe.batch, probe.local_batch) for probe in timed], share),
            doublings([probe.nodes for probe in timed], nodes),
            doublings([probe.local_batch for probe in timed], local_batch),
        )
        took = np.array([probe.overheads.refresh for probe in timed], dtype=float)[find_nearest(*unlike)]
    elif local:
        alike = find_nearest(doublings([probe.local_batch for probe in local], share))
        took = np.array([_get_time_without_sync(probe) for probe in local], dtype=float)[alike]
    else:
        took = np.full(len(batch), np.nan)
    return np.where(refreshed, took, 0.0)


def _get_time_without_sync(probe: Measured) -> float | None:
    """Return a step without synchronisation, which one GPU's is in any case; None where it was not measured."""
    if probe.compute_time is None and probe.nodes * probe.gpus_per_node == 1:
        from tula_cli.models.time.noise import (
            compute_trimmed_mean,  # numpy, which the commands that only look have no time for
        )

        return compute_trimmed_mean(probe.step_times)
    return probe.compute_time


def is_refresh_time_unknown(spec: JobSpec, probes: Iterable[Measured]) -> bool:
    """Return whether some steps take a refresh, and no probe tells what that is."""
    apart_from_steps = spec.train.facts.refreshes and not spec.ags.resolved().each_step
    return apart_from_steps and all(p.overheads.refresh is None and _get_time_without_sync(p) is None for p in probes)


def _count_samples_per_rank(spec: JobSpec, batch: int, local_batch: int) -> int:
    """Return the samples of one rank that takes part in a refresh."""
    return min(compute_small_batch_size(spec, batch), max(1, local_batch // spec.train.accumulate))
