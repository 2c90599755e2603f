import make_runs as make
import numpy as np

from tula_cli.models.choice.offers import Offers
from tula_cli.run.records.recommendations import Prediction, SameProgress, TimeParts


def rows() -> list[Prediction]:
    parts = TimeParts(steps=5.0, data=None, evaluation=1.0, checkpoints=0.5, branches=0.0, rest=12.0)
    progress = SameProgress(
        epochs=4.0, epochs_low=3.0, epochs_high=5.0, epochs_alike=3.0, epochs_lossy=5.0, hours=1.0, hours_low=0.8,
        hours_high=1.2, cost=3.0,
    )  # fmt: skip
    unknown = {"step_low": None, "hours_high": None, "peak_memory": None, "headroom": None, "measured": False}
    found = [
        make.prediction(2, 128, type="fast", step_fitted=0.2, kwh=3.0),
        make.prediction(2, 128, type="fast", market="spot", pareto=True),
        make.prediction(4, 64, **unknown),
        make.prediction(2, 128, type="slower", refresh_share=None),
    ]
    return [row.model_copy(update={"parts": parts, "same_progress": progress}) for row in found]


def test_records_are_the_same_after_a_while_as_columns() -> None:
    assert list(Offers.of(rows()).records()) == rows()
    plain = [row.model_copy(update={"parts": None, "same_progress": None}) for row in rows()]
    assert list(Offers.of(plain).records()) == plain
    memory = Offers.of(rows()).record(0).peak_memory
    assert isinstance(memory, int), "bytes are a whole number"


def test_rows_are_taken_and_joined_with_all_that_they_hold() -> None:
    offers = Offers.of(rows())
    assert list(Offers.join([offers.take([3, 0]), offers.take(offers.market == "spot")]).records()) == [
        rows()[index] for index in (3, 0, 1)
    ]
    assert not len(offers.take([])) and offers.take([]).records() == ()


def test_a_configuration_is_one_on_both_markets_and_another_on_other_nodes() -> None:
    first, spot, other, slower = Offers.of(rows()).configurations()
    assert first == spot and len({first, other, slower}) == 3
    assert {first, other, slower} == {0, 1, 2}


def test_the_fastest_comes_first_then_fewer_nodes_and_a_smaller_batch() -> None:
    given = [make.prediction(4, 64, hours=1.0), make.prediction(2, 128, hours=1.0), make.prediction(2, 64, hours=1.0)]
    found = Offers.of([*given, make.prediction(8, 256, hours=0.5)]).ordered()
    assert np.array_equal(found.nodes, [8, 2, 2, 4]) and np.array_equal(found.batch, [256, 64, 128, 64])
