"""The extreme eigenvalues of the loss's Hessian, and the norm of its gradient (Figure 5b), on demand.

Lanczos' iteration with Hessian-vector products by double backward (Pearlmutter 1994), on a fixed, seeded part of the
training set. The model is in evaluation mode, so that the loss is a plain mean over samples: it depends neither on the
number of ranks nor on which samples are in one batch, and dropout is off. The training is not affected: modes, buffers,
gradients and random number generators are restored.
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
from torch.utils._pytree import tree_map_only

from tula_cli.errors import SpecError
from tula_cli.optim.ags import restore_buffers
from tula_cli.worker.build.batches import ModelCall
from tula_cli.worker.build.compiled import disable_compilation
from tula_cli.worker.build.loaders import build_fixed_loader, make_epoch_permutation
from tula_cli.worker.build.samples import StreamedDataset
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.seeding import compute_stable_seed, seed_torch
from tula_cli.worker.train.loop import Trainer

EIGENVALUE_TOLERANCE = 0.05
"""Bound on the error of an eigenvalue, relative to the largest magnitude, at which the iteration stops."""
MAX_ITERATIONS = 100
FAILURE_PROBABILITY = 0.01
"""Probability, over the random start, that an error exceeds its bound."""

_MEMORY_RATIO = 4  # approximate memory of a double backward relative to a training step of as many samples
_SEED_STREAM = 0x4E55  # part of the seed, so that random numbers differ from the job's others

_NO_SECOND_DERIVATIVE = re.compile(
    r"derivative for .* is not implemented|double backwards? (is )?not (supported|implemented)",
    re.IGNORECASE,
)

Product = Callable[[Tensor], Tensor]  # v -> H v, both flat


@dataclass(frozen=True)
class Extremes:
    """Both ends of a spectrum as found by Lanczos' iteration; they lie within the true ends."""

    largest: float  # lower bound of the largest (most positive) eigenvalue
    smallest: float  # upper bound of the smallest (most negative) eigenvalue
    error: float  # bound on the error of both, with probability 1 - FAILURE_PROBABILITY; infinity if unknown
    iterations: int
    converged: bool

    @property
    def magnitude(self) -> float:
        return max(abs(self.largest), abs(self.smallest))


@dataclass(frozen=True)
class Curvature:
    """The loss around the weights, as in a row of metrics.jsonl."""

    eigenvalue: float  # largest (most positive) eigenvalue
    smoothness: float  # largest magnitude of an eigenvalue: the local L of Lemma 1
    error: float  # bound on the error of both, from `run_lanczos`
    gradient_norm: float  # norm of the gradient on the same samples
    loss: float
    iterations: int  # number of Hessian-vector products
    converged: bool
    batch: int  # number of samples over all ranks
    seconds: float


def compute_step_size_bound(smoothness: float, s_min: float, s_max: float) -> float | None:
    """Return Lemma 1's bound on the learning rate, 2 s_min / (L s_max^2) (Eq. 11); None if there is no bound.

    It applies to plain SGD with factors in [s_min, s_max]; both are 1 without scaling. (The paper's text prints the
    inequality the other way round.)
    """
    return 2 * s_min / (smoothness * s_max**2) if smoothness > 0 else None


def compute_lemma_1_terms(trainer: Trainer, smoothness: float) -> dict[str, float | None]:
    """Return the quantities of Lemma 1, as in a row of metrics.jsonl.

    `s_min` and `s_max` are the interval of the factors applied to gradients, unscaled steps included.
    """
    ags = trainer.ags
    low, high = (1.0, 1.0) if ags is None or ags.identity else (ags.bounds.low, ags.bounds.high)
    return {"s_min": low, "s_max": high, "lr": trainer.lr, "lr_bound": compute_step_size_bound(smoothness, low, high)}


def measure_curvature(trainer: Trainer, *, samples: int, after_product: Callable[[], None] = lambda: None) -> Curvature:
    """Measure the curvature at the trainer's weights; every rank processes its share of samples and returns the same.

    Args:
        trainer: not changed. Its replicas are assumed to be equal, as DistributedDataParallel keeps them.
        samples: over all ranks, at most the training set.
        after_product: called after each product, on every rank at the same time, so it may communicate; it may raise.

    Raises:
        SpecError: a layer has no second derivative.
    """
    began = time.monotonic()
    with _use_evaluation_mode(trainer.parallel.module), _use_plain_attention(), disable_compilation(trainer.spec.train):
        batches = _load_batches(trainer, samples)
        surface = LossSurface(
            trainer.parallel.module, trainer.call, batches, trainer.ranks, seed=trainer.spec.train.seed
        )
        loss, gradient = surface.compute_gradient()

        def multiply_vector(vector: Tensor) -> Tensor:
            result = surface.multiply_hessian(vector)
            after_product()
            return result

        extremes = run_lanczos(multiply_vector, surface.make_direction())
    return Curvature(
        eigenvalue=extremes.largest,
        smoothness=extremes.magnitude,
        error=extremes.error,
        gradient_norm=_compute_vector_norm(gradient),
        loss=loss,
        iterations=extremes.iterations,
        converged=extremes.converged,
        batch=surface.samples,
        seconds=time.monotonic() - began,
    )


