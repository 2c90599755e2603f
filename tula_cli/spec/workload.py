"""The workload of a job: a model in tula's own loop, or a script of the user, and all that differs between both.

`cluster/rank_program.py` starts it; which files are its code is in `run/code.py`.
"""

from dataclasses import dataclass

from tula_cli.spec.scripts.placeholders import find_placeholders, find_program_name
from tula_cli.spec.scripts.script import Script, count_requested_samples, count_script_samples, get_default_train
from tula_cli.spec.sections import Dataset, Model, Optimizer, Schedule, Train
from tula_cli.words import format_count


@dataclass(frozen=True)
class Workload:
    """The workload of a job, with its settings and observable quantities: here a model and dataset in tula's loop."""

    model: Model
    dataset: Dataset
    optimizer: Optimizer
    schedule: Schedule
    train: Train

    epochs_key = "train.epochs"
    reference_key = "train.reference_batch"
    reference_lr_key = "optimizer.lr"
    less_memory_hint = "add larger numbers to search.nodes, lower search.min_batch, raise train.accumulate, or set train.activation_checkpointing: true or train.precision: bf16"
    evaluates_held_out_data = True
    """Whether tula itself evaluates it on other samples, with accuracies in percent; a script's output has the metrics."""
    measures_step_parts = True
    """Whether the time of a step can be divided into computation, synchronisation, data and evaluation."""
    resumes_reliably = True
    """Whether it saves before each exit and surely resumes from its checkpoints, also on other nodes."""
    restarts_for_branch = False
    """Whether each branch of a search for the learning rate is a new start of the ranks."""

    @property
    def optimizer_name(self) -> str | None:
        """Name of the optimizer; None of a script, whose optimizer is unknown."""
        return self.optimizer.name

    @property
    def default_method_reason(self) -> str:
        """Why the method of the job is the default; empty if it is not."""
        return self.train.training_method.default_reason

    @property
    def reference_lr(self) -> float | None:
        """The learning rate of the reference batch; None of a script with {lr_factor}, which has its own."""
        return self.optimizer.lr

    @property
    def settings(self) -> frozenset[str]:
        """Names of the settings that the workload accepts; those of a script are its placeholders."""
        return frozenset({"lr", "seed", "epochs"})

    @property
    def takes_workers(self) -> bool:
        """Whether `train.workers` decides how many processes load its data."""
        return True

    @property
    def description(self) -> str:
        """Description of what is trained, for users."""
        return f"{self.model.name} on {self.dataset.name}"

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """The metrics that the workload reports instead of those of tula; the first one is compared."""
        return ()

    @property
    def warmup_epochs(self) -> float:
        """Epochs of learning-rate warm-up that tula knows of: as given, otherwise as the method needs."""
        if self.schedule.kind == "one-cycle":  # one-cycle includes a warm-up
            return 0.0
        given = self.schedule.warmup_epochs
        if given is not None:
            return given
        if self.train.stages and self.train.stages != "decay":  # a growing batch replaces a warm-up
            return 0.0
        return self.train.training_method.limit_warmup_epochs(self.train.epochs)

    @property
    def short_epochs(self) -> int | None:
        """The epochs that can be shortened for a first comparison; None if the length cannot be set."""
        return self.train.epochs

    @property
    def max_epochs(self) -> int | None:
        """Maximum number of epochs, whatever the metrics; None if the length is in samples or steps."""
        return self.train.max_epochs

    @property
    def requested_samples(self) -> int | None:
        """Samples of the whole training if its length is in samples or steps; None for a length in epochs."""
        return None

    def count_samples(self, dataset_size: int) -> int:
        """Return the samples of the whole training, with `dataset_size` samples per epoch."""
        return self.train.epochs * dataset_size

    def count_epochs(self, dataset_size: int) -> int:
        """Return the epochs of the training; a length in samples or steps is rounded to whole epochs."""
        return self.train.epochs

    def describe_length(self) -> str:
        """Describe the length of the training."""
        whole, trained = self.train.epochs, self.train.max_epochs
        return format_count(whole, "epoch") if trained == whole else f"{trained} of {format_count(whole, 'epoch')}"

    def describe_accumulation_conflict(self) -> str:
        """Return why micro-batches cannot be split; empty if they can."""
        return ""


@dataclass(frozen=True)
class UserScript(Workload):
    """A training script: only its command and the settings of section `script` are known."""

    script: Script

    epochs_key = "script.length.epochs"
    reference_key = "script.reference.batch"
    reference_lr_key = "script.reference.lr"
    less_memory_hint = "add larger numbers to search.nodes, lower search.min_batch, or use more gradient accumulation, activation checkpointing or bf16 in the script"
    optimizer_name = None
    warmup_epochs = 0.0  # a script implements its own warm-up
    evaluates_held_out_data = False
    measures_step_parts = False
    resumes_reliably = False
    restarts_for_branch = True

    @property
    def default_method_reason(self) -> str:
        default, reason = get_default_train(self.script.command)
        return reason if default == self.train.model_dump(include=set(default)) else ""

    @property
    def reference_lr(self) -> float | None:
        return self.script.reference.lr

    @property
    def takes_workers(self) -> bool:
        return "workers" in self.script.placeholders

    @property
    def settings(self) -> frozenset[str]:
        return frozenset(find_placeholders(self.script.command))

    @property
    def description(self) -> str:
        return find_program_name(self.script.command)

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        return tuple(self.script.metric)

    @property
    def short_epochs(self) -> int | None:
        return self.script.length.epochs if {"epochs", "steps", "samples"} & self.settings else None

    @property
    def max_epochs(self) -> int | None:
        return self.script.length.epochs

    @property
    def requested_samples(self) -> int | None:
        return count_requested_samples(self.script)

    def count_samples(self, dataset_size: int) -> int:
        return count_script_samples(self.script, dataset_size)

    def count_epochs(self, dataset_size: int) -> int:
        return max(1, round(self.count_samples(dataset_size) / dataset_size))

    def describe_length(self) -> str:
        length = self.script.length
        if length.epochs is not None:
            return format_count(length.epochs, "epoch")
        if length.samples is not None:
            return format_count(length.samples, "sample")
        return f"{format_count(length.steps or 0, 'step')} at batch {self.script.reference.batch}"

    def describe_accumulation_conflict(self) -> str:
        if self.script.accumulates:
            return ""
        return "the command has no {micro_batch} with {accumulate} or {accumulate_total}"
