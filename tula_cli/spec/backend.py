"""Properties of the systems that run jobs, for plans, messages and waiting: this machine, SLURM, or a user's scheduler.

The `Scheduler` of a backend (`cluster/scheduler.py`) submits, monitors and cancels the jobs.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Backend:
    """A value of `cluster.kind`; the defaults are those of a user-defined scheduler."""

    title: str = "its scheduler"  # name in messages
    memory_setting: str = "cluster.options"  # the key that requests a node's memory
    grace: float = 60.0  # seconds after the end of a job for which its files may not be visible yet (NFS, Lustre)
    file_lag: float = 30.0  # seconds until a file written on another node is visible here (NFS caches a folder)
    # seconds between two queries for the states of jobs: the first interval, and the longest that it grows to
    poll: tuple[float, float] = (10.0, 60.0)
    has_queue: bool = True  # jobs wait for nodes, cost node-hours, and are chained
    inspects_on_node: bool = False  # whether a first job can build model and dataset if this machine cannot
    has_one_supervisor: bool = False  # whether one process starts all ranks of a job, instead of one per rank or node
    unused_settings: tuple[str, ...] = ()  # keys of section cluster without effect
    core_assigner: str = "the scheduler"  # assigns cores to each rank, in messages; empty if ranks share this machine's
    default_interface: str | None = None  # network interface of the ranks if the job names none; None: detected
    scheduler: str = ""  # module and class of the `Scheduler`; empty: `cluster.kind` names the user's

    def count_ranks_per_machine(self, ranks: int, *, gpus_per_node: int) -> int:
        """Return how many of a job's ranks share a machine."""
        return gpus_per_node

    def may_have_gpu(self, requested: Literal["auto", "cuda", "cpu"], *, here: str | None) -> bool:
        """Return whether the ranks may have GPUs.

        Args:
            requested: value of cluster.device.
            here: device of an inspection on this machine; None if there was none.
        """
        return requested != "cpu"

    @property
    def more_memory_advice(self) -> str:
        """Advice for a job that has run out of host memory."""
        return f"request more with {self.memory_setting}"


class LocalBackend(Backend):
    """Jobs are processes of this machine, which all nodes of the search share."""

    def count_ranks_per_machine(self, ranks: int, *, gpus_per_node: int) -> int:
        return ranks

    def may_have_gpu(self, requested: Literal["auto", "cuda", "cpu"], *, here: str | None) -> bool:
        return requested != "cpu" and here == "cuda"

    @property
    def more_memory_advice(self) -> str:
        return "stop other programs on this machine"


BACKENDS: dict[str, Backend] = {
    "local": LocalBackend(
        memory_setting="cluster.slurm.memory",
        grace=2.0,
        file_lag=2.0,
        poll=(0.5, 2.0),
        has_queue=False,
        has_one_supervisor=True,
        core_assigner="",
        unused_settings=("minutes", "python", "setup"),
        default_interface="lo",
        scheduler="tula_cli.cluster.scheduler:LocalScheduler",
    ),
    "slurm": Backend(
        "SLURM",
        "cluster.slurm.memory",
        inspects_on_node=True,
        core_assigner="SLURM",
        scheduler="tula_cli.cluster.slurm.scheduler:SlurmScheduler",
    ),
}
"""The included backends by `cluster.kind`."""


def get_backend(kind: str) -> Backend:
    """Return the backend for a value of `cluster.kind`, which job records also contain."""
    return BACKENDS.get(kind) or Backend()
