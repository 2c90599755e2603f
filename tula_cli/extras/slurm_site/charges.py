"""The charges of finished jobs, by SLURM's accounting."""

from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.cluster.slurm.command import call_slurm
from tula_cli.cluster.slurm.site import COMMAND_TIMEOUT
from tula_cli.models.cost import compute_hourly_charge
from tula_cli.models.tres import parse_tres
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services.site_charges import SiteCharge
from tula_cli.spec.resources import Pricing

_FIELDS = "JobIDRaw,State,ElapsedRaw,AllocTRES"
_OPEN = ("RUNNING", "PENDING", "REQUEUED", "SUSPENDED", "COMPLETING")


@dataclass(frozen=True)
class BilledJobs:
    """The billing of finished jobs."""

    jobs: int  # that had nodes
    billing_hours: float  # before usage and charge factors
    hours: float  # of all of them, one after the other
    open: bool  # whether some still wait or run
    billings: tuple[int, ...] = ()  # of one hour, of each kind of job among them


def read_billed_jobs(ids: Sequence[str]) -> BilledJobs | None:
    """Return the billing of jobs so far; None if the accounting does not report it.

    Args:
        ids: ids of allocations.
    """
    if not ids:
        return None
    answer = call_slurm(
        "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", f"--jobs={','.join(ids)}", f"--format={_FIELDS}",
        patience=COMMAND_TIMEOUT,
    )  # fmt: skip
    return parse_billed(answer.text) if answer.ok else None


def parse_billed(output: str) -> BilledJobs | None:
    """Return the total billing of rows of sacct (id, state, seconds, allocated TRES); None if there are none."""
    rows = [line.split("|") for line in output.splitlines() if line.count("|") == 3]
    if not rows:
        return None
    jobs = [
        (int(seconds), parse_tres(tres).get("billing", 0.0))
        for _, _, seconds, tres in rows
        if seconds.isdigit() and tres
    ]
    jobs_states: dict[str, set[str]] = {}  # the start that was requeued stays REQUEUED in the accounting for ever
    for id_, state, _, _ in rows:
        jobs_states.setdefault(id_, set()).add(state.split(" ")[0].rstrip("+"))
    ran = [(seconds, billing) for seconds, billing in jobs if seconds]
    return BilledJobs(
        jobs=len(ran),
        billing_hours=sum(seconds * billing for seconds, billing in ran) / 3600,
        hours=sum(seconds for seconds, _ in ran) / 3600,
        open=any(state in _OPEN for states in jobs_states.values() for state in (states - {"REQUEUED"} or states)),
        billings=tuple(sorted({int(billing) for _, billing in ran})),
    )


def compute_price_of_billed(billed: BilledJobs, pricing: Pricing) -> float:
    """Return the price of billed jobs at a site, in the currency of the pricing."""
    billing = pricing.slurm_billing
    factor = 1.0 if billing is None else billing.usage_factor * billing.charge_factor
    return billed.billing_hours * factor * pricing.price


def compare_with_prediction(billed: BilledJobs, task: TrainTask) -> SiteCharge:
    """Return the charge of a training's jobs beside the prediction of its last task."""
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
