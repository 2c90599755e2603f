"""The resume test of scripts: `tula check --rehearse`, and the test before the first long training of `tula train`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tula_cli import words
from tula_cli.cluster.launcher import Launcher, list_jobs_to_wait_for, lock_submission, submit_task
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import CannotResume, JobFailed, OverBudget, ResumeUntested, SpecError
from tula_cli.models.cost import find_checkpoint_schedule
from tula_cli.run.code import choose_code, take_snapshot
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.format import require_current_format
from tula_cli.run.imports import Source
from tula_cli.run.job_runs import get_only_run, save_runs
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.results import JobFile
from tula_cli.run.records.scripts import ResumeTestResult, Verdict
from tula_cli.run.records.tasks import ResumeTestTask, TrainTask
from tula_cli.run.script_attempt import ResumeTestRecords
from tula_cli.services import messages
from tula_cli.services.events import Event, Note, WarningEvent, Work
from tula_cli.services.plans import TrainPlan
from tula_cli.services.profile_plan import count_measured_node_hours
from tula_cli.services.waiting import Submission, describe_exceeded_cap, explain_interruption, wait_for_jobs
from tula_cli.spec.job import JobSpec
from tula_cli.spec.scripts.placeholders import find_placeholders
from tula_cli.spec.scripts.script import Resume
from tula_cli.spec.signature import compute_resume_test_signature

# --- The test

RESUME_ABILITIES: tuple[Verdict, ...] = ("none", "same", "epoch", "any")
"""Abilities to resume, ascending: each one includes those before it."""


@dataclass(frozen=True)
class ResumeTestFinding:
    """The result of a script's resume test."""

    rehearsal: ResumeTestResult
    setting: Literal["rehearse", "same", "epoch", "any"]  # script.resume.batch
    kept: bool  # whether the result is that of an earlier test

    @property
    def resumes(self) -> Verdict:
        """The batches at which trainings of this run resume from a checkpoint."""
        verdict = self.rehearsal.verdict
        if verdict == "none" or self.setting == "rehearse":
            return verdict or "same"
        return self.setting

    @property
    def contradiction(self) -> Diagnostic | None:
        """Warning that the setting allows more than the test has shown; None if it does not."""
        verdict = self.rehearsal.verdict
        if (
            verdict in (None, "none")
            or self.setting == "rehearse"
            or RESUME_ABILITIES.index(self.setting) <= RESUME_ABILITIES.index(verdict)
        ):
            return None
        return messages.resume_setting_too_free(setting=self.setting, verdict=verdict, reason=self.why)

    @property
    def why(self) -> str:
        """The faults that the test found, or else its observations."""
        return "; ".join(self.rehearsal.faults or self.rehearsal.told)

    def require_found(self, name: str) -> None:
        """Raise ResumeUntested if the test was inconclusive."""
        if self.rehearsal.verdict is None:
            hint = "remove this cause and repeat the test; until then, trainings resume at the same batch, untested"
            raise ResumeUntested(f"the resume test of {name} was inconclusive: {self.why}", hint)

    def require_resumable_script(self, name: str, hint: str) -> None:
        """Raise CannotResume if the script cannot resume from its checkpoint."""
        if self.rehearsal.verdict == "none":
            raise CannotResume(f"{name} cannot resume after an interruption: {self.why}", hint)

    def require_resume_on_other_nodes(self) -> None:
        """Raise an error unless the test found that the script resumes at the same batch on another number of nodes.

        Raises:
            CannotResume: it found that the script does not.
            ResumeUntested: it did not find out.
        """
        if self.rehearsal.other_nodes is None:
            raise ResumeUntested(
                f"[[--nodes]] cannot be a range, because it is unknown whether the script resumes on another number of nodes: {self.why}",
                "remove this cause and run the same command again to repeat the test; or give one number, for example [[--nodes]] 4",
            )
        if not self.rehearsal.other_nodes:
            raise CannotResume(
                f"[[--nodes]] cannot be a range, because the script does not resume on another number of nodes: {self.why}",
                "correct how the script resumes, or give one number, for example [[--nodes]] 4",
            )


