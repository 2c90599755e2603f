"""What of a job each of its values allows, and together they hardly mean."""

from tula_cli.run.records.inspections import Inspection
from tula_cli.spec.job import JobSpec
from tula_cli.words import plural


def hardly_meant(spec: JobSpec, inspection: Inspection | None) -> list[str]:
    """Return warnings about job settings that are valid one by one but unlikely in combination."""
    warnings, epochs, workers = [], spec.train.epochs, spec.train.workers
    if late := [f"{at:g}" for at in spec.schedule.milestones if at >= epochs]:
        warnings.append(
            f"schedule.milestones {', '.join(late)}: training ends after {plural(epochs, 'epoch')}, and the learning rate does"
            " not fall there"
        )
    half_life, reference = spec.optimizer.beta2_half_life, spec.train.reference_batch
    if isinstance(half_life, float) and half_life < reference:
        warnings.append(
            f"optimizer.beta2_half_life {half_life:g} is less than a batch (train.reference_batch: {reference}): it is in"
            " samples, not in steps, and auto is what the optimizer's beta2 comes to"
        )
    runs_here = inspection is not None and spec.cluster.kind == "local"
    if (
        inspection is not None
        and runs_here
        and workers != "auto"
        and workers * spec.cluster.gpus_per_node > 2 * inspection.cpus
    ):
        warnings.append(
            f"train.workers {workers}: a node's ranks start {workers * spec.cluster.gpus_per_node} loader processes on"
            f" {inspection.cpus} cores, which slow each other down; auto is the cores that a rank has, less one"
        )
    return warnings


def warn_ags_on_one_rank(spec: JobSpec) -> list[str]:
    """Return where a script's gradients cannot be scaled for want of another rank, unless its loop offers a part of the batch."""
    alone = [nodes for nodes in spec.search.nodes if nodes * spec.cluster.gpus_per_node == 1]
    if spec.script is None or not spec.train.facts.scales or not alone:
        return []
    remaining = [nodes for nodes in spec.search.nodes if nodes not in alone]
    advice = f"search.nodes: {remaining}" if remaining else "two GPUs or more (search.nodes), train.method lbt or lrs"
    return [
        f"train.method ags on one GPU (search.nodes: {alone}) ends in the script's first steps, for there is no other rank to"
        f" compare with, unless its loop calls tula_hooks.small_batch: take {advice}"
    ]
