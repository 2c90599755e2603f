"""`tula init`: write a job file from a template or a command, and the JSON Schemas for editors.

A job file is made with every key; `shorten_job_file` keeps the keys that it sets.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from tula_cli.assets import find_asset
from tula_cli.cluster.slurm import site
from tula_cli.cluster.slurm.site import Site, TemplateLine
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.run.files import MODE_FOR_ALL, write_file_atomically
from tula_cli.run.script_command import CommandFileMissing, find_program, split_command
from tula_cli.services import messages
from tula_cli.spec.json_schema import Kind, make_json_schema
from tula_cli.spec.scripts.launchers import KnownFacts
from tula_cli.spec.scripts.placeholders import find_placeholders
from tula_cli.spec.scripts.proposal import (
    MissingKey,
    format_yaml_word,
    list_missing_keys,
    make_job_name,
    render_sections,
)
from tula_cli.spec.scripts.recognition import RecognisedCommand, recognise_line
from tula_cli.words import format_count

# --- Schemas for editors

SCHEMA_FOLDER = ".tula"
"""Relative to the folder of the job, so that it is found without a network and from any machine.

It is hidden because hidden files are not part of the code that a run copies.
"""
_TULA_SCHEMA = '"$id": "urn:tula:'


def get_schema_path(kind: Kind) -> Path:
    """Return the path of a schema, relative to the folder of the job."""
    return Path(SCHEMA_FOLDER, f"{kind}.schema.json")


def write_schema(kind: Kind, path: Path) -> None:
    """Write a schema file; only an older schema of tula is overwritten.

    Raises:
        TulaError: this installation has no sources, and so no descriptions.
        SpecError: the file exists and is not a schema of tula.
        CannotWrite: the file cannot be written.
    """
    if path.is_dir() or (path.exists() and _TULA_SCHEMA not in _read_file_start(path)):
        raise SpecError(f"{path} already exists and is not a schema that tula wrote", "move or remove this file")
    text = json.dumps(make_json_schema(kind), indent=1, ensure_ascii=False) + "\n"
    write_file_atomically(path, text, mode=MODE_FOR_ALL)


def _read_file_start(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(400).decode(errors="replace")
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None


def write_schemas_and_add_reference(text: str, job: Path) -> str:
    """Write the schemas next to a new job file, and return its text with the line that refers to the schema.

    Raises:
        TulaError, SpecError, CannotWrite: as in `write_schema`.
    """
    for kind in get_args(Kind):
        write_schema(kind, job.parent / get_schema_path(kind))
    return f"# yaml-language-server: $schema={get_schema_path('job').as_posix()}\n{text}"


def name_file_in_comments(text: str, path: Path) -> str:
    """Return a job file whose comments show commands with its path, quoted for the shell, in place of job.yaml."""
    if not str(path).isprintable():
        return text
    return re.sub(
        r"^#.*",
        lambda line: re.sub(
            r"(tula (?:check|profile)) job\.yaml", lambda command: f"{command[1]} {shlex.quote(str(path))}", line[0]
        ),
        text,
        flags=re.MULTILINE,
    )


# --- From a command

TEMPLATES: Mapping[str, str] = {"local": "templates/job.yaml", "slurm": "templates/slurm.yaml"}
LENGTH_QUESTION = "epochs"
"""Key of the question how many epochs the script trains."""
PROFILING_MINUTES = 20  # minutes of a profiling job, in which the script is started once per batch
_BATCH_RANGE_BELOW, _BATCH_RANGE_ABOVE = 2, 8  # minimum factors below and above the current batch in the search
_FILE_HEADER = """\
# A job around your training script: tula check job.yaml, then tula profile job.yaml, tula recommend, tula train.
#
#   tula check job.yaml        shows what would be measured and its maximum cost
#   tula profile job.yaml      measures some steps of the script at several numbers of nodes and batch sizes
#   tula recommend             chooses nodes and batch size for time, cost, or the knee of time against cost
#   tula train                 trains with the chosen configuration, and resumes from the script's checkpoints
#
# The job was made from this command. tula starts it with values for the {{placeholders}}:
#
#   {line}
#
# `batch` is global (samples per optimizer step over all GPUs), `local_batch` is that of one GPU. Values can also be set on the
# command line: --set search.nodes=[2,4]. Commented-out lines show the default, or an example if there is none.

