import make_runs as make
import numpy as np

from tula_cli.models.choice.candidates import Candidates, StageTable
from tula_cli.query import Query
from tula_cli.run.frames import list_columns
from tula_cli.run.records.recommendations import Prediction, Recommendation, SameProgress, StageSteps, TimeParts


def rows() -> list[Prediction]:
    parts = TimeParts(steps=5.0, data=None, evaluation=1.0, checkpoints=0.5, branches=0.0, rest=12.0)
    progress = SameProgress(
        epochs=4.0, epochs_low=3.0, epochs_high=5.0, epochs_alike=3.0, epochs_lossy=5.0, hours=1.0, hours_low=0.8,
        hours_high=1.2, cost=3.0,
    )  # fmt: skip
    unknown = {"step_low": None, "hours_high": None, "peak_memory": None, "headroom": None, "measured": False}
    return [
        make.prediction(2, 128, type="fast", step_fitted=0.2, kwh=3.0, parts=parts, same_progress=progress),
        make.prediction(2, 128, type="fast", market="spot", pareto=True, parts=parts),
        make.prediction(4, 64, **unknown),
        make.prediction(2, 128, type="slower", refresh_share=None, same_progress=progress),
    ]


def stage(batch: int) -> StageSteps:
    """Return a stage before the batch of a training on 4 nodes."""
    return StageSteps(batch=batch, steps=10, share=0.1, step_time=0.1, step_low=None, step_high=None, nodes=2)


def growing() -> tuple[Candidates, list[Prediction]]:
    """Return a table whose second row has one stage before its own batch and whose first has two, and its records."""
    records = [make.prediction(4, 128), make.prediction(4, 64)]
    own = np.array([[128], [64]])
    stages = StageTable(
        nodes=np.array([[2, 2, 4], [2, 2, 4]]),
        batch=np.hstack([[[32, 64], [32, 0]], own]),
        steps=np.full((2, 3), 10.0),
        share=np.full((2, 3), 0.1),
        step_time=np.full((2, 3), 0.1),
        step_low=np.full((2, 3), np.nan),
        step_high=np.full((2, 3), np.nan),
    )
    with_stages = [
        record.model_copy(update={"stages": tuple(map(stage, batches))})
        for record, batches in zip(records, ((32, 64), (32,)), strict=True)
    ]
    return Candidates(Candidates.from_predictions(records).frame, stages), with_stages


def test_rows_of_the_table_are_the_records_that_it_was_made_of() -> None:
    table = Candidates.from_predictions(rows())
    assert list(table.make_predictions()) == rows(), "with and without nested records"
    assert isinstance(table.make_prediction(0).peak_memory, int), "bytes are a whole number"


def test_every_column_is_described_and_its_values_are_those_of_the_records() -> None:
    table, columns = Candidates.from_predictions(rows()), list_columns(Prediction)
    assert set(table.frame.columns) == {column.name for column in columns}
    assert all(column.description for column in columns)
    assert {"parts_data", "same_progress_epochs", "step_time"} <= set(table.frame.columns)
    assert table["same_progress_epochs"][0] == 4.0 and np.isnan(table["same_progress_epochs"][1])


def test_numbers_that_a_model_does_not_give_are_unknown() -> None:
    given = {"nodes": [2], "batch": [8], "local_batch": [4], "step_time": [0.5], "hours": [1.0], "cost": [2.0]}
    words = {"type": [""], "market": ["on_demand"], "trained": [""], "stages": [()]}
    (row,) = Candidates.from_columns({**given, **words}).make_predictions()
    assert (row.nodes, row.hours, row.kwh, row.peak_memory, row.parts, row.same_progress) == (2, 1.0, *[None] * 4)
    assert not (row.measured or row.pareto or row.further)


def test_rows_are_taken_and_joined_with_all_that_they_hold() -> None:
    table = Candidates.from_predictions(rows())
    joined = Candidates.concatenate([table.select_rows([3, 0]), table.select_matching_rows(market="spot")])
    assert list(joined.make_predictions()) == [rows()[index] for index in (3, 0, 1)]
    assert not len(table.select_rows([])) and table.select_rows([]).make_predictions() == ()
    assert table.select_matching_rows(type="fast", market="on_demand").make_prediction(0) == rows()[0]


