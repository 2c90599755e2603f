import math
from pathlib import Path

import pytest
from campaign import compare, judge, list_step_costs
from replay_data import load_sets

ROWS = """cluster,app,nodes,gpus_per_node,replicas,local_batch,step_time_s,sync_time_s,flag
c,a,1,1,1,8,0.8,0,ok
c,a,1,1,1,32,2.0,0,ok
c,a,2,1,2,4,0.6,0,ok
c,a,2,1,2,16,1.2,0,ok
c,a,4,1,4,2,0.5,0,ok
c,a,4,1,4,8,0.8,0,ok
"""


def test_a_fixed_batch_is_interpolated_and_a_free_one_is_the_best_of_each_number_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text(ROWS)
    (measured,) = [each for each in load_sets(tmp_path / "steps.csv") if each.kind != "one node"]
    (free,) = list_step_costs(measured, "free")
    assert free == pytest.approx({1: 2.0 / 32, 2: 1.2 / 32, 4: 0.8 / 32})
    smallest, largest = list_step_costs(measured, "fixed")
    assert smallest == pytest.approx({1: 0.1, 2: 0.6 / 8, 4: 0.5 / 8})
    assert largest == pytest.approx(free)
    gains = {(gain.batch, gain.trainings): gain for gain in judge([measured])}
    speedup, share, bound = (
        math.sqrt(a * b) for a, b in zip(compare(smallest, 8, 4), compare(largest, 8, 4), strict=True)
    )
    gain = gains["fixed", 8]
    assert (gain.speedup, gain.node_hours, gain.bound) == pytest.approx((speedup, share, bound))
    assert gain.nodes == (4,) and gain.sets == 1


def test_a_plan_is_compared_with_each_at_its_fastest() -> None:
    assert compare({1: 10.0, 4: 5.0}, 8, 4) == pytest.approx((40 / 20, 80 / 160, 40 / 20))
    assert compare({1: 10.0, 2: 5.0, 4: 2.5}, 8, 4)[0] == pytest.approx(1.0)
