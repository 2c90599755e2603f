"""Prices, balances and charges of a SLURM site (`pricing.kind: billing`), as SLURM's accounting reports them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tula_cli.run.records.tasks import TrainTask
    from tula_cli.services.site_charges import BalanceCheck, SiteCharge
    from tula_cli.spec.job import JobSpec
    from tula_cli.spec.resources import JobBilling


class SlurmSite:
    """This package as the core uses it: a `SiteBilling`; `ask` replaces `run_slurm_command`."""

    def __init__(self, ask: Callable[..., str] | None = None) -> None:
        self._ask = ask

    def query_job_billing(self, spec: "JobSpec", root: Path | None) -> "JobBilling":
        from tula_cli.extras.slurm_site.billing import find_job_billing, run_slurm_command

        return find_job_billing(spec, root, ask=self._ask or run_slurm_command)

    def check_balance(
        self, spec: "JobSpec", billing: "JobBilling", *, nodes: int, hours: float | None, max_hours: float | None
    ) -> "BalanceCheck":
        from tula_cli.extras.slurm_site.balance import check_balance
        from tula_cli.extras.slurm_site.billing import run_slurm_command

        return check_balance(
            spec, billing, nodes=nodes, hours=hours, max_hours=max_hours, ask=self._ask or run_slurm_command
        )

    def find_charge(self, task: "TrainTask", jobs: Sequence[str]) -> "SiteCharge | None":
        from tula_cli.extras.slurm_site.billing import query_site_charge

        return query_site_charge(jobs, task)


package = SlurmSite()
