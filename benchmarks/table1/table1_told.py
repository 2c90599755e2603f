"""What the tables of benchmarks/table1/table1.py tell: accuracy beside steps and time, and which rows no other one beats."""

from collections.abc import Iterator, Mapping

import table1_rows
from table1_kept import share, won_back

from tula_cli.run.directory import RunDir
from tula_cli.services.comparison.accuracy import CompareReport, Row, Stat
from tula_cli.show.compare import heads

Steps = Mapping[tuple[str, int], float]
"""Optimizer steps of a training, by (method, batch): the mean over seeds."""


def steps(run: RunDir, report: CompareReport) -> Steps:
    """Return the steps of each row that has finished trainings; of a self-tuning one those of its branches too."""
    found = {}
    for row in report.rows:
        each = [count for cell in row.cells if (count := _steps(run, cell.cell.signature)) is not None]
        if each:
            found[row.method, row.batch] = sum(each) / len(each)
    return found


def _steps(run: RunDir, signature: str) -> float | None:
    result = run.training(signature).result()
    if result is None:
        return None
    return result.steps + (result.tuning.samples / result.batch if result.tuning is not None else 0)


def front(report: CompareReport, steps: Steps) -> set[tuple[str, int]]:
    """Return the rows (method, batch) than which no other one is as good, or better, in fewer steps (the Pareto front)."""
    best: float | None = None
    found = set()
    for row in sorted(report.rows, key=lambda row: (steps.get((row.method, row.batch), 0.0), _worth(row, report))):
        value = row.stat(report.metric)
        if value is None or (row.method, row.batch) not in steps:
            continue
        if best is None or _worth(row, report) < best:
            best = _worth(row, report)
            found.add((row.method, row.batch))
    return found


def _worth(row: Row, report: CompareReport) -> float:
    """Return what is the less, the better a row is."""
    value = row.stat(report.metric)
    return float("inf") if value is None else value.mean if report.less_is_better else -value.mean


def same_tricks(row: Row, report: CompareReport) -> float | None:
    """Return the share of the way from lbt to the small batch with the same tricks that a row goes.

    Over the seeds that all three have; None where there is no such small batch, or lbt does not lose to it.
    """
    name = table1_rows.SAME_TRICKS.get(row.method)
    if name is None or row.batch == report.reference_batch:
        return None
    rows = {(other.method, other.batch): other for other in report.rows}
    small, plain = rows.get((name, report.reference_batch)), rows.get(("lbt", row.batch))
    own, of_plain, of_small = (_by_seed(found, report.metric) for found in (row, plain, small))
    return won_back(own, of_plain, of_small, report.metric)


def _by_seed(row: Row | None, metric: str) -> dict[int, float]:
    if row is None:
        return {}
    return {cell.cell.seed: value for cell in row.cells if (value := cell.value(metric)) is not None}


def markdown(name: str, report: CompareReport, steps: Steps) -> Iterator[str]:
    """One row a method at a batch: mean, sample standard deviation and number of seeds."""
    yield f"### {name}: {report.finished} of {report.total} trainings"
    yield ""
    metrics = " | ".join(heads(report))
    yield (
        f"| batch | method | n | {metrics} | gap | recovered (%) | against the same tricks (%) | steps | samples |"
        " minutes | front | note |"
    )
    yield "|" + "---|" * (len(report.columns) + 11)
    best = front(report, steps)
    for row in report.rows:
        yield f"| {' | '.join(cells(row, report, steps, best))} |"
    yield ""


def cells(row: Row, report: CompareReport, steps: Steps, best: set[tuple[str, int]]) -> tuple[str, ...]:
    """Return a row of the table."""
    key = row.method, row.batch
    return (
        str(row.batch),
        f"{row.method} (reference)" if row.reference else row.method,
        str(row.seeds),
        *(spread(row.stat(metric), 3 if metric == "loss" else 2) for metric in report.columns),
        "" if row.gap is None else f"{row.gap:.2f}",
        share(row.recovered),
        share(same_tricks(row, report)),
        f"{steps[key]:.0f}" if key in steps else "",
        "" if row.samples is None else f"{row.samples:.0f}",
        "" if row.hours is None else f"{60 * row.hours:.2f}",
        "*" if key in best else "",
        row.note,
    )


def spread(value: Stat | None, digits: int) -> str:
    if value is None:
        return ""
    return f"{value.mean:.{digits}f}" + ("" if value.sd is None else f" ± {value.sd:.{digits}f}")
