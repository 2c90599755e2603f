import pytest
from make_results import Truth, make_probes, make_spec
from pydantic import ValidationError

from tula_cli.models.estimator import Estimator
from tula_cli.models.summaries import list_regression_summaries
from tula_cli.run.records.probes import Measured

PROBES = {2: (16, 64, 256), 4: (16,), 8: (16, 64, 256)}


def test_steps_whose_compute_was_measured_have_one_regression() -> None:
    regression_summaries = list(list_regression_summaries(Estimator.fit(make_spec(), make_probes(Truth(), PROBES))))
    assert [item.name for item in regression_summaries] == ["step time", "step time by the paper", "memory", "cost"]


def test_whole_steps_have_one_with_overlap_and_one_without_and_their_probabilities() -> None:
    whole = [probe.model_copy(update={"compute_time": None}) for probe in make_probes(Truth(), PROBES)]
    overlapped, additive, *_ = list_regression_summaries(Estimator.fit(make_spec(), whole))
    assert (overlapped.name, additive.name) == ("step time, overlapped", "step time, nothing overlapped")
    assert overlapped.coefficients["level"] != additive.coefficients["level"] and "ln step time" in additive.summary
    shares = [int(item.about.partition("weight ")[2].partition("%")[0]) for item in (overlapped, additive)]
    assert sum(shares) in (99, 100, 101)
    assert "whole step times do not show" in additive.about


def test_a_small_model_has_both_where_its_compute_was_measured() -> None:
    small = [
        probe.model_copy(update={"memory": probe.memory.model_copy(update={"gradients": 1 << 20})})
        for probe in make_probes(Truth(), PROBES)
    ]
    overlapped, additive, *_ = list_regression_summaries(Estimator.fit(make_spec(), small))
    assert (overlapped.name, additive.name) == ("step time, overlapped", "step time, nothing overlapped")
    assert "communication of gradients this small overlaps with compute" in additive.about


def test_a_probe_whose_batch_cannot_be_trained_any_more_is_no_row() -> None:
    fewer = [probe.model_copy(update={"dataset_size": 1024}) for probe in make_probes(Truth(), PROBES)]
    summaries = list_regression_summaries(Estimator.fit(make_spec(), fewer))
    assert "cost" in [item.name for item in summaries], "8 nodes with local batch 256 exceed the dataset"


def test_a_counter_of_energy_that_stands_still_is_none() -> None:
    stopped = [Measured.model_validate(probe.model_dump() | {"energy": 0.0}) for probe in make_probes(Truth(), PROBES)]
    assert Estimator.fit(make_spec(), stopped).power is None


def test_a_duration_of_a_clock_that_was_set_back_is_damage() -> None:
    content = make_probes(Truth(), PROBES)[0].model_dump()
    with pytest.raises(ValidationError, match="startup"):
        Measured.model_validate(content | {"overheads": content["overheads"] | {"startup": -5.0}})
