"""Orthogonalised steps against the singular value decomposition, and against the plain SGD that they wrap."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tula_cli.optim import gradient_stats, orthogonal
from tula_cli.optim.orthogonal import Ortho, batch_matrices, orthogonalize_, run_newton_schulz

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def polar(update: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(update.flatten(1), full_matrices=False)
    return (u @ v).view_as(update)


def cosine(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / (one.norm() * other.norm()))


def turned(update: Tensor) -> Tensor:
    result = update.clone()
    orthogonalize_([result])
    return result


@pytest.mark.parametrize("shape", [(20, 20), (10, 40), (2, 300)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    update = matrix(*shape)
    u, before, v = torch.linalg.svd(update, full_matrices=False)
    inside = u.T @ run_newton_schulz(update[None])[0] @ v.T
    large = before > 0.01 * before.norm()
    assert float((inside - inside.diag().diag()).abs().max()) < 1e-9, "the same singular vectors"
    assert bool((inside.diag()[large] - 0.95).abs().max() < 0.3), "0.68 to 1.13 is where Muon's polynomial leaves them"


def test_iterations_are_those_of_muons_polynomial() -> None:
    value = torch.tensor([[0.3, 0.0], [0.0, 0.02]], dtype=torch.float64)
    known = value.diag() / value.norm()
    for _ in range(5):
        known = 3.4445 * known - 4.7750 * known**3 + 2.0315 * known**5
    torch.testing.assert_close(run_newton_schulz(value[None])[0], known.diag())


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (16, 3, 3, 3), (5, 4, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_turned_update_has_its_own_length_and_the_nearest_orthogonal_direction(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    update = matrix(*shape).to(dtype) * 1e-3
    result = turned(update)
    assert (result.shape, result.dtype) == (update.shape, dtype)
    assert float(result.double().norm()) == pytest.approx(float(update.double().norm()), rel=1e-2 if dtype is torch.bfloat16 else 1e-5)  # fmt: skip
    assert cosine(result.double(), polar(update.double())) > 0.97


def test_a_long_and_a_short_update_turn_alike() -> None:
    update = matrix(6, 9)
    torch.testing.assert_close(turned(1e-20 * update), 1e-20 * turned(update))
    assert torch.equal(turned(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_a_strided_update_turns_as_its_values_do() -> None:
    update = matrix(4, 3, 5, 5)
    strided = update.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(turned(strided), turned(update))


SHAPES = [(8, 30), (8, 5, 3), (30, 8), (8, 64), (6, 9), (8, 2, 2, 2), (9, 6), (4, 4)]


def test_matrices_that_are_multiplied_together_turn_as_each_alone() -> None:
    updates = [matrix(*shape, seed=seed) * 10.0**-seed for seed, shape in enumerate(SHAPES)]
    together = [u.clone() for u in updates]
    orthogonalize_(together)
    for update, result in zip(updates, together, strict=True):
        torch.testing.assert_close(result, turned(update), rtol=1e-9, atol=0)


def test_a_gpu_fills_up_with_zeros_and_turns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = [matrix(*shape, seed=seed).float() * 10.0**-seed for seed, shape in enumerate(SHAPES)]
    monkeypatch.setattr(gradient_stats, "is_on_accelerator", lambda tensor: True)
    results = [u.clone() for u in updates]
    orthogonalize_(results)
    for update, first in zip(updates, results, strict=True):
        assert float(first.norm()) == pytest.approx(float(update.norm()), rel=1e-2)
        assert cosine(first.double(), polar(update.double())) > 0.95  # bfloat16


def test_batches_have_one_shorter_side_and_a_bound_on_zeros_and_size() -> None:
    sides = [(8, 30), (8, 16), (8, 30), (6, 9), (8, 8), (8, 30)]
    assert batch_matrices(sides, padding=1.0, max_elements=10**9) == [[0, 2, 5], [1], [4], [3]]
    assert batch_matrices(sides, padding=1.3, max_elements=10**9) == [[0, 2, 5, 1], [4], [3]]
    assert batch_matrices(sides, padding=9.0, max_elements=10**9) == [[0, 2, 5, 1, 4], [3]]
    assert batch_matrices(sides, padding=9.0, max_elements=480) == [[0, 2], [5, 1], [4], [3]]
    assert batch_matrices(sides, padding=9.0, max_elements=1) == [[0], [2], [5], [1], [4], [3]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.conv = nn.Conv2d(3, 4, 3)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.grouped = nn.Conv2d(4, 6, 3, groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.wide = nn.Linear(5, 6)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.score = nn.Linear(4, 1, bias=False)


def test_maps_are_turned_and_all_else_takes_the_bases_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    subject = Ortho(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in subject.matrices()] == ["conv.weight", "grouped.weight", "wide.weight"]
    monkeypatch.setattr(orthogonal, "MAX_SHORTER_SIDE", 4)
    assert [names[id(p)] for p in subject.matrices()] == ["conv.weight"]


class Positions(nn.Module):
    """Looks up or adds values in the ways that networks write it."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(9, 4))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 4))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.prompt_tokens = nn.ParameterList([nn.Parameter(torch.zeros(3, 4))])
        self.maps = nn.ParameterList([nn.Parameter(torch.zeros(3, 4))])
        self.experts = nn.Parameter(torch.zeros(2, 3, 4))


