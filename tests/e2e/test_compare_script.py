"""Methods of a training script beside each other, all by the command line."""

from pathlib import Path

import pytest
from driver import Tula

pytestmark = [pytest.mark.torch, pytest.mark.proof]
SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
for name in ("--batch", "--seed"):
    parser.add_argument(name, type=int)
parser.add_argument("--lr", type=float)
given = parser.parse_args()
torch.manual_seed(given.seed)
weights = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weights], lr=given.lr)
for batch in torch.utils.data.DataLoader(torch.randn(64, 4), given.batch):
    optimizer.zero_grad()
    (batch @ weights).square().mean().backward()
    optimizer.step()
    print("acc", 100 * given.lr - 5 + given.seed)
"""
JOB = """
name: compared
script:
  command: train.py --batch {batch} --lr {lr} --seed {seed}
  length: {epochs: 1}
  dataset_size: 64
  reference: {batch: 16, lr: 0.1}
  metric: {acc: 'acc (.+)'}
train: {method: lbt}
search: {nodes: [1], min_batch: 16, max_batch: 32, max_node_hours: 1}
cluster: {device: cpu}
"""


def test_methods_of_a_script_are_trained_and_compared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    tula = Tula(tmp_path, JOB)
    requested = ("--methods", "lrs", "--batch", "32", "--seeds", "1", "--no-controls")
    data = tula("compare", "job.yaml", *requested)["data"]
    rows = [
        (row["method"], row["batch"], row["metrics"]["acc"]["mean"], row["gap"], row["top1"]) for row in data["rows"]
    ]
    assert rows == [("lbt", 16, 5.0, None, None), ("lrs", 32, 15.0, -10.0, None)]
    assert (data["metric"], data["finished"]) == ("acc", 2)
    tula("report", "--html", "page.html")
    assert "best acc" in (tmp_path / "page.html").read_text()
