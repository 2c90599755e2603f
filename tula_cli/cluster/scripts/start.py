"""The start of a script by a supervisor: command line and environment of each process, and the plan for the shim."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.rank_processes import RankCommand, runs_script
from tula_cli.cluster.scripts import methods, placeholders
from tula_cli.cluster.scripts.methods import copy_shim
from tula_cli.cluster.scripts.placeholders import ScriptProcess, get_script
from tula_cli.cluster.scripts.resume_test import ResumeTest
from tula_cli.cluster.scripts.training import ScriptTraining
from tula_cli.cluster.slurm import sbatch
from tula_cli.host.devices import has_gpu
from tula_cli.host.network import make_interface_variables
from tula_cli.run.directory import RunDir
from tula_cli.run.files import make_folder, write_error
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.scripts import ExpectedValues, ShimPlan
from tula_cli.run.records.tasks import ProbeTask, RehearsalTask, Task, TrainTask
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.run.script_files import list_snapshot_python_path, move_command_to_snapshot
from tula_cli.spec.job import JobSpec
from tula_cli.spec.scripts.placeholders import fill, render
from tula_cli.spec.scripts.script import Script

MAX_PROBE_STEPS = 1000
"""Maximum timed steps of a probe, reached if steps are very short."""
ROW_SECONDS = 2.0
"""Seconds between two rows of a training; samples since the last row are not counted towards a checkpoint."""
_GROUP_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TULA_PLAN")


@dataclass(frozen=True)
class ScriptStart:
    """How one supervisor starts a script in one attempt.

    Args:
        command: command of the leader; its `batch` is the one that a probe measures.
    """

    run: RunDir
    allocation: Allocation
    task: Task
    command: LeaderCommand

    @property
    def attempt(self) -> ScriptAttempt:
        return ScriptAttempt(self.run.path, self.task.id, self.command.attempt)

    def rank_commands(self, log: Path | None) -> list[RankCommand]:
        """Return the processes that this supervisor starts; creates the output folder, the copied shim and the plan.

        Raises:
            TulaError: the run directory cannot be written.
            JobFailed: this node lacks the configured network interface, or the snapshot of the code is gone.
        """
        folder = self._output_folder()
        try:
            make_folder(folder)
            shim = copy_shim(self.run.path)
        except OSError as error:
            raise write_error(self.run.path, error) from error
        if self.allocation.is_leader:
            self.attempt.write_plan(self.plan())
        return [
            RankCommand(self.argv(process), self._environment(process, shim), self.task.workdir, str(log or ""))
            for process in self.processes()
        ]

    @property
    def _spec(self) -> JobSpec:
        """The job; for a resume test, with the length of the current start."""
        spec, start = self.task.spec, self.command.rehearsal
        if start is None:
            return spec
        return spec.model_copy(update={"script": get_script(spec).model_copy(update={"length": start.length})})

    def processes(self) -> list[ScriptProcess]:
        """Return the processes of this supervisor: a rank, all ranks of a node or machine, or a command per node."""
        task, allocation = self.task, self.allocation
        address, _, port = self.command.meeting.rpartition(":")
        gpus = task.spec.cluster.gpus_per_node

        def place(node: int, rank: int | None = None, local_rank: int | None = None) -> ScriptProcess:
            return ScriptProcess(task.nodes, node, address.strip("[]"), int(port), rank, local_rank)

        if get_script(task.spec).launch == "node":
            return [place(node) for node in (range(task.nodes) if allocation.is_local else [allocation.index])]
        if allocation.is_local:  # the machine's GPUs are counted through, whatever node they are taken for
            return [place(rank // gpus, rank, rank) for rank in range(task.nodes * gpus)]
        if task.spec.task_per_node:
            return [place(allocation.index, allocation.index * gpus + local, local) for local in range(gpus)]
        return [place(allocation.index // gpus, allocation.index, allocation.local_index)]

    def plan(self) -> ShimPlan:
        """Return the plan for the shim."""
        spec, script, attempt = self.task.spec, get_script(self.task.spec), self.attempt
        counted = script.placeholders & {"accumulate", "accumulate_total", "micro_batch"}
        expected = ExpectedValues(
            world=self.command.ranks,
            batch=self.command.batch,
            accumulate=spec.train.accumulate * self._splits if counted else None,
            lr=placeholders.get_learning_rate(spec, self.command.batch) if "lr" in script.placeholders else None,
            dataset=None if script.dataset_size == "auto" else script.dataset_size,
        )
        search, start = spec.search, self.command.rehearsal
        return ShimPlan(
            task=self.task.id,
            attempt=self.command.attempt,
            folder=str(attempt.path),
            mode="probe" if isinstance(self.task, ProbeTask) else "train",
            expected=expected,
            warmup=search.warmup_steps,
            min_steps=search.min_steps,
            max_steps=max(search.min_steps, MAX_PROBE_STEPS),
            seconds=search.min_seconds,
            split_steps=search.split_steps,
            stop=script.probe.stop,
            row=ROW_SECONDS if start is None else 0.0,  # a row a step
            save=script.save == "hooks",
            checkpoint=self._hook_save_path(script),
            ags=methods.make_ags_plan(self.run, self.task, self.command, dataset_size=self._dataset_size()),
            ortho=methods.make_ortho_plan(self.run, self.task, self.command),
            schedule=start is not None,
            files=None if isinstance(self.task, TrainTask) else (str(self._output_folder()),),
            rehearsal=None if self._resume_test is None or start is None else self._resume_test.kill_plan(start),
        )

    def _dataset_size(self) -> int | None:
        return ScriptTraining(self.run, self.task).dataset_size if isinstance(self.task, TrainTask) else None

    def _hook_save_path(self, script: Script) -> str:
        """Return the checkpoint path for the script's callback: resume.checkpoint without *, else a file in {out}."""
        if isinstance(self.task, ProbeTask) or script.resume is None or "*" in script.resume.checkpoint:
            return str(self._output_folder() / "checkpoint.pt")
        return fill(script.resume.checkpoint, self._values(self.processes()[0]))

    def _output_folder(self) -> Path:
        task = self.task
        if self.command.rehearsal is not None:
            return Path(self.command.rehearsal.out)
        return (
            ScriptTraining(self.run, task).output_folder if isinstance(task, TrainTask) else self.attempt.output_folder
        )

    @property
    def _resume_test(self) -> ResumeTest | None:
        return ResumeTest(self.run, self.task) if isinstance(self.task, RehearsalTask) else None

    def _values(self, process: ScriptProcess) -> dict[str, str | float]:
        """Return the values of the placeholders."""
        spec = self._spec
        ranks = self.command.ranks
        workers = placeholders.count_loader_workers(
            spec, threads=self._cores_per_rank(), ranks_here=ranks, task=_as_training(self.task)
        )
        return placeholders.list_placeholder_values(
            spec, process, batch=self.command.batch, out=self._output_folder(), run=self.run.path.absolute(), workers=workers,
            checkpoint=self.command.checkpoint, splits=self._splits,
        )  # fmt: skip

    def argv(self, process: ScriptProcess) -> tuple[str, ...]:
        """Return the command line of a process."""
        spec, script = self.task.spec, get_script(self.task.spec)
        values = self._values(process)
        arguments = render(script.command, values)
        if isinstance(self.task, ProbeTask):
            arguments += render(script.probe.args, values)
        elif script.resume is not None and self.command.checkpoint:
            arguments += render(script.resume.args, values)
        arguments = move_command_to_snapshot(arguments, Path(self.task.workdir), self._code_snapshot)
        if arguments[0].endswith(".py"):
            arguments = [sys.executable, "-u", *arguments]
        wrapper = [] if self.allocation.is_local else sbatch.get_wrapper_words(spec, environ=self.allocation.environ)
        return (*wrapper, *arguments)

    @property
    def _splits(self) -> int:
        return self.task.splits if isinstance(self.task, TrainTask) else 1

    def _environment(self, process: ScriptProcess, shim: Path) -> dict[str, str]:
        """Return the environment of a process; inherited rendezvous variables (set-up lines, shell) are dropped."""
        spec, allocation = self.task.spec, self.allocation
        network = make_interface_variables(spec.cluster.interface, local=spec.cluster.kind == "local")
        inherited = network | {
            name: value for name, value in allocation.environ.items() if name not in _GROUP_VARIABLES
        }
        code = os.pathsep.join(list_snapshot_python_path(self._code_snapshot))
        path = os.pathsep.join(filter(None, [str(shim), code, inherited.get("PYTHONPATH", "")]))
        plan = str(self.attempt.plan_path)
        variables = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "TULA_PLAN": plan, "TULA_CODE": code}
        if not isinstance(self.task, TrainTask):
            variables |= get_script(spec).probe.environment
        if spec.cluster.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        elif process.rank is None and allocation.is_local and process.nodes > 1 and has_gpu():
            variables["CUDA_VISIBLE_DEVICES"] = self._gpus_of(process.node_rank)
        if process.rank is None:
            return {**inherited, **variables}
        local_world = self.command.ranks if allocation.is_local else spec.cluster.gpus_per_node
        group = {
            "RANK": process.rank, "LOCAL_RANK": process.local_rank, "WORLD_SIZE": self.command.ranks,
            "LOCAL_WORLD_SIZE": local_world, "MASTER_ADDR": process.master_addr, "MASTER_PORT": process.master_port,
        }  # fmt: skip
        threads = {"OMP_NUM_THREADS": str(self._cores_per_rank() or 1)}
        return {**threads, **inherited, **variables, **{name: str(value) for name, value in group.items()}}

    @property
    def _code_snapshot(self) -> Path | None:
        """The snapshot of the user's code; None if there is none."""
        return self.run.code_dir(self.task.code).absolute() if self.task.code else None

    def _gpus_of(self, node: int) -> str:
        """Return the GPUs of this machine that stand in for those of a node, as in CUDA_VISIBLE_DEVICES."""
        gpus = self.task.spec.cluster.gpus_per_node
        names = [name for name in self.allocation.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        own_numbers = range(node * gpus, (node + 1) * gpus)
        return ",".join(names[number] if number < len(names) else str(number) for number in own_numbers)

    def _cores_per_rank(self) -> int | None:
        """Return the cores that the scheduler allocates per rank; None if unknown."""
        cores = None if self.allocation.is_local else self.allocation.cpus
        if cores is None:
            return None
        cluster = self.task.spec.cluster
        return max(1, cores // (cluster.gpus_per_node if self.task.spec.task_per_node else 1))


def _as_training(task: Task) -> TrainTask | None:
    return task if isinstance(task, TrainTask) else None


def preview_command(run: RunDir, task: Task) -> str:
    """Return the shell command line of a task's first process, with its first batch, without side effects.

    Empty unless the task is a probe or training of a script.
    """
    if not isinstance(task, ProbeTask | TrainTask) or not runs_script(task):
        return ""
    world = task.ranks
    batch = task.batch if isinstance(task, TrainTask) else task.local_batches[0] * world
    command = LeaderCommand(task=task.id, attempt=1, ranks=world, meeting="127.0.0.1:0", batch=batch)
    start = ScriptStart(run, Allocation(0, 1, environ={}), task, command)
    return shlex.join(start.argv(start.processes()[0]))
