"""The weights that a training starts from, where they are a file's (`model.weights`)."""

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tula_cli.errors import SpecError
from tula_cli.optim.sharding import is_sharded
from tula_cli.run.files import is_regular
from tula_cli.spec.sections import Model

STATE_KEYS = ("model", "state_dict", "model_state_dict")
"""Keys under which training scripts, and tula, save a model's state beside other things."""
PREFIXES = ("module.", "_orig_mod.", "model.")
"""What DDP, torch.compile and Lightning put before each name."""
KEY = "model.weights"
_OTHER_OBJECTS = re.compile(r"Unsupported (?:global|class)[: ]+(?:GLOBAL )?([\w.]+)")
"""How torch's unpickler tells of an object that is no tensor."""
MAX_NAMES_SHOWN = 6
"""Names that are told of many."""


@dataclass(frozen=True)
class WeightFit:
    """How a file's tensors and a model's fit each other, by name and shape."""

    common: Mapping[str, Any]  # of the file, by the model's names
    missing: tuple[str, ...]  # of the model, not in the file
    unexpected: tuple[str, ...]  # of the file, not in the model
    other_shape: tuple[str, ...]  # with both shapes

    @property
    def mismatch_text(self) -> str:
        """A description of what does not fit; empty if everything does."""
        mismatches = {
            "missing": self.missing,
            "not in the model": self.unexpected,
            "of another shape": self.other_shape,
        }
        return "; ".join(f"{kind}: {_list_names(names)}" for kind, names in mismatches.items() if names)


def read_weights(path: str, *, key: str = KEY) -> dict[str, Any]:
    """Return the state that a file holds: .safetensors, or what torch.save wrote of a state_dict or a checkpoint.

    A folder is a checkpoint of shares (`train.parallel: fsdp`).

    Code in the file does not run (weights_only).

    Args:
        path: of the file.
        key: which setting, or option, names it.

    Raises:
        SpecError: it cannot be read, or holds something else.
    """
    try:
        content = _read(path)
    except FileNotFoundError:
        raise SpecError(f"{key}: there is no file {path}", f"it is looked for in {Path.cwd()}") from None
    except SpecError as error:
        raise SpecError(f"{key}: {error.message}", error.hint) from None
    except OSError as error:
        raise SpecError(f"{key}: {path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001 - the unpickler, and the archive, trip over what is damaged in ways of their own
        raise _unreadable_file(path, key, error) from None
    for key_name in STATE_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key_name), Mapping):
            content = content[key_name]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise SpecError(f"{key}: {path} holds no tensors by name", "save model.state_dict()")
    return dict(content)


def _unreadable_file(path: str, key: str, error: Exception) -> SpecError:
    """Tell a file of other objects, which torch names, from one that is damaged or no such file."""
    if Path(path).is_dir():
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return SpecError(f"{key}: {path} is no checkpoint of shares, or a damaged one: {why}")
    size = f"{Path(path).stat().st_size} bytes"
    if match := _OTHER_OBJECTS.search(str(error)):
        return SpecError(
            f"{key}: {path} holds more than tensors: {match[1]}",
            "save model.state_dict() alone, or convert the file to safetensors",
        )
    kind = "a file of safetensors" if path.endswith(".safetensors") else "a file of torch.save"
    return SpecError(
        f"{key}: {path} ({size}) is damaged, or not {kind}",
        "was it copied, or downloaded, to its end? save it once more",
    )


def _read(path: str) -> Any:
    if Path(path).is_dir():
        return _read_sharded(path)
    if not is_regular(path):
        raise SpecError(f"{path} is no regular file")
    return _read_safetensors(path) if path.endswith(".safetensors") else _read_torch_file(path)


def _read_sharded(path: str) -> dict[str, Any]:
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from tula_cli.worker.build.finetune.shares_reader import SafeLoadPlanner, SafeShardReader

    reader = SafeShardReader(path)
    model: dict[str, Any] = {
        name.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    state_dict_loader.load({"model": model}, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
    return model


def _read_torch_file(path: str) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if (bad := archive.testzip()) is not None:  # torch does not compare its check sums
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


def check_fit(section: Model, model: nn.Module, *, key: str = KEY) -> WeightFit:
    """Return how the file fits the model, which may be on fake tensors; `key` names the file.

    Raises:
        SpecError: it cannot be read, does not fit with `strict`, or no tensor of it does.
    """
    assert section.weights is not None
    model_state = model.state_dict()
    state = _strip_wrapper_prefixes(read_weights(section.weights, key=key), model_state)
    common = {
        name: value
        for name, value in state.items()
        if name in model_state and _shape_of(value) == _shape_of(model_state[name])
    }
    fit = WeightFit(
        common,
        # BatchNorm's counter came later than many a file; nothing reads it where momentum is a number.
        missing=tuple(name for name in model_state if name not in state and not name.endswith("num_batches_tracked")),
        unexpected=tuple(name for name in state if name not in model_state),
        other_shape=tuple(
            f"{name} {_shape_of(value)} for {_shape_of(model_state[name])}"
            for name, value in state.items()
            if name in model_state and name not in common
        ),
    )
    whose = f"{key}: {section.weights} does not fit model {section.name}: {fit.mismatch_text}"
    if not common:
        raise SpecError(whose, "no tensor of it has the name and shape of one of the model's")
    if fit.mismatch_text and section.strict:
        raise SpecError(
            whose, "" if key != KEY else "model.strict: false takes what fits and leaves the rest as it is initialised"
        )
    return fit


def load_weights(section: Model, model: nn.Module, *, first: bool, key: str = KEY) -> str:
    """Put the file's weights into a model, the same on all ranks, which all take part; rank 0 alone reads it.

    Args:
        section: names the file.
        model: on its device.
        first: whether this is rank 0.
        key: which setting, or option, names it.

    Returns:
        What did not fit, on rank 0; empty where all did, or there is no file.
    """
    if section.weights is None:
        return ""
    if is_sharded(model):
        return _load_sharded(section, model, first=first, key=key)
    mismatch = ""
    if first:
        fit = check_fit(section, model, key=key)
        model.load_state_dict(dict(fit.common), strict=False)
        mismatch = fit.mismatch_text
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    return mismatch


def _load_sharded(section: Model, model: nn.Module, *, first: bool, key: str) -> str:
    """Put the file's weights into a model in shares, one tensor at a time."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    fit = check_fit(section, model, key=key) if first else None
    names: list[Any] = [None if fit is None else list(fit.common)]
    dist.broadcast_object_list(names, src=0)
    model_state = model.state_dict()
    for name in names[0]:
        target = model_state[name].detach()
        full_tensor = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if fit is not None:
            full_tensor.copy_(fit.common[name])
        if isinstance(target, DTensor):
            target.copy_(distribute_tensor(full_tensor, target.device_mesh, target.placements))  # rank 0's values
        else:
            dist.broadcast(full_tensor, src=0)
            target.copy_(full_tensor)
    return "" if fit is None else fit.mismatch_text


def describe_weights(section: Model, fit: WeightFit) -> str:
    """Describe what is taken from a file."""
    return f"weights: {len(fit.common)} tensors of {section.weights}" + f"; {fit.mismatch_text}" * bool(
        fit.mismatch_text
    )


def _strip_wrapper_prefixes(state: Mapping[str, Any], model_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without what wrappers have put before every name."""
    stripped = dict(state)
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in stripped) and not any(
            name.startswith(prefix) for name in model_state
        ):
            stripped = {name.removeprefix(prefix): value for name, value in stripped.items()}
    return stripped


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _list_names(names: tuple[str, ...]) -> str:
    hidden = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")
