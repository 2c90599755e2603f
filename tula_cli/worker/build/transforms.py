"""Transforms of samples, by their names in the job file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.utils.data
from torchvision import tv_tensors
from torchvision.transforms import v2

from tula_cli.errors import SpecError
from tula_cli.plugins import is_import_string, load_named_object, suggest_nearest
from tula_cli.worker.build.construct import call_with_arguments

Transform = Callable[[Any], Any]


def convert_to_plain_tensor(sample: Any) -> Any:
    """Return an image tensor of torchvision's as a plain tensor: its subclass makes every operation slower."""
    return sample.as_subclass(torch.Tensor) if isinstance(sample, tv_tensors.TVTensor) else sample


def build_transforms(items: Sequence[str | dict[str, dict[str, Any]]], *, path: str = "transforms") -> Transform:
    """Return one transform from a list of names; an empty list means ToTensor.

    Args:
        items: names of torchvision.transforms.v2 classes, `{Name: {arguments}}`, or import strings.
        path: path of the list in the spec, for messages.

    Raises:
        SpecError: unknown name or wrong arguments.
    """
    steps = [_build_transform(item, path=f"{path}[{index}]") for index, item in enumerate(items)]
    if not steps:
        return convert_to_tensor
    return steps[0] if len(steps) == 1 else v2.Compose(steps)


def convert_to_tensor(image: Any) -> torch.Tensor:
    """Return an image as float32 (channels, height, width) in [0, 1], as ToImage and ToDtype(float32, scale) do."""
    if not isinstance(image, PIL.Image.Image) or image.mode not in ("L", "RGB"):
        pixels = convert_to_plain_tensor(
            v2.functional.to_dtype(v2.functional.to_image(image), torch.float32, scale=True)
        )
        return pixels.contiguous()  # type: ignore[no-any-return]
    # For a small image the checks and wrappers of ToImage and ToDtype take three times as long as the conversion.
    pixels = torch.from_numpy(np.array(image))
    return (pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()).float().div_(255)


def _build_transform(item: str | dict[str, dict[str, Any]], *, path: str) -> Transform:
    if isinstance(item, dict) and len(item) != 1:
        raise SpecError(f"{path}: each entry must have one transform, got {', '.join(item) or 'none'}")
    name, args = (item, None) if isinstance(item, str) else next(iter(item.items()))
    target = load_named_object(name, TRANSFORMS, kind="transform")
    if is_import_string(name) and args is None and not isinstance(target, type):
        return target  # type: ignore[no-any-return]  # a plain function from image to image
    arguments = {key: _build_argument(key, value, path=f"{path}.{name}") for key, value in (args or {}).items()}
    return call_with_arguments(target, arguments, path=f"{path}.{name}", name=name)  # type: ignore[no-any-return]


def _build_argument(key: str, value: Any, *, path: str) -> Any:
    """Return a transform's argument, converted if it names a dtype, an interpolation, a policy or inner transforms.

    YAML can only name these.
    """
    if key == "transforms" and isinstance(value, list):
        return [_build_transform(item, path=f"{path}.transforms[{index}]") for index, item in enumerate(value)]
    if key not in ENUMERATIONS or not isinstance(value, str):
        return value
    values = ENUMERATIONS[key]
    if value not in values:
        hint = suggest_nearest(value, values) or f"choose from: {', '.join(values)}"
        raise SpecError(f"{path}.{key}: unknown {key} {value!r}", hint)
    return values[value]


TRANSFORMS: dict[str, Any] = {
    **{name: kind for name, kind in vars(v2).items() if isinstance(kind, type) and issubclass(kind, v2.Transform)},
    "Compose": v2.Compose,
    "ToTensor": lambda: convert_to_tensor,
}

ENUMERATIONS: dict[str, dict[str, Any]] = {
    "dtype": {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)},
    "interpolation": {mode.value: mode for mode in v2.InterpolationMode},
    "policy": {policy.value: policy for policy in v2.AutoAugmentPolicy},
}


def check_sample(sample: Any, *, path: str) -> torch.Tensor:
    """Check one transformed input and return it.

    Args:
        path: the list of transforms that made it ("transforms.train").

    Raises:
        SpecError: it is not a floating-point tensor.
    """
    if not isinstance(sample, torch.Tensor):
        raise SpecError(f"{path} returns {type(sample).__name__}, but must return a tensor", f"add ToTensor to {path}")
    if not sample.is_floating_point():
        dtype = str(sample.dtype).removeprefix("torch.")
        raise SpecError(
            f"{path} returns a tensor of {dtype}, but must return floating-point numbers",
            f"add ToTensor, or {{ToDtype: {{dtype: float32, scale: true}}}}, to {path}",
        )
    return sample
