"""A user's script as a program, and its start: command line with its values, environment of each process, plan for the shim."""

import os
import shlex
import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.rank_processes import RankCommand, find_rendezvous_address
from tula_cli.cluster.rank_program import RankProgram
from tula_cli.cluster.scripts import methods
from tula_cli.cluster.scripts.methods import copy_shim
from tula_cli.host.devices import has_gpu
from tula_cli.host.network import make_interface_variables
from tula_cli.run.directory import RunDir
from tula_cli.run.files import make_folder, make_write_error
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.results import PlannedBranch
from tula_cli.run.records.scripts import BranchPlan, ExpectedValues, KillPlan, ShimPlan
from tula_cli.run.records.tasks import Task
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.run.script_command import list_snapshot_python_path, move_command_to_snapshot
from tula_cli.spec.job import JobSpec, compute_lr_scale
from tula_cli.spec.scripts.placeholders import fill_command, fill_text
from tula_cli.spec.scripts.script import Script, count_script_samples, count_script_steps


@dataclass(frozen=True)
class ScriptProcess:
    """The position of a process in a job, and the rendezvous address."""

    nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    rank: int | None = None  # None if the command itself starts the ranks of a node
    local_rank: int | None = None


def list_placeholder_values(
    spec: JobSpec,
    process: ScriptProcess,
    *,
    batch: int,
    out: Path,
    run: Path,
    workers: int,
    checkpoint: str = "",
    splits: int = 1,
) -> dict[str, str | float]:
    """Return the value of each placeholder that has one.

    Args:
        out: folder of the script's files.
        workers: data-loader processes per rank.
        checkpoint: the newest checkpoint; empty if there is none.
        splits: number of parts into which each micro-batch of train.accumulate is split.
    """
    script, gpus = spec.get_script(), spec.cluster.gpus_per_node
    local_batch = batch // (process.nodes * gpus)
    accumulate = spec.train.accumulate * splits
    micro_batch = local_batch // accumulate
    values: dict[str, str | float | None] = {
        "batch": batch,
        "local_batch": local_batch,
        "micro_batch": micro_batch,
        "accumulate": accumulate,
        "accumulate_total": batch // micro_batch,
        "lr": compute_script_learning_rate(spec, batch),
        "lr_factor": compute_lr_scale(spec, batch),
        "epochs": script.length.epochs,
        "seed": spec.train.seed,
        "workers": workers,
        "nodes": process.nodes,
        "gpus_per_node": gpus,
        "world": process.nodes * gpus,
        "node_rank": process.node_rank,
        "master_addr": process.master_addr,
        "master_port": process.master_port,
        "rank": process.rank,
        "local_rank": process.local_rank,
        "out": str(out),
        "checkpoint": checkpoint or None,
        "tula_run": str(run),
    }
    if (size := script.known_dataset_size) is not None:
        values["steps"] = count_script_steps(script, batch, size)
        values["samples"] = count_script_samples(script, size)
    return {name: value for name, value in values.items() if value is not None}


def compute_script_learning_rate(spec: JobSpec, batch: int) -> float | None:
    """Return the learning rate for the command line at a global batch; None if the script sets it itself."""
    lr = spec.get_script().reference.lr
    return None if lr is None else lr * compute_lr_scale(spec, batch)


MAX_PROBE_STEPS = 1000
"""Maximum timed steps of a probe, reached if steps are very short."""
ROW_SECONDS = 2.0
"""Seconds between two rows of a training; samples since the last row are not counted towards a checkpoint."""
PROBE_HANG_SECONDS = 60.0
"""Minimum seconds without a heartbeat after which a probe that has stepped is killed as stuck."""
TRAINING_HANG_SECONDS = 600.0
"""The same for a training, which may evaluate and save unseen by the shim, and must not be restarted needlessly."""
_GROUP_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TULA_PLAN")


