"""Accuracy of predicting the iterations that other batches need for the same metric, from the gradient noise of one epoch.

    python benchmarks/replay/efficiency.py statistical_efficiency.csv [--json]

The table has the columns app, global_batch, epoch, iteration, metric, grad_sqr and grad_var; a row is the end of an epoch, grad_sqr is
|G|^2 and grad_var the variance of a gradient of the app's smallest batch, so that their ratio times that batch is the noise scale.
A method uses the run of each app with the smallest batch; methods with growing and constant noise use only its gradients of the first
epoch, `10 % trained` those of the epoch at which a tenth of the run's epochs are done (at least the first one), as a training with
`train.diagnostics: [gradient_noise]` measures them. It predicts the iterations of each other batch until the metric is 50, 80 and 95 %
of the way from the smallest batch's first epoch to its best one. Falling metrics are negated. The error is
|predicted / measured - 1|; batches that never reach a metric are counted and left out.

The exponent of the growth is fitted on the other apps each time: the least median over apps of the mean |log error|.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tula_cli.models.efficiency import (
    EARLY_SHARE,
    MIN_NOISE_GROWTH,
    compute_equivalent_constant_noise,
    compute_steps_ratio,
)
from tula_cli.models.ramp import NOISE_GROWTH_EXPONENT

COLUMNS = ("app", "global_batch", "epoch", "iteration", "metric", "grad_sqr", "grad_var")
LEVELS = (0.5, 0.8, 0.95)
GROWTHS = [step / 20 for step in range(41)]
RANGE_TOLERANCE = 0.1
"""Tolerance of the range check: the metrics scatter, and some batches do better than perfect scaling."""


@dataclass(frozen=True)
class Case:
    """One batch and one metric to reach, and the smallest batch's run to the same metric."""

    app: str
    batch: int
    level: float
    reference: int  # the smallest batch
    epochs: float  # of the smallest batch until the metric
    first_noise: float  # samples, at the end of its first epoch
    later_noise: float  # samples, at the end of epoch `later`
    later: int
    run_noise: float  # samples; constant noise equivalent to that of all its epochs until the metric
    ratio: float  # measured iterations relative to the smallest batch


Method = Callable[[Case, float], float]
"""Predicted iterations relative to the smallest batch, given the exponent of the growth."""


def _predict_by_noise(case: Case, noise: float) -> float:
    return float(compute_steps_ratio(case.batch, reference=case.reference, noise=noise))


def predict_with_growth(case: Case, growth: float) -> float:
    noise = compute_equivalent_constant_noise(
        case.first_noise, reference=case.reference, epochs=case.epochs, growth=growth
    )
    return _predict_by_noise(case, noise)


def predict_later(case: Case, growth: float) -> float:
    noise = compute_equivalent_constant_noise(
        case.later_noise, reference=case.reference, epochs=case.epochs, growth=growth, measured_at=case.later
    )
    return _predict_by_noise(case, noise)


