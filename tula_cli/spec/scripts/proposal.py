"""The job file proposed by `tula init --from-command`: sections with comments, and keys for the user to fill in."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tula_cli.spec.scripts.placeholders import BATCH_PLACEHOLDERS, find_program_name
from tula_cli.spec.scripts.recognition import RecognisedCommand
from tula_cli.spec.scripts.script import get_default_train
from tula_cli.words import format_count


@dataclass(frozen=True)
class MissingKey:
    """A key whose value the command does not determine."""

    key: str  # key in the job file
    words: str  # description of the value to set
    required: bool = False  # the job file is invalid without it


def make_job_name(recognised: RecognisedCommand) -> str:
    """Return the name of the job: the name of the script, with invalid characters replaced."""
    stem = re.sub(r"\.(py|sh)$", "", find_program_name(recognised.script["command"]))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")
    return name[:64] or "job"


def list_missing_keys(recognised: RecognisedCommand) -> Iterator[MissingKey]:
    """Yield the keys that the command does not determine, required and optional ones, in the order of the file."""
    script, placeholders = recognised.script, recognised.placeholders
    if "out" not in placeholders:
        yield MissingKey(
            "script.command",
            "write {out} in place of the output folder; otherwise, a probe writes to the same folder as the training",
        )
    if "length" not in script:
        yield MissingKey(
            "script.length", "length of the training: {epochs: N}, {samples: N} or {steps: N}", required=True
        )
    if _needs_dataset_size(script, placeholders):
        yield MissingKey("script.dataset_size", "samples per epoch, needed for {steps} and {samples}", required=True)
    else:
        yield MissingKey("script.dataset_size", "samples per epoch, if the script does not use a torch DataLoader")
    if "batch" not in script["reference"]:
        yield MissingKey("script.reference.batch", "the current batch, over all GPUs", required=True)
    if "lr" not in script["reference"]:
        if "lr" in placeholders:
            yield MissingKey("script.reference.lr", "the current learning rate", required=True)
        else:
            words = "the current learning rate; needs {lr} in the command. Omit it if the script scales its learning rate itself"
            yield MissingKey("script.reference.lr", words)
    if "resume" not in script:
        yield MissingKey(
            "script.resume",
            "how the script resumes from a checkpoint; without this section, an interrupted training starts from the beginning",
        )
    elif "out" not in placeholders:
        yield MissingKey(
            "script.resume.checkpoint",
            "path of the script's checkpoints; section resume is a comment because {out} is not in the command",
        )
    yield MissingKey("script.metric", "pattern of a metric in the script's output")
    yield MissingKey(
        "script.save",
        "how tula requests a checkpoint before a job has to stop; without this key, the script's last checkpoint is used",
    )


def render_sections(recognised: RecognisedCommand) -> str:
    """Return sections `script` and `train` as YAML with comments; missing required keys are comments."""
    script = recognised.script
    lines = [
        "script:",
        f"  command: {format_yaml_word(script['command'])}",
        f"  launch: {script['launch']} # rank: tula starts one process per GPU; node: one per node, which starts the ranks",
        *_list_length_lines(script),
        _render_dataset_size(recognised),
        *_render_reference(recognised),
        *_render_resume(recognised),
        "  # metric: {top1: 'Acc@1 ([0-9.]+)'} # a pattern in the script's output; the last and the best value are kept",
        '  # save: none # how tula requests a checkpoint: SIGUSR1, SIGUSR2, SIGTERM, "file:{out}/save", or hooks (tula_hooks.py)',
        "  # code: snapshot # jobs run a copy made at submission; none: the files as they are when the job starts",
        '  # probe_args: "" # appended to the command in probes, not in trainings, for example --no-eval',
        "",
        "train:",
        *_render_train(recognised),
    ]
    return "\n".join(lines) + "\n"


def _list_length_lines(script: dict[str, Any]) -> Iterator[str]:
    if "length" in script:
        ((kind, count),) = script["length"].items()
        others = [f"{{{other}: N}}" for other in ("epochs", "samples", "steps") if other != kind]
        length_words = (
            " # at reference.batch; another batch trains on the same number of samples"
            if kind == "steps"
            else f" # or {' or '.join(others)}"
        )
        yield f"  length: {{{kind}: {count}}}{length_words}"
    else:
        yield "  # length: {epochs: 90} # REQUIRED: or {samples: N}, or {steps: N} at reference.batch"


def _needs_dataset_size(script: dict[str, Any], placeholders: frozenset[str]) -> bool:
    return bool(placeholders & {"steps", "samples"}) and "epochs" in script.get("length", {})


def _render_dataset_size(recognised: RecognisedCommand) -> str:
    if _needs_dataset_size(recognised.script, recognised.placeholders):
        return "  # dataset_size: 50000 # REQUIRED: samples per epoch, needed for {steps} and {samples}"
    return "  # dataset_size: auto # samples per epoch; auto: read from the script's DataLoader in the probes"


def _render_reference(recognised: RecognisedCommand) -> Iterator[str]:
    reference = recognised.script["reference"]
    comment = (
        "    # " if reference else "  #   "
    )  # before a key of the section, which is a comment itself if it is empty
    yield (
        "  reference: # the batch and learning rate for which the script was tuned"
        if reference
        else "  # reference: # REQUIRED: the batch and learning rate for which the script was tuned"
    )
    if "batch" in reference:
        yield f"    batch: {reference['batch']} # {_describe_batch(recognised)}"
    else:
        yield f"{comment}batch: 256 # REQUIRED: over all GPUs"
    if "lr" in reference:
        yield f"    lr: {reference['lr']:.12g} # tuned for that batch"
    elif "lr" in recognised.placeholders:
        yield f"{comment}lr: 0.1 # REQUIRED: tuned for that batch"
    else:
        yield f"{comment}lr: 0.1 # needs {{lr}} in the command; omit it if the script scales its learning rate itself"


def _describe_batch(recognised: RecognisedCommand) -> str:
    """Describe how the reference batch is computed, and what to do if the option means the batch of all GPUs."""
    flag = next((word for word, name in recognised.flags.items() if name in BATCH_PLACEHOLDERS), "")
    if "batch" in recognised.values:
        return "over all GPUs"
    values = recognised.values
    per_process = values.get("local_batch") or f"{values['micro_batch']} x {recognised.accumulate} micro-batches"
    text = f"{per_process} per GPU x {format_count(recognised.ranks, 'GPU')}"
    batch = values.get("local_batch")
    if batch is None or recognised.ranks == 1:
        return text
    return f"{text}; if {flag} is the batch of all GPUs, write {batch} here and {{batch}} in the command"


def _render_resume(recognised: RecognisedCommand) -> Iterator[str]:
    args = recognised.script.get("resume", {}).get("args", "--resume {checkpoint}")
    if "resume" in recognised.script and "out" in recognised.placeholders:
        yield "  resume: # without this section, an interrupted training starts from the beginning"
        yield f"    args: {format_yaml_word(args)} # appended to the command if there is a checkpoint"
        yield '    checkpoint: "{out}/*" # the newest match is used; narrow the pattern down to the checkpoints of the script'
        yield "    # batch: rehearse # batch with which the script can resume: same, epoch (another one, from the end of an epoch), any"
    else:
        yield f'  # resume: {{args: {format_yaml_word(args, flow=True)}, checkpoint: "{{out}}/checkpoint*.pth"}} # without this section, an interrupted training starts from the beginning'


def _render_train(recognised: RecognisedCommand) -> Iterator[str]:
    values, placeholders = recognised.values, recognised.placeholders
    chosen, reason = get_default_train(recognised.script["command"])
    others = [name for name in ("lbt", "lrs", "ags", "ortho") if name != chosen["method"]]
    yield f"  method: {chosen['method']} # {reason}; or {', '.join(others)}"
    if "lr_scaling" in chosen:
        yield "  lr_scaling: sqrt # {lr} is reference.lr times sqrt(batch / reference.batch); linear: times batch / reference.batch"
    if values.keys() & {"accumulate", "accumulate_total"}:
        yield f"  accumulate: {recognised.accumulate} # micro-batches per optimizer step, {{accumulate}}"
    elif placeholders & {"accumulate", "accumulate_total"}:
        yield "  # accumulate: 1 # micro-batches per optimizer step, {accumulate}"
    for key, default, words in (("seed", "0", ""), ("workers", "auto", "data-loader processes per GPU, ")):
        if key in values:
            yield f"  {key}: {int(float(values[key]))} # {words}{{{key}}}"
        else:
            yield f"  # {key}: {default} # {words}{{{key}}}{' in the command' * (key not in placeholders)}"
    yield "  # max_attempts: 8 # failures in a row without a newer checkpoint after which the training ends"


def format_yaml_word(text: str, *, flow: bool = False) -> str:
    """Format text for YAML, unquoted if it reads back the same."""
    unsafe = r"[{}\[\],#&*!|>'\"%@`:?-]" if flow else r"^[{}\[\],#&*!|>'\"%@`?-]|: |:$| #|^\s|\s$"
    if text.isprintable() and not re.search(unsafe, text) and yaml.safe_load(text) == text:
        return text
    return yaml.safe_dump(text, default_style='"', width=math.inf, allow_unicode=True).rstrip("\n")
