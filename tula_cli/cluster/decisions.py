"""The decision after an attempt: `decide_next_action(task, failure, history) -> Relaunch | Requeue | Stop`, as one table for each kind of task.

Nothing is read or written here. `relaunch.py` reads the history and carries out the decision.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tula_cli.cluster.chains import compute_start_delay_minutes
from tula_cli.host.failures import describe_advice
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure, Fallback, Relaunch, Requeue, Stop
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.tasks import ProbeTask, Task, TrainTask
from tula_cli.spec.sections import MIN_AUTO_WORKERS

MAX_STARTUP_SECONDS = 30.0
"""Seconds from the start of the ranks, for imports of Python, torch and the user's code and the first steps."""
CRASH_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
"""Signals by which a program crashes. Any other signal is sent from outside, and may come at any time."""
COUNTED_OUTCOMES: tuple[OutcomeClass, ...] = (
    "storage", "hung", "host_limit", "port", "unknown", "signal", "peer", "device_fault", "device_error",
)  # fmt: skip
"""Failures limited to `MAX_RESTARTS` per job, or in a training to `train.max_attempts` without a newer checkpoint."""
ALLOCATION_ENDED: tuple[OutcomeClass, ...] = ("time_limit", "preempted", "node_failure")
"""Failures with which an allocation ends, whether or not its scheduler has warned by a signal."""
ALLOCATION_LOST: tuple[OutcomeClass, ...] = ("supervisor", *ALLOCATION_ENDED)
"""Failures that end the allocation: a training resumes in the next one as long as checkpoints advance."""


@dataclass(frozen=True)
class History:
    """The state of a run that `decide_next_action` needs in addition to the task and its failure.

    Args:
        earlier: earlier attempts of this job that count; of a training, those without a newer checkpoint since.
        allocation: id of the present allocation; empty on this machine.
        of_allocation: all attempts in the allocation of `attempt`, oldest first.
        later_jobs: how many jobs of the chain come after the present one.
        allocation_ended: whether the scheduler ends the present allocation.
        progress: samples trained and saved so far, tuning included; None of other tasks than trainings.
        reached: samples trained when the attempt ended; None before a first step.
        fallback: the next configuration that takes less memory.
        lr_factor: learning-rate factor at which a growing batch diverged.
        current_batch: the local batch that a probe job measures now.
        similar: the `earlier` attempts at the same work: of a probe job, at the same local batch.
        has_seen_gpus: whether nodes of the same cluster section have shown GPUs.
        next_trial: the local batch that a search for the largest one tries next.
    """

    attempt: Attempt
    earlier: Sequence[Attempt] = ()
    allocation: str = ""
    of_allocation: Sequence[Attempt] = ()
    later_jobs: int = 0
    allocation_ended: bool = False
    cancelled: bool = False
    finished: bool = False
    progress: int | None = None
    reached: int | None = None
    fallback: Fallback | None = None
    lr_factor: float | None = None
    current_batch: int | None = None
    similar: Sequence[Attempt] = ()
    has_seen_gpus: bool = False
    next_trial: int | None = None


# --- The tables
#
# The first row whose failure and situation apply decides. "any" is every failure, "none" a success.

Situation = Literal[
    "always",
    "the job is cancelled",
    "the job has all its results",
    "a new start would fail too",
    "the allocation has ended",
    "the next stage has more nodes",
    "a configuration takes less memory",
    "the number of loader processes can be lowered",
    "the learning rate of the growing batch can be lowered",
    "attempts remain",
    "attempts remain, and there is no scheduler",
    "a later job waits",
    "it is the first failure since the newest checkpoint, after at least one step, and a later job waits",
    "it is the first failure since the newest checkpoint, after at least one step",
    "the same failure occurs twice within 30 s of a start, or after the same samples",
    "the job saved nothing",
    "the supervisor has failed `train.max_attempts` times without a newer checkpoint",
    "no batch was skipped yet",
    "no batch was skipped yet, and there is a GPU",
    "the search for the largest batch continues",
]
Action = Literal[
    "new processes",
    "new processes after a pause",
    "new processes, once",
    "new processes on the nodes of the stage",
    "new processes with smaller micro-batches, or a smaller batch",
    "new processes with fewer loader processes",
    "new processes from the previous checkpoint, with half the learning-rate factor",
    "new processes without this batch",
    "the next job",
    "the next job, once",
    "the next job, on other nodes",
    "the next job, 10 to 30 minutes later",
    "the later jobs are held until `tula train` finds space",
    "the end",
    "the end, with the result of the batch",
]
FailureCategory = OutcomeClass | Literal["any", "none"]
Rule = tuple[FailureCategory, Situation, Action]

