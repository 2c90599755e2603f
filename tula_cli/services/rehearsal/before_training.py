"""What a training by a script does about its resume before it starts: a rehearsal, once, before the first long one."""

from collections.abc import Iterator
from dataclasses import dataclass

from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import SpecError
from tula_cli.run.directory import Part
from tula_cli.run.imports import Source
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.script_attempt import ResumeTestRecords
from tula_cli.services.events import Event, Note, WarningEvent, Work
from tula_cli.services.rehearsal.rehearse import (
    ResumeFinding,
    load_finding,
    resume_settings,
    resume_test_batch,
    submit_and_wait,
    submit_resume_test,
)
from tula_cli.services.waiting import WaitPolicy
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import rehearsal_signature

LONG_TRAINING_HOURS = 1.0
"""Hours from which on a training is preceded by a rehearsal."""
WITHOUT_RESUME_TEST = "mend its resume; or tula train --no-rehearse, which begins anew after each interruption"


@dataclass(frozen=True)
class TrainingStart:
    """A training that is to be started."""

    part: Part
    task: TrainTask
    code: Source
    prediction: Prediction | None
    rehearse: bool  # not --no-rehearse
    over_cap: str = ""  # that a rehearsal may take more than is left of search.max_node_hours, in words

    @property
    def is_long(self) -> bool:
        return self.prediction is not None and self.prediction.hours > LONG_TRAINING_HOURS

    @property
    def is_test_due(self) -> bool:
        """Whether a rehearsal comes first, and may be paid for."""
        return self.needs_test and not self.over_cap

    @property
    def needs_test(self) -> bool:
        """Whether a rehearsal should come first: it is long, has not begun, and nobody has looked yet.

        How long an unmeasured training takes is not known; `tula check --rehearse` is there for it.
        """
        run, spec = self.part.run, self.part.spec
        if (
            not (self.rehearse and self.is_long and can_test_resume(spec))
            or run.training(self.task.signature).attempts()
        ):
            return False
        earlier = ResumeTestRecords(run.path).records_of(rehearsal_signature(spec, self.code.digest))
        return not any(record.over_at is not None for record in earlier)


def can_test_resume(spec: JobSpec) -> bool:
    """Return whether the job has a resume that a rehearsal can try without touching the user's own files."""
    try:
        return bool(resume_settings(spec))
    except SpecError:
        return False


def test_resume_if_due(training: TrainingStart, launcher: Launcher, policy: WaitPolicy) -> Work[str]:
    """Rehearse where that is due, and tell what is known.

    Returns:
        The job that the training has to wait for; empty for none.

    Raises:
        CannotResume: the script cannot go on from its own checkpoint, and the training is long.
        Pending, Interruption, SchedulerError, JobFailed: of the rehearsal.
    """
    part, task, code = training.part, training.task, training.code
    if not can_test_resume(part.spec):
        return ""
    if training.is_test_due:
        local_batch = task.batch // (task.nodes * part.spec.cluster.gpus_per_node)
        batch = resume_test_batch(part.run, part.spec, local_batch=local_batch)
        if not policy.should_wait(part.spec):
            job = submit_resume_test(part, launcher, code, batch=batch).job
            yield Note(
                f"the training starts after {job}, and not at all if its script cannot go on from its checkpoint"
            )
            return job
        finding = yield from submit_and_wait(part, launcher, code, policy, batch=batch)
    else:
        if training.needs_test:
            yield WarningEvent(f"the script's resume is not rehearsed: {training.over_cap}")
        earlier = load_finding(part.run, part.spec, code)
        if earlier is None:
            return ""
        finding = earlier
    yield from _finding_events(finding)
    if training.rehearse and training.is_long:
        finding.require_resumable(part.spec.name, WITHOUT_RESUME_TEST)
    return ""


def _finding_events(finding: ResumeFinding) -> Iterator[Event]:
    verdict = finding.rehearsal.verdict
    if verdict is None:
        yield WarningEvent(f"the script's resume: {finding.why}; it goes on at the same batch, untried")
    elif verdict == "none":
        yield WarningEvent(f"after an interruption this training begins anew: {finding.why}")
    elif finding.contradiction:
        yield WarningEvent(finding.contradiction)
    elif not finding.kept:
        yield Note(f"the script's resume: {verdict}; {finding.why}")
