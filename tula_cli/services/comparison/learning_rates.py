"""`tula compare --learning-rates` and `--batches`: the learning rate of a large batch, by short branches from one checkpoint."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.cluster.inspection import Inspect
from tula_cli.cluster.launcher import list_unfinished_jobs, lock_submission, submit_missing_tasks
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, Diverged, OverBudget, SpecError
from tula_cli.models import rate_search
from tula_cli.models.ramp_costs import compute_batch_divisor
from tula_cli.models.rate_search import MIN_STEPS
from tula_cli.run.code import choose_code
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.format import require_current_format
from tula_cli.run.frames import make_frame, render_html
from tula_cli.run.records.results import JobFile, RateBranch, RateSearch
from tula_cli.run.records.tasks import RateSearchTask
from tula_cli.services import compare, messages, resume_test, train
from tula_cli.services.evaluate import make_job_error
from tula_cli.services.events import Note, RateSearchPlanned, WarningEvent, Work
from tula_cli.services.plans import LearningRateSearchPlan
from tula_cli.services.waiting import DetachedJobs, Submission, describe_exceeded_cap, explain_interruption
from tula_cli.spec.scripts.script import Script
from tula_cli.spec.signature import compute_digest, compute_train_signature
from tula_cli.words import format_count, format_number, join_words, quote_path

if TYPE_CHECKING:
    import pandas as pd

EXPENSIVE_SHARE = 0.12
"""Share of a training's samples above which a search is reported as expensive."""
LOW_RATE = 0.8
"""Share of a script's learning rate below which its branches do not show whether the full rate is stable."""
MIN_GAIN = 0.01
"""Minimum relative decrease of the loss in the best branch; below it, the losses do not distinguish learning rates."""


@dataclass(frozen=True)
class LearningRateReport:
    """The learning rate chosen for a large batch, and the branches that the choice is based on."""

    nodes: int
    batch: int
    reference_batch: int
    chosen: RateBranch
    overrides: tuple[str, ...]  # overrides of the job that train with the chosen learning rate
    command: str  # shell command that trains with it
    branches: tuple[RateBranch, ...]
    best_batch: int | None  # largest batch whose loss is close to the best; None if only one batch was tried
    too_large: int | None  # batch that ran out of memory
    # gradient noise scale with its 90 % interval, as in the record
    critical_batch: tuple[float, float, float | None] | None
    held_out: bool  # losses are of held-out training samples; False: of a script's training steps
    epoch: float  # epoch of the checkpoint at which the noise was measured and the branches started
    samples: int
    share: float  # samples of the search as a share of those of a training
    loss_margin: float  # how far the chosen learning rate's loss may exceed the lowest loss at this batch
    answer: str
    warnings: tuple[Diagnostic, ...] = ()

    def frame(self) -> "pd.DataFrame":
        """Return one row per branch: batch, rule, factor, learning rate, loss, top-1, whether it diverged."""
        columns = ("batch", "rule", "factor", "lr", "loss", "top1", "diverged", "samples", "seconds")
        return make_frame([{name: getattr(branch, name) for name in columns} for branch in self.branches])

    def _repr_html_(self) -> str:
        """Return the answer and a row per branch, for a notebook."""
        rows = [
            (
                str(branch.batch),
                branch.rule,
                format_number(branch.lr),
                "diverged" if branch.diverged else format_number(branch.loss, 4),
            )
            for branch in self.branches
        ]
        return render_html(
            self.answer,
            ["batch", "rule", "learning rate", "loss"],
            rows,
            notes=[*(w.text for w in self.warnings), self.command],
        )


