"""`pricing.kind: billing` as a job names it."""

import pytest
from make_runs import spec

from tula_cli.errors import SpecError
from tula_cli.spec.load import dump_yaml, validate_job
from tula_cli.spec.resources import JobBilling
from tula_cli.spec.signature import compute_measurement_signature
from tula_cli.spec.yaml_text import parse_yaml


def said(pricing):
    result = spec(pricing=pricing).pricing
    return result.price, result.currency


@pytest.mark.parametrize(
    ("pricing", "price", "currency"),
    [
        ({"kind": "billing"}, 1.0, "SU"),
        ({"kind": "billing", "price": 0.02, "currency": "EUR"}, 0.02, "EUR"),
        ({"kind": "billing", "price": 1.0, "currency": "node-h"}, 1.0, "SU"),  # of a run that had no price
    ],
)
def test_costs_are_in_units_unless_they_have_a_price(pricing, price, currency):
    assert said(pricing) == (price, currency)


@pytest.mark.parametrize(
    ("pricing", "words"),
    [
        ({"kind": "billing", "currency": "EUR"}, "EUR needs pricing.price; set the price of a billing-hour"),
        ({"kind": "gpu_hour"}, "pricing.price: is required"),
        (
            {"price": 1.0, "slurm_billing": {"node": 5}},
            "is only valid with pricing.kind: billing, got pricing.kind: node_hour",
        ),
        ({"kind": "billing", "qos_factors": {"a": 2}}, "pricing.qos_factors: this key no longer exists"),
        ({"kind": "billing", "partition_factors": {"a": 2}}, "pricing.partition_factors: this key no longer exists"),
        ({"kind": "billing", "per_node": 64}, "pricing.per_node: this key no longer exists"),
    ],
)
def test_what_does_not_go_together_is_refused(pricing, words):
    with pytest.raises(SpecError) as error:
        spec(pricing=pricing)
    assert words in "; ".join(f"{problem.path}: {problem.message}" for problem in error.value.problems)


def test_what_slurm_told_is_not_written_down_as_the_users():
    written = spec(pricing={"kind": "billing"})
    answer = written.pricing.model_copy(update={"slurm_billing": JobBilling(node=5.0, words="x")})
    filled = written.model_copy(update={"pricing": answer})
    assert filled != written and filled.without_slurm_billing() == written
    assert validate_job(parse_yaml(dump_yaml(written), source="x"), source="x") == written
    assert compute_measurement_signature(filled) == compute_measurement_signature(written)
    assert validate_job(filled.model_dump(mode="json"), source="task") == filled
