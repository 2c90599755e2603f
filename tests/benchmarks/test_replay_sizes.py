"""Ways to search GPUs a node, replayed (benchmarks/replay/replay_sizes.py)."""

import json
import sys
from pathlib import Path

import replay_sizes
from two_levels import write_table


def test_one_fit_and_fewer_probes_of_smaller_sizes_cost_less(tmp_path: Path, monkeypatch, capsys) -> None:
    table = write_table(tmp_path / "table.csv", (16, 32, 64, 128, 256))
    monkeypatch.setattr(sys, "argv", ["replay_sizes.py", str(table), "--json"])
    replay_sizes.main()
    results = {row["design"]: row for row in json.loads(capsys.readouterr().out)}
    apart, whole, most, _ = results.values()
    assert list(results) == list(replay_sizes.DESIGNS) and {row["sets"] for row in results.values()} == {1}
    assert (apart["probes"], most["probes"]) == (3 * 9, 9 + 2 + 2) and most["cost"] < 0.6 * whole["cost"]
    assert apart["cost"] == whole["cost"] and whole["median"] < apart["median"] + 0.01
    assert most["median"] < 0.1 and 0 <= most["regret_fastest"] < 0.05 and most["covered"] > 0.8
