"""Orthogonalised steps: the length of the optimizer's step in Muon's direction (Jordan et al. 2024), so its learning rate fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import gradient_stats, sharding
from .gradient_stats import chunk_indices, clip_, copy_tensors, get_accumulation_dtype, group_by_dtype
from .wrapper import OptimizerWrapper, check_sharding, get_rank_and_world, list_class_names

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that Muon iterates: steep at 0, and its values stay near 1 without converging."""
NEWTON_SCHULZ_ITERATIONS = 5

MAX_SHORTER_SIDE = 2048
"""Matrices with a longer shorter side get the base optimizer's step, as orthogonalising them would cost too much."""

GPU_DTYPE = torch.bfloat16
"""Precision of the matrix products on a GPU, as in Muon."""
MAX_PADDING = 1.4
"""Maximum ratio of elements with zero padding to elements without in a batch on a GPU: padding saves kernels."""
MAX_BATCH_ELEMENTS = 2**24, 2**18
"""Maximum elements of a batch of several matrices on a GPU and on the CPU, where batching saves hardly any time."""

NO_MATRIX_NAMES = frozenset(
    {"bias", "pos", "position", "positional", "embed", "embedding", "embeddings", "token", "tokens"}
)
"""Words in the names of parameters that are added to inputs or looked up, and are not multiplied as matrices."""

BROADCAST_INTERVAL_STEPS = 100
"""Steps between two broadcasts of rank 0's matrices, as products may be rounded differently on other hardware."""


REFUSED_OPTIMIZERS = {
    "LBFGS": "evaluates its closure several times per step",
    "Muon": "already orthogonalises its steps",
    "MuonWithAdamW": "already orthogonalises its steps",
}
"""Optimizers that `Ortho` does not wrap, with the reason."""

INDEPENDENT_OF_WEIGHTS = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop"}
)
"""Classes of torch.optim whose update depends on the weights through weight decay alone."""
COUPLED_DECAY_CLASSES = INDEPENDENT_OF_WEIGHTS - {"AdamW"} | {"ASGD"}
"""Classes with weight decay as part of the gradient (L2), unless a group has `decoupled_weight_decay`."""


def describe_why_not_orthogonalizable(base: torch.optim.Optimizer) -> str:
    """Return why the steps of an optimizer cannot be orthogonalised; empty if they can."""
    names = list_class_names(base)
    return next(
        (f"{name.removesuffix('WithAdamW')} {why}" for name, why in REFUSED_OPTIMIZERS.items() if name in names), ""
    )


