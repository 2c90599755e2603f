"""The sentences of the services: one function per code of a `Diagnostic`."""

import shlex
from collections.abc import Sequence

from tula_cli.diagnostics import diagnostic
from tula_cli.words import (
    capitalize_first_letter,
    describe_files,
    describe_node_counts,
    describe_pending_probes,
    describe_sample_share,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    join_words,
)

# --- The search for a learning rate


@diagnostic
def expensive_rate_search(*, share: float, samples: int, steps: int) -> str:
    return (
        f"The search costs {describe_sample_share(share)}, because the training is short and each branch takes"
        f" at least {steps} steps ({samples} samples)."
    )


@diagnostic
def branches_learned_little(*, start: float, lowest: float) -> str:
    return (
        f"The losses of the branches hardly decreased, from {start:.4g} to {lowest:.4g} at best, so they do not show which"
        " learning rate is better. Compare short trainings instead: tula compare --methods lbt,sqrt,lrs."
    )


@diagnostic
def branches_below_learning_rate(*, lr: float, reference: float) -> str:
    return (
        f"The script used learning rate {format_number(lr)} when the branches started, below script.reference.lr"
        f" {format_number(reference)}: the script is still warming up, or its schedule has lowered the learning rate. The search did not test"
        " whether the training is stable at the full learning rate."
    )


# --- Unlikely combinations of settings


@diagnostic
def milestones_after_end(*, milestones: Sequence[float], epochs: int) -> str:
    return (
        f"The learning rate does not change at schedule.milestones {join_words(format(at, 'g') for at in milestones)}:"
        f" the training ends after {format_count(epochs, 'epoch')}."
    )


@diagnostic
def warmup_after_end(*, warmup_epochs: float, epochs: int) -> str:
    return (
        f"schedule.warmup_epochs {warmup_epochs:g} is more than train.epochs {epochs}, so the learning rate does not reach"
        " optimizer.lr. Shorten the warm-up, or train for more epochs."
    )


@diagnostic
def recommendation_not_stored(*, reason: str) -> str:
    return f"The recommendation could not be stored for tula train: {reason}"


@diagnostic
def choice_changed(
    *, nodes: int, batch: int, node_type: str, earlier_nodes: int, earlier_batch: int, earlier_node_type: str
) -> str:
    """Text for a stored recommendation whose new choice differs; the node types are empty if the job names none."""
    earlier = f"{format_count(earlier_nodes)}{f' of type {earlier_node_type}' * bool(earlier_node_type)}"
    option = f" --type {shlex.quote(earlier_node_type)}" if earlier_node_type else ""
    return (
        f"The choice has changed from {earlier}, batch {earlier_batch} to"
        f" {format_count(nodes)}{f' of type {node_type}' * bool(node_type)}, batch {batch}. To train the earlier one:"
        f" tula train --nodes {earlier_nodes} --batch {earlier_batch}{option}."
    )


@diagnostic
def beta2_half_life_below_batch(*, half_life: float, reference_batch: int) -> str:
    return (
        f"optimizer.beta2_half_life {half_life:g} is less than one batch (train.reference_batch: {reference_batch})."
        " Give the half-life in samples, not steps, or set it to auto to derive it from the optimizer's beta2."
    )


@diagnostic
def reference_batch_exceeds_dataset(*, reference_batch: int, dataset_size: int) -> str:
    return (
        f"train.reference_batch {reference_batch} is more than the {dataset_size} training samples, so no training can use it."
        " Set it to the global batch that optimizer.lr was tuned for."
    )


@diagnostic
def too_many_loader_processes(*, workers: int, processes: int, cores: int) -> str:
    return (
        f"train.workers {workers} starts {processes} data-loader processes per node, which has {cores} cores,"
        " so they slow each other down. With train.workers: auto, each rank has one process less than it has cores."
    )


@diagnostic
def ags_on_one_rank(*, nodes: Sequence[int], other_nodes: Sequence[int]) -> str:
    advice = f"search.nodes: {list(other_nodes)}" if other_nodes else "search.nodes to use at least two GPUs"
    return (
        f"train.method ags fails on one GPU (search.nodes: {list(nodes)}) because it compares the gradients of several"
        f" ranks. Set {advice}, use train.method lbt or lrs, or call tula_hooks.small_batch in the script."
    )


