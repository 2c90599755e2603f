"""The balance of an account at a SLURM site: its limits, and what is used of them.

`scontrol show assoc_mgr` reports them as the controller holds them. Counts are minutes of each TRES (of memory MB-minutes).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tula_cli.cluster.slurm.sbatch import fill_environment_defaults, get_slurm_section
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SchedulerError
from tula_cli.extras.slurm_site.billing import CommandRunner, find_account, get_user_name
from tula_cli.extras.slurm_site.tres import truncate_billing
from tula_cli.services import messages
from tula_cli.services.site_charges import BalanceCheck, TresLimit
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import BILLING_UNIT, JobBilling
from tula_cli.words import format_number

_MAX_PARENT_ACCOUNTS = 20  # maximum depth of the account hierarchy


@dataclass(frozen=True)
class Balance:
    """The balance of an account; unlimited if it has no limits and all limits could be read."""

    account: str
    limits: tuple[TresLimit, ...]
    unseen: str = ""  # why some limits are unknown; empty if all are known


def read_account_balance(spec: JobSpec, *, qos: str, ask: CommandRunner) -> Balance:
    """Return the balance of the account of a job with a QOS; errors are reported in the result, not raised."""
    spec = fill_environment_defaults(spec)
    try:
        account = find_account(spec, ask)
    except SchedulerError as error:
        return Balance("", (), f"SLURM's accounting does not report the account: {error.message}")
    if not account:
        return Balance("", (), "SLURM's accounting has no default account for this user. Set cluster.slurm.account")
    limits, missing = _read_limits_of_controller(account, get_slurm_section(spec).partition or "", ask)
    by_qos, hidden = ([], "") if missing else _read_limits_of_qos(qos.lower(), ask)
    return Balance(account, (*limits, *by_qos), missing or hidden)


# --- scontrol show assoc_mgr


def _read_limits_of_controller(account: str, partition: str, ask: CommandRunner) -> tuple[list[TresLimit], str]:
    """Return the limits that the controller shows, and why some are missing (empty if none is)."""
    limits: list[TresLimit] = []
    above, name = [account], account
    while name and name != "root":
        try:
            blocks = list(parse_blocks(ask("scontrol", "show", "assoc_mgr", "flags=assoc", f"accounts={name}")))
        except SchedulerError as error:
            return limits, f"scontrol show assoc_mgr: {error.message}"
        blocks_of_account = [block for block in blocks if block.get("Account") == name]
        shared = next((block for block in blocks_of_account if not block.get("UserName")), None)
        if shared is None:
            return limits, f"SLURM does not show account {name}; PrivateData in slurmdbd.conf may hide it"
        if name == account:
            for block in blocks_of_account:
                of_user = block.get("UserName", "").partition("(")[0] == get_user_name()
                if of_user and block.get("Partition", "") in ("", partition):
                    limits += parse_limits(block, f"{get_user_name()} in account {name}")
        limits += parse_limits(shared, f"account {name}")
        name = shared.get("ParentAccount", "").partition("(")[0]
        if name in above or len(above) > _MAX_PARENT_ACCOUNTS:
            break
        above.append(name)
    return limits, ""


def _read_limits_of_qos(qos: str, ask: CommandRunner) -> tuple[list[TresLimit], str]:
    """Return the limits of a QOS, and why they are unknown (empty if they are known)."""
    if not qos:
        return [], ""
    try:
        output = ask("scontrol", "show", "assoc_mgr", "flags=qos", f"qos={qos}")
    except SchedulerError as error:
        return [], f"QOS {qos} is not shown ({error.message})"
    blocks = [block for block in parse_blocks(output) if block.get("QOS", "").partition("(")[0] == qos]
    return (parse_limits(blocks[0], f"QOS {qos}"), "") if blocks else ([], f"QOS {qos} is not shown")


def parse_blocks(text: str) -> Iterator[dict[str, str]]:
    """Yield the records of `scontrol show assoc_mgr`; each starts with a line of `ClusterName=` or `QOS=`."""
    _, *records = re.split(r"^(?=ClusterName=|QOS=)", text, flags=re.MULTILINE)
    for record in records:
        block: dict[str, str] = {}
        for field_text in record.split():
            name, separator, value = field_text.partition("=")
            if separator:
                block.setdefault(name, value)
        yield block


def parse_limits(block: Mapping[str, str], where: str) -> list[TresLimit]:
    """Return the limits of a record: "GrpTRESMins=cpu=N(12),billing=600(34)" means 600 billing-minutes, 34 used."""
    running = {name: used for name, _, used in _parse_entries(block.get("GrpTRESRunMins", ""))}
    return [
        TresLimit(where, name, limit, used, running.get(name, 0.0))
        for name, limit, used in _parse_entries(block.get("GrpTRESMins", ""))
        if limit is not None
    ]


def _parse_entries(text: str) -> Iterator[tuple[str, float | None, float]]:
    """Yield name, limit (None if unlimited) and use of each TRES."""
    for name, limit, used in re.findall(r"([^,=()]+)=(N|\d+)\((\d+(?:\.\d+)?)\)", text):
        yield name.lower(), None if limit == "N" else float(limit), float(used)


# --- Comparison with the cost of a training


def compute_needed_minutes(billing: JobBilling, *, nodes: int, hours: float) -> dict[str, float]:
    """Return the minutes of each TRES that SLURM counts for a job, including its QOS's usage factor."""
    counts = {name: nodes * count for name, count in billing.tres.items()}
    counts["billing"] = truncate_billing(nodes * billing.node + billing.job)
    return {name: 60 * hours * billing.usage_factor * count for name, count in counts.items()}


