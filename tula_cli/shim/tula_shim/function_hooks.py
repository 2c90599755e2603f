"""Replaces functions of torch and other libraries by functions of the shim that call them."""

from __future__ import annotations

import functools
from typing import Any, Callable


def hook_function(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of a module, or a method of a class, by `replacement`, which gets the original as first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call_replacement(*arguments: Any, **named: Any) -> Any:
        return replacement(original, *arguments, **named)

    setattr(owner, name, call_replacement)