class VocabularyEmbedding(nn.Module):
    """A lookup that is no nn.Embedding, with a projection in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(9, 4))
        self.project = nn.Linear(4, 4)


class TinyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight


KINDS: list[tuple[str, Callable[[], nn.Module], set[str]]] = [
    ("linear", lambda: nn.Linear(4, 5), {"weight"}),
    ("tied head", Tied, set()),
    ("untied head", lambda: nn.ModuleDict({"t": nn.Embedding(9, 4), "h": nn.Linear(4, 9)}), {"h.weight"}),
    ("bag", lambda: nn.EmbeddingBag(9, 4), set()),
    ("own embedding", VocabularyEmbedding, {"project.weight"}),
    ("positions", Positions, {"maps.0"}),
    ("layer norm of two dimensions", lambda: nn.LayerNorm([4, 4]), set()),
    ("own norm", TinyRMSNorm, set()),
    ("depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4), set()),
    ("depthwise in one dimension", lambda: nn.Conv1d(4, 4, 3, groups=4), set()),
    ("transposed depthwise", lambda: nn.ConvTranspose2d(4, 4, 3, groups=4), set()),
    ("transposed", lambda: nn.ConvTranspose2d(4, 5, 3), {"weight"}),
    ("three dimensions", lambda: nn.Conv3d(2, 3, 3), {"weight"}),
    ("one channel", lambda: nn.Conv2d(1, 4, 3), {"weight"}),
    ("weight norm", lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), {"parametrizations.weight.original1"}),
    ("lstm", lambda: nn.LSTM(3, 4), {"weight_ih_l0", "weight_hh_l0"}),
    ("attention", lambda: nn.MultiheadAttention(4, 2), {"in_proj_weight", "out_proj.weight"}),
    ("bilinear", lambda: nn.Bilinear(3, 4, 5), set()),
    ("frozen", lambda: nn.Linear(4, 4).requires_grad_(False), set()),
]  # fmt: skip


@pytest.mark.parametrize(("made", "expected"), [case[1:] for case in KINDS], ids=[case[0] for case in KINDS])
def test_matrices_are_maps_and_nothing_else(made: Callable[[], nn.Module], expected: set[str]) -> None:
    model = made()
    subject = Ortho(torch.optim.AdamW(model.parameters(), lr=0.1), model=model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in subject.matrices()} == expected


def test_a_step_is_the_bases_turned() -> None:
    nets = [nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).double() for _ in "ab"]
    nets[1].load_state_dict(nets[0].state_dict())
    plain = torch.optim.SGD(nets[0].parameters(), **SGD)
    subject = Ortho(torch.optim.SGD(nets[1].parameters(), **SGD), model=nets[1])
    for seed in range(3):
        before = [p.detach().clone() for p in nets[1].parameters()]
        nets[0].load_state_dict(nets[1].state_dict())  # the same weights and momentum before each step
        for ours, theirs in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
            ours.grad = theirs.grad = matrix(*ours.shape, seed=seed)
        plain.step()
        subject.step()
        for start, first, other in zip(before, nets[0].parameters(), nets[1].parameters(), strict=True):
            update = first.detach() - start
            torch.testing.assert_close(other.detach() - start, turned(update) if start.ndim > 1 else update)


def test_a_parameter_without_a_gradient_stays() -> None:
    net = nn.Linear(4, 4)
    subject = Ortho(torch.optim.SGD(net.parameters(), **SGD), model=net)
    before = net.weight.detach().clone()
    net.bias.grad = torch.ones(4)
    subject.step()
    assert torch.equal(net.weight, before)


def test_gradients_are_clipped_together() -> None:
    net = nn.Linear(4, 4, bias=False)
    subject = Ortho(torch.optim.SGD(net.parameters(), lr=1.0), model=net, max_grad_norm=0.5)
    before = net.weight.detach().clone()
    net.weight.grad = 100 * torch.ones(4, 4)
    subject.step()
    assert float((net.weight.detach() - before).norm()) == pytest.approx(0.5, rel=1e-4)


def test_it_converges_where_sgd_crawls() -> None:
    """Badly conditioned least squares: SGD is held back by the steepest direction."""
    scales = torch.logspace(0, -3, 12, dtype=torch.float64)
    target, losses = matrix(12, 12, seed=1), {}
    for name in ("sgd", "ortho"):
        net = nn.Linear(12, 12, bias=False).double()
        nn.init.zeros_(net.weight)
        base = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.9)
        optimizer = base if name == "sgd" else Ortho(base, model=net)
        for _ in range(300):
            optimizer.zero_grad()
            loss = ((net.weight - target) * scales).square().sum()
            loss.backward()
            optimizer.step()
        losses[name] = float(loss)
    assert losses["ortho"] < 0.5 * losses["sgd"]


def test_its_state_is_the_bases() -> None:
    net = nn.Linear(4, 4)
    base = torch.optim.SGD(net.parameters(), **SGD)
    subject = Ortho(base, model=net)
    net(torch.randn(2, 4)).sum().backward()
    subject.step()
    assert subject.state_dict().keys() == base.state_dict().keys()
    other = torch.optim.SGD(net.parameters(), **SGD)
    Ortho(other, model=net).load_state_dict(subject.state_dict())
    assert torch.equal(other.state[net.weight]["momentum_buffer"], base.state[net.weight]["momentum_buffer"])


@pytest.mark.parametrize("name", ["LBFGS", "Muon"])
def test_a_base_that_evaluates_again_or_orthogonalises_itself_is_refused(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    net = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=name):
        Ortho(getattr(torch.optim, name)(net.parameters(), lr=0.1), model=net)


def test_complex_weights_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="Ortho does not work with complex"):
        Ortho(torch.optim.SGD([weight], lr=0.1), model=nn.Linear(2, 2))


# --- any optimizer


class Signs(torch.optim.Optimizer):
    """Lion without momentum: steps by the sign, with decoupled weight decay."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * p.grad.sign())


