"""Batches of any structure: sizes, tokens, slicing, collation, and the calls of model and loss with them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.data
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_map_with_path

from tula_cli.errors import SpecError
from tula_cli.models.ramp import Ramp
from tula_cli.plugins import load_named_object
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.construct import call_with_arguments

# --- Sizes


@dataclass(frozen=True)
class BatchSizes:
    """The batches of a training, and the number of micro-batches in which each is computed."""

    ramp: Ramp
    micro_batches: int  # micro-batches per step on one rank, before splits
    splits: Mapping[int, int]  # batch -> number of parts in which each micro-batch is computed
    largest: int  # largest batch of this attempt, which may stop before later stages on more nodes

    @property
    def batch(self) -> int:
        """The training's target batch: that of the last stage."""
        return self.ramp.stages[-1].batch

    @property
    def parts(self) -> dict[int, int]:
        """For each batch, the micro-batches of a step on one rank, with each part of a split micro-batch counted."""
        return {batch: self.micro_batches * splits for batch, splits in self.splits.items()}


# --- Structure
#
# Each tensor of a batch of n samples has n as its first dimension, or is in a list with one entry per sample. Numbers,
# texts, None and 0-dim tensors belong to the batch as a whole.


def slice_batch(batch: Any, *, samples: int, start: int = 0, stop: int, from_user: bool = False) -> Any:
    """Return the samples from `start` to `stop` of a batch, as views.

    Args:
        from_user: whether a user's collate_fn made the batch: torch's never makes a list of tensors with an entry per sample.

    Raises:
        SpecError: the first dimension of a tensor is not the samples, or it is ambiguous whether a list has an entry
            per sample or tensors with all samples.
    """

    def slice_leaf(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return tuple(leaf[start:stop]) if isinstance(leaf, tuple) else leaf[start:stop] if _is_list(leaf) else leaf
        if len(leaf) != samples:
            raise _make_first_dimension_error(path, leaf, samples)
        return leaf[start:stop]

    return tree_map_with_path(
        slice_leaf, batch, is_leaf=_make_sample_list_predicate(batch, samples, from_user=from_user)
    )


def allocate_batch(batch: Any, *, samples: int, target_samples: int, from_user: bool = False) -> Any:
    """Return uninitialised tensors for `target_samples` samples, shaped like those of `batch`, which has `samples`.

    Raises:
        SpecError: the first dimension of a tensor is not the samples.
        TypeError: the batch has a list with an entry per sample.
    """

    def allocate_leaf(path: Any, leaf: Any) -> Any:
        if _is_list(leaf):
            raise TypeError(
                f"batch{keystr(path)} is a list with one entry per sample, whose memory cannot be estimated"
            )
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return leaf
        if len(leaf) != samples:
            raise _make_first_dimension_error(path, leaf, samples)
        return torch.empty((target_samples, *leaf.shape[1:]), dtype=leaf.dtype)

    return tree_map_with_path(
        allocate_leaf, batch, is_leaf=_make_sample_list_predicate(batch, samples, from_user=from_user)
    )


def list_tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in tree_flatten_with_path(batch)[0] if isinstance(leaf, torch.Tensor)]


def describe_tree(tree: Any) -> str:
    """Describe the content of a tree: `{ids: int64 (2, 12), labels: int64 (2)}`."""
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')} ({', '.join(map(str, tree.shape))})"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key}: {describe_tree(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        return describe_tree(tree._asdict())
    if isinstance(tree, tuple | list):
        max_items = 4
        return f"({', '.join([*map(describe_tree, tree[:max_items]), *(['...'] if len(tree) > max_items else [])])})"
    return type(tree).__name__


def _make_sample_list_predicate(batch: Any, samples: int, *, from_user: bool) -> Callable[[Any], bool]:
    """Return a predicate for lists with an entry per sample, as opposed to lists of tensors with all samples.

    It is false for the batch itself, because (input, target) would look like a list of two samples.
    """

    def is_list_of_samples(node: Any) -> bool:
        if node is batch or not _is_list(node) or hasattr(node, "_asdict") or len(node) != samples:
            return False
        inside = [leaf for leaf in list_tensors(node) if leaf.ndim]
        if not inside:
            return True
        if from_user and samples > 1 and all(len(leaf) == samples for leaf in inside):
            raise SpecError(
                f"a batch of {samples} samples has a list of {samples} tensors with {samples} rows, so it is ambiguous whether an"
                " entry is a sample or a field",
                "use another batch size, or stack the tensors in dataset.collate_fn",
            )
        return from_user and any(len(leaf) != samples for leaf in inside)

    return is_list_of_samples


