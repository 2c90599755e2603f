"""Step times on more nodes than were measured (benchmarks/replay/replay_further.py)."""

import json
import sys
from pathlib import Path

import replay_further
from replay_data import load_sets

TABLE = Path(__file__).parents[1] / "fixtures" / "step_times.csv"


def test_larger_sizes_are_judged_by_how_much_larger_they_are(monkeypatch, capsys) -> None:
    rows = replay_further.judge(load_sets(TABLE), (1, 2, 4))
    assert {row.times for row in rows} <= {2, 4, 8} and {row.most for row in rows} == {2, 4}
    assert all(row.median < 0.5 and row.covered > 0.6 and row.width > 1 for row in rows)
    monkeypatch.setattr(sys, "argv", ["replay_further.py", str(TABLE), "--json"])
    replay_further.main()
    assert json.loads(capsys.readouterr().out)[0]["configurations"] == rows[0].configurations
