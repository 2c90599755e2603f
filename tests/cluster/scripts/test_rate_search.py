"""How a supervisor searches a learning rate with a script: a small descent, which tells its steps through tula_hooks and imports no torch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tula_cli.cluster.scripts.rate_search import ScriptRateSearch
from tula_cli.cluster.supervise import supervise
from tula_cli.run.directory import RunDir
from tula_cli.run.files import append_json_line, write_file_atomically, write_record
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.results import RateSearch
from tula_cli.run.records.scripts import KillRecord, ShimPlan
from tula_cli.run.records.tasks import RateSearchTask
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.load import validate_job

SCRIPT = """
import argparse, json, os, time
from pathlib import Path
import tula_hooks as tula

parser = argparse.ArgumentParser()
parser.add_argument("-b", type=int)
parser.add_argument("--lr", type=float)
parser.add_argument("--samples", type=int)
parser.add_argument("--out", type=Path)
parser.add_argument("--resume", type=Path)
options, world, steps = parser.parse_args(), int(os.environ["WORLD_SIZE"]), 0


class Engine:
    def parameters(self):
        return []


def save():
    if os.environ["RANK"] == "0":
        (options.out / "draft").write_text(json.dumps({"samples": samples, "x": x, "lr": lr}))
        (options.out / "draft").replace(options.out / "state")


known = json.loads(options.resume.read_text()) if options.resume else {"samples": 0, "x": 1.0}
samples, x, lr = known["samples"], known["x"], options.lr
tula.wrap(Engine(), Engine())
WHAT_ELSE
while samples < options.samples:
    loss, x = x * x, x - 2 * lr * x
    steps += 1
    time.sleep(0.001)
    samples += options.b * world
    WITHIN
    tula.step(samples=options.b, loss=loss, lr=lr)
    if SAVES:
        save()
