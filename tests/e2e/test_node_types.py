"""Two types of nodes in one job, with real ranks: measured apart, compared, and trained on the one chosen."""

import pytest

from tula_cli.run.job_runs import open_runs_of_job
from tula_cli.run.records.probes import Measured

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

TYPES = """
node_types:
  single: {pricing: {price: 1.0}}
  pair: {cluster: {gpus_per_node: 2}, pricing: {price: 1000.0}}
"""


@pytest.mark.proof
def test_two_types_from_profile_to_trained_model(tula) -> None:
    job = tula.folder / "job.yaml"
    job.write_text(
        job.read_text().replace("nodes: [1, 2]", "nodes: [1]").replace("max_batch: 256", "max_batch: 128") + TYPES
    )
    profile = tula("profile", "job.yaml")
    assert profile["status"] == "done"
    run = tula.run()
    parts = {part.type: part for part in open_runs_of_job(run)}
    for name, ranks in (("single", 1), ("pair", 2)):
        results = parts[name].read_results()
        assert [(result.nodes, result.local_batch) for result in results] == [(1, 64 // ranks), (1, 128 // ranks)]
        assert all(isinstance(result, Measured) and result.gpus_per_node == ranks for result in results)
    assert [part.spec.name for part in parts.values()] == ["e2e-single", "e2e-pair"], "each is a run"

    answer = tula("recommend", "--objective", "cost")["data"]
    assert {row["type"] for row in answer["rows"]} == {"single", "pair"}
    assert answer["choice"]["type"] == "single", "a pair costs a thousand times as much"
    assert any(row["pareto"] for row in answer["rows"])

    summary = tula("train")["data"]
    assert summary["batch"] == answer["choice"]["batch"]
    assert parts["single"].get_training(summary["signature"]).read_summary() is not None
    assert not parts["pair"].list_train_signatures()
    status = tula("status")
    assert status["status"] == "done" and set(status["data"]["types"]) == {"single", "pair"}


@pytest.mark.proof
def test_numbers_of_gpus_from_profile_to_trained_model(tula) -> None:
    job = tula.folder / "job.yaml"
    text = job.read_text().replace("max_batch: 256", "max_batch: 128, gpus_per_node: [1, 2]")
    job.write_text(f"{text}cluster: {{gpus_per_node: 2}}\n")
    assert tula("profile", "job.yaml")["status"] == "done"
    run = tula.run()
    first, two = open_runs_of_job(run)
    probes = [[(r.nodes, r.gpus_per_node, r.local_batch) for r in part.read_results()] for part in (first, two)]
    assert probes[0] == [(1, 1, 64), (1, 1, 128)]
    assert {(nodes, gpus) for nodes, gpus, _ in probes[1]} == {(1, 2), (2, 2)}

    answer = tula("recommend", "--objective", "cost", "--type", "gpus-1")["data"]
    rows = {(row["type"], row["nodes"], row["batch"]): row for row in answer["rows"]}
    assert ("gpus-1", 2, 128) in rows, "two nodes of one GPU follow from one of them and two of two"
    assert rows["gpus-1", 2, 128]["further"] and not rows["gpus-1", 2, 128]["measured"]

    summary = tula("train", "--type", "gpus-1", "--nodes", "2", "--batch", "128")["data"]
    assert summary["predicted_step"] == pytest.approx(rows["gpus-1", 2, 128]["step_time"])
    assert summary["actual_step"] > 0
    again = tula("recommend", "--objective", "cost")["data"]
    assert {row["type"] for row in again["rows"]} == {"gpus-1", "gpus-2"}
    assert [message["gpus_per_node"] for message in again["trainings"]] in ([], [1]), (
        "a short training may tell too little"
    )
