"""A training method as a user may write it: lookahead (Zhang et al. 2019), slow weights that follow fast weights."""

from typing import Any

import torch

from tula_cli.worker.methods.plain import Loop, Plain


class Lookahead(Plain):
    """Every few steps the weights return half of the distance that they moved since the last return."""

    def __init__(self, every: int = 4, share: float = 0.5) -> None:
        self.every, self.share = every, share
        self.steps = 0
        self.slow: list[torch.Tensor] = []

    def before_backward(self, loop: Loop) -> None:
        if not self.slow:
            self.slow = [p.detach().clone() for p in loop.parallel.parameters()]

    @torch.no_grad()
    def after_step(self, loop: Loop) -> None:
        self.steps += 1
        if self.steps % self.every:
            return
        for slow, fast in zip(self.slow, loop.parallel.parameters(), strict=True):
            slow.lerp_(fast, self.share)
            fast.copy_(slow)

    def own_state(self, loop: Loop) -> dict[str, Any]:
        return {"steps": self.steps, "slow": [slow.clone() for slow in self.slow]}

    def load_own_state(self, loop: Loop, state: dict[str, Any]) -> None:
        self.steps, self.slow = state["steps"], [slow.to(loop.ranks.device) for slow in state["slow"]]

    def report(self, loop: Loop) -> dict[str, Any]:
        return {"lookahead": self.steps}


METHOD = Lookahead(every=3)
NO_METHOD = {"every": 3}


class NeedsArguments(Lookahead):
    """A method that cannot be constructed without arguments."""

    def __init__(self, every: int) -> None:
        super().__init__(every)


class Refuses(Lookahead):
    """A method that checks the job itself."""

    def check_optimizer(self, spec: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from tula_cli.errors import SpecError

        if spec.train.lr_scaling != "linear":
            raise SpecError(
                "train.method own_method:Refuses needs a scaled learning rate", "set train.lr_scaling: linear"
            )
