"""`tula report`: the results of a run as one document."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tula_cli.extras.report import sections, training_sections
from tula_cli.extras.report.material import ReportData, list_newest_trainings
from tula_cli.extras.report.values import has_prices
from tula_cli.models.cost import describe_price
from tula_cli.run.records.probes import Environment
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.secrets import redact_secrets
from tula_cli.services.document import Document, Fact
from tula_cli.spec.job import JobSpec
from tula_cli.version import __version__
from tula_cli.words import (
    describe_configuration,
    format_count,
    format_duration,
    format_interval_of_hours,
    format_local_time,
    format_number,
)


def build_document(material: ReportData) -> Document:
    """Build the report from the material of a run; sections without content explain why."""
    all_sections = (
        sections.build_choice_section(material),
        sections.build_time_and_cost_section(material),
        sections.build_scaling_section(material),
        sections.build_memory_section(material),
        sections.build_measured_section(material),
        training_sections.build_training_section(material),
        training_sections.build_gradients_section(material),
        *training_sections.build_comparison_sections_of_node_types(material),
    )
    return Document(
        material.parts[0].run.job_name,
        _describe_question(material),
        " ".join(_describe_answer(material)),
        f"{format_local_time(material.at)}, tula {__version__}",
        tuple(_list_facts(material)),
        all_sections,
    )


def _describe_question(material: ReportData) -> str:
    spec, recommendation = material.spec, material.shown_recommendation
    nodes = sorted({count for part in material.parts for count in part.run.spec.search.nodes})
    counts = ", ".join(map(str, nodes)) if len(nodes) <= 8 else f"{nodes[0]} to {nodes[-1]}"
    types = sorted({part.run.type for part in material.parts if part.run.type is not None})
    of_types = f" of types {', '.join(types)}" if types else ""
    asked_at = "" if material.kept is None else f", {format_local_time(material.kept.created_at)}"
    by = "" if recommendation is None else f" (objective {recommendation.criteria}{asked_at})"
    job = spec.workload.description
    return f"On how many nodes ({counts}{of_types}) and with which batch should {job} be trained for {spec.workload.describe_length()}{by}?"


def _describe_answer(material: ReportData) -> Iterator[str]:
    """Yield the comparison with today's configuration, the choice, and the state or result of the newest training on each node type."""
    recommendation = material.shown_recommendation
    if recommendation is None:
        yield f"No recommendation yet: {material.unanswered}."
    else:
        headline = material.headline
        if headline is not None:
            yield f"{headline.text.rstrip('.')}. {headline.comparison}"
        yield f"{_describe_choice(material.choice or recommendation.choice, recommendation.currency)}."
    for training in list_newest_trainings(material):
        end = training.summary
        if end is None:
            yield f"Training {training.task.signature}: {training.state}."
            continue
        predicted = (
            "" if end.predicted_hours is None else f" (predicted: {format_duration(3600 * end.predicted_hours)})"
        )
        time = f"{format_duration(3600 * end.actual_hours)}{predicted}"
        unit = " %" if training.task.spec.workload.evaluates_held_out_data else ""  # a script may report fractions
        best = f", best top-1 {format_number(end.best_top1, 4)}{unit}" if "top1" in end.metrics else ""
        cost = f"{format_number(end.actual_cost)} {end.currency}"
        length = training.task.spec.workload.describe_length()
        yield f"Trained for {length} on {format_count(end.nodes)} at batch {end.batch}: {time}, {cost}{best}."


def _describe_choice(choice: Prediction, currency: str) -> str:
    kind = f" of type {choice.type}" if choice.type else ""
    on_spot = ", on spot nodes" if choice.market == "spot" else ""
    configuration_text = describe_configuration(choice.nodes, choice.batch, choice.local_batch)
    time = format_duration(3600 * choice.hours) + format_interval_of_hours(choice.hours_low, choice.hours_high)
    cost = f", {format_number(choice.cost)} {currency}" if has_prices([choice], currency) else ""
    return f"{configuration_text}{kind}{on_spot}: {time}, {format_number(choice.all_node_hours)} node-hours{cost}"


