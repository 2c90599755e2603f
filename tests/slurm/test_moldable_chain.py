"""A training whose jobs use the nodes that SLURM grants them: the weights and the samples are those of an undisturbed one."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seen_samples
from cluster import SlurmCluster
from driver import Tula
from seen_samples import EPOCHS, SIZE
from test_recovery import attempts, finished, queue, submit

pytestmark = [pytest.mark.slurm, pytest.mark.torch]
CLUSTER = "cluster: {kind: slurm, device: cpu, minutes: 10, slurm: {memory: 1500M, partition: spare}}\n"


SCRIPT, SCRIPT_EPOCHS = Path(__file__).parents[1] / "scripts" / "on_any_ranks.py", 8
SCRIPT_JOB = f"""
name: script
script:
  command: on_any_ranks.py --local-batch {{local_batch}} --epochs {{epochs}} --out {{out}} --pause 0.015
  length: {{epochs: {SCRIPT_EPOCHS}}}
  dataset_size: 256
  reference: {{batch: 32}}
  resume: {{args: "--resume {{checkpoint}}", checkpoint: "{{out}}/state.pt"}}
  save: SIGUSR1
search: {{nodes: [1, 2], max_node_hours: 5}}
"""


def occupy(nodes: int, seconds: int) -> str:
    """Submit a job of the partition that preempts trainings; return its id."""
    command = ["sbatch", "--parsable", "--partition=main", "--exclusive", "--output=/dev/null"]
    command += [f"--nodes={nodes}", "--time=5", f"--wrap=sleep {seconds}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.promise(
    "the scheduler",
    "a job of `--nodes 1-4` gets other nodes than the previous job",
    "it trains the same batches. Every sample is trained once per epoch, and the weights are the same up to rounding",
)
@pytest.mark.parametrize(
    ("nodes", "occupied", "first", "second"),
    [("1-2", 3, 1, 2), pytest.param("1-4", 1, 2, 4, marks=pytest.mark.proof)],
)
def test_jobs_train_the_same_on_the_nodes_that_they_are_granted(
    tula: Tula, on_slurm: SlurmCluster, nodes: str, occupied: int, first: int, second: int
) -> None:
    undisturbed = Tula(make_folder(tula.folder / "undisturbed"), seen_samples.JOB)
    alone = undisturbed.start("train", "job.yaml", "--nodes", "1", "--batch", "32", "--yes")
    (make_folder(tula.folder) / "job.yaml").write_text(seen_samples.JOB + CLUSTER)
    other = occupy(occupied, 300)
    tula.wait_until(lambda: "RUNNING" in queue())
    submit(
        tula, "--nodes", nodes, "--batch", "32", "--set", "model={name: 'seen_samples:Watching', args: {pause: 1.0}}"
    )
    tula.wait_until((tula.folder / "seen.jsonl").exists)
    idle = subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], check=True, capture_output=True, text=True).stdout
    occupy(4, 1)
    subprocess.run(["scancel", other], check=True)
    free = 4 - occupied - first
    assert idle.split() == [str(free)] * bool(free), (
        "the batch does not divide among 3 nodes: one of them is free again"
    )
    tula.wait_until(lambda: finished(tula))
    assert [attempt.outcome for attempt in attempts(tula)] == ["preempted", "done"]
    assert [attempt.idle_nodes for attempt in attempts(tula)] == [0, 0]
    status = tula("status")["data"]
    assert [attempt["nodes"] for attempt in status["attempts"]] == [first, second]
    assert seen_samples.count_samples(tula.folder) == Counter(dict.fromkeys(range(SIZE), EPOCHS))
    assert {row["world"] for row in seen_samples.read_batches(tula.folder)} == {first, second}
    assert alone.wait() == 0, alone.communicate()
    weights, expected = (load_weights(each) for each in (tula, undisturbed))
    assert all(weights[name] == pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in expected.items())


@pytest.mark.promise(
    "the scheduler",
    "a script with `--nodes 1-4` gets other nodes than before",
    "it resumes with the same batch and samples, and reaches the same weights up to rounding. Before the training,"
    " tula runs the resume test on twice the ranks",
)
@pytest.mark.proof
def test_a_script_trains_the_same_on_the_nodes_that_it_is_granted(tula: Tula, on_slurm: SlurmCluster) -> None:
    undisturbed = tula.folder.parent / "undisturbed"
    undisturbed.mkdir()
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29473", "RANK": "0", "WORLD_SIZE": "1"}
    words = [sys.executable, SCRIPT, "--local-batch", "32", "--epochs", str(SCRIPT_EPOCHS), "--out", undisturbed]
    subprocess.run(words, check=True, env={**os.environ, **alone})
    shutil.copy(SCRIPT, tula.folder)
    (tula.folder / "job.yaml").write_text(SCRIPT_JOB + CLUSTER)
    other = occupy(1, 600)
    tula.wait_until(lambda: "RUNNING" in queue())
    submit(tula, "--nodes", "1-4", "--batch", "32")
    tula.wait_until(lambda: next(tula.folder.glob("tula-runs/*/train/*/out/state.pt"), None), seconds=600)
    occupy(4, 1)
    subprocess.run(["scancel", other], check=True)
    tula.wait_until(lambda: finished(tula), seconds=600)
    assert [attempt.outcome for attempt in attempts(tula)] == ["preempted", "done"]
    status = tula("status")["data"]
    assert [attempt["nodes"] for attempt in status["attempts"] if attempt["job"].startswith("train")] == [2, 4]
    assert status["training"]["spent"]["node_hours"] > status["training"]["spent"]["hours"] * 2
    assert (status["rehearsal"]["verdict"], status["rehearsal"]["other_nodes"]) == ("same", True)
    state = load(next(tula.folder.glob("tula-runs/*/train/*/out/state.pt")))
    assert Counter(state["trained"]) == Counter(dict.fromkeys(range(256), SCRIPT_EPOCHS)) and state["world"] == 4
    expected = load(undisturbed / "state.pt")["net"]
    assert all(
        state["net"][name].numpy() == pytest.approx(expected[name].numpy(), rel=1e-4, abs=1e-6) for name in expected
    )


def make_folder(folder: Path) -> Path:
    """Make a folder with the module of the job's model."""
    folder.mkdir(exist_ok=True)
    shutil.copy(seen_samples.__file__, folder)
    return folder


def load_weights(tula: Tula) -> dict[str, np.ndarray]:
    run = tula.run()
    state = load(run.get_training(run.list_train_signatures()[0]).path / "last")["model"]
    return {name: value.numpy() for name, value in state.items()}


def load(path: Path) -> dict[str, Any]:
    import torch

    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state
