"""The number of nodes for each stage of a batch-size ramp, chosen by time or cost."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.models import messages
from tula_cli.models.choice.grid import list_candidates, name_nearest_multiples
from tula_cli.models.out_of_memory import MIN_NORMALISED
from tula_cli.models.ramp.by_noise import NoisePath
from tula_cli.models.ramp.stages import Ramp, build_ramp
from tula_cli.run.records.recommendations import Prediction, Recommendation, Stage
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.job import JobSpec, compute_max_decay_growth
from tula_cli.spec.sections import RampStage
from tula_cli.words import format_count, format_number

if TYPE_CHECKING:
    from tula_cli.models.choice.columns import Ints

# --- Nodes
#
# A small batch scales least, so that its first stages take few nodes hardly longer, or sooner, than many. Each change of nodes
# is a new start, and on a cluster with a queue a wait, so that one is made only where it pays. Samples are the clock: where a
# stage begins and which samples it trains is the same on any nodes.

StageObjective = Literal["time", "cost"]
"""The quantity that is minimised: hours, or node-hours."""

MAX_CHANGES = 3
"""Maximum changes of the number of nodes in one training: each is one more job in the queue."""


def choose_stage_objective(objective: str, curve: str) -> StageObjective:
    """Return the quantity by which the nodes of stages are chosen.

    Cost for the objectives cost and energy and for a knee of cost, else time.
    """
    by_cost = objective in ("cost", "energy") or (objective == "knee" and curve == "cost")
    return "cost" if by_cost else "time"


def choose_stage_objective_of(recommended: Recommendation | None) -> StageObjective:
    """Return the quantity by which the nodes of stages are chosen for a recommendation; time if there is none."""
    return "time" if recommended is None else choose_stage_objective(recommended.objective, recommended.curve)


@dataclass(frozen=True)
class Change:
    """The duration of a change of nodes. Seconds."""

    start: float  # until the ranks train; on nodes that are paid for
    queue: float = 0.0  # until there are nodes, which are not


def choose_stage_nodes(
    options: Sequence[Mapping[int, float]], change: Change, *, by: StageObjective
) -> tuple[int, ...]:
    """Return the nodes of each stage, ascending, with the least time or node-hours.

    Of equal solutions the one with the fewest changes is chosen.

    Args:
        options: for each stage the seconds of its steps by number of nodes; for the last one the training's own nodes
            only.
        change: duration of each change; the first start is on the first stage's nodes.
        by: time or cost.

    Returns:
        One number per stage. If each stage has the option of the last stage's nodes, the result is never worse than
        using those throughout.
    """

    def value(nodes: int, seconds: float, *, queue: float = 0.0) -> float:
        return nodes * seconds if by == "cost" else seconds + queue

    first_values = {nodes: value(nodes, change.start + seconds) for nodes, seconds in options[0].items()}
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
        (nodes, 0): (lowest, (nodes,)) for nodes, lowest in first_values.items()
    }
    for stage in options[1:]:
        reached: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (previous_nodes, changes), (so_far, path) in best.items():
            for nodes, seconds in stage.items():
                if nodes < previous_nodes or (nodes > previous_nodes and changes == MAX_CHANGES):
                    continue
                moved = nodes > previous_nodes
                added = value(nodes, seconds + change.start * moved, queue=change.queue * moved)
                lowest, state = (so_far + added, (*path, nodes)), (nodes, changes + moved)
                if state not in reached or lowest[0] < reached[state][0]:
                    reached[state] = lowest
        best = reached
    assert best, "the last stage's nodes are an option of each, or more than those of all"
    return min((lowest, changes, path) for (_, changes), (lowest, path) in best.items())[2]


def list_allowed_stage_nodes(spec: JobSpec, batch: int, *, nodes: int) -> tuple[int, ...]:
    """Return the numbers of nodes on which a stage may run, ascending: those of the search up to the training's own.

    The batch must divide among their GPUs. On fewer nodes than the training has, each GPU must also take at least as
    many samples at a time as BatchNorm needs for its statistics.

    Args:
        spec: the job, with `train.ramp_nodes: auto`.
        batch: of the stage, global.
        nodes: of the training.
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
    fewer: list[int] = []
    if spec.train.ramp_nodes == "auto":
        fewer = [
            compute_batch_divisor(spec, count)
            for count in sorted(set(spec.search.nodes), reverse=True)
            if count < nodes
        ]
    for size, count in list_nodes_named_by_stages(spec).items():
        if count > nodes and size < batch:
            raise SpecError(
                f"train.ramp: batch {size} has {format_count(count)}, more than the training ({nodes})",
                "the number of nodes must not decrease from stage to stage",
            )
    divisor = compute_batch_divisor(spec, nodes)
    return build_ramp(spec, batch=batch, divisor=divisor, dataset_size=dataset_size, noise=noise, fewer=fewer)


