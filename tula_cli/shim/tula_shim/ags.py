"""Adaptive gradient scaling (AGS) around the steps of the script's own optimizer.

The script keeps its optimizer: a hook before its step scales the gradients, or keeps the weights, and a hook after it
completes the step. Both call tula's library of optimizers, which is copied into the run and needs a newer Python and
torch than the shim. If the script cannot be scaled, it fails with `CannotScaleError`, so that no training silently runs
without AGS.
"""

from __future__ import annotations

import importlib
import platform
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Callable, NoReturn

from .failing import write_failure
from .function_hooks import hook_function
from .optimizers import count_elements, get_full_name, get_scaler_class, list_parameters
from .ranks import count_ranks

if TYPE_CHECKING:
    from .ddp_split import DdpSplit
    from .plan import Plan


AGS_PACKAGE_NAME = "tula_ags"
STATE_DICT_KEY = "tula_ags"
"""Key of the state in the optimizer's state_dict, hence in the script's checkpoints: torch ignores unknown keys."""
LEAST_PYTHON, LEAST_TORCH = (3, 10), (2, 6)
MAX_INITIAL_STEPS_WITHOUT_AGS = 3
"""Steps without AGS after which the script fails; it may take a few steps before its model is wrapped in DDP."""
MAX_STEPS_WITHOUT_AGS = 1000
"""The same limit later in a training: steps of another, equally large optimizer, or without a reduction."""
REDUCTION_STEPS_COUNTED = 10
"""Steps at the start in which reductions are counted; later steps are assumed to have the same number."""


class CannotScaleError(RuntimeError):
    """AGS cannot act in this script; the message is for the user."""


class MethodHooks:
    """Base of the methods that act around the steps of the script's own optimizer."""

    method: str
    title: str  # name of the method in messages
    error: type[RuntimeError]  # raised if the method cannot act in this script
    _steps_taken = 0  # steps with the method, if it counts them

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.failed: RuntimeError | None = None
        self._notes: list[str] = []  # notes that are not reported yet

    def import_library(self, code: str, module: str) -> Any:
        """Return a module of tula's optimizers, whose package is in folder `code`; fail if this process is too old for it."""
        torch = str(getattr(sys.modules.get("torch"), "__version__", ""))
        torch_version = tuple(int(part) if part.isdigit() else 0 for part in torch.split(".")[:2])
        if sys.version_info[:2] < LEAST_PYTHON or torch_version < LEAST_TORCH:
            python, least = (".".join(map(str, version)) for version in (LEAST_PYTHON, LEAST_TORCH))
            self.fail(
                f"{self.title} needs Python {python} and torch {least} or newer, but the script runs Python {platform.python_version()} with torch {torch}"
            )
        if code not in sys.path:
            sys.path.append(code)  # kept, because parts of the package are imported late
        return importlib.import_module(f"{AGS_PACKAGE_NAME}.{module}")

    def pop_notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def fail(self, why: str) -> NoReturn:
        """Report the failure to the supervisor, and raise it now and at each later step.

        Raises:
            RuntimeError: always, of class `error`.
        """
        self.failed = self.error(f"train.method {self.method}: {why}; otherwise use train.method lbt or lrs")
        write_failure(self.plan, self.failed, step=self._steps_taken, where="method")
        raise self.failed


