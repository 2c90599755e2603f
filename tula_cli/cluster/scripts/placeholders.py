"""The values of the placeholders in a script's command line."""

import os
from dataclasses import dataclass
from pathlib import Path

from tula_cli.run.records.tasks import Task
from tula_cli.spec.job import JobSpec, compute_lr_scale
from tula_cli.spec.scripts.script import Script, count_script_samples, count_script_steps


@dataclass(frozen=True)
class ScriptProcess:
    """The position of a process in a job, and the rendezvous address."""

    nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    rank: int | None = None  # None where the command starts the ranks of a node itself
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
        spec: the job, with a script.
        process: the process.
        batch: global batch.
        out: folder of the script's files.
        run: the run directory.
        workers: data-loader processes per rank.
        checkpoint: the newest checkpoint; empty if there is none.
        splits: number of parts into which each micro-batch of train.accumulate is split.
    """
    script, gpus = get_script(spec), spec.cluster.gpus_per_node
    local_batch = batch // (process.nodes * gpus)
    accumulate = spec.train.accumulate * splits
    micro_batch = local_batch // accumulate
    values: dict[str, str | float | None] = {
        "batch": batch,
        "local_batch": local_batch,
        "micro_batch": micro_batch,
        "accumulate": accumulate,
        "accumulate_total": batch // micro_batch,
        "lr": get_learning_rate(spec, batch),
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
    size = script.known_dataset_size
    if size is not None:
        values["steps"], values["samples"] = (
            count_script_steps(script, batch, size),
            count_script_samples(script, size),
        )
    return {name: value for name, value in values.items() if value is not None}


def get_script(spec: JobSpec) -> Script:
    """Return the script of a job that has one."""
    assert spec.script is not None, "a job of tula's own loop"
    return spec.script


def get_learning_rate(spec: JobSpec, batch: int) -> float | None:
    """Return the learning rate for the command line at a global batch; None if the script sets it itself."""
    lr = get_script(spec).reference.lr
    return None if lr is None else lr * compute_lr_scale(spec, batch)


def count_loader_workers(task: Task, *, threads: int | None, ranks_here: int) -> int:
    """Return the data-loader processes per rank: as configured, else from the number of cores per rank.

    Args:
        task: the task.
        threads: cores that the scheduler allocates per rank; None if the ranks share this machine.
        ranks_here: number of ranks that share this machine.
    """
    requested = task.loader_workers
    if requested != "auto":
        return requested
    return task.spec.train.count_loaders(threads or len(os.sched_getaffinity(0)) / ranks_here)
