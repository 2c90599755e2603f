"""Program of each rank in test_tula_ddp: runs all cases, one after the other, in one process group.

    python ags_ddp_cases.py FOLDER RANK WORLD

Writes the names of the passed cases to FOLDER/<rank>.json, and exits at the first failed case.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ags_models import get_ags_state, make_arguments
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tula_cli.optim import PRESETS, TulaOptimizer, gradient_stats
from tula_cli.optim.ags import count_samples_per_rank
from tula_cli.optim.ddp_hook import add_listener

B_LARGE, STEPS = 16, 3  # STEPS: optimizer steps in an epoch
Case = Callable[[int, int], None]
CASES: dict[str, Case] = {}


def register_case(*arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the function once per combination of the given values."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for values in itertools.product(*arguments):
            name = "-".join([function.__name__, *map(str, values)])
            CASES[name] = lambda rank, world, values=values: function(rank, world, *values)
        return function

    return register


def make_net(bn: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(7)] if bn else []
    return nn.Sequential(nn.Linear(5, 7), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 3)).double()


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    x = torch.randn(B_LARGE, 5, generator=rng, dtype=torch.float64)
    return x, torch.randint(0, 3, (B_LARGE,), generator=rng)


def slice_local_batch(x: Tensor, rank: int, world: int) -> Tensor:
    return x[rank::world]


def compute_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def build_optimizer(model: nn.Module, **kwargs: Any) -> TulaOptimizer:
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    default: dict[str, Any] = {"b_large": B_LARGE, "b_small": 4, "steps_per_epoch": STEPS, "delta": 0.6}
    return TulaOptimizer(base, model=model, **make_arguments(**(default | kwargs)))


def train_step(model: DistributedDataParallel, opt: TulaOptimizer, step: int, spoil: Any = None) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (slice_local_batch(t, rank, world) for t in make_batch(step))
    opt.zero_grad()
    compute_loss(model, x, y).backward()
    if opt.needs_small_batch:
        small = lambda n: compute_loss(model.module, x[:n], y[:n])  # noqa: E731
        opt.small_batch(small if spoil is None else lambda n: spoil(small(n)))
    opt.step()


def train_alone(model: nn.Module, opt: TulaOptimizer, step: int, counts: list[int]) -> None:
    """Do the work of all ranks in one process; the small batch has the same samples."""
    x, y = make_batch(step)
    opt.zero_grad()
    compute_loss(model, x, y).backward()
    if opt.needs_small_batch:
        world = len(counts)
        xs, ys = (torch.cat([slice_local_batch(t, r, world)[:n] for r, n in enumerate(counts)]) for t in (x, y))
        opt.small_batch(lambda n: compute_loss(model, xs, ys))
    opt.step()


def flatten_state(model: nn.Module, opt: TulaOptimizer) -> Tensor:
    state = get_ags_state(opt)
    numbers = torch.tensor([state["n_scaled"], state["n_refresh"], state["n_steps"], len(state["scale"])])
    square = [] if state["prev_sq"] is None else [state["prev_sq"].reshape(1)]
    parts = [*model.parameters(), *state["scale"].values(), *square, numbers]
    return torch.cat([p.detach().double().reshape(-1) for p in parts])


def assert_ranks_equal(model: nn.Module, opt: TulaOptimizer) -> None:
    mine = flatten_state(model, opt)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    assert all(torch.equal(mine, other) for other in theirs), "the ranks differ"


def assert_close(model: nn.Module, opt: TulaOptimizer, twin: nn.Module, alone: TulaOptimizer) -> None:
    ours, theirs = get_ags_state(opt), get_ags_state(alone)
    assert ours["n_scaled"] == theirs["n_scaled"] and ours["n_refresh"] == theirs["n_refresh"]
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)
    assert ours["scale"].keys() == theirs["scale"].keys()
    for k, factor in ours["scale"].items():
        torch.testing.assert_close(factor, theirs["scale"][k], rtol=1e-6, atol=1e-6)


@register_case([False, True], ["element", "tensor"])
def equals_one_process(rank: int, world: int, bucket_view: bool, granularity: Any) -> None:
    model, twin = DistributedDataParallel(make_net(), gradient_as_bucket_view=bucket_view), make_net()
    opt = build_optimizer(model, granularity=granularity)
    alone = build_optimizer(twin, granularity=granularity)
    for step in range(4 * STEPS):
        turn = get_ags_state(opt)["n_refresh"]
        counts = [4 * (r == turn % world) for r in range(world)]
        train_step(model, opt, step)
        train_alone(twin, alone, step, counts)
        assert_close(model, opt, twin, alone)
        assert_ranks_equal(model, opt)
    assert 0 < get_ags_state(opt)["n_scaled"] < 4 * STEPS - 1


@register_case(["element", "tensor"])
def small_batch_over_several_ranks(rank: int, world: int, granularity: Any) -> None:
    """No rank holds b_small samples: several ranks contribute unequal numbers."""
    available, b_small = (2, 3) if world == 2 else (2, 5)
    first = {2: [2, 1], 4: [2, 2, 1, 0]}[world]
    model, twin = DistributedDataParallel(make_net()), make_net()
    opt = build_optimizer(model, available=available, b_small=b_small, granularity=granularity)
    alone = build_optimizer(twin, b_small=b_small, granularity=granularity)
    assert opt.setup.small_batch_size == b_small and opt.bounds == alone.bounds
    for step in range(4 * STEPS):
        turn = get_ags_state(opt)["n_refresh"] % world
        counts = [first[(r - turn) % world] for r in range(world)]
        train_step(model, opt, step)
        train_alone(twin, alone, step, counts)
        assert_close(model, opt, twin, alone)
        assert_ranks_equal(model, opt)


@register_case()
def default_share_is_the_local_batch(rank: int, world: int) -> None:
    opt = build_optimizer(DistributedDataParallel(make_net()), b_small=12)
    assert opt.setup.available == B_LARGE // world and opt.setup.small_batch_size == 12
    assert sum(count_samples_per_rank(12, opt.setup.available, world, 0)) == 12


@register_case()
def not_finite_on_one_rank_puts_the_refresh_off_on_all(rank: int, world: int) -> None:
    model = DistributedDataParallel(make_net())
    opt = build_optimizer(model)
    spoil = (lambda loss: loss * torch.inf) if rank == 0 else None
    for step in range(STEPS):
        train_step(model, opt, step, spoil)
    assert get_ags_state(opt)["n_refresh"] == 0 and get_ags_state(opt)["scale"] == {} and opt.needs_small_batch
    train_step(model, opt, STEPS)
    assert get_ags_state(opt)["n_refresh"] == 1
    assert_ranks_equal(model, opt)


class Forked(nn.Module):
    """A model whose parameter `rare` small batches do not use; rank 0 uses it in large batches even if `everywhere` is false."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.often, self.rare = nn.Linear(5, 3), nn.Linear(5, 3)
        self.everywhere = everywhere

    def forward(self, x: Tensor) -> Tensor:
        large = len(x) == B_LARGE // dist.get_world_size()
        used = large or (dist.get_rank() == 0 and not self.everywhere)
        result: Tensor = self.often(x) + (self.rare(x) if used else 0)
        return result


