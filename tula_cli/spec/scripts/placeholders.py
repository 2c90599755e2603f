"""Command lines with placeholders for the values that tula chooses: `train.py -b {local_batch} --lr {lr}`."""

import difflib
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

PLACEHOLDERS = {
    "batch": "samples per optimizer step, over all GPUs",
    "local_batch": "samples per optimizer step on one GPU",
    "micro_batch": "samples that a GPU processes at a time: local_batch / accumulate",
    "accumulate": "micro-batches per optimizer step on one GPU",
    "accumulate_total": "micro-batches per optimizer step over all GPUs: batch / micro_batch",
    "lr": "learning rate: reference.lr, scaled by train.lr_scaling",
    "lr_factor": "factor by which reference.lr is scaled",
    "epochs": "length.epochs",
    "steps": "optimizer steps of the whole training at this batch",
    "samples": "samples of the whole training",
    "seed": "train.seed",
    "workers": "data-loader processes per GPU",
    "nodes": "number of nodes",
    "gpus_per_node": "GPUs per node",
    "world": "total number of GPUs",
    "node_rank": "number of this node, from 0",
    "master_addr": "host of the rendezvous of all ranks",
    "master_port": "port of the rendezvous",
    "rank": "number of this process, from 0",
    "local_rank": "number of this process on its node, from 0",
    "out": "folder for the script's files; a training keeps it when it resumes, and each probe has a separate one",
    "checkpoint": "path of the newest checkpoint (script.resume.checkpoint)",
    "tula_run": "the run directory",
}
"""Meaning of each placeholder."""
BATCH_PLACEHOLDERS = {"batch", "local_batch", "micro_batch"}
RANK_PLACEHOLDERS = {"rank", "local_rank"}
"""Placeholders that differ among the processes of a node, so that a command started once per node cannot use them."""
SHELL_SUFFIXES = (".sh", ".bash")
SCRIPT_SUFFIXES = (".py", *SHELL_SUFFIXES)
"""File extensions of scripts."""
PYTHON_PATTERN = re.compile(r"i?python[\d.]*|pypy[\d.]*")
"""Names of Python interpreters."""
RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
"""Variables that tula sets for each rank, as torchrun does."""
_PLACEHOLDER_PATTERN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def find_placeholders(text: str) -> tuple[str, ...]:
    """Return the placeholders of a text in order.

    Raises:
        ValueError: a placeholder is unknown, or a brace is neither doubled nor part of a placeholder.
    """
    found_names = []
    for token in _PLACEHOLDER_PATTERN.finditer(text):
        if token[0] in ("{{", "}}"):
            continue
        if token[1] is None:
            raise ValueError(f"a single {token[0]} in {text!r}: write {token[0] * 2} for a literal brace")
        if token[1] not in PLACEHOLDERS:
            raise ValueError(_describe_unknown_placeholder(token[1]))
        found_names.append(token[1])
    return tuple(found_names)


def fill_command(command: str, values: Mapping[str, str | float]) -> list[str]:
    """Return the words of a command with values in place of its placeholders.

    The command is split as by a shell before values are inserted, so that a path with spaces stays one word.

    Raises:
        KeyError: a placeholder has no value.
        ValueError: see `find_placeholders`; or the command is not valid shell syntax.
    """
    return [fill_text(word, values) for word in shlex.split(command)]


def fill_text(text: str, values: Mapping[str, str | float]) -> str:
    """Return a text with values in place of its placeholders, and single braces in place of doubled ones.

    Raises:
        KeyError: a placeholder has no value.
        ValueError: see `find_placeholders`.
    """
    find_placeholders(text)
    return _PLACEHOLDER_PATTERN.sub(
        lambda token: token[0][0] if token[1] is None else _format_value(values[token[1]]), text
    )


_SHELL_WORD_PATTERN = re.compile(r"&&|\|\|?|.*;|&|\d?[<>]{1,2}(&\d|.*)?|.*\$[A-Za-z_{(].*")

_QUOTED_PATTERN = re.compile(r"""\\.|'[^']*'|"((?:\\.|[^"\\])*)\"""", re.DOTALL)
_VARIABLE_PATTERN = re.compile(r"(?<!\\)\$[A-Za-z_{(]\w*")
"""Expansions that a shell also performs inside double quotes."""


def find_shell_word(command: str) -> str:
    """Return the first unquoted word that needs a shell; empty if there is none.

    A command that calls a shell by name is accepted as it is.
    """
    if any(PurePath(word).name in ("bash", "sh", "zsh") for word in shlex.split(command)):
        return ""
    bare = _QUOTED_PATTERN.sub(lambda quoted: next(iter(_VARIABLE_PATTERN.findall(quoted[1] or "")), "-"), command)
    return next((word for word in bare.split() if _SHELL_WORD_PATTERN.fullmatch(word)), "")


class PythonWord(NamedTuple):
    """A word of a command after `separate_python_options`."""

    text: str
    position: int  # of the command's word that contains it
    is_option: bool  # an option of Python, or the value of one


_PYTHON_OPTION_WITH_VALUE = re.compile(r"-([^-cmWX]*)([cmWX])(.*)", re.DOTALL)


def separate_python_options(words: Sequence[str]) -> Iterator[PythonWord]:
    """Yield the words of a command, with -m and -c of each Python in it as words of their own: -umpkg gives -u -m pkg.

    The module and the code that follow them are not options, but the program that Python runs.
    """
    awaits_program = awaits_value = False
    for position, word in enumerate(words):
        if awaits_value or not awaits_program or word == "-" or not word.startswith("-"):
            yield PythonWord(word, position, awaits_value)
            awaits_program = awaits_value or bool(PYTHON_PATTERN.fullmatch(PurePath(word).name))
            awaits_value = False
        elif (match := _PYTHON_OPTION_WITH_VALUE.fullmatch(word)) and match[2] in "cm":
            options = [f"-{letters}" for letters in match.group(1, 2) if letters]
            yield from (PythonWord(option, position, is_option=True) for option in options)
            if match[3]:
                yield PythonWord(match[3], position, is_option=False)
            awaits_program = False
        else:
            yield PythonWord(word, position, is_option=True)
            awaits_value = word == "--check-hash-based-pycs" or (match is not None and not match[3])


LAUNCHER_PACKAGES = {"torch", "accelerate", "deepspeed"}
"""Packages whose modules start another program, as in `python -m torch.distributed.run train.py`."""


def find_program_name(command: str) -> str:
    """Return the displayed name of a command: the file name of its script, else its module or program."""
    words = [word.text for word in separate_python_options(shlex.split(command))]
    files = [word for word in words if PurePath(word).suffix in SCRIPT_SUFFIXES]
    modules = [] if files else [name for flag, name in itertools.pairwise(words) if flag == "-m"]
    if modules:  # skips a launcher's module; a later -m may be an option of the program
        return next((name for name in modules if name.partition(".")[0] not in LAUNCHER_PACKAGES), modules[0])
    return PurePath((files or words)[0]).name


def _format_value(value: str | float) -> str:
    """Format a value for a command line: 0.1 + 0.2 gives 0.3, and 32.0 gives 32."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _describe_unknown_placeholder(name: str) -> str:
    near = difflib.get_close_matches(name, PLACEHOLDERS, 1)
    hint = f"did you mean {{{near[0]}}}?" if near else f"choose from {', '.join(PLACEHOLDERS)}."
    return f"unknown placeholder {{{name}}}: {hint} For literal braces, write {{{{ and }}}}"
