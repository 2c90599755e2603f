"""torch.optim.Muon for a whole network: matrices are updated as by it alone, all else as by AdamW."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tula_cli.optim.muon import MuonWithAdamW, describe_missing_muon, split_parameters

pytestmark = pytest.mark.skipif(
    bool(describe_missing_muon()), reason="torch before 2.9 has no Muon, which another test checks"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.map = nn.Linear(6, 5)
        self.conv = nn.Conv2d(3, 4, 3)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.norm = nn.LayerNorm(4)


def with_gradients(net: nn.Module, seed: int = 0) -> None:
    for p in net.parameters():
        made = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + p.numel()))
        p.grad = torch.empty_like(p).copy_(made)


def built(net: nn.Module, **settings: Any) -> MuonWithAdamW:
    return MuonWithAdamW(split_parameters(list(net.parameters()), net), **{"lr": 0.02, **settings})


def test_matrices_go_to_muon_and_all_else_to_adamw_with_its_own_rate() -> None:
    net = Net()
    names = {id(p): name for name, p in net.named_parameters()}
    groups = {group["by_muon"]: group for group in built(net, adamw={"lr": 0.003, "betas": (0.8, 0.9)}).param_groups}
    assert {names[id(p)] for p in groups[True]["params"]} == {"map.weight", "conv.weight"}
    assert (groups[True]["lr"], groups[False]["lr"], groups[False]["betas"]) == (0.02, 0.003, (0.8, 0.9))
    assert [group["lr"] for group in built(net).param_groups] == pytest.approx([0.02, 0.002])
    same = built(net, adjust_lr_fn="match_rms_adamw")
    assert [group["lr"] for group in same.param_groups] == [0.02, 0.02]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_weights_are_those_of_torchs_two_optimizers(layout: Any) -> None:
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    ours = ours.to(memory_format=layout)
    subject = built(ours, weight_decay=0.1)
    flat = nn.Parameter(theirs.conv.weight.detach().flatten(1))
    matrices, rest = [theirs.map.weight, flat], [p for n, p in theirs.named_parameters() if n not in ("map.weight", "conv.weight")]  # fmt: skip
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW(rest, lr=0.002, weight_decay=0.1)
    for seed in range(3):
        with_gradients(ours, seed), with_gradients(theirs, seed)
        flat.grad = theirs.conv.weight.grad.flatten(1)
        subject.step(), muon.step(), adamw.step()
        with torch.no_grad():
            theirs.conv.weight.copy_(flat.view_as(theirs.conv.weight))
        for first, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(first, other)
            assert first.shape == other.shape and first.grad.shape == other.shape
    assert ours.conv.weight.is_contiguous(memory_format=layout)


def test_it_resumes_from_its_state_bit_for_bit() -> None:
    through, broken = Net(), Net()
    broken.load_state_dict(through.state_dict())
    item, first = built(through), built(broken)
    for seed in range(4):
        with_gradients(through, seed)
        item.step()
    for seed in range(2):
        with_gradients(broken, seed)
        first.step()
    second = built(broken)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for seed in range(2, 4):
        with_gradients(broken, seed)
        second.step()
    assert all(torch.equal(a, b) for a, b in zip(through.parameters(), broken.parameters(), strict=True))


def test_a_network_without_a_matrix_and_one_of_matrices_alone_are_trained_too() -> None:
    for net in (nn.LayerNorm(4), nn.Linear(4, 4, bias=False)):
        before = [p.detach().clone() for p in net.parameters()]
        subject = built(net)
        with_gradients(net)
        subject.step()
        assert len(subject.param_groups) == 1
        assert not any(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
