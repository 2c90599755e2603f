"""`tula report`: what a run has found, as one document."""

from collections.abc import Callable, Iterator, Sequence

from tula_cli.cluster.launcher import Launcher
from tula_cli.models.cost import price_words
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.source.keys import without_secrets
from tula_cli.services.reporting.compared import what
from tula_cli.services.reporting.document import Document, Fact
from tula_cli.services.reporting.forms import sites
from tula_cli.services.reporting.forms.site_values import site_values
from tula_cli.services.reporting.material import Material, gather
from tula_cli.services.reporting.sections import (
    chosen,
    cross_validation,
    gradients_logged,
    measured_steps,
    memory_curve,
    methods_compared,
    same_progress,
    scaling_study,
    time_and_cost,
    training_outcome,
)
from tula_cli.services.reporting.training_look import trainings
from tula_cli.services.reporting.units import is_priced, software
from tula_cli.spec.job import JobSpec, train_length
from tula_cli.version import __version__
from tula_cli.words import amount, configuration, duration, interval_of_hours, moment, number, plural


def report(run: RunDir, spec: JobSpec, launcher_for: Callable[[JobSpec], Launcher], *, now: float) -> Document:
    """Return the report of a run.

    Args:
        run: the run.
        spec: its job.
        launcher_for: knows whether jobs are under way.
        now: Unix time.

    Raises:
        TulaError: a record of the run cannot be read.
    """
    return document_of(gather(run, spec, launcher_for, now=now))


def document_of(seen: Material) -> Document:
    """Return what was seen of a run as a document; sections of which there is nothing say why."""
    sections = (
        chosen.section(seen),
        scaling_study.section(seen),
        time_and_cost.section(seen),
        measured_steps.measured_section(seen),
        measured_steps.parts_section(seen),
        memory_curve.section(seen),
        cross_validation.section(seen),
        same_progress.section(seen),
        training_outcome.section(seen),
        gradients_logged.section(seen),
        *methods_compared.sections(seen),
    )
    made = f"{moment(seen.at)}, tula {__version__}"
    return Document(seen.spec.name, _question(seen), _answer(seen), made, tuple(_facts(seen)), sections)


def for_site(seen: Material, document: Document, site: str, *, runs: int = 1) -> str:
    """Return what a site asks for in an application, by its template.

    Args:
        seen: the run.
        document: its report.
        site: the name of a template, or the path of one.
        runs: how many trainings like the choice are asked for.

    Raises:
        SpecError: there is no such template, or it names what there is not.
        BadMeasurements: it names what this run has nothing for yet.
    """
    return sites.fill(sites.find(site), site_values(seen, document, runs=runs))


def _question(seen: Material) -> str:
    """Return what was asked, in a line."""
    spec, kept = seen.spec, seen.words
    nodes = sorted({count for one in seen.own_parts for count in one.part.spec.search.nodes})
    counts = f"{', '.join(map(str, nodes))} {'node' if nodes == [1] else 'nodes'}" if len(nodes) <= 8 else f"{nodes[0]} to {plural(nodes[-1])}"  # fmt: skip
    types = sorted({one.part.type for one in seen.own_parts if one.part.type is not None})
    of_types = f" of types {', '.join(types)}" if types else ""
    asked = "" if seen.kept is None else f", asked {moment(seen.kept.created_at)}"
    by = "" if kept is None else f" (by {kept.criteria}{asked})"
    return (
        f"On how many of {counts}{of_types}, and with what batch, is {what(spec)} trained for {train_length(spec)}{by}?"
    )


def _answer(seen: Material) -> str:
    """Return the choice with its time and cost, and what the training came to, in a line."""
    words = seen.words
    told = [f"Not known yet: {seen.unanswered}." if words is None else f"{_chosen(words.choice, words.currency)}."]
    for one in trainings(seen):
        end = one.summary
        if end is None:
            told.append(f"Training {one.task.signature}: {one.state}.")
            continue
        predicted = "" if end.predicted_hours is None else f" (predicted {duration(3600 * end.predicted_hours)})"
        best = f", best top-1 {number(end.best_top1, 4)} %" if "top1" in end.metrics else ""
        told.append(
            f"Trained on {plural(end.nodes)} at batch {end.batch}: {duration(3600 * end.actual_hours)}{predicted},"
            f" {number(end.actual_cost)} {end.currency}{best}."
        )
    return " ".join(told)


def _chosen(choice: Prediction, currency: str) -> str:
    interval = interval_of_hours(choice.hours_low, choice.hours_high)
    kind = f" of type {choice.type}" if choice.type else ""
    on_spot = ", on spot nodes" if choice.market == "spot" else ""
    place = configuration(choice.nodes, choice.batch, choice.local_batch)
    cost = f", {number(choice.cost)} {currency}" if is_priced([choice], currency) else ""
    hours = f"{number(choice.all_node_hours)} node-hours"
    return f"{place}{kind}{on_spot}: {duration(3600 * choice.hours)}{interval}, {hours}{cost}"


def _facts(seen: Material) -> Iterator[Fact]:
    spec = seen.spec
    yield from _job(spec)
    for one in seen.own_parts:
        prefix = f"{one.name}: " if one.name else ""
        gpus, probes = one.part.spec.cluster.gpus_per_node, one.measured
        yield Fact(f"{prefix}hardware", _hardware(probes, gpus))
        if probes:
            yield Fact(f"{prefix}software", software(probes[-1].environment.model_dump()))
            yield Fact(f"{prefix}data set", f"{probes[0].dataset_size} samples to train on")
            dates = sorted(probe.measured_at for probe in probes)
            until = f" to {moment(dates[-1])}" if moment(dates[-1]) != moment(dates[0]) else ""
            yield Fact(f"{prefix}measured", f"{moment(dates[0])}{until}, {plural(len(probes), 'probe')}")
        yield Fact(f"{prefix}price", price_words(one.part.spec.pricing))
    if (code := _code(seen)) is not None:
        yield code
    yield Fact("run", seen.run.id)


def _job(spec: JobSpec) -> Iterator[Fact]:
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
    yield Fact("length", train_length(spec))


def _hardware(probes: Sequence[Measured], gpus_per_node: int) -> str:
    if not probes:
        return f"{plural(gpus_per_node, 'GPU')} a node; nothing was measured yet"
    names = sorted({probe.environment.hardware for probe in probes})
    device = "GPU" if probes[0].environment.device != "cpu" else "process"
    nodes = sorted({probe.nodes for probe in probes})
    capacity = next((probe.capacity for probe in probes if probe.capacity is not None), None)
    each = "" if capacity is None else f" of {amount(capacity)}"
    many = f"{gpus_per_node} {device}{'' if gpus_per_node == 1 else 'es' if device == 'process' else 's'} a node"
    return f"{', '.join(names)}{each}; {many}, measured on {', '.join(map(str, nodes))} {'node' if nodes == [1] else 'nodes'}"


def _code(seen: Material) -> Fact | None:
    """Return the state of the user's own code; None where the job names none, or git knows none."""
    names = [task.code for one in seen.own_parts for task in one.look.tasks if task.code]
    found = seen.run.code(names[-1]) if names else None
    if found is None or not found.commit:
        return None
    return Fact("code", f"commit {found.commit[:12]}{', with changes' if found.dirty else ''}")
