"""The screen of `tula check --memory`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tula_cli.show.check import inspection
from tula_cli.show.tables import table
from tula_cli.words import amount, plural, size, size_unit

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tula_cli.services.estimate import EstimateReport

ON_GPU = ("reserved", "libraries")
"""Components that are told of a GPU alone."""


def estimate(report: "EstimateReport") -> Iterator["RenderableType"]:
    """Memory of one GPU by local batch, component by component."""
    yield from inspection(report.inspection)
    yield ""
    yield _components(report)
    yield ""
    yield from _apart(report)
    yield f"{amount(report.fixed)} whatever the batch, and {amount(report.per_sample)} a sample"
    if report.sharing:
        yield f"each of {plural(report.sharing, 'GPU')} holds its share of parameters, gradients and optimizer states"
    yield from _data(report)
    if report.correction:
        yield report.correction
    if report.capacity is None:
        yield "how much a GPU has is not known here; tell with --memory or cluster.memory_per_gpu"
        return
    largest = {None: "every batch fits", 0: "nothing fits"}.get(
        report.largest_local_batch, f"the largest local batch is {report.largest_local_batch}"
    )
    yield f"of {amount(report.capacity)} with {100 * report.margin:g} % kept free, {largest}"


def _components(report: "EstimateReport") -> "Table":
    """Eq. 3 at each local batch; for a GPU also what the libraries hold, what the allocator keeps, and what is needed."""
    from tula_cli.run.records.components import Components  # with pydantic, which --help does without

    byte, unit = size_unit(max(*report.needed, *(row.memory.reserved for row in report.rows)))
    parts = [part for part in Components.model_fields if report.gpu or part not in ON_GPU]
    headings = [f"{part}\n({unit})" for part in (*parts, *(["needed"] if report.gpu else []))]
    made = table(("local\nbatch", *headings, "fits"), left=(1 + len(headings),))
    for row, needed in zip(report.rows, report.needed, strict=True):
        sizes = [getattr(row.memory, part) for part in parts] + ([needed] if report.gpu else [])
        fits = {True: "yes", False: "no", None: "-"}[report.fits(row)]
        made.add_row(str(row.local_batch), *(size(value, byte) for value in sizes), fits)
    return made


def _data(report: "EstimateReport") -> Iterator[str]:
    """Say what data may take of the node's own memory."""
    if report.data is None:
        return
    pinned = f" and {amount(report.data.pinned)} pinned" if report.data.pinned else ""
    processes = "no loader process" if not report.loaders else f"{report.loaders} loader processes"
    yield (
        f"data, in the node's own memory: up to {amount(report.data.shared)} in /dev/shm{pinned} for each rank, at local batch"
        f" {report.largest_row} with {processes}"
    )


def _apart(report: "EstimateReport") -> Iterator[str]:
    """Say what the libraries are, and what PyTorch's allocator is to that."""
    if report.gpu:
        yield (
            "reserved: what PyTorch's allocator takes where there is room; needed: the least it runs in, and the libraries"
            f" (CUDA context, cuBLAS, cuDNN, NCCL: {'as measured' if report.probed else 'a rule of thumb until a probe has measured them'})"
        )
    elif report.inspection.process:
        yield f"on the CPU; the process itself holds {amount(report.inspection.process)} beside that, which no limit counts"
        if not report.probed:
            yield (
                "the heap and workspaces take more than the tensors: half as much more is kept free until a probe has measured"
                " them; very small jobs take two to three times the estimate"
            )