def find_fitting_batches(spec: JobSpec, nodes: "Ints", batches: "Ints") -> "Ints":
    """Return batches rounded down to divide on `nodes` nodes, or else on the most below these if stages may run on fewer.

    0 if a batch has less than one sample for each part.

    Args:
        spec: the job.
        nodes, batches: arrays that broadcast to the shape of the result.
    """
    import numpy as np

    parts = compute_batch_divisor(spec, 1)
    divisor = nodes * parts
    if spec.train.ramp_nodes == "auto":
        counts = np.array(sorted(set(spec.search.nodes)))
        place = np.searchsorted(counts, np.minimum(nodes - 1, batches // parts), side="right")
        divisor = np.where(batches >= divisor, divisor, np.where(place > 0, counts[place - 1], 0) * parts)
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
    stages = _list_stages_naming_nodes(spec)
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
            "train with a smaller batch (search.max_batch, or --batch), or with a schedule that ends lower",
        )


def describe_unusable_stages(spec: JobSpec, *, dataset_size: int | None) -> tuple[list[Diagnostic], list[Diagnostic]]:
    """Describe numbers of nodes for which the search has no batch at which a training with the job's stages can start.

    Args:
        spec: the job.
        dataset_size: training samples; None if unknown, in which case stage lengths are not checked against it.

    Returns:
        Problems, if no number of nodes has such a batch; and warnings, if only some have none, which are then left out.
    """
    size, most = dataset_size or sys.maxsize, spec.search.max_batch
    if not (_list_stages_naming_nodes(spec) or spec.train.stages == "decay") or (dataset_size is None and most is None):
        return [], []
    grid = list_candidates(
        spec.search.nodes,
        gpus_per_node=spec.cluster.gpus_per_node,
        min_batch=spec.search.min_batch,
        max_batch=min(size, most or size),
        accumulate=spec.train.accumulate,
    )
    whys: dict[int, str] = {}
    for nodes, batch in grid:  # ascending: what is said is why not at the largest
        if whys.get(nodes) != "":
            whys[nodes] = describe_stage_refusal(spec, batch=batch, nodes=nodes, dataset_size=size)
    by_why = {why: [nodes for nodes in whys if whys[nodes] == why] for why in whys.values() if why}
    unusable = [messages.nodes_unusable_for_stages(nodes=counts, reason=why) for why, counts in by_why.items()]
    return (unusable, []) if all(whys.values()) else ([], unusable)


def describe_stage_refusal(spec: JobSpec, *, batch: int, nodes: int, dataset_size: int) -> str:
    """Return why `check_stages` rejects a training; empty if it does not."""
    try:
        check_stages(spec, batch=batch, nodes=nodes, dataset_size=dataset_size)
    except SpecError as error:
        return describe_error(error)
    return ""


def describe_error(error: SpecError) -> str:
    """Return an error and its hint in one line."""
    return f"{error.message} ({error.hint})" if error.hint else error.message


def list_nodes_named_by_stages(spec: JobSpec) -> dict[int, int]:
    """Return the nodes that stages of the job name, by batch."""
    return {stage.batch: stage.nodes for stage in _list_stages_naming_nodes(spec) if stage.nodes is not None}


def _list_stages_naming_nodes(spec: JobSpec) -> list[RampStage]:
    return spec.train.stages if isinstance(spec.train.stages, list) else []


def assign_nodes_to_stages(
    stages: Sequence[Stage], chosen: Mapping[int, int], *, spec: JobSpec, nodes: int
) -> tuple[Stage, ...]:
    """Return the stages of a training with their nodes; without nodes if all stages run on the training's own.

    Args:
        stages: of the training, that of its own batch last.
        chosen: nodes by batch, for stages whose nodes differ from the training's.
        spec: the job.
        nodes: of the training.

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
                    f"train.ramp: batch {later.batch} has {format_count(stage_nodes)}, fewer than the {count} of batch {stage.batch} before it"
                )
            divisor = compute_batch_divisor(spec, count)
            if later.batch % divisor:
                raise SpecError(
                    f"train.ramp: batch {later.batch} is not divisible by {divisor} (GPUs x micro-batches on the"
                    f" {format_count(count)} of batch {stage.batch}), so the order of samples would change",
                    name_nearest_multiples(later.batch, divisor),
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
