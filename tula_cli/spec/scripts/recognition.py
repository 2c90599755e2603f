"""From an existing command line to section `script`: processes, batch, learning rate, length and so on."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tula_cli.errors import SpecError
from tula_cli.spec.scripts.command_text import TrainingCommand, find_training_command, reject_unexpanded_word
from tula_cli.spec.scripts.launchers import KnownFacts, Launch, UnknownFact, find_launcher, make_per_node_words
from tula_cli.spec.scripts.placeholders import BATCH_PLACEHOLDERS, PLACEHOLDERS, find_placeholders
from tula_cli.spec.scripts.shell import MAY_BE_BATCH, Option, ShellWord, read_options, replace_option_values
from tula_cli.words import format_count, parse_number

_DEVICE = r"(?:gpu|device|rank|replica|proc(?:ess)?)"
_SIZE = r"batch(?:_?size)?"
_OPTION_PATTERNS = {
    "tokens": r"max_tokens|tokens_per_(?:batch|step)|\w*batch(?:_size)?_tokens",
    "accumulate": r"(?:\w*_)?(?:acc|accum(?:ulat(?:e|ion))?)_(?:steps?|iters?|freq|grad_batches)|(?:\w*_)?accum(?:ulat(?:e|ion))?"
    r"|update_freq|iter_size",
    "micro_batch": rf"(?:device_)?(?:train_)?micro_?{_SIZE}(?:_per_{_DEVICE})?",
    "batch": rf"(?:global|total|effective)_(?:train_)?(?:{_SIZE}|bs)|ims_per_batch",
    "local_batch": rf"local_(?:{_SIZE}|bs)|(?:train_)?(?:{_SIZE}|bs|samples|imgs|images|ims)_per_{_DEVICE}"
    rf"|(?:per_)?{_DEVICE}_(?:train_)?{_SIZE}",
    "some_batch": rf"b|bs|bsz|(?:train_)?{_SIZE}|max_sentences",  # usually the batch of one process
    "model_parallel": r"(?:tensor|pipeline|context|sequence|model)(?:_model)?_parallel(?:_size|_degree)?"
    r"|(?:tp|pp|cp)(?:_size|_degree)?|[sm]p_size",
    "lr": r"lr0?|learning_rate|(?:base|peak|max)_lr",
    "epochs": r"(?:n_?|(?:num_|max_)?(?:train_)?)epochs|(?:num|max|end)_epochs?",
    "steps": r"(?:max|num|total|train|max_train)_(?:steps|iters?|updates?)|num_iterations",
    "workers": r"j|(?:num_|dataloader_num_|data_)?workers",
    "out": r"out|out(?:put)?_?(?:dir|folder|path)|output|(?:save|checkpoint|ckpt|work|exp(?:eriment)?)_dir|default_root_dir|logdir",
    "seed": r"seed",
    "resume": r"resume(?:_from(?:_checkpoint)?)?|ckpt_path",
}
"""Patterns of option names by meaning; names are in lower case with underscores, the last part of a path."""
_OTHER_PHASE_PATTERN = re.compile(
    r"(?:^|_)(?:val|valid(?:ation)?|eval(?:uation)?|test(?:ing)?|infer(?:ence)?|pred(?:ict)?)(?:$|_)"
)
_LENGTH_OF_TEXT = re.compile(r"(?:max_)?seq(?:uence)?_len(?:gth)?|block_size|context_length")
_YOLO_OPTIONS = {"weights", "hyp", "cfg", "img", "imgsz"}
_LENGTH_MEANINGS = ("epochs", "steps")
_COUNT_MEANINGS = {*BATCH_PLACEHOLDERS, *_LENGTH_MEANINGS, "some_batch", "accumulate"}
"""Meanings of options whose values must be positive integers: --max_steps -1 and --epochs 0.5 are left unchanged."""
_USER_PLACEHOLDER_PATTERN = re.compile(r"(?<!\{)\{(\w+)(?:=([^{}\s]*))?\}(?!\})")
_BATCH_HINT = "replace its value by {{local_batch={0}}} if it is the batch of one process, or by {{batch={0}}} if it is the batch of all processes"


@dataclass(frozen=True)
class RecognisedCommand:
    """The job settings recognised in a command line."""

    script: dict[str, Any]  # section `script` as plain values, without keys that the command does not determine
    gpus_per_node: int | None  # processes per node of the launcher; None without a launcher
    flags: dict[str, str]  # option of the command -> placeholder that replaces its value
    values: dict[str, str]  # placeholder -> the value that it replaces
    nodes: int = 1
    wrapper: tuple[str, ...] = ()  # words before the command of every rank
    setup: tuple[str, ...] = ()  # shell lines before the command
    sources: tuple[tuple[str, str], ...] = ()  # (words of the command, the setting read from them)
    left_out: tuple[str, ...] = ()  # parts of the text that tula does itself or does not need
    other_programs: tuple[str, ...] = ()  # parts of the text that start another program
    slurm: Mapping[str, Option] = field(default_factory=dict)  # options of srun by long name

    @property
    def placeholders(self) -> frozenset[str]:
        """Names in braces in the command, such as lr in {lr}."""
        return frozenset(find_placeholders(self.script["command"]))

    @property
    def accumulate(self) -> int:
        """Micro-batches per process and step."""
        each, total = self.values.get("accumulate"), self.values.get("accumulate_total")
        return int(float(each or 1)) if total is None else max(1, int(float(total)) // self.ranks)

    @property
    def ranks(self) -> int:
        """Number of processes on all nodes."""
        return (self.gpus_per_node or 1) * self.nodes

    @property
    def summary(self) -> str:
        """Summary for the user: "4 processes per node, 64 samples per process: global batch 256; 90 epochs"."""
        values, reference = self.values, self.script["reference"]
        parts = [format_count(self.nodes)] if self.nodes > 1 else []
        parts.append(make_per_node_words(self.gpus_per_node or 1))
        if "batch" not in values and "local_batch" in values:
            parts.append(f"{format_count(int(float(values['local_batch'])), 'sample')} per process")
        elif "batch" not in values and "micro_batch" in values:
            times = values.get("accumulate") or values.get("accumulate_total", "1")
            global_options = " over all processes" if "accumulate_total" in values else ""
            micro, micros = (
                format_count(int(float(n)), what)
                for n, what in ((values["micro_batch"], "sample"), (times, "micro-batch"))
            )
            parts.append(f"{micro} per process x {micros}{global_options}")
        length = self.script.get("length", {})
        return "; ".join([
            f"{', '.join(parts)}: global batch {reference.get('batch', 'not known')}",
            *(format_count(count, kind.removesuffix("s")) for kind, count in length.items()),
            *([f"learning rate {reference['lr']:.12g}"] if "lr" in reference else []),
        ])  # fmt: skip


def recognise_line(line: str, known: KnownFacts | None = None, *, keeps_setup: bool = False) -> RecognisedCommand:
    """Recognise section `script` in a command line.

    `--batch-size` under a launcher is taken as the batch of one process, as nearly all scripts mean it; the first probe
    detects if this is wrong. Existing placeholders are kept; they may hold the current value, as in `{local_batch=64}`.

    Raises:
        UnknownFact: the number of processes, or whose batch an option gives, is unknown.
        SpecError: the line needs a shell, or is not a command.
    """
    return recognise_command(find_training_command(line, keeps_setup=keeps_setup), known or KnownFacts())


def recognise_command(command: TrainingCommand, known: KnownFacts) -> RecognisedCommand:
    """Recognise section `script` in an extracted command; raises the errors of `recognise_line`."""
    devices = re.findall(r"[\w-]+", command.environment.get("CUDA_VISIBLE_DEVICES", ""))
    launch = find_launcher(command.words, replace(known, gpus=len(devices) or known.gpus))
    environment = [f"{name}={value}" for name, value in command.environment.items()]
    reader = _OptionReplacer(launch, known, len(environment))
    arguments = reader.replace_options([*(ShellWord(text, text) for text in environment), *launch.arguments])
    words = [*arguments[: len(environment)], *launch.program, *arguments[len(environment) :]]
    if environment:  # program env instead of the shell's assignments, because there is no shell
        words = [ShellWord("env", "env"), *words]
    for word in (*launch.wrapper, *words):
        reject_unexpanded_word(word)
    return RecognisedCommand(
        reader.make_section(" ".join(_quote_word(_escape_braces(word)) for word in words)),
        launch.per_node,
        reader.flags,
        reader.values,
        launch.nodes,
        tuple(word.text for word in launch.wrapper),
        command.setup,
        (*launch.sources, *reader.sources),
        (*command.left_out, *launch.left_out),
        command.other_programs,
        launch.slurm,
    )


@dataclass
class _OptionReplacer:
    launch: Launch
    known: KnownFacts
    variables: int = 0  # number of first words that set environment variables; options of the script take precedence
    values: dict[str, str] = field(default_factory=dict)  # placeholder -> the value that it replaces
    flags: dict[str, str] = field(default_factory=dict)
    by_hand: set[str] = field(default_factory=set)  # placeholders that the user wrote
    resume: str = ""
    sources: list[tuple[str, str]] = field(default_factory=list)  # (words of the command, the setting read from them)

    @property
    def ranks(self) -> int:
        return (self.launch.per_node or 1) * self.launch.nodes

    def replace_options(self, words: Sequence[ShellWord]) -> list[ShellWord]:
        """Return the words with placeholders, and without an option that resumes from a checkpoint."""
        options = [option for option in read_options(words) if not option.value.filled]
        given = {_find_option_role(option) for option in options if option.index >= self.variables}
        options = [
            option for option in options if option.index >= self.variables or _find_option_role(option) not in given
        ]
        flags = {option.index + len(option.words) - 1: option.label for option in options}
        for index, word in enumerate(words):
            self._record_placeholders(word, flags.get(index, word.raw))
        values = []
        for option, placeholder in [*self._list_batch_options(options), *self._list_other_options(options)]:
            self.flags[option.label] = placeholder
            self.values[placeholder] = option.value.text.removesuffix("ep")
            values.append((option, f"{{{placeholder}}}{'ep' * option.value.text.endswith('ep')}"))
        result = replace_option_values(words, values)
        for option in reversed(options):
            if _find_option_meaning(option) == "resume" and option.value.text and option.words[0].text.startswith("-"):
                self.resume = f"{option.flag}{{checkpoint}}"
                self.sources.append(
                    (option.text, "moved to script.resume, because a training starts without a checkpoint")
                )
                del result[option.index : option.index + len(option.words)]
        return result

    def _record_placeholders(self, word: ShellWord, flag: str) -> None:
        """Record placeholders written by the user, and the values in them: {local_batch=64}."""
        for name, value in _USER_PLACEHOLDER_PATTERN.findall("" if word.filled else word.text):
            if name not in PLACEHOLDERS:
                continue
            self.by_hand.add(name)
            if value and not _is_valid_value(name, value):
                raise SpecError(
                    f"{word.text}: {value!r} is not a valid value of {{{name}}}",
                    "give the number that the command uses today",
                )
            if value:
                self.values[name], self.flags[flag] = value, name

    def _list_other_options(self, options: Sequence[Option]) -> Iterator[tuple[Option, str]]:
        """Yield the options to replace other than those of the batch, each with its placeholder."""
        seen = {*self.by_hand}
        if len([option for option in options if _find_option_meaning(option) == "lr"]) > 1:
            seen.add("lr")  # learning rates of several optimizers: none is replaced
        for option in options:
            placeholder, text = _find_option_meaning(option), option.value.text
            # Composer's duration in epochs, such as 90ep.
            if option.name == "max_duration" and re.fullmatch(r"\d+ep", text):
                yield option, "epochs"
            elif (
                placeholder in {*PLACEHOLDERS} - {*BATCH_PLACEHOLDERS, "accumulate", *seen}
                and _is_valid_value(placeholder, text)
                and (placeholder == "out" or not option.value.unknown)
            ):
                seen.add(placeholder)
                yield option, placeholder

    def _list_batch_options(self, options: Sequence[Option]) -> Iterator[tuple[Option, str]]:
        """Yield the options that determine the batch of a step, each with its placeholder.

        Raises:
            UnknownFact: there is none, or whose batch an option gives is uncertain.
            SpecError: an option counts tokens, the batch is given twice, or processes share a copy of the model.
        """
        if self.by_hand & BATCH_PLACEHOLDERS:
            return
        kinds: dict[str, list[Option]] = {}
        for option in options:
            is_training = not any(_OTHER_PHASE_PATTERN.search(part) for part in option.path)
            # In b=x, an x that is not a number is no batch.
            if is_training and (option.flag.lower() != "b=" or _is_valid_value("batch", option.value.text)):
                kinds.setdefault(_find_option_meaning(option), []).append(option)
        global_options = kinds.get("batch", [])
        local_options = [*kinds.get("local_batch", []), *kinds.get("some_batch", [])]
        answer = self.known.answers.get("option of the batch", "")
        chosen = (
            global_options
            or local_options
            or kinds.get("micro_batch")
            or [each for each in options if each.label == answer]
        )
        of_tokens = [each for each in global_options if each.name == "total_batch_size"]
        if not (local_options or any(_LENGTH_OF_TEXT.fullmatch(option.name) for option in options)):
            of_tokens = []
        if of_tokens := [*kinds.get("tokens", []), *of_tokens]:
            raise SpecError(
                f"{of_tokens[0].text} may count tokens, but tula's batches are samples",
                "use an option for samples (sequences) per step, and add one to the script if there is none; if this option counts"
                f" samples, {_BATCH_HINT.format(of_tokens[0].value.text)}",
            )
        if not chosen:
            raise _make_no_batch_error(options, [*self.launch.program, *self.launch.arguments])
        if len(chosen) > 1 or (global_options and local_options):
            names = " and ".join(option.text for option in [*global_options, *local_options] or chosen)
            raise SpecError(
                f"the batch is given twice: {names}",
                "remove one of them; or, for the one that sets the batch, " + _BATCH_HINT.format("N"),
            )
        option, accumulation = chosen[0], kinds.get("accumulate", [])[:1]
        shared = [each for each in kinds.get("model_parallel", []) if each.value.text != "1"]
        if shared and self.ranks > 1 and not global_options:
            raise SpecError(
                f"with {shared[0].text}, several processes share one copy of the model, so it is unknown how many batches"
                f" ({option.text}) a step has",
                "use an option for the batch of all processes, and replace its value N by {batch=N}",
            )
        _check_count(option, "samples")
        if global_options or self._is_batch_of_all_processes(option, options):
            yield option, "batch"
        elif not accumulation:
            yield option, "local_batch"
        else:
            _check_count(accumulation[0], "micro-batches")
            yield option, "micro_batch"
            yield accumulation[0], self._choose_accumulation_placeholder(accumulation[0], option)

    def _is_batch_of_all_processes(self, option: Option, options: Sequence[Option]) -> bool:
        name, launcher = option.name, self.launch.launcher
        if self.ranks == 1 or _find_option_meaning(option) in ("local_batch", "micro_batch"):
            return False
        if launcher == "yolo" or (
            name.startswith("batch") and len({each.name for each in options} & _YOLO_OPTIONS) > 1
        ):
            return True  # yolov5 and similar scripts
        is_yacs = len(option.path) > 1 and option.flag[:1].isupper() and option.path[0] != "data"
        is_split = any(_find_option_meaning(each) == "micro_batch" for each in options)
        by_custom = (
            _find_option_meaning(option) == "some_batch"
            and not is_split
            and (name != "train_batch_size" or launcher == "accelerate")
        )
        if by_custom and not is_yacs:
            return False
        hint = _BATCH_HINT.format(option.value.text)
        return self._counts_all_processes(option, f"batch of {option.label}", "the batch", hint)

    def _choose_accumulation_placeholder(self, option: Option, batch: Option) -> str:
        certain = option.name != "gradient_accumulation_steps" or _find_option_meaning(batch) in (
            "local_batch",
            "micro_batch",
        )
        if self.ranks == 1 or certain or self.launch.launcher in ("accelerate", "deepspeed"):
            return "accumulate"
        value = option.value.text
        global_options = self._counts_all_processes(
            option,
            f"micro-batches of {option.label}",
            "the micro-batches of a step",
            f"replace the value of {batch.label} by {{micro_batch={batch.value.text}}}, and that of {option.label} by"
            f" {{accumulate={value}}} (micro-batches of one process) or {{accumulate_total={value}}} (of all processes)",
        )
        return "accumulate_total" if global_options else "accumulate"

    def _counts_all_processes(self, option: Option, key: str, what: str, hint: str) -> bool:
        if (answer := self.known.answers.get(key)) is not None:
            return answer == "all"
        message = f"{option.text}: it is unclear whether this is {what} of one process or of all {self.ranks}"
        question = f"{option.text}: is this {what} of one process, or of all {self.ranks}?"
        raise UnknownFact(message, hint, key=key, question=question, choices=("one", "all"))

    def get_number(self, name: str) -> float | None:
        return parse_number(self.values[name]) if name in self.values else None

    def make_section(self, command: str) -> dict[str, Any]:
        batch = self.get_number("batch")
        if batch is None:
            micro = self.get_number("micro_batch") or 0
            each = self.get_number("local_batch") or micro * (self.get_number("accumulate") or 1)
            total = self.get_number("accumulate_total")
            batch = micro * total if total else each * self.ranks
        reference: dict[str, Any] = {"batch": int(batch)} if batch else {}
        if (lr := self.get_number("lr")) is not None:
            reference["lr"] = lr
        lengths = {name: int(value) for name in _LENGTH_MEANINGS if (value := self.get_number(name)) is not None}
        section: dict[str, Any] = {"command": command, "launch": self.launch.launch, "reference": reference}
        if lengths:
            section["length"] = dict([next(iter(lengths.items()))])
        if self.resume:
            section["resume"] = {"args": self.resume, "checkpoint": "{out}/*"}
        return section


def _find_option_meaning(option: Option) -> str:
    return next((meaning for meaning, names in _OPTION_PATTERNS.items() if re.fullmatch(names, option.name)), "")


def _find_option_role(option: Option) -> str:
    """Return the meaning of an option; the same for all options that set a batch."""
    meaning = _find_option_meaning(option)
    return "batch" if meaning in {*BATCH_PLACEHOLDERS, "some_batch"} else meaning


def _check_count(option: Option, what: str) -> None:
    if option.value.unknown or not _is_valid_value("batch", option.value.text):
        raise SpecError(
            f"{option.text}: {option.value.text!r} is not a number of {what}",
            "give the current number",
        )


def _make_no_batch_error(options: Sequence[Option], words: Sequence[ShellWord]) -> SpecError:
    names = list(dict.fromkeys(option.label for option in options))
    line = " ".join(word.raw for word in words if not word.filled)
    known_options = (
        f"its options are {', '.join(names)}, and none is known to set the batch size"
        if names
        else "it has no options with values"
    )
    numbers = [
        option for option in options if _is_valid_value("batch", option.value.text) and not _find_option_meaning(option)
    ]
    maybe = [f"{option.flag}{{local_batch}}" for option in numbers if MAY_BE_BATCH.search(option.flag)]
    example = maybe[0] if maybe else "--batch-size {local_batch}"
    script = next((word.text for word in words if word.text.endswith(".py")), "")
    missing = f"{script} does not exist in {Path.cwd()}; " * (bool(script) and not Path(script).exists())
    message = f"{missing}no batch size found in {line!r}: {known_options}"
    hint = (
        "write {local_batch} (batch of one process) or {batch} (batch of all processes) for the batch size, for example"
        f" {example}, or with the current value: {example.replace('}', '=64}')}. If the script reads the batch size from a"
        " file, add an option for it to the script"
    )
    if not numbers:
        return SpecError(message, hint)
    flags = tuple(option.label for option in numbers)
    return UnknownFact(
        message, hint, key="option of the batch", question="which option sets the batch size?", choices=flags
    )


def _is_valid_value(placeholder: str, text: str) -> bool:
    value = parse_number(text)
    if placeholder in _COUNT_MEANINGS:
        return value is not None and value >= 1 and value == int(value)
    match placeholder:
        case "out":
            return bool(text)
        case "lr":
            return value is not None and value > 0
        case _:
            return value is not None


def _escape_braces(word: ShellWord) -> str:
    """Return a word with its braces doubled, except those of placeholders."""
    if word.filled:
        return word.text
    result, end = "", 0
    for match in _USER_PLACEHOLDER_PATTERN.finditer(word.text):
        if match[1] in PLACEHOLDERS:
            result += _double_braces(word.text[end : match.start()]) + f"{{{match[1]}}}"
            end = match.end()
    return result + _double_braces(word.text[end:])


def _double_braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _quote_word(word: str) -> str:
    """Quote a word for a shell; braces of placeholders need no quotes."""
    bare = word.replace("{", "").replace("}", "")
    return word if word and (not bare or bare == shlex.quote(bare)) else shlex.quote(word)