name: {name} # the run's directory is tula-runs/<name>-<signature>

"""


@dataclass(frozen=True)
class JobFileProposal:
    """A job file, and the parts of the command that it is made from."""

    text: str
    recognised: RecognisedCommand
    missing: tuple[MissingKey, ...]  # keys that the command does not determine, in the order of the file
    warnings: tuple[Diagnostic, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the file can be used as it is."""
        return not any(key.required for key in self.missing)

    @property
    def placeholders(self) -> dict[str, tuple[str, str]]:
        """The original value and the placeholder of each recognised option: "--lr": ("0.1", "lr")."""
        return {flag: (self.recognised.values[name], name) for flag, name in self.recognised.flags.items()}


def make_job_from_command(
    line: str,
    kind: Literal["local", "slurm"],
    cluster_site: Site | None = None,
    *,
    gpus: int = 0,
    cores: int | None = None,
    answers: Mapping[str, str] | None = None,
) -> JobFileProposal:
    """Return a commented job file for a command.

    Args:
        line: the command as it is typed today, with its launcher.
        cluster_site: the site's partitions as the scheduler reports them; they are filled in for slurm.
        gpus: number of GPUs of this machine; a local job searches the node counts that they allow.
        cores: number of CPU cores of this machine; without GPUs, a local job searches the node counts that they allow.
        answers: answers to questions that were raised before, by their keys.

    Raises:
        UnknownFact: the command leaves something open that the user can answer.
        SpecError: the command cannot be used.
        TulaError: the installation lacks its templates.
    """
    gpus_here = gpus if kind == "local" else 0
    facts = KnownFacts(answers or {}, gpus=gpus_here or _get_gpus_per_node(cluster_site))
    recognised = add_answered_epochs(recognise_line(line, facts, keeps_setup=kind == "slurm"), answers)
    one_process = recognised.gpus_per_node is None and _trains_in_one_process(recognised.script["command"])
    text = make_job_text(line, recognised, kind)
    if kind == "local":
        text = _set_machine_resources(
            text,
            per_node=recognised.gpus_per_node or 1,
            gpus=1 if one_process else gpus,
            cores=cores,
        )
    else:
        if cluster_site is not None:
            text = _adapt_site_settings(site.fill_template(text, cluster_site), recognised, cluster_site)
        text = site.replace_setting_lines(text, list_shell_settings(recognised))
    if one_process:
        text = _set_key(
            text, "nodes", "[1]", "more nodes need a script that uses torch.distributed or a trainer library"
        )
    text = set_batch_range(text, recognised)
    warnings = (
        *warn_other_programs(recognised),
        *_list_machine_warnings(recognised, cluster_site, gpus=gpus_here),
        *([messages.script_in_one_process()] if one_process else ()),
    )
    return JobFileProposal(text, recognised, tuple(list_missing_keys(recognised)), warnings)


def warn_other_programs(recognised: RecognisedCommand) -> Iterator[Diagnostic]:
    """Yield a warning for each program that the text of a command also starts."""
    return (messages.program_not_in_job(program=program) for program in recognised.other_programs)


_SEVERAL_PROCESSES = re.compile(
    r"distributed|world_size|local_rank|fully_shard|trainer|accelerat|deepspeed|lightning|horovod|composer|colossalai"
    r"|mmengine|ignite|torchtnt|fairscale|megatron|ultralytics|detectron2|fastai|\bray\b",
    re.IGNORECASE,
)
"""Words in a script that may train in several processes, itself or by a library."""
_IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+(\w+)", re.MULTILINE)


def warn_missing_file(command: str) -> Iterator[Diagnostic]:
    """Yield a warning if a command names a file that is not here: it may be only on the cluster, or not written yet."""
    try:
        find_program(split_command(command), Path.cwd())
    except CommandFileMissing as error:
        yield messages.command_file_missing(problem=error.message, advice=error.hint)


