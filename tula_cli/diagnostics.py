"""Diagnostics: warnings, notes and problems as data, each with the sentence that the user reads.

The sentences of a package are the functions of its module `messages`, one function per code.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ParamSpec

P = ParamSpec("P")


@dataclass(frozen=True)
class Diagnostic:
    """A warning, note or problem, as data and as text.

    Args:
        code: the kind of message, in words joined by hyphens. Unlike the text, it is the same in all versions.
        values: what the sentence mentions, by name; values that JSON can express.
        text: one or two sentences for the user.
    """

    code: str
    values: Mapping[str, object]
    text: str

    def __str__(self) -> str:
        return self.text


class DiagnosticWarning(UserWarning):
    """The Python warning that a function of the API issues, with the code and the values of its diagnostic.

    A warning that is a text only has an empty code.
    """

    def __init__(self, warning: Diagnostic | str) -> None:
        super().__init__(str(warning))
        self.code = warning.code if isinstance(warning, Diagnostic) else ""
        self.values = warning.values if isinstance(warning, Diagnostic) else {}


def diagnostic(write: Callable[P, str]) -> Callable[P, Diagnostic]:
    """Decorate a function that writes a sentence, so that it returns a `Diagnostic`.

    The function's name becomes the code and its arguments, all of them keyword-only, become the values. So a code
    without a sentence, and a sentence without its values, do not pass the type checker.
    """
    code = write.__name__.replace("_", "-")

    @functools.wraps(write)
    def make_diagnostic(*args: P.args, **values: P.kwargs) -> Diagnostic:
        return Diagnostic(code, values, write(*args, **values))

    return make_diagnostic
