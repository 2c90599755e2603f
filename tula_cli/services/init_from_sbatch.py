"""`tula init --from-sbatch`: write a job file from an sbatch script."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tula_cli.cluster.slurm.site import (
    Site,
    TemplateLine,
    list_search_settings,
    parse_gres,
    parse_minutes,
    quote_yaml_name,
    replace_setting_lines,
)
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.services import messages
from tula_cli.services.init import (
    PROFILING_MINUTES,
    JobFileProposal,
    add_answered_epochs,
    list_shell_settings,
    make_job_text,
    set_batch_range,
    warn_other_programs,
)
from tula_cli.spec.scripts.command_text import find_training_command
from tula_cli.spec.scripts.launchers import (
    NODES_QUESTION,
    KnownFacts,
    UnknownFact,
    divide_processes,
    read_slurm_options,
)
from tula_cli.spec.scripts.proposal import list_missing_keys
from tula_cli.spec.scripts.recognition import RecognisedCommand, recognise_command
from tula_cli.spec.scripts.shell import Option, ShellWord
from tula_cli.spec.slurm_options import EXTRA_MINUTES
from tula_cli.words import format_count

_SETTING_OPTIONS = {"partition": "partition", "account": "account", "qos": "qos", "constraint": "constraint",
             "exclude": "exclude", "mem": "memory"}  # fmt: skip
"""Options of sbatch that are settings of cluster.slurm, with the same values."""
_SIZE_OPTIONS = {"nodes", "ntasks", "ntasks_per_node", "gres", "gpus", "gpus_per_node", "gpus_per_task", "cpus_per_task",
          "cpus_per_gpu", "time", "job_name", "exclusive", "chdir"}  # fmt: skip
_DROPPED_OPTIONS = {"array", "dependency", "output", "error", "open_mode", "input", "requeue", "no_requeue", "signal", "wait", "parsable",
             "quiet", "verbose", "test_only", "hold", "wrap", "ntasks_per_gpu", "gpu_bind", "label", "unbuffered",
             "kill_on_bad_exit", "begin", "deadline", "jobid", "overlap", "exact", "pty", "time_min", "clusters"}  # fmt: skip
"""Options that concern a single job, its output or its tasks, and are left out of the job file."""
_COMMAND_STARTS = re.compile(r"^\s*[^#\s]")


@dataclass(frozen=True)
class _SbatchRequest:
    """The resources and options that a script asks SLURM for."""

    options: Mapping[str, Option]  # options by long name, with underscores
    answered: int = 0  # number of nodes that the user answered; 0: not asked

    def get_text(self, name: str) -> str:
        return self.options[name].value.text if name in self.options else ""

    def get_number(self, name: str) -> int:
        """Return the numeric value of an option, or 0 if it is not set.

        Raises:
            SpecError: the value is not a number.
        """
        if not (text := self.get_text(name)):
            return 0
        if not re.fullmatch(r"[1-9]\d{0,5}", text):
            raise SpecError(
                f"#SBATCH {self.options[name].text}: {text!r} must be an integer of at least 1",
                f"write one number, for example --{name.replace('_', '-')}=4",
            )
        return int(text)

    @property
    def nodes(self) -> int:
        """Number of nodes.

        Raises:
            UnknownFact: the script leaves the number of nodes to SLURM.
        """
        tasks, tasks_per_node = self.get_number("ntasks"), self.get_number("ntasks_per_node")
        if "nodes" in self.options or self.answered:
            return self.answered or self.get_number("nodes")
        if tasks > 1 and not tasks_per_node:
            written = self.options["ntasks"].text
            raise UnknownFact(
                f"#SBATCH {written} does not specify the number of nodes",
                "add a line #SBATCH --nodes=N with the number of nodes",
                key=NODES_QUESTION,
                question=f"number of nodes for the tasks of #SBATCH {written}?",
            )
        return max(1, math.ceil(tasks / tasks_per_node)) if tasks_per_node else 1

    @property
    def tasks_per_node(self) -> int:
        """Number of tasks per node; `--ntasks` has precedence over `--ntasks-per-node`, as in SLURM.

        Raises:
            SpecError: the nodes would have different numbers of tasks.
        """
        total = self.get_number("ntasks")
        if total > self.nodes:
            return divide_processes(total, self.nodes, among=format_count(self.nodes))
        return 1 if total else self.get_number("ntasks_per_node") or 1

    @property
    def gpus(self) -> tuple[int, str, str]:
        """GPUs per node, their type, and the option that requests them; 0 if none are requested."""
        forms = (("gres", 1), ("gpus_per_node", 1), ("gpus_per_task", self.tasks_per_node), ("gpus", 1 / self.nodes))
        for name, times in forms:
            text = self.get_text(name)
            gpus = parse_gres(text if name == "gres" else f"gpu:{text}") if text else ()
            if gpus:
                form = name if name in ("gres", "gpus_per_task") and "," not in text else "gpus_per_node"
                return max(1, int(gpus[0].count * times)), gpus[0].type, form
        return 0, "", "none"

    @property
    def other_resources(self) -> str:
        return ",".join(
            resource for resource in self.get_text("gres").split(",") if resource and not resource.startswith("gpu")
        )


def make_job_from_sbatch(
    text: str, source: str, cluster_site: Site | None = None, *, answers: Mapping[str, str] | None = None
) -> JobFileProposal:
    """Return a commented job file for an sbatch script.

    Args:
        cluster_site: the site's partitions as the scheduler reports them, if there is a scheduler.
        answers: answers to questions that were raised before, by their keys.

    Raises:
        UnknownFact: the script leaves something open that the user can answer.
        SpecError: the script cannot be used; the message names the line.
    """
    text = text.removeprefix("\ufeff")
    _check_shell(text)
    known = KnownFacts(answers or {})
    request = replace(_read_request(text), answered=known.parse_answer(NODES_QUESTION) or 0)
    _check_working_directory(request)
    gpus, _, _ = request.gpus
    known = replace(known, gpus=gpus, nodes=request.nodes, tasks_per_node=request.tasks_per_node)
    command = find_training_command(text, keeps_setup=True, variables=_list_slurm_variables(request))
    recognised = add_answered_epochs(recognise_command(command, known), answers)
    request = replace(request, options={**_list_srun_options(recognised.slurm), **request.options})
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.get_text("job_name")).strip("._-")[:64]
    written = make_job_text(f"tula init --from-sbatch {shlex.quote(source)}", recognised, "slurm", name=name)
    written = replace_setting_lines(
        written, [*_list_setting_lines(request, recognised, cluster_site), *list_shell_settings(recognised)]
    )
    left_out = [
        f"{option.text}: "
        + (
            "for several trainings, see tula recommend --trainings"
            if name == "array"
            else "tula decides this for each of its jobs"
        )
        for name, option in request.options.items()
        if name in _DROPPED_OPTIONS and name != "clusters"
    ]
    recognised = replace(recognised, left_out=(*left_out, *recognised.left_out))
    return JobFileProposal(
        set_batch_range(written, recognised),
        recognised,
        tuple(list_missing_keys(recognised)),
        (*warn_other_programs(recognised), *_list_sbatch_warnings(request, recognised)),
    )


def _read_request(text: str) -> _SbatchRequest:
    options: dict[str, Option] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if _COMMAND_STARTS.match(line):
            break  # sbatch ignores options after the first command
        if not (match := re.match(r"#SBATCH\s+(.*)", line)):
            continue
        try:
            arguments = [ShellWord(argument, argument) for argument in shlex.split(match[1], comments=True)]
        except ValueError as error:
            raise SpecError(f"line {number}: {line.strip()!r}: {str(error).lower()}") from None
        known, other_words = read_slurm_options(arguments)
        if other_words and other_words[0].text in ("hetjob", "packjob"):
            raise SpecError(
                f"line {number}: {other_words[0].text} separates the components of a heterogeneous job, but tula runs each job on nodes of one kind",
                "give a script with the component that trains",
            )
        if other_words:
            raise SpecError(f"line {number}: {other_words[0].text!r} is not an option of sbatch", "correct the line")
        options |= known
    return _SbatchRequest(options)


def _check_shell(text: str) -> None:
    first = text.partition("\n")[0]
    if match := re.match(r"#!.*\b(t?csh|fish|python[\d.]*|perl|Rscript)\b", first):
        raise SpecError(
            f"line 1: the script is written for {match[1]}, but tula reads and writes scripts for bash",
            "pass its training command to tula init --from-command, and put the lines before that command into cluster.setup",
        )


def _check_working_directory(request: _SbatchRequest) -> None:
    if (folder := request.get_text("chdir")) and Path(folder).expanduser().resolve() != Path.cwd():
        raise SpecError(
            f"#SBATCH {request.options['chdir'].text} cannot be used: jobs run in the folder in which tula runs",
            f"run tula init in {folder}",
        )


def _list_slurm_variables(request: _SbatchRequest) -> dict[str, str]:
    """Return the variables that SLURM sets in the script's job, as far as they follow from its request."""
    gpus, _, _ = request.gpus
    tasks = request.tasks_per_node
    counts = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), request.nodes),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), request.get_number("ntasks") or tasks * request.nodes),
        **dict.fromkeys(("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), tasks),
        **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), gpus),
        "SLURM_GPUS": gpus * request.nodes,
        "SLURM_CPUS_PER_TASK": request.get_number("cpus_per_task"),
    }
    texts = {"SLURM_JOB_NAME": request.get_text("job_name"), "SLURM_SUBMIT_DIR": str(Path.cwd())}
    return {name: str(value) for name, value in {**counts, **texts}.items() if value}


