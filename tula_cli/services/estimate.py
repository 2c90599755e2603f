"""`tula check --memory`: the memory that one GPU needs at each local batch.

The estimate needs no GPU; probes of the job correct it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.cluster.inspection import Inspect, inspect
from tula_cli.cluster.slurm.first_job import reuse_stored_inspection
from tula_cli.errors import Infeasible, JobFailed, SpecError
from tula_cli.models import memory
from tula_cli.models.choice.grid import list_batches
from tula_cli.models.memory import DataMemory, MemoryModel, estimate_data_memory
from tula_cli.models.observations import describe_mixed_hardware, find_capacity
from tula_cli.run.directory import Run
from tula_cli.run.job_runs import select_runs
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Footprint, Measured, OutOfMemory, Result
from tula_cli.services.job_warnings import count_loader_processes
from tula_cli.services.search import list_feasible_candidates
from tula_cli.spec.job import JobSpec
from tula_cli.spec.kinds import parse_size
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import format_count


@dataclass(frozen=True)
class EstimateReport:
    """Eq. 3 at some local batches, and the largest local batch that fits. All memory is in bytes of one GPU."""

    inspection: Inspection
    rows: tuple[Footprint, ...]  # ascending by local batch
    needed: tuple[int, ...]  # per row, the smallest device memory that it runs in, including libraries
    fixed: int  # memory that does not depend on the batch size
    per_sample: int  # memory of one more sample in the micro-batch
    capacity: int | None  # None if unknown
    margin: float  # share of the capacity that is kept free
    largest_local_batch: int | None  # 0 if nothing fits; None without a bound
    gpu: bool  # whether the memory is that of a GPU; otherwise of a process on the CPU
    probes: int  # number of this job's probes that correct the estimate
    correction: str  # the probes and the model's error on them, in words; empty without probes
    ran: tuple[int, ...]  # local batches that ran in a probe on a GPU of this capacity
    smallest_oom: int | None  # smallest local batch out of memory on a GPU of this capacity; None if there is none
    data: DataMemory | None  # host memory of one rank's data at the largest row that fits; None if unknown
    loaders: int  # maximum data-loader processes per rank
    sharing: int | None  # GPUs that a sharded model is divided among (at most nodes); None if each has a copy

    @property
    def largest_row(self) -> int | None:
        """The largest local batch among the rows that fits, or may fit; None if none does."""
        return _find_largest_size([row.local_batch for row in self.rows], self.largest_local_batch)

    @property
    def probed(self) -> bool:
        """Whether probes have corrected the estimate."""
        return bool(self.probes)

    def fits(self, row: Footprint) -> bool | None:
        """Return whether a row leaves the margin free or ran in a probe; None if the capacity is not known."""
        if self.smallest_oom is not None and row.local_batch >= self.smallest_oom:
            return False
        if row.local_batch in self.ran:
            return True
        if self.capacity is None:
            return None
        return self.needed[self.rows.index(row)] <= self.capacity * (1 - self.margin)


def parse_capacity(name: str, value: int | str) -> int:
    """Return the bytes of a memory size that was given for the argument or option `name`.

    Raises:
        SpecError: the value is not a size above 0.
    """
    try:
        size: int = int(parse_size(value))  # type: ignore[call-overload]
    except ValueError as error:
        raise SpecError(f"{name}: {error}") from None
    if size <= 0:
        raise SpecError(f"{name}: must be a size above 0, got {value!r}", f"for example {name} 16GiB")
    return size


def estimate_memory_on_all_node_types(
    runs: Sequence[Run],
    *,
    capacity: int | None = None,
    node_type: str | None = None,
    inspector: Inspect,
) -> dict[str | None, EstimateReport]:
    """Estimate the peak memory of one GPU on each node type; the key is None for a job without node types.

    Args:
        runs: the runs of a job, whose probes correct the estimate; they need not exist yet.
        capacity, inspector: as in `estimate`.
        node_type: estimate only this node type.

    Raises:
        SpecError, JobFailed: as in `estimate`; or the job has no such node type.
    """
    return {
        run.type: estimate_memory(
            run.spec,
            capacity=capacity,
            results=run.read_results(),
            inspector=reuse_stored_inspection(inspector, run),
        )
        for run in select_runs(runs, node_type)
    }


def estimate_memory(
    spec: JobSpec, *, capacity: int | None = None, results: Sequence[Result] = (), inspector: Inspect | None = None
) -> EstimateReport:
    """Estimate the peak memory of one GPU; for a probed job, with the same model as `tula recommend`.

    Args:
        capacity: bytes of one GPU, if it differs from the GPU found by the probes or the inspection.
        inspector: None builds the model and the dataset.

    Raises:
        SpecError: the job cannot be built, or has a script.
        JobFailed: nothing was measured, and the user's code fails or reads values of tensors while it runs, so that a
            fake-tensor run is not possible.
    """
    if spec.script is not None:
        raise SpecError(
            "the memory of a script cannot be estimated, because tula cannot build its model",
            "run tula profile to measure the memory; tula recommend --explain then shows the memory for each batch",
        )
    inspection = (inspector or inspect)(spec)
    probed = _ProbedMemory.from_results(results, capacity=capacity)
    if not inspection.footprints and not probed.probes:
        raise JobFailed(
            f"memory cannot be estimated: {inspection.estimate_error}",
            "run tula profile, which measures the memory and stops at the first batch that does not fit",
        )
    ranks = spec.max_ranks
    model = memory.fit_memory_model(
        [*probed.probes, *inspection.footprints], accumulate=spec.train.accumulate, sharded=spec.train.is_sharded
    ).adapt_to_ranks(ranks)
    capacity = find_capacity(spec, probed.probes, inspection) if capacity is None else capacity
    largest = probed.correct_largest_local_batch(
        model.compute_largest_local_batch(capacity, margin=MEMORY_MARGIN), accumulate=spec.train.accumulate
    )
    sizes = list_local_batches(spec, inspection, largest=largest)
    gpu = any(probe.environment.device == "cuda" for probe in probed.probes)
    gpu = gpu or any(row.memory.libraries for row in inspection.footprints)
    processes = count_loader_processes(spec, inspection, ranks=spec.cluster.gpus_per_node)[1]
    return EstimateReport(
        inspection=inspection,
        rows=tuple(model.compute_footprint(size) for size in sizes),
        needed=tuple(model.compute_needed_memory(size) for size in sizes),
        fixed=round(model.fixed_bytes),
        per_sample=round(model.bytes_per_sample),
        capacity=capacity,
        margin=MEMORY_MARGIN,
        largest_local_batch=largest,
        gpu=gpu,
        probes=len(probed.probes),
        correction=probed.describe_basis(model, inspection),
        ran=tuple(probed.ran),
        smallest_oom=probed.smallest_oom,
        data=_estimate_data_memory(spec, inspection, _find_largest_size(sizes, largest), processes, gpu=gpu),
        loaders=processes,
        sharing=ranks if spec.train.is_sharded else None,
    )


def _find_largest_size(sizes: Sequence[int], largest: int | None) -> int | None:
    return max((size for size in sizes if largest is None or size <= largest), default=None)


def _estimate_data_memory(
    spec: JobSpec, inspection: Inspection, size: int | None, processes: int, *, gpu: bool
) -> DataMemory | None:
    if size is None or not inspection.sample_bytes:
        return None
    micro_batch = size // spec.train.accumulate
    return estimate_data_memory([micro_batch], sample=inspection.sample_bytes, ranks=1, workers=processes, on_gpu=gpu)


@dataclass(frozen=True)
class _ProbedMemory:
    probes: Sequence[Measured]
    ran: Sequence[int]  # local batches that ran on a GPU of the requested capacity
    smallest_oom: int | None  # smallest local batch out of memory on such a GPU; None if there is none
    unusable: str  # why the existing probes cannot be used; else empty

    @classmethod
    def from_results(cls, results: Sequence[Result], *, capacity: int | None) -> "_ProbedMemory":
        """Sort results into probes that ran and those that were out of memory.

        `capacity` is the bytes of the requested GPU, if it is not the GPU of the probes.
        """
        probes = [result for result in results if isinstance(result, Measured)]
        ooms = [result.local_batch for result in results if isinstance(result, OutOfMemory)]
        if unusable := describe_mixed_hardware(probes):
            return cls([], [], None, unusable)
        if capacity is not None and all(probe.capacity != capacity for probe in probes):
            return cls(probes, [], None, "")  # out-of-memory and successful probes of another GPU do not transfer
        return cls(probes, sorted({probe.local_batch for probe in probes}), min(ooms, default=None), "")

    def correct_largest_local_batch(self, estimate: int | None, *, accumulate: int) -> int | None:
        """Return the largest local batch that fits; results of probes take precedence over the model's `estimate`."""
        below = None if self.smallest_oom is None else (self.smallest_oom - 1) // accumulate * accumulate
        bounds = [bound for bound in (estimate, below) if bound is not None]
        if not bounds:
            return None
        return max([min(bounds), *(size for size in self.ran if below is None or size <= below)])

    def describe_basis(self, model: MemoryModel, inspection: Inspection) -> str:
        """Describe what the figures are based on; empty if there are no probes."""
        if self.unusable:
            return f"not corrected by probes: {self.unusable}"
        sentences = []
        if self.probes:
            sizes = sorted({probe.local_batch for probe in self.probes})
            span = f"local batches {sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"local batch {sizes[0]}"
            count = format_count(len(self.probes), "probe")
            source = f"corrected by {count}" if inspection.footprints else f"from {count} alone"
            error_text = "" if model.error is None else f"; median error of the peak memory {100 * model.error:.1f} %"
            sentences.append(f"{source} of this job ({span}{error_text})")
        if self.smallest_oom is not None:
            sentences.append(f"a local batch of {self.smallest_oom} ran out of memory")
        return "; ".join(sentences)


def list_local_batches(spec: JobSpec, inspection: Inspection, *, largest: int | None) -> list[int]:
    """Return the local batches of the search, up to and including the first that does not fit.

    Args:
        largest: the largest local batch that fits; None for no bound.
    """
    try:
        configs = list_feasible_candidates(spec, dataset_size=inspection.dataset_size, max_local_batch=None)
        sizes = sorted({config.compute_local_batch(spec.cluster.gpus_per_node) for config in configs})
    except Infeasible:  # reported by tula check; the memory can still be estimated
        sizes = list_batches(spec.train.accumulate, max(spec.train.accumulate, inspection.dataset_size))
    if largest is None:
        return sizes
    too_large = [size for size in sizes if size > largest]
    return [size for size in sizes if size <= largest] + too_large[:1]