_SAME_FAILURE_TWICE: Situation = "the same failure occurs twice within 30 s of a start, or after the same samples"
_AFTER_STEP: Situation = "it is the first failure since the newest checkpoint, after at least one step"
_AFTER_STEP_AND_WAITS: Situation = (
    "it is the first failure since the newest checkpoint, after at least one step, and a later job waits"
)

TRAINING_RULES: tuple[Rule, ...] = (
    ("none", "always", "the end"),
    ("any", "the job is cancelled", "the end"),
    ("any", "a new start would fail too", "the end"),
    ("any", "the allocation has ended", "the next job"),
    ("device_oom", "the next stage has more nodes", "new processes on the nodes of the stage"),
    ("device_oom", "a configuration takes less memory", "new processes with smaller micro-batches, or a smaller batch"),
    ("host_oom", "the number of loader processes can be lowered", "new processes with fewer loader processes"),
    ("user", _AFTER_STEP_AND_WAITS, "the next job, once"),
    ("user", _AFTER_STEP, "new processes, once"),
    ("diverged", "the learning rate of the growing batch can be lowered",
     "new processes from the previous checkpoint, with half the learning-rate factor"),
    ("device_fault", "attempts remain, and there is no scheduler", "new processes"),
    ("device_fault", "attempts remain", "the next job, on other nodes"),
    ("device_error", "attempts remain", "new processes"),
    ("disk", "always", "the later jobs are held until `tula train` finds space"),
    ("storage", "attempts remain", "new processes after a pause"),
    ("storage", "a later job waits", "the next job, 10 to 30 minutes later"),
    ("supervisor", _SAME_FAILURE_TWICE, "the end"),
    ("supervisor", "the supervisor has failed `train.max_attempts` times without a newer checkpoint", "the end"),
    ("supervisor", "always", "the next job"),
    ("hung", "attempts remain", "new processes"),
    ("host_limit", _SAME_FAILURE_TWICE, "the end"),
    ("host_limit", "attempts remain", "new processes after a pause"),
    ("port", "attempts remain", "new processes"),
    ("time_limit", "the job saved nothing", "the end"),
    ("time_limit", "always", "the next job"),
    ("preempted", "always", "the next job"),
    ("node_failure", "always", "the next job"),
    ("stage_end", "the next stage has more nodes", "new processes on the nodes of the stage"),
    ("unknown", _SAME_FAILURE_TWICE, "the end"),
    ("unknown", "attempts remain", "new processes"),
    ("signal", _SAME_FAILURE_TWICE, "the end"),
    ("signal", "attempts remain", "new processes"),
    ("peer", "attempts remain", "new processes"),
    ("any", "always", "the end"),
)  # fmt: skip
"""A training. On a machine without a scheduler "the next job" is the next `tula train`."""

_RESTARTS: tuple[Rule, ...] = (
    ("device_fault", "attempts remain, and there is no scheduler", "new processes"),
    ("device_error", "attempts remain", "new processes"),
    ("storage", "attempts remain", "new processes after a pause"),
    ("hung", "attempts remain", "new processes"),
    ("host_limit", "attempts remain", "new processes after a pause"),
    ("port", "attempts remain", "new processes"),
    ("unknown", "attempts remain", "new processes"),
    ("signal", "attempts remain", "new processes"),
    ("peer", "attempts remain", "new processes"),
)
"""Failures after which a job that saves no checkpoint is started again in its allocation."""

PROBE_RULES: tuple[Rule, ...] = (
    ("any", "the job has all its results", "the end"),
    ("none", "the search for the largest batch continues", "new processes"),
    ("none", "the job has all its results", "the end"),
    ("none", "always", "new processes"),  # a script is started once for each batch
    ("any", "the allocation has ended", "the end"),
    ("any", "a new start would fail too", "the end"),
    ("device_oom", "the search for the largest batch continues", "new processes without this batch"),
    ("device_oom", "always", "the end, with the result of the batch"),
    *_RESTARTS,
    ("cancelled", "the job is cancelled", "the end"),
    ("diverged", "no batch was skipped yet", "new processes without this batch"),
    ("user", "no batch was skipped yet, and there is a GPU", "new processes without this batch"),
    ("any", "always", "the end, with the result of the batch"),
)
"""A job that measures batches, in ascending order."""

