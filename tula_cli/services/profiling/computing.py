"""How a job computes on a GPU, in words: which settings are in force there, and why where nobody has said so."""

from collections.abc import Iterator

from tula_cli.presets import DIVIDING
from tula_cli.run.records.inspections import Inspection
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import FEWEST_WORKERS, MOST_WORKERS
from tula_cli.words import plural


def describe_computing(spec: JobSpec, inspection: Inspection | None) -> tuple[str, ...]:
    """Return what is to be told, a line each; of a GPU only where the job may run on one.

    Args:
        spec: the job.
        inspection: of its model and dataset; None where that is not known yet.
    """
    if spec.script is not None:  # how it computes is its own, and its loader's processes too without {workers}
        return tuple(_describe_loader(spec, inspection)) if "workers" in spec.script.placeholders else ()
    loader = (*_describe_loader(spec, inspection), *_describe_scaling(spec))
    if not _may_run_on_gpu(spec, inspection):
        return loader
    description = ", ".join(_describe_gpu_settings(spec, inspection))
    return (f"on a GPU: {description or 'no tf32, no cudnn_benchmark'} (section train)", *loader)


def _describe_loader(spec: JobSpec, inspection: Inspection | None) -> Iterator[str]:
    """Yield what `train.workers: auto` comes to."""
    cluster = spec.cluster
    if spec.train.workers != "auto" or (cluster.kind == "local" and inspection is None):
        return
    ranks = [nodes * cluster.gpus_per_node for nodes in spec.search.nodes]
    fewest, most = (
        loader_process_range(spec, inspection, ranks=max(ranks))[0],
        loader_process_range(spec, inspection, ranks=min(ranks))[1],
    )
    cpus = cluster.slurm.cpus_per_task if cluster.slurm is not None else None
    if cluster.kind != "local":
        who = "SLURM" if cluster.kind == "slurm" else "the scheduler"
        why = f"cluster.slurm.cpus_per_task: {cpus}" if cpus else f"by the cores that {who} gives it"
    else:
        assert inspection is not None
        why = f"by its share of {plural(inspection.cpus, 'core')}"
    number = str(most) if fewest == most else f"{fewest} to {most}"
    yield f"data loader: {number} processes a rank, {why} (train.workers: auto)"


def _describe_scaling(spec: JobSpec) -> Iterator[str]:
    """Yield what gradient scaling is applied to, where that is not the gradient."""
    if spec.train.facts.scales and spec.ags.resolved().apply_to == "update":
        name = spec.optimizer.name
        why = f": {name} divides a factor on its gradients out" if name in DIVIDING else ""
        yield f"train.method {spec.train.method} scales the steps of {name}, not its gradients{why} (ags.apply_to: update)"


def loader_process_range(spec: JobSpec, inspection: Inspection | None, *, ranks: int) -> tuple[int, int]:
    """Return the fewest and the most data-loader processes that a rank may have, with so many ranks on a machine."""
    train, slurm = spec.train, spec.cluster.slurm
    if train.workers != "auto":
        return train.workers, train.workers
    if spec.cluster.kind == "local":
        return (train.loaders(inspection.cpus / ranks),) * 2 if inspection else (FEWEST_WORKERS, MOST_WORKERS)
    cpus_per_task = slurm.cpus_per_task if slurm is not None else None
    return (train.loaders(cpus_per_task),) * 2 if cpus_per_task else (FEWEST_WORKERS, MOST_WORKERS)


def _may_run_on_gpu(spec: JobSpec, inspection: Inspection | None) -> bool:
    """Return whether the jobs may run on GPUs: as the memory is estimated."""
    if spec.cluster.device == "cpu":
        return False
    return spec.cluster.kind != "local" or (inspection is not None and inspection.device == "cuda")


def _describe_gpu_settings(spec: JobSpec, inspection: Inspection | None) -> Iterator[str]:
    train = spec.train
    convolutional = inspection is None or inspection.convolutional
    tensor_cores = train.tf32 or train.precision != "fp32"
    if train.tf32:
        yield "tf32 (float32 products and convolutions of 10 bits of mantissa)"
    if train.channels_last is True:
        yield "channels_last"
    elif train.channels_last == "auto" and tensor_cores and convolutional:
        yield "channels_last (NVIDIA's tensor cores; a network with 2-d convolutions)"
    if train.compile:
        yield "compile" if train.compile is True else f"compile ({train.compile})"
    if train.deterministic:
        yield "deterministic"
    elif train.cudnn_benchmark == "auto":
        yield "cudnn_benchmark (NVIDIA; all inputs have one shape)"
    elif train.cudnn_benchmark:
        yield "cudnn_benchmark"