class ScriptProgram(RankProgram):
    """A user's script as a rank program; base class of its probes, trainings, resume tests and rate searches."""

    mode: ClassVar[Literal["probe", "train"]] = "train"
    """Whether the shim measures and stops the script, or only reports."""
    silence: ClassVar[float] = TRAINING_HANG_SECONDS
    """Minimum seconds without a heartbeat after which the script is killed as stuck."""
    records_steps: ClassVar[bool] = False
    """Whether each step has a row."""

    @property
    def script(self) -> Script:
        return self.task.spec.get_script()

    def get_attempt(self, command: LeaderCommand) -> ScriptAttempt:
        return ScriptAttempt(self.run.path, self.task.id, command.attempt)

    def find_rank_rendezvous(self) -> str:
        return find_rendezvous_address(self.task)

    def make_starter(self, allocation: Allocation, command: LeaderCommand) -> "ScriptStart":
        return ScriptStart(self, allocation, command)

    def list_ranks(self, allocation: Allocation) -> range:
        """Return the ranks that a supervisor, or the command that it runs, starts."""
        ranks = [position.rank for position in allocation.list_ranks(self.task)]
        return range(ranks[0], ranks[-1] + 1)

    def find_clean_exit_failure(self) -> Failure | None:
        return None  # the leader then judges by the files of the ranks

    def record_attempt_results(self, command: LeaderCommand, failure: Failure | None) -> Failure | None:
        """Record the results of an attempt; return why it failed, corrected by these results."""
        refusals = (reported for reported in self.get_attempt(command).read_failures() if reported.where == "method")
        refused = next((refusal.description for refusal in refusals), "")
        if refused:  # the script may have finished nevertheless
            return make_script_failure(failure, refused, permanent=True)
        return self.record_results(command, failure)

    @abstractmethod
    def record_results(self, command: LeaderCommand, failure: Failure | None) -> Failure | None:
        """Record the results of an attempt whose method the script did not refuse; return why it failed."""

    def preview_command_at_batch(self, batch: int, *, branch: PlannedBranch | None = None) -> str:
        """Return the shell command line of the first process at a batch, without side effects."""
        command = LeaderCommand(
            task=self.task.id, attempt=1, ranks=self.task.ranks, meeting="127.0.0.1:0", batch=batch, branch=branch
        )
        start = self.make_starter(Allocation(0, 1, environ={}), command)
        return shlex.join(start.make_command_line(start.list_processes()[0]))

    @property
    def log_patterns(self) -> list[str]:
        return [pattern for pattern in self.script.metric.values() if isinstance(pattern, str)]

    def find_reason_to_stop(self, command: LeaderCommand) -> Failure | None:
        """Return why a start must be stopped although its ranks are not stuck, or None."""
        return None

    def list_path_values(self, out: Path, *, batch: int, nodes: int) -> dict[str, str | float]:
        """Return the values of the placeholders in paths, which are the same for all processes."""
        return list_placeholder_values(
            self.task.spec, ScriptProcess(nodes, 0, "", 0), batch=batch, out=out, run=self.run.path.absolute(), workers=0,
            splits=self.task.micro_batch_splits,
        )  # fmt: skip

    # --- Settings of one start

    @abstractmethod
    def get_output_folder(self, command: LeaderCommand) -> Path:
        """Return the script's output folder, {out}."""

    def list_watched_folders(self, command: LeaderCommand) -> tuple[str, ...] | None:
        """Return the folders outside of which changed files are noted and restored; None: the script may write anywhere."""
        return (str(self.get_output_folder(command)),)

    def make_spec(self, command: LeaderCommand) -> JobSpec:
        """Return the job with the settings of this start."""
        return self.task.spec

    def get_extra_arguments(self, command: LeaderCommand) -> str:
        """Return the arguments after the command line: those to resume, if there is a checkpoint."""
        resume = self.script.resume
        return resume.args if resume is not None and command.checkpoint else ""

    def get_hook_checkpoint_path(self, command: LeaderCommand, values: Mapping[str, str | float]) -> str:
        """Return the checkpoint path for the script's callback: resume.checkpoint without *, else a file in {out}."""
        resume = self.script.resume
        if resume is None or "*" in resume.checkpoint:
            return str(self.get_output_folder(command) / "checkpoint.pt")
        return fill_text(resume.checkpoint, values)

    @property
    def extra_probe_variables(self) -> Mapping[str, str]:
        """Environment variables that are set for probes only; they keep W&B from publishing probes as runs."""
        return {"WANDB_MODE": "disabled"}

    def count_steps_per_epoch(self, batch: int) -> int:
        """Return the number of steps after which AGS refreshes its factors again."""
        return methods.NEVER_REFRESH_STEPS

    def make_kill_plan(self, command: LeaderCommand) -> KillPlan | None:
        """Return the plan by which the shim kills the start after a checkpoint; None if it does not."""
        return None

    def make_branch_plan(self, command: LeaderCommand) -> BranchPlan | None:
        """Return how the shim shapes and ends a branch of a search for a learning rate; None for other starts."""
        return None