class AgsHooks(MethodHooks):
    """AGS in one process, bound to an optimizer and its model before the first backward pass at which both exist.

    Args:
        plan: with the settings of AGS.
        split: holds the DDP modules and the gradient scalers.
    """

    method, title, error = "ags", "AGS", CannotScaleError

    def __init__(self, plan: Plan, split: DdpSplit) -> None:
        assert plan.ags is not None
        super().__init__(plan)
        self.settings: dict[str, Any] = plan.ags
        self.split = split
        self.tula: Any | None = None  # the TulaOptimizer once bound, else None
        self.rounds = 0  # gradient reductions since the last step
        self.offered = False  # the loop provides small batches
        self._optimizers: list[weakref.ref[Any]] = []
        self._loaded: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._target = ""  # "gradient" or "update"; empty before binding
        self._step: Any | None = None  # context manager of the AGS step while the script's optimizer takes its step
        self._steps_without_ags = 0  # steps since the last one with AGS
        self._refresh_count = 0
        self._last_report: dict[str, Any] = {}
        self._totals = {"steps": 0.0, "scaled": 0.0, "mean": 0.0}

    # --- Binding to an optimizer

    def register_optimizer(self, optimizer: Any) -> None:
        """Register a new optimizer, and hooks that save and load the AGS state with it."""
        self._optimizers.append(weakref.ref(optimizer))
        if hasattr(optimizer, "register_load_state_dict_pre_hook"):  # since torch 2.1
            optimizer.register_state_dict_post_hook(self._add_ags_state)
            optimizer.register_load_state_dict_pre_hook(self._load_ags_state)

    def bind_largest_model(self) -> None:
        """Bind to the largest DDP module and the largest optimizer of its parameters, once both exist.

        Raises:
            CannotScaleError: they cannot be scaled.
        """
        if self.tula is None and (pair := self._find_largest_optimizer_and_model()) is not None:
            self.bind_optimizer(*pair)

    def register_model(self, optimizer: Any, model: Any) -> None:
        """Bind to the optimizer and the model that the loop declares.

        Raises:
            CannotScaleError: they cannot be scaled.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)  # the torch optimizer in a trainer's wrapper
        if self.tula is not None or model is None:
            return
        if not hasattr(optimizer, "register_step_post_hook"):
            self.fail(f"{get_full_name(optimizer)} is not a torch optimizer")
        if count_ranks() > 1 and all(
            getattr(model, "_orig_mod", model) is not module for module in self.split.list_modules()
        ):
            self.fail(
                f"tula_hooks.wrap was given {get_full_name(model)} on {count_ranks()} ranks: give it the"
                " DistributedDataParallel object that wraps the model"
            )
        self.bind_optimizer(optimizer, model)

    def _find_largest_optimizer_and_model(self) -> tuple[Any, Any] | None:
        """Return the largest of the optimizers that train the largest DDP model, and that model; None if there is none."""
        modules = self.split.list_modules()
        if not modules:
            return None
        model = max(modules, key=lambda module: sum(parameter.numel() for parameter in module.parameters()))
        ids = {id(parameter) for parameter in model.parameters()}
        optimizers = [
            optimizer
            for optimizer in self._list_optimizers()
            if any(id(parameter) in ids for parameter in list_parameters(optimizer))
        ]
        # With equal sizes max returns the first, which is the same on all ranks.
        return (max(optimizers, key=count_elements), model) if optimizers else None

    def _list_optimizers(self) -> list[Any]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def bind_optimizer(self, base: Any, model: Any) -> None:
        """Wrap an optimizer in AGS.

        Args:
            base: the optimizer.
            model: its module: a DDP module, or with one rank any module.

        Raises:
            CannotScaleError: they cannot be scaled.
        """
        dividing = self.import_library(self.settings["code"], "presets").NORMALISING_OPTIMIZERS
        if self.settings["settings"]["source"] == "local_norms" and self.split.has_hook(model):
            self.fail(
                f"the script registers its own communication hook ({self.split.hook}) on DistributedDataParallel, but"
                " ags.source: local_norms needs that hook: remove the script's, or set ags.source: small_batch"
            )
        target = self.settings["apply_to"] or ("gradient" if can_scale_gradients(base, dividing) else "update")
        try:
            tula = self.tula = self._wrap_optimizer(base, model, target)
        except ValueError as error:
            self.fail(str(error))
        self.split.hook = "default"  # the hook of AGS is not the script's own
        # Otherwise a fused step would unscale gradients after their norms are computed.
        base._step_supports_amp_scaling = False
        self._count_reductions(model)
        self._target = target
        if tula.identity is not None:
            self._notes.append(tula.identity)
        self._record_other_parameters(base, model)
        if (state := self._loaded.pop(base, None)) is not None:
            self._restore_ags_state(state)
        elif self.settings["resumed"]:
            self._notes.append(
                "the checkpoint contains no AGS state, so the factors start again at 1: check whether the script saves the state of its optimizer"
            )

    def _record_other_parameters(self, base: Any, model: Any) -> None:
        """Note the parameters, also of other models (a GAN has two), that other optimizers train unscaled."""
        scaled, module = {id(parameter) for parameter in list_parameters(base)}, getattr(model, "module", model)
        counts = [
            (optimizer, sum(int(p.numel()) for p in list_parameters(optimizer) if id(p) not in scaled))
            for optimizer in self._list_optimizers()
        ]
        others = [f"{get_full_name(optimizer)} ({count:,} parameters)" for optimizer, count in counts if count]
        if others:
            name, size = type(module).__qualname__, count_elements(base)
            words = f"AGS scales the {size:,} parameters of {get_full_name(base)}, which has the most parameters of the largest model ({name})"
            self._notes.append(f"{words}; not scaled: {', '.join(others)}")

    def _wrap_optimizer(self, base: Any, model: Any, target: str) -> Any:
        """Return AGS around the optimizer `base` of a model.

        Args:
            target: what the factors scale, "gradient" or "update".

        Raises:
            ValueError: the settings do not fit the optimizer or the model.
        """
        library, preset = importlib.import_module(AGS_PACKAGE_NAME), self.settings["settings"]
        names = ("b_large", "b_small", "available", "steps_per_epoch", "seed")
        if not self.plan.is_training:
            # Until the process exits, because the last steps of a probe have no reductions, as planned.
            warnings.simplefilter("ignore", library.MissedRefreshWarning)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", library.IdentityWarning)  # reported as a note instead
            return library.TulaOptimizer(
                base,
                model=model,
                exclude=() if preset.get("parameters") == "all" else None,
                **library.configure_ags({**preset, "apply_to": target}),
                **{name: self.settings[name] for name in names},
            )

    def _count_reductions(self, model: Any) -> None:
        """Count the reductions per step, if the method compares the gradients of the ranks."""
        assert self.tula is not None
        if self.tula.factors.reads_b_small:
            return

        def count_reduction(bucket: Any) -> None:
            self.rounds += bool(bucket.is_last())

        importlib.import_module(f"{AGS_PACKAGE_NAME}.ddp_hook").add_listener(
            getattr(model, "_orig_mod", model), count_reduction
        )

    # --- Steps

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Start a step of AGS if the optimizer is the bound one; return new arguments of its step, or None.

        A closure is evaluated here, because AGS needs its gradients.

        Raises:
            CannotScaleError: the loop lacks something that AGS needs.
        """
        if self.failed is not None:
            raise self.failed  # raised again, because the script caught the first one
        base = self.tula.base if self.tula is not None else (self._find_largest_optimizer_and_model() or (None,))[0]
        if optimizer is not base:
            return None
        from torch import no_grad

        changed = evaluate_closure(args, kwargs)
        if self.tula is None:  # no backward pass yet
            return changed
        self._check_loop()
        self._step = self.tula.wrap_base_step()  # replaces a step that an exception has aborted
        with no_grad():
            self._step.__enter__()
        return changed

    def _check_loop(self) -> None:
        assert self.tula is not None
        if self.rounds > 1 and self._steps_taken < REDUCTION_STEPS_COUNTED:
            self.fail(
                f"the script reduces its gradients {self.rounds} times per step, so the gradient of a single rank is not available:"
                " accumulate within no_sync() of DistributedDataParallel"
            )
        needs = self.tula.factors.reads_b_small and self.tula.identity is None
        if needs and not self.offered:
            self.fail(
                _NO_PEERS_EXPLANATION if self.settings["settings"]["source"] == "local_norms" else _HINT_OTHER_SOURCES
            )

    def after_step(self, optimizer: Any) -> None:
        """Complete a step of AGS; count the steps of other optimizers.

        Raises:
            CannotScaleError: the script trains without AGS.
        """
        if self.tula is None or optimizer is not self.tula.base:
            self._unscale_gradients(optimizer)
            return
        if self._step is not None:
            from torch import no_grad

            with no_grad():
                self._step.__exit__(None, None, None)
        self._step, self.rounds = None, 0
        self._steps_taken += 1
        refreshes_each_step = self.tula.identity is None and self.settings["settings"]["refresh"] == {"every": 1}
        refreshed = self.tula.factors.n_refresh > self._refresh_count or not refreshes_each_step
        self._refresh_count = self.tula.factors.n_refresh
        self._steps_without_ags = 0 if refreshed else self._steps_without_ags + 1
        if self._steps_without_ags > (MAX_STEPS_WITHOUT_AGS if self._refresh_count else MAX_INITIAL_STEPS_WITHOUT_AGS):
            self.fail(
                f"no gradient came through the script's DistributedDataParallel in {self._steps_without_ags} steps: check whether the script calls the wrapped module directly or reduces gradients without DistributedDataParallel"
            )

    def _unscale_gradients(self, optimizer: Any) -> None:
        if self.tula is None:
            self._steps_without_ags += 1
            if self._steps_without_ags >= MAX_INITIAL_STEPS_WITHOUT_AGS:
                self.fail(self._describe_missing_call())
        elif optimizer is not self.tula and count_elements(optimizer) >= count_elements(self.tula.base):
            self._steps_without_ags += 1
            if self._steps_without_ags > (MAX_STEPS_WITHOUT_AGS if self._steps_taken else REDUCTION_STEPS_COUNTED):
                self.fail(
                    f"AGS scales the optimizer {get_full_name(self.tula.base)}, but the script steps"
                    f" {get_full_name(optimizer)}, which has at least as many parameters"
                )

    def _describe_missing_call(self) -> str:
        if self.split.list_modules():
            return "no optimizer updates parameters of the model in the script's DistributedDataParallel"
        ranks = count_ranks()
        if ranks == 1:
            return _NO_PEERS_EXPLANATION
        return (
            f"the script's {ranks} ranks train without DistributedDataParallel (FSDP, ZeRO, tensor parallelism or its own"
            " reduction), so no rank has the whole gradient"
        )

    def discard_skipped_step(self) -> None:
        """Discard the gradients of a step that a GradScaler has skipped."""
        self.rounds = 0
        if self.tula is not None:
            self.tula._discard_pending_gradients()

    def compute_small_batch_gradient(self, loss: Callable[[int], Any]) -> None:
        """Compute the small batch's gradient if AGS needs it in this step (`TulaOptimizer.small_batch`)."""
        self.offered = True
        if self.tula is not None and self.tula.needs_small_batch:
            scalers = [scaler for reference in self.split.scalers if (scaler := reference()) is not None]
            self.tula.small_batch(
                loss, scaler=next((candidate for candidate in scalers if candidate.is_enabled()), None)
            )

    # --- State and reports

    def _add_ags_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        if self.tula is None or optimizer is not self.tula.base:
            return state
        return {**state, STATE_DICT_KEY: self.tula.ags_state_dict()}

    def _load_ags_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        state_of_ags = state.pop(STATE_DICT_KEY, None)  # `state` is a shallow copy, so the script's dict is unchanged
        if state_of_ags is None:
            return
        if self.tula is not None and optimizer is self.tula.base:
            self._restore_ags_state(state_of_ags)
        else:
            self._loaded[optimizer] = state_of_ags

    def _restore_ags_state(self, state: dict[str, Any]) -> None:
        assert self.tula is not None
        try:
            self.tula.load_ags_state_dict(state)
        except ValueError as error:
            self.fail(f"{error}: it was saved by another version of tula")
        self._refresh_count = self.tula.factors.n_refresh

    def report(self) -> dict[str, Any]:
        """Return the fields of a row for the steps since the last row and, in "so_far", for all steps.

        If there were no steps since, the fields of the last row are returned. Waits for the device.
        """
        if self.tula is None:
            return {}
        now = self.tula.report()
        if not now["steps"] and self._last_report:
            return self._last_report
        steps, totals = now["steps"], self._totals
        totals["steps"] += steps
        totals["scaled"] += now["scaled"] * steps
        totals["mean"] += now["mean"] * steps
        count = max(1.0, totals["steps"])
        step_totals = {
            "apply_to": self._target,
            "steps": totals["steps"],
            "scaled": totals["scaled"] / count,
            "mean": totals["mean"] / count,
        }
        self._last_report = {"ags": {**now, "so_far": step_totals}}
        return self._last_report