@diagnostic
def batch_not_scaled(*, b_small: int, batches: Sequence[int], method: str) -> str:
    return (
        f"train.method {method} has no effect at batch {join_words(batches)}:"
        f" gradients are scaled only at batches above ags.b_small ({b_small})."
    )


# --- Shared memory of data loaders

_SHARED_MEMORY_ADVICE = "In a container, raise --shm-size or use --ipc=host."


@diagnostic
def shared_memory_too_small(*, free_bytes: int, ranks: int, needed_bytes: int, local_batch: int) -> str:
    return (
        f"/dev/shm has {format_bytes(free_bytes)} free, but one batch per rank needs {format_bytes(needed_bytes)} in total"
        f" ({format_count(ranks, 'rank')}, local batch {local_batch}), so data-loader processes would be killed."
        f" {_SHARED_MEMORY_ADVICE} Or set train.workers: 0, which needs no shared memory."
    )


# --- The search planned by `tula check`


@diagnostic
def node_type_left_out(*, node_type: str | None, problems: Sequence[str]) -> str:
    return f"Node type {node_type} is left out. {' '.join(problems)}"


@diagnostic
def first_job_inspects(*, reason: str, minutes: float, remedy: str) -> str:
    return (
        f"{reason}. The dataset size and the memory are therefore unknown here; the first job of tula profile determines"
        f" them on a node, in at most {minutes:g} min. To determine both here: {remedy}."
    )


@diagnostic
def first_search_may_exceed_cap(*, node_hours: float, cap: float) -> str:
    return (
        f"The first job and the probes may take {node_hours:g} node-hours."
        f" Probes beyond search.max_node_hours ({cap:g}) are not started."
    )


@diagnostic
def no_feasible_batch(*, reason: str, advice: str) -> str:
    return f"{capitalize_first_letter(reason)}." + (f" {capitalize_first_letter(advice)}." if advice else "")


@diagnostic
def search_exceeds_cap(*, node_hours: float, cap: float) -> str:
    return (
        f"Profiling may take {format_number(node_hours)} node-hours, but search.max_node_hours is {cap:g}."
        " Raise search.max_node_hours, lower search.max_minutes, search fewer nodes, or set search.strategy: partial."
    )


@diagnostic
def first_job_exceeds_cap(*, node_hours: float, cap: float, remedy: str) -> str:
    return (
        f"The job that builds the model and the dataset may take {format_number(node_hours)} node-hours, but"
        f" search.max_node_hours is {cap:g}. Raise search.max_node_hours, or build the model and the dataset here: {remedy}."
    )


@diagnostic
def too_few_gpus(*, nodes: Sequence[int], needed: int, available: int, advice: str) -> str:
    return f"search.nodes: {list(nodes)} needs {format_count(needed, 'GPU')}, but this machine has {available}. Set {advice}."


@diagnostic
def memory_not_estimated(*, reason: str) -> str:
    return f"The memory cannot be estimated: {reason}. Probes stop at the first batch that does not fit."


@diagnostic
def nodes_without_batch(*, nodes: Sequence[int]) -> str:
    return f"search.nodes {list(nodes)} is left out: no batch of the search can be trained on that many nodes."


@diagnostic
def ranks_share_cores(*, ranks: int, cores: int) -> str:
    return (
        f"{ranks} ranks share {cores} CPU cores. Their step times are marked as oversubscribed and do not apply to"
        " a real cluster."
    )


@diagnostic
def adaptive_first_round(*, chosen_by_auto: bool, capped: bool) -> str:
    chosen = "auto chose adaptive" if chosen_by_auto else "adaptive"
    limit = " and stay within search.max_node_hours" * capped
    return f"search.strategy: {chosen}. The figures are for the first round; later rounds depend on its results{limit}."


