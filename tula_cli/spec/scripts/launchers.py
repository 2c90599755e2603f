"""Recognition of the parts of a command that start its processes: wrappers, launchers with options, and the script."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Literal

from tula_cli.errors import SpecError
from tula_cli.spec.scripts.placeholders import (
    PYTHON_PATTERN,
    RANK_VARIABLES,
    SCRIPT_SUFFIXES,
    SHELL_SUFFIXES,
    separate_python_options,
)
from tula_cli.spec.scripts.shell import (
    Option,
    ShellWord,
    is_option,
    make_placeholder_word,
    read_options,
    replace_option_values,
    split_commands,
)
from tula_cli.spec.yaml_text import parse_yaml, read_text_file
from tula_cli.words import format_count

RENDEZVOUS_VARIABLES = RANK_VARIABLES | {"NODE_RANK"}
"""Variables from which the ranks of a command know each other; a job file states none of them."""
PROCESSES_QUESTION, NODES_QUESTION = "processes per node", "nodes"
"""Keys of questions."""


class UnknownFact(SpecError):
    """A fact that a command does not state and that the user can be asked for.

    Args:
        message: what is unknown, with the words of the command.
        hint: how to state it in the command.
        key: key of the answer.
        question: question shown on a terminal.
        choices: possible answers; empty for a positive integer.
    """

    def __init__(self, message: str, hint: str, *, key: str, question: str, choices: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.key, self.question, self.choices = key, question, choices


@dataclass(frozen=True)
class KnownFacts:
    """Facts about a command that it does not state itself."""

    answers: Mapping[str, str] = field(default_factory=dict)  # key of a question -> the user's answer
    gpus: int = 0  # GPUs per node; 0: unknown
    folder: Path = Path()  # folder of the command's files
    nodes: int = 0  # nodes of the allocation in which it runs; 0: no allocation
    tasks_per_node: int = 0  # tasks per node of this allocation; 0: unknown
    starts_ranks: bool = False  # a launcher before the command starts one process per GPU

    def parse_answer(self, key: str) -> int | None:
        return int(self.answers[key]) if self.answers.get(key, "").isdigit() else None


@dataclass(frozen=True)
class Launch:
    """A command without the words that start its processes."""

    program: tuple[ShellWord, ...]  # interpreter, its options and the script
    arguments: tuple[ShellWord, ...]  # arguments of the script
    launch: Literal["rank", "node"] = "rank"
    per_node: int | None = None  # processes per node; None without a launcher
    nodes: int = 1
    launcher: str = ""  # name of the launcher; empty without one
    wrapper: tuple[ShellWord, ...] = ()  # words before the launcher, such as those of a container
    sources: tuple[tuple[str, str], ...] = ()  # (words of the command, the setting read from them)
    left_out: tuple[str, ...] = ()  # words that tula does not need
    slurm: Mapping[str, Option] = field(default_factory=dict)  # options of srun by long name


@dataclass(frozen=True)
class _Launcher:
    """A program that starts processes, and its options for their numbers, with underscores."""

    name: str
    nodes: str = ""
    per_node: str = ""  # options for the number of processes per node, separated by spaces
    total: str = ""  # options for the total number of processes, separated by spaces
    one_process: bool = False  # starts one process if no option sets their number
    local_rank: bool = False  # passes --local_rank to the script


_TORCHRUN = _Launcher("torchrun", "nnodes", "nproc_per_node", one_process=True)
_DEEPSPEED = _Launcher("deepspeed", "num_nodes", "num_gpus include i", local_rank=True)
_COMPOSER = _Launcher("composer", per_node="n nproc", total="world_size")
_ACCELERATE = _Launcher("accelerate", "num_machines", total="num_processes")
_SRUN = _Launcher("srun", "nodes", "ntasks_per_node", "ntasks")
_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run"), _TORCHRUN),
    "torch.distributed.launch": replace(_TORCHRUN, local_rank=True),
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), _DEEPSPEED),
    **dict.fromkeys(("composer", "composer.cli.launcher"), _COMPOSER),
    **dict.fromkeys(("accelerate", "accelerate-launch", "accelerate.commands.launch"), _ACCELERATE),
    "srun": _SRUN,
}
"""Launchers by the name of the program, or of the module after `python -m`."""
_MPI_REASON = "starts the processes itself and connects them by variables of MPI, which tula does not set"
_SUBMITS_REASON = "submits a job, but tula itself submits the jobs"
_UNSUPPORTED_LAUNCHERS = {
    **dict.fromkeys(("mpirun", "mpiexec", "orterun", "horovodrun", "jsrun", "aprun", "ibrun"), _MPI_REASON),
    **dict.fromkeys(("docker", "podman", "kubectl"), "starts a container without the variables of a rank"),
    **dict.fromkeys(("sudo", "su"), "runs the command as another user, without the variables of a rank"),
    **dict.fromkeys(("ssh", "pdsh"), "runs the command on another machine, but tula itself starts it on the nodes"),
    **dict.fromkeys(("sbatch", "salloc", "qsub", "bsub", "torchx", "sky", "ray"), _SUBMITS_REASON),
    **dict.fromkeys(
        ("xargs", "parallel", "watch", "tmux", "screen"),
        "cannot be used: tula has to start one fixed command and wait for its exit",
    ),
    **dict.fromkeys(("colossalai", "fabric", "lightning"), "is a launcher that tula does not support"),
}
_WRAPPERS = frozenset({
    "uv", "poetry", "pixi", "pdm", "rye", "hatch", "pipenv", "conda", "mamba", "micromamba", "apptainer", "singularity",
    "shifter", "env", "numactl", "taskset", "nice", "ionice", "stdbuf", "timeout", "nsys", "ncu", "xvfb-run", "coverage",
    "kernprof", "viztracer", "scalene", "memray", "pyinstrument",
})  # fmt: skip
"""Programs that run another program once; the words up to that program are kept."""
_DROPPED_PREFIXES = ("time", "nohup", "exec", "command", "setsid", "eval")
_SHELLS = ("bash", "sh", "zsh", "dash")
_COMPLETE_COMMAND_HINT = "give the complete command with which you start the training today"
_PROCESS_COUNT_HINT = (
    "if the program starts N processes per node, write {gpus_per_node=N} for its number of GPUs; if it is one of several"
    " processes, replace python by torchrun --nproc_per_node=N"
)
_INNER_COMMAND_HINT = "give the command with which this program starts the training; or, " + _PROCESS_COUNT_HINT


# --- Start of the training program


def find_launcher(words: Sequence[ShellWord], known_facts: KnownFacts) -> Launch:
    """Return a command without its launcher, which is the first launcher before the script; other words may precede it.

    Raises:
        UnknownFact: the number of processes is unknown.
        SpecError: there is no script, or the launcher is not supported.
    """
    remaining_words, left_out = _strip_prefix(words)
    if not remaining_words:
        raise SpecError("the command is empty", _COMPLETE_COMMAND_HINT)
    index = _find_program_index(remaining_words)
    if (
        remaining_words[0].name not in _WRAPPERS
        and remaining_words[index].name not in _LAUNCHERS
        and not known_facts.starts_ranks
    ):
        index = 0  # the words may belong to a program that starts its processes itself
    wrapper, remaining_words = remaining_words[:index], remaining_words[index:]
    inner = _find_inner_command(remaining_words) if remaining_words[0].name in _SHELLS else None
    launch = (
        find_launcher(inner, known_facts)
        if inner is not None
        else _parse_unwrapped_launch(remaining_words, known_facts)
    )
    if wrapper and launch.program and launch.program[0].text.endswith(".py"):
        launch = replace(launch, program=(ShellWord("python", "python"), *launch.program))
    return replace(launch, wrapper=(*wrapper, *launch.wrapper), left_out=(*left_out, *launch.left_out))


def is_program_start(words: Sequence[ShellWord]) -> bool:
    """Return whether a command starts a Python program, a launcher or a shell script."""
    remaining_words, _ = _strip_prefix(words)
    return bool(remaining_words) and (
        _starts_program(remaining_words[0])
        or (remaining_words[0].name in _WRAPPERS and _find_program_index(remaining_words) > 0)
    )


def has_launcher(words: Sequence[ShellWord]) -> bool:
    """Return whether the words contain a supported launcher."""
    separated = separate_python_options([word.text for word in words])
    return any({word.text, PurePath(word.text).name} & _LAUNCHERS.keys() for word in separated)


def _strip_prefix(words: Sequence[ShellWord]) -> tuple[list[ShellWord], list[str]]:
    """Return a command without prefixes such as `time`, `nohup` and `tula observe --`, and the removed words."""
    size = next((index for index, word in enumerate(words) if word.name not in _DROPPED_PREFIXES), len(words))
    texts = [word.text for word in words]
    if [word.name for word in words[size : size + 2]] == ["tula", "observe"] and "--" in texts:
        size = texts.index("--") + 1
    return list(words[size:]), [word.raw for word in words[:size]]


def _starts_program(word: ShellWord) -> bool:
    """Return whether a word is a launcher, Python, a shell or a script."""
    is_name = (
        word.name in _LAUNCHERS
        or word.name in _UNSUPPORTED_LAUNCHERS
        or word.name in _SHELLS
        or PYTHON_PATTERN.fullmatch(word.name)
    )
    return word.text.endswith(SCRIPT_SUFFIXES) or (bool(is_name) and not re.search("[:,=]", word.text))


def _find_program_index(words: Sequence[ShellWord]) -> int:
    """Return the index of the word that starts the program, 0 if none does.

    A launcher or shell directly before another such name is the argument of an option (`--type bash python`), so it is skipped.
    """
    starts = [index for index, word in enumerate(words) if _starts_program(word)]
    for index in starts:
        is_argument = (
            index + 1 in starts and not words[index + 1].text.endswith(SCRIPT_SUFFIXES) and words[index].name != "srun"
        )
        if index == 0 or not is_argument:
            return index
    return 0


def _find_inner_command(words: Sequence[ShellWord]) -> list[ShellWord] | None:
    """Return the words of the single command in `bash -c '...'`; None without -c.

    Raises:
        SpecError: the text after -c is not a single plain command.
    """
    options = [word.text for word in words[1:-1]]
    if len(words) < 3 or not re.fullmatch(r"-\w*c", options[-1]) or not all(text.startswith("-") for text in options):
        return None
    commands = split_commands(words[-1].text)
    if len(commands) != 1 or commands[0].inside or commands[0].assignments or commands[0].redirections:
        raise SpecError(
            f"{words[0].text} -c contains more than one command: {words[-1].text!r}",
            "give only the command that starts the training",
        )
    return list(commands[0].program)


def _parse_unwrapped_launch(words: Sequence[ShellWord], known_facts: KnownFacts) -> Launch:
    first = words[0]
    if why := _UNSUPPORTED_LAUNCHERS.get(first.name):
        hint = (
            "tula init --from-sbatch FILE reads an sbatch script"
            if first.name in ("sbatch", "salloc")
            else "give the command that runs the script, with torchrun --nproc_per_node=N before the script if there are N processes per node"
        )
        raise SpecError(f"{first.text} {why}", hint)
    if launcher := _LAUNCHERS.get(first.name):
        if first.name == "accelerate" and [word.text for word in words[1:2]] != ["launch"]:
            raise SpecError("accelerate starts a script only with accelerate launch", _COMPLETE_COMMAND_HINT)
        if launcher is _SRUN:
            return _parse_srun_launch(words[1:], known_facts)
        size = 2 if first.name == "accelerate" else 1
        folder = first.text.rpartition("/")[0]  # ranks run with the python of the launcher's folder
        interpreter = str(Path(folder, "python")) if folder else "python"
        start = words[:size] if launcher is _ACCELERATE else [ShellWord(interpreter, interpreter, first.unknown)]
        return _parse_launch(launcher, start, words[size:], known_facts)
    if PYTHON_PATTERN.fullmatch(first.name):
        return _parse_python_launch(words, known_facts)
    size = next((index for index, word in enumerate(words, 1) if word.text.endswith(SHELL_SUFFIXES)), 1)
    return _make_launch_without_launcher(
        Launch(tuple(words[:size]), tuple(words[size:])), known_facts, is_script=first.text.endswith(".py")
    )


def _parse_python_launch(words: Sequence[ShellWord], known_facts: KnownFacts) -> Launch:
    program: list[ShellWord] = []
    for text, position, is_python_option in separate_python_options([word.text for word in words]):
        word = words[position]
        program.append(word if text == word.text else replace(word, text=text, raw=text))
        if position and not is_python_option:
            break
    else:
        raise SpecError("the command has a launcher but no script", _COMPLETE_COMMAND_HINT)
    name, arguments, is_module = program[-1].name, words[position + 1 :], program[-2].text == "-m"
    if (launcher := _LAUNCHERS.get(name)) and launcher is not _SRUN:
        start = program if launcher is _ACCELERATE else program[: -2 if is_module else -1]
        return _parse_launch(launcher, start, arguments, known_facts)
    if is_module and re.search(r"launch|\.distributed\b|elastic", name):
        raise SpecError(f"{name} is a launcher that tula does not support", _PROCESS_COUNT_HINT)
    return _make_launch_without_launcher(Launch(tuple(program), tuple(arguments)), known_facts, is_script=True)


# --- Launchers


def parse_count_option(option: Option | None, key: str, known_facts: KnownFacts, *, missing: str = "") -> int:
    """Return the number of processes or nodes that an option gives.

    Raises:
        UnknownFact: the value is a variable, `gpu` or a range, or the option is missing.
    """
    if (number := _parse_count(option)) is not None:
        return number
    if (answer := known_facts.parse_answer(key)) is not None:
        return answer
    means_all_gpus = option is None or option.value.text in ("gpu", "cuda", "auto", "-1")
    if key == PROCESSES_QUESTION and known_facts.gpus and means_all_gpus:
        return known_facts.gpus
    written = option.text if option else missing
    flag = re.split(r"[ =]", written.removeprefix("srun's "))[0]
    separator = "=" if "=" in written and " " not in written else " "
    raise UnknownFact(
        f"the number of {key} is not in the command: {written}{'' if option else ' is not given'}",
        f"write the number, as in {flag}{separator}4",
        key=key,
        question=f"how many {key} does the command start ({written})?",
    )


_COUNT = re.compile(r"(?:\{(?:gpus_per_node|nodes|world)=)?([1-9]\d{0,5})\}?")  # 4 or {nodes=4}
_DEVICE_LIST = re.compile(r"\[?\d+(,\d+)+,?\]?|\[\d+\]")  # 0,1,2 or [0]


def _parse_count(option: Option | None) -> int | None:
    """Return the number in an option's value (4 or {nodes=4}), or the length of a device list (0,1,2); else None."""
    text = option.value.text if option and not option.value.unknown else ""
    if match := _COUNT.fullmatch(text):
        return int(match[1])
    return len(re.findall(r"\d+", text)) if _DEVICE_LIST.fullmatch(text) else None


