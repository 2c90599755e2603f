"""Hugging Face's and Lightning's trainers, as they come and with tula's callbacks."""

import json
import threading
import time
from pathlib import Path

import pytest
from script_ranks import ScriptRanks

from tula_cli.models.claims import list_mismatches, select_undisturbed_steps
from tula_cli.run.records.scripts import ExpectedValues, ShimPlan

pytestmark = [pytest.mark.torch, pytest.mark.proof]


def plan(folder: Path, **more: object) -> ShimPlan:
    settings = {"task": "t", "folder": str(folder), "warmup": 3, "min_steps": 12, "max_steps": 12, "split_steps": 2}
    return ShimPlan.model_validate(settings | more)


def test_hugging_face(run: ScriptRanks, tmp_path: Path) -> None:
    expected = ExpectedValues(world=2, batch=16, accumulate=2, lr=0.1)
    outcome = run("trainer.py", tmp_path / "out", 3, plan=plan(tmp_path, expected=expected), world=2)
    ranks = outcome.results()
    assert (outcome.codes, outcome.leftover_processes, list_mismatches(ranks)) == ([0, 0], 0, [])
    assert [number for number, step in enumerate(ranks[0].timed) if step.gap] == [6]
    assert len(select_undisturbed_steps(ranks)) == 11
    assert ranks[0].lr is not None and ranks[0].lr.base == 0.1
    assert ranks[0].split is not None and len(ranks[0].split.norms) == 2


def test_lightning(run: ScriptRanks, tmp_path: Path) -> None:
    outcome = run(
        "lit.py", tmp_path / "out", 1, 3, plan=plan(tmp_path, expected=ExpectedValues(world=1, batch=8, accumulate=2))
    )
    ranks = outcome.results()
    assert (outcome.codes, outcome.leftover_processes, list_mismatches(ranks)) == ([0], 0, [])
    assert {step.backwards for step in ranks[0].timed} == {2}


def ask_to_stop(folder: Path) -> None:
    while not (folder / "heartbeat-0.json").exists():
        time.sleep(0.01)
    (folder / "save.json").write_text(json.dumps({"then": "stop"}))


@pytest.mark.parametrize(("script", "arguments"), [("trainer.py", ()), ("lit.py", (1,))])
def test_a_callback_saves_with_the_trainer_s_own_means(
    run: ScriptRanks, tmp_path: Path, script: str, arguments: tuple[int, ...]
) -> None:
    asking = threading.Thread(target=ask_to_stop, args=(tmp_path,))
    asking.start()
    training = plan(tmp_path, mode="train", save=True, heartbeat=0.1)
    outcome = run(script, tmp_path / "out", *arguments, 2000, "callback", plan=training)
    asking.join()
    (seen,) = outcome.results()
    assert (outcome.codes, seen.why) == ([0], "saved"), outcome.output
    data = outcome.json("saved.json")
    assert data["step"] == seen.steps and Path(data["path"]).exists()
