"""In a training the shim counts, tells that it goes on, has it saved, and never ends it by itself."""

import json
import threading
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from script_ranks import ScriptRanks

from tula_cli.run.records.scripts import Heartbeat, RankResult, ShimPlan

pytestmark = pytest.mark.torch


def training(folder: Path, **more: object) -> ShimPlan:
    settings = {
        "task": "train",
        "folder": str(folder),
        "mode": "train",
        "warmup": 2,
        "min_steps": 5,
        "heartbeat": 0.0,
        "row": 0.0,
    }
    return ShimPlan.model_validate(settings | more)


def rows(folder: Path, kind: str, rank: int = 0) -> list[dict[str, object]]:
    results = [json.loads(line) for line in (folder / f"steps-{rank}.jsonl").read_text().splitlines()]
    return [row for row in results if row["kind"] == kind]


def test_a_training_runs_to_its_end_and_its_samples_are_counted(run: ScriptRanks, tmp_path: Path) -> None:
    outcome = run("reference.py", "--epochs", 3, "--output-dir", tmp_path, plan=training(tmp_path))
    assert outcome.codes == [0] and "CLEANED UP" in outcome.output[0]
    (seen,) = outcome.results()
    assert (seen.why, seen.steps, seen.samples) == ("ended", 30, 480)
    begun = RankResult.model_validate_json((tmp_path / "begun-0.json").read_bytes())
    assert (begun.why, begun.steps, {step.samples for step in begun.timed}) == ("begun", 7, {16})
    assert len(begun.timed) == 5 and begun.timed == seen.timed, "of the first steps alone"
    steps = [(row["step"], row["samples"], row["lr"]) for row in rows(tmp_path, "row")]
    assert steps[:30] == [(step, 16 * step, 0.1) for step in range(1, 31)]
    assert [(row["step"], row["before"], row["causes"]) for row in rows(tmp_path, "gap")] == [
        (11, 160, ["eval", "epoch", "save"]),
        (21, 320, ["eval", "epoch", "save"]),
    ]
    assert {name for row in rows(tmp_path, "gap") for name in row["saved"]} == {str(tmp_path / "checkpoint.pth")}
    beat = TypeAdapter(Heartbeat).validate_json((tmp_path / "heartbeat-0.json").read_bytes())
    assert (beat.step, beat.samples, beat.lost) == (30, 480, None)
    assert 0 < beat.seconds < 5 and beat.stepped_at <= beat.alive_at <= time.time()


def test_a_resumed_training_counts_its_own_samples(run: ScriptRanks, tmp_path: Path) -> None:
    arguments = ("--output-dir", tmp_path, "-b", 16)
    run("reference.py", "--epochs", 1, *arguments, plan=training(tmp_path / "first"))
    resumed = ("--epochs", 3, "--resume", tmp_path / "checkpoint.pth")
    (seen,) = run("reference.py", *resumed, *arguments, plan=training(tmp_path / "second")).results()
    assert (seen.steps, seen.samples) == (20, 320)


def ask(folder: Path, then: str) -> None:
    """Ask for a save once the training steps, as a supervisor would."""
    while not (folder / "heartbeat-1.json").exists():
        time.sleep(0.01)
    (folder / "save.json").write_text(json.dumps({"then": then}))


def test_all_ranks_save_after_the_same_step_and_stop(run: ScriptRanks, tmp_path: Path) -> None:
    plan = training(tmp_path, save=True, checkpoint=str(tmp_path / "last"), heartbeat=0.1)
    asking = threading.Thread(target=ask, args=(tmp_path, "stop"))
    asking.start()
    outcome = run("by_hand.py", 100_000, plan=plan, world=2)
    asking.join()
    first, second = outcome.results()
    assert (outcome.codes, first.why, second.why) == ([0, 0], "saved", "saved"), outcome.output
    saved = [json.loads((tmp_path / f"last.{rank}").read_text())["steps"] for rank in (0, 1)]
    assert saved == [first.steps, second.steps] and first.steps == second.steps
    data = outcome.json("saved.json")
    assert (data["step"], data["samples"], data["path"]) == (first.steps, 4 * first.steps, plan.checkpoint)
    assert not (tmp_path / "save.json").exists()


def test_a_training_goes_on_without_a_shim_that_fails(run: ScriptRanks, tmp_path: Path) -> None:
    tmp_path.joinpath("steps-0.jsonl").mkdir()  # rows cannot be written
    outcome = run("odd_steps.py", "gan", plan=training(tmp_path))
    assert outcome.codes == [0] and "no longer monitored" in outcome.output[0]
    assert "IsADirectoryError" in outcome.json("heartbeat-0.json")["lost"]
    (failure,) = tmp_path.glob("failure-*.json")
    assert json.loads(failure.read_text())["where"] == "shim"


def test_a_rehearsal_kills_itself_some_steps_after_the_first_checkpoint(run: ScriptRanks, tmp_path: Path) -> None:
    killing = {"checkpoint": str(tmp_path / "*.pth"), "after": 5, "settled": 0.1}
    outcome = run("reference.py", "--epochs", 3, "--output-dir", tmp_path, plan=training(tmp_path, rehearsal=killing))
    assert outcome.codes == [-9] and "CLEANED UP" not in outcome.output[0]
    data = json.loads((tmp_path / "rehearsal.json").read_text())
    assert data == {"steps": 10, "samples": 160, "dataset": 160, "killed": True}
    assert [row["step"] for row in rows(tmp_path, "row")] == list(range(1, 16))
