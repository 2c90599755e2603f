"""Probes brought to the pace of a training: what it has seen holds there, and is taken to hold elsewhere."""

import dataclasses

import pytest
from make_results import Truth, measured
from read_diagnostics import codes, values

from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.models.time.pace import PacedResults, TrainingPace, scale_results_to_pace
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.results import StepParts

PROBES = [(1, 16), (1, 64), (2, 16), (4, 16), (4, 64)]
BEFORE = Truth(fixed=0.02, slope=0.0005, sync=0.04)


def seen(now: Truth, nodes: int, local_batch: int, *, data: float = 0.0, apart: bool = True) -> TrainingPace:
    """Return what a training sees on a cluster that is `now` so."""
    compute, sync = now.fixed + now.slope * local_batch, now.sync * (1 - 1 / nodes)
    step = compute + sync + data
    parts = StepParts(step=step, data=data, compute=compute if apart else None, sync=sync if apart else None)
    return TrainingPace(nodes, 1, local_batch, (step,) * 6, parts)


def after(pace: TrainingPace) -> PacedResults:
    return scale_results_to_pace(
        [measured(BEFORE, *probe) for probe in PROBES],
        pace,
        step_of=BEFORE.step_time,
        compute_of=lambda nodes, local: BEFORE.fixed + BEFORE.slope * local,
    )


def times(result: PacedResults) -> dict[tuple[int, int], float]:
    return {
        (r.nodes, r.local_batch): compute_trimmed_mean(r.step_times) for r in result.results if isinstance(r, Measured)
    }


@pytest.mark.parametrize("at", [(4, 16), (2, 64)], ids=["measured", "not measured"])
@pytest.mark.parametrize(
    "change",
    [{"fixed": 0.032, "slope": 0.0008}, {"sync": 0.12}, {"fixed": 0.032, "slope": 0.0008, "sync": 0.02}, {}],
    ids=["computing", "network", "both", "nothing"],
)
def test_what_changed_alike_everywhere_is_found_everywhere(change: dict[str, float], at: tuple[int, int]) -> None:
    now = dataclasses.replace(BEFORE, **change)
    assert times(after(seen(now, *at))) == pytest.approx({probe: now.step_time(*probe) for probe in PROBES})


def test_data_that_set_the_pace_bound_every_step_by_its_batch() -> None:
    result = times(after(seen(BEFORE, 4, 16, data=0.1)))
    a_sample = (BEFORE.step_time(4, 16) + 0.1) / 16
    assert result[4, 16] == pytest.approx(16 * a_sample) == result[1, 16]
    assert result[4, 64] == pytest.approx(64 * a_sample)


def test_a_network_that_was_hidden_is_added_where_it_is_not_any_more() -> None:
    hidden = [measured(dataclasses.replace(BEFORE, sync=0.0), *probe) for probe in PROBES]
    now = seen(dataclasses.replace(BEFORE, sync=0.04), 4, 16)
    result = scale_results_to_pace(
        hidden, now, step_of=BEFORE.step_time, compute_of=lambda _, local: 0.02 + 0.0005 * local
    )
    assert times(result)[2, 16] == pytest.approx(0.028 + 0.03)
    assert times(result)[1, 16] == pytest.approx(0.028), "one node has no network"
    assert values(result.warnings, "training-pace")["added_sync_ms"] > 0


def test_what_is_not_known_is_said() -> None:
    item = after(seen(dataclasses.replace(BEFORE, fixed=0.04), 1, 16))
    pace = values(item.warnings, "training-pace")
    assert pace["where"] == "1 node, local batch 16" and pace["sync"] is None
    assert "other-configurations-assumed" in codes(item.warnings)
    together = after(seen(dataclasses.replace(BEFORE, sync=0.12), 4, 16, apart=False))
    assert values(together.warnings, "training-pace")["compute"] is None
    assert times(together)[1, 64] > BEFORE.step_time(1, 64)