def check_balance(
    spec: JobSpec, billing: JobBilling, *, nodes: int, hours: float | None, max_hours: float | None, ask: CommandRunner
) -> BalanceCheck:
    """Return whether the balance of an account covers a training; see `SiteBilling.check_balance`."""
    balance = read_account_balance(spec, qos=billing.qos, ask=ask)
    no_limit = f"account {balance.account} has no limit for these resources (GrpTRESMins)"
    words = f"unknown: {balance.unseen}" if balance.unseen else no_limit
    without_limit = BalanceCheck(balance.account, balance.limits, words, unknown=balance.unseen)
    if hours is None:
        return replace(without_limit, unknown="the duration is unknown because nothing was measured")
    need = compute_needed_minutes(billing, nodes=nodes, hours=hours)
    max_minutes = compute_needed_minutes(billing, nodes=nodes, hours=max(hours, max_hours or 0.0))
    tight = [limit for limit in balance.limits if max_minutes.get(limit.tres, 0.0) > 0]
    if not tight:
        return without_limit
    worst = min(tight, key=lambda limit: limit.remaining / max_minutes[limit.tres])
    return replace(
        without_limit,
        words=f"{_describe_limit(worst, spec)}; the training needs {_describe_needed_minutes(worst, need, spec)}",
        lacking=_warn_insufficient_balance(worst, need, spec),
        lacking_at_most=_warn_insufficient_balance(worst, max_minutes, spec),
    )


def _warn_insufficient_balance(limit: TresLimit, need: Mapping[str, float], spec: JobSpec) -> Diagnostic | None:
    if need[limit.tres] <= limit.remaining:
        return None
    return messages.balance_too_low(
        available=_describe_limit(limit, spec), needed=_describe_needed_minutes(limit, need, spec)
    )


def _describe_limit(limit: TresLimit, spec: JobSpec) -> str:
    whole, remaining = (_describe_minutes(minutes, limit.tres) for minutes in (limit.limit, limit.remaining))
    runs = f" ({_describe_minutes(limit.running, limit.tres)} reserved for running jobs)" if limit.running else ""
    return f"{limit.where} has {remaining} of {whole} {_get_unit_name(limit.tres, spec)} left{runs}"


def _describe_needed_minutes(limit: TresLimit, need: Mapping[str, float], spec: JobSpec) -> str:
    return f"{_describe_minutes(need[limit.tres], limit.tres)} {_get_unit_name(limit.tres, spec)}"


def _describe_minutes(minutes: float, tres: str) -> str:
    return format_number(minutes / 60 / (1024 if tres == "mem" else 1))


def _get_unit_name(tres: str, spec: JobSpec) -> str:
    """Return the name of an hour of a TRES; for billing, SLURM's unit."""
    if tres == "billing" and spec.pricing.slurm_billing is not None:
        return BILLING_UNIT
    return "GB-hours of memory" if tres == "mem" else f"{tres}-hours"
