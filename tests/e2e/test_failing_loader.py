"""A script whose file system, limit, loader worker or loss fails once: it goes on from its checkpoint, or ends with the right exit code."""

import shutil
from pathlib import Path

import pytest
from driver import Tula

from tula_cli.run.training_run import TrainingRun

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parents[1] / "scripts" / "failing_loader.py"
JOB = """
name: failing
script:
  command: failing_loader.py --batch {local_batch} --epochs {epochs} --out {out} --fault FAULT
  length: {epochs: 4}
  reference: {batch: 32}
  resume: {args: "--resume {checkpoint}", checkpoint: "{out}/e*.pt", batch: epoch}
search: {nodes: [1], min_batch: 32, max_batch: 32}
cluster: {device: cpu}
"""


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("EIO", "storage"), ("ESTALE", "storage"), ("ESHUTDOWN", "storage"), ("ENOTCONN", "storage"),
        ("EMFILE", "host_limit"), ("SIGSEGV", "signal"), ("SIGABRT", "signal"), ("timeout", "hung"), ("KeyError", "user"),
    ],
)  # fmt: skip
@pytest.mark.proof
def test_a_script_goes_on_after_what_another_start_cures(tmp_path: Path, fault: str, outcome: str) -> None:
    training = trained(tmp_path, fault, code=0)
    assert [attempt.outcome for attempt in training.read_attempts()] == [outcome, "done"]
    result = training.read_result()
    assert result is not None and result.samples == 4 * 256


def test_a_script_that_stops_at_nan_has_diverged_at_once(tmp_path: Path) -> None:
    training = trained(tmp_path, "nan", code=9)
    assert [attempt.outcome for attempt in training.read_attempts()] == ["diverged"]


def trained(folder: Path, fault: str, *, code: int) -> TrainingRun:
    """Train the script with a fault; return the training."""
    shutil.copy(SCRIPT, folder)
    tula = Tula(folder, JOB.replace("FAULT", fault))
    tula("train", "job.yaml", "--nodes", "1", "--batch", "32", "--no-rehearse", "--yes", code=code)
    run = tula.run()
    return run.get_training(run.list_train_signatures()[0])
