"""What refreshing the scaling factors takes: how often, and how long where no probe has timed it."""

from collections.abc import Iterable
from math import ceil, log2

from tula_cli.run.records.probes import Measured
from tula_cli.spec.ags import Every
from tula_cli.spec.job import JobSpec


def small_batch(spec: JobSpec, batch: int) -> int:
    """Return b_small of a refresh at a global batch: the batch the learning rate was tuned for, at most a quarter of it.

    Where that is not below the batch there is nothing to scale: AGS then is the identity, and does not refresh.
    """
    if spec.ags.b_small != "auto":
        return min(spec.ags.b_small, batch)
    reference = spec.train.reference_batch
    return batch if batch <= reference else max(1, min(reference, batch // 4))


def apart(spec: JobSpec, batch: int) -> bool:
    """Return whether some steps at a global batch take a refresh that others do not."""
    ags = spec.ags.resolved()
    return spec.train.facts.refreshes and not ags.each_step and small_batch(spec, batch) < batch


def most_drawn(spec: JobSpec, batch: int, *, available: int, world: int) -> int:
    """Return the most samples that one rank gives to a refresh at a global batch; 1 where none takes any.

    Args:
        spec: the job.
        batch: global batch.
        available: samples of a rank's micro-batch.
        world: ranks.
    """
    small = small_batch(spec, batch)
    by_norms = world > 1 and spec.ags.resolved().source == "local_norms"
    if not spec.train.facts.scales or by_norms or small >= batch or available < 1:
        return 1
    ranks = min(world, ceil(small / available))  # as `draw_counts` of the optimizer shares it out
    return ceil(min(small, ranks * available) / ranks)


def count(spec: JobSpec, *, batch: int, steps: int) -> int:
    """Return the refreshes of a whole run, apart from those that are a part of each step.

    Args:
        spec: epochs, method and refresh interval.
        batch: samples an optimizer step over all GPUs.
        steps: optimizer steps an epoch.
    """
    if not apart(spec, batch):
        return 0
    refresh = spec.ags.resolved().refresh
    return spec.train.epochs * steps // refresh.every if isinstance(refresh, Every) else spec.train.epochs


def seconds(spec: JobSpec, probes: Iterable[Measured], *, nodes: int, local_batch: int, batch: int) -> float | None:
    """Return what one refresh adds to a step at a configuration; None where no probe tells.

    That of the probe whose rank took about as many samples for it, on about as many nodes. Where the probes' batches
    were all too small to scale, the step without synchronisation of the probe with about as many samples: a refresh is
    a forward and a backward pass.
    """
    if not apart(spec, batch):
        return 0.0
    known, share = list(probes), _share(spec, batch, local_batch)
    timed = [probe for probe in known if apart(spec, probe.batch) and probe.overheads.refresh is not None]
    if not timed:
        local = [probe for probe in known if _without_sync(probe) is not None]
        nearest = min(local, key=lambda probe: abs(log2(probe.local_batch / share)), default=None)
        return None if nearest is None else _without_sync(nearest)

    def unlike(probe: Measured) -> tuple[float, float, float]:
        return (
            abs(log2(_share(spec, probe.batch, probe.local_batch) / share)),
            abs(log2(probe.nodes / nodes)),
            abs(log2(probe.local_batch / local_batch)),
        )

    return min(timed, key=unlike).overheads.refresh


def _without_sync(probe: Measured) -> float | None:
    """Return a step without synchronisation, which one GPU's is in any case; None where it was not measured."""
    if probe.compute_time is None and probe.nodes * probe.gpus_per_node == 1:
        from tula_cli.models.time.noise import centre  # numpy, which the commands that only look have no time for

        return centre(probe.step_times)
    return probe.compute_time


def unknown(spec: JobSpec, probes: Iterable[Measured]) -> bool:
    """Return whether some steps take a refresh, and no probe tells what that is."""
    apart_from_steps = spec.train.facts.refreshes and not spec.ags.resolved().each_step
    return apart_from_steps and all(p.overheads.refresh is None and _without_sync(p) is None for p in probes)


def _share(spec: JobSpec, batch: int, local_batch: int) -> int:
    """Return the samples of one rank that takes part in a refresh."""
    return min(small_batch(spec, batch), max(1, local_batch // spec.train.accumulate))
