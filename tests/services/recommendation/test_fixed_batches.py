"""What stands beside a choice whose batch grows: with its nodes throughout, with its batch fixed, at the reference batch."""

from dataclasses import replace

import pytest
from make_results import Truth, probe_all, spec

from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.models.ramp.stage_nodes import describe_stage_nodes
from tula_cli.services.recommendation.alternatives import describe_alternatives, predict_ramp_alternatives


def forecast(by: str, **train: object) -> Estimator:
    settings = {"method": "lrs", "ramp": "auto", "epochs": 10, "reference_batch": 32, **train}
    subject = spec(train=settings, search={"nodes": [1, 2, 4, 8]})
    result = Estimator.fit(subject, probe_all(Truth(dataset_size=12_800), {1: (16, 32, 64, 128, 256), 8: (2, 64)}))
    return replace(result, stages_by=by)  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [{"ramp_nodes": "auto"}, {"ramp_nodes": "auto", "ramp": None, "method": "ramp"}, {}])
def test_beside_the_choice_stands_what_it_would_take_without_stages(train: dict[str, object]) -> None:
    subject = forecast("cost", **train)
    choice = subject.predict(Config(8, 256))
    results = {item.what: item for item in predict_ramp_alternatives(subject, choice)}
    plain = forecast("cost", ramp=None)
    assert results["as chosen"].node_hours == choice.node_hours
    assert results["a fixed batch"].hours == pytest.approx(plain.predict(Config(8, 256)).hours)
    cheapest_ = min((row for row in plain.predictions() if row.batch == 32), key=lambda row: row.cost)
    assert (results["the reference batch"].nodes, results["the reference batch"].cost) == (
        cheapest_.nodes,
        cheapest_.cost,
    )
    same = results.get("its nodes throughout")
    assert (same is not None) == ("ramp_nodes" in train)
    if same is not None:
        assert results["as chosen"].node_hours < same.node_hours
        assert describe_stage_nodes(choice).startswith("nodes: 1 at batch 32") and describe_stage_nodes(
            choice
        ).endswith("8 at batch 256")
    assert "as chosen (batch 256 on 8 nodes)" in describe_alternatives(tuple(results.values()))
    assert predict_ramp_alternatives(plain, plain.predict(Config(8, 256))) == ()