def run_resume_test(
    runs: Sequence[Run],
    launcher_for: Callable[[JobSpec], Launcher],
    *,
    node_type: str | None = None,
    timeout: float | None = None,
    fresh: bool = False,
    file: JobFile | None = None,
) -> Work[ResumeTestFinding]:
    """Test a script's resume, or return the finding of an earlier test of the same script and code.

    Args:
        timeout: seconds to wait at most.
        fresh: run the test even if there is a verdict.

    Raises:
        SpecError: the job has no script, or no resume to test; or names several node types and none is given.
        OtherFormat: the run has an older format.
        OverBudget: the test may exceed the remainder of search.max_node_hours.
        Pending: the timeout has passed.
        Interruption: Ctrl-C; the job continues to run.
        SchedulerError: the scheduler refused the job.
        JobFailed: the test ended without a finding.
    """
    run = get_only_run(runs, node_type, purpose="the resume test")
    get_resume_settings(run.spec)
    code = choose_code(run, run.spec, Path.cwd(), keep=False)
    if not fresh and (earlier := load_finding(run, code)) is not None:
        yield Note(
            f"resuming was already tested {words.format_local_time(earlier.rehearsal.over_at)}; --fresh repeats the test"
        )
        return earlier
    require_current_format(run.path)
    if cap_message := describe_resume_test_over_cap(runs):
        raise OverBudget(
            cap_message, "raise the limit, for example [[--set search.max_node_hours=100]], or lower search.max_minutes"
        )
    save_runs([run], file)
    return (yield from submit_resume_test_and_wait(run, launcher_for(run.spec), code, timeout=timeout, batch=None))


def submit_resume_test_and_wait(
    run: Run, launcher: Launcher, code: Source, *, timeout: float | None, batch: int | None, nodes: int = 1
) -> Work[ResumeTestFinding]:
    """Submit a resume test, or attach to the one that is already running, and return its finding.

    Args:
        timeout: seconds to wait at most.
        batch: global batch of the first start; None chooses one.
        nodes: of the job: one, or twice those of the first start.

    Raises:
        Pending, Interruption, SchedulerError, JobFailed: as in `run_resume_test`.
    """
    with explain_interruption([run]):
        task = submit_resume_test(run, launcher, code, batch=batch, nodes=nodes)
        size_text = f"at batch {task.batch}, at most {run.spec.compute_measuring_minutes():g} min"
        yield Note(f"testing on {words.format_count(task.nodes)} whether the script can resume, {size_text}: {task.id}")
        yield from wait_for_jobs(run, launcher, [task.job], timeout=timeout)
    record = ResumeTestRecords(run.path).read_result(task.id)
    if record is None or record.over_at is None:
        attempts = run.read_attempts(task.id)
        why = attempts[-1].message if attempts else "it has not started"
        raise JobFailed(f"{task.id} ended without a verdict: {why}", "read the output with tula logs")
    return ResumeTestFinding(record, get_resume_settings(run.spec).batch, kept=False)


def submit_resume_test(
    run: Run, launcher: Launcher, code: Source, *, batch: int | None, nodes: int = 1
) -> ResumeTestTask:
    """Submit a resume test and return its task; one that is waiting or running is left alone.

    Raises:
        SchedulerError: the scheduler refused the job.
    """
    spec = run.spec
    key = compute_resume_test_signature(spec, code.digest)
    with lock_submission(run):
        earlier = [task for task in run.read_snapshot().select_tasks(ResumeTestTask) if task.key == key]
        unfinished = list_jobs_to_wait_for(run, launcher, [task.job for task in earlier])
        if (task := next((task for task in earlier if task.job in unfinished), None)) is not None:
            return task
        name = f"rehearse-{key}-{len(earlier) + 1}"
        task = ResumeTestTask(
            id=name, job=name, spec=spec, workdir=str(code.workdir), nodes=nodes, key=key,
            batch=batch or compute_resume_test_batch(run), code=take_snapshot(run, spec, code),
        )  # fmt: skip
        submit_task(run, launcher, task)
    return task


def describe_resume_test_over_cap(runs: Sequence[Run], *, nodes: int = 1) -> str:
    """Return a message that a resume test on `nodes` nodes may exceed the rest of the node-hour cap; empty if it fits."""
    spec = runs[0].spec
    used_hours = sum(count_measured_node_hours(run) for run in runs if run.exists)
    subject = (
        f"profiling so far ({words.format_number(used_hours)} node-hours) and a resume test"
        if used_hours
        else "a resume test"
    )
    return describe_exceeded_cap(
        subject, used_hours + nodes * spec.compute_measuring_minutes() / 60, spec.search.max_node_hours
    )


def load_finding(run: Run, code: Source) -> ResumeTestFinding | None:
    """Return the finding of an earlier resume test of this script with this code; None if there is none."""
    record = ResumeTestRecords(run.path).find_newest_verdict(compute_resume_test_signature(run.spec, code.digest))
    return None if record is None else ResumeTestFinding(record, get_resume_settings(run.spec).batch, kept=True)


