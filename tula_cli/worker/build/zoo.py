"""Builds the model, the loss and the optimizer of a spec. Datasets and transforms are in `data`."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchvision.models
from torch import nn

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.optim.muon import MuonWithAdamW, describe_missing_muon
from tula_cli.optim.sharding import get_local_shard
from tula_cli.plugins import is_import_string, load_named_object, suggest_name
from tula_cli.spec.job import JobSpec, compute_beta2, get_beta2_half_life
from tula_cli.worker import messages
from tula_cli.worker.build.batches import LossFunction, ModelCall
from tula_cli.worker.build.construct import accepts_argument, call_with_arguments, make_refused_arguments_error
from tula_cli.worker.build.parameter_groups import Parameters, flatten_parameter_groups, freeze_parameters
from tula_cli.worker.build.transformers_models import TRANSFORMERS_PREFIX, FromConfig

# --- Networks for small images
#
# torchvision's networks are made for 224 x 224: at 32 x 32, ResNet, VGG and MobileNetV3 discard most of the image
# before the first block or leave one pixel for the head, and AlexNet does not run at all.


def build_small_resnet(name: str, **arguments: Any) -> nn.Module:
    """Return a ResNet with a 3x3 stem of stride 1 and no pooling before the first block (He et al. 2016, section 4.2)."""
    model = _build_torchvision_model(name, arguments)
    model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision initialises it
    model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]


def build_small_vgg(name: str, *, num_classes: int = 1000, **arguments: Any) -> nn.Module:
    """Return a VGG with a single linear layer as its head: five poolings leave one pixel of 512 channels."""
    model = _build_torchvision_model(name, arguments)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Linear(512, num_classes)
    return model  # type: ignore[no-any-return]


def build_small_alexnet(*, num_classes: int = 1000, **arguments: Any) -> nn.Module:
    """Return an AlexNet with a first convolution of 3x3 and stride 2, and 2x2 pooling; its head sees 2x2 pixels."""
    model = _build_torchvision_model("alexnet", {**arguments, "num_classes": num_classes})
    model.features[0] = nn.Conv2d(3, 64, 3, stride=2, padding=1)
    for index, layer in enumerate(model.features):
        if isinstance(layer, nn.MaxPool2d):
            model.features[index] = nn.MaxPool2d(2)
    model.avgpool = nn.AdaptiveAvgPool2d(2)
    model.classifier[1] = nn.Linear(256 * 2 * 2, 4096)
    return model  # type: ignore[no-any-return]


def build_small_mobilenet_v3(name: str, **arguments: Any) -> nn.Module:
    """Return a MobileNetV3 that reduces images by a factor of 8 instead of 32: its first two strides are 1."""
    model = _build_torchvision_model(name, arguments)
    strided = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2)]
    for layer in strided[:2]:
        layer.stride = (1, 1)
    return model  # type: ignore[no-any-return]


def _build_torchvision_model(name: str, arguments: dict[str, Any]) -> Any:
    return torchvision.models.get_model_builder(name)(**arguments)


_TORCHVISION_FAMILIES: dict[Callable[..., nn.Module], tuple[str, ...]] = {
    build_small_resnet: ("resnet18", "resnet34", "resnet50", "resnet101"),
    build_small_vgg: ("vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn"),
    build_small_mobilenet_v3: ("mobilenet_v3_small", "mobilenet_v3_large"),
}
MODELS: dict[str, Callable[..., nn.Module]] = {
    f"{name}_cifar": functools.partial(build, name) for build, names in _TORCHVISION_FAMILIES.items() for name in names
} | {"alexnet_cifar": build_small_alexnet}


# --- Models, losses and optimizers by name


class SmallCNN(nn.Module):
    """A network for small images: two stages of two 3x3 convolutions with BatchNorm, global pooling, one linear layer.

    Args:
        num_classes: outputs.
        in_channels: 1 for gray images.
        width: channels of the first stage; the second has twice as many.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 32) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            _build_conv_block(in_channels, width),
            _build_conv_block(width, width),
            nn.Sequential(nn.MaxPool2d(2), *_build_conv_block(width, 2 * width)),
            _build_conv_block(2 * width, 2 * width),
        )
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, in_channels, H, W), at least 2 x 2, to logits (N, num_classes)."""
        features: torch.Tensor = self.stages(images)
        logits: torch.Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


def _build_conv_block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


TULA_MODELS: dict[str, Callable[..., nn.Module]] = {"small_cnn": SmallCNN, **MODELS}


def build_model(spec: JobSpec, classes: int | None) -> nn.Module:
    """Return the model on the CPU, initialised from torch's current random state, with its frozen layers.

    Args:
        spec: job that names the model; `model.args` are passed to the constructor.
        classes: classes of the dataset; passed as `num_classes` unless the arguments give it or an imported callable
            has no such parameter.

    Raises:
        SpecError: unknown model, arguments that it refuses, or layers to freeze that it does not have.
    """
    name, args = spec.model.name, dict(spec.model.args)
    target = find_model_builder(name)
    takes_classes = not is_import_string(name) or accepts_argument(target, "num_classes")
    if classes is not None and takes_classes and args.get("weights") is None:
        args.setdefault("num_classes", classes)
    try:
        model = call_with_arguments(target, args, path="model.args", name=name)
    except (KeyError, RuntimeError) as error:  # unknown weights, impossible sizes
        if is_import_string(name):
            raise
        raise make_refused_arguments_error(error, args, path="model.args", name=name) from error
    if not isinstance(model, nn.Module):
        raise SpecError(f"model {name} is a {type(model).__name__}, not a torch.nn.Module")
    freeze_parameters(model, spec.model.frozen)
    return model


def find_model_builder(name: str) -> Callable[..., Any]:
    if name.startswith(TRANSFORMERS_PREFIX):
        return FromConfig(name)
    if is_import_string(name) or name in TULA_MODELS:
        return load_named_object(name, TULA_MODELS, kind="model")  # type: ignore[no-any-return]
    names = torchvision.models.list_models()
    if name.lower() not in names:
        hint = suggest_name(name, [*TULA_MODELS, *names])
        raise SpecError(f"unknown model {name!r}", hint or "name your own model as package.module:callable")
    return torchvision.models.get_model_builder(name.lower())  # type: ignore[no-any-return]


def build_loss(spec: JobSpec) -> LossFunction:
    """Return the loss; a torch.nn loss is a module, to be moved to the device like the model.

    Raises:
        SpecError: unknown name, or arguments that it refuses.
    """
    name, args = spec.loss.name, spec.loss.args
    target = load_named_object(name, LOSSES, kind="loss")
    if is_import_string(name) and not isinstance(target, type):
        return functools.partial(target, **args) if args else target
    tensors = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in args.items()}
    return call_with_arguments(target, tensors, path="loss.args", name=name)  # type: ignore[no-any-return]


def make_model_call(spec: JobSpec, model: nn.Module, loss: LossFunction) -> ModelCall:
    """Return the call of the model and the loss with a batch.

    Args:
        model: as it was built, before anything wraps it.
        loss: as returned by `build_loss`, on any device.
    """
    return ModelCall.from_model(
        model,
        loss,
        receives_all_outputs=is_import_string(spec.loss.name),
        default=spec.loss.name == "cross_entropy" and not spec.loss.args,
        names=(f"model {spec.model.name}", f"loss {spec.loss.name}"),
    )


LOSSES: dict[str, Any] = {
    "cross_entropy": nn.CrossEntropyLoss,
    **{name: kind for name, kind in vars(nn).items() if name.endswith("Loss") and isinstance(kind, type)},
}


def build_optimizer(
    spec: JobSpec, parameters: Parameters, *, instead: type[torch.optim.Optimizer] | None = None
) -> torch.optim.Optimizer:
    """Return the base optimizer; SGD uses torch's fused kernel if it supports these parameters.

    Args:
        instead: the class with which `train.method` replaces the spec's optimizer.

    Raises:
        SpecError: unknown optimizer, LBFGS, one that the method does not replace, or a momentum, weight decay or
            argument that it does not accept.
    """
    name, tensors = spec.optimizer.name, flatten_parameter_groups(parameters)
    if name == "LBFGS":
        raise SpecError(
            "optimizer.name: LBFGS evaluates the loss several times per step, which tula's loop does not support"
        )
    if name == "Muon" and (why := describe_missing_muon()):
        raise SpecError(f"optimizer.name: {why}", "install a newer torch, or set optimizer.name: AdamW")
    if instead is not None:
        _check_optimizer_fits_method(spec)
    target = instead or load_named_object(name, OPTIMIZERS, kind="optimizer")
    if not tensors:
        raise SpecError(f"model {spec.model.name} has no parameters to train")
    if any(group.weight_decay is not None for group in spec.optimizer.groups) and not accepts_argument(
        target, "weight_decay"
    ):
        raise SpecError(f"optimizer.groups: {name} has no argument weight_decay", "remove weight_decay from the groups")
    arguments: dict[str, Any] = {"lr": spec.optimizer.lr, **_get_momentum_and_weight_decay(spec, target)}
    if target is torch.optim.SGD and not {"fused", "foreach", "differentiable"} & set(spec.optimizer.args):
        arguments["fused" if _has_fused_kernel(tensors) else "foreach"] = True
    optimizer = call_with_arguments(
        target, spec.optimizer.args, path="optimizer.args", name=name, given=arguments, first=(list(parameters),)
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError(f"optimizer {name} is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return optimizer


def compute_lr_ratios(optimizer: torch.optim.Optimizer, lr: float) -> tuple[float, ...]:
    """Return the ratio of each parameter group's learning rate to the spec's, as the optimizer was built.

    Must be called before a state is loaded, which sets the rates of the middle of a training. A group without a rate
    has the ratio 1.
    """
    rates = (group.get("lr") for group in optimizer.param_groups)
    return tuple(1.0 if rate is None else float(rate) / lr for rate in rates)


def set_lr(optimizer: torch.optim.Optimizer, lr: float, ratios: Sequence[float]) -> None:
    """Set each parameter group's learning rate to its ratio times `lr`; a tensor is changed in place."""
    for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
        if isinstance(group.get("lr"), torch.Tensor):  # a captured step reads the tensor in place
            group["lr"].fill_(lr * ratio)
        else:
            group["lr"] = lr * ratio


