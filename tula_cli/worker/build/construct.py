"""Calls the targets that a spec names with the spec's arguments, so that errors name the wrong argument."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from tula_cli.errors import SpecError
from tula_cli.plugins import is_import_string, suggest_nearest

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)")


def call_with_arguments(
    target: Callable[..., Any],
    args: Mapping[str, Any],
    *,
    path: str,
    name: str,
    given: Mapping[str, Any] | None = None,
    first: tuple[Any, ...] = (),
) -> Any:
    """Call `target(*first, **given, **args)`.

    Args:
        path: path of `args` in the spec ("model.args").
        name: the name in the spec; an import string is the user's own code.
        given: arguments that tula passes itself and `args` must not repeat.

    Raises:
        SpecError: an argument is unknown, missing or given twice, or built-in code refuses its value. Any other
            exception of the user's own code is passed on.
    """
    given = given or {}
    for key in args:
        if key in given:
            raise SpecError(
                f"{path}.{key} is not allowed, because tula itself passes {key} to {name}", f"remove it from {path}"
            )
    try:
        return target(*first, **given, **args)
    except (TypeError, ValueError) as error:
        if isinstance(error, TypeError) and (
            problem := _make_argument_error(error, target, args, path=path, name=name, given=given, first=first)
        ):
            raise problem from error
        if is_import_string(name):
            raise
        raise make_refused_arguments_error(error, args, path=path, name=name) from error


def list_parameter_names(target: Callable[..., Any]) -> list[str]:
    """Return the names of a callable's parameters; with **kwargs, also those of the class in its return annotation."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # the signature is unknown
        return []
    kinds = signature.parameters.values()
    names = [p.name for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
    returned = signature.return_annotation
    if any(p.kind is p.VAR_KEYWORD for p in kinds) and isinstance(returned, type) and returned is not signature.empty:
        names += [name for name in list_parameter_names(returned) if name not in names]
    return names


def accepts_argument(target: Callable[..., Any], argument: str) -> bool:
    """Return whether a callable has a parameter named `argument`."""
    return argument in list_parameter_names(target)


def _make_argument_error(
    error: TypeError,
    target: Callable[..., Any],
    args: Mapping[str, Any],
    *,
    path: str,
    name: str,
    given: Mapping[str, Any],
    first: tuple[Any, ...],
) -> SpecError | None:
    """Return an error about the arguments if they, and not the called code, caused the TypeError; otherwise None."""
    unexpected = _UNEXPECTED.search(str(error))
    if unexpected and unexpected[1] in args:
        parameter_names = list_parameter_names(target)
        hint = suggest_nearest(unexpected[1], parameter_names) or (
            f"it takes {', '.join(parameter_names)}" if parameter_names else ""
        )
        return SpecError(f"{path}.{unexpected[1]}: {name} has no such argument", hint)
    if _can_bind_arguments(target, *first, **given, **args):
        return None
    missing = _MISSING.search(str(error))
    if missing:
        return SpecError(f"{path}: {name} needs {missing[1]}", f"add it to {path}")
    expected = ", ".join([*(["..."] if first else []), *given, "**args"])
    return SpecError(f"{name} cannot be called by tula: {error}", f"tula calls it as {name}({expected})")


def _can_bind_arguments(target: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(target).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def make_refused_arguments_error(error: Exception, args: Mapping[str, Any], *, path: str, name: str) -> SpecError:
    """Return the error for arguments whose values built-in code refuses."""
    shown = ", ".join(f"{key}: {value!r}" for key, value in args.items())
    return SpecError(f"{path}: {name} does not accept {shown or 'its arguments'}: {error}")