RESUME_TEST_RULES: tuple[Rule, ...] = (
    ("any", "the job has all its results", "the end"),
    ("none", "the job has all its results", "the end"),
    ("none", "always", "new processes"),  # the next start of the test
    ("any", "the job is cancelled", "the end"),
    ("any", "the allocation has ended", "the end"),
    ("any", "a new start would fail too", "the end"),
    ("supervisor", "always", "the end"),
    ("disk", "always", "the end"),
    ("storage", "attempts remain", "new processes after a pause"),
    ("host_limit", "attempts remain", "new processes after a pause"),
    ("any", "attempts remain", "new processes"),
    ("any", "always", "the end"),
)
"""The test of how a script resumes."""

EVALUATION_RULES: tuple[Rule, ...] = (
    ("none", "always", "the end"),
    ("any", "the allocation has ended", "the end"),
    ("any", "a new start would fail too", "the end"),
    *_RESTARTS,
    ("any", "always", "the end"),
)
"""An evaluation of a training's weights."""

RATE_SEARCH_RULES: tuple[Rule, ...] = (
    ("none", "the job has all its results", "the end"),
    ("none", "always", "new processes"),  # a script is started once for each branch
    *EVALUATION_RULES[1:],
)
"""A search for a learning rate."""

CHECK_RULES: tuple[Rule, ...] = (
    ("none", "always", "the end"),
    ("any", "the allocation has ended", "the end"),
    ("port", "attempts remain", "new processes"),
    ("any", "always", "the end"),
)
"""A check of the nodes of a site."""


def decide_next_action(task: Task, failure: Failure | None, history: History) -> Relaunch | Requeue | Stop:
    """Return what follows an attempt.

    Args:
        failure: why the attempt ended, after `attribute_failure`; None after a success.
    """
    _, situation, action = find_decision_rule(task, failure, history)
    return _ACTIONS[action](_FailureContext(task, failure, history), situation)


def find_decision_rule(task: Task, failure: Failure | None, history: History) -> Rule:
    """Return the row that decides what follows an attempt; arguments as of `decide_next_action`."""
    case = _FailureContext(task, failure, history)
    kinds = ("none",) if failure is None else (failure.outcome, "any")
    return next(rule for rule in RULES[task.kind] if rule[0] in kinds and _SITUATIONS[rule[1]](case))


RULES = {
    "train": TRAINING_RULES,
    "probe": PROBE_RULES,
    "rehearse": RESUME_TEST_RULES,
    "evaluate": EVALUATION_RULES,
    "rates": RATE_SEARCH_RULES,
    "check": CHECK_RULES,
}
"""The tables by the kind of a task."""


def attribute_failure(task: Task, failure: Failure | None, history: History) -> Failure | None:
    """Return the failure, with a device error attributed to the program or the job instead if that is the likelier cause.

    A repeated device error is attributed to the program. A missing GPU is a fault of the node only if other nodes have GPUs.
    """
    if failure is None:
        return None
    lacks_gpu = failure.outcome == "device_fault" and failure.fault == "no_gpu" and not history.has_seen_gpus
    comes_again = failure.outcome == "device_error" and any(
        attempt.outcome == "device_error" for attempt in history.similar
    )
    if not (lacks_gpu or comes_again):
        return failure
    note = f"; {describe_advice(failure)}" if lacks_gpu else ", as in the previous attempt"
    return failure.model_copy(
        update={"outcome": "user", "message": f"{failure.description}{note}", "permanent": task.has_checkpoints}
    )


def is_resumed_by_next_job(attempt: Attempt) -> bool:
    """Return whether the next job of the chain resumes a training, instead of the job whose attempt has ended."""
    if attempt.decision is not None:
        return isinstance(attempt.decision, Requeue)
    return attempt.outcome in ALLOCATION_LOST or (attempt.outcome == "device_fault" and bool(attempt.allocation))


