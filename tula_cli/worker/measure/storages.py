"""Tensors without memory: which storages are alive, and which kernels a GPU would take."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class LiveStorages(TorchDispatchMode):
    """Records when tensor storages come to be and die while it is active; counts the bytes that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0  # bytes
        self.peak = 0  # bytes
        self.events: list[int] = []  # n + 1: number n comes to be; -(n + 1): it dies
        self.sizes: list[int] = []  # bytes of each number
        self._held: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.hold(tree_leaves(result))
        return result

    def hold(self, values: Iterable[Any]) -> None:
        """Count the storages of the tensors among the values until they die."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._track(value.untyped_storage())
        self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Begin a new peak at what is alive."""
        self.peak = self.live

    def alive(self) -> list[int]:
        """Return the numbers that are alive, ascending."""
        return sorted(number for _, number in self._held.values())

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._held:
            return
        number, size = len(self.sizes), storage.nbytes()
        # The Python object lives as long as the storage does, also where only autograd in C++ holds it.
        self._held[key] = weakref.ref(storage, lambda _: self._release(key)), number
        self.sizes.append(size)
        self.events.append(number + 1)
        self.live += size

    def _release(self, key: int) -> None:
        _, number = self._held.pop(key)
        self.events.append(-number - 1)
        self.live -= self.sizes[number]


class AsOnGpu(TorchFunctionMode):
    """Runs operations on the CPU's fake tensors in the way that costs the memory they cost on a GPU.

    torch has no backward pass on fake CUDA tensors where there is no CUDA. What differs: CUDA's dropout keeps a mask of
    one byte an element, and its autocast runs these functions in float32.
    """

    IN_FLOAT32 = frozenset({
        "layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "kl_div",
        "binary_cross_entropy_with_logits", "smooth_l1_loss", "cosine_similarity", "normalize", "softplus", "norm", "cdist",
        "pow", "__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "reciprocal", "rsqrt", "exp", "expm1", "log", "log2",
        "log10", "log1p", "acos", "asin", "cosh", "sinh", "tan", "erfinv",
    })  # fmt: skip
    """By their names in torch and torch.nn.functional, as torch's manual has them under autocasting on CUDA."""
    SUMMED_IN_FLOAT32 = frozenset({"sum", "prod", "cumsum", "cumprod"})
    """They read narrow numbers and write wide ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout and (drop := _fused_dropout(*args, **kwargs)) is not None:
            return drop
        name = getattr(func, "__name__", "")
        if name in self.IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, _to_float32, (args, kwargs))
        if name in self.SUMMED_IN_FLOAT32 and torch.is_autocast_enabled("cpu") and _is_narrow(args[0]):
            kwargs = {"dtype": torch.float32, **kwargs}
        return func(*args, **kwargs)


def _fused_dropout(
    values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor | None:
    """Return what CUDA's kernel does; None where it would not run."""
    if inplace or not training or not 0 < p < 1:
        return None
    return torch.native_dropout(values, p, True)[0]


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if _is_narrow(tensor) else tensor


def _is_narrow(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
