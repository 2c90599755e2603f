"""Ghost batch normalisation against BatchNorm over the parts by themselves."""

import copy

import pytest
import torch
from torch import nn

from tula_cli.errors import SpecError
from tula_cli.worker.build.norms import GhostBatchNorm, apply_ghost_batch_norm, check_ghost_batch, check_small_batch


def ghost_of(norm: nn.Module, ghost_batch: int = 4) -> nn.Module:
    model = nn.Sequential(copy.deepcopy(norm))
    apply_ghost_batch_norm(model, ghost_batch)
    return model[0]


def drawn(norm: nn.Module) -> nn.Module:
    """Give a norm parameters and statistics that are not those of its start."""
    for tensor in [*norm.parameters(), norm.running_mean, norm.running_var]:
        if tensor is not None:
            nn.init.uniform_(tensor, 0.5, 1.5)
    return norm


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm2d(3), (12, 3, 5, 5)),
        (nn.BatchNorm1d(3), (12, 3)),
        (nn.BatchNorm1d(3), (12, 3, 7)),
        (nn.BatchNorm3d(3, momentum=None), (12, 3, 2, 2, 2)),
        (nn.BatchNorm2d(3, affine=False, momentum=0.3), (12, 3, 5, 5)),
        (nn.BatchNorm2d(3, track_running_stats=False), (12, 3, 5, 5)),
    ],
)
def test_a_batch_is_normalised_part_by_part(norm: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ghost = ghost_of(drawn(norm))
    ours, theirs = (torch.randn(shape).requires_grad_() for _ in range(2))
    theirs.data.copy_(ours.data)
    out = ghost(ours)
    expected = torch.cat([norm(theirs[begin : begin + 4]) for begin in range(0, 12, 4)])
    assert torch.equal(out, expected)
    direction = torch.randn_like(out)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(ghost.state_dict()[name], value, msg=lambda text, name=name: f"{name} {text}")
    for mine, other in zip(ghost.parameters(), norm.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_running_statistics_average_the_parts_with_weights_that_add_up() -> None:
    ghost = ghost_of(nn.BatchNorm1d(1, momentum=0.1), ghost_batch=2)
    ghost(torch.tensor([[1.0], [1.0], [3.0], [3.0]]))
    assert float(ghost.running_mean) == pytest.approx(0.9 * 0.1 * 1 + 0.1 * 3)
    assert int(ghost.num_batches_tracked) == 2


def test_in_evaluation_it_is_plain_batch_norm() -> None:
    norm = drawn(nn.BatchNorm2d(3)).eval()
    ghost = ghost_of(norm)
    inputs = torch.randn(12, 3, 5, 5)
    assert torch.equal(ghost(inputs), norm(inputs))
    assert not ghost.training


@pytest.mark.parametrize("samples", [2, 4])
def test_a_batch_up_to_the_ghosts_size_is_taken_whole(samples: int) -> None:
    norm = nn.BatchNorm2d(3)
    inputs = torch.randn(samples, 3, 5, 5)
    assert torch.equal(ghost_of(norm)(inputs), norm(inputs))


def test_a_network_keeps_its_parameters_and_the_names_of_its_state() -> None:
    shared = nn.BatchNorm2d(3)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), shared, nn.Sequential(nn.ReLU(), shared), nn.Dropout())
    names, before = list(model.state_dict()), list(model.parameters())
    apply_ghost_batch_norm(model, 4)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert isinstance(model[1], GhostBatchNorm)
    assert model[1] is model[2][1]
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def test_models_without_batch_norm_are_refused() -> None:
    with pytest.raises(SpecError, match=r"ghost_batch 4: the model has no BatchNorm"):
        apply_ghost_batch_norm(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), 4)
    with pytest.raises(SpecError, match="SyncBatchNorm"):
        apply_ghost_batch_norm(nn.Sequential(nn.SyncBatchNorm(2)), 4)


def test_a_rest_is_refused_and_a_smaller_batch_is_not() -> None:
    for fits in (2, 3, 4, 8, 12):
        check_ghost_batch(4, micro_batch=fits)
    with pytest.raises(SpecError, match="ghost_batch 4 does not divide the 10 samples"):
        check_ghost_batch(4, micro_batch=10)


def test_one_sample_left_of_a_small_batch_is_refused_and_a_larger_rest_is_not() -> None:
    check_small_batch(4, shares=[0, 1, 3, 4, 6, 7, 8])
    for share in (5, 9):
        with pytest.raises(SpecError, match=rf"ghost_batch 4 leaves 1 sample over of the {share} .* small batch"):
            check_small_batch(4, shares=[4, share])