class OwnAdamW(torch.optim.AdamW):
    """A class of the user's own."""


OPTIMIZERS: list[tuple[Any, dict[str, Any], bool]] = [
    (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9}, False),
    (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "fused": True}, False),
    (torch.optim.Adam, {}, False),
    (torch.optim.Adam, {"weight_decay": 0.1}, False),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True, "amsgrad": True}, False),
    (torch.optim.AdamW, {"weight_decay": 0.1}, True),
    (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True, "foreach": False}, True),
    (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}, True),
    (torch.optim.NAdam, {"weight_decay": 0.1}, False),
    (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, True),
    (torch.optim.RAdam, {"weight_decay": 0.1}, False),
    (torch.optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, True),
    (torch.optim.Adamax, {"weight_decay": 0.1}, False),
    (torch.optim.RMSprop, {"weight_decay": 0.1, "centered": True, "momentum": 0.5}, False),
    (torch.optim.Adagrad, {"weight_decay": 0.1}, False),
    (torch.optim.Adadelta, {"weight_decay": 0.1}, False),
    (torch.optim.Rprop, {}, False),
    (torch.optim.ASGD, {"weight_decay": 0.1}, False),
    (torch.optim.Adafactor, {"weight_decay": 0.1}, True),
    (OwnAdamW, {"weight_decay": 0.1}, True),
    (Signs, {"weight_decay": 0.1}, True),
]


