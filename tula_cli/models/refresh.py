"""Refreshes of the scaling factors: small-batch size, number of refreshes, and estimated duration if it was not measured."""

from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING

from tula_cli.run.records.probes import Measured
from tula_cli.spec.ags import Every
from tula_cli.spec.job import JobSpec

if TYPE_CHECKING:
    from tula_cli.models.choice.candidates import Floats, Ints


def compute_small_batch_size(spec: JobSpec, batch: int) -> int:
    """Return b_small of a refresh at a global batch, at most `batch`.

    It is `ags.b_small` if that is set, else the reference batch of the learning rate, at most a quarter of `batch`. If
    it equals `batch` (at or below the reference batch), there is nothing to scale: AGS is the identity and does not
    refresh.
    """
    if spec.ags.b_small != "auto":
        return min(spec.ags.b_small, batch)
    reference = spec.train.reference_batch
    return batch if batch <= reference else max(1, min(reference, batch // 4))


def has_separate_refreshes(spec: JobSpec, batch: int | None = None) -> bool:
    """Return whether some steps include a refresh that others do not, at a global batch or at any (None)."""
    is_separate = spec.train.training_method.refreshes and not spec.ags.fill_from_preset().refreshes_each_step
    return is_separate and (batch is None or compute_small_batch_size(spec, batch) < batch)


def compute_max_samples_drawn(spec: JobSpec, batch: int, *, available: int, world: int) -> int:
    """Return how many samples of its micro-batch a rank needs at most for a refresh of the AGS factors.

    1 if no small batch is drawn, so that the result is a lower bound of the micro-batch.

    Args:
        available: samples of a rank's micro-batch.
    """
    ags, small = spec.effective_ags, compute_small_batch_size(spec, batch)
    if ags is None or (world > 1 and ags.source == "local_norms") or small >= batch or available < 1:
        return 1
    ranks = min(world, ceil(small / available))  # the same distribution as `count_samples_per_rank` of the optimizer
    return ceil(min(small, ranks * available) / ranks)


def count_separate_refreshes(spec: JobSpec, *, batch: int, steps: int) -> int:
    """Return the number of refreshes of a training that add time to single steps; 0 if every step refreshes, or none.

    Args:
        batch: samples per optimizer step over all GPUs.
        steps: optimizer steps per epoch.
    """
    if not has_separate_refreshes(spec, batch):
        return 0
    refresh, epochs = spec.ags.fill_from_preset().refresh, spec.train.max_epochs
    return epochs * steps // refresh.every if isinstance(refresh, Every) else epochs


def compute_refresh_seconds(
    spec: JobSpec, probes: Iterable[Measured], *, nodes: "Ints", local_batch: "Ints", batch: "Ints"
) -> "Floats":
    """Return the seconds that one refresh adds to a step at each of many configurations, shape (n,); nan if unknown.

    Taken from the probe whose ranks drew the most similar number of samples, on a similar number of nodes. If the
    batches of all probes were too small to scale, the step without synchronisation of the probe with the most similar
    number of samples is used, because a refresh is a forward and a backward pass.

    Args:
        nodes, local_batch, batch: of the configurations, shape (n,).
    """
    import numpy as np

    from tula_cli.models.choice.candidates import (
        apply_to_distinct_values,
        compute_ratio_distances,
        find_nearest_columns,
    )

    refreshed = apply_to_distinct_values(lambda size: has_separate_refreshes(spec, size), batch)
    if not refreshed.any():
        return np.zeros(len(batch))
    all_probes, accumulate = list(probes), spec.train.accumulate
    share = np.minimum(
        apply_to_distinct_values(lambda size: compute_small_batch_size(spec, size), batch),
        np.maximum(1, local_batch // accumulate),
    )
    timed = [
        probe
        for probe in all_probes
        if has_separate_refreshes(spec, probe.batch) and probe.overheads.refresh is not None
    ]
    local = [probe for probe in all_probes if _get_time_without_sync(probe) is not None]
    if timed:
        differences = (
            compute_ratio_distances(
                [_count_samples_per_rank(spec, probe.batch, probe.local_batch) for probe in timed], share
            ),
            compute_ratio_distances([probe.nodes for probe in timed], nodes),
            compute_ratio_distances([probe.local_batch for probe in timed], local_batch),
        )
        refresh_seconds = np.array([probe.overheads.refresh for probe in timed], dtype=float)[
            find_nearest_columns(*differences)
        ]
    elif local:
        nearest_probes = find_nearest_columns(compute_ratio_distances([probe.local_batch for probe in local], share))
        refresh_seconds = np.array([_get_time_without_sync(probe) for probe in local], dtype=float)[nearest_probes]
    else:
        refresh_seconds = np.full(len(batch), np.nan)
    return np.where(refreshed, refresh_seconds, 0.0)


def _get_time_without_sync(probe: Measured) -> float | None:
    """Return the time of a step without synchronisation, which is any step of a single GPU; None if not measured."""
    if probe.compute_time is None and probe.nodes * probe.gpus_per_node == 1:
        # imports numpy, which would slow down commands that only display
        from tula_cli.models.time.noise import compute_trimmed_mean

        return compute_trimmed_mean(probe.step_times)
    return probe.compute_time


def is_refresh_time_unknown(spec: JobSpec, probes: Iterable[Measured]) -> bool:
    """Return whether some steps include a separate refresh and no probe allows its duration to be estimated."""
    return has_separate_refreshes(spec) and all(
        p.overheads.refresh is None and _get_time_without_sync(p) is None for p in probes
    )


def _count_samples_per_rank(spec: JobSpec, batch: int, local_batch: int) -> int:
    """Return the samples drawn by one rank that takes part in a refresh."""
    return min(compute_small_batch_size(spec, batch), max(1, local_batch // spec.train.accumulate))
