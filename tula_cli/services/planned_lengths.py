"""Plan the probes at each sequence length (search.sequence), and predict the end of trainings with early stopping."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.cluster.inspection import Inspect, NotInspectable
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import Infeasible
from tula_cli.models.choice.early_stopping import find_end_epoch, has_metrics, shorten_prediction
from tula_cli.models.choice.grid import get_limit_on_nodes
from tula_cli.run.directory import RunDir
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.training_run import TrainingRun
from tula_cli.services import messages
from tula_cli.services.search import choose_probes, find_largest_local_batch
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_train_signature
from tula_cli.words import format_count


@dataclass(frozen=True)
class PlannedLength:
    """The probes at one sequence length, on the fewest nodes, with their estimated memory."""

    length: int
    own: bool  # the job's
    nodes: int
    local_batches: tuple[int, ...]  # one GPU's, ascending; empty where nothing fits
    batches: tuple[int, ...]  # global
    largest_batch: int | None = None  # global, that memory holds less the margin; None for no bound, or unknown
    memory: tuple[int, ...] = ()  # bytes of one GPU at each of the batches; empty where it is not known
    problem: str = ""  # why nothing is measured


def plan_lengths(
    spec: JobSpec, inspection: Inspection | None, local_batches: Sequence[int], inspector: Inspect | None
) -> tuple[PlannedLength, ...]:
    """Return the plans for the job's sequence length and all others, ascending; empty if there are no others.

    Args:
        spec: the job.
        inspection: inspection at the job's length; None if the model was not built.
        local_batches: local batches measured at the job's length on the fewest nodes.
        inspector: inspects the model and the dataset at the other lengths; None if nothing may be built.

    Raises:
        SpecError, JobFailed: they cannot be built at a length.
    """
    jobs_by_length = spec.by_length()
    if spec.length is None or not jobs_by_length:
        return ()
    planned = [_plan_length(spec, spec.length, inspection, local_batches, own=True)]
    for length, job_of_length in jobs_by_length.items():
        inspection_of_length = _inspect_or_none(job_of_length, inspector)
        size = inspection_of_length.dataset_size if inspection_of_length else job_of_length.search.max_batch
        if size is None:
            planned.append(
                _plan_length(
                    job_of_length,
                    length,
                    inspection_of_length,
                    (),
                    own=False,
                    problem="the size of the dataset is not known yet",
                )
            )
            continue
        try:
            largest = find_largest_local_batch(job_of_length, inspection_of_length) if inspection_of_length else None
            (sizes,) = choose_probes(job_of_length, dataset_size=size, max_local_batch=largest).values()
        except Infeasible as error:
            planned.append(
                _plan_length(job_of_length, length, inspection_of_length, (), own=False, problem=error.message)
            )
        else:
            planned.append(_plan_length(job_of_length, length, inspection_of_length, sizes, own=False))
    return tuple(sorted(planned, key=lambda plan: plan.length))


def _inspect_or_none(spec: JobSpec, inspector: Inspect | None) -> Inspection | None:
    try:
        return None if inspector is None else inspector(spec)
    except NotInspectable:
        return None


def _plan_length(
    spec: JobSpec, length: int, inspection: Inspection | None, sizes: Sequence[int], *, own: bool, problem: str = ""
) -> PlannedLength:
    from tula_cli.models.memory import memory  # numpy, of no use where nothing was built

    nodes = min(spec.search.nodes)
    world = nodes * spec.cluster.gpus_per_node
    largest = get_limit_on_nodes(find_largest_local_batch(spec, inspection), nodes) if inspection else None
    model = None
    if inspection and inspection.footprints:
        train = spec.train
        model = memory.fit_memory_model(
            inspection.footprints, accumulate=train.accumulate, sharded=train.sharded
        ).for_ranks(world)
    return PlannedLength(
        length=length,
        own=own,
        nodes=nodes,
        local_batches=tuple(sizes),
        batches=tuple(size * world for size in sizes),
        largest_batch=None if largest is None else largest * world,
        memory=() if model is None else tuple(model.needed(size) for size in sizes),
        problem=problem,
    )


def list_measured_other_lengths(planned: Sequence[PlannedLength]) -> list[PlannedLength]:
    """Return the lengths other than the job's at which probes are planned; each is a job."""
    return [planned_length for planned_length in planned if not planned_length.own and planned_length.local_batches]


