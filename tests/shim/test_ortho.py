"""Orthogonalised steps of a script's own optimizer: what is trained is what `Ortho` does by hand, or nothing."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from script_ranks import ScriptRanks
from torch import nn

from tula_cli.cluster.scripts.methods import copy_optim
from tula_cli.optim import Ortho
from tula_cli.run.records.scripts import OrthoPlan, ShimPlan
from tula_cli.shim.tula_shim.ortho import CannotOrthogonaliseError, OrthoHooks, find_module
from tula_cli.shim.tula_shim.plan import read_plan

pytestmark = pytest.mark.torch
SCRIPT = "scalable.py"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_optim(tmp_path_factory.mktemp("run"))


def plan(folder: Path, library: Path | None, power: float = 2.0) -> ShimPlan:
    ortho = None if library is None else OrthoPlan(code=str(library), beta2_power=power)
    return ShimPlan(task="t", folder=str(folder), mode="train", warmup=2, heartbeat=0.0, row=0.0, ortho=ortho)


def weights(path: Path, rank: int = 0) -> torch.Tensor:
    state = torch.load(f"{path}.{rank}", weights_only=True)["model"]
    return torch.cat([tensor.flatten() for tensor in state.values()])


@pytest.mark.parametrize(
    ("world", "loop"),
    [
        (2, ("--optimizer", "AdamW", "--accumulate", 2, "--scaler")),
        pytest.param(2, ("--optimizer", "SGD", "--scaler"), marks=pytest.mark.proof),
        (1, ("--optimizer", "AdamW", "--alone", "--scaler", "--fused")),
        (1, ("--optimizer", "AdamW", "--alone", "--closure")),
        pytest.param(1, ("--optimizer", "AdamW", "--alone", "--hooks"), marks=pytest.mark.proof),
    ],
)
def test_weights_are_those_of_ortho_by_hand(
    run: ScriptRanks, tmp_path: Path, library: Path, world: int, loop: tuple[Any, ...]
) -> None:
    for name, ortho, more in (("own", library, ()), ("hand", None, ("--ortho-by-hand",)), ("plain", None, ())):
        of = plan(tmp_path / f"of-{name}", ortho)
        outcome = run(SCRIPT, *loop, *more, "--out", tmp_path / name, plan=of, world=world)
        assert outcome.codes == [0] * world, outcome.output
    value, hand, plain = (weights(tmp_path / name) for name in ("own", "hand", "plain"))
    torch.testing.assert_close(value, hand, rtol=0, atol=0)
    assert not torch.allclose(value, plain, atol=1e-4)
    assert torch.equal(value, weights(tmp_path / "own", world - 1))
    rows = [json.loads(line) for line in (tmp_path / "of-own" / "steps-0.jsonl").read_text().splitlines()]
    (note,) = [row["text"] for row in rows if row["kind"] == "note"]
    assert note.startswith("train.method ortho orthogonalises the updates of 2 matrices of torch.optim.")


def test_a_resumed_script_goes_on_bit_for_bit_and_its_beta2_is_not_raised_again(
    run: ScriptRanks, tmp_path: Path, library: Path
) -> None:
    loop = ("--optimizer", "AdamW", "--alone", "--out")
    for name, more in (("through", ()), ("first", ("--steps", 3)), ("second", ("--resume", f"{tmp_path}/first.0"))):
        outcome = run(SCRIPT, *loop, tmp_path / name, *more, plan=plan(tmp_path / f"of-{name}", library))
        assert outcome.codes == [0], outcome.output
    assert torch.equal(weights(tmp_path / "through"), weights(tmp_path / "second"))
    groups = torch.load(f"{tmp_path}/second.0", weights_only=True)["optimizer"]["param_groups"]
    assert groups[0]["betas"] == (0.9, 0.999**2)


# --- in this process


@pytest.fixture
def make(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], OrthoHooks]]:
    monkeypatch.setattr(sys, "path", [*sys.path])

    def made() -> OrthoHooks:
        (tmp_path / "plan.json").write_text(plan(tmp_path, library, 1.0).model_dump_json())
        return OrthoHooks(read_plan(str(tmp_path / "plan.json")))

    yield made


def take_step(steps: OrthoHooks, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = gradient(p)
    steps.before_step(optimizer, (optimizer,), {})
    optimizer.step()
    steps.after_step(optimizer)


def gradient(p: torch.Tensor) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p.dtype)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight


def test_the_module_of_an_optimizer_is_found_and_its_embeddings_and_tied_heads_are_left(
    make: Callable[[], OrthoHooks],
) -> None:
    nets = [Tied() for _ in "ab"]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets]
    assert find_module(optimizers[0]) is nets[0]
    steps, by_hand = make(), Ortho(optimizers[1], model=nets[1])
    for _ in range(2):
        take_step(steps, optimizers[0])
        for p in nets[1].parameters():
            p.grad = gradient(p)
        by_hand.step()
    for first, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(first, other)


def spread(change: torch.Tensor) -> float:
    """Return the largest singular value by the least: up to 1.7 of what Muon's polynomial makes of well-conditioned matrices."""
    values = torch.linalg.svdvals(change)
    return float(values.max() / values.min())


