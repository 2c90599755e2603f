"""The duration of the steps of a batch-size ramp (`train.ramp`): sum_k n_k t(N_k, B_k) in place of n t(N, B).

The stages of many configurations are arrays of shape (n, stages), see `StageTable`. Positions are float64, which holds
whole numbers of samples up to 2^53 exactly; beyond that, where int64 would overflow, they are rounded.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.models import messages
from tula_cli.models.choice.candidates import NO_STAGES, Flags, Floats, Ints, StageTable, convert_to_configs
from tula_cli.models.choice.grid import Config, describe_nearest_multiples, list_candidates
from tula_cli.models.cost import TrainingWork
from tula_cli.models.out_of_memory import MIN_NORMALISED
from tula_cli.models.ramp import (
    NoisePath,
    Ramp,
    build_ramp,
    compute_auto_begins,
    count_steps_of_stages,
    has_auto_stages,
    plan_stages_before_fitting,
)
from tula_cli.models.time.step_time import Estimates
from tula_cli.query import Quantity, get_quantity
from tula_cli.run.records.recommendations import Prediction, Recommendation, Stage
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.job import JobSpec, compute_max_decay_growth
from tula_cli.spec.sections import RampStage
from tula_cli.words import format_count, format_number

StageObjective = Literal["time", "cost"]
"""The quantity that is minimised: hours, or node-hours."""


@dataclass(frozen=True)
class StageTimes:
    """The stages of each configuration, with their nodes and step times.

    A stage whose step time is unknown is assumed to take that of the training's batch, which is longer.
    """

    spec: JobSpec
    dataset_size: int
    predict_steps: Callable[[Ints, Ints], Estimates]  # step times by nodes and batch
    find_unknown: Callable[[Ints, Ints], Flags]  # flags of configurations whose step times are unknown
    startup: Callable[[Ints, Ints], Floats]  # seconds from the start of a job to its first step
    noise: NoisePath | None = None  # gradient noise; None unless the ramp is based on it
    is_too_large: Callable[[Config], bool] = lambda _: False  # whether a batch does not fit the memory
    queue: float = 0.0  # seconds that a job waits for nodes
    by: StageObjective = "time"  # quantity by which the nodes of stages are chosen

    def describe_why_infeasible(self, config: Config) -> str:
        """Return why a configuration cannot be trained with the stages that the job names; empty if it can."""
        if not isinstance(self.spec.train.stages, list):
            return ""
        try:
            stages = self.list_stages(config)
            assign_nodes_to_stages(stages, list_nodes_named_by_stages(self.spec), spec=self.spec, nodes=config.nodes)
        except SpecError as error:
            return _describe_error(error)
        return ""

    def describe_why_not_startable(self, config: Config) -> str:
        """Return why a training cannot start at a configuration; empty if it can.

        A training may still reach such a configuration after an out-of-memory error.
        """
        return describe_why_stages_rejected(
            self.spec, batch=config.batch, nodes=config.nodes, dataset_size=self.dataset_size
        )

    def compute_feasible_mask(self, nodes: Ints, batch: Ints) -> Flags:
        """Return a mask, shape (n,), of the configurations for which `describe_why_infeasible` gives no reason."""
        if not isinstance(self.spec.train.stages, list):
            return np.ones(len(nodes), dtype=bool)
        return np.array(
            [not self.describe_why_infeasible(config) for config in convert_to_configs(nodes, batch)], dtype=bool
        )

    def compute_startable_mask(self, nodes: Ints, batch: Ints) -> Flags:
        """Return a mask, shape (n,), of the configurations for which `describe_why_not_startable` gives no reason."""
        if self.spec.train.stages in (None, "auto", "noise"):
            return np.ones(len(nodes), dtype=bool)
        return np.array(
            [not self.describe_why_not_startable(config) for config in convert_to_configs(nodes, batch)], dtype=bool
        )

    def list_stages(self, config: Config) -> tuple[Stage, ...]:
        """Return the stages of a training at a configuration, each with its start in samples; empty if constant."""
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
        """
        if self.spec.train.stages is None:
            return NO_STAGES
        begin, batches = self._plan_stages(nodes, batch)
        size, epochs = self.dataset_size, self.spec.train.max_epochs
        later = np.minimum.accumulate(np.where(batches > 0, begin, np.inf)[:, ::-1], axis=1)[:, ::-1]
        end = np.concatenate([later[:, 1:], np.full((len(nodes), 1), np.inf)], axis=1)
        total = float(size) * epochs
        counts = count_steps_of_stages(batches, end, size=size, epochs=epochs)
        share = np.where(batches > 0, np.maximum(0.0, np.minimum(end, total) - begin) / total, 0.0)
        stage_nodes = self._choose_nodes(nodes, batch, batches, counts, steps)
        return self._add_step_times(stage_nodes, batches, counts, share, steps)

    def _plan_stages(self, nodes: Ints, batch: Ints) -> tuple[Floats, Ints]:
        """Return the first samples and the batches of stages, shape (n, stages); the row's final batch comes last.

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
        if has_auto_stages(spec, self.noise):
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
        stages = {
            (training_nodes, stage_batch)
            for training_nodes, row in zip(nodes.tolist(), batches[:, :-1].tolist(), strict=True)
            for stage_batch in row
            if stage_batch
        }
        options = {stage: self._list_stage_nodes(*stage) for stage in stages}
        pairs = sorted({(count, stage_batch) for (_, stage_batch), counts_ in options.items() for count in counts_})
        predicted_seconds = self._predict_step_times(pairs)
        startup = self.startup(nodes, batch)
        for row, training_nodes in enumerate(nodes.tolist()):
            present = np.flatnonzero(batches[row, :-1])
            choices = [
                {
                    count: counts[row, column]
                    * predicted_seconds.get((count, int(batches[row, column])), steps.seconds[row])
                    for count in options[training_nodes, int(batches[row, column])]
                }
                for column in present.tolist()
            ]
            if any(len(choice) > 1 for choice in choices) or any(training_nodes not in choice for choice in choices):
                last_stage = {training_nodes: counts[row, -1] * steps.seconds[row]}
                stage_nodes[row, present] = choose_stage_nodes(
                    [*choices, last_stage], start=float(startup[row]), queue=self.queue, by=self.by
                )[:-1]
        return stage_nodes

    def _list_stage_nodes(self, nodes: int, batch: int) -> Sequence[int]:
        """Return the numbers of nodes on which a stage may run, from the nodes of its training and its batch."""
        counts = list_allowed_stage_nodes(self.spec, batch, nodes=nodes)
        unknown = self.find_unknown(np.array(counts), np.full(len(counts), batch)).tolist()
        if nodes in counts and unknown[counts.index(nodes)]:
            return [nodes]  # the saving of other numbers of nodes is unknown
        fitting = [
            count
            for count, is_unknown in zip(counts, unknown, strict=True)
            if count == nodes or not (is_unknown or self.is_too_large(Config(count, batch)))
        ]
        return fitting or counts[:1]

    def _predict_step_times(self, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
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

    def count_equivalent_work(self, work: TrainingWork, table: StageTable) -> TrainingWork:
        """Return the work of configurations in equivalent steps.

        These are the steps at their own batches that take as long as the steps of all stages.
        """
        if table is NO_STAGES:
            return work
        steps = (table.steps * table.step_time).sum(axis=1) / table.step_time[:, -1] / work.epochs
        changes = table.count_changes()
        return replace(work, steps=steps, changes=changes, queued=changes * self.queue)

    def compute_unused_node_hours(self, nodes: Ints, batch: Ints, table: StageTable) -> Floats:
        """Return the node-hours, shape (n,), that stages on fewer nodes save compared with all nodes for all hours."""
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
    """Return for each pair its index among the distinct pairs, and those: nodes and batches."""
    import pandas as pd

    node_index, distinct_nodes = pd.factorize(nodes)
    batch_index, distinct_batches = pd.factorize(batch)
    width = max(1, len(distinct_batches))
    pair_index, pairs = pd.factorize(node_index.astype(np.int64) * width + batch_index)
    return pair_index, distinct_nodes[pairs // width], distinct_batches[pairs % width]


# --- Nodes
#
# Small batches scale worst, so that a few nodes train the first stages in about the same time as many. Each change of
# nodes needs a restart, and on a cluster time in the queue, so it is made only if it pays off. Stages are defined in
# samples, so their boundaries do not depend on the nodes.

MAX_CHANGES = 3
"""Maximum changes of the number of nodes in one training: each is one more job in the queue."""


def choose_stage_objective(quantity: Quantity) -> StageObjective:
    """Return the quantity by which the nodes of stages are chosen, for a recommendation that minimises `quantity`."""
    return "cost" if quantity.grows_with_nodes else "time"


def choose_stage_objective_of_recommendation(recommended: Recommendation | None) -> StageObjective:
    """Return the quantity by which the nodes of stages are chosen for a recommendation; time if there is none."""
    if recommended is None:
        return "time"
    return choose_stage_objective(get_quantity(recommended.objective, recommended.curve))


def choose_stage_nodes(
    options: Sequence[Mapping[int, float]], *, start: float, queue: float = 0.0, by: StageObjective
) -> tuple[int, ...]:
    """Return the nodes of each stage, ascending, with the least time or node-hours.

    Of equal solutions the one with the fewest changes is chosen.

    Args:
        options: for each stage the seconds of its steps by number of nodes; for the last one the training's own nodes
            only.
        start: seconds from each start, on nodes that are paid for, until the ranks train.
        queue: seconds that each change of nodes waits in the queue, which are not paid for.

    Returns:
        One number per stage. If each stage has the option of the last stage's nodes, the result is never worse than
        using those throughout.
    """

    def compute_value(nodes: int, seconds: float, wait: float) -> float:
        return nodes * seconds if by == "cost" else seconds + wait

    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
        (nodes, 0): (compute_value(nodes, start + seconds, 0.0), (nodes,)) for nodes, seconds in options[0].items()
    }
    for stage in options[1:]:
        reached: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (previous_nodes, changes), (totals, path) in best.items():
            for nodes, seconds in stage.items():
                if nodes < previous_nodes or (nodes > previous_nodes and changes == MAX_CHANGES):
                    continue
                moved = nodes > previous_nodes
                added = compute_value(nodes, seconds + start * moved, queue * moved)
                lowest, state = (totals + added, (*path, nodes)), (nodes, changes + moved)
                if state not in reached or lowest[0] < reached[state][0]:
                    reached[state] = lowest
        best = reached
    assert best, "the last stage's nodes are an option of each, or more than those of all"
    return min((lowest, changes, path) for (_, changes), (lowest, path) in best.items())[2]


def list_allowed_stage_nodes(spec: JobSpec, batch: int, *, nodes: int) -> tuple[int, ...]:
    """Return the numbers of nodes on which a stage may run, ascending: those of the search up to the training's own.

    The batch must divide among their GPUs. On fewer nodes than the training has, each GPU must also take at least as
    many samples at a time as BatchNorm needs for its statistics.
    """
    counts = sorted({count for count in spec.search.nodes if count < nodes})
    fewer = [count for count in counts if batch % compute_batch_divisor(spec, count) == 0]
    roomy = [count for count in fewer if batch // compute_batch_divisor(spec, count) >= MIN_NORMALISED]
    training_nodes = [nodes] if batch % compute_batch_divisor(spec, nodes) == 0 else []
    return (*(roomy or fewer[:1] * (not training_nodes)), *training_nodes)


def compute_batch_divisor(spec: JobSpec, nodes: int) -> int:
    """Return the number of parts into which a batch is divided: GPUs x micro-batches per step."""
    return nodes * spec.cluster.gpus_per_node * spec.train.accumulate


def build_ramp_on_nodes(
    spec: JobSpec, *, batch: int, nodes: int, dataset_size: int, noise: NoisePath | None = None
) -> Ramp:
    """Return the stages of a training that ends on `nodes` nodes (see `build_ramp`).

    Raises:
        SpecError: as in `build_ramp`, or a stage names more nodes than the training has.
    """
    smaller = sorted({count for count in spec.search.nodes if count < nodes}, reverse=True)
    fewer = [compute_batch_divisor(spec, count) for count in smaller] if spec.train.ramp_nodes == "auto" else []
    for size, count in list_nodes_named_by_stages(spec).items():
        if count > nodes and size < batch:
            raise SpecError(
                f"train.ramp: batch {size} has {format_count(count)}, more than the training ({nodes})",
                f"give this stage at most {nodes}, because the number of nodes must not decrease from stage to stage",
            )
    divisor = compute_batch_divisor(spec, nodes)
    return build_ramp(spec, batch=batch, divisor=divisor, dataset_size=dataset_size, noise=noise, fewer=fewer)


def find_fitting_batches(spec: JobSpec, nodes: Ints, batches: Ints) -> Ints:
    """Return batches rounded down so that they divide among the GPUs and micro-batches of `nodes` nodes.

    If stages may run on fewer nodes, a batch that is too small is rounded for the most nodes for which it suffices. 0 if
    there are none.

    Args:
        nodes, batches: arrays that broadcast to the shape of the result.
    """
    parts = compute_batch_divisor(spec, 1)
    divisor = nodes * parts
    if spec.train.ramp_nodes == "auto":
        counts = np.array(sorted(set(spec.search.nodes)))
        count_below = np.searchsorted(counts, np.minimum(nodes - 1, batches // parts), side="right")
        divisor = np.where(batches >= divisor, divisor, np.where(count_below > 0, counts[count_below - 1], 0) * parts)
    fitting: Ints = np.where((divisor > 0) & (batches >= divisor), batches // np.maximum(1, divisor) * divisor, 0)
    return fitting


def check_stages(spec: JobSpec, *, batch: int, nodes: int, dataset_size: int) -> None:
    """Check that the stages that the job names, or its decay, fit a training that starts.

    A training that continues at a smaller batch after an out-of-memory error keeps the stages below that batch.

    Raises:
        SpecError: a batch is not below the training's, or as in `build_ramp_on_nodes` and `assign_nodes_to_stages`.
    """
    if spec.train.stages == "decay":
        _check_decay(
            spec, batch=batch, ramp=build_ramp_on_nodes(spec, batch=batch, nodes=nodes, dataset_size=dataset_size)
        )
    stages = _list_explicit_stages(spec)
    above = [stage.batch for stage in stages if stage.batch >= batch]
    if above:
        raise SpecError(
            f"train.ramp: batch {above[0]} is not below {batch}, the batch of the training",
            f"remove this stage: after the last stage of train.ramp, the training uses batch {batch} in any case",
        )
    if stages:
        ramp = build_ramp_on_nodes(spec, batch=batch, nodes=nodes, dataset_size=dataset_size)
        assign_nodes_to_stages(ramp.stages, list_nodes_named_by_stages(spec), spec=spec, nodes=nodes)


def _check_decay(spec: JobSpec, *, batch: int, ramp: Ramp) -> None:
    """Check that a decay starts at the reference batch and reaches the training's batch.

    Raises:
        SpecError: it does not.
    """
    reference, growth = spec.train.reference_batch, compute_max_decay_growth(spec)
    if ramp.stages[0].batch > reference:
        raise SpecError(
            f"train.ramp: decay starts at train.reference_batch {reference}, which is less than one sample per GPU and"
            " micro-batch here",
            "train on fewer nodes, or remove train.ramp_nodes: same",
        )
    if batch > reference * growth:
        raise SpecError(
            f"train.ramp: decay reaches at most batch {int(reference * growth)}, not {batch}: the schedule lowers the learning"
            f" rate only to 1/{format_number(growth)} before the last 2 % of the training",
            "train with a smaller batch (search.max_batch, or [[--batch]]), or with a schedule that ends at a lower learning rate",
        )


def list_stage_diagnostics(spec: JobSpec, *, dataset_size: int | None) -> tuple[list[Diagnostic], list[Diagnostic]]:
    """Describe numbers of nodes for which the search has no batch at which a training with the job's stages can start.

    Args:
        dataset_size: training samples; None if unknown, in which case stage lengths are not checked against it.

    Returns:
        Problems, if no number of nodes has such a batch; and warnings, if only some have none, which are then left out.
    """
    size, max_batch = dataset_size or sys.maxsize, spec.search.max_batch
    if not (_list_explicit_stages(spec) or spec.train.stages == "decay") or (
        dataset_size is None and max_batch is None
    ):
        return [], []
    grid = list_candidates(
        spec.search.nodes,
        gpus_per_node=spec.cluster.gpus_per_node,
        min_batch=spec.search.min_batch,
        max_batch=min(size, max_batch or size),
        accumulate=spec.train.accumulate,
    )
    whys: dict[int, str] = {}
    for nodes, batch in grid:  # ascending by batch: the reason kept is that of the largest batch
        if whys.get(nodes) != "":
            whys[nodes] = describe_why_stages_rejected(spec, batch=batch, nodes=nodes, dataset_size=size)
    by_why = {why: [nodes for nodes in whys if whys[nodes] == why] for why in whys.values() if why}
    unusable = [messages.nodes_unusable_for_stages(nodes=counts, reason=why) for why, counts in by_why.items()]
    return (unusable, []) if all(whys.values()) else ([], unusable)


def describe_why_stages_rejected(spec: JobSpec, *, batch: int, nodes: int, dataset_size: int) -> str:
    """Return why `check_stages` rejects a training; empty if it does not."""
    try:
        check_stages(spec, batch=batch, nodes=nodes, dataset_size=dataset_size)
    except SpecError as error:
        return _describe_error(error)
    return ""


def _describe_error(error: SpecError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def list_nodes_named_by_stages(spec: JobSpec) -> dict[int, int]:
    """Return the nodes that stages of the job name, by batch."""
    return {stage.batch: stage.nodes for stage in _list_explicit_stages(spec) if stage.nodes is not None}


def _list_explicit_stages(spec: JobSpec) -> list[RampStage]:
    return spec.train.stages if isinstance(spec.train.stages, list) else []


def assign_nodes_to_stages(
    stages: Sequence[Stage], chosen: Mapping[int, int], *, spec: JobSpec, nodes: int
) -> tuple[Stage, ...]:
    """Return the stages of a training with their nodes; without nodes if all stages run on the training's own.

    Args:
        stages: of the training, that of its own batch last.
        chosen: nodes by batch, for stages whose nodes differ from the training's.

    Raises:
        SpecError: a stage has more nodes than the one after it, or the batch of it or a later stage does not divide
            among its GPUs.
    """
    stages_with_nodes = tuple(stage.model_copy(update={"nodes": chosen.get(stage.batch, nodes)}) for stage in stages)
    counts = [chosen.get(stage.batch, nodes) for stage in stages]
    for index, (stage, count) in enumerate(zip(stages, counts, strict=True)):
        for later, stage_nodes in zip(stages[index:], counts[index:], strict=True):
            if stage_nodes < count:
                raise SpecError(
                    f"train.ramp: batch {later.batch} would run on {format_count(stage_nodes)}, but batch {stage.batch} before it on {count}",
                    "give each stage at least as many nodes as the stage before it",
                )
            divisor = compute_batch_divisor(spec, count)
            if later.batch % divisor:
                raise SpecError(
                    f"train.ramp: batch {later.batch} is not divisible by {divisor} (GPUs x micro-batches on the"
                    f" {format_count(count)} of batch {stage.batch}), so the order of samples would change",
                    describe_nearest_multiples(later.batch, divisor),
                )
    return stages_with_nodes if len(set(counts)) > 1 else tuple(stages)


def move_task_to_stage_nodes(task: TrainTask, *, samples: int) -> TrainTask:
    """Return a task on the nodes of the stage in which it starts; unchanged if all stages run on the training's nodes.

    If the job names no nodes for a stage, those of the prediction are used.

    Args:
        task: on the nodes of the training, with its stages.
        samples: samples trained so far.

    Raises:
        SpecError: stages do not divide among the nodes that they name.
    """
    predicted = task.prediction.stages if task.prediction is not None else ()
    chosen = {stage.batch: stage.nodes for stage in predicted if stage.nodes is not None} | list_nodes_named_by_stages(
        task.spec
    )
    stages = assign_nodes_to_stages(task.stages, chosen, spec=task.spec, nodes=task.nodes)
    begun_stage_nodes = [stage.nodes for stage in stages if stage.begin <= samples and stage.nodes is not None]
    return task.model_copy(update={"stages": stages, "nodes": begun_stage_nodes[-1]}) if begun_stage_nodes else task


def describe_stage_nodes(choice: Prediction) -> str:
    """Describe the number of nodes of each stage of a choice; empty if all run on its own."""
    if not any(stage.nodes for stage in choice.stages):
        return ""
    descriptions = [f"{stage.nodes or choice.nodes} at batch {stage.batch}" for stage in choice.stages]
    return f"nodes: {', '.join(descriptions)}, {choice.nodes} at batch {choice.batch}"
