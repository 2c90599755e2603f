from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OWN_LOOP = str(ROOT / "examples" / "own_loop.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
pytestmark = pytest.mark.torch


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("start", [(), TORCHRUN], ids=["alone", "torchrun"])
def test_own_loop_trains_with_ags(start: tuple[str, ...]) -> None:
    shown = run(*start, OWN_LOOP, "--preset", "robust", "--epochs", "10")
    accuracy, scaled = re.search(r"robust: ([\d.]+) %", shown), re.search(r"epoch 10: 100% .* by ([\d.]+)", shown)
    assert accuracy and scaled, shown
    assert float(accuracy[1]) > 70 and float(scaled[1]) > 1


@pytest.mark.parametrize(
    ("words", "world", "said"),
    [
        (("--batch", "0"), 1, "--batch 0: at least 1"),
        (("--small", "0"), 1, "--small 0: at least 1"),
        (("--epochs", "-1"), 1, "--epochs -1: at least 1"),
        (("--batch", "1409"), 1, "--batch 1409: there are only 1408 training images"),
        (("--batch", "129"), 2, "--batch 129: 2 processes cannot share it equally; take a multiple of 2"),
        (("--batch", "many"), 1, "invalid int value"),
    ],
)
def test_own_loop_refuses_words_that_mean_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], world: int, said: str
) -> None:
    module = runpy.run_path(OWN_LOOP)
    monkeypatch.setattr(sys, "argv", ["own_loop.py", *words])
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit) as ended:
        module["main"]()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_own_loop_scales_nothing_where_the_batch_is_the_small_one() -> None:
    ways = [("--batch", "128", "--small", "128", "--epochs", "5", *way) for way in ((), ("--plain",))]
    ends = [re.findall(r"([\d.]+) % of", run(OWN_LOOP, *way)) for way in ways]
    assert ends[0] == ends[1] != []