class Ortho(OptimizerWrapper):
    """Wraps an optimizer and replaces its update of each matrix by the nearest (semi-)orthogonal one of the same length.

    With u the update of a weight without its weight decay, as a matrix of (outputs, all else), and U S V^T its singular
    value decomposition, the weight moves by |u| / |U V^T| U V^T instead: all directions of the update have equal weight,
    while a few strong ones dominate the base optimizer's update. U V^T is approximated by five iterations of a polynomial (Newton-Schulz),
    as in Muon. The length is that of the base optimizer's update ("grafting", Agarwal et al. 2020), so learning rate, schedule and
    momentum keep their meaning. Decoupled weight decay (AdamW's) is applied to the weights outside of the update; weight decay that the
    base adds to the gradient (SGD's and Adam's L2) is a part of the gradient and so of the update.

    Matrices and the weights of convolutions are orthogonalised. Embeddings (and output layers tied to them), depthwise
    convolutions (one input per filter), normalization layers, biases, positions, and matrices whose shorter side is above
    2048 get the base optimizer's step.

    Under DistributedDataParallel every rank computes the same result from the same averaged gradients; a broadcast every 100
    steps removes differences of rounding. For a module that `fully_shard` has sharded over all ranks, the updates of the
    matrices are gathered, some at a time, and each rank keeps its shard of the result. `param_groups`, `state`, `defaults`
    and `state_dict()` are the base optimizer's. Do not clip before the step; use `max_grad_norm`.

    Args:
        base: an optimizer of torch.optim, or any other. The update of an optimizer from elsewhere (or of a derived class) is
            the difference of the weights around its step, which needs weights in float32 or float64.
        model: the module, its DistributedDataParallel, or a module sharded by `fully_shard`.
        max_grad_norm: clips the joint norm of the gradients.

    Raises:
        ValueError: the base optimizer orthogonalises by itself (Muon) or needs several evaluations per step (LBFGS), its
            update is a difference of weights in half precision, or parameters are sharded in another way.
    """

    def __init__(self, base: torch.optim.Optimizer, *, model: nn.Module, max_grad_norm: float | None = None) -> None:
        if why := describe_why_not_orthogonalizable(base):
            raise ValueError(f"{why}; use torch.optim.SGD or AdamW")
        check_sharding(base, model, "Ortho")
        super().__init__(base)
        self.max_grad_norm = max_grad_norm
        self._matrix_ids = frozenset(map(id, find_matrices(model)))
        self._sharded = sharding.is_sharded(model)
        _, self._world = get_rank_and_world(model)
        self._steps = 0
        kind = type(base)
        self._by_zeros = kind is getattr(torch.optim, kind.__name__, None) and kind.__name__ in INDEPENDENT_OF_WEIGHTS
        if not self._by_zeros and (half := {p.dtype for p in self.matrices()} - {torch.float32, torch.float64}):
            raise ValueError(
                f"weights in {', '.join(sorted(map(str, half)))} are too coarse for the small steps of {kind.__name__};"
                " use torch.optim.SGD or AdamW, or weights in float32 (autocast still computes in half precision)"
            )

    def matrices(self) -> list[Tensor]:
        """The parameters whose steps are orthogonalised, in the order of the groups."""
        return [p for group in self.param_groups for p in self._select_matrices(group)]

    def _select_matrices(self, group: dict[str, Any]) -> list[Tensor]:
        return [p for p in group["params"] if self._is_matrix(p)]

    def _is_matrix(self, param: Tensor) -> bool:
        return id(param) in self._matrix_ids and param.requires_grad and 1 < _get_sides(param)[0] <= MAX_SHORTER_SIDE

    @contextmanager
    def wrap_base_step(self) -> Iterator[None]:
        """Orthogonalise the step that the base optimizer takes inside the context; needs a temporary copy of the matrices.

        If the update does not depend on the weights, the base optimizer steps from zeros: the result is the update without
        weight decay, in full precision (added to weights in half precision it would be rounded away).
        """
        all_params = [p for group in self.param_groups for p in group["params"]]
        grads = [sharding.get_local_shard(p.grad) for p in all_params if p.grad is not None]
        if self.max_grad_norm is not None and grads:
            square = sharding.compute_sharded_squared_norm(grads) if self._sharded else None
            clip_(grads, self.max_grad_norm, square=square)
        params = [p for p in self.matrices() if p.grad is not None]
        if not params:
            yield
            return
        weights = [sharding.get_local_shard(p) for p in params]
        start = copy_tensors(weights)
        decays = self._copy_decoupled_decays(dict(zip(map(id, params), start, strict=True)))
        gradients = [p.grad for p in params]
        if self._by_zeros:
            self._add_coupled_decay()
            torch._foreach_zero_(weights)
        try:
            yield
        except BaseException:
            torch._foreach_copy_(weights, start)
            raise
        finally:
            for p, grad in zip(params, gradients, strict=True):
                p.grad = grad
        for tensors, factor in decays:
            torch._foreach_mul_(tensors, factor)
        if not self._by_zeros:
            torch._foreach_sub_(weights, start)
        if self._sharded:
            orthogonalize_shards_(params, weights)
        else:
            orthogonalize_(weights)
        torch._foreach_add_(weights, start)
        self._steps += 1
        if self._steps % BROADCAST_INTERVAL_STEPS == 0:
            self._broadcast_matrices()

    def _copy_decoupled_decays(self, weights_before: dict[int, Tensor]) -> list[tuple[list[Tensor], Any]]:
        """Return copies of weights and the factor by which decoupled weight decay multiplies them in this step."""
        result = []
        for group in self.param_groups:
            tensors = [weights_before[id(p)] for p in self._select_matrices(group) if id(p) in weights_before]
            if tensors and group.get("weight_decay") and not self._has_coupled_decay(group):
                result.append((tensors, 1 - group["lr"] * group["weight_decay"]))
        return result

    def _has_coupled_decay(self, group: dict[str, Any]) -> bool:
        names = list_class_names(self.base)
        return not group.get("decoupled_weight_decay", "AdamW" in names) and bool(names & COUPLED_DECAY_CLASSES)

    def _add_coupled_decay(self) -> None:
        """Add weight decay to the gradients of matrices as the base optimizer would, since it sees zeros for weights."""
        for group in self.param_groups:
            decay = group.get("weight_decay")
            params = [p for p in self._select_matrices(group) if p.grad is not None]
            if params and decay and self._has_coupled_decay(group):
                # unlike a sum, a copy keeps the strides of dimensions of size 1
                decayed = copy_tensors([p.grad for p in params if p.grad is not None])
                torch._foreach_add_(decayed, params, alpha=-decay if group["maximize"] else decay)
                for p, grad in zip(params, decayed, strict=True):
                    p.grad = grad

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state; there is no other."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a base optimizer, wrapped or not."""
        self.base.load_state_dict(state_dict)

    def _broadcast_matrices(self) -> None:
        if self._world > 1 and not self._sharded:
            for handle in [dist.broadcast(p, 0, async_op=True) for p in self.matrices()]:
                assert handle is not None
                handle.wait()


