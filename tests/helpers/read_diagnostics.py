"""Codes and values of diagnostics, which tests compare instead of sentences."""

from collections.abc import Iterable, Mapping
from typing import Any

from tula_cli.diagnostics import Diagnostic


def codes(diagnostics: Iterable[Diagnostic]) -> list[str]:
    return [diagnostic.code for diagnostic in diagnostics]


def values(diagnostics: Iterable[Diagnostic], code: str) -> Mapping[str, Any]:
    """Return the values of the only diagnostic with this code."""
    (match,) = (diagnostic for diagnostic in diagnostics if diagnostic.code == code)
    return match.values
