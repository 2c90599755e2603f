"""Chains of jobs: a training on a batch scheduler is a chain of jobs, each of which starts when the earlier ones have ended."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import CheckTask, EvaluateTask, ProbeTask, RehearsalTask, Task, TrainTask
from tula_cli.spec.slurm_options import ROOM

SPARE_LINKS = 2
"""Links of a chain beyond those that a training is predicted to need: for a preemption, a lost node, a slow day."""
MAX_LINKS = 50
"""Of one chain: queues bound how many jobs a user may have. The same command goes on where a chain ends."""
FOLDER_PATIENCE = 30
"""Seconds for which a job waits for a folder that is away."""
TRAINING_PATIENCE = 600
"""The same of a job of a training, at most: it is never longer than half of its time limit."""
FIRST_DELAY, LONGEST_DELAY = 10, 30
"""Minutes by which the job after one that the scheduler could not start is delayed: the least, and the most."""
YOUNG_SECONDS = 30.0
"""Seconds for which a submitted job may be known to neither the queue nor the accounting."""
YOUNG_WORDS = "just submitted"
DEPENDENCY = "Dependency"
"""The reason of a job that waits for the end of another."""


def count_links(task: Task) -> int:
    """Return how many jobs a task is submitted as: a training in a queue as several, one after the other.

    Half as many again as it is predicted to need, and two for what is lost. Stages of `train.ramp` that run on fewer nodes have
    links of their own before those; one that has too many nodes for its stage can do it all the same, so they have one
    to spare.
    """
    return len(list_chain_tasks(task))


def list_chain_tasks(task: Task) -> Sequence[Task]:
    """Return the jobs of a task's chain, each as the task that it asks for nodes for."""
    if task.spec.cluster.kind == "local" or not isinstance(task, TrainTask):
        return [task]
    predicted = task.prediction
    hours = None if predicted is None else predicted.hours
    links: list[Task] = []
    for nodes in sorted({count for stage in task.stages if task.nodes <= (count := stage.nodes or 0) < task.own_nodes}):
        predicted_hours = None if predicted is None else predicted.hours_on(nodes)
        links += [task.model_copy(update={"nodes": nodes})] * _count_links_needed(
            task, predicted_hours, _get_time_limit_on_nodes(task, nodes), spare=1
        )
        hours = None if hours is None or predicted_hours is None else hours - predicted_hours
    last_task = task.model_copy(update={"nodes": task.own_nodes})
    needed = _count_links_needed(task, hours, _get_time_limit_on_nodes(task, task.own_nodes), spare=SPARE_LINKS)
    links = links[: MAX_LINKS - 2] + [last_task] * min(max(2, needed), MAX_LINKS)
    return links[:MAX_LINKS]


def _get_time_limit_on_nodes(task: TrainTask, nodes: int) -> int:
    """Return the time limit of a job on so many nodes, within the site's bins (cluster.slurm.limits)."""
    slurm = task.spec.cluster.slurm
    return task.spec.cluster.minutes if slurm is None else max(1, slurm.job_minutes(nodes))


def _count_links_needed(task: TrainTask, hours: float | None, limit: int, *, spare: int) -> int:
    """Return the links that so many hours need; None: that is not known."""
    if hours is None:
        return task.spec.train.max_attempts
    return spare + (1 if 60 * hours < limit / 2 else math.ceil(1.5 * 60 * hours / limit))


def list_nodes_of_links(task: Task) -> tuple[int, ...]:
    """Return the nodes that each job of a task asks for."""
    return tuple(link.nodes for link in list_chain_tasks(task))


def get_time_limit(task: Task) -> int:
    """Return the time limit of a job, minutes; none is above its bin of the site's (cluster.slurm.limits)."""
    match task:
        case ProbeTask() | RehearsalTask():
            needed = math.ceil(task.spec.measuring_minutes())
        case TrainTask() | EvaluateTask():
            needed = task.spec.cluster.minutes
        case CheckTask():
            needed = math.ceil(CheckTask.MINUTES) + ROOM
    longest = math.inf if task.spec.cluster.slurm is None else task.spec.cluster.slurm.longest(task.nodes)
    return max(1, math.floor(min(needed, longest or needed)))


def get_folder_patience(task: Task) -> int:
    """Return the seconds for which a job waits for its folders: a job of a chain must outlast a file system's failure.

    Where somebody waits for the answer, and no job of the run has seen the folders yet, it is short.
    """
    return min(TRAINING_PATIENCE, 30 * get_time_limit(task)) if isinstance(task, TrainTask) else FOLDER_PATIENCE


def start_delay(number: int) -> int:
    """Return the minutes between the starts of a job of a chain (from 2) and the one before it, should that not start tula."""
    return min(FIRST_DELAY * (number - 1), LONGEST_DELAY)


# --- what became of it


def get_chain_state(
    job: Job, known: Mapping[str, SchedulerState], *, forgotten: str, released: Mapping[str, str] | None = None
) -> SchedulerState:
    """Return the state of a job from those of its links.

    Args:
        job: the job.
        known: what the scheduler says; it does not know all of them.
        forgotten: what to say of those.
        released: links that tula itself has cancelled, and why: they report nothing about the others.
    """
    if released and (cancelled := [id_ for id_ in job.ids if id_ in released]):
        ids = cancelled[0] if len(cancelled) == 1 else f"{cancelled[0]} to {cancelled[-1]}"
        explanation = f"tula cancelled {ids} of its chain: {released[cancelled[-1]]}"
        retained = tuple(id_ for id_ in job.ids if id_ not in released)
        remaining = job.model_copy(
            update={"links": retained, "scheduler_id": retained[0] if retained else job.scheduler_id}
        )
        return replace(get_chain_state(remaining, known, forgotten=forgotten), released=explanation)
    young = time.time() - job.submitted_at < YOUNG_SECONDS
    unheard = SchedulerState("pending", YOUNG_WORDS) if young else SchedulerState("ended", forgotten)
    states = [known.get(id_, unheard) for id_ in job.ids]
    if young:  # accounting may know a job before the queue shows it
        states = [unheard if state.state == "unknown" else state for state in states]
    kinds = [state.state for state in states]
    if "running" in kinds:
        return _add_next_reason(job.ids, states, kinds.index("running"))
    if "pending" in kinds:
        first_pending = kinds.index("pending")
        return _get_waiting_state(job.ids[:first_pending], states[: first_pending + 1])
    return states[kinds.index("unknown")] if "unknown" in kinds else states[-1]


def _add_next_reason(ids: Sequence[str], states: Sequence[SchedulerState], at: int) -> SchedulerState:
    """Return the state of the link that runs, with what keeps those after it from going on."""
    state = states[at]
    for id_, following in zip(ids[at + 1 :], states[at + 1 :], strict=True):
        if following.hopeless or following.without_nodes:
            reason = f"job {id_}, which goes on after it: {following.reason}"
            return replace(state, reason="; ".join(filter(None, (state.reason, reason))))
    return state


def _get_waiting_state(earlier: Sequence[str], states: Sequence[SchedulerState]) -> SchedulerState:
    """Return what the first waiting link of a chain waits for: for the story of the link before it, if there is one."""
    last_state = states[-1]
    if last_state.reason != DEPENDENCY or not earlier:
        return last_state
    story = states[-2].reason or "it ended"
    return SchedulerState("pending", f"goes on after job {earlier[-1]} ({story})", last_state.starts_at)
