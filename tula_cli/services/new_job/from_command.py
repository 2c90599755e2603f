"""`tula init --from-command`: a job file around the command that somebody types today."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tula_cli.assets import find_asset
from tula_cli.cluster.slurm import partitions as site
from tula_cli.cluster.slurm.partitions import Site, TemplateLine
from tula_cli.spec.scripts.launchers import Known
from tula_cli.spec.scripts.placeholders import names
from tula_cli.spec.scripts.proposal import Missing, job_name, missing, sections, yaml_word
from tula_cli.spec.scripts.recognition import Recognised, recognise
from tula_cli.words import plural

TEMPLATES: Mapping[str, str] = {"local": "templates/job.yaml", "slurm": "templates/slurm.yaml"}
LENGTH_QUESTION = "epochs"
"""Key of the answer to how long the script trains."""
_MINUTES = 20  # of a measuring job, in which the script starts once a batch
_BATCH_RANGE_BELOW, _BATCH_RANGE_ABOVE = 2, 8  # how far below and above the batch of today is measured, at least
_HEAD = """\
# A job for tula around a training script as it is. It stands for the command
#
#   {line}
#
# in which tula puts numbers of its own in place of {{placeholders}} and starts it as often as it takes:
#
#   tula check job.yaml        shows what would be measured and what it costs at most
#   tula profile job.yaml      starts it for some steps at each number of nodes and batch, and measures it from inside
#   tula recommend             chooses nodes and batch for time, cost or the knee between the two
#   tula train                 starts it there, and again from its checkpoint after an interruption
#
# `batch` is global (samples an optimizer step over all GPUs), `local_batch` is one GPU's. A value can be given on the
# command line instead: --set search.nodes=[2,4]. What is commented out is the default, or an example where there is none.

name: {name} # the run's directory is tula-runs/<name>-<signature>

"""


@dataclass(frozen=True)
class FromCommand:
    """A job file, and what of the command it is made of."""

    text: str
    recognised: Recognised
    missing: tuple[Missing, ...]  # what the command does not tell, in the order of the file
    warnings: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Return whether the file can be used as it is."""
        return not any(key.required for key in self.missing)

    @property
    def placeholders(self) -> dict[str, tuple[str, str]]:
        """Return what each recognised option was, and what stands there now: "--lr": ("0.1", "lr")."""
        return {flag: (self.recognised.values[name], name) for flag, name in self.recognised.flags.items()}


def job_from_command(
    line: str,
    kind: Literal["local", "slurm"],
    offered: Site | None = None,
    *,
    gpus: int = 0,
    answers: Mapping[str, str] | None = None,
) -> FromCommand:
    """Return a commented job file for a command.

    Args:
        line: the command as it is typed today, with its launcher.
        kind: where the job will run.
        offered: what the scheduler tells; for slurm it is filled in.
        gpus: that this machine has; a local job searches as many nodes as they make.
        answers: to the questions that were raised before, by their keys.

    Raises:
        Unknown: the command does not tell for certain what can be asked.
        SpecError: the command cannot be used.
        TulaError: the installation lacks its templates.
    """
    gpus_available = gpus if kind == "local" else _gpus_of(offered)
    recognised = with_length(
        recognise(line, Known(answers or {}, gpus=gpus_available), keeps_setup=kind == "slurm"), answers
    )
    if kind == "local":
        text = _fit_to_machine(
            write_job_around(line, recognised, kind), per_node=recognised.gpus_per_node or 1, gpus=gpus
        )
    else:
        text = write_job_around(line, recognised, kind)
        if offered is not None:
            text = _match_site_settings(site.fill_template(text, offered), recognised, offered)
        text = site.write_settings(text, shell_settings(recognised))
    text = with_batches(text, recognised)
    warnings = [*recognised.warnings, *_machine_warnings(recognised, offered, gpus=gpus if kind == "local" else 0)]
    return FromCommand(text, recognised, missing(recognised), tuple(warnings))


