"""Nodes of several GPUs foreseen from one node and from nodes of one GPU (benchmarks/replay/replay_levels.py)."""

import json
import sys
from pathlib import Path

import pytest
import replay_levels
from two_levels import write_table


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "table.csv", (16, 64, 256))


def test_several_nodes_of_several_gpus_are_judged_with_and_without_one_of_them(
    table: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay_levels.py", str(table), "--json"])
    replay_levels.main()
    apart, corner = json.loads(capsys.readouterr().out)
    assert (apart["configurations"], corner["configurations"]) == (12, 11) and corner["corner"]
    assert corner["median"] < 0.05 < apart["one_gpu"] and corner["width"] < apart["width"]
    assert min(apart["covered"], corner["covered"]) > 0.9
