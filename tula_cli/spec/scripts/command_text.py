"""Extraction of the training command from shell text, with its set-up and the parts that tula does not need."""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tula_cli.errors import SpecError
from tula_cli.spec.scripts.launchers import RENDEZVOUS_VARIABLES, has_launcher, is_program_start
from tula_cli.spec.scripts.shell import MAY_BE_BATCH, PIPE_OPERATORS, Command, ShellWord, split_commands

_OUTPUT_COMMANDS = (
    "echo",
    "printf",
    "date",
    "hostname",
    "pwd",
    "which",
    "nvidia-smi",
    "ls",
    "env",
    "sleep",
    "true",
    ":",
    "wait",
)
"""Commands whose output is not needed in the job."""
_SETUP_COMMANDS = ("cd", "pushd", "set", "source", ".", "module", "ml", "conda", "mkdir", "ulimit", "export")
_RENDEZVOUS_PATTERN = re.compile(
    r"scontrol|hostname|NODELIST|\bSLURM_(?:JOB_)?NODE|SLURM_LAUNCH_NODE|comm -23|getsockname"
)
_OUTPUT_REDIRECTION = re.compile(r"1?>")  # > file, 1> file
_POSITIONAL_ARGUMENT = re.compile(r"\$(?:[1-9@*#]|\{[1-9@*#])")  # $1, ${2}, $@
_FUNCTION_DEFINITION = re.compile(r"function|.*\(\)")  # function name, name()
_NO_SHELL_MESSAGE = "tula starts the command without a shell"
_Pipeline = list[Command]


