"""torch.compile in place: the module keeps its identity, and thus its names, its state and references to it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tula_cli.spec.sections import Train

COMPILE_BACKEND = "inductor"


MAX_OTHER_SHAPES = 8
"""Shapes that may be compiled in addition to those of a step (such as an evaluation's last batch): torch's default
limit."""


def compile_model(model: nn.Module, train: Train, *, shapes: int = 1) -> None:
    """Compile the model's forward and backward pass at their first run, if the job requests it.

    Each shape is compiled separately: a step's inputs have one shape, and kernels for any shape would be slower.
    `shapes` is the number of shapes of a training, one after the other; beyond its limit torch would continue without
    compiling.
    """
    if train.compile:
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, MAX_OTHER_SHAPES + shapes - 1)
        mode = None if train.compile is True else train.compile
        model.compile(backend=COMPILE_BACKEND, mode=mode, dynamic=False)


def disable_compilation(train: Train) -> AbstractContextManager[Any]:
    """Run models uncompiled inside the context: for passes that are rare, or differentiated twice."""
    return torch.compiler.set_stance("force_eager") if train.compile else nullcontext()