def test_tables_of_a_constant_and_of_a_growing_batch_are_joined_in_any_order() -> None:
    table, with_stages = growing()
    constant = [make.prediction(nodes, 64) for nodes in (1, 2, 4, 8, 16)]
    tables = [table, Candidates.from_predictions(constant).select_rows([4, 1])]
    records = [with_stages, [constant[4], constant[1]]]
    for first, second in ((0, 1), (1, 0)):
        joined = Candidates.concatenate([tables[first], tables[second]])
        assert list(joined.make_predictions()) == [*records[first], *records[second]]


def test_a_configuration_is_one_on_both_markets_and_another_on_other_nodes() -> None:
    first, spot, other, slower = Candidates.from_predictions(rows()).number_configurations()
    assert first == spot and len({first, other, slower}) == 3
    assert {first, other, slower} == {0, 1, 2}


def test_the_fastest_comes_first_then_fewer_nodes_and_a_smaller_batch() -> None:
    given = [make.prediction(4, 64, hours=1.0), make.prediction(2, 128, hours=1.0), make.prediction(2, 64, hours=1.0)]
    result = Candidates.from_predictions([*given, make.prediction(8, 256, hours=0.5)]).sort_by_time()
    assert np.array_equal(result["nodes"], [8, 2, 2, 4]) and np.array_equal(result["batch"], [256, 64, 128, 64])


def test_a_query_keeps_the_rows_within_all_of_its_limits_in_their_order() -> None:
    progress = rows()[0].same_progress
    assert progress is not None
    made = [
        make.prediction(
            nodes,
            batch,
            hours=hours,
            cost=nodes * hours,
            same_progress=progress.model_copy(update={"hours": 9 / hours}),
        )
        for nodes, batch, hours in ((4, 64, 3.0), (2, 128, 2.0), (2, 64, 6.0), (8, 64, 1.0))
    ]
    table = Candidates.from_predictions(made)

    def places(query: Query) -> list[tuple[int, int]]:
        return [(row.nodes, row.batch) for row in table.satisfying(query).make_predictions()]

    assert places(Query()) == [(4, 64), (2, 128), (2, 64), (8, 64)]
    assert places(Query(max_nodes=4, max_batch=64)) == [(4, 64), (2, 64)]
    assert places(Query(deadline_hours=3, budget=8)) == [(2, 128), (8, 64)], "a limit itself is within it"
    assert places(Query(deadline_hours=0.5)) == []
    assert places(Query(objective="accuracy-time", deadline_hours=3)) == [(4, 64), (2, 64)], "to the same progress"


def test_the_front_is_of_time_cost_and_energy_where_all_have_it() -> None:
    def front(*kwh: float | None) -> list[bool]:
        given = zip((1.0, 2.0, 3.0), (3.0, 3.0, 4.0), kwh, strict=True)
        made = [make.prediction(2, 64, hours=hours, cost=cost, kwh=energy) for hours, cost, energy in given]
        marked = Candidates.from_predictions(made).with_pareto_front()
        return [row.pareto for row in marked.make_predictions()]

    assert front(None, None, 1.0) == [True, False, False]
    assert front(5.0, 5.0, 1.0) == [True, False, True]


def test_the_table_of_a_recommendation_is_that_of_its_candidates() -> None:
    answer: Recommendation = make.recommendation()
    frame = answer.frame()
    assert list(frame.columns) == [
        *(column.name for column in list_columns(Prediction)),
        "chosen",
        "speed_up",
        "accuracy_risk",
        "caveats",
    ]
    assert frame["hours"].tolist() == [row.hours for row in answer.rows]
    assert frame["chosen"].tolist() == [row == answer.choice for row in answer.rows]
    assert str(frame["peak_memory"].dtype) == str(frame["nodes"].dtype) == "Int64"
