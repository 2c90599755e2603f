"""The schedulers by the names of `cluster.kind`; one of the user's own is an import string."""

from collections.abc import Mapping
from typing import Any

from tula_cli import plugins
from tula_cli.cluster.scheduler import LocalScheduler, Scheduler
from tula_cli.cluster.slurm.scheduler import SlurmScheduler
from tula_cli.errors import SpecError
from tula_cli.spec.resources import Cluster

SCHEDULERS: Mapping[str, type[Scheduler]] = {"local": LocalScheduler, "slurm": SlurmScheduler}
PROTOCOL_MEMBERS = (*sorted(name for name in vars(Scheduler) if not name.startswith("_")), *Scheduler.__annotations__)
"""Members that a scheduler of the user's own needs."""


def load_scheduler(kind: str, options: Mapping[str, Any] | None = None) -> Scheduler:
    """Return a scheduler.

    Args:
        kind: `cluster.kind`.
        options: `cluster.scheduler.options`, which it is made with.

    Raises:
        SpecError: the name is unknown, its import fails, it does not take the options, or it lacks a part of the protocol.
    """
    cls = plugins.load(kind, SCHEDULERS, kind="scheduler")
    try:
        scheduler = cls(**(options or {}))
    except TypeError as error:
        raise SpecError(f"scheduler {kind!r}: {error}", "cluster.scheduler.options are its arguments") from error
    if missing := [name for name in PROTOCOL_MEMBERS if not hasattr(scheduler, name)]:
        raise SpecError(
            f"scheduler {kind!r} has no {', '.join(missing)}",
            "what a scheduler has to have stands in docs/schedulers.md",
        )
    return scheduler  # type: ignore[no-any-return]


def make_scheduler(cluster: Cluster) -> Scheduler:
    """Return the scheduler of a job.

    Raises:
        SpecError: as `named`.
    """
    section = cluster.own_scheduler
    return load_scheduler(cluster.kind, section.options if section else None)
