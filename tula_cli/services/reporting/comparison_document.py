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
from tula_cli.services.reporting.units import software
from tula_cli.spec.job import JobSpec
from tula_cli.words import plural

Environment = Mapping[str, Any]
"""A row of kind "environment" of a training's log: device, hardware, versions."""


def of_comparison(part: Part, comparison: Comparison, report: CompareReport, *, at: float) -> Document:
    """Return the report of a comparison.

    Args:
        part: where it was trained.
        comparison: its trainings.
        report: its table.
        at: Unix time.
    """
    curves = accuracy.curves(part.run, comparison)
    found = compared.comparison_document(report, curves, spec=part.spec, run_id=part.run.id, at=at)
    seen = [row for cell in comparison.cells for row in _environments(part, cell.signature)]
    facts = [*_job(part.spec), *_seeds(comparison), *_machines(seen, part.spec)]
    known = {fact.name for fact in found.facts}
    return dataclasses.replace(found, facts=(*(fact for fact in facts if fact.name not in known), *found.facts))


def _environments(part: Part, signature: str) -> Iterator[Environment]:
    yield from part.run.training(signature).metrics("environment")


def _job(spec: JobSpec) -> Iterator[Fact]:
    if spec.script is not None:
        command = spec.script.command
        yield Fact("script", without_secrets(command if isinstance(command, str) else " ".join(command)))
        return
    yield Fact("model", _named(spec.model.name, spec.model.args))
    yield Fact("data", _named(spec.dataset.name, spec.dataset.args))
    rule = f", {spec.schedule.kind} schedule" if spec.schedule.kind != "constant" else ""
    lr = f"{spec.optimizer.name}, learning rate {spec.optimizer.lr:g} at batch {spec.train.reference_batch}{rule}"
    yield Fact("optimizer", lr)


def _named(name: str, args: Mapping[str, Any]) -> str:
    """Return a name with its numbers: a page is shown around, and a text could be a path or a key."""
    told = ", ".join(f"{key} {value}" for key, value in args.items() if isinstance(value, int | float))
    return f"{name} ({told})" if told else name


def _seeds(comparison: Comparison) -> Iterator[Fact]:
    if comparison.cells:
        yield Fact("seeds", ", ".join(str(seed) for seed in sorted({cell.seed for cell in comparison.cells})))


def _machines(seen: Sequence[Environment], spec: JobSpec) -> Iterator[Fact]:
    """Yield what the trainings ran on and with; those of a comparison may have run on several kinds."""
    devices = {str(row.get("device")) for row in seen} or {spec.cluster.device}
    device = "process" if devices == {"cpu"} else "GPU"
    gpus = spec.cluster.gpus_per_node
    each = f"{gpus} processes" if device == "process" and gpus > 1 else plural(gpus, device)
    names = _several(str(row.get("hardware", "")) for row in seen)
    yield Fact("hardware", f"{names}; {each} a node" if names else f"not told by the trainings so far; {each} a node")
    versions = _several(software(row) for row in seen)
    yield Fact("software", versions or "not told by the trainings so far")


def _several(texts: Iterator[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))
