"""Two types of nodes in one job, with real ranks: measured apart, compared, and trained on the one chosen."""

import pytest

from tula_cli.run.records.probes import Measured

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

TYPES = """
node_types:
  single: {pricing: {price: 1.0}}
  pair: {cluster: {gpus_per_node: 2}, pricing: {price: 1000.0, source: a test, date: 2025-11-30}}
"""


def test_two_types_from_profile_to_trained_model(tula) -> None:
    job = tula.folder / "job.yaml"
    job.write_text(
        job.read_text().replace("nodes: [1, 2]", "nodes: [1]").replace("max_batch: 256", "max_batch: 128") + TYPES
    )
    profile = tula("profile", "job.yaml")
    assert profile["status"] == "done"
    run = tula.run()
    parts = {part.type: part.run for part in run.parts(run.spec())}
    for name, ranks in (("single", 1), ("pair", 2)):
        results = parts[name].results()
        assert [(result.nodes, result.local_batch) for result in results] == [(1, 64 // ranks), (1, 128 // ranks)]
        assert all(isinstance(result, Measured) and result.gpus_per_node == ranks for result in results)
    assert not run.results(), "nothing is measured in the job's own directory"

    answer = tula("recommend", "--objective", "cost")["data"]
    assert {row["type"] for row in answer["rows"]} == {"single", "pair"}
    assert answer["choice"]["type"] == "single", "a pair costs a thousand times as much"
    assert any(row["pareto"] for row in answer["rows"])

    summary = tula("train")["data"]
    assert summary["batch"] == answer["choice"]["batch"]
    assert parts["single"].training(summary["signature"]).summary() is not None
    assert not parts["pair"].train_signatures()
    status = tula("status")
    assert status["status"] == "done" and set(status["data"]["types"]) == {"single", "pair"}
