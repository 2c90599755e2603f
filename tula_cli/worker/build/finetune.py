"""Fine-tuning: initial weights, frozen parameters and parameter groups."""

import enum
import functools
import io
import itertools
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.nn.modules.batchnorm import _BatchNorm

from tula_cli.errors import SpecError
from tula_cli.optim.muon import split_parameters
from tula_cli.optim.sharding import is_sharded
from tula_cli.plugins import suggest_nearest
from tula_cli.run import files
from tula_cli.spec.sections import Model, Optimizer
from tula_cli.words import format_count, format_number, join_first_words

# --- Patterns of parameter names

MAX_PATTERN_NAMES_SHOWN = 8
"""Maximum number of module names in an error message."""


def find_parameters(model: nn.Module, patterns: Sequence[str], *, path: str) -> dict[str, nn.Parameter]:
    """Return the parameters whose names match patterns, by name; if several patterns match a name, the last one counts.

    Args:
        model: a shared module counts under each of its names.
        patterns: patterns of names, in which * stands for any text; a pattern that matches a module selects all parameters in
            it. `norms`, `biases` and `embeddings` select those of the whole model. A pattern after ! excludes its
            matches.
        path: path of the patterns in the spec.

    Raises:
        SpecError: a pattern matches nothing.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    kinds = {kind: set(_list_parameters_of_kind(model, kind)) for kind in PARAMETER_KINDS}
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        if not any(_matches_pattern(name, plain, kinds) for name in names):
            raise _make_no_match_error(model, pattern, path)
    return {name: parameter for name, parameter in names.items() if _is_included_by_last_match(name, patterns, kinds)}


PARAMETER_KINDS = {"norms": "normalisation layers", "biases": "biases", "embeddings": "embedding layers"}
"""Words that select the parameters of a kind, with what a model lacks if they match none."""


def _is_included_by_last_match(name: str, patterns: Sequence[str], kinds: dict[str, set[str]]) -> bool:
    matches = [
        not pattern.startswith("!") for pattern in patterns if _matches_pattern(name, pattern.removeprefix("!"), kinds)
    ]
    return bool(matches) and matches[-1]


def _matches_pattern(name: str, pattern: str, kinds: dict[str, set[str]]) -> bool:
    if pattern in kinds:
        return name in kinds[pattern]
    modules_and_name = itertools.accumulate(name.split("."), "{}.{}".format)
    return any(fnmatchcase(prefix, pattern) for prefix in modules_and_name)


def _list_parameters_of_kind(model: nn.Module, kind: str) -> Iterator[str]:
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False):
            is_norm = "norm" in type(module).__name__.lower()  # LayerNorm, RMSNorm of any package ...
            is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            if {"norms": is_norm, "biases": name.endswith("bias"), "embeddings": is_embedding}[kind]:
                yield f"{module_name}.{name}" if module_name else name


def _make_no_match_error(model: nn.Module, pattern: str, path: str) -> SpecError:
    if parameters := PARAMETER_KINDS.get(pattern.removeprefix("!")):
        return SpecError(f"{path}: {pattern!r}: model {type(model).__name__} has no {parameters}", f"remove {pattern}")
    modules = [name for name, _ in model.named_modules() if name]
    names = [*modules, *(name for name, _ in model.named_parameters())]
    top = [name for name in modules if "." not in name]
    more = " ..." if len(top) > MAX_PATTERN_NAMES_SHOWN else ""
    module_list = f"its modules are {', '.join(top[:MAX_PATTERN_NAMES_SHOWN])}{more}"
    hint = suggest_nearest(pattern.strip("!*.?"), names) or module_list
    return SpecError(f"{path}: {pattern!r} matches no parameter of {type(model).__name__}", hint)


# --- Frozen parameters

FROZEN_KEY = "model.frozen"


class FrozenStatistics:
    """Marks a BatchNorm that remains in evaluation mode: it normalises by its running statistics, which do not change.

    With batch statistics a frozen layer's outputs would differ from those that its weights were trained with, and vary
    from batch to batch.
    """

    def train(self, mode: bool = True) -> Any:  # noqa: ARG002
        """Remain in evaluation mode, whatever mode the surrounding model is set to."""
        parent: Any = super()
        return parent.train(False)


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that patterns select, and the statistics of BatchNorm layers that are frozen completely.

    Args:
        model: changed in place, before anything wraps it.
        patterns: patterns of names (see `find_parameters`).

    Raises:
        SpecError: a pattern matches nothing, or nothing is left to train.
    """
    if not patterns:
        return
    for parameter in find_parameters(model, patterns, path=FROZEN_KEY).values():
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SpecError(
            f"{FROZEN_KEY}: {', '.join(patterns)} freezes all parameters",
            'exclude the parameters to train with !, for example ["*", "!head"]',
        )
    no_kinds: dict[str, set[str]] = {kind: set() for kind in PARAMETER_KINDS}  # a layer without parameters is of none
    for name, module in model.named_modules():
        if parameters := list(module.parameters(recurse=False)):
            is_frozen = not any(p.requires_grad for p in parameters)
        else:
            is_frozen = _is_included_by_last_match(name, patterns, no_kinds)
        if isinstance(module, _BatchNorm) and is_frozen:
            kind: Any = type(module)
            module.__class__ = _make_frozen_class(kind)
            module.train(False)


