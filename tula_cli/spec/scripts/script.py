"""Section `script` of a job file: a user's script, its length, its checkpoints and what it reports."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from tula_cli.spec.kinds import OneLineText, Positive, PositiveFloat, Section, require_shell_words
from tula_cli.spec.methods import METHODS, SCRIPT_METHODS
from tula_cli.spec.old_keys import make_key_advice
from tula_cli.spec.scripts.placeholders import (
    BATCH_PLACEHOLDERS,
    RANK_PLACEHOLDERS,
    find_placeholders,
    find_shell_word,
)
from tula_cli.spec.sections import Dataset, Model, Optimizer


def _require_known_placeholders(text: str) -> str:
    find_placeholders(text)  # raises ValueError if one is unknown
    return text


def _require_no_shell(text: str) -> str:
    if word := find_shell_word(text):
        raise ValueError(
            f"{word!r} needs a shell, but tula starts the command without one; replace variables by their values and remove redirections, or put the command into a shell script, for example bash train.sh"
        )
    return text


def _refuse_file(value: object) -> object:
    """Refuse {jsonl: file, key: name}, which earlier versions read."""
    if isinstance(value, Mapping):
        raise ValueError(
            "must be a pattern for the output of the script, because tula no longer reads files with JSON lines; make the script print the value"
        )
    return value


def _require_pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression, got {text!r}: {error}") from None
    if groups != 1:
        raise ValueError(
            f"must have exactly one group, around the number, as in 'top1 ([0-9.]+)', but {text!r} has {groups}"
        )
    return text


def _require_save_request(text: str) -> str:
    if text in ("none", "hooks", "SIGUSR1", "SIGUSR2", "SIGTERM") or re.fullmatch(r"file:.+", text):
        return _require_known_placeholders(text)
    raise ValueError(f"must be none, hooks, SIGUSR1, SIGUSR2, SIGTERM or file:PATH, got {text!r}")


Filled = Annotated[OneLineText, AfterValidator(_require_known_placeholders)]
Pattern = Annotated[str, BeforeValidator(_refuse_file), AfterValidator(_require_pattern)]


class Length(Section):
    """Length of the training: exactly one of the three keys."""

    epochs: Positive | None = None  # Number of epochs, of dataset_size samples each
    samples: Positive | None = None  # Number of samples in total
    # Number of optimizer steps at reference.batch; with another batch, the number of samples is the same
    steps: Positive | None = None

    @model_validator(mode="after")
    def _check_one_length(self) -> "Length":
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            raise ValueError(f"must set exactly one of epochs, samples and steps, got {' and '.join(given) or 'none'}")
        return self


class Reference(Section):
    """The batch and learning rate for which the script was tuned."""

    batch: Positive  # Global batch size
    lr: PositiveFloat | None = None  # Learning rate at this batch; required if the command has {lr}


class Resume(Section):
    """How the script resumes from its own checkpoint."""

    args: Filled = ""  # Arguments appended to the command if there is a checkpoint, for example --resume {checkpoint}
    # Path of the checkpoint, for example {out}/checkpoint*.pth. Of several files that match *, the newest one is used.
    checkpoint: Filled
    # Batch with which the script can resume. same: only the same batch. epoch: another batch, but only from the end of
    # an epoch. any: another batch from any checkpoint. rehearse: as the resume test finds.
    batch: Literal["rehearse", "same", "epoch", "any"] = "rehearse"


class Script(Section):
    """A training script that runs unchanged: its command line, and properties that tula cannot detect."""

    # Command line with placeholders, for example train.py -b {local_batch} --lr {lr}
    command: Annotated[
        str,
        AfterValidator(require_shell_words),
        AfterValidator(_require_known_placeholders),
        AfterValidator(_require_no_shell),
    ]
    # rank: tula starts one process per GPU, and sets RANK, WORLD_SIZE and similar variables. node: tula starts one
    # process per node, which must start the ranks.
    launch: Literal["rank", "node"] = "rank"
    # snapshot: jobs run a copy of the code, made when they are submitted. none: jobs run the files as they are when the
    # job starts.
    code: Literal["snapshot", "none"] = "snapshot"
    length: Length
    # Samples per epoch; auto: read from the script's DataLoader in the probes
    dataset_size: Literal["auto"] | Positive = "auto"
    reference: Reference
    # How the script resumes from a checkpoint. null: an interrupted training starts again from the beginning.
    resume: Resume | None = None
    # How tula requests a checkpoint before a job has to stop: none, hooks, SIGUSR1, SIGUSR2, SIGTERM or file:PATH
    save: Annotated[str, AfterValidator(_require_save_request)] = "none"
    # Metrics by name. A value is a regular expression for the script's output, with one group around the number. tula
    # records the last and the best value.
    metric: dict[str, Pattern] = {}
    # Arguments appended to the command in probes, not in trainings, for example --epochs 1
    probe_args: Filled = ""

    @property
    def known_dataset_size(self) -> int | None:
        """Samples per epoch if given; the samples of the whole training if its length is in samples or steps.

        None if the samples per epoch are not known yet.
        """
        return count_requested_samples(self) if self.dataset_size == "auto" else self.dataset_size

    @property
    def placeholders(self) -> frozenset[str]:
        """The placeholders of all text that may be on the command line."""
        parts = (self.command, self.resume.args if self.resume else "", self.probe_args)
        return frozenset(name for part in parts for name in find_placeholders(part))

    @property
    def accumulates(self) -> bool:
        """Whether the command can split a batch into more and smaller micro-batches."""
        placeholders = set(find_placeholders(self.command))
        return "micro_batch" in placeholders and bool(placeholders & {"accumulate", "accumulate_total"})

    @model_validator(mode="after")
    def _check_batch_placeholders(self) -> "Script":
        placeholders = set(find_placeholders(self.command))
        if not placeholders & BATCH_PLACEHOLDERS:
            raise ValueError(
                "command: has no placeholder for the batch size; replace the batch size by {local_batch} (per GPU), {batch} (all GPUs), or {micro_batch} with {accumulate} (samples per forward pass, and their number per step)"
            )
        if "micro_batch" in placeholders and not placeholders & {"accumulate", "accumulate_total"}:
            raise ValueError(
                "command: has {micro_batch} but neither {accumulate} nor {accumulate_total}, so the script does not get the number of micro-batches per step. Add {accumulate}, or replace {micro_batch} by {local_batch}"
            )
        return self

    @model_validator(mode="after")
    def _check_placeholder_values(self) -> "Script":
        placeholders = self.placeholders
        if self.launch == "node" and (rank_placeholders := sorted(placeholders & RANK_PLACEHOLDERS)):
            raise ValueError(
                f"command: {{{rank_placeholders[0]}}} differs between the processes of a node, but with script.launch: node tula starts only one process per node. Remove the placeholder, or set script.launch: rank"
            )
        for name, value in (("lr", self.reference.lr), ("epochs", self.length.epochs)):
            if name in placeholders and value is None:
                where = "reference.lr" if name == "lr" else "length.epochs"
                raise ValueError(
                    f"command: has {{{name}}}, but script.{where} is not set; set script.{where}, or remove the placeholder"
                )
        if self.reference.lr is not None and not placeholders & {"lr", "lr_factor"}:
            raise ValueError(
                "reference.lr: has no effect, because script.command has neither {lr} nor {lr_factor}; add {lr} to the command, or remove script.reference.lr if the script scales its learning rate itself"
            )
        for name in ("steps", "samples"):
            if name in placeholders and self.known_dataset_size is None:
                raise ValueError(
                    f"command: {{{name}}} cannot be computed from script.length.epochs while script.dataset_size is auto; set script.dataset_size to the samples per epoch"
                )
        if "checkpoint" in find_placeholders(self.command):
            raise ValueError(
                "command: must not contain {checkpoint}, because there is no checkpoint at the first start; move {checkpoint} to script.resume.args"
            )
        return self


TULA_LOOP_SECTIONS = ("model", "dataset", "transforms", "loss", "optimizer", "schedule", "auto")
"""Sections of tula's loop, which a script replaces completely."""
SCRIPT_TRAIN_KEYS = {"method", "lr_scaling", "accumulate", "seed", "workers", "oom_policy", "max_attempts"}
"""Settings of section train that apply to a script: through placeholders, or because they control its start."""
SCRIPT_AGS_PRESET = "robust"
"""Preset of section ags for scripts; it works without changes to the script."""


