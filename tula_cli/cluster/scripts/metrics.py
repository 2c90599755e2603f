"""Metrics that a script prints or writes into its log."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tula_cli.run.files import MAX_LINE_BYTES, open_file
from tula_cli.spec.scripts.script import Script

_NAMES_OF_MINIMISED_METRICS = re.compile(
    r"loss|error|perplexity|(err|ppl|nll|mse|mae)(?![a-z])|(?<![a-z])(wer|cer|fid)(?![a-z])", re.IGNORECASE
)
"""Metrics to minimise. Short names must end a word or be one: answer_f1 and confidence are not error rates."""

_READ_BYTES = 2**22  # bytes of a log that are searched in one read


def read_metrics(script: Script, logs: Iterable[Path]) -> dict[str, list[float]]:
    """Return the values of each metric in order, including nan and infinity; an empty list if a metric is not found.

    Args:
        script: script whose section `metric` is used.
        logs: logs of all attempts, oldest first.
    """
    values_by_metric: dict[str, list[object]] = {name: [] for name in script.metric}
    for text in (text for log in logs if script.metric for text in _read_log_in_chunks(log)):
        for name, pattern in script.metric.items():
            values_by_metric[name] += re.findall(pattern, text, re.MULTILINE)
    return {
        name: [number for value in values if (number := _parse_number(value)) is not None]
        for name, values in values_by_metric.items()
    }


def _read_log_in_chunks(log: Path) -> Iterator[str]:
    """Yield the text of a log in blocks of whole lines of some MiB, as a log may be large."""
    if not log.exists():
        return
    with open_file(log) as file:
        while block := file.read(_READ_BYTES):
            yield (block + file.readline(MAX_LINE_BYTES)).decode(errors="replace")


def is_lower_better(name: str) -> bool:
    """Return whether a metric is to be minimised, judged by its name: loss, error, perplexity ..."""
    return _NAMES_OF_MINIMISED_METRICS.search(name) is not None


def find_last_and_best(values_by_metric: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the last value of each metric, and the best one with the prefix `best_`, if they are finite."""
    metrics: dict[str, float] = {}
    for name, values in values_by_metric.items():
        finite = [value for value in values if math.isfinite(value)]
        if finite and math.isfinite(values[-1]):
            metrics[name] = values[-1]
        if finite:
            metrics[f"best_{name}"] = min(finite) if is_lower_better(name) else max(finite)
    return metrics


def _parse_number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
