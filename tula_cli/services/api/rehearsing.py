"""`tula check --rehearse` from Python."""

from typing import TYPE_CHECKING

from tula_cli.services.api.calls import Settings, Submission, Target
from tula_cli.services.events import follow
from tula_cli.services.resume_test import ResumeFinding, run_resume_test

if TYPE_CHECKING:
    from typing_extensions import Unpack


def rehearse(
    job: Target,
    *,
    fresh: bool = False,
    node_type: str | None = None,
    timeout: float | None = None,
    **settings: "Unpack[Settings]",
) -> ResumeFinding:
    """Try how a script goes on from its own checkpoint, in a job of one node, and wait for it: `tula check --rehearse`.

    Args:
        job: the path of a job.yaml, its content as a mapping, a spec, or a run.
        fresh: rehearse although there is a verdict.
        node_type: the type of node, where the job names several.
        timeout: seconds to wait at most.
        settings: `root`, `overrides` and `on_event` of `Settings`; there is nothing to confirm, and it always waits.

    Returns:
        What was found (`.resumes`, `.why`, `.rehearsal`); `require_found("my job")` raises where nothing was, and
        `require_resumable("my job", "")` where its checkpoint is of no use to the script.

    Raises:
        SpecError: the job cannot be used, has no script with a resume, or names several types of node.
        OverBudget: it may take more than is left of search.max_node_hours.
        Pending: `timeout` is over.
        JobFailed: it ended without having found anything.
        SchedulerError: it was refused, or will never start.
        KeyboardInterrupt: Ctrl-C; the job goes on, and the same call attaches to it again.
    """
    for name in ("confirm", "wait"):
        if name in settings:
            raise TypeError(f"rehearse() takes no {name}: it asks nobody, and waits")
    submission = Submission.from_arguments(job, timeout=timeout, **settings)
    call, launcher_for = submission.call, submission.dependencies.launcher_for
    finding = run_resume_test(
        call.run, call.spec, launcher_for, node_type=node_type, timeout=timeout, fresh=fresh, file=call.file
    )  # fmt: skip
    return follow(finding, submission.tell)