@functools.cache
def _make_frozen_class(kind: Any) -> Any:
    return type(f"Frozen{kind.__name__}", (FrozenStatistics, kind), {})


def describe_frozen_parameters(model: nn.Module, patterns: Sequence[str]) -> str:
    """Describe the frozen parameters and statistics; empty if nothing is frozen."""
    if not patterns:
        return ""
    sizes = [(p.requires_grad, p.numel()) for p in model.parameters()]
    trained, frozen = (sum(size for trains, size in sizes if trains is is_trained) for is_trained in (True, False))
    norms = sum(isinstance(module, FrozenStatistics) for module in model.modules())
    statistics = f"; the statistics of {norms} BatchNorm layers are kept" * bool(norms)
    return f"frozen: {frozen} of {frozen + trained} parameters ({', '.join(patterns)}){statistics}"


# --- Parameter groups

Parameters = Sequence[nn.Parameter] | Sequence[dict[str, Any]]
"""The parameters of an optimizer, or groups of them."""


def make_parameter_groups(section: Optimizer, model: nn.Module) -> Parameters:
    """Return the trainable parameters of a model, in groups if the section defines some.

    Parameters in no group come first, with the section's own values. Parameters for Muon and for AdamW are in separate
    groups, and those with sparse gradients too, which torch's fused SGD cannot update.

    Raises:
        SpecError: a pattern matches nothing, or a group is left without a parameter.
    """
    groups = _build_parameter_groups(section, model)
    if section.name == "SGD":
        return _split_off_sparse_gradients(groups, model)
    return split_parameters(groups, model) if section.name == "Muon" else groups


def _build_parameter_groups(section: Optimizer, model: nn.Module) -> Parameters:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not section.groups:
        return trained
    group_index = dict.fromkeys(trained, -1)
    for index, group in enumerate(section.groups):
        for parameter in find_parameters(model, group.parameters, path=_format_parameters_path(index)).values():
            if parameter in group_index:
                group_index[parameter] = index
    members = {index: [p for p in trained if group_index[p] == index] for index in range(-1, len(section.groups))}
    for index, group in enumerate(section.groups):
        if not members[index]:
            names = ", ".join(group.parameters)
            raise SpecError(
                f"{_format_parameters_path(index)}: all parameters that match {names} are frozen or belong to a later group",
                "remove this group, or change its patterns",
            )
    ungrouped = [{"params": members[-1]}] if members[-1] else []
    return [
        *ungrouped,
        *(_make_parameter_group(section, index, members[index]) for index in range(len(section.groups))),
    ]


