"""The largest eigenvalue of the loss's Hessian, beside the norm of its gradient (Figure 5b), on demand.

Power iteration with Hessian-vector products by double backward (Pearlmutter 1994; PyHessian of Yao et al. 2020 does the
same), on a fixed, seeded part of the training set. The model is in evaluation mode, so that the loss is a plain mean
over samples: it depends neither on how many ranks share them nor on which samples sit in one batch, and dropout is off.
Nothing of the training changes: modes, buffers, gradients and random number generators are afterwards as they were.
"""

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tula_cli.errors import SpecError
from tula_cli.worker.build.sampling import fixed_loader, permutation
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.seeding import seed_torch, stable_seed
from tula_cli.worker.train.loop import Trainer

TOLERANCE = 0.05
"""Residual |Hv - rv| as a share of |r| that ends the iteration; the error of r is of the order of its square."""
MAX_ITERATIONS = 100

_SHARE = 4  # a double backward holds about so many times the memory of a training step with as many samples
_STREAM = 0x4E55  # parts this module's random numbers from the job's others

_NO_SECOND_DERIVATIVE = re.compile(
    r"derivative for .* is not implemented|double backwards? (is )?not (supported|implemented)",
    re.IGNORECASE,
)

Product = Callable[[Tensor], Tensor]  # v -> H v, both flat


@dataclass(frozen=True)
class Eigenvalue:
    """What a power iteration found."""

    value: float  # v'Hv at the end
    size: float  # |Hv| at the end: at most the largest magnitude of an eigenvalue, and its best estimate
    iterations: int
    converged: bool


@dataclass(frozen=True)
class Curvature:
    """The loss around the weights, as a row of metrics.jsonl holds it."""

    eigenvalue: float  # the largest (the most positive one)
    smoothness: float  # the largest magnitude of an eigenvalue: the local L of Lemma 1
    gradient_norm: float  # on the same samples
    loss: float
    iterations: int  # Hessian-vector products
    converged: bool
    batch: int  # samples, over all ranks
    seconds: float


def step_size_bound(smoothness: float, s_min: float, s_max: float) -> float | None:
    """Return Lemma 1's bound on the learning rate, 2 s_min / (L s_max^2) (Eq. 11); None where nothing bounds it.

    It is that of plain SGD with factors in [s_min, s_max]; both are 1 without scaling. (The paper's text prints the
    inequality the other way round.)
    """
    return 2 * s_min / (smoothness * s_max**2) if smoothness > 0 else None


def measure(trainer: Trainer, *, samples: int, between: Callable[[], None] = lambda: None) -> Curvature:
    """Measure the curvature at the trainer's weights; every rank takes its share of the samples, all return the same.

    Args:
        trainer: only looked at. Its replicas are taken to be equal, as DistributedDataParallel keeps them.
        samples: over all ranks, at most the training set.
        between: called after each product, on every rank at the same time, so it may communicate; it may raise.

    Raises:
        SpecError: a layer has no second derivative.
    """
    began = time.monotonic()
    with _unchanged(trainer.ddp.module), _graphs_allowed():
        batches = _batches(trainer, samples)
        surface = Surface(trainer.ddp.module, trainer.loss, batches, trainer.ranks, seed=trainer.spec.train.seed)
        loss, gradient = surface.gradient()

        def product(vector: Tensor) -> Tensor:
            result = surface.product(vector)
            between()
            return result

        largest, strongest = extremes(product, surface.direction())
    return Curvature(
        eigenvalue=largest.value,
        smoothness=max(strongest.size, abs(largest.value)),
        gradient_norm=_norm(gradient),
        loss=loss,
        iterations=largest.iterations,
        converged=largest.converged,
        batch=surface.samples,
        seconds=time.monotonic() - began,
    )


# --- the iteration


def power_iteration(
    product: Product, start: Tensor, *, shift: float = 0.0, tolerance: float = TOLERANCE, most: int = MAX_ITERATIONS
) -> Eigenvalue:
    """Return the eigenvalue of largest magnitude of a symmetric operator plus `shift` times the identity.

    Ends where |Hv - rv| <= tolerance |r|, r = v'Hv: then an eigenvalue is that close to r. Does not get there where
    eigenvalues of about the same magnitude differ in sign.
    """
    vector = start / torch.linalg.vector_norm(start)
    value = size = 0.0
    for iteration in itertools.count(1):
        image = product(vector)
        if shift:
            image.add_(vector, alpha=shift)
        value, size = float(torch.dot(vector, image)), _norm(image)
        residual = math.sqrt(max(0.0, size**2 - value**2))  # |v| = 1
        if residual <= tolerance * abs(value) or iteration == most or not math.isfinite(size):
            break
        vector = image.div_(size)
    return Eigenvalue(value, size, iteration, math.isfinite(size) and residual <= tolerance * abs(value))


def extremes(
    product: Product, start: Tensor, *, tolerance: float = TOLERANCE, most: int = MAX_ITERATIONS
) -> tuple[Eigenvalue, Eigenvalue]:
    """Return (the most positive eigenvalue, that of largest magnitude), with at most 2 x `most` products.

    Where the one of largest magnitude is negative, or two of opposite signs contend, a second iteration with the
    spectrum shifted above zero finds the most positive one. The first counts all iterations.
    """
    strongest = power_iteration(product, start, tolerance=tolerance, most=most)
    if (strongest.converged and strongest.value >= 0) or not math.isfinite(strongest.size):
        return strongest, strongest
    shift = strongest.size
    # shifted, the largest may be twice as large: half the tolerance is as much of the smoothness as before
    found = power_iteration(product, start, shift=shift, tolerance=tolerance / 2, most=most)
    value, iterations = found.value - shift, strongest.iterations + found.iterations
    return Eigenvalue(value, abs(value), iterations, found.converged), strongest


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


