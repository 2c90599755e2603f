"""AGS over several processes: all cases in one start of 2 processes and one of 4 (gloo, loopback)."""

from __future__ import annotations

import json
from pathlib import Path

import ags_ddp_cases
import pytest
from start_ranks import read_errors, start_ranks

pytestmark = pytest.mark.torch


class Ranks:
    """Results of the processes of one start: the cases that passed on each rank."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world

    def passed(self, rank: int) -> list[str]:
        path = self.folder / f"{rank}.json"
        return list(json.loads(path.read_text())) if path.exists() else []


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.proof)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    world: int = request.param
    folder = tmp_path_factory.mktemp(f"ddp-{world}-")
    start_ranks(ags_ddp_cases.__file__, folder, world=world, GLOO_SOCKET_IFNAME="lo")
    return Ranks(folder, world)


@pytest.mark.parametrize("case", ags_ddp_cases.CASES)
def test_ddp(ranks: Ranks, case: str) -> None:
    missing = [rank for rank in range(ranks.world) if case not in ranks.passed(rank)]
    assert not missing, f"ranks {missing} did not pass {case}\n{read_errors(ranks.folder, ranks.world)}"