def orthogonalize_shards_(params: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
    """Orthogonalise sharded updates as `orthogonalize_` does; every rank must call it.

    Some matrices at a time are gathered: per step as many bytes as all matrices have.

    Args:
        params: DTensors, for their sharding.
        updates: this rank's shards, changed in place.
    """
    order = sorted(range(len(params)), key=lambda i: (str(updates[i].dtype), _get_sides(params[i])))
    for chunk in chunk_indices(params, order):
        for indices in group_by_dtype(updates[i] for i in chunk).values():
            some = [chunk[i] for i in indices]
            gathered = sharding.gather_shards([params[i] for i in some], [updates[i] for i in some])
            orthogonalize_(gathered)
            shards = [sharding.select_shard(w, params[i]) for w, i in zip(gathered, some, strict=True)]
            torch._foreach_copy_([updates[i] for i in some], shards)


def orthogonalize_(updates: Sequence[Tensor]) -> None:
    """Replace each update by its orthogonal direction at the same Frobenius norm, in place; zeros stay zeros.

    Matrices with the same shorter side are multiplied in one batch (`batch_matrices`), on a GPU in bfloat16 as in Muon, else
    in float32, or float64 for float64.

    Args:
        updates: tensors of two dimensions or more; the first dimension gives the rows of the matrix.
    """
    for (_, dtype), indices in group_by_dtype(updates).items():
        selected = [updates[i] for i in indices]
        device = gradient_stats.is_on_accelerator(selected[0])
        lengths = torch._foreach_norm(selected, 2, dtype=get_accumulation_dtype(dtype))
        padding, max_elements = (MAX_PADDING, MAX_BATCH_ELEMENTS[0]) if device else (1.0, MAX_BATCH_ELEMENTS[1])
        for batch in batch_matrices([_get_sides(u) for u in selected], padding=padding, max_elements=max_elements):
            stacked = torch.stack([lengths[i] for i in batch])
            work_dtype = GPU_DTYPE if device else get_accumulation_dtype(dtype)
            _orthogonalize_batch_([selected[i] for i in batch], stacked, work_dtype)


def batch_matrices(sides: Sequence[tuple[int, int]], *, padding: float, max_elements: int) -> list[list[int]]:
    """Return the positions of the matrices of each batch; those of a batch are padded with zeros to the longest.

    Args:
        sides: (shorter, longer) side of each matrix; those of a batch have the same shorter side.
        padding: largest ratio of the elements of a batch to those of its matrices; 1: equal longer sides, too.
        max_elements: largest number of elements of a batch; a single matrix may have more.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(sides)), key=lambda i: sides[i], reverse=True):
        batch = [*batches[-1], index] if batches else [index]
        short, longest = sides[batch[0]]
        filled, elements = longest * len(batch), sum(sides[i][1] for i in batch)
        if batches and sides[index][0] == short and filled <= padding * elements and short * filled <= max_elements:
            batches[-1] = batch
        else:
            batches.append([index])
    return batches


def _orthogonalize_batch_(updates: Sequence[Tensor], lengths: Tensor, dtype: torch.dtype) -> None:
    """Orthogonalise updates of the same shorter side in one batch of `dtype`; `lengths` are their norms, (k,)."""
    sides = [_get_sides(u) for u in updates]
    short, longest = sides[0][0], max(long for _, long in sides)
    new = updates[0].new_empty if all(long == longest for _, long in sides) else updates[0].new_zeros
    if updates[0].shape[0] > short:  # transpose the view instead of copying
        work = new((len(updates), longest, short), dtype=dtype).mT
    else:
        work = new((len(updates), short, longest), dtype=dtype)
    torch._foreach_copy_(_get_views(work, updates), list(updates))
    direction = run_newton_schulz(work)
    norms = torch.linalg.vector_norm(direction, dim=(1, 2), keepdim=True, dtype=lengths.dtype)
    scales = lengths.view(-1, 1, 1) / norms.clamp_(min=torch.finfo(norms.dtype).tiny)
    torch._foreach_copy_(list(updates), _get_views(direction * scales, updates))


def _get_sides(update: Tensor) -> tuple[int, int]:
    rows, columns = update.shape[0], math.prod(update.shape[1:])
    return min(rows, columns), max(rows, columns)


def _get_views(batch: Tensor, updates: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a batch, (k, shorter, longest), in the shapes of the k updates."""
    views = []
    for matrix, update in zip(batch.unbind(), updates, strict=True):
        short, long = _get_sides(update)
        tall = update.shape[0] > short
        matrix_ = matrix[:, :long].T if tall else matrix[:, :long]
        views.append(matrix_.unflatten(1, update.shape[1:]))
    return views


def run_newton_schulz(matrices: Tensor) -> Tensor:
    """Return an approximation of U V^T of each matrix U S V^T by Newton-Schulz iteration with Muon's coefficients.

    Args:
        matrices: (k, m, n), m at most n; columns of zeros stay zeros and have no effect on the others.
    """
    # Division by the Frobenius norm makes all singular values at most 1.
    work: Tensor = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp_(min=1e-30)
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = torch.bmm(work, work.mT)
        work = torch.baddbmm(work, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), work, beta=a)
    return work


def find_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of linear layers and of convolutions over several input channels."""
    excluded, convolutions = set[int](), set[int]()
    for path, module in model.named_modules():
        everything = set(map(id, module.parameters()))  # including those of a parametrization
        direct = {name: id(p) for name, p in module.named_parameters(recurse=False)}
        names = list_class_names(module)
        if isinstance(module, nn.modules.conv._ConvNd):
            (excluded if module.groups == module.in_channels > 1 else convolutions).update(everything)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            excluded |= everything
        elif any("Embedding" in name or name.rstrip("123d").endswith("Norm") for name in names):
            excluded.update(direct.values())
        if isinstance(module, nn.ParameterList | nn.ParameterDict):
            direct = {f"{path.rpartition('.')[2]}_{name}": value for name, value in direct.items()}
        excluded.update(value for name, value in direct.items() if NO_MATRIX_NAMES & set(name.lower().split("_")))
    return [
        p
        for p in model.parameters()
        if id(p) not in excluded and (p.ndim == 2 or (id(p) in convolutions and p.ndim > 2))
    ]