@diagnostic
def plan_made_offline(*, strategy: str) -> str:
    sweep = ", and search.strategy: auto may choose another search than this sweep" if strategy == "auto" else ""
    return (
        "With --offline, the size of the dataset, the memory of each batch and earlier probes are unknown. Batches that exceed the"
        f" dataset or the memory will be left out{sweep}. Run tula check without --offline for the final plan."
    )


@diagnostic
def no_cap_on_node_hours() -> str:
    return (
        "search.max_node_hours is not set, so tula profile asks for confirmation; without a terminal, it needs --yes."
    )


@diagnostic
def parameter_server_collective() -> str:
    return (
        "cluster.collective: parameter_server only affects the time model (Eq. 2c of the paper). Probes and training use all-reduce, so"
        " predictions for node counts that were not measured assume a parameter server."
    )


# --- Nodes (`tula check --on-cluster`)


@diagnostic
def run_directory_not_shared(*, host: str, folder: str, other_content: bool) -> str:
    fault = "has other content" if other_content else "cannot be read"
    return f"{host} does not share the run directory: the file that tula wrote to {folder} {fault} there."


@diagnostic
def cannot_write_run_directory(*, host: str, reason: str) -> str:
    return f"{host} cannot write to the run directory: {reason}."


@diagnostic
def files_not_visible(*, host: str, folder: str, seconds: float) -> str:
    return f"A file that {host} wrote to {folder} was not visible here after {seconds:g} s."


@diagnostic
def cannot_read_dataset(*, hosts: str, folder: str) -> str:
    return f"{hosts} cannot read dataset.root ({folder})."


@diagnostic
def no_gpu_visible(*, hosts: str) -> str:
    return f"torch sees no GPU on {hosts}. Check the driver, the CUDA version of torch, and how the job requests GPUs."


@diagnostic
def fewer_gpus_than_ranks(*, host: str, ranks: int, gpus: int) -> str:
    return f"{ranks} ranks on {host} see {format_count(gpus, 'GPU')}, but each rank needs its own."


@diagnostic
def ranks_share_gpu(*, host: str, ranks: Sequence[int], gpus: int) -> str:
    return (
        f"Ranks {join_words(ranks)} of {host} are bound to the same GPU although their node has {gpus}."
        " Change the binding of the scheduler (cluster.slurm.gpus, --gpu-bind)."
    )


@diagnostic
def ranks_cannot_communicate(*, backend: str, reason: str) -> str:
    return f"The ranks cannot exchange tensors with {backend}: {reason}."


@diagnostic
def nodes_differ(*, aspect: str, differences: str) -> str:
    return f"The nodes differ in {aspect}: {differences}."


@diagnostic
def slow_gpu_link(*, host: str, gigabytes_per_second: float) -> str:
    return (
        f"Two GPUs of {host} exchange {gigabytes_per_second:.1f} GB/s in each direction, which is too slow for NVLink."
        " If the node has NVLink, do not set cluster.slurm.gpus: gpus_per_task, which can hide the GPUs from each other."
    )


@diagnostic
def small_shared_memory(*, host: str, free_bytes: int) -> str:
    return (
        f"{host} has only {format_bytes(free_bytes)} free in /dev/shm, which data loaders and NCCL use."
        f" {_SHARED_MEMORY_ADVICE} tula check shows which batches fit."
    )


@diagnostic
def clock_offset(*, host: str, seconds: float, first_host: str) -> str:
    direction = "ahead of" if seconds > 0 else "behind"
    return (
        f"The clock of {host} is {abs(seconds):.1f} s {direction} that of {first_host},"
        " so the times in their logs and results do not match. Synchronise the clocks."
    )


@diagnostic
def jobs_run_on_cpu() -> str:
    return "torch sees no GPU on any node, so the jobs will run on the CPU (cluster.device: auto)."


@diagnostic
def dataset_not_downloaded(*, folder: str) -> str:
    return f"dataset.root ({folder}) does not exist yet. tula downloads the dataset before the first job."


# --- Submitted jobs


@diagnostic
def environment_not_passed(*, variables: Sequence[str]) -> str:
    return (
        f"tula does not pass these environment variables to sbatch: {join_words(variables)}."
        " Set the corresponding options in section cluster."
    )


