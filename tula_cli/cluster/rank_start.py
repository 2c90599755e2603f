"""What a supervisor starts its ranks with: the command, the environment and the folder of each."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.forkserver import RankCommand
from tula_cli.cluster.slurm import sbatch
from tula_cli.host import network
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.tasks import CheckTask, Task


def world_size(task: Task) -> int:
    return task.nodes * task.spec.cluster.gpus_per_node


def first_rank(allocation: Allocation, task: Task) -> int:
    """Return the lowest rank that a supervisor starts."""
    return allocation.index * ranks_of(task)


def ranks_of(task: Task) -> int:
    """Return how many ranks a supervisor has that a scheduler starts: one, or those of its node."""
    return task.spec.cluster.gpus_per_node if task.spec.task_per_node else 1


def has_tagged_lines(task: Task) -> bool:
    """Return whether lines of a log begin with their rank, but those of its lowest: the worker's do, and those of supervisors that share one."""
    return not runs_script(task) or shares_node_log(task)


def shares_node_log(task: Task) -> bool:
    """Return whether a scheduler starts a supervisor a rank, and those of a node write into one log."""
    return task.spec.cluster.kind != "local" and not task.spec.task_per_node


def rendezvous_address(task: Task) -> str:
    """Return where torchrun's agents meet, or the ranks of a script; a port taken meanwhile is an exit reason of its own.

    Raises:
        JobFailed: there is no such network interface.
    """
    cluster = task.spec.cluster
    if not (_uses_torchrun(task) or runs_script(task)):
        return ""
    interface = cluster.interface or ("lo" if cluster.kind == "local" else None)
    return f"{network.own_address(interface)}:{network.free_port()}"


def runs_script(task: Task) -> bool:
    """Return whether a task starts a script of the user's own. A check looks at nodes, whatever is to run there."""
    return task.spec.script is not None and not isinstance(task, CheckTask)


def _uses_torchrun(task: Task) -> bool:
    """Return whether torchrun starts the ranks of a node; else supervisors start them themselves."""
    cluster = task.spec.cluster
    return cluster.kind == "slurm" and cluster.slurm is not None and cluster.slurm.launcher == "torchrun"


def visible_gpus(starts: Sequence[RankCommand]) -> list[str]:
    """Return the GPUs of these ranks as CUDA_VISIBLE_DEVICES names them; empty for all that are to be seen."""
    environment = starts[0].environment
    names = environment.get("CUDA_VISIBLE_DEVICES", "")
    visible = [name.strip() for name in names.split(",") if name.strip()]
    ranks = [int(start.environment["LOCAL_RANK"]) for start in starts if "LOCAL_RANK" in start.environment]
    if not ranks:
        return visible
    return [visible[rank % len(visible)] for rank in ranks] if visible else [str(rank) for rank in ranks]


@dataclass(frozen=True)
class RankStart:
    """How one supervisor starts its ranks of one attempt."""

    run: RunDir
    allocation: Allocation
    task: Task
    command: LeaderCommand

    def rank_commands(self, log: Path | None) -> list[RankCommand]:
        """Return what this supervisor starts: torchrun, its own rank, or all ranks of this machine.

        Args:
            log: that its ranks open; None where they are given what to write into.
        """
        argv, folder = tuple(self.argv()), self._python_folder()
        return [RankCommand(argv, environment, folder, str(log or "")) for environment in self.environments()]

    def argv(self) -> list[str]:
        """Return the command line of a rank, or of torchrun, which starts those of a node."""
        task, spec = self.task, self.task.spec
        worker = ["-m", "tula_cli.worker", str(self.run.path.resolve()), task.id, str(self.command.attempt)]
        wrapper = [] if self.allocation.is_local else sbatch.wrapper_words(spec, environ=self.allocation.environ)
        if not _uses_torchrun(task):
            return [*wrapper, sys.executable, "-u", *worker]
        address, _, port = self.command.meeting.rpartition(":")
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--max-restarts=0"),
            *(f"--nnodes={task.nodes}", f"--node-rank={self.allocation.index}"),
            *(f"--master-addr={address}", f"--master-port={port}"),
            f"--nproc-per-node={spec.cluster.gpus_per_node}",
        ]
        if not wrapper:
            return [*torchrun, *worker]
        return [*torchrun, "--no-python", *wrapper, sys.executable, "-u", *worker]

    def environments(self) -> list[dict[str, str]]:
        """Return the environment of each process that this supervisor starts."""
        allocation = self.allocation
        threads = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(self._threads_per_rank())}
        variables = {**allocation.environ, **threads, **allocation.time_limit_variable()}
        if _uses_torchrun(self.task):
            return [variables]
        # A rendezvous of the site's set-up lines, or of a shell, is not ours.
        variables = {name: value for name, value in variables.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
        world = world_size(self.task)
        ranks = [(rank, rank) for rank in range(world)]
        if not allocation.is_local:
            ranks = [(allocation.index, allocation.local_index)]
        return [
            {**variables, "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world)}
            for rank, local in ranks
        ]

    def _python_folder(self) -> str:
        """Return where python finds the user's code first: what was submitted runs. The ranks then go to workdir."""
        task = self.task
        code = self.run.code_dir(task.code) if task.code else Path(task.workdir)
        return str(code) if code.is_dir() else task.workdir  # the ranks say what is missing

    def _threads_per_rank(self) -> int:
        """Return the threads of a rank. On this machine the ranks share its cores, one thread each."""
        if self.allocation.is_local:
            return 1
        threads = self.allocation.cpus or 1
        return max(1, threads // self.task.spec.cluster.gpus_per_node) if _uses_torchrun(self.task) else threads
