"""The balance of an account compared with what a training needs."""

from collections.abc import Mapping
from dataclasses import replace

from tula_cli.diagnostics import Diagnostic
from tula_cli.extras.slurm_site.balance import Balance, read_account_balance
from tula_cli.extras.slurm_site.bill import Ask
from tula_cli.models.tres import truncate_billing
from tula_cli.services import messages
from tula_cli.services.site_charges import BalanceCheck, TresLimit
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import SiteBill
from tula_cli.words import format_number


def compute_needed_minutes(bill: SiteBill, *, nodes: int, hours: float) -> dict[str, float]:
    """Return the minutes of each TRES that SLURM counts for a job, including its QOS's usage factor.

    Args:
        bill: the site's billing of the job.
        nodes: number of nodes of the job.
        hours: duration of the job.
    """
    counts = {name: nodes * count for name, count in bill.tres.items()}
    counts["billing"] = truncate_billing(nodes * bill.node + bill.job)
    return {name: 60 * hours * bill.usage_factor * count for name, count in counts.items()}


def check_balance(
    spec: JobSpec, bill: SiteBill, *, nodes: int, hours: float | None, at_most: float | None, ask: Ask
) -> BalanceCheck:
    """Return whether the balance of an account covers a training.

    Args:
        spec: the job.
        bill: SLURM's billing of the job.
        nodes: nodes of its jobs.
        hours: expected total duration of its jobs; None if there is no prediction.
        at_most: the upper end of the 90 % interval of that duration; None if unknown.
        ask: returns the output of a SLURM command.
    """
    balance = read_account_balance(spec, qos=bill.qos, ask=ask)
    if hours is None:
        return BalanceCheck(
            balance.account,
            balance.limits,
            _describe_left(balance),
            unknown="the duration is unknown because nothing was measured",
        )
    if uncounted := sorted({limit.tres for limit in balance.limits} - {"billing"}) if not bill.tres else []:
        note = f"pricing.per_node covers only the billing, but there are limits on {', '.join(uncounted)}"
        balance = replace(balance, unseen=balance.unseen or note)
    need = compute_needed_minutes(bill, nodes=nodes, hours=hours)
    most = compute_needed_minutes(bill, nodes=nodes, hours=max(hours, at_most or 0.0))
    tight = [limit for limit in balance.limits if most.get(limit.tres, 0.0) > 0]
    if not tight:
        return BalanceCheck(balance.account, balance.limits, _describe_left(balance), unknown=balance.unseen)
    worst = min(tight, key=lambda limit: limit.remaining / most[limit.tres])
    return BalanceCheck(
        account=balance.account,
        limits=balance.limits,
        words=f"{_describe_limit(worst, spec)}; it needs {_describe_need(worst, need, spec)}",
        lacking=_warn_lacking(worst, need, spec),
        lacking_at_most=_warn_lacking(worst, most, spec),
        unknown=balance.unseen,
    )


def _describe_left(balance: Balance) -> str:
    if balance.unseen:
        return f"unknown: {balance.unseen}"
    return f"account {balance.account} has no limit for this (GrpTRESMins)"


def _warn_lacking(limit: TresLimit, need: Mapping[str, float], spec: JobSpec) -> Diagnostic | None:
    if need[limit.tres] <= limit.remaining:
        return None
    return messages.balance_too_low(available=_describe_limit(limit, spec), needed=_describe_need(limit, need, spec))


def _describe_limit(limit: TresLimit, spec: JobSpec) -> str:
    whole, remaining = (_describe_minutes(minutes, limit.tres) for minutes in (limit.limit, limit.remaining))
    runs = f" ({_describe_minutes(limit.running, limit.tres)} reserved for running jobs)" if limit.running else ""
    return f"{limit.where} has {remaining} of {whole} {_get_unit_name(limit.tres, spec)} left{runs}"


def _describe_need(limit: TresLimit, need: Mapping[str, float], spec: JobSpec) -> str:
    return f"{_describe_minutes(need[limit.tres], limit.tres)} {_get_unit_name(limit.tres, spec)}"


def _describe_minutes(minutes: float, tres: str) -> str:
    return format_number(minutes / 60 / (1024 if tres == "mem" else 1))


def _get_unit_name(tres: str, spec: JobSpec) -> str:
    """Return the name of an hour of a TRES; for billing, the site's unit unless a charge factor is applied to it."""
    bill = spec.pricing.slurm_billing
    if tres == "billing" and bill is not None and bill.charge_factor == 1:
        return spec.pricing.unit
    return {"mem": "GB-hours of memory"}.get(tres, f"{tres}-hours")
