"""The workload of a job: a model in tula's own loop, or a script of the user.

`cluster/rank_program.py` starts it; which files are its code is in `run/code.py`.
"""

from dataclasses import dataclass

from tula_cli.spec.job import JobSpec, compute_warmup_epochs
from tula_cli.spec.scripts.placeholders import find_placeholders, find_program_name
from tula_cli.spec.scripts.script import Script, count_script_samples


@dataclass(frozen=True)
class Workload:
    """The workload of a job, with its settings and observable quantities: here a model and dataset in tula's loop."""

    spec: JobSpec

    epochs_key = "train.epochs"
    reference_key = "train.reference_batch"

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
        return f"{self.spec.model.name} on {self.spec.dataset.name}"

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """The metrics that the workload reports instead of those of tula; the first one is compared."""
        return ()

    @property
    def warmup_epochs(self) -> float:
        """Epochs of learning-rate warm-up that tula knows of."""
        return compute_warmup_epochs(self.spec)

    @property
    def short_epochs(self) -> int | None:
        """The epochs that can be shortened for a first comparison; None if the length cannot be set."""
        return self.spec.train.epochs

    def count_epochs(self, dataset_size: int) -> int:
        """Return the epochs of the training; a length in samples or steps is rounded to whole epochs."""
        return self.spec.train.epochs

    def describe_accumulation_conflict(self) -> str:
        """Return why micro-batches cannot be split; empty if they can."""
        return ""


class UserScript(Workload):
    """A training script: only its command and the settings of section `script` are known."""

    epochs_key = "script.length.epochs"
    reference_key = "script.reference.batch"

    @property
    def script(self) -> Script:
        assert self.spec.script is not None
        return self.spec.script

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
    def warmup_epochs(self) -> float:
        return 0.0  # a script implements its own warm-up

    @property
    def short_epochs(self) -> int | None:
        return self.script.length.epochs if {"epochs", "steps", "samples"} & self.settings else None

    def count_epochs(self, dataset_size: int) -> int:
        return max(1, round(count_script_samples(self.script, dataset_size) / dataset_size))

    def describe_accumulation_conflict(self) -> str:
        if self.script.accumulates:
            return ""
        return "the command has no {micro_batch} with {accumulate} or {accumulate_total}"


def get_workload(spec: JobSpec) -> Workload:
    """Return the view of a job that is common to tula's loop and to user scripts."""
    return Workload(spec) if spec.script is None else UserScript(spec)