def _split_off_sparse_gradients(groups: Parameters, model: nn.Module) -> Parameters:
    """Return the groups with the weights of sparse embeddings in groups of their own, for which `fused` is off."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    sparse = {embedding.weight for embedding in embeddings if embedding.sparse}
    if not sparse.intersection(flatten_parameter_groups(groups)):
        return groups
    split = []
    for group in [group for group in groups if isinstance(group, dict)] or [{"params": groups}]:
        dense = [parameter for parameter in group["params"] if parameter not in sparse]
        updated_by_rows = [parameter for parameter in group["params"] if parameter in sparse]
        split += [{**group, "params": dense}] if dense else []
        split += [{**group, "params": updated_by_rows, "fused": False}] if updated_by_rows else []
    return split


def _make_parameter_group(section: Optimizer, index: int, parameters: list[nn.Parameter]) -> dict[str, Any]:
    group = section.groups[index]
    decay = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
    return {"params": parameters, "lr": section.lr * group.lr_factor, **decay}


def _format_parameters_path(index: int) -> str:
    return f"optimizer.groups[{index}].parameters"


def flatten_parameter_groups(parameters: Parameters) -> list[nn.Parameter]:
    """Return the parameters of all groups as one list."""
    entries = (entry["params"] if isinstance(entry, dict) else [entry] for entry in parameters)
    return [parameter for entry in entries for parameter in entry]


def describe_parameter_groups(section: Optimizer, model: nn.Module) -> tuple[str, ...]:
    """Return one line of description per group."""
    groups = [group for group in _build_parameter_groups(section, model) if isinstance(group, dict)]
    lines = []
    for settings, group in zip(section.groups, groups[len(groups) - len(section.groups) :], strict=True):
        decay = section.weight_decay if settings.weight_decay is None else settings.weight_decay
        lines.append(
            f"group {', '.join(settings.parameters)}: {format_count(len(group['params']), 'tensor')}, lr {format_number(group['lr'])},"
            f" weight decay {format_number(decay)}"
        )
    return tuple(lines)


# --- Reading of sharded weights

SAFE_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""Names allowed in the metadata besides its records and torch's dtypes."""


class SafeShardReader(FileSystemReader):
    """A reader that unpickles nothing but records of metadata."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """Return a folder's metadata.

        Raises:
            pickle.UnpicklingError: the metadata contains other objects, or is damaged.
        """
        content = files.read_content(Path(self.path, ".metadata"))
        try:
            records = _MetadataUnpickler(io.BytesIO(content)).load()
        except (LookupError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise pickle.UnpicklingError(f"the metadata is damaged: {error}") from None
        if not isinstance(records, metadata.Metadata):
            raise pickle.UnpicklingError("the metadata has an unknown format")
        if records.storage_meta is None:
            records.storage_meta = metadata.StorageMeta()
        records.storage_meta.load_id = self.load_id
        return records


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Python 3.11.2 and others pickle a member of an enumeration with getattr.
        if (module, name) == ("builtins", "getattr"):
            return _allow_frozen_member
        is_metadata_class = module == metadata.__name__ and isinstance(vars(metadata).get(name), type)
        number = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_metadata_class and not number and (module, name) not in SAFE_CLASSES:
            raise pickle.UnpicklingError(f"the metadata names {module}.{name}")
        return super().find_class(module, name)


def _allow_frozen_member(kind: Any, name: str) -> Any:
    if not isinstance(kind, type) or not issubclass(kind, enum.Enum):
        raise pickle.UnpicklingError(f"the metadata refers to {name} of {kind!r}")
    return kind[name]


class SafeLoadPlanner(DefaultLoadPlanner):
    """A planner that loads only plain values, such as an optimizer's groups; torch's planner loads any object."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Load a value that is not a tensor.

        Raises:
            pickle.UnpicklingError: it is not a plain value.
        """
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


# --- Initial weights

STATE_KEYS = ("model", "state_dict", "model_state_dict")
"""Keys under which training scripts, and tula, save a model's state besides other entries."""
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that DDP, torch.compile and Lightning put before each name."""
WEIGHTS_KEY = "model.weights"
_OTHER_OBJECTS = re.compile(r"Unsupported (?:global|class)[: ]+(?:GLOBAL )?([\w.]+)")
"""Messages of torch's unpickler about objects that are not tensors."""
MAX_NAMES_SHOWN = 6
"""Maximum number of names in a list."""