@register_case([False, True])
def unused_in_the_small_batch(rank: int, world: int, everywhere: bool) -> None:
    model = DistributedDataParallel(Forked(everywhere).double())
    opt = build_optimizer(model, b_small=2)
    for step in range(STEPS):
        train_step(model, opt, step)
    # rank 0 is the source in the first refresh
    assert [*get_ags_state(opt)["scale"]] == ([0, 1] if everywhere else [0, 1, 2, 3])
    assert_ranks_equal(model, opt)


@register_case()
def batch_norm_and_dropout_keep_each_ranks_buffers_and_generator(rank: int, world: int) -> None:
    kept = []
    for delta in (0.0, None):
        model = DistributedDataParallel(make_net(bn=True, dropout=0.2), broadcast_buffers=False)
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        opt: Any = base if delta is None else build_optimizer(model, b_small=8, delta=delta, refresh=1)
        torch.manual_seed(100 + rank)
        for step in range(2 * STEPS):
            if delta is not None:
                train_step(model, opt, step)
                continue
            opt.zero_grad()
            compute_loss(model, *(slice_local_batch(t, rank, world) for t in make_batch(step))).backward()
            opt.step()
        kept.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


@register_case()
def batch_norm_ranks_stay_equal(rank: int, world: int) -> None:
    model = DistributedDataParallel(make_net(bn=True, dropout=0.2))
    opt = build_optimizer(model, b_small=8)
    torch.manual_seed(100 + rank)
    for step in range(4 * STEPS):
        train_step(model, opt, step)
        assert_ranks_equal(model, opt)
    assert get_ags_state(opt)["n_scaled"] > 0


