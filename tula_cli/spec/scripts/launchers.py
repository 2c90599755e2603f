"""Who starts the processes of a command, wherever it stands in it: wrappers, launchers with their options, and the script."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tula_cli.errors import SpecError
from tula_cli.spec.scripts.options import Option, launcher_options, read_options
from tula_cli.spec.scripts.shell import Word, split_commands
from tula_cli.spec.yaml_text import parse_yaml
from tula_cli.words import plural

RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
"""Variables that tula sets for each rank, as torchrun does."""
PROCESSES, NODES = "processes per node", "nodes"
"""Keys of questions."""


class Unknown(SpecError):
    """Something that a command does not say for certain, and that can be asked.

    Args:
        message: what is not known, with the words of the command.
        hint: how to say it in the command.
        key: of the answer.
        question: as it is asked on a terminal.
        choices: the answers that there are; none: a whole number from 1 on.
    """

    def __init__(self, message: str, hint: str, *, key: str, question: str, choices: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.key, self.question, self.choices = key, question, choices


@dataclass(frozen=True)
class Known:
    """Facts about a command that it does not state itself."""

    answers: Mapping[str, str] = field(default_factory=dict)  # to questions, by their keys
    gpus: int = 0  # of a node; 0: not known
    folder: Path = Path()  # that its files are in
    nodes: int = 0  # of the allocation that it runs in; 0: none
    tasks_per_node: int = 0  # likewise
    starts_ranks: bool = False  # what stands before it starts one process for each GPU

    def answer(self, key: str) -> int | None:
        return int(self.answers[key]) if self.answers.get(key, "").isdigit() else None


@dataclass(frozen=True)
class Launch:
    """A command without the words by which its processes are started."""

    program: tuple[Word, ...]  # up to the script
    arguments: tuple[Word, ...]  # the script's
    launch: Literal["rank", "node"] = "rank"
    per_node: int | None = None  # processes; None: nothing starts more than one
    nodes: int = 1
    launcher: str = ""  # its name
    wrapper: tuple[Word, ...] = ()  # words before it
    sources: tuple[tuple[str, str], ...] = ()  # words of the command, and what they were taken for
    left_out: tuple[str, ...] = ()  # words that tula has no use for
    slurm: Mapping[str, Option] = field(default_factory=dict)  # what srun was asked for, by long names


# --- wrappers


@dataclass(frozen=True)
class _Wrapper:
    """A program that runs another: its sub-commands, its options with a value, and the words before the other's name."""

    commands: tuple[str, ...] = ()
    valued: str = ""  # names without dashes
    words: int = 0


_RUNNER = _Wrapper(("run",), "e environment p python project directory with extra group env-file package only-group C")
_CONDA = _Wrapper(("run",), "n name p prefix cwd")
_CONTAINER = _Wrapper(
    ("exec", "run"), "B bind env env-file H home pwd cwd W workdir o overlay mount S scratch network app security", 1
)
_WRAPPERS = {
    **dict.fromkeys(("uv", "poetry", "pixi", "pdm", "rye", "hatch", "pipenv"), _RUNNER),
    **dict.fromkeys(("conda", "mamba", "micromamba"), _CONDA),
    **dict.fromkeys(("apptainer", "singularity"), _CONTAINER),
    "shifter": _Wrapper((), "image volume module env env-file V"),
    "env": _Wrapper((), "u unset C chdir"),
    "numactl": _Wrapper((), "N cpunodebind m membind C physcpubind p preferred i interleave"),
    "taskset": _Wrapper((), "c cpu-list"),
    "nice": _Wrapper((), "n adjustment"),
    "ionice": _Wrapper((), "c class n classdata"),
    "stdbuf": _Wrapper((), "o output e error i input"),
    "timeout": _Wrapper((), "s signal k kill-after", 1),
    "nsys": _Wrapper(("profile",), "o output t trace s sample c capture-range w d y e delay duration"),
    "xvfb-run": _Wrapper((), "s server-args n server-num e error-file"),
}
_LEFT_OUT = ("time", "nohup", "exec", "command", "setsid")
_MPI = "starts the processes itself and tells them of each other in MPI's variables, which a script under tula does not get"
_SUBMITS = "submits a job, and tula submits its own"
_FOREIGN = {
    **dict.fromkeys(("mpirun", "mpiexec", "orterun", "horovodrun", "jsrun", "aprun", "ibrun"), _MPI),
    **dict.fromkeys(
        ("docker", "podman", "nerdctl", "kubectl"), "does not hand the variables of a rank on to the container"
    ),
    **dict.fromkeys(("sudo", "su", "doas"), "runs it as another user, without the variables of a rank"),
    **dict.fromkeys(("ssh", "pdsh", "clush"), "runs it on another machine, and tula starts it on the nodes itself"),
    **dict.fromkeys(("sbatch", "salloc", "qsub", "bsub", "torchx", "sky", "ray", "modal"), _SUBMITS),
    **dict.fromkeys(("eval", "xargs", "parallel", "watch", "tmux", "screen"), "makes the command while it runs"),
    **dict.fromkeys(
        ("colossalai", "fabric", "lightning", "torchpippy"), "is a launcher whose options are not read here"
    ),
}
_PYTHON = re.compile(r"i?python[\d.]*|pypy[\d.]*")
_SHELLS = ("bash", "sh", "zsh", "dash")


