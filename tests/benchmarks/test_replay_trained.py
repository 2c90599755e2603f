"""Predictions for neighbouring configurations from a training (benchmarks/replay/replay_trained.py)."""

import json
import sys
from pathlib import Path

import pytest
import replay_trained
from replay_data import Where, load_sets

TABLE = Path(__file__).parents[1] / "fixtures" / "step_times.csv"


def test_neighbours_of_a_training_are_judged_before_and_after_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = replay_trained.judge(load_sets(TABLE))
    assert rows and all(row.neighbours >= row.trainings > 0 for row in rows)
    partial = next(row for row in rows if row.strategy == "partial")
    assert partial.median[1] < partial.median[0] and partial.width[1] < partial.width[0]
    monkeypatch.setattr(sys, "argv", ["replay_trained.py", str(TABLE), "--json"])
    replay_trained.main()
    assert json.loads(capsys.readouterr().out)[0]["strategy"] == rows[0].strategy


def test_a_neighbour_is_one_step_away() -> None:
    here = Where(4, 1, 32)
    assert replay_trained._are_neighbours(here, Where(4, 1, 64)) and replay_trained._are_neighbours(
        here, Where(2, 1, 33)
    )
    assert not any(replay_trained._are_neighbours(here, other) for other in (here, Where(8, 1, 64), Where(4, 1, 128)))
