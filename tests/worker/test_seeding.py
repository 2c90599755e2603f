"""Seeds made of integers, and which generators are given them."""

import random

import numpy as np
import pytest
import torch

from tula_cli.worker.seeding import compute_stable_seed, seed_generators, seed_torch

CPU = torch.device("cpu")


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_seeds_tell_their_parts_apart() -> None:
    seeds = [compute_stable_seed(*parts) for parts in ((1, 23), (12, 3), (123,), (1, 2, 3), (3, 2, 1))]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_cpu_draws_as_after_torchs_own_seeding() -> None:
    for seed in (0, 7, 2**63 - 1):
        torch.manual_seed(seed)
        expected = torch.rand(5), torch.randperm(9), torch.get_rng_state()
        seed_torch(seed, CPU)
        assert all(map(torch.equal, (torch.rand(5), torch.randperm(9), torch.get_rng_state()), expected))


def test_of_several_gpus_only_the_ranks_own_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)]
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    seed_torch(7, torch.device("cuda", 1))
    assert [gpu.initial_seed() for gpu in gpus] == [1, 7]
    assert torch.default_generator.initial_seed() == 7
    seed_torch(8, CPU)
    assert gpus[1].initial_seed() == 7


def test_seeding_covers_three_generators_and_puts_them_back() -> None:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = draws()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    with seed_generators(0, 1, 2):
        inside = draws()
    assert draws() == expected
    with seed_generators(0, 1, 2):
        assert draws() == inside
    with seed_generators(0, 2, 1):
        assert all(first != two for first, two in zip(draws(), inside, strict=True))


def test_generators_are_put_back_after_an_error() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with pytest.raises(ZeroDivisionError), seed_generators(1):
        raise ZeroDivisionError
    assert random.random() == expected
