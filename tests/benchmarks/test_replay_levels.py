"""Nodes of several GPUs foreseen from one node and from nodes of one GPU (benchmarks/replay/replay_levels.py)."""

import csv
import json
import sys
from pathlib import Path

import pytest
import replay_levels
from replay_data import COLUMNS


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A cluster whose gradients are summed inside each node, and then between nodes."""
    rows = []
    for nodes in (1, 2, 4):
        for gpus in (1, 2, 4):
            for batch in (16, 64, 256):
                compute, sync = 0.02 + 0.001 * batch, 0.06 * (nodes > 1) + 0.01 * (gpus - 1)
                step = compute / 3 + max(2 / 3 * compute, sync) + 0.05 * sync
                rows.append(["c", "app", nodes, gpus, nodes * gpus, batch, step, step - compute, "ok"])
    path = tmp_path / "table.csv"
    with path.open("w") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


def test_several_nodes_of_several_gpus_are_judged_with_and_without_one_of_them(
    table: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay_levels.py", str(table), "--json"])
    replay_levels.main()
    apart, corner = json.loads(capsys.readouterr().out)
    assert (apart["configurations"], corner["configurations"]) == (12, 11) and corner["corner"]
    assert corner["median"] < 0.05 < apart["one_gpu"] and corner["width"] < apart["width"]
    assert min(apart["covered"], corner["covered"]) > 0.9
