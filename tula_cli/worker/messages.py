"""The sentences of the worker: one function per code of a `Diagnostic`."""

from collections.abc import Mapping, Sequence

from tula_cli.diagnostics import diagnostic
from tula_cli.words import capitalize_first_letter, format_count


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
def setting_without_effect(*, text: str) -> str:
    return f"{capitalize_first_letter(text)}."


@diagnostic
def ags_hardly_scales(*, text: str) -> str:
    return f"{text}."
