"""Job specs in the records of runs, possibly written by an older version of tula."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from tula_cli.spec.job import JobSpec
from tula_cli.spec.old_keys import remove_old_keys, replace_old_keys
from tula_cli.spec.sections import REMOVED_STRATEGIES


def without_removed_values(content: Any) -> Any:
    """Return a stored job, as plain values, without removed keys; a removed `search.strategy` becomes auto.

    The results of older runs stay readable; no version continues a training of another format.
    """
    if not isinstance(content, Mapping):
        return content
    updated = remove_old_keys(replace_old_keys(content))
    search, train, node_types = (updated.get(name) for name in ("search", "train", "node_types"))
    if isinstance(search, Mapping) and str(search.get("strategy")) in REMOVED_STRATEGIES:
        updated["search"] = {**search, "strategy": "auto"}
    if isinstance(train, Mapping) and isinstance(train.get("diagnostics"), bool):  # is a list now
        updated["train"] = {name: value for name, value in train.items() if name != "diagnostics"}
    if isinstance(node_types, Mapping):
        updated["node_types"] = {name: without_removed_values(node_type) for name, node_type in node_types.items()}
    return updated


StoredSpec = Annotated[JobSpec, BeforeValidator(without_removed_values)]
"""The job spec stored in a record."""
