"""Parameters of a model by patterns of their names, for what is frozen and for groups of an optimizer."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from tula_cli.errors import SpecError
from tula_cli.plugins import nearest

MAX_NAMES_SHOWN = 8
"""Names of modules that an error lists."""


def parameters_matching(model: nn.Module, patterns: Sequence[str], *, path: str) -> dict[str, nn.Parameter]:
    """Return the parameters that patterns name, by name; of several patterns that a name fits, the last one counts.

    Args:
        model: whose they are; one that stands in several places has a name for each.
        patterns: of names, where * stands for any text; one that fits a module names all that is in it. `norms`, `biases`
            and `embeddings` are those of the whole model. After a ! a pattern takes out what it names.
        path: where they stand in the spec.

    Raises:
        SpecError: a pattern names nothing.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    kinds = {kind: set(_parameters_of_kind(model, kind)) for kind in KINDS}
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        if not any(_matches(name, plain, kinds) for name in names):
            raise _no_match_error(model, pattern, path)
    return {name: parameter for name, parameter in names.items() if _last_match_includes(name, patterns, kinds)}


def is_module_matching(name: str, patterns: Sequence[str]) -> bool:
    """Return whether patterns name a module, by its own name alone."""
    return _last_match_includes(name, patterns, {kind: set() for kind in KINDS})


KINDS = ("norms", "biases", "embeddings")


def _last_match_includes(name: str, patterns: Sequence[str], kinds: dict[str, set[str]]) -> bool:
    matches = [not pattern.startswith("!") for pattern in patterns if _matches(name, pattern.removeprefix("!"), kinds)]
    return bool(matches) and matches[-1]


def _matches(name: str, pattern: str, kinds: dict[str, set[str]]) -> bool:
    if pattern in kinds:
        return name in kinds[pattern]
    return any(fnmatchcase(name_part, pattern) for name_part in _with_parents(name))


def _with_parents(name: str) -> Iterator[str]:
    """Yield a name and those of the modules that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _parameters_of_kind(model: nn.Module, kind: str) -> Iterator[str]:
    """Yield the names of the parameters of one of KINDS."""
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False):
            is_norm = "norm" in type(module).__name__.lower()  # LayerNorm, and RMSNorm of whatever package
            is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            if {"norms": is_norm, "biases": name.endswith("bias"), "embeddings": is_embedding}[kind]:
                yield f"{module_name}.{name}" if module_name else name


def _no_match_error(model: nn.Module, pattern: str, path: str) -> SpecError:
    modules = [name for name, _ in model.named_modules() if name]
    names = [*modules, *(name for name, _ in model.named_parameters())]
    top = [name for name in modules if "." not in name]
    there_are = f"its modules are {', '.join(top[:MAX_NAMES_SHOWN])}{' ...' * (len(top) > MAX_NAMES_SHOWN)}"
    hint = nearest(pattern.strip("!*.?"), names) or there_are
    return SpecError(f"{path}: {pattern!r} fits no parameter of {type(model).__name__}", hint)