@diagnostic
def job_will_not_start(*, job: str, reason: str) -> str:
    return f"{job} will not start: {reason}. Run tula cancel, correct section cluster, and run the same command again."


@diagnostic
def other_cluster_section(*, job: str) -> str:
    return (
        f"{job} was submitted with other settings in section cluster. To use the current ones, run tula cancel first."
    )


@diagnostic
def job_ended(*, job: str, state: str, reason: str) -> str:
    return f"{job} {state}: {reason}"


@diagnostic
def part_left_out(*, part: str, reason: str) -> str:
    return f"{capitalize_first_letter(part)} is left out: {reason}."


@diagnostic
def part_failed(*, part: str, reason: str) -> str:
    return f"{capitalize_first_letter(part)}: {reason}."


@diagnostic
def balance_too_low(*, available: str, needed: str) -> str:
    return f"The balance is too low: {available}, but up to {needed} are needed."


# --- `tula train`


@diagnostic
def ramp_shortened_by_nodes(*, batches: Sequence[int], nodes: int, batches_on_least: Sequence[int], least: int) -> str:
    return (
        f"The stages of train.ramp have batches {join_words(batches)}, because these are divisible by the number of GPUs on"
        f" {format_count(nodes)}; on only {format_count(least)}, they would have batches {join_words(batches_on_least)}."
        " The batches remain the same in all jobs of the training. For smaller first batches, start with a smaller range of nodes."
    )


@diagnostic
def nodes_unusable_for_started_training(*, nodes: Sequence[int], batches: Sequence[int]) -> str:
    return (
        f"The jobs cannot use {describe_node_counts(nodes)}: this training already exists, and its batches"
        f" ({join_words(batches)}) are not all divisible by the number of GPUs on these nodes."
    )


@diagnostic
def earlier_training_unfinished(*, training: str, samples: int, code: str, files: Sequence[str]) -> str:
    return (
        f"Training {training} reached {samples} samples before {code} changed{describe_files(files)}, so this training starts from the"
        " beginning. Restore that code to resume the earlier one."
    )


@diagnostic
def settings_not_applied_to_finished_training(*, keys: Sequence[str]) -> str:
    advice = ""
    if "train.metrics" in keys:
        advice += " To compute metrics of its weights, run tula evaluate."
    if "train.diagnostics" in keys:
        advice += " To log diagnostics, train again with another train.seed."
    return f"This training has already finished with other values of {join_words(keys)}.{advice}"


@diagnostic
def earlier_training_other_settings(*, training: str, samples: int, keys: Sequence[str]) -> str:
    return (
        f"Training {training} reached {samples} samples with other settings ({join_words(keys)}), so this training starts"
        " from the beginning. Restore these settings to resume the earlier one."
    )


@diagnostic
def resume_untested(*, reason: str) -> str:
    return f"The resume test of the script did not run: {reason}. To run it, raise search.max_node_hours."


@diagnostic
def resume_test_inconclusive(*, reason: str) -> str:
    return f"The resume test of the script was inconclusive: {reason}. Interrupted trainings resume at the same batch, unless script.resume.batch allows others."


@diagnostic
def script_cannot_resume(*, reason: str) -> str:
    return f"The script cannot resume: {reason}. After an interruption, this training starts from the beginning."


@diagnostic
def resume_setting_too_free(*, setting: str, verdict: str, reason: str) -> str:
    return (
        f"script.resume.batch is {setting}, but the resume test only confirmed {verdict}: {reason}."
        f" Correct how the script resumes, or set script.resume.batch: {verdict}."
    )


@diagnostic
def stored_plan_not_used(*, trainings: int) -> str:
    return (
        f"The stored plan is for {format_count(trainings, 'training')}, so tula makes a new plan with objective knee."
        " To train another plan, store it with tula recommend --trainings N --save."
    )


# --- `tula compare`


@diagnostic
def duplicate_row(*, row: str, twin: str) -> str:
    return f"{row} has the same settings as {twin}, so it is trained only once, as {twin}."


@diagnostic
def batch_not_above_reference(*, batch: int, reference: int, key: str) -> str:
    return f"Batch {batch} is not above {key} ({reference}), so methods for large batches have no accuracy to recover there."


