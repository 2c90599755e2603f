"""`tula report`: the results of a run as one document."""

from collections.abc import Callable, Iterator, Sequence

from tula_cli.cluster.launcher import Launcher
from tula_cli.extras.report import sections
from tula_cli.extras.report.material import Material, gather_material, list_newest_trainings
from tula_cli.extras.report.values import describe_software, is_priced
from tula_cli.models.cost import describe_price
from tula_cli.run.directory import Run
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.secrets import without_secrets
from tula_cli.services.document import Document, Fact
from tula_cli.spec.job import JobSpec, describe_train_length
from tula_cli.spec.workload import get_workload
from tula_cli.version import __version__
from tula_cli.words import (
    describe_configuration,
    format_bytes,
    format_count,
    format_duration,
    format_interval_of_hours,
    format_moment,
    format_number,
)


def build_run_report(runs: Sequence[Run], launcher_for: Callable[[JobSpec], Launcher], *, now: float) -> Document:
    """Build the report of the runs of a job.

    Args:
        runs: the runs.
        launcher_for: returns the launcher of a job, which knows whether jobs are active.
        now: Unix time.

    Raises:
        TulaError: a record of the run cannot be read.
    """
    return build_document(gather_material(runs, launcher_for, now=now))


def build_document(material: Material) -> Document:
    """Build the report from the material of a run; sections without content explain why."""
    all_sections = (
        sections.build_choice_section(material),
        sections.build_scaling_section(material),
        sections.build_time_and_cost_section(material),
        sections.build_measured_section(material),
        sections.build_parts_section(material),
        sections.build_memory_section(material),
        sections.build_cross_validation_section(material),
        sections.build_same_progress_section(material),
        sections.build_training_section(material),
        sections.build_gradients_section(material),
        *sections.build_comparison_sections_of_parts(material),
    )
    made_by = f"{format_moment(material.at)}, tula {__version__}"
    return Document(
        material.parts[0].run.job_name,
        _describe_question(material),
        _describe_answer(material),
        made_by,
        tuple(_run_facts(material)),
        all_sections,
    )


def _describe_question(material: Material) -> str:
    """Return the question that the run answers, in one line."""
    spec, recommendation = material.spec, material.shown_recommendation
    nodes = sorted({count for run_material in material.own_runs for count in run_material.run.spec.search.nodes})
    counts = ", ".join(map(str, nodes)) if len(nodes) <= 8 else f"{nodes[0]} to {nodes[-1]}"
    types = sorted({run_material.run.type for run_material in material.own_runs if run_material.run.type is not None})
    of_types = f" of types {', '.join(types)}" if types else ""
    asked_at = "" if material.kept is None else f", {format_moment(material.kept.created_at)}"
    by = "" if recommendation is None else f" (objective {recommendation.criteria}{asked_at})"
    return f"How many nodes ({counts}{of_types}) and which batch to train {get_workload(spec).title} for {describe_train_length(spec)}{by}?"


def _describe_answer(material: Material) -> str:
    """Return the choice with its time and cost, and the state or result of each part's newest training, in one line."""
    recommendation = material.shown_recommendation
    sentences = [
        f"No recommendation yet: {material.unanswered}."
        if recommendation is None
        else f"{_describe_choice(recommendation.choice, recommendation.currency)}."
    ]
    for training in list_newest_trainings(material):
        end = training.summary
        if end is None:
            sentences.append(f"Training {training.task.signature}: {training.state}.")
            continue
        predicted = "" if end.predicted_hours is None else f" (predicted {format_duration(3600 * end.predicted_hours)})"
        best = f", best top-1 {format_number(end.best_top1, 4)} %" if "top1" in end.metrics else ""
        sentences.append(
            f"Trained on {format_count(end.nodes)} at batch {end.batch}: {format_duration(3600 * end.actual_hours)}{predicted},"
            f" {format_number(end.actual_cost)} {end.currency}{best}."
        )
    return " ".join(sentences)


