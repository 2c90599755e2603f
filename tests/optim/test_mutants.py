"""Errors planted into the optimizer, one line each: every one of them has to fail a check of ags_checks.

A line that is not there exactly once fails too, so that this list follows the code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import ags_checks
import ags_edge_checks  # noqa: F401  (adds its checks)
import pytest

from tula_cli import optim, presets

pytestmark = pytest.mark.torch
FOLDER = Path(optim.__file__).parent
PRESETS = "tula_cli.presets"  # all that the package imports of tula
NUMBERS = itertools.count()

# (module, the line or a part of it, the error in its place)
MUTANTS = {
    # the gate: Eq. 5 and line 5
    "norms instead of squared norms": ("parts.indicators", ".square().sum()", ".square().sum().sqrt()"),
    "the change is relative to now": (
        "parts.indicators",
        "return (now - before) / before",
        "return (now - before) / now",
    ),
    "the change has a sign": ("gate", "change = rise.abs()", "change = rise"),
    "the first step is scaled": ("parts.indicators", "torch.full_like(now, math.inf)", "torch.zeros_like(now)"),
    "the threshold is not strict": ("gate", "calm = change < self.delta", "calm = change <= self.delta"),
    "the branch is inverted": ("gate", "calm = change < self.delta", "calm = ~(change < self.delta)"),
    "NaN counts as calm": ("gate", "calm = change < self.delta", "calm = ~(change >= self.delta)"),
    "the previous norm is kept after scaled steps only": (
        "gate",
        "self.square, self.level, self.change = square, level, change",
        "self.square, self.level, self.change = square, level if calm else self.level, change",
    ),
    "the norm is of the scaled gradient": (
        "tula",
        "        if self.max_grad_norm is not None and grads:",
        "        self.gate.level = sum(g.square().sum() for g in grads.values()) if calm is not None else None\n"
        "        if self.max_grad_norm is not None and grads:",
    ),
    "clipping comes first": (
        "tula",
        "        calm = self._look(grads, due) if grads and self.identity is None else None",
        "        if self.max_grad_norm is not None and grads:\n"
        "            clip_(list(grads.values()), self.max_grad_norm)\n"
        "        calm = self._look(grads, due) if grads and self.identity is None else None",
    ),
    "the average of norms forgets the wrong share": (
        "parts.indicators",
        "torch.lerp(before, now, 1 - keep)",
        "torch.lerp(before, now, keep)",
    ),
    "a norm that is not finite stays in the average": (
        "parts.indicators",
        "torch.where(before.isfinite(), ",
        "torch.where(now == now, ",
    ),
    # the factors: lines 10 to 18
    "new factors act at once": (
        "tula",
        '        if calm is not None and self.apply_to == "gradient":',
        "        used = getattr(self.factors, '_found', None) or used\n"
        '        if calm is not None and self.apply_to == "gradient":',
    ),
    "s_max without the root": ("parts.indicators", "return math.sqrt(b_large / b_small)", "return b_large / b_small"),
    "no cap": ("parts.indicators", "posinf=high).clamp_(low, high)", "posinf=high).clamp_(low)"),
    "no floor": ("parts.indicators", "posinf=high).clamp_(low, high)", "posinf=high).clamp_(max=high)"),
    "x/0 is 1": ("parts.indicators", "posinf=high)", "posinf=1.0)"),
    "0/0 is the cap": ("parts.indicators", "nan_to_num_(nan=1.0", "nan_to_num_(nan=high"),
    "the ratio has a sign": ("parts.indicators", "ratio.abs_()", "ratio"),
    "the ratio is upside down": (
        "parts.indicators",
        "torch.div(small.to(dtype), ratio, out=ratio)",
        "torch.div(ratio, small.to(dtype), out=ratio)",
    ),
    "eps is added to a magnitude": ("parts.indicators", "copy=True).add_(eps)", "copy=True).abs_().add_(eps)"),
    "no eps": ("parts.indicators", "copy=True).add_(eps)", "copy=True)"),
    "the raw gradient is overwritten": ("parts.indicators", "large.to(dtype, copy=True)", "large.to(dtype)"),
    "the small gradient is overwritten": ("parts.indicators", "if overwrite and small.dtype", "if small.dtype"),
    "only the first part": (
        "parts.indicators",
        "zip(*_in_parts(result, small, large), strict=True)",
        "[next(zip(*_in_parts(result, small, large)))]",
    ),
    "tensor: the ratio is upside down": ("parts.indicators", "above[i] for i in indices", "below[i] for i in indices"),
    "the average of factors forgets the wrong share": ("parts.indicators", "list(new), 1 - keep)", "list(new), keep)"),
    "factors are not averaged": ("factors", "if factors is None or not self.ema:", "if True:"),
    # line 6 and Eq. 8
    "the device scales where the host does not": (
        "parts.gradient_scaling",
        "flag + (1 - flag)] *",
        "(1 - flag) + flag] *",
    ),
    "the device forgets the branch": (
        "parts.gradient_scaling",
        "multipliers = list(torch._foreach_mul(factors, flag))",
        "multipliers = list(torch._foreach_mul(factors, 1 - flag))",
    ),
    "the device forgets the branch, tensor": (
        "parts.gradient_scaling",
        "(torch.stack(factors) * flag + (1 - flag))",
        "(torch.stack(factors))",
    ),
    "the host forgets the branch": ("parts.gradient_scaling", "if tensors and bool(calm):", "if tensors:"),
    "the update is scaled in every step": ("parts.gradient_scaling", "(not device and not bool(calm))", "False"),
    "the device scales every update": (
        "parts.gradient_scaling",
        "torch.where(calm, moved, kept, out=moved)",
        "moved",
    ),
    "the device scales no update": (
        "parts.gradient_scaling",
        "torch.where(calm, moved, kept, out=moved)",
        "moved.copy_(kept)",
    ),
    "the update is scaled about zero": ("parts.gradient_scaling", "torch._foreach_sub_(after, before)", "pass"),
    "update and gradient are scaled": (
        "tula",
        '        if calm is not None and self.apply_to == "gradient":',
        "        if calm is not None:",
    ),
    "the update is scaled with the gradient's setting": (
        "tula",
        '        if calm is None or self.apply_to == "gradient":',
        "        if calm is None:",
    ),
    "static: factor 1": ("factors", "torch.full((), self._number, device", "torch.full((), 1.0, device"),
    "static: the cap without its root": (
        "factors",
        "max(1.0, self.setup.limit)",
        "max(1.0, self.setup.b_large / self.setup.small_batch_size)",
    ),
    "the gate counts without factors": ("gate", "calm if has_factors", "calm if True"),
    "steps before the first factors count as scaled": ("factors", "return bool(self._factor)", "return True"),
    "static counts no scaled steps": (
        "factors",
        "    def ready(self) -> bool:\n        return True",
        "    def ready(self) -> bool:\n        return False",
    ),
    # the small pass: lines 13 and 14
    "BatchNorm's statistics take part": ("parts.small_batch", "buffer.copy_(copy)", "pass"),
    "random numbers are drawn": ("parts.small_batch", "with torch.random.fork_rng(devices=devices):", "if True:"),
    "the small gradient keeps the loss scale": (
        "parts.small_batch",
        "factor = 1.0 / scaler.scale(torch.ones((), device=first.device))",
        "factor = torch.ones((), device=first.device)",
    ),
    "a gradient that is not finite is taken": (
        "factors",
        "        if self._each_step or self._finite is None or bool(self._finite):",
        "        if True:",
    ),
    "a staged gradient outlives zero_grad": (
        "parts.wrapper",
        "        self._drop()\n        self.base.zero_grad(set_to_none)",
        "        self.base.zero_grad(set_to_none)",
    ),
    "GradScaler takes the wrapper for a fused optimizer": (
        "parts.wrapper",
        "_step_supports_amp_scaling = False",
        "_step_supports_amp_scaling = True",
    ),
    # the state
    "the factors are not restored": (
        "factors",
        'self._factor = {params[i]: _match_layout(s, params[i]) for i, s in state["scale"].items()}',
        "pass",
    ),
    "the previous norm is not restored": ("gate", "else level.to(device)", "else None"),
    "the place in the epoch is not restored": ("factors", 'self.schedule.resume(state["schedule"])', "pass"),
    "factors of another batch are used": ("tula", 'void = ags["meaning"] != self._meaning()', "void = False"),
    "factors of another cap are used": (
        "parts.factor_source",
        'return {"kind": self.kind, "s_max": self.limit}',
        'return {"kind": self.kind}',
    ),
    "factors of another target are used": ("tula", '            "apply_to": self.apply_to,\n', ""),
    "norms of another average are used": ("gate", 'return {"ewma": self.ewma}', "return {}"),
    "factors of another average are used": ("factors", ', "ema": self.ema}', "}"),
    # the ranks' own gradients
    "the sum over the ranks": ("parts.local_norms", "own / dist.get_world_size()", "own"),
    "this rank's norm alone": ("parts.local_norms", "        dist.all_reduce(own)\n", ""),
    "both norms from before the reduction": (
        "parts.local_norms",
        "seen.averaged = _squares(grads)",
        "seen.averaged = seen.own.clone()",
    ),
    "both norms from after the reduction": (
        "parts.local_norms",
        "seen.averaged = _squares(grads)",
        "seen.averaged = seen.own = _squares(grads)",
    ),
    "norms in place of their squares": (
        "parts.local_norms",
        "torch.stack(norms(grads)).square()",
        "torch.stack(norms(grads))",
    ),
    "local: the root is missing": ("parts.indicators", "(small / large).sqrt()", "(small / large)"),
    "local: upside down": ("parts.indicators", "(small / large).sqrt()", "(large / small).sqrt()"),
    "local: what is not finite is taken": (
        "parts.indicators",
        "torch.where(small.isfinite() & large.isfinite(), ratio, before)",
        "ratio",
    ),
    "local: a large norm that is not finite is taken": (
        "parts.indicators",
        "small.isfinite() & large.isfinite()",
        "small.isfinite()",
    ),
    "local: a small norm that is not finite is taken": (
        "parts.indicators",
        "small.isfinite() & large.isfinite()",
        "large.isfinite()",
    ),
    "local: the cap of the small batch": (
        "factors",
        "math.sqrt(self.setup.world)",
        "math.sqrt(2 * self.setup.world)",
    ),
    "the reduction sums": ("parts.reduction", "    gradient.div_(state.group.size())\n", ""),
    # steps of nothing, schedules, seeds, many tensors
    "lamb: the ratio of a step of nothing": (
        "layerwise",
        "torch.where((w > 0) & (u > 0), w / u",
        "torch.where(w > 0, w / u",
    ),
    "lars: the rate without a gradient": ("layerwise", "(w > 0) & (g > 0), trust", "w > 0, trust"),
    "a place in another interval is taken": (
        "parts.refresh_schedule",
        '        if saved["every"] == self.every:',
        "        if True:",
    ),
    "a restart keeps what is owed": (
        "parts.refresh_schedule",
        "self.taken, self.refreshed, self.owed = 0, False, False",
        "self.taken, self.refreshed = 0, False",
    ),
    "the small pass draws the same on all ranks": ("parts.setup", "{step}, {self.rank}", "{step}"),
    "the small pass draws the same in each step": ("parts.setup", "{self.seed}, {step}, ", "{self.seed}, "),
    "listeners hear no end while replicas are apart": (
        "parts.reduction",
        "        return _done(gradient, after)",
        "        return _done(gradient, [])",
    ),
    "listeners hear nothing while replicas are apart": (
        "parts.reduction",
        "[listener(bucket) for listener in state.listeners]",
        "[listener(bucket) for listener in state.listeners if not state.local]",
    ),
    "the device takes 64 tensors of a chunk": (
        "parts.gradient_scaling",
        "        chunk.append(index)\n",
        "        chunk.append(index) if len(chunk) < 64 else None\n",
    ),
    "the device takes one chunk alone": (
        "parts.gradient_scaling",
        "            yield chunk\n            chunk, size = [], 0\n",
        "            yield chunk\n            return\n",
    ),
    # presets
    "paper: another threshold": (PRESETS, '"delta": 0.5', '"delta": 0.8'),
    "robust: no average": (PRESETS, '"scale_ema": 0.9', '"scale_ema": 0.0'),
    "robust: a gate": (PRESETS, '"delta": "inf"', '"delta": 0.5'),
}


def file_of(module: str) -> tuple[Path, bool]:
    """The file of a module, named from the package on, and whether it is a package."""
    if module == PRESETS:
        return Path(presets.__file__), False
    path = FOLDER.joinpath(*filter(None, module.split(".")))
    return (path / "__init__.py", True) if path.is_dir() else (path.with_suffix(".py"), False)


class _Changed(importlib.abc.SourceLoader):
    """Loads a module from its text with one replacement."""

    def __init__(self, path: Path, change: tuple[str, str]) -> None:
        self.path, self.change = path, change

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: str) -> bytes:
        return Path(path).read_text(encoding="utf-8").replace(*self.change).encode()

    def load(self) -> ModuleType:
        module = ModuleType(self.path.stem)
        exec(self.get_data(str(self.path)), vars(module))
        return module


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the package under another name."""

    def __init__(self, name: str, module: str, change: tuple[str, str]) -> None:
        self.name, self.module, self.change = name, module, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != self.name:
            return None
        file, inner = file_of(module)
        loader = _Changed(file, self.change if module == self.module else ("", ""))
        return importlib.machinery.ModuleSpec(fullname, loader, origin=str(file), is_package=inner)


