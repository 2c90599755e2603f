"""Errors planted into the optimizer, one line each: every one of them has to fail a check of ags_checks.

A line that is not there exactly once fails too, so that this list follows the code.
"""

from __future__ import annotations

import ast
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
    "norms instead of squared norms": ("gradient_stats", ".square().sum()", ".square().sum().sqrt()"),
    "the change is relative to now": (
        "gradient_stats",
        "return (now - before) / before",
        "return (now - before) / now",
    ),
    "the change has a sign": ("ags", "change = rise.abs()", "change = rise"),
    "the first step is scaled": ("gradient_stats", "torch.full_like(now, math.inf)", "torch.zeros_like(now)"),
    "the threshold is not strict": ("ags", "should_scale = change < self.delta", "should_scale = change <= self.delta"),
    "the branch is inverted": ("ags", "should_scale = change < self.delta", "should_scale = ~(change < self.delta)"),
    "NaN counts as should_scale": (
        "ags",
        "should_scale = change < self.delta",
        "should_scale = ~(change >= self.delta)",
    ),
    "the previous norm is kept after scaled steps only": (
        "ags",
        "self.square, self.change = square, change",
        "self.square, self.change = square if should_scale else self.square, change",
    ),
    "the norm is of the scaled gradient": (
        "ags",
        "        if self.max_grad_norm is not None and grads:",
        "        self.gate.square = sum(g.square().sum() for g in grads.values()) if should_scale is not None else None\n"
        "        if self.max_grad_norm is not None and grads:",
    ),
    "clipping comes first": (
        "ags",
        "        should_scale = self._decide_and_refresh(grads, due) if grads and self.identity is None else None",
        "        if self.max_grad_norm is not None and grads:\n"
        "            clip_(list(grads.values()), self.max_grad_norm)\n"
        "        should_scale = self._decide_and_refresh(grads, due) if grads and self.identity is None else None",
    ),
    # the factors: lines 10 to 18
    "new factors act at once": (
        "ags",
        '        if should_scale is not None and self.apply_to == "gradient":',
        "        used = getattr(self.factors, '_next_factors', None) or used\n"
        '        if should_scale is not None and self.apply_to == "gradient":',
    ),
    "s_max without the root": ("gradient_stats", "return math.sqrt(b_large / b_small)", "return b_large / b_small"),
    "no cap": ("gradient_stats", "posinf=high).clamp_(low, high)", "posinf=high).clamp_(low)"),
    "no floor": ("gradient_stats", "posinf=high).clamp_(low, high)", "posinf=high).clamp_(max=high)"),
    "x/0 is 1": ("gradient_stats", "posinf=high)", "posinf=1.0)"),
    "0/0 is the cap": ("gradient_stats", "nan_to_num_(nan=1.0", "nan_to_num_(nan=high"),
    "the ratio has a sign": ("gradient_stats", "ratio.abs_()", "ratio"),
    "the ratio is upside down": (
        "gradient_stats",
        "torch.div(small.to(dtype), ratio, out=ratio)",
        "torch.div(ratio, small.to(dtype), out=ratio)",
    ),
    "eps is added to a magnitude": ("gradient_stats", "copy=True).add_(eps)", "copy=True).abs_().add_(eps)"),
    "no eps": ("gradient_stats", "copy=True).add_(eps)", "copy=True)"),
    "the raw gradient is overwritten": ("gradient_stats", "large.to(dtype, copy=True)", "large.to(dtype)"),
    "the small gradient is overwritten": ("gradient_stats", "if overwrite and small.dtype", "if small.dtype"),
    "only the first part": (
        "gradient_stats",
        "zip(*_split_for_caches(result, small, large), strict=True)",
        "[next(zip(*_split_for_caches(result, small, large)))]",
    ),
    "tensor: the ratio is upside down": ("gradient_stats", "above[i] for i in indices", "below[i] for i in indices"),
    "the average of factors forgets the wrong share": ("ags", "(old, new, 1 - self.ema)", "(old, new, self.ema)"),
    "factors are not averaged": ("ags", "if factors is None or not self.ema:", "if True:"),
    # line 6 and Eq. 8
    "the device scales where the host does not": (
        "gradient_stats",
        "flag + (1 - flag)] *",
        "(1 - flag) + flag] *",
    ),
    "the device forgets the branch": (
        "gradient_stats",
        "multipliers = list(torch._foreach_mul(factors, flag))",
        "multipliers = list(torch._foreach_mul(factors, 1 - flag))",
    ),
    "the device forgets the branch, tensor": (
        "gradient_stats",
        "(torch.stack(factors) * flag + (1 - flag))",
        "(torch.stack(factors))",
    ),
    "the host forgets the branch": ("gradient_stats", "if tensors and bool(should_scale):", "if tensors:"),
    "the update is scaled in every step": ("gradient_stats", "(not device and not bool(should_scale))", "False"),
    "the device scales every update": (
        "gradient_stats",
        "torch.where(should_scale, moved, kept, out=moved)",
        "moved",
    ),
    "the device scales no update": (
        "gradient_stats",
        "torch.where(should_scale, moved, kept, out=moved)",
        "moved.copy_(kept)",
    ),
    "the update is scaled about zero": ("gradient_stats", "torch._foreach_sub_(after, before)", "pass"),
    "update and gradient are scaled": (
        "ags",
        '        if should_scale is not None and self.apply_to == "gradient":',
        "        if should_scale is not None:",
    ),
    "the update is scaled with the gradient's setting": (
        "ags",
        '        if should_scale is None or self.apply_to == "gradient":',
        "        if should_scale is None:",
    ),
    "static: factor 1": ("ags", "torch.full((), self._constant_factor, device", "torch.full((), 1.0, device"),
    "static: the cap without its root": (
        "ags",
        "max(1.0, self.setup.max_factor)",
        "max(1.0, self.setup.b_large / self.setup.small_batch_size)",
    ),
    "the gate counts without factors": ("ags", "should_scale if has_factors", "should_scale if True"),
    "steps before the first factors count as scaled": ("ags", "return bool(self._factor)", "return True"),
    "static counts no scaled steps": (
        "ags",
        "    def has_factors(self) -> bool:\n        return True",
        "    def has_factors(self) -> bool:\n        return False",
    ),
    # the small pass: lines 13 and 14
    "BatchNorm's statistics take part": ("ags", "buffer.copy_(copy)", "pass"),
    "random numbers are drawn": ("ags", "with torch.random.fork_rng(devices=devices):", "if True:"),
    "the small gradient keeps the loss scale": (
        "ags",
        "factor = 1.0 / scaler.scale(torch.ones((), device=first.device))",
        "factor = torch.ones((), device=first.device)",
    ),
    "a gradient that is not finite is taken": (
        "ags",
        "        if self._refreshes_each_step or self._finite is None or bool(self._finite):",
        "        if True:",
    ),
    "a staged gradient outlives zero_grad": (
        "wrapper",
        "        self._discard_pending_gradients()\n        self.base.zero_grad(set_to_none)",
        "        self.base.zero_grad(set_to_none)",
    ),
    "GradScaler takes the wrapper for a fused optimizer": (
        "wrapper",
        "_step_supports_amp_scaling = False",
        "_step_supports_amp_scaling = True",
    ),
    # the state
    "the factors are not restored": (
        "ags",
        'self._factor = {params[i]: _match_layout(s, params[i]) for i, s in state["scale"].items()}',
        "pass",
    ),
    "the previous norm is not restored": ("ags", "else square.to(device)", "else None"),
    "the place in the epoch is not restored": ("ags", 'self.schedule.load_state_dict(state["schedule"])', "pass"),
    "factors of another batch are used": ("ags", 'void = ags["meaning"] != self._get_state_settings()', "void = False"),
    "factors of another cap are used": (
        "ags",
        'return {"kind": self.kind, "s_max": self.max_factor}',
        'return {"kind": self.kind}',
    ),
    "factors of another target are used": ("ags", '            "apply_to": self.apply_to,\n', ""),
    "factors of another average are used": ("ags", ', "ema": self.ema}', "}"),
    # the ranks' own gradients
    "the sum over the ranks": ("ddp_hook", "local_squares / dist.get_world_size()", "local_squares"),
    "this rank's norm alone": ("ddp_hook", "        dist.all_reduce(local_squares)\n", ""),
    "both norms from before the reduction": (
        "ddp_hook",
        "seen.averaged = _compute_squared_norms(grads)",
        "seen.averaged = seen.local.clone()",
    ),
    "both norms from after the reduction": (
        "ddp_hook",
        "seen.averaged = _compute_squared_norms(grads)",
        "seen.averaged = seen.local = _compute_squared_norms(grads)",
    ),
    "norms in place of their squares": (
        "ddp_hook",
        "torch.stack(compute_norms(grads)).square()",
        "torch.stack(compute_norms(grads))",
    ),
    "local: the root is missing": ("gradient_stats", "(small / large).sqrt()", "(small / large)"),
    "local: upside down": ("gradient_stats", "(small / large).sqrt()", "(large / small).sqrt()"),
    "local: what is not finite is taken": (
        "gradient_stats",
        "torch.where(small.isfinite() & large.isfinite(), ratio, before)",
        "ratio",
    ),
    "local: a large norm that is not finite is taken": (
        "gradient_stats",
        "small.isfinite() & large.isfinite()",
        "small.isfinite()",
    ),
    "local: a small norm that is not finite is taken": (
        "gradient_stats",
        "small.isfinite() & large.isfinite()",
        "large.isfinite()",
    ),
    "local: the cap of the small batch": (
        "ags",
        "math.sqrt(self.setup.world)",
        "math.sqrt(2 * self.setup.world)",
    ),
    "the reduction sums": ("ddp_hook", "    gradient.div_(state.group.size())\n", ""),
    # steps of nothing, schedules, seeds, many tensors
    "lamb: the ratio of a step of nothing": (
        "layerwise",
        "torch.where((w > 0) & (u > 0), w / u",
        "torch.where(w > 0, w / u",
    ),
    "lars: the rate without a gradient": ("layerwise", "(w > 0) & (g > 0), trust", "w > 0, trust"),
    "a place in another interval is taken": (
        "ags",
        '        if saved["every"] == self.every:',
        "        if True:",
    ),
    "a restart keeps what is owed": (
        "ags",
        "self.taken, self.refreshed, self.owed = 0, False, False",
        "self.taken, self.refreshed = 0, False",
    ),
    "the small pass draws the same on all ranks": ("ags", "{step}, {self.rank}", "{step}"),
    "the small pass draws the same in each step": ("ags", "{self.seed}, {step}, ", "{self.seed}, "),
    "listeners hear no end while replicas are apart": (
        "ddp_hook",
        "        return _finish_reduction(gradient, after)",
        "        return _finish_reduction(gradient, [])",
    ),
    "listeners hear nothing while replicas are apart": (
        "ddp_hook",
        "[listener(bucket) for listener in state.listeners]",
        "[listener(bucket) for listener in state.listeners if not state.local]",
    ),
    "the device takes 64 tensors of a chunk": (
        "gradient_stats",
        "        chunk.append(index)\n",
        "        chunk.append(index) if len(chunk) < 64 else None\n",
    ),
    "the device takes one chunk alone": (
        "gradient_stats",
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
    with mutant("ags", "", "") as package:
        assert package.TulaOptimizer is not optim.TulaOptimizer
        assert failing(package) == []


def definition_with(module: str, line: str) -> tuple[str, str]:
    """Return the module and the class or function of it in which a line stands."""
    text = file_of(module)[0].read_text(encoding="utf-8")
    number = text[: text.index(line)].count("\n") + 1
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= number <= (node.end_lineno or 0):
            return module, node.name
    return module, ""


FIRST_OF_EACH = {definition_with(*MUTANTS[error][:2]): error for error in reversed(MUTANTS)}
"""For each class or function the error that `make test` plants; `make proof` plants the others."""


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