def _list_facts(material: ReportData) -> Iterator[Fact]:
    spec = material.spec
    yield from _list_job_facts(spec)
    yield Fact("method", spec.train.method)
    yield Fact("length", spec.workload.describe_length())
    for part in material.parts:
        prefix = f"{part.name}: " if part.name else ""
        probes = part.snapshot.measured
        environments = [probe.environment for probe in probes]
        yield Fact(f"{prefix}hardware", _describe_hardware(environments, part.run.spec))
        if probes:
            yield Fact(f"{prefix}software", _describe_software(environments[-1]))
            yield Fact(f"{prefix}data set", f"{probes[0].dataset_size} training samples")
            dates = sorted(probe.measured_at for probe in probes)
            days = " to ".join(dict.fromkeys((format_local_time(dates[0]), format_local_time(dates[-1]))))
            yield Fact(f"{prefix}measured", f"{days}, {format_count(len(probes), 'probe')}")
        yield Fact(f"{prefix}price", describe_price(part.run.spec.pricing))
    yield from _list_code_facts(material)
    yield Fact("run", ", ".join(part.run.id for part in material.parts))


def _list_code_facts(material: ReportData) -> Iterator[Fact]:
    """Yield the commit of the user's code; nothing if no code was recorded or it has no git commit."""
    names = [(part.run, task.code) for part in material.parts for task in part.snapshot.tasks if task.code]
    snapshot = names[-1][0].read_code(names[-1][1]) if names else None
    if snapshot is not None and snapshot.commit:
        yield Fact("code", f"commit {snapshot.commit[:12]}{', with changes' if snapshot.dirty else ''}")


def _list_job_facts(spec: JobSpec) -> Iterator[Fact]:
    """Yield the script, or the model, the data and the optimizer of a job."""
    if spec.script is not None:
        yield Fact("script", redact_secrets(spec.script.command))
        return
    yield Fact("model", _format_name_with_arguments(spec.model.name, spec.model.args))
    yield Fact("data", _format_name_with_arguments(spec.dataset.name, spec.dataset.args))
    rule = f", {spec.schedule.kind} schedule" if spec.schedule.kind != "constant" else ""
    lr = f"{spec.optimizer.name}, learning rate {spec.optimizer.lr:g} at batch {spec.train.reference_batch}{rule}"
    yield Fact("optimizer", lr)


def _format_name_with_arguments(name: str, args: Mapping[str, Any]) -> str:
    """Format a name with its numeric arguments.

    Text arguments are left out, because reports are shared and a text could be a path or a key.
    """
    arguments = ", ".join(f"{key} {value}" for key, value in args.items() if isinstance(value, int | float))
    return f"{name} ({arguments})" if arguments else name


def _describe_software(environment: Environment) -> str:
    """Return the software versions recorded in a probe's environment; unknown ones are left out."""
    keys = {"torch": "torch", "CUDA": "cuda", "NCCL": "nccl", "driver": "driver", "Python": "python", "tula": "tula"}
    unused = ("CUDA", "NCCL", "driver") if environment.device == "cpu" else ()
    versions = {name: getattr(environment, key) for name, key in keys.items() if name not in unused}
    texts = [f"{name} {version}" for name, version in versions.items() if version]
    return ", ".join([*texts, *filter(None, [environment.system])])


def _describe_hardware(environments: Sequence[Environment], spec: JobSpec) -> str:
    """Describe the kinds of hardware that a job has run on, and the GPUs or processes per node."""
    devices = {environment.device for environment in environments} or {spec.cluster.device}
    gpus = spec.cluster.gpus_per_node
    per_node = format_count(gpus, "GPU") if devices != {"cpu"} else "1 process" if gpus == 1 else f"{gpus} processes"
    names = dict.fromkeys(environment.hardware for environment in environments)
    return f"{'; '.join(filter(None, names)) or 'not recorded yet'}; {per_node} per node"
