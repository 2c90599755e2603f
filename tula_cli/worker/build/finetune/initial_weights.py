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
from tula_cli.optim.parts.shares import is_sharded
from tula_cli.run.files import is_regular
from tula_cli.spec.sections import Model

PARTS = ("model", "state_dict", "model_state_dict")
"""Keys under which training scripts, and tula, save a model's state beside other things."""
PREFIXES = ("module.", "_orig_mod.", "model.")
"""What DDP, torch.compile and Lightning put before each name."""
KEY = "model.weights"
_OTHER_OBJECTS = re.compile(r"Unsupported (?:global|class)[: ]+(?:GLOBAL )?([\w.]+)")
"""How torch's unpickler tells of an object that is no tensor."""
SHOWN = 6
"""Names that are told of many."""


@dataclass(frozen=True)
class Fit:
    """How a file's tensors and a model's fit each other, by name and shape."""

    common: Mapping[str, Any]  # of the file, by the model's names
    missing: tuple[str, ...]  # of the model, not in the file
    unexpected: tuple[str, ...]  # of the file, not in the model
    other_shape: tuple[str, ...]  # with both shapes

    @property
    def words(self) -> str:
        """What does not fit; empty where all does."""
        parts = {"missing": self.missing, "not in the model": self.unexpected, "of another shape": self.other_shape}
        return "; ".join(f"{kind}: {_some(names)}" for kind, names in parts.items() if names)


def read(path: str, *, key: str = KEY) -> dict[str, Any]:
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
        raise _unreadable(path, key, error) from None
    for part in PARTS:
        if isinstance(content, Mapping) and isinstance(content.get(part), Mapping):
            content = content[part]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise SpecError(f"{key}: {path} holds no tensors by name", "save model.state_dict()")
    return dict(content)


def _unreadable(path: str, key: str, error: Exception) -> SpecError:
    """Tell a file of other objects, which torch names, from one that is damaged or no such file."""
    if Path(path).is_dir():
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return SpecError(f"{key}: {path} is no checkpoint of shares, or a damaged one: {why}")
    size = f"{Path(path).stat().st_size} bytes"
    if found := _OTHER_OBJECTS.search(str(error)):
        return SpecError(
            f"{key}: {path} holds more than tensors: {found[1]}",
            "save model.state_dict() alone, or convert the file to safetensors",
        )
    kind = "a file of safetensors" if path.endswith(".safetensors") else "a file of torch.save"
    return SpecError(
        f"{key}: {path} ({size}) is damaged, or not {kind}",
        "was it copied, or downloaded, to its end? save it once more",
    )


def _read(path: str) -> Any:
    if Path(path).is_dir():
        return _folder(path)
    if not is_regular(path):
        raise SpecError(f"{path} is no regular file")
    return _safetensors(path) if path.endswith(".safetensors") else _torch(path)


def _folder(path: str) -> dict[str, Any]:
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from tula_cli.worker.build.finetune.shares_reader import SharesPlanner, SharesReader

    reader = SharesReader(path)
    model: dict[str, Any] = {
        name.removeprefix("model."): torch.empty(told.size, dtype=told.properties.dtype)
        for name, told in reader.read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(told, TensorStorageMetadata)
    }
    state_dict_loader.load({"model": model}, storage_reader=reader, planner=SharesPlanner(), no_dist=True)
    return model


def _torch(path: str) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if (bad := archive.testzip()) is not None:  # torch does not compare its check sums
                raise zipfile.BadZipFile(bad)
    return torch.load(path, map_location="cpu", weights_only=True)


def _safetensors(path: str) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise SpecError(
            f"{path} needs the package safetensors, which is not installed",
            "pip install 'tula-cli[safetensors]'",
        ) from None
    return load_file(path)


def fitted(section: Model, model: nn.Module, *, key: str = KEY) -> Fit:
    """Return how the file fits the model, which may be on fake tensors; `key` names the file.

    Raises:
        SpecError: it cannot be read, does not fit with `strict`, or no tensor of it does.
    """
    assert section.weights is not None
    own = model.state_dict()
    state = _renamed(read(section.weights, key=key), own)
    common = {name: value for name, value in state.items() if name in own and _shape(value) == _shape(own[name])}
    fit = Fit(
        common,
        # BatchNorm's counter came later than many a file; nothing reads it where momentum is a number.
        missing=tuple(name for name in own if name not in state and not name.endswith("num_batches_tracked")),
        unexpected=tuple(name for name in state if name not in own),
        other_shape=tuple(
            f"{name} {_shape(value)} for {_shape(own[name])}"
            for name, value in state.items()
            if name in own and name not in common
        ),
    )
    whose = f"{key}: {section.weights} does not fit model {section.name}: {fit.words}"
    if not common:
        raise SpecError(whose, "no tensor of it has the name and shape of one of the model's")
    if fit.words and section.strict:
        raise SpecError(
            whose, "" if key != KEY else "model.strict: false takes what fits and leaves the rest as it is initialised"
        )
    return fit


def load(section: Model, model: nn.Module, *, first: bool, key: str = KEY) -> str:
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
        return _load_shares(section, model, first=first, key=key)
    words = ""
    if first:
        fit = fitted(section, model, key=key)
        model.load_state_dict(dict(fit.common), strict=False)
        words = fit.words
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    return words


def _load_shares(section: Model, model: nn.Module, *, first: bool, key: str) -> str:
    """Put the file's weights into a model in shares, one tensor at a time."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    fit = fitted(section, model, key=key) if first else None
    names: list[Any] = [None if fit is None else list(fit.common)]
    dist.broadcast_object_list(names, src=0)
    own = model.state_dict()
    for name in names[0]:
        target = own[name].detach()
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if fit is not None:
            whole.copy_(fit.common[name])
        if isinstance(target, DTensor):
            target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))  # rank 0's values
        else:
            dist.broadcast(whole, src=0)
            target.copy_(whole)
    return "" if fit is None else fit.words


def told(section: Model, fit: Fit) -> str:
    """Return in words what is taken of a file."""
    return f"weights: {len(fit.common)} tensors of {section.weights}" + f"; {fit.words}" * bool(fit.words)


def _renamed(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without what wrappers have put before every name."""
    found = dict(state)
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in found) and not any(name.startswith(prefix) for name in own):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
