"""One rank of two is slow: the probes tell which and why, and the choice is among what was measured."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.proof]
HELPERS = Path(__file__).parents[1] / "helpers"


def job(**slow: str) -> dict[str, Any]:
    return {
        "name": "slow",
        "model": {"name": "slow_jobs:Model", "args": {"slow": slow.get("model", "")}},
        "dataset": {"name": "slow_jobs:Points", "args": {"slow": slow.get("dataset", "")}},
        "optimizer": {"name": "SGD", "lr": 0.1},
        "train": {"epochs": 2, "reference_batch": 16, "workers": 0, "method": "lbt"},
        "search": {
            "nodes": [2], "min_batch": 16, "max_batch": 64, "strategy": "full", "min_steps": 5, "min_seconds": 0,
            "max_seconds": 2, "max_node_hours": 5,
        },
        "cluster": {"device": "cpu"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("slow", "does"),
    [
        ({"model": "compute"}, "computes"),
        ({"dataset": "data"}, "gets its data"),
    ],
)
def test_a_slow_rank_is_named_with_what_is_slow_in_it(tula, slow: dict[str, str], does: str) -> None:
    (tula.folder / "job.yaml").write_text(yaml.safe_dump(job(**slow)))
    shutil.copy(HELPERS / "slow_jobs.py", tula.folder)
    tula("profile", "job.yaml")
    answer = tula("recommend", "--objective", "time")
    messages = [text for text in answer["warnings"] if "Straggler" in text]
    assert len(messages) == 1 and f"rank 1 {does} " in messages[0], answer["warnings"]
    assert answer["data"]["choice"]["measured"]
