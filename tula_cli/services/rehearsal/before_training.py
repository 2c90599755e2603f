"""What a training by a script does about its resume before it starts: a rehearsal, once, before the first long one."""

from collections.abc import Iterator
from dataclasses import dataclass

from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import SpecError
from tula_cli.run.directory import Part
from tula_cli.run.imports import Source
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.script_attempt import Rehearsals
from tula_cli.services.events import Event, Note, WarningEvent, Work
from tula_cli.services.rehearsal.rehearse import ResumeFinding, batch_of, kept_for, rehearsed, resume_of, submit
from tula_cli.services.waiting import WaitPolicy
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import rehearsal_signature

LONG = 1.0
"""Hours from which on a training is preceded by a rehearsal."""
ALL_THE_SAME = "mend its resume; or tula train --no-rehearse, which begins anew after each interruption"


@dataclass(frozen=True)
class Training:
    """A training that is to be started."""

    part: Part
    task: TrainTask
    code: Source
    prediction: Prediction | None
    rehearse: bool  # not --no-rehearse
    over_cap: str = ""  # that a rehearsal may take more than is left of search.max_node_hours, in words

    @property
    def long(self) -> bool:
        return self.prediction is not None and self.prediction.hours > LONG

    @property
    def due(self) -> bool:
        """Whether a rehearsal comes first, and may be paid for."""
        return self.wanted and not self.over_cap

    @property
    def wanted(self) -> bool:
        """Whether a rehearsal should come first: it is long, has not begun, and nobody has looked yet.

        How long an unmeasured training takes is not known; `tula check --rehearse` is there for it.
        """
        run, spec = self.part.run, self.part.spec
        if not (self.rehearse and self.long and rehearsable(spec)) or run.training(self.task.signature).attempts():
            return False
        earlier = Rehearsals(run.path).all(rehearsal_signature(spec, self.code.digest))
        return not any(found.over_at is not None for found in earlier)


def rehearsable(spec: JobSpec) -> bool:
    """Return whether the job has a resume that a rehearsal can try without touching the user's own files."""
    try:
        return bool(resume_of(spec))
    except SpecError:
        return False


def prepared(training: Training, launcher: Launcher, policy: WaitPolicy) -> Work[str]:
    """Rehearse where that is due, and tell what is known.

    Returns:
        The job that the training has to wait for; empty for none.

    Raises:
        CannotResume: the script cannot go on from its own checkpoint, and the training is long.
        Pending, Interruption, SchedulerError, JobFailed: of the rehearsal.
    """
    part, task, code = training.part, training.task, training.code
    if not rehearsable(part.spec):
        return ""
    if training.due:
        local_batch = task.batch // (task.nodes * part.spec.cluster.gpus_per_node)
        batch = batch_of(part.run, part.spec, local_batch=local_batch)
        if not policy.waits(part.spec):
            job = submit(part, launcher, code, batch=batch).job
            yield Note(
                f"the training starts after {job}, and not at all if its script cannot go on from its checkpoint"
            )
            return job
        found = yield from rehearsed(part, launcher, code, policy, batch=batch)
    else:
        if training.wanted:
            yield WarningEvent(f"the script's resume is not rehearsed: {training.over_cap}")
        known = kept_for(part.run, part.spec, code)
        if known is None:
            return ""
        found = known
    yield from _told(found)
    if training.rehearse and training.long:
        found.require_resumable(part.spec.name, ALL_THE_SAME)
    return ""


def _told(found: ResumeFinding) -> Iterator[Event]:
    verdict = found.rehearsal.verdict
    if verdict is None:
        yield WarningEvent(f"the script's resume: {found.why}; it goes on at the same batch, untried")
    elif verdict == "none":
        yield WarningEvent(f"after an interruption this training begins anew: {found.why}")
    elif found.contradiction:
        yield WarningEvent(found.contradiction)
    elif not found.kept:
        yield Note(f"the script's resume: {verdict}; {found.why}")