def with_length(recognised: Recognised, answers: Mapping[str, str] | None) -> Recognised:
    """Return what was recognised with the epochs that were asked for, where the command tells no length."""
    epochs = (answers or {}).get(LENGTH_QUESTION)
    return (
        replace(recognised, script={**recognised.script, "length": {"epochs": int(epochs)}}) if epochs else recognised
    )


def write_job_around(line: str, recognised: Recognised, kind: Literal["local", "slurm"], *, name: str = "") -> str:
    """Return the job file around a command, before what is known of the machines is put into it.

    Args:
        line: the command as it was typed.
        recognised: the parts of the command.
        kind: where the job will run.
        name: of the job; empty: as its script is called.
    """
    arguments = [*recognised.wrapper] if kind == "local" or not _is_wrapper_list(recognised.wrapper) else []
    if arguments:  # no section of the job has a place for them
        command = " ".join([*(shlex.quote(argument.replace("{", "{{").replace("}", "}}")) for argument in arguments), recognised.script["command"]])  # fmt: skip
        recognised = replace(recognised, script={**recognised.script, "command": command})
    shown = "\n#   ".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in row) for row in line.split("\n"))
    return (
        _HEAD.format(line=shown, name=name or job_name(recognised))
        + sections(recognised)
        + "\n"
        + _search_section(kind)
    )


def shell_settings(recognised: Recognised) -> Iterator[TemplateLine]:
    """Yield what stands around the command in a job of SLURM: words before each rank, and lines before the job."""
    if recognised.wrapper and _is_wrapper_list(recognised.wrapper):
        arguments = ", ".join(yaml_word(argument, flow=True) for argument in recognised.wrapper)
        yield TemplateLine(
            "cluster.slurm.wrapper", f"[{arguments}]", "before the command of every rank, as in the command"
        )
    if recognised.setup:
        yield TemplateLine("cluster.slurm.setup", f"[{', '.join(yaml_word(line, flow=True) for line in recognised.setup)}]", "before the job; without set -e a failure goes unnoticed")  # fmt: skip


def _is_wrapper_list(arguments: Sequence[str]) -> bool:
    """Tell whether words may be those of cluster.slurm.wrapper."""
    return all(argument and argument.isprintable() for argument in arguments)


def _gpus_of(offered: Site | None) -> int:
    """Return how many GPUs a node of the default partition has; 0 where that is not known."""
    kinds = offered.default.kinds if offered is not None and offered.default is not None else ()
    return kinds[0].gpus[0].count if kinds and kinds[0].gpus else 0


def _search_section(kind: str) -> str:
    """Return what the templates say from section `search` on: what a script is measured by is nobody else's."""
    text = find_asset(TEMPLATES[kind]).read_text(encoding="utf-8")
    return text[text.index("\nsearch:") + 1 :]


def _set_key(text: str, key: str, value: str, why: str, *, section: str = "") -> str:
    """Return a job file with another value at a key of a section, commented out or not.

    It is there once, or `section` tells after whose head.
    """
    position = text.index(f"\n{section}:") if section else 0
    replaced, count = re.subn(
        rf"^  (?:# )?{key}:.*$", lambda _: f"  {key}: {value} # {why}", text[position:], count=1, flags=re.MULTILINE
    )
    assert count == 1, key
    return text[:position] + replaced


