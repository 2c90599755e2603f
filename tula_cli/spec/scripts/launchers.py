"""Who starts the processes of a command, wherever it stands in it: wrappers, launchers with their options, and the script."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""What tula sets for each rank, as torchrun does."""
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
    """What is known beside the command."""

    answers: Mapping[str, str] = field(default_factory=dict)  # to questions, by their keys
    gpus: int = 0  # of a node; 0: not known
    folder: Path = Path()  # that its files are in
    nodes: int = 0  # of the allocation that it runs in; 0: none
    tasks_per_node: int = 0  # likewise

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
    "colossalai": "is a launcher whose options are not read here",
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
    """Tell whether a command starts a Python program, a launcher or a script of a shell."""
    return bool(words) and (_is_program(words[0]) or words[0].name in {*_LAUNCHERS, *_FOREIGN, *_WRAPPERS, *_SHELLS})


def runs_launcher(words: Sequence[Word]) -> bool:
    """Tell whether a launcher that is read here stands among the words."""
    return any(word.name in _LAUNCHERS or word.text in _MODULES for word in words)


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
    if by_hand := re.fullmatch(r"\{(?:gpus_per_node|nodes|world)=(\d+)\}", value.text):
        return int(by_hand[1])
    if value.text.isdigit() and int(value.text) and not value.unknown:
        return int(value.text)
    if re.fullmatch(r"\[?\d+(,\d+)+,?\]?|\[\d+\]", value.text) and not value.unknown:  # numbers of devices
        return len(re.findall(r"\d+", value.text))
    if (answer := known.answer(key)) is not None:
        return answer
    if key == PROCESSES and known.gpus and value.text in ("", "gpu", "cuda", "auto", "-1"):
        return known.gpus
    written = option.written if option else missing
    flag = re.split(r"[ =]", written)[0]
    raise Unknown(
        f"{written} does not say how many {key} the command starts" if option else f"the command does not say how many {key} it starts: {missing} is not given",
        f"write the number, as in {flag}{' ' if ' ' in written or not option else '='}4",
        key=key,
        question=f"how many {key} does the command start ({written})?",
    )  # fmt: skip


_TORCHRUN = (
    "nnodes nproc_per_node node_rank master_addr master_port local_addr rdzv_id rdzv_backend rdzv_endpoint rdzv_conf"
    " max_restarts monitor_interval start_method role log_dir r redirects t tee local_ranks_filter logs_specs"
    " event_log_handler numa_binding signals_to_handle"
)
_TORCHRUN_FLAGS = "standalone m module no_python run_path use_env"


def _torchrun(start: Sequence[Word], words: Sequence[Word], known: Known, *, local_rank: bool = False) -> Launch:
    options, unknown, rest = launcher_options(words, _TORCHRUN, _TORCHRUN_FLAGS, abbreviated=True)
    if unknown:
        raise SpecError(
            f"torchrun's {unknown[0].raw} is not known: tula starts the ranks itself",
            "leave it out, if it is not needed",
        )
    nodes, per_node = options.get("nnodes"), options.get("nproc_per_node")
    machines = count(nodes, NODES, known, missing="--nnodes") if nodes else 1
    processes = count(per_node, PROCESSES, known, missing="--nproc_per_node") if per_node else 1
    module = "m" in options or "module" in options
    own_rank = local_rank and "use_env" not in options
    launch = _of_script(start, rest, module=module, bare="no_python" in options, local_rank=own_rank, known=known)
    return replace(
        launch,
        per_node=processes,
        nodes=machines,
        launcher="torchrun",
        sources=(*_source(nodes, plural(machines)), *_source(per_node, per_node_words(processes))),
    )


def _launch_module(start: Sequence[Word], words: Sequence[Word], known: Known) -> Launch:
    return _torchrun(start, words, known, local_rank=True)


def _of_script(
    start: Sequence[Word], rest: Sequence[Word], *, module: bool, bare: bool = False, local_rank: bool, known: Known
) -> Launch:
    """Return what each rank runs: a script, a module or a program, with --local_rank where its launcher hands that on."""
    if not rest:
        raise SpecError("the command has a launcher but no script", "give the whole command that you type today")
    program = (*(() if bare else start), *((Word("-m", "-m"),) if module else ()), rest[0])
    flag = _local_rank_flag(known.folder / rest[0].text) if local_rank else ""
    own = (Word(f"{flag}={{local_rank}}", flag, filled=True),) if flag else ()
    return Launch(program, (*own, *rest[1:]))


