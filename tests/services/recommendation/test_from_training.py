"""`tula recommend --from-training`: by the steps of a training under way, and honest about what those do not tell."""

import dataclasses
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from make_results import Truth, probe_all, spec
from read_diagnostics import codes

from tula_cli.errors import BadMeasurements
from tula_cli.query import Query
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_family
from tula_cli.services.recommend import Answer, recommend, save_answer, should_replace
from tula_cli.show import recommend as show_recommend

BEFORE = Truth(fixed=0.02, slope=0.0005, sync=0.01)
SLOWER = dataclasses.replace(BEFORE, sync=1.0)


def rows(now: Truth, *, count: int = 10) -> list[dict[str, Any]]:
    """Return the rows of a training on 2 nodes at batch 128, half way through, on a cluster that is `now` so."""
    compute, sync = now.fixed + now.slope * 64, now.sync / 2
    start = {"kind": "start", "time": 0.0, "samples": 0, "epoch": 0.0, "attempt": 1, "batch": 128, "nodes": 2}
    step = {
        "kind": "step",
        "step": 5,
        "loss": 2.1,
        "lr": 0.1,
        "step_time": compute + sync,
        "data_wait": 0.0,
        "eta": 100.0,
    }
    parts = {"compute": compute, "sync": sync}
    return [start, *({**step, **parts, "time": 1.0 + at, "samples": 250_000, "epoch": 5.0} for at in range(count))]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A job of 10 epochs, measured while the network was good."""
    run = RunDir.create(tmp_path, spec(search={"nodes": [1, 2, 4], "max_batch": 512}))
    for probe in probe_all(BEFORE, {1: (32, 128, 512), 2: (64, 256), 4: (8, 128)}):
        run.write_result(probe)
    return run


def ask(run: RunDir, **limits: Any) -> Answer:
    return recommend(open_family(run), Query(objective="time", from_training=True, **limits), now=1.0)


def test_a_slower_network_makes_one_node_the_better_choice(run: RunDir) -> None:
    make.add_training(run, rows=rows(SLOWER))
    assert recommend(open_family(run), Query(objective="time"), now=1.0).recommendation.choice.nodes == 4
    answer = ask(run)
    recommendation = answer.recommendation
    rest = recommendation.continuation
    assert rest is not None and recommendation.choice.nodes == 1 and rest.moves
    assert (rest.nodes, rest.batch, rest.samples, rest.left) == (2, 128, 250_000, 0.5)
    stay = next(row for row in recommendation.rows if (row.nodes, row.batch) == (2, 128))
    assert stay.step_time == pytest.approx(SLOWER.step_time(2, 64))
    assert rest.hours_as_it_is == pytest.approx(stay.hours / 2)
    assert recommendation.choice.hours / 2 < rest.hours < rest.hours_as_it_is, "a new start is in it"
    assert "training-pace" in codes(answer.warnings)
    (line,) = show_recommend._describe_continuation(recommendation)
    assert (
        "50.0 % left: on 2 nodes, batch 128" in line and line.endswith("% time)") and "including the restart (-" in line
    )
    worse = rest.model_copy(update={"hours": 2 * rest.hours_as_it_is, "cost": 2 * (rest.cost_as_it_is or 0.0)})
    (line,) = show_recommend._describe_continuation(recommendation.model_copy(update={"continuation": worse}))
    assert line.endswith(
        "including the restart (+100 % time), neither faster nor cheaper: keep the current configuration"
    )


def test_where_nothing_has_changed_nothing_moves(run: RunDir) -> None:
    make.add_training(run, rows=rows(BEFORE))
    recommendation = ask(run, nodes=2, max_batch=128).recommendation
    assert recommendation.continuation is not None and not recommendation.continuation.moves
    assert recommendation.continuation.hours == recommendation.continuation.hours_as_it_is
    (line,) = show_recommend._describe_continuation(recommendation)
    assert line.endswith("this is also the choice, so it continues unchanged")


def test_only_steps_since_the_newest_change_count(run: RunDir) -> None:
    change = make.step_change(began_at=20.0).model_dump(mode="json")
    record = {"kind": "change", "time": 30.0, "samples": 250_000, "epoch": 5.0, "change": change}
    later = [{**row, "time": row["time"] + 20.0} for row in rows(SLOWER)[1:]]
    make.add_training(run, rows=[*rows(BEFORE, count=50)[:19], *later, record])
    stay = next(row for row in ask(run).recommendation.rows if (row.nodes, row.batch) == (2, 128))
    assert stay.step_time == pytest.approx(SLOWER.step_time(2, 64))


def test_refreshes_of_the_factors_are_no_change_of_pace(run: RunDir) -> None:
    messages = [{"refreshed": 1, "plain_time": row["step_time"], **row, "step_time": 0.5} for row in rows(BEFORE)[1:]]
    make.add_training(run, rows=[rows(BEFORE)[0], *messages, {**messages[0], "plain_time": None}])
    stay = next(row for row in ask(run).recommendation.rows if (row.nodes, row.batch) == (2, 128))
    assert stay.step_time == pytest.approx(BEFORE.step_time(2, 64))


def test_steps_of_a_smaller_batch_say_nothing_of_the_one_in_use(run: RunDir) -> None:
    grown = [{**row, "batch": 128} for row in rows(SLOWER)]
    smaller = [{**row, "batch": 32, "step_time": 9.0} for row in rows(BEFORE)[1:]]
    make.add_training(run, rows=[grown[0], *smaller, *grown[1:]])
    stay = next(row for row in ask(run).recommendation.rows if (row.nodes, row.batch) == (2, 128))
    assert stay.step_time == pytest.approx(SLOWER.step_time(2, 64))


def test_it_is_kept_only_where_that_is_asked(run: RunDir) -> None:
    make.add_training(run, rows=rows(SLOWER))
    answer = ask(run)
    assert not should_replace(answer.recommendation, None)
    assert run.recommendation() is None
    save_answer(open_family(run), answer)
    assert run.recommendation() == answer.recommendation


def test_without_a_training_or_enough_of_its_steps_it_is_refused(run: RunDir) -> None:
    with pytest.raises(BadMeasurements, match="no training of this run is under way"):
        ask(run)
    make.add_training(run, rows=rows(SLOWER, count=3))
    with pytest.raises(BadMeasurements, match="reported its steps only 3 times"):
        ask(run)