# --- the loss as a function of the weights


class Surface:
    """The mean loss over fixed samples, and its derivatives by the trainable parameters as one flat vector.

    Args:
        model: in the mode it is to be looked at in.
        loss: (output, target) -> mean over samples.
        batches: this rank's samples, each batch small enough for a double backward.
        ranks: over all of them the mean is taken.
        seed: for a model that draws random numbers even so: the same in each pass.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor], batches: Sequence[Any], ranks: Ranks, *, seed: int
    ) -> None:
        self.model, self.loss, self.batches, self.ranks, self.seed = model, loss, batches, ranks, seed
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.samples = round(ranks.sum([float(sum(len(targets) for _, targets in batches))])[0])

    def direction(self) -> Tensor:
        """Return a seeded random vector to start from, the same on every rank."""
        generator = torch.Generator().manual_seed(stable_seed(self.seed, _STREAM))
        size = sum(p.numel() for p in self.parameters)
        return torch.randn(size, generator=generator, dtype=self._dtype).to(self.ranks.device)

    def gradient(self) -> tuple[float, Tensor]:
        """Return the mean loss and its gradient."""
        total, loss = self._zeros(), 0.0
        for weight, value in self._losses():
            total.add_(self._flat(torch.autograd.grad(value, self.parameters, allow_unused=True)), alpha=weight)
            loss += weight * float(value.detach())
        return self.ranks.sum([loss])[0], self._summed(total)

    def product(self, vector: Tensor) -> Tensor:
        """Return the Hessian times a vector.

        Raises:
            SpecError: a layer has no second derivative.
        """
        total = self._zeros()
        pieces = self._split(vector)
        for weight, value in self._losses():
            try:
                total.add_(self._flat(self._second(value, pieces)), alpha=weight)
            except RuntimeError as error:
                _explain(error)
                raise
        return self._summed(total)

    def _second(self, loss: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor | None]:
        first = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
        _refuse_dead_ends(first)
        # A gradient that depends on no parameter is constant: its part of the Hessian is zero.
        pairs = [(g, v) for g, v in zip(first, pieces, strict=True) if g is not None and g.requires_grad]
        if not pairs:
            return [None] * len(pieces)
        gradients, vectors = zip(*pairs, strict=True)
        return torch.autograd.grad(gradients, self.parameters, grad_outputs=vectors, allow_unused=True)

    def _losses(self) -> Iterator[tuple[float, Tensor]]:
        """Yield (share of all samples, mean loss) of each batch."""
        for inputs, targets in self.batches:
            seed_torch(stable_seed(self.seed, _STREAM, self.ranks.rank), self.ranks.device)
            with torch.enable_grad():
                yield len(targets) / self.samples, self.loss(self.model(inputs), targets)

    @property
    def _dtype(self) -> torch.dtype:
        wide = any(p.dtype is torch.float64 for p in self.parameters)
        return torch.float64 if wide else torch.float32

    def _zeros(self) -> Tensor:
        size = sum(p.numel() for p in self.parameters)
        return torch.zeros(size, dtype=self._dtype, device=self.ranks.device)

    def _flat(self, parts: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(parts, self.parameters, strict=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).detach().flatten().to(self._dtype) for g, p in pairs]
        )

    def _split(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split([p.numel() for p in self.parameters])
        return [piece.view_as(p).to(p.dtype) for piece, p in zip(pieces, self.parameters, strict=True)]

    def _summed(self, vector: Tensor) -> Tensor:
        if self.ranks.world > 1:
            dist.all_reduce(vector)
        return vector


def _batches(trainer: Trainer, samples: int) -> list[Any]:
    """Load this rank's share of the fixed samples onto the device."""
    ranks, seed, size = trainer.ranks, trainer.spec.train.seed, len(trainer.datasets.train)
    order = permutation(size, seed=stable_seed(seed, _STREAM), epoch=0)[:samples].tolist()
    keys = [(0, index) for index in order[ranks.rank :: ranks.world]]
    batch = max(1, trainer.micro_batch // _SHARE)
    loader = fixed_loader(trainer.datasets.train, keys, batch=batch, workers=trainer.workers)
    return [(inputs.to(ranks.device), targets.to(ranks.device)) for inputs, targets in loader]


def _refuse_dead_ends(gradients: Sequence[Tensor | None]) -> None:
    """Raise SpecError where the gradients' graph holds a backward marked @once_differentiable.

    Nothing leads from there to the weights, so that autograd would leave that part out without a word.
    """
    waiting = [g.grad_fn for g in gradients if g is not None and g.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name().endswith("Error"):
            raise _no_second_derivative("its backward is marked @once_differentiable")
        found = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= found
        waiting.extend(found)


def _explain(error: RuntimeError) -> None:
    """Raise SpecError where the model is the reason; an out-of-memory, for one, stays what it is."""
    if _NO_SECOND_DERIVATIVE.search(str(error)):
        raise _no_second_derivative(str(error).splitlines()[0]) from error


def _no_second_derivative(why: str) -> SpecError:
    return SpecError(
        f"train.hessian: a layer of the model has no second derivative: {why}",
        "leave train.hessian out, or write the layer's backward so that it can be differentiated",
    )


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; outside the modes, buffers and random numbers of before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, copy in buffers:
                buffer.copy_(copy)


@contextmanager
def _graphs_allowed() -> Iterator[None]:
    """Attention by plain products: the fast kernels have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
