"""A job that runs anyway is measured, and nothing of it changes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from script_ranks import SCRIPTS, ScriptOutcome, ScriptRanks

import tula_cli
from tula_cli.models.observed import MeasuredJob
from tula_cli.run.observed import ObservedJob, list_observed_jobs
from tula_cli.run.records.scripts import ShimPlan
from tula_cli.services.observe import OBSERVATION_PLAN, install_observer

pytestmark = pytest.mark.torch


def make_plan(folder: Path, **more: object) -> ShimPlan:
    settings = {
        **OBSERVATION_PLAN,
        "folder": str(folder),
        "warmup": 2,
        "min_steps": 5,
        "seconds": 0.0,
        "split_steps": 4,
    }
    return ShimPlan.model_validate(settings | more)


def get_only_job(folder: Path) -> ObservedJob:
    (job,) = list_observed_jobs(folder)
    return job


def measure(job: ObservedJob) -> MeasuredJob:
    return MeasuredJob.from_records(job.script, job.id, job.ranks, job.heartbeats, job.observed_at)


def test_a_script_under_ddp_is_measured_by_part_and_ends_as_without_tula(run: ScriptRanks, tmp_path: Path) -> None:
    outcome = run("plain_ddp.py", "--samples", 640, "--epochs", 1, plan=make_plan(tmp_path), world=2)
    assert outcome.codes == [0, 0] and "FINISHED" in outcome.output[0]
    job = get_only_job(tmp_path)
    measured = measure(job)
    assert (job.script, measured.world, measured.nodes, measured.local_batch) == ("plain_ddp", 2, 1, 8)
    assert [rank.why for rank in job.ranks] == ["ended", "ended"] and job.ranks[0].steps == 40
    assert len(measured.step_times) >= 5
    assert measured.sync_seconds is not None and 0 < measured.sync_seconds < sum(measured.step_times)
    totals = job.heartbeats[0].totals
    assert totals is not None and 0 < totals["data"] < totals["training"]
    assert all(rank.split is not None and not rank.split.norms and not rank.split.local for rank in job.ranks)


@pytest.mark.parametrize(
    ("script", "arguments", "world", "samples"),
    [
        ("accumulating.py", ("--gradient_accumulation_steps=4", "--max_iters=40"), 2, None),
        ("sharded.py", (), 2, 8),
        pytest.param("reference.py", ("--epochs", 2), 1, 16, marks=pytest.mark.proof),
        pytest.param("various.py", ("--epochs", 2), 1, 16, marks=pytest.mark.proof),
        pytest.param("odd_steps.py", ("gan",), 1, None, marks=pytest.mark.proof),
        pytest.param("trainer.py", ("OUT", 3), 1, 8, marks=pytest.mark.proof),
        pytest.param("lit.py", ("OUT", 1, 3), 1, 8, marks=pytest.mark.proof),
    ],
)
def test_scripts_of_many_kinds_are_measured(
    run: ScriptRanks, tmp_path: Path, script: str, arguments: tuple[object, ...], world: int, samples: int | None
) -> None:
    named = {"reference.py": ("--output-dir", tmp_path / "out"), "various.py": ("--out", tmp_path / "out")}
    (tmp_path / "out").mkdir()
    plan = make_plan(tmp_path / "observed")
    filled = [tmp_path / "out" if argument == "OUT" else argument for argument in arguments]
    outcome = run(script, *filled, *named.get(script, ()), plan=plan, world=world)
    assert outcome.codes == [0] * world, outcome.output
    measured = measure(get_only_job(tmp_path / "observed"))
    assert measured.step_seconds > 0 and measured.world == world
    assert measured.samples == samples


def test_weights_are_those_of_the_script_without_tula(run: ScriptRanks, tmp_path: Path) -> None:
    """Hooks, comparisons of steps and resets of counters must not touch what is trained or drawn."""

    def train(plan: ShimPlan, out: Path) -> str:
        out.mkdir()
        outcome = run("various.py", "--epochs", 3, "--out", out, plan=plan)
        assert outcome.codes == [0], outcome.output
        return [line for line in outcome.output[0].splitlines() if line.startswith("{")][-1]

    counted = ShimPlan(task="train", folder=str(tmp_path / "counted"), mode="train", min_steps=5)
    assert train(make_plan(tmp_path / "observed"), tmp_path / "a") == train(counted, tmp_path / "b")


def test_a_killed_job_leaves_its_measurements(run: ScriptRanks, tmp_path: Path) -> None:
    outcome = run("plain_ddp.py", "--fail-on", 0, "--samples", 6400, plan=make_plan(tmp_path, min_steps=1), world=1)
    assert outcome.codes == [1]
    assert not list(tmp_path.glob("*/*/failure-*.json")), "the script's own message is enough"


def test_a_folder_that_cannot_be_written_does_not_disturb_the_job(run: ScriptRanks, tmp_path: Path) -> None:
    (tmp_path / "plain_ddp").write_text("in the way")
    outcome: ScriptOutcome = run("plain_ddp.py", "--samples", 640, "--epochs", 1, plan=make_plan(tmp_path), world=2)
    assert outcome.codes == [0, 0] and "FINISHED" in outcome.output[0]
    assert "no longer monitored" in outcome.output[0]


def start_observed(folder: Path, *command: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "tula_cli", "observe", "--folder", str(folder), *command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.parent)


def test_a_command_keeps_its_output_and_exit_code_and_is_reported(tmp_path: Path) -> None:
    script = str(SCRIPTS / "reference.py")
    process = start_observed(
        tmp_path / "seen", "--", sys.executable, script, "--epochs", "6", "--output-dir", str(tmp_path)
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "one step" not in out and "computing" in err and "peak memory" in err
    report = subprocess.run(
        [sys.executable, "-m", "tula_cli", "observe", "--folder", tmp_path / "seen", "--report", "reference", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    (job,) = json.loads(report.stdout)["data"]["jobs"]
    assert (job["script"], job["batch"], job["nodes"]) == ("reference", 16, 1)


@pytest.mark.proof
def test_the_hooks_of_a_site_watch_trainings_and_can_be_turned_off(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "tula_cli",
        "observe",
        "--install",
        tmp_path / "hooks",
        "--folder",
        tmp_path / "seen",
    ]
    subprocess.run(words, check=True, capture_output=True)
    script = [sys.executable, str(SCRIPTS / "reference.py"), "--epochs", "6", "--output-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "hooks")}
    subprocess.run(script, env={**environment, "TULA_OBSERVE": "0"}, check=True)
    assert not list_observed_jobs(tmp_path / "seen")
    subprocess.run(script, env=environment, check=True)
    assert measure(get_only_job(tmp_path / "seen")).local_batch == 16


def test_signals_reach_the_command_and_its_exit_code_the_shell(tmp_path: Path) -> None:
    waiting = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); print('up', flush=True); time.sleep(60)"
    process = start_observed(tmp_path / "seen", "--", sys.executable, "-c", waiting)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7 and "no report" in err
    outcome = start_observed(
        tmp_path / "seen", "--", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), 9)"
    )
    begun = time.monotonic()
    outcome.communicate(timeout=60)
    assert outcome.returncode == 128 + signal.SIGKILL and time.monotonic() - begun < 30


@pytest.mark.proof
def test_trainings_of_one_command_are_kept_apart(tmp_path: Path) -> None:
    script = f"{sys.executable} {SCRIPTS / 'reference.py'} --epochs 6 --output-dir"
    process = start_observed(
        tmp_path / "seen", "--", "bash", "-c", f"{script} {tmp_path}/a & {script} {tmp_path}/b & wait"
    )
    for name in "ab":
        (tmp_path / name).mkdir()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err.count("whole step") == 2, err
    assert len(list_observed_jobs(tmp_path / "seen")) == 2


@pytest.mark.proof
def test_a_job_that_is_too_short_says_how_many_steps_it_had(tmp_path: Path) -> None:
    command = ("--", sys.executable, str(SCRIPTS / "reference.py"), "--epochs", "1", "--output-dir", str(tmp_path))
    process = start_observed(tmp_path / "seen", *command)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "only 0 of 10 steps could be timed" in err


@pytest.mark.proof
def test_a_user_without_a_home_trains_unobserved(tmp_path: Path) -> None:
    install_observer(tmp_path / "hooks", "~nobody-has-this-name/seen")
    script = [sys.executable, str(SCRIPTS / "reference.py"), "--epochs", "2", "--output-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "hooks")}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "no longer monitored" in done.stderr


def test_python_reads_the_observations(run: ScriptRanks, tmp_path: Path) -> None:
    run("plain_ddp.py", "--samples", 640, "--epochs", 1, plan=make_plan(tmp_path), world=2)
    (report,) = tula_cli.observed_jobs(tmp_path)
    assert (report.script, report.batch) == ("plain_ddp", 16)
    with pytest.raises(tula_cli.TulaError, match="no job of script other was observed"):
        tula_cli.observed_jobs(tmp_path, "other")
