"""The sentences of the models: one function per code of a `Diagnostic`."""

from collections.abc import Sequence

from tula_cli.diagnostics import diagnostic
from tula_cli.words import format_count, join_words

# --- Stages of a batch-size ramp


@diagnostic
def nodes_unusable_for_stages(*, nodes: Sequence[int], reason: str) -> str:
    return f"No training is possible on {join_words(nodes)} {'node' if list(nodes) == [1] else 'nodes'}: {reason}."


@diagnostic
def stage_times_not_measured() -> str:
    return (
        "Only one local batch was measured, so the stages of train.ramp are assumed to have the step time of the full batch."
        " Times and costs are therefore upper bounds."
    )


@diagnostic
def noise_not_measured() -> str:
    return "train.ramp: noise needs the gradient noise scale, which was not measured. The times shown are those of train.ramp: auto, and tula train would refuse to start. Train with train.diagnostics: [gradient_noise] to measure the scale, or set train.ramp: auto."


@diagnostic
def noise_only_at_start() -> str:
    return (
        "The stages of train.ramp: noise are based on the noise at the start of training, which may not be typical."
        " To measure the noise after each epoch, set train.diagnostics: [gradient_noise]."
    )


@diagnostic
def stage_skipped(*, setting: str, batch: int, micro_batches: int) -> str:
    return f"{setting}: batch {batch} is skipped, because it is smaller than the number of GPUs x micro-batches ({micro_batches})."


@diagnostic
def auto_ramp_without_stages(*, batch: int, reference_batch: int) -> str:
    return (
        f"train.ramp: auto has no effect, because batch {batch} is not above train.reference_batch {reference_batch}."
    )


# --- Expectations about a script


@diagnostic
def rank_count_differs(*, expected: int, observed: int) -> str:
    single_process_hint = "If the script trains in one process, set search.nodes: [1] (one GPU per node). " * (
        observed == 1
    )
    return (
        f"{format_count(expected, 'rank')} should have started, but {observed} did. {single_process_hint}Check that the launcher of the"
        " command gets {gpus_per_node} and {nodes}, and that the script joins a process group."
    )


@diagnostic
def batch_differs(*, expected: int, observed: float, at_end: bool) -> str:
    steps = "the last steps train" if at_end else "a step trains"
    return (
        f"The command was given batch {expected}, but {steps} on {observed:g} samples."
        " Check that {local_batch}, {micro_batch} and {accumulate} are given to the right options."
    )


@diagnostic
def micro_batches_differ(*, expected: int, observed: float) -> str:
    return (
        f"The command was given {expected} micro-batches per step, but {observed:g} were observed."
        " Check whether the script divides the number of micro-batches by its number of ranks."
    )


@diagnostic
def epoch_steps_differ(*, expected: int, observed: int, dataset_size: int, batch: int, is_given: bool) -> str:
    source = " (script.dataset_size)" if is_given else ""
    advice = "" if is_given else " If each rank does, set script.dataset_size to the samples of all ranks together."
    return (
        f"An epoch of {dataset_size} samples{source} has {expected} steps at batch {batch}, but the script's epoch has"
        f" {observed}. Check that each rank reads its own part (DistributedSampler).{advice}"
    )


@diagnostic
def probes_differ(*, aspect: str, first: str, other: str) -> str:
    return f"The probes differ in {aspect}: {first} and {other}. Check that the command trains the same model with the same optimizer in each probe."


@diagnostic
def script_scales_learning_rate(*, exponent: float, rates: str) -> str:
    return (
        f"The script itself scales its learning rate with batch^{exponent:.1f} ({rates})."
        " Set train.lr_scaling: none and remove {lr} from the command."
    )


# --- Measurements


@diagnostic
def times_are_upper_bounds(*, method: str) -> str:
    return (
        f"train.method {method} was measured with synchronisation in every step, as in its first phase."
        " Steps of later phases are faster, so times and costs on several GPUs are upper bounds."
    )


@diagnostic
def other_collective(*, chosen: str, modelled: str, nodes: int) -> str:
    return (
        f"NCCL chose the {chosen} algorithm for its largest all-reduces on {format_count(nodes)}, but times are modelled for"
        f" {modelled}. Set cluster.collective: {chosen}."
    )


@diagnostic
def times_exclude(*, missing: Sequence[str], epochs_lost_on_spot: bool) -> str:
    spot = " On spot nodes, an interruption is assumed to lose the current epoch." if epochs_lost_on_spot else ""
    subject = "it" if len(missing) == 1 else "them"
    return f"Time and cost do not include {' or '.join(missing)}, because the probes did not measure {subject}.{spot}"


@diagnostic
def gpu_memory_unknown(*, largest_local_batch: int) -> str:
    return (
        f"The memory of a GPU is unknown, so local batches above {largest_local_batch}, the largest measured, may not fit."
        " Set cluster.memory_per_gpu."
    )


@diagnostic
def library_memory_not_measured(*, margin: float) -> str:
    return f"The GPU memory of CUDA, cuBLAS and NCCL was not measured. This memory has to fit into the {100 * margin:.0f} % of GPU memory that tula keeps free."


@diagnostic
def oversubscribed(*, nodes: Sequence[int], shared: str) -> str:
    return (
        f"There were more ranks than {shared} on {join_words(nodes)} {'node' if list(nodes) == [1] else 'nodes'}"
        " (oversubscribed). These step times apply to this machine only."
    )


@diagnostic
def software_differs(*, versions: Sequence[str]) -> str:
    return f"The probes ran with different software, so their times may not be comparable: {'; '.join(versions)}."


