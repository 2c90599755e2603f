"""Peak memory of one rank without a GPU and without computing: the real training step on fake tensors (Eq. 3).

Fake tensors have shapes and storages but no data. A dispatch mode sees every operation, forward and backward, and keeps
count of the storages that are alive. What no operation shows is not in the estimate: workspaces of cuDNN or oneDNN, the
allocator's rounding and fragmentation, the CUDA context.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tula_cli.records import Footprint
from tula_cli.spec import JobSpec
from tula_cli.worker import zoo
from tula_cli.worker.recompute import apply_activation_checkpointing

FIRST_MICRO_BATCH = 4
LARGEST_MICRO_BATCH = 2**16

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all tensor storages that are alive, and their peak, while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0  # bytes
        self.peak = 0  # bytes
        self._held: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.hold(tree_leaves(result))
        return result

    def hold(self, values: Iterable[Any]) -> None:
        """Count the storages of the tensors among the values until they die."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._hold(value.untyped_storage())
        self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Begin a new peak at what is alive."""
        self.peak = self.live

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return
        # The Python object lives as long as the storage does, also where only autograd in C++ holds it.
        self._held[key] = weakref.ref(storage, lambda _: self._release(key, size))
        self.live += size

    def _release(self, key: int, size: int) -> None:
        del self._held[key]
        self.live -= size


@dataclass
class Rehearsal:
    """A model and its optimizer on fake tensors, with the state that training has after its first step."""

    spec: JobSpec
    sample: tuple[Any, Any]  # a real batch of one (input, target)
    fake: FakeTensorMode
    storages: LiveStorages
    model: nn.Module
    loss: zoo.LossFunction
    optimizer: torch.optim.Optimizer
    factors: list[torch.Tensor] = field(default_factory=list)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def batch(self, size: int) -> tuple[Any, Any]:
        """Return a fake micro-batch shaped like the sample."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype)

        inputs, targets = self.sample
        return tree_map_only(torch.Tensor, fake, inputs), tree_map_only(torch.Tensor, fake, targets)

    def measure(self, micro_batch: int) -> Footprint:
        """Rehearse one optimizer step and return its peak."""
        with self._active():
            self.storages.restart()
            inputs, targets = self.batch(micro_batch)
            self._backward(inputs, targets)
            if self.spec.train.method == "ags":
                self._refresh(inputs, targets)
            self._update()
        return self._split(micro_batch, tree_leaves((inputs, targets)))

    def output(self, size: int) -> Any:
        """Return the model's fake output for `size` samples."""
        with self._active():
            return self.model(self.batch(size)[0])

    @contextmanager
    def _active(self) -> Iterator[None]:
        with self.fake, self.storages:
            yield

    def _backward(self, inputs: Any, targets: Any) -> None:
        """Accumulate into gradients that exist already, as the views of DDP's buckets do."""
        for _ in range(min(2, self.spec.train.accumulate)):
            with autocast(self.spec):
                loss = self.loss(self.model(inputs), targets)
            loss.backward()

    def _refresh(self, inputs: Any, targets: Any) -> None:
        """Take the small batch's gradient beside the large one's, as TulaOptimizer does."""
        count = min(small_batch(self.spec), _samples(inputs))
        with autocast(self.spec):
            loss = self.loss(self.model(_first(inputs, count)), _first(targets, count))
        small = [g for g in torch.autograd.grad(loss, self.parameters, allow_unused=True) if g is not None]
        del loss
        if max(self.spec.search.nodes) * self.spec.cluster.gpus_per_node > 1:
            # To be sent, each is weighted and all are packed into one tensor, before the first two copies are dropped.
            weighted = [g.reshape(-1) * 1.0 for g in small]
            small = [torch.cat(weighted)]
            del weighted
        if self.factors:  # the new ones come to be beside the old
            self.factors = [torch.empty_like(factor) for factor in self.factors]

    def _update(self) -> None:
        if self.spec.train.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.spec.train.max_grad_norm, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def _split(self, micro_batch: int, batch: Sequence[Any]) -> Footprint:
        parameters = tensor_bytes([*self.model.parameters(), *self.model.buffers()])
        gradients = tensor_bytes(p.grad for p in self.parameters)
        state = tensor_bytes(tree_leaves(list(self.optimizer.state.values())))
        factors, inputs, peak = tensor_bytes(self.factors), tensor_bytes(batch), self.storages.peak
        return Footprint(
            local_batch=micro_batch * self.spec.train.accumulate,
            parameters=parameters,
            gradients=gradients,
            optimizer=state,
            factors=factors,
            batch=inputs,
            activations=max(0, peak - parameters - gradients - state - factors - inputs),
            peak=peak,
        )