_NO_PEERS_EXPLANATION = (
    "with one process there is no other gradient to compare with: use two or more GPUs under DistributedDataParallel"
    " (search.nodes), or pass a part of the batch with tula_hooks.wrap(optimizer, model) and tula_hooks.small_batch(...)"
)
_HINT_OTHER_SOURCES = "ags.source small_batch needs tula_hooks.small_batch(...) in the loop, after backward(); ags.preset: robust does not need this call"


def can_scale_gradients(optimizer: Any, dividing: frozenset[str]) -> bool:
    """Return whether a factor on the gradient scales the step, as in SGD; for other optimizers, updates are scaled."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    return not names & dividing and any("SGD" in name for name in names)


def evaluate_closure(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Evaluate the closure of an optimizer's step; return the step's new arguments, or None without a closure."""
    from torch import enable_grad

    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with enable_grad():
        loss = closure()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": lambda: loss}
    return (args[0], lambda: loss, *args[2:]), kwargs


# --- Hooks into torch


def hook_steps(recorder: Any) -> None:
    """Hook torch's optimizers and their steps for the recorder's AGS. Must be called before the hooks that count steps."""
    import torch
    from torch.optim import optimizer as module

    def register_new_optimizer(original: Any, self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        recorder.ags.register_optimizer(self)

    def bind_and_run_backward(original: Any, *arguments: Any, **named: Any) -> Any:
        recorder.ags.bind_largest_model()
        return original(*arguments, **named)

    def step_and_detect_skip(original: Any, self: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        hooks: AgsHooks = recorder.ags
        before = hooks._steps_taken
        done = original(self, optimizer, *arguments, **named)
        if hooks.tula is not None and optimizer is hooks.tula.base and hooks._steps_taken == before:
            hooks.discard_skipped_step()
        return done

    hook_function(torch.optim.Optimizer, "__init__", register_new_optimizer)
    hook_function(torch.autograd, "backward", bind_and_run_backward)
    module.register_optimizer_step_pre_hook(lambda *step: recorder.ags.before_step(*step))
    module.register_optimizer_step_post_hook(lambda optimizer, *_: recorder.ags.after_step(optimizer))
    hook_function(get_scaler_class(), "step", step_and_detect_skip)
