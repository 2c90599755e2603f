"""Chains of jobs: each job of a training on a batch scheduler starts when the earlier ones have ended."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import Task, TrainTask
from tula_cli.spec.slurm_options import MAX_CHAINED_JOBS, SPARE_CHAINED_JOBS

MIN_START_DELAY_MINUTES, MAX_START_DELAY_MINUTES = 10, 30
"""Minimum and maximum minutes by which a job is delayed after one that did not start tula."""
YOUNG_SECONDS = 30.0
"""Seconds after its submission in which a job may be missing from both queue and accounting."""
WAITS_FOR_EARLIER_JOB = "Dependency"
"""The scheduler's reason for a job that waits for another job to end."""


def list_chain_tasks(task: Task) -> Sequence[Task]:
    """Return the jobs of a task's chain, each as a copy of the task with the number of nodes that the job requests.

    Only a training on a scheduler with a queue has several jobs: 1.5 times the predicted number, and two spare jobs.
    Stages of `train.ramp` on fewer nodes have separate jobs before those, with one spare job, as a job with more nodes
    than a stage needs can also run it.
    """
    if not task.spec.cluster.backend.has_queue or not isinstance(task, TrainTask):
        return [task]
    predicted = task.prediction
    # The number of jobs is that for the fewest nodes that may be granted.
    slowest = task.with_granted_nodes(task.sizes[0].nodes).prediction if task.sizes else predicted
    hours = None if slowest is None else slowest.hours
    chain_tasks: list[Task] = []
    stage_nodes = {stage.nodes or 0 for stage in task.stages}
    for nodes in sorted(count for count in stage_nodes if task.nodes <= count < task.training_nodes):
        predicted_hours = None if predicted is None else predicted.compute_hours_on_nodes(nodes)
        chain_tasks += [task.model_copy(update={"nodes": nodes})] * _count_jobs_needed(task, predicted_hours, spare=1)
        hours = None if hours is None or predicted_hours is None else hours - predicted_hours
    last_task = task.model_copy(update={"nodes": task.training_nodes})
    needed = _count_jobs_needed(task, hours, spare=SPARE_CHAINED_JOBS)
    chain_tasks = chain_tasks[: MAX_CHAINED_JOBS - 2] + [last_task] * min(max(2, needed), MAX_CHAINED_JOBS)
    return chain_tasks[:MAX_CHAINED_JOBS]


def _count_jobs_needed(task: TrainTask, hours: float | None, *, spare: int) -> int:
    """Return how many jobs a training of `hours` needs; train.max_attempts if hours is None."""
    if hours is None:
        return task.spec.train.max_attempts
    limit = task.time_limit_minutes
    return spare + (1 if 60 * hours < limit / 2 else math.ceil(1.5 * 60 * hours / limit))


def list_nodes_of_chain_jobs(task: Task) -> tuple[int, ...]:
    """Return the number of nodes that each job of a task requests."""
    return tuple(chain_task.nodes for chain_task in list_chain_tasks(task))


def compute_start_delay_minutes(number: int) -> int:
    """Return the minutes between the starts of job `number` (from 2) and its predecessor if the latter cannot start tula."""
    return min(MIN_START_DELAY_MINUTES * (number - 1), MAX_START_DELAY_MINUTES)


# --- The state of a chain


def derive_chain_state(
    job: Job,
    reported_states: Mapping[str, SchedulerState],
    *,
    forgotten: str,
    released: Mapping[str, str] | None = None,
) -> SchedulerState:
    """Return the state of a chain from those of its jobs.

    Args:
        reported_states: states that the scheduler reports, by job id; may lack some jobs.
        forgotten: reason to show for jobs that the scheduler does not know.
        released: ids of jobs that tula itself cancelled, with the reason; they are ignored for the state.
    """
    if released and (cancelled := [id_ for id_ in job.scheduler_ids if id_ in released]):
        ids = f"job {cancelled[0]}" if len(cancelled) == 1 else f"jobs {cancelled[0]} to {cancelled[-1]}"
        explanation = f"tula cancelled {ids} of the chain: {released[cancelled[-1]]}"
        kept_ids = tuple(id_ for id_ in job.scheduler_ids if id_ not in released)
        remaining = job.model_copy(
            update={"links": kept_ids, "scheduler_id": kept_ids[0] if kept_ids else job.scheduler_id}
        )
        return replace(derive_chain_state(remaining, reported_states, forgotten=forgotten), released=explanation)
    is_just_submitted = time.time() - job.submitted_at < YOUNG_SECONDS
    unheard = SchedulerState("ended", forgotten, forgotten=True)
    if is_just_submitted:
        unheard = SchedulerState("pending", "just submitted", young=True)
    states = [reported_states.get(id_, unheard) for id_ in job.scheduler_ids]
    if is_just_submitted:  # accounting may know a job before squeue lists it
        states = [unheard if state.state == "unknown" else state for state in states]
    kinds = [state.state for state in states]
    if "running" in kinds:
        return _add_reason_of_next_job(job.scheduler_ids, states, kinds.index("running"))
    if "pending" in kinds:
        first_pending = kinds.index("pending")
        return _derive_waiting_state(job.scheduler_ids[:first_pending], states[: first_pending + 1])
    return states[kinds.index("unknown")] if "unknown" in kinds else states[-1]


def _add_reason_of_next_job(ids: Sequence[str], states: Sequence[SchedulerState], at: int) -> SchedulerState:
    """Return the state of the running job, with the reason why a later job of the chain cannot start, if any."""
    state = states[at]
    for id_, following in zip(ids[at + 1 :], states[at + 1 :], strict=True):
        if following.hopeless or following.without_nodes:
            reason = f"the next job {id_}: {following.reason}"
            return replace(state, reason="; ".join(filter(None, (state.reason, reason))))
    return state


def _derive_waiting_state(earlier: Sequence[str], states: Sequence[SchedulerState]) -> SchedulerState:
    """Return the state of the first waiting job, with the outcome of the job before it if it waits for that job."""
    last_state = states[-1]
    if last_state.reason != WAITS_FOR_EARLIER_JOB or not earlier:
        return last_state
    story = states[-2].reason or "it ended"
    return SchedulerState("pending", f"continues after job {earlier[-1]} ({story})", last_state.starts_at)
