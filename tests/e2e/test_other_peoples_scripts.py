"""Scripts as other people write them, from the command line to the end of a training: what they do unasked is noticed."""

import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from driver import Tula

pytestmark = [pytest.mark.torch, pytest.mark.proof]
SCRIPT = Path(__file__).parents[1] / "scripts" / "various.py"
JOB = """
name: various
script:
  command: various.py --batch-size {local_batch} --lr {lr} --epochs {epochs} --out {out} HABIT
  code: none
  length: {epochs: 6}
  dataset_size: auto
  reference: {batch: 32, lr: 0.01}
  RESUME
train: {method: lbt}
search: {nodes: [1], strategy: full, min_batch: 32, max_batch: 32, min_steps: 8, min_seconds: 0}
cluster: {device: cpu}
"""
RESUME = 'resume: {args: "--resume {checkpoint}", checkpoint: "{out}/ck.pt"}'


def tula(folder: Path, habit: str, *, resume: str = "") -> Tula:
    shutil.copy(SCRIPT, folder)
    return Tula(folder, JOB.replace("HABIT", habit).replace("RESUME", resume))


@pytest.mark.parametrize(
    ("schedule", "verdict"),
    [
        ("cosine", "same"),
        ("timm_warmup", "same"),
        ("lambda", "same"),
        ("epoch_cosine", "epoch"),
        ("by_samples", "epoch"),
    ],
)
def test_a_resume_that_would_spoil_the_schedule_is_not_cleared(tmp_path: Path, schedule: str, verdict: str) -> None:
    run = tula(tmp_path, f"--schedule {schedule} --slow 0.002", resume=RESUME)
    rehearsal: dict[str, Any] = run("check", "job.yaml", "--rehearse")["data"]["rehearsal"]
    assert rehearsal["verdict"] == verdict and bool(rehearsal["faults"]) == (verdict == "same"), rehearsal


@pytest.mark.parametrize("save", ["cwd", "beside", "versions"])
def test_a_training_does_not_start_from_what_a_probe_has_saved(tmp_path: Path, save: str) -> None:
    run = tula(tmp_path, f"--save {save} --size 128")
    run("profile", "job.yaml", "--yes")
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "various.py", "tula-runs"}
    assert any("outside of {out}" in note for note in run("status")["data"]["notes"])
    run("train", "job.yaml", "--yes", "--nodes", "1", "--batch", "32")
    assert "resumed from" not in run.logs()


def test_a_script_that_resumes_by_itself_is_noticed_at_its_second_start(tmp_path: Path) -> None:
    run = tula(tmp_path, "--save auto --slow 0.03")
    training = run.start("train", "job.yaml", "--yes", "--nodes", "1", "--batch", "32")
    until = time.monotonic() + 120
    while not list(tmp_path.glob("tula-runs/*/train/*/out/ck.pt")) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1.0)
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("TULA_PLAN", "").startswith(str(tmp_path)):
            process.kill()
    text = "".join(training.communicate(timeout=240))
    assert training.returncode == 0 and "resumed by itself from ck.pt" in text, text
    assert "epoch 6.00 of 6" in text and "ended after" not in text, text