def _fit_to_machine(text: str, *, per_node: int, gpus: int) -> str:
    if gpus < 1:
        nodes, node_comment = [1, 2], f"here every node is {_describe_processes(per_node)} of this machine"
    else:
        nodes = [2**power for power in range(max(1, gpus // per_node).bit_length())]
        node_comment = f"here a node is {plural(per_node, 'GPU')} of this machine's {gpus}"
    text = _set_key(text, "nodes", str(nodes), node_comment)
    text = re.sub(r"^  max_seconds:.*$", "  # max_seconds: 60 # at the latest then", text, count=1, flags=re.MULTILINE)
    text = _set_key(text, "max_minutes", str(_MINUTES), "of one measuring job, at most; the script starts once a batch")
    hours = sum(nodes) * _MINUTES / 60
    cap = math.ceil(12 * hours) / 10
    sum_ = f"({' + '.join(map(str, nodes))}) nodes" if len(nodes) > 1 else plural(nodes[0])
    comment = f"of all of them, {sum_} x {_MINUTES} minutes = {hours:.3g}; beyond, nothing is started"
    return _set_key(text, "max_node_hours", f"{cap:g}", comment)


def _match_site_settings(text: str, recognised: Recognised, offered: Site) -> str:
    """Put right what the site says of other ranks, and of workers where the command has no place for them."""
    if "workers" not in names(recognised.script["command"]):
        text = re.sub(
            r"^  workers: .*$", "  # workers: auto # with {workers} in the command", text, count=1, flags=re.MULTILINE
        )
    partition = offered.default
    if recognised.gpus_per_node is None or partition is None or not partition.kinds:
        return text
    cpus = partition.kinds[0].cpus
    line = f"    cpus_per_task: {max(1, cpus // recognised.gpus_per_node)} # a rank; a node has {cpus}"
    return re.sub(r"^    cpus_per_task: .*$", line, text, count=1, flags=re.MULTILINE)


def with_batches(text: str, recognised: Recognised) -> str:
    """Set which batches are measured: around that of today, and what the launcher says of the GPUs."""
    if recognised.gpus_per_node is not None:
        text = _set_key(
            text,
            "gpus_per_node",
            str(recognised.gpus_per_node),
            "processes a node, as in the command",
            section="cluster",
        )
    text = re.sub(r"^  max_batch:.*\n", "", text, count=1, flags=re.MULTILINE)
    batch = recognised.script["reference"].get("batch")
    if batch is None:
        lines = _set_key(text, "min_batch", "32", "smallest global batch; batches are min_batch x 2^k")
        return re.sub(
            r"^(  min_batch:.*)$", r"\1" + "\n  max_batch: 256 # the largest", lines, count=1, flags=re.MULTILINE
        )
    nodes = [int(number) for number in re.findall(r"\d+", re.findall(r"^  nodes: \[(.*)\]", text, re.MULTILINE)[0])]
    least, most = batch_range(recognised, batch, nodes)
    below = "half of that of today" if least < batch else "that of today"
    text = _set_key(
        text, "min_batch", str(least), f"{below}, {batch}; batches are min_batch x 2^k, each a start of the script"
    )
    above = f"\n  max_batch: {most} # {most // batch} times that of today; memory may end it earlier"
    return re.sub(r"^(  min_batch:.*)$", lambda line: line[0] + above, text, count=1, flags=re.MULTILINE)


def batch_range(recognised: Recognised, batch: int, nodes: list[int]) -> tuple[int, int]:
    """Return the smallest and the largest global batch to measure.

    Half of today's where that divides among the GPUs of the fewest nodes; and 8 times today's, or what gives each GPU of the
    most nodes its batch of today.

    Args:
        found: the command.
        batch: of today, global.
        nodes: numbers of nodes that are searched.
    """
    micro_batches = recognised.accumulate
    half, odd = divmod(batch, _BATCH_RANGE_BELOW)
    divides = not odd and half % (min(nodes) * (recognised.gpus_per_node or 1) * micro_batches) == 0
    return half if divides else batch, batch * max(_BATCH_RANGE_ABOVE, max(nodes))


def _machine_warnings(recognised: Recognised, offered: Site | None, *, gpus: int) -> list[str]:
    """Return where the command does not agree with the machines.

    Args:
        found: the command.
        offered: what the scheduler tells of them.
        gpus: of this machine, where it is to run here; else 0.
    """
    requested, partition = recognised.gpus_per_node, offered.default if offered is not None else None
    if requested is None:
        return []
    description = f"the command starts {_describe_processes(requested)} a node"
    if 0 < gpus < requested:
        return [f"{description}, and this machine has {plural(gpus, 'GPU')}: set cluster.gpus_per_node"]
    available = _gpus_of(offered) or requested
    if partition is None or available == requested:
        return []
    return [
        f"{description}, and those of partition {partition.name} have {plural(available, 'GPU')}: set cluster.gpus_per_node"
    ]


def _describe_processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