def rehearse(spec: JobSpec, sample: tuple[Any, Any], *, classes: int | None) -> Rehearsal:
    """Build the spec's model, loss and optimizer on fake tensors.

    Args:
        spec: the job.
        sample: one real (input, target) of the training set, whose shapes the batches have.
        classes: of the dataset.

    Raises:
        SpecError: from building the model, the loss or the optimizer.
    """
    fake, storages = FakeTensorMode(allow_non_fake_inputs=True), LiveStorages()
    model = zoo.build_model(spec, classes)  # with real numbers, for some initialisations look at what they have drawn
    if spec.train.activation_checkpointing:
        apply_activation_checkpointing(model)
    model.train()
    _make_fake(model, fake)
    with fake:
        loss = zoo.build_loss(spec)
        optimizer = zoo.build_optimizer(spec, [p for p in model.parameters() if p.requires_grad])
    inputs, targets = torch.utils.data.default_collate([sample])
    rehearsal = Rehearsal(spec, (inputs, targets), fake, storages, model, loss, optimizer)
    with fake, storages:
        storages.hold([*model.parameters(), *model.buffers()])
        for parameter in rehearsal.parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # its state is there from the second step on
        if spec.train.method == "ags" and spec.ags.granularity == "element":
            rehearsal.factors = [torch.empty_like(p) for p in rehearsal.parameters]
    return rehearsal


def _make_fake(model: nn.Module, fake: FakeTensorMode) -> None:
    """Replace every parameter and buffer by a fake one; tied ones stay tied."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake.from_tensor(tensor)  # type: ignore[assignment]


def footprints(rehearsal: Rehearsal) -> tuple[Footprint, ...]:
    """Return the estimate at two micro-batches, m and 2 m, where it has become a straight line.

    The peak is the largest of several moments of a step, each linear in the batch. At small batches it may be one that
    no batch size changes (a large layer's gradient, a refresh of the factors): a line through that says nothing of
    where memory ends. So the batch grows until its own share is the larger part.
    """
    size = FIRST_MICRO_BATCH
    small, double = rehearsal.measure(size), rehearsal.measure(2 * size)
    while size < LARGEST_MICRO_BATCH and not _batch_dominates(small, double):
        size *= 8
        small, double = rehearsal.measure(size), rehearsal.measure(2 * size)
    return double, rehearsal.measure(4 * size)


def _batch_dominates(small: Footprint, double: Footprint) -> bool:
    growing, fixed = double.activations - small.activations, 2 * small.activations - double.activations
    return 2 * growing >= fixed


def small_batch(spec: JobSpec) -> int:
    """Return the most samples that AGS draws for its small batch."""
    return spec.train.reference_batch if spec.ags.b_small == "auto" else spec.ags.b_small


def autocast(spec: JobSpec) -> AbstractContextManager[Any]:
    """Return the context of the spec's precision on fake CPU tensors."""
    if spec.train.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=DTYPES[spec.train.precision])


def tensor_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors among the values."""
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def _samples(inputs: Any) -> int:
    return next(len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))


def _first(part: Any, count: int) -> Any:
    take: Callable[[torch.Tensor], torch.Tensor] = lambda t: t[:count]  # noqa: E731
    return tree_map_only(torch.Tensor, take, part)
