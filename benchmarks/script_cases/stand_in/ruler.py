"""Measure the cost of the shim per step of a whole script from within: steps with its hooks compared with steps without them.

`sitecustomize` starts it if SCRIPTS_RULER names the output file. Successive steps form pairs, one of each kind in a random order, so
that other load of the machine, and work that the script does only in some epochs, affect both equally; two starts of a script would
differ by more than the effect. The end of the measurement ends the process.
"""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 4  # first steps that are not recorded: they allocate and import


class Switch:
    """Switches between the hooks that the shim has installed before, and torch's original functions."""

    def __init__(self) -> None:
        import torch
        from torch.optim.optimizer import _global_optimizer_post_hooks as after_step
        from torch.utils.data.dataloader import _BaseDataLoaderIter as Batches

        owners: list[tuple[Any, str]] = [
            (Batches, "__next__"), (torch.autograd, "backward"), (torch.nn.Module, "train")
        ]  # fmt: skip
        self.watched = True
        self.places = [(owner, name, getattr(owner, name)) for owner, name in owners]
        assert after_step, "the shim is not there"
        for key, hook in list(
            after_step.items()
        ):  # in place, because torch iterates over them while one of them switches
            after_step[key] = lambda *arguments, hook=hook: hook(*arguments) if self.watched else None

    def put(self, watched: bool) -> None:
        """Enable or disable the hooks."""
        self.watched = watched
        for owner, name, hooked in self.places:
            setattr(owner, name, hooked if watched else hooked.__wrapped__)


class Ruler:
    """Times steps in CPU seconds of all threads of the process, and switches the shim's hooks between steps."""

    def __init__(self, path: Path, pairs: int) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.path, self.pairs = path, pairs
        self.switch = Switch()
        self.draw = random.Random(0)
        self.costs: list[dict[bool, float]] = []
        self.order: list[bool] = []
        self.steps, self.began = 0, 0.0
        register_optimizer_step_post_hook(self.stepped)

    def stepped(self, *_: object) -> None:
        """Record a step, and choose whether the next one runs with the hooks."""
        cost = time.process_time() - self.began
        self.steps += 1
        if self.steps > WARM_UP_STEPS:
            self.costs[-1][self.switch.watched] = cost
        if not self.order:
            if len(self.costs) == self.pairs:
                self._end()
            if self.steps >= WARM_UP_STEPS:
                self.order = self.draw.sample((True, False), 2)
                self.costs.append({})
        if self.order:
            self.switch.put(self.order.pop())
        self.began = time.process_time()

    def _end(self) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps([[pair[False], pair[True]] for pair in self.costs]))
        draft.replace(self.path)
        os._exit(0)  # the training would continue for long, and then run its tests
