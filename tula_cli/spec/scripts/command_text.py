"""From a shell text to the one command in it that starts the training: what is set up for it, and what tula has no use for."""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tula_cli.errors import SpecError
from tula_cli.spec.scripts.launchers import RANK_VARIABLES, runs_launcher, starts_program
from tula_cli.spec.scripts.options import MAY_BE_BATCH
from tula_cli.spec.scripts.shell import PIPES, Command, Word, split_commands

_SETS_UP = "module ml source . conda mamba micromamba set shopt ulimit umask unset alias spack eval trap stty"
_FILES = "mkdir cp mv rm ln tar unzip rsync chmod touch pip pip3 git wget curl sync stat"
_PRINTS = (
    "echo printf date hostname pwd which nvidia-smi rocm-smi ls squeue sacct scontrol sleep exit true : cat free df lscpu"
    " lsb_release env printenv wait whoami uname type seff jobinfo numastat head tail clear"
)
_RENDEZVOUS = re.compile(
    r"scontrol|hostname|NODELIST|\bSLURM_(?:JOB_)?NODE|comm -23|getsockname|\bip -|SLURM_LAUNCH_NODE"
)
_WITHOUT_SHELL = "tula starts the command without a shell"


@dataclass(frozen=True)
class TrainingCommand:
    """The command that starts the training."""

    words: tuple[Word, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # that the text sets for it
    setup: tuple[str, ...] = ()  # lines of the shell before it
    left_out: tuple[str, ...] = ()  # what tula does itself, or has no use for
    warnings: tuple[str, ...] = ()


def training_command(
    text: str, *, keeps_setup: bool = False, variables: Mapping[str, str] | None = None, first_line: int = 1
) -> TrainingCommand:
    """Return the command that starts the training.

    Args:
        text: a command line, or a script.
        keeps_setup: whether lines that set up the shell have a place in the job; else they are refused.
        variables: that the text may use, by their values.
        first_line: number of the text's first line, for messages.

    Raises:
        SpecError: there is none, or more than one, or it needs a shell.
    """
    known = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
    typed = re.sub(r"\A\s*\$ ", "", text)  # without the prompt
    try:
        commands = split_commands(typed, {**known, **(variables or {})})
    except ValueError as error:
        raise SpecError(f"{text.strip()!r} is no command: {str(error).lower()}", "quote it as a whole") from None
    return _Reader(text=typed, keeps_setup=keeps_setup, first_line=first_line).read(commands)


@dataclass
class _Reader:
    text: str
    keeps_setup: bool
    first_line: int
    environment: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    rendezvous: list[str] = field(default_factory=list)  # names of variables that hold where ranks meet
    functions: set[str] = field(default_factory=set)
    programs: list[list[Command]] = field(default_factory=list)  # pipelines that start one

    def read(self, commands: Sequence[Command]) -> TrainingCommand:
        for pipeline in _pipelines(commands):
            self._take(pipeline)
        pipeline, others = self._training()
        first = pipeline[0]
        self._check_alone(pipeline)
        for name, word in first.assignments:
            if name in RANK_VARIABLES:
                self.left_out.append(f"{name}={word.text}")
            elif word.unknown and self.keeps_setup:
                self.setup.append(f"export {word.raw}")
            else:
                self._refuse_unknown(word)
                self.environment[name] = word.text
        warnings = [
            f"{self._place(other[0])}{self._raw(other)!r} is not part of the job: run it before, if the training needs it"
            for other in others
        ]
        return TrainingCommand(
            first.program, self.environment, tuple(self.setup), tuple(self.left_out), tuple(warnings)
        )

    def _take(self, pipeline: list[Command]) -> None:
        first = pipeline[0]
        if first.inside:
            self._take_block(first, pipeline)
        elif any(starts_program(command.program) for command in pipeline[1:]):
            self.programs.append(pipeline)
        elif not first.program and first.words:
            self._take_assignments(first, pipeline)
        elif not first.words or self._is_rendezvous(pipeline):
            self.left_out.append(self._raw(pipeline))
        else:
            name = first.program[0].name
            writes_file = any(re.match(r"1?>", text) and "/dev/null" not in text for text in first.redirections)
            if name == "eval" and self._runs_program(first):
                inner = split_commands(" ".join(word.text for word in first.program[1:]))
                at_once = [replace(each, line=first.line, start=first.start, end=first.end) for each in inner]
                for each in _pipelines(at_once):
                    self._take([*each[:-1], replace(each[-1], operator=first.operator), *pipeline[1:]])
            elif name in self.functions:
                self._keep(pipeline)
            elif name in ("cd", "pushd"):
                self._take_folder(first)
            elif (
                (name in _SETS_UP.split() and not self._runs_program(first))
                or name in _FILES.split()
                or (name in ("echo", "printf", "cat") and writes_file)
            ):
                self._keep(pipeline)
            elif (name in _PRINTS.split() and (name != "env" or len(first.program) == 1)) or (
                starts_program(first.program) and first.program[-1].text in ("--version", "-V")
            ):
                self.left_out.append(self._raw(pipeline))
            else:
                self.programs.append(pipeline)

    def _runs_program(self, command: Command) -> bool:
        words = [word.text for word in command.program]
        is_hook = words[0] == "eval" and re.search(r"conda|mamba|module|agent", " ".join(words))
        return words[1:2] == ["run"] or (words[0] == "eval" and not is_hook)

    def _take_block(self, block: Command, pipeline: Sequence[Command]) -> None:
        for inner in block.inside:
            words = list(inner.program)
            while words and words[0].raw in ("do", "then", "else", "elif", "!", "{", "(", "if", "while", "for"):
                words.pop(0)
            if starts_program(words) or runs_launcher(words):
                raise SpecError(
                    f"{self._place(block)}{_short(words)!r} stands in a loop, a branch or a function"
                    f" ({_opener(block)}), and a job has one training command",
                    "give the command of one of them, with its values written out",
                )
        self.functions.add(block.words[0 if block.words[0].raw != "function" else 1].raw)
        self._keep(pipeline)

    def _take_assignments(self, command: Command, pipeline: Sequence[Command]) -> None:
        names = [name for name, _ in command.assignments]
        if self._is_rendezvous(pipeline) or any(name in RANK_VARIABLES for name in names):
            self.rendezvous += names
            self.left_out.append(self._raw(pipeline))
        elif self.keeps_setup:
            self.setup.append(self._raw(pipeline))
        elif command.exported:
            for name, word in command.assignments:
                self._refuse_unknown(word)
                self.environment[name] = word.text

    def _is_rendezvous(self, pipeline: Sequence[Command]) -> bool:
        """Return whether a line finds out where the ranks meet, which tula does itself."""
        first, raw = pipeline[0], self._raw(pipeline)
        if first.program and first.program[0].text not in ("mapfile", "readarray", "read"):
            return False
        uses = any(re.search(rf"\$\{{?{name}\b", raw) for name in self.rendezvous)
        return bool(_RENDEZVOUS.search(raw)) or uses

    def _take_folder(self, command: Command) -> None:
        target = command.program[1] if len(command.program) > 1 else Word("", "")
        is_here = "SLURM_SUBMIT_DIR" in target.unknown or (
            not target.unknown and Path(target.text or Path.home()).resolve() == Path.cwd()
        )
        if not is_here:
            raise SpecError(
                f"{self._place(command)}{_short(command.words)!r} is not kept: tula starts the command in the folder that"
                " tula itself is run in",
                f"run tula init in {target.text or 'that folder'}, and give the command without it",
            )
        self.left_out.append(_short(command.words))

    def _keep(self, pipeline: Sequence[Command]) -> None:
        first, raw = pipeline[0], self._raw(pipeline)
        if (
            re.search(r"\$(?:[1-9@*#]|\{[1-9@*#])", raw)
            and not raw.startswith("function")
            and "()" not in raw.split("\n")[0]
        ):
            raise SpecError(
                f"{self._place(first)}{_short(first.words)!r} reads the arguments of the script, and a job has none",
                "write their values in their places",
            )
        if self.keeps_setup:
            self.setup.append(self._raw(pipeline))
        elif pipeline[0].program and pipeline[0].program[0].name in ("set", "ulimit", "trap", "mkdir"):
            self.left_out.append(self._raw(pipeline))
        else:
            raise SpecError(
                f"{self._place(pipeline[0])}{self._raw(pipeline)!r} is for a shell, and {_WITHOUT_SHELL}",
                "run it before tula; or write the job with tula init slurm, which keeps such lines as cluster.slurm.setup",
            )

    def _training(self) -> tuple[list[Command], list[list[Command]]]:
        if not self.programs:
            what = (
                "there is no command that starts a program" if self.setup or self.left_out else "the command is empty"
            )
            raise SpecError(what, "give the whole command that you type today")
        likely = [each for each in self.programs if _is_likely(each)] if self.keeps_setup else self.programs
        if len(self.programs) > 1 and len(likely) != 1:
            lines = "; ".join(f"{self._place(each[0])}{_short(each[0].words)!r}" for each in self.programs)
            raise SpecError(
                f"there is more than one command that starts a program ({lines}), and a job has one",
                "give the one that trains; run the others before it",
            )
        training = likely[0] if len(likely) == 1 else self.programs[0]
        return training, [each for each in self.programs if each is not training]

    def _check_alone(self, pipeline: Sequence[Command]) -> None:
        """Refuse what cannot be left out around a command: its input, a filter behind it, another in its place."""
        first = pipeline[0]
        behind = list(itertools.pairwise(pipeline))
        for before, after in behind:
            if before.operator == "||" or after.program[0].name != "tee":
                what = f"{before.operator} {_short(after.words)}"
                raise SpecError(
                    f"{self._place(first)}{what!r} is for a shell, and {_WITHOUT_SHELL}",
                    "leave it out: what the ranks print is kept in the run's logs",
                )
        for redirection in first.redirections:
            if re.match(r"\d*<", redirection):
                raise SpecError(
                    f"{self._place(first)}{redirection!r} gives the command an input, and tula starts it without one",
                    "give the script an option for it",
                )
        outside = [*first.redirections, *(f"{before.operator} {self._raw([after])}" for before, after in behind)]
        self.left_out += [*outside, *(["&"] if pipeline[-1].operator == "&" else [])]

    def _refuse_unknown(self, word: Word) -> None:
        refuse_unknown(word)

    def _raw(self, pipeline: Sequence[Command]) -> str:
        return self.text[pipeline[0].start : pipeline[-1].end].strip()

    def _place(self, command: Command) -> str:
        several = self.keeps_setup or "\n" in self.text.strip()
        return f"line {command.line + self.first_line - 1}: " if several else ""


def refuse_unknown(word: Word) -> None:
    """Refuse a word that a shell would have to replace.

    Raises:
        SpecError: it is such a word.
    """
    if word.raw[:1] in tuple("\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}\N{LEFT DOUBLE QUOTATION MARK}") and not word.filled:
        raise SpecError(
            f"{word.raw!r} begins with {word.raw[0]!r}, as text that was copied from a page may",
            "type '-' or '\"'; or quote the word by ' where it is meant as it is",
        )
    if word.unknown:
        raise SpecError(
            f"{word.raw!r} is for a shell ({word.unknown}), and {_WITHOUT_SHELL}",
            "give its value in place of it; or quote it by ' where it is meant as it is",
        )


def _pipelines(commands: Sequence[Command]) -> Iterator[list[Command]]:
    pipeline: list[Command] = []
    for command in commands:
        pipeline.append(command)
        if command.operator not in PIPES:
            yield pipeline
            pipeline = []
    if pipeline:
        yield pipeline


def _is_likely(pipeline: Sequence[Command]) -> bool:
    words = pipeline[0].program
    return runs_launcher(words) or any(MAY_BE_BATCH.search(word.text) for word in words)


def _opener(block: Command) -> str:
    return block.words[0].raw + "()" * (len(block.words) > 2 and block.words[2].raw == ")")


def _short(words: Sequence[Word]) -> str:
    text = " ".join(word.raw for word in words)
    return text if len(text) <= 60 else f"{text[:57]}..."
