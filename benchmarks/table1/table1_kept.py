"""Trainings of a table that are kept as a CSV, one a line: where one machine ends, another one goes on.

`--csv FILE` of table1.py adds what it trains to the file and trains nothing again that the file has; the file's own table, over
the seeds that each row has, is what docs tell.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

import table1_rows

from tula_cli.cluster.scripts.printed_metrics import less_is_better
from tula_cli.run.files import write_atomic
from tula_cli.run.records.results import Cell
from tula_cli.services.comparison import accuracy
from tula_cli.services.comparison.accuracy import CompareReport

HEAD = ("network", "method", "batch", "seed", "metric", "value", "steps")
Key = tuple[str, str, int, int]
"""Network, method, batch and seed of a training."""
Kept = dict[Key, tuple[str, float, float]]
"""Its metric, what came of it and the optimizer steps that it took."""


def read(file: Path) -> Kept:
    """Return the trainings of a file; none where there is no file. Raises SystemExit for a file of another kind."""
    if not file.exists():
        return {}
    with file.open(newline="") as lines:
        rows = csv.DictReader(lines)
        if tuple(rows.fieldnames or ()) != HEAD:
            raise SystemExit(f"{file} does not hold trainings of this table: its first line must be {','.join(HEAD)}")
        return {
            (row["network"], row["method"], int(row["batch"]), int(row["seed"])): (
                row["metric"],
                float(row["value"]),
                float(row["steps"]),
            )
            for row in rows
        }


def write(file: Path, kept: Kept) -> None:
    """Write trainings, one a line, in an order that does not depend on that of the training."""
    found = (
        ",".join(map(str, (*key, metric, f"{value:.6g}", f"{steps:.6g}")))
        for key, (metric, value, steps) in sorted(kept.items())
    )
    write_atomic(file, "\n".join((",".join(HEAD), *found)) + "\n")


def of(
    name: str, report: CompareReport, steps: Mapping[tuple[str, int], float]
) -> Iterator[tuple[Key, tuple[str, float, float]]]:
    """Yield the finished trainings of a network's report."""
    for row in report.rows:
        for found in row.cells:
            value = found.value(report.metric)
            if value is not None and (row.method, row.batch) in steps:
                key = (name, row.method, row.batch, found.cell.seed)
                yield key, (report.metric, value, steps[row.method, row.batch])


def missing(turn_of: Iterable[Cell], name: str, kept: Kept) -> tuple[Cell, ...]:
    """Return the cells of a network's table that are not kept."""
    return tuple(c for c in turn_of if (name, c.method, c.batch, c.seed) not in kept)


def markdown(kept: Kept) -> Iterator[str]:
    """Yield a table of each network: over the seeds of each row, with what it wins back of what lbt loses, seed by seed."""
    for name in dict.fromkeys(key[0] for key in kept):
        own = {key: found for key, found in kept.items() if key[0] == name}
        metric = next(iter(own.values()))[0]
        yield from (f"### {name}, kept trainings", "")
        yield f"| batch | method | n | {metric} | recovered (%) | against the same tricks (%) | below lbt in | steps |"
        yield "|" + "---|" * 8
        reference = min(key[2] for key in own)
        for batch, method in sorted(
            {(key[2], key[1]) for key in own}, key=lambda row: (row[0], row[1] != "lbt", row[1])
        ):
            yield f"| {' | '.join(_cells(own, name, method, batch, reference, metric))} |"
        yield ""


def _cells(kept: Kept, name: str, method: str, batch: int, reference: int, metric: str) -> Iterator[str]:
    values, plain = values_of(kept, name, method, batch), values_of(kept, name, "lbt", batch)
    own = accuracy.stat(values.values())
    assert own is not None
    digits = 3 if less_is_better(metric) else 2
    yield from (str(batch), method, str(own.n))
    yield f"{own.mean:.{digits}f}" + ("" if own.sd is None else f" ± {own.sd:.{digits}f}")
    both = values.keys() & plain.keys()
    if batch == reference or method == "lbt":
        yield from ("", "", "")
    else:
        tricks = table1_rows.SAME_TRICKS.get(method)
        yield share(won_back(values, plain, values_of(kept, name, "lbt", reference), metric))
        yield share(won_back(values, plain, values_of(kept, name, tricks, reference), metric)) if tricks else ""
        worse = sum(
            values[seed] > plain[seed] if less_is_better(metric) else values[seed] < plain[seed] for seed in both
        )
        yield f"{worse} of {len(both)}"
    steps = [found[2] for key, found in kept.items() if key[:3] == (name, method, batch)]
    yield f"{fmean(steps):.0f}"


def values_of(kept: Kept, name: str, method: str, batch: int) -> dict[int, float]:
    """Return what came of a row's trainings, by seed."""
    return {key[3]: found[1] for key, found in kept.items() if key[:3] == (name, method, batch)}


def won_back(
    own: Mapping[int, float], plain: Mapping[int, float], small: Mapping[int, float], metric: str
) -> float | None:
    """Return the share of the way from lbt to a small batch that a row goes, over the seeds that all three have."""
    seeds = own.keys() & plain.keys() & small.keys()
    of_own, of_plain, of_small = (accuracy.stat(values[seed] for seed in seeds) for values in (own, plain, small))
    lost, left = accuracy.gap(of_small, of_plain, metric), accuracy.gap(of_small, of_own, metric)
    return None if lost is None or left is None or lost <= 0 else (lost - left) / lost


def share(value: float | None) -> str:
    """Return a share in per cent, as a table's cell."""
    return "" if value is None else f"{100 * value:.0f}"
