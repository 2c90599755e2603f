"""Jobs that a site bills, without the optional package that reads a site's billing."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from make_runs import add_training, spec
from make_runs import scheduler_job as make_job

from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services import site_charges
from tula_cli.services.site_charges import SiteCharge, add_site_billing, check_balance, find_site_charge
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import JobBilling


@pytest.fixture(autouse=True)
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tula_cli.extras.slurm_site", None)


def job(**pricing: object) -> JobSpec:
    return spec(cluster={"kind": "slurm", "slurm": {"qos": "dear"}}, pricing=pricing)


def test_a_price_that_only_the_site_knows_names_the_extra_to_install() -> None:
    with pytest.raises(SpecError, match="optional package slurm_site is not installed") as error:
        add_site_billing(job(kind="billing"), None)
    assert "pip install 'tula-cli[slurm_site]'" in error.value.hint


def test_a_price_of_the_job_file_needs_no_package() -> None:
    by_hour = job(price=2.0)
    assert add_site_billing(by_hour, None) == by_hour


CHARGE = SiteCharge(
    cost=4.0,
    currency="SU",
    predicted=None,
    jobs=1,
    billing_hours=4.0,
    predicted_billing=None,
    billings=(4,),
    open=False,
)


class Accounting:
    """A package that finds the jobs of a training in the accounting."""

    def find_charge(self, task: TrainTask, jobs: Sequence[str]) -> SiteCharge | None:
        return CHARGE if (task.signature, list(jobs)) == ("ab12cd34", ["4711"]) else None


def billed() -> JobSpec:
    value = job(kind="billing")
    return value.model_copy(update={"pricing": value.pricing.model_copy(update={"slurm_billing": JobBilling(node=1)})})


def test_a_balance_is_checked_by_the_package_alone() -> None:
    assert check_balance(job(price=2.0), nodes=1, hours=1.0) is None
    with pytest.raises(SpecError, match="slurm_site is not installed"):
        check_balance(billed(), nodes=1, hours=1.0)


def test_the_charge_of_a_training_is_unknown_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "tula-runs", job(kind="billing"))
    name = add_training(run)
    (task,) = run.get_training("ab12cd34").read_tasks()
    run.write_task(task.model_copy(update={"spec": billed()}))
    run.write_job(make_job(name, scheduler="slurm"))
    assert find_site_charge(run, "ab12cd34") is None
    monkeypatch.setattr(site_charges, "load_extra_if_installed", lambda _: Accounting())
    assert find_site_charge(run, "ab12cd34") == CHARGE
