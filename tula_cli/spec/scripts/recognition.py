"""From the command line that somebody types today to section `script`: what stands for batch, learning rate, length ..."""

import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from tula_cli.errors import SpecError
from tula_cli.spec.scripts.placeholders import BATCHES, FOR_A_SHELL, IN_A_FILE, PLACEHOLDERS, SCRIPTS, of_a_shell

# A flag's name without dashes, in lower case with underscores; of `trainer.max_epochs=9` the last part -> placeholder.
FLAGS = {
    **dict.fromkeys(("b", "bs", "batch_size", "train_batch_size", "batch", "batchsize"), "local_batch"),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size", "local_batch_size"), "local_batch"),
    **dict.fromkeys(("micro_batch_size", "micro_batch", "train_micro_batch_size_per_gpu"), "micro_batch"),
    **dict.fromkeys(("global_batch_size", "total_batch_size"), "batch"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"), "accumulate"),
    **dict.fromkeys(("accumulation_steps", "gradient_accumulation", "accum_iter", "grad_accum"), "accumulate"),
    **dict.fromkeys(("lr", "learning_rate", "base_lr"), "lr"),
    **dict.fromkeys(("epochs", "num_train_epochs", "max_epochs", "num_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "max_iters", "num_steps", "total_steps", "train_steps", "max_train_steps"), "steps"),
    **dict.fromkeys(("j", "workers", "num_workers", "dataloader_num_workers", "data_workers"), "workers"),
    **dict.fromkeys(("output_dir", "out_dir", "output", "save_dir", "checkpoint_dir", "default_root_dir"), "out"),
    "seed": "seed",
}
RESUME = {"resume", "resume_from_checkpoint", "ckpt_path", "resume_from"}
_LENGTHS = ("epochs", "steps")
_COUNTS = {
    *BATCHES,
    *_LENGTHS,
    "accumulate",
}  # whole numbers from 1 on; --max_steps -1 and --epochs 0.5 stay as they are
# What a launcher is told of the machines, with the number of words after it; the rest of its options are the user's.
_TORCHRUN = {
    **dict.fromkeys(("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_id"), 1),
    **dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_conf", "max_restarts", "local_addr"), 1),
    "standalone": 0,
}
_MODULE = ("-m", "--module")
_ACCELERATE = {
    **dict.fromkeys(("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"), 1),
    "multi_gpu": 0,
}
_ACCELERATE_ON_NODES = (
    "--num_processes {world} --num_machines {nodes} --machine_rank {node_rank} --main_process_ip {master_addr}"
    " --main_process_port {master_port}"
)


@dataclass(frozen=True)
class Recognised:
    """What a command line tells."""

    script: dict[str, Any]  # section `script`, as it is written; without what the command does not tell
    gpus_per_node: int | None  # as the launcher was told
    flags: dict[str, str]  # the word of the command -> what stands for its value now
    values: dict[str, str]  # placeholder -> the value that it had
    ranks: int = 1  # processes of all machines, as the launcher was told


def recognise(line: str) -> Recognised:
    """Return what section `script` would be for a command line.

    A batch is taken for that of one GPU, as nearly all scripts mean it; the first probe tells where it is not so.
    Placeholders that are there already stay; what they had in their places is then not known.

    Raises:
        SpecError: it has no batch that is known by its name, needs a shell, or is no command.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise SpecError(f"{line!r} is no command: {str(error).lower()}", "quote it as a whole") from None
    if word := of_a_shell(line):
        raise SpecError(f"{word!r} {FOR_A_SHELL}", IN_A_FILE)
    variables = [word for word in words[: _variables(words)] if word]
    launched = _launched(words[len(variables) :])
    found = _Found()
    command = [word for part in found.take([*variables, *launched.rest]) for word in part]
    if variables:  # a shell's way to set them; the program does the same
        command = ["env", *command[: len(variables)], *launched.own, *command[len(variables) :]]
    else:
        command = [*launched.own, *command]
    if not BATCHES & {*found.values, *found.by_hand}:
        raise _no_batch(line, launched.rest)
    launch = "node" if launched.own else "rank"
    section = _section(" ".join(_quoted(word) for word in command), found, launch=launch, ranks=launched.ranks)
    return Recognised(section, launched.gpus_per_node, found.flags, found.values, launched.ranks)


def _no_batch(line: str, words: Sequence[str]) -> SpecError:
    seen = list(dict.fromkeys(word.partition("=")[0] for word in words if _is_option(word) or "=" in word))
    options = f"the options are {', '.join(seen)}" if seen else "it has no options"
    unknown = [option for option in seen if _name(option) not in {*FLAGS, *RESUME}]
    example = f"{unknown[0] if unknown else '--batch-size'} {{local_batch}}"
    return SpecError(
        f"no batch in {line!r}: {options}, and none is known for one",
        "write the placeholder in place of the batch's number, {local_batch} where it is one GPU's and {batch} where it is"
        f" that of all, as in {example!r}; where the script reads its batch from a file, give it an option first",
    )


@dataclass
class _Found:
    """The values that the command had, by placeholder, and the words for them."""

    values: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    by_hand: set[str] = field(default_factory=set)  # placeholders that were there
    resume: str = ""

    def take(self, words: Sequence[str]) -> list[list[str]]:
        """Return the words with placeholders, and without a checkpoint to go on from."""
        accumulates = any(FLAGS.get(_name(word.partition("=")[0])) == "accumulate" for word in words)
        self.by_hand = {name for word in words for name in _BY_HAND.findall(word) if name in PLACEHOLDERS}
        result, position = [], 0
        while position < len(words):
            word, after = words[position], words[position + 1 : position + 2]
            flag, equals, value = word.partition("=")
            name = _name(flag)
            apart = not equals and word.startswith("-") and bool(after) and not _is_option(after[0])
            if not (equals or apart):
                result.append([_literal(word)])
            elif name in RESUME:
                self.resume = f"{flag}={{checkpoint}}" if equals else f"{flag} {{checkpoint}}"
            elif (stands := self._stands_for(name, value if equals else after[0], accumulates)) is None:
                result.append([_literal(word)] if equals else [_literal(word), _literal(after[0])])
            else:
                self.flags[flag] = stands
                result.append([f"{flag}={{{stands}}}"] if equals else [flag, f"{{{stands}}}"])
            position += 2 if apart else 1
        return result

    def _stands_for(self, name: str, value: str, accumulates: bool) -> str | None:
        """Return the placeholder for an option's value; None where it is not known, or no number where one belongs."""
        stands = FLAGS.get(name)
        if stands == "local_batch" and accumulates:
            stands = "micro_batch"
        if stands is None or stands in self.values or stands in self.by_hand or not _fits(stands, value):
            return None
        self.values[stands] = value
        return stands

    def number(self, name: str) -> float | None:
        return _number(self.values[name]) if name in self.values else None


def _section(command: str, found: _Found, *, launch: str, ranks: int) -> dict[str, Any]:
    batch = found.number("batch")
    if batch is None:
        own = found.number("local_batch") or (found.number("micro_batch") or 0) * (found.number("accumulate") or 1)
        batch = own * ranks
    reference: dict[str, Any] = {"batch": int(batch)} if batch else {}
    if (lr := found.number("lr")) is not None:
        reference["lr"] = lr
    lengths = {name: int(value) for name in _LENGTHS if (value := found.number(name)) is not None}
    section: dict[str, Any] = {"command": command, "launch": launch, "reference": reference}
    if lengths:
        section["length"] = dict([next(iter(lengths.items()))])
    if found.resume:
        section["resume"] = {"args": found.resume, "checkpoint": "{out}/*"}
    return section


# --- launchers


@dataclass(frozen=True)
class _Launched:
    """A command line without what its launcher was told of the machines."""

    own: list[str]  # words of a launcher that stays
    rest: list[str]  # the script's
    gpus_per_node: int | None = None
    machines: int = 1

    @property
    def ranks(self) -> int:
        return (self.gpus_per_node or 1) * self.machines


def _launched(words: list[str]) -> _Launched:
    """Take the launcher off a command.

    torchrun does nothing that tula does not; accelerate sets up what the script asks for, and stays.

    Raises:
        SpecError: there is no script, or the launcher is none of these.
    """
    for start, take in _LAUNCHERS.items():
        if tuple(words[: len(start)]) == start or (len(start) == 1 and words and PurePath(words[0]).name == start[0]):
            return take(words[: len(start)], words[len(start) :])
    if words and PurePath(words[0]).name in _FOREIGN:
        raise SpecError(
            f"{words[0]} is a launcher that is not read here: tula starts the processes itself",
            "give the command that it starts on one GPU (script.launch: rank), or write section script by hand with launch:"
            " node",
        )
    return _Launched([], words)


def _torchrun(_: Sequence[str], words: Sequence[str]) -> _Launched:
    told, rest = _options(words, _TORCHRUN)
    if rest[0].startswith("-") and rest[0] not in _MODULE:
        raise SpecError(
            f"torchrun's {rest[0]} has no counterpart: tula starts the ranks itself",
            "leave it out, or set script.launch: node and write the command for each node",
        )
    script = ["python", "-m", *rest[1:]] if rest[0] in _MODULE else ["python", *rest]
    machines = told.get("nnodes", "").rpartition(":")[2]  # 1:4 is from 1 to 4
    return _Launched([], script, _processes(told.get("nproc_per_node")), _processes(machines) or 1)


def _accelerate(start: Sequence[str], words: Sequence[str]) -> _Launched:
    told, rest = _options(words, _ACCELERATE)
    machines = _processes(told.get("num_machines")) or 1
    processes = _processes(told.get("num_processes"))
    own = [*start, *_ACCELERATE_ON_NODES.split()]
    return _Launched(own, rest, processes // machines if processes else None, machines)


_LAUNCHERS: dict[tuple[str, ...], Callable[[Sequence[str], Sequence[str]], _Launched]] = {
    ("torchrun",): _torchrun,
    ("python", "-m", "torch.distributed.run"): _torchrun,
    ("python3", "-m", "torch.distributed.run"): _torchrun,
    ("python", "-m", "torch.distributed.launch"): _torchrun,
    ("accelerate", "launch"): _accelerate,
}
_FOREIGN = {"srun", "sbatch", "mpirun", "mpiexec", "horovodrun", "deepspeed", "colossalai"}


def _options(words: Sequence[str], known: dict[str, int]) -> tuple[dict[str, str], list[str]]:
    """Return the options of a launcher that are known, and all words without them.

    Raises:
        SpecError: nothing is left.
    """
    told, position = {}, 0
    kept: list[str] = []
    while position < len(words) and words[position].startswith("-") and words[position] not in _MODULE:
        flag, equals, value = words[position].partition("=")
        name = _name(flag)
        if name not in known:
            count = 2 if _has_a_value(words[position:]) else 1
            kept += words[position : position + count]
            position += count
            continue
        values = known[name] and not equals
        told[name] = value or (words[position + 1] if values and position + 1 < len(words) else "")
        position += 2 if values else 1
    if position >= len(words):
        raise SpecError("the command has a launcher but no script", "give the whole command that you type today")
    return told, [*kept, *words[position:]]


def _has_a_value(words: Sequence[str]) -> bool:
    """Tell whether the next word belongs to an option that is not known: it is no script, and one comes later."""
    after, rest = words[1:2], words[2:]
    if not after or "=" in words[0] or after[0].startswith("-") or _is_script(after[0]):
        return False
    return any(_is_script(word) or word in _MODULE for word in rest)


def _is_script(word: str) -> bool:
    return PurePath(word).suffix in SCRIPTS


def _processes(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None  # torchrun takes gpu and auto too


# --- words

_BY_HAND = re.compile(r"(?<!\{)\{(\w+)\}(?!\})")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")


def _variables(words: Sequence[str]) -> int:
    """Return how many words at the start set variables, as in `OMP_NUM_THREADS=4 torchrun ...`."""
    return next((place for place, word in enumerate(words) if not _VARIABLE.match(word)), 0)


def _name(flag: str) -> str:
    return flag.lstrip("-").rpartition(".")[2].replace("-", "_").lower()


def _is_option(word: str) -> bool:
    return word.startswith("-") and _number(word) is None


def _fits(stands: str, value: str) -> bool:
    """Tell whether an option's value is of the kind that its placeholder is given."""
    number = _number(value)
    if stands in _COUNTS:
        return number is not None and number >= 1 and number == int(number)
    return stands == "out" or (number is not None and (number > 0 or stands != "lr"))


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _literal(word: str) -> str:
    """Return a word with its braces doubled, but for those of placeholders that somebody wrote."""
    parts = _BY_HAND.split(word)  # text and names in turn
    for place, part in enumerate(parts):
        if place % 2:
            parts[place] = f"{{{part}}}" if part in PLACEHOLDERS else f"{{{{{part}}}}}"
        else:
            parts[place] = part.replace("{", "{{").replace("}", "}}")
    return "".join(parts)


def _quoted(word: str) -> str:
    """Return a word as a shell wants it; braces alone, as of placeholders, need no quotes."""
    bare = word.replace("{", "").replace("}", "")
    return word if bare == shlex.quote(bare) or not bare else shlex.quote(word)