def _local_rank_flag(script: Path) -> str:
    """Return the option by which a script takes its rank, as its text spells it; nothing where it takes none."""
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "--local_rank"
    return next((flag for flag in ("--local-rank", "--local_rank") if flag in text), "")


_ACCELERATE = "num_processes num_machines machine_rank main_process_ip main_process_port"
_ACCELERATE_ON_NODES = (
    "--num_processes {world} --num_machines {nodes} --machine_rank {node_rank} --main_process_ip {master_addr}"
    " --main_process_port {master_port}"
)


def _accelerate(start: Sequence[Word], words: Sequence[Word], known: Known) -> Launch:
    options, others, rest = launcher_options(words, _ACCELERATE, "multi_gpu")
    if not rest:
        raise SpecError("the command has a launcher but no script", "give the whole command that you type today")
    config = next((option.value for option in read_options(others) if option.name == "config_file"), None)
    if config is not None and "num_processes" not in options:
        for name, value in _accelerate_config(config, known).items():
            written = Word(f"{name}: {value}", f"{name}: {value}")
            options.setdefault(name, Option((written,), f"{name} ", Word(str(value), str(value))))
    nodes, world = options.get("num_machines"), options.get("num_processes")
    machines = count(nodes, NODES, known, missing="--num_machines") if nodes else 1
    answer = None if world else known.answer(PROCESSES) or known.gpus
    processes = answer * machines if answer else count(world, PROCESSES, known, missing="--num_processes")
    if processes % machines:
        raise SpecError(f"{processes} processes do not divide among {plural(machines)}", "give --num_processes that do")
    return Launch(
        (*start, *(Word(word, word, filled=True) for word in _ACCELERATE_ON_NODES.split()), *others, rest[0]),
        tuple(rest[1:]),
        "node",
        processes // machines,
        machines,
        "accelerate",
        sources=(*_source(nodes, plural(machines)), *_source(world, per_node_words(processes // machines))),
    )


def _accelerate_config(path: Word, known: Known) -> dict[str, Any]:
    try:
        content = parse_yaml(
            (known.folder / Path(path.text).expanduser()).read_text(encoding="utf-8"), source=path.text
        )
    except OSError as error:
        raise SpecError(
            f"cannot read accelerate's --config_file {path.text}: {error.strerror}",
            "run tula init where the file is, or give --num_processes",
        ) from None
    return content if isinstance(content, dict) else {}


def _deepspeed(start: Sequence[Word], words: Sequence[Word], known: Known) -> Launch:
    valued = (
        "H hostfile i include e exclude num_nodes num_gpus master_port master_addr node_rank launcher launcher_args"
        " min_elastic_nodes max_elastic_nodes autotuning bind_core_list ssh_port enable_each_rank_log venv_script"
    )
    flags = (
        "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank elastic_training"
    )
    options, _, rest = launcher_options(words, valued, flags)
    nodes, per_node = options.get("num_nodes"), options.get("num_gpus")
    machines = count(nodes, NODES, known, missing="--num_nodes") if nodes else 1
    if include := options.get("include") or options.get("i"):
        hosts = [host.partition(":")[2] for host in include.value.text.split("@")]
        sizes = {len(devices.split(",")) for devices in hosts if devices}
        machines, per_node = len(hosts), replace(include, value=Word(str(*sizes) if len(sizes) == 1 else "", ""))
    processes = count(per_node, PROCESSES, known, missing="--num_gpus")
    launch = _of_script(
        start,
        rest,
        module="module" in options,
        bare="no_python" in options,
        local_rank="no_local_rank" not in options,
        known=known,
    )
    sources = (*_source(nodes, plural(machines)), *_source(per_node, per_node_words(processes)))
    return replace(launch, per_node=processes, nodes=machines, launcher="deepspeed", sources=sources)


def _composer(start: Sequence[Word], words: Sequence[Word], known: Known) -> Launch:
    valued = "n nproc stdout stderr world_size base_rank node_rank master_addr master_port"
    options, _, rest = launcher_options(words, valued, "v verbose m module_mode c command_mode")
    per_node, world = options.get("n") or options.get("nproc"), options.get("world_size")
    processes = count(per_node, PROCESSES, known, missing="-n")
    machines = count(world, NODES, known, missing="--world_size") // processes if world else 1
    module, bare = bool({"m", "module_mode"} & {*options}), bool({"c", "command_mode"} & {*options})
    launch = _of_script(start, rest, module=module, bare=bare, local_rank=False, known=known)
    node_rank = (Word("env", "env"), Word("NODE_RANK={node_rank}", "", filled=True))  # which torchrun does not set
    return replace(
        launch,
        program=(*node_rank, *launch.program),
        per_node=processes,
        nodes=max(1, machines),
        launcher="composer",
        sources=(*_source(per_node, per_node_words(processes)), *_source(world, plural(machines))),
    )


def _srun(_: Sequence[Word], words: Sequence[Word], known: Known) -> Launch:
    options, _, rest = slurm_options(words)
    if not rest:
        raise SpecError("srun has no command", "give the whole command that you type today")
    if container := next((name for name in options if name.startswith("container")), ""):
        raise SpecError(
            f"srun's {options[container].written} starts the job's own supervisor in the container too, without tula",
            "start the container by words before the script, as apptainer exec does",
        )
    launch = replace(find_launcher(rest, known), slurm=options)
    nodes, tasks, each = options.get("nodes"), options.get("ntasks"), options.get("ntasks_per_node")
    machines = count(nodes, NODES, known, missing="--nodes") if nodes else known.nodes or launch.nodes
    if launch.launcher:  # it starts the processes, and srun has it once a node
        return launch if launch.nodes > 1 else replace(launch, nodes=machines)
    if tasks and not each:
        per_node = max(1, count(tasks, PROCESSES, known, missing="") // machines)
    elif each or not known.tasks_per_node:
        per_node = count(each, PROCESSES, known, missing="srun's --ntasks-per-node")
    else:
        per_node = known.tasks_per_node
    sources = (*_source(nodes, plural(machines)), *_source(each or tasks, per_node_words(per_node)))
    return replace(launch, per_node=per_node, nodes=machines, launcher="srun", sources=sources)


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
    valued = " ".join([*_SLURM_SHORT, *_SLURM_SHORT.values(), _SLURM_VALUED])
    flags = {*_SLURM_FLAGS.split()}
    valued = " ".join(name for name in valued.split() if name not in flags)
    options, others, rest = launcher_options(words, valued, _SLURM_FLAGS)
    return {_SLURM_SHORT.get(name, name): option for name, option in options.items()}, others, rest


_LAUNCHERS: dict[str, Callable[[Sequence[Word], Sequence[Word], Known], Launch]] = {
    "torchrun": _torchrun,
    "deepspeed": _deepspeed,
    "composer": _composer,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate,
    "srun": _srun,
}
_MODULES = {
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _launch_module,
    "accelerate.commands.launch": _accelerate,
    "deepspeed.launcher.runner": _deepspeed,
    "composer.cli.launcher": _composer,
}


def _launch(words: Sequence[Word], known: Known) -> Launch:
    first = words[0]
    if why := _FOREIGN.get(first.name):
        hint = "tula init --from-sbatch FILE reads a script of sbatch" if first.name in ("sbatch", "salloc") else (
            "give the command that each GPU runs, with torchrun --nproc_per_node=N before the script for its processes"
        )  # fmt: skip
        raise SpecError(f"{first.text} {why}", hint)
    if first.name in ("accelerate",) and [word.text for word in words[1:2]] != ["launch"]:
        raise SpecError("accelerate starts a script by accelerate launch", "give the whole command that you type today")
    if first.name in _LAUNCHERS:
        size = 2 if first.name == "accelerate" else 1
        start = words[:size] if _LAUNCHERS[first.name] is _accelerate else [_interpreter(first)]
        return _LAUNCHERS[first.name](start, words[size:], known)
    if _PYTHON.fullmatch(first.name):
        return _python(words, known)
    if first.name in _SHELLS or first.text.endswith(".sh"):
        return _shell_script(words, known)
    return _self_launching(Launch((first,), tuple(words[1:])), known)


def _interpreter(launcher: Word) -> Word:
    """Return the python beside a launcher: that of its folder, where it is given by its path."""
    folder, slash, _ = launcher.text.rpartition("/")
    return Word(f"{folder}{slash}python", f"{folder}{slash}python", launcher.unknown)


def _python(words: Sequence[Word], known: Known) -> Launch:
    place = 1
    while place < len(words) and words[place].text.startswith("-") and words[place].text not in ("-m", "-c", "-"):
        place += 2 if words[place].text in ("-W", "-X", "--check-hash-based-pycs") else 1
    if place >= len(words):
        raise SpecError(f"{words[0].text} has no script", "give the whole command that you type today")
    if words[place].text == "-m":
        module = words[place + 1].text if place + 1 < len(words) else ""
        if module in _MODULES:
            take = _MODULES[module]
            start = words[: place + 2] if take is _accelerate else words[:place]
            return take(start, words[place + 2 :], known)
        place += 1
    elif words[place].text == "-c":
        place += 1
    return _self_launching(Launch(tuple(words[: place + 1]), tuple(words[place + 1 :])), known)


def _shell_script(words: Sequence[Word], known: Known) -> Launch:
    """Return the launch of a script of the shell: one process, where its text starts no launcher."""
    size = next((place for place, word in enumerate(words) if word.text.endswith(".sh")), len(words) - 1) + 1
    launch, script = Launch(tuple(words[:size]), tuple(words[size:])), words[size - 1].text
    try:
        text = (known.folder / script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = "torchrun"
    if not re.search(
        r"torchrun|torch\.distributed\.|accelerate|deepspeed|composer|srun|mpirun|mpiexec|horovodrun", text
    ):
        return launch
    if (answer := known.answer(PROCESSES)) is None:
        raise Unknown(
            f"{script} is a script of the shell, and how many processes it starts is not known",
            "give the command inside it that starts the training; or, where it is one process of each GPU:"
            f" torchrun --no-python --nproc_per_node=N {' '.join(word.raw for word in words[:size])}",
            key=PROCESSES,
            question=f"how many {PROCESSES} does {script} start?",
        )
    return replace(launch, launch="rank" if answer == 1 else "node", per_node=answer)


# --- scripts that start their processes themselves

_SPAWN_NAMES = (
    "gpus num_gpus ngpus n_gpu n_gpus gpu_num num_gpu devices num_devices nproc nprocs num_processes world_size gpu_ids"
    " device_ids distributed_world_size ngpus_per_node gpus_per_node gpu device multiprocessing_distributed num_nodes"
)
_SUBMITIT = re.compile(r"(?:run_with_)?submitit\w*\.py|\w+_submitit\.py")
_TORCHRUN_ON_NODES = (
    "-m torch.distributed.run --nnodes {nodes} --node-rank {node_rank} --nproc-per-node {gpus_per_node} --master-addr"
    " {master_addr} --master-port {master_port}"
)


def _self_launching(launch: Launch, known: Known) -> Launch:
    """Return the launch of a program without a launcher: one process, or those that its options make it start."""
    name = launch.program[-1].name
    if _SUBMITIT.fullmatch(name):
        raise SpecError(
            f"{name} submits jobs of its own (submitit), and tula submits its own",
            "give the command that such a job runs: torchrun --nproc_per_node=8 main.py ... without the options of the job",
        )
    given = read_options(launch.arguments)
    names = {option.name for option in given}
    options = {key: option for option in given if (key := _spawn_key(option))}
    if any(key.startswith("trainer.") for key in options) or (
        {"strategy", "accelerator"} & names and {"devices", "gpus"} & options.keys()
    ):
        return _lightning(launch, options, known)
    if "num_gpus" in options and "config_file" in names:
        return _detectron(launch, given, known)
    flag = next((word for word in launch.arguments if word.text == "--multiprocessing-distributed"), None)
    several = [option for key, option in options.items() if _is_several(key, option.value.text)]
    if flag is None and not several:
        return launch
    written = flag.raw if flag else several[0].written
    if several and ("{gpus_per_node=" in several[0].value.text or name == "yolo"):
        processes = count(several[0], PROCESSES, known, missing="")
    elif (answer := known.answer(PROCESSES)) is not None:
        processes = answer
    else:
        raise Unknown(
            f"{written}: how many processes the script starts by itself is not known",
            "if it starts N on each node, write {gpus_per_node=N} in place of a number of GPUs; if it is one of several"
            " processes, put torchrun --nproc_per_node=N before the script in place of python",
            key=PROCESSES,
            question=f"how many {PROCESSES} does the script start by itself ({written})?",
        )
    sources = ((written, per_node_words(processes)),)
    return replace(
        launch, launch="rank" if processes == 1 else "node", per_node=processes, launcher=name, sources=sources
    )


def _spawn_key(option: Option) -> str:
    if "trainer" in option.path[:-1] and option.name in ("devices", "gpus", "num_nodes"):
        return f"trainer.{option.name}"
    return option.name if len(option.path) == 1 and option.name in _SPAWN_NAMES.split() else ""


def _is_several(name: str, value: str) -> bool:
    if name == "num_nodes":  # of a graph, too
        return False
    if value in ("-1", "all", "auto") or value.startswith("{gpus_per_node="):
        return name not in ("gpu", "device")
    if re.fullmatch(r"\d+", value):
        return int(value) > 1 and name not in ("gpu", "device", "gpu_ids", "device_ids")
    return bool(re.fullmatch(r"\[?\d+(,\d+)+\]?", value))


def _lightning(launch: Launch, options: Mapping[str, Option], known: Known) -> Launch:
    """Return the launch of a script with Lightning's trainer: torchrun on each node, or it takes tasks of SLURM for its ranks."""
    by_name = {key.rpartition(".")[2]: option for key, option in options.items()}
    devices, nodes = by_name.get("devices") or by_name.get("gpus"), by_name.get("num_nodes")
    processes = count(devices, PROCESSES, known, missing="--trainer.devices")
    machines = count(nodes, NODES, known, missing="--trainer.num_nodes") if nodes else 1
    values = {id(devices): "{gpus_per_node}", id(nodes): "{nodes}"}
    arguments = list(launch.arguments)
    for option in sorted(filter(None, (devices, nodes)), key=lambda option: -option.place):
        arguments[option.place : option.place + len(option.words)] = option.filled(values[id(option)])
    if nodes is None and devices is not None and devices.path[:-1]:
        dashes, path = devices.flag.startswith("--"), ".".join(devices.path[:-1])
        words = [f"--{path}.num_nodes", "{nodes}"] if dashes else [f"++{path}.num_nodes={{nodes}}"]
        arguments += [Word(word, word, filled=True) for word in words]
    torchrun = [Word(word, word, filled=True) for word in _TORCHRUN_ON_NODES.split()]
    place = next(
        (place for place, word in enumerate(launch.program) if word.text == "-m"), len(launch.program) - 1
    )  # of the script
    start = launch.program[:place] or (Word("python", "python"),)
    return replace(
        launch,
        program=(*start, *torchrun, *launch.program[place:]),
        arguments=tuple(arguments),
        launch="node",
        per_node=processes,
        nodes=machines,
        launcher="lightning",
        sources=(*_source(nodes, plural(machines)), *_source(devices, per_node_words(processes))),
    )


def _detectron(launch: Launch, given: Sequence[Option], known: Known) -> Launch:
    """Return the launch of a script with detectron2's options, which starts its processes and finds the other nodes."""
    by_name = {option.name: option for option in given if len(option.path) == 1}
    nodes, gpus = by_name.get("num_machines"), by_name["num_gpus"]
    processes = count(gpus, PROCESSES, known, missing="--num-gpus")
    machines = count(nodes, NODES, known, missing="--num-machines") if nodes else 1
    values = {
        "num_gpus": "{gpus_per_node}", "num_machines": "{nodes}", "machine_rank": "{node_rank}",
        "dist_url": "tcp://{master_addr}:{master_port}",
    }  # fmt: skip
    arguments: list[Word] = []
    taken = {place for name in values if (o := by_name.get(name)) for place in range(o.place, o.place + len(o.words))}
    arguments = [word for place, word in enumerate(launch.arguments) if place not in taken]
    own = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]
    return replace(
        launch,
        arguments=(*(Word(word, word, filled=True) for word in own), *arguments),
        launch="node",
        per_node=processes,
        nodes=machines,
        launcher="detectron2",
        sources=(*_source(nodes, plural(machines)), *_source(gpus, per_node_words(processes))),
    )


# --- words


def _source(option: Option | None, words: str) -> tuple[tuple[str, str], ...]:
    return ((option.written, words),) if option else ()


def per_node_words(processes: int) -> str:
    return "1 process per node" if processes == 1 else f"{processes} processes per node"
