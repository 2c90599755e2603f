"""Predictions compared with what happens (benchmarks/reality): the comparison, the plan of stages, and one small job for real."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import comparison
import pytest
import reality
from comparison import TRAINING, Row
from reality import Stage

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks/reality/reality.py"


def run_program(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], cwd=ROOT, text=True, capture_output=True, timeout=600, check=True
    )


# --- hand-made answers of the commands: two configurations, of which the sweep has measured the first


def candidate(nodes: int, step: float, *, probed: bool, width: float = 0.1, **parts: float) -> dict[str, Any]:
    seconds = {"steps": 100 * step, "data": None, "evaluation": 0.0, "rest": 8.0, **parts}
    hours = sum(value for value in seconds.values() if value is not None) / 3600
    return {
        "nodes": nodes, "batch": 64, "measured": probed, "parts": seconds, "step_time": step, "step_low": step * (1 - width),
        "step_high": step * (1 + width), "hours": hours, "hours_low": hours * (1 - width), "hours_high": hours * (1 + width),
    }  # fmt: skip


def search(
    rows: list[dict[str, Any]], probes: dict[int, list[float]], *, chosen: int, knee: int = 64
) -> dict[str, Any]:
    return {
        "profile": {
            "measured": [{"nodes": nodes, "batch": 64, "step_times": times} for nodes, times in probes.items()]
        },
        "time": {"rows": rows, "choice": rows[chosen]},
        "knee": {"rows": rows, "choice": {**rows[chosen], "batch": knee}},
    }


SWEEP = search(
    [candidate(1, 0.20, probed=True), candidate(2, 0.12, probed=False, evaluation=2.0)], {1: [0.2]}, chosen=0
)
TRUTHS = [
    search(
        [candidate(1, 0.21, probed=True), candidate(2, 0.10, probed=True, evaluation=4.0)],
        {1: [0.20, 0.22], 2: [0.10]},
        chosen=1,
    ),
    search(
        [candidate(1, 0.23, probed=True), candidate(2, 0.11, probed=True, evaluation=4.0)],
        {1: [0.23], 2: [0.11]},
        chosen=1,
        knee=128,
    ),
]
TRAINED = {
    "nodes": 1, "batch": 64, "predicted_step": 0.20, "actual_step": 0.38, "predicted_hours": 28 / 3600, "actual_hours": 29 / 3600,
    "predicted_parts": {"steps": 20.0, "data": None, "evaluation": 0.0, "checkpoints": 0.01, "rest": 8.0},
    "actual_parts": {"steps": 28.0, "data": 1.0, "evaluation": 0.0, "checkpoints": 0.02, "rest": 1.0},
}  # fmt: skip


@pytest.fixture
def rows() -> list[Row]:
    return comparison.compare_job("loop", {1: SWEEP}, TRUTHS, TRAINED)


def of(rows: list[Row], quantity: str, **values: Any) -> list[Row]:
    return [
        row
        for row in rows
        if row.quantity == quantity and all(getattr(row, key) == value for key, value in values.items())
    ]


def test_every_candidate_is_compared_with_each_full_search(rows: list[Row]) -> None:
    steps = [row for row in of(rows, "step") if row.truth != TRAINING]
    assert [(row.nodes, row.probed, row.truth, row.actual) for row in steps] == [
        (1, True, "1", pytest.approx(0.21)), (2, False, "1", 0.10), (1, True, "2", 0.23), (2, False, "2", 0.11),
    ]  # fmt: skip
    assert [row.is_inside for row in steps] == [True, False, False, True]
    assert comparison.list_errors(row for row in steps if not row.probed) == [pytest.approx(0.12 / 0.105 - 1)]
    assert comparison.list_repeat_differences(steps) == [pytest.approx(0.23 / 0.21 - 1), pytest.approx(0.1)]


def test_parts_are_compared_where_both_sides_have_them_and_the_sweep_has_not_measured(rows: list[Row]) -> None:
    parts = {row.quantity for row in rows if row.truth in ("1", "2")} - {"step", "knee"}
    assert parts == {"time", "steps", "evaluation", "rest"}
    assert {row.nodes for row in of(rows, "evaluation", truth="1")} == {2}
    assert comparison.list_errors(of(rows, "evaluation", truth="1")) == [pytest.approx(0.5)]


def test_the_choice_is_judged_by_the_mean_times_of_the_full_searches(rows: list[Row]) -> None:
    (lost,) = of(rows, "time lost")
    assert lost.actual == pytest.approx((0.22 * 100 + 8) / (0.105 * 100 + 4 + 8) - 1)
    assert [(row.predicted, row.actual) for row in of(rows, "knee")] == [(64.0, 64.0), (64.0, 128.0)]


def test_a_step_far_off_is_named_behind_a_total_that_is_right(rows: list[Row]) -> None:
    (total,) = of(rows, "time", truth=TRAINING)
    assert abs(total.error) < 0.04 and total.is_inside
    named = comparison.list_large_errors(rows)
    assert {name for name in named if "training" in name} == {
        "loop, training: step -47.4%",
        "loop, training: steps -28.6%",
        "loop, training: rest +700.0%",
    }, "checkpoints are off by half too, which is a small part of the whole"
    assert "loop, unprobed: evaluation 50% in the median" in named


def test_the_table_holds_what_was_compared(rows: list[Row]) -> None:
    table = comparison.format_tables(rows)
    assert (
        "| loop | 1, 2 | 14.3% / 14.3% | 50% of 2, 50% of 2 | 9.8% / 10.0% | 33.3%, at most 33.3% | 1 of 2 |" in table
    )
    assert "| loop | evaluation | 50.0% / 50.0% | 0.0% / 0.0% |" in table
    assert "| loop | 1 node, batch 64 | time | 28 | 29 | -3.4% | yes |" in table


def test_a_job_without_full_searches_or_training_is_compared_as_far_as_it_goes() -> None:
    assert comparison.compare_job("loop", {1: SWEEP}, [], None) == []
    assert {row.truth for row in comparison.compare_job("loop", {1: SWEEP}, [], TRAINED)} == {TRAINING}
    assert comparison.format_tables([]) == "nothing to compare yet"


def test_whole_steps_of_a_script_are_compared_without_parts() -> None:
    trained = {**TRAINED, "predicted_parts": None, "actual_parts": None}
    assert [row.quantity for row in comparison.compare_training("script", SWEEP, trained)] == ["step", "time"]


# --- the kept file


def test_kept_rows_give_the_same_tables(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "kept.csv"
    comparison.write_rows(path, rows)
    assert comparison.format_tables(comparison.read_rows(path)) == comparison.format_tables(rows)
    assert run_program("--summary", str(path)).stdout.rstrip("\n") == comparison.format_tables(rows)
    again = json.loads(run_program("--summary", str(path), "--json").stdout)
    assert [Row(**row) for row in again] == comparison.read_rows(path)


def test_the_kept_measurement_is_read_and_summed_up() -> None:
    kept = ROOT / "benchmarks/results/reality.csv"
    rows = comparison.read_rows(kept)
    jobs = {row.job for row in rows}
    assert jobs >= set(reality.KINDS) and {row.job for row in rows if row.truth == TRAINING} == jobs
    printed = run_program("--summary", str(kept)).stdout
    assert printed == comparison.format_tables(rows) + "\n" and all(f"| {job} |" in printed for job in jobs)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("nodes,batch\n1,2\n")
    with pytest.raises(SystemExit, match=r"other\.csv does not hold rows of this benchmark"):
        comparison.read_rows(tmp_path / "other.csv")


# --- the stages


def complete(stage: Stage, out: Path, seconds: float) -> None:
    stage.path(out).parent.mkdir(parents=True, exist_ok=True)
    stage.path(out).write_text(json.dumps({"seconds": seconds}))


def test_the_first_round_of_all_jobs_comes_before_repetitions() -> None:
    stages = reality.plan_stages(["loop", "fsdp"], sweeps=3, full=2)
    assert [f"{stage.job} {stage.name}" for stage in stages] == [
        "loop sweep1", "loop full1", "loop train", "fsdp sweep1", "fsdp full1", "fsdp train",
        "loop sweep2", "loop full2", "fsdp sweep2", "fsdp full2", "loop sweep3", "fsdp sweep3",
    ]  # fmt: skip


def test_a_stage_takes_as_long_as_the_longest_of_its_kind(tmp_path: Path) -> None:
    sweep = Stage("loop", "sweep", 3)
    assert reality.estimate_seconds(sweep, tmp_path) == reality.DEFAULT_SECONDS["sweep"]
    complete(Stage("fsdp", "sweep", 1), tmp_path, 50.0)
    assert reality.estimate_seconds(sweep, tmp_path) == pytest.approx(60.0)
    complete(Stage("loop", "sweep", 1), tmp_path, 20.0)
    complete(Stage("loop", "sweep", 2), tmp_path, 30.0)
    assert reality.estimate_seconds(sweep, tmp_path) == pytest.approx(36.0)


def test_only_stages_that_are_missing_and_fit_the_budget_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = reality.plan_stages(["loop"], sweeps=3, full=1)
    complete(stages[0], tmp_path, 20.0)
    started = []

    def run_stage(stage: Stage, *_: object) -> dict[str, Any]:
        started.append(stage.name)
        return {}

    monkeypatch.setattr(reality, "run_stage", run_stage)
    deadline = time.monotonic() + 100
    missing = list(reality.run_stages(stages, tmp_path, deadline=deadline, tiny=True, cluster={}))
    assert started == ["train", "sweep2", "sweep3"]
    assert [stage.name for stage, _ in missing] == ["full1"] and "it takes about 110 s" in missing[0][1]
    assert list(reality.run_stages(stages, tmp_path, deadline=deadline, tiny=True, cluster={})) == missing[:1]
    assert started == ["train", "sweep2", "sweep3"], "what is complete is not run again"


def test_after_a_failure_a_job_waits_for_the_next_call_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_stage(stage: Stage, *_: object) -> dict[str, Any]:
        if stage.job == "loop":
            raise reality.StageFailed("exit code 3")
        return {}

    monkeypatch.setattr(reality, "run_stage", run_stage)
    stages = reality.plan_stages(["loop", "fsdp"], sweeps=1, full=1)
    deadline = time.monotonic() + 1000
    missing = list(reality.run_stages(stages, tmp_path, deadline=deadline, tiny=True, cluster={}))
    assert [(stage.job, stage.name) for stage, _ in missing] == [
        ("loop", "sweep1"),
        ("loop", "full1"),
        ("loop", "train"),
    ]
    assert all(stage.path(tmp_path).exists() for stage in stages if stage.job == "fsdp")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("25m", 1500), ("1.5h", 5400), ("2", 120)])
def test_budgets_are_durations(text: str, seconds: float) -> None:
    assert reality.parse_arguments(["--budget", text]).budget == seconds


# --- for real


def test_help_names_every_job() -> None:
    printed = run_program("--help").stdout
    assert all(job in printed for job in reality.JOBS)


@pytest.mark.torch
@pytest.mark.proof
def test_one_small_job_is_searched_trained_and_compared(tmp_path: Path) -> None:
    arguments = (
        "--tiny",
        "--jobs",
        "loop",
        "--sweeps",
        "1",
        "--full",
        "1",
        "--budget",
        "15m",
        "--out",
        str(tmp_path),
        "--json",
    )
    done = run_program(*arguments, "--keep", str(tmp_path / "kept.csv"))
    rows = [Row(**row) for row in json.loads(done.stdout)]
    steps = [row for row in rows if row.quantity == "step" and row.truth == "1"]
    assert len(steps) == 8 and sum(not row.probed for row in steps) == 1
    assert all(0.5 < row.actual / row.predicted < 2 for row in steps if row.predicted)
    trained = {row.quantity: row for row in rows if row.truth == TRAINING}
    assert {"step", "time", "steps", "data", "evaluation", "checkpoints", "rest"} == set(trained)
    assert trained["time"].actual > trained["steps"].actual > 16 * 0.015, "slept compute is a floor"
    assert len(comparison.read_rows(tmp_path / "kept.csv")) == len(rows)
    again = run_program(*arguments)
    assert again.stdout == done.stdout and again.stderr == "", "nothing is run twice"
