"""The hooks of the shim cost little beside the smallest step. 0.1 ms is the promise; here a loaded machine may take more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.torch
def test_a_step_costs_little_more_under_the_shim() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/overhead/shim_overhead.py"), "--pairs", "15", "--json"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300, check=True)
    data = json.loads(done.stdout)
    assert set(data) == {"probe", "train", "observe"}
    for figures in data.values():
        assert figures["more"] < 0.3e-3, data
        assert figures["plain"] > 20e-6, data
