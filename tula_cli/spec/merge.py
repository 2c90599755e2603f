"""Merging of defaults, site files, job file, environment and --set (later wins), with the origin of each value."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tula_cli.assets import list_config_files
from tula_cli.errors import SpecError
from tula_cli.options import require_list
from tula_cli.spec.old_keys import replace_old_keys, replace_old_path
from tula_cli.spec.yaml_text import parse_yaml, read_yaml

SITE_FILE = "site.yaml"
"""File name of a site's and a user's settings for all jobs."""
ENV_PREFIX = "TULA_SPEC_"
"""TULA_SPEC_SEARCH__MIN_STEPS=20 overrides search.min_steps: two underscores separate the levels."""


def merge_sources(
    path: Path,
    *,
    overrides: Iterable[str],
    environ: Mapping[str, str] = os.environ,
    site_files: Iterable[Path] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the merged mapping, and the source of each value by its key `a.b.c`."""
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    candidates = reversed(list_config_files(SITE_FILE, environ=environ)) if site_files is None else site_files
    sites = [site_file for site_file in candidates if site_file.is_file()]
    for file in (*sites, path):
        merge_mappings(merged, replace_old_keys(read_yaml(file), source=str(file)), origins, source=str(file))
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX):
            key = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            _assign_value(merged, key, environ[variable], origins, source=variable)
    apply_overrides(merged, overrides, origins)
    _remove_unused_scheduler_settings(merged, origins, {str(site_file) for site_file in sites} - {str(path)})
    return merged, origins


def _remove_unused_scheduler_settings(merged: dict[str, Any], origins: dict[str, str], sites: Collection[str]) -> None:
    """Remove settings of a scheduler that the job does not use, if only site files have given them."""
    cluster = merged.get("cluster")
    if not isinstance(cluster, dict):
        return
    kind = cluster.get("kind", "local")
    is_meant = {"slurm": kind == "slurm", "options": kind not in ("local", "slurm")}
    is_meant |= dict.fromkeys(("minutes", "python", "setup"), kind != "local")
    for name, meant in is_meant.items():
        given = [key for key in origins if f"{key}.".startswith(f"cluster.{name}.")]
        if not meant and given and all(origins[key] in sites for key in given):
            del cluster[name]
            for key in given:
                del origins[key]


def apply_overrides(into: dict[str, Any], overrides: Iterable[str], origins: dict[str, str]) -> None:
    """Merge overrides `a.b=c`, with c in YAML, into nested mappings; later wins.

    Raises:
        SpecError: an override does not have this form, or its value is not valid YAML.
    """
    require_list(overrides=overrides)  # rejects a single string, as Python code may pass
    for text in overrides:
        if not isinstance(text, str):
            raise SpecError(f"overrides: {text!r} is not text", "for example overrides=['search.nodes=[2,4]']")
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise SpecError(f"[[--set {text}]]: expected key.subkey=value", "for example [[--set search.nodes=[2,4]]]")
        _assign_value(into, key.strip(), value, origins, source="--set")


def _assign_value(into: dict[str, Any], key: str, text: str, origins: dict[str, str], *, source: str) -> None:
    """Set `a.b.c` to a YAML value; a mapping replaces the previous value."""
    content = parse_yaml(text, source=f"{source} {key}")
    for part in reversed(key.split(".")):
        content = {part: content}
    content = replace_old_keys(content, source=source)
    _remove_path(into, replace_old_path(key), origins)
    merge_mappings(into, content, origins, source=source)


def _remove_path(content: dict[str, Any], path: str, origins: dict[str, str]) -> None:
    """Remove the value at `a.b.c` with everything below it."""
    *sections, last = path.split(".")
    for part in sections:
        inner = content.get(part)
        if not isinstance(inner, dict):
            return
        content = inner
    content.pop(last, None)
    for leaf in [known for known in origins if known == path or known.startswith(f"{path}.")]:
        del origins[leaf]


def merge_mappings(
    into: dict[str, Any],
    new: Mapping[str, Any],
    origins: dict[str, str] | None = None,
    *,
    source: str = "",
    prefix: str = "",
) -> None:
    """Merge `new` into `into` in place, level by level, and set the origin, if recorded, of each new value to `source`.

    A value is replaced unless both values are mappings.
    """
    for key, value in new.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge_mappings(into[key], value, origins, source=source, prefix=f"{path}.")
        else:
            into[key] = value
            if origins is not None:
                origins.update((leaf, source) for leaf, _ in flatten_mapping(value, path))


def flatten_mapping(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested mappings with its key `a.b.c`; lists and empty mappings count as single values."""
    if isinstance(value, dict) and value:
        for key, nested in value.items():
            yield from flatten_mapping(nested, f"{path}.{key}" if path else key)
    else:
        yield path, value
