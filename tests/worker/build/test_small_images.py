"""torchvision's networks for small images."""

import pytest
import torch
import torchvision.models

from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import zoo
from tula_cli.worker.build.zoo import build_model


def build(name: str, **args: object) -> torch.nn.Module:
    content = {"model": {"name": name, "args": args}, "dataset": {"name": "FakeData"}, "optimizer": {"lr": 0.1}}
    return build_model(JobSpec.model_validate({**content, "train": {"epochs": 1}}), 7)


def resolution(model: torch.nn.Module, inside: str) -> int:
    """Return the height of what a part of the model gives for an image of 32 x 32 pixels."""
    seen = []
    model.get_submodule(inside).register_forward_hook(lambda *call: seen.append(call[-1].shape[-1]))
    with torch.no_grad():
        assert model.eval()(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    return seen[0]


@pytest.mark.parametrize(
    ("name", "last", "pixels"),
    [
        ("resnet18_cifar", "layer4", 4),
        ("resnet50_cifar", "layer4", 4),
        ("vgg11_cifar", "features", 1),
        ("alexnet_cifar", "features", 2),
        ("mobilenet_v3_small_cifar", "features", 4),
        ("mobilenet_v3_large_cifar", "features", 4),
    ],
)
def test_what_is_left_of_a_small_image_for_the_head(name: str, last: str, pixels: int) -> None:
    assert resolution(build(name), last) == pixels


def test_a_resnet_differs_from_torchvisions_in_the_stem_alone() -> None:
    state, plain = build("resnet18_cifar").state_dict(), torchvision.models.resnet18(num_classes=7).state_dict()
    assert state.keys() == plain.keys()
    assert [key for key in state if state[key].shape != plain[key].shape] == ["conv1.weight"]
    assert state["conv1.weight"].std() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.15)  # fan-out, not fan-in (0.27)


@pytest.mark.parametrize(
    ("name", "millions"), [("vgg11_cifar", 9.2), ("alexnet_cifar", 23.5), ("resnet18_cifar", 11.2)]
)
def test_sizes_are_those_of_small_images(name: str, millions: float) -> None:
    assert sum(p.numel() for p in build(name).parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_torchvisions_own_arguments_are_taken_and_others_refused() -> None:
    dropout = [m.p for m in build("alexnet_cifar", dropout=0.1).modules() if isinstance(m, torch.nn.Dropout)]
    assert dropout == [0.1, 0.1]
    with pytest.raises(SpecError, match="dropuot"):
        build("vgg11_cifar", dropuot=0.1)


def test_every_name_is_that_of_a_torchvision_model() -> None:
    assert {name.removesuffix("_cifar") for name in zoo.MODELS} <= set(torchvision.models.list_models())
