"""One observed job against published step times (benchmarks/observe/observe.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "observe" / "observe.py"
HEAD = "cluster,app,nodes,gpus_per_node,replicas,local_batch,step_time_s,sync_time_s,flag"


def write_table(path: Path) -> Path:
    """Write the step times of a cluster that follows the ring law: 0.1 s of compute, up to 0.1 s of synchronisation."""
    rows = [
        f"here,app,{nodes},1,{nodes},{batch},{0.1 + 0.1 * (nodes - 1) / nodes},{0.1 * (nodes - 1) / nodes},ok"
        for nodes in (1, 2, 4, 8, 16)
        for batch in (8, 16, 32)
    ]
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return path


def test_pairs_are_scored_beside_the_ring_law(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), str(write_table(tmp_path / "t.csv")), "--json"]
    scores = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert scores["all"]["pairs"] == 12 and scores["all"]["ring_median"] == pytest.approx(0.0, abs=1e-9)
    assert scores["all"]["median"] < 0.15 and scores["all"]["covered"] > 0.8
    assert scores["more nodes"]["pairs"] == 9
    assert scores["fitted"]["median"] < 0.01 and scores["fitted"]["right"] == 1  # the ring law is within its reach


def test_a_table_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(BENCHMARK), str(tmp_path / "none.csv")], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