@diagnostic
def method_needs_several_gpus(*, reason: str) -> str:
    return f"{capitalize_first_letter(reason)}."


@diagnostic
def only_warmup(*, method: str, warmup_epochs: float, epochs: int) -> str:
    return f"{method} has {warmup_epochs:g} epochs of warm-up, but train.epochs is {epochs}, so the whole training is warm-up. Raise train.epochs."


@diagnostic
def controls_left_out(*, controls: Sequence[str], reason: str) -> str:
    return f"The controls {' and '.join(controls)} (lbt with a higher learning rate) are left out: {reason}."


@diagnostic
def one_seed_only() -> str:
    return "script.command has no {seed}, so only one seed is trained and the variation between seeds is unknown. Add {seed} to the command to train several."


@diagnostic
def row_trained_at_smaller_batch(*, method: str, batch: int, smaller: Sequence[int]) -> str:
    return f"{method} at batch {batch} ran out of memory; part of it was trained at batch {join_words(smaller)}."


@diagnostic
def row_trained_with_other_normalisation(*, method: str, batch: int, normalisation: str) -> str:
    return f"{method} at batch {batch} ran out of memory; part of it was trained with {normalisation}."


@diagnostic
def metric_not_found(*, training: str, metric: str) -> str:
    return f"{training}: the output of the script has no line that matches script.metric of {metric}. Correct this pattern."


# --- `tula recommend`


@diagnostic
def probes_pending(*, probes: int) -> str:
    return (
        f"{capitalize_first_letter(describe_pending_probes(probes))}. The recommendation may change when they finish."
    )


@diagnostic
def probe_failed(*, nodes: int, local_batch: int, reason: str) -> str:
    return (
        f"The probe on {format_count(nodes)} with local batch {local_batch} failed: {reason.rstrip('.')}."
        " Run tula profile to repeat the probe."
    )


@diagnostic
def probe_disturbed(*, task: str, trainings: Sequence[str]) -> str:
    return (
        f"While {task} was measuring, {join_words(trainings)} ran on the same GPUs or cores, so its step times may be too long."
        " To repeat the probe, delete its results and run tula profile."
    )


@diagnostic
def configurations_left_out(*, configurations: int, nodes: Sequence[int], reason: str) -> str:
    count = format_count(configurations, "configuration")
    verb = "is" if configurations == 1 else "are"
    return f"{count} on {join_words(nodes)} {'node' if list(nodes) == [1] else 'nodes'} {verb} left out: {reason}."


@diagnostic
def more_configurations_left_out(*, configurations: int, nodes: Sequence[int]) -> str:
    return (
        f"{configurations} more configurations are left out for similar reasons, on {len(nodes)} other numbers of nodes"
        f" ({min(nodes)} to {max(nodes)})."
    )


@diagnostic
def same_progress_unknown() -> str:
    return (
        "The time to the same progress is unknown because no probe measured gradients."
        f" In a script, this requires {GRADIENTS_OF_SCRIPT}."
    )


GRADIENTS_OF_SCRIPT = (
    "DistributedDataParallel on two or more GPUs, and a script that does not exit before the probe is complete"
)


@diagnostic
def fit_error_unknown() -> str:
    return (
        "The error of the fit is unknown, because it has as many parameters as there are probes."
        " Measure more configurations with search.strategy: sweep or full."
    )


@diagnostic
def time_too_uncertain(*, low_hours: float, high_hours: float, all_measured: bool) -> str:
    advice = "" if all_measured else " Measure all configurations (search.strategy: full)."
    return (
        "The training time of the chosen configuration is too uncertain for a decision: its 90 % interval is"
        f" {format_duration(3600 * low_hours)} to {format_duration(3600 * high_hours)}.{advice}"
        " To measure a probe again for longer, raise search.min_seconds and"
        " search.max_seconds, delete its file in the folder results of the run, and run tula profile."
    )


@diagnostic
def unmeasured_not_considered() -> str:
    return (
        "Only measured configurations are considered, because other step times cannot be predicted from the probes."
        " To consider all, measure them (search.strategy: full)."
    )


