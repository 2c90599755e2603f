"""What a script says of how good it is: by patterns on its output, or in a file of one JSON object a line."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tula_cli.errors import BadMeasurements
from tula_cli.models.resuming import NO_STEP_SEEN
from tula_cli.run.files import MAX_LINE, open_file, parse_json_object, read_end, read_lines
from tula_cli.spec.scripts.own_script import Rows, Script
from tula_cli.spec.scripts.placeholders import fill
from tula_cli.words import rank_of

TAIL_BYTES = 16_384
"""Bytes at the end of a log in which its last line is looked for."""
MAX_QUOTED = 300
"""Characters of it that are quoted."""
_LESS_IS_BETTER = re.compile(
    r"loss|error|perplexity|(err|ppl|nll|mse|mae)(?![a-z])|(?<![a-z])(wer|cer|fid)(?![a-z])", re.IGNORECASE
)
"""Short ones end a word, or are one: an answer_f1 or a confidence is no error rate."""

_BLOCK = 2**22  # bytes of a log that are searched at a time


def read_metrics(
    script: Script,
    values: Mapping[str, str | float],
    logs: Iterable[Path],
    *,
    first_rank_only: bool = False,
    workdir: Path,
) -> dict[str, list[float]]:
    """Return each metric's values, in their order, nan and infinity too; of one that is nowhere to be found an empty list.

    Args:
        script: its section `metric`.
        values: of placeholders in the files' names.
        logs: of all attempts, oldest first.
        first: only what rank 0 says counts, where lines of others begin with their rank.
        workdir: what a relative path starts from.
    """
    patterns = {name: source for name, source in script.metric.items() if not isinstance(source, Rows)}
    values_by_metric: dict[str, list[object]] = {name: [] for name in script.metric}
    for text in (text for log in logs if patterns for text in _read_blocks(log)):
        counted = _lines_of_rank_0(text) if first_rank_only else text
        for name, pattern in patterns.items():
            values_by_metric[name] += re.findall(pattern, counted, re.MULTILINE)
    for name, source in script.metric.items():
        if isinstance(source, Rows):
            values_by_metric[name] += _json_values(workdir / fill(source.jsonl, values), source.key)
    return {
        name: [number for value in values if (number := _as_number(value)) is not None]
        for name, values in values_by_metric.items()
    }


def _read_blocks(log: Path) -> Iterator[str]:
    """Yield a log's text, some MiB of whole lines at a time: it may be of any size."""
    if not log.exists():
        return
    with open_file(log) as file:
        while block := file.read(_BLOCK):
            yield (block + file.readline(MAX_LINE)).decode(errors="replace")


def _lines_of_rank_0(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if rank_of(line) in (None, 0))


def last_script_line(log: Path) -> str:
    """Return the last line that a command has written, without its rank; empty without one. tula's own do not count."""
    try:
        lines = read_end(log, TAIL_BYTES).splitlines()
    except (OSError, BadMeasurements):
        return ""
    of_script = (line.strip() for line in reversed(lines) if not line.startswith("tula: "))
    return next((line for line in of_script if line), "")[:MAX_QUOTED]


def describe_missing_step(log: Path) -> str:
    """Return that no step was seen, with the last line of the script, which may say why, or else what to look for."""
    line = last_script_line(log)
    return f"no optimizer step of torch was seen; the last line of the script is: {line}" if line else NO_STEP_SEEN


def is_lower_better(name: str) -> bool:
    """Return whether the name of a metric says that the least is the best: a loss, an error, a perplexity ..."""
    return _LESS_IS_BETTER.search(name) is not None


def best_value(name: str, values: Iterable[float]) -> float:
    """Return the best of a metric's values: the least or the most, by its name."""
    return (min if is_lower_better(name) else max)(values)


def _json_values(path: Path, key: str) -> Iterator[object]:
    if not path.exists():
        return
    with open_file(path) as file:
        for line in read_lines(file):
            row = parse_json_object(line)
            if row is not None and key in row:
                yield row[key]


def last_and_best(values_by_metric: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Return the last value of each metric, and the best under `best_`, as far as they are finite numbers."""
    metrics: dict[str, float] = {}
    for name, values in values_by_metric.items():
        values_ = list(values)
        finite = [value for value in values_ if math.isfinite(value)]
        metrics |= {name: values_[-1]} if finite and math.isfinite(values_[-1]) else {}
        metrics |= {f"best_{name}": best_value(name, finite)} if finite else {}
    return metrics


def _as_number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