def compute_beta2_by_group(optimizer: torch.optim.Optimizer, spec: JobSpec, batch: int) -> tuple[float, ...]:
    """Return each parameter group's beta2 at a batch; empty if the job sets no half-life for it.

    Must be called before a state is loaded, which sets the beta2 of the batch that it was saved at.

    Args:
        optimizer: as it was built.

    Raises:
        SpecError: the optimizer has no beta2, or its beta2 is not that of a second moment.
    """
    if get_beta2_half_life(spec) is None:
        return ()
    betas_by_group: list[Any] = [group.get("betas") for group in optimizer.param_groups]
    kind = type(optimizer).__name__
    # Lion has two betas as well, but both are those of the gradient's average.
    if "lion" in kind.lower() or any(
        not isinstance(betas, tuple | list) or len(betas) != 2 for betas in betas_by_group
    ):
        raise SpecError(
            f"optimizer.beta2_half_life: {kind} has no beta2 for a second moment",
            "remove it, or set optimizer.name: AdamW (train.method lamb and schedule_free also have one)",
        )
    return tuple(compute_beta2(spec, float(second), batch) for _, second in betas_by_group)


def describe_beta2(spec: JobSpec, optimizer: torch.optim.Optimizer) -> Diagnostic | None:
    """Describe beta2 at the batches that may be searched; None if no half-life is set."""
    train, steps = spec.train, get_beta2_half_life(spec)
    if steps is None:
        return None
    ends = (spec.search.min_batch, train.reference_batch, spec.search.max_batch)
    batches = sorted({batch for batch in ends if batch is not None})
    at = {batch: compute_beta2_by_group(optimizer, spec, batch)[0] for batch in batches}
    reference = compute_beta2_by_group(optimizer, spec, train.reference_batch)[0]
    if steps == "auto" and not 0 < reference < 1:
        return messages.beta2_at_any_batch(beta2=reference)
    half_life = train.reference_batch * math.log(0.5) / math.log(reference) if steps == "auto" else steps
    return messages.beta2_by_batch(half_life=half_life, beta2=at)


