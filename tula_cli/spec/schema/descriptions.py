"""What each key of a spec means, in the words of the comment beside it in the source of its section.

The page of reference (docs/job-spec.md) and the JSON Schema are both made of them.
"""

import ast
import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from tula_cli.errors import TulaError
from tula_cli.spec.kinds import Section


def sections(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections inside a section with their paths, depth first; NAME stands for a name of the user's."""
    for name, hint in get_type_hints(section, include_extras=True).items():
        for inner in inner_sections(hint):
            below = f"{path}.{name}".lstrip(".") + (".NAME" if get_origin(hint) is dict else "")
            yield below, inner
            yield from sections(inner, below)


def inner_sections(hint: Any) -> Iterator[type[Section]]:
    """Yield the sections that a type names, as those of `Slurm | None` and `list[Arm]`."""
    if get_origin(hint) is None and isinstance(hint, type) and issubclass(hint, Section):
        yield hint
    for part in get_args(hint):
        yield from inner_sections(part)


@cache
def descriptions(section: type[Section]) -> dict[str, str]:
    """Return the words of each key: the comment of its field, else the first line of the section that it holds.

    Args:
        section: a part of the spec.

    Raises:
        TulaError: this installation has no sources, and so no comments.
    """
    comments = _comments(section)
    hints = get_type_hints(section, include_extras=True)
    return {name: comments.get(name) or _first_line(hints[name]) for name in section.model_fields}


def _first_line(hint: Any) -> str:
    return next((inspect.cleandoc(inner.__doc__ or "").splitlines()[0] for inner in inner_sections(hint)), "")


def _comments(section: type[Section]) -> dict[str, str]:
    """Return the comment of each field of a class: beside it, else on the lines above it."""
    try:
        source = textwrap.dedent(inspect.getsource(section))
    except OSError:
        raise TulaError(
            f"this installation of tula lacks the source of {section.__module__}, whose comments tell what keys mean",
            "install it again, from a wheel or a whole checkout",
        ) from None
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            beside = [lines[n] for n in range(node.lineno, (node.end_lineno or node.lineno) + 1) if n in lines]
            above = node.lineno
            while not beside and above - 1 in lines and source.splitlines()[above - 2].lstrip().startswith("#"):
                above -= 1
            found[node.target.id] = " ".join(beside or [lines[n] for n in range(above, node.lineno)])
    return found
