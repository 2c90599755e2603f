"""Output of `tula train`: its plan and its result."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.show.status import describe_scaling, describe_step_changes, make_branches_table
from tula_cli.show.tables import describe_cost, describe_metrics, make_table, render_scripts, select_shown_metrics
from tula_cli.words import (
    choose_time_unit,
    compute_perplexity,
    describe_configuration,
    describe_node_counts,
    format_count,
    format_duration,
    format_number,
    format_percent,
    is_interval_too_wide,
    make_relative_path,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tula_cli.models.choice.baseline import BaselineSaving
    from tula_cli.models.choice.campaign import Campaign
    from tula_cli.run.records.recommendations import Prediction
    from tula_cli.run.records.results import EvaluationRecord, Summary
    from tula_cli.run.records.tasks import EvaluateTask, TrainTask
    from tula_cli.services.plans import TrainPlan
    from tula_cli.services.site_charges import SiteCharge
    from tula_cli.services.train_seeds import SeedsReport


def render_train_plan(
    plan: "TrainPlan", *, chain_nodes: Sequence[int] = (), scripts: Sequence[str] = (), is_running: bool = False
) -> Iterator["RenderableType"]:
    """Yield the nodes, number of jobs, expected time and cost of a training, which may be pending or running already."""
    yield from _render_training_plan(plan, is_running=is_running)
    if plan.finished:
        return
    if len(chain_nodes) > 1:
        counts = {nodes: chain_nodes.count(nodes) for nodes in sorted(chain_nodes)}
        on = ", ".join(f"{count} on {format_count(nodes)}" for nodes, count in counts.items())
        jobs_text = f"{len(chain_nodes)} jobs" + f" ({on})" * (len(counts) > 1)
        yield f"a chain of {jobs_text}, which run one after the other; tula cancels jobs that are not needed"
    if plan.balance is not None:
        yield f"balance: {plan.balance.words}"
    yield from render_scripts(scripts)


def render_seeds_plan(plan: "Campaign", missing: int, *, scripts: Sequence[str] = ()) -> Iterator["RenderableType"]:
    """Yield the plan of trainings with different seeds, and how many of them would be submitted."""
    from tula_cli.show.campaign import render_campaign

    yield from render_campaign(plan)
    yield ""
    yield f"{missing} of {format_count(plan.trainings, 'training')} to submit, each with a different seed"
    yield from render_scripts(scripts)


def render_seed_trainings(report: "SeedsReport") -> Iterator["RenderableType"]:
    """Yield a table of the trainings of a plan, and their cost."""
    table = make_table(["seed", "nodes", "batch", "time (h)", "cost", "training", "result"], left=(5, 6))
    for row in report.trainings:
        hours, cost = (None, None) if row.summary is None else (row.summary.actual_hours, row.summary.actual_cost)
        result = row.problem or "not finished"
        if row.summary is not None:
            result = describe_metrics(row.summary.metrics)
        table.add_row(
            str(row.seed), str(row.nodes), str(row.batch), format_number(hours), format_number(cost), row.signature, result
        )  # fmt: skip
    yield table
    finished = sum(row.summary is not None for row in report.trainings)
    yield (
        f"{finished} of {format_count(len(report.trainings), 'training')} finished; cost {format_number(report.cost)} of the"
        f" planned {format_number(report.plan.cost)} {report.plan.currency}"
    )


def _describe_planned_branches(task: "TrainTask") -> Iterator[str]:
    from tula_cli.models import self_tuning
    from tula_cli.spec.ags import BRANCHING_EPOCH

    if not (count := len(self_tuning.list_arms_of_training(task.spec, task.batch))):
        return
    if count == 1:
        reference = task.spec.train.reference_batch
        why = f"batch {task.batch} is not above train.reference_batch ({reference})"
        if task.spec.auto.arms:
            why = "auto.arms contains no other arm"
        yield f"method auto trains with lbt only, because {why}"
        return
    epochs = count * self_tuning.compute_branch_epochs(task.spec, count)
    in_total = f"{format_number(epochs)} epochs in total, in addition to the training"
    yield f"after epoch {BRANCHING_EPOCH}, tries {count} settings in short branches ({in_total}) and continues with one of them"


def _describe_planned_stages(task: "TrainTask", predicted: "Prediction | None") -> Iterator[str]:
    """Describe how the batch grows, as far as known before the start."""
    from tula_cli.models.ramp import describe_stages

    train = task.spec.train
    if train.stages is None:
        return
    predicted_stages = () if predicted is None else predicted.stages
    growth = "The batch grows instead of a decaying learning rate" if train.stages == "decay" else "The batch grows"
    included = " Times and costs include all stages." if predicted_stages else ""
    if task.stages and (train.stages == "decay" or any(stage.noise is not None for stage in task.stages)):
        yield f"{growth}: {describe_stages(task.stages)}.{included}"
    elif predicted_stages:
        steps = ", ".join(f"{stage.batch} ({format_count(stage.steps, 'step')})" for stage in predicted_stages)
        yield f"{growth}: {steps}, then {task.batch}.{included}"
    elif task.batch > train.reference_batch:
        yield "The batch grows over the first epochs (train.ramp); the log shows when."


def _describe_node_growth(task: "TrainTask") -> Iterator[str]:
    texts = [f"{format_count(stage.nodes)} at batch {stage.batch}" for stage in task.stages if stage.nodes is not None]
    if texts:
        yield f"the number of nodes grows with the batch: {', '.join(texts)}"


def _describe_job_sizes(task: "TrainTask") -> Iterator[str]:
    """Describe time and cost of a training on each number of nodes that its jobs may be granted."""
    for size in task.sizes:
        parts = f"local batch {task.batch // (size.nodes * task.spec.cluster.gpus_per_node)}"
        if size.splits > 1:
            parts += f" in micro-batches of {size.micro_batch}"
        if size.prediction is not None:
            cost = describe_cost(size.prediction.all_node_hours, size.prediction.cost, task.spec.pricing.currency)
            parts += f", {format_duration(3600 * size.prediction.hours)}, {cost}"
        yield f"  {format_count(size.nodes)}: {parts}"


def _render_training_plan(plan: "TrainPlan", *, is_running: bool) -> Iterator["RenderableType"]:
    from tula_cli.models.out_of_memory import describe_why_not_splittable

    task, predicted = plan.task, plan.prediction
    local = task.batch // (task.training_nodes * task.spec.cluster.gpus_per_node)
    if len(task.sizes) > 1:
        counts = describe_node_counts(task.node_counts)
        yield f"train at batch {task.batch} on {counts}, as many as each job is granted, {plan.source}"
        yield from _describe_job_sizes(task)
    else:
        only = "the only usable number of nodes in the range, " * len(task.sizes)
        yield f"train on {describe_configuration(task.training_nodes, task.batch, local)}, {only}{plan.source}"
    length = task.spec.workload.describe_length()
    started = "" if task.spec.script is None else f" of {task.spec.workload.description}"
    yield f"{length}{started}, method {task.spec.train.method}, run train-{task.signature}"
    yield from _describe_planned_branches(task)
    yield from _describe_planned_stages(task, predicted)
    yield from _describe_node_growth(task)
    if plan.finished:
        yield "already finished: tula train shows the result"
        return
    for other in plan.finished_elsewhere:
        yield f"already trained on {format_count(other.nodes)} with batch {other.start_batch} (train-{other.signature}): this is another training"
    if is_running:
        yield f"{task.job} is pending or running: tula train follows it and submits nothing"
    elif plan.resumes is not None:
        yield f"resumes from the checkpoint at {plan.resumes} samples"
    if plan.rehearses:
        minutes, nodes = f"{task.spec.compute_measuring_minutes():g} min", task.resume_test_nodes
        purpose = "can resume (--no-rehearse skips it)" if nodes == 1 else "can resume, also on other nodes"
        yield f"first, a test of at most {minutes} on {format_count(nodes)} checks that the script {purpose}"
    if len(task.ladder) > 1:
        first = "" if describe_why_not_splittable(task.spec) else "in smaller micro-batches, then "
        smaller = ", ".join(str(fallback.batch) for fallback in task.ladder[1:])
        yield f"after an out-of-memory error: {first}at the next smaller batch: {smaller}"
    if plan.interruption:
        yield f"checkpoints: {plan.interruption}"
    if predicted is None:
        yield "no prediction of time and cost: this configuration has no measurements"
        return
    if task.spec.train.early_stopping is not None and task.spec.train.early_stopping.depends_on_metric:
        yield "train.early_stopping may end the training earlier; times and costs are for all epochs"
    currency = task.spec.pricing.currency
    max_hours = predicted.hours_high
    width_warning = ", too uncertain for a decision" * is_interval_too_wide(predicted.hours_low, max_hours)
    high = "" if max_hours is None else f" (90 % interval up to {format_duration(3600 * max_hours)}{width_warning})"
    on_spot = ", on spot nodes" * (predicted.market == "spot")
    energy = "" if predicted.kwh is None else f", {format_number(predicted.kwh)} kWh"
    whole = "the whole training: " * (plan.resumes is not None)
    yield f"{whole}{format_duration(3600 * predicted.hours)}{high}, {describe_cost(predicted.all_node_hours, predicted.cost, currency)}{energy}{on_spot}"
    yield f"price: {plan.price}"


# --- The evaluation of weights


def render_evaluation_plan(task: "EvaluateTask") -> Iterator[str]:
    """Describe which weights are evaluated, on which samples and on how many nodes."""
    at = "" if task.samples is None else f" at {task.samples} samples"
    yield f"evaluate {_describe_weights(task.weights)} of training {task.signature}{at} on {_describe_samples(task.spec.dataset.test is not None)}"
    yield f"{format_count(task.nodes)}, local batch {task.local_batch}"


def render_evaluation(evaluated: "EvaluationRecord") -> Iterator[str]:
    """Yield the evaluation of weights on a set of samples."""
    from tula_cli.models.choice.early_stopping import PERCENT_METRICS

    at = "" if evaluated.samples is None else f" at {evaluated.samples} samples"
    on = f"{_describe_samples(evaluated.test)}, {evaluated.size} samples ({evaluated.dataset})"
    yield f"{_describe_weights(evaluated.weights)} of training {evaluated.signature}{at} on {on}"
    yield ", ".join(
        f"{name} {format_number(value, 4)}{' %' * (name in PERCENT_METRICS)}"
        for name, value in select_shown_metrics(evaluated.metrics).items()
    )
    if not evaluated.test:
        yield "the best epoch was chosen on these samples, so the result is optimistic; set dataset.test to use a separate test set"


def _describe_weights(name: str) -> str:
    return f"the {name} weights" if name in ("best", "last") else f"{make_relative_path(Path(name))} with the model"


def _describe_samples(test: bool) -> str:
    return "the test set" if test else "the validation set"


# --- The end of a training


def describe_best_epoch(summary: "Summary") -> str:
    """Describe the result of the best epoch by the metric that judged it.

    The metric is train.best_checkpoint, top-1, or the loss (with the perplexity of a language model).
    """
    if summary.best is not None:
        return f"best {summary.best.metric} {format_number(summary.best.value, 4)}"
    if "top1" in summary.metrics:
        return f"best top-1 {format_number(summary.best_top1, 4)} %"
    if summary.best_loss is None:  # a run of an older version of tula
        return "lowest loss"
    loss = f"lowest loss {format_number(summary.best_loss, 4)}"
    return (
        f"{loss} (perplexity {format_number(compute_perplexity(summary.best_loss), 4)})"
        if "perplexity" in summary.metrics
        else loss
    )


def render_summary(
    summary: "Summary",
    *,
    weights: "Path | None" = None,
    script_output: "Path | None" = None,
    charge: "SiteCharge | None" = None,
    gain: "BaselineSaving | None" = None,
) -> Iterator["RenderableType"]:
    """Yield predicted and actual values, result metrics, the path of the best weights or of a script's files, and the gain."""
    changed = "" if summary.batch == summary.start_batch else f" (started with {summary.start_batch})"
    # the best epoch is 0 if unknown, as for scripts
    at = f", {describe_best_epoch(summary)} at epoch {summary.best_epoch}" if summary.best_epoch else ""
    yield f"trained on {format_count(summary.nodes)} at batch {summary.batch}{changed}{at}"
    if summary.metrics:
        values = describe_metrics(summary.metrics)
        yield f"after the last epoch: {values}" if summary.best_epoch else values
    if summary.ended:
        yield f"ended {summary.ended} (train.early_stopping); predictions are for the epochs that were trained"
    yield ""
    yield _make_predicted_and_actual_table(summary, charge)
    if charge is not None:
        yield charge.description
    if summary.actual_kwh is not None and not summary.has_complete_energy:
        yield f"energy was measured during {format_percent(summary.counted)} % of the time (not while ranks start, and not before a failure)"
    yield from describe_step_changes(summary.changes)
    if summary.scaled is not None:
        did = describe_scaling(summary.scaled.mean, summary.scaled.scaled)
        yield f"gradient scaling (of each {summary.scaled.apply_to}): {did}"
    if summary.tuning is not None and summary.tuning.chosen is not None:
        yield ""
        branches, chosen = summary.tuning.branches, summary.tuning.chosen.name
        yield f"tuned: {chosen}, {summary.tuning.samples} samples in {len(branches)} branches in addition to the training"
        yield make_branches_table(branches, chosen)
    if summary.attempts > 1:
        yield ""
        causes = "; ".join(filter(None, summary.causes))
        reason = f"relaunched because of: {causes}" if causes else "resumed after tula cancel or a killed job"
        yield f"{format_count(summary.attempts, 'attempt')}; {reason}"
    if summary.lost:
        yield f"{format_count(len(summary.lost), 'interruption')}; {_describe_lost_samples(summary.lost)}"
    yield from (f"warning: {text}" for text in summary.warnings)
    if weights is not None:
        yield f"best weights: {make_relative_path(weights)}"
    if script_output is not None:
        yield f"files of the script: {make_relative_path(script_output)}"
    if gain is not None:
        yield gain.text