class Drifting:
    """Change the norm on one rank, as different hardware or kernels would."""

    def __init__(self, rank: int, steps: set[int]) -> None:
        self.rank, self.steps, self.step = rank, steps, 0

    def __enter__(self) -> None:
        self.original = gradient_stats.compute_squared_norm
        setattr(gradient_stats, "compute_squared_norm", self.norm)  # noqa: B010

    def __exit__(self, *_: object) -> None:
        setattr(gradient_stats, "compute_squared_norm", self.original)  # noqa: B010

    def norm(self, grads: Any) -> Tensor:
        square = self.original(grads)
        return square * 10 if self.rank == dist.get_world_size() - 1 and self.step in self.steps else square


@register_case()
def broadcast_keeps_the_ranks_together(rank: int, world: int) -> None:
    model, twin = DistributedDataParallel(make_net()), DistributedDataParallel(make_net())
    opt, undisturbed = build_optimizer(model), build_optimizer(twin)
    drift = Drifting(rank, {4, 5, 7})
    for step in range(4 * STEPS):
        drift.step = step
        with drift:
            train_step(model, opt, step)
        train_step(twin, undisturbed, step)
        assert_ranks_equal(model, opt)
    assert torch.equal(flatten_state(model, opt), flatten_state(twin, undisturbed))


@register_case()
def state_goes_to_another_world_size(rank: int, world: int) -> None:
    model, twin = DistributedDataParallel(make_net()), make_net()
    opt = build_optimizer(model)
    for step in range(STEPS + 1):
        train_step(model, opt, step)
    stored = io.BytesIO()
    torch.save([model.module.state_dict(), opt.state_dict()], stored)
    stored.seek(0)
    weights, state = torch.load(stored, weights_only=True)
    twin.load_state_dict(weights)
    alone = build_optimizer(twin)
    alone.load_state_dict(state)
    assert len(get_ags_state(alone)["scale"]) == 4
    for step in range(STEPS + 1, 3 * STEPS):
        turn = get_ags_state(opt)["n_refresh"] % world
        train_step(model, opt, step)
        train_alone(twin, alone, step, [4 * (r == turn) for r in range(world)])
        assert_close(model, opt, twin, alone)


@register_case()
def grad_scaler_in_step(rank: int, world: int) -> None:
    plain, scaled = DistributedDataParallel(make_net()), DistributedDataParallel(make_net())
    first, second = build_optimizer(plain), build_optimizer(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(3 * STEPS):
        train_step(plain, first, step)
        x, y = (slice_local_batch(t, rank, world) for t in make_batch(step))
        second.zero_grad()
        scaler.scale(compute_loss(scaled, x, y)).backward()
        if second.needs_small_batch:
            second.small_batch(lambda n, x=x, y=y: compute_loss(scaled.module, x[:n], y[:n]), scaler=scaler)
        scaler.step(second)
        scaler.update()
    assert torch.equal(flatten_state(plain, first), flatten_state(scaled, second))


@register_case()
def a_plain_module_does_not_communicate(rank: int, world: int) -> None:
    """Ranks train different models: a collective operation would mix them or hang."""
    model = make_net()
    opt = build_optimizer(model)
    for step in range((2 + rank) * STEPS):
        train_alone(model, opt, step + 100 * rank, [4])
    assert get_ags_state(opt)["n_refresh"] == 2 + rank


@register_case()
def compiled_ddp_is_seen(rank: int, world: int) -> None:
    compiled = nn.Module()
    compiled._orig_mod = DistributedDataParallel(make_net())  # as torch.compile wraps it, whose import takes seconds
    base = torch.optim.SGD(compiled._orig_mod.parameters(), lr=0.1)
    opt = TulaOptimizer(base, model=compiled, b_large=B_LARGE, b_small=4)
    assert opt.setup.available == B_LARGE // world


@register_case()
def sync_batch_norm_needs_local_norms(rank: int, world: int) -> None:
    inner = nn.Sequential(nn.Linear(5, 3), nn.SyncBatchNorm(3))
    model = DistributedDataParallel.__new__(DistributedDataParallel)  # the constructor requires a GPU for SyncBatchNorm
    nn.Module.__init__(model)
    model.module, model.process_group = inner, dist.group.WORLD
    assert build_optimizer(model, granularity="static").identity is None  # needs no small batch
    assert_refused("LocalNorms", lambda: build_optimizer(model))


@register_case()
def another_process_group_is_refused(rank: int, world: int) -> None:
    groups = [dist.new_group([r]) for r in range(world)]
    model = DistributedDataParallel(make_net(), process_group=groups[rank])
    assert_refused("default process group", lambda: build_optimizer(model))


@register_case()
def dtensor_is_refused(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Replicate()]))
    assert_refused("DTensor", lambda: build_optimizer(nn.ParameterList([weight])))