def get_default_train(command: object) -> tuple[dict[str, str], str]:
    """Return the default settings of section train for a script, and the reason.

    The learning rate follows the square root of the batch, because the script's optimizer is unknown and linear scaling
    does not work with Adam.

    Args:
        command: command of the script; if it is not text or has invalid placeholders, this is reported by the check of
            section script.
    """
    reason = "the batch of a script cannot change during training"
    try:
        takes_rate = isinstance(command, str) and bool({"lr", "lr_factor"} & set(find_placeholders(command)))
    except ValueError:
        takes_rate = False
    if takes_rate:
        return {"method": "lrs", "lr_scaling": "sqrt"}, reason
    return {"method": "lbt"}, f"{reason}, and script.command has no {{lr}} that could be scaled"


def fill_script_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a job with a script, with placeholders for required sections that the job does not have.

    These are never shown: the worker of tula's loop is not started, and `remove_script_defaults` removes them.

    Raises:
        ValueError: the content has a setting that would not reach the script.
    """
    if loop_sections := [name for name in TULA_LOOP_SECTIONS if content.get(name) is not None]:
        verb, sections = ("have", "these sections") if loop_sections[1:] else ("has", "this section")
        raise ValueError(
            f"{', '.join(loop_sections)} {verb} no effect with section script, because the script builds its model and data itself; remove {sections}"
        )
    train = {key: value for key, value in (content.get("train") or {}).items() if value is not None}
    if unknown := sorted(key for key in train.keys() - SCRIPT_TRAIN_KEYS if not make_key_advice(f"train.{key}")):
        raise ValueError(
            f"train.{unknown[0]}: has no effect on a script; remove the key, and set the value in the script or its command. The keys of section train that affect a script are {', '.join(sorted(SCRIPT_TRAIN_KEYS))}"
        )
    if "method" not in train:
        default, _ = get_default_train(_get_mapping_or_empty(content["script"]).get("command"))
        train = {"method": "lbt", **train} if "lr_scaling" in train else {**default, **train}
    method = train["method"]
    if method not in SCRIPT_METHODS:
        raise ValueError(
            f"train.method: {method} needs tula's own training loop; for a script, set train.method to one of {', '.join(SCRIPT_METHODS)}"
        )
    reads_ags = METHODS[method].uses_section("ags")
    if not reads_ags and content.get("ags") is not None:
        raise ValueError(
            f"section ags has no effect with train.method: {method}; remove section ags, or set train.method: ags"
        )
    length, reference = (
        _get_mapping_or_empty(_get_mapping_or_empty(content["script"]).get(name)) for name in ("length", "reference")
    )
    return {
        **content,
        "model": Model(name=""),
        "dataset": Dataset(name=""),
        "optimizer": Optimizer.model_construct(name="", lr=math.nan),
        **({"ags": _fill_ags_defaults(content.get("ags") or {})} if reads_ags else {}),
        # Placeholders for invalid values, whose problems are reported for section script itself.
        "train": {**train, "epochs": length.get("epochs") or 1, "reference_batch": reference.get("batch") or 1},
    }


def _fill_ags_defaults(given: Any) -> Any:
    """Return section ags with the default preset of scripts; a value that is not a mapping is left to validation."""
    return {"preset": SCRIPT_AGS_PRESET, **given} if isinstance(given, Mapping) else given


def _get_mapping_or_empty(part: Any) -> Mapping[str, Any]:
    return part if isinstance(part, Mapping) else {}


def remove_script_defaults(content: dict[str, Any]) -> dict[str, Any]:
    """Return the written content of a job with a script, without the additions of `fill_script_defaults`."""
    reads_ags = METHODS[content.get("train", {}).get("method", "lbt")].uses_section("ags")
    written_content = {
        key: value for key, value in content.items() if key not in TULA_LOOP_SECTIONS and (key != "ags" or reads_ags)
    }
    if "train" in written_content:
        written_content["train"] = {
            key: value for key, value in written_content["train"].items() if key in SCRIPT_TRAIN_KEYS
        }
    return written_content


def count_script_samples(script: Script, dataset_size: int) -> int:
    """Return the samples of the whole training, with `dataset_size` samples per epoch."""
    requested = count_requested_samples(script)
    return (script.length.epochs or 0) * dataset_size if requested is None else requested


def count_requested_samples(script: Script) -> int | None:
    """Return the samples of the whole training if the length is in samples or steps; None for a length in epochs."""
    length = script.length
    return length.steps * script.reference.batch if length.steps is not None else length.samples


def count_script_steps(script: Script, batch: int, dataset_size: int) -> int:
    """Return the optimizer steps of the whole training at a global batch, rounded up so that no sample is left out."""
    return math.ceil(count_script_samples(script, dataset_size) / batch)
