"""What a search takes beside the training that it is for, by strategy."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from tula_cli.errors import Infeasible
from tula_cli.models.choice.grid import Limit
from tula_cli.models.cost import work
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.services.profiling.expectation import SUPPOSED_STEP, expected_by, measured_in, step_of
from tula_cli.services.search import probes
from tula_cli.spec.job import JobSpec
from tula_cli.words import plural

COMPARED = ("five", "sweep", "full", "adaptive")
"""The strategies that are held against each other, whichever is asked for."""
DEAR = 0.5
"""Share of the training beyond which a search is advised against."""
SMALL = 0.01
"""Share of the training up to which `search.strategy: auto` is a sweep, about that of ten hours: what it takes hardly counts then, it
waits in the queue once, and its choice under a bound on the batch is the better one (benchmarks/replay/replay_worth.py)."""


@dataclass(frozen=True)
class Worth:
    """What the strategies take, as shares of the node-hours of one training."""

    nodes: int  # of that training: the fewest
    batch: int  # and the largest that is feasible there
    node_hours: float  # that it takes, its steps alone
    shares: Mapping[str, float]  # of it, by strategy, least first; of `adaptive` the first round

    def dear(self, strategy: str) -> str:
        """Return what is to be said of a search that takes much of what it is to save; empty where it does not."""
        share, least = self.shares[strategy], next(iter(self.shares))
        if share <= DEAR:
            return ""
        instead = f"search.strategy: {least} takes {self.shares[least]:.0%}; " * (self.shares[least] < 0.9 * share)
        return (
            f"the search is expected to take {share:.0%} of the node-hours of the whole training (batch {self.batch} on"
            f" {plural(self.nodes)}): {instead}a training this short is hardly worth one (tula train --nodes --batch needs none)"
        )


def worth(spec: JobSpec, *, dataset_size: int, largest: Limit, run: RunDir | None) -> Worth | None:
    """Return what a search takes beside the training; None where nothing can be searched, or no probe has told what a step takes.

    Args:
        spec: the job.
        dataset_size: training samples.
        largest: the largest local batch that fits one GPU.
        run: of the job, whose probes tell how long a step takes.
    """
    known = measured_in(run)
    return _worth(spec, {*COMPARED, spec.search.strategy}, known, dataset_size, largest) if known else None


def with_strategy(spec: JobSpec, *, dataset_size: int, largest: Limit, run: RunDir | None) -> JobSpec:
    """Return the job with what `search.strategy: auto` comes to: what its run has begun, else by the length of the training.

    Args:
        spec: the job; another strategy stays.
        dataset_size: training samples.
        largest: the largest local batch that fits one GPU.
        run: of the job, which may not be there yet.
    """
    if spec.search.strategy != "auto":
        return spec
    tasks = run.tasks() if run is not None and run.exists else []
    begun = [task.spec.search.strategy for task in tasks if isinstance(task, ProbeTask)]
    begun = [name for name in begun if name in ("sweep", "adaptive")]
    if begun:
        return _with(spec, begun[-1])
    expected = _worth(spec, {"full", "sweep"}, measured_in(run), dataset_size, largest)
    return _with(spec, "sweep" if expected is None or expected.shares["sweep"] <= SMALL else "adaptive")


def _worth(
    spec: JobSpec, strategies: Set[str], known: Sequence[Measured], dataset_size: int, largest: Limit
) -> Worth | None:
    """Return what strategies, `full` among them, take beside the training; by a supposed step if no probe is known."""
    try:
        planned = {
            name: probes(_with(spec, name), dataset_size=dataset_size, max_local_batch=largest) for name in strategies
        }
    except Infeasible:
        return None
    fewest = min(planned["full"])
    local_batch, gpus = planned["full"][fewest][-1], spec.cluster.gpus_per_node
    batch = local_batch * fewest * gpus
    todo = work(spec, batch=batch, world=fewest * gpus, dataset_size=dataset_size, eval_size=None, eval_batch_size=None)
    step = step_of(known, local_batch) or SUPPOSED_STEP
    if not todo.steps:
        return None
    node_hours = fewest * todo.epochs * todo.steps * step / 3600
    shares = {
        name: expected_by(spec, list(jobs.items()), known).node_hours / node_hours for name, jobs in planned.items()
    }
    ordered = {name: shares[name] for name in sorted(shares, key=lambda name: (shares[name], name))}
    return Worth(fewest, batch, node_hours, ordered)


def _with(spec: JobSpec, strategy: str) -> JobSpec:
    return spec.model_copy(update={"search": spec.search.model_copy(update={"strategy": strategy})})
