"""`tula init --from-sbatch`: a job file from a script of sbatch: its #SBATCH lines, its set-up and its command."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tula_cli.cluster.slurm.partitions import (
    Site,
    TemplateLine,
    measuring_settings,
    parse_gres,
    parse_minutes,
    quote_word,
    write_settings,
)
from tula_cli.errors import SpecError
from tula_cli.services.new_job.from_command import (
    FromCommand,
    shell_settings,
    with_batches,
    with_length,
    write_job_around,
)
from tula_cli.spec.scripts.command_text import training_command
from tula_cli.spec.scripts.launchers import NODES, Known, Unknown, slurm_options
from tula_cli.spec.scripts.options import Option
from tula_cli.spec.scripts.proposal import missing
from tula_cli.spec.scripts.recognition import Recognised, recognise_command
from tula_cli.spec.scripts.shell import Word
from tula_cli.spec.slurm_options import ROOM
from tula_cli.words import plural

_MINUTES = 20  # of a measuring job, in which the script starts once a batch
_SETTINGS = {"partition": "partition", "account": "account", "qos": "qos", "constraint": "constraint",
             "reservation": "reservation", "exclude": "exclude", "mem": "memory"}  # fmt: skip
"""Options of sbatch that are settings of cluster.slurm as they are."""
_SIZES = {"nodes", "ntasks", "ntasks_per_node", "gres", "gpus", "gpus_per_node", "gpus_per_task", "cpus_per_task",
          "cpus_per_gpu", "time", "job_name", "exclusive", "chdir"}  # fmt: skip
_LEFT_OUT = {"array", "dependency", "output", "error", "open_mode", "input", "requeue", "no_requeue", "signal", "wait", "parsable",
             "quiet", "verbose", "test_only", "hold", "wrap", "ntasks_per_gpu", "gpu_bind", "label", "unbuffered",
             "kill_on_bad_exit", "begin", "deadline", "jobid", "overlap", "exact", "pty", "time_min"}  # fmt: skip
"""Options that are about one job, its output or its tasks."""
_COMMAND_STARTS = re.compile(r"^\s*[^#\s]")


@dataclass(frozen=True)
class _Request:
    """The resources and options that a script asks SLURM for."""

    options: Mapping[str, Option]  # by long names with underscores
    answered: int = 0  # nodes, as the user said

    def text(self, name: str) -> str:
        return self.options[name].value.text if name in self.options else ""

    def count(self, name: str, default: int = 0) -> int:
        """Return a number.

        Raises:
            SpecError: it is none.
        """
        if not (text := self.text(name)):
            return default
        if not re.fullmatch(r"[1-9]\d{0,5}", text):
            raise SpecError(f"#SBATCH {self.options[name].written}: {text!r} is no number", "give the number")
        return int(text)

    @property
    def nodes(self) -> int:
        """Return the number of nodes.

        Raises:
            Unknown: SLURM chooses it.
        """
        tasks, tasks_per_node = self.count("ntasks"), self.count("ntasks_per_node")
        if "nodes" in self.options or self.answered:
            return self.answered or self.count("nodes")
        if tasks > 1 and not tasks_per_node:
            written = self.options["ntasks"].written
            raise Unknown(
                f"#SBATCH {written} does not say on how many nodes they are",
                "add a line #SBATCH --nodes=1, with the number",
                key=NODES,
                question=f"on how many nodes are the tasks of #SBATCH {written}?",
            )
        return max(1, math.ceil(tasks / tasks_per_node)) if tasks_per_node else 1

    @property
    def tasks_per_node(self) -> int:
        total = self.count("ntasks")
        return self.count("ntasks_per_node") or (max(1, total // self.nodes) if total else 1)

    @property
    def gpus(self) -> tuple[int, str, str]:
        """GPUs of a node, their type, and the form in which they are asked for; 0: none are."""
        forms = (("gres", 1), ("gpus_per_node", 1), ("gpus_per_task", self.tasks_per_node), ("gpus", 1 / self.nodes))
        for name, times in forms:
            text = self.text(name)
            gpus = parse_gres(text if name == "gres" else f"gpu:{text}") if text else ()
            if gpus:
                form = name if name in ("gres", "gpus_per_task") and "," not in text else "gpus_per_node"
                return max(1, int(gpus[0].count * times)), gpus[0].type, form
        return 0, "", "none"

    @property
    def other_resources(self) -> str:
        return ",".join(
            resource for resource in self.text("gres").split(",") if resource and not resource.startswith("gpu")
        )


def job_from_sbatch(
    text: str, source: str, offered: Site | None = None, *, answers: Mapping[str, str] | None = None
) -> FromCommand:
    """Return a commented job file for a script of sbatch.

    Args:
        text: of the script.
        source: the name of its file.
        offered: what the scheduler tells, if there is one.
        answers: to the questions that were raised before, by their keys.

    Raises:
        Unknown: the script does not tell for certain what can be asked.
        SpecError: the script cannot be used; the message names the line.
    """
    recognised_ = Known(answers or {})
    request = replace(_read_request(text), answered=recognised_.answer(NODES) or 0)
    _check_folder(request)
    gpus, _, _ = request.gpus
    recognised_ = replace(recognised_, gpus=gpus, nodes=request.nodes, tasks_per_node=request.tasks_per_node)
    command = training_command(text, keeps_setup=True, variables=_slurm_variables(request))
    recognised = with_length(recognise_command(command, recognised_), answers)
    request = replace(request, options={**_options_of_srun(recognised.slurm), **request.options})
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.text("job_name")).strip("._-")[:64]
    written = write_job_around(f"tula init --from-sbatch {shlex.quote(source)}", recognised, "slurm", name=name)
    written = write_settings(written, [*_settings(request, recognised, offered), *shell_settings(recognised)])
    left_out = [
        f"{option.written}: tula decides it for each of its jobs"
        for name, option in request.options.items()
        if name in _LEFT_OUT
    ]
    recognised = replace(recognised, left_out=(*left_out, *recognised.left_out))
    return FromCommand(
        with_batches(written, recognised),
        recognised,
        missing(recognised),
        (*recognised.warnings, *_sbatch_warnings(request, recognised)),
    )


def _read_request(text: str) -> _Request:
    options: dict[str, Option] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if _COMMAND_STARTS.match(line):
            break  # sbatch reads no further
        if not (match := re.match(r"#SBATCH\s+(.*)", line)):
            continue
        try:
            arguments = [Word(argument, argument) for argument in shlex.split(match[1], comments=True)]
        except ValueError as error:
            raise SpecError(f"line {number}: {line.strip()!r}: {str(error).lower()}") from None
        known, other_words = slurm_options(arguments)
        if other_words:
            raise SpecError(f"line {number}: {other_words[0].text!r} is no option of sbatch", "correct the line")
        options |= known
    return _Request(options)


def _check_folder(request: _Request) -> None:
    if (folder := request.text("chdir")) and Path(folder).expanduser().resolve() != Path.cwd():
        raise SpecError(
            f"#SBATCH {request.options['chdir'].written} is not kept: jobs run in the folder that tula is run in",
            f"run tula init in {folder}",
        )


def _slurm_variables(request: _Request) -> dict[str, str]:
    """Return the variables that SLURM sets in the script's job, as far as they follow from what it asks for."""
    gpus, _, _ = request.gpus
    tasks = request.tasks_per_node
    counts = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), request.nodes),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), request.count("ntasks") or tasks * request.nodes),
        **dict.fromkeys(("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), tasks),
        **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), gpus),
        "SLURM_GPUS": gpus * request.nodes,
        "SLURM_CPUS_PER_TASK": request.count("cpus_per_task"),
    }
    texts = {"SLURM_JOB_NAME": request.text("job_name"), "SLURM_SUBMIT_DIR": str(Path.cwd())}
    return {name: str(value) for name, value in {**counts, **texts}.items() if value}


