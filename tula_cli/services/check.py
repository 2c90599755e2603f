"""`tula check` and `tula init`: is the job sound, what would it search and cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tula_cli.assets import find_asset
from tula_cli.cluster.inspection import Inspect, NotInspected, inspect
from tula_cli.cluster.slurm import partitions as site
from tula_cli.cluster.slurm.partitions import Site
from tula_cli.cluster.slurm.sbatch import doubts
from tula_cli.errors import Infeasible, OverBudget
from tula_cli.models.cost import price_at_most, price_words
from tula_cli.run.records.inspections import Inspection
from tula_cli.services.search import largest_local_batch, probes
from tula_cli.services.waiting import require_within_cap
from tula_cli.spec.job import JobSpec

_TEMPLATES = {"local": "templates/job.yaml", "slurm": "templates/slurm.yaml"}


@dataclass(frozen=True)
class PlannedJob:
    """One measuring job: its nodes and the batches it goes through."""

    nodes: int
    local_batches: tuple[int, ...]  # one GPU's, ascending
    batches: tuple[int, ...]  # global


@dataclass(frozen=True)
class CheckReport:
    """What a job would search. Upper bounds hold for jobs that all last `search.max_minutes`."""

    inspection: Inspection | None  # None where the model and the dataset were not built
    jobs: tuple[PlannedJob, ...]
    largest_local_batch: int | None  # as memory is estimated, less the margin; None where nothing bounds it
    node_hours_at_most: float
    machine_hours_at_most: float | None  # one job after the other on this machine; None on SLURM
    price_at_most: float | None  # None where it depends on memory that is not known
    currency: str
    price: str  # in words, with unit, source and date
    problems: tuple[str, ...]  # nothing can run before these are solved
    warnings: tuple[str, ...]

    @property
    def probes(self) -> int:
        """How many configurations are measured."""
        return sum(len(job.local_batches) for job in self.jobs)


@dataclass(frozen=True)
class Checked:
    """What a job would search on each type of node; None is the type of a job that names none."""

    reports: Mapping[str | None, CheckReport]
    cap: float | None  # node-hours of search.max_node_hours

    @property
    def problems(self) -> dict[str | None, tuple[str, ...]]:
        """What keeps types from running."""
        return {name: report.problems for name, report in self.reports.items() if report.problems}

    @property
    def left_out(self) -> list[str]:
        """What to say of the types that cannot run, where others can."""
        if len(self.problems) == len(self.reports):
            return []
        return [f"node type {name} is left out: {'; '.join(found)}" for name, found in self.problems.items()]

    def require_sound(self, name: str) -> None:
        """Refuse a job that can run on no type, or that may take more than the cap on all of them.

        Args:
            name: of the job, for the message.

        Raises:
            Infeasible: nothing can run.
            OverBudget: the search may take more node-hours than search.max_node_hours.
        """
        if len(self.problems) == len(self.reports):
            kind = OverBudget if any(report.jobs for report in self.reports.values()) else Infeasible
            told = dict.fromkeys(problem for found in self.problems.values() for problem in found)
            raise kind(f"{name} cannot run as it is: {'; '.join(told)}")
        require_within_cap([report.node_hours_at_most for report in self.reports.values()], self.cap)


def check_all(
    spec: JobSpec, *, node_type: str | None = None, online: bool = True, inspector: Inspect | None = None
) -> Checked:
    """Check a job on each of its types of node.

    Args:
        spec: the job, sound as far as the file alone can tell.
        node_type: this type alone.
        online: as of `check`.
        inspector: builds the model and the dataset, or remembers; None builds them.

    Raises:
        SpecError: the job cannot be built, or has no such type.
        JobFailed: the user's code fails.
    """
    reports = {name: check(own, online=online, inspector=inspector) for name, own in spec.by_type(node_type).items()}
    return Checked(reports, spec.search.max_node_hours)


def check(spec: JobSpec, *, online: bool = True, inspector: Inspect | None = None) -> CheckReport:
    """Check a job.

    Args:
        spec: the job, sound as far as the file alone can tell.
        online: also build the model and the dataset in a process of its own; without, the search is known only as far
            as `search.max_batch` bounds it.
        inspector: builds the model and the dataset, or remembers; None builds them.

    Raises:
        SpecError: the job cannot be built.
        JobFailed: the user's code fails.
    """
    inspection, unknown = _inspected(spec, inspector or inspect) if online else (None, ())
    largest = largest_local_batch(spec, inspection) if inspection else None
    jobs, problems = _jobs(spec, inspection, largest=largest)
    node_hours = sum(job.nodes for job in jobs) * spec.search.max_minutes / 60
    local = spec.cluster.kind == "local"
    return CheckReport(
        inspection=inspection,
        jobs=jobs,
        largest_local_batch=largest,
        node_hours_at_most=node_hours,
        machine_hours_at_most=len(jobs) * spec.search.max_minutes / 60 if local else None,
        price_at_most=price_at_most(
            spec, node_hours, inspection.capacity if inspection else spec.cluster.memory_per_gpu
        ),
        currency=spec.pricing.currency,
        price=price_words(spec.pricing),
        problems=(*problems, *_over_budget(spec, node_hours)),
        warnings=(*unknown, *_warnings(spec, inspection, jobs)),
    )


def _inspected(spec: JobSpec, inspector: Inspect) -> tuple[Inspection | None, tuple[str, ...]]:
    """Return what building the model and the dataset tells, or what is unknown where only a node can tell."""
    try:
        return inspector(spec), ()
    except NotInspected as error:
        if spec.cluster.kind != "slurm":
            raise
        return None, (
            f"{error.message}; so the dataset's size, the memory and whether the model fits the data are not known yet:"
            f" the first job of tula profile settles them on a node ({error.hint})",
        )


def _jobs(
    spec: JobSpec, inspection: Inspection | None, *, largest: int | None
) -> tuple[tuple[PlannedJob, ...], tuple[str, ...]]:
    """Return one job a number of nodes, or why there is none."""
    size = inspection.dataset_size if inspection else spec.search.max_batch
    if size is None:
        return (), ()
    try:
        by_nodes = probes(spec, dataset_size=size, max_local_batch=largest)
    except Infeasible as error:
        return (), (f"{error.message} ({error.hint})" if error.hint else error.message,)
    gpus = spec.cluster.gpus_per_node
    jobs = [
        PlannedJob(nodes, tuple(sizes), tuple(size * nodes * gpus for size in sizes))
        for nodes, sizes in sorted(by_nodes.items())
    ]
    return tuple(jobs), ()


def _over_budget(spec: JobSpec, node_hours: float) -> tuple[str, ...]:
    cap = spec.search.max_node_hours
    if cap is None or node_hours <= cap:
        return ()
    return (
        f"profiling may take {node_hours:g} node-hours, search.max_node_hours is {cap:g}"
        " (raise it, lower search.max_minutes, search fewer nodes, or use strategy: partial)",
    )


def _warnings(spec: JobSpec, inspection: Inspection | None, jobs: tuple[PlannedJob, ...]) -> tuple[str, ...]:
    found = [*(inspection.warnings if inspection else ()), *doubts(spec)]
    if inspection and inspection.estimate_error:
        found.append(
            f"memory cannot be estimated ({inspection.estimate_error}); measuring stops at the first batch that does not fit"
        )
    left_out = sorted(set(spec.search.nodes) - {job.nodes for job in jobs}) if jobs else []
    if left_out and spec.search.strategy != "partial":
        found.append(f"no batch is feasible on {', '.join(map(str, left_out))} nodes: left out")
    ranks = max(spec.search.nodes) * spec.cluster.gpus_per_node
    if inspection and spec.cluster.kind == "local" and inspection.device == "cpu" and ranks > inspection.cpus:
        found.append(
            f"{ranks} ranks share {inspection.cpus} cores: their times are marked oversubscribed and say nothing of a"
            " real cluster"
        )
    if spec.search.strategy == "adaptive" and jobs:
        found.append(
            "search.strategy: adaptive: the figures are those of the first round; further ones depend on its results and stay"
            " within search.max_node_hours"
        )
    if spec.search.max_node_hours is None:
        found.append("search.max_node_hours is not set: where there is no terminal to confirm, profiling is refused")
    return tuple(found)


# --- init


def init(kind: Literal["local", "slurm"], offered: Site | None = None) -> str:
    """Return the text of a commented job spec.

    Args:
        kind: where the job will run.
        offered: what the scheduler tells; for slurm it is filled in.

    Raises:
        TulaError: the installation lacks its templates.
    """
    text = find_asset(_TEMPLATES[kind]).read_text(encoding="utf-8")
    return text if offered is None or kind != "slurm" else site.fill_in(text, offered)