def _list_srun_options(options: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options of srun that also apply to the job; #SBATCH lines take precedence."""
    names = {*_SETTING_OPTIONS, *_SIZE_OPTIONS} - {"nodes", "ntasks", "chdir"}
    return {name: option for name, option in options.items() if name in names}


def _list_extra_options(options: Mapping[str, Option]) -> dict[str, str | bool]:
    """Return the options that are not settings of cluster.slurm, in the form of section `extra`."""
    names = options.keys() - {*_SETTING_OPTIONS, *_SIZE_OPTIONS, *_DROPPED_OPTIONS}
    return {name.replace("_", "-"): option.value.text or True for name, option in options.items() if name in names}


def _list_setting_lines(
    request: _SbatchRequest, recognised: RecognisedCommand, cluster_site: Site | None
) -> Iterator[TemplateLine]:
    for name, key in _SETTING_OPTIONS.items():
        if text := request.get_text(name):
            yield TemplateLine(f"cluster.slurm.{key}", quote_yaml_name(text), f"--{name.replace('_', '-')}")
    gpus, kind, form = request.gpus
    yield TemplateLine(
        "cluster.slurm.gpus", form, "as the script requests them" if gpus else "the script requests none"
    )
    if kind:
        yield TemplateLine("cluster.slurm.gpu_type", quote_yaml_name(kind), "name of the GPU type in SLURM")
    ranks = recognised.gpus_per_node or 1
    yield TemplateLine("cluster.gpus_per_node", str(ranks), "one process per GPU")
    if cpus_per_gpu := request.get_number("cpus_per_gpu"):
        yield TemplateLine("cluster.slurm.cpus_per_task", str(cpus_per_gpu), "per rank, from --cpus-per-gpu")
    elif cpus := request.get_number("cpus_per_task"):
        of_rank = max(1, cpus * request.tasks_per_node // ranks)
        yield TemplateLine("cluster.slurm.cpus_per_task", str(of_rank), f"per rank, from --cpus-per-task {cpus} and {format_count(request.tasks_per_node, 'task')} per node")  # fmt: skip
    exclusive = "exclusive" in request.options
    yield TemplateLine(
        "cluster.slurm.exclusive",
        str(exclusive).lower(),
        "whole nodes"
        if exclusive
        else "as in the script; true: whole nodes, so that other jobs do not change step times",
    )
    extra = _list_extra_options(request.options) | (
        {"gres": other_resources} if (other_resources := request.other_resources) else {}
    )
    for key, extra_options, command in (
        ("extra", extra, "sbatch"),
        ("srun_extra", _list_extra_options(recognised.slurm), "srun"),
    ):
        if extra_options:
            yield TemplateLine(f"cluster.slurm.{key}", json.dumps(extra_options), f"other options of {command}")
    yield from _list_profiling_settings(request, cluster_site)


def _list_profiling_settings(request: _SbatchRequest, cluster_site: Site | None) -> Iterator[TemplateLine]:
    limit = parse_minutes(request.get_text("time"))
    if limit:
        yield TemplateLine(
            "cluster.minutes", str(limit), f"time limit of a training job, from --time {request.get_text('time')}"
        )
    partition = cluster_site.find_partition(request.get_text("partition")) if cluster_site else None
    most = partition.usable if partition is not None and partition.usable else 2 * request.nodes
    nodes = sorted({max(1, request.nodes // 2), request.nodes, min(most, 2 * request.nodes)})
    minutes = max(1, min(PROFILING_MINUTES, (limit or PROFILING_MINUTES) - EXTRA_MINUTES))
    yield from list_search_settings(
        nodes, minutes, f"numbers of nodes to measure, around the {request.nodes} of the script"
    )


def _list_sbatch_warnings(request: _SbatchRequest, recognised: RecognisedCommand) -> Iterator[Diagnostic]:
    gpus, _, _ = request.gpus
    ranks = recognised.gpus_per_node or 1
    if not request.options:
        yield messages.no_sbatch_lines()
    if clusters := request.get_text("clusters"):
        yield messages.script_of_other_cluster(cluster=clusters)
    if gpus and gpus != ranks:
        yield messages.gpus_unlike_processes(gpus=gpus, processes=ranks)
    if "nodes" in request.options and recognised.nodes != request.nodes:
        yield messages.nodes_unlike_command(nodes=request.nodes, nodes_of_command=recognised.nodes)
