"""Observations of scripts with many habits: one script, whose options are those habits."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from read_diagnostics import codes
from script_ranks import ScriptRanks

from tula_cli.cluster.scripts.watch import move_probe_files
from tula_cli.models.claims import count_epoch_samples, list_mismatches
from tula_cli.run.records.scripts import ExpectedValues, ShimPlan
from tula_cli.run.script_attempt import ScriptAttempt

pytestmark = pytest.mark.torch


def few_now(cases: Sequence[Any], *now: int) -> list[Any]:
    """Return parameters of which those at some places run in each test run, and all in `make proof`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if place in now else pytest.mark.proof)
        for place, case in enumerate(cases)
    ]


def training(folder: Path, **more: object) -> ShimPlan:
    settings = {"task": "train", "folder": str(folder), "mode": "train", "warmup": 2, "min_steps": 5, "max_steps": 5}
    return ShimPlan.model_validate(settings | more)


@pytest.mark.parametrize(
    "habit",
    few_now(
        [
            (("--peek", "epoch"),),
            (("--peek", "break"),),
            (("--peek", "kept"),),
            (("--peek", "calibrate"),),
            (("--peek", "each_step"),),
            (("--peek", "first_then_rest"),),
            (("--peek", "epoch", "--samples", "stream"),),
            (("--samples", "drop_last", "--size", "500"),),
        ],
        0,
        4,
    ),
)
def test_samples_are_those_that_the_script_counts(run: ScriptRanks, tmp_path: Path, habit: tuple[str, ...]) -> None:
    outcome = run("various.py", *habit, "--epochs", 3, "--batch-size", 32, "--out", tmp_path, plan=training(tmp_path))
    (seen,) = outcome.results()
    data = json.loads(next(line for line in outcome.output[0].splitlines() if line.startswith("{")))
    assert (seen.steps, seen.samples) == (data["steps"], data["samples"]), outcome.output


@pytest.mark.parametrize(
    ("samples", "given", "agrees", "epoch"),
    few_now(
        [
            ("strided", None, True, 192),
            ("subset", None, True, 200),
            ("chunk", None, True, 192),
            ("split", 200, True, 192),
            ("sized_stream", 200, True, None),
            ("sampler", None, True, 192),
            ("padding", None, True, 200),
            ("every_rank_all", None, False, 384),
            ("every_rank_all", 200, False, 384),
        ],
        0,
        7,
    ),
)
def test_ranks_that_share_their_data_themselves(
    run: ScriptRanks, tmp_path: Path, samples: str, given: int | None, agrees: bool, epoch: int | None
) -> None:
    plan = training(tmp_path, expected=ExpectedValues(world=2, batch=32, dataset=given))
    options = ("--samples", samples, "--size", 200, "--epochs", 2, "--batch-size", 16, "--out", tmp_path)
    ranks = run("various.py", *options, plan=plan, world=2).results()
    assert codes(list_mismatches(ranks)) == ([] if agrees else ["epoch-steps-differ"])
    assert count_epoch_samples(ranks) == epoch


@pytest.mark.parametrize(
    ("schedule", "expected"),
    few_now([("warmup_cosine", ("SequentialLR", 2, True)), ("epoch_step", ("StepLR", 0, True)), ("timm", None)], 0),
)
def test_rows_tell_where_the_scheduler_stands(
    run: ScriptRanks, tmp_path: Path, schedule: str, expected: tuple[str, int, bool] | None
) -> None:
    plan = training(tmp_path, schedule=True, row=0.0)
    run("various.py", "--schedule", schedule, "--epochs", 2, "--out", tmp_path, plan=plan)
    rows = [
        row for row in map(json.loads, (tmp_path / "steps-0.jsonl").read_text().splitlines()) if row["kind"] == "row"
    ]
    answer = rows[2].get("schedule")
    assert (answer and (answer["name"].rpartition(".")[2], answer["at"], answer["moves"])) == expected


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SAVES = "cwd subfolder cache argument overwrite versions hydra sqlite log move remove each_rank"


@pytest.mark.parametrize("save", few_now(SAVES.split(), 0, 4, 9))
def test_a_probe_leaves_nothing_that_a_training_would_start_from(run: ScriptRanks, tmp_path: Path, save: str) -> None:
    work, attempt = tmp_path / "work", ScriptAttempt(tmp_path / "run", "probe", 1)
    work.mkdir()
    for name in ("mine.pt", "todo.txt", "train.txt"):
        (work / name).write_text(name)
    before = tree(work)
    plan = training(attempt.path, mode="probe", min_steps=20, max_steps=20, files=(str(attempt.output_folder),))
    options = ("--save", save, "--size", 64, "--epochs", 30, "--out", attempt.output_folder, "--home", work)
    outcome = run("various.py", *options, plan=plan)
    assert outcome.results()[0].why == "stopped", outcome.output
    assert tree(work) != before, "the script has written"
    answer = move_probe_files(attempt)
    assert tree(work) == before and "outside of {out}" in answer and str(work) in answer
    assert attempt.read_moved_files() == [answer]


def test_what_was_there_before_is_restored_and_early_files_stay(run: ScriptRanks, tmp_path: Path) -> None:
    work, attempt = tmp_path / "work", ScriptAttempt(tmp_path / "run", "probe", 1)
    work.mkdir()
    (work / "train.log").write_text('{"epoch": -1}\n')
    time.sleep(0.01)
    plan = training(attempt.path, mode="probe", min_steps=8, max_steps=8, files=(str(attempt.output_folder),))
    options = (
        "--save",
        "log",
        "--size",
        64,
        "--epochs",
        30,
        "--out",
        attempt.output_folder,
        "--home",
        work,
        "--prepare",
    )
    run("various.py", *options, plan=plan).results()
    assert (work / "train.log").read_text().count("\n") > 1
    move_probe_files(attempt)
    assert (work / "train.log").read_text() == '{"epoch": -1}\n'
    assert (work / "prepared.txt").exists(), "it was written before the first step: no training is in it"
