"""The benefit of stages on fewer nodes, by measured step times (benchmarks/replay/replay_stages.py)."""

import json
import sys
from pathlib import Path

import pytest
import replay_stages
from replay_data import load_sets

TABLE = Path(__file__).parents[1] / "fixtures" / "step_times.csv"


def test_nodes_of_stages_never_take_more_node_hours_than_the_same_throughout(monkeypatch, capsys) -> None:
    rows = replay_stages.judge(load_sets(TABLE)[:2])
    assert rows
    for row in rows:
        assert row.stages.node_hours <= row.same.node_hours * (1 + 1e-9) and row.at_speed >= -1e-9
        assert row.sooner.hours <= row.fastest.hours and row.fixed.hours <= row.sooner.hours * 1.01
        assert row.saved == pytest.approx(1 - row.stages.node_hours / row.least.node_hours)
    monkeypatch.setattr(sys, "argv", ["replay_stages.py", str(TABLE), "--json"])
    monkeypatch.setattr(replay_stages, "load_sets", lambda *_: load_sets(TABLE)[:1])
    replay_stages.main()
    data = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in data] == [rows[0].name], "the first table is the only one of one row"
    assert f"{len(rows)} sets" in "\n".join(replay_stages.format_rows(rows))
