"""Output of `tula status` and `tula list`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli.show.tables import (
    describe_cost,
    describe_metrics,
    describe_prediction_row,
    make_table,
    make_table_of_columns,
    measure_long_table_width,
    render_each_type,
    render_long_table,
)
from tula_cli.words import (
    choose_time_unit,
    describe_node_counts,
    format_count,
    format_duration,
    format_local_time,
    format_number,
    format_percent,
    get_first_line,
    make_relative_path,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tula_cli.run.records.recommendations import Recommendation
    from tula_cli.run.records.results import Branch, EvaluationRecord, StepChange
    from tula_cli.services.run_list import RunSummary
    from tula_cli.services.site_charges import SiteCharge
    from tula_cli.services.status import JobState, JobStatus, RunStatus
    from tula_cli.services.training_status import SpentAndRemainingCost, TrainingStatus, TuningStatus

# --- Status

STATE_STYLES = {
    "running": "cyan",
    "done": "green",
    "failed": "bold red",
    "diverged": "bold red",
    "lost": "bold red",
    "cancelled": "yellow",
    "held": "yellow",
    "suspended": "yellow",
}


def render_status(status: "RunStatus") -> Iterator["RenderableType"]:
    """Yield jobs, training, attempts and recommendation of a run."""
    counts = f"{status.measured} measured, {status.out_of_memory} out of memory, {status.failed} failed"
    yield f"{make_relative_path(status.path)}: {counts}"
    yield from (f"note: {note}" for note in status.notes)
    if status.jobs:
        yield ""
        yield make_jobs_table(status.jobs)
        causes = {get_first_line(row.attempt.message) for row in status.attempts}
        unexplained = [
            job for job in status.jobs if job.starts_at is not None or get_first_line(job.reason) not in causes
        ]
        yield from (f"{job.id} {job.state}: {story}" for job in unexplained if (story := describe_job_state(job)))
        yield from describe_chain_jobs(status.jobs)
    if status.training is not None:
        yield ""
        yield describe_training(status.training)
        if status.training.spent is not None and not status.training.finished:
            yield describe_spent_and_remaining_cost(status.training.spent)
        if status.training.tuning is not None and status.training.tuning.branches:
            yield ""
            yield make_branches_table(status.training.tuning.branches, status.training.tuning.chosen)
        yield from describe_step_changes(status.training.changes)
        for evaluated in status.evaluations:
            other = "" if evaluated.signature == status.training.signature else f"training {evaluated.signature}: "
            yield f"evaluated {other}{describe_evaluation(evaluated)}"
        yield from (f"warning: {text}" for text in status.training.warnings)
    if status.rehearsal is not None and status.rehearsal.over_at is not None:
        yield ""
        verdict = status.rehearsal.verdict or "no result"
        yield f"resume test of {format_local_time(status.rehearsal.over_at)}: {verdict}; {'; '.join(status.rehearsal.told)}"
    if status.attempts:
        yield ""
        yield make_attempts_table(status)
        yield from _render_causes(status)
    if status.between_rounds:
        yield ""
        yield "next: run tula profile again; it submits the next round, or ends the search"
    if status.recommendation is not None:
        yield ""
        yield f"recommended: {describe_prediction_row(status.recommendation.choice)}, {status.recommendation.criteria}"


def render_status_by_type(
    statuses: Mapping[str | None, "RunStatus"],
    chosen: "Recommendation | None",
    charges: "Mapping[str | None, SiteCharge]",
) -> Iterator["RenderableType"]:
    """Yield the status of each node type, and the recommendation over all node types."""
    yield from render_each_type(statuses, render_status)
    for name, charge in charges.items():
        whole = (
            "" if charge.predicted is None else f" ({format_number(charge.predicted)} predicted for the whole training)"
        )
        yield f"{'' if name is None else f'{name}: '}SLURM's bill, {charge.description}{whole}"
    if chosen is not None and None not in statuses:
        yield ""
        among = "" if any(option.startswith("--type") for option in chosen.options) else " over all node types"
        yield f"recommended{among}: {describe_prediction_row(chosen.choice)}, {chosen.criteria}"


def describe_job_state(job: "JobStatus") -> str:
    """Describe the reason of a job's state and its expected start."""
    start = [] if job.starts_at is None else [f"expected to start {format_local_time(job.starts_at)}"]
    return ", ".join(filter(None, [get_first_line(job.reason), *start]))


