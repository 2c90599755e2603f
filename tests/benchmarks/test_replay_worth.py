"""Which strategy is worth most (benchmarks/replay/replay_worth.py)."""

import json
import sys
from pathlib import Path

import pytest
import replay_worth
from replay_data import load_sets

TABLE = Path(__file__).parents[1] / "fixtures" / "step_times.csv"


def test_probing_weighs_the_less_the_longer_the_training_is(monkeypatch, capsys) -> None:
    rows = {(row.hours, row.strategy): row for row in replay_worth.judge(load_sets(TABLE)[:3], (0.1, 10))}
    brief, long = rows[0.1, "full"], rows[10, "full"]
    assert brief.money == pytest.approx(100 * long.money), "what has measured everything loses nothing by its choice"
    assert brief.money == brief.capped_money > rows[0.1, "partial"].money
    assert brief.time == pytest.approx(100 * long.time) and brief.time < brief.money, "jobs run side by side"
    assert all(row.money > 0 and row.time > 0 for row in rows.values())
    monkeypatch.setattr(sys, "argv", ["replay_worth.py", str(TABLE), "--hours", "2", "--json"])
    replay_worth.main()
    assert {row["strategy"] for row in json.loads(capsys.readouterr().out)} == {name for _, name in rows}
