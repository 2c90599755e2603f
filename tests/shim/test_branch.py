"""In a branch of a search for a learning rate, the shim shapes the learning rate, records the loss, and ends all ranks after the same step."""

import json
from itertools import accumulate
from pathlib import Path

import pytest
from script_ranks import ScriptRanks

from tula_cli.run.records.scripts import ShimPlan

pytestmark = pytest.mark.torch
SCRIPT = """
import os, sys, torch
if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
    torch.distributed.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD([weight], lr=0.4)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(100):
    optimizer.zero_grad()
    for _ in range(2):
        scaler.scale((weight + 10) / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    with open(f"{sys.argv[1]}/weights-{os.environ.get('RANK', 0)}", "a") as file:
        print(weight.item(), file=file)
print("THE END")
"""
DDP_SCRIPT = """
import os, torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
for step in range(100):
    optimizer.zero_grad()
    model(torch.full((1, 1), 3.0 if os.environ["RANK"] == "0" else 1.0)).sum().backward()
    optimizer.step()
"""
SHARES = [0.25, 0.625, 1, 1, 1, 0.75, 0.5, 0.25]
"""From a quarter of the learning rate, that of the checkpoint, to all of it in two of eight steps; from the fourth on to 0."""


@pytest.mark.parametrize("world", [1, 2])
def test_a_branch_follows_its_shape_and_ends(run: ScriptRanks, tmp_path: Path, world: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    settings = {"task": "rates", "folder": str(tmp_path), "mode": "train", "row": 0.0}
    plan = ShimPlan.model_validate({**settings, "branch": {"steps": 8, "factor": 4.0}})
    outcome = run(tmp_path / "train.py", tmp_path, plan=plan, world=world)
    assert outcome.codes == [0] * world and "THE END" not in outcome.output[0], outcome.output
    assert [result.why for result in outcome.results()] == ["stopped"] * world
    weights = [0.0, *accumulate(-0.4 * share for share in SHARES)]
    for rank in range(world):
        trained = [float(line) for line in (tmp_path / f"weights-{rank}").read_text().split()]
        assert trained[:7] == pytest.approx(weights[1:8]), "the last one is not written: the step ends the rank"
        rows = [json.loads(line) for line in (tmp_path / f"steps-{rank}.jsonl").read_text().splitlines()]
        losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "row"}
        assert list(losses.values()) == pytest.approx([10 + weight for weight in weights[:8]]), "before it is scaled"
        assert {row["lr"] for row in rows if row["kind"] == "row"} == {0.4}, "the script's own"


def test_the_first_steps_of_a_branch_record_the_norms_of_gradients(run: ScriptRanks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DDP_SCRIPT)
    settings = {"task": "rates", "folder": str(tmp_path), "mode": "train", "row": 0.0}
    plan = ShimPlan.model_validate({**settings, "branch": {"steps": 8, "factor": 1.0, "norms": 3}})
    outcome = run(tmp_path / "train.py", tmp_path, plan=plan, world=2)
    for result, gradient in zip(outcome.results(), (3.0, 1.0), strict=True):
        assert result.split is not None
        assert result.split.norms == ((gradient**2, 4.0),) * 2, "of the second and the third step"


def test_up_to_the_checkpoint_nothing_is_shaped_and_only_late_checkpoints_count(
    run: ScriptRanks, tmp_path: Path
) -> None:
    killing = {"checkpoint": str(tmp_path / "*.pth"), "after": 2, "settled": 0.1, "first": 12}
    settings = {"task": "rates", "folder": str(tmp_path), "mode": "train", "row": 0.0, "rehearsal": killing}
    plan = ShimPlan.model_validate({**settings, "branch": {"steps": None, "factor": 1.0}})
    outcome = run("reference.py", "--epochs", 4, "--output-dir", tmp_path, plan=plan)
    assert outcome.codes == [-9]
    assert json.loads((tmp_path / "rehearsal.json").read_text())["steps"] == 20, "the second epoch's"
    rows = [json.loads(line) for line in (tmp_path / "steps-0.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "row"]
    assert len(losses) == 22 and all(0 < loss < 20 for loss in losses)
