"""Job specs in the records of runs, possibly written by an older version of tula."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from tula_cli.spec.job import JobSpec
from tula_cli.spec.old_keys import remove_old_keys, replace_old_keys
from tula_cli.spec.sections import REMOVED_STRATEGIES


def without_removed_values(content: Any) -> Any:
    """Return a stored job, as plain values, without removed keys; a removed `search.strategy` becomes auto.

    Measurements stay readable; a training that depended on a removed key has another name and is not resumed.
    """
    if not isinstance(content, Mapping):
        return content
    updated = replace_old_keys(content)
    train = updated.get("train")
    if isinstance(train, Mapping):
        updated["train"] = _with_listed_measurements(train)
    source = _get_section(updated, "pricing").get("source")
    node_types = {
        name: {**node_type, "pricing": _with_dated_source(_get_section(node_type, "pricing"), source)}
        if "date" in _get_section(node_type, "pricing")
        else node_type
        for name, node_type in _get_section(updated, "node_types").items()
    }
    if "date" in _get_section(updated, "pricing"):
        updated["pricing"] = _with_dated_source(updated["pricing"], source)
    updated = remove_old_keys(updated)
    search = updated.get("search")
    if isinstance(search, Mapping) and str(search.get("strategy")) in REMOVED_STRATEGIES:
        updated["search"] = {**search, "strategy": "auto"}
    if node_types:
        updated["node_types"] = {name: without_removed_values(node_type) for name, node_type in node_types.items()}
    return updated


def _get_section(content: Any, name: str) -> Mapping[str, Any]:
    """Return a section of a stored job or node type; empty if there is none."""
    section = content.get(name) if isinstance(content, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _with_dated_source(pricing: Mapping[str, Any], source: object) -> dict[str, Any]:
    """Return section pricing with its date as part of its source; `source` is that of the job, for a node type without one."""
    texts = (pricing.get("source", source), pricing["date"])
    dated = {**pricing, "source": ", ".join(str(text) for text in texts if text)}
    del dated["date"]
    return dated


def _with_listed_measurements(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return section train with the measurements that older versions switched on by a key each in one list."""
    diagnostics = train.get("diagnostics")
    listed = list(diagnostics) if isinstance(diagnostics, list) else ["gradient_norms"] if diagnostics else []
    listed += [
        name for name in ("gradient_noise", "hessian") if train.get(name) not in (None, False) and name not in listed
    ]
    return {**train, "diagnostics": listed} if listed or diagnostics is not None else dict(train)


StoredSpec = Annotated[JobSpec, BeforeValidator(without_removed_values)]
"""The job spec stored in a record."""