def _ask_for_processes(what: str, hint: str, known_facts: KnownFacts) -> int:
    if (answer := known_facts.parse_answer(PROCESSES_QUESTION)) is not None:
        return answer
    question = f"how many {PROCESSES_QUESTION} does the program start by itself ({what})?"
    raise UnknownFact(
        f"{what}: it is unknown how many processes the program starts", hint, key=PROCESSES_QUESTION, question=question
    )


def divide_processes(total: int, parts: int, *, among: str, key: str = NODES_QUESTION) -> int:
    """Return the number of processes divided by a number of nodes, or of processes per node.

    Args:
        among: the parts in words.
        key: what the number of parts is, in words.

    Raises:
        SpecError: there is a remainder.
    """
    if total % parts:
        raise SpecError(
            f"{format_count(total, 'process')} cannot be divided equally among {among}",
            f"give a multiple of the number of {key}",
        )
    return total // parts


def _count_nodes(total: int, per_node: int) -> int:
    among = f"nodes with {format_count(per_node, 'process')} each"
    return divide_processes(total, per_node, among=among, key=PROCESSES_QUESTION)


def _count_processes_per_node(
    each: Option | None, total: Option | None, machines: int, known_facts: KnownFacts, *, missing: str
) -> int:
    """Return the processes per node, from an option for the processes of all nodes, or for those of one."""
    if (world := _parse_count(total)) is not None:
        return divide_processes(world, machines, among=format_count(machines))
    return parse_count_option(each or total, PROCESSES_QUESTION, known_facts, missing=missing)