# --- Situations


@dataclass(frozen=True)
class _FailureContext:
    """A task with its failure and history: the input of the situations and actions of the tables."""

    task: Task
    failure: Failure | None
    history: History

    @property
    def outcome(self) -> OutcomeClass | None:
        return None if self.failure is None else self.failure.outcome

    @property
    def training(self) -> TrainTask:
        assert isinstance(self.task, TrainTask)
        return self.task

    @property
    def probe(self) -> ProbeTask:
        assert isinstance(self.task, ProbeTask)
        return self.task

    def has_attempts_left(self) -> bool:
        """Return whether the limit of restarts is not reached.

        Failures of the file system are not the program's fault: they count only among themselves and in their allocation.
        """
        history = self.history
        attempts = [*history.earlier, history.attempt.model_copy(update={"failure": self.failure})]
        if self.outcome == "storage":
            counted = sum(each.outcome == "storage" and each.allocation == history.allocation for each in attempts)
        else:
            counted = sum(each.outcome in COUNTED_OUTCOMES and each.outcome != "storage" for each in attempts)
        return counted < self.task.max_attempts

    def compute_fewer_workers(self) -> int | None:
        """Return fewer loader processes, or None: half, once; for `auto` MIN_AUTO_WORKERS, then half each time."""
        task = self.training
        if task.workers == "auto":
            return MIN_AUTO_WORKERS
        workers = task.spec.train.workers
        if workers == "auto":
            return task.workers // 2 or None
        return task.workers // 2 if task.workers and task.workers >= workers else None

    def compute_lower_lr_limit(self) -> float | None:
        """Return half the learning-rate factor at which a growing batch diverged; None the second time, or at factor 1."""
        factor = self.history.lr_factor or 1.0
        if self.training.max_lr_factor is not None or factor <= 1:
            return None
        return max(1.0, factor / 2)

    def is_first_failure_after_step(self) -> bool:
        """Return whether a failure of the program may be transient: the first since the newest checkpoint, after at least one step."""
        history = self.history
        stepped = history.reached is not None or history.progress != history.attempt.progress
        return stepped and all(attempt.outcome != "user" for attempt in history.earlier)

    def find_repeated_failure(self) -> Stop | None:
        """Return why a training must not be started again, because it fails repeatedly in the same way; else None."""
        last, previous = self.history.attempt, self.history.earlier[-1] if self.history.earlier else None
        if previous is None or previous.failure is None or self.failure is None:
            return None
        if self.outcome == "signal" and not {self.failure.signal, previous.failure.signal} <= set(CRASH_SIGNALS):
            return None
        if previous.outcome != self.outcome or not previous.progress == last.progress == self.history.progress:
            return None
        if (
            self.history.reached is not None
            and self.history.reached == previous.reached
            and _mask_varying_parts(self.failure) == _mask_varying_parts(previous.failure)
        ):
            return Stop(why="same_failure", samples=self.history.reached)
        seconds = max(each.compute_duration_seconds() for each in (previous, last))
        return Stop(why="same_failure", seconds=seconds) if seconds <= MAX_STARTUP_SECONDS else None

    def has_saved_nothing(self) -> bool:
        """Return whether the whole allocation saved nothing; an earlier attempt in it may have, or storage failed."""
        attempts = self.history.of_allocation
        began = attempts[0] if attempts else self.history.attempt
        storage_failed = any(attempt.outcome == "storage" for attempt in attempts)
        return began.progress == self.history.progress and not storage_failed

    def count_failed_supervisors(self) -> int:
        """Return how many supervisors have failed since the newest checkpoint; 0 if the last allocation saved one."""
        history = self.history
        if history.of_allocation and history.of_allocation[0].progress != history.progress:
            return 0
        # The first is the failure that is being handled.
        return 1 + sum(attempt.outcome == "supervisor" for attempt in history.earlier)


def _mask_varying_parts(failure: Failure) -> str:
    """Return the message of a failure without numbers and the host, which differ between processes."""
    return re.sub(r"\d+", "", failure.message.replace(failure.host or "\0", ""))


