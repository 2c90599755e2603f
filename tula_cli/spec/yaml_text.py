"""YAML with the plain scalars of YAML 1.2, and errors with line and column."""

import contextlib
import difflib
import os
import re
import select
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tula_cli.errors import SpecError


class TypedInt(int):
    """An integer that keeps its YAML spelling, for keys whose values are text (0x1F, +5)."""

    typed: str


class TypedFloat(float):
    """A float that keeps its YAML spelling (12.10, 7e3)."""

    typed: str


def _construct_int(loader: "yaml.constructor.SafeConstructor", node: yaml.ScalarNode) -> TypedInt:
    number = TypedInt(loader.construct_yaml_int(node))
    number.typed = node.value
    return number


def _construct_float(loader: "yaml.constructor.SafeConstructor", node: yaml.ScalarNode) -> TypedFloat:
    number = TypedFloat(loader.construct_yaml_float(node))
    number.typed = node.value
    return number


def _construct_text(loader: "yaml.constructor.SafeConstructor", node: yaml.ScalarNode) -> str:
    """Return text with surrogate pairs, as in JSON escapes, joined to characters; reject lone surrogates."""
    text: str = loader.construct_yaml_str(node)
    try:
        return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        problem = f"{text!r} contains half of a UTF-16 pair, which is not a character"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


class _Constructor(yaml.constructor.SafeConstructor):
    """Constructor that rejects duplicate keys, for loaders to which `_PLAIN_SCALARS` are added."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key must be text, not a list or a mapping", problem_mark=key_node.start_mark
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Loader(_Constructor, yaml.SafeLoader):
    """YAML loader with 1.2's plain scalars: 1e-3 is a number, `on`, 1:30 and 2025-01-01 are text; no duplicate keys."""


if yaml.__with_libyaml__:

    class _FastLoader(_Constructor, yaml.CSafeLoader):
        """The same loader based on libyaml, ten times as fast; errors are reported by `_Loader`."""


class Dumper(yaml.SafeDumper):
    """Dumper that quotes text which YAML 1.1 or `_Loader` would not read as text."""


_PLAIN_SCALARS = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.nan|\.NaN|\.NAN)$",
        list("-+0123456789."),
    ),
    ("merge", r"^<<$", ["<"]),
)
_LOADERS: tuple[Any, ...] = (_Loader, *((_FastLoader,) if yaml.__with_libyaml__ else ()))
for _loader in _LOADERS:
    _loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
    _loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
    _loader.add_constructor("tag:yaml.org,2002:str", _construct_text)
for _class in (*_LOADERS, Dumper):
    for _name, _pattern, _first in _PLAIN_SCALARS:
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)


_MAX_DEPTH = 50
_PIPE_TIMEOUT = 10.0
_MAX_FILE_BYTES = 2**24  # maximum size of a file in bytes
_MAX_VALUES = 100_000
"""Maximum number of values with all anchors expanded, because nested anchors could exceed the memory."""
_TOO_DEEP = f"it has more than {_MAX_DEPTH} levels"
_VALUE_ERRORS = (ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError)
"""Errors of PyYAML for a value that does not fit its tag (`!!bool x`, `!!timestamp x`) or is nested too deeply."""


def parse_yaml(text: str, *, source: str) -> Any:
    """Parse YAML text.

    Raises:
        SpecError: the text is not valid YAML (with source, line and column), nested too deeply, or too large.
    """
    content: Any = None
    with contextlib.suppress(yaml.YAMLError, *_VALUE_ERRORS):
        content = yaml.load(text, Loader=_FastLoader) if yaml.__with_libyaml__ else None
    if content is None:
        content = _parse_with_python_loader(text, source=source)
    if _measure_nesting_depth(content) > _MAX_DEPTH:
        raise SpecError(f"{source}: not valid YAML: {_TOO_DEEP}")
    if _count_values(content, {}) > _MAX_VALUES:
        raise SpecError(
            f"{source} has more than {_MAX_VALUES} values after its YAML anchors are expanded",
            "write large data to a separate file, and its path into the job",
        )
    return content


def _measure_nesting_depth(content: Any) -> int:
    """Return the nesting depth of a value, at most one more than allowed; a recursive anchor has unlimited depth."""
    level, depth = [content], 0
    while level and depth <= _MAX_DEPTH:
        inner: dict[int, Any] = {}  # id -> value, so that a value referenced by many aliases is visited once per level
        for value in level:
            inner |= {id(child): child for child in _list_children(value)}
        level, depth = list(inner.values()), depth + 1
    return depth


def _count_values(content: Any, counts: dict[int, int]) -> int:
    """Return the number of values with all anchors expanded.

    Args:
        content: value nested no deeper than allowed.
        counts: counts of values visited before, by identity.
    """
    if id(content) not in counts:
        counts[id(content)] = 1 + sum(_count_values(child, counts) for child in _list_children(content))
    return counts[id(content)]


def _list_children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()