def make_attempts_table(status: "RunStatus") -> "Table":
    """Build a table with one row per attempt: hosts, first sample and outcome."""
    from rich.text import Text

    states = {job.id: job.state for job in status.jobs}
    active = {id_ for id_, state in states.items() if state in ("running", "suspended")}
    # the last attempt of each job, because attempts are ordered oldest first
    newest = {row.job: row.attempt for row in status.attempts}
    ends = [status.at if row.job in active else None for row in status.attempts]
    # unknown for an attempt that is open although its job is over
    seconds = [
        row.attempt.compute_duration_seconds(end) if row.attempt.ended_at or end else None
        for row, end in zip(status.attempts, ends, strict=True)
    ]
    divisor, unit = choose_time_unit(max(elapsed or 0.0 for elapsed in seconds))
    outcomes = [
        row.attempt.outcome or _describe_open_attempt(states.get(row.job), newest=newest[row.job] is row.attempt)
        for row in status.attempts
    ]
    has_resumed = any(row.attempt.samples for row in status.attempts)
    hosts = [row.attempt.hosts or row.attempt.host for row in status.attempts]
    on_machine = len(set(hosts)) == 1 and not any(row.attempt.allocation for row in status.attempts)
    columns: dict[str, Sequence[str | Text]] = {
        "task": [row.attempt.task for row in status.attempts],
        "try": [str(row.attempt.number) for row in status.attempts],
        "started": [format_local_time(row.attempt.started_at, "%m-%d %H:%M") for row in status.attempts],
        f"time\n({unit})": ["-" if elapsed is None else format_number(elapsed / divisor) for elapsed in seconds],
        "allocation": [row.attempt.allocation or "-" for row in status.attempts],
        "hosts": ["-" if on_machine else names for names in hosts],
        # the hosts column shows the nodes
        "nodes": ["-" if row.attempt.allocation else str(row.nodes) for row in status.attempts],
        "batch": ["-" if row.batch is None else str(row.batch) for row in status.attempts],
        "first\nsample": [str(row.attempt.samples or 0) if has_resumed else "-" for row in status.attempts],
        "outcome": [Text(outcome, STATE_STYLES.get(outcome, "bold red")) for outcome in outcomes],
    }
    return make_table_of_columns(columns, left=("task", "started", "allocation", "hosts", "outcome"))


def _describe_open_attempt(job: "JobState | None", *, newest: bool) -> str:
    """Return the state of an attempt that was not closed; the newest attempt of a finished job counts as done."""
    if job in ("running", "suspended"):
        return job
    return "done" if job == "done" and newest else "lost"


def _render_causes(status: "RunStatus") -> Iterator["RenderableType"]:
    """Yield why attempts ended early and why further tasks followed; an error that repeats within a task only once."""
    last = {(row.attempt.task, row.attempt.message): row.attempt for row in status.attempts}
    for row in status.attempts:
        attempt = row.attempt
        if row.cause:
            yield f"{attempt.task} continues after: {get_first_line(row.cause)}"
        if attempt.outcome not in (None, "done") and last[attempt.task, attempt.message] is attempt:
            rank = "" if attempt.rank is None else f" rank {attempt.rank}"
            where = f"{attempt.task} attempt {attempt.number} on {attempt.host}{rank}"
            yield f"{where}: {attempt.outcome}: {get_first_line(attempt.message)}"


def make_jobs_table(rows: Iterable["JobStatus"]) -> "Table":
    """Build a table with one row per job; a probe job shows its current probe."""
    from rich.text import Text

    job_rows = list(rows)
    divisor, unit = choose_time_unit(max((job.elapsed or 0.0) + (job.left or 0.0) for job in job_rows))
    columns: dict[str, Sequence[str | Text]] = {
        "job": [job.id for job in job_rows],
        "compared": [job.compared or "-" for job in job_rows],
        "scheduler\nid": ["-" if job.scheduler == "local" else job.scheduler_id for job in job_rows],
        "state": [Text(job.state, STATE_STYLES.get(job.state, "")) for job in job_rows],
        "nodes": [str(job.nodes) for job in job_rows],
        "probes": [f"{job.done}/{job.total}" if job.kind == "probe" else "-" for job in job_rows],
        "batch\n(/GPU)": ["-" if job.now is None else f"{job.now.batch} ({job.now.local_batch})" for job in job_rows],
        f"elapsed\n({unit})": [
            "-" if job.elapsed is None else format_number(job.elapsed / divisor) for job in job_rows
        ],
        f"remain-\ning ({unit})": ["-" if job.left is None else format_number(job.left / divisor) for job in job_rows],
        "node-\nhours": [format_number(job.node_hours) for job in job_rows],
    }
    return make_table_of_columns(columns, left=("job", "compared", "scheduler\nid", "state"))


