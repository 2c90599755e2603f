"""`pricing.kind: billing` and bins of wall time as a job names them."""

import pytest
from make_runs import SPEC, spec

from tula_cli.errors import SpecError
from tula_cli.spec.load import dump_yaml, validate
from tula_cli.spec.resources import SiteBill
from tula_cli.spec.signature import compute_cluster_signature, compute_measurement_signature
from tula_cli.spec.yaml_text import parse_yaml


def said(pricing):
    result = spec(pricing=pricing).pricing
    return result.price, result.currency


@pytest.mark.parametrize(
    ("pricing", "price", "currency"),
    [
        ({"kind": "billing"}, 1.0, "SU"),
        ({"kind": "billing", "unit": "core-hours"}, 1.0, "core-hours"),
        ({"kind": "billing", "price": 0.02, "currency": "EUR"}, 0.02, "EUR"),
        ({"kind": "billing", "price": 1.0, "currency": "node-h"}, 1.0, "SU"),  # of a run that had no price
    ],
)
def test_costs_are_in_units_unless_they_have_a_price(pricing, price, currency):
    assert said(pricing) == (price, currency)


@pytest.mark.parametrize(
    ("pricing", "words"),
    [
        ({"kind": "billing", "currency": "EUR"}, "currency EUR needs a price per SU"),
        ({"kind": "gpu_hour"}, "pricing.price: is required"),
        ({"price": 1.0, "unit": "core-hours"}, "unit: only valid with kind: billing, but kind is node_hour"),
        (
            {"price": 1.0, "per_node": 3, "qos_factors": {"a": 1}},
            "per_node, qos_factors: only valid with kind: billing",
        ),
        ({"kind": "billing", "per_node": 0}, "pricing.per_node: must be greater than 0"),
    ],
)
def test_what_does_not_go_together_is_refused(pricing, words):
    with pytest.raises(SpecError) as error:
        spec(pricing=pricing)
    assert words in "; ".join(f"{problem.path}: {problem.message}" for problem in error.value.problems)


def test_what_slurm_told_is_not_written_down_as_the_users():
    written = spec(pricing={"kind": "billing", "unit": "core-hours"})
    answer = written.pricing.model_copy(update={"slurm_billing": SiteBill(node=5.0, words="x")})
    filled = written.model_copy(update={"pricing": answer})
    assert filled != written and filled.without_bill() == written
    assert validate(parse_yaml(dump_yaml(written), source="x"), source="x") == written
    assert compute_measurement_signature(filled) == compute_measurement_signature(written)
    assert validate(filled.model_dump(mode="json"), source="task") == filled


def test_bins_are_sorted_and_change_no_measurement():
    cluster = {"kind": "slurm", "slurm": {"limits": [{"nodes": 8, "hours": 6}, {"nodes": 2, "hours": 1}]}}
    result, free = spec(cluster=cluster), spec(cluster={"kind": "slurm", "slurm": {}})
    assert [each.nodes for each in result.cluster.slurm.limits] == [2, 8]
    assert compute_measurement_signature(result) == compute_measurement_signature(free)
    assert compute_cluster_signature(result.cluster) == compute_cluster_signature(free.cluster)
    with pytest.raises(SpecError, match="problem"):
        twice = [{"nodes": 2, "hours": 1}, {"nodes": 2, "hours": 3}]
        validate({**SPEC, "cluster": {"kind": "slurm", "slurm": {"limits": twice}}}, source="x")
