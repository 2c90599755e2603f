"""The search for a learning rate with a user's script: each branch is a separate start, from a copy of one checkpoint.

`models.rate_search` decides which branches are trained, as in tula's own loop. The shim ends each branch after its
samples, and records the loss of each step: only the script could evaluate its model on other samples.
"""

import math
import shutil
import time
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.scripts import checkpoints
from tula_cli.cluster.scripts.probe import merge_gradient_stats
from tula_cli.cluster.scripts.resume_test import find_learning_rates
from tula_cli.cluster.scripts.start import ScriptProgram, compute_script_learning_rate, make_script_failure
from tula_cli.cluster.scripts.watch import ScriptMonitor, find_last_script_line
from tula_cli.models import claims, rate_search
from tula_cli.models.efficiency import estimate_noise_scale
from tula_cli.models.rate_search import RateArm, SearchPlan
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.results import PlannedBranch, RateBranch, RateSearch
from tula_cli.run.records.scripts import BranchPlan, KillPlan
from tula_cli.run.records.tasks import RateSearchTask
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.job import JobSpec, compute_lr_scale

STEPS_AFTER_SAVE = 3
"""Steps that are trained after the checkpoint, to see the learning rate that a branch has to resume with."""
JUDGED_SHARE = 0.25
"""Share of a branch, at its end, whose mean loss it is judged by."""
NORMS_SHARE = 0.25
"""Share of the first branch, at its start, whose gradient norms give the noise scale: its learning rate still rises from
that of the checkpoint."""
MAX_LR_RATIO = 1.25
"""Ratio of an observed to the requested learning rate from which on the script does not follow its command line."""


