from types import SimpleNamespace

import pytest

from tula_cli.extras.slurm_site.billing import make_site_charge, parse_billed_jobs
from tula_cli.spec.resources import JobBilling, Pricing

ROWS = """51417006|COMPLETED|24|billing=5,cpu=2,gres/gpu:a100=2,gres/gpu=2,mem=1500M,node=1
51417007|TIMEOUT|3600|billing=10,cpu=4,mem=3000M,node=2
51417008|CANCELLED by 0|0|"""


def test_billing_times_elapsed_over_all_jobs():
    billed = parse_billed_jobs(ROWS)
    assert (billed.jobs, billed.open, billed.billings) == (2, False, (5, 10))
    assert billed.billing_hours == pytest.approx((24 * 5 + 3600 * 10) / 3600)
    pricing = Pricing(kind="billing", slurm_billing=JobBilling(node=5, usage_factor=2))
    task = SimpleNamespace(spec=SimpleNamespace(pricing=pricing), prediction=None, training_nodes=1)
    assert make_site_charge(billed, task).cost == pytest.approx(2 * billed.billing_hours)


def test_what_still_runs_is_said_and_what_nobody_knows_is_nothing():
    assert parse_billed_jobs(ROWS.replace("TIMEOUT", "RUNNING")).open
    again = "7|REQUEUED|60|billing=5\n7|{}|30|billing=5"
    assert parse_billed_jobs(again.format("RUNNING")).open
    assert not parse_billed_jobs(again.format("COMPLETED")).open
    assert parse_billed_jobs("7|REQUEUED|60|billing=5").open
    assert parse_billed_jobs("") is None
