"""torch.compile, in place: the module stays the one it is, and so do its names, its state and whoever holds it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tula_cli.spec.sections import Train

BACKEND = "inductor"


MAX_OTHER_SHAPES = 8
"""Shapes beside those of a step that may be compiled (an evaluation's last batch, for one): torch's own limit of all."""


def compile_model(model: nn.Module, train: Train, *, shapes: int = 1) -> None:
    """Have the model's forward and backward pass compiled when they are first run, where the job says so.

    For each shape by itself: a step's inputs have one shape, and kernels for any shape would be slower. `shapes` is how many
    a training has, one after the other; beyond its limit torch would go on without compiling.
    """
    if train.compile:
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, MAX_OTHER_SHAPES + shapes - 1)
        mode = None if train.compile is True else train.compile
        model.compile(backend=BACKEND, mode=mode, dynamic=False)


def without_compilation(train: Train) -> AbstractContextManager[Any]:
    """Run models uncompiled inside: for passes that are rare, or differentiated twice."""
    return torch.compiler.set_stance("force_eager") if train.compile else nullcontext()
