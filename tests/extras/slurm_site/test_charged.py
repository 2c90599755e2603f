from types import SimpleNamespace

import pytest

from tula_cli.extras.slurm_site.billing import parse_site_charge
from tula_cli.spec.resources import JobBilling, Pricing

ROWS = """51417006|COMPLETED|24|billing=5,cpu=2,gres/gpu:a100=2,gres/gpu=2,mem=1500M,node=1
51417007|TIMEOUT|3600|billing=10,cpu=4,mem=3000M,node=2
51417008|CANCELLED by 0|0|"""
PRICING = Pricing(kind="billing", slurm_billing=JobBilling(node=5, usage_factor=2))
TASK = SimpleNamespace(spec=SimpleNamespace(pricing=PRICING), prediction=None, training_nodes=1)


def test_billing_times_elapsed_over_all_jobs():
    charge = parse_site_charge(ROWS, TASK)
    assert (charge.jobs, charge.open, charge.billings) == (2, False, (5, 10))
    assert charge.billing_hours == pytest.approx((24 * 5 + 3600 * 10) / 3600)
    assert charge.cost == pytest.approx(2 * charge.billing_hours)


def test_what_still_runs_is_said_and_what_nobody_knows_is_nothing():
    assert parse_site_charge(ROWS.replace("TIMEOUT", "RUNNING"), TASK).open
    again = "7|REQUEUED|60|billing=5\n7|{}|30|billing=5"
    assert parse_site_charge(again.format("RUNNING"), TASK).open
    assert not parse_site_charge(again.format("COMPLETED"), TASK).open
    assert parse_site_charge("7|REQUEUED|60|billing=5", TASK).open
    assert parse_site_charge("", TASK) is None