@diagnostic
def beyond_probed_nodes(*, nodes: int, probed_nodes: int, gpus_per_node: int | None) -> str:
    """`gpus_per_node` is given if the prediction uses probes with other numbers of GPUs per node."""
    where, basis = "", "the growth of synchronisation time up to there"
    if gpus_per_node is not None:
        where, basis = (
            f" with {format_count(gpus_per_node, 'GPU')} per node",
            "probes with other numbers of GPUs per node",
        )
    return (
        f"No probe{where} ran on more than {format_count(probed_nodes)}; the time on {format_count(nodes)} is extrapolated"
        f" from {basis}. Add {nodes} to search.nodes to measure it."
    )


@diagnostic
def little_memory_free(*, free_share: float, wanted_share: float) -> str:
    return (
        f"The chosen configuration fitted in its probe, but leaves only {100 * free_share:.0f} % of the GPU memory free"
        f" (recommended: {100 * wanted_share:.0f} %), so a training may run out of memory."
    )


@diagnostic
def may_miss_deadline(*, high_hours: float, deadline_hours: float) -> str:
    deadline, high = format_duration(3600 * deadline_hours), format_duration(3600 * high_hours)
    return (
        f"The chosen configuration may miss the deadline of {deadline}: the 90 % interval of its time ends at {high}."
    )


@diagnostic
def no_spot_saves_unknown(*, nodes: int) -> str:
    return f"Spot nodes are not considered for {format_count(nodes)}: it is unknown how often the script saves until it has trained."


@diagnostic
def no_spot_too_many_interruptions(*, nodes: int) -> str:
    return f"Spot nodes are not considered for {format_count(nodes)}: with interruptions that frequent, the training would never finish."


@diagnostic
def spot_time_is_expected() -> str:
    return "The time on spot nodes is an average over interruptions; a run with more of them takes longer and may miss the deadline."


# --- Observed jobs


@diagnostic
def observed_job_not_used(*, job: str, why: str) -> str:
    return f"The observed job {job} is not used, because {why}."


# --- The proposal of a job file


@diagnostic
def program_not_in_job(*, program: str) -> str:
    return f"{capitalize_first_letter(program)} is not part of the job. Run it first if the training needs it."


@diagnostic
def script_in_one_process() -> str:
    return (
        "Neither the script nor the modules in its folder use torch.distributed or a trainer library, so search.nodes is [1]. If"
        " the script can train in several processes, add numbers of nodes."
    )


@diagnostic
def command_file_missing(*, problem: str, advice: str) -> str:
    return f"{problem}. {capitalize_first_letter(advice)}."


@diagnostic
def more_processes_than_gpus(*, processes: int, gpus: int) -> str:
    return (
        f"The command starts {format_count(processes, 'process')} per node, but this machine has {format_count(gpus, 'GPU')}."
        " Lower cluster.gpus_per_node."
    )


@diagnostic
def processes_unlike_partition(*, processes: int, partition: str, gpus: int) -> str:
    return (
        f"The command starts {format_count(processes, 'process')} per node, but nodes of partition {partition} have"
        f" {format_count(gpus, 'GPU')} each. Check cluster.gpus_per_node."
    )


@diagnostic
def no_sbatch_lines() -> str:
    return "The script has no #SBATCH line, so its resources are unknown. Fill in section cluster."


@diagnostic
def script_of_other_cluster(*, cluster: str) -> str:
    return f"The script is submitted to cluster {cluster}. Run tula on a login node of that cluster."


@diagnostic
def gpus_unlike_processes(*, gpus: int, processes: int) -> str:
    return (
        f"The script requests {format_count(gpus, 'GPU')} per node, but its command starts {format_count(processes, 'process')}"
        f" per node, so cluster.gpus_per_node is {processes}. To use one process per GPU, set it to {gpus}."
    )


@diagnostic
def nodes_unlike_command(*, nodes: int, nodes_of_command: int) -> str:
    return (
        f"The script requests {format_count(nodes)}, but its command runs on {nodes_of_command}, so the current global batch was"
        f" computed for {format_count(nodes_of_command)}."
    )
