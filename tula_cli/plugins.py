"""Names in a spec: a key of a dict literal, or an import string `package.module:attribute`."""

import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tula_cli.errors import SpecError

_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_MAX_LISTED = 20
"""Maximum number of known names that a hint lists."""


def suggest_nearest(name: str, known_names: Iterable[str]) -> str:
    """Return "did you mean ...?" with the known names closest to `name`, or an empty string."""
    folded = {key.lower(): key for key in known_names}
    matches = difflib.get_close_matches(name.lower(), folded, n=len(folded) or 1, cutoff=0.6)
    # Of equally close names, those that start like it come first: AdamW before NAdam for Adamm.
    ratios = {key: difflib.SequenceMatcher(None, key, name.lower()).ratio() for key in matches}
    close = sorted(matches, key=lambda key: (-ratios[key], key[:1] != name[:1].lower()))[:3]
    return f"did you mean {' or '.join(folded[key] for key in close)}?" if close else ""


def suggest_name(name: str, known_names: Iterable[str]) -> str:
    """Return the hint for an unknown name: as an import string if it has dots, else as the nearest known name, or empty."""
    if _DOTTED.fullmatch(name):
        module, _, attribute = name.rpartition(".")
        return f"did you mean {module}:{attribute}? An import string has a colon before the attribute"
    return suggest_nearest(name, known_names)


def is_import_string(name: str) -> bool:
    return ":" in name


def load_named_object(name: str, builtins: Mapping[str, Any], *, kind: str) -> Any:
    """Return the object that `name` refers to.

    Args:
        name: a key of `builtins`, or `package.module:attribute` (the working directory is importable).
        builtins: built-in objects by name.
        kind: kind of object ("model", "dataset"), for the error message.

    Raises:
        SpecError: the name is unknown (the hint lists the nearest known names), or its module or attribute does not
            exist.
    """
    if name in builtins:
        return builtins[name]
    if not is_import_string(name):
        listed = f"choose from {', '.join(sorted(builtins))}, or " if 0 < len(builtins) <= _MAX_LISTED else ""
        raise SpecError(
            f"unknown {kind} {name!r}",
            suggest_name(name, builtins) or f"{listed}write your own {kind} as package.module:attribute",
        )
    module_name, _, attribute = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise SpecError(
            f"{kind} {name!r} does not start with the full name of a module", "write it as package.module:attribute"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's module is their code's own error: keep its traceback.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        raise SpecError(
            f"{kind} {name!r}: there is no module {error.name!r}",
            "run tula in the folder that contains the module, or install the package",
        ) from error
    try:
        target: Any = module
        for part in attribute.split("."):
            target = getattr(target, part)
        return target
    except AttributeError:
        raise SpecError(
            f"{kind} {name!r}: {module_name} has no {attribute!r}", suggest_nearest(attribute, dir(module))
        ) from None
