"""Which batch a training has where (`train.ramp`): stages by rule and by name, the steps they take, and what is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_diagnostics import values

from tula_cli.errors import SpecError
from tula_cli.models.ramp import Ramp, Stage, build_ramp
from tula_cli.models.ramp_costs import check_stages, list_stage_diagnostics
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job
from tula_cli.spec.sections import Search


def job(ramp: Any = "auto", **train: Any) -> JobSpec:
    sections = {"model": {"name": "small_cnn"}, "dataset": {"name": "digits"}, "optimizer": {"lr": 0.1}}
    return validate_job({**sections, "train": {"epochs": 20, "method": "lbt", "ramp": ramp, **train}}, source="a test")


def of(ramp: Any, *, batch: int = 2048, parts: int = 1, size: int = 10_000, **train: Any) -> Ramp:
    return build_ramp(job(ramp, **train), batch=batch, divisor=parts, dataset_size=size)


def test_auto_doubles_from_the_reference_batch_every_twentieth_of_the_training() -> None:
    result = of("auto")
    assert result.remarks == ()
    assert result.stages == tuple(
        Stage(begin=10_000 * k, batch=batch) for k, batch in enumerate((128, 256, 512, 1024, 2048))
    )  # an epoch each


def test_auto_lasts_half_the_training_at_most() -> None:
    result = of("auto", batch=2**20, size=2**21)
    assert len(result.stages) == 14 and result.stages[-1] == Stage(begin=10 * 2**21, batch=2**20)


def test_auto_rounds_to_what_divides_and_leaves_out_what_no_gpu_has_a_sample_of() -> None:
    assert [stage.batch for stage in of("auto", batch=3072, parts=48).stages] == [96, 240, 480, 1008, 2016, 3072]
    result = of("auto", batch=4096, parts=256)
    assert [stage.batch for stage in result.stages] == [256, 512, 1024, 2048, 4096]
    assert result.stages[1].begin == 10_000
    skipped = {"setting": "train.ramp: auto", "batch": 128, "micro_batches": 256}
    assert values(result.remarks, "stage-skipped") == skipped


def test_auto_says_where_there_is_nothing_to_grow() -> None:
    result = of("auto", batch=128)
    assert result.stages == (Stage(begin=0, batch=128),)
    assert values(result.remarks, "auto-ramp-without-stages") == {"batch": 128, "reference_batch": 128}


def test_a_method_may_ramp_by_itself_and_no_other_does() -> None:
    assert len(of(None, method="ramp").stages) == 5
    assert of(None, method="ortho") == Ramp.from_constant_batch(2048)


def test_named_stages_last_epochs() -> None:
    result = of([{"epochs": 1.5, "batch": 128}, {"epochs": 0.07, "batch": 300}])
    assert result.stages == (Stage(begin=0, batch=128), Stage(begin=15_000, batch=300), Stage(begin=15_700, batch=2048))


def test_a_smaller_batch_keeps_the_stages_below_it() -> None:
    named = [{"epochs": 1, "batch": 128}, {"epochs": 2, "batch": 512}]
    assert of(named, batch=512).stages == (Stage(begin=0, batch=128), Stage(begin=10_000, batch=512))
    assert of("auto", batch=512).stages == of("auto").stages[:3]


SIZES = st.integers(1, 40)


@given(size=st.integers(5, 300), batches=st.lists(SIZES, min_size=1, max_size=4), data=st.data())
@settings(max_examples=80)
def test_steps_are_those_of_a_walk(size: int, batches: list[int], data: st.DataObject) -> None:
    begins = sorted(data.draw(st.lists(st.integers(0, 3 * size), min_size=len(batches), max_size=len(batches))))
    ramp = Ramp(
        tuple(Stage(begin=begin, batch=batch) for begin, batch in zip([0, *begins[1:]], sorted(batches), strict=True))
    )
    epochs, start = 5, data.draw(st.integers(0, size))
    walked = dict.fromkeys(sorted(batches), 0)
    for epoch in range(epochs):
        done = 0 if epoch else start
        while (batch := ramp.find_batch(epoch * size + done)) <= size - done:
            walked[batch] += 1
            done += batch
    assert ramp.count_remaining_steps(size=size, epochs=epochs, samples_done=start) == walked


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([{"epochs": 1, "batch": 100}], {"nodes": 8}, r"batch 100 is not divisible by 8 .*"),
    ([{"epochs": 1, "batch": 4096}], {}, "batch 4096 is not below 2048, the batch of the training"),
    ([{"epochs": 19.999999, "batch": 128}], {}, r"lasts 20 epochs, so none of the 20 epochs \(train.epochs\) remains"),
    ([{"epochs": 1, "batch": 128, "nodes": 5}], {}, r"has 5 nodes, more than the training \(1\)"),
    (
        [{"epochs": 4e-5, "batch": 128}],
        {},
        "4e-05 epochs at batch 128 are less than one sample of the dataset",
    ),
]


@pytest.mark.parametrize(("ramp", "where", "words"), REFUSED)
def test_stages_that_do_not_fit_are_refused(ramp: Any, where: dict[str, int], words: str) -> None:
    given_ = {"batch": 2048, "nodes": 1, "dataset_size": 10_000, **where}
    with pytest.raises(SpecError, match=words):
        check_stages(job(ramp), **given_)


@pytest.mark.parametrize(
    ("named", "most", "problem", "warning"),
    [
        (
            [64, 512],
            512,
            "no training on [1, 2]: train.ramp: batch 512 is not below 512, the batch of the training",
            "",
        ),
        ([64, 512], 1024, "", ""),
        (
            [64, 511],
            1024,
            "",
            "no training on [2]: train.ramp: batch 511 is not divisible by 2 (GPUs x micro-batches of a step)",
        ),
        ([(64, 3)], 512, "no training on [1]: train.ramp: batch 64 has 3 nodes, more than the training (1)", ""),
        (
            [(64, 2)],
            512,
            "",
            "no training on [1]: train.ramp: batch 64 has 2 nodes, more than the training (1)",
        ),
        ([64], None, "", ""),
        ("auto", 32, "", ""),
    ],
)
@pytest.mark.parametrize("size", [1438, None])
def test_check_tells_where_the_search_has_no_batch_for_the_stages(
    named: Any, most: int | None, problem: str, warning: str, size: int | None
) -> None:
    stages: Any = named
    if named != "auto":
        those = [item if isinstance(item, tuple) else (item, None) for item in named]
        stages = [{"epochs": 1, "batch": batch, **({"nodes": nodes} if nodes else {})} for batch, nodes in those]
    search = Search(nodes=[1, 2], min_batch=32, max_batch=most)
    problems, warnings = list_stage_diagnostics(job(stages).model_copy(update={"search": search}), dataset_size=size)
    for result, words in ((problems, problem), (warnings, warning)):
        assert len(result) == (0 if not words else 2 if "has 3 nodes" in words else 1)
        assert not words or words in f"no training on {result[0].values['nodes']}: {result[0].values['reason']}"


def test_check_tells_stages_that_last_too_long_once_the_dataset_is_known() -> None:
    subject = job([{"epochs": 19.9999, "batch": 64}]).model_copy(update={"search": Search(nodes=[1], max_batch=512)})
    assert list_stage_diagnostics(subject, dataset_size=None) == ([], [])
    assert "lasts 20 epochs" in list_stage_diagnostics(subject, dataset_size=1438)[0][0].text


@pytest.mark.parametrize(
    ("ramp", "train", "words"),
    [
        ([{"epochs": 1, "batch": 64}, {"epochs": 1, "batch": 64}], {}, "must increase"),
        ([{"batch": 64}], {}, "is required"),
        ([{"batch": 64, "epochs": 1, "samples": 7}], {}, "this key no longer exists"),
        ([{"epochs": 20, "batch": 64}], {}, "the stages last 20 epochs and must end before train.epochs"),
        ([], {}, "at least 1 entry"),
        ("auto", {"method": "auto"}, "train.method: auto, which needs a constant batch"),
    ],
)
def test_the_file_alone_tells_what_cannot_be(ramp: Any, train: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(ramp, **train)
    assert words in " ".join(problem.message for problem in caught.value.problems)
