"""The sentences of the worker: one function per code of a `Diagnostic`."""

from collections.abc import Mapping, Sequence

from tula_cli.diagnostics import diagnostic
from tula_cli.words import format_count, start_sentence


@diagnostic
def damaged_checkpoint_skipped(*, problem: str, samples: int) -> str:
    resumes = f"resumes at {samples} samples" if samples else "starts again"
    return f"{start_sentence(problem)}. The training {resumes} and trains everything after that again."


@diagnostic
def weights_partly_loaded(*, weights: str, reason: str) -> str:
    return f"Only a part of model.weights ({weights}) was loaded: {reason}."


@diagnostic
def arm_diverged_after_choice(*, arms: Sequence[str], chosen: str) -> str:
    return f"{', '.join(arms)} diverged after it was chosen. The training continues with {chosen}."


@diagnostic
def metric_not_finite(*, metric: str, epoch: int) -> str:
    return (
        f"train.best_checkpoint: {metric} is not a finite number at epoch {epoch}."
        " Such an epoch is the best only if there is no other."
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
        f" The {samples} samples that were trained before are not trained again, but reading them delays the first step."
    )


@diagnostic
def small_norm_batches(*, samples: Mapping[int, int]) -> str:
    counts = ", ".join(f"{format_count(count, 'sample')} at batch {batch}" for batch, count in samples.items())
    return (
        f"BatchNorm computes its statistics over few samples in the first stages of train.ramp: {counts}."
        " Name stages with larger batches, or train on fewer GPUs."
    )


@diagnostic
def setting_without_effect(*, text: str) -> str:
    return f"{start_sentence(text)}."


@diagnostic
def ags_hardly_scales(*, text: str) -> str:
    return f"{text}."