def _describe_noise(row: Mapping[str, Any]) -> str:
    at = f"after epoch {row['epoch']:g}"
    if row.get("scale") is None:
        return f"gradient noise unknown {at}"
    return f"gradient noise scale {format_number(row['scale'])} samples {at}"


def describe_training(status: "TrainingStatus") -> str:
    """Describe the state of a training in one line."""
    nodes = describe_node_counts(status.possible_nodes or (status.nodes,))
    head = f"training {status.signature} on {nodes}{_describe_later_nodes(status)}, batch {status.batch}"
    if not status.submitted:
        return f"{head}, not submitted"
    parts = [
        f"{head}{_describe_stage(status)}",
        *([f"epoch {status.epoch:.2f} of {status.epochs}"] if status.epochs is not None else []),
        f"{status.samples} samples"
        if status.samples_asked is None
        else f"{status.samples} of {status.samples_asked} samples",
        *_list_training_measurements(status),
    ]
    if status.finished:
        parts.append("finished")
    elif status.eta is not None:
        parts.append(f"{format_duration(status.eta)} left")
    return ", ".join(parts)


def describe_spent_and_remaining_cost(spent: "SpentAndRemainingCost") -> str:
    """Describe time and cost of a training so far, and the predicted remaining ones."""
    spent_text = (
        f"so far {format_duration(3600 * spent.hours)}, {describe_cost(spent.node_hours, spent.cost, spent.currency)}"
    )
    remaining_texts = [
        f"{format_duration(3600 * rest.hours)}, {describe_cost(rest.nodes * rest.hours, rest.cost, spent.currency)}"
        f" on {format_count(rest.nodes)}"
        for rest in spent.rest
    ]
    return f"{spent_text}; predicted for the rest: {' or '.join(remaining_texts)}" if remaining_texts else spent_text


def describe_progress_of_training(status: "TrainingStatus") -> str:
    """Describe what a running training measures, in the line below its progress bar."""
    head = f"{format_count(status.nodes)}{_describe_later_nodes(status)}, batch {status.batch}{_describe_stage(status)}"
    return ", ".join([head, *_list_training_measurements(status)])


def _list_training_measurements(status: "TrainingStatus") -> list[str]:
    parts = [f"loss {format_number(status.loss, 4)}"] if status.loss is not None else []
    parts += [f"top-1 {format_number(status.top1, 4)} %"] if status.top1 is not None else []
    parts += [f"perplexity {format_number(status.perplexity, 4)}"] if status.perplexity is not None else []
    parts += [f"{name} {format_number(value, 4)}" for name, value in status.metrics.items()]
    parts += [f"lr {format_number(status.lr)}"] if status.lr is not None else []
    parts += [f"beta2 {status.beta2:.6g}"] if status.beta2 is not None else []
    parts += [f"AGS {describe_scaling(status.ags['mean'], status.ags['scaled'])}"] if status.ags is not None else []
    parts += [_describe_noise(status.noise)] if status.noise is not None else []
    parts += [_describe_tuning(status.tuning)] if status.tuning is not None else []
    if status.step_time is not None:
        predicted = (
            "" if status.predicted_step is None else f" (predicted {format_number(1000 * status.predicted_step)})"
        )
        parts.append(f"{format_number(1000 * status.step_time)} ms per step{predicted}")
    if status.tokens_per_second is not None:
        padding = f" ({format_percent(status.padding)} % padding not counted)" if status.padding else ""
        parts.append(f"{format_number(status.tokens_per_second)} tokens/s{padding}")
    parts += [f"{format_number(status.kwh)} kWh{' so far' * (not status.finished)}"] if status.kwh is not None else []
    return parts


def _describe_stage(status: "TrainingStatus") -> str:
    stage = status.stage
    if stage is None:
        return ""
    batch = "" if stage.batch == status.batch else f"now {stage.batch}, "
    noise = "" if stage.noise is None else f", noise scale {format_number(stage.noise)}"
    return f" ({batch}stage {stage.number} of {stage.count}{noise})"


def _describe_later_nodes(status: "TrainingStatus") -> str:
    later = {count: stage.batch for stage in reversed(status.stages) if (count := stage.nodes or 0) > status.nodes}
    texts = [f"{nodes} from batch {batch} on" for nodes, batch in sorted(later.items())]
    return f" (then {', '.join(texts)})" if texts and not status.finished else ""