@contextmanager
def mutant(module: str, old: str, new: str) -> Iterator[ModuleType]:
    name = f"mutant_{next(NUMBERS)}"
    finder = _Finder(name, module, (old, new))
    sys.meta_path.insert(0, finder)
    if module == PRESETS:
        sys.modules[PRESETS] = _Changed(Path(presets.__file__), (old, new)).load()
    try:
        yield importlib.import_module(name)
    finally:
        sys.modules[PRESETS] = presets
        sys.meta_path.remove(finder)
        for loaded in [other for other in sys.modules if other.partition(".")[0] == name]:
            del sys.modules[loaded]


def failing(package: ModuleType) -> list[str]:
    """The first check that fails, in a list; none where all pass."""
    for name, check in reversed(ags_checks.CHECKS.items()):  # the quick ones first
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(package)
        except AssertionError:
            return [name]
    return []


def test_a_copy_without_an_error_passes_every_check() -> None:
    with mutant("tula", "", "") as package:
        assert package.TulaOptimizer is not optim.TulaOptimizer
        assert failing(package) == []


FIRST_OF_EACH = {MUTANTS[error][0]: error for error in reversed(MUTANTS)}
"""Of each module the error that `make test` plants; `make proof` plants the others."""


def test_every_error_stands_for_a_line_that_is_there_once() -> None:
    counts = {error: file_of(module)[0].read_text().count(old) for error, (module, old, _) in MUTANTS.items()}
    assert {error: count for error, count in counts.items() if count != 1} == {}


@pytest.mark.parametrize(
    "error",
    [pytest.param(error, marks=[] if error in FIRST_OF_EACH.values() else pytest.mark.proof) for error in MUTANTS],
)
def test_an_error_is_caught(error: str) -> None:
    module, old, new = MUTANTS[error]
    assert file_of(module)[0].read_text(encoding="utf-8").count(old) == 1, "the line is there exactly once"
    with mutant(module, old, new) as package:
        assert failing(package)
