"""What a search takes beside the training that it is for, by strategy."""

from collections.abc import Mapping
from dataclasses import dataclass

from tula_cli.errors import Infeasible
from tula_cli.models.choice.grid import Limit
from tula_cli.models.cost import work
from tula_cli.run.directory import RunDir
from tula_cli.services.profiling.expectation import expected_by, measured_in, step_of
from tula_cli.services.search import probes
from tula_cli.spec.job import JobSpec
from tula_cli.words import plural

COMPARED = ("five", "sweep", "full", "adaptive")
"""The strategies that are held against each other, whichever is asked for."""
DEAR = 0.5
"""Share of the training beyond which a search is advised against."""


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
    if not known:
        return None
    try:
        planned = {name: _planned(spec, name, dataset_size, largest) for name in {*COMPARED, spec.search.strategy}}
    except Infeasible:
        return None
    fewest = min(planned["full"])
    local_batch, gpus = planned["full"][fewest][-1], spec.cluster.gpus_per_node
    batch = local_batch * fewest * gpus
    todo = work(spec, batch=batch, world=fewest * gpus, dataset_size=dataset_size, eval_size=None, eval_batch_size=None)
    step = step_of(known, local_batch)
    if step is None or not todo.steps:
        return None
    node_hours = fewest * todo.epochs * todo.steps * step / 3600
    shares = {
        name: expected_by(spec, list(jobs.items()), known).node_hours / node_hours for name, jobs in planned.items()
    }
    ordered = {name: shares[name] for name in sorted(shares, key=lambda name: (shares[name], name))}
    return Worth(fewest, batch, node_hours, ordered)


def _planned(spec: JobSpec, strategy: str, dataset_size: int, largest: Limit) -> dict[int, tuple[int, ...]]:
    search = spec.search.model_copy(update={"strategy": strategy})
    return probes(spec.model_copy(update={"search": search}), dataset_size=dataset_size, max_local_batch=largest)
