"""The learning rate of a training script, found by branches from its own checkpoint, all by the command line."""

import shutil
from pathlib import Path

import pytest
from driver import Tula

pytestmark = [pytest.mark.torch, pytest.mark.proof]
SCRIPT = Path(__file__).parents[1] / "scripts" / "resumes_at_any_rate.py"
JOB = """
name: searched
script:
  command: train.py --batch {batch} --lr {lr} --samples {samples} --out {out}
  length: {samples: 65536}
  reference: {batch: 16, lr: 0.0005}
  resume: {args: "--resume {checkpoint}", checkpoint: "{out}/last.pt", batch: any}
train: {method: lrs}
search: {nodes: [1], min_batch: 16, max_batch: 128, max_node_hours: 1}
cluster: {device: cpu}
"""


def test_the_learning_rate_of_a_script_is_found_by_branches_from_its_checkpoint(tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path / "train.py")
    tula = Tula(tmp_path, JOB)
    options = ("compare", "job.yaml", "--learning-rates", "--batch", "64", "--nodes", "1")
    data = tula(*options, "--yes")["data"]
    assert [(branch["batch"], branch["rule"], branch["lr"]) for branch in data["branches"]] == [
        (64, "none", 0.0005), (64, "sqrt", 0.001), (64, "linear", 0.002),
    ]  # fmt: skip
    losses = [branch["loss"] for branch in data["branches"]]
    assert losses == sorted(losses, reverse=True), "the learning rate is so low that the highest one learns most"
    assert (data["chosen"]["rule"], data["held_out"]) == ("linear", False)
    assert data["overrides"] == ["train.lr_scaling=linear"]
    assert 0.05 < data["share"] < 0.1
    assert tula(*options)["data"] == data, "nothing is trained twice"
    (task,) = tula.run().read_tasks()
    assert len(tula.run().read_attempts(task.id)) == 4, "the training up to the checkpoint, and three branches"