# ---- factors from the gradients of each rank


def gradients_alone(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(compute_loss(model, x, y), list(model.parameters())))


def local_factor(own: list[Tensor], world: int) -> Tensor:
    """Return the factor from the gradients of one parameter on each rank."""
    mean = sum(own[1:], own[0]) / world
    squares = [float(g.square().sum()) for g in own]
    ratio = sum(squares) / world / float(mean.square().sum())
    return torch.tensor(min(ratio**0.5, world**0.5), dtype=torch.float64)


def build_robust(model: nn.Module, **kwargs: Any) -> TulaOptimizer:
    return build_optimizer(model, **(PRESETS["robust"] | kwargs))


def backward(model: DistributedDataParallel, step: int, accumulate: int, scale: Any = lambda loss: loss) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (slice_local_batch(t, rank, world).chunk(accumulate) for t in make_batch(step))
    for part in range(accumulate - 1):
        with model.no_sync():
            scale(compute_loss(model, x[part], y[part]) / accumulate).backward()
    scale(compute_loss(model, x[-1], y[-1]) / accumulate).backward()


@register_case([False, True], [1, 2], [1, 3])
def local_norms_are_those_of_disjoint_small_batches(
    rank: int, world: int, bucket_view: bool, accumulate: int, every: int
) -> None:
    model = DistributedDataParallel(make_net(), gradient_as_bucket_view=bucket_view)
    twin = copy.deepcopy(model.module)
    base = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    opt = build_robust(model, refresh=every, scale_ema=0.75)
    assert opt.bounds.high == world**0.5
    factors: dict[int, Tensor] = {}
    for step in range(8):
        x, y = make_batch(step)
        value = [
            gradients_alone(twin, slice_local_batch(x, r, world), slice_local_batch(y, r, world)) for r in range(world)
        ]
        opt.zero_grad()
        backward(model, step, accumulate)
        for k, (p, q) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
            assert p.grad is not None
            q.grad = p.grad * factors[k] if factors and step else p.grad.clone()
        assert not opt.needs_small_batch
        opt.step()
        base.step()
        for k in range(len(value[0])):
            fresh = local_factor([grads[k] for grads in value], world)
            if step % every == every - 1:
                factors[k] = 0.75 * factors[k] + 0.25 * fresh if k in factors else fresh
            if factors:
                torch.testing.assert_close(get_ags_state(opt)["scale"][k], factors[k], rtol=1e-9, atol=0)
                factors[k] = get_ags_state(opt)["scale"][k]
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q), step
        assert_ranks_equal(model, opt)
    assert get_ags_state(opt)["n_scaled"] == 8 - every and any(
        1 < s < world**0.5 for s in get_ags_state(opt)["scale"].values()
    )


