"""Charges as the site counts them (`pricing.kind: billing`): prices, balances of accounts, and charges of trainings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tula_cli.cluster.slurm.billing import (
    Ask,
    Balance,
    BilledJobs,
    TresLimit,
    ask_slurm,
    compute_price_of_billed,
    find_site_bill,
    read_account_balance,
    read_billed_jobs,
)
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import OverBudget, SpecError
from tula_cli.models.cost import compute_hourly_charge
from tula_cli.models.tres import truncate_billing
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services import messages
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import SiteBill
from tula_cli.words import format_count, format_number


def with_site_billing(spec: JobSpec, root: Path | None, *, ask: Ask | None = None) -> JobSpec:
    """Return a job with SLURM's billing (`pricing.slurm_billing`) for each node type; other pricing is unchanged.

    Args:
        spec: the job.
        root: the folder of the runs, in which SLURM's answers are cached; None for no cache.
        ask: returns the output of a SLURM command; None runs it.

    Raises:
        SpecError: SLURM does not report its billing.
    """
    if not spec.node_types:
        if spec.pricing.kind != "billing":
            return spec
        pricing = spec.pricing.model_copy(update={"slurm_billing": find_site_bill(spec, root, ask=ask)})
        return spec.model_copy(update={"pricing": pricing})
    types = dict(spec.node_types)
    for name, kind in types.items():
        job_of_type = spec.of_node_type(name)
        if job_of_type.pricing.kind == "billing":
            bill = asdict(find_site_bill(job_of_type, root, ask=ask))
            types[name] = kind.model_copy(update={"pricing": {**kind.pricing, "slurm_billing": bill}})
    return spec.model_copy(update={"node_types": types})


# --- The balance of the account


@dataclass(frozen=True)
class BalanceCheck:
    """The balance of an account compared with the cost of a command."""

    account: str
    limits: tuple[TresLimit, ...]  # minutes of each TRES
    words: str  # of the tightest limit
    lacking: Diagnostic | None = None  # about too low a balance for what is expected; None where it suffices
    lacking_at_most: Diagnostic | None = None  # likewise for the upper end of the 90 % interval
    unknown: str = ""  # why nothing can be promised; empty where it can


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
    spec: JobSpec, *, nodes: int, hours: float | None, at_most: float | None = None, ask: Ask = ask_slurm
) -> BalanceCheck | None:
    """Return whether the balance covers a training; None if the price is of another kind, or the job not for SLURM.

    Args:
        spec: the job, with SLURM's billing filled in.
        nodes: nodes of its jobs.
        hours: expected total duration of its jobs; None if there is no prediction.
        at_most: the upper end of the 90 % interval of that duration.
        ask: returns the output of a SLURM command.
    """
    bill = spec.pricing.slurm_billing
    if bill is None or spec.cluster.kind != "slurm":
        return None
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


def check_balance_of_task(task: TrainTask, *, remaining_share: float) -> BalanceCheck | None:
    """Return whether the balance covers the remainder of a training.

    Args:
        task: the training, with its prediction.
        remaining_share: share of the training that remains.
    """
    predicted, nodes = task.prediction, task.own_nodes
    if predicted is None:
        return check_balance(task.spec, nodes=nodes, hours=None)
    paid = remaining_share * predicted.all_node_hours / nodes
    most = None if predicted.hours_high is None else paid * predicted.hours_high / predicted.hours
    return check_balance(task.spec, nodes=nodes, hours=paid, at_most=most)


def require_balance(balance_check: BalanceCheck | None) -> None:
    """Enforce --within-balance.

    Raises:
        SpecError: there is no balance for this kind of price.
        OverBudget: the balance is not sufficient, or cannot be determined.
    """
    if balance_check is None:
        raise SpecError(
            "--within-balance needs the balance of SLURM's accounting",
            "set cluster.kind: slurm and pricing.kind: billing",
        )
    if balance_check.lacking or balance_check.lacking_at_most:
        why = balance_check.lacking or f"At the upper end of the 90 % interval: {balance_check.lacking_at_most}"
        raise OverBudget(
            f"--within-balance: nothing was submitted. {why}", "use fewer epochs, cheaper nodes or another account"
        )
    if balance_check.unknown:
        raise OverBudget(
            f"--within-balance: nothing was submitted, because the balance cannot be checked: {balance_check.unknown}",
            "remove the option, or ask the site to show limits and usage to its users",
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


def warn_balance_for_probes(spec: JobSpec, node_hours: float, *, ask: Ask = ask_slurm) -> list[Diagnostic]:
    """Return a warning if the balance may not cover profiling jobs of up to `node_hours`."""
    balance_check = check_balance(spec, nodes=1, hours=node_hours, ask=ask) if node_hours else None
    return [balance_check.lacking] if balance_check and balance_check.lacking else []


# --- The charge of a training


@dataclass(frozen=True)
class SiteCharge:
    """The charge of a training so far, by SLURM's accounting."""

    cost: float  # in the currency of the pricing
    currency: str
    predicted: float | None  # for the whole training
    jobs: int
    billing_hours: float  # before usage and charge factors
    predicted_billing: float | None  # units of one hour, as predicted of its jobs
    billings: tuple[int, ...]  # as AllocTRES has them
    open: bool  # whether jobs still wait or run

    @property
    def description(self) -> str:
        """Return the source of the charge, and how much the billing of a job differs from the prediction."""
        billings_text = ", ".join(map(str, self.billings)) or "none yet"
        expected = "" if self.predicted_billing is None else f", {self.predicted_billing:g} predicted"
        so_far = ", so far" * self.open
        return (
            f"by sacct{so_far}: {format_count(self.jobs, 'job')}, billing {billings_text} an hour{expected};"
            f" {format_number(self.billing_hours)} billing-hours, {format_number(self.cost)} {self.currency}"
        )


def find_site_charge(run: RunDir, signature: str) -> SiteCharge | None:
    """Return SLURM's charge for a training; None if the price is of another kind, or accounting reports nothing.

    Args:
        run: the run with the training.
        signature: signature of the training.
    """
    training = run.training(signature)
    tasks = training.tasks()
    task = tasks[-1] if tasks else None
    job = None if task is None else run.job(task.job)
    if task is None or job is None or job.scheduler != "slurm" or task.spec.pricing.slurm_billing is None:
        return None
    earlier = {attempt.allocation.partition(".")[0] for attempt in training.attempts()} - {""}
    billed = read_billed_jobs(sorted({*earlier, *job.ids}))
    return None if billed is None else _compare_with_prediction(billed, task)


def _compare_with_prediction(billed: BilledJobs, task: TrainTask) -> SiteCharge:
    pricing, predicted = task.spec.pricing, task.prediction
    billing = pricing.slurm_billing
    assert billing is not None
    factors = billing.usage_factor * billing.charge_factor
    return SiteCharge(
        cost=compute_price_of_billed(billed, pricing),
        currency=pricing.currency,
        predicted=None if predicted is None else predicted.cost,
        jobs=billed.jobs,
        billing_hours=billed.billing_hours,
        predicted_billing=compute_hourly_charge(pricing, task.own_nodes) / factors if factors else None,
        billings=billed.billings,
        open=billed.open,
    )