def describe_chain_jobs(job_statuses: "Iterable[JobStatus]") -> Iterator[str]:
    """Yield one line per job whose chained jobs request different numbers of nodes."""
    for job in job_statuses:
        by_nodes: dict[int, list[str]] = {}
        for chain_job in job.links:
            by_nodes.setdefault(chain_job.nodes, []).append(chain_job.scheduler_id)
        batches = {chain_job.nodes: ", ".join(map(str, chain_job.batches)) for chain_job in job.links}
        texts = [
            f"{', '.join(ids)} on {format_count(nodes)} (batch {batches[nodes]})" for nodes, ids in by_nodes.items()
        ]
        if texts:
            yield f"chained jobs of {job.id}: {'; '.join(texts)}"


def describe_evaluation(evaluated: "EvaluationRecord") -> str:
    """Describe the evaluation of a training's weights in one line."""
    at = "" if evaluated.samples is None else f" at {evaluated.samples} samples"
    name = evaluated.weights if evaluated.samples is not None else make_relative_path(Path(evaluated.weights))
    samples = "test" if evaluated.test else "validation"
    return f"{name}{at} on the {samples} set: {describe_metrics(evaluated.metrics)}"


def describe_step_changes(step_changes: "Sequence[StepChange]") -> Iterator[str]:
    """Yield one line per change of the step time during training."""
    if not step_changes:
        return  # without importing numpy
    from tula_cli.models.time.changes import describe_step_change

    yield from (f"changed: {describe_step_change(change)}" for change in step_changes)


def describe_scaling(mean: float, share: float) -> str:
    """Describe the mean factor of gradient scaling and the share of scaled steps."""
    return f"factor {format_number(mean, 3)} in {format_percent(share)} % of the steps"


def _describe_tuning(status: "TuningStatus") -> str:
    if status.arm is None:
        return f"as tuned: {status.chosen}" if status.chosen else "tuning ends"
    return f"tuning: arm {status.number} of {status.count} ({status.arm})"


def make_branches_table(branches: "Sequence[Branch]", chosen: str | None) -> "Table":
    """Build a table with one row per arm of self-tuning: the held-out result of its branch."""
    from tula_cli.models.self_tuning import sort_branches

    table = make_table(("arm", "epochs", "validation\nloss", "top-1 (%)", ""), left=(0, 4))
    for branch in sorted(sort_branches(branches), key=lambda branch: branch.arm != chosen):
        note = "chosen" if branch.arm == chosen else "diverged" if branch.diverged else ""
        table.add_row(
            branch.arm,
            format_number(branch.epochs),
            format_number(branch.loss, 4),
            format_number(branch.top1, 4),
            note,
        )
    return table


def render_runs(run_summaries: "Sequence[RunSummary]", *, width: int) -> Iterator["RenderableType"]:
    """Yield a table with one row per run, without dataset and model if it is too wide, then the runs that cannot be read."""
    columns = ["run", "last change", "model", "dataset", "probes", "chosen\nnodes", "chosen\nbatch", "trained", "best result"]  # fmt: skip
    rows = [_make_run_row(run) for run in run_summaries]
    for column in (3, 2):
        if measure_long_table_width(columns, rows) > width:
            columns, *rows = ([*row[:column], *row[column + 1 :]] for row in (columns, *rows))
    yield from render_long_table(columns, rows, left=range(len(columns) - 5), width=width)
    yield from (f"{run.id} cannot be read: {run.problem}" for run in run_summaries if run.problem)
    yield from (f"{run.id}: {words}, and left out" for run in run_summaries for words in run.damaged)


def _make_run_row(run: "RunSummary") -> list[str]:
    choice = {"nodes": "-", "batch": "-", **(run.recommendation or {}).get("choice", {})}
    counts = [str(run.measured), str(choice["nodes"]), str(choice["batch"]), str(run.trained)]
    return [
        run.id,
        format_local_time(run.changed, "%Y-%m-%d"),
        run.script or run.model,
        run.dataset or "-",
        *counts,
        _describe_best_result(run),
    ]


def _describe_best_result(run: "RunSummary") -> str:
    """Describe the best result of a run's trainings: top-1, or without it perplexity or loss."""
    if run.best_top1 is not None:
        return f"top-1 {format_number(run.best_top1, 4)}{'' if run.script else ' %'}"  # a script may report fractions
    if run.best_loss is None:
        return "-"
    best = (run.best_perplexity, "perplexity") if run.best_perplexity is not None else (run.best_loss, "loss")
    return f"{best[1]} {format_number(best[0], 4)}"