def find_launcher(words: Sequence[Word], known: Known) -> Launch:
    """Return a command without its launcher: the first one before the script, behind whatever words.

    Raises:
        Unknown: the number of its processes cannot be known.
        SpecError: there is no script, or the launcher has no counterpart.
    """
    rest, wrapper, left_out = list(words), list[Word](), list[str]()
    while rest:
        name = rest[0].name
        if name in _LEFT_OUT:
            left_out.append(rest.pop(0).raw)
        elif (skipped := _wrapper_size(rest)) and skipped < len(rest):
            wrapper, rest = [*wrapper, *rest[:skipped]], rest[skipped:]
        elif name in _SHELLS and (inner := _inner_command(rest)) is not None:
            rest = inner
        elif name not in {*_LAUNCHERS, *_FOREIGN} and not _is_program(rest[0]) and (later := _first_program(rest)):
            wrapper, rest = [*wrapper, *rest[:later]], rest[later:]
        else:
            break
    if not rest:
        raise SpecError("the command is empty", "give the whole command that you type today")
    launch = _launch(rest, known)
    if wrapper and launch.program and launch.program[0].text.endswith(".py"):
        launch = replace(launch, program=(Word("python", "python"), *launch.program))
    return replace(launch, wrapper=(*wrapper, *launch.wrapper), left_out=(*left_out, *launch.left_out))


def starts_program(words: Sequence[Word]) -> bool:
    """Return whether a command starts a Python program, a launcher or a script of a shell."""
    return bool(words) and (_is_program(words[0]) or words[0].name in {*_LAUNCHERS, *_FOREIGN, *_WRAPPERS, *_SHELLS})


def runs_launcher(words: Sequence[Word]) -> bool:
    """Return whether a launcher that is read here stands among the words."""
    return any(word.name in _LAUNCHERS or word.text in _LAUNCHERS for word in words)


def _is_program(word: Word) -> bool:
    return bool(_PYTHON.fullmatch(word.name)) or word.text.endswith((".py", ".sh"))


def _first_program(words: Sequence[Word]) -> int:
    """Return where, behind words that are not known, a launcher or Python stands; 0 where none does."""
    names = {*_LAUNCHERS, *_FOREIGN}
    return next(
        (
            place
            for place, word in enumerate(words)
            if place and not re.search("[:,=]", word.text) and (word.name in names or _PYTHON.fullmatch(word.name))
        ),
        0,
    )