def get_resume_settings(spec: JobSpec) -> Resume:
    """Return the resume settings of the job's script.

    Raises:
        SpecError: there is no resume to test, or the test would overwrite the user's files.
    """
    if spec.script is None:
        raise SpecError(
            "only jobs with a section script have a resume test",
            "run tula check without --rehearse: tula's own loop always resumes with the same samples",
        )
    if (resume := spec.script.resume) is None:
        raise SpecError(
            "script.resume is missing, so there is nothing to test",
            'describe how the script resumes, for example resume: {args: "--resume {checkpoint}", checkpoint: "{out}/checkpoint.pth"}',
        )
    if "out" not in find_placeholders(resume.checkpoint):
        raise SpecError(
            f"script.resume.checkpoint: {resume.checkpoint} must be in {{out}}, because the resume test must not"
            " overwrite your files",
            "make the script save in {out}",
        )
    return resume


def compute_resume_test_batch(run: Run, *, local_batch: int | None = None, nodes: int = 1) -> int:
    """Return the global batch of a resume test.

    Args:
        run: the run, with its recommendation if there is one.
        local_batch: local batch; None for the recommended one, or else one at most as large as the reference batch that
            can be halved.
        nodes: of the job; if there are several, the test starts on half of them, with a local batch that can be halved.
    """
    spec = run.spec
    recommendation = run.read_recommendation()
    if local_batch is None and recommendation is not None:
        local_batch = recommendation.choice.local_batch
    gpus = spec.cluster.gpus_per_node
    if local_batch is not None and nodes > 1:
        parts = 2 * spec.train.accumulate
        return max(1, local_batch // parts) * parts * gpus * (nodes // 2)
    if local_batch is not None:
        return local_batch * gpus
    divisor = 2 * gpus * spec.train.accumulate
    max_batch = min(spec.train.reference_batch, spec.search.max_batch or spec.train.reference_batch)
    return max(divisor, max_batch // divisor * divisor)


# --- Before a training

LONG_TRAINING_HOURS = 1.0
"""Hours above which a training is preceded by a resume test."""
NO_RESUME_HINT = "correct how the script resumes, or use tula train --no-rehearse, which trains from the beginning after each interruption"


@dataclass(frozen=True)
class TrainingStart:
    """A training that is about to be started."""

    run: Run
    task: TrainTask
    code: Source
    prediction: Prediction | None
    rehearse: bool  # False with --no-rehearse
    over_cap: str = ""  # why a resume test does not fit search.max_node_hours; empty if it does

    @classmethod
    def from_plan(cls, plan: TrainPlan, run: Run, runs: Sequence[Run], *, allow_resume_test: bool) -> "TrainingStart":
        """Return the start of a planned training in a run; `runs` are all runs of the job."""
        limit_text = ""
        if not run.spec.workload.resumes_reliably:
            limit_text = describe_resume_test_over_cap(runs, nodes=plan.task.resume_test_nodes)
        return cls(run, plan.task, plan.code, plan.prediction, allow_resume_test, limit_text)

    @property
    def is_long(self) -> bool:
        return self.prediction is not None and self.prediction.hours > LONG_TRAINING_HOURS

    @property
    def _test_signature(self) -> str:
        """Signature of the script and its code, under which resume tests are recorded."""
        return compute_resume_test_signature(self.run.spec, self.code.digest)

    @property
    def may_change_nodes(self) -> bool:
        """Whether the script may have to resume on another number of nodes, because jobs use the nodes that they are granted."""
        return not self.run.spec.workload.resumes_reliably and len(self.task.sizes) > 1

    @property
    def is_test_due(self) -> bool:
        """Whether a resume test comes first and is within the cap."""
        return self.needs_test and not self.over_cap

    @property
    def needs_test(self) -> bool:
        """Whether a resume test should come first: the training is long, has not started, and no test has finished yet.

        The duration of an unmeasured training is not known; use `tula check --rehearse` for it. A training that may be
        granted other nodes needs a test that found whether its script resumes there.
        """
        records = ResumeTestRecords(self.run.path)
        if not self.rehearse or not can_test_resume(self.run.spec):
            return False
        if self.may_change_nodes:
            return records.find_newest_verdict_on_other_nodes(self._test_signature) is None
        if not self.is_long or self.run.get_training(self.task.signature).read_attempts():
            return False
        return not any(record.over_at is not None for record in records.read_results_of_script(self._test_signature))

    def require_resume_on_other_nodes(self) -> None:
        """Require that the script can resume on another number of nodes, or that a test of this is due, if --nodes is a range.

        Raises:
            SpecError: it cannot be tested, or --no-rehearse or the cap on node-hours prevents that.
            CannotResume: a test found that the script does not.
        """
        if not self.may_change_nodes or self.is_test_due:
            return
        spec, record = (
            self.run.spec,
            ResumeTestRecords(self.run.path).find_newest_verdict_on_other_nodes(self._test_signature),
        )
        if record is not None:
            ResumeTestFinding(record, get_resume_settings(spec).batch, kept=True).require_resume_on_other_nodes()
            return
        untested = (
            "[[--nodes]] cannot be a range: whether the script resumes on another number of nodes must be tested first"
        )
        if not can_test_resume(spec):
            why, hint = "the test needs script.resume with a checkpoint in {out}", "add script.resume"
        elif self.rehearse:
            why, hint = self.over_cap, "raise search.max_node_hours"
        else:
            why, hint = "[[--no-rehearse]] prevents the test", "remove [[--no-rehearse]]"
        raise SpecError(f"{untested}; {why}", f"{hint}, or give one number, for example [[--nodes]] 4")


def can_test_resume(spec: JobSpec) -> bool:
    """Return whether the job has a resume that can be tested without changing the user's files."""
    try:
        return bool(get_resume_settings(spec))
    except SpecError:
        return False


def run_resume_test_if_due(training: TrainingStart, launcher: Launcher, submission: Submission) -> Work[str]:
    """Test a script's resume if that is due, and report the finding.

    Returns:
        The job that the training has to wait for; empty for none.

    Raises:
        CannotResume: the training is long, and its script cannot resume from its checkpoint; or not on other nodes that
            it may be granted.
        ResumeUntested: the test did not find out whether it does so on other nodes.
        Pending, Interruption, SchedulerError, JobFailed: raised by the resume test.
    """
    run, task, code = training.run, training.task, training.code
    if not can_test_resume(run.spec):
        return ""
    if training.is_test_due:
        local_batch, nodes = task.batch // (task.nodes * run.spec.cluster.gpus_per_node), task.resume_test_nodes
        batch = compute_resume_test_batch(run, local_batch=local_batch, nodes=nodes)
        if not submission.should_wait(run.spec):
            job = submit_resume_test(run, launcher, code, batch=batch, nodes=nodes).job
            yield Note(f"the training starts after {job}, if the script can resume from its checkpoint")
            return job
        finding = yield from submit_resume_test_and_wait(
            run, launcher, code, timeout=submission.timeout, batch=batch, nodes=nodes
        )
    else:
        if training.needs_test:
            yield WarningEvent(messages.resume_untested(reason=training.over_cap))
        earlier = load_finding(run, code)
        if earlier is None:
            return ""
        finding = earlier
    yield from _list_finding_events(finding)
    if training.rehearse and training.is_long:
        finding.require_resumable_script(run.spec.name, NO_RESUME_HINT)
    if training.may_change_nodes and not finding.kept:
        finding.require_resume_on_other_nodes()
    return ""


def _list_finding_events(finding: ResumeTestFinding) -> Iterator[Event]:
    verdict = finding.rehearsal.verdict
    if verdict is None:
        yield WarningEvent(messages.resume_test_inconclusive(reason=finding.why))
    elif verdict == "none":
        yield WarningEvent(messages.script_cannot_resume(reason=finding.why))
    elif finding.contradiction:
        yield WarningEvent(finding.contradiction)
    elif not finding.kept:
        yield Note(f"resume test of the script (script.resume.batch): {verdict}; {finding.why}")


# --- The cost of an interruption


def describe_interruption_cost(
    run: RunDir | None, spec: JobSpec, *, batch: int | None = None, step_time: float | None = None
) -> str:
    """Describe the cost of an interruption; empty for tula's training loop, which saves before it exits.

    Args:
        run: the run, which need not exist yet; None for no run.
        batch: global batch of the training; None if it is not chosen yet.
        step_time: seconds per step at that batch; None if it is not known.
    """
    if spec.workload.resumes_reliably:
        return ""
    measured_size, saves = (
        (None, ()) if run is None else (run.read_snapshot().measured_dataset_size, run.find_newest_script_saves())
    )
    size = spec.get_script().known_dataset_size or measured_size
    schedule = find_checkpoint_schedule(spec.get_script(), saves, dataset_size=size)
    return schedule.describe_lost_work(step_time, epoch_steps=size // batch if size and batch else None)
