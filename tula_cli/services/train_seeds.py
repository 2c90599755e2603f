"""`tula train --seeds`: the trainings of a plan, each with a seed of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.cluster.inspection import Inspect
from tula_cli.cluster.launcher import Launcher, list_unfinished_jobs
from tula_cli.errors import Diverged, JobFailed, OverBudget, Pending, SpecError, TulaError
from tula_cli.models.choice.campaign import Campaign, ScheduledTraining
from tula_cli.models.choice.node_schedule import is_within_limit
from tula_cli.options import TrainRequest
from tula_cli.query import Query
from tula_cli.run.code import choose_code, list_code_changes
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.format import require_current_format
from tula_cli.run.frames import make_frame
from tula_cli.run.job_runs import select_runs
from tula_cli.run.records.results import Summary
from tula_cli.services import messages
from tula_cli.services.campaign import load_campaign, plan_campaign, save_campaign
from tula_cli.services.compare import cache_first_inspection
from tula_cli.services.events import Note, SeedsPlanned, WarningEvent, Work
from tula_cli.services.plans import TrainPlan
from tula_cli.services.resume_test import TrainingStart, run_resume_test_if_due
from tula_cli.services.site_charges import add_site_billing_to_run
from tula_cli.services.train import plan_training, submit_training
from tula_cli.services.training_end import MAX_FIRST_FAILURES, load_summary
from tula_cli.services.waiting import Submission, explain_interruption, wait_for_jobs, warn_about_submitted_jobs
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_train_signature
from tula_cli.words import describe_files, format_count, format_number, join_words

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class SeedTraining:
    """One training of a plan, in the order of the plan."""

    seed: int
    nodes: int
    batch: int
    signature: str
    summary: Summary | None  # None until it has finished
    problem: str  # why it failed; empty if it did not

    @property
    def job_id(self) -> str:
        return f"train-{self.signature}"

    @property
    def is_over(self) -> bool:
        """Whether it has finished or failed."""
        return self.summary is not None or bool(self.problem)


@dataclass(frozen=True)
class SeedsReport:
    """The trainings of a plan so far."""

    plan: Campaign
    trainings: tuple[SeedTraining, ...]
    cost: float  # cost of the finished trainings

    def frame(self) -> "pd.DataFrame":
        """Return a table with one row per training; hours and cost are missing until it has finished."""
        return make_frame(
            [
                {
                    **{key: value for key, value in asdict(row).items() if key != "summary"},
                    "hours": row.summary and row.summary.actual_hours,
                    "cost": row.summary and row.summary.actual_cost,
                }
                for row in self.trainings
            ]
        )

    def require_none_failed(self) -> None:
        """Raise JobFailed if trainings have failed and all are over."""
        failed = [row.problem for row in self.trainings if row.problem]
        if failed and all(row.is_over for row in self.trainings):
            raise JobFailed(
                f"{len(failed)} of {format_count(len(self.trainings), 'training')} failed: {failed[0]}",
                "read their output with tula logs; run the same command to start them again",
            )


@dataclass(frozen=True)
class PreparedSeeds:
    """The trainings of a plan before anything is submitted."""

    runs: Sequence[Run]  # runs of the job, one per node type
    run: Run  # run of the node type to train on
    plan: Campaign
    trainings: tuple[SeedTraining, ...]
    first: TrainPlan | None  # plan of the first unfinished training; None if all have finished
    request: TrainRequest
    inspect: Inspect

    @property
    def missing_trainings(self) -> tuple[SeedTraining, ...]:
        return tuple(training for training in self.trainings if training.summary is None)

    def plan_training(self, training: SeedTraining) -> TrainPlan:
        """Return the plan of one training.

        Raises:
            TulaError: the user's code has changed since the trainings were prepared.
        """
        run = self.run.with_spec(_set_seed(self.run.spec, training.seed))
        plan = plan_training(run, nodes=training.nodes, batch=training.batch, inspect=self.inspect)
        if plan.task.signature != training.signature:
            raise TulaError(
                "the code of the job has changed since the first training was started"
                + describe_files(list_code_changes(run, run.spec, Path.cwd())),
                "to continue these trainings, restore the code; to train with the new code, run the same command again, which"
                " restarts all seeds",
            )
        return plan

    def make_report(self) -> SeedsReport:
        rows = tuple(_read_seed_training(self.run, training) for training in self.trainings)
        return SeedsReport(self.plan, rows, _sum_costs(rows))

    def list_scheduled(self, trainings: Sequence[SeedTraining]) -> list[ScheduledTraining]:
        seeds = {training.seed for training in trainings}
        rows = zip(self.trainings, self.plan.schedule, strict=True)
        return [scheduled for training, scheduled in rows if training.seed in seeds]


def _sum_costs(trainings: Iterable[SeedTraining]) -> float:
    return sum(training.summary.actual_cost for training in trainings if training.summary is not None)


def _set_seed(spec: JobSpec, seed: int) -> JobSpec:
    return spec.model_copy(update={"train": spec.train.model_copy(update={"seed": seed})})


def _read_seed_training(run: RunDir, training: SeedTraining) -> SeedTraining:
    """Return a training with its summary, or why it failed."""
    summary, problem = None, ""
    try:
        summary = load_summary(run, training.signature)
    except Pending:
        pass
    except TulaError as error:
        problem = error.message
    return replace(training, summary=summary, problem=problem)


def prepare_seed_trainings(runs: Sequence[Run], request: TrainRequest, inspect: Inspect) -> Work[PreparedSeeds]:
    """Plan the trainings by the stored plan, or else by the one for the knee; nothing is written.

    The i-th training of the plan, counted from 0, has the seed `train.seed` + i.

    Raises:
        OtherFormat: the run has an older format.
        SpecError: an option has no effect with seeds, or the script takes no seed.
        BadMeasurements, Infeasible, Pending: as in `plan_campaign`.
        OverBudget: the finished trainings and those that remain exceed the budget of the plan.
    """
    assert request.seeds is not None
    spec = runs[0].spec
    options = {"[[--nodes]]": request.nodes, "[[--batch]]": request.batch, "[[--type]]": request.node_type}
    options["[[--within-balance]]"] = request.within_balance or None
    if unused := [name for name, value in options.items() if value is not None]:
        raise SpecError(
            f"{join_words(unused)} {'has' if len(unused) == 1 else 'have'} no effect with [[--seeds]]",
            f"set limits in a stored plan instead: tula recommend --trainings {request.seeds} --save",
        )
    if request.seeds > 1 and "seed" not in spec.workload.settings:
        raise SpecError(
            "[[--seeds]]: script.command has no {seed}, so all trainings would be identical",
            "add {seed} to script.command, for example --seed {seed}",
        )
    plan = load_campaign(runs)
    if plan is None or plan.trainings != request.seeds:
        if plan is not None:
            yield WarningEvent(messages.stored_plan_not_used(trainings=plan.trainings))
        plan = plan_campaign([runs], Query(), [request.seeds], for_seeds=True)
    run = select_runs(runs, plan.waves[0].node_type or None)[0]
    require_current_format(run.path)
    run = add_site_billing_to_run(run)
    code = choose_code(run, run.spec, Path.cwd(), keep=False)
    assert plan.batch is not None, "a stored plan is of one job"
    trainings = []
    for number, scheduled in enumerate(plan.schedule):
        seed = spec.train.seed + number
        signature = compute_train_signature(
            _set_seed(run.spec, seed), nodes=scheduled.nodes, batch=plan.batch, code=code.identity
        )
        training = SeedTraining(seed, scheduled.nodes, plan.batch, signature, None, "")
        trainings.append(_read_seed_training(run, training))
    prepared = PreparedSeeds(runs, run, plan, tuple(trainings), None, request, cache_first_inspection(inspect))
    _require_within_budget(prepared)
    if not prepared.missing_trainings:
        return prepared
    first = prepared.plan_training(prepared.missing_trainings[0])
    yield from map(WarningEvent, first.code.warnings)
    return replace(prepared, first=first)


def _require_within_budget(prepared: PreparedSeeds) -> None:
    """Raise an error if the finished trainings and those that remain exceed the budget of the plan."""
    plan = prepared.plan
    spent, missing = _sum_costs(prepared.trainings), prepared.missing_trainings
    if plan.budget is None or not missing or not spent:
        return  # without a budget, or before any cost, there is nothing to check
    remaining = sum(scheduled.cost for scheduled in prepared.list_scheduled(missing))
    if not is_within_limit(spent + remaining, plan.budget):
        raise OverBudget(
            f"the finished trainings cost {format_number(spent, 4)} {plan.currency} and"
            f" {format_count(len(missing), 'further training')} may cost {format_number(remaining, 4)}, together more than"
            f" the budget of {plan.budget:g}",
            f"store a plan with another budget: tula recommend --trainings {plan.trainings} --budget PRICE --save",
        )


def run_seed_trainings(prepared: PreparedSeeds, submission: Submission) -> Work[SeedsReport]:
    """Submit the trainings that are missing, on this machine one after another, and return all of them.

    Raises:
        OverBudget: the trainings were not confirmed.
        SpecError: --no-wait on this machine, where trainings run one after another.
        Pending: the timeout has passed.
        Interruption: Ctrl-C; running trainings continue.
        CannotResume, SchedulerError: as in `run_training`.
        JobFailed: the first trainings have all failed.
    """
    run = prepared.run
    if not prepared.missing_trainings:
        yield Note("all trainings of this plan have already finished")
        return prepared.make_report()
    submission.require_waiting(run.spec)
    launcher = submission.launcher_for(run.spec)
    under_way = list_unfinished_jobs(run, launcher, [training.job_id for training in prepared.missing_trainings])
    new = [training for training in prepared.missing_trainings if training.job_id not in under_way]
    if new:
        node_hours = sum(scheduled.nodes * scheduled.hours for scheduled in prepared.list_scheduled(new))
        planned = SeedsPlanned(prepared.plan, len(new), node_hours)
        yield planned
        submission.require_confirmed(planned)
    submission.save_runs([run])
    save_campaign(prepared.runs, prepared.plan)
    with explain_interruption([run]):
        if submission.starts_one_by_one(run.spec):
            yield from _run_trainings_one_by_one(prepared, launcher, submission)
        else:
            yield from _submit_missing_trainings(prepared, launcher, submission, under_way)
    return prepared.make_report()


def _test_resume(prepared: PreparedSeeds, launcher: Launcher, submission: Submission) -> Work[str]:
    """Test the resume of a script if that is due; return the job that the trainings have to wait for, or an empty text."""
    first, run = prepared.first, prepared.run
    assert first is not None
    start = TrainingStart.from_plan(first, run, prepared.runs, allow_resume_test=prepared.request.rehearse)
    return (yield from run_resume_test_if_due(start, launcher, submission))


def _submit_missing_trainings(
    prepared: PreparedSeeds, launcher: Launcher, submission: Submission, under_way: Sequence[str]
) -> Work[None]:
    """Submit the missing trainings, each to start after the trainings whose nodes it uses.

    A training also waits for the trainings that those wait for: if one of them is cancelled before it starts, the next
    one must not start until the nodes are idle.
    """
    run, unfinished = prepared.run, set(under_way)
    after = yield from _test_resume(prepared, launcher, submission)
    for training, scheduled in zip(prepared.trainings, prepared.plan.schedule, strict=True):
        if training.summary is None and training.job_id not in unfinished:
            before = [number for index in scheduled.follows for number in prepared.plan.schedule[index].follows]
            names = [prepared.trainings[index].job_id for index in sorted({*scheduled.follows, *before})]
            follows = [job for job in names if job in unfinished]
            submit_training(run, prepared.plan_training(training), launcher, after=after, follows=follows)
            unfinished.add(training.job_id)
    jobs = [training.job_id for training in prepared.missing_trainings]
    yield from warn_about_submitted_jobs(run, launcher, jobs, under_way)
    if submission.should_wait(run.spec):
        yield from wait_for_jobs(run, launcher, jobs, timeout=submission.timeout)
    else:
        yield Note(
            f"{format_count(len(jobs), 'training')} running or queued; run the same command again later to see their results"
        )


def _run_trainings_one_by_one(prepared: PreparedSeeds, launcher: Launcher, submission: Submission) -> Work[None]:
    """Run the missing trainings one after another; one that fails does not stop the others."""
    run, failed = prepared.run, 0
    after = yield from _test_resume(prepared, launcher, submission)
    for number, training in enumerate(prepared.missing_trainings, 1):
        yield Note(f"training {number} of {len(prepared.missing_trainings)}: seed {training.seed}")
        submit_training(run, prepared.plan_training(training), launcher, after=after)
        yield from wait_for_jobs(run, launcher, [training.job_id], timeout=submission.timeout)
        if run.is_cancelled(training.job_id):
            return
        try:
            load_summary(run, training.signature)
        except (Diverged, JobFailed) as error:
            failed += 1
            if failed == number == MAX_FIRST_FAILURES:
                raise JobFailed(
                    f"the first {failed} trainings have all failed: {error.message}", "read their output with tula logs"
                ) from None
