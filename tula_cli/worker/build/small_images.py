"""torchvision's networks for images of 32 x 32 pixels: `resnet18_cifar` is `resnet18` with less shrinking at the start.

torchvision's are made for 224 x 224: at 32 x 32 ResNet, VGG and MobileNetV3 throw most of the image away before the first
block, or leave one pixel for the head, and AlexNet does not run at all.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torchvision.models
from torch import nn


def small_resnet(name: str, **arguments: Any) -> nn.Module:
    """Return a ResNet with a 3x3 stem of stride 1 and no pooling before the first block (He et al. 2016, section 4.2)."""
    model = _build_torchvision(name, arguments)
    model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's own
    model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]


def small_vgg(name: str, *, num_classes: int = 1000, **arguments: Any) -> nn.Module:
    """Return a VGG with one linear layer for a head: five poolings leave one pixel of 512 channels."""
    model = _build_torchvision(name, arguments)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Linear(512, num_classes)
    return model  # type: ignore[no-any-return]


def small_alexnet(*, num_classes: int = 1000, **arguments: Any) -> nn.Module:
    """Return an AlexNet whose first convolution is 3x3 with stride 2, and which pools by 2x2; the head sees 2x2 pixels."""
    model = _build_torchvision("alexnet", {**arguments, "num_classes": num_classes})
    model.features[0] = nn.Conv2d(3, 64, 3, stride=2, padding=1)
    for index, layer in enumerate(model.features):
        if isinstance(layer, nn.MaxPool2d):
            model.features[index] = nn.MaxPool2d(2)
    model.avgpool = nn.AdaptiveAvgPool2d(2)
    model.classifier[1] = nn.Linear(256 * 2 * 2, 4096)
    return model  # type: ignore[no-any-return]


def small_mobilenet_v3(name: str, **arguments: Any) -> nn.Module:
    """Return a MobileNetV3 that shrinks images by 8, not by 32: its first two strides are 1."""
    model = _build_torchvision(name, arguments)
    for layer in list(_strided_convolutions(model))[:2]:
        layer.stride = (1, 1)
    return model  # type: ignore[no-any-return]


def _build_torchvision(name: str, arguments: dict[str, Any]) -> Any:
    return torchvision.models.get_model_builder(name)(**arguments)


def _strided_convolutions(model: nn.Module) -> Iterator[nn.Conv2d]:
    return (layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2))


_FAMILIES: dict[Callable[..., nn.Module], tuple[str, ...]] = {
    small_resnet: ("resnet18", "resnet34", "resnet50", "resnet101"),
    small_vgg: ("vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn"),
    small_mobilenet_v3: ("mobilenet_v3_small", "mobilenet_v3_large"),
}
MODELS: dict[str, Callable[..., nn.Module]] = {
    f"{name}_cifar": functools.partial(build, name) for build, names in _FAMILIES.items() for name in names
} | {"alexnet_cifar": small_alexnet}
