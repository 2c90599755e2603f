"""Regression summaries by statsmodels for `tula recommend --explain`.

The models used for prediction are fitted in numpy. Here statsmodels repeats the final fits to the same probes: the
generalised least squares whose covariance gives the intervals of step times, and three plain regressions for
comparison.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tula_cli.models.choice.candidates import Floats
from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.models.time.step_model import OverlapFit, StepModel
from tula_cli.models.time.step_time import StepTimeFit
from tula_cli.words import format_count

if TYPE_CHECKING:
    from statsmodels.regression.linear_model import RegressionResultsWrapper

MIB = 2**20


@dataclass(frozen=True)
class Coefficient:
    """One coefficient of a regression, with its 90 % interval."""

    value: float
    standard_error: float
    low: float
    high: float


@dataclass(frozen=True)
class RegressionSummary:
    """A regression with its description, its coefficients, and the tables of statsmodels, which only JSON shows."""

    name: str
    about: str  # response and predictors, in a sentence
    coefficients: Mapping[str, Coefficient]  # empty if there are too few probes
    summary: str  # tables of statsmodels; empty if there are too few probes


def list_regression_summaries(estimator: Estimator) -> Iterator[RegressionSummary]:
    """Yield the regressions of one type of node."""
    yield from _summarize_step_time(estimator.steps.model)
    yield _summarize_paper_fit(estimator.steps)
    yield _summarize_memory(estimator)
    yield _summarize_cost(estimator)


def _summarize_step_time(model: StepModel) -> Iterator[RegressionSummary]:
    if len(model.members) == 1:
        yield _summarize_overlap(model.members[0], "step time", "")
        return
    reason = (
        "whole step times do not show which one is right"
        if model.has_only_whole_steps
        else "it is unknown whether the communication of gradients this small overlaps with compute"
    )
    for member, weight, name in zip(model.members, model.weights, ("overlapped", "nothing overlapped"), strict=True):
        yield _summarize_overlap(
            member,
            f"step time, {name}",
            f"; one of two fits, with weight {100 * weight:.0f} %, because {reason}",
        )


def _summarize_overlap(model: OverlapFit, name: str, share: str) -> RegressionSummary:
    names = model.coordinates
    about = (
        "the step-time model at its most probable parameters, by generalised least squares: one row per step time and, if"
        f" measured, per compute time, and {format_count(len(names), 'row')} for the priors. Each value is the number of prior"
        f" standard deviations from the prior mean; if its interval is about -1.64 to 1.64, the probes did not determine it{share}"
    )
    return _summarize_result(name, about, "ln step time", model.fitted.regression, names)


def _summarize_paper_fit(steps: StepTimeFit) -> RegressionSummary:
    points, seconds = steps.list_measured_points()
    columns = {"fixed": np.ones(len(points)), "local batch": points.local_batch}
    if len(np.unique(points.replicas)) > 1:
        columns["1 - 1/N"] = 1 - 1 / np.where(points.is_single_gpu, 1.0, points.replicas)
    about = "the paper's Eq. 2 for comparison, by ordinary least squares: milliseconds per step, without overlap"
    return _summarize_ols("step time by the paper", about, "step (ms)", 1e3 * seconds, columns)


def _summarize_memory(estimator: Estimator) -> RegressionSummary:
    probes = list(estimator.probes.values())
    micro_batch = np.array([probe.local_batch / probe.accumulate for probe in probes])
    peak = np.array([probe.memory.peak for probe in probes]) / MIB
    about = "the peak memory of a GPU in MiB, by ordinary least squares on the micro-batch"
    return _summarize_ols(
        "memory", about, "peak (MiB)", peak, {"fixed": np.ones(len(probes)), "micro-batch": micro_batch}
    )


def _summarize_cost(estimator: Estimator) -> RegressionSummary:
    gpus = estimator.spec.cluster.gpus_per_node
    configurations = [Config(nodes, local * nodes * gpus) for nodes, local in estimator.probes]
    rows = [estimator.predict(config) for config in configurations if not estimator.describe_why_infeasible(config)]
    columns = {"fixed": np.ones(len(rows))}
    columns |= {f"ln {name}": np.log([getattr(row, name) for row in rows]) for name in ("nodes", "batch")}
    about = (
        "the cost of the training at the measured configurations, by ordinary least squares of logarithms: a coefficient of"
        " -0.5 for the batch means that doubling the batch divides the cost by 1.4"
    )
    cost = np.array([row.cost for row in rows])
    if not (cost > 0).all():
        return RegressionSummary("cost", f"{about}; not fitted, because the cost is 0", {}, "")
    varying = {name: column for name, column in columns.items() if name == "fixed" or np.ptp(column) > 0}
    return _summarize_ols("cost", about, f"ln cost ({estimator.spec.pricing.currency})", np.log(cost), varying)


def _summarize_ols(
    name: str, about: str, response: str, target: Floats, columns: Mapping[str, Floats]
) -> RegressionSummary:
    from statsmodels.regression.linear_model import OLS

    rows = np.column_stack(list(columns.values()))
    if len(rows) <= rows.shape[1] or np.linalg.matrix_rank(rows) < rows.shape[1]:
        few_text = f"; {format_count(len(rows), 'probe')} are too few for {format_count(rows.shape[1], 'coefficient')} and an error"
        return RegressionSummary(name, f"{about}{few_text}", {}, "")
    return _summarize_result(name, about, response, OLS(target, rows).fit(), list(columns))


def _summarize_result(
    name: str, about: str, response: str, result: "RegressionResultsWrapper", names: Sequence[str]
) -> RegressionSummary:
    rows = np.column_stack([result.params, result.bse, result.conf_int(alpha=0.1)]).tolist()
    coefficients = {column: Coefficient(*row) for column, row in zip(names, rows, strict=True)}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # some of its tests require more rows than a search has probes
        summary = str(result.summary(yname=response, xname=list(names)).as_text())
    return RegressionSummary(name, about, coefficients, summary)
