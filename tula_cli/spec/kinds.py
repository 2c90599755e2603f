"""Types of values in a spec (sizes, minutes, lines, commands, prices), and the base class of its sections."""

import math
import re
import shlex
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from tula_cli.spec.methods import METHODS
from tula_cli.spec.yaml_text import TypedFloat, TypedInt

_SIZE_UNITS = {"": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("I", 1024))
}

MAX_MINUTES = 366 * 24 * 60
"""A year; longer limits are typing errors."""
_MINUTES_FORMATS = "a number of minutes, or MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS as in SLURM"
_MINUTES_PATTERN = r"^\s*([0-9]{1,9}-)?[0-9]{1,15}(:[0-9]{1,9}){0,2}\s*$"

_MIN_MEMORY_BYTES = 1000**2
"""Bytes; a smaller size indicates a forgotten unit."""
_MAX_MEMORY_BYTES = 2**60
_MAX_SHOWN_CHARACTERS = 60  # characters of a value that an error shows
_MAX_DEPTH, _MAX_VALUES = 32, 10_000
"""Maximum depth and number of values passed to user code, because YAML anchors can expand without limit."""


class UnexpectedValue(ValueError):
    """The error for a value that its key does not accept; the errors for several accepted kinds are joined in one message.

    Args:
        expected: what the value must be, in words.
        given: the value in words.
    """

    def __init__(self, expected: str, given: str) -> None:
        super().__init__(f"must be {expected}, got {given}")
        self.expected, self.given = expected, given


def parse_size(value: object) -> object:
    """Convert "16GiB" or "800 MB" to bytes; a number is taken as bytes.

    Raises:
        ValueError: the value is not a size, is below a megabyte (a forgotten unit), or exceeds any machine's memory.
    """
    if isinstance(value, bool):
        raise ValueError(f"must be a size such as 16GiB or 800MB, got {str(value).lower()}")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", value.upper())
        if match is None:
            raise ValueError(f"must be a size such as 16GiB or 800MB, got {value!r}")
        size: object = math.floor(Fraction(match[1]) * _SIZE_UNITS[match[2] or ""] + Fraction(1, 2))
    else:
        size = value
    if isinstance(size, int | float) and size >= _MAX_MEMORY_BYTES:
        raise ValueError(f"must be less than 1 EiB, got {_shorten_value(value)}")
    if isinstance(size, int | float) and 0 < size < _MIN_MEMORY_BYTES:
        if isinstance(value, str) and value.strip()[-1:].isalpha():
            raise ValueError(f"must be at least 1MB, such as 16GiB or 800MB, got {value!r}")
        raise ValueError(
            f"{value!r} has no unit and counts as bytes, but the minimum is 1MB; add the unit, for example {size:g}GiB"
        )
    return size