def _make_predicted_and_actual_table(summary: "Summary", charge: "SiteCharge | None") -> "Table":
    divisor, unit = choose_time_unit(3600 * summary.actual_hours)
    table = make_table(("", "predicted", "actual", "error (%)"))
    to_unit = 3600 / divisor
    table.add_row("step time (ms)", *_compare_values(summary.predicted_step, summary.actual_step, 1000))
    table.add_row(f"time ({unit})", *_compare_values(summary.predicted_hours, summary.actual_hours, to_unit))
    for name, predicted, actual in list_time_parts(summary):
        table.add_row(f"  {name}", *_compare_values(predicted, actual, 1 / divisor))
    table.add_row(f"cost ({summary.currency})", *_compare_values(summary.predicted_cost, summary.actual_cost, 1))
    if charge is not None:
        table.add_row(f"SLURM's bill ({charge.currency})", *_compare_values(charge.predicted, charge.cost, 1))
    if summary.actual_kwh is not None or summary.predicted_kwh is not None:
        *energy, error = _compare_values(summary.predicted_kwh, summary.actual_kwh, 1)
        table.add_row("energy (kWh)", *energy, error if summary.has_complete_energy else "-")
    return table


def _describe_lost_samples(lost_samples: Sequence[int]) -> str:
    if not sum(lost_samples):
        return "no sample was trained twice"
    each = f" ({', '.join(map(str, lost_samples))})" if len(lost_samples) > 1 else ""
    return f"{sum(lost_samples)} samples were trained twice{each}"


def list_time_parts(summary: "Summary") -> Iterator[tuple[str, float | None, float]]:
    """Yield the non-empty parts of the training time: name, predicted and actual seconds."""
    actual, predicted = summary.actual_parts, summary.predicted_parts
    if actual is None:
        return
    names = {
        "steps": "steps",
        "data": "  waiting for data",
        "evaluation": "evaluation" if summary.lost is None else "evaluation, saving, new epochs",
        "checkpoints": "checkpoints",
        "branches": "branches",
        "rest": "starting, stopping" if summary.attempts == 1 else "starting, stopping, repeated steps",
    }
    for part, name in names.items():
        here, predicted_part = getattr(actual, part), getattr(predicted, part, None)
        if here or predicted_part:
            yield name, predicted_part, here


def _compare_values(predicted: float | None, actual: float | None, factor: float) -> tuple[str, str, str]:
    """Return predicted and actual value and the prediction error relative to the actual value."""
    predicted_text, actual_text = (
        "-" if value is None else format_number(value * factor) for value in (predicted, actual)
    )
    error = f"{100 * (predicted - actual) / actual:+.1f}" if predicted is not None and actual else "-"
    return predicted_text, actual_text, error