def _wrapper_size(words: Sequence[Word]) -> int:
    """Return how many words a wrapper that is known takes at the start; 0 where none stands there."""
    if (wrapper := _WRAPPERS.get(words[0].name)) is None:
        return 0
    place, positional = 1, wrapper.words
    command = not wrapper.commands
    while place < len(words):
        text = words[place].text
        if text == "--":
            return place + 1 if command else 0
        if text.startswith("-"):
            place += 2 if text.lstrip("-") in wrapper.valued.split() else 1
        elif not command:
            if text not in wrapper.commands:
                return 0
            command, place = True, place + 1
        elif words[0].name == "env" and re.match(r"\w+=", text):
            place += 1
        elif positional or (words[0].name == "taskset" and re.fullmatch(r"0x[0-9a-f]+|\d+", text)):
            positional, place = max(0, positional - 1), place + 1
        else:
            return place
    return 0


def _inner_command(words: Sequence[Word]) -> list[Word] | None:
    """Return the words of `bash -c '...'`, where that is one command and nothing else; None where there is no -c."""
    options = [word.text for word in words[1:-1]]
    if len(words) < 3 or not re.fullmatch(r"-\w*c", options[-1]) or not all(text.startswith("-") for text in options):
        return None
    commands = split_commands(words[-1].text)
    if len(commands) != 1 or commands[0].inside or commands[0].assignments or commands[0].redirections:
        raise SpecError(
            f"{words[0].text} -c holds more than one command: {words[-1].text!r}",
            "give the command that starts the training by itself",
        )
    return list(commands[0].program)


# --- launchers


def count(option: Option | None, key: str, known: Known, *, missing: str) -> int:
    """Return a number of processes or nodes that an option gives.

    Raises:
        Unknown: it is a variable, `gpu`, a range, or not there.
    """
    value = option.value if option else Word("", "")
    if match := re.fullmatch(r"(?:\{(?:gpus_per_node|nodes|world)=)?([1-9]\d*)\}?", value.text):
        return int(match[1])
    if re.fullmatch(r"\[?\d+(,\d+)+,?\]?|\[\d+\]", value.text) and not value.unknown:  # numbers of devices
        return len(re.findall(r"\d+", value.text))
    if (answer := known.answer(key)) is not None:
        return answer
    if key == PROCESSES and known.gpus and value.text in ("", "gpu", "cuda", "auto", "-1"):
        return known.gpus
    written = option.written if option else missing
    flag = re.split(r"[ =]", written)[0]
    equals = "=" if option and "=" in written and " " not in written else " "
    raise Unknown(
        f"the command does not say how many {key} it starts: {written}{'' if option else ' is not given'}",
        f"write the number, as in {flag}{equals}4",
        key=key,
        question=f"how many {key} does the command start ({written})?",
    )


def _ask_processes(what: str, hint: str, known: Known) -> int:
    if (answer := known.answer(PROCESSES)) is not None:
        return answer
    question = f"how many {PROCESSES} does it start by itself ({what})?"
    raise Unknown(
        f"{what}: how many processes it starts by itself is not known", hint, key=PROCESSES, question=question
    )


def _counted(
    launch: Launch, launcher: str, machines: int, processes: int, nodes: Option | None, each: Option | None
) -> Launch:
    """Return a launch with its numbers of nodes and processes, and the options that gave them."""
    given = ((nodes, plural(machines)), (each, per_node_words(processes)))
    sources = tuple((option.written, words) for option, words in given if option)
    return replace(launch, launcher=launcher, nodes=machines, per_node=processes, sources=sources)


@dataclass(frozen=True)
class _RankLauncher:
    """A launcher that starts ranks as tula does, so that it is left out: its options."""

    name: str
    valued: str
    flags: str
    nodes: str  # options that give the nodes
    processes: str  # and the processes of a node
    one_process: bool = False  # is what it starts without that option; else one for each GPU
    local_rank: bool = False  # it hands --local_rank on to the script


