"""The sentences of the cluster package: one function per code of a `Diagnostic`."""

from tula_cli.diagnostics import diagnostic

# --- Settings of SLURM jobs


@diagnostic
def cpus_per_task_not_set(*, workers: int | None, needed: int | None) -> str:
    loaders = "its data loader" if workers is None else f"its {workers} data-loader processes"
    value = "the number of cores of a node divided by its number of GPUs" if needed is None else str(needed)
    return f"cluster.slurm.cpus_per_task is not set. SLURM may then assign a single core to a rank and {loaders}, so data loading slows the GPUs down. Set cluster.slurm.cpus_per_task to {value}."


@diagnostic
def too_few_cpus_per_task(*, cpus_per_task: int, workers: int) -> str:
    return f"cluster.slurm.cpus_per_task: {cpus_per_task} is too small, so data loading slows the GPUs down: a rank and its {workers} data-loader processes need {workers + 1} cores."


# --- The program of a user's script on this machine


@diagnostic
def program_not_here(*, program: str) -> str:
    return f"script.command: the program {program} does not exist on this machine. The nodes need this program."


@diagnostic
def torch_not_here(*, python: str, reason: str) -> str:
    return (
        f"script.command: {python} cannot import torch: {reason}. The Python of the nodes must be able to import torch."
    )
