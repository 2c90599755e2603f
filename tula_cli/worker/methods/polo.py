"""Method polo: post-local SGD (Lin et al. 2020): synchronous steps at first, then local steps of each rank with
periodic averaging.

After the switch gradients are not averaged, so `Trainer.on_gradient` and the norms of diagnostics are those of rank 0's
samples. A checkpoint holds one state for all ranks: regular checkpoints wait for the next average. A run that must exit
between two averages (at its time limit, for example) averages early to save, and so does not end at the same weights as an
uninterrupted run.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tula_cli.diagnostics import Diagnostic
from tula_cli.optim.ddp_hook import get_or_register_reduction_hook
from tula_cli.worker import messages
from tula_cli.worker.methods.plain import Loop, Plain
from tula_cli.worker.parallel.sharding import Replicated

SWITCH_EPOCHS = 5
"""Epochs of synchronous training (Tula paper, IV-D)."""
AVERAGES_PER_EPOCH = 4
"""How often the replicas are averaged in each epoch after that (Tula paper, IV-D)."""


class PostLocal(Plain):
    """Post-local SGD: the optimizer is unchanged; after the switch, weights are averaged in place of gradients."""

    def is_local(self, loop: Loop) -> bool:
        return loop.ranks.world > 1 and loop.position.epoch >= SWITCH_EPOCHS

    def before_backward(self, loop: Loop) -> None:
        """Average gradients over the ranks until the switch, and not afterwards."""
        if loop.ranks.world > 1:
            assert isinstance(loop.parallel, Replicated), "the spec refuses polo with sharded parameters"
            set_gradient_synchronisation(loop.parallel, enabled=not self.is_local(loop))

    def after_step(self, loop: Loop) -> None:
        """Average the replicas if due; they differ after a local step until they are averaged."""
        if not self.is_local(loop):
            return
        loop.apart = True
        samples_done, size = loop.position.done, len(loop.datasets.train)
        remaining = loop.sizes.ramp.list_epoch_steps(loop.position.epoch, samples_done=samples_done, size=size)
        end = samples_done + sum(batch * steps for batch, steps in remaining)
        if is_average_due(samples_done, batch=loop.batch, end=end):
            self.synchronize_replicas(loop)

    def synchronize_replicas(self, loop: Loop) -> None:
        if not loop.apart:
            return
        average_replicas(loop.parallel.module, loop.base)
        if loop.scaler.is_enabled():  # the ranks' loss scales differ after different overflows
            state = loop.scaler.state_dict()
            scale, steps = loop.ranks.compute_elementwise_max([-state["scale"], -state["_growth_tracker"]])
            loop.scaler.load_state_dict({**state, "scale": -scale, "_growth_tracker": int(-steps)})
        loop.apart = False

    def probe_epochs(self) -> int | None:
        return SWITCH_EPOCHS  # a probe measures the synchronous steps, which take longer

    def list_remarks(self, loop: Loop) -> list[Diagnostic]:
        epochs = loop.spec.train.epochs
        if loop.ranks.world == 1:
            return [messages.no_replicas_to_average()]
        if epochs <= SWITCH_EPOCHS:
            return [messages.averaging_never_starts(synchronous_epochs=SWITCH_EPOCHS, epochs=epochs)]
        return []


def set_gradient_synchronisation(ddp: DistributedDataParallel, *, enabled: bool) -> None:
    """Make DDP average gradients and broadcast rank 0's buffers, as by default, or neither."""
    get_or_register_reduction_hook(ddp).local = not enabled
    # torch names this attribute broadcast_buffers up to 2.12, and warns of that name in later versions
    setattr(ddp, "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers", enabled)


def is_average_due(done: int, *, batch: int, end: int) -> bool:
    """Return whether the replicas are averaged after the coming step: at each quarter of the epoch, so also at its end.

    Args:
        done: samples of the epoch before the step.
        end: samples of the epoch after its last step.
    """
    return AVERAGES_PER_EPOCH * (done + batch) // end > AVERAGES_PER_EPOCH * done // end


@torch.no_grad()
def average_replicas(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Average parameters, buffers and the optimizer's state over all ranks, in place; afterwards all are equal.

    torch's PostLocalSGDOptimizer averages parameters only. Here momentum is averaged, too ("average buffers" of Wang et al.
    2020, SlowMo), so that the checkpoint that one rank writes is the state of every rank. Counters are equal already.
    """
    world = dist.get_world_size()
    tensors = [tensor for tensor in _iterate_tensors(model, optimizer) if tensor.is_floating_point()]
    flat = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    for handle in [dist.all_reduce(tensor, async_op=True) for tensor in flat]:
        assert handle is not None
        handle.wait()
    for tensor, total in zip(tensors, flat, strict=True):
        tensor.copy_(total.div_(world))


def _iterate_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield parameters, buffers and states in an order that is the same on all ranks."""
    yield from model.parameters()
    yield from model.buffers()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            yield from (state[name] for name in sorted(state) if isinstance(state[name], Tensor))


METHOD = PostLocal