def set_beta2(optimizer: torch.optim.Optimizer, values: Sequence[float]) -> None:
    """Set each parameter group's beta2; does nothing if `values` is empty."""
    for group, value in zip(optimizer.param_groups, values, strict=bool(values)):
        group["betas"] = (group["betas"][0], value)


def _check_optimizer_fits_method(spec: JobSpec) -> None:
    method = spec.train.training_method
    if misfit := method.describe_optimizer_conflict(spec.optimizer.name, divides_gradients=False):
        raise SpecError(
            f"train.method {method.name} {misfit}",
            f"set optimizer.name: {method.replaced_optimizers[0]}, with a suitable learning rate and weight decay",
        )


def _has_fused_kernel(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether fused SGD supports these tensors; torch itself would only raise an error at the first step."""
    return all(
        t.is_floating_point() and t.device.type in ("cpu", "cuda") and not t.is_sparse and get_local_shard(t) is t
        for t in tensors
    )


def _get_momentum_and_weight_decay(spec: JobSpec, target: Callable[..., Any]) -> dict[str, float]:
    """Return momentum and weight decay if they are set; the spec's weight decay replaces the class's default."""
    values = {}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(target).parameters.values())
    for key, value in (("momentum", spec.optimizer.momentum), ("weight_decay", spec.optimizer.weight_decay)):
        if accepts_argument(target, key) or (takes_any and value):
            if value is not None and key not in spec.optimizer.args:
                values[key] = value
        elif value:
            has_betas = key == "momentum" and accepts_argument(target, "betas")
            hint = "; to change the decay rates of the moments, set optimizer.args.betas" * has_betas
            raise SpecError(
                f"optimizer.{key}: {spec.optimizer.name} has no argument {key}", f"remove optimizer.{key}{hint}"
            )
    return values


OPTIMIZERS: dict[str, Any] = {
    name: MuonWithAdamW if name == "Muon" else kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
}
