"""Stages from the gradient noise scale (`train.ramp: noise`): where a batch begins, how long it lasts, and what is said of it."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_results import Truth, make_probes
from make_results import make_spec as measured_spec
from read_diagnostics import codes, values

from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.models.ramp import (
    NOISE_GROWTH_EXPONENT,
    NoisePath,
    Ramp,
    add_stage_epochs,
    build_ramp,
    describe_stages,
    plan_stages_by_noise,
)
from tula_cli.run.records.recommendations import Stage
from tula_cli.spec.load import validate_job
from tula_cli.spec.sections import MIN_STAGE_SHARE

SIZE, EPOCHS = 10_000, 20


def path(*points: tuple[float, float], reference: int = 128) -> NoisePath:
    result = NoisePath.from_measurements(dict(points), reference=reference)
    assert result is not None
    return result


def stages(subject: NoisePath, *, batch: int = 2048) -> tuple[Stage, ...]:
    return plan_stages_by_noise(subject, batch=batch, size=SIZE, epochs=EPOCHS)


# --- the noise over a training


def test_the_noise_passes_through_what_was_measured_and_grows_as_whole_trainings_do() -> None:
    subject = path((0, 50), (2, 400))
    assert subject.interpolate_noise(0) == pytest.approx(50) and subject.interpolate_noise(2) == pytest.approx(400)
    assert 50 < subject.interpolate_noise(1) < 400
    assert subject.interpolate_noise(9) == pytest.approx((128 + 400) * (10 / 3) ** NOISE_GROWTH_EXPONENT - 128)
    assert NoisePath.from_measurements({}, reference=128) is None
    assert subject.measured_at == 2


def test_before_a_lone_measurement_it_was_as_much_smaller() -> None:
    subject = path((2, 400))
    assert subject.interpolate_noise(0) == pytest.approx(max(0.0, (128 + 400) / 3**NOISE_GROWTH_EXPONENT - 128))
    assert path((2, 10)).interpolate_noise(0) == 0.0


def test_a_noise_that_does_not_stay_counts_for_no_more_than_the_next() -> None:
    subject = path((0, 900), (1, 300), (2, 5000), (3, 600))
    assert subject.interpolate_noise(0) == subject.interpolate_noise(1) == pytest.approx(300)
    assert subject.interpolate_noise(2) == subject.interpolate_noise(3) == pytest.approx(600)


def test_a_gradient_that_is_lost_in_its_noise_allows_any_batch() -> None:
    assert stages(path((0, math.inf))) == (Stage(begin=0, batch=2048, noise=path((0, math.inf)).interpolate_noise(0)),)


MOMENTS = st.integers(0, 20_000_000).map(lambda millionths: millionths / 1e6)
"""Where noise is measured: so many samples are done, of some millions."""
POINTS = st.dictionaries(MOMENTS, st.floats(0, 1e5), min_size=1, max_size=5)


@given(points=POINTS, scale=st.floats(1, 1e5))
@settings(max_examples=100)
def test_first_is_where_it_comes_to_a_scale(points: dict[float, float], scale: float) -> None:
    subject = path(*points.items())
    epoch = subject.find_first_epoch(scale)
    assert subject.interpolate_noise(epoch) >= scale * (1 - 1e-6) - 1e-3
    if epoch > 1e-3:
        assert subject.interpolate_noise(epoch * (1 - 1e-3)) <= scale * (1 + 1e-6) + 1e-3


# --- stages


def test_a_batch_begins_where_the_noise_scale_has_come_to_it() -> None:
    subject = path((0, 60), (2, 400))
    result = stages(subject)
    assert [stage.batch for stage in result] == [128, 256, 512, 1024, 2048]
    for stage in result[1:4]:
        assert (
            subject.interpolate_noise(stage.begin / SIZE) == pytest.approx(stage.batch, rel=1e-3)
            and stage.noise is not None
        )
        assert subject.interpolate_noise((stage.begin - 2) / SIZE) < stage.batch


def test_it_starts_at_the_doubling_that_the_noise_at_the_start_allows() -> None:
    assert stages(path((0, 600)))[0] == Stage(begin=0, batch=512, noise=path((0, 600)).interpolate_noise(0))
    assert stages(path((0, 10)))[0].batch == 128, "never below the reference batch"
    assert [stage.batch for stage in stages(path((0, 10)), batch=100)] == [100]


def test_a_batch_that_the_noise_never_comes_to_begins_at_the_end() -> None:
    result = stages(path((0, 10), (2, 100)))
    assert result[-1] == Stage(begin=SIZE * EPOCHS, batch=2048) and result[-2].batch < 1024
    ramp = Ramp(result)
    steps = ramp.count_remaining_steps(size=SIZE, epochs=EPOCHS)
    assert steps[2048] == 0 and sum(steps.values()) > 0


@given(points=POINTS, batch=st.integers(1, 10_000), epochs=st.integers(1, 100))
@settings(max_examples=200)
def test_stages_only_double_last_their_share_and_never_go_down(
    points: dict[float, float], batch: int, epochs: int
) -> None:
    size, reference = 5000, 128
    subject = path(*points.items(), reference=reference)
    result = plan_stages_by_noise(subject, batch=batch, size=size, epochs=epochs)
    assert result[0].begin == 0 and result[-1].batch == batch
    for before, stage in pairwise(result):
        assert stage.batch > before.batch
        assert stage.begin - before.begin >= MIN_STAGE_SHARE * size * epochs
    for stage in result[:-1]:
        assert stage.batch in {reference << k for k in range(20)}
    for stage in result:
        allowed = stage.noise is None or stage.batch <= stage.noise * (1 + 1e-3) + 1
        assert allowed or stage is result[0]


def job(**train: object) -> object:
    sections = {"model": {"name": "small_cnn"}, "dataset": {"name": "digits"}, "optimizer": {"lr": 0.1}}
    return validate_job(
        {**sections, "train": {"epochs": EPOCHS, "method": "lrs", "ramp": "noise", **train}}, source="a test"
    )


def test_stages_divide_among_parts_and_what_was_decided_stays() -> None:
    noise = path((0, 60), (2, 1000))
    value = {"batch": 3072, "divisor": 48, "dataset_size": SIZE}
    ramp = build_ramp(job(), noise=noise, **value)  # type: ignore[arg-type]
    assert [stage.batch for stage in ramp.stages] == [96, 240, 480, 1008, 2016, 3072]
    assert build_ramp(job(), decided=ramp.stages, **value).stages == ramp.stages  # type: ignore[arg-type]
    smaller = build_ramp(job(), decided=ramp.stages, **{**value, "batch": 480})  # type: ignore[arg-type]
    assert smaller.stages == ramp.stages[:3]
    few = build_ramp(job(), noise=noise, batch=4096, divisor=256, dataset_size=SIZE)  # type: ignore[arg-type]
    assert few.stages[0].begin == 0 and few.stages[0].batch == 256
    assert values(few.remarks, "stage-skipped")["batch"] == 128


def test_without_a_measurement_stages_are_those_of_auto() -> None:
    value = {"batch": 2048, "divisor": 1, "dataset_size": SIZE}
    assert build_ramp(job(), **value) == build_ramp(job(ramp="auto"), **value)  # type: ignore[arg-type]


# --- the forecast


def test_a_forecast_knows_the_stages_and_what_they_lack() -> None:
    spec = measured_spec(train={"method": "lrs", "ramp": "noise", "epochs": 10, "reference_batch": 32})
    results = make_probes(Truth(dataset_size=12_800), {2: (16, 32, 64, 128), 16: (2, 64)})
    known = Estimator.fit(spec, results, noise=path((0, 20), (1, 70), reference=32))
    row = known.predict(Config(2, 256))
    stages = known.stages.list_stages(Config(2, 256))
    assert [stage.batch for stage in row.stages] == [32, 64, 128] == [stage.batch for stage in stages[:-1]]
    assert row.stages[0].steps == pytest.approx(stages[1].begin / 32, abs=1)
    assert not {"noise-only-at-start", "noise-not-measured"} & set(codes(known.warnings))
    start = Estimator.fit(spec, results, noise=path((0, 20), reference=32))
    assert "noise-only-at-start" in codes(start.warnings)
    untold = Estimator.fit(spec, results)
    assert "noise-not-measured" in codes(untold.warnings)


# --- words


def test_stages_in_words() -> None:
    planned = (Stage(begin=0, batch=128), Stage(begin=20_000, batch=256), Stage(begin=50_000, batch=512))
    answer = describe_stages(add_stage_epochs(stages(path((0, 60), (2, 400))), SIZE))
    assert answer.startswith(
        "batch 128 from epoch 0: noise scale 60.0; batch 256 from epoch 1.14: noise scale 256; batch 512"
    )
    assert (
        describe_stages(add_stage_epochs(planned, SIZE))
        == "batch 128 from epoch 0; batch 256 from epoch 2.00; batch 512 from epoch 5.00"
    )
    assert describe_stages(add_stage_epochs(stages(path((0, 10), (2, 100))), SIZE)).endswith(
        "batch 2048: never, because the noise scale remains below 2048"
    )
