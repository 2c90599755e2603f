"""A training on SLURM as a chain of jobs: how many, of which names, and what each waits for."""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence

from tula_cli.cluster.slurm.queue import Queued
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import Task, TrainTask
from tula_cli.spec.slurm_options import Slurm

SPARE_LINKS = 2
"""Links of a chain beyond those that a training is predicted to need: for a preemption, a lost node, a slow day."""
MOST_LINKS = 50
"""Of one chain: queues bound how many jobs a user may have. The same command goes on where a chain ends."""


def links(task: Task) -> int:
    """Return how many jobs a task is submitted as: a training on SLURM as several, one after the other.

    Half as many again as it is predicted to need, and two for what is lost. Stages of `train.ramp` that run on fewer nodes have
    links of their own before those; one that has too many nodes for its stage can do it all the same, so they have one
    to spare.
    """
    return len(chain(task))


def chain(task: Task) -> Sequence[Task]:
    """Return the jobs of a task's chain, each as the task that it asks for nodes for."""
    if task.spec.cluster.kind != "slurm" or not isinstance(task, TrainTask):
        return [task]
    limit, predicted = (task.spec.cluster.slurm or Slurm()).minutes, task.prediction
    hours = None if predicted is None else predicted.hours
    found: list[Task] = []
    for nodes in sorted({count for stage in task.stages if task.nodes <= (count := stage.nodes or 0) < task.own_nodes}):
        own = None if predicted is None else predicted.hours_on(nodes)
        found += [task.model_copy(update={"nodes": nodes})] * _needed(task, own, limit, spare=1)
        hours = None if hours is None or own is None else hours - own
    last = task.model_copy(update={"nodes": task.own_nodes})
    found = found[: MOST_LINKS - 2] + [last] * min(max(2, _needed(task, hours, limit, spare=SPARE_LINKS)), MOST_LINKS)
    return found[:MOST_LINKS]


def _needed(task: TrainTask, hours: float | None, limit: int, *, spare: int) -> int:
    """Return the links that so many hours need; None: that is not known."""
    if hours is None:
        return task.spec.train.max_attempts
    return spare + (1 if 60 * hours < limit / 2 else math.ceil(1.5 * 60 * hours / limit))


def nodes_of_links(task: Task) -> tuple[int, ...]:
    """Return the nodes that each job of a task asks for."""
    return tuple(link.nodes for link in chain(task))


# --- names, and what each waits for


def job_name(run: RunDir, task: Task) -> str:
    """Return the name of a job in the queue: all links of a chain have one, and those of a run elsewhere have another.

    SLURM lets one job of a name run at a time where it is told so (`singleton`).
    """
    own = f"tula-{run.id}-{task.job}"
    if links(task) == 1:
        return own
    return f"{own}-{hashlib.sha256(os.fsencode(run.path.resolve())).hexdigest()[:8]}"


def link_names(run: RunDir, task: Task) -> list[str]:
    """Return the names of the scripts to submit: they find a job again of which sbatch did not tell the id."""
    first = f"tula-{run.id}-{task.job}"
    return [first, *(f"{first}.{number}" for number in range(2, links(task) + 1))]


def to_wait_for(name: str, there: Mapping[str, Queued], ids: Sequence[str]) -> Sequence[str]:
    """Return the jobs in the queue that the next link has to name: the last one, and all that have another name than it.

    Args:
        name: of the chain's jobs in the queue.
        there: the jobs there, by their scripts' names; an older tula gave each link a name of its own.
        ids: of all of them, in their order.
    """
    strangers = {job.id for job in there.values() if job.name != name}
    return [id_ for id_ in ids if id_ in strangers or id_ == ids[-1]]


def dependency(before: Sequence[str], rehearsal: Sequence[str]) -> str:
    """Return what a link waits for, as sbatch takes it: the same few words at the end of a chain as at its beginning.

    A link that waits and is cancelled satisfies `afterany`, so naming the one before is not enough: that would start a link
    beside one that runs. All links have one name, and of that SLURM starts one at a time, in their order (`singleton`).

    Args:
        before: jobs of the chain that have to have ended.
        rehearsal: the jobs that a training comes after.
    """
    named = (*rehearsal, *before)
    return ",".join([*([f"afterany:{':'.join(named)}"] if named else []), *(["singleton"] if before else [])])
