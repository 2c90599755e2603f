"""How far the micro-batches of a script may be cut, by what its ranks' shims told of the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tula_cli.cluster.scripts.training import ScriptTraining
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.load import validate_job

FAILURE = {
    "version": 1, "task": "t-1", "attempt": 1, "host": "h", "pid": 1, "where": "script",
    "error": "torch.OutOfMemoryError", "text": "CUDA out of memory", "step": 3, "failed_at": 1.0,
}  # fmt: skip


def training(folder: Path, **train: Any) -> tuple[RunDir, TrainTask]:
    """Return a training of 64 samples on each of two GPUs, or 32 twice."""
    command = "train.py -b {micro_batch} -a {accumulate}"
    script = {"command": command, "length": {"samples": 1600}, "reference": {"batch": 16}}
    preset = {"ags": {"preset": "paper"}} if train.get("method") == "ags" else {}
    spec = validate_job({"script": script, "train": train, "search": {"nodes": [2]}, **preset}, source="test")
    task = TrainTask(
        id="t-1", job="t", spec=spec, workdir=str(folder), nodes=2, signature="t", attempt=1,
        ladder=(Rung(batch=128), Rung(batch=64)), workers=1,
    )  # fmt: skip
    return RunDir(folder / "run"), task


def write_norms(run: RunDir, *norms: str) -> None:
    folder = ScriptAttempt(run.path, "t-1", 1).path
    folder.mkdir(parents=True)
    for rank, norm in enumerate(norms):
        (folder / f"failure-{rank}.json").write_text(json.dumps({**FAILURE, "rank": rank, "batch_norm": norm}))


@pytest.mark.parametrize(
    ("norms", "into", "normalised"),
    [
        ([""], (2, 4, 8, 16, 32, 64), 0),
        (["batch"], (2, 4, 8), 1),
        (["sync", "sync"], (2, 4, 8, 16), 2),
        (["sync", "batch"], (2, 4, 8), 1),
        ([], (2, 4, 8), 0),  # killed ranks tell nothing
    ],
)
def test_batch_norm_bounds_it(tmp_path: Path, norms: list[str], into: tuple[int, ...], normalised: int) -> None:
    run, task = training(tmp_path)
    write_norms(run, *norms)
    result = ScriptTraining(run, task).list_micro_batch_splits()
    value, smaller = result.splits
    assert (value.batch, value.micro_batch, value.into) == (128, 64, into)
    assert (smaller.batch, smaller.micro_batch, result.normalised) == (64, 32, normalised)


def test_it_starts_from_the_accumulation_asked_for(tmp_path: Path) -> None:
    run, task = training(tmp_path, accumulate=2)
    write_norms(run, "")
    value = ScriptTraining(run, task).list_micro_batch_splits().get_splits(128)
    assert value is not None and (value.micro_batch, value.micro_batches, value.into) == (32, 2, (2, 4, 8, 16, 32))


def test_the_small_batch_of_gradient_scaling_stays_whole(tmp_path: Path) -> None:
    run, task = training(tmp_path, method="ags")  # its small batch of 16 samples is one GPU's
    write_norms(run, "")
    value = ScriptTraining(run, task).list_micro_batch_splits().get_splits(128)
    assert (
        value is not None
        and value.into == (2, 4)
        and value.limit == "AGS needs a small batch of 16 samples from each micro-batch"
    )
