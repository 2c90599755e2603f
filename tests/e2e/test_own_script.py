"""A training script that knows nothing of tula: measured, recommended, trained, killed and resumed, all by the command line."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from driver import Tula

from tula_cli.run.records.probes import Measured
from tula_cli.run.script_attempt import ScriptAttempt

pytestmark = pytest.mark.torch
SCRIPTS = Path(__file__).parents[1] / "scripts"
DDP = """
name: own
script:
  command: plain_ddp.py --local-batch {local_batch} --lr {lr} --epochs {epochs}
  length: {epochs: 30}
  reference: {batch: 16, lr: 0.1}
train: {method: lrs}
search: {nodes: [1, 2], min_batch: 32, max_batch: 32, strategy: full, min_steps: 5, min_seconds: 0}
cluster: {device: cpu}
"""
RESUMING = """
name: resuming
script:
  command: reference.py -b {local_batch} --epochs {epochs} --output-dir {out}
  length: {epochs: 400}
  dataset_size: 160
  reference: {batch: 16}
  resume: {args: "--resume {checkpoint}", checkpoint: "{out}/*.pth", batch: any}
search: {nodes: [1], min_batch: 16, max_batch: 16}
cluster: {device: cpu}
"""


def with_script(folder: Path, name: str, job: str) -> Tula:
    shutil.copy(SCRIPTS / name, folder)
    return Tula(folder, job)


@pytest.mark.proof  # test_observe measures scripts under DDP, and test_script_on_slurm a script of a job
def test_a_script_under_ddp_is_measured_and_a_choice_is_made(tmp_path: Path) -> None:
    tula = with_script(tmp_path, "plain_ddp.py", DDP)
    tula("profile", "job.yaml", "--yes")
    results = tula.run().read_results()
    assert [(type(r), r.nodes, r.local_batch) for r in results] == [(Measured, nodes, 32 // nodes) for nodes in (1, 2)]
    for result in results:
        assert isinstance(result, Measured) and result.dataset_size == 320 and result.data_wait is not None
        assert result.script is not None and result.script.lr_given == result.script.lr.first  # type: ignore[union-attr]
        if result.nodes == 2:
            assert result.sync_time and result.compute_time and result.gradients is not None
            assert result.gradients.norm_sqr <= result.gradients.local_norm_sqr
    answer = tula("recommend", "--objective", "time")["data"]
    assert len(answer["rows"]) == 2 and all(row["measured"] for row in answer["rows"])
    assert not [text for text in answer["warnings"] if "scales its learning rate" in text]


def test_a_killed_script_goes_on_from_its_own_checkpoint_to_the_last_sample(tmp_path: Path) -> None:
    tula = with_script(tmp_path, "reference.py", RESUMING)
    training = tula.start("train", "job.yaml", "--nodes", "1", "--batch", "16", "--yes")
    out = tula.wait_until(lambda: next(tmp_path.glob("tula-runs/resuming-*/train/*/out/*.pth"), None))
    run = tula.run()
    beat = tula.wait_until(lambda: ScriptAttempt(run.path, tula.task().id, 1).read_heartbeat(0))
    os.kill(beat.pid, signal.SIGKILL)
    output, complaint = training.communicate(timeout=240)
    assert training.returncode == 0, complaint
    summary = run.get_training(run.list_train_signatures()[0]).read_summary()
    result = run.get_training(run.list_train_signatures()[0]).read_result()
    assert summary is not None and result is not None and out.exists()
    assert summary.attempts == 2 and "SIGKILL" in summary.causes[0]
    assert (result.samples, result.steps) == (400 * 160, 4000), "of the epoch that was broken off nothing counts twice"
    assert "2 attempts" in output


@pytest.mark.proof  # tests/shim/test_ags.py compares its weights with those of the library
def test_gradient_scaling_goes_around_a_script_under_ddp(tmp_path: Path) -> None:
    """The same factor on both ranks, in every step but the first; told while it trains and at the end."""
    job = DDP.replace("method: lrs", "method: ags").replace("[1, 2]", "[2]").replace("epochs: 30", "epochs: 3")
    tula = with_script(tmp_path, "plain_ddp.py", job)
    output, complaint = tula.start("train", "job.yaml", "--nodes", "2", "--batch", "32", "--yes").communicate(
        timeout=240
    )
    run = tula.run()
    training = run.get_training(run.list_train_signatures()[0])
    summary = training.read_summary()
    assert summary is not None and summary.scaled is not None, complaint
    assert (summary.scaled.steps, summary.scaled.apply_to) == (30, "gradient")
    assert summary.scaled.scaled == pytest.approx(29 / 30) and 1 < summary.scaled.mean <= 2**0.5
    assert f"factor {summary.scaled.mean:.3g}" in output
    attempt = ScriptAttempt(run.path, tula.task().id, 1)
    first, second = (attempt.read_newest_row(rank)["ags"]["mean"] for rank in (0, 1))
    assert first == second
    assert [row for row in training.read_metrics() if row.get("ags")]
    status = tula("status")["data"]
    assert status["training"]["ags"]["mean"] == pytest.approx(summary.scaled.mean)


@pytest.mark.proof
def test_a_script_that_cannot_load_its_own_checkpoint_is_detected_by_a_rehearsal(tmp_path: Path) -> None:
    options = RESUMING.replace("--epochs", "--keep-arguments --epochs").replace(", batch: any", "")
    tula = with_script(tmp_path, "reference.py", options)
    answer = tula("check", "job.yaml", "--rehearse", code=11)
    assert answer["error"]["code"] == "resume" and "argparse.Namespace" in answer["error"]["message"]
    rehearsal = answer["data"]["rehearsal"]
    assert [(start["phase"], start["ended"]) for start in rehearsal["starts"]] == [
        ("begin", "killed"),
        ("same", "failed"),
    ]
    assert (
        rehearsal["starts"][0]["saved_samples"] == 160 and rehearsal["starts"][1]["error"] == "_pickle.UnpicklingError"
    )
    assert tula("check", "job.yaml", "--rehearse", code=11)["data"]["kept"], "it is not tried a second time"
    assert tula("status")["data"]["rehearsal"]["verdict"] == "none"