@register_case()
def local_norms_do_not_see_the_loss_scale(rank: int, world: int) -> None:
    plain, scaled = DistributedDataParallel(make_net()), DistributedDataParallel(make_net())
    first, second = build_robust(plain), build_robust(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(6):
        for model, opt, scale in ((plain, first, lambda loss: loss), (scaled, second, scaler.scale)):
            opt.zero_grad()
            backward(model, step, 1, scale)
        if step == 3:  # skipped: the recorded norms are discarded
            next(scaled.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        else:
            first.step()
        scaler.step(second)
        scaler.update(2.0**8)
        assert get_ags_state(second)["n_refresh"] == step + (step < 3)
    assert torch.equal(flatten_state(plain, first), flatten_state(scaled, second))


@register_case()
def a_norm_that_is_not_finite_keeps_the_factor(rank: int, world: int) -> None:
    model = DistributedDataParallel(make_net())
    opt = build_robust(model)
    train_step(model, opt, 0)
    before = get_ags_state(opt)["scale"]
    opt.zero_grad()
    x, y = (slice_local_batch(t, rank, world) for t in make_batch(1))
    bias = model.module[-1].bias
    loss = compute_loss(model, x, y) + (bias.sum() * torch.inf if rank == world - 1 else 0)
    loss.backward()
    opt.max_grad_norm = 1.0
    opt.step()
    after = get_ags_state(opt)["scale"]
    assert torch.equal(after[3], before[3]) and not torch.equal(after[0], before[0])


@register_case()
def listeners_share_one_hook_and_reduce_as_ddp_does(rank: int, world: int) -> None:
    seen: dict[str, list[float]] = {"own": [], "averaged": []}

    def listener(bucket: Any) -> Any:
        buffer = bucket.buffer()
        seen["own"].append(float(buffer.norm()))
        return lambda: seen["averaged"].append(float(buffer.norm()))

    heard, plain = DistributedDataParallel(make_net()), DistributedDataParallel(make_net())
    opt = build_robust(heard)
    add_listener(heard, listener)
    for model in (heard, plain):
        backward(model, 0, 1)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(heard.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
    total = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()  # type: ignore[union-attr]
    torch.testing.assert_close(torch.tensor(seen["averaged"]).double().norm(), total, check_dtype=False)
    assert len(seen["own"]) == len(seen["averaged"]) > 0 and seen["own"] != seen["averaged"]
    opt.step()
    assert get_ags_state(opt)["n_refresh"] == 1


@register_case()
def a_taken_hook_is_refused(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = DistributedDataParallel(make_net())
    model.register_comm_hook(None, allreduce_hook)
    assert_refused("SmallBatch", lambda: build_robust(model))


@register_case()
def local_norms_leave_out_frozen_sparse_and_unused(rank: int, world: int) -> None:
    torch.manual_seed(0)
    parts = {"bag": nn.EmbeddingBag(10, 5, mode="sum", sparse=True), "head": nn.Linear(5, 3), "rare": nn.Linear(5, 3)}
    inner = nn.ModuleDict(parts | {"frozen": nn.Linear(5, 3)})
    inner["frozen"].requires_grad_(False)
    inner.forward = lambda index: inner["head"](inner["bag"](index)) + inner["frozen"](inner["bag"](index))  # type: ignore[method-assign]
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = TulaOptimizer(base, model=model, b_large=B_LARGE, b_small=4, preset="robust")
    index = torch.randint(0, 10, (3, 3), generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        opt.zero_grad()
        model(index).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.step()
        assert_ranks_equal(model, opt)
    assert [*get_ags_state(opt)["scale"]] == [1, 2] and get_ags_state(opt)["n_scaled"] == 2


@register_case()
def a_backward_beside_ddp_is_noticed(rank: int, world: int) -> None:
    model = DistributedDataParallel(make_net())
    opt = build_robust(model)
    compute_loss(model.module, *make_batch(0)).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    assert "DDP" in str(caught[-1].message) and get_ags_state(opt)["scale"] == {}


@register_case()
def local_norms_on_another_world_size_are_void(rank: int, world: int) -> None:
    model = DistributedDataParallel(make_net())
    opt = build_robust(model)
    for step in range(2):
        train_step(model, opt, step)
    again, alone = build_robust(DistributedDataParallel(make_net())), build_robust(make_net())
    # the cap of one process is sqrt(16 / 4), the same as that of four ranks
    for other, factors in ((again, 4), (alone, 4 if world == 4 else 0)):
        other.load_state_dict(opt.state_dict())
        assert len(get_ags_state(other)["scale"]) == factors
    assert alone.needs_small_batch and not again.needs_small_batch


@register_case(["gradient", "update"], ["static", "tensor", "element"])
def every_way_keeps_the_ranks_equal(rank: int, world: int, apply_to: Any, granularity: Any) -> None:
    model = DistributedDataParallel(make_net(bn=True, dropout=0.2))
    opt = build_optimizer(model, granularity=granularity, apply_to=apply_to, scale_ema=0.5)
    for step in range(3 * STEPS):
        train_step(model, opt, step)
        assert_ranks_equal(model, opt)
    assert get_ags_state(opt)["n_scaled"] > 0


def assert_refused(message: str, act: Callable[[], object]) -> None:
    try:
        act()
    except ValueError as error:
        assert message in str(error), error
        return
    raise AssertionError(f"not refused: {message}")


def run(folder: Path, rank: int, world: int) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    finished: list[str] = []
    for name, function in CASES.items():
        function(rank, world)
        dist.barrier()
        finished.append(name)
        (folder / f"{rank}.json").write_text(json.dumps(finished))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
