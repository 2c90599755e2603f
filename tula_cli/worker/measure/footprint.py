"""Peak memory of one rank without a GPU and without computing: the real training step on fake tensors (Eq. 3).

Fake tensors have shapes and storages but no data. A dispatch mode sees every operation, forward and backward, and
records when each storage comes to be and dies. One rehearsal is enough for every batch: its batch is a prime number, so
that a size it divides is one that grows with the batch. The recording is then replayed at any batch, for a GPU through a
simulation of PyTorch's allocator.

What no operation shows is in no recording: the workspaces that cuDNN or oneDNN choose by measuring. For what libraries
hold beside the tensors there is a heuristic, `libraries`; probes correct both.
"""

from torch import nn

from tula_cli.run.records.components import Components, Footprint
from tula_cli.spec.sections import Train
from tula_cli.words import amount, plural
from tula_cli.worker.device import tensor_bytes
from tula_cli.worker.measure.rehearsal import FakeStep
from tula_cli.worker.parallel.sharded import fsdp_blocks

MICRO_BATCHES = tuple(2**power for power in range(17))
"""Where an estimate is told; between them memory is as good as a straight line."""


def estimate_footprints(rehearsal: FakeStep, *, largest: int = MICRO_BATCHES[-1]) -> tuple[Footprint, ...]:
    """Return the estimate at micro-batches of 1, 2, 4 ... up to the first that is as large as the largest of interest.

    The peak is the largest of several moments of a step, each linear in the batch; at small batches it may be one that
    no batch size changes (a large layer's gradient, a refresh of the factors).
    """
    below = [size for size in MICRO_BATCHES if size < largest]
    sizes = (*below, MICRO_BATCHES[min(len(below), len(MICRO_BATCHES) - 1)])
    accumulate, room = rehearsal.spec.train.accumulate, rehearsal.allocator_margin()
    gathered = _gathered_bytes(rehearsal.model, rehearsal.spec.train) if rehearsal.spec.train.sharded else 0
    components = {size * accumulate: _add_extra(rehearsal.measure(size), gathered) for size in sizes}
    return tuple(
        Footprint(local_batch=b, memory=memory, room=round(room * memory.peak)) for b, memory in components.items()
    )


def _gathered_bytes(model: nn.Module, train: Train) -> int:
    """Return the bytes that are gathered beside a rank's share of a model at the peak of a step (`train.parallel: fsdp`).

    What belongs to no block stays gathered all along. Of the largest block there are its parameters and those of the next
    one, which is fetched ahead; its gradient, and that of the one before, on its way.
    """
    blocks, outside_blocks = _block_sizes(model, train)
    return outside_blocks + 4 * max(blocks, default=0)


def _block_sizes(model: nn.Module, train: Train) -> tuple[list[int], int]:
    """Return the bytes of each block's parameters, but for those of blocks inside it, and of those that belong to none."""
    counted: set[nn.Parameter] = set()
    blocks = []
    for block in fsdp_blocks(model, train.fsdp_blocks):  # the inner ones come first
        parameters = set(block.parameters()) - counted
        blocks.append(tensor_bytes(parameters))
        counted |= parameters
    return blocks, tensor_bytes(model.parameters()) - sum(blocks)


def describe_gathering(model: nn.Module, train: Train) -> str:
    """Describe what part of a model is gathered at a time (`train.parallel: fsdp`)."""
    blocks, outside_blocks = _block_sizes(model, train)
    if not blocks:
        return f"shares: the model has no blocks, so that all of its {amount(outside_blocks)} are gathered at once"
    return (
        f"shares: {plural(len(blocks), 'block')} of at most {amount(max(blocks))}, gathered one at a time, and {amount(outside_blocks)}"
        " that stay gathered through a step"
    )


def _add_extra(memory: Components, extra: int) -> Components:
    """Return the memory with something beside it that is neither a state nor the batch."""
    raised = {name: getattr(memory, name) + extra for name in ("activations", "peak", "reserved")}
    return memory.model_copy(update=raised) if extra else memory
