"""What goes with `train.parallel: fsdp`, where no rank holds a whole parameter or gradient."""

from typing import TYPE_CHECKING

from tula_cli.spec.ags import Ags
from tula_cli.spec.methods import METHODS
from tula_cli.spec.sections import Train

if TYPE_CHECKING:
    from tula_cli.spec.job import JobSpec


def divided(spec: "JobSpec") -> Ags:
    """Return the section ags of a job, fit for a model in shares: a factor for each tensor where nothing else is said.

    Raises:
        ValueError: something of the job needs the whole.
    """
    train, ags = spec.train, spec.ags
    if train.parallel == "ddp":
        if train.fsdp_blocks != "auto":
            raise ValueError("train.fsdp_blocks means nothing without train.parallel: fsdp")
        return ags
    for why in (_method(train), _settings(train)):
        if why:
            raise ValueError(f"train.parallel: fsdp divides the model among the GPUs, and {why}")
    if not train.facts.scales:
        return ags
    if ags.granularity == "element":
        raise ValueError("train.parallel: fsdp has factors of whole tensors alone; set ags.granularity: tensor")
    if ags.resolved().source == "local_norms":
        raise ValueError(
            "train.parallel: fsdp has no gradients of single GPUs to compare; set ags.source: small_batch or ags.preset:"
            " paper"
        )
    return ags.model_copy(update={"granularity": "tensor"})


def _method(train: Train) -> str:
    """Return why the method cannot be had; empty where it can."""
    if train.facts.on_shares:
        return ""
    can = ", ".join(name for name, facts in METHODS.items() if facts.on_shares)
    return f"train.method {train.method} needs whole gradients or weights; the methods that do not: {can}"


def _settings(train: Train) -> str:
    refused = {
        "train.precision fp16 scales the loss by what each GPU sees of the gradient; set bf16": train.precision
        == "fp16",
        "train.compile compiles the model as a whole; leave it out": bool(train.compile),
        "train.channels_last lays out whole weights; leave it out": train.channels_last is True,
        "train.hessian differentiates twice through whole weights; leave it out": bool(train.hessian),
    }
    return next((why for why, asked in refused.items() if asked), "")
