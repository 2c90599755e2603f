"""The resume test of a script: its task, its stored result, and what a training does about it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import make_runs
import pytest
from make_results import make_inspection
from make_runs import FakeLauncher

import tula_cli as tula
from tula_cli.cluster.scripts.resume_test import require_resumable_script
from tula_cli.cluster.scripts.training import ScriptTraining
from tula_cli.errors import CannotResume, JobFailed, OverBudget, ResumeUntested, SpecError
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.imports import Source
from tula_cli.run.job_runs import open_run
from tula_cli.run.records.scripts import ObservedStart, ResumeTestResult
from tula_cli.run.records.tasks import JobSize, ResumeTestTask, Rung, TrainTask
from tula_cli.run.script_attempt import ResumeTestRecords
from tula_cli.services import messages, resume_test, status
from tula_cli.services.events import Event, Note, WarningEvent, run_work
from tula_cli.services.profile_plan import count_measured_node_hours
from tula_cli.services.waiting import Submission
from tula_cli.show import check as show_check
from tula_cli.show import status as show_status
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job
from tula_cli.spec.scripts.script import Length
from tula_cli.spec.signature import compute_resume_test_signature

RESUME = {"args": "--resume {checkpoint}", "checkpoint": "{out}/x.pth"}


def spec(**script: Any) -> JobSpec:
    settings = {
        "command": "python /nowhere/train.py -b {local_batch} --epochs {epochs}",
        "length": {"epochs": 90},
        "dataset_size": 1000,
        "reference": {"batch": 100},
        "code": "none",
        "resume": RESUME,
    }
    return validate_job({"name": "own", "script": settings | script, "cluster": {"gpus_per_node": 2}}, source="test")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, spec())


def code() -> Source:
    return Source(Path("/"), "")


def keep(
    run: RunDir, verdict: Any, job: JobSpec | None = None, *, number: int = 1, why: str = "KeyError: 'a'", **found: Any
) -> None:
    """Store the result of a resume test of the job."""
    key = compute_resume_test_signature(job or run.read_spec(), "")
    rehearsal = ResumeTestResult(
        task=f"rehearse-{key}-{number}", key=key, began_at=float(number), over_at=number + 1.0, verdict=verdict, told=(why,),
        faults=(why,) if verdict == "none" or found.get("other_nodes") is False else (), **found,
    )  # fmt: skip
    ResumeTestRecords(run.path).write_result(rehearsal)


def train_task(job: JobSpec, **changes: Any) -> TrainTask:
    return TrainTask(
        id="train-x-1", job="train-x", spec=job, workdir="/", nodes=2, signature="x", attempt=1,
        ladder=(Rung(batch=64),), workers=0, **changes,
    )  # fmt: skip


def training(run: RunDir, job: JobSpec, *, hours: float | None = 2.0, wanted: bool = True) -> resume_test.TrainingStart:
    predicted = None if hours is None else make_runs.prediction(2, 64, hours=hours)
    return resume_test.TrainingStart(Run(run.path, job), train_task(job), code(), predicted, wanted)


SIZES = tuple(JobSize(nodes=nodes, micro_batch=32 // nodes, splits=1, ladder=(Rung(batch=64),)) for nodes in (1, 2))


def on_granted_nodes(
    run: RunDir, job: JobSpec, *, wanted: bool = True, over_cap: str = ""
) -> resume_test.TrainingStart:
    """Return a short training whose jobs may be granted one node or two."""
    task = train_task(job, sizes=SIZES)
    return resume_test.TrainingStart(Run(run.path, job), task, code(), None, wanted, over_cap)


def prepared(result: resume_test.TrainingStart, launcher: FakeLauncher | None = None) -> tuple[str, list[Event]]:
    """Return the job that a training waits for, and what was said."""
    text: list[Event] = []
    launcher = launcher or FakeLauncher()
    submission = Submission(lambda _: launcher, lambda _: make_inspection(), lambda _: True, wait=False)
    return run_work(resume_test.run_resume_test_if_due(result, launcher, submission), text.append), text


# --- what can be tested


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (make_runs.spec(), "only jobs with a section script"),
        (spec(resume=None), "script.resume is missing"),
        (spec(resume={"args": "", "checkpoint": "/mine/x.pth"}), "must not overwrite your files"),
    ],
)
def test_a_job_that_cannot_be_tested_is_refused(tmp_path: Path, job: JobSpec, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        run_work(
            resume_test.run_resume_test([RunDir.from_spec(tmp_path, job)], lambda _: FakeLauncher()), lambda _: None
        )


def test_a_batch_has_a_half_and_is_that_of_the_recommendation_or_of_the_script(run: RunDir) -> None:
    assert resume_test.compute_resume_test_batch(Run(run.path, spec())) == 100
    assert resume_test.compute_resume_test_batch(Run(run.path, spec(reference={"batch": 3}))) == 4
    assert resume_test.compute_resume_test_batch(Run(run.path, spec()), local_batch=24) == 48
    on_other_nodes = [(25, 2, 48), (25, 4, 96), (1, 2, 4)]  # that of a rank is halved on twice the nodes
    for local_batch, nodes, batch in on_other_nodes:
        assert (
            resume_test.compute_resume_test_batch(Run(run.path, spec()), local_batch=local_batch, nodes=nodes) == batch
        )
    run.write_recommendation(make_runs.recommendation(choice=make_runs.prediction(2, 128)))
    assert resume_test.compute_resume_test_batch(Run(run.path, spec())) == 128


def test_what_was_found_is_not_tried_again_unless_that_is_wished(run: RunDir) -> None:
    keep(run, "epoch", why="it goes on")
    launcher = FakeLauncher()
    result = run_work(resume_test.run_resume_test([Run(run.path, spec())], lambda _: launcher), lambda _: None)
    assert (result.kept, result.resumes, launcher.submitted) == (True, "epoch", [])
    shown = list(show_check.render_resume_test(result))
    assert shown[-1] == "script.resume.batch: rehearse now means epoch" and "it goes on" in shown
    assert show_check.make_resume_test_data(result)["resumes"] == "epoch"
    other = spec(resume=RESUME | {"args": "--continue {checkpoint}"})
    assert resume_test.load_finding(Run(run.path, other), code()) is None, "it was another command line"


def test_what_each_start_had_left_to_train_is_shown(run: RunDir) -> None:
    begin = ObservedStart(
        phase="begin", batch=100, length=Length(epochs=3), whole=3000, ended="killed", seconds=2.0, steps=5, samples=500,
        first_lr=0.1, saved_samples=400,
    )  # fmt: skip
    later = begin.model_copy(update={"phase": "same", "saved_samples": None})
    half = later.model_copy(update={"phase": "half", "batch": 50, "whole": None, "first_lr": None})
    keep(run, "epoch", starts=(begin, later, half))
    result = run_work(resume_test.run_resume_test([Run(run.path, spec())], lambda _: FakeLauncher()), lambda _: None)
    columns = [list(column.cells) for column in next(show_check.render_resume_test(result)).columns]
    assert columns[1:6] == [
        ["100", "100", "50"], ["5"] * 3, ["500"] * 3, ["3000", "2600", "-"], ["0.1000", "0.1000", "-"],
    ]  # fmt: skip
    undecided = dataclasses.replace(
        result, rehearsal=result.rehearsal.model_copy(update={"verdict": None}), setting="same"
    )
    assert "it is unknown at which batch sizes the script can resume" in list(show_check.render_resume_test(undecided))


def test_python_has_what_the_command_finds(run: RunDir) -> None:
    keep(run, "epoch")
    result = tula.rehearse(spec(), root=run.path.parent, on_event=lambda _: None)
    assert (result.kept, result.resumes) == (True, "epoch")
    with pytest.raises(SpecError, match="only jobs with a section script"):
        tula.rehearse(make_runs.spec(), root=run.path.parent)


def test_the_same_rehearsal_is_submitted_once(run: RunDir) -> None:
    launcher, part = FakeLauncher(), Run(run.path, spec())
    first = resume_test.submit_resume_test(part, launcher, code(), batch=None)
    assert resume_test.submit_resume_test(part, launcher, code(), batch=None) == first
    launcher.says[first.job] = "ended"
    second = resume_test.submit_resume_test(part, launcher, code(), batch=None)
    assert launcher.submitted == [first.job, second.job] and second.id.endswith("-2")
    assert isinstance(run.read_task(first.id), ResumeTestTask) and (first.nodes, first.batch) == (1, 100)


def test_status_shows_a_rehearsal_while_it_runs_and_what_it_found(run: RunDir) -> None:
    launcher = FakeLauncher()
    task = resume_test.submit_resume_test(Run(run.path, spec()), launcher, code(), batch=None)
    now = status.read_run_status(run, launcher, now=make_runs.START)
    assert [(job.id, job.kind, job.state) for job in now.jobs] == [(task.job, "rehearse", "running")]
    keep(run, "none")
    launcher.says[task.job] = "ended"
    now = status.read_run_status(run, launcher, now=make_runs.START)
    assert now.jobs[0].state == "done" and now.rehearsal is not None and now.rehearsal.verdict == "none"
    assert [line for line in show_status.render_status(now) if "none; KeyError: 'a'" in str(line)]


def test_what_found_nothing_out_is_no_success(run: RunDir) -> None:
    keep(run, None, why="not tested: no checkpoint within 30 s")
    nothing = resume_test.ResumeTestFinding(
        ResumeTestRecords(run.path).read_results_of_script(compute_resume_test_signature(run.read_spec(), ""))[0],
        "rehearse",
        kept=False,
    )
    with pytest.raises(ResumeUntested, match="was inconclusive: not tested: no checkpoint within 30 s") as error:
        nothing.require_found("job.yaml")
    assert error.value.exit_code == 12
    nothing.require_resumable_script("job.yaml", "")
    keep(run, "same", number=2)
    resume_test.load_finding(open_run(run), code()).require_found("job.yaml")  # type: ignore[union-attr]


def capped(run: RunDir, *, hours: float) -> JobSpec:
    """Return the job with a cap on node-hours, of which a resume test has taken half an hour."""
    job = run.read_spec().model_copy(
        update={"search": run.read_spec().search.model_copy(update={"max_node_hours": hours})}
    )
    task = resume_test.submit_resume_test(Run(run.path, job), FakeLauncher(), code(), batch=None)
    run.write_attempt(make_runs.attempt(task.id, start=make_runs.START, end=make_runs.START + 1800))
    assert count_measured_node_hours(run) == 0.5
    return job


def test_a_rehearsal_counts_to_the_cap_on_node_hours(run: RunDir) -> None:
    job = capped(run, hours=0.6)
    with pytest.raises(OverBudget, match=r"so far \(0.500 node-hours\) and a resume test may take 0.833"):
        run_work(
            resume_test.run_resume_test([Run(run.path, job)], lambda _: FakeLauncher(), fresh=True), lambda _: None
        )
    assert "a resume test may take 1.17" in resume_test.describe_resume_test_over_cap([Run(run.path, job)], nodes=2)
    enough = job.model_copy(update={"search": job.search.model_copy(update={"max_node_hours": 9.0})})
    assert resume_test.describe_resume_test_over_cap([Run(run.path, enough)]) == ""


def test_a_training_is_not_kept_back_by_a_rehearsal_that_may_not_be_paid_for(run: RunDir) -> None:
    over = "a resume test may take too much"
    result = dataclasses.replace(training(run, run.read_spec()), over_cap=over)
    job, text = prepared(result)
    assert (result.is_test_due, job) == (False, "")
    assert [event.text for event in text if isinstance(event, WarningEvent)] == [
        messages.resume_untested(reason=over).text
    ]


# --- before a training


def test_a_rehearsal_comes_once_before_the_first_long_training(run: RunDir) -> None:
    job = run.read_spec()
    assert training(run, job).is_test_due
    for other in (
        training(run, job, hours=0.9), training(run, job, hours=None), training(run, job, wanted=False),
        training(run, spec(resume=None)), training(run, spec(resume={"args": "", "checkpoint": "/mine/x"})),
    ):  # fmt: skip
        assert not other.is_test_due
    run.write_attempt(make_runs.attempt("train-x-1"))
    assert not training(run, job).is_test_due, "it has begun"
    (run.path / "attempts" / "train-x-1.001.json").unlink()
    keep(run, None)
    assert not training(run, job).is_test_due, "somebody has looked"


def test_a_training_that_nobody_waits_for_is_submitted_behind_its_rehearsal(run: RunDir) -> None:
    launcher = FakeLauncher()
    job, text = prepared(training(run, run.read_spec()), launcher)
    assert [job] == launcher.submitted and run.read_task(job).batch == 32  # type: ignore[union-attr]
    assert isinstance(text[-1], Note) and f"starts after {job}" in text[-1].text
    keep(run, "none")
    with pytest.raises(JobFailed, match="cannot resume after an interruption: KeyError"):
        require_resumable_script(run, train_task(run.read_spec(), after=job))
    require_resumable_script(run, train_task(run.read_spec()))


def test_a_long_training_by_a_script_that_cannot_resume_is_refused_until_that_is_wished(run: RunDir) -> None:
    keep(run, "none")
    with pytest.raises(CannotResume, match="KeyError") as error:
        prepared(training(run, run.read_spec()))
    assert error.value.exit_code == 11 and "--no-rehearse" in error.value.hint
    for result in (training(run, run.read_spec(), wanted=False), training(run, run.read_spec(), hours=0.5)):
        job, text = prepared(result)
        assert job == "" and isinstance(text[0], WarningEvent) and text[0].warning.code == "script-cannot-resume"


def test_a_training_on_nodes_that_it_is_granted_is_submitted_behind_a_test_on_twice_the_ranks(run: RunDir) -> None:
    launcher, job = FakeLauncher(), run.read_spec()
    keep(run, "any")  # on one node, which is not enough
    start = on_granted_nodes(run, job)
    start.require_resume_on_other_nodes()
    name, _ = prepared(start, launcher)
    task = run.read_task(name)
    assert isinstance(task, ResumeTestTask) and launcher.submitted == [name]
    assert (task.nodes, task.first_nodes, task.batch) == (2, 1, 32)


def test_a_training_on_nodes_that_it_is_granted_needs_a_script_that_resumes_there(run: RunDir) -> None:
    job = run.read_spec()
    keep(run, "any", other_nodes=True)
    assert not on_granted_nodes(run, job).is_test_due and prepared(on_granted_nodes(run, job)) == ("", [])
    on_granted_nodes(run, job).require_resume_on_other_nodes()
    on_granted_nodes(run, job, wanted=False).require_resume_on_other_nodes()
    keep(run, "any", other_nodes=False, number=2)
    with pytest.raises(CannotResume, match="KeyError: 'a'"):
        on_granted_nodes(run, job).require_resume_on_other_nodes()
    unknown = ResumeTestResult(task="t", key="k", began_at=0.0, verdict="any", told=("not tested: no memory",))
    with pytest.raises(ResumeUntested, match="no memory"):
        resume_test.ResumeTestFinding(unknown, "same", kept=False).require_resume_on_other_nodes()


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ({"resume": None}, {}, "the test needs script.resume"),
        ({}, {"wanted": False}, "--no-rehearse prevents the test"),
        ({}, {"over_cap": "a resume test may take too much"}, "a resume test may take too much"),
    ],
)
def test_a_range_of_nodes_is_refused_if_the_script_cannot_be_tested(
    run: RunDir, script: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words) as error:
        on_granted_nodes(run, spec(**script), **options).require_resume_on_other_nodes()
    assert error.value.hint.endswith("or give one number, for example --nodes 4")


@pytest.mark.parametrize(
    ("setting", "verdict", "code"),
    [
        ("any", "epoch", "resume-setting-too-free"),
        ("same", "any", ""),
        ("rehearse", "same", ""),
        ("epoch", None, "resume-test-inconclusive"),
    ],
)
def test_what_is_set_is_held_against_what_was_found(run: RunDir, setting: Any, verdict: Any, code: str) -> None:
    rehearsal = ResumeTestResult(task="t", key="k", began_at=0.0, verdict=verdict, told=("KeyError: 'a'",))
    finding_events = list(
        resume_test._list_finding_events(resume_test.ResumeTestFinding(rehearsal, setting, kept=True))
    )
    assert [event.warning.code for event in finding_events if isinstance(event, WarningEvent)] == [code] * bool(code)


@pytest.mark.parametrize(
    ("setting", "verdict", "goes_on"),
    [
        ("rehearse", "any", "any"), ("rehearse", "epoch", "epoch"), ("rehearse", None, "same"), ("rehearse", "none", "none"),
        ("any", "same", "any"), ("any", "none", "none"), ("same", "any", "same"),
    ],
)  # fmt: skip
def test_a_relaunch_goes_on_as_was_found(run: RunDir, setting: Any, verdict: Any, goes_on: str) -> None:
    job = spec(resume=RESUME | {"batch": setting})
    keep(run, verdict, job)
    assert ScriptTraining(run, train_task(job)).allowed_resume_batch == goes_on


def test_records_go_through_their_files(run: RunDir) -> None:
    start = ObservedStart(phase="begin", batch=8, length=Length(epochs=3), whole=None, ended="killed", seconds=1.0)
    rehearsal = ResumeTestResult(task="rehearse-k-1", key="k", began_at=0.0, starts=(start,))
    ResumeTestRecords(run.path).write_result(rehearsal)
    assert (
        ResumeTestRecords(run.path).read_result("rehearse-k-1") == rehearsal
        and ResumeTestRecords(run.path).find_newest_verdict("k") is None
    )
    assert json.loads((run.path / "script" / "rehearse-k-1.json").read_text())["starts"][0]["length"]["epochs"] == 3


@pytest.mark.parametrize(("nodes", "needed"), [((2,), 1), ((1, 2), 2), ((2, 3), 2), ((2, 4), 4), ((3, 8), 4)])
def test_a_resume_test_needs_no_more_nodes_than_the_range(nodes: tuple[int, ...], needed: int) -> None:
    sizes = tuple(JobSize(nodes=count, micro_batch=8, splits=1, ladder=(Rung(batch=64),)) for count in nodes)
    job = spec()
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"gpus_per_node": 1})})
    assert train_task(job, sizes=sizes).resume_test_nodes == needed