METHODS: Mapping[str, Method] = {
    "10 % trained, noise grows from there": predict_later,
    "first epoch, noise grows": predict_with_growth,
    "first epoch, constant noise": lambda case, _: _predict_by_noise(case, case.first_noise),
    "noise of the whole run": lambda case, _: _predict_by_noise(case, case.run_noise),
    "perfect scaling (fixed epochs)": lambda case, _: case.reference / case.batch,
    "square root of the batch": lambda case, _: math.sqrt(case.reference / case.batch),
    "no gain": lambda *_: 1.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    try:
        cases, missed = read_cases(arguments.table)
    except (OSError, ValueError) as error:
        sys.exit(f"efficiency.py: {error}")
    result = summarise(cases, missed)
    print(json.dumps(result, indent=1, allow_nan=False) if arguments.json else format_report(result))


def read_cases(path: Path) -> tuple[list[Case], int]:
    """Return the cases, and the number of batches that did not reach a metric."""
    table = pd.read_csv(path)
    if missing := [column for column in COLUMNS if column not in table.columns]:
        raise ValueError(f"{path} has no column {', '.join(missing)}")
    if table.groupby("app").global_batch.nunique().max() < 2 or table.empty:
        raise ValueError(f"{path} holds no app with two batches to compare")
    results = [case for app, rows in table.groupby("app") for case in _make_cases(str(app), rows)]
    cases = [case for case in results if case is not None]
    return cases, len(results) - len(cases)


def _make_cases(app: str, rows: pd.DataFrame) -> Iterable[Case | None]:
    runs = {int(str(batch)): run.sort_values("epoch") for batch, run in rows.groupby("global_batch")}
    reference = min(runs)
    first = runs[reference]
    sign = 1.0 if first.metric.iloc[-1] > first.metric.iloc[0] else -1.0
    start, best = sign * first.metric.iloc[0], (sign * first.metric).max()
    noise = reference * first.grad_var.to_numpy() / np.maximum(first.grad_sqr.to_numpy(), 1e-300)
    at = max(1, math.floor(EARLY_SHARE * len(noise)))
    for level in LEVELS:
        wanted = start + level * (best - start)
        iterations = iterations_to_metric(first, sign=sign, wanted=wanted)
        assert iterations is not None, "the smallest batch reaches its own best"
        epochs = iterations / first.iteration.iloc[0]
        for batch, run in runs.items():
            if batch == reference:
                continue
            measured = iterations_to_metric(run, sign=sign, wanted=wanted)
            yield (
                None
                if measured is None
                else Case(
                    app=app,
                    batch=batch,
                    level=level,
                    reference=reference,
                    epochs=epochs,
                    first_noise=float(noise[0]),
                    later_noise=float(noise[at - 1]),
                    later=at,
                    run_noise=equivalent_noise(noise[: math.ceil(epochs)], reference),
                    ratio=measured / iterations,
                )
            )


def equivalent_noise(noise: Sequence[float], reference: int) -> float:
    """Return the constant noise scale that loses the same number of steps as these noise scales, one per epoch.

    Another batch needs 1 / s + (1 - 1 / s) u of the steps of an epoch of the smallest batch, where s is the ratio of the batches and u =
    1 / (1 + noise / smallest); so the mean of u determines the result.
    """
    lost = float(np.mean([1 / (1 + value / reference) for value in noise]))
    return reference * (1 / lost - 1) if lost > 0 else math.inf


def iterations_to_metric(run: pd.DataFrame, *, sign: float, wanted: float) -> float | None:
    """Return the iterations until a metric is reached, interpolated linearly between epochs; None if it is not reached."""
    metric, iteration = sign * run.metric.to_numpy(), run.iteration.to_numpy()
    above = np.flatnonzero(metric >= wanted)
    if not len(above):
        return None
    at = int(above[0])
    if at == 0:
        return float(iteration[0])
    before = float(metric[:at].max())
    share = (wanted - before) / (metric[at] - before)
    return float(iteration[at - 1] + share * (iteration[at] - iteration[at - 1]))


def fit_growth(cases: Sequence[Case]) -> float:
    """Return the exponent with the least median over apps of the mean |log error|, which is robust to a single odd app."""

    def loss(growth: float) -> float:
        logs = {app: [] for app in {case.app for case in cases}}  # type: dict[str, list[float]]
        for case in cases:
            logs[case.app].append(abs(math.log(predict_with_growth(case, growth) / case.ratio)))
        return float(np.median([np.mean(values) for values in logs.values()]))

    return min(GROWTHS, key=loss)


def summarise(cases: Sequence[Case], missed: int) -> dict[str, Any]:
    """Return errors in percent by method and app, and over all cases."""
    apps = sorted({case.app for case in cases})
    growths = {app: fit_growth([case for case in cases if case.app != app]) for app in apps}
    errors = {
        name: {app: [_error(method, case, growths[app]) for case in cases if case.app == app] for app in apps}
        for name, method in METHODS.items()
    }
    return {
        "cases": {app: sum(case.app == app for case in cases) for app in apps},
        "not_reached": missed,
        "growth": {**growths, "all": fit_growth(cases), "product": NOISE_GROWTH_EXPONENT},
        "errors": {
            name: {**_summarise_by_app(by_app), "all": _summarise_errors(_join_errors(by_app))}
            for name, by_app in errors.items()
        },
        "mean_of_medians": {name: _mean_of_medians(by_app) for name, by_app in errors.items()},
        "range_covers": {
            str(slack): 100 * float(np.mean([_is_in_range(case, slack) for case in cases]))
            for slack in (0.0, RANGE_TOLERANCE)
        },
        "noise_samples": {
            app: [_round(next(c.first_noise for c in cases if c.app == app)), *_run_noise(cases, app)] for app in apps
        },
    }


def _is_in_range(case: Case, slack: float) -> bool:
    low, high = case.reference / case.batch, predict_with_growth(case, MIN_NOISE_GROWTH)
    return low / (1 + slack) <= case.ratio <= high * (1 + slack)


def _run_noise(cases: Sequence[Case], app: str) -> list[float | None]:
    by_level = {case.level: case.run_noise for case in cases if case.app == app}
    return [_round(by_level[level]) if level in by_level else None for level in LEVELS]


def _round(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def _error(method: Method, case: Case, growth: float) -> float:
    return abs(method(case, growth) / case.ratio - 1)


def _join_errors(by_app: Mapping[str, Sequence[float]]) -> list[float]:
    return [error for errors in by_app.values() for error in errors]


def _summarise_by_app(by_app: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {app: _summarise_errors(errors) for app, errors in by_app.items()}


def _mean_of_medians(by_app: Mapping[str, Sequence[float]]) -> float:
    return 100 * float(np.mean([np.median(errors) for errors in by_app.values()]))


def _summarise_errors(errors: Sequence[float]) -> dict[str, float]:
    return {"median": 100 * float(np.median(errors)), "p90": 100 * float(np.quantile(errors, 0.9))}


def format_report(result: Mapping[str, Any]) -> str:
    """Format the report as tables."""
    apps = [*result["cases"], "all"]
    head = f"{'error of the iterations, median / p90 (%)':42s}" + "".join(f"{app:>16s}" for app in apps)
    lines = [head, *(_format_row(name, [errors[app] for app in apps]) for name, errors in result["errors"].items())]
    growths = ", ".join(f"{app} {result['growth'][app]:.2f}" for app in result["cases"])
    noise = "; ".join(
        f"{app} {' / '.join(str(value) for value in seen)}" for app, seen in result["noise_samples"].items()
    )
    means = ", ".join(f"{name} {value:.1f}" for name, value in result["mean_of_medians"].items())
    return "\n".join(
        [
            *lines,
            f"mean over apps of the median (%): {means}",
            f"cases: {', '.join(f'{app} {count}' for app, count in result['cases'].items())};"
            f" {result['not_reached']} more never reach the metric",
            f"growth of the noise, epochs^x, fitted without the app: {growths};"
            f" with all {result['growth']['all']:.2f}; the product's {result['growth']['product']:.2f}",
            f"the range (growth {MIN_NOISE_GROWTH} to perfect scaling) covers {result['range_covers']['0.0']:.0f} % of the cases,"
            f" {result['range_covers'][str(RANGE_TOLERANCE)]:.0f} % to within {RANGE_TOLERANCE:.0%}",
            f"noise scale, samples: first epoch / run up to {', '.join(f'{level:.0%}' for level in LEVELS)}: {noise}",
        ]
    )


def _format_row(name: str, errors: Sequence[Mapping[str, float]]) -> str:
    return f"{name:42s}" + "".join(f"{error['median']:8.1f} / {error['p90']:5.0f}" for error in errors)


if __name__ == "__main__":
    main()
