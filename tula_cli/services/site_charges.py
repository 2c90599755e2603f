"""The billing of jobs by SLURM (`pricing.kind: billing`), the balance of the account, and the charges of trainings.

The optional package `slurm_site` reads them, through the protocol `SiteBilling`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from tula_cli.cluster.slurm.sbatch import fill_environment_defaults
from tula_cli.diagnostics import Diagnostic
from tula_cli.entry_points import load_extra, load_extra_if_installed
from tula_cli.errors import OverBudget, SpecError
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import JobBilling
from tula_cli.words import format_count, format_number

NODE_HOUR_ADVICE = "set pricing.kind: node_hour, pricing.price to the billing of a whole node, and pricing.currency: SU"
"""Advice if the billing of SLURM is unknown."""


@dataclass(frozen=True)
class TresLimit:
    """Limit and use of one TRES by an account, user or QOS, in TRES-minutes."""

    where: str  # account, user or QOS with the limit, such as "account proj"
    tres: str
    limit: float
    used: float
    running: float = 0.0  # TRES-minutes that running jobs may still use, by their time limits

    @property
    def remaining(self) -> float:
        return max(0.0, self.limit - self.used - self.running)


@dataclass(frozen=True)
class BalanceCheck:
    """The balance of an account compared with the cost of a command."""

    account: str
    limits: tuple[TresLimit, ...]  # limits in TRES-minutes
    words: str  # description of the tightest limit
    lacking: Diagnostic | None = None  # warning that the balance is below the expected cost; None if it suffices
    lacking_at_most: Diagnostic | None = None  # the same for the upper end of the 90 % interval
    unknown: str = ""  # why the balance is unknown; empty if it is known


@dataclass(frozen=True)
class SiteCharge:
    """The charge of a training so far, by SLURM's accounting."""

    cost: float  # in the currency of the pricing
    currency: str
    predicted: float | None  # predicted cost of the whole training; None without a prediction
    jobs: int
    billing_hours: float  # billing-hours before usage and charge factors
    predicted_billing: float | None  # predicted billing units per hour of a job; None without a prediction
    billings: tuple[int, ...]  # billing units per hour of each kind of job, from AllocTRES
    open: bool  # whether jobs are still queued or running

    @property
    def description(self) -> str:
        """The source of the charge, and how much the billing of a job differs from the prediction."""
        billings_text = ", ".join(map(str, self.billings)) or "none yet"
        expected = "" if self.predicted_billing is None else f", {self.predicted_billing:g} predicted"
        open_text = ", so far" * self.open
        return (
            f"from sacct{open_text}: {format_count(self.jobs, 'job')}, billing {billings_text} per hour{expected};"
            f" {format_number(self.billing_hours)} billing-hours, {format_number(self.cost)} {self.currency}"
        )


# --- The optional package `slurm_site`


class SiteBilling(Protocol):
    """The optional package `slurm_site` (`extras/slurm_site`)."""

    def query_job_billing(self, spec: JobSpec, root: Path | None) -> JobBilling:
        """Return SLURM's billing of a job on one type of nodes; `root` is the folder in which answers are cached.

        Raises:
            SpecError: SLURM does not report its billing.
        """

    def check_balance(
        self, spec: JobSpec, billing: JobBilling, *, nodes: int, hours: float | None, max_hours: float | None
    ) -> BalanceCheck:
        """Return whether the balance of the job's account covers a training.

        Args:
            billing: SLURM's billing of the job.
            hours: expected total duration of its jobs; None if there is no prediction.
            max_hours: the upper end of the 90 % interval of that duration; None if unknown.
        """

    def find_charge(self, task: TrainTask, jobs: Sequence[str]) -> SiteCharge | None:
        """Return the charge of a training's jobs, by their ids; None if accounting reports nothing."""


def _load_site_billing() -> SiteBilling:
    return cast(SiteBilling, load_extra("slurm_site"))


# --- Prices