def _describe_choice(choice: Prediction, currency: str) -> str:
    interval = format_interval_of_hours(choice.hours_low, choice.hours_high)
    kind = f" of type {choice.type}" if choice.type else ""
    on_spot = ", on spot nodes" if choice.market == "spot" else ""
    configuration_text = describe_configuration(choice.nodes, choice.batch, choice.local_batch)
    cost = f", {format_number(choice.cost)} {currency}" if is_priced([choice], currency) else ""
    hours = f"{format_number(choice.all_node_hours)} node-hours"
    return f"{configuration_text}{kind}{on_spot}: {format_duration(3600 * choice.hours)}{interval}, {hours}{cost}"


def _run_facts(material: Material) -> Iterator[Fact]:
    spec = material.spec
    yield from _list_job_facts(spec)
    for run_material in material.own_runs:
        prefix = f"{run_material.name}: " if run_material.name else ""
        gpus, probes = run_material.run.spec.cluster.gpus_per_node, run_material.measured
        yield Fact(f"{prefix}hardware", _describe_hardware(probes, gpus))
        if probes:
            yield Fact(f"{prefix}software", describe_software(probes[-1].environment.model_dump()))
            yield Fact(f"{prefix}data set", f"{probes[0].dataset_size} training samples")
            dates = sorted(probe.measured_at for probe in probes)
            until_text = (
                f" to {format_moment(dates[-1])}" if format_moment(dates[-1]) != format_moment(dates[0]) else ""
            )
            yield Fact(
                f"{prefix}measured", f"{format_moment(dates[0])}{until_text}, {format_count(len(probes), 'probe')}"
            )
        yield Fact(f"{prefix}price", describe_price(run_material.run.spec.pricing))
    if (code := _make_code_fact(material)) is not None:
        yield code
    yield Fact("run", ", ".join(run_material.run.id for run_material in material.own_runs))


def _list_job_facts(spec: JobSpec) -> Iterator[Fact]:
    if spec.script is not None:
        command = spec.script.command
        yield Fact("script", without_secrets(command if isinstance(command, str) else " ".join(command)))
    else:
        assert spec.model is not None and spec.dataset is not None  # where there is no script
        yield Fact("model", spec.model.name)
        yield Fact("data", spec.dataset.name)
        optimizer = spec.optimizer
        yield Fact(
            "optimizer", f"{optimizer.name}, learning rate {optimizer.lr:g} at batch {spec.train.reference_batch}"
        )
    yield Fact("method", spec.train.method)
    yield Fact("length", describe_train_length(spec))


def _describe_hardware(probes: Sequence[Measured], gpus_per_node: int) -> str:
    if not probes:
        return f"{format_count(gpus_per_node, 'GPU')} per node; nothing was measured yet"
    names = sorted({probe.environment.hardware for probe in probes})
    device = "GPU" if probes[0].environment.device != "cpu" else "process"
    nodes = sorted({probe.nodes for probe in probes})
    capacity = next((probe.capacity for probe in probes if probe.capacity is not None), None)
    per_gpu = "" if capacity is None else f" of {format_bytes(capacity)}"
    many = f"{gpus_per_node} {device}{'' if gpus_per_node == 1 else 'es' if device == 'process' else 's'} per node"
    return f"{', '.join(names)}{per_gpu}; {many}, measured on {', '.join(map(str, nodes))} {'node' if nodes == [1] else 'nodes'}"


def _make_code_fact(material: Material) -> Fact | None:
    """Return the commit of the user's code; None if no code was recorded or it has no git commit."""
    names = [
        (run_material.run, task.code)
        for run_material in material.own_runs
        for task in run_material.look.tasks
        if task.code
    ]
    snapshot = names[-1][0].code(names[-1][1]) if names else None
    if snapshot is None or not snapshot.commit:
        return None
    return Fact("code", f"commit {snapshot.commit[:12]}{', with changes' if snapshot.dirty else ''}")
