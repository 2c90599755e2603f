"""The cost of DistributedDataParallel, from separate steps after the timed ones: synchronisation, norms, local work.

The script's modules get no hooks before that: the timed steps run as they would without tula.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable

from .clocks import Mark
from .function_hooks import hook_function
from .optimizers import get_scaler_class

Inner = Callable[[Any, Any], Any]


class DdpSplit:
    """The DDP modules of this process and the measurements on them.

    exposed: seconds per step from the last local gradient to the end of the reduction, one pair of marks per backward
    pass. norms: squared gradient norms per step, of this rank's gradient and of the reduced one.
    """

    def __init__(self) -> None:
        self.modules: list[weakref.ref[Any]] = []
        self.scalers: list[weakref.ref[Any]] = []
        self.hook = "default"  # name of the script's own communication hook
        self.note = ""  # why a measurement is missing
        self.local = True  # the steps without synchronisation reduced no gradients
        self.exposed: list[list[tuple[Mark, Mark]]] = []
        self.norms: list[tuple[Any, Any]] = []
        self._hooked: set[int] = set()
        self._handles: list[Any] = []
        self._watching = ""  # "sync", "norms" or "local"; empty if nothing is measured
        self._synchronises = False
        self._last: Mark | None = None
        self._now: list[tuple[Mark, Mark]] = []
        self._local: list[Any] = []
        self._reduced: list[Any] = []
        self._rounds = 0

    def list_modules(self) -> list[Any]:
        return [module for reference in self.modules if (module := reference()) is not None]

    def has_hook(self, module: Any) -> bool:
        """Return whether a DDP module has a communication hook that is not the shim's own."""
        return id(getattr(module, "_orig_mod", module)) in self._hooked

    # --- Phases

    def watch_sync(self, mark: Callable[[], Mark]) -> None:
        """Start timing each backward pass that reduces gradients."""
        self._watching = "sync"

        def mark_sync_done(_: object) -> None:
            self._last = mark()

        for module in self.list_modules():
            self._handles.append(module.register_forward_pre_hook(self._before_forward))
            self._handles += [p.register_hook(mark_sync_done) for p in module.parameters() if p.requires_grad]

    def watch_norms(self) -> None:
        """Start recording the norms of each bucket before and after its reduction."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self._remove_hooks()
        self._watching = "norms"
        for module in self.list_modules():
            if id(module) not in self._hooked:
                try:
                    module.register_comm_hook(module.process_group, allreduce_hook)
                except RuntimeError as error:  # a hook is registered from C++, which this class does not see
                    self.note = f"gradient norms not measured: {error}"
                self.hook = "default"

    def skip_sync(self) -> None:
        """Stop reducing gradients in backward passes, so that only the local work remains."""
        self._watching = "local"
        self._handles = [module.register_forward_pre_hook(self._before_forward) for module in self.list_modules()]

    def stop_watching(self) -> None:
        """End the measurements, and remove all hooks of modules and parameters."""
        self._remove_hooks()
        self._watching = ""

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- Events within a phase

    def _before_forward(self, module: Any, _: object) -> None:
        import torch

        if not torch.is_grad_enabled():  # not module.training, because Lightning trains modules for which it is False
            return
        if self._watching == "local":
            module.require_backward_grad_sync = False
        self._synchronises = bool(module.require_backward_grad_sync)

    def after_backward(self, mark: Callable[[], Mark]) -> None:
        """Record the end of a backward pass: on a GPU the stream waits for the reduction by then."""
        if self._watching == "sync" and self._synchronises and self._last is not None:
            self._now.append((self._last, mark()))
        self._last = None

    def after_step(self) -> None:
        """Complete a step: store its measurements."""
        if self._watching == "sync":
            self.exposed.append(self._now)
        elif self._watching == "norms" and self._local:
            self._record_norms()
        self._now, self._local, self._reduced, self._rounds = [], [], [], 0

    def _record_norms(self) -> None:
        import torch

        if self._rounds > len(self.list_modules()):
            self.note = "gradient norms not measured: gradients are reduced more than once per step"
            return
        scale = 1.0
        for reference in self.scalers:
            scaler = reference()
            if scaler is not None and scaler.is_enabled():
                scale *= float(scaler.get_scale())
        local, reduced = (torch.stack(parts).sum() / scale**2 for parts in (self._local, self._reduced))
        self.norms.append((local, reduced))

    def wrap_hook(self, wrapped: Inner) -> Inner:
        """Return a communication hook that calls `wrapped`, and records gradient norms while they are watched."""
        import torch

        def compute_squared_norm(tensor: Any) -> Any:
            return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32).square()

        @functools.wraps(wrapped)
        def call_and_record(state: Any, bucket: Any) -> Any:
            if self._watching == "local":
                self.note = (
                    "compute time not measured: gradients were reduced although tula had turned the reduction off"
                )
                self.local = False
            if self._watching != "norms":
                return wrapped(state, bucket)
            self._local.append(compute_squared_norm(bucket.buffer()))
            self._rounds += bool(bucket.is_last())

            def record_reduced_bucket(future: Any) -> Any:
                value = future.value()
                tensor = value[0] if isinstance(value, (list, tuple)) else value
                self._reduced.append(compute_squared_norm(tensor))
                return tensor

            return wrapped(state, bucket).then(record_reduced_bucket)

        return call_and_record


def hook_ddp(recorder: Any) -> None:
    """Hook DDP modules, their communication hooks and gradient scalers, so that they are registered."""
    from torch.nn.parallel import DistributedDataParallel

    def register_module(original: Any, self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        recorder.split.modules.append(weakref.ref(self))

    def wrap_comm_hook(original: Any, self: Any, state: object, hook: Inner) -> Any:
        split: DdpSplit = recorder.split
        done = original(self, state, split.wrap_hook(hook))
        split._hooked.add(id(self))
        split.hook = getattr(hook, "__qualname__", type(hook).__qualname__)
        return done

    def register_scaler(original: Any, self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        recorder.split.scalers.append(weakref.ref(self))

    hook_function(DistributedDataParallel, "__init__", register_module)
    hook_function(DistributedDataParallel, "register_comm_hook", wrap_comm_hook)
    hook_function(get_scaler_class(), "__init__", register_scaler)
