"""Numbers, durations, sizes, plurals and places in words; no styles, no screen."""

import math
import re
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

# --- numbers and words


def format_number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, all of its digits before the point, and no exponent."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 12)}f}"


def compute_perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats a token; huge, and not infinite, where the loss is huge."""
    return math.exp(min(loss, 700.0))


def format_duration(seconds: float | None) -> str:
    """Return a time with its unit."""
    if seconds is None:
        return "-"
    divisor, unit = choose_time_unit(seconds)
    return f"{format_number(seconds / divisor)} {unit}"


WIDEST_INTERVAL = 3.0
"""The upper end of an interval that is of use, over its lower end."""


def is_too_wide(low: float | None, high: float | None) -> bool:
    """Return whether an interval is too wide to decide by; one of which an end is not known is not."""
    return low is not None and high is not None and high > WIDEST_INTERVAL * max(low, 0.0)


def format_interval_of_hours(low: float | None, high: float | None) -> str:
    """Return an interval in brackets, and that it is too wide to decide by; empty where there is none."""
    if low is None or high is None:
        return ""
    wide = ", too wide to decide by" * is_too_wide(low, high)
    return f" ({format_duration(3600 * low)} to {format_duration(3600 * high)}{wide})"


def choose_time_unit(longest: float) -> tuple[float, str]:
    """Return the unit in which a column up to `longest` seconds is read best: its seconds and its name."""
    if longest < 120:
        return 1.0, "s"
    return (60.0, "min") if longest < 7200 else (3600.0, "h")


def is_cost_in_node_hours(cost: float, node_hours: float, currency: str) -> bool:
    """Return whether a cost is the number of node-hours itself, as it is without a price: it is shown once then."""
    return currency == "node-h" and math.isclose(cost, node_hours)


def format_count(count: int, noun: str = "node") -> str:
    """Return how many, in words: 1 node, 2 nodes, 3 batches."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('tch') else 's'}"


def describe_configuration(nodes: int, batch: int, local_batch: int) -> str:
    """Return a configuration in words, with both of its batches."""
    return f"{format_count(nodes)}, batch {batch} (local {local_batch})"


def describe_method_label(method: str, *, reference: bool) -> str:
    """Return a method of a comparison, and whether it is what the others are held against."""
    return f"{method} (reference)" if reference else method


_CONTROLS = re.compile(
    r"\r+(?=\n|\Z)"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # strings for the terminal
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
    r"|[\U000e0000-\U000e007f]"
)


def without_controls(text: str) -> str:
    """Return text without what steers a terminal or reorders a line: control characters, escape sequences, bidi marks.

    Newlines and tabs stay; a carriage return inside a line is a space.
    """
    if text.isprintable():
        return text
    return _CONTROLS.sub(
        lambda match: " " if match[0] == "\r" and text[match.end() : match.end() + 1] not in ("", "\n") else "", text
    )


def escape_spreadsheet_cell(value: object) -> object:
    """Return a value as a cell of CSV that no spreadsheet computes: one line, and an apostrophe before what is a formula.

    Spreadsheets take text for a formula that begins with one of ``=+-@``. Numbers stay as they are.
    """
    if not isinstance(value, str):
        return value
    line = " ".join(value.split())
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) and parse_number(line) is None else line


def parse_number(text: str) -> float | None:
    """Return the finite number that a text is, or None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def make_relative_path(path: Path) -> str:
    """Return a path as it is seen from the working directory, where it lies in it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def format_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def choose_size_unit(largest: float | None) -> tuple[float, str]:
    """Return the unit in which a column up to `largest` bytes is read best: its bytes and its name."""
    return (1024**2, "MiB") if largest is not None and largest < 1024**3 else (1024**3, "GiB")


def format_size(value: float | None, divisor: float) -> str:
    return "-" if value is None else format_number(value / divisor)


def format_bytes(value: float) -> str:
    """Return bytes with their unit."""
    divisor, unit = choose_size_unit(value)
    return f"{format_number(value / divisor)} {unit}"


def format_moment(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


_STAMP = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:[.,][0-9]+)?([+-][0-9]{2}:?[0-9]{2}|Z)?"
)


_TAG = re.compile(r"\[rank([0-9]+)\]: ?")


def stamp_line(line: str) -> str:
    """Return a line of a log with the time before it."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} {line}"


def parse_line_time(line: str) -> float | None:
    """Return the Unix time that a line of a log begins with (local where it names no zone); None where it has none."""
    match = _STAMP.match(line)
    if match is None:
        return None
    zone = (match[3] or "").replace("Z", "+0000")
    try:
        return datetime.strptime(f"{match[1]} {match[2]}{zone}", f"%Y-%m-%d %H:%M:%S{'%z' * bool(zone)}").timestamp()
    except (ValueError, OverflowError):
        return None


def format_number_ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as "0-3, 7"."""
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], value]
        else:
            runs.append([value])
    return ", ".join("-".join(map(str, run)) for run in runs)


def make_rank_tag(rank: int) -> str:
    """Return what stands before a rank's line in a log that several share, as torch marks its own."""
    return f"[rank{rank}]: "


def parse_rank(line: str) -> int | None:
    """Return the rank whose tag stands before a line; None where none does."""
    match = _TAG.match(line)
    return int(match[1]) if match else None


def describe_progress(
    *,
    of: int | None,
    epoch: float | None,
    samples: int,
    batch: int,
    loss: float | None,
    step_time: float,
    left: float | None,
) -> str:
    """Return how far a training is: of its epochs, in samples, at a global batch, with the time of a step and what is left (s)."""
    epochs = "" if epoch is None else f"epoch {epoch:.4g}" + (f" of {of}" if of else "") + ", "
    text = f"{epochs}sample {samples}: batch {batch}"
    text += "" if loss is None else f", loss {format_number(loss, 4)}"
    text += f", {format_number(batch / step_time)} samples/s" if step_time > 0 else ""
    return text + ("" if left is None else f", {format_duration(left)} left")


def compute_log_pause(age: float) -> float:
    """Return the seconds until a log tells again how far a training is, `age` seconds after it began: ever fewer lines."""
    return min(240.0, max(15.0, age))


def shorten_pair(before: str, after: str, longest: int) -> tuple[str, str]:
    """Return two texts in so many characters each, if they are longer those about the first in which they differ."""
    pairs = enumerate(zip(before, after, strict=False))
    common = next((place for place, (word, other) in pairs if word != other), min(len(before), len(after)))
    start = max(0, min(common - longest // 3, max(len(before), len(after)) - longest + 3))

    def shortened(text: str) -> str:
        text = f"...{text[start:]}" if start else text
        return text if len(text) <= longest else f"{text[: longest - 3]}..."

    return shortened(before), shortened(after)


def get_first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def describe_probe_place(nodes: int, local_batch: int) -> str:
    """Return where a probe is made, in words."""
    return f"{format_count(nodes)}, local batch {local_batch}"


def describe_part(name: str) -> str:
    """Return what of a job is meant by the name of a part: a type of node, a length of text, or both."""
    kind, at, length = f"-{name}".rpartition("-length-")
    words = [f"node type {kind[1:] if at else name}"] if kind[1:] or not at else []
    return ", ".join(words + [f"length {length}"] * bool(at))
