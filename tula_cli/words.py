"""Format numbers, durations, sizes, plurals and configurations as plain text, without styles."""

import math
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def format_number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` significant digits and no exponent; "-" if it is not finite.

    Digits before the point are never rounded away.
    """
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 12)}f}"


def compute_perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats per token; the loss is capped at 700 to keep the result finite."""
    return math.exp(min(loss, 700.0))


def format_duration(seconds: float | None) -> str:
    """Return a duration with its unit."""
    if seconds is None:
        return "-"
    divisor, unit = choose_time_unit(seconds)
    return f"{format_number(seconds / divisor)} {unit}"


MAX_INTERVAL_RATIO = 3.0
"""Ratio of the upper to the lower end of an interval above which it is too wide to base a decision on."""


def is_interval_too_wide(low: float | None, high: float | None) -> bool:
    """Return whether an interval is too wide to base a decision on; False if one of its ends is unknown."""
    return low is not None and high is not None and high > MAX_INTERVAL_RATIO * max(low, 0.0)


def describe_interval_of_hours(low: float | None, high: float | None) -> str:
    """Return an interval of hours in words, marked if it is too uncertain to decide by; empty if there is no interval."""
    if low is None or high is None:
        return ""
    width_warning = ", too uncertain for a decision" * is_interval_too_wide(low, high)
    return f"{format_duration(3600 * low)} to {format_duration(3600 * high)}{width_warning}"


def format_interval_of_hours(low: float | None, high: float | None) -> str:
    """Return `describe_interval_of_hours` in parentheses after a space; empty if there is no interval."""
    interval = describe_interval_of_hours(low, high)
    return f" ({interval})" * bool(interval)


def choose_time_unit(longest: float) -> tuple[float, str]:
    """Return the unit in which a column of up to `longest` seconds is displayed: its length in seconds and its name."""
    if longest < 120:
        return 1.0, "s"
    return (60.0, "min") if longest < 7200 else (3600.0, "h")


def is_cost_in_node_hours(cost: float, node_hours: float, currency: str) -> bool:
    """Return whether a cost equals the node-hours because no price is set, so that only one of them is shown."""
    return currency == "node-h" and math.isclose(cost, node_hours)


def format_count(count: int, noun: str = "node") -> str:
    """Return a count with its noun: 1 node, 2 nodes, 3 batches."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith(('tch', 'ss')) else 's'}"


def describe_node_counts(counts: Sequence[int]) -> str:
    """Return alternative numbers of nodes in words: 2, 4 or 8 nodes; "no nodes" without any."""
    return " or ".join(filter(None, (join_words(counts[:-1]), *map(format_count, counts[-1:])))) or "no nodes"


def describe_pending_probes(probes: int) -> str:
    """Return the number of queued or running probes in words."""
    return "1 probe is still queued or running" if probes == 1 else f"{probes} probes are still queued or running"


def describe_sample_share(share: float) -> str:
    """Describe the samples of a search for a learning rate, as a share of those of a training."""
    return f"{100 * share:.1f} % of the samples of a training"


def join_words(words: Iterable[object]) -> str:
    """Return words or numbers separated by commas."""
    return ", ".join(map(str, words))


def join_first_words(words: Sequence[object], count: int) -> str:
    """Return the first `count` words separated by commas, and the number of the others: "a, b and 3 more"."""
    hidden = len(words) - count
    return join_words(words[:count]) + (f" and {hidden} more" if hidden > 0 else "")


def describe_files(files: Sequence[str]) -> str:
    """Return the first three files, and the number of the others, in parentheses after a space; empty without files."""
    return f" ({join_first_words(files, 3)})" * bool(files)


def capitalize_first_letter(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def describe_configuration(nodes: int, batch: int, local_batch: int) -> str:
    """Return a configuration in words, with its global and local batch."""
    return f"{format_count(nodes)}, batch {batch} (local {local_batch})"


def format_method_label(method: str, *, reference: bool) -> str:
    """Return the label of a method of a comparison, marked if it is the reference."""
    return f"{method} (reference)" if reference else method


_CONTROL_CHARACTERS = re.compile(
    r"\r+(?=\n|\Z)"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # window titles and links (OSC)
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # other control strings (DCS, SOS, PM, APC)
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours and cursor movements (CSI)
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
    r"|[\U000e0000-\U000e007f]"
)


def strip_control_characters(text: str) -> str:
    """Return text without control characters, escape sequences and bidi marks, which control a terminal or reorder a line.

    Newlines and tabs are kept; a carriage return inside a line becomes a space.
    """
    if text.isprintable():
        return text
    return _CONTROL_CHARACTERS.sub(
        lambda match: " " if match[0] == "\r" and text[match.end() : match.end() + 1] not in ("", "\n") else "", text
    )


def escape_spreadsheet_cell(value: object) -> object:
    """Return a value as a CSV cell that no spreadsheet evaluates: one line, with an apostrophe before a formula.

    Spreadsheets treat text that starts with one of ``=+-@`` as a formula. Numbers are not changed.
    """
    if not isinstance(value, str):
        return value
    line = " ".join(value.split())
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) and parse_number(line) is None else line


def parse_number(text: str) -> float | None:
    """Parse a finite number; return None if the text is not one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def make_relative_path(path: Path) -> str:
    """Return a path relative to the working directory if it lies inside it, else unchanged."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def quote_path(path: Path) -> str:
    """Return a path as `make_relative_path` does, quoted for a command that the user can copy into a shell."""
    return shlex.quote(make_relative_path(path))


def format_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def choose_size_unit(largest: float | None) -> tuple[float, str]:
    """Return the unit in which a column of up to `largest` bytes is displayed: its bytes and its name."""
    return (1024**2, "MiB") if largest is not None and largest < 1024**3 else (1024**3, "GiB")


def format_size(value: float | None, divisor: float) -> str:
    return "-" if value is None else format_number(value / divisor)


def format_bytes(value: float) -> str:
    """Return a number of bytes with its unit."""
    divisor, unit = choose_size_unit(value)
    return f"{format_number(value / divisor)} {unit}"


def format_local_time(at: float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    """Return a Unix time as local time; "-" if it is None, or outside the range of the calendar (damaged record)."""
    try:
        return "-" if at is None else time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "-"


SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
"""Seconds of the units in which users write times."""
_RANK_TAG = re.compile(r"\[rank([0-9]+)\]: ?")


def add_timestamp(line: str) -> str:
    """Return a log line with the current time in front."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} {line}"


def format_number_ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as ranges, "0-3, 7"."""
    ranges: list[list[int]] = []
    for value in numbers:
        if ranges and value == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], value]
        else:
            ranges.append([value])
    return join_words("-".join(map(str, ends)) for ends in ranges)


def make_rank_tag(rank: int) -> str:
    """Return the tag before a rank's line in a log shared by several ranks, in torch's format."""
    return f"[rank{rank}]: "


def parse_rank(line: str) -> int | None:
    """Return the rank from the tag at the start of a line, or None if it has no tag."""
    match = _RANK_TAG.match(line)
    return int(match[1]) if match else None


def describe_progress(
    *,
    all_epochs: int | None,
    epoch: float | None,
    samples: int,
    batch: int,
    loss: float | None,
    step_time: float,
    remaining: float | None,
) -> str:
    """Describe the progress of a training: epoch, samples, global batch, loss, throughput and remaining time.

    `all_epochs` is the number of epochs; `step_time` and `remaining` are in seconds.
    """
    epochs = "" if epoch is None else f"epoch {epoch:.4g}" + (f" of {all_epochs}" if all_epochs else "") + ", "
    text = f"{epochs}sample {samples}: batch {batch}"
    text += "" if loss is None else f", loss {format_number(loss, 4)}"
    text += f", {format_number(batch / step_time)} samples/s" if step_time > 0 else ""
    return text + ("" if remaining is None else f", {format_duration(remaining)} left")


def compute_seconds_to_next_progress_line(age: float) -> float:
    """Return the seconds until the next progress line, `age` seconds after the start: first 15, later up to 240."""
    return min(240.0, max(15.0, age))


def shorten_around_difference(before: str, after: str, longest: int) -> tuple[str, str]:
    """Shorten two texts to at most `longest` characters each, keeping the part around their first difference."""
    pairs = enumerate(zip(before, after, strict=False))
    common = next((position for position, (word, other) in pairs if word != other), min(len(before), len(after)))
    start = max(0, min(common - longest // 3, max(len(before), len(after)) - longest + 3))

    def shorten(text: str) -> str:
        text = f"...{text[start:]}" if start else text
        return text if len(text) <= longest else f"{text[: longest - 3]}..."

    return shorten(before), shorten(after)


_EXPECTED_VALUES = {
    "Value error, ": "",
    "Input should be": "must be",
    "a valid integer, unable to parse string as an integer": "an integer",
    "a valid integer, got a number with a fractional part": "an integer",
    "a valid integer": "an integer",
    "a valid number, unable to parse string as a number": "a number",
    "a valid number": "a number",
    "a valid boolean, unable to interpret input": "true or false",
    "a valid boolean": "true or false",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def simplify_validation_message(message: str) -> str:
    """Return a message of pydantic or click about a value in plain words."""
    for pydantic_text, tula_text in _EXPECTED_VALUES.items():
        message = message.replace(pydantic_text, tula_text)
    return message


def get_first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def describe_probe_configuration(nodes: int, local_batch: int) -> str:
    return f"{format_count(nodes)}, local batch {local_batch}"


def describe_node_type(name: str) -> str:
    return f"node type {name}"


def split_outside_brackets(text: str, mark: str) -> Iterator[str]:
    """Yield the parts of a text, split at `mark` outside brackets and quotes."""
    text_part, depth, quote = "", 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{(") - (character in "]})")
        if character == mark and depth <= 0 and not quote:
            yield text_part
            text_part = ""
        else:
            text_part += character
    yield text_part
