"""`tula evaluate` from Python."""

from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.run.records.results import Evaluated
from tula_cli.services.api.calls import Settings, Submission, Target
from tula_cli.services.evaluate import EvaluationRequest, prepare_evaluation, run_evaluation
from tula_cli.services.events import follow
from tula_cli.services.waiting import DetachedJobs

if TYPE_CHECKING:
    from typing_extensions import Unpack


def evaluate(
    run: Target,
    *,
    weights: str | Path | None = None,
    training: str | None = None,
    nodes: int = 1,
    node_type: str | None = None,
    fresh: bool = False,
    timeout: float | None = None,
    **settings: "Unpack[Settings]",
) -> Evaluated | None:
    """Evaluate the weights of a training on dataset.test; without one on the samples that training is evaluated on.

    Args:
        run: a run, the path of its folder, or its job.
        weights: "best", "last" or the path of a file; None: best where there is one, else last.
        training: its signature, as `tula.train` returns it; None for the one that was started last.
        nodes: how many share the samples.
        node_type: look for trainings on this type alone.
        fresh: evaluate although it is known what they come to.
        timeout: seconds to wait at most.
        settings: root, overrides, confirm, wait, on_event; see `Settings`. Nobody is asked on this machine.

    Returns:
        Loss, top-1 and top-5 (percent), perplexity and train.metrics, those that there are, as `.metrics`; None where nobody
        waits for it (`tula.status(run)` tells).

    Raises:
        SpecError: the job, the training or the file cannot be used, or a script trains by itself.
        BadMeasurements: nothing is trained yet, or nothing of it is saved.
        OverBudget: not confirmed, or neither search.max_node_hours nor `confirm` is there.
        Pending: `timeout` is over.
        DeviceFault, JobFailed: it has ended so.
        SchedulerError: it was refused.
        KeyboardInterrupt: Ctrl-C; the job goes on, and the same call attaches to it again.

    Example:
        >>> tula.evaluate(run, weights="best").metrics["top1"]
    """
    submission = Submission.from_arguments(run, timeout=timeout, **settings)
    request = EvaluationRequest(None if weights is None else str(weights), training, nodes, fresh)
    prepared = prepare_evaluation(submission.call.run, submission.call.spec, request, node_type=node_type)
    evaluation = follow(run_evaluation(prepared, submission.dependencies, submission.wait_policy), submission.tell)
    return None if isinstance(evaluation, DetachedJobs) else evaluation
