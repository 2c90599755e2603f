"""The charge of a training by SLURM's accounting, compared with the prediction (`pricing.kind: billing`)."""

from dataclasses import dataclass

from tula_cli.cluster.slurm.billing import BilledJobs, billed_jobs, price_of_billed
from tula_cli.models.cost import hourly_charge
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.words import number, plural


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
            f"by sacct{so_far}: {plural(self.jobs, 'job')}, billing {billings_text} an hour{expected};"
            f" {number(self.billing_hours)} billing-hours, {number(self.cost)} {self.currency}"
        )


def site_charge_of(run: RunDir, signature: str) -> SiteCharge | None:
    """Return what SLURM has billed a training; None where the price is of another kind, or the accounting tells nothing.

    Args:
        run: the run that it is in.
        signature: of the training.
    """
    training = run.training(signature)
    tasks = training.tasks()
    task = tasks[-1] if tasks else None
    job = None if task is None else run.job(task.job)
    if task is None or job is None or job.scheduler != "slurm" or task.spec.pricing.slurm_billing is None:
        return None
    earlier = {attempt.allocation.partition(".")[0] for attempt in training.attempts()} - {""}
    billed = billed_jobs(sorted({*earlier, *job.ids}))
    return None if billed is None else _compare_with_prediction(billed, task)


def _compare_with_prediction(billed: BilledJobs, task: TrainTask) -> SiteCharge:
    pricing, predicted = task.spec.pricing, task.prediction
    billing = pricing.slurm_billing
    assert billing is not None
    factors = billing.usage_factor * billing.charge_factor
    return SiteCharge(
        cost=price_of_billed(billed, pricing),
        currency=pricing.currency,
        predicted=None if predicted is None else predicted.cost,
        jobs=billed.jobs,
        billing_hours=billed.billing_hours,
        predicted_billing=hourly_charge(pricing, task.own_nodes) / factors if factors else None,
        billings=billed.billings,
        open=billed.open,
    )
