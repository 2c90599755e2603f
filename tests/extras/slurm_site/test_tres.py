"""Billing as SLURM counts it: its words, its three ways to add up, and what must hold of them whatever the weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_cli.extras.slurm_site.tres import (
    compute_billing,
    parse_billing_rule,
    parse_tres,
    parse_weights,
    truncate_billing,
)

NAMES = ("cpu", "mem", "node", "gres/gpu", "gres/gpu:a100", "license/x", "bb/scratch")
AMOUNTS = st.floats(0, 1e6, allow_nan=False)
WEIGHTS = st.dictionaries(st.sampled_from(NAMES), AMOUNTS, min_size=1)
COUNTS = st.fixed_dictionaries(dict.fromkeys(NAMES, AMOUNTS))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cpu=4,mem=3000M,node=2,billing=10,gres/gpu:a100=4", {"cpu": 4, "mem": 3000, "node": 2, "billing": 10, "gres/gpu:a100": 4}),
        ("cpu=128,mem=1T,gres/gpu=8", {"cpu": 128, "mem": 1024**2, "gres/gpu": 8}),
        ("cpu=64,mem=251.50G", {"cpu": 64, "mem": 251.5 * 1024}),
        ("cpu=N,mem=500M", {"mem": 500}),
        ("", {}),
    ],
)  # fmt: skip
def test_tres_are_read_as_slurm_writes_them(text, found):
    assert parse_tres(text) == found


def test_a_suffix_of_a_weight_is_the_unit_that_it_is_of():
    weights = parse_weights("CPU=1.0,Mem=0.25G,GRES/gpu=2.5,GRES/gpu:A100=8,License/matlab=.5,BB/cray=1T")
    assert weights["mem"] == 0.25 / 1024
    assert weights["bb/cray"] == 1 / 1024**2
    others = {name: weights[name] for name in ("cpu", "gres/gpu", "gres/gpu:a100", "license/matlab")}
    assert others == {"cpu": 1.0, "gres/gpu": 2.5, "gres/gpu:a100": 8.0, "license/matlab": 0.5}


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("", "sum"),
        ("(null)", "sum"),
        ("CALCULATE_RUNNING,NO_FAIR_TREE", "sum"),
        ("MAX_TRES", "max"),
        ("SMALL_RELATIVE_TO_TIME,MAX_TRES,CALCULATE_RUNNING", "max"),
        ("MAX_TRES_GRES", "max_gres"),
    ],
)
def test_priority_flags_say_how_it_is_added_up(flags, count):
    assert parse_billing_rule(flags) == count


@pytest.mark.parametrize(("count", "told"), [("sum", 4 + 3 + 10 + 7), ("max", 10 + 7), ("max_gres", 4 + 10 + 7)])
def test_the_largest_of_a_node_and_the_sum_of_the_rest(count, told):
    tres = {"cpu": 4.0, "mem": 3000.0, "gres/gpu": 4.0, "license/x": 1.0}
    weights = {"cpu": 1.0, "mem": 0.001, "gres/gpu": 2.5, "license/x": 7.0}
    assert compute_billing(tres, weights, count) == pytest.approx(told)


def test_without_weights_it_is_the_cpus():
    assert compute_billing({"cpu": 64.0, "mem": 1e6}, {}, "max") == 64.0


@given(COUNTS, WEIGHTS)
def test_the_sum_is_most_and_the_largest_is_least(tres, weights):
    total, largest, with_gres = (compute_billing(tres, weights, count) for count in ("sum", "max", "max_gres"))
    assert largest <= with_gres * (1 + 1e-9)
    assert with_gres <= total * (1 + 1e-9)


@given(COUNTS, WEIGHTS, st.integers(1, 4096), st.sampled_from(["sum", "max", "max_gres"]))
def test_nodes_that_are_alike_are_billed_alike(tres, weights, nodes, count):
    of_all = {name: nodes * value for name, value in tres.items()}
    assert compute_billing(of_all, weights, count) == pytest.approx(nodes * compute_billing(tres, weights, count))


@given(COUNTS, WEIGHTS, st.sampled_from(["sum", "max", "max_gres"]), st.sampled_from(NAMES))
def test_more_of_anything_is_never_cheaper(tres, weights, count, name):
    more = {**tres, name: tres[name] + 1}
    assert compute_billing(more, weights, count) >= compute_billing(tres, weights, count)


@given(st.integers(1, 10**5), st.integers(1, 1000))
def test_whole_numbers_stay_what_they_are_through_the_noise_of_floats(count, parts):
    assert truncate_billing(count / parts * parts) == count


def test_digits_are_cut_off():
    assert [truncate_billing(value) for value in (0.3, 1.2, 2.5, 2.9999999999999996)] == [0, 1, 2, 3]