_TORCHRUN = _RankLauncher(
    "torchrun",
    "nnodes nproc_per_node node_rank master_addr master_port local_addr rdzv_id rdzv_backend rdzv_endpoint rdzv_conf"
    " max_restarts monitor_interval start_method role log_dir r redirects t tee local_ranks_filter logs_specs"
    " event_log_handler numa_binding signals_to_handle",
    "standalone m module no_python run_path use_env",
    "nnodes",
    "nproc_per_node",
    one_process=True,
)
_DEEPSPEED = _RankLauncher(
    "deepspeed",
    "H hostfile i include e exclude num_nodes num_gpus master_port master_addr node_rank launcher launcher_args"
    " min_elastic_nodes max_elastic_nodes autotuning bind_core_list ssh_port enable_each_rank_log venv_script",
    "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank elastic_training",
    "num_nodes",
    "num_gpus include i",
    local_rank=True,
)
_COMPOSER = _RankLauncher(
    "composer",
    "n nproc stdout stderr world_size base_rank node_rank master_addr master_port",
    "v verbose m module_mode c command_mode",
    "world_size",
    "n nproc",
)
_AS_MODULE, _BARE, _NO_LOCAL_RANK = {"m", "module", "module_mode"}, {"no_python", "c", "command_mode"}, {"use_env", "no_local_rank"}  # fmt: skip