def _is_list(node: Any) -> bool:
    return isinstance(node, tuple | list)


def _make_first_dimension_error(path: Any, leaf: torch.Tensor, samples: int) -> SpecError:
    return SpecError(
        f"batch{keystr(path)} is {describe_tree(leaf)}, but its first dimension must be the batch's {samples} samples:"
        f" ({samples}, ...)",
        "make dataset.collate_fn put the samples first, or return a list with one entry per sample",
    )


# --- Tokens

TOKEN_KEYS = ("input_ids", "ids", "tokens")
"""Keys of a batch that hold token ids."""
MASK_KEYS = ("attention_mask", "mask")
"""Keys of a batch that mark the positions of tokens, as opposed to padding."""
LABEL_KEYS = ("labels", "targets", "target")
"""Keys of a batch that mark the positions of tokens if there is no mask: positions that the loss ignores are
padding."""
IGNORED_LABEL = -100
"""The label that torch's cross entropy ignores."""


def list_named_entries(tree: Any) -> Mapping[str, Any] | None:
    """Return the entries of a dictionary or a named tuple by name; None for any other tree."""
    if isinstance(tree, Mapping):
        return tree
    return tree._asdict() if isinstance(tree, tuple) and hasattr(tree, "_asdict") else None


def find_sequence_length(batch: Any) -> int | None:
    """Return the length of a sample of a batch, including padding; None if the batch is not recognised as text."""
    ids = _find_token_ids(batch)
    return None if ids is None else ids.shape[1]


@dataclass
class TokenCounter:
    """Counts samples and tokens over batches, on the GPU if they are there: only `compute_means_per_sample` blocks the host."""

    samples: int = 0
    places: int = 0  # positions, including padding
    real: Any = 0  # tokens without padding: a number or a 0-dim tensor

    def add(self, batch: Any) -> None:
        """Count a batch; one that is not recognised as text is ignored."""
        ids = _find_token_ids(batch)
        if ids is None:
            return
        mask = _find_word_mask(batch, ids)
        self.samples += ids.shape[0]
        self.places += ids.numel()
        self.real = self.real + (ids.numel() if mask is None else mask.sum())

    def compute_means_per_sample(self) -> tuple[float, float] | None:
        """Return the mean length of a sample, with and without padding; None if no text was counted."""
        return (self.places / self.samples, float(self.real) / self.samples) if self.samples else None


def _find_token_ids(batch: Any) -> torch.Tensor | None:
    """Return the token ids of a batch, (samples, length); None if it is not recognised as text.

    Recognised are the keys in TOKEN_KEYS, and a pair of ids and targets of equal shape.
    """
    fields = list_named_entries(batch)
    if fields is not None:
        candidates = [fields[key] for key in TOKEN_KEYS if key in fields]
    elif type(batch) in (tuple, list) and len(batch) == 2 and all(isinstance(part, torch.Tensor) for part in batch):
        candidates = [batch[0]] if batch[0].shape == batch[1].shape and not batch[1].is_floating_point() else []
    else:
        candidates = []
    ids = next((leaf for leaf in candidates if isinstance(leaf, torch.Tensor) and leaf.ndim == 2), None)
    return None if ids is None or ids.is_floating_point() else ids


def _find_word_mask(batch: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Return which positions hold a token, bool (samples, length); None if the batch has neither mask nor labels."""
    fields = list_named_entries(batch)
    fields = {"labels": batch[1]} if fields is None else fields
    for keys, nothing in ((MASK_KEYS, 0), (LABEL_KEYS, IGNORED_LABEL)):
        for key in keys:
            mask = fields.get(key)
            if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
                return mask.ne(nothing)
    return None


# --- Collation

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class UserCollate:
    """A user's collate function; mappings other than dict, as tokenizers return, are converted to dict."""

    function: Collate

    def __call__(self, items: list[Any]) -> Any:
        # torch's pytree does not know these mappings, so they are leaves
        return tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, self.function(items))


