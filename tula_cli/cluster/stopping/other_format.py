"""A link that meets a run of another format: it touches nothing, and the chain waits for the tula that can read it."""

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tula_cli.cluster.allocation import Allocation
from tula_cli.errors import OtherFormat, TulaError
from tula_cli.run.files import list_files, read_content
from tula_cli.run.upkeep import format as run_format


def require_known_format(run: Path, allocation: Allocation) -> None:
    """See that this tula reads a run's format; where it does not, hold what waits of the chain, and change nothing else.

    Raises:
        OtherFormat: it does not.
        TulaError: what tells the format cannot be read.
    """
    try:
        run_format.require_known(run)
    except OtherFormat:
        waiting = _later_jobs(run, allocation.job_id) if allocation.is_leader and not allocation.is_local else ()
        if waiting:  # each would end like this one, and the chain would be gone in a minute
            scheduler = allocation.scheduler
            complaint = scheduler.hold(waiting)
            ids = ",".join(waiting)
            message = (
                f"could not be held: {complaint}"
                if complaint
                else f"are held: {scheduler.release_command} {ids} lets them go on"
            )
            sys.stderr.write(f"tula: the jobs of the chain that wait ({ids}) {message}\n")
        raise


def _later_jobs(run: Path, job_id: str) -> Sequence[str]:
    """Return the jobs of a chain after one of them, by what any format's records are expected to have."""
    with contextlib.suppress(TulaError, OSError, ValueError, RecursionError):
        for path in list_files(run / "jobs"):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                links = [str(link) for link in json.loads(read_content(path))["links"]]
                if job_id in links:
                    return links[links.index(job_id) + 1 :]
    return ()
