"""A balance beside what a training takes: told, refused with --within-balance, and where nobody can tell."""

import pytest
from accounting_recorded import RecordedSlurm
from make_runs import spec

from tula_cli.errors import OverBudget, SpecError
from tula_cli.extras.slurm_site import SlurmSite
from tula_cli.extras.slurm_site.balance import compute_needed_minutes
from tula_cli.extras.slurm_site.billing import get_user_name
from tula_cli.services.site_charges import (
    add_site_billing,
    check_balance,
    require_known_balance,
    require_sufficient_balance,
    warn_balance_for_probes,
)
from tula_cli.spec.resources import JobBilling

SITE = SlurmSite(RecordedSlurm(get_user_name()))


def job(*, pricing=None, **slurm):
    cluster = {"kind": "slurm", "device": "cpu", "slurm": {"partition": "billed", "account": "proj", **slurm}}
    return add_site_billing(
        spec(cluster=cluster, pricing={"kind": "billing", **(pricing or {})}), None, site_billing=SITE
    )


def test_a_job_takes_minutes_of_each_tres_times_its_usage_factor():
    billing = JobBilling(node=2.4, usage_factor=2.0, tres={"cpu": 8.0, "mem": 1024.0})
    assert compute_needed_minutes(billing, nodes=3, hours=0.5) == {
        "cpu": 24 * 30 * 2,
        "mem": 3072 * 30 * 2,
        "billing": 7 * 30 * 2,
    }


def test_the_tightest_limit_of_all_above_decides():
    """41 minutes of billing are left of account big: at 5 an hour that is 8.2 minutes of one node."""
    fits = check_balance(job(), nodes=1, hours=8 / 60, site_billing=SITE)
    assert fits is not None and not fits.lacking and not fits.lacking_at_most
    assert fits.words.startswith(
        "account big has 0.683 of 1.67 SU left (0.667 reserved for running jobs); the training needs"
    )
    require_sufficient_balance(fits)
    beyond = check_balance(job(), nodes=1, hours=9 / 60, site_billing=SITE)
    assert beyond is not None and "account big" in beyond.lacking.values["available"]
    with pytest.raises(
        OverBudget, match=r"nothing was submitted.*account big has 0\.683 of 1\.67 SU left .* 0\.750 SU"
    ):
        require_sufficient_balance(beyond)


def test_a_dear_qos_takes_twice_as_much_and_has_a_limit_of_its_own():
    assert check_balance(job(qos="dear"), nodes=1, hours=4 / 60, site_billing=SITE).lacking is None
    assert "account big" in check_balance(job(qos="dear"), nodes=1, hours=5 / 60, site_billing=SITE).lacking.text


def test_the_upper_end_of_the_interval_is_held_to_it_too():
    result = check_balance(job(), nodes=1, hours=8 / 60, max_hours=9 / 60, site_billing=SITE)
    assert result.lacking is None and result.lacking_at_most
    with pytest.raises(OverBudget, match="upper end of the 90 % interval"):
        require_sufficient_balance(result)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (check_balance(job(), nodes=1, hours=None, site_billing=SITE), "nothing was measured"),
        (
            check_balance(
                job(),
                nodes=1,
                hours=0.01,
                site_billing=SlurmSite(RecordedSlurm(get_user_name(), without=["assoc_mgr"])),
            ),
            "access denied",
        ),
        (
            check_balance(job(account="hidden"), nodes=1, hours=0.01, site_billing=SITE),
            "SLURM does not show account hidden",
        ),
    ],
)
def test_what_cannot_be_known_is_reported_and_not_promised(found, words):
    assert found.lacking is None
    with pytest.raises(OverBudget, match=f"cannot be checked: .*{words}"):
        require_sufficient_balance(found)


def test_a_price_of_another_kind_has_no_balance():
    result = check_balance(spec(pricing={"price": 2.0}), nodes=1, hours=1.0, site_billing=SITE)
    assert result is None
    with pytest.raises(SpecError, match=r"pricing.kind: billing"):
        require_known_balance(result)


def test_no_limit_is_as_much_as_one_likes():
    free = RecordedSlurm(get_user_name())
    unlimited = job(account="lab")
    texts = "ClusterName=t Account=lab UserName= Partition=\n    ParentAccount=root(1)\n    GrpTRESMins=cpu=N(3),billing=N(4)\n"
    result = check_balance(
        unlimited, nodes=8, hours=1e6, site_billing=SlurmSite(lambda *c: texts if "accounts=lab" in c else free(*c))
    )
    require_sufficient_balance(result)
    assert "account lab has no limit" in result.words


def test_a_price_that_the_site_puts_on_its_units_is_not_in_the_balance_of_slurm():
    result = check_balance(job(pricing={"price": 3, "currency": "SU"}), nodes=1, hours=8 / 60, site_billing=SITE)
    assert result.lacking is None and "SU left" in result.words


def test_probes_are_reported_when_the_balance_may_not_carry_them():
    (warning,) = warn_balance_for_probes(job(), 1.0, site_billing=SITE)
    assert warning.code == "balance-too-low" and "account big has 0.683 of 1.67 SU" in warning.values["available"]
    assert warn_balance_for_probes(job(), 0.05, site_billing=SITE) == []
    assert warn_balance_for_probes(spec(), 100.0, site_billing=SITE) == []


def test_each_type_of_node_has_its_own_bill():
    types = {"a": {"cluster": {"slurm": {"partition": "half"}}}, "b": {"cluster": {"slurm": {"partition": "billed"}}}}
    cluster = {"kind": "slurm", "device": "cpu", "slurm": {}}
    job_by_type = spec(cluster=cluster, pricing={"kind": "billing"}, node_types=types).split_by_type()
    results = {
        name: add_site_billing(expected_value, None, site_billing=SITE) for name, expected_value in job_by_type.items()
    }
    assert {name: own.pricing.slurm_billing.node for name, own in results.items()} == {
        "a": pytest.approx(0.6),
        "b": 5.0,
    }
    assert all(value.without_slurm_billing().pricing.slurm_billing is None for value in results.values())
