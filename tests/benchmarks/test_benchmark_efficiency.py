"""The judgement of the gradient noise (benchmarks/replay/efficiency.py)."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import efficiency
import pandas as pd
import pytest

from tula_cli.models.efficiency import compute_equivalent_constant_noise

PERFECT = "perfect scaling (fixed epochs)"
CONSTANT = "first epoch, constant noise"
RUN = "noise of the whole run"
GROWING = "first epoch, noise grows"
LATER = "10 % trained, noise grows from there"


def run(app: str, batch: int, *, noise: list[float], per_epoch: list[float], falls: bool = False) -> list[dict]:
    """An epoch a row; the metric goes from 0 to 1 (or from 1 to 0) in equal steps. The smallest batch is 10."""
    count, iteration, rows = len(per_epoch), 0.0, []
    for epoch, more in enumerate(per_epoch, 1):
        iteration += more
        share = (epoch - 1) / (count - 1)
        rows.append({"app": app, "global_batch": batch, "epoch": epoch, "iteration": iteration, "grad_sqr": 2.0})
        rows[-1] |= {"metric": 1 - share if falls else share, "grad_var": 2 * noise[epoch - 1] / 10}
    return rows


def table(tmp_path: Path, *, noise: list[float], batches: tuple[int, ...] = (10, 20, 80), **how: bool) -> Path:
    """Runs that need just the iterations that the noise of each epoch says."""
    results = []
    for app in ("one", "two", "three"):
        for batch in batches:
            steps = [100 * (1 + value / batch) / (1 + value / 10) for value in noise]
            results += run(app, batch, noise=noise, per_epoch=steps, **how)
    path = tmp_path / "table.csv"
    pd.DataFrame(results).to_csv(path, index=False)
    return path


def medians(path: Path) -> dict[str, float]:
    cases, _ = efficiency.read_cases(path)
    return {name: errors["all"]["median"] for name, errors in efficiency.summarise(cases, 0)["errors"].items()}


@pytest.mark.parametrize("falls", [False, True])
def test_constant_noise_is_exact_where_the_noise_is_constant(tmp_path: Path, falls: bool) -> None:
    path = table(tmp_path, noise=[30.0] * 21, falls=falls)
    result = medians(path)
    assert sorted({round(case.epochs) for case in efficiency.read_cases(path)[0]}) == [11, 17, 20]
    assert result[CONSTANT] == pytest.approx(0, abs=1e-9) == result[RUN]
    assert result[PERFECT] > 20 and result["no gain"] > 20
    assert result[GROWING] == pytest.approx(0, abs=1e-9)  # fitted on the others: no growth


def test_the_noise_of_the_whole_run_is_exact_where_it_grows(tmp_path: Path) -> None:
    result = medians(table(tmp_path, noise=[10.0 * 1.2**epoch for epoch in range(21)]))
    assert result[RUN] < 1 < result[CONSTANT]
    assert result[GROWING] < result[CONSTANT]


def test_the_noise_after_a_tenth_of_the_epochs_goes_on_from_there(tmp_path: Path) -> None:
    """A first epoch that tells nothing misleads what goes by it, and not what looks at the second of 21."""
    noise = [1000.0, *[30.0] * 20]
    result = medians(table(tmp_path, noise=noise))
    assert result[LATER] < 5 < result[GROWING]


def test_lost_gradients_are_perfect_scaling(tmp_path: Path) -> None:
    path = table(tmp_path, noise=[30.0] * 21)
    rows = pd.read_csv(path)
    rows.loc[rows.epoch > 0, "grad_sqr"] = 0.0
    rows.to_csv(path, index=False)
    result = medians(path)
    assert result[CONSTANT] == pytest.approx(result[PERFECT], abs=1e-6)


def test_the_growth_is_that_of_the_cases(tmp_path: Path) -> None:
    case = efficiency.Case(
        "a", 80, 0.5, reference=10, epochs=20.0, first_noise=30.0, later_noise=30.0, later=1, run_noise=0.0, ratio=1.0
    )
    cases = []
    for batch in (20, 40, 80):
        noise = compute_equivalent_constant_noise(30.0, reference=10, epochs=20.0, growth=0.4)
        cases.append(dataclasses.replace(case, batch=batch, ratio=(1 + noise / batch) / (1 + noise / 10)))
    assert efficiency.fit_growth(cases) == pytest.approx(0.4)


def test_the_growth_of_an_app_is_that_of_the_others() -> None:
    cases = []
    for app, growth in (("slow", 0.2), ("fast", 0.9), ("faster", 0.9)):
        noise = compute_equivalent_constant_noise(30.0, reference=10, epochs=20.0, growth=growth)
        case = efficiency.Case(
            app,
            80,
            0.5,
            reference=10,
            epochs=20.0,
            first_noise=30.0,
            later_noise=30.0,
            later=1,
            run_noise=0.0,
            ratio=1.0,
        )
        cases.append(dataclasses.replace(case, ratio=(1 + noise / 80) / (1 + noise / 10)))
    growths = efficiency.summarise(cases, 0)["growth"]
    assert growths["slow"] == pytest.approx(0.9) and 0.2 <= growths["fast"] < 0.9


def test_a_metric_is_reached_between_its_epochs_and_may_never_be() -> None:
    rows = pd.DataFrame({"metric": [0.1, 0.5, 0.4, 0.9], "iteration": [100, 200, 300, 400]})
    assert efficiency.iterations_to_metric(rows, sign=1.0, wanted=0.3) == pytest.approx(150)
    assert efficiency.iterations_to_metric(rows, sign=1.0, wanted=0.7) == pytest.approx(350)  # from the best so far
    assert efficiency.iterations_to_metric(rows, sign=1.0, wanted=0.05) == 100
    assert efficiency.iterations_to_metric(rows, sign=1.0, wanted=0.95) is None
    assert efficiency.iterations_to_metric(rows * [-1, 1], sign=-1.0, wanted=0.3) == pytest.approx(150)


def test_it_prints_tables_or_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, noise=[30.0] * 21)
    monkeypatch.setattr(sys, "argv", ["efficiency.py", str(path), "--json"])
    efficiency.main()
    data = json.loads(capsys.readouterr().out)
    assert data["cases"] == {"one": 6, "two": 6, "three": 6}
    assert all(math.isfinite(error["median"]) for errors in data["errors"].values() for error in errors.values())
    monkeypatch.setattr(sys, "argv", ["efficiency.py", str(path)])
    efficiency.main()
    assert "0 more never reach the metric" in capsys.readouterr().out