def test_two_optimizers_and_one_that_grows_are_all_orthogonalised(make: Callable[[], OrthoHooks]) -> None:
    first, other = nn.Linear(4, 9), nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 30))
    optimizers = [torch.optim.SGD(first.parameters(), lr=1.0), torch.optim.Adam(other[0].parameters(), lr=1.0)]
    steps = make()
    for optimizer, layer in zip(optimizers, (first, other[0]), strict=True):
        before = layer.weight.detach().clone()
        take_step(steps, optimizer)
        assert spread(layer.weight.detach() - before) < 2
    optimizers[1].add_param_group({"params": list(other[1].parameters())})
    before = other[1].weight.detach().clone()
    take_step(steps, optimizers[1])
    assert spread(other[1].weight.detach() - before) < 2


def test_a_step_that_an_exception_breaks_off_leaves_the_weights(make: Callable[[], OrthoHooks]) -> None:
    net = nn.Linear(4, 4)
    optimizer, steps = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0), make()
    before = net.weight.detach().clone()
    net.weight.grad = torch.ones(4, 4)
    steps.before_step(optimizer, (optimizer,), {})  # its step fails, and no hook comes after it
    take_step(steps, optimizer)
    assert torch.equal(net.weight, before)


def test_nothing_to_orthogonalise_is_an_error_and_muon_is_left_as_it_is(make: Callable[[], OrthoHooks]) -> None:
    steps = make()
    optimizer = torch.optim.SGD(nn.Embedding(5, 4).parameters(), lr=0.1)
    with pytest.raises(CannotOrthogonaliseError, match="no optimizer of the script updates a matrix"):
        for _ in range(5):
            take_step(steps, optimizer)
    with pytest.raises(CannotOrthogonaliseError):
        take_step(steps, optimizer)
    if hasattr(torch.optim, "Muon"):
        net, mixed = nn.Linear(4, 4), make()
        for optimizer in (torch.optim.Muon([net.weight], lr=0.1), torch.optim.AdamW([net.bias], lr=0.1)):
            take_step(mixed, optimizer)
        assert list(mixed.pop_notes()) == ["not orthogonalised: Muon already orthogonalises its steps"]


def test_half_weights_of_an_own_optimizer_are_refused_with_the_reason(
    make: Callable[[], OrthoHooks], tmp_path: Path
) -> None:
    class Own(torch.optim.SGD):
        pass

    net = nn.Linear(4, 4).bfloat16()
    with pytest.raises(
        CannotOrthogonaliseError, match=r"train.method ortho: weights in torch.bfloat16 are too coarse .* steps of Own"
    ):
        take_step(make(), Own(net.parameters(), lr=0.1))
    failure = json.loads(next(tmp_path.glob("failure-*.json")).read_text())
    assert failure["where"] == "method"