@pytest.mark.parametrize(("kind", "settings", "decoupled"), OPTIMIZERS)
def test_the_update_of_any_optimizer_is_orthogonalised_at_its_length_and_its_decay_is_apart(
    kind: Any, settings: dict[str, Any], decoupled: bool
) -> None:
    """`plain` takes the same steps from the same weights and state; its matrices' update is what has to be turned."""
    nets = [nn.Sequential(nn.Linear(6, 9), nn.Conv2d(3, 4, 3)).double() for _ in "ab"]
    nets[1].load_state_dict(nets[0].state_dict())
    plain = kind(nets[0].parameters(), lr=0.01, **settings)
    subject = Ortho(kind(nets[1].parameters(), lr=0.01, **settings), model=nets[1])
    for seed in range(8):  # RAdam needs six to have a variance
        start = [p.detach().clone() for p in nets[1].parameters()]
        nets[0].load_state_dict(nets[1].state_dict())
        for ours, theirs in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
            ours.grad, theirs.grad = (matrix(*ours.shape, seed=seed) for _ in "ab")
        plain.step()
        subject.step()
        for before, first, other in zip(start, nets[0].parameters(), nets[1].parameters(), strict=True):
            kept = before * (1 - 0.01 * 0.1) if decoupled and before.ndim > 1 else before
            update = first.detach() - kept
            expected = kept + (turned(update) if before.ndim > 1 else update)
            torch.testing.assert_close(other.detach(), expected, rtol=1e-6, atol=1e-9)
            assert torch.equal(other.grad, matrix(*other.shape, seed=seed)), "the gradient is the user's"


def test_a_learning_rate_that_is_a_tensor_decays_too() -> None:
    nets = [nn.Linear(4, 4, bias=False).double() for _ in "ab"]
    nets[1].load_state_dict(nets[0].state_dict())
    for net, lr in zip(nets, (0.1, torch.tensor(0.1, dtype=torch.float64)), strict=True):
        net.weight.grad = matrix(4, 4)
        more = {"foreach": False, "capturable": False}
        Ortho(torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.5, **more), model=net).step()
    torch.testing.assert_close(nets[0].weight, nets[1].weight)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Signs])