@dataclass(frozen=True)
class WeightFit:
    """The match of a file's tensors with those of a model, by name and shape."""

    common: Mapping[str, Any]  # tensors of the file that match, by the model's names
    missing: tuple[str, ...]  # names in the model that the file lacks
    unexpected: tuple[str, ...]  # names in the file that the model lacks
    other_shape: tuple[str, ...]  # names in both with different shapes, with the two shapes

    @property
    def mismatch_text(self) -> str:
        """Return a description of the mismatches; empty if there are none."""
        mismatches = {
            "missing": self.missing,
            "not in the model": self.unexpected,
            "with another shape": self.other_shape,
        }
        return "; ".join(
            f"{kind}: {join_first_words(names, MAX_NAMES_SHOWN)}" for kind, names in mismatches.items() if names
        )


def read_weights(path: str, *, key: str = WEIGHTS_KEY) -> dict[str, Any]:
    """Return the state in a file: .safetensors, or a state_dict or checkpoint written by torch.save.

    A folder is a sharded checkpoint (`train.parallel: fsdp`).

    Code in the file is not run (weights_only).

    Args:
        key: the setting or option that names it.

    Raises:
        SpecError: it cannot be read, or contains no named tensors.
    """
    try:
        content = _read_weights_file(path)
    except FileNotFoundError:
        raise SpecError(f"{key}: the file {path} does not exist", f"relative paths start at {Path.cwd()}") from None
    except SpecError as error:
        raise SpecError(f"{key}: {error.message}", error.hint) from None
    except OSError as error:
        raise SpecError(f"{key}: {path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001 - unpickler and archive reader raise various errors for damaged files
        raise _make_unreadable_file_error(path, key, error) from None
    for key_name in STATE_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key_name), Mapping):
            content = content[key_name]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise SpecError(f"{key}: {path} contains no named tensors", "save model.state_dict()")
    return dict(content)


def _make_unreadable_file_error(path: str, key: str, error: Exception) -> SpecError:
    """Return the error for an unreadable file: it holds other objects, which torch names, or is damaged."""
    if Path(path).is_dir():
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return SpecError(f"{key}: {path} is not a sharded checkpoint, or is damaged: {why}")
    size = f"{Path(path).stat().st_size} bytes"
    if match := _OTHER_OBJECTS.search(str(error)):
        return SpecError(
            f"{key}: {path} contains more than tensors: {match[1]}",
            "save model.state_dict() alone, or convert the file to safetensors",
        )
    kind = "a file of safetensors" if path.endswith(".safetensors") else "a file of torch.save"
    return SpecError(
        f"{key}: {path} ({size}) is damaged, or not {kind}",
        "check that it was copied or downloaded completely, or save it again",
    )


def _read_weights_file(path: str) -> Any:
    if Path(path).is_dir():
        return _read_sharded_checkpoint(path)
    if not files.is_regular_file(path):
        raise SpecError(f"{path} is not a regular file")
    return _read_safetensors(path) if path.endswith(".safetensors") else _read_torch_file(path)