@dataclass(frozen=True)
class TrainingCommand:
    """The training command found in shell text."""

    words: tuple[ShellWord, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the text sets for the command."""
    setup: tuple[str, ...] = ()  # shell lines before the command
    left_out: tuple[str, ...] = ()  # parts of the text that tula does itself or does not need
    other_programs: tuple[str, ...] = ()  # parts of the text that start another program, with their lines


def find_training_command(
    text: str, *, keeps_setup: bool, variables: Mapping[str, str] | None = None
) -> TrainingCommand:
    """Return the command that starts the training in a command line or a shell script.

    Args:
        keeps_setup: whether the job can keep lines that set up the shell; otherwise they are rejected.
        variables: values of variables that the text may use.

    Raises:
        SpecError: there is no training command, more than one, or one that needs a shell.
    """
    known = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
    typed = re.sub(r"\A\ufeff?\s*(?:\$ )?", "", text)  # removes a byte order mark and a shell prompt
    try:
        commands = split_commands(typed, {**known, **(variables or {})})
    except ValueError as error:
        raise SpecError(
            f"{text.strip()!r} is not a command: {str(error).lower()}", "put the whole command in quotes"
        ) from None
    return _TrainingCommandFinder(typed, keeps_setup).read_pipelines(list(_split_pipelines(commands)))


@dataclass
class _TrainingCommandFinder:
    text: str
    keeps_setup: bool
    environment: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    rendezvous: list[str] = field(default_factory=list)  # names of variables with the address of the rendezvous

    def read_pipelines(self, pipelines: Sequence[_Pipeline]) -> TrainingCommand:
        """Return the one that trains, with the others as its set-up and environment, or as left out."""
        programs = [pipeline for pipeline in pipelines if self._is_program(pipeline)]
        training = self._find_training(programs)
        for pipeline in pipelines:
            if pipeline is training or pipeline in programs:
                continue
            if pipeline[0].start > training[0].start and self.keeps_setup:
                # After the training command, so not part of the setup.
                self.left_out.append(self._get_raw_text(pipeline))
            else:
                self._record_preceding_command(pipeline)
        self._reject_connected_commands(training)
        for name, word in training[0].assignments:
            if name in RENDEZVOUS_VARIABLES:
                self.left_out.append(f"{name}={word.text}: tula sets it")
            elif word.unknown and self.keeps_setup:
                self.setup.append(f"export {word.raw}")
            else:
                reject_unexpanded_word(word)
                self.environment[name] = word.text
        words = training[0].program
        for word in words:
            reject_typographic_characters(word)
        other_programs = tuple(
            f"{self._describe_line(other)}{self._get_raw_text(other)!r}" for other in programs if other is not training
        )
        return TrainingCommand(words, self.environment, tuple(self.setup), tuple(self.left_out), other_programs)

    def _is_program(self, pipeline: _Pipeline) -> bool:
        """Return whether a pipeline starts a program that may be the training.

        Raises:
            SpecError: the program is started in a loop, a branch or a function.
        """
        first = pipeline[0]
        for nested_command in first.inside:
            words = list(nested_command.program)
            while words and words[0].raw in ("do", "then", "else", "elif", "!", "{", "(", "if", "while", "for"):
                words.pop(0)
            if is_program_start(words) or has_launcher(words):
                opener = first.words[0].raw + "()" * (len(first.words) > 2 and first.words[2].raw == ")")
                raise SpecError(
                    f"{self._describe_line(pipeline)}{_shorten_words(words)!r} is in a loop, a branch or a function ({opener}), but a job has one training command",
                    "give one command, with its values written out",
                )
        if first.inside:
            return False
        words = list(first.program)
        may_be = (
            bool(words)
            and words[0].name not in (*_OUTPUT_COMMANDS, *_SETUP_COMMANDS)
            and (_is_likely_training(pipeline) or not self.keeps_setup)
        )
        is_program = may_be or is_program_start(words)
        is_piped = any(is_program_start(command.program) for command in pipeline[1:])
        return is_piped or (is_program and words[-1].text not in ("--version", "-V"))

    def _find_training(self, programs: Sequence[_Pipeline]) -> _Pipeline:
        if not programs:
            what = "no command starts a program" if self.text.strip() else "the command is empty"
            raise SpecError(what, "give the complete command with which you start the training today")
        likely = [each for each in programs if _is_likely_training(each)] if self.keeps_setup else programs
        if len(programs) > 1 and len(likely) != 1:
            lines = "; ".join(f"{self._describe_line(each)}{_shorten_words(each[0].words)!r}" for each in programs)
            raise SpecError(
                f"several commands start a program ({lines}), but a job has one training command",
                "give only the one that trains, and run the others first",
            )
        return likely[0] if likely else programs[0]

    def _record_preceding_command(self, pipeline: _Pipeline) -> None:
        """Record a command before the training as set-up, as environment, or as left out."""
        first, raw = pipeline[0], self._get_raw_text(pipeline)
        name = first.program[0].name if first.program else ""
        writes_file = any(_OUTPUT_REDIRECTION.match(text) and "/dev/null" not in text for text in first.redirections)
        if name in ("cd", "pushd"):
            self._record_working_directory(pipeline)
        elif not first.words or (name in _OUTPUT_COMMANDS and not writes_file):
            self.left_out.append(raw)
        elif not name and self._is_rendezvous(first, raw):
            self.rendezvous += [variable for variable, _ in first.assignments]
            self.left_out.append(f"{raw}: tula sets it")
        elif not self.keeps_setup:
            self._record_without_shell(pipeline)
        elif _POSITIONAL_ARGUMENT.search(raw) and not _FUNCTION_DEFINITION.match(raw):
            raise SpecError(
                f"{self._describe_line(pipeline)}{_shorten_words(first.words)!r} uses the arguments of the script, but tula starts it without arguments",
                "replace them by their values",
            )
        else:
            self.setup.append(raw)

    def _record_without_shell(self, pipeline: _Pipeline) -> None:
        """Record the variables that a command exports; reject any other command, because no shell would run it."""
        first = pipeline[0]
        if first.program:
            raise SpecError(
                f"{self._describe_line(pipeline)}{self._get_raw_text(pipeline)!r} needs a shell, but {_NO_SHELL_MESSAGE}",
                "run this command yourself before tula, or write it into cluster.setup of a job with cluster.kind: slurm (tula init slurm does so)",
            )
        for variable, word in first.assignments if first.is_exported else ():
            reject_unexpanded_word(word)
            self.environment[variable] = word.text

    def _is_rendezvous(self, command: Command, raw: str) -> bool:
        """Return whether variables define the rendezvous of the ranks, which tula determines itself."""
        uses = any(re.search(rf"\$\{{?{name}\b", raw) for name in self.rendezvous)
        return uses or bool(
            _RENDEZVOUS_PATTERN.search(raw) or RENDEZVOUS_VARIABLES & {name for name, _ in command.assignments}
        )

    def _record_working_directory(self, pipeline: _Pipeline) -> None:
        words = pipeline[0].program
        target = words[1] if len(words) > 1 else ShellWord("", "")
        is_here = not target.unknown and Path(target.text or Path.home()).resolve() == Path.cwd()
        if not is_here and "SLURM_SUBMIT_DIR" not in target.unknown:
            raise SpecError(
                f"{self._describe_line(pipeline)}{_shorten_words(words)!r} cannot be used: tula starts the command in the folder in which tula itself runs",
                f"run tula init in {target.text or 'that folder'}, and remove the change of folder from the command",
            )
        self.left_out.append(_shorten_words(words))

    def _reject_connected_commands(self, pipeline: _Pipeline) -> None:
        """Reject parts around a command that cannot be left out: its input, a filter after it, an alternative to it."""
        first = pipeline[0]
        words_outside = list(first.redirections)
        for before, after in itertools.pairwise(pipeline):
            words_outside.append(f"{before.operator} {self._get_raw_text([after])}")
            if pipeline[0] is before and is_program_start(after.program):
                raise SpecError(
                    f"{self._describe_line(pipeline)}{self._get_raw_text([before])!r} provides the input of the command, but tula starts the command without input",
                    "change the script so that it reads its input from a file, and pass the file with an option",
                )
            if before.operator == "||" or after.program[0].name != "tee":
                raise SpecError(
                    f"{self._describe_line(pipeline)}{words_outside[-1]!r} needs a shell, but {_NO_SHELL_MESSAGE}",
                    "remove it: the output of the ranks is in the run's logs",
                )
        if redirection := next((each for each in first.redirections if re.match(r"\d*<(?!\s*/dev/null$)", each)), ""):
            raise SpecError(
                f"{self._describe_line(pipeline)}{redirection!r} redirects the input, but tula starts the command without input",
                "change the script so that it reads its input from a file, and pass the file with an option",
            )
        self.left_out += [*words_outside, *(["&"] if pipeline[-1].operator == "&" else [])]

    def _get_raw_text(self, pipeline: _Pipeline) -> str:
        return self.text[pipeline[0].start : pipeline[-1].end].strip()

    def _describe_line(self, pipeline: _Pipeline) -> str:
        return f"line {pipeline[0].line}: " if self.keeps_setup or "\n" in self.text.strip() else ""


_INVISIBLE_CHARACTERS = re.compile("[\u00a0\u00ad\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]")
"""Characters that look like a space or like nothing, and do not separate words."""


def reject_typographic_characters(word: ShellWord) -> None:
    """Reject a word that starts with a typographic dash or quote, or that contains an invisible character.

    Raises:
        SpecError: the word is such a word.
    """
    if (match := _INVISIBLE_CHARACTERS.search(word.raw)) and not re.search("['\"]", word.raw):
        raise SpecError(
            f"{word.text!r} contains the character U+{ord(match[0]):04X}, as in text copied from a web page",
            "replace it by a space or remove it, or quote the word with ' if it is meant literally",
        )
    if word.raw[:1] in tuple("\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}\N{LEFT DOUBLE QUOTATION MARK}") and not word.filled:
        raise SpecError(
            f"{word.raw!r} begins with {word.raw[0]!r}, as in text copied from a web page",
            "type '-' or '\"', or quote the word with ' if it is meant literally",
        )


def reject_unexpanded_word(word: ShellWord) -> None:
    """Reject a word that needs expansion by a shell.

    Raises:
        SpecError: the word is such a word.
    """
    if word.unknown:
        raise SpecError(
            f"{word.raw!r} needs a shell ({word.unknown}), but {_NO_SHELL_MESSAGE}",
            "replace it by its value, or quote it with ' if it is meant literally",
        )


def _split_pipelines(commands: Sequence[Command]) -> Iterator[_Pipeline]:
    pipeline: _Pipeline = []
    for command in commands:
        pipeline.append(command)
        if command.operator not in PIPE_OPERATORS or command is commands[-1]:
            yield pipeline
            pipeline = []


def _is_likely_training(pipeline: _Pipeline) -> bool:
    words = pipeline[0].program
    return has_launcher(words) or any(MAY_BE_BATCH.search(word.text) for word in words)


def _shorten_words(words: Sequence[ShellWord]) -> str:
    text = " ".join(word.raw for word in words)
    return text if len(text) <= 60 else f"{text[:57]}..."