def make_script_failure(failure: Failure | None, message: str, *, permanent: bool = False) -> Failure:
    """Return the failure of a start of a script, with the host and rank of `failure` if its ranks have failed."""
    rank, host = (None, "") if failure is None else (failure.rank, failure.host)
    return Failure(outcome="user", message=message, rank=rank, host=host, permanent=permanent)


class AttemptContext:
    """The run, the task and the files of one attempt of a script, for its start and its monitor."""

    program: ScriptProgram
    command: LeaderCommand

    @property
    def run(self) -> RunDir:
        return self.program.run

    @property
    def task(self) -> Task:
        return self.program.task

    @property
    def attempt(self) -> ScriptAttempt:
        return self.program.get_attempt(self.command)


@dataclass(frozen=True)
class ScriptStart(AttemptContext):
    """Makes the commands with which one supervisor starts a script in one attempt, and the plan for the shim.

    Args:
        command: command of the leader; its `batch` is the one that a probe measures.
    """

    program: ScriptProgram
    allocation: Allocation
    command: LeaderCommand

    def make_rank_commands(self, log: Path) -> list[RankCommand]:
        """Return the processes that this supervisor starts; creates the output folder, the copied shim and the plan.

        Raises:
            TulaError: the run directory cannot be written.
            JobFailed: this node lacks the configured network interface, or the snapshot of the code is gone.
        """
        folder = self.program.get_output_folder(self.command)
        try:
            make_folder(folder)
            shim = copy_shim(self.run.path)
        except OSError as error:
            raise make_write_error(self.run.path, error) from error
        if self.allocation.is_leader:
            self.attempt.write_plan(self.make_plan())
        workdir, log_path = self.task.workdir, str(log)
        return [
            RankCommand(self.make_command_line(process), self._make_environment(process, shim), workdir, log_path)
            for process in self.list_processes()
        ]

    def list_processes(self) -> list[ScriptProcess]:
        """Return the processes of this supervisor: a rank, all ranks of a node or machine, or a command per node."""
        task, positions = self.task, self.allocation.list_ranks(self.task)
        address, _, port = self.command.meeting.rpartition(":")

        def make_process(node: int, rank: int | None = None, local_rank: int | None = None) -> ScriptProcess:
            return ScriptProcess(task.nodes, node, address.strip("[]"), int(port), rank, local_rank)

        if self.program.script.launch == "node":
            return [make_process(node) for node in dict.fromkeys(position.node for position in positions)]
        return [make_process(position.node, position.rank, position.local_rank) for position in positions]

    def make_plan(self) -> ShimPlan:
        spec, script, attempt, program = self.task.spec, self.program.script, self.attempt, self.program
        counted = script.placeholders & {"accumulate", "accumulate_total", "micro_batch"}
        lr = compute_script_learning_rate(program.make_spec(self.command), self.command.batch)
        expected = ExpectedValues(
            world=self.command.ranks,
            batch=self.command.batch,
            accumulate=spec.train.accumulate * self.task.micro_batch_splits if counted else None,
            lr=lr if "lr" in script.placeholders else None,
            dataset=None if script.dataset_size == "auto" else script.dataset_size,
        )
        search = spec.search
        return ShimPlan(
            task=self.task.id,
            attempt=self.command.attempt,
            folder=str(attempt.path),
            mode=program.mode,
            expected=expected,
            warmup=search.min_steps,
            min_steps=search.min_steps,
            max_steps=max(search.min_steps, MAX_PROBE_STEPS),
            seconds=search.min_seconds,
            split_steps=search.max_extra_timing_steps,
            row=0.0 if program.records_steps else ROW_SECONDS,
            save=script.save == "hooks",
            checkpoint=program.get_hook_checkpoint_path(
                self.command, self._list_placeholder_values(self.list_processes()[0])
            ),
            ags=methods.make_ags_plan(
                self.run, self.task, self.command, count_steps_per_epoch=program.count_steps_per_epoch
            ),
            ortho=methods.make_ortho_plan(self.run, self.task, self.command),
            schedule=self.command.rehearsal is not None,
            files=program.list_watched_folders(self.command),
            rehearsal=program.make_kill_plan(self.command),
            branch=program.make_branch_plan(self.command),
        )

    def _list_placeholder_values(self, process: ScriptProcess) -> dict[str, str | float]:
        command, program, workers = self.command, self.program, self.task.loader_workers
        if workers == "auto":
            # Without a scheduler, all ranks share the cores of this machine.
            cores = self.allocation.count_cores_per_rank(self.task) or len(os.sched_getaffinity(0)) / command.ranks
            workers = self.task.spec.train.count_loaders(cores)
        return list_placeholder_values(
            program.make_spec(command), process, batch=command.batch, out=program.get_output_folder(command),
            run=self.run.path.absolute(), workers=workers, checkpoint=command.checkpoint,
            splits=self.task.micro_batch_splits,
        )  # fmt: skip

    def make_command_line(self, process: ScriptProcess) -> tuple[str, ...]:
        values = self._list_placeholder_values(process)
        arguments = fill_command(self.program.script.command, values)
        arguments += fill_command(self.program.get_extra_arguments(self.command), values)
        arguments = move_command_to_snapshot(arguments, Path(self.task.workdir), self._code_snapshot)
        if arguments[0].endswith(".py"):
            arguments = [sys.executable, "-u", *arguments]
        return (*self.allocation.list_wrapper_arguments(self.task.spec), *arguments)

    def _make_environment(self, process: ScriptProcess, shim: Path) -> dict[str, str]:
        """Return the environment of a process; inherited rendezvous variables (set-up lines, shell) are dropped."""
        spec, allocation = self.task.spec, self.allocation
        network = make_interface_variables(spec.cluster.network_interface)
        inherited = {name: value for name, value in allocation.environ.items() if name not in _GROUP_VARIABLES}
        code = os.pathsep.join(list_snapshot_python_path(self._code_snapshot))
        path = os.pathsep.join(filter(None, [str(shim), code, inherited.get("PYTHONPATH", "")]))
        plan = str(self.attempt.plan_path)
        variables = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "TULA_PLAN": plan, "TULA_CODE": code}
        variables |= self.program.extra_probe_variables
        if spec.cluster.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        elif process.rank is None and len(self.list_processes()) > 1 and has_gpu():  # the nodes share this machine
            variables["CUDA_VISIBLE_DEVICES"] = self._list_gpus_of_node(process.node_rank)
        if process.rank is None:
            return {**network, **inherited, **variables}
        cluster, ranks = spec.cluster, self.command.ranks
        local_world = cluster.backend.count_ranks_per_machine(ranks, gpus_per_node=cluster.gpus_per_node)
        group = {
            "RANK": process.rank, "LOCAL_RANK": process.local_rank, "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": local_world, "MASTER_ADDR": process.master_addr, "MASTER_PORT": process.master_port,
        }  # fmt: skip
        threads = {"OMP_NUM_THREADS": str(allocation.count_cores_per_rank(self.task) or 1)}
        return {**threads, **network, **inherited, **variables, **{name: str(value) for name, value in group.items()}}

    @property
    def _code_snapshot(self) -> Path | None:
        """The snapshot of the user's code; None if there is none."""
        return self.run.get_code_dir(self.task.code).absolute() if self.task.code else None

    def _list_gpus_of_node(self, node: int) -> str:
        """Return the GPUs of this machine that stand in for those of a node, as in CUDA_VISIBLE_DEVICES."""
        gpus = self.task.spec.cluster.gpus_per_node
        names = [name for name in self.allocation.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        gpu_numbers = range(node * gpus, (node + 1) * gpus)
        return ",".join(names[number] if number < len(names) else str(number) for number in gpu_numbers)
