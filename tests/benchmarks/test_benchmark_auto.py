"""benchmarks/table1/auto.py, shortened: it trains, keeps what is done, and its table counts from lbt."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "table1" / "auto.py"
SHORT = ("--seeds", "1", "--epochs", "2", "--only", "lbt,auto")

pytestmark = [pytest.mark.torch, pytest.mark.proof]


def bench(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), "--runs", str(folder), *SHORT, *options]
    return subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, check=True, timeout=300)


def test_it_trains_once_and_tabulates(tmp_path: Path) -> None:
    lbt, auto = json.loads(bench(tmp_path, "--json").stdout)
    assert (lbt["name"], lbt["extra"], lbt["chosen"]) == ("lbt", 0, [])
    assert 0.8 < auto["extra"] < 0.9, "40 steps of 32 and four branches of a step, beside a training of two epochs"
    assert len(auto["chosen"]) == 1
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    table = bench(tmp_path).stdout.splitlines()
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    apart = auto["top1"][0] - lbt["top1"][0]
    assert "+0.00" in table[2]
    assert f"{apart:+.2f}" in table[3]
