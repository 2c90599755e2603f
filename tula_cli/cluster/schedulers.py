"""The schedulers by the value of `cluster.kind`; a user-defined one is given as an import string."""

from collections.abc import Mapping
from typing import Any

from tula_cli import plugins
from tula_cli.cluster.scheduler import LocalScheduler, Scheduler
from tula_cli.cluster.slurm.scheduler import SlurmScheduler
from tula_cli.errors import SpecError
from tula_cli.spec.resources import Cluster

SCHEDULERS: Mapping[str, type[Scheduler]] = {"local": LocalScheduler, "slurm": SlurmScheduler}
PROTOCOL_MEMBERS = (*sorted(name for name in vars(Scheduler) if not name.startswith("_")), *Scheduler.__annotations__)
"""Members that a user-defined scheduler must have."""


def load_scheduler(kind: str, options: Mapping[str, Any] | None = None) -> Scheduler:
    """Return a scheduler.

    Args:
        kind: `cluster.kind`.
        options: `cluster.scheduler.options`, the arguments of the scheduler.

    Raises:
        SpecError: the name is unknown, its import fails, it rejects the options, or it lacks a member of the protocol.
    """
    cls = plugins.load(kind, SCHEDULERS, kind="scheduler")
    try:
        scheduler = cls(**(options or {}))
    except TypeError as error:
        raise SpecError(f"scheduler {kind!r}: {error}", "cluster.scheduler.options are its arguments") from error
    if missing := [name for name in PROTOCOL_MEMBERS if not hasattr(scheduler, name)]:
        raise SpecError(
            f"scheduler {kind!r} has no {', '.join(missing)}",
            "the page 'Use another scheduler' of the documentation lists what the class needs",
        )
    return scheduler  # type: ignore[no-any-return]


def make_scheduler(cluster: Cluster) -> Scheduler:
    """Return the scheduler of a job.

    Raises:
        SpecError: as in `load_scheduler`.
    """
    section = cluster.own_scheduler
    return load_scheduler(cluster.kind, section.options if section else None)