def _parse_with_python_loader(text: str, *, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or ""
        if "\\t" in problem:
            hint = "use spaces for indentation: YAML does not allow tabs there"
        elif "could not find expected ':'" in problem:
            hint = "write a colon after each key; check this line and the one above"
        elif "is given twice" in problem:
            hint = "remove one of the two"
        elif "<stream end>" in problem:
            hint = "close each bracket and each quotation mark"
        elif "but got ':'" in problem and mark and _MISSING_COMMA_PATTERN.search(text.splitlines()[mark.line]):
            hint = "write a comma between the entries of {...}"
        else:
            hint = _make_quoting_hint(text, mark)
        raise SpecError(f"{source}{where}: not valid YAML: {error.problem or error.context}", hint) from None
    except RecursionError:
        raise SpecError(f"{source}: not valid YAML: {_TOO_DEEP}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{source}: not valid YAML: {error}") from None
    except _VALUE_ERRORS:
        raise SpecError(f"{source}: not valid YAML: a value does not have the type of its tag (!!...)") from None


_MISSING_COMMA_PATTERN = re.compile(r"[^:,{\s]\s+[\w.-]+:\s")
_MAPPING_VALUE_PATTERN = re.compile(r"(?:^|[{,]|- )\s*(?P<key>[\w.-]+):\s+(?P<value>\S.*?)(?=,\s*[\w.-]+:\s|\s+#|\s*$)")
_LIST_VALUE_PATTERN = re.compile(r"(?:^\s*- |\[)\s*(?P<key>)(?P<value>[^\s\[].*?)(?=\s+#|\s*$)")
_SPECIAL_CHARACTERS = re.compile(r"[\[\]{}:#,&*!|>'\"%@`]")
"""Characters with a special meaning in YAML values: at the start, inside [...] and {...}, or before a space."""


def _make_quoting_hint(text: str, mark: "yaml.Mark | None") -> str:
    """Return how to quote the value at which parsing failed; empty if the value has no special characters."""
    lines = text.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    pairs = [*_MAPPING_VALUE_PATTERN.finditer(line)] or [*_LIST_VALUE_PATTERN.finditer(line)]
    before = [pair for pair in pairs if mark is not None and pair.start("value") <= mark.column] or pairs[:1]
    if not before:
        return ""
    key, value = before[-1]["key"], before[-1]["value"]
    while match := re.match(r"\{\s*([\w.-]+):\s+(.*)", value):  # the first pair of a flow mapping {...}
        key, value = match[1], match[2]
    if value.startswith("[") and value.endswith("]"):  # the items of a flow sequence
        key, value = "", value[1:-1]
    while value[-1:] in ("}", "]") and value.count(value[-1]) > value.count({"}": "{", "]": "["}[value[-1]]):
        value = value[:-1].rstrip()
    if not _SPECIAL_CHARACTERS.search(value):
        return ""
    quote = "'" if '"' in value else '"'
    return f"put the value in quotes: {f'{key}: ' if key else ''}{quote}{value}{quote}"


def read_text_file(path: Path) -> str:
    """Return the text of a file that the user names: a regular file or a pipe of the shell, but no endless device.

    Raises:
        SpecError: it is larger than any file that is written by hand, or a pipe that receives nothing.
        OSError: it cannot be read.
        UnicodeDecodeError: it is not text in UTF-8.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not select.select([file], [], [], _PIPE_TIMEOUT)[0]:
            raise SpecError(f"{path} is a pipe that received nothing for {_PIPE_TIMEOUT:g} s")
        os.set_blocking(file.fileno(), True)
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise SpecError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB; check that this is the right file")
    return content.decode()


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that contains a mapping.

    Raises:
        SpecError: the file is missing, unreadable, too large, not text, not YAML or not a mapping.
    """
    try:
        text = read_text_file(path)
    except FileNotFoundError:
        missing = f"{path} is a link to a missing file" if path.is_symlink() else f"no such file: {path}"
        raise SpecError(missing, _suggest_file(path) or "tula init writes a job file") from None
    except IsADirectoryError:
        raise SpecError(
            f"{path} is a folder, not a job file", _suggest_file(path / "job.yaml") or "name a file in it, or a run"
        ) from None
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise SpecError(
            f"cannot read {path}: it is not a text file in UTF-8 (byte 0x{byte:02x} in line {line})",
            "save the file as UTF-8",
        ) from None
    except (OSError, ValueError) as error:  # a path with a null character is a ValueError
        raise SpecError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    sections = parse_yaml(text, source=str(path))
    if not isinstance(sections, dict):
        kind = (
            "it is empty" if sections is None else "it is a list" if isinstance(sections, list) else "it is plain text"
        )
        raise SpecError(
            f"{path}: a job file must contain sections (name: value), but {kind}", "tula init writes a job file"
        )
    return sections


def _suggest_file(path: Path) -> str:
    """Return "did you mean ...?" with the YAML files in the folder of `path` whose names are similar, or an empty string."""
    with contextlib.suppress(OSError):
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml") and entry.exists()]
        stems = difflib.get_close_matches(path.stem, {Path(name).stem for name in names}, n=2)
        nearest = [name for stem in stems for name in names if Path(name).stem == stem][:2]
        return f"did you mean {' or '.join(str(path.with_name(name)) for name in nearest)}?" if nearest else ""
    return ""
