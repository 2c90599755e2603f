"""The job file proposed by `tula init --from-command`: sections with comments, and keys for the user to fill in."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tula_cli.spec.scripts.placeholders import BATCHES, find_placeholders, get_program_name
from tula_cli.spec.scripts.recognition import RecognisedCommand
from tula_cli.spec.scripts.script import get_default_train
from tula_cli.words import format_count


@dataclass(frozen=True)
class MissingKey:
    """A key whose value the command does not determine."""

    key: str  # in the job file
    words: str  # what to write
    required: bool = False  # without it the file cannot be used


def make_job_name(recognised: RecognisedCommand) -> str:
    """Return the name of the job: the name of the script, with invalid characters replaced."""
    stem = re.sub(r"\.(py|sh)$", "", get_program_name(recognised.script["command"]))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")
    return name[:64] or "job"


def list_missing(recognised: RecognisedCommand) -> tuple[MissingKey, ...]:
    """Return the keys that the command does not determine, required and optional ones, in the order of the file."""
    return tuple(_list_missing_parts(recognised.script, set(find_placeholders(recognised.script["command"]))))


def _list_missing_parts(script: dict[str, Any], placeholders: set[str]) -> Iterator[MissingKey]:
    if "out" not in placeholders:
        yield MissingKey(
            "script.command", "{out} in place of its output folder, or a probe writes where the training does"
        )
    if "length" not in script:
        yield MissingKey("script.length", "how long it trains: {epochs: N}, {samples: N} or {steps: N}", required=True)
    if _needs_a_size(script, placeholders):
        yield MissingKey("script.dataset_size", "samples of an epoch, which {steps} follow from", required=True)
    else:
        yield MissingKey(
            "script.dataset_size", "samples of an epoch, where it has no torch DataLoader that could be asked"
        )
    if "batch" not in script["reference"]:
        yield MissingKey("script.reference.batch", "the batch of today, over all GPUs", required=True)
    if "lr" not in script["reference"]:
        if "lr" in placeholders:
            yield MissingKey("script.reference.lr", "the learning rate of today", required=True)
        else:
            words = "the learning rate of today, with {lr} in the command; nothing where the script scales it itself"
            yield MissingKey("script.reference.lr", words)
    if "resume" not in script:
        yield MissingKey("script.resume", "how it goes on from a checkpoint; without it a training begins anew")
    elif "out" not in placeholders:
        yield MissingKey(
            "script.resume.checkpoint", "where it saves; {out} is not in the command, so section resume is a comment"
        )
    yield MissingKey("script.metric", "how good it is, from what it prints or a file of JSON lines")
    yield MissingKey(
        "script.save", "how it is asked for a checkpoint before it has to leave; without, its own last one counts"
    )


def write_sections(recognised: RecognisedCommand) -> str:
    """Return sections `script` and `train` as YAML with comments; missing required keys are comments."""
    script = recognised.script
    lines = [
        "script:",
        f"  command: {format_yaml_word(script['command'])}",
        f"  launch: {script['launch']} # rank: tula starts a process a GPU; node: one a node, which starts its ranks itself",
        *_list_length_lines(script),
        _render_dataset_size(script),
        *_render_reference(recognised),
        *_resume(script),
        "  # metric: {top1: 'Acc@1 ([0-9.]+)'} # a pattern on what it prints, or {jsonl: FILE, key: NAME}; the last and the best are kept",
        '  # save: none # how to ask for a checkpoint: SIGUSR1, SIGUSR2, SIGTERM, "file:{out}/save", or hooks (tula_hooks.py)',
        "  # code: snapshot # of the files as they are when it is submitted; none: what they are when it starts",
        "  # probe: # where it is measured and not trained",
        '  #   args: "" # appended, for example --no-eval',
        "  #   environment: {WANDB_MODE: disabled} # so that it publishes nothing",
        "  #   stop: exit # how it ends after the last step; raise: SystemExit in its loop, so that it cleans up",
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
            " # at reference.batch; another batch takes as many samples"
            if kind == "steps"
            else f" # or {' or '.join(others)}"
        )
        yield f"  length: {{{kind}: {count}}}{length_words}"
    else:
        yield "  # length: {epochs: 90} # REQUIRED: or {samples: N}, or {steps: N} at reference.batch"


def _needs_a_size(script: dict[str, Any], placeholders: set[str]) -> bool:
    """Return whether the dataset size is needed: {steps} or {samples} in the command, and a length in epochs."""
    return bool(placeholders & {"steps", "samples"}) and "epochs" in script.get("length", {})


def _render_dataset_size(script: dict[str, Any]) -> str:
    if _needs_a_size(script, set(find_placeholders(script["command"]))):
        return "  # dataset_size: 50000 # REQUIRED: samples of an epoch, which {steps} follow from"
    return "  # dataset_size: auto # samples of an epoch; auto: as its DataLoader says, in the probes"


def _render_reference(recognised: RecognisedCommand) -> Iterator[str]:
    reference, placeholders = recognised.script["reference"], set(find_placeholders(recognised.script["command"]))
    yield (
        "  reference: # what the script was tuned for"
        if reference
        else "  # reference: # REQUIRED: what it was tuned for"
    )
    if "batch" in reference:
        yield f"    batch: {reference['batch']} # {_describe_batch(recognised)}"
    else:
        yield f"  {'  ' if reference else '#   '}{'# ' if reference else ''}batch: 256 # REQUIRED: over all GPUs"
    if "lr" in reference:
        yield f"    lr: {_format_number(reference['lr'])} # tuned for that batch"
    elif "lr" in placeholders:
        yield f"  {'  # ' if reference else '#   '}lr: 0.1 # REQUIRED: tuned for that batch"
    else:
        yield f"  {'  # ' if reference else '#   '}lr: 0.1 # with {{lr}} in the command; left out where the script scales it itself"


def _describe_batch(recognised: RecognisedCommand) -> str:
    """Describe how the reference batch is computed, and what to do if the option means the batch of all GPUs."""
    flag = next((word for word, name in recognised.flags.items() if name in BATCHES), "")
    if "batch" in recognised.values:
        return "over all GPUs"
    values = recognised.values
    per_process = values.get("local_batch") or f"{values['micro_batch']} x {recognised.accumulate} micro-batches"
    text = f"{per_process} a GPU x {format_count(recognised.ranks, 'GPU')}"
    batch = values.get("local_batch")
    if batch is None or recognised.ranks == 1:
        return text
    return f"{text}; if {flag} is the batch of all GPUs, write {batch} here and {{batch}} in the command"


def _resume(script: dict[str, Any]) -> Iterator[str]:
    args = script.get("resume", {}).get("args", "--resume {checkpoint}")
    if "resume" in script and "out" in find_placeholders(script["command"]):
        yield "  resume: # without it a training that is interrupted begins anew"
        yield f"    args: {format_yaml_word(args)} # appended where there is a checkpoint"
        yield '    checkpoint: "{out}/*" # of what matches, the newest: narrow it down to what the script saves'
        yield "    # batch: rehearse # with which batch it may go on: same, epoch (another from an epoch's end on), any"
        yield "    # checkpoint_interval: epoch # how often it saves (epoch, or so many steps), until a training has shown it"
    else:
        yield f'  # resume: {{args: {format_yaml_word(args, flow=True)}, checkpoint: "{{out}}/checkpoint*.pth"}} # or it begins anew'


def _render_train(recognised: RecognisedCommand) -> Iterator[str]:
    values, placeholders = recognised.values, set(find_placeholders(recognised.script["command"]))
    chosen, reason = get_default_train(recognised.script["command"])
    yield f"  method: {chosen['method']} # {reason}; or lbt, lrs, ags, ortho"
    if "lr_scaling" in chosen:
        yield "  lr_scaling: sqrt # {lr} is reference.lr times sqrt(batch / reference.batch); linear: times batch / reference.batch"
    if values.keys() & {"accumulate", "accumulate_total"}:
        yield f"  accumulate: {recognised.accumulate} # micro-batches an optimizer step, {{accumulate}}"
    elif placeholders & {"accumulate", "accumulate_total"}:
        yield "  # accumulate: 1 # micro-batches an optimizer step, {accumulate}"
    for key, default, words in (("seed", "0", ""), ("workers", "auto", "data-loader processes a GPU, ")):
        if key in values:
            yield f"  {key}: {int(float(values[key]))} # {words}{{{key}}}"
        else:
            yield f"  # {key}: {default} # {words}{{{key}}}{' in the command' * (key not in placeholders)}"
    yield "  # max_attempts: 8 # starts, or allocations, in a row that save nothing new"


def format_yaml_word(text: str, *, flow: bool = False) -> str:
    """Format text for YAML, unquoted if it reads back the same."""
    unsafe = r"[{}\[\],#&*!|>'\"%@`:?-]" if flow else r"^[{}\[\],#&*!|>'\"%@`?-]|: |:$| #|^\s|\s$"
    if text.isprintable() and not re.search(unsafe, text) and yaml.safe_load(text) == text:
        return text
    return yaml.safe_dump(text, default_style='"', width=math.inf, allow_unicode=True).rstrip("\n")


def _format_number(value: float) -> str:
    """Format a learning rate for YAML."""
    return f"{value:.12g}"
