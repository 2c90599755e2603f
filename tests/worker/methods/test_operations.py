"""No method's step waits for the device; a method that did would be found here, and so is one that is planted."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import operations
import pytest
import torch
import torchvision
from operations import (
    PLAIN_METHOD,
    PRECISIONS,
    OperationCounts,
    count_kernels,
    count_operations,
    count_step,
    list_cases,
    make_sections,
)
from worker_jobs import make_spec

from tula_cli.optim import Ortho, SmallBatch, TulaOptimizer
from tula_cli.optim.layerwise import Lamb, Lars
from tula_cli.spec.job import JobSpec
from tula_cli.spec.methods import METHODS
from tula_cli.worker.methods.plain import Loop, Plain
from tula_cli.worker.ranks import Ranks

BATCH = 16


def job(case: str, precision: str = "fp32", **changes: Any) -> JobSpec:
    """Return a case with a network that has BatchNorm and dropout."""
    model = {"args": {"norm": True, "dropout": 0.3}}
    return make_spec(
        **{"model": model, **make_sections(case, precision=precision, reference_batch=BATCH // 2), **changes}
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", list_cases())
def test_a_step_does_not_wait_for_the_device(case: str, precision: str, alone: Ranks) -> None:
    seen = count_step(job(case, precision), alone, batch=BATCH)
    assert seen.waits.total() <= (precision == "fp16"), seen.waits  # GradScaler asks whether to step at all
    assert all("grad_scaler" in place for place in seen.waits), seen.waits
    assert seen.operations.total() > 20


@pytest.mark.parametrize("case", ["ags", "lars"])
def test_steps_that_overflow_are_not_those_that_are_counted(
    case: str, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, scaler = count_step(job(case, "fp16"), alone, batch=BATCH), torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, **kw: scaler(device, init_scale=2.0**40, **kw))
    seen = count_step(job(case, "fp16"), alone, batch=BATCH)
    assert seen.operations == usual.operations  # else without the update, or with a refresh that waits for its turn
    assert seen.waits.total() == 1


def test_every_method_of_the_table_is_counted() -> None:
    assert set(METHODS) <= set(list_cases())
    assert {case.partition(",")[0] for case in list_cases()} == set(METHODS)


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda value: value.item(),
    "float": float,
    "branch": lambda value: 1 if value > 0 else 0,
    "tolist": lambda value: value.reshape(1).tolist(),
    "copy": lambda value: value.cpu(),
    "to": lambda value: value.to("cpu"),
    "index": lambda value: torch.nonzero(value),
    "mask": lambda value: value.reshape(1)[value.reshape(1) > 0],
    "equal": lambda value: torch.equal(value, value),
    "number in an operation": lambda value: torch.add(torch.ones(2), torch.ones(2), alpha=value),
    "made on the host": lambda value: torch.tensor([1.0], device=value.device),
}


@pytest.mark.parametrize("how", WAITS)
def test_a_planted_wait_is_seen(how: str, alone: Ranks, plant: Callable[..., None]) -> None:
    class Waiting(Plain):
        def after_step(self, loop: Loop) -> None:
            WAITS[how](next(loop.parallel.parameters()).detach().sum())

    plant(PLAIN_METHOD, Waiting)
    waits = count_step(job(PLAIN_METHOD), alone, batch=BATCH).waits
    assert waits.total() == 1
    assert "test_operations.py" in next(iter(waits))


def test_a_step_on_the_cpu_may_read_what_it_likes(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of the CPU has a branch on the host: without `as_on_gpu` the count would tell of another way."""
    step = operations.make_step(job("ags"), alone, batch=BATCH)
    with count_operations() as seen:
        step()
    assert seen.waits


def test_operations_are_counted_without_views_and_lists_by_what_cuda_can_take() -> None:
    with count_operations() as seen:
        lists = [torch.ones(4).view(2, 2), torch.ones(3)]
        torch._foreach_mul_(lists, 2.0)
        torch._foreach_mul_(lists, [torch.ones(()), torch.ones(())])
    assert seen.operations == {"ones": 4, "_foreach_mul_": 2}
    rows, columns = torch.ones(2, 3), torch.ones(3, 2).T
    assert count_kernels("_foreach_add_", ([rows, rows], [rows, rows])) == 1
    assert count_kernels("_foreach_add_", ([rows, rows], [columns, rows])) == 2
    assert count_kernels("_foreach_add_", ([rows, rows], [rows.double(), rows])) == 2
    assert count_kernels("_foreach_mul_", ([rows, rows], torch.ones(()))) == 1
    assert count_kernels("_foreach_mul_", ([rows, rows], torch.ones((), dtype=torch.float64))) == 2
    assert count_kernels("add", (rows, rows)) == 1


# --- how many: the shapes of whole networks, on a device that computes nothing and gives no value away


PLAIN_STEP = {"resnet18": 297, "resnet50": 742}
"""Operations of lbt's step, of which its fused update is one (benchmarks/operations/operations.py)."""


def optimizer_on(params: list[torch.nn.Parameter], model: torch.nn.Module, method: str) -> torch.optim.Optimizer:
    """Return a method's optimizer, with factors that act."""
    if method in ("lars", "lamb"):
        kind, more = (Lars, {"momentum": 0.9}) if method == "lars" else (Lamb, {})
        return kind(params, lr=0.1, weight_decay=0.1, **more)
    base = torch.optim.SGD(params, lr=0.1, foreach=True)  # one operation, as the fused one
    if method.startswith("ortho"):
        adamw = torch.optim.AdamW(params, lr=0.1, foreach=True)
        return Ortho(adamw if method == "ortho, adamw" else base, model=model)
    factors, to = SmallBatch(), "update" if method == "update" else "gradient"
    limit = 1.0 if method == "clip" else None
    opt = TulaOptimizer(base, model=model, b_large=8, b_small=2, factors=factors, apply_to=to, max_grad_norm=limit)
    opt.start_epoch(100)
    factors._factor = {p: torch.empty_like(p) for p in params}
    return opt


@pytest.mark.parametrize(
    ("network", "method", "most"),
    [
        ("resnet18", "clip", 1.10),
        ("resnet50", "clip", 1.05),
        ("resnet18", "update", 1.10),
        ("resnet50", "update", 1.05),
        ("resnet18", "lars", 1.2),
        ("resnet50", "lars", 1.2),
        ("resnet18", "lamb", 1.2),
        ("resnet50", "lamb", 1.2),
        ("resnet18", "ortho", 1.5),
        ("resnet50", "ortho", 1.5),
        ("resnet18", "ortho, adamw", 1.5),
        ("resnet50", "ortho, adamw", 1.5),
    ],
)
def test_a_step_has_few_operations_more_than_a_plain_one(network: str, method: str, most: float) -> None:
    with torch.device("meta"):
        model = getattr(torchvision.models, network)(num_classes=10)
    params = list(model.parameters())
    optimizer = optimizer_on(params, model, method)
    seen = second_step(optimizer, params)
    base = torch.optim.AdamW(params, lr=0.1, foreach=True) if "adamw" in method else None
    # AdamW's own operations are lbt's too; its number of steps, on the CPU, is read without waiting for a device
    value = second_step(base, params) if base is not None else OperationCounts(Counter(fused=1))
    plain, more = PLAIN_STEP[network], seen.operations.total() - value.operations.total()
    assert (plain + more) / plain <= most, seen.operations
    assert seen.waits.total() == value.waits.total()


def second_step(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> OperationCounts:
    """Return what an optimizer's second step does: the first makes momenta."""
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p)
        with count_operations() as seen:
            optimizer.step()
    return seen
