"""Initial weights of a model: files of weights read without running their code, and loaded by name and shape."""

import enum
import io
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tula_cli.errors import SpecError
from tula_cli.optim.sharding import is_sharded
from tula_cli.run import files
from tula_cli.spec.sections import Model
from tula_cli.words import join_first_words

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