def count_lengths_node_hours(spec: JobSpec, planned: Sequence[PlannedLength]) -> float:
    """Return the maximum node-hours of the probes at other lengths."""
    return (
        sum(planned_length.nodes for planned_length in list_measured_other_lengths(planned))
        * spec.measuring_minutes()
        / 60
    )


def warn_lengths_left_out(planned: Sequence[PlannedLength]) -> tuple[Diagnostic, ...]:
    """Return a warning, with the reason, for each length that is not measured."""
    return tuple(
        messages.length_left_out(length=planned_length.length, problem=planned_length.problem)
        for planned_length in planned
        if planned_length.problem
    )


# --- Early stopping in earlier trainings


@dataclass(frozen=True)
class ExpectedEnd:
    """The epoch at which a training is expected to end, and the prediction up to there."""

    epoch: int
    witnesses: tuple[int, ...]  # epochs after which earlier trainings ended, or would have, ascending
    batch: int  # at which they were trained, global
    prediction: Prediction  # up to that epoch

    @property
    def description(self) -> str:
        """Return a description of the earlier trainings that the expectation is based on."""
        least, most = self.witnesses[0], self.witnesses[-1]
        epochs = format_count(least, "epoch") if least == most else f"{least} to {most} epochs"
        count = len(self.witnesses)
        return f"{format_count(count, 'earlier training')} of this job at batch {self.batch} reached it after {epochs}"


def predict_end(run: RunDir, task: TrainTask, *, code: str) -> ExpectedEnd | None:
    """Return the expected end of a training with early stopping; None if no earlier training shows it.

    Earlier trainings of the same job may have another seed, number of nodes, batch or early-stopping rule; those at the
    nearest batch are used. One that finished all its epochs without meeting the rule counts with all of them.

    Args:
        run: the run with earlier trainings, including those of a comparison.
        task: the training.
        code: digest of the user code that it runs.
    """
    train = task.spec.train
    if (
        train.early_stopping is None
        or not train.early_stopping.by_metric
        or task.prediction is None
        or task.spec.script is not None
    ):
        return None
    batches_by_epoch: dict[int, list[int]] = {}
    for signature in run.train_signatures():
        training = run.training(signature)
        newest = training.newest_task()
        if (
            signature == task.signature
            or newest is None
            or not _differs_only_in_scale_and_seed(run, newest, task.spec, code)
        ):
            continue
        epoch = _find_end_epoch(training, task.spec)
        if epoch is not None:
            batches_by_epoch.setdefault(newest.batch, []).append(epoch)
    if not batches_by_epoch:
        return None
    batch = min(batches_by_epoch, key=lambda batch: (abs(math.log2(batch / task.batch)), batch))
    epoch = statistics.median_high(batches_by_epoch[batch])
    prediction = shorten_prediction(task.prediction, epochs=epoch, of=train.epochs_at_most)
    return ExpectedEnd(epoch, tuple(sorted(batches_by_epoch[batch])), batch, prediction)


def _differs_only_in_scale_and_seed(run: RunDir, earlier: TrainTask, spec: JobSpec, code: str) -> bool:
    """Return whether a training runs the same code and settings, except seed, nodes, batch and early stopping."""
    snapshot = run.code(earlier.code)
    return (snapshot.digest if snapshot is not None else "") == code and _compute_job_signature(
        earlier.spec
    ) == _compute_job_signature(spec)


def _compute_job_signature(spec: JobSpec) -> str:
    """Return a signature shared by trainings that differ only in seed, nodes, batch and early stopping."""
    train = spec.train.model_copy(update={"early_stopping": None, "seed": 0})
    return compute_train_signature(spec.model_copy(update={"train": train}), nodes=1, batch=1)


def _find_end_epoch(training: TrainingRun, spec: JobSpec) -> int | None:
    """Return the epoch after which a training met the early-stopping rule, or all epochs if it did not.

    None if its metrics are missing, or if it has neither met the rule nor finished.
    """
    rows = training.metrics("epoch")
    if not has_metrics(rows, spec.train):
        return None
    result = training.result()
    is_complete = result is not None and result.epochs >= spec.train.epochs_at_most
    return find_end_epoch(rows, spec.train) or (spec.train.epochs_at_most if is_complete else None)
