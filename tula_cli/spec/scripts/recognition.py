"""From the command line that somebody types today to section `script`: its processes, its batch, learning rate, length ..."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tula_cli.errors import SpecError
from tula_cli.spec.scripts.command_text import TrainingCommand, refuse_unknown, training_command
from tula_cli.spec.scripts.launchers import Known, Launch, Unknown, find_launcher, per_node_words
from tula_cli.spec.scripts.options import MAY_BE_BATCH, Option, number, read_options
from tula_cli.spec.scripts.placeholders import BATCHES, PLACEHOLDERS
from tula_cli.spec.scripts.shell import Word
from tula_cli.words import plural

# The last part of an option's name, in lower case with underscores -> what it is.
_PER_PROCESS = (
    "local_batch local_bs per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size per_gpu_batch_size local_batch_size"
    " batch_size_per_gpu batch_size_per_device batch_size_per_rank batch_size_per_replica batch_size_per_proc"
    " batch_per_gpu samples_per_gpu imgs_per_gpu images_per_gpu ims_per_gpu device_batch_size train_batch_size_per_gpu"
    " device_train_batch_size batch_per_device train_batch_size_per_device batch_size_per_process"
)
_BY_CUSTOM = "b bs bsz batch_size train_batch_size batch batchsize max_sentences"
_MICRO = "micro_batch_size micro_batch train_micro_batch_size_per_gpu microbatch_size device_train_microbatch_size"
_GLOBAL = (
    "global_batch_size total_batch_size global_train_batch_size total_train_batch_size effective_batch_size ims_per_batch"
    " global_bs global_batch"
)
_TOKENS = "max_tokens tokens_per_batch batch_size_tokens batch_tokens global_batch_tokens tokens_per_step"
_ACCUMULATIONS = (
    "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps accumulation_steps gradient_accumulation"
    " accum_iter grad_accum update_freq accum_freq accum_steps grad_accumulation_steps acc_steps"
)
_VALUES = {
    "lr": "lr learning_rate base_lr peak_lr max_lr lr0",
    "epochs": "epochs num_train_epochs max_epochs num_epochs n_epochs max_epoch end_epoch train_epochs nepochs",
    "steps": "max_steps max_iters max_iter num_steps total_steps train_steps max_train_steps train_iters num_iterations"
    " max_update total_iters",
    "workers": "j workers num_workers dataloader_num_workers data_workers",
    "out": "output_dir out_dir output save_dir checkpoint_dir default_root_dir work_dir",
    "seed": "seed",
}
FLAGS = {
    **dict.fromkeys(f"{_PER_PROCESS} {_BY_CUSTOM}".split(), "local_batch"),
    **dict.fromkeys(_MICRO.split(), "micro_batch"),
    **dict.fromkeys(_GLOBAL.split(), "batch"),
    **dict.fromkeys(_ACCUMULATIONS.split(), "accumulate"),
    **{name: placeholder for placeholder, names in _VALUES.items() for name in names.split()},
}
RESUME = {"resume", "resume_from_checkpoint", "ckpt_path", "resume_from"}
_OTHER_PHASE = re.compile(
    r"(?:^|_)(?:val|valid|validation|eval|evaluation|test|testing|infer|inference|pred|predict)(?:$|_)"
)
_LENGTH_OF_TEXT = "sequence_length seq_length seq_len block_size context_length max_seq_len max_seq_length"
_YOLO = "weights hyp cfg img imgsz"
_LENGTHS = ("epochs", "steps")
_COUNTS = {
    *BATCHES,
    *_LENGTHS,
    "accumulate",
}  # whole numbers from 1 on; --max_steps -1 and --epochs 0.5 stay as they are
_BY_HAND = re.compile(r"(?<!\{)\{(\w+)(?:=([^{}\s]*))?\}(?!\})")
_HOW_TO_SAY = (
    "write {{local_batch={0}}} in place of its value where that is one process's, {{batch={0}}} where it is that of all"
)


@dataclass(frozen=True)
class Recognised:
    """What a command line tells."""

    script: dict[str, Any]  # section `script`, as it is written; without what the command does not tell
    gpus_per_node: int | None  # as the launcher was told; None: there is no launcher
    flags: dict[str, str]  # the word of the command -> what stands for its value now
    values: dict[str, str]  # placeholder -> the value that it had
    nodes: int = 1
    wrapper: tuple[str, ...] = ()  # words before the command of every rank
    setup: tuple[str, ...] = ()  # lines of the shell before it
    sources: tuple[tuple[str, str], ...] = ()  # words of the command -> what they were taken for
    left_out: tuple[str, ...] = ()  # of the text
    warnings: tuple[str, ...] = ()
    slurm: Mapping[str, Option] = field(default_factory=dict)  # what srun was asked for, by long names

    @property
    def accumulate(self) -> int:
        """Micro-batches of a process in a step."""
        each, total = self.values.get("accumulate"), self.values.get("accumulate_total")
        return int(float(each or 1)) if total is None else max(1, int(float(total)) // self.ranks)

    @property
    def ranks(self) -> int:
        """Processes of all nodes."""
        return (self.gpus_per_node or 1) * self.nodes

    @property
    def summary(self) -> str:
        """The summary for the user: "4 processes per node, 64 samples per process: global batch 256; 90 epochs"."""
        values, reference = self.values, self.script["reference"]
        parts = [plural(self.nodes)] if self.nodes > 1 else []
        parts.append(per_node_words(self.gpus_per_node or 1))
        if "batch" not in values and "local_batch" in values:
            parts.append(f"{plural(int(float(values['local_batch'])), 'sample')} per process")
        elif "batch" not in values and "micro_batch" in values:
            times = values.get("accumulate") or values.get("accumulate_total", "1")
            of_all = " over all processes" if "accumulate_total" in values else ""
            micro, micros = (
                plural(int(float(n)), what) for n, what in ((values["micro_batch"], "sample"), (times, "micro-batch"))
            )
            parts.append(f"{micro} per process x {micros}{of_all}")
        length = self.script.get("length", {})
        return "; ".join([
            f"{', '.join(parts)}: global batch {reference.get('batch', 'not known')}",
            *(plural(count, kind.removesuffix("s")) for kind, count in length.items()),
            *([f"learning rate {reference['lr']:.12g}"] if "lr" in reference else []),
        ])  # fmt: skip


def recognise(line: str, known: Known | None = None, *, keeps_setup: bool = False) -> Recognised:
    """Return what section `script` would be for a command line.

    `--batch-size` under a launcher is taken for that of one process, as nearly all scripts mean it; the first probe tells
    where it is not so. Placeholders that are there already stay, with the value of today in `{local_batch=64}`.

    Raises:
        Unknown: it does not say how many processes there are, or whose batch an option gives.
        SpecError: it needs a shell, or is no command.
    """
    return recognise_command(training_command(line, keeps_setup=keeps_setup), known or Known())


def recognise_command(command: TrainingCommand, known: Known) -> Recognised:
    """Return what section `script` would be for a command that was taken out of its text. Raises as `recognise`."""
    devices = re.findall(r"[\w-]+", command.environment.get("CUDA_VISIBLE_DEVICES", ""))
    launch = find_launcher(command.words, replace(known, gpus=len(devices) or known.gpus))
    environment = [f"{name}={value}" for name, value in command.environment.items()]
    reader = _Reader(launch, known)
    arguments = reader.take([*(Word(text, text) for text in environment), *launch.arguments])
    words = [*arguments[: len(environment)], *launch.program, *arguments[len(environment) :]]
    if environment:  # a shell's way to set them; the program does the same
        words = [Word("env", "env"), *words]
    for word in (*launch.wrapper, *words):
        refuse_unknown(word)
    return Recognised(
        reader.section(" ".join(_quoted(_literal(word)) for word in words)),
        launch.per_node,
        reader.flags,
        reader.values,
        launch.nodes,
        tuple(word.text for word in launch.wrapper),
        command.setup,
        (*launch.sources, *reader.sources),
        (*command.left_out, *launch.left_out),
        command.warnings,
        launch.slurm,
    )


@dataclass
class _Reader:
    """Puts placeholders in place of the values of a script's options."""

    launch: Launch
    known: Known
    values: dict[str, str] = field(default_factory=dict)  # that the command had, by placeholder
    flags: dict[str, str] = field(default_factory=dict)
    by_hand: set[str] = field(default_factory=set)  # placeholders that were there
    resume: str = ""
    sources: list[tuple[str, str]] = field(default_factory=list)  # words that are taken for something else

    @property
    def ranks(self) -> int:
        return (self.launch.per_node or 1) * self.launch.nodes

    def take(self, words: Sequence[Word]) -> list[Word]:
        """Return the words with placeholders, and without a checkpoint to go on from."""
        options = [option for option in read_options(words) if not option.value.filled]
        flags = {option.place + len(option.words) - 1: option.flag.rstrip("= ") for option in options}
        for place, word in enumerate(words):
            self._take_by_hand(word, flags.get(place, word.raw))
        roles = {option.place: role for option, role in self._roles(options)}
        result, position = [], 0
        by_place = {option.place: option for option in options}
        while position < len(words):
            option = by_place.get(position)
            role = roles.get(position)
            if option is None:
                result.append(words[position])
                position += 1
                continue
            if option.name in RESUME and option.value.text and option.words[0].text.startswith("-"):
                self.resume = f"{option.flag}{{checkpoint}}"
                self.sources.append((option.written, "script.resume: a training begins without"))
            elif role is None:
                result += option.words
            else:
                placeholder, text = role
                self.flags[option.flag.rstrip("= ")] = placeholder
                self.values[placeholder] = option.value.text.removesuffix("ep")
                result += option.filled(text)
            position += len(option.words)
        return result

    def _take_by_hand(self, word: Word, flag: str) -> None:
        """Take over the placeholders that somebody wrote, and the values in them: {local_batch=64}."""
        for name, value in _BY_HAND.findall("" if word.filled else word.text):
            if name not in PLACEHOLDERS:
                continue
            self.by_hand.add(name)
            if value and not _fits(name, value):
                raise SpecError(f"{word.text}: {value!r} is no value of {{{name}}}", "give the number of today")
            if value:
                self.values[name], self.flags[flag] = value, name

    def _roles(self, options: Sequence[Option]) -> Iterator[tuple[Option, tuple[str, str]]]:
        """Yield the options whose values give way, with the placeholder and the text in place of the value."""
        for option, placeholder in self._batch_roles(options):
            yield option, (placeholder, f"{{{placeholder}}}")
        seen: set[str] = set()
        for option in options:
            placeholder, text = FLAGS.get(option.name, ""), option.value.text
            if option.name == "max_duration" and re.fullmatch(r"\d+ep", text):  # composer
                yield option, ("epochs", "{epochs}ep")
            elif (
                placeholder
                and placeholder not in {*BATCHES, "accumulate", *seen, *self.by_hand}
                and _fits(placeholder, text)
                and (placeholder == "out" or not option.value.unknown)
            ):
                seen.add(placeholder)
                yield option, (placeholder, f"{{{placeholder}}}")

    def _batch_roles(self, options: Sequence[Option]) -> Iterator[tuple[Option, str]]:
        """Yield the options that make the batch of a step.

        Raises:
            Unknown: there is none, or whose batch one gives is not certain.
            SpecError: it counts tokens, or two options disagree.
        """
        if self.by_hand & BATCHES:
            return
        training = [option for option in options if not any(_OTHER_PHASE.search(part) for part in option.path)]
        kinds: dict[str, list[Option]] = {}
        for option in training:
            if option.name in _TOKENS.split():
                raise _tokens(option)
            if option.flag.lower() != "b=" or _fits("batch", option.value.text):  # b=x is no batch for certain
                kinds.setdefault(FLAGS.get(option.name, ""), []).append(option)
        of_all = kinds.get("batch", [])
        of_process = kinds.get("local_batch") or kinds.get("micro_batch") or []
        chosen = of_all or of_process or self._asked(options)
        if not chosen:
            raise _no_batch(options, [*self.launch.program, *self.launch.arguments])
        if len(chosen) > 1 or (of_all and kinds.get("local_batch")):
            options_ = [*of_all, *kinds.get("local_batch", [])]
            if of_all and any(option.name == "total_batch_size" for option in of_all):
                raise _tokens(of_all[0])
            names = " and ".join(option.written for option in options_ or chosen)
            raise SpecError(
                f"the batch is given twice: {names}", "leave one of them out, or " + _HOW_TO_SAY.format("N")
            )
        option = chosen[0]
        self._check_value(option)
        if option.name == "total_batch_size" and any(each.name in _LENGTH_OF_TEXT.split() for each in training):
            raise _tokens(option)
        if of_all or self._meaning(option, options) == "batch":
            yield option, "batch"
            return
        accumulation = kinds.get("accumulate", [])
        if not accumulation:
            yield option, "local_batch"
            return
        self._check_value(accumulation[0])
        yield option, "micro_batch"
        yield accumulation[0], self._accumulation(accumulation[0], option)

    def _check_value(self, option: Option) -> None:
        placeholder = FLAGS.get(option.name, "batch")
        if option.value.unknown or not _fits(placeholder if placeholder in _COUNTS else "batch", option.value.text):
            raise SpecError(
                f"{option.written}: {option.value.raw.rpartition('=')[2]!r} is no number of samples"
                if placeholder != "accumulate"
                else f"{option.written}: {option.value.text!r} is no number of micro-batches",
                "give the number that it stands for today",
            )

    def _meaning(self, option: Option, options: Sequence[Option]) -> str:
        """Return whose batch an option gives: {local_batch} that of a process, {batch} that of all.

        Raises:
            Unknown: it is not certain.
        """
        name, names = option.name, {each.name for each in options}
        if self.ranks == 1 or name in f"{_PER_PROCESS} {_MICRO}".split():
            return "local_batch"
        if self.launch.launcher == "yolo" or (name in ("batch", "batch_size") and len(names & {*_YOLO.split()}) > 1):
            return "batch"  # yolov5 and its kin: of all GPUs
        is_yacs = len(option.path) > 1 and option.flag[:1].isupper() and option.path[0] != "data"
        by_custom = name in _BY_CUSTOM.split() and not is_yacs
        if by_custom and (name != "train_batch_size" or self.launch.launcher == "accelerate"):
            return "local_batch"
        key = f"batch of {option.flag.rstrip('= ')}"
        if (answer := self.known.answers.get(key)) is not None:
            return "batch" if answer == "all" else "local_batch"
        raise Unknown(
            f"{option.written}: whether that is the batch of one process or of all {self.ranks} is not known",
            _HOW_TO_SAY.format(option.value.text),
            key=key,
            question=f"{option.written}: is that the batch of one process, or of all {self.ranks}?",
            choices=("one", "all"),
        )

    def _accumulation(self, option: Option, batch: Option) -> str:
        """Return whose micro-batches an option counts: {accumulate} a process's, {accumulate_total} those of all."""
        certain = option.name != "gradient_accumulation_steps" or batch.name in f"{_PER_PROCESS} {_MICRO}".split()
        if self.ranks == 1 or certain or self.launch.launcher in ("accelerate", "deepspeed"):
            return "accumulate"
        key = f"micro-batches of {option.flag.rstrip('= ')}"
        if (answer := self.known.answers.get(key)) is not None:
            return "accumulate_total" if answer == "all" else "accumulate"
        value = option.value.text
        raise Unknown(
            f"{option.written}: whether each of the {self.ranks} processes takes so many micro-batches a step, or all together,"
            " is not known",
            f"write {{accumulate={value}}} in place of its value where each does, {{accumulate_total={value}}} where all"
            f" together do, and {{micro_batch={batch.value.text}}} in place of that of {batch.flag.rstrip('= ')}",
            key=key,
            question=f"{option.written}: are those the micro-batches of one process, or of all {self.ranks}?",
            choices=("one", "all"),
        )

    def _asked(self, options: Sequence[Option]) -> list[Option]:
        answer = self.known.answers.get("option of the batch", "")
        return [option for option in options if option.flag.rstrip("= ") == answer]

    def number(self, name: str) -> float | None:
        return number(self.values[name]) if name in self.values else None

    def section(self, command: str) -> dict[str, Any]:
        batch = self.number("batch")
        if batch is None:
            micro = self.number("micro_batch") or 0
            each = self.number("local_batch") or micro * (self.number("accumulate") or 1)
            total = self.number("accumulate_total")
            batch = micro * total if total else each * self.ranks
        reference: dict[str, Any] = {"batch": int(batch)} if batch else {}
        if (lr := self.number("lr")) is not None:
            reference["lr"] = lr
        lengths = {name: int(value) for name in _LENGTHS if (value := self.number(name)) is not None}
        section: dict[str, Any] = {"command": command, "launch": self.launch.launch, "reference": reference}
        if lengths:
            section["length"] = dict([next(iter(lengths.items()))])
        if self.resume:
            section["resume"] = {"args": self.resume, "checkpoint": "{out}/*"}
        return section


