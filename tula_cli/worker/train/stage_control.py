"""Decisions on the next stage from the gradient noise of a running training (`train.ramp: noise`).

The noise is measured at the end of an epoch if a stage would start before the next measurement. The stage then starts
as planned, or is postponed to that measurement, or is cancelled; the rule is in `models/ramp/by_noise.py`. A decision
always concerns future steps, and is written to the training's stages.jsonl before any rank acts on it. A later attempt
that reaches the same point uses the recorded decision, so that an interrupted training is bit for bit the same as an
uninterrupted one.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tula_cli.models.ramp.by_noise import apply_decisions, decide_stage, find_next_stage
from tula_cli.run.directory import RunDir
from tula_cli.run.records.recommendations import Stage
from tula_cli.run.records.results import StageDecision
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.sections import NOISE_BATCHES
from tula_cli.worker.build.data import Position
from tula_cli.worker.train import gradient_noise
from tula_cli.worker.train.batch_partition import build_ramp_from_stages
from tula_cli.worker.train.loop import Trainer
from tula_cli.worker.train.training_log import TrainingLog

SHARE, FEWEST = 0.25, 16
"""Share of an epoch's samples for a measurement that the job has not requested; and its minimum micro-batches per
rank."""


class StageControl:
    """The stages of one training, on every rank.

    Args:
        run: the run directory, which stores the decisions.
        task: with the stages as they were planned.
        trainer: whose ramp follows the decisions.
    """

    def __init__(self, run: RunDir, task: TrainTask, trainer: Trainer) -> None:
        self.files, self.task, self.trainer = run.training(task.signature), task, trainer
        self.acts = task.spec.train.stages == "noise" and len(task.stages) > 1
        self.known = self._read_decisions() if self.acts else []
        self.taken: list[StageDecision] = []  # of these, in effect

    def _read_decisions(self) -> list[StageDecision]:
        """Return the decisions of earlier attempts, read by rank 0, on every rank."""
        ranks = self.trainer.ranks
        lines = [row.model_dump_json() for row in self.files.stage_decisions()] if ranks.is_first else []
        return [StageDecision.model_validate_json(line) for line in ranks.gather("\n".join(lines))[0].splitlines()]

    def resume(self, position: Position, *, needs_evaluation: bool) -> None:
        """Apply the decisions that were in effect at a checkpoint; called before its state is restored.

        Args:
            position: of the checkpoint.
            needs_evaluation: whether the epoch that ends there is not yet evaluated, so that its decision is not in
                effect.
        """
        passed = position.epoch * self._size + position.done
        self._apply([decision for decision in self.known if decision.passed < passed + (not needs_evaluation)])

    @property
    def _size(self) -> int:
        return len(self.trainer.datasets.train)

    @property
    def _total(self) -> int:
        return self.task.spec.train.epochs * self._size

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages up to the one with the training's target batch, after all decisions in effect."""
        stages = apply_decisions(self.task.stages, self.taken, total=self._total, size=self._size)
        below = sum(stage.batch < self.trainer.sizes.batch for stage in stages)
        return stages[: below + 1]

    def _apply(self, decisions: list[StageDecision]) -> None:
        self.taken += decisions
        if decisions:
            self.trainer.use_ramp(build_ramp_from_stages(self.task, self.stages, self.trainer.ranks.world, self._size))

    # --- at the end of an epoch

    def measure_and_decide(self, log: TrainingLog, *, between: Callable[[], None]) -> None:
        """If due, write a row with the gradient noise scale, and decide by it; every rank must call this."""
        noise = self.measure(between)
        if noise is not None:
            log.add("noise", batch=self.trainer.batch, **noise)
            log.log_stage_decision(self.decide(noise))

    def measure(self, between: Callable[[], None]) -> dict[str, Any] | None:
        """Return the noise if the job requests it now, or a stage is to come; else None. Every rank must call this."""
        train, trainer = self.task.spec.train, self.trainer
        if not train.measures_noise:
            return None
        if "gradient_noise" in train.diagnostics:
            return gradient_noise.measure_gradient_noise(trainer, batches=NOISE_BATCHES, between=between)
        if self._next_stage() is None:
            return None
        some = round(SHARE * self._size / (trainer.micro_batch * trainer.ranks.world))
        return gradient_noise.measure_gradient_noise(
            trainer, batches=min(NOISE_BATCHES, max(FEWEST, some)), between=between
        )

    def _next_stage(self) -> Stage | None:
        """Return the stage that starts before the next measurement; None if there is none."""
        passed = self.trainer.samples_passed
        return find_next_stage(self.stages, passed=passed, end=passed + self._size) if self.acts else None

    def decide(self, noise: Mapping[str, Any]) -> StageDecision | None:
        """Decide on the coming stage by the measured noise, equally on every rank; None if no stage is to come."""
        stage = self._next_stage() if self.task.spec.train.measures_noise else None
        if stage is None:
            return None
        row = self._load_or_decide(stage, noise) if self.trainer.ranks.is_first else None
        text = self.trainer.ranks.gather("" if row is None else row.model_dump_json())[0]
        row = StageDecision.model_validate_json(text)
        self._apply([row])
        return row

    def _load_or_decide(self, stage: Stage, noise: Mapping[str, Any]) -> StageDecision:
        """Return the recorded decision for this position, or make one and write it first. Rank 0 alone."""
        passed = self.trainer.samples_passed
        for row in self.known:
            if row.passed == passed and row.batch == stage.batch:
                return row
        row = decide_stage(
            stage,
            noise={name: noise[name] for name in ("scale", "low", "high") if name in noise},
            reference=self.task.spec.train.reference_batch,
            passed=passed,
            size=self._size,
            total=self._total,
        )
        self.known.append(row)
        self.files.write_stage_decisions(self.known)
        return row