def test_a_step_that_fails_leaves_the_weights(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(4, 4)
    subject = Ortho(kind(net.parameters(), lr=0.1), model=net)
    before, grad = net.weight.detach().clone(), torch.ones(4, 4)
    net.weight.grad, net.bias.grad = grad, torch.ones(4)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(subject.base, "step", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        subject.step()
    assert torch.equal(net.weight, before) and net.weight.grad is grad


def test_bfloat16_weights_take_adamws_update_as_those_in_float32() -> None:
    """An update of 0.5 % of a weight, of which bfloat16 has steps of 0.4 to 0.8 %."""
    start, moved = matrix(48, 64, dtype=torch.float32).to(torch.bfloat16), []
    for dtype in (torch.bfloat16, torch.float32):
        net = nn.Linear(64, 48, bias=False).to(dtype)
        with torch.no_grad():
            net.weight.copy_(start)
        subject = Ortho(torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.0), model=net)
        net.weight.grad = matrix(48, 64, seed=1, dtype=torch.float32).to(dtype)
        subject.step()
        moved.append(net.weight.detach().float() - start.float())
    assert cosine(*moved) > 0.98


def test_a_training_that_resumes_from_its_state_is_the_same_bit_for_bit() -> None:
    def steps(net: nn.Module, subject: Ortho, seeds: range) -> None:
        for seed in seeds:
            for p in net.parameters():
                p.grad = matrix(*p.shape, seed=seed, dtype=torch.float32)
            subject.step()

    def made(net: nn.Module) -> Ortho:
        return Ortho(torch.optim.AdamW(net.parameters(), lr=0.01), model=net)

    through, broken = nn.Linear(6, 9), nn.Linear(6, 9)
    broken.load_state_dict(through.state_dict())
    steps(through, made(through), range(6))
    first = made(broken)
    steps(broken, first, range(3))
    second = made(broken)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(broken, second, range(3, 6))
    assert torch.equal(through.weight, broken.weight) and torch.equal(through.bias, broken.bias)


def test_a_grad_scaler_skips_a_step_that_overflows_with_its_decay() -> None:
    net = nn.Linear(4, 4)
    subject = Ortho(torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5), model=net, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    before = net.weight.detach().clone()
    for inputs, moves in ((torch.full((2, 4), torch.inf), False), (torch.ones(2, 4), True)):
        subject.zero_grad()
        scaler.scale(net(inputs).sum()).backward()
        scaler.step(subject)
        scaler.update()
        assert torch.equal(net.weight, before) != moves


# --- the step is turned before it changes a weight


SETTINGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.02, "maximize": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_turned_is_sgds_own_step_with_its_momentum(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonal, "orthogonalize_", lambda updates: None)
    models = [nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = torch.optim.SGD(models[0].parameters(), lr=0.1, **settings)
    ours = Ortho(torch.optim.SGD(models[1].parameters(), lr=0.1, **settings), model=models[1])
    for seed in range(4):
        if seed == 3:
            models[0][1].weight.grad = models[1][1].weight.grad = None
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            if seed < 3 or theirs.grad is not None:
                theirs.grad = matrix(*theirs.shape, seed=seed)
                mine.grad = theirs.grad.clone()
        plain.step()
        ours.step()
        assert all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True)
            if p.grad is not None
        )
    for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
    for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert ours.state[mine].keys() == plain.state[theirs].keys()
        if settings.get("momentum"):
            assert torch.equal(ours.state[mine]["momentum_buffer"], plain.state[theirs]["momentum_buffer"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_move_as_those_in_float32_would(dtype: torch.dtype) -> None:
    """A step of 3 % of the weights, which are rounded by up to 0.4 %: read off them, it was another one."""
    start, grad = matrix(48, 64, dtype=torch.float32).to(dtype), matrix(48, 64, seed=1, dtype=torch.float32).to(dtype)
    moved = []
    for kind in (dtype, torch.float32):
        model = nn.Linear(64, 48, bias=False).to(kind)
        with torch.no_grad():
            model.weight.copy_(start)
        model.weight.grad = grad.to(kind)
        Ortho(torch.optim.SGD(model.parameters(), lr=0.03), model=model).step()
        moved.append(model.weight.detach().float() - start.float())
    assert cosine(*moved) > 0.99
    assert float(moved[0].norm() / moved[1].norm()) == pytest.approx(1, abs=0.02)


class Slower(torch.optim.SGD):
    """Steps by half of SGD's step."""

    def step(self, closure: Any = None) -> None:
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        with torch.no_grad():
            for p, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
                p.lerp_(old, 0.5)


def test_a_class_of_ones_own_steps_by_itself_and_not_with_half_weights() -> None:
    models = [nn.Linear(6, 5, bias=False).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    moved = []
    for model, kind in zip(models, (torch.optim.SGD, Slower), strict=True):
        before = model.weight.detach().clone()
        model.weight.grad = matrix(5, 6)
        Ortho(kind(model.parameters(), lr=0.1), model=model).step()
        moved.append(model.weight.detach() - before)
    torch.testing.assert_close(moved[1], moved[0] / 2)
    with pytest.raises(ValueError, match=r"weights in torch.bfloat16 are too coarse for the small steps of Slower"):
        half = nn.Linear(6, 5).bfloat16()
        Ortho(Slower(half.parameters(), lr=0.1), model=half)