def build_collate(spec: JobSpec) -> Collate | None:
    """Return the job's collate function; None: torch's default.

    Raises:
        SpecError: it cannot be imported, or its arguments are wrong.
    """
    import_string = spec.dataset.collate_fn
    if import_string is None:
        return None
    name, args = (import_string, None) if isinstance(import_string, str) else next(iter(import_string.items()))
    target = load_named_object(name, {}, kind="collate_fn")
    if isinstance(target, type):
        return UserCollate(call_with_arguments(target, args or {}, path=f"dataset.collate_fn.{name}", name=name))
    return UserCollate(partial(target, **args) if args else target)


def make_batch(collate: Collate | None, items: Sequence[Any]) -> Any:
    """Return a batch of these samples, as a data loader makes it."""
    return (collate or torch.utils.data.default_collate)(list(items))


# --- Calls of model and loss

LossFunction = Callable[[Any, Any], torch.Tensor]  # (outputs, target) or (outputs, batch) -> 0-dim loss
TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Keys of a batch that hold its target if the model takes all entries."""


@dataclass(frozen=True)
class ForwardSignature:
    """The arguments of a model's `forward`."""

    names: tuple[str, ...]  # parameters that can be passed by name
    required: tuple[str, ...]  # parameters without a default
    positional: int  # number of parameters that can be passed by position
    accepts_any_name: bool  # whether there is **kwargs
    accepts_any_number: bool  # whether there is *args

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> "ForwardSignature":
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            names=tuple(p.name for p in named),
            required=tuple(p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)),
            positional=len([p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]),
            accepts_any_name=any(p.kind is p.VAR_KEYWORD for p in parameters),
            accepts_any_number=any(p.kind is p.VAR_POSITIONAL for p in parameters),
        )  # fmt: skip


