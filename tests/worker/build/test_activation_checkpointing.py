"""Activation checkpointing changes nothing but memory."""

import copy

import pytest
import torch
import torchvision.models
from torch import nn
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import Bottleneck, ResNet

from tula_cli.errors import SpecError
from tula_cli.worker.build import activation_checkpointing
from tula_cli.worker.build.activation_checkpointing import apply_activation_checkpointing
from tula_cli.worker.build.zoo import SmallCNN


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a model and its checkpointed twin."""
    twin = copy.deepcopy(model)
    apply_activation_checkpointing(twin)
    return model, twin


def step(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)  # dropout
    output = model(images)
    output.square().mean().backward()
    return output


SMALL = {  # the networks' structure, narrow
    "resnet50": lambda: ResNet(Bottleneck, [2, 2, 2, 2], num_classes=5, width_per_group=8),
    "vgg11": lambda: torchvision.models.vgg11(num_classes=5).features[:11],
    "mobilenet_v3_large": lambda: torchvision.models.mobilenet_v3_large(num_classes=5, width_mult=0.25),
    "densenet121": lambda: DenseNet(4, (2, 3, 3, 2), num_init_features=8, num_classes=5),
    "small_cnn": lambda: SmallCNN(width=4),
}
SHORT = ("mobilenet_v3_large", "densenet121", "small_cnn")
"""The networks of `make test`."""
FULL = {
    "resnet50": lambda: torchvision.models.resnet50(num_classes=5),
    "vgg11": lambda: torchvision.models.vgg11(num_classes=5).features,  # what is left are 120 M parameters
    "mobilenet_v3_large": lambda: torchvision.models.mobilenet_v3_large(num_classes=5),
    "densenet121": lambda: torchvision.models.densenet121(num_classes=5),
}


def assert_equal_steps(model: nn.Module, *, pixels: int) -> None:
    plain, recomputed = twins(model)
    images = torch.rand(2, 3, pixels, pixels)
    assert torch.equal(step(plain, images), step(recomputed, images))
    for (key, first), (other_key, two) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        assert key == other_key
        assert torch.equal(first.grad, two.grad), key
    assert list(plain.state_dict()) == list(recomputed.state_dict())
    for key, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(recomputed.named_buffers())[key]), key


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.proof) for name in SMALL]
)
def test_outputs_gradients_and_buffers_stay_equal(name):
    torch.manual_seed(0)
    assert_equal_steps(SMALL[name](), pixels=32)


@pytest.mark.proof
@pytest.mark.parametrize("name", FULL)
def test_outputs_gradients_and_buffers_of_full_networks_stay_equal(name):
    torch.manual_seed(0)
    assert_equal_steps(FULL[name](), pixels=64)


def test_blocks_run_again_in_the_backward_pass_only():
    model = SmallCNN(width=2)
    calls = []
    model.stages[0][0].register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    apply_activation_checkpointing(model)
    model(torch.rand(2, 3, 4, 4)).sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        model(torch.rand(2, 3, 4, 4))
    assert len(calls) == 3


def test_gradient_without_backward_works():
    """As AGS takes the small batch's gradient."""
    plain, recomputed = twins(SmallCNN(width=4))
    images = torch.rand(2, 3, 8, 8)
    gradients = [torch.autograd.grad(model(images).sum(), list(model.parameters())) for model in (plain, recomputed)]
    assert all(torch.equal(first, two) for first, two in zip(*gradients, strict=True))


def test_copy_of_a_checkpointed_model_has_its_own_parameters():
    model = SmallCNN(width=2)
    apply_activation_checkpointing(model)
    twin = copy.deepcopy(model)
    twin(torch.rand(2, 3, 4, 4)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())


def plain_chain(length: int) -> nn.Sequential:
    layers = [layer for _ in range(length) for layer in (nn.Linear(4, 4), nn.Hardswish(inplace=True))]
    return nn.Sequential(*layers)


def test_chain_without_pooling_is_cut_before_layers_with_parameters():
    """An in-place activation at the start of a part would change the input that is kept for the second pass."""
    torch.manual_seed(0)
    chain = plain_chain(8)
    cuts = activation_checkpointing._choose_cut_positions(list(chain))
    assert len(cuts) >= 2
    assert all(isinstance(chain[place], nn.Linear) for place in cuts)
    plain, recomputed = twins(chain)
    values = torch.randn(3, 4)
    assert torch.equal(step(plain, values), step(recomputed, values))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), recomputed.parameters(), strict=True))


@pytest.mark.parametrize("model", [nn.Linear(3, 3), plain_chain(2), nn.Sequential()], ids=["layer", "short", "empty"])
def test_model_without_blocks_is_refused(model):
    with pytest.raises(SpecError, match="no blocks to checkpoint"):
        apply_activation_checkpointing(model)


def test_model_that_is_one_list_of_blocks_is_covered():
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
    plain, recomputed = twins(blocks)
    values = torch.randn(3, 4)
    assert torch.equal(step(plain, values), step(recomputed, values))
