"""`tula compare --learning-rates` as a service: the plan, the job, and the report."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from make_results import make_inspection
from make_runs import FakeLauncher

from tula_cli.errors import BadMeasurements, Diverged, JobFailed, OverBudget, SpecError
from tula_cli.run.code import choose_code
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.results import JobFile, RateBranch, RateSearch
from tula_cli.run.records.scripts import ObservedStart, ResumeTestResult, Verdict
from tula_cli.run.records.tasks import RateSearchTask
from tula_cli.run.script_attempt import ResumeTestRecords
from tula_cli.services.comparison import learning_rates
from tula_cli.services.comparison.learning_rates import LearningRateReport
from tula_cli.services.events import Note, RateSearchPlanned, WarningEvent, run_work
from tula_cli.services.plans import LearningRateSearchPlan
from tula_cli.services.waiting import DetachedJobs, Submission
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job
from tula_cli.spec.scripts.script import Length
from tula_cli.spec.signature import compute_resume_test_signature

FILE = JobFile(path=str(Path("job.yaml").absolute()))
JOB = make.spec(train={"epochs": 100, "method": "lrs", "reference_batch": 16})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, JOB)


def submission(launcher: FakeLauncher, *, wait: bool, confirm: bool = True) -> Submission:
    return Submission(lambda _: launcher, lambda _: make_inspection(), lambda _: confirm, wait, job=Path(FILE.path))


def prepare(run: RunDir, job: JobSpec = JOB, **request: Any) -> tuple[LearningRateSearchPlan, list[Any]]:
    events: list[Any] = []
    request = {"batch": 64, "nodes": 1, **request}
    work = learning_rates.prepare_rate_search([Run(run.path, job)], lambda _: make_inspection(), **request)
    return run_work(work, events.append), events


def record(task: RateSearchTask, *losses: float | None, finished: bool = True) -> RateSearch:
    """Return what a search found: a loss for each learning rate in turn, then for each other batch; None: diverged."""
    places = [(64, "none", 1.0), (64, "sqrt", 2.0), (64, "linear", 4.0), (32, "sqrt", 2.0**0.5), (128, "sqrt", 8**0.5)]
    branches = [
        RateBranch(
            arm="a",
            epochs=0.1,
            samples=100,
            loss=loss,
            top1=90.0,
            diverged=loss is None,
            seconds=1.0,
            batch=batch,
            rule=rule,
            factor=factor,
            lr=0.1 * factor,
        )
        for loss, (batch, rule, factor) in zip(losses, places, strict=False)
    ]
    return RateSearch(
        key=task.key, nodes=1, batches=task.batches, reference_batch=16, samples=800, total=10_000, start_epoch=2.0,
        start_loss=1.0, noise=(300.0, 250.0, None), branches=tuple(branches), finished=finished,
    )  # fmt: skip


class Ends(FakeLauncher):
    """A launcher whose job has ended when it is submitted: with losses, and a failure if it did not finish."""

    def __init__(self, *losses: float | None, outcome: str = "") -> None:
        super().__init__()
        self.losses, self.outcome = losses, outcome

    def submit(self, run: RunDir, task: RateSearchTask) -> Any:  # type: ignore[override]
        job = super().submit(run, task)  # type: ignore[arg-type]
        self.says[task.job] = "ended"
        failure = {"failure": Failure(outcome=self.outcome, message="no memory left")} if self.outcome else {}  # type: ignore[arg-type]
        run.write_attempt(make.attempt(task.id, end=make.START + 9, outcome=self.outcome or "done", **failure))
        if self.losses:
            run.write_rate_search(record(task, *self.losses, finished=not self.outcome))
        return job


def search(run: RunDir, launcher: FakeLauncher, *, wait: bool = True, confirm: bool = True, **request: Any) -> Any:
    """Return the result of a search and its events."""
    events: list[Any] = []
    prepared, _ = prepare(run, **request)
    work = learning_rates.run_rate_search(prepared, submission(launcher, wait=wait, confirm=confirm))
    return run_work(work, events.append), events


def report(run: RunDir, launcher: FakeLauncher, **request: Any) -> LearningRateReport:
    result, _ = search(run, launcher, **request)
    assert isinstance(result, LearningRateReport)
    return result


# --- the plan


def test_the_plan_has_the_cost_as_a_share_of_a_training(run: RunDir) -> None:
    prepared, events = prepare(run)
    assert [arm.factor for arm in prepared.arms] == [1.0, 2.0, 4.0]
    assert prepared.task.batches == (64,)
    assert 0 < prepared.plan.training_share < 0.1
    assert prepared.node_hours is None, "nothing was measured"
    assert events == []
    assert prepare(run, near_batches=True)[0].task.batches == (64, 32, 128)


def test_after_measurements_the_plan_has_hours(run: RunDir) -> None:
    for local in (16, 32, 64, 128):
        make.add_measured(run, 1, local)
    prepared, _ = prepare(run)
    assert prepared.training_hours is not None
    assert prepared.hours == prepared.node_hours == prepared.plan.training_share * prepared.training_hours
    section = {"nodes": [1, 2], "max_node_hours": prepared.node_hours / 2}
    capped = make.spec(train={"epochs": 100, "method": "lrs", "reference_batch": 16}, search=section)
    launcher = FakeLauncher()
    work = learning_rates.run_rate_search(prepare(run, capped)[0], submission(launcher, wait=False))
    with pytest.raises(OverBudget, match="search for a learning rate may take"):
        run_work(work, lambda _: None)
    assert not launcher.submitted


def test_an_expensive_search_of_a_short_training_is_warned_of(run: RunDir) -> None:
    job = make.spec(train={"epochs": 1, "method": "lrs", "reference_batch": 16})
    prepared, (warning,) = prepare(run, job, batch=1024)
    assert isinstance(warning, WarningEvent)
    assert not isinstance(warning.warning, str)
    assert warning.warning.code == "expensive-rate-search"
    assert warning.warning.values["share"] == prepared.plan.training_share


def test_the_search_is_the_same_whatever_the_job_s_rule(run: RunDir) -> None:
    with_rule = make.spec(train={"epochs": 100, "method": "lrs", "reference_batch": 16, "lr_scaling": "sqrt"})
    assert prepare(run, with_rule)[0].task.key == prepare(run)[0].task.key
    assert prepare(run, batch=128)[0].task.key != prepare(run)[0].task.key


# --- a script


RESUME = {"args": "--resume {checkpoint}", "checkpoint": "{out}/last.pt"}
EPOCHS: dict[str, Any] = {"length": {"epochs": 60}, "dataset_size": 1600}


def script_job(resume: Any = (), **script: Any) -> JobSpec:
    """Return a job whose script resumes at any batch; `resume` and `script` are changes."""
    settings = {
        "command": "python /home/me/train.py -b {batch} --lr {lr}",
        "code": "none",
        "reference": {"batch": 16, "lr": 0.1},
        "resume": None if resume is None else {**RESUME, "batch": "any", **dict(resume)},
        **EPOCHS,
        **script,
    }
    return validate_job({"name": "own", "script": settings, "search": {"nodes": [1]}}, source="test")


def write_resume_test(
    run: RunDir, job: JobSpec, verdict: Verdict, *, saved: int | None = None, batch: int = 16
) -> None:
    """Write the result of a resume test of the script, with the code that the search finds."""
    key = compute_resume_test_signature(job, choose_code(run, job, Path.cwd(), keep=False).digest)
    begin = ObservedStart(
        phase="begin",
        batch=batch,
        length=Length(epochs=3),
        whole=4800,
        ended="killed",
        seconds=1.0,
        saved_samples=saved,
    )
    result = ResumeTestResult(
        task=f"rehearse-{key}-1",
        key=key,
        began_at=0.0,
        over_at=1.0,
        starts=(begin,),
        verdict=verdict,
        faults=("it counts steps",),
    )
    ResumeTestRecords(run.path).write_result(result)


@pytest.mark.parametrize(
    ("job", "verdict", "reason"),
    [
        (script_job(resume=None), None, "script.resume is missing"),
        (script_job(command="train.py -b {batch}", reference={"batch": 16}), None, "neither {lr} nor {lr_factor}"),
        (script_job(resume={"batch": "rehearse"}), None, "unknown whether the script can resume at another batch"),
        (
            script_job(resume={"batch": "rehearse"}),
            "same",
            "the script cannot resume at another batch (it counts steps)",
        ),
        (script_job(resume={"batch": "same"}), None, "script.resume.batch: same"),
        (script_job(), "none", "the script cannot resume at another batch (it counts steps)"),
        (script_job(reference={"batch": 15, "lr": 0.1}, launch="node"), None, "15 is not divisible by 2"),
        (script_job(length={"epochs": 4}, dataset_size="auto"), None, "the number of samples per epoch is unknown"),
        (script_job(dataset_size=10), None, "script.reference.batch 16 is larger than an epoch of 10 samples"),
    ],
)
def test_a_script_that_cannot_be_branched_is_refused_with_what_to_do(
    tmp_path: Path, job: JobSpec, verdict: Verdict | None, reason: str
) -> None:
    run = RunDir.create(tmp_path, job)
    if verdict is not None:
        write_resume_test(run, job, verdict)
    with pytest.raises(SpecError, match=re.escape(reason)) as error:
        prepare(run, job, nodes=2 if "divisible" in reason else 1)
    assert error.value.message.startswith("tula cannot start short trainings of the script from its checkpoint: ")
    assert "tula compare --methods lbt,sqrt,lrs" in error.value.hint
    assert ("--nodes 1" in error.value.hint) == ("divisible" in reason)


def test_fewer_nodes_are_not_advised_if_the_batch_does_not_divide_on_one(tmp_path: Path) -> None:
    job = script_job(reference={"batch": 15, "lr": 0.1}, launch="node")
    job = validate_job({**job.model_dump(exclude_unset=True), "cluster": {"gpus_per_node": 2}}, source="test")
    with pytest.raises(SpecError, match="15 is not divisible by 2") as error:
        prepare(RunDir.create(tmp_path, job), job)
    assert error.value.hint.startswith("set script.reference to the settings of a batch that is divisible by 2; ")


def test_a_checkpoint_outside_of_the_folder_of_the_script_is_not_overwritten(tmp_path: Path) -> None:
    job = script_job(resume={"checkpoint": "last.pt"})
    with pytest.raises(SpecError, match=r"must be in \{out\}"):
        prepare(RunDir.create(tmp_path, job), job)


@pytest.mark.parametrize(
    ("job", "verdict", "saved", "start"),
    [
        (script_job(), None, None, 1600),  # 2 % of 96,000 are 1920; it is taken to save once per epoch
        (script_job(save="SIGUSR1"), None, None, 1920),  # a checkpoint is requested
        (script_job(save="SIGUSR1", resume={"batch": "rehearse"}), "epoch", 1600, 1600),
        (script_job(resume={"batch": "rehearse"}), "any", 400, 2000),  # the fifth of its checkpoints
        (script_job(length={"samples": 96_000}, dataset_size="auto"), None, None, 1920),
    ],
)
def test_branches_of_a_script_start_from_one_of_its_own_checkpoints(
    tmp_path: Path, job: JobSpec, verdict: Verdict | None, saved: int | None, start: int
) -> None:
    run = RunDir.create(tmp_path, job)
    if verdict is not None:
        write_resume_test(run, job, verdict, saved=saved)
    prepared, _ = prepare(run, job)
    plan = prepared.plan
    assert (plan.start, plan.length, plan.total, plan.noise_batches) == (start, 1920, 96_000, 0)
    assert plan.samples == start + 3 * 1920 and plan.training_share < 0.1
    assert [arm.factor for arm in prepared.arms] == [1.0, 2.0, 4.0]
    near = prepare(run, job, near_batches=True)[0]
    assert near.task.batches == (64, 32, 128) and near.plan.training_share <= 0.1


@pytest.mark.parametrize(
    ("tested_batch", "saved", "start"),
    [
        (8, 600, 2400),  # each 75 steps, which are 1,200 samples at the reference batch of 16
        (12, 1596, 1600),  # at the end of an epoch, whose last 4 samples it drops
    ],
)
def test_checkpoints_of_a_resume_test_are_converted_to_the_batch_that_branches_start_at(
    tmp_path: Path, tested_batch: int, saved: int, start: int
) -> None:
    job = script_job(resume={"batch": "rehearse"})
    run = RunDir.create(tmp_path, job)
    write_resume_test(run, job, "any", saved=saved, batch=tested_batch)
    assert prepare(run, job)[0].plan.start == start


def test_the_report_of_a_script_says_what_its_losses_are_and_where_its_learning_rate_was_too_low(
    tmp_path: Path,
) -> None:
    job = script_job()
    run = RunDir.create(tmp_path, job)
    prepared, _ = prepare(run, job)
    for start_lr, warnings in ((0.1, []), (0.05, ["branches-below-learning-rate"])):
        unknown_noise = {"start_lr": start_lr, "noise": None}
        run.write_rate_search(record(prepared.task, 0.5, 0.3, 0.32).model_copy(update=unknown_noise))
        result = learning_rates.read_search_report(prepared, FILE)
        assert [warning.code for warning in result.warnings] == warnings
    assert not result.held_out and result.overrides == ("train.lr_scaling=linear",)
    assert "only if the script uses DDP" in learning_rates.describe_critical_batch(result)
    run.write_rate_search(record(prepared.task, 0.5, 0.3, 0.32))
    measured = learning_rates.read_search_report(prepared, FILE)
    assert learning_rates.describe_critical_batch(measured).endswith("300 (90 % interval: at least 250)")
    bounded = replace(measured, critical_batch=(250.0, 250.0, None))
    assert learning_rates.describe_critical_batch(bounded).endswith("at least 250 (95 % bound)")


# --- the job


def test_the_search_is_confirmed_submitted_and_reported(run: RunDir) -> None:
    launcher = Ends(0.5, 0.3, 0.32)
    result, events = search(run, launcher)
    assert isinstance(events[0], RateSearchPlanned)
    assert (result.chosen.rule, result.overrides) == ("linear", ("train.lr_scaling=linear",))
    assert result.command == "tula train job.yaml --nodes 1 --batch 64 --set train.lr_scaling=linear"
    assert (result.share, result.critical_batch, result.best_batch) == (0.08, (300.0, 250.0, None), None)
    assert list(result.frame()["loss"]) == [0.5, 0.3, 0.32]
    earlier = FILE.model_copy(update={"overrides": ("train.epochs=60", "train.lr_scaling=sqrt")})
    command = learning_rates.read_search_report(prepare(run)[0], earlier).command
    assert command.endswith(" --set train.epochs=60 --set train.lr_scaling=linear"), "with the settings of the search"
    spaced = learning_rates.read_search_report(
        prepare(run)[0], FILE.model_copy(update={"path": str(Path("my job.yaml").absolute())})
    )
    assert spaced.command.startswith("tula train 'my job.yaml' --nodes 1 ")
    again, events = search(run, launcher)
    assert again == result
    assert [type(event) for event in events] == [Note]
    assert len(launcher.submitted) == 1


def test_nothing_is_submitted_unless_confirmed(run: RunDir) -> None:
    launcher = Ends(0.5, 0.3, 0.32)
    with pytest.raises(OverBudget):
        search(run, launcher, confirm=False)
    assert not launcher.submitted


def test_a_job_that_runs_is_attached_to(run: RunDir) -> None:
    launcher = FakeLauncher()
    first, _ = search(run, launcher, wait=False)
    second, _ = search(run, launcher, wait=False)
    assert isinstance(first, DetachedJobs)
    assert second.under_way == first.jobs
    assert len(launcher.submitted) == 1


# --- the report


def test_at_the_reference_learning_rate_the_method_without_a_rule_is_named(run: RunDir) -> None:
    result = report(run, Ends(0.3, None, None))
    assert result.overrides == ("train.method=lbt",)
    assert result.answer == "Use the learning rate of batch 16 at batch 64: 0.100."


def test_the_largest_batch_with_a_close_loss_is_reported(run: RunDir) -> None:
    assert report(run, Ends(0.5, 0.3, 0.9, 0.28, 0.32), near_batches=True).best_batch == 128
    assert report(run, Ends(0.5, 0.3, 0.9, 0.28, 0.32), near_batches=True).too_large is None


def test_a_batch_that_does_not_fit_after_the_one_in_question_is_reported_and_not_tried_again(run: RunDir) -> None:
    launcher = Ends(0.5, 0.3, 0.9, 0.28, outcome="device_oom")
    assert report(run, launcher, near_batches=True).too_large == 128
    assert report(run, launcher, near_batches=True).best_batch == 64
    assert len(launcher.submitted) == 1


def test_where_every_learning_rate_diverges_the_search_fails_as_a_training_would(run: RunDir) -> None:
    with pytest.raises(Diverged, match="all learning rates diverged at batch 64"):
        search(run, Ends(None, None, None))


def test_a_failed_job_is_an_error_and_the_same_command_goes_on(run: RunDir) -> None:
    with pytest.raises(JobFailed, match="no memory left"):
        search(run, Ends(0.5, outcome="user"))
    result = report(run, Ends(0.5, 0.3, 0.32))
    assert result.chosen.rule == "linear" and not result.warnings


def test_branches_that_hardly_learn_give_a_warning(run: RunDir) -> None:
    assert [warning.code for warning in report(run, Ends(0.999, 0.995, 0.997)).warnings] == ["branches-learned-little"]


def test_each_branch_is_reported_once_when_it_ends_and_known_ones_with_the_plan(run: RunDir) -> None:
    class Trains(FakeLauncher):
        """A launcher whose job ends a branch at every look."""

        def submit(self, run: RunDir, task: RateSearchTask) -> Any:  # type: ignore[override]
            self.task = task
            return super().submit(run, task)  # type: ignore[arg-type]

        def query_states(self, snapshot: Any, jobs: Any) -> Any:
            if self.submitted:
                known = run.read_rate_search(self.task.key)
                losses = (0.5, 0.4, 0.3)[: len(known.branches) + 1 if known else 1]
                run.write_rate_search(record(self.task, *losses, finished=len(losses) == 3))
                self.says[self.task.job] = "ended" if len(losses) == 3 else "running"
                if len(losses) == 3:
                    run.write_attempt(make.attempt(self.task.id, end=make.START + 9))
            return super().query_states(snapshot, jobs)

    prepared, _ = prepare(run)
    run.write_rate_search(record(prepared.task, 0.5, finished=False))
    _, events = search(run, Trains())
    notes = [event.text for event in events if isinstance(event, Note)]
    assert [note.partition(":")[0] for note in notes] == [
        "1 of 3 branches have already been trained",
        "branch 2 of 3",
        "branch 3 of 3",
    ]


def test_without_a_search_there_is_nothing_to_show(run: RunDir) -> None:
    with pytest.raises(BadMeasurements, match="there is no search for a learning rate at batch 64 on 1 node yet"):
        learning_rates.read_search_report(prepare(run)[0])


def test_searches_with_other_options_are_named_where_there_is_none_to_show(run: RunDir) -> None:
    for request in ({"batch": 32}, {"near_batches": True}):
        task = prepare(run, **request)[0].task
        run.write_task(task)
        run.write_rate_search(record(task, 0.3))
    with pytest.raises(BadMeasurements) as error:
        learning_rates.read_search_report(prepare(run)[0])
    _, *others = error.value.hint.split("; ")
    assert {other.partition(": ")[2] for other in others} == {
        "--learning-rates --batch 32 --nodes 1",
        "--batches --batch 64 --nodes 1",
    }
