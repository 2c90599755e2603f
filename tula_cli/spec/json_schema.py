"""The JSON Schema of job.yaml and site.yaml, for editors and other programs.

The schema defines the keys, their meaning and the written form of their values, including sizes and time limits.
Constraints between keys (a schedule without milestones, a script together with a model) are left to `tula check`. The
dialect is 2020-12, restricted to keywords with the same meaning in draft 7, which editors read.
"""

import ast
import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import StringSchema

from tula_cli.errors import TulaError
from tula_cli.spec.job import JobSpec
from tula_cli.spec.kinds import Section
from tula_cli.spec.old_keys import NODE_TYPE_SECTIONS
from tula_cli.version import __version__

# --- Descriptions of keys
#
# The reference page (docs/reference/job-file.md) and the JSON Schema are generated from them.


def walk_sections(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections inside a section with their paths, depth first; NAME represents a user-defined name."""
    for name, hint in get_type_hints(section, include_extras=True).items():
        for nested_section in list_inner_sections(hint):
            below = f"{path}.{name}".lstrip(".") + (".NAME" if get_origin(hint) is dict else "")
            yield below, nested_section
            yield from walk_sections(nested_section, below)


def list_inner_sections(hint: Any) -> Iterator[type[Section]]:
    """Yield the sections in a type annotation, such as `Slurm | None` or `list[Arm]`."""
    if get_origin(hint) is None and isinstance(hint, type) and issubclass(hint, Section):
        yield hint
    for part in get_args(hint):
        yield from list_inner_sections(part)


@cache
def describe_keys(section: type[Section]) -> dict[str, str]:
    """Return the description of each key: the comment of its field, else the first line of its section's docstring.

    Raises:
        TulaError: the source code is missing in this installation, and with it the comments.
    """
    comments = _read_field_comments(section)
    hints = get_type_hints(section, include_extras=True)
    return {name: comments.get(name) or _get_first_docstring_line(hints[name]) for name in section.model_fields}


def _get_first_docstring_line(hint: Any) -> str:
    return next((inspect.cleandoc(inner.__doc__ or "").splitlines()[0] for inner in list_inner_sections(hint)), "")


def _read_field_comments(section: type[Section]) -> dict[str, str]:
    """Return the comment of each field of a class: on the same line, otherwise on the lines above."""
    try:
        source = textwrap.dedent(inspect.getsource(section))
    except OSError:
        raise TulaError(
            f"this installation of tula lacks the source of {section.__module__}, whose comments describe the keys",
            "reinstall it from a wheel or a complete checkout",
        ) from None
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    comments = {}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            trailing = [lines[n] for n in range(node.lineno, (node.end_lineno or node.lineno) + 1) if n in lines]
            above = node.lineno
            while not trailing and above - 1 in lines and source.splitlines()[above - 2].lstrip().startswith("#"):
                above -= 1
            comments[node.target.id] = " ".join(trailing or [lines[n] for n in range(above, node.lineno)])
    return comments


Schema = dict[str, Any]
Kind = Literal["job", "site"]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCHEMA_DESCRIPTIONS = {
    "job": "A job of tula: what to train, what to measure first, where to run.",
    "site": "Settings for all jobs of a site or a user: any part of a job file. A job file overrides them.",
}


class _SchemaGenerator(GenerateJsonSchema):
    """Schema generator that lets text be typed as a number: see `spec/kinds.convert_to_typed_text`."""

    def str_schema(self, schema: StringSchema) -> Schema:
        return {**super().str_schema(schema), "type": ["string", "number"]}


def make_json_schema(kind: Kind) -> Schema:
    """Return the schema of a file, as an object for `json.dumps`.

    Args:
        kind: "job" for a job.yaml; "site" for a site.yaml, which may hold any part of a job and requires nothing.

    Raises:
        TulaError: the source code is missing in this installation, and with it the descriptions.
    """
    schema = JobSpec.model_json_schema(mode="validation", schema_generator=_SchemaGenerator)
    parts: Schema = schema.pop("$defs")
    classes: dict[str, type[Section]] = {section.__name__: section for _, section in walk_sections(JobSpec)}
    for name, part in parts.items():
        _add_descriptions(part, classes[name])
    _add_descriptions(schema, JobSpec)
    for key in NODE_TYPE_SECTIONS:
        inside = parts["NodeType"]["properties"][key]
        parts["NodeType"]["properties"][key] = {
            "description": inside["description"],
            "allOf": [{"$ref": f"#/$defs/{key.title()}"}],
        }
    required = schema.pop("required")
    of_node_types = {"properties": {key: schema["properties"][key] for key in NODE_TYPE_SECTIONS}}
    for name in _list_merged_sections(schema if kind == "site" else of_node_types, parts):
        parts[name].pop("required", None)
    if kind == "job":
        schema |= _make_required_keys_condition(required, parts)
    head = {
        "$schema": DIALECT,
        "$id": f"urn:tula:{kind}",
        "$comment": f"written by tula init, version {__version__}",
        "title": f"{kind}.yaml of tula",
        "description": _SCHEMA_DESCRIPTIONS[kind],
    }
    return {**head, **{key: schema[key] for key in schema if key not in head}, "$defs": parts}


def _add_descriptions(part: Schema, section: type[Section]) -> None:
    """Add the descriptions of keys, and remove titles and defaults that do not help an editor."""
    words = describe_keys(section)
    part.pop("title", None)
    for name, schema in part["properties"].items():
        _simplify_value(schema)
        if "$ref" in schema:  # JSON Schema draft 7 ignores other keys next to $ref
            schema["allOf"] = [{"$ref": schema.pop("$ref")}]
        if isinstance(schema.get("default", {}), dict) or schema["default"] is None:
            schema.pop("default", None)
        part["properties"][name] = {"description": words[name], **schema}


def _simplify_value(value: Any) -> None:
    """Remove pydantic's titles from a value's schema, and reject names that do not match a pattern."""
    if isinstance(value, list):
        for item in value:
            _simplify_value(item)
    elif isinstance(value, dict):
        if isinstance(value.get("title"), str):
            del value["title"]
        if "patternProperties" in value:
            value["additionalProperties"] = False
        for item in value.values():
            _simplify_value(item)


def _list_merged_sections(root: Schema, parts: Schema) -> set[str]:
    """Return the sections reachable from `root` that are merged level by level, which excludes those in lists."""
    merged: set[str] = set()
    waiting = [root]
    while waiting:
        for name in _list_referenced_sections(waiting.pop()):
            if name not in merged:
                merged.add(name)
                waiting.append(parts[name])
    return merged


def _list_referenced_sections(value: Any) -> Iterator[str]:
    """Yield the sections that a schema refers to, without those of array items."""
    for key, nested in value.items():
        if key == "$ref":
            yield nested.rpartition("/")[2]
        elif isinstance(nested, dict) and key != "items":
            yield from _list_referenced_sections(nested)
        elif isinstance(nested, list):
            yield from (name for item in nested if isinstance(item, dict) for name in _list_referenced_sections(item))


def _make_required_keys_condition(names: list[str], parts: Schema) -> Schema:
    """Return the condition that requires keys, also of section train, of jobs without a script."""
    of_train = {"properties": {"train": {"required": parts["Train"].pop("required")}}}
    script = {"required": ["script"], "properties": {"script": {"type": "object"}}}
    return {"if": script, "then": {}, "else": {"required": names, **of_train}}
