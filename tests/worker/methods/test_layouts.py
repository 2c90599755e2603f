"""channels_last: the same training in another order of memory, for every method, and across a checkpoint."""

from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from operations import list_cases, make_sections
from torch import nn
from worker_jobs import list_other_layouts, make_spec, make_trainer

from tula_cli.optim.ags import _pack_gradients, _unflatten_like
from tula_cli.optim.gradient_stats import Bounds, compute_element_factor
from tula_cli.run.directory import RunDir
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import Train
from tula_cli.worker import device
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.loop import Trainer

pytestmark = pytest.mark.torch
STEPS = 8


def job(case: str) -> JobSpec:
    """Return a job of one of the cases whose operations are counted."""
    requested: dict[str, Any] = make_sections(case, precision="fp32", reference_batch=8)
    if requested["optimizer"].get(
        "args"
    ):  # of AdamW: biases before a norm have gradients of rounding alone, and with its
        requested["optimizer"]["args"]["eps"] = 1e-3  # usual eps their steps are as long as any other
    model = {"name": "worker_jobs:convolutions"}
    return make_spec(**{**requested, "model": model})


def built(case: str, ranks: Ranks, *, channels_last: bool) -> Trainer:
    """Return a trainer in a layout that a GPU would choose by itself."""
    with mock.patch.object(worker_train_loop, "should_use_channels_last", return_value=channels_last):
        return make_trainer(job(case), ranks)


def trained(case: str, ranks: Ranks, *, channels_last: bool) -> Trainer:
    subject = built(case, ranks, channels_last=channels_last)
    if subject.ags:
        subject.ags.start_epoch(2)  # factors are there after two steps
    list(islice(worker_train_loop.run_steps(subject), STEPS))
    return subject


def turned(subject: Trainer) -> list[bool]:
    return [p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last) for p in subject.parallel.parameters()]


@pytest.mark.parametrize("case", list_cases())
def test_every_method_learns_the_same_in_either_layout(case: str, alone: Ranks) -> None:
    usual, subject = (trained(case, alone, channels_last=wanted) for wanted in (False, True))
    assert sum(turned(subject)) == 4
    assert not list_other_layouts(subject)
    for first, other in zip(subject.parallel.parameters(), usual.parallel.parameters(), strict=True):
        torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case", ["ags", "lbt", "schedule_free"])
def test_a_training_goes_on_in_the_other_layout(case: str, before: bool, alone: Ranks, run: RunDir) -> None:
    first = trained(case, alone, channels_last=before)
    path = checkpoint.save_checkpoint(run, "5" * 8, first, best={}, is_best=False)
    subject = built(case, alone, channels_last=not before)
    checkpoint.restore_checkpoint(subject, torch.load(path, weights_only=True))
    assert not list_other_layouts(subject)
    for item, other in zip(subject.parallel.parameters(), first.parallel.parameters(), strict=True):
        assert torch.equal(item, other)
    for going in (first, subject):
        next(worker_train_loop.run_steps(going))
    assert turned(subject) != turned(first)
    for item, other in zip(subject.parallel.parameters(), first.parallel.parameters(), strict=True):
        torch.testing.assert_close(item, other, rtol=1e-3, atol=1e-4)


def test_images_are_laid_like_the_weights_and_other_inputs_are_not(alone: Ranks) -> None:
    subject = built("lbt", alone, channels_last=True)
    images, labels = torch.rand(8, 3, 4, 4), torch.zeros(8, dtype=torch.int64)
    moved, _ = worker_train_loop.move_batch_to_device(subject, (images, labels))
    assert moved.is_contiguous(memory_format=torch.channels_last) and torch.equal(moved, images)
    assert worker_train_loop.move_batch_to_device(subject, (images.flatten(1), labels))[0].is_contiguous()
    usual = built("lbt", alone, channels_last=False)
    assert worker_train_loop.move_batch_to_device(usual, (images, labels))[0] is images


def test_other_dimensions_than_four_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Conv3d(2, 3, 3), nn.Conv2d(2, 3, 3), nn.Linear(3, 3))
    device.convert_to_channels_last(model)
    assert [p.is_contiguous() for p in model.parameters()] == [True, True, False, True, True, True]


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("error:Grad strides")
def test_gradients_have_the_strides_of_their_weights_whose_values_are_in_one_order_either_way() -> None:
    pointwise, depthwise = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3, groups=4)
    model = nn.Sequential(pointwise, depthwise, nn.Flatten())
    device.convert_to_channels_last(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(torch.rand(2, 8, 6, 6).to(memory_format=torch.channels_last)).sum().backward()
    for weight in (pointwise.weight, depthwise.weight):
        assert weight.grad is not None and weight.grad.stride() == weight.stride()


# --- where it is taken by itself


NET, PERCEPTRON = nn.Sequential(nn.Conv2d(1, 2, 3)), nn.Sequential(nn.Linear(1, 2))


@pytest.mark.parametrize(
    ("asked", "model", "where", "capability", "hip", "expected"),
    [
        ({}, NET, "cuda", (8, 0), None, True),
        ({}, NET, "cpu", (8, 0), None, False),
        ({}, NET, "cuda", (7, 0), None, False),
        ({}, NET, "cuda", (9, 0), "6.4", False),
        ({}, PERCEPTRON, "cuda", (8, 0), None, False),
        ({"parallel": "fsdp", "method": "lbt"}, NET, "cuda", (9, 0), None, False),
        ({"precision": "fp16"}, NET, "cuda", (7, 0), None, True),
    ],
)
def test_channels_last_is_taken_where_tensor_cores_multiply_convolutions(
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    model: nn.Module,
    where: str,
    capability: tuple[int, int],
    hip: str | None,
    expected: bool,
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert device.should_use_channels_last(Train(epochs=1, **asked), model, torch.device(where)) is expected


# --- what factors are made of


def test_factors_do_not_depend_on_the_layout() -> None:
    small, large = torch.randn(2, 5, 4, 3, 3).unbind()
    bounds = Bounds(1e-3, 3.0)
    expected = compute_element_factor(small, large, 1e-8, bounds)
    for item in (small, small.contiguous(memory_format=torch.channels_last)):
        for other in (large, large.contiguous(memory_format=torch.channels_last)):
            result = compute_element_factor(item, other, 1e-8, bounds)
            assert torch.equal(result, expected)
            assert result.stride() == other.stride(), "as the gradient that it multiplies"


@pytest.mark.parametrize("shape", [(5, 4, 3, 3), (5, 4, 1, 1), (1, 4, 3, 3), (4, 1, 3, 3), (6,)])
def test_small_gradients_travel_in_their_parameters_order(shape: tuple[int, ...]) -> None:
    param = nn.Parameter(torch.zeros(shape))
    if len(shape) == 4:
        param.data = param.data.contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(shape)
    flat = _pack_gradients([gradient, None], [param, param], 0.5)
    assert flat[:2].tolist() == [0.5, 0.0]
    result, nothing = (_unflatten_like(piece, param) for piece in flat[2:].split(param.numel()))
    assert torch.equal(result, gradient / 2)
    assert result.stride() == param.stride()
    assert not nothing.any()