@dataclass(frozen=True)
class ModelCall:
    """Calls a model with a batch, and computes the loss.

    Entries of a dictionary are passed by the names of `forward`'s parameters (all of them to **kwargs). A tuple or list
    is passed in order without its last entry, which is the target, unless `forward` requires as many arguments as there
    are entries. Anything else is passed unchanged. If `forward` has no parameter named as a key of a dictionary, it
    receives the whole dictionary.
    """

    takes: ForwardSignature
    loss: LossFunction
    whole: bool = False  # whether the loss takes the whole batch instead of its target
    receives_all_outputs: bool = False  # whether the loss takes the model's outputs unchanged
    default: bool = False  # whether the job sets no loss, so that a loss returned by the model is used
    names: tuple[str, str] = ("model", "loss")  # names of model and loss in messages

    @classmethod
    def from_model(cls, model: nn.Module, loss: LossFunction, **options: Any) -> "ModelCall":
        """Return the call of a model, before it is wrapped, and a loss."""
        return cls(ForwardSignature.from_function(model.forward), loss, whole=accepts_batch(loss), **options)

    def compute_outputs(self, model: nn.Module, batch: Any) -> Any:
        """Call the model or its wrapper.

        Raises:
            SpecError: the batch lacks an argument that `forward` requires.
        """
        if self._is_input_target_pair(batch):
            return model(batch[0])
        args, named = self.get_forward_arguments(batch)
        return model(*args, **named)

    def compute_loss_from_outputs(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the loss of the model's outputs.

        Raises:
            SpecError: the loss needs a target and there is none, or the model's own loss is not one number.
        """
        if self.whole:
            return self.loss(outputs, batch)
        if self.default and (model_loss := _find_loss(outputs)) is not None:
            if model_loss.ndim:
                raise SpecError(
                    f"the .loss that {self.names[0]} returns is {describe_tree(model_loss)}, not one number"
                )
            return model_loss
        target = batch[1] if self._is_input_target_pair(batch) else self.get_target(batch)
        if target is None:
            raise SpecError(
                f"{self.names[1]} needs a target, but the batch {describe_tree(batch)} has only the inputs"
                f" of {self.names[0]}",
                "make the model return an object with .loss, or set loss.name to your own callable(outputs, batch)",
            )
        return self.loss(outputs if self.receives_all_outputs else find_scores(outputs), target)

    def compute_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.compute_loss_from_outputs(self.compute_outputs(model, batch), batch)

    def get_forward_arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `forward` for a batch, in order and by name."""
        fields = list_named_entries(batch)
        if fields is not None and (isinstance(batch, Mapping) or self._names_any_parameter(fields)):
            return self._make_call_arguments(fields, batch)
        if not isinstance(batch, tuple | list) or not batch:
            return (batch,), {}
        nested = isinstance(batch[0], Mapping | tuple | list)
        inputs = batch if len(self.takes.required) >= len(batch) > 1 and not nested else batch[:-1] or batch
        if len(inputs) > 1:
            return tuple(inputs), {}
        fields = list_named_entries(inputs[0])
        if fields is not None:
            return self._make_call_arguments(fields, inputs[0])
        has_several_inputs = isinstance(inputs[0], tuple | list) and (
            self.takes.accepts_any_number or self.takes.positional > 1
        )
        return (tuple(inputs[0]) if has_several_inputs else (inputs[0],)), {}

    def get_target(self, batch: Any) -> Any:
        """Return the target of a batch; None if it has none."""
        fields = list_named_entries(batch)
        if fields is None or not (isinstance(batch, Mapping) or self._names_any_parameter(fields)):
            return batch[-1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
        for key in TARGET_KEYS:
            if key in fields:
                return fields[key]
        unused = list(self.find_unused_entries(batch).values())
        return unused[0] if len(unused) == 1 else None

    def find_unused_entries(self, batch: Any) -> dict[str, Any]:
        """Return the entries of a batch, or of its inputs, that are not passed to `forward`."""
        tree = (
            batch
            if list_named_entries(batch) is not None or not isinstance(batch, tuple | list) or not batch
            else batch[0]
        )
        fields = list_named_entries(tree)
        if fields is None or self.takes.accepts_any_name or not self._names_any_parameter(fields):
            return {}
        return {key: value for key, value in fields.items() if key not in self.takes.names}

    def _is_input_target_pair(self, batch: Any) -> bool:
        """Return whether this is the usual (input, target), which needs no further inspection."""
        takes_one_input = len(self.takes.required) <= 1
        return (
            takes_one_input and type(batch) in (tuple, list) and len(batch) == 2 and isinstance(batch[0], torch.Tensor)
        )

    def _names_any_parameter(self, fields: Mapping[str, Any]) -> bool:
        return any(key in self.takes.names for key in fields)

    def _make_call_arguments(self, fields: Mapping[str, Any], whole: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.takes.accepts_any_name:
            return (), dict(fields)
        if not self._names_any_parameter(fields) and len(self.takes.required) == 1:
            return (whole,), {}
        missing = [name for name in self.takes.required if name not in fields]
        if missing:
            raise SpecError(
                f"{self.names[0]} needs {', '.join(missing)}, but the batch has {', '.join(map(str, fields)) or 'nothing'}",
                "the entries of a dictionary are passed by name: use the parameters of forward as keys",
            )
        return (), {key: value for key, value in fields.items() if key in self.takes.names}


def accepts_batch(loss: Callable[..., Any]) -> bool:
    """Return whether the second parameter of a loss is called `batch`, so that it is passed the whole batch."""
    try:
        function = loss.forward if isinstance(loss, nn.Module) else loss
        names = [p.name for p in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # the signature is unknown
        return False
    return len(names) > 1 and names[1] == "batch"


def find_scores(outputs: Any) -> Any:
    """Return a model's scores: its only output, or the output named `logits`."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    # GoogLeNet returns a named tuple with `logits`, whose other outputs have losses too.
    return logits if isinstance(logits, torch.Tensor) and not isinstance(outputs, tuple) else outputs


def is_language_model_output(outputs: Any, targets: Any) -> bool:
    """Return whether the scores are per position over a vocabulary, and the targets are token ids per position."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor) or outputs.ndim != 3:
        return False
    return targets.shape == outputs.shape[:2] and not targets.is_floating_point()


def _find_loss(outputs: Any) -> torch.Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None
