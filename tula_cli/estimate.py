"""`tula estimate`: how much memory one GPU needs at which local batch, without a GPU."""

from dataclasses import dataclass

from tula_cli.errors import Infeasible, JobFailed
from tula_cli.grid import batches
from tula_cli.launch import inspect
from tula_cli.models import memory
from tula_cli.models.memory import MemoryModel
from tula_cli.records import Footprint, Inspection
from tula_cli.search import feasible
from tula_cli.spec import JobSpec


@dataclass(frozen=True)
class EstimateReport:
    """Eq. 3 at some local batches, and the largest one that fits. All memory is bytes of one GPU."""

    inspection: Inspection
    rows: tuple[Footprint, ...]  # ascending by local batch
    needed: tuple[int, ...]  # the least memory of a device that each row runs in, libraries included
    fixed: int  # what no batch size changes
    per_sample: int  # what one more sample of the micro-batch takes
    capacity: int | None  # None where it is not known
    margin: float  # share of the capacity that is kept free
    largest_local_batch: int | None  # 0 where nothing fits; None where nothing bounds it

    @property
    def gpu(self) -> bool:
        """Whether the memory is a GPU's; else that of a process on the CPU."""
        return any(row.libraries for row in self.rows)

    def fits(self, row: Footprint) -> bool | None:
        """Whether a row leaves the margin free; None where the capacity is not known."""
        if self.capacity is None:
            return None
        return self.needed[self.rows.index(row)] <= self.capacity * (1 - self.margin)


def estimate(spec: JobSpec, *, capacity: int | None = None) -> EstimateReport:
    """Estimate the peak memory of one GPU.

    Args:
        spec: the job.
        capacity: bytes of one GPU, where it is not the one the inspection found.

    Raises:
        SpecError: the job cannot be built.
        JobFailed: the user's code fails, or reads numbers while it runs, so that it cannot be rehearsed without them.
    """
    inspection = inspect(spec)
    if not inspection.footprints:
        raise JobFailed(
            f"memory cannot be estimated: {inspection.estimate_error}",
            "tula profile measures it, and stops where it ends",
        )
    capacity = inspection.capacity if capacity is None else capacity
    margin = spec.search.memory_margin
    model = memory.fit(inspection.footprints, accumulate=spec.train.accumulate)
    largest = model.largest_local_batch(capacity, margin=margin)
    sizes = local_batches(spec, inspection, largest=largest)
    return EstimateReport(
        inspection=inspection,
        rows=tuple(predicted(model, size) for size in sizes),
        needed=tuple(model.needed(size) for size in sizes),
        fixed=round(model.fixed),
        per_sample=round(model.slope),
        capacity=capacity,
        margin=margin,
        largest_local_batch=largest,
    )


def predicted(model: MemoryModel, local_batch: int) -> Footprint:
    """Return Eq. 3 at one local batch, component by component."""
    micro_batch = local_batch / model.accumulate
    return Footprint(
        local_batch=local_batch,
        parameters=round(model.parameters),
        gradients=round(model.gradients),
        optimizer=round(model.optimizer),
        factors=round(model.factors),
        batch=round(model.batch_slope * micro_batch),
        activations=round(model.activations_at(micro_batch)),
        peak=model.peak(local_batch),
        libraries=round(model.libraries),
        reserved=model.reserved(local_batch),
        room=round(model.room * model.peak(local_batch)),
    )


def local_batches(spec: JobSpec, inspection: Inspection, *, largest: int | None) -> list[int]:
    """Return the local batches of the search, up to the first that does not fit.

    Args:
        spec: the job.
        inspection: tells the dataset's size.
        largest: the largest that fits; None for no bound.
    """
    try:
        configs = feasible(spec, dataset_size=inspection.dataset_size, max_local_batch=None)
        sizes = sorted({config.local_batch(spec.cluster.gpus_per_node) for config in configs})
    except Infeasible:  # tula check says so; memory can be told all the same
        sizes = batches(spec.train.accumulate, max(spec.train.accumulate, inspection.dataset_size))
    if largest is None:
        return sizes
    too_large = [size for size in sizes if size > largest]
    return [size for size in sizes if size <= largest] + too_large[:1]