# --- Lanczos' iteration


def run_lanczos(
    product: Product, start: Tensor, *, tolerance: float = EIGENVALUE_TOLERANCE, max_iterations: int = MAX_ITERATIONS
) -> Extremes:
    """Return both ends of the spectrum of a symmetric operator, with at most `max_iterations` products.

    A residual |Hv - rv| is no stopping criterion: it is small near any eigenvalue, also an inner one. Therefore the
    bound for a random start is used: after k products neither end is missed by more than `compute_missed_share_bound`
    of the spectrum's width, whatever the spectrum. Fewer products suffice if they span the whole start vector. Three
    vectors are held; there is no reorthogonalisation, which repeats eigenvalues but does not delay the extreme ones
    (Paige 1980).

    Args:
        product: v -> H v, flat; its result is changed.
        start: drawn from a normal distribution.
        tolerance: bound on the error, relative to the largest magnitude, at which the iteration stops.
    """
    rounding = 10 * torch.finfo(start.dtype).eps
    size, vector, previous, beta = len(start), start / torch.linalg.vector_norm(start), torch.zeros_like(start), 0.0
    del start  # frees as much memory as the trainable parameters
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for count in itertools.count(1):
        image = product(vector).sub_(previous, alpha=beta)
        diagonal.append(float(torch.dot(vector, image)))
        beta = _compute_vector_norm(image.sub_(vector, alpha=diagonal[-1]))
        if not math.isfinite(beta):
            return Extremes(math.nan, math.nan, math.inf, count, converged=False)
        smallest, largest = _compute_tridiagonal_ends(diagonal, off_diagonal)
        magnitude = max(abs(smallest), abs(largest))
        exhausted = beta <= rounding * magnitude
        error = rounding * magnitude if exhausted else _compute_error_bound(count, size, largest - smallest)
        if (converged := error <= tolerance * magnitude) or count == max_iterations:
            return Extremes(largest, smallest, error, count, converged)
        previous, vector = vector, image.div_(beta)
        off_diagonal.append(beta)
    raise AssertionError("the iteration has an end")


def compute_missed_share_bound(products: int, size: int) -> float:
    """Bound the share of a spectrum's width by which each end is missed, with probability 1 - FAILURE_PROBABILITY.

    Kuczynski and Wozniakowski 1992, Theorem 4.2: for a start uniform on the sphere in R^n, the largest eigenvalue of a
    positive operator is missed by more than the share s with probability 1.648 sqrt(n) exp(-sqrt(s) (2k - 1)) at most.
    A shift makes every operator positive, with the width as its largest eigenvalue; each end has half of
    FAILURE_PROBABILITY.
    """
    return (math.log(2 * 1.648 * math.sqrt(size) / FAILURE_PROBABILITY) / (2 * products - 1)) ** 2


def _compute_error_bound(products: int, size: int, width: float) -> float:
    """Return the bound on the error of both ends, given the width between the ends found."""
    share = compute_missed_share_bound(products, size)
    return share * width / (1 - 2 * share) if share < 0.5 else math.inf


