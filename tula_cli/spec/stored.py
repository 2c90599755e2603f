"""Job specs in the records of runs, which an older version of tula may have written."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import REMOVED_STRATEGIES


def without_removed_values(content: Any) -> Any:
    """Return a stored job, as plain values, with `search.strategy: auto` in place of a strategy that was removed since."""
    if not isinstance(content, Mapping):
        return content
    updated = dict(content)
    search, node_types = content.get("search"), content.get("node_types")
    if isinstance(search, Mapping) and str(search.get("strategy")) in REMOVED_STRATEGIES:
        updated["search"] = {**search, "strategy": "auto"}
    if isinstance(node_types, Mapping):
        updated["node_types"] = {name: without_removed_values(node_type) for name, node_type in node_types.items()}
    return updated


StoredSpec = Annotated[JobSpec, BeforeValidator(without_removed_values)]
"""The job of a record."""
