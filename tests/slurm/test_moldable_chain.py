"""A training whose jobs use the nodes that SLURM grants them: the weights and the samples are those of an undisturbed one."""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import seen_samples
from cluster import SlurmCluster
from driver import Tula
from seen_samples import EPOCHS, SIZE
from test_recovery import attempts, finished, queue, submit

pytestmark = [pytest.mark.slurm, pytest.mark.torch]
CLUSTER = "cluster: {kind: slurm, device: cpu, slurm: {minutes: 10, memory: 1500M, partition: spare}}\n"


def occupy(nodes: int, seconds: int) -> str:
    """Submit a job of the partition that preempts trainings; return its id."""
    command = ["sbatch", "--parsable", "--partition=main", "--exclusive", "--output=/dev/null"]
    command += [f"--nodes={nodes}", "--time=5", f"--wrap=sleep {seconds}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.promise(
    "the scheduler",
    "a job of `--nodes 1-4` is granted other nodes than the one before",
    "it trains the same batches on them: every sample once per epoch, and the same weights up to rounding",
)
def test_jobs_train_the_same_on_the_nodes_that_they_are_granted(tula: Tula, on_slurm: SlurmCluster) -> None:
    undisturbed = Tula(make_folder(tula.folder.parent / "undisturbed"), seen_samples.JOB)
    alone = undisturbed.start("train", "job.yaml", "--nodes", "1", "--batch", "32", "--yes")
    (make_folder(tula.folder) / "job.yaml").write_text(seen_samples.JOB + CLUSTER)
    other = occupy(1, 300)
    tula.until(lambda: "RUNNING" in queue())
    submit(
        tula, "--nodes", "1-4", "--batch", "32", "--set", "model={name: 'seen_samples:Watching', args: {pause: 1.0}}"
    )
    tula.until((tula.folder / "seen.jsonl").exists)
    idle = subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], check=True, capture_output=True, text=True).stdout
    occupy(4, 1)
    subprocess.run(["scancel", other], check=True)
    assert idle.split() == ["1"], "the batch does not divide among 3 nodes, so one of those granted is free again"
    tula.until(lambda: finished(tula))
    assert [attempt.outcome for attempt in attempts(tula)] == ["preempted", "done"]
    assert [attempt.idle_nodes for attempt in attempts(tula)] == [0, 0]
    status = tula("status")["data"]
    assert [attempt["nodes"] for attempt in status["attempts"]] == [2, 4]
    assert seen_samples.seen(tula.folder) == Counter(dict.fromkeys(range(SIZE), EPOCHS))
    assert {row["world"] for row in seen_samples.told(tula.folder)} == {2, 4}
    assert alone.wait() == 0, alone.communicate()
    weights, expected = (load_weights(each) for each in (tula, undisturbed))
    assert all(weights[name] == pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in expected.items())


def make_folder(folder: Path) -> Path:
    """Make a folder with the module of the job's model."""
    folder.mkdir(exist_ok=True)
    shutil.copy(seen_samples.__file__, folder)
    return folder


def load_weights(tula: Tula) -> dict[str, np.ndarray]:
    import torch

    run = tula.run()
    state = torch.load(run.training(run.train_signatures()[0]).path / "last", weights_only=True)["model"]
    return {name: value.numpy() for name, value in state.items()}
