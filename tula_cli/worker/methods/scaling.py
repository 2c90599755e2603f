"""What TulaOptimizer is made of, as the spec's section `ags` says it."""

from typing import Any

from tula_cli.optim import configured
from tula_cli.optim.configure import Configured
from tula_cli.spec.ags import Ags


def settings(ags: Ags, **changed: Any) -> Configured:
    """Return new arguments of one TulaOptimizer; `changed` are settings that differ from the section's."""
    return configured(ags.resolved().model_dump() | changed)
