"""The comparison of a run as a report, with what was trained and what it was trained on."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tula_cli.run.directory import Part
from tula_cli.run.records.results import Comparison
from tula_cli.run.source.keys import without_secrets
from tula_cli.services.comparison import accuracy
from tula_cli.services.comparison.accuracy import CompareReport
from tula_cli.services.reporting import compared
from tula_cli.services.reporting.document import Document, Fact
from tula_cli.services.reporting.units import describe_software
from tula_cli.spec.job import JobSpec
from tula_cli.words import plural

Environment = Mapping[str, Any]
"""A row of kind "environment" of a training's log: device, hardware, versions."""


def document_of_comparison(part: Part, comparison: Comparison, report: CompareReport, *, at: float) -> Document:
    """Return the report of a comparison.

    Args:
        part: where it was trained.
        comparison: its trainings.
        report: its table.
        at: Unix time.
    """
    curves = accuracy.training_curves(part.run, comparison)
    document = compared.comparison_document(report, curves, spec=part.spec, run_id=part.run.id, at=at)
    environments = [row for cell in comparison.cells for row in _environments(part, cell.signature)]
    facts = [*_job_facts(part.spec), *_seed_facts(comparison), *_machine_facts(environments, part.spec)]
    fact_names = {fact.name for fact in document.facts}
    return dataclasses.replace(
        document, facts=(*(fact for fact in facts if fact.name not in fact_names), *document.facts)
    )


def _environments(part: Part, signature: str) -> Iterator[Environment]:
    yield from part.run.training(signature).metrics("environment")


def _job_facts(spec: JobSpec) -> Iterator[Fact]:
    if spec.script is not None:
        command = spec.script.command
        yield Fact("script", without_secrets(command if isinstance(command, str) else " ".join(command)))
        return
    yield Fact("model", _name_with_arguments(spec.model.name, spec.model.args))
    yield Fact("data", _name_with_arguments(spec.dataset.name, spec.dataset.args))
    rule = f", {spec.schedule.kind} schedule" if spec.schedule.kind != "constant" else ""
    lr = f"{spec.optimizer.name}, learning rate {spec.optimizer.lr:g} at batch {spec.train.reference_batch}{rule}"
    yield Fact("optimizer", lr)


def _name_with_arguments(name: str, args: Mapping[str, Any]) -> str:
    """Return a name with its numbers: a page is shown around, and a text could be a path or a key."""
    arguments = ", ".join(f"{key} {value}" for key, value in args.items() if isinstance(value, int | float))
    return f"{name} ({arguments})" if arguments else name


def _seed_facts(comparison: Comparison) -> Iterator[Fact]:
    if comparison.cells:
        yield Fact("seeds", ", ".join(str(seed) for seed in sorted({cell.seed for cell in comparison.cells})))


def _machine_facts(environments: Sequence[Environment], spec: JobSpec) -> Iterator[Fact]:
    """Yield what the trainings ran on and with; those of a comparison may have run on several kinds."""
    devices = {str(row.get("device")) for row in environments} or {spec.cluster.device}
    device = "process" if devices == {"cpu"} else "GPU"
    gpus = spec.cluster.gpus_per_node
    per_node = f"{gpus} processes" if device == "process" and gpus > 1 else plural(gpus, device)
    names = _join_distinct(str(row.get("hardware", "")) for row in environments)
    yield Fact(
        "hardware", f"{names}; {per_node} a node" if names else f"not told by the trainings so far; {per_node} a node"
    )
    versions = _join_distinct(describe_software(row) for row in environments)
    yield Fact("software", versions or "not told by the trainings so far")


def _join_distinct(texts: Iterator[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))