def _tokens(option: Option) -> SpecError:
    return SpecError(
        f"{option.written} counts tokens, or may do so, and tula's batches are samples",
        "give the script an option for samples (sequences) of a step, and that one in the command; where it counts samples,"
        f" {_HOW_TO_SAY.format(option.value.text)}",
    )


def _no_batch(options: Sequence[Option], words: Sequence[Word]) -> SpecError:
    names = list(dict.fromkeys(option.flag.rstrip("= ") for option in options))
    line = " ".join(word.raw for word in words if not word.filled)
    known_options = (
        f"the options are {', '.join(names)}, and none is known for one" if names else "it has no options with values"
    )
    numbers = [option for option in options if _fits("batch", option.value.text) and option.name not in FLAGS]
    maybe = [f"{option.flag}{{local_batch}}" for option in numbers if MAY_BE_BATCH.search(option.flag)]
    example = maybe[0] if maybe else "--batch-size {local_batch}"
    message = f"no batch in {line!r}: {known_options}"
    hint = (
        "write the placeholder in place of the batch's number, {local_batch} where it is one process's and {batch} where it"
        f" is that of all, as in {example!r}, or {example.replace('}', '=64}')!r} with the number of today; where the script"
        " reads its batch from a file, give it an option first"
    )
    if not numbers:
        return SpecError(message, hint)
    flags = tuple(option.flag.rstrip("= ") for option in numbers)
    return Unknown(message, hint, key="option of the batch", question="which option is the batch?", choices=flags)


# --- words


def _fits(placeholder: str, text: str) -> bool:
    """Tell whether an option's value is of the kind that its placeholder is given."""
    value = number(text)
    if placeholder in _COUNTS:
        return value is not None and value >= 1 and value == int(value)
    return (placeholder == "out" and bool(text)) or (value is not None and (value > 0 or placeholder != "lr"))


def _literal(word: Word) -> str:
    """Return a word with its braces doubled, but for those of placeholders."""
    if word.filled:
        return word.text
    result, end = "", 0
    for match in _BY_HAND.finditer(word.text):
        if match[1] in PLACEHOLDERS:
            result += _doubled(word.text[end : match.start()]) + f"{{{match[1]}}}"
            end = match.end()
    return result + _doubled(word.text[end:])


def _doubled(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _quoted(word: str) -> str:
    """Return a word as a shell wants it; braces alone, as of placeholders, need no quotes."""
    bare = word.replace("{", "").replace("}", "")
    return word if word and (not bare or bare == shlex.quote(bare)) else shlex.quote(word)
