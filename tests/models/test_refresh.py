"""The cost of refreshing the scaling factors."""

import math
from typing import Any

import numpy as np
import pytest
from make_results import Truth, as_script_probe, make_probe, make_probes, make_spec

from tula_cli.models import refresh
from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.run.records.probes import Measured, Overheads

AGS = {"train": {"method": "ags", "epochs": 10, "reference_batch": 64}}


def probe(nodes: int, local_batch: int, *, took: float = 0.0) -> Measured:
    overheads = Overheads(startup=0, eval_batch=0, eval_batch_size=64, checkpoint=0, refresh=took)
    return make_probe(Truth(overheads=overheads), nodes, local_batch)


def seconds(probes: list[Measured], nodes: int, local_batch: int, **sections: Any) -> float:
    columns = {"nodes": nodes, "local_batch": local_batch, "batch": nodes * local_batch}
    job = make_spec(**{**AGS, **sections})
    (refresh_second,) = refresh.compute_refresh_seconds(
        job, probes, **{name: np.array([value]) for name, value in columns.items()}
    )
    return float(refresh_second)


@pytest.mark.parametrize(
    ("ags", "batch", "small"),
    [({}, 64, 64), ({}, 128, 32), ({}, 256, 64), ({}, 4096, 64), ({"b_small": 8}, 4096, 8), ({"b_small": 8}, 4, 4)],
)
def test_the_small_batch_is_at_most_a_quarter_of_a_larger_one(ags: dict[str, int], batch: int, small: int) -> None:
    assert refresh.compute_small_batch_size(make_spec(**AGS, ags=ags), batch) == small


@pytest.mark.parametrize(
    ("train", "ags", "batch", "expected"),
    [
        ({}, {}, 128, 10),
        ({}, {"refresh": {"every": 100}}, 128, 9),  # 970 steps
        ({}, {}, 64, 0),  # nothing to scale
        ({}, {"refresh": {"every": 1}}, 128, 0),  # in every step, so a part of it
        ({}, {"preset": "robust"}, 128, 0),
        ({"method": "lbt"}, {}, 128, 0),
        ({"method": "lrs"}, {"refresh": {"every": 5}}, 128, 0),
    ],
)
def test_refreshes_are_counted_where_they_are_apart_from_the_steps(
    train: dict[str, Any], ags: dict[str, Any], batch: int, expected: int
) -> None:
    job = make_spec(train={**AGS["train"], **train}, ags=ags)
    assert refresh.count_separate_refreshes(job, batch=batch, steps=97) == expected


def test_a_probe_of_the_configuration_is_believed() -> None:
    probes = [probe(1, 128, took=0.1), probe(2, 128, took=0.2), probe(2, 256, took=0.3)]
    assert [seconds(probes, nodes, local) for nodes, local in ((1, 128), (2, 128), (2, 256))] == [0.1, 0.2, 0.3]


def test_what_was_not_measured_is_that_of_the_most_alike_refresh() -> None:
    """64 samples for it on one rank are alike, whatever the local batch is; then the number of nodes counts."""
    probes = [probe(1, 64), probe(1, 128, took=0.1), probe(1, 256, took=0.2), probe(4, 256, took=0.4)]
    assert seconds(probes, 1, 512) == 0.2
    assert seconds(probes, 8, 64) == 0.4  # and not the 0 of a batch that had nothing to scale
    assert seconds(probes, 1, 64) == 0.0


def test_where_no_probe_has_refreshed_it_is_a_step_with_so_many_samples() -> None:
    probes = [probe(1, 16), probe(1, 64)]
    assert seconds(probes, 4, 64) == probes[1].compute_time
    assert seconds(probes, 8, 16) == probes[0].compute_time


def test_the_forecast_holds_the_refreshes_and_says_their_share() -> None:
    truth, plan = Truth(), {2: (32, 64, 128), 4: (16,), 16: (2, 128)}
    results = make_probes(truth, plan)
    result = {}
    for method in ("ags", "lbt"):
        job = make_spec(train={"method": method, "epochs": 10, "reference_batch": 32})
        result[method] = Estimator.fit(job, results).predict(Config(2, 256))
    extra = 3600 * (result["ags"].hours - result["lbt"].hours)
    assert extra == pytest.approx(10 * truth.overheads.refresh)
    assert result["ags"].refresh_share == pytest.approx(extra / 3600 / result["ags"].hours)
    assert result["lbt"].refresh_share == 0.0


def test_few_steps_between_refreshes_make_them_a_large_share() -> None:
    results = make_probes(Truth(), {2: (32, 64, 128), 4: (16,), 16: (2, 128)})
    shares = []
    for every in (100, 10, 2):
        job = make_spec(train={"method": "ags", "epochs": 10, "reference_batch": 32}, ags={"refresh": {"every": every}})
        shares.append(Estimator.fit(job, results).predict(Config(2, 256)).refresh_share)
    assert shares[0] < 0.05 < shares[1] < shares[2]


def test_a_refresh_that_no_probe_tells_is_unknown() -> None:
    job = make_spec(**AGS)
    silent = [as_script_probe(make_probe(Truth(), nodes, 64)) for nodes in (2, 4)]
    assert math.isnan(seconds(silent, 2, 128)) and refresh.is_refresh_time_unknown(job, silent)
    row = Estimator.fit(job, silent).predict(Config(2, 128))
    assert row.refresh_share is None
    item = as_script_probe(
        make_probe(Truth(), 1, 64)
    )  # has no synchronisation: its step is a forward and a backward pass
    assert seconds([*silent, item], 2, 128) == pytest.approx(Truth().step_time(1, 64))
    assert seconds([*silent, probe(4, 64, took=0.3)], 2, 128) == 0.3
    assert not refresh.is_refresh_time_unknown(job, [*silent, item]) and not refresh.is_refresh_time_unknown(
        make_spec(train={"method": "lbt"}), silent
    )


@pytest.mark.torch
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("available", [1, 7, 16, 512])
@pytest.mark.parametrize("b_small", [1, 20, 64])
def test_the_most_that_a_rank_draws_is_what_the_optimizer_shares_out(world: int, available: int, b_small: int) -> None:
    from tula_cli.optim.ags import count_samples_per_rank

    job = make_spec(train={"method": "ags"}, ags={"b_small": b_small})
    most = max(count_samples_per_rank(b_small, available, world, 0))
    assert refresh.compute_max_samples_drawn(job, 4096, available=available, world=world) == most


@pytest.mark.parametrize(
    ("sections", "batch"),
    [
        ({"train": {"method": "lbt"}}, 4096),
        ({"train": {"method": "ags"}, "ags": {"b_small": 64}}, 64),
        ({"train": {"method": "ags"}, "ags": {"preset": "robust"}}, 4096),
    ],
)
def test_where_no_small_batch_is_taken_a_rank_draws_nothing_of_it(sections: dict[str, Any], batch: int) -> None:
    assert refresh.compute_max_samples_drawn(make_spec(**sections), batch, available=16, world=2) == 1
