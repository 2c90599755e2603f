"""Peak memory of one rank without a GPU and without computing: the real training step on fake tensors (Eq. 3).

Fake tensors have shapes and storages but no data. A dispatch mode sees every operation, forward and backward, and
records when each storage comes to be and dies. One rehearsal is enough for every batch: its batch is a prime number, so
that a size it divides is one that grows with the batch. The recording is then replayed at any batch, for a GPU through a
simulation of PyTorch's allocator.

What no operation shows is in no recording: the workspaces that cuDNN or oneDNN choose by measuring. For what libraries
hold beside the tensors there is a heuristic, `libraries`; probes correct both.
"""

from tula_cli.run.records.components import Footprint
from tula_cli.worker.measure.rehearsal import Rehearsal

MICRO_BATCHES = tuple(2**power for power in range(17))
"""Where an estimate is told; between them memory is as good as a straight line."""


def footprints(rehearsal: Rehearsal, *, largest: int = MICRO_BATCHES[-1]) -> tuple[Footprint, ...]:
    """Return the estimate at micro-batches of 1, 2, 4 ... up to the first that is as large as the largest of interest.

    The peak is the largest of several moments of a step, each linear in the batch; at small batches it may be one that
    no batch size changes (a large layer's gradient, a refresh of the factors).
    """
    below = [size for size in MICRO_BATCHES if size < largest]
    sizes = (*below, MICRO_BATCHES[min(len(below), len(MICRO_BATCHES) - 1)])
    accumulate, room = rehearsal.spec.train.accumulate, rehearsal.room()
    found = {size * accumulate: rehearsal.measure(size) for size in sizes}
    return tuple(Footprint(local_batch=b, memory=memory, room=round(room * memory.peak)) for b, memory in found.items())
