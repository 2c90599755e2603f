"""What profiling may cost where only a node can build the model and the dataset: the first job settles the probes."""

from dataclasses import dataclass

from tula_cli.cluster.inspection import NotInspectable
from tula_cli.cluster.slurm import first_job
from tula_cli.models.cost import describe_price, max_price
from tula_cli.services.profile import max_node_hours
from tula_cli.spec.job import JobSpec


@dataclass(frozen=True)
class UpperBoundPlan:
    """A job on one node, and probes that are not known before its end. All figures are upper bounds."""

    why: str  # it is not done here; empty where it was
    remedy: str  # what would make it possible here
    first_job_minutes: float  # 0 where there is none
    nodes: tuple[int, ...]  # of the search
    probe_node_hours: float  # of one round with search.strategy: adaptive
    node_hours_at_most: float  # of all of it, within the cap
    price_at_most: float | None  # None where it depends on memory that is not known
    currency: str
    price: str  # in words, with unit, source and date
    cap: float | None  # search.max_node_hours: more is not started
    adaptive: bool  # further rounds may follow

    @property
    def first_job_node_hours(self) -> float:
        """Node-hours of the first job."""
        return self.first_job_minutes / 60


def plan_upper_bound(spec: JobSpec, *, why: NotInspectable | None) -> UpperBoundPlan:
    """Return what profiling may cost before the dataset's size and the memory are known.

    Args:
        spec: the job.
        why: the model and the dataset cannot be built here; None where they were.
    """
    search = spec.search
    first_job_minutes = first_job.MINUTES if why else 0.0
    probes = max_node_hours(spec, search.nodes)
    total, cap = first_job_minutes / 60 + probes, search.max_node_hours
    node_hours = total if cap is None else max(first_job_minutes / 60, min(total, cap))
    return UpperBoundPlan(
        why=why.message if why else "",
        remedy=why.remedy if why else "",
        first_job_minutes=first_job_minutes,
        nodes=tuple(search.nodes),
        probe_node_hours=probes,
        node_hours_at_most=node_hours,
        price_at_most=max_price(spec, node_hours, spec.cluster.memory_per_gpu),
        currency=spec.pricing.currency,
        price=describe_price(spec.pricing),
        cap=cap,
        adaptive=search.strategy in ("auto", "adaptive"),
    )
