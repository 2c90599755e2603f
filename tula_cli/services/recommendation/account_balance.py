"""Whether the balance of an account carries what is about to be submitted."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tula_cli.cluster.slurm.billing import Ask, Balance, TresLimit, account_balance, ask_slurm
from tula_cli.errors import OverBudget, SpecError
from tula_cli.models.tres import whole
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import SiteBill
from tula_cli.words import number


@dataclass(frozen=True)
class BalanceCheck:
    """The balance of an account compared with the cost of a command."""

    account: str
    limits: tuple[TresLimit, ...]  # minutes of each TRES
    words: str  # of the tightest limit
    lacking: str = ""  # what it lacks for what is expected; empty where it suffices, as far as is known
    lacking_at_most: str = ""  # likewise for the upper end of the 90 % interval
    unknown: str = ""  # why nothing can be promised; empty where it can


def needed_minutes(bill: SiteBill, *, nodes: int, hours: float) -> dict[str, float]:
    """Return the minutes of each TRES that SLURM counts for a job, its QOS's usage factor included.

    Args:
        told: what it bills.
        nodes: of the job.
        hours: that it holds them.
    """
    counts = {name: nodes * count for name, count in bill.tres.items()}
    counts["billing"] = whole(nodes * bill.node + bill.job)
    return {name: 60 * hours * bill.usage_factor * count for name, count in counts.items()}


def check_balance(
    spec: JobSpec, *, nodes: int, hours: float | None, at_most: float | None = None, ask: Ask = ask_slurm
) -> BalanceCheck | None:
    """Return whether the balance carries a training; None where the price is of another kind, or nobody keeps a balance.

    Args:
        spec: the job, with what SLURM bills it.
        nodes: of its jobs.
        hours: that they are expected to take together; None where nothing predicts it.
        at_most: the upper end of the 90 % interval of it.
        ask: returns what a command of SLURM prints.
    """
    bill = spec.pricing.slurm_billing
    if bill is None or spec.cluster.kind != "slurm":
        return None
    balance = account_balance(spec, qos=bill.qos, ask=ask)
    if hours is None:
        return BalanceCheck(
            balance.account, balance.limits, _describe_left(balance), unknown="nothing predicts what it takes"
        )
    if uncounted := sorted({limit.tres for limit in balance.limits} - {"billing"}) if not bill.tres else []:
        note = f"pricing.per_node tells the billing alone, and there are limits on {', '.join(uncounted)}"
        balance = replace(balance, unseen=balance.unseen or note)
    need = needed_minutes(bill, nodes=nodes, hours=hours)
    most = needed_minutes(bill, nodes=nodes, hours=max(hours, at_most or 0.0))
    tight = [limit for limit in balance.limits if most.get(limit.tres, 0.0) > 0]
    if not tight:
        return BalanceCheck(balance.account, balance.limits, _describe_left(balance), unknown=balance.unseen)
    worst = min(tight, key=lambda limit: limit.remaining / most[limit.tres])
    return BalanceCheck(
        account=balance.account,
        limits=balance.limits,
        words=f"{_describe_limit(worst, spec)}, of which it takes {_describe_need(worst, need, spec)}",
        lacking=_describe_lacking(worst, need, spec),
        lacking_at_most=_describe_lacking(worst, most, spec),
        unknown=balance.unseen,
    )


def check_balance_of_task(task: TrainTask, *, remaining_share: float) -> BalanceCheck | None:
    """Return whether the balance carries what is left of a training.

    Args:
        task: with its prediction.
        left: share of it.
    """
    predicted, nodes = task.prediction, task.own_nodes
    if predicted is None:
        return check_balance(task.spec, nodes=nodes, hours=None)
    paid = remaining_share * predicted.all_node_hours / nodes
    most = None if predicted.hours_high is None else paid * predicted.hours_high / predicted.hours
    return check_balance(task.spec, nodes=nodes, hours=paid, at_most=most)


def require_balance(balance_check: BalanceCheck | None) -> None:
    """Keep --within-balance.

    Raises:
        SpecError: no balance is kept of this kind of price.
        OverBudget: the balance does not suffice, or nobody can tell.
    """
    if balance_check is None:
        raise SpecError(
            "--within-balance: the balance is that of SLURM's accounting, and pricing.kind is not billing on it",
            "set pricing.kind: billing, with cluster.kind: slurm",
        )
    if balance_check.lacking or balance_check.lacking_at_most:
        why = balance_check.lacking or f"at the upper end of its 90 % interval {balance_check.lacking_at_most}"
        raise OverBudget(
            f"--within-balance: {why}; nothing was submitted", "fewer epochs, cheaper nodes, or another account"
        )
    if balance_check.unknown:
        raise OverBudget(
            f"--within-balance cannot be kept: {balance_check.unknown}; nothing was submitted",
            "leave the option out, or ask the site to show limits and usage to its users",
        )


def _describe_left(balance: Balance) -> str:
    if balance.unseen:
        return f"not known: {balance.unseen}"
    return f"account {balance.account} has no limit on what this takes (GrpTRESMins)"


def _describe_lacking(limit: TresLimit, need: Mapping[str, float], spec: JobSpec) -> str:
    if need[limit.tres] <= limit.remaining:
        return ""
    return (
        f"the balance cannot carry it: {_describe_limit(limit, spec)}, and it takes {_describe_need(limit, need, spec)}"
    )


def _describe_limit(limit: TresLimit, spec: JobSpec) -> str:
    whole, remaining = (_describe_minutes(minutes, limit.tres) for minutes in (limit.limit, limit.remaining))
    runs = f" ({_describe_minutes(limit.running, limit.tres)} held for what runs)" if limit.running else ""
    return f"{limit.where} has {remaining} of {whole} {_unit_name(limit.tres, spec)} left{runs}"


def _describe_need(limit: TresLimit, need: Mapping[str, float], spec: JobSpec) -> str:
    return f"{_describe_minutes(need[limit.tres], limit.tres)} {_unit_name(limit.tres, spec)}"


def _describe_minutes(minutes: float, tres: str) -> str:
    return number(minutes / 60 / (1024 if tres == "mem" else 1))


def _unit_name(tres: str, spec: JobSpec) -> str:
    """Return how an hour of a TRES is called; billing as the site does, unless its own factors come on top."""
    bill = spec.pricing.slurm_billing
    if tres == "billing" and bill is not None and bill.charge_factor == 1:
        return spec.pricing.unit
    return {"mem": "GB-hours of memory"}.get(tres, f"{tres}-hours")


def describe_lacking_for_probes(spec: JobSpec, node_hours: float, *, ask: Ask = ask_slurm) -> str:
    """Return that the balance cannot carry measuring jobs of so many node-hours at most; empty where it can."""
    balance_check = check_balance(spec, nodes=1, hours=node_hours, ask=ask) if node_hours else None
    return (
        balance_check.lacking.replace("cannot carry it", "may not carry the probes") + " at most"
        if balance_check and balance_check.lacking
        else ""
    )