def prepare_rate_search(
    runs: Sequence[Run],
    inspect: Inspect,
    *,
    batch: int | None,
    nodes: int | None,
    node_type: str | None = None,
    near_batches: bool = False,
) -> Work[LearningRateSearchPlan]:
    """Plan a search; nothing is written.

    Args:
        batch: global batch; None for the recommended one.
        nodes: number of nodes; None for the recommended one, or the fewest in search.nodes.
        node_type: the node type; None for the recommended one.
        near_batches: whether half and twice the batch are tried too.

    Raises:
        OtherFormat: the run has an older format.
        BadMeasurements: no batch or node type is given, known or recommended.
        SpecError: the learning rate or the batch of the job cannot be searched, or its script cannot be branched.
    """
    run = train.choose_run_to_train(runs, node_type)
    require_current_format(run.path)
    spec = run.spec
    nodes = compare.choose_default_nodes(run) if nodes is None else nodes
    divisor = compute_batch_divisor(spec, nodes)
    script_size, save_every = (None, 0) if spec.script is None else _require_branchable(run, spec.script, divisor)
    batch = compare.read_recommended_batch(run) if batch is None else batch
    rate_search.require_searchable(spec, batch)
    training = train.plan_training(run, nodes=nodes, batch=batch, inspect=inspect)
    yield from map(WarningEvent, training.code.warnings)
    size = script_size or train.find_dataset_size(run, inspect)
    others = rate_search.list_other_batches(spec, batch, divisor=divisor, dataset_size=size) if near_batches else ()
    plan = rate_search.plan_rate_search(spec, (batch, *others), dataset_size=size, save_every=save_every)
    if plan.training_share > EXPENSIVE_SHARE:
        yield WarningEvent(
            messages.expensive_rate_search(share=plan.training_share, samples=plan.length, steps=MIN_STEPS)
        )
    signature = compute_train_signature(  # the same for all rules of the learning rate
        rate_search.make_job_of_rule(spec, "linear"), nodes=nodes, batch=batch, code=training.code.identity
    )
    key = compute_digest({"training": signature, "batches": others})
    task = RateSearchTask(
        id=f"rates-{key}",
        job=f"rates-{key}",
        spec=spec,
        workdir=training.task.workdir,
        nodes=nodes,
        key=key,
        batches=(batch, *others),
        dataset_size=script_size,
        save_every=save_every,
    )
    hours = training.prediction.hours if training.prediction is not None else None
    arms = tuple(rate_search.list_rate_arms(spec, batch))
    starts = plan.branches + 1 if spec.workload.restarts_for_branch else 0
    seconds = max((probe.overheads.startup for probe in run.read_measurements()), default=0.0)
    return LearningRateSearchPlan(run, task, plan, arms, training.code, hours, training.price, starts * seconds / 3600)