def _read_sharded_checkpoint(path: str) -> dict[str, Any]:
    from torch.distributed.checkpoint import state_dict_loader

    reader = SafeShardReader(path)
    model: dict[str, Any] = {
        name.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, metadata.TensorStorageMetadata)
    }
    state_dict_loader.load({"model": model}, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
    return model


def _read_torch_file(path: str) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if (bad := archive.testzip()) is not None:  # torch does not verify the check sums of the archive
                raise zipfile.BadZipFile(bad)
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_safetensors(path: str) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise SpecError(
            f"{path} needs the package safetensors, which is not installed",
            "pip install 'tula-cli[safetensors]'",
        ) from None
    return load_file(path)


def check_weights_fit_model(section: Model, model: nn.Module, *, key: str = WEIGHTS_KEY) -> WeightFit:
    """Match the weights file with the model, which may be on fake tensors; `key` is the setting that names the file.

    Raises:
        SpecError: the file cannot be read, has mismatches although `strict` is set, or none of its tensors matches.
    """
    assert section.weights is not None
    model_state = model.state_dict()
    state = _strip_wrapper_prefixes(read_weights(section.weights, key=key), model_state)
    common = {
        name: value
        for name, value in state.items()
        if name in model_state and _get_shape(value) == _get_shape(model_state[name])
    }
    fit = WeightFit(
        common,
        # Older files lack BatchNorm's counter, which is only used if momentum is None.
        missing=tuple(name for name in model_state if name not in state and not name.endswith("num_batches_tracked")),
        unexpected=tuple(name for name in state if name not in model_state),
        other_shape=tuple(
            f"{name} {_get_shape(value)} instead of {_get_shape(model_state[name])}"
            for name, value in state.items()
            if name in model_state and name not in common
        ),
    )
    mismatch = f"{key}: {section.weights} does not fit model {section.name}: {fit.mismatch_text}"
    if not common:
        raise SpecError(
            f"{mismatch} (no tensor has the name and shape of a tensor of the model)",
            "use weights of this architecture, or rename the keys of the state dict",
        )
    if fit.mismatch_text and section.strict:
        hint = "to load only the matching tensors, set model.strict: false; the others keep their initial values"
        raise SpecError(mismatch, hint if key == WEIGHTS_KEY else "")
    return fit


def load_weights(section: Model, model: nn.Module, *, first: bool, key: str = WEIGHTS_KEY) -> str:
    """Load the file's weights into a model on all ranks; every rank must call this, and rank 0 alone reads the file.

    Args:
        section: section model, which names the file.
        model: model on its device.
        first: whether this is rank 0.
        key: the setting or option that names the file.

    Returns:
        The mismatches, on rank 0; empty if there are none, or no file.
    """
    if section.weights is None:
        return ""
    if is_sharded(model):
        return _load_sharded_weights(section, model, first=first, key=key)
    mismatch = ""
    if first:
        fit = check_weights_fit_model(section, model, key=key)
        model.load_state_dict(dict(fit.common), strict=False)
        mismatch = fit.mismatch_text
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    return mismatch


def _load_sharded_weights(section: Model, model: nn.Module, *, first: bool, key: str) -> str:
    """Load the file's weights into a sharded model, one tensor at a time; return the mismatches, on rank 0."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    fit = check_weights_fit_model(section, model, key=key) if first else None
    names: list[Any] = [None if fit is None else list(fit.common)]
    dist.broadcast_object_list(names, src=0)
    model_state = model.state_dict()
    for name in names[0]:
        target = model_state[name].detach()
        full_tensor = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if fit is not None:
            full_tensor.copy_(fit.common[name])
        if isinstance(target, DTensor):
            target.copy_(distribute_tensor(full_tensor, target.device_mesh, target.placements))  # sends rank 0's values
        else:
            dist.broadcast(full_tensor, src=0)
            target.copy_(full_tensor)
    return "" if fit is None else fit.mismatch_text


def describe_loaded_weights(section: Model, fit: WeightFit) -> str:
    """Describe the weights loaded from a file."""
    mismatch = f"; {fit.mismatch_text}" if fit.mismatch_text else ""
    return f"weights: {len(fit.common)} tensors of {section.weights}{mismatch}"


def _strip_wrapper_prefixes(state: Mapping[str, Any], model_state: Mapping[str, Any]) -> dict[str, Any]:
    stripped = dict(state)
    for prefix in WRAPPER_PREFIXES:
        if all(name.startswith(prefix) for name in stripped) and not any(
            name.startswith(prefix) for name in model_state
        ):
            stripped = {name.removeprefix(prefix): value for name, value in stripped.items()}
    return stripped


def _get_shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
