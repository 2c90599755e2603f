"""What a template of a site may name: values of a run in words, and tables of its report."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tula_cli.run.records.recommendations import Prediction
from tula_cli.services.compare import expected_hours, mean_hours_by_row
from tula_cli.services.comparison import rounds
from tula_cli.services.progress.job_status import attempt_seconds
from tula_cli.services.reporting.compared import describe_training_job
from tula_cli.services.reporting.document import Cell, Column, Document, Table
from tula_cli.services.reporting.material import Material
from tula_cli.services.reporting.training_look import newest_trainings
from tula_cli.version import __version__
from tula_cli.words import duration, method_label, number, plural


@dataclass(frozen=True)
class SiteValues:
    """What a report has for a template.

    Args:
        words: by the names that a template may use.
        tables: likewise.
        missing: names of both that this run has nothing for, with why and which command would bring it.
    """

    words: Mapping[str, str]
    tables: Mapping[str, Table]
    missing: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """All names that a template may use."""
        return sorted({*self.words, *self.tables, *self.missing})


OF_THE_CHOICE = (
    "nodes", "gpus", "batch", "local_batch", "hours", "hours_low", "hours_high", "time", "node_hours", "gpu_hours", "cost",
    "total_node_hours", "total_gpu_hours",
)  # fmt: skip
TABLES = (
    "strong_scaling", "weak_scaling", "configurations", "probes", "predicted_actual", "attempts", "methods", "validation",
)  # fmt: skip


def site_values(seen: Material, document: Document, *, runs: int) -> SiteValues:
    """Return what a template may name.

    Args:
        seen: the run.
        document: its report.
        runs: how many trainings like the choice are asked for.
    """
    words, missing = _words(seen, document, runs=runs), dict[str, str]()
    if seen.choice is None:
        missing.update(dict.fromkeys(OF_THE_CHOICE, seen.unanswered))
    else:
        words.update(_choice(seen.choice, seen, runs=runs))
    tables = {table.key: table for section in document.sections for table in section.tables}
    tables["experiments"] = experiments(seen, runs=runs)
    owners = {"strong_scaling": "scaling", "weak_scaling": "scaling", "configurations": "choice", "probes": "measured",
              "predicted_actual": "training", "attempts": "training", "methods": "comparison", "validation": "predictions"}  # fmt: skip
    whys = {section.key: section.missing for section in document.sections}
    untold = {name: whys.get(owners[name], "") or "there is nothing of it yet" for name in TABLES if name not in tables}
    return SiteValues(words, tables, {**missing, **untold})


def _words(seen: Material, document: Document, *, runs: int) -> dict[str, str]:
    facts: dict[str, str] = {}
    for fact in document.facts:
        name = fact.name.rpartition(": ")[2].replace(" ", "_")
        facts[name] = f"{facts[name]}; {fact.value}" if name in facts else fact.value
    known = ("model", "data", "script", "optimizer", "method", "length", "hardware", "software", "data_set", "measured", "price", "code", "run")  # fmt: skip
    told = {name: facts.get(name, "-") for name in known}
    own = {
        "title": document.title, "question": document.question, "answer": document.answer, "made": document.made,
        "used_node_hours": number(_used_hours(seen)),
        "what": describe_training_job(seen.spec), "tula": __version__, "currency": seen.currency, "runs": str(runs),
        "gpus_per_node": str(seen.spec.cluster.gpus_per_node),
    }  # fmt: skip
    return {**told, **own}


def _used_hours(seen: Material) -> float:
    """Return the node-hours of jobs, and of attempts of those that are not shown, as in a copy of a run."""
    jobs = [job for one in seen.parts for job in one.now.jobs]
    known = {job.id for job in jobs}
    others = (one for part in seen.parts for one in part.now.attempts if one.job not in known)
    return (
        sum(job.node_hours for job in jobs)
        + sum(one.nodes * attempt_seconds(one.attempt, None) for one in others) / 3600
    )


def _choice(row: Prediction, seen: Material, *, runs: int) -> dict[str, str]:
    gpus = _gpus_per_node(seen, row)
    return {
        "nodes": str(row.nodes),
        "gpus": str(row.nodes * gpus),
        "batch": str(row.batch),
        "local_batch": str(row.local_batch),
        "hours": number(row.hours),
        "hours_low": number(row.hours_low),
        "hours_high": number(row.hours_high),
        "time": duration(3600 * row.hours),
        "node_hours": number(row.all_node_hours),
        "gpu_hours": number(row.all_node_hours * gpus),
        "cost": number(row.cost),
        "total_node_hours": number(_total(seen, runs=runs)),
        "total_gpu_hours": number(_total(seen, runs=runs) * gpus),
    }


def _gpus_per_node(seen: Material, row: Prediction) -> int:
    specs = {one.part.type or "": one.part.spec for one in seen.own_parts}
    return specs.get(row.type, seen.spec).cluster.gpus_per_node


def _total(seen: Material, *, runs: int) -> float:
    return sum(hours * count for _, hours, count in _experiments(seen, runs=runs) if hours is not None)


def experiments(seen: Material, *, runs: int) -> Table:
    """Return the table that an application asks for: experiment, node-hours a run, number of runs, total."""
    columns = (Column("experiment", align="left"), Column("node-hours a run", digits=3), Column("runs"), Column("node-hours", digits=3))  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (name, hours, count, None if hours is None else hours * count)
        for name, hours, count in _experiments(seen, runs=runs)
    ]
    rows.append(("total", None, None, _total(seen, runs=runs)))
    caption = "Forecast from probes on the machine itself; methods that were compared by the trainings there were."
    return Table("experiments", "Experiments", columns, tuple(rows), caption)


def _experiments(seen: Material, *, runs: int) -> Iterator[tuple[str, float | None, int]]:
    """Yield name, node-hours a run and number of runs of each experiment: training the choice, and comparing methods."""
    if (row := seen.choice) is not None:
        yield f"training on {plural(row.nodes)}, batch {row.batch}", row.all_node_hours, runs
    elif trained := next((one.summary for one in newest_trainings(seen) if one.summary is not None), None):
        yield (
            f"training on {plural(trained.nodes)}, batch {trained.batch}",
            trained.actual_hours * trained.nodes,
            runs,
        )
    for one in seen.own_parts:
        comparison = one.part.run.comparison()
        if comparison is None:
            continue
        took = mean_hours_by_row(one.look, comparison)
        standing = rounds.decide_standing(one.look, comparison, one.part.spec)
        counts = Counter((cell.method, cell.batch, cell.short) for cell in (*standing.wanted, *standing.undecided))
        for cell in {(cell.method, cell.batch, cell.short): cell for cell in comparison.cells}.values():
            hours = expected_hours((cell.method, cell.batch), took, {})
            length = "" if cell.short is None else f", {cell.short[0]} of {cell.short[1]} epochs"
            name = f"{method_label(cell.method, reference=cell.reference)}, batch {cell.batch}{length}"
            if count := counts[cell.method, cell.batch, cell.short]:
                yield name, None if hours is None else hours * cell.share * comparison.nodes, count
