"""How trainers of others go on from their own checkpoints, found by the resume test: nothing tells it what to look for."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from driver import Tula

pytestmark = [pytest.mark.torch, pytest.mark.proof]
SCRIPTS = Path(__file__).parents[1] / "scripts"
TRAINER = """
name: trainer
script:
  command: resuming_trainer.py --per_device_train_batch_size {local_batch} --num_train_epochs {epochs} --output_dir {out}
  length: {epochs: 3}
  reference: {batch: 32}
  resume: {args: "--resume_from_checkpoint {checkpoint}", checkpoint: "{out}/checkpoint-*"}
search: {nodes: [1], min_batch: 16, max_batch: 64}
cluster: {device: cpu}
"""
LIT = """
name: lit
script:
  command: resuming_lit.py --batch {local_batch} --epochs {epochs} --out {out}
  length: {epochs: 90}
  reference: {batch: 32}
  resume: {args: "--resume {checkpoint}", checkpoint: "{out}/*.ckpt"}
search: {nodes: [1], min_batch: 16, max_batch: 64}
cluster: {device: cpu}
"""
REFERENCE = """
name: reference
script:
  command: reference.py -b {local_batch} --lr {lr} --epochs {epochs} --output-dir {out}
  length: {epochs: 90}
  reference: {batch: 16, lr: 0.1}
  resume: {args: "--resume {checkpoint}", checkpoint: "{out}/checkpoint.pth"}
train: {method: METHOD}
search: {nodes: [1], min_batch: 16, max_batch: 64}
cluster: {device: cpu}
"""


def run_resume_test(folder: Path, script: str, job: str) -> dict[str, Any]:
    """Test how a script resumes, and return the result."""
    shutil.copy(SCRIPTS / script, folder)
    data: dict[str, Any] = Tula(folder, job)("check", "job.yaml", "--rehearse")["data"]
    assert data["resumes"] == data["rehearsal"]["verdict"]
    rehearsal: dict[str, Any] = data["rehearsal"]
    return rehearsal


def test_hugging_face_trains_17_percent_too_many_at_half_the_batch_a_device(tmp_path: Path) -> None:
    result = run_resume_test(tmp_path, "resuming_trainer.py", TRAINER)
    assert result["verdict"] == "same"
    assert result["faults"] == ["at batch 16 it trains 4480 samples in total instead of 3840: 16.7 % too many"]
    assert result["starts"][1]["samples"] == 2560, "at the same batch it is right"


def test_lightning_goes_on_at_another_batch_from_an_epochs_end(tmp_path: Path) -> None:
    result = run_resume_test(tmp_path, "resuming_lit.py", LIT)
    assert (result["verdict"], result["faults"]) == ("epoch", [])
    assert [start["samples"] for start in result["starts"][1:]] == [2560, 2560]


@pytest.mark.parametrize(("method", "verdict"), [("lbt", "epoch"), ("lrs", "same")])
def test_a_learning_rate_that_stays_is_right_unless_another_was_asked_for(
    tmp_path: Path, method: str, verdict: str
) -> None:
    result = run_resume_test(tmp_path, "reference.py", REFERENCE.replace("METHOD", method))
    assert result["verdict"] == verdict
    if verdict == "same":  # its checkpoint holds the optimizer with the rate of the whole batch
        assert result["faults"] == [
            "at batch 8 its learning rate is 0.1000 after the checkpoint, but should be 0.05000"
        ]
