"""Gradient scaling around the optimizer of a script: what is trained is what the library does by hand, or nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from script_ranks import ROOT, SCRIPTS, SHIM, TIMEOUT_SECONDS, ScriptRanks

from tula_cli.cluster.scripts.methods import copy_optim
from tula_cli.presets import AGS_PRESETS
from tula_cli.run.records.scripts import AgsPlan, ShimPlan

pytestmark = pytest.mark.torch
SCRIPT = "scalable.py"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_optim(tmp_path_factory.mktemp("run"))


def plan(folder: Path, library: Path | None, *, mode: str = "train", **changes: Any) -> ShimPlan:
    """Return a plan, with AGS where the library is given."""
    settings = {**AGS_PRESETS[changes.pop("preset", "robust")]}
    given = {
        "settings": settings, "apply_to": None, "b_large": 16, "b_small": 4, "available": 8, "steps_per_epoch": 2,
        "seed": 0, "resumed": False, **changes,
    }  # fmt: skip
    ags = None if library is None else AgsPlan(code=str(library), **given)
    return ShimPlan(task="t", folder=str(folder), mode=mode, warmup=2, heartbeat=0.0, row=0.0, ags=ags)  # type: ignore[arg-type]


def weights(path: Path, rank: int = 0) -> torch.Tensor:
    state = torch.load(f"{path}.{rank}", weights_only=True)["model"]
    return torch.cat([tensor.flatten() for tensor in state.values()])


def rows(folder: Path, rank: int) -> list[dict[str, Any]]:
    results = [json.loads(line) for line in (folder / f"steps-{rank}.jsonl").read_text().splitlines()]
    return [row["ags"] for row in results if row["kind"] == "row"]


def test_weights_of_two_ranks_are_those_of_the_library_applied_by_hand(
    run: ScriptRanks, tmp_path: Path, library: Path
) -> None:
    """Under micro-batches, a scaler that skips a step, a schedule; with nothing of AGS they are others."""
    value, hand, plain = (tmp_path / name for name in ("own", "hand", "plain"))
    for out, ags, more in ((value, library, ()), (hand, None, ("--by-hand",)), (plain, None, ())):
        loop = ("--accumulate", 2, "--scaler", *more, "--out", out)
        outcome = run(SCRIPT, *loop, plan=plan(tmp_path / f"of-{out.name}", ags), world=2)
        assert outcome.codes == [0, 0], outcome.output
    assert torch.equal(weights(value), weights(value, 1))
    assert torch.equal(weights(value), weights(hand))
    assert not torch.allclose(weights(value), weights(plain), atol=1e-4)
    first, second = (rows(tmp_path / "of-own", rank) for rank in (0, 1))
    assert first == second and first[-1]["mean"] > 1
    so_far = first[-1]["so_far"]
    assert (so_far["apply_to"], so_far["steps"]) == ("gradient", 5), "one of six was skipped"
    assert 0.5 < so_far["scaled"] < 1, "the first step has no factors yet"


def test_ranks_that_reduce_by_themselves_train_not_a_step_more(run: ScriptRanks, tmp_path: Path, library: Path) -> None:
    outcome = run(SCRIPT, "--alone", "--own-reduction", "--catching", plan=plan(tmp_path, library), world=2)
    assert outcome.codes == [0, 0], "it catches everything; what was refused is told all the same"
    failure = outcome.json("failure-0.json")
    assert (failure["where"], failure["step"]) == ("method", 0)
    assert "2 ranks train without DistributedDataParallel" in failure["text"]
    assert outcome.results()[0].steps < 4


@pytest.mark.proof
@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (("--accumulate", 2, "--sync-each"), "reduces its gradients 2 times per step"),
        (("--within", "--own-reduction"), "no gradient came through the script's DistributedDataParallel"),
        (("--compressed",), "own communication hook (fp16_compress_hook) on DistributedDataParallel"),
    ],
    ids=["reduced-twice", "within", "compressed"],
)
def test_loops_that_no_factor_can_come_from_are_refused(
    run: ScriptRanks, tmp_path: Path, library: Path, loop: tuple[object, ...], words: str
) -> None:
    outcome = run(SCRIPT, *loop, plan=plan(tmp_path, library), world=2)
    assert 0 not in outcome.codes and words in outcome.json("failure-0.json")["text"], outcome.output


@pytest.mark.proof
def test_the_papers_form_takes_its_small_batch_from_the_loop(run: ScriptRanks, tmp_path: Path, library: Path) -> None:
    """One factor an element, refreshed at the end of each epoch of two steps, under a scaler that skips one of six."""
    path = tmp_path / "own"
    loop = ("--hooks", "--scaler", "--out", path)
    outcome = run(SCRIPT, *loop, plan=plan(tmp_path, library, preset="paper"), world=2)
    assert outcome.codes == [0, 0], outcome.output
    assert torch.equal(weights(path), weights(path, 1))
    first, second = (rows(tmp_path, rank)[-1] for rank in (0, 1))
    assert first == second and first["factors"] == weights(path).numel()
    assert first["refreshes"] == 2 and first["mean"] != 1 and first["so_far"]["steps"] == 5


@pytest.mark.proof
def test_sharded_parameters_are_refused(run: ScriptRanks, tmp_path: Path, library: Path) -> None:
    outcome = run("sharded.py", plan=plan(tmp_path, library), world=2)
    assert 0 not in outcome.codes
    assert "2 ranks train without DistributedDataParallel (FSDP" in outcome.json("failure-0.json")["text"]


@pytest.mark.proof
def test_hugging_faces_trainer_is_scaled_as_it_is(run: ScriptRanks, tmp_path: Path, library: Path) -> None:
    outcome = run("trainer.py", tmp_path / "out", 2, plan=plan(tmp_path, library, available=4), world=2)
    assert outcome.codes == [0, 0], outcome.output
    first, second = (rows(tmp_path, rank)[-1] for rank in (0, 1))
    assert first == second and first["so_far"]["steps"] == 32 and first["so_far"]["scaled"] > 0.9
    assert 1 < first["mean"] <= 2**0.5


@pytest.mark.proof
def test_lightnings_trainer_is_scaled_as_it_is(tmp_path: Path, library: Path) -> None:
    """Its backward pass is within the optimizer's step, and it starts its second rank itself."""
    path = tmp_path / "plan.json"
    path.write_text(plan(tmp_path, library, available=4).model_dump_json())
    environment = {"PYTHONPATH": f"{SHIM}:{ROOT / 'templates'}", "TULA_PLAN": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPTS / "lit.py"), str(tmp_path / "out"), "2", "2"]
    subprocess.run(command, env=os.environ | environment, capture_output=True, timeout=TIMEOUT_SECONDS, check=True)
    first, second = (rows(tmp_path, rank)[-1] for rank in (0, 1))
    assert first == second and first["so_far"]["steps"] == 32 and first["so_far"]["scaled"] == 31 / 32
    assert 1 < first["mean"] <= 2**0.5


@pytest.mark.proof
def test_updates_of_adam_are_scaled_as_by_hand_and_go_on_from_a_checkpoint(
    run: ScriptRanks, tmp_path: Path, library: Path
) -> None:
    value, hand, again = (tmp_path / name for name in ("own", "hand", "again"))
    for out, ags, more in ((value, library, ()), (hand, None, ("--by-hand",))):
        loop = ("--optimizer", "AdamW", "--closure", *more, "--steps", 8)
        run(SCRIPT, *loop, "--out", out, plan=plan(tmp_path / f"of-{out.name}", ags), world=2)
    assert torch.equal(weights(value), weights(hand))
    for out, more in ((tmp_path / "half", ("--steps", 4)), (again, ("--steps", 8, "--resume", tmp_path / "half.0"))):
        resumed = plan(tmp_path / f"of-{out.name}", library, resumed="--resume" in more)
        run(SCRIPT, "--optimizer", "AdamW", "--closure", *more, "--out", out, plan=resumed, world=2)
    assert torch.equal(weights(value), weights(again))
