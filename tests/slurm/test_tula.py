"""The main job on a real cluster: several nodes, one supervisor a rank, and what clusters do to jobs."""

import json
import os
import signal
import subprocess
import time
from typing import Any

import pytest
from cluster import SlurmCluster
from driver import TIMEOUT_SECONDS, Tula

from tula_cli.run.records.probes import Measured

pytestmark = [pytest.mark.slurm, pytest.mark.torch]
GREEDY = """
import os, torch

class Greedy(torch.nn.Module):
    # Is out of memory above a local batch of 20, on one of two ranks.
    def __init__(self, num_classes=10):
        super().__init__()
        self.layer = torch.nn.Linear(64, num_classes)

    def forward(self, x):
        if len(x) > 20 and os.environ.get("RANK") == "1":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
        return self.layer(x.flatten(1))
"""


def test_detached_profile_recommend_and_train_over_nodes(tula: Tula, on_slurm: SlurmCluster) -> None:
    submitted = tula("profile", "job.yaml")
    assert submitted["status"] == "pending"
    assert submitted["data"]["jobs"] == ["probe-n001", "probe-n002"]
    tula("profile", "job.yaml", "--wait")
    run = tula.run()
    assert all(job.submissions == 1 for job in run.read_jobs()), "attached, not submitted again"
    measured = {(r.nodes, r.local_batch): r for r in run.read_results() if isinstance(r, Measured)}
    assert set(measured) == {(1, 64), (1, 128), (2, 32), (2, 64)}
    assert len(measured[2, 32].environment.hosts) == 2
    assert measured[2, 32].sync_time > 0

    choice = tula("recommend", "--objective", "time")["data"]["choice"]
    summary = tula("train", "--nodes", "2", "--batch", "128", "--wait")["data"]
    assert summary["attempts"] == 1
    assert summary["predicted_hours"] > 0
    assert choice["hours"] > 0
    result = run.get_training(summary["signature"]).read_result()
    assert result is not None
    assert result.samples == 4 * (1438 // 128) * 128


@pytest.mark.proof  # test_two_ranks evaluates on two ranks, test_main_job by the command
def test_an_evaluation_over_nodes_has_the_metrics_of_the_training(tula: Tula, on_slurm: SlurmCluster) -> None:
    trained = tula("train", "job.yaml", "--nodes", "2", "--batch", "128", "--wait", "--set", "train.epochs=1")["data"]
    submitted = tula("evaluate", "--nodes", "2", "--yes")
    assert submitted["status"] == "pending"
    data = tula("evaluate", "--nodes", "2", "--wait", "--yes")["data"]
    top1 = pytest.approx(trained["metrics"]["top1"])
    assert (data["size"], data["nodes"], data["metrics"]["top1"]) == (359, 2, top1)


@pytest.mark.proof
def test_methods_are_compared_side_by_side(tula: Tula, on_slurm: SlurmCluster) -> None:
    grid = ("compare", "job.yaml", "--methods", "lbt,polo", "--batch", "128", "--seeds", "1", "--no-controls",
            "--nodes", "1", "--set", "cluster.gpus_per_node=2")  # fmt: skip
    submitted = tula(*grid)
    assert submitted["status"] == "pending"
    run = tula.run()
    tula.wait_until(lambda: sum(job.submissions for job in run.read_jobs()) == 3)
    answer = tula("compare", "--wait")["data"]
    assert answer["finished"] == answer["total"] == 3
    assert [(row["method"], row["batch"], row["reference"]) for row in answer["rows"]] == [
        ("lbt", 32, True), ("lbt", 128, False), ("polo", 128, False)
    ]  # fmt: skip
    for row in answer["rows"]:
        assert row["samples"] == 4 * (1438 // row["batch"]) * row["batch"]
    again = tula(*grid)["data"]
    assert [row["top1"] for row in again["rows"]] == [row["top1"] for row in answer["rows"]]
    assert [job.submissions for job in run.read_jobs()] == [1, 1, 1], "attached, not submitted again"


@pytest.mark.proof
def test_out_of_memory_of_the_ranks_goes_on_in_the_same_allocation(tula: Tula) -> None:
    limit = ("--set", "cluster.memory_per_gpu=20MB")
    summary = tula("train", "job.yaml", "--nodes", "2", "--batch", "1024", *limit, "--wait")["data"]
    assert summary["start_batch"] == 1024
    assert summary["causes"][0].startswith(
        "out of memory at batch 1024: each rank now computes a step in 2 micro-batches of 256"
    )
    assert tula.run().read_jobs()[0].submissions == 1


@pytest.mark.proof
def test_one_job_of_two_nodes_finds_the_largest_batch_without_a_command_that_waits(tula: Tula) -> None:
    (tula.folder / "mine.py").write_text(GREEDY)
    model = ("--set", "model={name: 'mine:Greedy'}", "--set", "train.method=lbt", "--set", "search.nodes=[2]")
    largest = ("profile", "job.yaml", "--largest", *model, "--set", "cluster.memory_per_gpu=1GB")
    assert tula(*largest)["status"] == "pending"
    run = tula.run()
    tula.wait_until(lambda: run.read_result("probe-n002-l000021") is not None)
    answer = tula(*largest, "--wait")["data"]
    assert (answer["local_batch"], answer["too_large"], answer["finished"]) == (20, 21, True)
    assert [job.submissions for job in run.read_jobs()] == [1]


@pytest.mark.proof
def test_ranks_that_are_dealt_to_the_nodes_in_turns_have_a_log_each(tula: Tula, on_slurm: SlurmCluster) -> None:
    turns = ("--set", "cluster.gpus_per_node=2", "--set", "cluster.slurm.srun_extra={distribution: cyclic}")
    summary = tula("train", "job.yaml", "--nodes", "2", "--batch", "128", *turns, "--wait")["data"]
    assert summary["attempts"] == 1
    logs = sorted(path.name.partition(".")[2] for path in (tula.run().path / "logs").glob("train-*"))
    assert logs == ["001.0001.log", "001.0002.log", "001.0003.log", "001.log"]


@pytest.mark.proof  # a rank of a script is killed in test_script_on_slurm, one of a training in test_main_job
def test_a_killed_rank_is_relaunched_in_the_same_allocation(tula: Tula, on_slurm: SlurmCluster) -> None:
    process = tula.start(
        "train", "job.yaml", "--nodes", "2", "--batch", "128", "--wait", "--json", "--set", "train.epochs=12"
    )
    tula.wait_until(tula.epochs_done)
    victims = subprocess.run(
        ["pgrep", "-f", f"tula_cli.worker {tula.run().path} {tula.task().id}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    os.kill(int(victims[-1]), signal.SIGKILL)
    answer, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, f"{answer}\n{errors}\n{tula.logs()}"
    summary = json.loads(answer)["data"]
    assert summary["attempts"] == 2
    result = tula.run().get_training(summary["signature"]).read_result()
    assert result is not None
    assert result.samples == 12 * (1438 // 128) * 128
    assert tula.run().read_jobs()[0].submissions == 1


@pytest.mark.proof  # test_submission cancels a chain, test_main_job a training
def test_cancel_ends_the_allocation_and_stays_cancelled(tula: Tula) -> None:
    tula("train", "job.yaml", "--nodes", "1", "--batch", "128", "--set", "train.epochs=200")
    tula.wait_until(tula.epochs_done)
    assert tula("cancel")["data"]["cancelled"] == [tula.task().job]
    tula.wait_until(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout)
    assert tula("status")["status"] == "done"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("partition", "invalid partition specified: nosuch"),
        ("account", "Invalid account or account/partition combination specified"),
    ],
)
def test_a_refusal_is_reported_in_the_schedulers_words(tula: Tula, setting: str, words: str) -> None:
    wrong = ("--set", f"cluster.slurm.{setting}=nosuch")
    answer = tula("train", "job.yaml", "--nodes", "1", "--batch", "64", *wrong, code=5)
    assert words in answer["error"]["message"]
    assert f"cluster.slurm.{setting}" in answer["error"]["hint"]


def test_a_job_that_waits_for_nodes_says_so_and_when_it_may_start(tula: Tula) -> None:
    occupied = ["sbatch", "--nodes=4", "--exclusive", "--time=5", "--output=/dev/null", "--wrap=sleep 300"]
    subprocess.run(occupied, check=True, capture_output=True)
    tula("train", "job.yaml", "--nodes", "2", "--batch", "64")

    def waiting() -> list[dict[str, Any]]:
        jobs = tula("status")["data"]["jobs"]
        return [job for job in jobs if job["reason"].startswith(("Resources", "Priority")) and job["starts_at"]]

    (job,) = tula.wait_until(waiting)
    assert job["state"] == "queued"
    assert 0 < job["starts_at"] - time.time() < 600
    tula("cancel")


def test_a_job_that_can_never_start_says_why(tula: Tula) -> None:
    tula("train", "job.yaml", "--nodes", "1", "--batch", "64", "--set", "cluster.slurm.partition=closed")
    status = tula.wait_until(
        lambda: [job for job in tula("status")["data"]["jobs"] if "will not start" in job["reason"]]
    )
    assert "PartitionDown" in status[0]["reason"]
    tula("cancel")