def _trains_in_one_process(command: str) -> bool:
    """Return whether neither the script of a command nor the modules of its folder mention several processes."""
    scripts = [Path(word) for word in shlex.split(command) if word.endswith(".py")]
    files = [path for path in scripts[:1] if path.is_file()]
    for file in files:  # the loop below appends imported files
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:  # an unreadable file may contain distributed code
            return False
        if _SEVERAL_PROCESSES.search(text):
            return False
        for module in map(scripts[0].parent.joinpath, _IMPORTED.findall(text)):
            imported = [module.with_suffix(".py"), *sorted(module.rglob("*.py"))]
            files += [path for path in imported if path.is_file() and path not in files]
    return bool(files)


def add_answered_epochs(recognised: RecognisedCommand, answers: Mapping[str, str] | None) -> RecognisedCommand:
    """Return the recognised command with the number of epochs that the user answered, if any."""
    epochs = (answers or {}).get(LENGTH_QUESTION)
    return (
        replace(recognised, script={**recognised.script, "length": {"epochs": int(epochs)}}) if epochs else recognised
    )


def make_job_text(line: str, recognised: RecognisedCommand, kind: Literal["local", "slurm"], *, name: str = "") -> str:
    """Return the job file around a command, before the properties of the machines are filled in.

    Args:
        line: the command as it was typed.
        name: name of the job; if empty, derived from the name of its script.
    """
    arguments = [*recognised.wrapper] if kind == "local" or not _is_wrapper_list(recognised.wrapper) else []
    if arguments:  # no key of the job file takes these arguments
        command = " ".join([*(shlex.quote(argument.replace("{", "{{").replace("}", "}}")) for argument in arguments), recognised.script["command"]])  # fmt: skip
        recognised = replace(recognised, script={**recognised.script, "command": command})
    shown = "\n#   ".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in row) for row in line.split("\n"))
    return (
        _FILE_HEADER.format(line=shown, name=name or make_job_name(recognised))
        + render_sections(recognised)
        + "\n"
        + _read_search_section(kind)
    )


def list_shell_settings(recognised: RecognisedCommand) -> Iterator[TemplateLine]:
    """Yield the settings for the wrapper of the ranks and for the shell lines before the command in a SLURM job."""
    if recognised.wrapper and _is_wrapper_list(recognised.wrapper):
        arguments = ", ".join(format_yaml_word(argument, flow=True) for argument in recognised.wrapper)
        yield TemplateLine(
            "cluster.slurm.wrapper", f"[{arguments}]", "before the command of every rank, as in the command"
        )
    if recognised.setup:
        yield TemplateLine("cluster.setup", f"[{', '.join(format_yaml_word(line, flow=True) for line in recognised.setup)}]", "run before the command; without set -e, the job continues if one fails")  # fmt: skip


def _is_wrapper_list(arguments: Sequence[str]) -> bool:
    """Return whether the arguments are valid for cluster.slurm.wrapper."""
    return all(argument and argument.isprintable() for argument in arguments)


def _get_gpus_per_node(cluster_site: Site | None) -> int:
    """Return the number of GPUs per node of the default partition, or 0 if it is not known."""
    kinds = (
        cluster_site.default_partition.kinds
        if cluster_site is not None and cluster_site.default_partition is not None
        else ()
    )
    return kinds[0].gpus[0].count if kinds and kinds[0].gpus else 0


def _read_search_section(kind: str) -> str:
    """Return the template's text from section `search` on, without the made-up price of the example."""
    text = find_asset(TEMPLATES[kind]).read_text(encoding="utf-8")
    return re.sub(
        r"^pricing:\n(?:  .*\n)+", _COMMENTED_PRICING, text[text.index("\nsearch:") + 1 :], flags=re.MULTILINE
    )


_COMMENTED_PRICING = """\
# pricing: {kind: node_hour, price: 2.5, currency: USD} # if absent, cost is counted in node-hours
#   kind: node_hour # or gpu_hour, or gb_hour (GB of reserved GPU memory)
#   spot: {discount: 0.6, interruptions_per_day: 0.5} # cheaper nodes that the provider may reclaim: share of the price
#     that is saved, and interruptions of one node per day
"""