def _set_process_counts(
    launch: Launch, launcher: str, machines: int, processes: int, nodes: Option | None, each: Option | None
) -> Launch:
    given = ((nodes, format_count(machines)), (each, make_per_node_words(processes)))
    sources = tuple((option.text, words) for option, words in given if option)
    return replace(launch, launcher=launcher, nodes=machines, per_node=processes, sources=sources)


def _parse_launch(
    launcher: _Launcher, start: Sequence[ShellWord], words: Sequence[ShellWord], known_facts: KnownFacts
) -> Launch:
    """Return the launch of a launcher's command: each rank's program, or accelerate with tula's numbers filled in."""
    options, remaining_words = _split_options(launcher, words)
    if not remaining_words:
        raise SpecError("the command has a launcher but no script", _COMPLETE_COMMAND_HINT)
    given = {option.meaning: option for option in options}
    if "config_file" in given and "num_processes" not in given:
        given = {**_read_accelerate_config(given["config_file"].value.text, known_facts), **given}
    nodes, each, total = (
        next((given[name] for name in names.split() if name in given), None)
        for names in (launcher.nodes, launcher.per_node, launcher.total)
    )
    needs_nodes = {"hostfile", "H"} & given.keys() and not {"include", "i"} & given.keys()
    machines = (
        parse_count_option(nodes, NODES_QUESTION, known_facts, missing=f"--{launcher.nodes}")
        if nodes or needs_nodes
        else 1
    )
    if each and each.meaning in ("include", "i"):  # host:0,1@host:0,1
        hosts = [host.partition(":")[2] for host in each.value.text.split("@")]
        each, machines = replace(each, value=ShellWord(f"[{hosts[0]}]" if len({*hosts}) == 1 else "", "")), len(hosts)
    if launcher.one_process and not each:
        processes = 1
    else:
        missing = f"--{launcher.per_node or launcher.total}".replace("--n ", "-n ").split()[0]
        total_of_nodes = None if launcher is _COMPOSER else total
        processes = _count_processes_per_node(each, total_of_nodes, machines, known_facts, missing=missing)
    if launcher is _ACCELERATE:
        launcher_words = {*_ACCELERATE_OPTIONS.replace("--", "").split(), "multi_gpu"}
        others = [word for option in options if option.meaning not in launcher_words for word in option.words]
        program = (*start, *map(make_placeholder_word, _ACCELERATE_OPTIONS.split()), *others, remaining_words[0])
        launch = Launch(program, tuple(remaining_words[1:]), "node")
        return _set_process_counts(launch, launcher.name, machines, processes, nodes, each or total)
    if launcher is _COMPOSER:
        if world := _parse_count(total):
            machines = _count_nodes(world, processes)
        elif total:
            machines = parse_count_option(total, NODES_QUESTION, known_facts)
        # Composer's scripts may need NODE_RANK, which torchrun does not set.
        start = (ShellWord("env", "env"), make_placeholder_word("NODE_RANK={node_rank}"), *start)
    module = [ShellWord("-m", "-m")] if given.keys() & {"m", "module", "module_mode"} else []
    program = (*(() if given.keys() & {"no_python"} else start), *module, remaining_words[0])
    hands_on = launcher.local_rank and not given.keys() & {"use_env", "no_local_rank"}
    flag = _find_local_rank_flag(known_facts.folder / remaining_words[0].text) if hands_on else ""
    rank_option = (make_placeholder_word(f"{flag}={{local_rank}}"),) if flag else ()
    return _set_process_counts(
        Launch(program, (*rank_option, *remaining_words[1:])), launcher.name, machines, processes, nodes, each
    )


