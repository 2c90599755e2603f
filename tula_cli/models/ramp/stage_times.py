"""The duration of the steps of a batch-size ramp (`train.ramp`): sum_k n_k t(N_k, B_k) in place of n t(N, B).

The stages of many configurations are arrays of shape (n, stages), see `StageTable`. Positions are float64, which holds
whole numbers of samples up to 2^53 exactly; beyond that, where int64 would overflow, they are rounded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_cli.errors import SpecError
from tula_cli.models.choice.candidates import NO_STAGES, StageTable
from tula_cli.models.choice.columns import Flags, Floats, Ints, to_configs
from tula_cli.models.choice.grid import Config
from tula_cli.models.cost import WorkCount
from tula_cli.models.ramp.by_noise import NoisePath
from tula_cli.models.ramp.stage_nodes import (
    Change,
    StageObjective,
    assign_nodes_to_stages,
    build_ramp_on_nodes,
    choose_stage_nodes,
    describe_error,
    describe_stage_refusal,
    find_fitting_batches,
    list_allowed_stage_nodes,
    list_nodes_named_by_stages,
)
from tula_cli.models.ramp.stages import (
    compute_auto_begins,
    count_steps_of_stages,
    plan_stages_before_fitting,
)
from tula_cli.models.time.steptime import Estimates
from tula_cli.run.records.recommendations import Stage
from tula_cli.spec.job import JobSpec


@dataclass(frozen=True)
class StageTimes:
    """The stages of each configuration, with their nodes and step times.

    A stage whose step time is unknown is assumed to take that of the training's batch, which is longer.
    """

    spec: JobSpec
    dataset_size: int
    predict_steps: Callable[[Ints, Ints], Estimates]  # step times by nodes and batch
    find_unknown: Callable[[Ints, Ints], Flags]  # the configurations whose step times are unknown
    startup: Callable[[Ints, Ints], Floats]  # seconds of a start
    noise: NoisePath | None = None  # of the gradients
    is_too_large: Callable[[Config], bool] = lambda _: False  # whether a batch does not fit the memory
    queue: float = 0.0  # seconds that a job waits for nodes
    by: StageObjective = "time"  # that the nodes of stages are chosen by

    def describe_why_infeasible(self, config: Config) -> str:
        """Return why a configuration cannot be trained with the stages that the job names; empty if it can."""
        if not isinstance(self.spec.train.stages, list):
            return ""
        try:
            stages = self.list_stage_positions(config)
            assign_nodes_to_stages(stages, list_nodes_named_by_stages(self.spec), spec=self.spec, nodes=config.nodes)
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

    def compute_fits_mask(self, nodes: Ints, batch: Ints) -> Flags:
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

    def list_stage_positions(self, config: Config) -> tuple[Stage, ...]:
        """Return the stages of a training at a configuration with their positions; empty if its batch does not grow."""
        if self.spec.train.stages is None:
            return ()
        return build_ramp_on_nodes(
            self.spec, batch=config.batch, nodes=config.nodes, dataset_size=self.dataset_size, noise=self.noise
        ).stages

    # --- Many configurations

    def make_stage_table(self, nodes: Ints, batch: Ints, steps: Estimates) -> StageTable:
        """Return the stages of configurations with their durations; `NO_STAGES` if the batch does not grow.

        Args:
            nodes, batch: of the configurations, shape (n,).
            steps: their step times.
        """
        if self.spec.train.stages is None:
            return NO_STAGES
        begin, batches = self._plan(nodes, batch)
        size, epochs = self.dataset_size, self.spec.train.epochs_at_most
        later = np.minimum.accumulate(np.where(batches > 0, begin, np.inf)[:, ::-1], axis=1)[:, ::-1]
        end = np.concatenate([later[:, 1:], np.full((len(nodes), 1), np.inf)], axis=1)
        total = float(size) * epochs
        counts = count_steps_of_stages(batches, end, size=size, epochs=epochs)
        share = np.where(batches > 0, np.maximum(0.0, np.minimum(end, total) - begin) / total, 0.0)
        stage_nodes = self._choose_nodes(nodes, batch, batches, counts, steps)
        return self._add_step_times(stage_nodes, batches, counts, share, steps)

    def _plan(self, nodes: Ints, batch: Ints) -> tuple[Floats, Ints]:
        """Return where stages begin (samples) and their batches, shape (n, stages), the own batch of each row last.

        The batch of a stage that a row does not have is 0.
        """
        spec, size = self.spec, self.dataset_size
        distinct, rows = np.unique(batch, return_inverse=True)
        planned = [
            plan_stages_before_fitting(spec, full_batch, dataset_size=size, noise=self.noise)
            for full_batch in distinct.tolist()
        ]
        lower = sorted({stage.batch for stages in planned for stage in stages[:-1]})
        columns = {stage_batch: index for index, stage_batch in enumerate(lower)}
        begins = np.full((len(distinct), len(lower) + 1), np.inf)
        for row, stages in enumerate(planned):
            begins[row, [columns[stage.batch] for stage in stages[:-1]]] = [stage.begin for stage in stages[:-1]]
            begins[row, -1] = stages[-1].begin
        begin = begins[rows]
        fitting = np.array(lower, dtype=np.int64)[None, :] + np.zeros((len(nodes), 1), dtype=np.int64)
        if not isinstance(spec.train.stages, list):
            counts, of_nodes = np.unique(nodes, return_inverse=True)
            fitting = find_fitting_batches(spec, counts[:, None], np.array(lower, dtype=np.int64)[None, :])[of_nodes]
        batches = np.column_stack([np.where(np.isfinite(begin[:, :-1]), fitting, 0), batch])
        if spec.train.stages == "auto" or (spec.train.stages == "noise" and self.noise is None):
            return compute_auto_begins(spec, batches, dataset_size=size), batches
        first = (batches > 0).argmax(axis=1)
        begin[np.arange(len(nodes)), first] = 0.0
        return begin, batches

    def _choose_nodes(self, nodes: Ints, batch: Ints, batches: Ints, counts: Floats, steps: Estimates) -> Ints:
        """Return the nodes of each stage, shape (n, stages)."""
        stage_nodes: Ints = np.repeat(nodes[:, None], batches.shape[1], axis=1)
        for named_batch, count in list_nodes_named_by_stages(self.spec).items():
            stage_nodes[:, :-1][batches[:, :-1] == named_batch] = count
        if isinstance(self.spec.train.stages, list) or self.spec.train.ramp_nodes == "same":
            return stage_nodes
        options = self._list_stage_nodes_by_batch(nodes, batches)
        pairs = sorted({(count, stage_batch) for (_, stage_batch), counts_ in options.items() for count in counts_})
        known = self._predict_pairs(pairs)
        startup = self.startup(nodes, batch)
        for row, training_nodes in enumerate(nodes.tolist()):
            present = np.flatnonzero(batches[row, :-1])
            choices = [
                {
                    count: counts[row, column] * known.get((count, int(batches[row, column])), steps.seconds[row])
                    for count in options[training_nodes, int(batches[row, column])]
                }
                for column in present.tolist()
            ]
            if any(len(choice) > 1 for choice in choices) or any(training_nodes not in choice for choice in choices):
                last_stage = {training_nodes: counts[row, -1] * steps.seconds[row]}
                change = Change(float(startup[row]), self.queue)
                stage_nodes[row, present] = choose_stage_nodes([*choices, last_stage], change, by=self.by)[:-1]
        return stage_nodes

    def _list_stage_nodes_by_batch(self, nodes: Ints, batches: Ints) -> dict[tuple[int, int], Sequence[int]]:
        """Return the numbers of nodes on which a stage may run, by the nodes of its training and its batch."""
        pairs = {
            (training_nodes, stage_batch)
            for training_nodes, row in zip(nodes.tolist(), batches[:, :-1].tolist(), strict=True)
            for stage_batch in row
            if stage_batch
        }
        return {
            (training_nodes, stage_batch): self._list_stage_nodes(training_nodes, stage_batch)
            for training_nodes, stage_batch in pairs
        }

    def _list_stage_nodes(self, nodes: int, batch: int) -> Sequence[int]:
        counts = list_allowed_stage_nodes(self.spec, batch, nodes=nodes)
        unknown = self.find_unknown(np.array(counts), np.full(len(counts), batch)).tolist()
        if nodes in counts and unknown[counts.index(nodes)]:
            return [nodes]  # what other nodes would save is not known
        fitting = [
            count
            for count, is_unknown in zip(counts, unknown, strict=True)
            if count == nodes or not (is_unknown or self.is_too_large(Config(count, batch)))
        ]
        return fitting or counts[:1]

    def _predict_pairs(self, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """Return the step times (seconds) of the pairs of nodes and batch that are known."""
        if not pairs:
            return {}
        nodes, batch = np.array(pairs, dtype=np.int64).T
        seconds, unknown = self.predict_steps(nodes, batch).seconds.tolist(), self.find_unknown(nodes, batch).tolist()
        return {pair: time for pair, time, refused in zip(pairs, seconds, unknown, strict=True) if not refused}

    def _add_step_times(
        self, nodes: Ints, batches: Ints, counts: Floats, share: Floats, steps: Estimates
    ) -> StageTable:
        """Return the table of stages with their step times, predicted once for each pair of nodes and batch."""
        cells = np.nonzero(batches[:, :-1])
        pair_index, pair_nodes, pair_batch = _find_distinct_pairs(nodes[cells], batches[cells])
        predicted, is_unknown = self.predict_steps(pair_nodes, pair_batch), self.find_unknown(pair_nodes, pair_batch)

        def spread_values(of_pairs: Floats, of_rows: Floats) -> Floats:
            values = np.repeat(of_rows[:, None], batches.shape[1], axis=1)
            values[cells] = np.where(is_unknown[pair_index], of_rows[cells[0]], of_pairs[pair_index])
            return values

        return StageTable(
            nodes=nodes,
            batch=batches,
            steps=counts,
            share=share,
            step_time=spread_values(predicted.seconds, steps.seconds),
            step_low=spread_values(predicted.low, steps.low),
            step_high=spread_values(predicted.high, steps.high),
        )

    def count_equivalent_work(self, work: WorkCount, table: StageTable) -> WorkCount:
        """Return the work of configurations in equivalent steps.

        These are the steps at their own batches that take as long as the steps of all stages.
        """
        if table is NO_STAGES:
            return work
        steps = (table.steps * table.step_time).sum(axis=1) / table.step_time[:, -1] / work.epochs
        changes = table.count_changes()
        return replace(work, steps=steps, changes=changes, queued=changes * self.queue)

    def compute_unused_node_hours(self, nodes: Ints, batch: Ints, table: StageTable) -> Floats:
        """Return the node-hours, shape (n,), saved compared with all nodes of a training for all its hours."""
        if table is NO_STAGES or (table.nodes == nodes[:, None]).all():
            return np.zeros(len(nodes))
        fewer = nodes[:, None] - table.nodes
        steps = (fewer * table.steps * table.step_time).sum(axis=1)
        ascending = np.sort(np.where(table.batch > 0, table.nodes, nodes[:, None]), axis=1)
        is_first = np.diff(ascending, axis=1, prepend=0) > 0
        starts = ((nodes[:, None] - ascending) * is_first).sum(axis=1) * self.startup(nodes, batch)
        seconds: Floats = steps + starts + table.count_changes() * nodes * self.queue
        return seconds / 3600


def _find_distinct_pairs(nodes: Ints, batch: Ints) -> tuple[Ints, Ints, Ints]:
    """Return for each pair the index of its first equal among the distinct ones, and those: nodes and batches."""
    import pandas as pd

    node_index, distinct_nodes = pd.factorize(nodes)
    batch_index, distinct_batches = pd.factorize(batch)
    pair_index, pairs = pd.factorize(node_index.astype(np.int64) * max(1, len(distinct_batches)) + batch_index)
    width = max(1, len(distinct_batches))
    return pair_index, distinct_nodes[pairs // width], distinct_batches[pairs % width]