def _take_ranks(kind: _RankLauncher, start: Sequence[Word], words: Sequence[Word], known: Known) -> Launch:
    """Return what each rank runs: a script, a module or a program."""
    options, unknown, rest = launcher_options(words, kind.valued, kind.flags, abbreviated=kind is _TORCHRUN)
    if unknown and kind is _TORCHRUN:
        hint = "leave it out, if it is not needed"
        raise SpecError(f"torchrun's {unknown[0].raw} is not known: tula starts the ranks itself", hint)
    _check_script(rest)
    nodes = next((options[name] for name in kind.nodes.split() if name in options), None)
    each = next((options[name] for name in kind.processes.split() if name in options), None)
    machines = count(nodes, NODES, known, missing="") if nodes else 1
    if each and each.name in ("include", "i"):  # host:0,1@host:0,1
        hosts = [host.partition(":")[2] for host in each.value.text.split("@")]
        each, machines = replace(each, value=Word(f"[{hosts[0]}]" if len({*hosts}) == 1 else "", "")), len(hosts)
    missing = "-n" if kind is _COMPOSER else f"--{kind.processes.split()[0]}"
    processes = count(each, PROCESSES, known, missing=missing) if each or not kind.one_process else 1
    if kind is _COMPOSER:
        machines = max(1, machines // processes)  # from the processes of all
        start = (Word("env", "env"), _filled("NODE_RANK={node_rank}"), *start)  # which torchrun does not set
    module = [Word("-m", "-m")] if _AS_MODULE & options.keys() else []
    program = (*(() if _BARE & options.keys() else start), *module, rest[0])
    flag = _local_rank_flag(known.folder / rest[0].text) if kind.local_rank and not _NO_LOCAL_RANK & {*options} else ""
    rank_option = (_filled(f"{flag}={{local_rank}}"),) if flag else ()
    return _counted(Launch(program, (*rank_option, *rest[1:])), kind.name, machines, processes, nodes, each)


def _check_script(rest: Sequence[Word]) -> None:
    if not rest:
        raise SpecError("the command has a launcher but no script", "give the whole command that you type today")


def _local_rank_flag(script: Path) -> str:
    """Return the option by which a script takes its rank, as its text spells it; nothing where it takes none."""
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "--local_rank"
    return next((flag for flag in ("--local-rank", "--local_rank") if flag in text), "")


_ACCELERATE_ON_NODES = (
    "--num_processes {world} --num_machines {nodes} --machine_rank {node_rank} --main_process_ip {master_addr}"
    " --main_process_port {master_port}"
)


def _accelerate(start: Sequence[Word], words: Sequence[Word], known: Known) -> Launch:
    valued = "num_processes num_machines machine_rank main_process_ip main_process_port"
    options, others, rest = launcher_options(words, valued, "multi_gpu")
    _check_script(rest)
    config = next((option.value.text for option in read_options(others) if option.name == "config_file"), "")
    if config and "num_processes" not in options:
        for name, value in _accelerate_config(config, known).items():
            written = Word(f"{name}: {value}", f"{name}: {value}")
            options.setdefault(name, Option((written,), f"{name} ", Word(str(value), str(value))))
    nodes, world = options.get("num_machines"), options.get("num_processes")
    machines = count(nodes, NODES, known, missing="") if nodes else 1
    answer = None if world else known.answer(PROCESSES) or known.gpus
    processes = answer * machines if answer else count(world, PROCESSES, known, missing="--num_processes")
    if processes % machines:
        raise SpecError(f"{processes} processes do not divide among {plural(machines)}", "give --num_processes that do")
    program = (*start, *map(_filled, _ACCELERATE_ON_NODES.split()), *others, rest[0])
    launch = Launch(program, tuple(rest[1:]), "node")
    return _counted(launch, "accelerate", machines, processes // machines, nodes, world)


def _accelerate_config(path: str, known: Known) -> dict[str, Any]:
    try:
        text = (known.folder / Path(path).expanduser()).read_text(encoding="utf-8")
    except OSError as error:
        hint = "run tula init where the file is, or give --num_processes"
        raise SpecError(f"cannot read accelerate's --config_file {path}: {error.strerror}", hint) from None
    content = parse_yaml(text, source=path)
    return content if isinstance(content, dict) else {}


def _srun(_: Sequence[Word], words: Sequence[Word], known: Known) -> Launch:
    options, _, rest = slurm_options(words)
    _check_script(rest)
    if container := next((name for name in options if name.startswith("container")), ""):
        raise SpecError(
            f"srun's {options[container].written} starts the job's own supervisor in the container too, without tula",
            "start the container by words before the script, as apptainer exec does",
        )
    nodes, tasks, each = options.get("nodes"), options.get("ntasks"), options.get("ntasks_per_node")
    several = bool(tasks or each) or known.tasks_per_node > 1
    launch = replace(find_launcher(rest, replace(known, starts_ranks=several)), slurm=options)
    machines = count(nodes, NODES, known, missing="") if nodes else known.nodes or launch.nodes
    if launch.launcher:  # it starts the processes, and srun has it once a node
        return launch if launch.nodes > 1 else replace(launch, nodes=machines)
    if tasks and not each:
        per_node = max(1, count(tasks, PROCESSES, known, missing="") // machines)
    elif each or not known.tasks_per_node:
        per_node = count(each, PROCESSES, known, missing="srun's --ntasks-per-node")
    else:
        per_node = known.tasks_per_node
    return _counted(launch, "srun", machines, per_node, nodes, each or tasks)


_SLURM_SHORT = {
    "A": "account", "C": "constraint", "D": "chdir", "G": "gpus", "J": "job_name", "L": "licenses", "M": "clusters",
    "N": "nodes", "S": "core_spec", "a": "array", "b": "begin", "c": "cpus_per_task", "d": "dependency", "e": "error",
    "i": "input", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time",
    "w": "nodelist", "x": "exclude", "tasks_per_node": "ntasks_per_node", "l": "label", "K": "kill_on_bad_exit",
}  # fmt: skip
_SLURM_FLAGS = (
    "exclusive label l unbuffered u verbose v quiet Q overcommit O oversubscribe s hold H kill_on_bad_exit K overlap"
    " pty exact requeue no_requeue parsable no_kill k contiguous spread_job use_min_nodes wait W test_only X propagate"
    " disable_status preempt_id get_user_env ignore_pbs"
)
_SLURM_VALUED = (
    "ntasks_per_node ntasks_per_gpu ntasks_per_socket ntasks_per_core gres gpus_per_node gpus_per_task"
    " gpus_per_socket cpus_per_gpu mem mem_per_gpu mem_per_cpu gpu_bind cpu_bind mem_bind export export_file mpi hint"
    " jobid reservation signal open_mode mail_type mail_user comment wckey switches tmp nice priority time_min deadline"
    " network gpu_freq threads_per_core cores_per_socket sockets_per_node mincpus tres_per_task acctg_freq profile"
    " container_image container_mounts container_workdir container_name container_env container quotatype uid gid"
    " power delay_boot bcast multi_prog task_prolog task_epilog prolog epilog wrap"
)


def slurm_options(words: Sequence[Word]) -> tuple[dict[str, Option], list[Word], list[Word]]:
    """Return options of sbatch or srun by their long names with underscores, words that are none, and those behind them."""
    names = [*_SLURM_SHORT, *_SLURM_SHORT.values(), *_SLURM_VALUED.split()]
    valued = " ".join(name for name in names if name not in _SLURM_FLAGS.split())
    options, others, rest = launcher_options(words, valued, _SLURM_FLAGS)
    return {_SLURM_SHORT.get(name, name): option for name, option in options.items()}, others, rest


_LAUNCHERS: dict[str, Callable[[Sequence[Word], Sequence[Word], Known], Launch]] = {
    "torchrun": partial(_take_ranks, _TORCHRUN),
    "torch.distributed.run": partial(_take_ranks, _TORCHRUN),
    "torch.distributed.launch": partial(_take_ranks, replace(_TORCHRUN, local_rank=True)),
    "deepspeed": partial(_take_ranks, _DEEPSPEED),
    "deepspeed.launcher.runner": partial(_take_ranks, _DEEPSPEED),
    "composer": partial(_take_ranks, _COMPOSER),
    "composer.cli.launcher": partial(_take_ranks, _COMPOSER),
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate,
    "accelerate.commands.launch": _accelerate,
    "srun": _srun,
}
"""By the name of the program, or of the module after `python -m`."""


def _launch(words: Sequence[Word], known: Known) -> Launch:
    first = words[0]
    if why := _FOREIGN.get(first.name):
        hint = (
            "give the command that each GPU runs, with torchrun --nproc_per_node=N before the script for its processes"
        )
        if first.name in ("sbatch", "salloc"):
            hint = "tula init --from-sbatch FILE reads a script of sbatch"
        raise SpecError(f"{first.text} {why}", hint)
    if first.name == "accelerate" and [word.text for word in words[1:2]] != ["launch"]:
        raise SpecError("accelerate starts a script by accelerate launch", "give the whole command that you type today")
    if take := _LAUNCHERS.get(first.name):
        size = 2 if first.name == "accelerate" else 1
        folder = first.text.rpartition("/")[0]  # its python is the one that runs the ranks
        interpreter = str(Path(folder, "python")) if folder else "python"
        return take(
            words[:size] if take is _accelerate else [Word(interpreter, interpreter, first.unknown)],
            words[size:],
            known,
        )
    if _PYTHON.fullmatch(first.name):
        return _python(words, known)
    if first.name in _SHELLS or first.text.endswith(".sh"):
        return _shell_script(words, known)
    runs_script = any(_is_program(word) for word in words[1:3]) and first.name not in _ONE_PROCESS.split()
    if first.name in _STARTS_ITS_OWN.split() or (runs_script and not known.starts_ranks):
        each = _ask_processes(f"{first.text} {words[1].text if len(words) > 1 else ''}".strip(), _HOW_TO_START, known)
        return _counted(
            Launch((first,), tuple(words[1:]), "rank" if each == 1 else "node"), first.name, 1, each, None, None
        )
    return _self_launching(Launch((first,), tuple(words[1:])), known)


def _python(words: Sequence[Word], known: Known) -> Launch:
    place = 1
    while place < len(words) and words[place].text.startswith("-") and words[place].text not in ("-m", "-c", "-"):
        place += 2 if words[place].text in ("-W", "-X", "--check-hash-based-pycs") else 1
    _check_script(words[place:])
    if words[place].text == "-m":
        module = words[place + 1].text if place + 1 < len(words) else ""
        if take := _LAUNCHERS.get(module if "." in module else ""):
            return take(words[: place + 2] if take is _accelerate else words[:place], words[place + 2 :], known)
        if re.search(r"launch|\.distributed\b|elastic", module):
            raise SpecError(f"{module} is a launcher whose options are not read here", _HOW_TO_START)
    place += words[place].text in ("-m", "-c")
    return _self_launching(Launch(tuple(words[: place + 1]), tuple(words[place + 1 :])), known)


def _shell_script(words: Sequence[Word], known: Known) -> Launch:
    """Return the launch of a script of the shell: one process, where its text starts no launcher."""
    size = next((place for place, word in enumerate(words) if word.text.endswith(".sh")), len(words) - 1) + 1
    launch, script = Launch(tuple(words[:size]), tuple(words[size:])), words[size - 1].text
    try:
        text = (known.folder / script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = "torchrun"
    if not re.search(rf"\b({'|'.join(map(re.escape, [*_LAUNCHERS, *_FOREIGN]))})\b", text):
        return launch
    hint = (
        "give the command inside it that starts the training; or, where it is one process of each GPU:"
        f" torchrun --no-python --nproc_per_node=N {' '.join(word.raw for word in words[:size])}"
    )
    each = _ask_processes(f"the script of the shell {script}", hint, known)
    return replace(launch, launch="rank" if each == 1 else "node", per_node=each)


# --- programs that start their processes themselves

_STARTS_ITS_OWN = "llamafactory-cli axolotl swift xtuner mim tune trl ns-train fairseq-train fairseq-hydra-train"
_ONE_PROCESS = "coverage kernprof viztracer scalene memray pyinstrument"
_DEVICES = (
    "gpus num_gpus ngpu ngpus n_gpu n_gpus gpu_num num_gpu devices num_devices nproc nprocs nproc_per_node num_processes"
    " world_size gpu_ids device_ids distributed_world_size ngpus_per_node n_gpus_per_node num_gpus_per_node gpus_per_node"
    " gpu device"
)
_SEVERAL = re.compile(r"--(?:ddp|use[-_]ddp|dp|data[-_]parallel|multi[-_]?gpu|distributed|multiprocessing[-_]distributed|fsdp)(?:=[Tt]rue|=1)?")  # fmt: skip
_SUBMITIT = re.compile(r"(?:run_with_)?submitit\w*\.py|\w+_submitit\.py")
_TORCHRUN_ON_NODES = (
    "-m torch.distributed.run --nnodes {nodes} --node-rank {node_rank} --nproc-per-node {gpus_per_node} --master-addr"
    " {master_addr} --master-port {master_port}"
)
_HOW_TO_START = (
    "if it starts N on each node, write {gpus_per_node=N} in place of a number of GPUs; if it is one of several"
    " processes, put torchrun --nproc_per_node=N before the script in place of python"
)


def _self_launching(launch: Launch, known: Known) -> Launch:
    """Return the launch of a program without a launcher: one process, or those that its options make it start."""
    name = launch.program[-1].name
    if _SUBMITIT.fullmatch(name):
        raise SpecError(
            f"{name} submits jobs of its own (submitit), and tula submits its own",
            "give the command that such a job runs: torchrun --nproc_per_node=8 main.py ... without the options of the job",
        )
    if any(word.text == "--multirun" for word in launch.arguments):
        raise SpecError("--multirun starts several trainings, and a job has one", "give the values of one of them")
    given = read_options(launch.arguments)
    names = {option.name for option in given}
    trainer = {option.name: option for option in given if "trainer" in option.path[:-1]}
    if {"strategy", "accelerator"} & names and {"devices", "gpus"} & names:
        trainer = {option.name: option for option in given} | trainer
    if {"devices", "gpus", "num_nodes"} & trainer.keys():
        return _lightning(launch, trainer, known)
    if any(option.flag in ("--num-gpus ", "--num-gpus=") for option in given) and "config_file" in names:
        return _detectron(launch, {option.name: option for option in given if len(option.path) == 1}, known)
    several = next((option for option in given if _is_several(option)), None)
    flag = next((word.raw for word in launch.arguments if _SEVERAL.fullmatch(word.text)), "")
    if known.starts_ranks or not (several or flag):
        return launch
    if several and ("{gpus_per_node=" in several.value.text or name == "yolo"):
        each = count(several, PROCESSES, known, missing="")
    else:
        each = _ask_processes(several.written if several else flag, _HOW_TO_START, known)
    return _counted(replace(launch, launch="rank" if each == 1 else "node"), name, 1, each, None, several)


def _is_several(option: Option) -> bool:
    """Return whether an option names more than one GPU, or a number that may be more than one."""
    value, is_one = option.value.text, option.name in ("gpu", "device", "gpu_ids", "device_ids")
    if len(option.path) > 1 or option.name not in _DEVICES.split():
        return False
    if re.fullmatch(r"\d+|-1|all|auto", value):
        return value not in ("0", "1") and not is_one
    return bool(re.fullmatch(r"\[?\d+(,\d+)+\]?", value)) or "{gpus_per_node=" in value


def _lightning(launch: Launch, options: Mapping[str, Option], known: Known) -> Launch:
    """Return the launch of a script with Lightning's trainer: torchrun on each node, or it takes tasks of SLURM for its ranks."""
    devices, nodes = options.get("devices") or options.get("gpus"), options.get("num_nodes")
    processes = count(devices, PROCESSES, known, missing="--trainer.devices")
    machines = count(nodes, NODES, known, missing="") if nodes else 1
    arguments = list(launch.arguments)
    placed = [(devices, "{gpus_per_node}"), (nodes, "{nodes}")]
    for option, value in sorted(((o, v) for o, v in placed if o), key=lambda pair: -pair[0].place):
        arguments[option.place : option.place + len(option.words)] = option.filled(value)
    if nodes is None and devices is not None and devices.path[:-1]:
        path = ".".join(devices.path[:-1])
        is_flag = devices.flag.startswith("--")
        arguments += map(_filled, [f"--{path}.num_nodes", "{nodes}"] if is_flag else [f"++{path}.num_nodes={{nodes}}"])
    is_python = bool(_PYTHON.fullmatch(launch.program[0].name))
    is_module = [word.text for word in launch.program[-2:-1]] == ["-m"]
    script = launch.program[-2:] if is_module else launch.program[-1:]
    start = launch.program[: -len(script)] if is_python else (Word("python", "python"),)
    bare = () if is_python or script[0].text.endswith(".py") else (Word("--no-python", ""),)
    program = (*start, *map(_filled, _TORCHRUN_ON_NODES.split()), *bare, *script)
    launch = replace(launch, program=program, arguments=tuple(arguments), launch="node")
    return _counted(launch, "lightning", machines, processes, nodes, devices)


def _detectron(launch: Launch, options: Mapping[str, Option], known: Known) -> Launch:
    """Return the launch of a script with detectron2's options, which starts its processes and finds the other nodes."""
    nodes, gpus = options.get("num_machines"), options["num_gpus"]
    processes = count(gpus, PROCESSES, known, missing="")
    machines = count(nodes, NODES, known, missing="") if nodes else 1
    options_of_nodes = (
        "--num-gpus {gpus_per_node} --num-machines {nodes} --machine-rank {node_rank}"
        " --dist-url tcp://{master_addr}:{master_port}"
    )
    names = ("num_gpus", "num_machines", "machine_rank", "dist_url")
    taken = {id(word) for name in names if name in options for word in options[name].words}
    arguments = (*map(_filled, options_of_nodes.split()), *(word for word in launch.arguments if id(word) not in taken))
    return _counted(replace(launch, arguments=arguments, launch="node"), "detectron2", machines, processes, nodes, gpus)


# --- words


def _filled(text: str) -> Word:
    return Word(text, text, filled=True)


def per_node_words(processes: int) -> str:
    return "1 process per node" if processes == 1 else f"{processes} processes per node"