def _split_options(launcher: _Launcher, words: Sequence[ShellWord]) -> tuple[list[Option], list[ShellWord]]:
    """Return a launcher's options and the words after them; options with a number may be abbreviated."""
    options, rest = _split_launcher_options(words)
    numbers = f"{launcher.nodes} {launcher.per_node} {launcher.total}".split()
    result = []
    for option in options:
        name = option.meaning
        longer = [each for each in numbers if len(name) > 2 and each.startswith(name)]
        name = longer[0] if name not in numbers and len(longer) == 1 else name
        if name not in numbers and re.search(r"nproc|nnode|num_?(?:gpu|node|proc|machine)|n_?gpu", name):
            raise SpecError(
                f"tula does not know option {option.label} of {launcher.name}", "correct this option, or remove it"
            )
        result.append(replace(option, meaning=name))
    return result, rest


_VALUELESS_FLAGS = frozenset({
    "standalone", "no_python", "use_env", "m", "module", "module_mode", "v", "verbose", "multi_gpu", "no_local_rank",
    "exclusive", "label", "l", "unbuffered", "u", "quiet", "Q", "overlap", "exact", "pty", "overcommit", "O", "oversubscribe",
    "E", "H", "K", "X", "k", "s", "hold", "kill_on_bad_exit", "multi_prog", "no_kill", "preserve_env", "requeue", "no_requeue",
})  # fmt: skip
"""Options of launchers that have no value, although the next word could be taken for one."""