_SITUATIONS: dict[Situation, Callable[[_FailureContext], bool]] = {
    "always": lambda _case: True,
    "the job is cancelled": lambda case: (
        case.history.cancelled or (case.outcome == "cancelled" and case.task.has_checkpoints)
    ),
    "the job has all its results": lambda case: case.history.finished,
    "a new start would fail too": lambda case: case.failure is not None and case.failure.permanent,
    "the allocation has ended": lambda case: case.history.allocation_ended,
    "the next stage has more nodes": lambda case: case.training.next_stage is not None,
    "a configuration takes less memory": lambda case: case.history.fallback is not None,
    "the number of loader processes can be lowered": lambda case: case.compute_fewer_workers() is not None,
    "the learning rate of the growing batch can be lowered": lambda case: case.compute_lower_lr_limit() is not None,
    "attempts remain": _FailureContext.has_attempts_left,
    "attempts remain, and there is no scheduler": lambda case: not case.history.allocation and case.has_attempts_left(),
    "a later job waits": lambda case: case.history.later_jobs > 0,
    _AFTER_STEP_AND_WAITS: lambda case: case.is_first_failure_after_step() and case.history.later_jobs > 0,
    _AFTER_STEP: _FailureContext.is_first_failure_after_step,
    _SAME_FAILURE_TWICE: lambda case: case.find_repeated_failure() is not None,
    "the job saved nothing": _FailureContext.has_saved_nothing,
    "the supervisor has failed `train.max_attempts` times without a newer checkpoint": lambda case: (
        case.count_failed_supervisors() >= case.training.spec.train.max_attempts
    ),
    "no batch was skipped yet": lambda case: not case.probe.skip,
    "no batch was skipped yet, and there is a GPU": lambda case: (
        not case.probe.skip and (case.failure is None or case.failure.fault != "no_gpu")
    ),
    "the search for the largest batch continues": lambda case: case.history.next_trial is not None,
}


# --- Actions


def _relaunch_on_next_stage(case: _FailureContext, _: Situation) -> Relaunch:
    stage = case.training.next_stage
    assert stage is not None
    return Relaunch(nodes=stage.nodes, nodes_before=case.task.nodes, stage_batch=stage.batch)


def _delay_next_job(case: _FailureContext, _: Situation) -> Requeue:
    jobs = {attempt.allocation for attempt in case.history.earlier if attempt.outcome == "storage"}
    return Requeue(first="delay", minutes=compute_start_delay_minutes(len(jobs | {case.history.allocation}) + 1))


def _make_stop(case: _FailureContext, situation: Situation) -> Stop:
    match situation:
        case "the job saved nothing":
            return Stop(why="nothing_saved", setting="cluster.minutes")
        case "the supervisor has failed `train.max_attempts` times without a newer checkpoint":
            return Stop(why="supervisors_failed", count=case.count_failed_supervisors())
        case "the job is cancelled":
            return Stop(why="cancelled")
    return (case.find_repeated_failure() if situation == _SAME_FAILURE_TWICE else None) or Stop()


_ACTIONS: dict[Action, Callable[[_FailureContext, Situation], Relaunch | Requeue | Stop]] = {
    "new processes": lambda _case, _: Relaunch(),
    "new processes after a pause": lambda _case, _: Relaunch(pause=True),
    "new processes, once": lambda _case, _: Relaunch(after_progress=True),
    "new processes on the nodes of the stage": _relaunch_on_next_stage,
    "new processes with smaller micro-batches, or a smaller batch": lambda case, _: Relaunch(
        fallback=case.history.fallback
    ),
    "new processes with fewer loader processes": lambda case, _: Relaunch(
        workers=case.compute_fewer_workers(), workers_before=case.training.workers
    ),
    "new processes from the previous checkpoint, with half the learning-rate factor": lambda case, _: Relaunch(
        max_lr_factor=case.compute_lower_lr_limit()
    ),
    "new processes without this batch": lambda case, _: Relaunch(skip=case.history.current_batch),
    "the next job": lambda _case, _: Requeue(),
    "the next job, once": lambda _case, _: Requeue(after_progress=True),
    "the next job, on other nodes": lambda _case, _: Requeue(first="exclude"),
    "the next job, 10 to 30 minutes later": _delay_next_job,
    "the later jobs are held until `tula train` finds space": lambda _case, _: Requeue(first="hold"),
    "the end": _make_stop,
    "the end, with the result of the batch": lambda _case, _: Stop(why="batch_failed"),
}
