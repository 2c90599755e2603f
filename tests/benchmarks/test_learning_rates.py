"""The search for a learning rate compared with a full grid (benchmarks/learning_rates): its judgement, and its shortest case."""

import json
from pathlib import Path

import learning_rates
import pytest
import torch


@pytest.mark.parametrize(
    ("values", "best", "is_right"),
    [
        ([95.0, 95.2, 95.1], [96.0, 96.1, 95.9], False),
        ([95.0, 97.0, 96.0], [96.0, 98.0, 97.0], True),  # a point apart, with a deviation of a point
        ([95.8, 95.8, 95.8], [96.0, 96.0, 96.0], True),  # less than an evaluated sample
        ([float("inf")] * 3, [96.0, 98.0, 97.0], False),
    ],
)
def test_a_choice_is_right_within_the_noise_of_the_seeds(
    values: list[float], best: list[float], is_right: bool
) -> None:
    assert learning_rates.is_within_noise(values, best, less_is_better=False) is is_right


def test_the_shortest_case_compares_searches_with_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    threads, out = torch.get_num_threads(), tmp_path / "out.jsonl"
    words = "--jobs perceptron --optimizers SGD --rates tuned --times 4 --seeds 1 --epochs 2 --json"
    try:
        learning_rates.main([str(out), *words.split()])
    finally:
        torch.set_num_threads(threads)
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert set(line["grid"]) == {"none", "sqrt", "linear"}
    assert [branch["rule"] for branch in line["searches"][0]["branches"]] == ["none", "sqrt", "linear"]
    printed = capsys.readouterr().out
    summary = json.loads(printed[printed.index("\n{") :])
    assert summary["perceptron"] == summary["all"]
    assert summary["all"]["searches"] == 1
    before = out.read_text()
    learning_rates.main([str(out), *words.split(), "--summary"])
    assert out.read_text() == before


def test_help_says_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learning_rates.main(["--help"])
    assert "compare --learning-rates" in capsys.readouterr().out