@diagnostic
def allocator_thrashed(*, where: str, retries: int) -> str:
    return (
        f"The probe at {where} ran out of cached GPU memory {retries} times, so its steps are slower than necessary."
        " To avoid this, use a smaller local batch."
    )


@diagnostic
def waiting_for_data(*, share: float, where: str, loader_ms: float | None, step_ms: float | None, slowest: str) -> str:
    rates = (
        f" Loading the data of a step takes {loader_ms:.3g} ms, the step itself {step_ms:.3g} ms ({slowest})."
        if loader_ms is not None and step_ms is not None
        else ""
    )
    return (
        f"Steps wait for the data loader for more than {100 * share:.0f} % of their time ({where}).{rates}"
        " Faster GPUs or a faster network do not help. Use more data-loader workers (train.workers)."
    )


@diagnostic
def gpus_throttled(*, reasons: Sequence[str], where: str, megahertz: int, watts: float) -> str:
    return (
        f"The GPUs were throttled ({' and '.join(reasons)}) while steps were timed ({where}; down to {megahertz} MHz at"
        f" {watts:.0f} W). On GPUs that are not throttled, steps are faster than predicted."
    )


# --- Fits


@diagnostic
def step_times_drift(*, probes: Sequence[str]) -> str:
    return f"The step time changes steadily within a probe: {'; '.join(probes)}."


@diagnostic
def step_time_falls_with_batch(*, pairs: Sequence[str]) -> str:
    return (
        f"A step is shorter with the larger batch: {'; '.join(pairs)}. Another program probably disturbed the probe of the"
        " smaller batch."
    )


@diagnostic
def fit_misses(*, kind: str, where: Sequence[str]) -> str:
    return (
        f"The fitted step time differs by more than 25 % from the one measured in the {kind} at: {'; '.join(where)}. Predictions"
        " for similar configurations are unreliable; measure the one you want with tula profile."
    )


@diagnostic
def memory_grows_differently(*, factor: float) -> str:
    return (
        f"Memory grows {factor:.2g} times as fast with the batch as estimated, and predictions use this measured growth."
        " Before you train at a much larger batch, measure the memory there with tula profile."
    )


@diagnostic
def memory_growth_unknown(*, largest: float, estimated: bool) -> str:
    """`largest` is the largest measured micro-batch."""
    assumed = "as estimated" if estimated else "in proportion to the batch"
    return (
        f"Memory does not grow with the batch in the probes, so that needed by more than {largest:g} samples at a time is"
        f" unknown. Predictions assume that it grows {assumed}. To find the largest batch that fits, run tula profile --largest."
    )


@diagnostic
def straggler(*, name: str, factor: float, slow_probes: int, probes: int, waits_for_data: bool) -> str:
    work = "gets its data" if waits_for_data else "computes"
    advice = "its data loader and disk" if waits_for_data else "its clocks and for other programs"
    exclude = "" if name.startswith("rank ") else f", or exclude it (cluster.slurm.exclude: {name})"
    return (
        f"Straggler: {name} {work} {factor:.2g} times as slowly as the others in {slow_probes} of"
        f" {format_count(probes, 'probe')}, so every step waits for {name}. Check {advice}{exclude}, then measure again."
    )


@diagnostic
def unexplained_waits(*, nodes: int, milliseconds: float, small_batch: int, large_batch: int) -> str:
    return (
        f"On {format_count(nodes)}, ranks wait {milliseconds:.3g} ms longer for each other at local batch {large_batch} than"
        f" at {small_batch}; data loading or a slow node may be the cause."
        " Copy the data to each node, or raise train.workers."
    )


# --- Step-time changes of a training


@diagnostic
def step_time_not_as_predicted(
    *, epoch: int, step_ms: float, predicted_ms: float, low_ms: float, high_ms: float
) -> str:
    slower = step_ms > high_ms
    cause = " The network or the load may have changed." if slower else ""
    return (
        f"Epoch {epoch}: step time {step_ms:.1f} ms is {'above' if slower else 'below'} the predicted {predicted_ms:.1f} ms"
        f" (90 % interval {low_ms:.1f}-{high_ms:.1f}).{cause}"
    )


@diagnostic
def step_time_as_predicted(*, epoch: int, step_ms: float, predicted_ms: float) -> str:
    return f"Epoch {epoch}: step time {step_ms:.1f} ms is within the 90 % interval again (predicted {predicted_ms:.1f} ms)."


# --- Observed jobs


@diagnostic
def fewer_nodes_are_cheaper(
    *,
    nodes: int,
    exposed_communication: float | None,
    fewer: int,
    time_ratio: float,
    node_hours_ratio: float,
    low: float,
    high: float,
) -> str:
    now = ""
    if exposed_communication is not None:
        now = f"On {format_count(nodes)}, {100 * exposed_communication:.0f} % of a step is exposed communication. "
    return (
        f"{now}On {format_count(fewer)}, the training takes {time_ratio:.1f}x the time and {node_hours_ratio:.1f}x the node-hours"
        f" (90 % interval {low:.1f} to {high:.1f})."
    )


@diagnostic
def data_waits_are_long(*, share: float, workers: int | None) -> str:
    now = "" if workers is None else f" (now {workers})"
    return f"{100 * share:.0f} % of the training time is spent waiting for data. Use more data-loader workers{now} or faster storage."


@diagnostic
def larger_batch_fits(*, growth: float, local_batch: int | None) -> str:
    now = "" if local_batch is None else f" (now {local_batch} per GPU)"
    return f"The GPU memory allows {growth:.1f}x the batch{now}. A larger batch usually needs another learning rate."