def _compute_tridiagonal_ends(diagonal: Sequence[float], off_diagonal: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of a symmetric tridiagonal matrix."""
    matrix = torch.tensor(diagonal, dtype=torch.float64).diag()
    if off_diagonal:
        matrix += torch.tensor(off_diagonal, dtype=torch.float64).diag(-1)  # eigvalsh reads the lower triangle
    values = torch.linalg.eigvalsh(matrix)
    return float(values[0]), float(values[-1])


def _compute_vector_norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


# --- The loss as a function of the weights


class LossSurface:
    """The mean loss over fixed samples, and its derivatives by the trainable parameters as one flat vector.

    Args:
        model: model in the mode (training or evaluation) in which it is measured.
        call: computes the loss of a batch, a mean over its samples.
        batches: this rank's samples as (number of samples, batch), each small enough for a double backward.
        ranks: the mean is taken over all of them.
        seed: seed of each pass, for models that draw random numbers even in evaluation mode.
    """

    def __init__(
        self, model: nn.Module, call: ModelCall, batches: Sequence[tuple[int, Any]], ranks: Ranks, *, seed: int
    ) -> None:
        self.model, self.call, self.batches, self.ranks, self.seed = model, call, batches, ranks, seed
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.size = sum(p.numel() for p in self.parameters)
        self.samples = round(ranks.sum([float(sum(count for count, _ in batches))])[0])

    def make_direction(self) -> Tensor:
        """Return a seeded random start vector, the same on every rank."""
        generator = torch.Generator().manual_seed(compute_stable_seed(self.seed, _SEED_STREAM))
        return torch.randn(self.size, generator=generator, dtype=self._dtype).to(self.ranks.device)

    def compute_gradient(self) -> tuple[float, Tensor]:
        """Return the mean loss and its gradient."""
        total, loss = self._make_zeros(), 0.0
        for weight, value in self._compute_losses():
            total.add_(
                self._flatten_tensors(torch.autograd.grad(value, self.parameters, allow_unused=True)), alpha=weight
            )
            loss += weight * float(value.detach())
        return self.ranks.sum([loss])[0], self._sum_vector_over_ranks(total)

    def multiply_hessian(self, vector: Tensor) -> Tensor:
        """Return the Hessian times a vector.

        Raises:
            SpecError: a layer has no second derivative.
        """
        total = self._make_zeros()
        pieces = self._split_vector(vector)
        for weight, value in self._compute_losses():
            try:
                total.add_(self._flatten_tensors(self._compute_second_derivative(value, pieces)), alpha=weight)
            except RuntimeError as error:
                if _NO_SECOND_DERIVATIVE.search(str(error)):
                    raise _make_no_second_derivative_error(str(error).splitlines()[0]) from error
                raise
        return self._sum_vector_over_ranks(total)

    def _compute_second_derivative(self, loss: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor | None]:
        first = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
        _check_twice_differentiable(first)
        # A gradient that depends on no parameter is constant: its part of the Hessian is zero.
        pairs = [(g, v) for g, v in zip(first, pieces, strict=True) if g is not None and g.requires_grad]
        if not pairs:
            return [None] * len(pieces)
        gradients, vectors = zip(*pairs, strict=True)
        return torch.autograd.grad(gradients, self.parameters, grad_outputs=vectors, allow_unused=True)

    def _compute_losses(self) -> Iterator[tuple[float, Tensor]]:
        """Yield (share of all samples, mean loss) of each batch."""
        for count, batch in self.batches:
            seed_torch(compute_stable_seed(self.seed, _SEED_STREAM, self.ranks.rank), self.ranks.device)
            with torch.enable_grad():
                yield count / self.samples, self.call.compute_loss(self.model, batch)

    @property
    def _dtype(self) -> torch.dtype:
        is_float64 = any(p.dtype is torch.float64 for p in self.parameters)
        return torch.float64 if is_float64 else torch.float32

    def _make_zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=self._dtype, device=self.ranks.device)

    def _flatten_tensors(self, tensors: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(tensors, self.parameters, strict=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).detach().flatten().to(self._dtype) for g, p in pairs]
        )

    def _split_vector(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split([p.numel() for p in self.parameters])
        return [piece.view_as(p).to(p.dtype) for piece, p in zip(pieces, self.parameters, strict=True)]

    def _sum_vector_over_ranks(self, vector: Tensor) -> Tensor:
        if self.ranks.world > 1:
            dist.all_reduce(vector)
        return vector


def _load_batches(trainer: Trainer, samples: int) -> list[tuple[int, Any]]:
    """Load this rank's share of the fixed samples onto the device."""
    ranks, seed, size = trainer.ranks, trainer.spec.train.seed, len(trainer.datasets.train)
    order = make_epoch_permutation(size, seed=compute_stable_seed(seed, _SEED_STREAM), epoch=0)[:samples].tolist()
    keys = [(0, index) for index in order[ranks.rank :: ranks.world]]
    batch = max(1, trainer.micro_batch // _MEMORY_RATIO)
    samples_by_number = trainer.datasets.train
    assert not isinstance(samples_by_number, StreamedDataset), "refused where the datasets are built"
    loader = build_fixed_loader(
        samples_by_number, keys, batch=batch, workers=trainer.workers, collate=trainer.datasets.collate
    )
    counts = (min(batch, len(keys) - start) for start in range(0, len(keys), batch))
    # All batches remain on the device, because every pass uses them; a training frees each before the next.
    return [
        (count, tree_map_only(Tensor, lambda tensor: tensor.to(ranks.device), loaded))
        for count, loaded in zip(counts, loader, strict=True)
    ]


def _check_twice_differentiable(gradients: Sequence[Tensor | None]) -> None:
    """Raise SpecError if the gradients' graph contains a backward marked @once_differentiable.

    No path leads from there to the weights, so autograd would omit that part without an error.
    """
    waiting = [g.grad_fn for g in gradients if g is not None and g.grad_fn is not None]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name().endswith("Error"):
            raise _make_no_second_derivative_error("its backward is marked @once_differentiable")
        next_nodes = {after for after, _ in node.next_functions if after is not None} - visited
        visited |= next_nodes
        waiting.extend(next_nodes)


def _make_no_second_derivative_error(why: str) -> SpecError:
    return SpecError(
        f"train.diagnostics hessian needs second derivatives, but a layer of the model has none: {why}",
        "remove hessian from train.diagnostics, or make the layer's backward differentiable",
    )


@contextmanager
def _use_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode inside the context; restore modes, buffers and random states on exit."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices=devices), restore_buffers(model):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _use_plain_attention() -> Iterator[None]:
    """Compute attention by plain products: the fast kernels have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
