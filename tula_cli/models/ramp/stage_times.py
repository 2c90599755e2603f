"""The duration of the steps of a batch-size ramp (`train.ramp`): sum_k n_k t(N_k, B_k) in place of n t(N, B)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tula_cli.errors import SpecError
from tula_cli.models.choice.columns import Flags, Floats, Ints, to_columns, to_configs
from tula_cli.models.choice.grid import Config
from tula_cli.models.cost import WorkCount
from tula_cli.models.overheads import OverheadModel
from tula_cli.models.ramp.by_noise import NoisePath
from tula_cli.models.ramp.stage_nodes import (
    Change,
    Worth,
    assign_nodes_to_stages,
    build_ramp_on_nodes,
    choose_stage_nodes,
    describe_error,
    describe_stage_refusal,
    list_allowed_stage_nodes,
    list_nodes_named_by_stages,
)
from tula_cli.models.ramp.stages import Ramp
from tula_cli.models.time.steptime import Estimate
from tula_cli.run.records.recommendations import Stage, StageSteps
from tula_cli.spec.job import JobSpec


def make_change_costs(overheads: OverheadModel, gpus_per_node: int, queue: float) -> Callable[[Config], Change]:
    """Return a function from a configuration to the duration of a change to its nodes (seconds).

    It consists of a start and the wait for nodes.
    """

    @functools.cache
    def change(config: Config) -> Change:
        nodes, batch = to_columns([config])
        overheads_here = overheads.overheads_at(nodes, batch // (nodes * gpus_per_node), batch)
        return Change(float(overheads_here.startup[0]), queue)

    return change


@dataclass
class StageTimes:
    """The stages of each configuration, with their nodes and step times.

    A stage whose step time is unknown is assumed to take that of the training's batch, which is longer.
    """

    spec: JobSpec
    dataset_size: int
    predicted: Callable[[Sequence[Config]], Sequence[Estimate]]  # step times, all at once
    describe_why_unknown: Callable[[Config], str]  # why there is none; empty where there is
    noise: NoisePath | None = None  # of the gradients
    describe_why_too_large: Callable[[Config], str] = lambda _: (
        ""
    )  # why a batch does not fit the memory; empty where it does
    change: Callable[[Config], Change] = lambda _: Change(0.0)  # what going on with other nodes takes
    by: Worth = "time"  # that the nodes of stages are chosen by
    _known: dict[Config, tuple[StageSteps, ...]] = field(default_factory=dict)

    def describe_why_infeasible(self, config: Config) -> str:
        """Return why a configuration cannot be trained with the stages that the job names; empty if it can."""
        if self.spec.train.stages is None:
            return ""
        try:
            assign_nodes_to_stages(
                self._ramp(config).stages, list_nodes_named_by_stages(self.spec), spec=self.spec, nodes=config.nodes
            )
        except SpecError as error:
            return describe_error(error)
        return ""

    def describe_why_not_startable(self, config: Config) -> str:
        """Return why a training cannot start at a configuration; empty if it can.

        A training may still reach such a configuration after an out-of-memory error.
        """
        if self.spec.train.stages is None:
            return ""
        return describe_stage_refusal(self.spec, batch=config.batch, nodes=config.nodes, dataset_size=self.dataset_size)

    def stages_at(self, config: Config) -> tuple[StageSteps, ...]:
        """Return the stages of a configuration before its own batch, ascending; empty if its batch is constant."""
        if self.spec.train.stages is None:
            return ()
        if config not in self._known:
            self.work_out([config])
        return self._known[config][:-1]

    def work_out(self, configs: Sequence[Config]) -> None:
        """Compute the stages of many configurations at once, for later calls of `stages_at`.

        Raises:
            SpecError: a stage that the job names is not divisible, or the stages last as long as the training.
        """
        if self.spec.train.stages is None:
            return
        ramps = {config: self._ramp(config) for config in configs if config not in self._known}
        options_by_config = {config: self._stage_options(config, ramp) for config, ramp in ramps.items()}
        distinct_options = sorted(
            {option for of_config in options_by_config.values() for options in of_config for option in options},
            key=lambda option: (option.nodes, option.batch),
        )
        times = dict(zip(distinct_options, self.predicted(distinct_options), strict=True)) if distinct_options else {}
        known_times = {option: time for option, time in times.items() if not self.describe_why_unknown(option)}
        for config, ramp in ramps.items():
            times_of_options = [
                {option.nodes: known_times.get(option) or times[config] for option in options}
                for options in options_by_config[config]
            ]
            self._known[config] = self._plan_stages(config, ramp, times_of_options)

    def _stage_options(self, config: Config, ramp: Ramp) -> list[list[Config]]:
        """Return the configurations on which each stage may run."""
        return [
            [Config(nodes, batch) for nodes in self._nodes_of_stage(config, batch)]
            for batch in dict.fromkeys(stage.batch for stage in ramp.stages)
        ]

    def _nodes_of_stage(self, config: Config, batch: int) -> Sequence[int]:
        named_nodes = list_nodes_named_by_stages(self.spec).get(batch)
        if batch == config.batch or self.spec.train.ramp_nodes == "same" or named_nodes is not None:
            return [named_nodes or config.nodes]
        counts = list_allowed_stage_nodes(self.spec, batch, nodes=config.nodes)
        if config.nodes in counts and self.describe_why_unknown(Config(config.nodes, batch)):
            return [config.nodes]  # what other nodes would save is not known
        fitting = [
            count
            for count in counts
            if count == config.nodes
            or not (self.describe_why_unknown(at := Config(count, batch)) or self.describe_why_too_large(at))
        ]
        return fitting or counts[:1]

    def _plan_stages(
        self, config: Config, ramp: Ramp, times: Sequence[Mapping[int, Estimate]]
    ) -> tuple[StageSteps, ...]:
        """Return the stages on the nodes chosen for each by time or cost.

        Args:
            config: the configuration of the training.
            ramp: its stages.
            times: step times of each stage by number of nodes.
        """
        epochs = self.spec.train.epochs_at_most
        steps = ramp.remaining_steps(size=self.dataset_size, epochs=epochs)
        shares = ramp.shares(self.dataset_size * epochs)
        nodes = [next(iter(options)) for options in times]
        if any(len(options) > 1 for options in times):
            seconds = [
                {count: number * time.seconds for count, time in options.items()}
                for options, number in zip(times, steps.values(), strict=True)
            ]
            nodes = [*choose_stage_nodes(seconds, self.change(config), by=self.by)]
        return tuple(
            StageSteps(
                batch=batch,
                steps=number,
                share=shares[batch],
                step_time=options[count].seconds,
                step_low=options[count].low,
                step_high=options[count].high,
                nodes=None if count == config.nodes else count,
            )
            for count, options, (batch, number) in zip(nodes, times, steps.items(), strict=True)
        )

    def fits_mask(self, nodes: Ints, batch: Ints) -> Flags:
        """Return a mask, shape (n,), of the configurations for which `describe_why_infeasible` has no objection."""
        if not isinstance(self.spec.train.stages, list):
            return np.ones(len(nodes), dtype=bool)
        return np.array([not self.describe_why_infeasible(config) for config in to_configs(nodes, batch)], dtype=bool)

    def can_begin_mask(self, nodes: Ints, batch: Ints) -> Flags:
        """Return a mask, shape (n,), of the configurations for which `describe_why_not_startable` has no objection."""
        if self.spec.train.stages in (None, "auto", "noise"):
            return np.ones(len(nodes), dtype=bool)
        return np.array(
            [not self.describe_why_not_startable(config) for config in to_configs(nodes, batch)], dtype=bool
        )

    def stages_column(self, nodes: Ints, batch: Ints) -> NDArray[np.object_]:
        """Return the stages of configurations, shape (n,), as returned by `stages_at`."""
        column = np.empty(len(nodes), dtype=object)
        column.fill(())
        if self.spec.train.stages is not None:
            for index, config in enumerate(to_configs(nodes, batch)):
                column[index] = self.stages_at(config)
        return column

    def count_equivalent_work(self, nodes: Ints, batch: Ints, work: WorkCount) -> WorkCount:
        """Return the work of configurations in equivalent steps.

        These are the steps at their own batches that take as long as the steps of all stages.
        """
        if self.spec.train.stages is None:
            return work
        configurations = to_configs(nodes, batch)
        self.work_out(configurations)
        changes = np.array([len(self._node_counts(config)) - 1 for config in configurations])
        queue = np.array(
            [self.change(config).queue if count else 0.0 for config, count in zip(configurations, changes, strict=True)]
        )
        steps = np.array([self._equivalent_steps(config) / work.epochs for config in configurations])
        return replace(work, steps=steps, changes=changes, queued=changes * queue)

    def unused_node_hours(self, nodes: Ints, batch: Ints) -> Floats:
        """Return the node-hours, shape (n,), saved compared with all nodes of a training for all its hours."""
        node_hours = np.zeros(len(nodes))
        if self.spec.train.stages is not None:
            for index, config in enumerate(to_configs(nodes, batch)):
                node_hours[index] = self._unused_node_hours(config) / 3600
        return node_hours

    def _unused_node_hours(self, config: Config) -> float:
        self.stages_at(config)
        counts = self._node_counts(config)
        if counts == [config.nodes]:
            return 0.0
        change = self.change(config)
        steps = sum(
            (config.nodes - stage.nodes) * stage.steps * stage.step_time
            for stage in self._known[config]
            if stage.nodes is not None
        )
        starts = sum(config.nodes - count for count in counts) * change.start
        return steps + starts + (len(counts) - 1) * config.nodes * change.queue

    def _node_counts(self, config: Config) -> list[int]:
        """Return the successive numbers of nodes of a training."""
        return sorted({stage.nodes or config.nodes for stage in self._known[config]})

    def _equivalent_steps(self, config: Config) -> float:
        stages, last_stage = self._known[config], self._known[config][-1]
        return sum(stage.steps * stage.step_time for stage in stages) / last_stage.step_time

    def stage_positions(self, config: Config) -> tuple[Stage, ...]:
        """Return the stages of a training at a configuration with their positions; empty if its batch does not grow."""
        return () if self.spec.train.stages is None else self._ramp(config).stages

    def _ramp(self, config: Config) -> Ramp:
        size = self.dataset_size
        return build_ramp_on_nodes(
            self.spec, batch=config.batch, nodes=config.nodes, dataset_size=size, noise=self.noise
        )
