"""The program that the ranks of a task run. Here tula's own worker; the user's scripts are in `scripts/`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tula_cli.cluster.allocation import POLL_SECONDS, Allocation
from tula_cli.cluster.rank_processes import RankCommand, RankLaunchPlan, find_rendezvous_address, uses_torchrun
from tula_cli.run.directory import RunDir
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import Attempt, LeaderCommand
from tula_cli.run.records.recommendations import TimeParts
from tula_cli.run.records.results import MicroBatches
from tula_cli.run.records.tasks import Task


class RankMonitor:
    """Observes the ranks of one attempt in one supervisor.

    This one observes nothing, because the ranks of tula's worker record their progress and save by themselves.
    """

    @property
    def can_save(self) -> bool:
        """Whether the supervisor can ask the ranks for a checkpoint before it ends them."""
        return False

    def record_start(self) -> None:
        """Record that the ranks have started."""

    def record_progress(self) -> None:
        """Record what the ranks have reported since the last call."""

    def record_final_reports(self) -> None:
        """Record what the ranks reported before they exited."""

    def undo_file_changes(self) -> str:
        """Undo changes of the ranks to files outside their folder; return a description of them, or empty."""
        return ""

    def write_allocation_end(self, ends_at: float) -> None:
        """Announce to the supervisors of all nodes when the allocation ends (Unix time)."""

    def read_allocation_end(self) -> float | None:
        """Return the announced end of the allocation (Unix time); None if there is none."""
        return None

    def request_checkpoint(self) -> None:
        """Ask the ranks for a checkpoint."""

    def has_saved_since(self, *, since: float) -> bool:
        """Return whether a checkpoint was written after `since` (Unix time) and is complete."""
        return False

    def find_reason_to_kill(self) -> Failure | None:
        """Return why the ranks must be killed, or None."""
        return None

    def describe_missing_step(self) -> str:
        """Describe that no step was seen; empty if one was, or if steps are not observed."""
        return ""

    def get_poll_interval(self, allocation: Allocation) -> float:
        """Return the seconds between two polls of the ranks."""
        return POLL_SECONDS


class RankStarter(Protocol):
    """Makes the commands with which one supervisor starts its ranks of one attempt."""

    def make_rank_commands(self, log: Path) -> list[RankCommand]:
        """Return the processes that this supervisor starts, which write to `log`."""


@dataclass(frozen=True)
class RankProgram(ABC):
    """The program that the ranks of a task run, and what a supervisor has to do for it."""

    run: RunDir
    task: Task

    @abstractmethod
    def find_rank_rendezvous(self) -> str:
        """Return the address (host:port) where the ranks meet; empty if they find each other by a file.

        Raises:
            JobFailed: the configured network interface does not exist.
        """

    def make_leader_command(self, *, attempt: int, rendezvous: str) -> LeaderCommand:
        """Return the command to start the ranks of an attempt now."""
        return LeaderCommand(task=self.task.id, attempt=attempt, ranks=self.task.ranks, meeting=rendezvous)

    @abstractmethod
    def make_starter(self, allocation: Allocation, command: LeaderCommand) -> RankStarter:
        """Return the object that makes the commands of a supervisor's ranks."""

    @abstractmethod
    def make_monitor(self, allocation: Allocation, command: LeaderCommand) -> RankMonitor:
        """Return the monitor of the ranks that a supervisor has started."""

    @abstractmethod
    def find_clean_exit_failure(self) -> Failure | None:
        """Return why ranks failed that all exited with code 0; None if they have succeeded."""

    @abstractmethod
    def record_attempt_results(self, command: LeaderCommand, failure: Failure | None) -> Failure | None:
        """Record what follows from the files of an attempt that has ended; return why it failed, corrected by them."""

    def count_samples_reached(self, command: LeaderCommand, attempt: Attempt) -> int | None:
        """Return the samples trained when an attempt ended; None before a first step, and of other tasks."""
        return None

    def recover_lost_attempt(self, lost: Attempt) -> None:  # noqa: B027 - only a script's training has progress to record
        """Record the progress of an attempt whose supervisor was lost before it could do so."""

    def list_micro_batch_splits(self) -> MicroBatches | None:
        """Return the possible splits of the micro-batch for each out-of-memory fallback; None if unknown."""
        return None

    def make_summary_fields(self, attempts: Sequence[Attempt], seconds: float) -> dict[str, Any]:
        """Return the fields that this program adds to a training's summary; its attempts took `seconds`."""
        return {}

    @property
    def log_patterns(self) -> list[str]:
        """Regular expressions of log lines that must be kept when the log is cut."""
        return []

    def preview_command(self) -> str:
        """Return the shell command of the first process, without side effects; empty if it is tula's own."""
        return ""


class WorkerProgram(RankProgram):
    """tula's worker: it trains, probes, evaluates and checks, and writes its results and checkpoints itself."""

    def find_rank_rendezvous(self) -> str:
        return find_rendezvous_address(self.task) if uses_torchrun(self.task) else ""

    def make_starter(self, allocation: Allocation, command: LeaderCommand) -> RankLaunchPlan:
        return RankLaunchPlan(self.run, allocation, self.task, command)

    def make_monitor(self, allocation: Allocation, command: LeaderCommand) -> RankMonitor:
        return RankMonitor()

    def find_clean_exit_failure(self) -> Failure | None:
        is_done = self.run.is_finished(self.task)
        return None if is_done else Failure(outcome="unknown", message="the ranks ended without a result")

    def record_attempt_results(self, command: LeaderCommand, failure: Failure | None) -> Failure | None:
        return failure  # the ranks have recorded their results themselves

    def count_samples_reached(self, command: LeaderCommand, attempt: Attempt) -> int | None:
        training = self.run.find_training(self.task)
        if training is None:
            return None
        rows = training.read_newest_metrics()
        steps: list[int] = [
            row["samples"] for row in rows if row["kind"] == "step" and row["time"] >= attempt.started_at
        ]
        return steps[-1] if steps else None

    def list_micro_batch_splits(self) -> MicroBatches | None:
        training = self.run.find_training(self.task)
        return None if training is None else training.read_micro_batches()

    def make_summary_fields(self, attempts: Sequence[Attempt], seconds: float) -> dict[str, Any]:
        """Return the breakdown of the seconds, from metric rows up to the newest checkpoint."""
        training = self.run.find_training(self.task)
        assert training is not None
        rows, tuning = list(training.read_metrics()), training.read_tuning()
        steps = [row for row in rows if row["kind"] == "step"]
        parts = {
            "steps": sum(row["count"] * row["step_time"] for row in steps),
            "evaluation": sum(row["eval_seconds"] for row in rows if row["kind"] == "epoch"),
            "checkpoints": sum(row["seconds"] for row in rows if row["kind"] == "save"),
            "branches": sum(branch.seconds for branch in tuning.branches) if tuning else 0.0,
        }
        data, rest = sum(row["count"] * row["data_wait"] for row in steps), max(0.0, seconds - sum(parts.values()))
        return {"actual_parts": TimeParts(**parts, data=data, rest=rest)}
