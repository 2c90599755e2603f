"""A training on this machine whose nodes become more with its batch: exact samples, and the weights of one that always has all."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import seen_samples
import torch
from seen_samples import EPOCHS, JOB, SIZE, count_samples, read_batches

pytestmark = [pytest.mark.e2e, pytest.mark.torch]


def nearly_equal(one: Path, other: Path) -> bool:
    """Return whether the weights of two checkpoints differ by rounding at most."""
    first, second = (torch.load(path, weights_only=True)["model"] for path in (one, other))
    assert first.keys() == second.keys() and any(first[key].abs().sum() > 0 for key in first)
    return all(torch.allclose(first[key], second[key], rtol=1e-4, atol=1e-6) for key in first)


def train(tula: Any, nodes: int | None) -> Path:
    """Train on two nodes, the first epoch on so many; return the newest checkpoint."""
    named = {} if nodes is None else {"nodes": nodes}
    ramp = json.dumps([{"epochs": 1, "batch": 8, **named}])
    answer = tula("train", "job.yaml", "--nodes", "2", "--batch", "16", "--set", f"train.ramp={ramp}")
    return tula.run().get_training(answer["data"]["signature"]).path / "last"


@pytest.mark.proof
def test_more_nodes_at_a_change_of_the_batch_train_the_same_samples_to_the_same_weights(tula: Any) -> None:
    (tula.folder / "job.yaml").write_text(JOB)
    (tula.folder / "seen_samples.py").write_text(Path(seen_samples.__file__).read_text())
    grown = train(tula, 1)
    task, training = tula.task(), tula.run().get_training(tula.task().signature)
    assert [(t.nodes, t.cause) for t in training.read_tasks()] == [
        (1, ""),
        (2, "the stage with batch 16 runs on 2 nodes"),
    ]
    assert [(a.outcome, a.samples) for a in training.read_attempts()] == [("stage_end", 0), ("done", SIZE)]
    assert count_samples(tula.folder) == Counter(dict.fromkeys(range(SIZE), EPOCHS))
    ranks = [(row["rank"], row["world"]) for row in read_batches(tula.folder)]
    assert set(ranks) == {(0, 1), (0, 2), (1, 2)} and ranks.count((0, 1)) == SIZE // 8
    status = tula("status")["data"]
    assert [(s["begin"], s["batch"], s["nodes"]) for s in status["training"]["stages"]] == [(0, 8, 1), (SIZE, 16, 2)]
    assert [(row["nodes"], row["batch"]) for row in status["attempts"]] == [(1, 16), (2, 16)]
    assert "training on 1 node (of 2 later), batch 16" in tula.logs()
    steps = [row for row in training.read_metrics() if row["kind"] == "step"]
    assert sum(row["count"] for row in steps) == training.read_result().steps == SIZE // 8 + 2 * SIZE // 16
    summary = training.read_summary()
    assert summary.nodes == 2 and summary.attempts == 2 and task.stages[0].nodes == 1
    (tula.folder / "seen.jsonl").unlink()
    always = train(tula, None)
    assert always.parent != grown.parent, "another training"
    assert nearly_equal(grown, always)
