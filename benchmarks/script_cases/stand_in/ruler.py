"""What the shim adds to a step of a whole script, measured from within: steps with its hooks beside steps without them.

Started by `sitecustomize` where SCRIPTS_RULER names the file to be written. Steps come in pairs of neighbours, one of each
kind in a drawn order, so that what else the machine does, and what the script does in some epochs only, meets both alike;
two starts of a script differ by more than what is looked for. What ends the measurement ends the process.
"""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

WARM_UP = 4  # steps that nothing is told of: they allocate and import


class Switch:
    """The hooks that the shim has placed, which it has to have done before: in place, or what torch had there before."""

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
        ):  # in their place, for torch goes through them while one of them switches
            after_step[key] = lambda *arguments, hook=hook: hook(*arguments) if self.watched else None

    def put(self, watched: bool) -> None:
        """Put the hooks in place, or away."""
        self.watched = watched
        for owner, name, hooked in self.places:
            setattr(owner, name, hooked if watched else hooked.__wrapped__)


class Ruler:
    """Times steps in CPU seconds of the process, all its threads together, and switches the shim's hooks in between."""

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
        """Close a step and choose for the next one whether it is watched."""
        cost = time.process_time() - self.began
        self.steps += 1
        if self.steps > WARM_UP:
            self.costs[-1][self.switch.watched] = cost
        if not self.order:
            if len(self.costs) == self.pairs:
                self._end()
            if self.steps >= WARM_UP:
                self.order = self.draw.sample((True, False), 2)
                self.costs.append({})
        if self.order:
            self.switch.put(self.order.pop())
        self.began = time.process_time()

    def _end(self) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps([[pair[False], pair[True]] for pair in self.costs]))
        draft.replace(self.path)
        os._exit(0)  # a training of others would go on for long, and test what it has
