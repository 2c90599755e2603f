"""The cost of an interruption of a script: how often it saves, in words and in the price of spot nodes."""

import math

import pytest
from make_results import Truth, as_script_probe, make_probes

from tula_cli.models import cost
from tula_cli.models.cost import CheckpointSchedule
from tula_cli.models.estimator import Estimator
from tula_cli.run.records.probes import Overheads
from tula_cli.run.records.results import ScriptCheckpointSave
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job

RESUME = {"args": "--resume {checkpoint}", "checkpoint": "{out}/c.pt", "batch": "any"}
PROBES = {1: (16, 32, 64), 2: (16, 32)}
SIZE = 50_000
SPOT = {"price": 1.0, "spot": {"discount": 0.7, "interruptions_per_day": 24}}


def job(resume: dict | None = RESUME, save: str = "none", **sections) -> JobSpec:
    script = {"command": "train.py -b {local_batch}", "length": {"epochs": 3}, "reference": {"batch": 16}, "save": save}
    if resume is not None:
        script["resume"] = resume
    search = {"nodes": [1, 2], "min_batch": 16, "max_batch": 64}
    return validate_job({"script": script, "search": search, **sections}, source="test")


def saves(*samples: int, batch: int = 32, seconds: float | None = 7.0) -> list[ScriptCheckpointSave]:
    return [
        ScriptCheckpointSave(saved_at=0.0, batch=batch, steps=n // batch, samples=n, seconds=seconds) for n in samples
    ]


def saving(*samples: int, spec: JobSpec | None = None, seconds: float | None = 7.0) -> CheckpointSchedule:
    script = (spec or job()).script
    assert script is not None
    return cost.find_checkpoint_schedule(script, saves(*samples, seconds=seconds), dataset_size=SIZE)


def test_an_epochs_last_batch_may_be_dropped() -> None:
    each = 32 * (SIZE // 32)
    assert saving(each, each, each).epochs == 1
    assert saving(2 * each, 2 * each).epochs == 2
    assert saving(each, each, each // 2).epochs == 1, "a checkpoint in between, once"


def test_what_is_no_epoch_is_so_many_steps_or_so_long() -> None:
    assert saving(3200, 3200, 3200).steps == 100
    by_time = saving(3200, 3520, 3840, 4160)
    assert (by_time.steps, by_time.epochs, by_time.seconds) == (None, None, 7.0)
    assert saving(3200, seconds=None).steps == 100, "one, at the end of a start, tells no time"


@pytest.mark.parametrize(
    ("samples", "unit", "interval"),
    [({32: 3200, 64: 6400}, "steps", 100), ({32: 6400, 64: 6400}, "samples", 6400), ({64: 6400, 32: 6336}, "samples", 6336)],
)  # fmt: skip
def test_several_batches_show_whether_a_script_counts_steps_or_samples(
    samples: dict[int, int], unit: str, interval: int
) -> None:
    seen = [save for batch, count in samples.items() for save in saves(count, count, batch=batch)]
    script = job().script
    assert script is not None
    schedule = cost.find_checkpoint_schedule(script, seen, dataset_size=SIZE)
    assert getattr(schedule, unit) == interval and schedule.is_known
    at_128 = schedule.compute_interval(0.5, epoch_steps=SIZE / 128)
    assert at_128 == pytest.approx(0.5 * (interval if unit == "steps" else interval / 128))
    assert f"saves every {interval} {unit}" in schedule.describe_lost_work(0.5, epoch_steps=SIZE // 128)


def test_how_often_a_script_saves_is_unknown_until_a_training_has_shown_it() -> None:
    assert not saving().is_known and saving(spec=job(None)).is_known


def test_an_interval_follows_the_step_time() -> None:
    assert CheckpointSchedule(True, epochs=2).compute_interval(0.5, epoch_steps=100) == 100.0
    assert CheckpointSchedule(True, steps=30).compute_interval(0.5, epoch_steps=100) == 15.0
    assert CheckpointSchedule(True, seconds=600.0).compute_interval(0.5, epoch_steps=100) == 600.0
    assert CheckpointSchedule(True).compute_interval(0.5, epoch_steps=100) is None
    assert CheckpointSchedule(False).compute_interval(0.5, epoch_steps=100) == math.inf


@pytest.mark.parametrize(
    ("found", "step_time", "words"),
    [
        (CheckpointSchedule(True, epochs=1), 24.6, "saves each epoch (41.0 min), so an interruption costs 20.5 min on average; tula cannot"),
        (CheckpointSchedule(True, "SIGUSR1", steps=500), 1.2, "saves every 500 steps (10.0 min), so an interruption costs 5.00 min on average;"
         " before a time limit, tula requests a checkpoint (SIGUSR1)"),
        (CheckpointSchedule(True, seconds=1800.0), 1.0, "saves every 30.0 min, so an interruption costs 15.0 min on average"),
        (CheckpointSchedule(True, epochs=1), None, "saves each epoch, so an interruption costs half of this interval on average"),
        (CheckpointSchedule(True), 1.0, "the checkpoint interval is unknown until the script trains"),
        (CheckpointSchedule(False), 1.0, "an interruption loses all progress"),
    ],
)  # fmt: skip
def test_the_cost_of_an_interruption_in_words(found: CheckpointSchedule, step_time: float | None, words: str) -> None:
    assert words in found.describe_lost_work(step_time, epoch_steps=100)


def test_each_interruption_takes_a_script_back_to_its_own_checkpoint() -> None:
    overheads = Overheads(startup=100.0, eval_batch=None, eval_batch_size=None, checkpoint=None, refresh=None)
    rate = 1 / 3600

    def takes(interval: float, rate: float = rate) -> float:
        return cost.compute_script_seconds(7200.0, overheads=overheads, interval=interval, rate=rate)

    assert takes(600.0, rate=0.0) == takes(math.inf, rate=0.0) == 7300.0
    assert 7300.0 < takes(600.0) < takes(3600.0) < takes(math.inf)
    whole = math.exp(rate * 100) * 3600 * math.expm1(2.0)
    assert takes(math.inf) == takes(7200.0) == pytest.approx(whole + 3600 * math.expm1(rate * 100))
    lost = takes(600.0) - 7300.0
    assert lost == pytest.approx(2 * (300 + 100), rel=0.15), "two interruptions of half an interval and a restart each"


def forecast(spec: JobSpec, seen: list[ScriptCheckpointSave]) -> Estimator:
    probes = [as_script_probe(probe) for probe in make_probes(Truth(), PROBES)]
    return Estimator.fit(spec, probes, saves=seen)


def test_spot_nodes_are_priced_by_what_the_script_loses() -> None:
    each = 32 * (SIZE // 32)
    spec = job(pricing=SPOT)
    often, seldom = (forecast(spec, saves(n, n)) for n in (3200, each))
    first, second = (result.predict_candidates().make_predictions() for result in (often, seldom))
    assert {row.market for row in first} == {"spot", "on_demand"} == {row.market for row in second}
    for here, there in zip(*(sorted((r for r in rows if r.market == "spot"), key=lambda r: (r.nodes, r.batch)) for rows in (first, second)), strict=True):  # fmt: skip
        assert here.hours < there.hours and here.cost < there.cost
    row = next(row for row in second if row.market == "on_demand")
    assert seldom.describe_interruption(row).startswith("saves each epoch (")


def test_no_spot_nodes_are_offered_while_nobody_knows_what_is_lost() -> None:
    result = forecast(job(pricing=SPOT), [])
    assert {row.market for row in result.predict_candidates().make_predictions()} == {"on_demand"}
    lost = [warning.values.get("epochs_lost_on_spot") for warning in result.warnings]
    assert True not in lost, "that would be a guess"
    anew = forecast(job(None, pricing=SPOT), [])
    spot = [row for row in anew.predict_candidates().make_predictions() if row.market == "spot"]
    for row in spot:
        same_nodes = anew.predict_candidates([row.nodes]).make_predictions()
        assert row.hours > next(other.hours for other in same_nodes if other.market == "on_demand")