class ScriptRateSearch(ScriptProgram):
    """A search for a learning rate with a script, run by the leader of its supervisors."""

    task: RateSearchTask
    records_steps = True

    # --- Starts of the script

    def make_leader_command(self, *, attempt: int, rendezvous: str) -> LeaderCommand:
        """Return the command for the next branch, with a copy of the checkpoint in a separate folder.

        It is the training up to the checkpoint if there is none yet, or none any more; all branches follow it.
        """
        command = super().make_leader_command(attempt=attempt, rendezvous=rendezvous)
        arm, origin = self._find_next_arm(), self._folder / "start"
        has_checkpoint = self._find_newest_checkpoint(origin, self._reference_batch) is not None
        if arm is None or not has_checkpoint:
            shutil.rmtree(self._folder, ignore_errors=True)
            start = PlannedBranch(rule=None, out=str(origin))
            return command.model_copy(update={"batch": self._reference_batch, "branch": start})
        folder = self._folder / f"{arm.rule}-{arm.batch}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(origin, folder, ignore_dangling_symlinks=True)
        update = {
            "batch": arm.batch,
            "branch": PlannedBranch(rule=arm.rule, out=str(folder)),
            "checkpoint": str(self._find_newest_checkpoint(folder, arm.batch)),
        }
        return command.model_copy(update=update)

    def make_monitor(self, allocation: Allocation, command: LeaderCommand) -> ScriptMonitor:
        return ScriptMonitor(self, command, self.list_ranks(allocation))

    def get_output_folder(self, command: LeaderCommand) -> Path:
        return Path(_get_branch(command).out)

    def make_spec(self, command: LeaderCommand) -> JobSpec:
        rule = _get_branch(command).rule
        return self.task.spec if rule is None else rate_search.make_job_of_rule(self.task.spec, rule)

    def make_kill_plan(self, command: LeaderCommand) -> KillPlan | None:
        """Return how the training before the branches is killed: after its first checkpoint that is late enough."""
        if _get_branch(command).rule is not None:
            return None
        first = self.plan.count_start_steps(self._reference_batch)
        return checkpoints.make_kill_plan(
            self.script,
            self.list_path_values(self.get_output_folder(command), batch=self._reference_batch, nodes=self.task.nodes),
            workdir=Path(self.task.workdir),
            after=STEPS_AFTER_SAVE,
            ask_at=first,
            first=first,
        )

    def make_branch_plan(self, command: LeaderCommand) -> BranchPlan:
        if _get_branch(command).rule is None:
            return BranchPlan(steps=None, factor=1.0)
        steps, record = self.plan.count_branch_steps(command.batch), self.run.read_rate_search(self.task.key)
        is_first = record is None or not record.branches
        return BranchPlan(
            steps=steps,
            factor=compute_lr_scale(self.make_spec(command), command.batch),
            norms=math.ceil(NORMS_SHARE * steps) if is_first else 0,
        )

    def find_reason_to_stop(self, command: LeaderCommand) -> Failure | None:
        """Return why the training before the branches is stopped: it saves no checkpoint; None if it is not."""
        heartbeat = self.get_attempt(command).read_heartbeat(0)
        if heartbeat is None or _get_branch(command).rule is not None:
            return None
        trained = heartbeat.step * command.batch
        max_samples = self.plan.start + rate_search.BRANCHES_SHARE * self.plan.total
        if trained <= max_samples + STEPS_AFTER_SAVE * command.batch:
            return None
        if self.get_attempt(command).read_kill() is not None:
            return None
        message = f"no checkpoint from which branches can start after {trained} samples: {_SAVE_HINT}"
        return make_script_failure(None, message, permanent=True)

    def preview_command(self) -> str:
        start = PlannedBranch(rule=None, out=str(self._folder / "start"))
        return self.preview_command_at_batch(self._reference_batch, branch=start)

    # --- Plan and files of the search

    @cached_property
    def plan(self) -> SearchPlan:
        task = self.task
        return rate_search.plan_rate_search(
            task.spec, task.batches, dataset_size=self._epoch_samples, save_every=task.save_every
        )

    @property
    def _epoch_samples(self) -> int:
        assert self.task.dataset_size is not None, "the command line sets it for a script"
        return self.task.dataset_size

    @property
    def _reference_batch(self) -> int:
        return self.task.spec.train.reference_batch

    @property
    def _folder(self) -> Path:
        """The folder for the script's own files, which is removed at the end."""
        return (self.run.path / "script" / self.task.id).absolute()

    def _find_next_arm(self) -> RateArm | None:
        record = self.run.read_rate_search(self.task.key)
        if record is None:
            return None
        return rate_search.find_next_arm(self.task.spec, self.task.batches, record.branches, record.start_loss)

    def _find_newest_checkpoint(self, out: Path, batch: int) -> Path | None:
        resume = self.script.resume
        assert resume is not None
        values = self.list_path_values(out, batch=batch, nodes=self.task.nodes)
        return checkpoints.find_newest_checkpoint(resume, values, workdir=Path(self.task.workdir), since=0.0)[0]

    # --- Observations of a start

    def record_results(self, command: LeaderCommand, failure: Failure | None) -> Failure | None:
        """Record the checkpoint or the branch of a start, and the end of the search after the last branch."""
        if self.run.is_cancelled(self.task.job):
            return failure
        attempt, record = self.get_attempt(command), self.run.read_rate_search(self.task.key)
        if broken := claims.describe_unmet_expectations(attempt.read_results(), resumed=bool(command.checkpoint)):
            return make_script_failure(failure, broken, permanent=True)
        if _get_branch(command).rule is None:
            result = self._observe_start(command, attempt, failure)
        else:
            assert record is not None
            result = self._observe_branch(command, attempt, failure, record)
        if isinstance(result, Failure):
            return result
        self.run.write_rate_search(result)
        if self._find_next_arm() is None:
            self.run.write_rate_search(result.model_copy(update={"finished": True}))
            shutil.rmtree(self._folder, ignore_errors=True)
        elif command.checkpoint:
            shutil.rmtree(_get_branch(command).out, ignore_errors=True)
        return None

    def _observe_start(
        self, command: LeaderCommand, attempt: ScriptAttempt, failure: Failure | None
    ) -> RateSearch | Failure:
        """Return the record of a search whose branches can start, or why they cannot."""
        batch, killed, losses = command.batch, attempt.read_kill(), self._read_losses(attempt, command.ranks)
        if killed is None or not killed.killed:
            if failure is not None:
                return failure
            message = f"the script ended after {len(losses) * batch} samples without a checkpoint to branch from"
            return make_script_failure(failure, f"{message}: {_SAVE_HINT}", permanent=True)
        if self._find_newest_checkpoint(Path(_get_branch(command).out), batch) is None:
            return make_script_failure(None, "the checkpoint from which branches would start is incomplete")
        before = losses[: killed.steps][-max(rate_search.MIN_STEPS, round(JUDGED_SHARE * self.plan.length / batch)) :]
        if all(loss is None for loss in losses):
            return make_script_failure(None, NO_LOSS, permanent=True)
        finite_losses = [loss for loss in before if loss is not None]
        if len(finite_losses) < len(before):
            message = f"the training diverges at script.reference.batch {batch}"
            return Failure(outcome="diverged", message=message, permanent=True)
        rows = [row for row in attempt.read_rows(0) if row["kind"] == "row"]
        next_lr = find_learning_rates(rows, killed.steps)["next_lr"]
        return RateSearch(
            key=self.task.key,
            nodes=self.task.nodes,
            batches=self.task.batches,
            reference_batch=batch,
            samples=len(losses) * batch,
            total=self.plan.total,
            start_epoch=killed.steps * batch / self._epoch_samples,
            start_loss=fmean(finite_losses),
            start_lr=next_lr,
        )

    def _observe_branch(
        self, command: LeaderCommand, attempt: ScriptAttempt, failure: Failure | None, record: RateSearch
    ) -> RateSearch | Failure:
        """Return the record with the branch added, or why the branch was not trained to its end."""
        plan, rule = self.make_branch_plan(command), _get_branch(command).rule
        assert plan.steps is not None
        assert rule is not None
        losses = self._read_losses(attempt, command.ranks)
        has_diverged = bool(losses) and losses[-1] is None
        if failure is not None and not has_diverged:
            return failure
        if problem := self._describe_ignored_lr(attempt, record, plan.factor):
            return make_script_failure(failure, problem, permanent=True)
        if len(losses) < plan.steps and not has_diverged:
            line = find_last_script_line(self.run.get_log_path(self.task.id, command.attempt))
            message = f"the branch ended after {len(losses)} of {plan.steps} steps; last line of the script: {line}"
            return make_script_failure(failure, message, permanent=True)
        judged = losses[-max(2, math.ceil(JUDGED_SHARE * plan.steps)) :]
        finite_losses = [loss for loss in judged if loss is not None]
        samples = len(losses) * command.batch
        branch = RateBranch(
            arm=f"{rule}-{command.batch}",
            epochs=samples / self._epoch_samples,
            samples=samples,
            loss=fmean(finite_losses) if len(finite_losses) == len(judged) else None,
            top1=None,
            diverged=len(finite_losses) < len(judged),
            seconds=time.time() - attempt.plan_path.stat().st_mtime,
            batch=command.batch,
            rule=rule,
            factor=plan.factor,
            lr=self._find_branch_lr(command, record, plan.factor),
        )
        update: dict[str, object] = {"branches": (*record.branches, branch), "samples": record.samples + samples}
        if plan.norms:
            update["noise"] = _estimate_noise(attempt, command.batch)
        return record.model_copy(update=update)

    def _find_branch_lr(self, command: LeaderCommand, record: RateSearch, factor: float) -> float:
        """Return the learning rate of the command line; with {lr_factor}, a multiple of that at the checkpoint (or of 1)."""
        given = compute_script_learning_rate(self.make_spec(command), command.batch)
        return factor * (record.start_lr or 1.0) if given is None else given

    @staticmethod
    def _describe_ignored_lr(attempt: ScriptAttempt, record: RateSearch, factor: float) -> str:
        """Describe that a branch did not train at its learning rate; empty if it did, or has none to compare.

        A schedule that is restored from the checkpoint may set the earlier learning rate again, at its next step.
        """
        rates = [row["lr"] for row in attempt.read_rows(0) if row["kind"] == "row" and row["lr"]]
        if not rates or not record.start_lr:
            return ""
        expected = factor * record.start_lr
        fallen = (
            after
            for before, after in pairwise(rates)
            if factor > MAX_LR_RATIO and _are_learning_rates_close(before, factor * after)
        )
        wrong = next(fallen, None) if _are_learning_rates_close(rates[0], expected) else rates[0]
        if wrong is None:
            return ""
        return (
            f"resumed with {factor:.3g} times the learning rate, the script uses {wrong:.4g} instead of {expected:.4g};"
            " set the learning rate of the command line after the optimizer and its schedule have loaded their checkpoint"
        )

    @staticmethod
    def _read_losses(attempt: ScriptAttempt, ranks: int) -> Sequence[float | None]:
        """Return the mean loss of each step over the ranks; None if it was not finite or not observed."""
        losses_by_rank = [
            {row["step"]: row["loss"] for row in attempt.read_rows(rank) if row["kind"] == "row"}
            for rank in range(ranks)
        ]
        steps = ([losses[step] for losses in losses_by_rank if step in losses] for step in sorted(losses_by_rank[0]))
        return [None if None in losses else fmean(losses) for losses in steps]


def _estimate_noise(attempt: ScriptAttempt, batch: int) -> tuple[float, float, float | None] | None:
    """Return the gradient noise scale with its 90 % interval, from the norms that the ranks recorded; None without them."""
    ranks = attempt.read_results()
    stats = merge_gradient_stats(ranks, local_batch=batch // max(1, len(ranks)), batch=batch)
    noise = None if stats is None else estimate_noise_scale([stats])
    if noise is None or not math.isfinite(noise.scale):
        return None
    return noise.scale, noise.low, noise.high if math.isfinite(noise.high) else None


_SAVE_HINT = (
    "set script.save so that tula can request a checkpoint (for example SIGUSR1), or make the script save more often"
)
NO_LOSS = "no loss was observed, because no backward pass of torch starts from a single value; report the loss in the training loop: tula_hooks.step(loss=loss)"


def _are_learning_rates_close(observed: float, expected: float) -> bool:
    return 1 / MAX_LR_RATIO <= observed / expected <= MAX_LR_RATIO


def _get_branch(command: LeaderCommand) -> PlannedBranch:
    assert command.branch is not None
    return command.branch
