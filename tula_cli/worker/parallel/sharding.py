"""The parallel strategies: a copy of the model per rank (DDP), or fully sharded data parallelism.

In fully sharded data parallelism (FSDP2; ZeRO stage 3, Rajbhandari et al. 2020) each rank holds 1/N of every parameter, of its gradient and of its optimizer state. A block of the model is gathered
just before it computes, forward and backward, and released afterwards; its gradient is averaged and divided in one
reduce-scatter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tula_cli.errors import SpecError
from tula_cli.optim.gradient_stats import compute_squared_norm
from tula_cli.optim.sharding import compute_sharded_squared_norm
from tula_cli.spec.sections import Train
from tula_cli.worker.build.activation_checkpointing import list_blocks


class Replicated(DistributedDataParallel):
    """A copy of the model per rank (DDP), whose gradients are averaged while the backward pass runs."""

    needs_all_ranks: ClassVar[bool] = False
    """Whether every rank must take part where weights or gradients are read, evaluated or saved."""
    separates_communication: ClassVar[bool] = True
    """Whether a rank has its local gradient before it communicates, so that both times can be measured."""

    def count_samples_of_gradient(self, samples: int) -> int:
        """Return the number of samples that a gradient covers if each rank computes it from `samples` samples."""
        return samples

    def compute_squared_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of the averaged gradient, given this rank's gradients or shards."""
        return compute_squared_norm(gradients)

    def release_gathered_parameters(self) -> None:
        """Do nothing: a replicated model gathers no parameters."""

    def make_local_context(self, fits: Callable[[int], bool]) -> AbstractContextManager[None] | None:
        """Return a context for steps without communication; None if that is not possible.

        The trainer must not synchronise gradients in it (`Trainer.synchronise`).

        Args:
            fits: returns whether a number of bytes of memory is available.
        """
        return nullcontext()

    def prepare_local_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a step of the optimizer in such a context, after the backward pass."""


class Sharded(nn.Module):
    """A sharded model, called as DistributedDataParallel is; the interface is that of `Replicated`.

    Code that reads `parameters()` outside of a forward or backward pass sees DTensors: the full shape, this rank's
    values. Every forward pass involves all ranks.

    Args:
        model: model on the CPU or the device, the same on all ranks except for values, which become rank 0's.
        device: device of this rank. The model is moved to it block by block, so that the whole need not fit.

    Raises:
        SpecError: this torch does not support sharding on the device, or it cannot divide a parameter.
    """

    def __init__(self, model: nn.Module, *, device: torch.device) -> None:
        # Imported here: DDP does not need it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__()
        require_fsdp_support(device.type)
        _require_averaging_backend(device)
        _broadcast_tensors([*model.parameters(), *model.buffers()], device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.parts: list[Any] = [*list_fsdp_blocks(model), model]
        for block in self.parts:
            fully_shard(block, mesh=mesh)
        self.module = model

    needs_all_ranks: ClassVar[bool] = True
    separates_communication: ClassVar[bool] = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def count_samples_of_gradient(self, samples: int) -> int:
        return samples * dist.get_world_size()

    def compute_squared_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return compute_sharded_squared_norm(gradients)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have no effect: the gradient of each micro-batch is reduced, and added to the shards.

        Keeping the full gradient until the last micro-batch would need the memory that sharding saves.
        """
        yield

    def make_local_context(self, fits: Callable[[int], bool]) -> AbstractContextManager[None] | None:
        """Return `disable_communication`, which torch supports from 2.8 on and which needs all parameters and gradients."""
        can_run = all(hasattr(block, "set_reshard_after_forward") for block in self.parts)
        gathered_bytes = sum(p.numel() * p.element_size() * (1 + p.requires_grad) for p in self.parameters())
        return self.disable_communication() if can_run and fits(gathered_bytes) else None

    @contextmanager
    def disable_communication(self) -> Iterator[None]:
        """Compute without communication in this context: the model stays gathered, and gradients are not averaged.

        Meanwhile the rank holds all parameters and their gradients. The weights must not change.
        """
        root: Any = self.module
        for block in self.parts:
            block.set_reshard_after_forward(False, recurse=False)
        root.set_reshard_after_backward(False)
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            self.zero_grad()
            for block in self.parts:
                block.set_reshard_after_forward(block is not root, recurse=False)
                block.reshard()
            root.set_reshard_after_backward(True)

    def release_gathered_parameters(self) -> None:
        """Reduce each rank to its own shards, after forward passes without a backward pass have left more gathered."""
        for block in self.parts:
            block.reshard()

    def prepare_local_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the full gradients from `disable_communication` by zeros, for a step of the usual duration."""
        self.zero_grad()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def require_fsdp_support(device: str) -> None:
    """Refuse a torch whose FSDP2 cannot run on a kind of device.

    Raises:
        SpecError: this torch cannot; 2.6 supports FSDP2 on GPUs alone.
    """
    if device == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise SpecError(
            f"train.parallel: fsdp cannot run on the CPU under torch {torch.__version__}",
            "use a newer torch, GPUs, or train.parallel: ddp",
        )


def _require_averaging_backend(device: torch.device) -> None:
    """Refuse a backend whose reduce-scatter does not average, as FSDP2 requires: gloo of torch 2.8 silently sums.

    Raises:
        SpecError: gradients would be too large by a factor of the number of ranks.
    """
    world = dist.get_world_size()
    mean = torch.zeros(1, device=device)
    dist.reduce_scatter_tensor(mean, torch.ones(world, device=device), op=dist.ReduceOp.AVG)
    if mean.item() != 1:
        raise SpecError(
            f"train.parallel: fsdp would sum gradients instead of averaging them: {dist.get_backend()} under torch"
            f" {torch.__version__} cannot average",
            "use a newer torch, GPUs, or train.parallel: ddp",
        )


def list_fsdp_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model that are gathered one at a time, in the order of its modules.

    A module that shares a parameter with the rest of the model (tied embeddings) is not a block: the rest holds it.

    Raises:
        SpecError: FSDP2 cannot divide a parameter.
    """
    if undivided := [name for name, parameter in model.named_parameters() if not parameter.ndim]:
        raise SpecError(
            f"train.parallel: fsdp cannot shard scalar parameters: {', '.join(undivided)}",
            "make each a tensor of shape (1,): nn.Parameter(torch.ones(1)); or use train.parallel: ddp",
        )
    return [
        block
        for block in list_blocks(model)
        if block is not model and any(True for _ in block.parameters()) and _has_no_shared_parameter(block, model)
    ]


def _has_no_shared_parameter(block: nn.Module, model: nn.Module) -> bool:
    inside = set(block.modules())
    block_parameters = {id(p) for p in block.parameters()}
    return not any(
        id(p) in block_parameters
        for module in model.modules()
        if module not in inside
        for p in module.parameters(recurse=False)
    )


def _broadcast_tensors(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Broadcast rank 0's values of tensors, one at a time over the device."""
    for tensor in tensors:
        on_device = tensor.detach().to(device)
        dist.broadcast(on_device, src=0)
        tensor.detach().copy_(on_device)


# --- Wrapping

Parallel = Replicated | Sharded
"""Its `module` is the model; inside `no_sync()`, DDP keeps the gradients of a backward pass local, and a sharded model
does not."""


def wrap_model(model: nn.Module, train: Train, device: torch.device) -> Parallel:
    """Wrap a model for training; every rank must call this.

    Args:
        model: model, the same on all ranks except for values, which become rank 0's; on the device under ddp.

    Raises:
        SpecError: as for `Sharded`.
    """
    if train.is_sharded:
        return Sharded(model, device=device)
    ids = [device] if device.type == "cuda" else None
    return Replicated(model, device_ids=ids, gradient_as_bucket_view=True)