def parse_minutes(value: object) -> object:
    """Convert SLURM's D-HH, D-HH:MM, D-HH:MM:SS, HH:MM:SS and MM:SS to minutes, rounded up; numbers are minutes.

    Raises:
        ValueError: the text is not one of these, or is longer than a year.
    """
    if isinstance(value, bool):
        raise ValueError(f"must be {_MINUTES_FORMATS}, got {str(value).lower()}")
    if isinstance(value, str):
        if re.fullmatch(_MINUTES_PATTERN, value) is None:
            raise ValueError(f"must be {_MINUTES_FORMATS}, got {value!r}")
        days, dash, clock = value.strip().rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        if not dash and len(parts) < 3:  # without days, the first of one or two parts is minutes
            parts = [0, *parts]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        total: object = (int(days or 0) * 24 + hours) * 60 + minutes + -(-seconds // 60)
    else:
        total = value
    if isinstance(total, int | float) and total > MAX_MINUTES:
        raise ValueError(f"must be at most a year ({MAX_MINUTES} minutes), got {_shorten_value(value)}")
    return total


def convert_to_typed_text(value: object) -> object:
    """Return a number as it was typed in the file, for a key whose value is text.

    Raises:
        ValueError: the spelling is unknown: a float of Python code (12.10 is 12.1 there), or true and false.
    """
    if isinstance(value, TypedInt | TypedFloat):
        return value.typed
    if isinstance(value, bool):
        raise ValueError(f"must be text, got {str(value).lower()}; write '{str(value).lower()}' with quotes")
    if isinstance(value, float):
        raise ValueError(f"must be text, got the number {value!r}; write '{value!r}' with quotes")
    return str(value) if isinstance(value, int) else value


def require_one_line(value: str) -> str:
    """Reject text that is not a single printable line."""
    if not value.isprintable():
        raise UnexpectedValue("one line of text without tabs or other control characters", repr(value))
    return value


def find_null_character(content: object) -> str:
    """Return the path of the first text in nested mappings and lists that contains a null character; empty if none does."""
    if "\\x00" not in repr(content):  # far faster than to visit all values of the hundreds of jobs that a command reads
        return ""
    pending, seen = [("", content)], set[int]()
    while pending:
        path, item = pending.pop()
        if isinstance(item, str) and "\0" in item:
            return path[1:] or "the text"
        if isinstance(item, Mapping | list) and id(item) not in seen:
            seen.add(id(item))  # Python code may pass a mapping that contains itself
            pairs = item.items() if isinstance(item, Mapping) else ((f"[{n}]", inner) for n, inner in enumerate(item))
            inside = [(f"{path}{'' if isinstance(item, list) else '.'}{key}", inner) for key, inner in pairs]
            pending += reversed(inside)
    return ""


def require_plain_data(value: dict[str, Any]) -> dict[str, Any]:
    """Reject values that JSON records cannot represent (NaN, dates, numbers as keys); make numbers plain Python ones.

    Args:
        value: arguments for user code.

    Raises:
        ValueError: a value cannot be represented (with the path of the first), or there are too many levels or values.
    """
    pending, seen = [("", value, 0)], 0
    while pending:
        path, item, depth = pending.pop()
        seen += 1
        if depth > _MAX_DEPTH or seen > _MAX_VALUES:
            raise ValueError(
                f"must have at most {_MAX_DEPTH} levels and {_MAX_VALUES} values; write larger arguments to a file that your code reads"
            )
        if isinstance(item, dict):
            inside = [(f"{path}.{_check_key(path, key)}", inner, depth + 1) for key, inner in item.items()]
            pending += reversed(inside)
        elif isinstance(item, list):
            inside = [(f"{path}[{number}]", inner, depth + 1) for number, inner in enumerate(item)]
            pending += reversed(inside)
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError(
                f"{path[1:]} is {item}, which tula cannot store; write it as text ('{item!s}') and convert it in your code"
            )
        elif not isinstance(item, str | int | float | None):
            raise ValueError(
                f"{path[1:]} is a {type(item).__name__}; use only text, numbers, true, false, null, lists and mappings"
            )
    plain: dict[str, Any] = _convert_to_plain_data(value)
    return plain


def _convert_to_plain_data(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _convert_to_plain_data(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_convert_to_plain_data(item) for item in value]
    return int(value) if isinstance(value, TypedInt) else float(value) if isinstance(value, TypedFloat) else value


def _check_key(path: str, key: object) -> str:
    if not isinstance(key, str):
        raise ValueError(f"key {_shorten_value(key)}{path and f' of {path[1:]}'} must be text; put the key in quotes")
    return key


def _shorten_value(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        return "this number"
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


def require_not_empty(value: str) -> str:
    if not value:
        raise ValueError("must not contain an empty string")
    return value


def require_shell_words(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(
            f"must be a command that a shell can split into words, got {value!r}: {str(error).lower()}"
        ) from None
    if not words:
        raise ValueError("must not be empty")
    return value


_MAX_PRICE = 1e12


def check_price(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
        raise ValueError(
            f"must be a number above 0, got {_shorten_value(value)}; to show costs in node-hours, remove section pricing"
        )
    if isinstance(value, int | float) and value > _MAX_PRICE:
        raise ValueError(f"must be a number of at most {_MAX_PRICE:g}, got {_shorten_value(value)}")
    return value


# The written forms of types with a BeforeValidator, for the JSON Schema: pydantic cannot derive them.
_WRITTEN_SIZE = {
    "anyOf": [
        {"type": "integer", "minimum": _MIN_MEMORY_BYTES},
        {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGTkmgt][Ii]?)?[Bb]?\s*$"},
    ]
}
_WRITTEN_MINUTES = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": MAX_MINUTES},
        {"type": "string", "pattern": _MINUTES_PATTERN},
    ]
}

Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0), WithJsonSchema(_WRITTEN_SIZE)]  # bytes
Minutes = Annotated[int, BeforeValidator(parse_minutes), Field(ge=1), WithJsonSchema(_WRITTEN_MINUTES)]
Arguments = Annotated[dict[str, Any], AfterValidator(require_plain_data)]
OneLineText = Annotated[str, AfterValidator(require_one_line)]
Command = Annotated[OneLineText, AfterValidator(require_shell_words)]
Positive = Annotated[int, Field(ge=1, le=2**63 - 1)]  # numpy computes with 64 bits
GpusPerNode = Annotated[int, Field(ge=1, le=1000)]  # GPUs, or processes on the CPU
Nodes = Annotated[int, Field(ge=1, le=10**6)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _reject_boolean(value: object) -> object:
    """Reject true and false for a number: Python takes them for 1 and 0."""
    if isinstance(value, bool):
        raise UnexpectedValue("a number", str(value).lower())
    return value


_CHECKS_BY_TYPE = {"str": convert_to_typed_text, "int": _reject_boolean, "float": _reject_boolean}


def _add_checks(schema: Any) -> Any:
    """Return a pydantic schema in which the value of each text and number is checked before its type."""
    if isinstance(schema, list | tuple):
        return type(schema)(_add_checks(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    if check := _CHECKS_BY_TYPE.get(schema.get("type", "")):
        return no_info_before_validator_function(check, cast("CoreSchema", schema))
    if schema.get("type") == "function-before" and schema["function"]["function"] in _CHECKS_BY_TYPE.values():
        return schema
    return {key: part if key == "metadata" else _add_checks(part) for key, part in schema.items()}


class Section(BaseModel):
    """Base class of the sections of a spec: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept a number, as typed in the file, for every key whose value is text; and no boolean for a number."""
        schema: CoreSchema = _add_checks(handler(source))
        return schema


def require_known_method(value: str) -> str:
    """Reject a method that is neither a name in `METHODS` nor an import string."""
    module, colon, attribute = value.partition(":")
    if module in METHODS and colon:
        raise ValueError(
            f"must be a method without settings, got {value!r}; set each setting by its own key, for example ags.delta (only tula compare --methods takes settings after a colon)"
        )
    if value in METHODS or (module and attribute):
        return value
    if colon:
        raise ValueError(f"must be the name of a method or package.module:attribute, got {value!r}")
    known = " or ".join(f"'{name}'" for name in METHODS)
    raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": known})


Method = Annotated[
    str,
    AfterValidator(require_known_method),
    WithJsonSchema({"anyOf": [{"enum": list(METHODS)}, {"type": "string", "pattern": "^[^:]+:.+$"}]}),
]
"""A name in `METHODS`, or the import string `package.module:attribute` of a user-defined method."""