def _split_launcher_options(words: Sequence[ShellWord], *, attached: str = "") -> tuple[list[Option], list[ShellWord]]:
    """Return the options in the words after a launcher, and the words from the script onwards.

    Args:
        attached: one-letter options whose value may follow without a space, in addition to numbers after any letter.
    """
    options: list[Option] = []
    index = 0
    while index < len(words) and words[index].text.startswith("-") and words[index].text != "--":
        word, behind = words[index], words[index + 1 : index + 2]
        flag, separator, value = word.text.partition("=")
        size = 1
        match = re.fullmatch(r"(-[A-Za-z])([^-=].*)", word.text)  # -n4, -pgpu
        if match and (match[2][0].isdigit() or match[1][1] in attached):
            flag, separator, value = match[1], "=", match[2]
        name = flag.lstrip("-").replace("-", "_")
        may_have_value = not separator and name not in _VALUELESS_FLAGS
        if may_have_value and behind and not (is_option(behind[0].text) or _starts_program(behind[0])):
            size, value = 2, behind[0].text
        given = behind[0] if size == 2 else replace(word, text=value)
        options.append(Option(tuple(words[index : index + size]), f"{flag}{separator or ' '}", given, index, name))
        index += size
    return options, list(words[index + (words[index : index + 1] == [ShellWord("--", "--")]) :])


