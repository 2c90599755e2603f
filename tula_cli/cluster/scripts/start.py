"""What a supervisor starts a script with: the command line of each process, its environment, and the shim's plan."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.forkserver import Start
from tula_cli.cluster.rank_start import runs_script, world_size
from tula_cli.cluster.scripts import scaled, values
from tula_cli.cluster.scripts.copies import copy_shim
from tula_cli.cluster.scripts.rehearsing.script_rehearsal import ScriptRehearsal
from tula_cli.cluster.scripts.script_training import ScriptTraining
from tula_cli.cluster.scripts.values import Place, own
from tula_cli.cluster.slurm import sbatch
from tula_cli.host.devices import has_gpu
from tula_cli.host.network import variables
from tula_cli.run.directory import RunDir
from tula_cli.run.files import cannot_write, make_folder
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.shim import Expected, ShimPlan
from tula_cli.run.records.tasks import ProbeTask, RehearsalTask, Task, TrainTask
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.run.source.command_file import in_snapshot, snapshot_path
from tula_cli.spec.job import JobSpec
from tula_cli.spec.scripts.own_script import Script
from tula_cli.spec.scripts.placeholders import fill, render

MOST_STEPS = 1000
"""Timed steps of a probe whose steps take next to nothing."""
ROW_SECONDS = 2.0
"""Between two rows of a training: what was trained since the last one is not counted to a checkpoint."""
_OF_A_GROUP = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TULA_PLAN")


@dataclass(frozen=True)
class ScriptStart:
    """How one supervisor starts a script in one attempt.

    Args:
        command: the leader's; of a probe its `batch` is measured.
    """

    run: RunDir
    allocation: Allocation
    task: Task
    command: LeaderCommand

    @property
    def attempt(self) -> ScriptAttempt:
        return ScriptAttempt(self.run.path, self.task.id, self.command.attempt)

    def starts(self, log: Path | None) -> list[Start]:
        """Return what this supervisor starts; the plan is written, and what the processes need is made.

        Raises:
            TulaError: the run directory cannot be written.
            JobFailed: this node has no such network interface, or the snapshot of the code is gone.
        """
        folder = self._out()
        try:
            make_folder(folder)
            shim = copy_shim(self.run.path)
        except OSError as error:
            raise cannot_write(self.run.path, error) from error
        if self.allocation.leader:
            self.attempt.write_plan(self.plan())
        return [
            Start(self.argv(place), self._environment(place, shim), self.task.workdir, str(log or ""))
            for place in self.places()
        ]

    @property
    def _spec(self) -> JobSpec:
        """The job; of a rehearsal with the length of this start."""
        spec, start = self.task.spec, self.command.rehearsal
        if start is None:
            return spec
        return spec.model_copy(update={"script": own(spec).model_copy(update={"length": start.length})})

    def places(self) -> list[Place]:
        """Return the processes that this supervisor starts: a rank's, all ranks of a node or machine, or a node's command."""
        task, allocation = self.task, self.allocation
        address, _, port = self.command.meeting.rpartition(":")
        gpus = task.spec.cluster.gpus_per_node

        def place(node: int, rank: int | None = None, local_rank: int | None = None) -> Place:
            return Place(task.nodes, node, address.strip("[]"), int(port), rank, local_rank)

        if own(task.spec).launch == "node":
            return [place(node) for node in (range(task.nodes) if allocation.local else [allocation.index])]
        if allocation.local:  # the machine's GPUs are counted through, whatever node they are taken for
            return [place(rank // gpus, rank, rank) for rank in range(task.nodes * gpus)]
        if task.spec.task_per_node:
            return [place(allocation.index, allocation.index * gpus + local, local) for local in range(gpus)]
        return [place(allocation.index // gpus, allocation.index, allocation.local_index)]

    def plan(self) -> ShimPlan:
        """Return what the shim is asked for."""
        spec, script, attempt = self.task.spec, own(self.task.spec), self.attempt
        counted = script.placeholders & {"accumulate", "accumulate_total", "micro_batch"}
        expected = Expected(
            world=self.command.ranks,
            batch=self.command.batch,
            accumulate=spec.train.accumulate * self._splits if counted else None,
            lr=values.learning_rate(spec, self.command.batch) if "lr" in script.placeholders else None,
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
            max_steps=max(search.min_steps, MOST_STEPS),
            seconds=search.min_seconds,
            split_steps=search.split_steps,
            stop=script.probe.stop,
            row=ROW_SECONDS if start is None else 0.0,  # a row a step
            save=script.save == "hooks",
            checkpoint=self._saved_by_hooks(script),
            ags=scaled.ags_plan(self.run, self.task, self.command, dataset_size=self._dataset_size()),
            ortho=scaled.ortho_plan(self.run, self.task, self.command),
            schedule=start is not None,
            files=None if isinstance(self.task, TrainTask) else (str(self._out()),),
            rehearsal=None if self._rehearsed is None or start is None else self._rehearsed.killing(start),
        )

    def _dataset_size(self) -> int | None:
        return ScriptTraining(self.run, self.task).dataset_size if isinstance(self.task, TrainTask) else None

    def _saved_by_hooks(self, script: Script) -> str:
        """Return the path that the script's callback is given: as resume.checkpoint finds it, where that is one path."""
        if isinstance(self.task, ProbeTask) or script.resume is None or "*" in script.resume.checkpoint:
            return str(self._out() / "checkpoint.pt")
        return fill(script.resume.checkpoint, self._values(self.places()[0]))

    def _out(self) -> Path:
        task = self.task
        if self.command.rehearsal is not None:
            return Path(self.command.rehearsal.out)
        return ScriptTraining(self.run, task).out if isinstance(task, TrainTask) else self.attempt.out

    @property
    def _rehearsed(self) -> ScriptRehearsal | None:
        return ScriptRehearsal(self.run, self.task) if isinstance(self.task, RehearsalTask) else None

    def _values(self, place: Place) -> dict[str, str | float]:
        """Return what the placeholders stand for."""
        spec = self._spec
        ranks = self.command.ranks
        workers = values.workers(spec, threads=self._threads(), ranks_here=ranks, task=_training(self.task))
        return values.values(
            spec, place, batch=self.command.batch, out=self._out(), run=self.run.path.absolute(), workers=workers,
            checkpoint=self.command.checkpoint, splits=self._splits,
        )  # fmt: skip

    def argv(self, place: Place) -> tuple[str, ...]:
        """Return the command line of a process."""
        spec, script = self.task.spec, own(self.task.spec)
        known = self._values(place)
        words = render(script.command, known)
        if isinstance(self.task, ProbeTask):
            words += render(script.probe.args, known)
        elif script.resume is not None and self.command.checkpoint:
            words += render(script.resume.args, known)
        words = in_snapshot(words, Path(self.task.workdir), self._code)
        if words[0].endswith(".py"):
            words = [sys.executable, "-u", *words]
        wrapper = [] if self.allocation.local else sbatch.wrapper(spec, environ=self.allocation.environ)
        return (*wrapper, *words)

    @property
    def _splits(self) -> int:
        return self.task.splits if isinstance(self.task, TrainTask) else 1

    def _environment(self, place: Place, shim: Path) -> dict[str, str]:
        """Return the environment of a process. A rendezvous of the site's set-up lines, or of a shell, is not ours."""
        spec, allocation = self.task.spec, self.allocation
        network = variables(spec.cluster.interface, local=spec.cluster.kind == "local")
        given = network | {name: value for name, value in allocation.environ.items() if name not in _OF_A_GROUP}
        code = os.pathsep.join(snapshot_path(self._code))
        path = os.pathsep.join(filter(None, [str(shim), code, given.get("PYTHONPATH", "")]))
        plan = str(self.attempt.plan_path)
        made = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "TULA_PLAN": plan, "TULA_CODE": code}
        if not isinstance(self.task, TrainTask):
            made |= own(spec).probe.environment
        if spec.cluster.device == "cpu":
            made["CUDA_VISIBLE_DEVICES"] = ""
        elif place.rank is None and allocation.local and place.nodes > 1 and has_gpu():
            made["CUDA_VISIBLE_DEVICES"] = self._gpus_of(place.node_rank)
        if place.rank is None:
            return {**given, **made}
        local_world = self.command.ranks if allocation.local else spec.cluster.gpus_per_node
        group = {
            "RANK": place.rank, "LOCAL_RANK": place.local_rank, "WORLD_SIZE": self.command.ranks,
            "LOCAL_WORLD_SIZE": local_world, "MASTER_ADDR": place.master_addr, "MASTER_PORT": place.master_port,
        }  # fmt: skip
        threads = {"OMP_NUM_THREADS": str(self._threads() or 1)}
        return {**threads, **given, **made, **{name: str(value) for name, value in group.items()}}

    @property
    def _code(self) -> Path | None:
        """The snapshot of the user's code; None where none was taken."""
        return self.run.code_dir(self.task.code).absolute() if self.task.code else None

    def _gpus_of(self, node: int) -> str:
        """Return the GPUs of this machine that are taken for those of a node."""
        gpus = self.task.spec.cluster.gpus_per_node
        names = [name for name in self.allocation.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        own_numbers = range(node * gpus, (node + 1) * gpus)
        return ",".join(names[number] if number < len(names) else str(number) for number in own_numbers)

    def _threads(self) -> int | None:
        """Return the cores that the scheduler gives a rank; None where it tells of none."""
        told = None if self.allocation.local else self.allocation.cpus
        if told is None:
            return None
        cluster = self.task.spec.cluster
        return max(1, told // (cluster.gpus_per_node if self.task.spec.task_per_node else 1))


def _training(task: Task) -> TrainTask | None:
    return task if isinstance(task, TrainTask) else None


def preview(run: RunDir, task: Task) -> str:
    """Return the command line of a task's first process as a shell takes it, with its first batch; nothing is written.

    Empty where that is tula's own worker.
    """
    if not isinstance(task, ProbeTask | TrainTask) or not runs_script(task):
        return ""
    world = world_size(task)
    batch = task.batch if isinstance(task, TrainTask) else task.local_batches[0] * world
    command = LeaderCommand(task=task.id, attempt=1, ranks=world, meeting="127.0.0.1:0", batch=batch)
    start = ScriptStart(run, Allocation(0, 1, environ={}), task, command)
    return shlex.join(start.argv(start.places()[0]))