def _require_branchable(run: Run, script: Script, divisor: int) -> tuple[int, int]:
    """Check that a script can be branched; return the samples of an epoch, and those between two of its checkpoints.

    The second number is 0 if the script saves on request.
    """
    reference = script.reference.batch
    size = script.known_dataset_size or run.read_snapshot().measured_dataset_size
    finding, resumes = None, ""
    if script.resume is not None:
        finding = resume_test.load_finding(run, choose_code(run, run.spec, Path.cwd(), keep=False))
        resumes = script.resume.batch if finding is None else finding.resumes
    problem, advice = "", ""
    if script.resume is None:
        problem, advice = "script.resume is missing", "describe in script.resume how the script resumes"
    elif not script.placeholders & {"lr", "lr_factor"}:
        problem, advice = (
            "script.command has neither {lr} nor {lr_factor}",
            "pass the learning rate to the script with {lr}",
        )
    elif resumes == "rehearse":
        problem = "it is unknown whether the script can resume at another batch"
        advice = "run tula check --rehearse, which tests whether the script can resume"
    elif resumes not in ("epoch", "any"):
        problem = f"the script cannot resume at another batch ({finding.why if finding else f'script.resume.batch: {resumes}'})"
        advice = "correct how the script resumes, and run tula check --rehearse"
    elif reference % divisor:
        problem = f"script.reference.batch {reference} is not divisible by {divisor} (nodes x GPUs per node x train.accumulate)"
        advice = (
            f"set script.reference to the settings of a batch that is divisible by {divisor}"
            if reference % compute_batch_divisor(run.spec, 1)
            else "search on fewer nodes: [[--nodes]] 1"
        )
    elif size is None:
        problem, advice = "the number of samples per epoch is unknown", "set script.dataset_size"
    elif size < reference:
        problem = f"script.reference.batch {reference} is larger than an epoch of {size} samples"
        advice = "correct script.dataset_size or script.reference.batch"
    if problem or size is None:
        raise SpecError(
            f"tula cannot start short trainings of the script from its checkpoint: {problem}",
            f"{advice}; or compare trainings of a quarter of the epochs: tula compare --methods lbt,sqrt,lrs",
        )
    resume_test.get_resume_settings(run.spec)
    if resumes == "any" and script.save != "none":
        return size, 0
    begins = [] if finding is None else [start for start in finding.rehearsal.starts if start.phase == "begin"]
    for start in reversed(begins):
        if start.saved_samples:
            epochs = round(start.saved_samples / size)
            is_epoch_end = epochs and abs(start.saved_samples - epochs * size) <= epochs * start.batch
            steps = epochs * (size // reference) if is_epoch_end else round(start.saved_samples / start.batch)
            return size, steps * reference
    return size, size // reference * reference if script.length.epochs is not None else 0


def run_rate_search(search: LearningRateSearchPlan, submission: Submission) -> Work[LearningRateReport | DetachedJobs]:
    """Train the missing branches, or attach to the job if it is running, and return the report.

    Raises:
        OverBudget: the search was not confirmed, or is expected to use more than search.max_node_hours.
        Pending: the timeout has passed.
        Interruption: Ctrl-C; the job continues to run.
        Diverged: every learning rate diverged.
        TulaError: the job failed, as classified by the table of exit reasons.
        SchedulerError: the scheduler refused the job.
    """
    run, task = search.run, search.task
    if _is_search_complete(run, task):
        yield Note("this search has already finished")
        return read_search_report(search, submission.find_settings_origin(run))
    launcher = submission.launcher_for(run.spec)
    unfinished = list_unfinished_jobs(run, launcher, [task.job])
    if not unfinished:
        planned = RateSearchPlanned(search)
        yield planned
        cap = run.spec.search.max_node_hours
        if problem := describe_exceeded_cap("the search for a learning rate", planned.node_hours or 0.0, cap):
            raise OverBudget(problem, "raise the limit, for example [[--set search.max_node_hours=100]]")
        if known := len(_list_finished_branches(run, task)):
            yield Note(f"{known} of {search.plan.branches} branches have already been trained")
        submission.require_confirmed(planned)
    submission.save_runs([run])
    with explain_interruption([run]):
        with lock_submission(run):
            submit_missing_tasks(run, launcher, [task], search.code)
        list_branches = _NewBranches(search).list_notes
        outcome = yield from submission.wait_for_jobs_or_detach(run, launcher, [task.job], unfinished, list_branches)
    if isinstance(outcome, DetachedJobs):
        return outcome
    return read_search_report(search, submission.find_settings_origin(run))


def _list_finished_branches(run: RunDir, task: RateSearchTask) -> tuple[RateBranch, ...]:
    record = run.read_rate_search(task.key)
    return () if record is None else record.branches


class _NewBranches:
    """Finds the branches that have ended since the last call."""

    def __init__(self, search: LearningRateSearchPlan) -> None:
        self._search = search
        self._reported = len(_list_finished_branches(search.run, search.task))

    def list_notes(self) -> Iterator[Note]:
        branches = _list_finished_branches(self._search.run, self._search.task)
        for number, branch in enumerate(branches[self._reported :], self._reported + 1):
            result = "diverged" if branch.diverged else f"loss {format_number(branch.loss, 4)}"
            yield Note(
                f"branch {number} of {self._search.plan.branches}: batch {branch.batch},"
                f" learning rate {format_number(branch.lr)}: {result}"
            )
        self._reported = len(branches)


# --- The result


def _find_batch_too_large(run: RunDir, task: RateSearchTask) -> int | None:
    """Return the larger batch at which the search ran out of memory after the requested one; None if none did."""
    record, attempts = run.read_rate_search(task.key), run.read_attempts(task.id)
    failure = attempts[-1].failure if attempts else None
    if record is None or record.finished or failure is None or failure.outcome != "device_oom":
        return None
    arm = rate_search.find_next_arm(task.spec, task.batches, record.branches, record.start_loss)
    return arm.batch if arm is not None and arm.batch > task.batches[0] else None


def _is_search_complete(run: RunDir, task: RateSearchTask) -> bool:
    record = run.read_rate_search(task.key)
    return record is not None and (record.finished or _find_batch_too_large(run, task) is not None)


def read_search_report(search: LearningRateSearchPlan, file: JobFile | None = None) -> LearningRateReport:
    """Return the result of a search.

    Raises:
        BadMeasurements: it was not started.
        Diverged: every learning rate diverged.
        TulaError: the job failed, as classified by the table of exit reasons.
    """
    run, task = search.run, search.task
    record = run.read_rate_search(task.key)
    if record is None and not run.read_attempts(task.id):
        first, *others = task.batches
        with_others = f" that also tries batches {join_words(others)}" if others else ""
        raise BadMeasurements(
            f"there is no search for a learning rate at batch {first}{with_others} on {format_count(task.nodes)} yet",
            "; ".join(
                ["to start it, remove --show", *(f"to show another: {o}" for o in _list_other_searches(run, task))]
            ),
        )
    if record is None or not _is_search_complete(run, task):
        raise make_job_error(run, task, "the search for a learning rate")
    batch, reference = task.batches[0], record.reference_batch
    chosen = rate_search.find_branch_with_highest_lr(
        [branch for branch in record.branches if branch.batch == batch], record.start_loss
    )
    if chosen is None:
        raise Diverged(
            f"all learning rates diverged at batch {batch}, even the one that was tuned for batch {reference}",
            f"lower {run.spec.workload.reference_lr_key}, or use a smaller batch",
        )
    overrides = tuple(rate_search.list_rule_overrides(run.spec, chosen.rule))
    branches_of_rule = [branch for branch in record.branches if branch.rule == chosen.rule]
    largest = (
        rate_search.find_branch_with_largest_batch(branches_of_rule, record.start_loss)
        if len(task.batches) > 1
        else None
    )
    lowest = min(branch.loss for branch in record.branches if branch.batch == batch and branch.loss is not None)
    times = "the learning rate" if chosen.factor == 1 else f"{chosen.factor:.3g} times the learning rate"
    return LearningRateReport(
        nodes=task.nodes,
        batch=batch,
        reference_batch=reference,
        chosen=chosen,
        overrides=overrides,
        command=_make_train_command(run, task, overrides, file),
        branches=record.branches,
        best_batch=None if largest is None else largest.batch,
        too_large=_find_batch_too_large(run, task),
        critical_batch=record.noise,
        held_out=run.spec.workload.evaluates_held_out_data,
        epoch=record.start_epoch,
        samples=record.samples,
        share=record.samples / record.total,
        loss_margin=rate_search.compute_loss_margin(lowest, record.start_loss),
        answer=f"Use {times} of batch {reference} at batch {batch}: {format_number(chosen.lr)}.",
        warnings=tuple(_warn_inconclusive_losses(record, run.spec.workload.reference_lr)),
    )


def _list_other_searches(run: RunDir, task: RateSearchTask) -> list[str]:
    """Return the options of the searches of a run that have results, except those of `task`, oldest first."""
    started = [
        other
        for other in run.read_snapshot().select_tasks(RateSearchTask)
        if other.key != task.key and run.read_rate_search(other.key) is not None
    ]
    options = dict.fromkeys(map(_describe_options, started))
    return [f"{text}{' with other settings' * (text == _describe_options(task))}" for text in options]


def _describe_options(task: RateSearchTask) -> str:
    kind = "--batches" if len(task.batches) > 1 else "--learning-rates"
    return f"{kind} --batch {task.batches[0]} --nodes {task.nodes}"


def _warn_inconclusive_losses(record: RateSearch, reference_rate: float | None) -> Iterator[Diagnostic]:
    if record.start_lr is not None and reference_rate is not None and record.start_lr < LOW_RATE * reference_rate:
        yield messages.branches_below_learning_rate(lr=record.start_lr, reference=reference_rate)
    lowest = min(branch.loss for branch in record.branches if branch.loss is not None)
    if record.start_loss - lowest < MIN_GAIN * abs(record.start_loss):
        yield messages.branches_learned_little(start=record.start_loss, lowest=lowest)


def _make_train_command(run: RunDir, task: RateSearchTask, overrides: Sequence[str], file: JobFile | None) -> str:
    keys = {override.partition("=")[0] for override in overrides}
    earlier = [] if file is None else [text for text in file.overrides if text.partition("=")[0] not in keys]
    where = f"--run {quote_path(run.path)}" if file is None else quote_path(Path(file.path))
    settings = "".join(f" --set {shlex.quote(override)}" for override in (*earlier, *overrides))
    return f"tula train {where} --nodes {task.nodes} --batch {task.batches[0]}{settings}"


def describe_critical_batch(report: LearningRateReport) -> str:
    """Describe the gradient noise scale at the checkpoint."""
    if report.critical_batch is None and not report.held_out:
        return "critical batch (gradient noise scale): unknown, because it is measured only if the script uses DDP on two or more ranks"
    if report.critical_batch is None:
        return f"critical batch (gradient noise scale) at epoch {report.epoch:.2g}: unknown"
    scale, low, high = report.critical_batch
    if high is None and scale <= low:  # the gradient is smaller than its noise: only a lower bound is known
        return f"critical batch (gradient noise scale) at epoch {report.epoch:.2g}: at least {low:.3g} (95 % bound)"
    interval = f"at least {low:.3g}" if high is None else f"{low:.3g} to {high:.3g}"
    return f"critical batch (gradient noise scale) at epoch {report.epoch:.2g}: {scale:.3g} (90 % interval: {interval})"