def _options_of_srun(options: Mapping[str, Option]) -> dict[str, Option]:
    """Return what srun was asked for and the #SBATCH lines may not say."""
    names = {*_SETTINGS, *_SIZES} - {"nodes", "ntasks", "chdir"}
    return {name: option for name, option in options.items() if name in names}


def _extra_options(options: Mapping[str, Option]) -> dict[str, str | bool]:
    """Return the options that are no settings of cluster.slurm, as section `extra` has them."""
    names = options.keys() - {*_SETTINGS, *_SIZES, *_LEFT_OUT}
    return {name.replace("_", "-"): option.value.text or True for name, option in options.items() if name in names}


def _settings(request: _Request, recognised: Recognised, offered: Site | None) -> Iterator[TemplateLine]:
    for name, key in _SETTINGS.items():
        if text := request.text(name):
            yield TemplateLine(f"cluster.slurm.{key}", quote_word(text), f"--{name.replace('_', '-')}")
    gpus, kind, form = request.gpus
    yield TemplateLine(
        "cluster.slurm.gpus", form, "how the script asks for them" if gpus else "the script asks for none"
    )
    if kind:
        yield TemplateLine("cluster.slurm.gpu_type", quote_word(kind))
    ranks = recognised.gpus_per_node or 1
    yield TemplateLine("cluster.gpus_per_node", str(ranks))
    if cpus_per_gpu := request.count("cpus_per_gpu"):
        yield TemplateLine("cluster.slurm.cpus_per_task", str(cpus_per_gpu), "a rank, --cpus-per-gpu")
    elif cpus := request.count("cpus_per_task"):
        of_rank = max(1, cpus * request.tasks_per_node // ranks)
        yield TemplateLine("cluster.slurm.cpus_per_task", str(of_rank), f"a rank: --cpus-per-task {cpus}, {plural(request.tasks_per_node, 'task')} per node")  # fmt: skip
    exclusive = "exclusive" in request.options
    yield TemplateLine(
        "cluster.slurm.exclusive",
        str(exclusive).lower(),
        "whole nodes" if exclusive else "as in the script; true: whole nodes, whose times no neighbour spoils",
    )
    extra = _extra_options(request.options) | (
        {"gres": other_resources} if (other_resources := request.other_resources) else {}
    )
    for key, extra_options, command in (
        ("extra", extra, "sbatch"),
        ("srun_extra", _extra_options(recognised.slurm), "srun"),
    ):
        if extra_options:
            yield TemplateLine(f"cluster.slurm.{key}", json.dumps(extra_options), f"other options of {command}")
    yield from _measuring_settings(request, offered)


def _measuring_settings(request: _Request, offered: Site | None) -> Iterator[TemplateLine]:
    """Yield what is searched, and for how long jobs may run."""
    limit = parse_minutes(request.text("time"))
    if limit:
        yield TemplateLine(
            "cluster.slurm.minutes", str(limit), f"time limit of a training job, --time {request.text('time')}"
        )
    partition = next((p for p in offered.partitions if p.name == request.text("partition")), None) if offered else None
    most = partition.usable if partition is not None and partition.usable else 2 * request.nodes
    nodes = sorted({max(1, request.nodes // 2), request.nodes, min(most, 2 * request.nodes)})
    minutes = max(1, min(_MINUTES, (limit or _MINUTES) - ROOM))
    yield from measuring_settings(nodes, minutes, f"around the script's {request.nodes}")


def _sbatch_warnings(request: _Request, recognised: Recognised) -> Iterator[str]:
    gpus, _, _ = request.gpus
    ranks = recognised.gpus_per_node or 1
    if not request.options:
        yield "the script has no #SBATCH line, so what it asks for is not known: fill in section cluster"
    if gpus and gpus != ranks:
        yield (
            f"the script asks for {plural(gpus, 'GPU')} per node, and its command starts"
            f" {'1 process' if ranks == 1 else f'{ranks} processes'}: cluster.gpus_per_node is {ranks}"
        )
    if "nodes" in request.options and recognised.nodes != request.nodes:
        yield (
            f"the script asks for {plural(request.nodes)}, and its command runs on {recognised.nodes}: the global batch of today"
            f" is that of {recognised.nodes}"
        )
