"""The learning rate of a training script, found by branches from its own checkpoint, all by the command line."""

from pathlib import Path

import pytest
from driver import Tula

pytestmark = [pytest.mark.torch, pytest.mark.proof]
SCRIPT = """
import argparse, os, torch
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--samples", type=int)
parser.add_argument("--lr", type=float)
parser.add_argument("--out", type=Path)
parser.add_argument("--resume", type=Path)
given = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(2048, 20)
y = (x @ torch.randn(20, 4)).argmax(1)
net = torch.nn.Linear(20, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=given.lr, momentum=0.9)
samples = 0
if given.resume:
    state = torch.load(given.resume)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    samples = state["samples"]
    for group in optimizer.param_groups:
        group["lr"] = given.lr
while samples < given.samples:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(samples))
    for inputs, labels in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[order], y[order]), given.batch):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        samples += len(inputs)
        if samples % 512 == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "samples": samples}
            torch.save(state, given.out / "draft.pt")
            os.replace(given.out / "draft.pt", given.out / "last.pt")
        if samples >= given.samples:
            break
"""
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
    (tmp_path / "train.py").write_text(SCRIPT)
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
    (task,) = tula.run().tasks()
    assert len(tula.run().attempts(task.id)) == 4, "the training up to the checkpoint, and three branches"
