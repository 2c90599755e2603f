"""Whether the balance of an account carries what is about to be submitted."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tula_cli.cluster.slurm.accounting.balance import Balance, TresLimit, balance
from tula_cli.cluster.slurm.accounting.site_bill import Ask, ask_slurm
from tula_cli.errors import OverBudget, SpecError
from tula_cli.models.bill.tres import whole
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import SiteBill
from tula_cli.words import number


@dataclass(frozen=True)
class Carry:
    """What an account has left beside what something takes of it."""

    account: str
    limits: tuple[TresLimit, ...]  # minutes of each TRES
    words: str  # of the tightest limit
    lacking: str = ""  # what it lacks for what is expected; empty where it suffices, as far as is known
    lacking_at_most: str = ""  # likewise for the upper end of the 90 % interval
    unknown: str = ""  # why nothing can be promised; empty where it can


def needed(told: SiteBill, *, nodes: int, hours: float) -> dict[str, float]:
    """Return the minutes of each TRES that SLURM counts for a job, its QOS's usage factor included.

    Args:
        told: what it bills.
        nodes: of the job.
        hours: that it holds them.
    """
    counts = {name: nodes * count for name, count in told.tres.items()}
    counts["billing"] = whole(nodes * told.node + told.job)
    return {name: 60 * hours * told.usage_factor * count for name, count in counts.items()}


def carried(
    spec: JobSpec, *, nodes: int, hours: float | None, at_most: float | None = None, ask: Ask = ask_slurm
) -> Carry | None:
    """Return whether the balance carries a training; None where the price is of another kind, or nobody keeps a balance.

    Args:
        spec: the job, with what SLURM bills it.
        nodes: of its jobs.
        hours: that they are expected to take together; None where nothing predicts it.
        at_most: the upper end of the 90 % interval of it.
        ask: returns what a command of SLURM prints.
    """
    told = spec.pricing.told
    if told is None or spec.cluster.kind != "slurm":
        return None
    found = balance(spec, qos=told.qos, ask=ask)
    if hours is None:
        return Carry(found.account, found.limits, _left(found), unknown="nothing predicts what it takes")
    if uncounted := sorted({limit.tres for limit in found.limits} - {"billing"}) if not told.tres else []:
        words = f"pricing.per_node tells the billing alone, and there are limits on {', '.join(uncounted)}"
        found = replace(found, unseen=found.unseen or words)
    need = needed(told, nodes=nodes, hours=hours)
    most = needed(told, nodes=nodes, hours=max(hours, at_most or 0.0))
    tight = [limit for limit in found.limits if most.get(limit.tres, 0.0) > 0]
    if not tight:
        return Carry(found.account, found.limits, _left(found), unknown=found.unseen)
    worst = min(tight, key=lambda limit: limit.left / most[limit.tres])
    return Carry(
        account=found.account,
        limits=found.limits,
        words=f"{_of(worst, spec)}, of which it takes {_hours(worst, need, spec)}",
        lacking=_lacking(worst, need, spec),
        lacking_at_most=_lacking(worst, most, spec),
        unknown=found.unseen,
    )


def balance_for(task: TrainTask, *, left: float) -> Carry | None:
    """Return whether the balance carries what is left of a training.

    Args:
        task: with its prediction.
        left: share of it.
    """
    predicted, nodes = task.prediction, task.own_nodes
    if predicted is None:
        return carried(task.spec, nodes=nodes, hours=None)
    paid = left * predicted.all_node_hours / nodes
    most = None if predicted.hours_high is None else paid * predicted.hours_high / predicted.hours
    return carried(task.spec, nodes=nodes, hours=paid, at_most=most)


def require_carried(found: Carry | None) -> None:
    """Keep --within-balance.

    Raises:
        SpecError: no balance is kept of this kind of price.
        OverBudget: the balance does not suffice, or nobody can tell.
    """
    if found is None:
        raise SpecError(
            "--within-balance: the balance is that of SLURM's accounting, and pricing.kind is not billing on it",
            "set pricing.kind: billing, with cluster.kind: slurm",
        )
    if found.lacking or found.lacking_at_most:
        why = found.lacking or f"at the upper end of its 90 % interval {found.lacking_at_most}"
        raise OverBudget(
            f"--within-balance: {why}; nothing was submitted", "fewer epochs, cheaper nodes, or another account"
        )
    if found.unknown:
        raise OverBudget(
            f"--within-balance cannot be kept: {found.unknown}; nothing was submitted",
            "leave the option out, or ask the site to show limits and usage to its users",
        )


def _left(found: Balance) -> str:
    if found.unseen:
        return f"not known: {found.unseen}"
    return f"account {found.account} has no limit on what this takes (GrpTRESMins)"


def _lacking(limit: TresLimit, need: Mapping[str, float], spec: JobSpec) -> str:
    if need[limit.tres] <= limit.left:
        return ""
    return f"the balance cannot carry it: {_of(limit, spec)}, and it takes {_hours(limit, need, spec)}"


def _of(limit: TresLimit, spec: JobSpec) -> str:
    whole_, left = (_told(minutes, limit.tres) for minutes in (limit.limit, limit.left))
    runs = f" ({_told(limit.running, limit.tres)} held for what runs)" if limit.running else ""
    return f"{limit.where} has {left} of {whole_} {_unit(limit.tres, spec)} left{runs}"


def _hours(limit: TresLimit, need: Mapping[str, float], spec: JobSpec) -> str:
    return f"{_told(need[limit.tres], limit.tres)} {_unit(limit.tres, spec)}"


def _told(minutes: float, tres: str) -> str:
    return number(minutes / 60 / (1024 if tres == "mem" else 1))


def _unit(tres: str, spec: JobSpec) -> str:
    """Return how an hour of a TRES is called; billing as the site does, unless its own factors come on top."""
    told = spec.pricing.told
    if tres == "billing" and told is not None and told.charge_factor == 1:
        return spec.pricing.unit
    return {"mem": "GB-hours of memory"}.get(tres, f"{tres}-hours")


def probes_lacking(spec: JobSpec, node_hours: float, *, ask: Ask = ask_slurm) -> str:
    """Return that the balance cannot carry measuring jobs of so many node-hours at most; empty where it can."""
    found = carried(spec, nodes=1, hours=node_hours, ask=ask) if node_hours else None
    return (
        found.lacking.replace("cannot carry it", "may not carry the probes") + " at most"
        if found and found.lacking
        else ""
    )