def _set_key(text: str, key: str, value: str, why: str, *, section: str = "") -> str:
    """Return a job file with another value for a key of a section, whether the key is commented out or not.

    The key occurs once in the text, or once after the head of `section`.
    """
    position = text.index(f"\n{section}:") if section else 0
    replaced, count = re.subn(
        rf"^  (?:# )?{key}:.*$", lambda _: f"  {key}: {value} # {why}", text[position:], count=1, flags=re.MULTILINE
    )
    assert count == 1, key
    return text[:position] + replaced


def _replace_line(text: str, pattern: str, line: str) -> str:
    """Return a job file with the first line that matches a pattern replaced; unchanged if none does."""
    return re.sub(f"^{pattern}$", lambda _: line, text, count=1, flags=re.MULTILINE)


def _set_machine_resources(text: str, *, per_node: int, gpus: int, cores: int | None) -> str:
    if gpus < 1:
        processes = format_count(per_node, "process")
        node_comment = f"numbers of nodes to measure; here each node is {processes} on this machine"
        nodes = [1, 2]
        if cores is not None and 2 * per_node > cores:
            nodes = [1]
            node_comment = f"here each node is {processes}; 2 nodes would need {2 * per_node} CPU cores, and this machine has {cores}"
    else:
        nodes = _list_powers_of_two(max(1, gpus // per_node))
        node_comment = f"numbers of nodes to measure; here each node is {per_node} of the {format_count(gpus, 'GPU')} of this machine"
    text = _set_key(text, "nodes", str(nodes), node_comment)
    text = _replace_line(text, "  max_seconds:.*", "  # max_seconds: 60 # maximum duration of the timed steps")
    minutes_comment = "maximum minutes of one profiling job; it starts the script once per batch"
    text = _set_key(text, "max_minutes", str(PROFILING_MINUTES), minutes_comment)
    hours = sum(nodes) * PROFILING_MINUTES / 60
    cap = math.ceil(12 * hours) / 10
    sum_ = f"({' + '.join(map(str, nodes))}) nodes" if len(nodes) > 1 else format_count(nodes[0])
    comment = f"maximum node-hours of all profiling jobs: {sum_} x {PROFILING_MINUTES} minutes = {hours:.3g}, plus 20 %"
    return _set_key(text, "max_node_hours", f"{cap:g}", comment)


def _adapt_site_settings(text: str, recognised: RecognisedCommand, cluster_site: Site) -> str:
    """Correct the site's settings for the command's number of ranks, and workers if the command has no {workers}."""
    if "workers" not in find_placeholders(recognised.script["command"]):
        text = _replace_line(text, "  workers: .*", "  # workers: auto # needs {workers} in the command")
    partition = cluster_site.default_partition
    if recognised.gpus_per_node is None or partition is None or not partition.kinds:
        return text
    cpus = partition.kinds[0].cpus
    line = f"    cpus_per_task: {max(1, cpus // recognised.gpus_per_node)} # per rank; a node has {cpus}"
    return _replace_line(text, "    cpus_per_task: .*", line)


def set_batch_range(text: str, recognised: RecognisedCommand) -> str:
    """Set the range of batches to measure around the current batch, the GPUs per node, and today's configuration."""
    text = _add_baseline(text, recognised)
    if recognised.gpus_per_node is not None:
        text = _set_key(
            text,
            "gpus_per_node",
            str(recognised.gpus_per_node),
            "processes per node, as in the command",
            section="cluster",
        )
    text = re.sub(r"^  max_batch:.*\n", "", text, count=1, flags=re.MULTILINE)
    batch = recognised.script["reference"].get("batch")
    if batch is None:
        min_batch, smallest = 32, "smallest global batch; batches are min_batch x 2^k"
        largest = "256 # largest global batch"
    else:
        nodes = [int(number) for number in re.findall(r"\d+", re.findall(r"^  nodes: \[(.*)\]", text, re.MULTILINE)[0])]
        min_batch, max_batch = choose_batch_range(recognised, batch, nodes)
        below = f"half of the current batch ({batch})" if min_batch < batch else "the current batch"
        smallest = f"{below}; batches are min_batch x 2^k, and the script starts once for each"
        largest = f"{max_batch} # {max_batch // batch} times the current batch; memory may limit it further"
    text = _set_key(text, "min_batch", str(min_batch), smallest)
    return re.sub(
        r"^  min_batch:.*$", lambda line: f"{line[0]}\n  max_batch: {largest}", text, count=1, flags=re.MULTILINE
    )


def _add_baseline(text: str, recognised: RecognisedCommand) -> str:
    """Add today's configuration if it has several nodes, because the search also includes fewer."""
    if recognised.nodes == 1:
        return text
    settings = {"nodes": recognised.nodes, "batch": recognised.script["reference"].get("batch")}
    values = ", ".join(f"{key}: {value}" for key, value in settings.items() if value is not None)
    line = f"baseline: {{{values}}} # the current configuration; tula recommend compares its choice with it\n\n"
    return text.replace("\nsearch:", f"\n{line}search:", 1)


def choose_batch_range(recognised: RecognisedCommand, batch: int, nodes: list[int]) -> tuple[int, int]:
    """Return the smallest and the largest global batch to measure.

    The smallest is half the current batch if that divides among the GPUs of the fewest nodes, else the current batch.
    The largest is 8 times the current batch or, if that is more, the current batch times the largest number of nodes.
    """
    half, remainder = divmod(batch, _BATCH_RANGE_BELOW)
    divides = not remainder and half % (min(nodes) * (recognised.gpus_per_node or 1) * recognised.accumulate) == 0
    return half if divides else batch, batch * max(_BATCH_RANGE_ABOVE, max(nodes))


def _list_machine_warnings(recognised: RecognisedCommand, cluster_site: Site | None, *, gpus: int) -> list[Diagnostic]:
    """Return warnings if the command does not match the machines; `gpus` is 0 if the job is not to run here."""
    requested, partition = (
        recognised.gpus_per_node,
        cluster_site.default_partition if cluster_site is not None else None,
    )
    if requested is None:
        return []
    if 0 < gpus < requested:
        return [messages.more_processes_than_gpus(processes=requested, gpus=gpus)]
    available = _get_gpus_per_node(cluster_site) or requested
    if partition is None or available == requested:
        return []
    return [messages.processes_unlike_partition(processes=requested, partition=partition.name, gpus=available)]


# --- The short job file

_FULL_HINT = (
    "# Every key with its default: tula init --full. To set one key on the command line: --set search.nodes=[2,4]"
)
_KEPT_COMMENT_PATTERN = re.compile(r"^ *# *(?:partition|account|resume|metric|pricing): |^ *#.*# REQUIRED")
"""Commented-out keys that most jobs need, or that a job cannot do without."""


def shorten_job_file(text: str) -> str:
    """Return a job file with the keys that it sets, each with its comment; other keys and explanations are removed.

    Args:
        text: a job file with all keys; its first line says how it is used.
    """
    first, *lines = text.splitlines()
    kept_lines = [
        line for line in lines if line and (not line.lstrip().startswith("#") or _KEPT_COMMENT_PATTERN.match(line))
    ]
    return "\n".join([first, _FULL_HINT, *kept_lines]) + "\n"


# --- From a template


def make_job_from_template(kind: Literal["local", "slurm"], cluster_site: Site | None = None, *, gpus: int = 0) -> str:
    """Return the text of a job file with all keys.

    Args:
        cluster_site: the site's partitions as the scheduler reports them; they are filled in for slurm.
        gpus: number of GPUs of this machine; a local job searches up to that many nodes of one GPU each.

    Raises:
        TulaError: the installation lacks its templates.
    """
    text = find_asset(TEMPLATES[kind]).read_text(encoding="utf-8")
    if kind == "slurm":
        return text if cluster_site is None else site.fill_template(text, cluster_site)
    if gpus < 1:
        return text
    comment = f"numbers of nodes to measure; here each node is one of {format_count(gpus, 'GPU')}"
    return _set_key(text, "nodes", str(_list_powers_of_two(gpus)), comment)


def _list_powers_of_two(max_number: int) -> list[int]:
    return [2**power for power in range(max_number.bit_length())]