def add_site_billing(spec: JobSpec, root: Path | None, *, site_billing: SiteBilling | None = None) -> JobSpec:
    """Return a job with its billing (`pricing.slurm_billing`); other pricing is unchanged.

    Args:
        root: the folder of the runs, in which SLURM's answers are cached; None for no cache.
        site_billing: asks SLURM; None for the optional package `slurm_site`.

    Raises:
        SpecError: SLURM does not report its billing, or the package is not installed.
    """
    if spec.pricing.kind != "billing":
        return spec
    submitted = fill_environment_defaults(spec)
    if submitted.cluster.kind != "slurm":
        raise SpecError(
            f"pricing.kind billing: the billing is queried from SLURM, but cluster.kind is {submitted.cluster.kind}",
            f"{NODE_HOUR_ADVICE}; or set cluster.kind: slurm",
        )
    billing = (site_billing or _load_site_billing()).query_job_billing(submitted, root)
    pricing = spec.pricing.model_copy(update={"slurm_billing": billing})
    return spec.model_copy(update={"pricing": pricing})


def add_site_billing_to_run(run: Run) -> Run:
    """Return a run with the billing of its site (`add_site_billing`)."""
    return run.with_spec(add_site_billing(run.spec, run.path.parent))


# --- The balance of the account


def check_balance(
    spec: JobSpec,
    *,
    nodes: int,
    hours: float | None,
    max_hours: float | None = None,
    site_billing: SiteBilling | None = None,
) -> BalanceCheck | None:
    """Return whether the balance covers a training; None if the price is of another kind.

    Args:
        spec: the job, with its billing filled in.
        hours, max_hours: as in `SiteBilling.check_balance`.
        site_billing: asks SLURM; None for the optional package `slurm_site`.

    Raises:
        SpecError: the package is not installed.
    """
    billing = spec.pricing.slurm_billing
    if billing is None:
        return None
    package = site_billing or _load_site_billing()
    return package.check_balance(spec, billing, nodes=nodes, hours=hours, max_hours=max_hours)


def check_balance_of_task(task: TrainTask, *, remaining_share: float) -> BalanceCheck | None:
    """Return whether the balance covers the remaining share of a training."""
    predicted, nodes = task.prediction, task.training_nodes
    if predicted is None:
        return check_balance(task.spec, nodes=nodes, hours=None)
    paid = remaining_share * predicted.all_node_hours / nodes
    max_hours = None if predicted.hours_high is None else paid * predicted.hours_high / predicted.hours
    return check_balance(task.spec, nodes=nodes, hours=paid, max_hours=max_hours)


def require_known_balance(balance_check: BalanceCheck | None) -> BalanceCheck:
    """Return the balance for --within-balance.

    Raises:
        SpecError: there is no balance for this kind of price.
    """
    if balance_check is None:
        raise SpecError(
            "[[--within-balance]] needs the balance of SLURM's accounting",
            "set cluster.kind: slurm and pricing.kind: billing",
        )
    return balance_check


def require_sufficient_balance(balance_check: BalanceCheck) -> None:
    """Raise OverBudget if the balance is not sufficient, or cannot be determined (--within-balance)."""
    if balance_check.lacking or balance_check.lacking_at_most:
        why = balance_check.lacking or f"At the upper end of the 90 % interval: {balance_check.lacking_at_most}"
        raise OverBudget(
            f"[[--within-balance]]: nothing was submitted. {why}",
            "lower train.epochs, or use cheaper nodes or another account (cluster.slurm.account)",
        )
    if balance_check.unknown:
        raise OverBudget(
            f"[[--within-balance]]: nothing was submitted, because the balance cannot be checked: {balance_check.unknown}",
            "remove [[--within-balance]], or ask the administrators to show limits and usage to users",
        )


def warn_balance_for_probes(
    spec: JobSpec, node_hours: float, *, site_billing: SiteBilling | None = None
) -> list[Diagnostic]:
    """Return a warning if the balance may not cover profiling jobs of up to `node_hours`."""
    balance_check = check_balance(spec, nodes=1, hours=node_hours, site_billing=site_billing) if node_hours else None
    return [balance_check.lacking] if balance_check and balance_check.lacking else []


# --- The charge of a training


def find_site_charge(run: RunDir, signature: str) -> SiteCharge | None:
    """Return SLURM's charge for a training; None if the price is of another kind, or nothing reports the charge."""
    training = run.get_training(signature)
    tasks = training.read_tasks()
    task = tasks[-1] if tasks else None
    job = None if task is None else run.find_job(task.job)
    if task is None or job is None or job.scheduler != "slurm" or task.spec.pricing.slurm_billing is None:
        return None
    earlier = {attempt.allocation.partition(".")[0] for attempt in training.read_attempts()} - {""}
    site_billing: SiteBilling | None = load_extra_if_installed("slurm_site")
    return None if site_billing is None else site_billing.find_charge(task, sorted({*earlier, *job.scheduler_ids}))
