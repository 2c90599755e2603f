"""The sentences of the worker: one function per code of a `Diagnostic`."""

from collections.abc import Mapping, Sequence

from tula_cli.diagnostics import diagnostic
from tula_cli.words import capitalize_first_letter, format_bytes, format_count, format_number


@diagnostic
def damaged_checkpoint_skipped(*, problem: str, samples: int) -> str:
    resumes = f"resumes at {samples} samples and repeats the later ones" if samples else "starts from the beginning"
    return f"{capitalize_first_letter(problem)}. The training {resumes}."


@diagnostic
def weights_partly_loaded(*, weights: str, reason: str) -> str:
    return f"Only a part of model.weights ({weights}) was loaded: {reason}."


@diagnostic
def arm_diverged_after_choice(*, arms: Sequence[str], chosen: str) -> str:
    return f"The training diverged with {', '.join(arms)}. It continues with {chosen}."


@diagnostic
def metric_not_finite(*, metric: str, epoch: int) -> str:
    return (
        f"train.best_checkpoint: {metric} is not a finite number at epoch {epoch}."
        " This epoch counts as the best only if no epoch has a finite value."
    )


@diagnostic
def evaluation_loss_not_finite(*, epoch: int) -> str:
    return (
        f"The evaluation loss is not finite at epoch {epoch}, but the training loss is."
        " Check the evaluation data and the running statistics of BatchNorm."
    )


@diagnostic
def warmup_never_ends(*, warmup_epochs: float, epochs: int) -> str:
    return (
        f"The learning rate never reaches its full value: the warm-up takes {warmup_epochs:g} epochs, but the training has"
        f" only {epochs}. Set schedule.warmup_epochs to a smaller value."
    )


@diagnostic
def stream_read_again(*, samples: int) -> str:
    return (
        "The training resumes in mid-epoch, so the stream is read again from its start."
        f" The {samples} samples already trained in this epoch are skipped, but reading them delays the first step."
    )


@diagnostic
def small_norm_batches(*, samples: Mapping[int, int]) -> str:
    counts = ", ".join(f"{format_count(count, 'sample')} at batch {batch}" for batch, count in samples.items())
    return (
        f"BatchNorm computes its statistics over few samples in the first stages of train.ramp: {counts}."
        " Set train.ramp to a list of stages with larger batches, or train on fewer GPUs."
    )


@diagnostic
def no_replicas_to_average() -> str:
    return "train.method polo has no effect on one GPU, because there are no replicas to average."


@diagnostic
def averaging_never_starts(*, synchronous_epochs: int, epochs: int) -> str:
    return (
        f"train.method polo has no effect: its first {synchronous_epochs} epochs are synchronous, and train.epochs is {epochs}."
        f" Set train.epochs to more than {synchronous_epochs}."
    )


@diagnostic
def small_batch_reduced(*, small_batch: int, b_small: int, accumulate: int) -> str:
    return (
        f"AGS uses a small batch of {small_batch} samples instead of ags.b_small ({b_small}), because with train.accumulate:"
        f" {accumulate} the GPUs process only {small_batch} samples at a time. Lower train.accumulate, or set ags.b_small:"
        f" {small_batch}."
    )


@diagnostic
def ags_without_effect(*, reason: str) -> str:
    return f"{capitalize_first_letter(reason)}."


@diagnostic
def ags_hardly_scales(*, text: str) -> str:
    return f"{text}."


# --- The inspection of a job


@diagnostic
def unused_batch_entries(*, entries: Sequence[str], model: str) -> str:
    return (
        f"Entries of the batch are not used: {', '.join(entries)}. Neither {model}.forward nor the loss has parameters of these"
        " names."
    )


@diagnostic
def lightning_methods_not_called() -> str:
    return (
        "The model has a training_step and configure_optimizers, but tula does not call them: it uses forward, and the loss and"
        " the optimizer of the job file. To train with Lightning, set your training script in section script."
    )


@diagnostic
def more_outputs_than_classes(*, model: str, outputs: int, dataset: str, classes: int) -> str:
    return f"Model {model} has {outputs} outputs, but dataset {dataset} has only {classes} classes."


@diagnostic
def batch_norm_on_single_sample(*, min_batch: int) -> str:
    return f"BatchNorm cannot train on a micro-batch of 1 sample. Set search.min_batch to {min_batch} or more."


@diagnostic
def samples_differ_in_shape(*, inspected: int, largest: str, padding: int | None, padded: int) -> str:
    padding_text = f" {padding} % of a batch of {padded} samples is padding." if padding is not None else ""
    return (
        f"Samples differ in shape, so memory is estimated for the largest of the {inspected} samples read ({largest}), and each"
        f" probe runs one step with only samples of this shape. Unread samples may be larger.{padding_text}"
    )


@diagnostic
def no_real_step(*, reason: str) -> str:
    return f"no step with real samples was run here, because {reason}; only shapes were checked"


@diagnostic
def metric_gathered(*, metric: str, with_inputs: bool) -> str:
    return (
        f"train.metrics.{metric} has neither sync nor merge_state, so the scores and targets{' (and inputs)' * with_inputs} of all"
        " evaluation batches are gathered on rank 0. To avoid this, give the metric a method merge_state"
    )


@diagnostic
def size_of_test_set(*, samples: int) -> str:
    return f"test set of tula evaluate: {samples} samples"


@diagnostic
def initial_weights(*, weights: str, tensors: int, mismatch: str) -> str:
    return f"weights: {tensors} tensors of {weights}{f'; {mismatch}' * bool(mismatch)}"


@diagnostic
def frozen_parameters(*, frozen: int, parameters: int, patterns: Sequence[str], norms: int) -> str:
    statistics = f"; the statistics of {norms} BatchNorm layers are kept" * bool(norms)
    return f"frozen: {frozen} of {parameters} parameters ({', '.join(patterns)}){statistics}"


@diagnostic
def parameter_group(*, parameters: Sequence[str], tensors: int, lr: float, weight_decay: float) -> str:
    return (
        f"group {', '.join(parameters)}: {format_count(tensors, 'tensor')}, lr {format_number(lr)},"
        f" weight decay {format_number(weight_decay)}"
    )


@diagnostic
def beta2_at_any_batch(*, beta2: float) -> str:
    return f"second moment: beta2 is {beta2:g} at any batch (optimizer.beta2_half_life)"


@diagnostic
def beta2_by_batch(*, half_life: float, beta2: Mapping[int, float]) -> str:
    values = ", ".join(f"{value:.6g} at batch {batch}" for batch, value in beta2.items())
    return f"second moment: half-life {half_life:.0f} samples, so beta2 is {values} (optimizer.beta2_half_life)"


@diagnostic
def gathered_blocks(*, blocks: int, largest: int, outside: int) -> str:
    if not blocks:
        return f"sharding: the model has no blocks, so all of its {format_bytes(outside)} are gathered at once"
    return (
        f"sharding: {format_count(blocks, 'block')} of at most {format_bytes(largest)} {'is' if blocks == 1 else 'are'} gathered"
        f" one at a time; the other {format_bytes(outside)} stay gathered during a step"
    )
