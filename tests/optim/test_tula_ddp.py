"""AGS over several processes: all cases in one start of 2 processes and one of 4 (gloo, loopback)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ags_ddp_cases
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.torch


class Ranks:
    """What the processes of one start left behind: the cases that passed on each rank, and its error stream."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world

    def passed(self, rank: int) -> list[str]:
        path = self.folder / f"{rank}.json"
        return list(json.loads(path.read_text())) if path.exists() else []

    def errors(self) -> str:
        return "\n".join(f"rank {r}:\n{(self.folder / f'{r}.err').read_text()[-3000:]}" for r in range(self.world))


def start(folder: Path, rank: int, world: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ags_ddp_cases.__file__, str(folder), str(rank), str(world)]
    with (folder / f"{rank}.err").open("wb") as errors:
        return subprocess.Popen(command, env=environment, stdout=errors, stderr=errors)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    world: int = request.param
    folder = tmp_path_factory.mktemp(f"ddp-{world}-")
    processes = [start(folder, rank, world) for rank in range(world)]
    try:
        for process in processes:
            process.wait(timeout=180)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Ranks(folder, world)


@pytest.mark.parametrize("case", ags_ddp_cases.CASES)
def test_ddp(ranks: Ranks, case: str) -> None:
    missing = [rank for rank in range(ranks.world) if case not in ranks.passed(rank)]
    assert not missing, f"ranks {missing} did not pass {case}\n{ranks.errors()}"
