"""The estimate of a start by sbatch --test-only, on the fake SLURM."""

import io
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, format_time
from make_results import Truth, make_probes, make_spec

import tula_cli as tula
from tula_cli.cli import app
from tula_cli.cluster.slurm.scheduler import make_sbatch_environment
from tula_cli.cluster.slurm.submit import estimate_job_start
from tula_cli.query import Query
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.job_runs import open_runs_of_job
from tula_cli.run.records.recommendations import StartEstimate
from tula_cli.services import recommend as services_recommend
from tula_cli.show.screen import Screen

NOW = 1_700_000_000.0


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path / "slurm")
    fake.use(monkeypatch)
    return fake


@pytest.fixture
def run(tmp_path):
    cluster = {"kind": "slurm", "minutes": 240, "slurm": {"partition": "gpu"}}
    job = make_spec(search={"max_batch": 4096}, cluster=cluster)
    measured = RunDir.create(tmp_path, job)
    for result in make_probes(Truth(noise=0.01), {1: (16, 64, 256), 2: (16, 64, 256), 4: (8,)}):
        measured.write_result(result)
    return measured


def files(run: RunDir) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_the_scheduler_is_asked_with_the_script_of_the_training_and_nothing_is_submitted(slurm, run, monkeypatch):
    scripts = []

    def environment(script: Path) -> dict[str, str]:
        scripts.append(script.read_text())
        return make_sbatch_environment(script)

    monkeypatch.setattr("tula_cli.cluster.slurm.submit.make_sbatch_environment", environment)
    slurm.fault(starts=format_time(NOW + 1800))
    before = files(run)
    estimate = estimate_job_start(Run(run.path, run.read_spec()), nodes=2, batch=512, now=NOW)
    assert estimate == StartEstimate(nodes=2, minutes=240, asked_at=NOW, wait=1800)
    (call,) = slurm.calls("sbatch")
    assert call.arguments[0] == "--test-only" and slurm.jobs() == []
    (script,) = scripts
    assert "#SBATCH --time=240" in script and "#SBATCH --nodes=2" in script and "#SBATCH --partition=gpu" in script
    assert files(run) == before, "a look writes nothing"


def test_a_start_that_has_passed_is_no_wait(slurm, run):
    slurm.fault(starts=format_time(NOW - 60))
    estimate = estimate_job_start(Run(run.path, run.read_spec()), nodes=2, batch=512, now=NOW)
    assert estimate is not None and estimate.wait == 0


def test_a_refusal_is_an_estimate_without_a_start_and_with_its_reason(slurm, run):
    slurm.fault(sbatch=["refuse:Batch job submission failed: Requested node configuration is not available"])
    estimate = estimate_job_start(Run(run.path, run.read_spec()), nodes=2, batch=512, now=NOW)
    assert estimate is not None and estimate.wait is None
    assert estimate.reason == "Batch job submission failed: Requested node configuration is not available"


def test_without_sbatch_there_is_no_estimate(slurm, run):
    slurm.without("sbatch")
    assert estimate_job_start(Run(run.path, run.read_spec()), nodes=2, batch=512, now=NOW) is None


def test_a_plan_for_many_trainings_does_not_ask_for_the_start_of_a_single_one(slurm, run):
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    assert app.run(["recommend", "--run", str(run.path), "--trainings", "3", "--json"], screen=screen) == 0
    assert tula.plan_trainings(run.path, trainings=3).trainings == 3
    assert slurm.calls("sbatch") == []


def test_a_recommendation_has_the_estimate_of_its_choice_which_has_no_part_in_it(slurm, run):
    slurm.fault(starts=format_time(NOW + 1800))
    answer = services_recommend.recommend_configuration(
        open_runs_of_job(run), Query(objective="time", max_nodes=2), now=NOW
    )
    plain, recommendation = answer.recommendation, services_recommend.add_start_estimate(answer).recommendation
    assert plain.start_estimate is None and plain.choice == recommendation.choice
    assert (
        recommendation.start_estimate is not None and recommendation.start_estimate.nodes == recommendation.choice.nodes
    )
    assert recommendation.start_estimate.minutes == 240
    (call,) = slurm.calls("sbatch")
    assert "--test-only" in call.arguments