def _find_local_rank_flag(script: Path) -> str:
    """Return the option by which a script takes its local rank, as spelled in its text; empty if it takes none."""
    try:
        text = read_text_file(script)
    except (OSError, UnicodeDecodeError):
        return "--local_rank"
    return next((flag for flag in ("--local-rank", "--local_rank") if flag in text), "")


_ACCELERATE_OPTIONS = (
    "--num_processes {world} --num_machines {nodes} --machine_rank {node_rank} --main_process_ip {master_addr}"
    " --main_process_port {master_port}"
)


def _read_accelerate_config(path: str, known_facts: KnownFacts) -> dict[str, Option]:
    try:
        text = read_text_file(known_facts.folder / Path(path).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        hint = "correct the path, or add --num_processes N to the command"
        raise SpecError(f"cannot read accelerate's --config_file {path}: {reason}", hint) from None
    content = parse_yaml(text, source=path)
    pairs = content.items() if isinstance(content, dict) else ()
    words = {
        name: (ShellWord(f"{name}: {value}", f"{name}: {value}"), ShellWord(str(value), str(value)))
        for name, value in pairs
    }
    return {name: Option((written,), f"{name} ", value) for name, (written, value) in words.items()}


def _parse_srun_launch(words: Sequence[ShellWord], known_facts: KnownFacts) -> Launch:
    options, remaining_words = read_slurm_options(words)
    if ":" in [word.text for word in words[: len(words) - len(remaining_words) + 1]]:
        raise SpecError(
            "srun starts several components (':'), but all nodes of a job run the same command",
            "give the command of the component that trains",
        )
    if not remaining_words:
        raise SpecError("the command has a launcher but no script", _COMPLETE_COMMAND_HINT)
    if container := next((name for name in options if name.startswith("container")), ""):
        raise SpecError(
            f"srun's {options[container].text} cannot be used: it would also run tula's own process (the supervisor) in the container, where tula is not installed",
            "start the container in the command, for example: apptainer exec image.sif python train.py",
        )
    nodes, tasks, each = options.get("nodes"), options.get("ntasks"), options.get("ntasks_per_node")
    has_several_tasks = (_parse_count(each or tasks) or known_facts.tasks_per_node) > 1
    launch = replace(
        find_launcher(remaining_words, replace(known_facts, starts_ranks=has_several_tasks)), slurm=options
    )
    machines = parse_count_option(nodes, NODES_QUESTION, known_facts) if nodes else known_facts.nodes or launch.nodes
    if launch.launcher:  # the launcher starts the processes, and srun starts the launcher once per node
        return launch if launch.nodes > 1 else replace(launch, nodes=machines)
    if not (each or tasks) and known_facts.tasks_per_node:
        return _set_process_counts(launch, "srun", machines, known_facts.tasks_per_node, nodes, None)
    if not (nodes or known_facts.nodes) and (per_node := _parse_count(each)) and (total := _parse_count(tasks)):
        machines = _count_nodes(total, per_node)
    per_node = _count_processes_per_node(each, tasks, machines, known_facts, missing="srun's --ntasks-per-node")
    return _set_process_counts(launch, "srun", machines, per_node, nodes, each or tasks)


_SLURM_SHORT_OPTIONS = {
    "A": "account", "C": "constraint", "D": "chdir", "G": "gpus", "J": "job_name", "N": "nodes", "a": "array",
    "b": "begin", "c": "cpus_per_task", "d": "dependency", "e": "error", "i": "input", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude", "tasks_per_node": "ntasks_per_node",
    "l": "label", "u": "unbuffered", "K": "kill_on_bad_exit", "H": "hold", "W": "wait", "Q": "quiet", "v": "verbose",
    "B": "extra_node_info", "F": "nodefile", "L": "licenses", "M": "clusters", "S": "core_spec", "T": "threads",
    "m": "distribution", "r": "relative", "E": "preserve_env", "O": "overcommit", "X": "disable_status", "k": "no_kill",
    "s": "oversubscribe",
}  # fmt: skip
_SLURM_OPTIONS_WITH_VALUE = "ABCDFGJLMNSTWabcdeimnopqrtwx"


def read_slurm_options(words: Sequence[ShellWord]) -> tuple[dict[str, Option], list[ShellWord]]:
    """Return options of sbatch or srun by their long names with underscores, and the words after them."""
    options, remaining_words = _split_launcher_options(words, attached=_SLURM_OPTIONS_WITH_VALUE)
    return {_SLURM_SHORT_OPTIONS.get(option.meaning, option.meaning): option for option in options}, remaining_words


# --- Programs that start their processes themselves

_DEVICE_OPTION_PATTERN = re.compile(
    r"(?:num_?|n_?)?gpus?(?:_num|_ids|_per_node)?|n_?gpus_per_node|num_gpus_per_node|(?:num_)?devices?|device_ids"
    r"|nprocs?(?:_per_node)?|num_processes|(?:distributed_)?world_size"
)
_SEVERAL_PROCESSES_PATTERN = re.compile(r"--(?:(?:use[-_])?ddp|dp|data[-_]parallel|multi[-_]?gpu|(?:multiprocessing[-_])?distributed|fsdp)(?:=[Tt]rue|=1)?")  # fmt: skip
_SUBMITIT_PATTERN = re.compile(r"(?:run_with_)?submitit\w*\.py|\w+_submitit\.py")
_TORCHRUN_COMMAND = (
    "-m torch.distributed.run --nnodes {nodes} --node-rank {node_rank} --nproc-per-node {gpus_per_node} --master-addr"
    " {master_addr} --master-port {master_port}"
)


def _make_launch_without_launcher(launch: Launch, known_facts: KnownFacts, *, is_script: bool) -> Launch:
    """Return the launch of a program without a launcher: one process, or as many as its options make it start.

    Args:
        is_script: whether Python runs the program; nothing is known about other programs.
    """
    name = launch.program[-1].name
    if _SUBMITIT_PATTERN.fullmatch(name):
        raise SpecError(
            f"{name} submits jobs with submitit, but tula itself submits the jobs",
            "give the command that these jobs run, without submitit's options, for example: torchrun --nproc_per_node=8 main.py ...",
        )
    if any(word.text == "--multirun" for word in launch.arguments):
        raise SpecError(
            "--multirun starts several trainings, but a job is one training",
            "remove --multirun, and give the values of one training",
        )
    given = read_options(launch.arguments)
    by_name = {option.name: option for option in given}
    is_lightning = {"strategy", "accelerator"} & by_name.keys() and {"devices", "gpus"} & by_name.keys()
    trainer = by_name if is_lightning else {}
    trainer = trainer | {option.name: option for option in given if "trainer" in option.path[:-1]}
    if {"devices", "gpus", "num_nodes"} & trainer.keys():
        return _make_lightning_launch(launch, trainer, known_facts)
    if known_facts.starts_ranks:
        return launch
    several_gpus_option = next((option for option in given if _may_name_several_gpus(option)), None)
    flag = next((word.raw for word in launch.arguments if _SEVERAL_PROCESSES_PATTERN.fullmatch(word.text)), "")
    if several_gpus_option and ("{gpus_per_node=" in several_gpus_option.value.text or name == "yolo"):
        each = parse_count_option(several_gpus_option, PROCESSES_QUESTION, known_facts)
    elif not is_script:
        first_words = " ".join(word.raw for word in [*launch.program, *launch.arguments][:2])
        each = _ask_for_processes(first_words, _INNER_COMMAND_HINT, known_facts)
    elif several_gpus_option or flag:
        written = several_gpus_option.text if several_gpus_option else flag
        each = _ask_for_processes(written, _PROCESS_COUNT_HINT, known_facts)
    else:
        return launch
    return _set_process_counts(
        replace(launch, launch="rank" if each == 1 else "node"), name, 1, each, None, several_gpus_option
    )


def _may_name_several_gpus(option: Option) -> bool:
    """Return whether an option names more than one GPU, or a number that may be more than one."""
    value, names_one_gpu = option.value.text, option.name in ("gpu", "device", "gpu_ids", "device_ids")
    if len(option.path) > 1 or not _DEVICE_OPTION_PATTERN.fullmatch(option.name):
        return False
    if re.fullmatch(r"\d+|-1|all|auto", value):
        return value not in ("0", "1") and not names_one_gpu
    return bool(re.fullmatch(r"\[?\d+(,\d+)+\]?", value)) or "{gpus_per_node=" in value


def _make_lightning_launch(launch: Launch, options: Mapping[str, Option], known_facts: KnownFacts) -> Launch:
    """Return the launch of a script with Lightning's trainer, by torchrun on each node.

    Without torchrun Lightning would take SLURM's tasks for its ranks.
    """
    devices, nodes = options.get("devices") or options.get("gpus"), options.get("num_nodes")
    processes = parse_count_option(devices, PROCESSES_QUESTION, known_facts, missing="--trainer.devices")
    machines = parse_count_option(nodes, NODES_QUESTION, known_facts) if nodes else 1
    arguments = replace_option_values(launch.arguments, [(devices, "{gpus_per_node}"), (nodes, "{nodes}")])
    if nodes is None and devices is not None and devices.path[:-1]:
        path = ".".join(devices.path[:-1])
        is_flag = devices.flag.startswith("--")
        arguments += map(
            make_placeholder_word, [f"--{path}.num_nodes", "{nodes}"] if is_flag else [f"++{path}.num_nodes={{nodes}}"]
        )
    is_python = bool(PYTHON_PATTERN.fullmatch(launch.program[0].name))
    size = 2 if [word.text for word in launch.program[-2:-1]] == ["-m"] else 1
    script = launch.program[-size:]
    start = launch.program[:-size] if is_python else (ShellWord("python", "python"),)
    bare = () if is_python or script[0].text.endswith(".py") else (ShellWord("--no-python", ""),)
    program = (*start, *map(make_placeholder_word, _TORCHRUN_COMMAND.split()), *bare, *script)
    launch = replace(launch, program=program, arguments=tuple(arguments), launch="node")
    return _set_process_counts(launch, "lightning", machines, processes, nodes, devices)


def make_per_node_words(processes: int) -> str:
    return "1 process per node" if processes == 1 else f"{processes} processes per node"
