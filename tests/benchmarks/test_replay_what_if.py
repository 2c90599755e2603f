"""One cluster foreseen from another's step times (benchmarks/replay/replay_what_if.py)."""

import csv
import json
import sys
from pathlib import Path

import pytest
import replay_what_if
from replay_data import COLUMNS

APPS = {"wide": (0.001, 0.30), "deep": (0.002, 0.80)}  # seconds a sample, of a ring
CLUSTERS = {"slow": (1.0, 1.0), "fast": (0.5, 0.25)}  # what compute and synchronisation take there


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two clusters whose GPUs and networks differ by the same factors for each of two applications."""
    rows = []
    for cluster, (gpu, network) in CLUSTERS.items():
        for app, (sample, ring) in APPS.items():
            for nodes in (1, 2, 4) if cluster == "slow" else (1, 2):
                for batch in (16, 64, 256):
                    compute, sync = gpu * sample * batch, network * ring * (1 - 1 / nodes)
                    step = compute / 3 + max(2 / 3 * compute, sync) + 0.05 * sync
                    rows.append([cluster, app, nodes, 1, nodes, batch, step, step - compute, "ok"])
    path = tmp_path / "table.csv"
    with path.open("w") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


def test_ratios_of_one_application_foresee_another_on_the_other_cluster(table: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["replay_what_if.py", str(table), "--json"])
    replay_what_if.main()
    rows = json.loads(capsys.readouterr().out)
    assert {(row["known"], row["foreseen"]) for row in rows} == {("slow", "fast"), ("fast", "slow")}
    assert {row["app"] for row in rows} == set(APPS) and {row["compute"] for row in rows} == {"own", "other"}
    near = [row for row in rows if not row["further"]]
    assert len(near) == 8 and all(row["median"] < min(0.3, row["unchanged"] / 2) for row in near)
    assert all(row["covered"] > 0.9 and row["width"] > 2 for row in near)
    further = [row for row in rows if row["further"]]
    assert further and all(row["foreseen"] == "slow" and row["median"] < row["unchanged"] for row in further)
