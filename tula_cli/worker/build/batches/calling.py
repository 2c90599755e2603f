"""How a model is called with a batch, and how its loss is taken: found once, from their signatures."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tula_cli.errors import SpecError
from tula_cli.worker.build.batches.tokens import named_entries
from tula_cli.worker.build.batches.tree import describe_tree

LossFunction = Callable[[Any, Any], torch.Tensor]  # (outputs, target), or (outputs, batch), -> 0-dim loss
TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys of a batch that hold its target, where the model takes them all."""


@dataclass(frozen=True)
class ForwardSignature:
    """What a model's `forward` takes."""

    names: tuple[str, ...]  # that may be given by name
    required: tuple[str, ...]  # of these, without a default
    positional: int  # that may be given in order
    any_name: bool  # **kwargs
    any_number: bool  # *args

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "ForwardSignature":
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            names=tuple(p.name for p in named),
            required=tuple(p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)),
            positional=len([p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]),
            any_name=any(p.kind is p.VAR_KEYWORD for p in parameters),
            any_number=any(p.kind is p.VAR_POSITIONAL for p in parameters),
        )  # fmt: skip


@dataclass(frozen=True)
class ModelCall:
    """Calls a model with a batch, and takes the loss.

    A dictionary is given by the names that `forward` has (all of it to **kwargs); a tuple or list in order but for its last
    entry, which is the target, unless `forward` needs as many as there are; anything else as it is. A model that names no
    key of a dictionary takes it whole.
    """

    takes: ForwardSignature
    loss: LossFunction
    whole: bool = False  # the loss takes the batch, not its target alone
    own: bool = False  # the loss takes what the model returns, whatever that is
    default: bool = False  # nothing was said of the loss: a model that returns its own is believed
    names: tuple[str, str] = ("model", "loss")  # for messages

    @classmethod
    def of(cls, model: nn.Module, loss: LossFunction, **how: Any) -> "ModelCall":
        """Return how this model, as it was built, and this loss are called."""
        return cls(ForwardSignature.of(model.forward), loss, whole=takes_batch(loss), **how)

    def compute_outputs(self, model: nn.Module, batch: Any) -> Any:
        """Call the model, or what wraps it.

        Raises:
            SpecError: the batch lacks what `forward` needs.
        """
        if self._is_pair(batch):
            return model(batch[0])
        args, named = self.forward_arguments(batch)
        return model(*args, **named)

    def loss_from_outputs(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the loss of what the model has returned.

        Raises:
            SpecError: the loss needs a target and there is none, or the model's own loss is not one number.
        """
        if self.whole:
            return self.loss(outputs, batch)
        if self.default and (model_loss := _loss_in_outputs(outputs)) is not None:
            if model_loss.ndim:
                raise SpecError(f"{self.names[0]}: its .loss is {describe_tree(model_loss)}, not one number")
            return model_loss
        target = batch[1] if self._is_pair(batch) else self.target_of(batch)
        if target is None:
            raise SpecError(
                f"{self.names[1]} needs a target, and none is left of the batch {describe_tree(batch)} beside what"
                f" {self.names[0]} takes",
                "let the model return an object with .loss, or set loss.name to a callable(outputs, batch) of your own",
            )
        return self.loss(outputs if self.own else scores_from_outputs(outputs), target)

    def compute_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.loss_from_outputs(self.compute_outputs(model, batch), batch)

    def forward_arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what `forward` is given of a batch, in order and by name."""
        fields = named_entries(batch)
        if fields is not None and (isinstance(batch, Mapping) or self._names_any_parameter(fields)):
            return self._named_arguments(fields, batch)
        if not isinstance(batch, tuple | list) or not batch:
            return (batch,), {}
        nested = isinstance(batch[0], Mapping | tuple | list)
        inputs = batch if len(self.takes.required) >= len(batch) > 1 and not nested else batch[:-1] or batch
        if len(inputs) > 1:
            return tuple(inputs), {}
        fields = named_entries(inputs[0])
        if fields is not None:
            return self._named_arguments(fields, inputs[0])
        several = isinstance(inputs[0], tuple | list) and (self.takes.any_number or self.takes.positional > 1)
        return (tuple(inputs[0]) if several else (inputs[0],)), {}

    def target_of(self, batch: Any) -> Any:
        """Return the target of a batch; None where it has none."""
        fields = named_entries(batch)
        if fields is None or not (isinstance(batch, Mapping) or self._names_any_parameter(fields)):
            return batch[-1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
        for key in TARGETS:
            if key in fields:
                return fields[key]
        unused = list(self.unused_entries(batch).values())
        return unused[0] if len(unused) == 1 else None

    def unused_entries(self, batch: Any) -> dict[str, Any]:
        """Return the entries of a batch, or of its inputs, that `forward` does not take."""
        tree = (
            batch if named_entries(batch) is not None or not isinstance(batch, tuple | list) or not batch else batch[0]
        )
        fields = named_entries(tree)
        if fields is None or self.takes.any_name or not self._names_any_parameter(fields):
            return {}
        return {key: value for key, value in fields.items() if key not in self.takes.names}

    def _is_pair(self, batch: Any) -> bool:
        """Return whether this is the usual (input, target), which needs no further look."""
        alone = len(self.takes.required) <= 1
        return alone and type(batch) in (tuple, list) and len(batch) == 2 and isinstance(batch[0], torch.Tensor)

    def _names_any_parameter(self, fields: Mapping[str, Any]) -> bool:
        return any(key in self.takes.names for key in fields)

    def _named_arguments(self, fields: Mapping[str, Any], whole: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.takes.any_name:
            return (), dict(fields)
        if not self._names_any_parameter(fields) and len(self.takes.required) == 1:
            return (whole,), {}
        missing = [name for name in self.takes.required if name not in fields]
        if missing:
            raise SpecError(
                f"{self.names[0]} needs {', '.join(missing)}, and the batch has {', '.join(map(str, fields)) or 'nothing'}",
                "a dictionary is given by name: let its keys be the parameters of forward",
            )
        return (), {key: value for key, value in fields.items() if key in self.takes.names}


def takes_batch(loss: Callable[..., Any]) -> bool:
    """Return whether the second parameter of a loss is called `batch`: then it is given all of it."""
    try:
        function = loss.forward if isinstance(loss, nn.Module) else loss
        names = [p.name for p in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # it does not tell
        return False
    return len(names) > 1 and names[1] == "batch"


def scores_from_outputs(outputs: Any) -> Any:
    """Return a model's scores: its only output, or the one that is called `logits`."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    # A tuple with that name is GoogLeNet's, whose other outputs have a loss too.
    return logits if isinstance(logits, torch.Tensor) and not isinstance(outputs, tuple) else outputs


def is_language_model_output(outputs: Any, targets: Any) -> bool:
    """Return whether the scores are per position over a vocabulary, and the targets are words per position."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor) or outputs.ndim != 3:
        return False
    return targets.shape == outputs.shape[:2] and not targets.is_floating_point()


def _loss_in_outputs(outputs: Any) -> torch.Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None