"""


def prepare(
    folder: Path,
    *,
    what_else: str = "",
    within: str = "pass",
    saves: str = "steps % 10 == 0",
    lr: float = 0.01,
    batches: tuple[int, ...] = (64,),
    gpus: int = 1,
    script: Any = (),
) -> tuple[RunDir, RateSearchTask]:
    """Write a script and the task of a search; the training has 1000 steps of 16 samples."""
    (folder / "train.py").write_text(
        SCRIPT.replace("WHAT_ELSE", what_else).replace("WITHIN", within).replace("SAVES", saves)
    )
    settings = {
        "command": "train.py -b {local_batch} --lr {lr} --samples {samples} --out {out}",
        "length": {"samples": 16_000},
        "reference": {"batch": 16, "lr": lr},
        "resume": {"args": "--resume {checkpoint}", "checkpoint": "{out}/state", "batch": "any"},
    }
    content = {"script": settings | dict(script), "cluster": {"device": "cpu", "gpus_per_node": gpus}}
    spec = validate_job({**content, "train": {"method": "lrs"}}, source="test")
    run = RunDir.create(folder / "tula-runs", spec)
    task = RateSearchTask(
        id="rates-k", job="rates-k", spec=spec, workdir=str(folder), nodes=1, key="k", batches=batches,
        dataset_size=16_000, save_every=160,
    )  # fmt: skip
    run.write_task(task)
    return run, task


def search(folder: Path, **settings: Any) -> RateSearch:
    """Search to the end; return the record."""
    run, task = prepare(folder, **settings)
    supervise(run.path, task.id, environ=os.environ)
    record = run.read_rate_search("k")
    assert record is not None and record.finished, [attempt.message for attempt in run.read_attempts(task.id)]
    assert not (run.path / "script" / task.id).exists(), "the script's files are gone"
    return record


def test_each_branch_starts_from_the_same_checkpoint_at_its_learning_rate_and_batch(folder: Path) -> None:
    record = search(folder, batches=(64, 32, 128))
    assert [(b.batch, b.rule, b.lr, b.samples) for b in record.branches] == [
        (64, "none", 0.01, 640), (64, "sqrt", 0.02, 640), (64, "linear", 0.04, 640),
        (32, "linear", 0.02, 640), (128, "linear", 0.08, 640),
    ]  # fmt: skip
    start = 0.98 ** (2 * record.start_epoch * 1000)  # x * x after so many steps
    for branch in record.branches:
        steps = branch.samples // branch.batch
        judged = [start * (1 - 2 * branch.lr) ** (2 * step) for step in range(steps)][-max(2, -(-steps // 4)) :]
        assert branch.loss == pytest.approx(sum(judged) / len(judged))
    assert record.start_lr == 0.01
    assert 0.02 <= record.start_epoch <= 0.031


def test_an_interrupted_search_trains_only_the_missing_branches(folder: Path) -> None:
    """On two ranks, which end their branches together."""
    fails = "if options.lr == 0.02 and not Path('once').exists(): Path('once').touch(); raise KeyError('unlucky')"
    run, task = prepare(folder, within=fails, gpus=2)
    supervise(run.path, task.id, environ=os.environ)
    stopped = run.read_rate_search("k")
    assert stopped is not None and not stopped.finished
    assert "KeyError: 'unlucky'" in run.read_attempts(task.id)[-1].message
    supervise(run.path, task.id, environ=os.environ)
    record = run.read_rate_search("k")
    assert record is not None and record.finished
    assert record.branches[0] == stopped.branches[0]
    assert [branch.samples for branch in record.branches] == [320] * 3
    changed = {"branches": (), "samples": 0, "finished": False}
    assert record.model_copy(update=changed) == stopped.model_copy(update=changed), "from the same checkpoint"


def test_a_script_that_saves_too_late_is_stopped(folder: Path) -> None:
    run, task = prepare(folder, saves="False")
    supervise(run.path, task.id, environ=os.environ)
    assert run.read_rate_search("k") is None
    assert "no checkpoint from which branches can start" in run.read_attempts(task.id)[-1].message


# --- what is seen of a start


def write_rows(attempt: ScriptAttempt, losses: Sequence[float | None], rates: Sequence[float]) -> None:
    attempt.write_plan(ShimPlan(task="rates-k", folder=str(attempt.path)))
    for step, loss in enumerate(losses, 1):
        lr = rates[min(step, len(rates)) - 1]
        append_json_line(attempt.path / "steps-0.jsonl", {"kind": "row", "step": step, "loss": loss, "lr": lr})


def observe_start(
    folder: Path, losses: Sequence[float | None], *, saved: int | None = 20
) -> tuple[RunDir, Failure | None]:
    """Return the run, and why the training up to the checkpoint failed, given its losses."""
    run, task = prepare(folder)
    command = ScriptRateSearch(run, task).make_leader_command(attempt=1, rendezvous="")
    assert command.branch is not None and command.branch.rule is None
    attempt = ScriptAttempt(run.path, task.id, 1)
    write_rows(attempt, losses, [0.01])
    if saved is not None:
        write_record(attempt.path / "rehearsal.json", KillRecord(steps=saved, samples=None, dataset=None, killed=True))
        write_file_atomically(Path(command.branch.out) / "state", "checkpoint")
    return run, ScriptRateSearch(run, task).record_results(command, None)


def observe_branch(
    folder: Path, losses: Sequence[float | None], rates: Sequence[float]
) -> tuple[RunDir, Failure | None]:
    """Return the run, and why the second branch, with twice the learning rate, failed."""
    run, _ = observe_start(folder, [1.0] * 23)
    task = next(task for task in run.read_tasks() if isinstance(task, RateSearchTask))
    program, failure = ScriptRateSearch(run, task), None
    for number, seen in ((2, [0.01]), (3, rates)):
        command = program.make_leader_command(attempt=number, rendezvous="")
        assert command.branch is not None and Path(command.branch.out, "state").read_text() == "checkpoint"
        write_rows(ScriptAttempt(run.path, task.id, number), [0.9] * 5 if number == 2 else losses, seen)
        failure = program.record_results(command, None)
    return run, failure


@pytest.mark.parametrize(
    ("losses", "saved", "message"),
    [
        ([None] * 23, 20, "no loss was observed"),
        ([1.0] * 18 + [None] * 5, 20, "the training diverges at script.reference.batch 16"),
        ([1.0] * 23, None, "ended after 368 samples without a checkpoint to branch from"),
    ],
)
def test_without_a_checkpoint_or_a_loss_no_branch_is_started(
    folder: Path, losses: list[float | None], saved: int | None, message: str
) -> None:
    run, failure = observe_start(folder, losses, saved=saved)
    assert failure is not None and failure.permanent and message in failure.message
    assert run.read_rate_search("k") is None


@pytest.mark.parametrize(
    ("losses", "rates", "message"),
    [
        ([0.9] * 5, [0.01], "uses 0.01 instead of 0.02"),
        ([0.9] * 5, [0.02, 0.01], "uses 0.01 instead of 0.02"),
        ([0.9] * 2, [0.02], "the branch ended after 2 of 5 steps"),
    ],
)
def test_a_branch_that_tells_nothing_fails_with_the_reason(
    folder: Path, losses: list[float | None], rates: list[float], message: str
) -> None:
    run, failure = observe_branch(folder, losses, rates)
    assert failure is not None and failure.permanent and message in failure.message
    record = run.read_rate_search("k")
    assert record is not None and [branch.rule for branch in record.branches] == ["none"]


@pytest.mark.parametrize(
    ("losses", "loss"),
    [([0.9, 0.8, 0.7, 0.6, 0.5], 0.55), ([0.9, 0.8, 0.7, 0.6, None], None), ([0.9, None], None)],
)
def test_a_branch_is_judged_by_its_last_steps_and_has_diverged_where_they_are_not_finite(
    folder: Path, losses: list[float | None], loss: float | None
) -> None:
    run, failure = observe_branch(folder, losses, [0.02])
    record = run.read_rate_search("k")
    assert failure is None and record is not None
    assert (record.branches[1].loss, record.branches[1].diverged) == (pytest.approx(loss), loss is None)
