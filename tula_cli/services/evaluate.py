"""`tula evaluate`: evaluate the weights of a training on a test set."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tula_cli import words
from tula_cli.cluster.launcher import (
    list_jobs_to_wait_for,
    list_unfinished_jobs,
    lock_submission,
    submit_task,
)
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, JobFailed, SpecError, TulaError
from tula_cli.host.failures import FAILURE_KINDS, describe_advice
from tula_cli.options import EvaluationRequest
from tula_cli.plugins import is_import_string
from tula_cli.run import imports
from tula_cli.run.checkpoint_integrity import describe_checkpoint_problem
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.files import is_regular_file, read_link_target
from tula_cli.run.format import require_current_format
from tula_cli.run.job_runs import select_runs
from tula_cli.run.records.results import EvaluationRecord
from tula_cli.run.records.tasks import EvaluateTask, RateSearchTask, TrainTask
from tula_cli.run.training_run import TrainingRun
from tula_cli.services.events import EvaluationPlanned, Note, WarningEvent, Work
from tula_cli.services.waiting import DetachedJobs, Submission, explain_interruption
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_evaluation_signature

BEST, LAST = "best", "last"


@dataclass(frozen=True)
class PreparedEvaluation:
    """An evaluation before anything is submitted."""

    run: Run
    task: EvaluateTask
    known_record: EvaluationRecord | None  # stored result of this evaluation; None if there is none
    warnings: tuple[Diagnostic, ...]  # about damaged records of the run


def prepare_evaluation(runs: Sequence[Run], request: EvaluationRequest) -> PreparedEvaluation:
    """Decide which weights are evaluated and on which test set; nothing is written.

    Args:
        runs: the runs of a job, of which one has the training. Their job provides the test set, metrics and cluster; all
            other settings are those of the training.

    Raises:
        SpecError: the job has a training script; or there is no such node type, training or file.
        BadMeasurements: nothing has been trained yet, or the training has saved no weights.
    """
    if not runs[0].spec.workload.evaluates_held_out_data:
        raise SpecError(
            "tula evaluate works only with tula's own training loop, but this job has section script",
            "evaluate the weights with the script itself",
        )
    run, trained = _find_training(runs, request)
    files = run.get_training(trained.signature)
    name, path = _find_weights(files, request.weights)
    is_training_checkpoint = name in (BEST, LAST)
    if is_training_checkpoint:
        _require_sound_checkpoint(files, name, path)
    elif not (path.is_dir() or is_regular_file(path)):
        raise SpecError(f"{path} is not a weights file", "choose other weights with [[--weights]]")
    stat = path.stat()
    identity = (
        {"name": name, "samples": path.stem}
        if is_training_checkpoint
        else {"path": str(path), "stamp": [stat.st_size, stat.st_mtime_ns]}
    )
    job = _make_evaluation_job(trained.spec, run.spec)
    key = compute_evaluation_signature(job, identity, code=_compute_code_digest(job, Path(trained.workdir)))
    id_ = f"evaluate-{trained.signature}-{key}"
    task = EvaluateTask(
        id=id_, job=id_, spec=job, workdir=trained.workdir, nodes=request.nodes, signature=trained.signature, key=key,
        weights=name, path=str(path), samples=int(path.stem) if is_training_checkpoint else None, local_batch=trained.micro_batch // trained.splits,
        code=trained.code,
    )  # fmt: skip
    known_record = None if request.fresh else files.read_evaluation(key)
    return PreparedEvaluation(run, task, known_record, tuple(run.read_snapshot().record_warnings))


def _find_training(runs: Sequence[Run], request: EvaluationRequest) -> tuple[Run, TrainTask]:
    """Return the requested training, as its newest task, and the run that contains it."""
    trainings: list[tuple[float, int, Run, TrainTask]] = []
    damaged: list[BadMeasurements] = []
    for number, run in enumerate(select_runs(runs, request.node_type)):
        snapshot = run.read_snapshot()
        submitted = {job.id: job.submitted_at for job in snapshot.jobs}
        trainings += [(submitted.get(task.job, 0.0), number, run, task) for task in snapshot.train_tasks]
        damaged += snapshot.damaged_tasks
    signatures = list(dict.fromkeys(task.signature for *_, task in trainings))
    if damaged and (not signatures if request.training is None else request.training not in signatures):
        raise damaged[0]
    if not signatures:
        paths = words.join_words(words.make_relative_path(run.path) for run in runs)
        raise BadMeasurements(
            f"nothing has been trained for {runs[0].job_name} yet ({paths})",
            "run tula train first",
        )
    if request.training is not None and request.training not in signatures:
        raise SpecError(
            f"[[--training]] {request.training}: this training does not exist", f"choose from: {', '.join(signatures)}"
        )
    matching = [entry for entry in trainings if request.training in (None, entry[3].signature)]
    *_, run, task = max(matching, key=lambda entry: (entry[0], entry[3].attempt, -entry[1]))
    return run, task


def _find_weights(files: TrainingRun, requested: str | Path | None) -> tuple[str, Path]:
    """Return the name and file of the weights; for best and last, the checkpoint that they currently refer to."""
    if requested is not None and requested not in (BEST, LAST):
        path = Path(requested).expanduser().absolute()
        if not path.exists():  # the checkpoint of a sharded model is a folder
            raise SpecError(
                f"[[--weights]] {requested}: this file does not exist",
                "give the path of a weights file, or best or last",
            )
        if not path.is_dir():
            _require_weights(path, requested)
        elif not (path / ".metadata").is_file():
            raise SpecError(
                f"[[--weights]] {requested}: this folder contains no sharded checkpoint",
                "give the path of a weights file, or best or last",
            )
        return str(path), path
    best, newest = files.find_weights(), files.list_checkpoints()
    if not newest:
        raise BadMeasurements(
            f"training {files.signature} has saved no weights yet",
            "see its progress with tula status, or choose another training with [[--training]] or a file with [[--weights]]",
        )
    if best is not None and requested != LAST:
        return BEST, read_link_target(best).absolute()
    if requested == BEST:
        raise BadMeasurements(
            f"training {files.signature} has not finished an epoch yet, so it has no best weights",
            "use [[--weights]] last for the newest weights",
        )
    result = files.read_result()
    if result is not None and int(newest[0].stem) < result.samples:
        raise BadMeasurements(
            f"the last weights of training {files.signature} have been deleted, for example by tula clean --keep best",
            "use [[--weights]] best"
            if best is not None
            else f"to evaluate an older checkpoint: [[--weights]] {shlex.quote(str(newest[0]))}",
        )
    return LAST, newest[0].absolute()


def _require_sound_checkpoint(files: TrainingRun, name: str, path: Path) -> None:
    """Raise an error if a checkpoint is damaged, before a job that would fail on it is submitted."""
    why = describe_checkpoint_problem(path)
    if not why:
        return
    sound = next((other for other in files.list_checkpoints() if not describe_checkpoint_problem(other)), None)
    alternative = (
        "" if sound is None else f"; to evaluate other weights of the training: [[--weights]] {shlex.quote(str(sound))}"
    )
    raise BadMeasurements(
        f"the {name} weights of training {files.signature} are damaged: {path}: {why}",
        f"restore the file from a copy of the run{alternative}",
    )


def _require_weights(path: Path, requested: str | Path) -> None:
    """Check that a file begins as those of torch.save do (zip or pickle), or has the name of a file of safetensors."""
    try:
        if path.is_file():  # opening a pipe would block until there is a writer
            with path.open("rb") as file:
                if path.suffix == ".safetensors" or file.read(2).startswith((b"PK", b"\x80")):
                    return
    except OSError as error:
        raise SpecError(
            f"[[--weights]] {requested}: cannot be read: {error.strerror}",
            "give the path of a weights file, or best or last",
        ) from None
    raise SpecError(
        f"[[--weights]] {requested} is not a weights file",
        "give a file written by torch.save, a .safetensors file, best or last",
    )


def _compute_code_digest(job: JobSpec, workdir: Path) -> str:
    """Return the digest of the user code that an evaluation runs; empty if there is none."""
    named = job.dataset.test.name if job.dataset.test else None
    names = [*imports.list_import_strings(job), *([named] if named and is_import_string(named) else [])]
    return imports.compute_digest_of_files(imports.list_files_of_import_strings(names, workdir), workdir)


def _make_evaluation_job(trained: JobSpec, current: JobSpec) -> JobSpec:
    """Return the job as it was trained, with the current test set, metrics, loader workers and cluster."""
    dataset = trained.dataset.model_copy(update={"test": current.dataset.test})
    # best_checkpoint and early_stopping name metrics, so they go with these: a record whose names do not fit could not be read again
    of_now = {key: getattr(current.train, key) for key in ("metrics", "best_checkpoint", "early_stopping", "workers")}
    train = trained.train.model_copy(update=of_now)
    return trained.model_copy(update={"dataset": dataset, "train": train, "cluster": current.cluster})


def run_evaluation(evaluation: PreparedEvaluation, submission: Submission) -> Work[EvaluationRecord | DetachedJobs]:
    """Evaluate the weights, attach to the job if it is already running, or return the stored result.

    Raises:
        OtherFormat: the run has an older format.
        OverBudget: the submission was not confirmed.
        Pending: the timeout has passed.
        Interruption: Ctrl-C; the job continues to run.
        JobFailed: the job has ended without a result, or was cancelled.
        TulaError: the evaluation failed, as classified by the table of exit reasons.
        SchedulerError: the scheduler refused the job.
    """
    run, task = evaluation.run, evaluation.task
    yield from map(WarningEvent, evaluation.warnings)
    if run.type is not None:
        yield Note(f"node type {run.type}")
    if evaluation.known_record is not None:
        when = words.format_local_time(evaluation.known_record.evaluated_at)
        yield Note(
            f"these weights were evaluated {when}; --fresh evaluates them again, for example if the samples have changed"
        )
        return evaluation.known_record
    require_current_format(run.path)
    launcher = submission.launcher_for(run.spec)
    unfinished = list_unfinished_jobs(run, launcher, [task.job])
    if not unfinished:
        planned = EvaluationPlanned(task)
        yield planned
        if run.spec.cluster.backend.has_queue:  # on this machine, evaluation needs no confirmation
            submission.require_confirmed(planned)
    with explain_interruption([run]):
        with lock_submission(run):
            if not list_jobs_to_wait_for(run, launcher, [task.job]):
                run.get_training(task.signature).drop_evaluation(task.key)
                submit_task(run, launcher, task)
        outcome = yield from submission.wait_for_jobs_or_detach(run, launcher, [task.job], unfinished)
    if isinstance(outcome, DetachedJobs):
        return outcome
    record = run.get_training(task.signature).read_evaluation(task.key)
    if record is None:
        raise make_job_error(run, task, "the evaluation")
    return record


def make_job_error(run: RunDir, task: EvaluateTask | RateSearchTask, subject: str) -> TulaError:
    """Return the error for a job that ended without a result, of the class of its last failure."""
    attempts = run.read_attempts(task.id)
    last_attempt = attempts[-1] if attempts else None
    if last_attempt is None or last_attempt.failure is None or run.is_cancelled(task.job):
        return JobFailed(
            f"{task.id} ended without a result",
            "read the output of the job with tula logs; run the same command to start it again",
        )
    where = f" (rank {last_attempt.rank} on {last_attempt.host})" if last_attempt.rank is not None else ""
    hint = describe_advice(last_attempt.failure, task.spec)
    return FAILURE_KINDS[last_attempt.failure.outcome].error(f"{subject} failed{where}: {last_attempt.message}", hint)
