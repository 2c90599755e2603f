"""The partitions and accounts of a SLURM site, and settings of a job file for it."""

import json
import math
import os
import pwd
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tula_cli.cluster.slurm.command import call_slurm_command, parse_record
from tula_cli.spec.sections import MIN_AUTO_WORKERS
from tula_cli.spec.slurm_options import EXTRA_MINUTES
from tula_cli.words import format_count

# --- Partitions and accounts
#
# Only fields requested by name are read, which SLURM 20.11 to 24.11 print in the same format. A scheduler that is
# missing, hangs or prints unknown output counts as unknown and raises no error.

COMMAND_TIMEOUT = 10.0
"""Timeout in seconds of a command of SLURM; its output is helpful, not required."""

_UNUSABLE = (
    "down", "drain", "drained", "draining", "fail", "failing", "error", "future", "inval", "unknown",
    "maint", "reserved", "reboot", "powering_down", "not_responding",
)  # fmt: skip
_STATE_SUFFIXES = "*$^%"
"""Suffixes of node states: not responding, in a maintenance window, rebooting or powering down."""
SINFO_COMMAND = ("sinfo", "--noheader", "--exact", "--format=%P|%a|%l|%s|%D|%T|%c|%m|%G|%N")


@dataclass(frozen=True)
class Gpus:
    """GPUs of one node; `type` is the name used by the site, empty if the site does not distinguish types."""

    type: str
    count: int


@dataclass(frozen=True)
class PartitionNodeType:
    """Identical nodes of a partition."""

    nodes: int  # number of nodes that can run a job, without those that are down or drained
    cpus: int  # CPUs per node that a job can use
    memory: int  # MB per node that a job can use
    gpus: tuple[Gpus, ...]  # GPUs per node by type, the most numerous first
    limited_memory: bool = False  # whether a node has more memory than a job may request


@dataclass(frozen=True)
class Partition:
    """A partition; its kinds of nodes are sorted, those with GPUs first and then by decreasing number of nodes."""

    name: str
    default: bool
    up: bool
    minutes: int | None  # time limit of a job; None: unlimited
    most_nodes: int | None  # maximum nodes per job; None: only limited by the partition's size
    kinds: tuple[PartitionNodeType, ...]
    least_nodes: int = 1  # minimum nodes per job

    @property
    def nodes(self) -> int:
        """Number of nodes that can run a job."""
        return sum(kind.nodes for kind in self.kinds)

    @property
    def usable(self) -> int:
        """Maximum number of nodes of one job."""
        return self.nodes if self.most_nodes is None else min(self.nodes, self.most_nodes)


@dataclass(frozen=True)
class Site:
    """The partitions and accounts of a site, as reported by its scheduler."""

    partitions: tuple[Partition, ...]
    accounts: tuple[str, ...]  # accounts of the user; empty if there is no accounting

    @property
    def default_partition(self) -> Partition | None:
        """Partition of jobs that name none; None if unknown."""
        named = [partition for partition in self.partitions if partition.default]
        return named[0] if named else self.partitions[0] if len(self.partitions) == 1 else None

    def find_partition(self, name: str) -> Partition | None:
        """Return the partition of a job that requests `name`, the default one if it is empty; None if unknown."""
        return next((each for each in self.partitions if each.name == name), None) if name else self.default_partition


# --- Queries


def query_site() -> Site | None:
    """Query the scheduler; return None if there is none or it does not answer."""
    partitions = list_partitions()
    return Site(partitions, list_accounts()) if partitions else None


def list_partitions() -> tuple[Partition, ...]:
    """Return the partitions in sinfo's order, with the usable resources of their nodes if scontrol reports them.

    The result is empty if SLURM does not answer.
    """
    rows = _run_command(*SINFO_COMMAND)
    if not rows:
        return ()
    nodes = sorted({_find_first_host(names) for *_, names in _split_rows(rows) if names})  # one node of each kind
    return parse_partitions(
        rows,
        nodes=_parse_records(_run_command("scontrol", "--oneliner", "show", "node", ",".join(nodes)) if nodes else ""),
        limits=_parse_records(_run_command("scontrol", "--oneliner", "show", "partition")),
        site=dict(re.findall(r"^(MaxMemPer\w+) *= (\S+)", _run_command("scontrol", "show", "config"), re.MULTILINE)),
    )


def list_accounts() -> tuple[str, ...]:
    """Return the accounts that the user may charge; empty if there is no accounting."""
    user = pwd.getpwuid(os.getuid()).pw_name
    form = "format=Account"
    output = _run_command("sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={user}", form)
    return tuple(dict.fromkeys(line.split("|")[0] for line in output.splitlines() if line.split("|")[0]))


def list_allocated_hosts(job_id: str) -> tuple[str, ...]:
    """Return the hosts of a running or recently finished job; empty if unknown."""
    jobs = f"--jobs={job_id}"
    output = _run_command("squeue", "--noheader", "--states=all", jobs, "--format=%N")
    if not output:
        output = _run_command("sacct", "--noheader", "--parsable2", "--allocations", jobs, "--format=NodeList")
    names = output.splitlines()[-1].strip() if output else ""
    if not names or names.startswith(("(", "None")):
        return ()
    return tuple(_run_command("scontrol", "show", "hostnames", names).split())


def _run_command(*command: str) -> str:
    """Return the output of a command; empty if it fails, hangs or is missing."""
    answer = call_slurm_command(*command, timeout=COMMAND_TIMEOUT)
    return answer.text if answer.has_succeeded else ""


# --- Parsing

_EMPTY_MAPPING: Mapping[str, Any] = MappingProxyType({})

Record = Mapping[str, str]
"""A line of `scontrol --oneliner show`: values by field name."""


def parse_partitions(
    text: str,
    *,
    nodes: Mapping[str, Record] = _EMPTY_MAPPING,
    limits: Mapping[str, Record] = _EMPTY_MAPPING,
    site: Record = _EMPTY_MAPPING,
) -> tuple[Partition, ...]:
    """Return the partitions in the output of `SINFO_COMMAND`.

    Its columns are partition, availability, time limit, job size, nodes, state, CPUs, MB, GRES and names. A partition
    has a row for each kind and state of nodes; a row that does not parse is left out.

    Args:
        text: output of `SINFO_COMMAND`; in older records the names are missing.
        nodes: scontrol's record of one node of each row, by name.
        limits: scontrol's records of the partitions, by name.
        site: memory limits of the site, for partitions without memory limits.
    """
    rows: dict[str, list[list[str]]] = {}
    for fields in _split_rows(text):
        rows.setdefault(fields[0], []).append(fields)
    return tuple(
        _parse_partition(name, fields, nodes, _read_partition_limits(limits.get(name.rstrip("*"), {}), site))
        for name, fields in rows.items()
    )


def _split_rows(text: str) -> list[list[str]]:
    rows = [[field.strip() for field in line.split("|", 9)] for line in text.splitlines()]
    return [[*row, ""][:10] for row in rows if len(row) in (9, 10) and row[0] and row[4].isdigit()]


def _parse_records(text: str) -> dict[str, Record]:
    """Return the lines of `scontrol --oneliner show` by the name in their first field."""
    records = [parse_record(line) for line in text.splitlines()]
    return {next(iter(record.values())): record for record in records if record}


def _read_partition_limits(partition: Record, site: Record) -> Record:
    """Return the numeric limits of a partition, with the memory limits of the site if the partition has none."""
    limits, site_limits = (
        {name: n for name, n in record.items() if n.isdigit() and n != "0"} for record in (partition, site)
    )
    return limits if any(name.startswith("MaxMemPer") for name in limits) else {**site_limits, **limits}


def _find_first_host(names: str) -> str:
    """Return the first host of a host list: node001 for "node[001-004,007],other"."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", names)[0])


def _parse_partition(name: str, rows: list[list[str]], nodes: Mapping[str, Record], limits: Record) -> Partition:
    _, available, limit, size, *_ = rows[0]
    return Partition(
        name=name.rstrip("*"),
        default=name.endswith("*"),
        up=available.lower() == "up",
        minutes=parse_minutes(limit),
        most_nodes=_parse_max_nodes(size),
        kinds=tuple(_parse_node_types(rows, nodes, limits)),
        least_nodes=max(1, _parse_leading_number(size)) if "-" in size else 1,
    )


def _parse_node_types(rows: list[list[str]], nodes: Mapping[str, Record], limits: Record) -> list[PartitionNodeType]:
    """Return the kinds of nodes, merged over node states."""
    counts: dict[PartitionNodeType, int] = {}
    for *_, count, state, cpus, memory, gres, names in rows:
        if _is_usable_state(state):
            whole = PartitionNodeType(0, _parse_leading_number(cpus), _parse_leading_number(memory), parse_gres(gres))
            kind = _subtract_reserved_resources(whole, nodes.get(_find_first_host(names), {}), limits)
            counts[kind] = counts.get(kind, 0) + int(count)
    kinds = [replace(kind, nodes=count) for kind, count in counts.items() if count]
    return sorted(kinds, key=lambda kind: (not kind.gpus, -kind.nodes))


def _subtract_reserved_resources(kind: PartitionNodeType, node: Record, limits: Record) -> PartitionNodeType:
    """Return the part of a node that one job can use, without system resources and within the partition's limits.

    Args:
        kind: the whole node.
        node: scontrol's record of the node; empty if unknown.
        limits: limits of the partition; empty if there are none.
    """
    threads = _parse_leading_number(node.get("ThreadsPerCore", "")) or 1
    reserved_cores = _parse_leading_number(node.get("CoreSpecCount", ""))
    specialised = len(_expand_ranges(node.get("CPUSpecList", ""))) or reserved_cores * threads
    cpus = _parse_leading_number(node.get("CPUEfctv", "")) or kind.cpus - specialised
    cpus = min(cpus, int(limits.get("MaxCPUsPerNode", cpus)))
    if "MaxCPUsPerSocket" in limits:
        cpus = min(cpus, int(limits["MaxCPUsPerSocket"]) * (_parse_leading_number(node.get("Sockets", "")) or 1))
    memory = kind.memory - _parse_leading_number(node.get("MemSpecLimit", ""))
    ranks = max(1, min(kind.gpus[0].count if kind.gpus else 1, cpus))
    requested_cpus = cpus // ranks * ranks
    max_memory = int(limits.get("MaxMemPerNode", 0)) or int(limits.get("MaxMemPerCPU", 0)) * requested_cpus or memory
    return replace(kind, cpus=cpus, memory=min(memory, max_memory), limited_memory=max_memory < memory)


def _expand_ranges(ranges: str) -> list[int]:
    """Return the numbers in a list of ranges: 0, 1, 4 and 5 for "0-1,4,5"."""
    pairs = [range_text.partition("-") for range_text in ranges.split(",") if re.fullmatch(r"\d+(-\d+)?", range_text)]
    return [number for lower, _, upper in pairs for number in range(int(lower), int(upper or lower) + 1)]


def _is_usable_state(state: str) -> bool:
    """Return whether a node in this state runs jobs, now or after current ones; powered-down ones ("~") do."""
    state_words = re.split(r"[^a-z_]", state.lower())
    return state[-1:] not in _STATE_SUFFIXES and not set(state_words) & set(_UNUSABLE)


def _parse_leading_number(text: str) -> int:
    """Return the leading number: 16 for "16+" (as in sinfo if nodes differ); 0 for "N/A", "(null)" and the like."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


def _parse_max_nodes(size: str) -> int | None:
    """Return the upper bound of a job size ("1-2", "4"); None for "1-infinite"."""
    upper = size.rpartition("-")[2]
    return int(upper) if upper.isdigit() else None


def parse_minutes(limit: str) -> int | None:
    """Return the whole minutes of a time limit of SLURM ([days-]hours:minutes:seconds or shorter), or None."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit.strip())
    if not match:
        return None
    days, second_last, second, third = (int(number) if number else None for number in match.groups())
    assert second_last is not None
    if days is not None or third is not None:  # days-hours[:minutes[:seconds]], hours:minutes:seconds
        return 1440 * (days or 0) + 60 * second_last + (second or 0)
    return second_last  # minutes[:seconds]


def parse_gres(text: str) -> tuple[Gpus, ...]:
    """Return the GPUs among a node's generic resources: "gpu:4", "gpu:a100:4(S:0-1),gpu:v100:2", "(null)"."""
    parsed = []
    for entry in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *fields = entry.strip().split(":")
        if name == "gpu":
            count = fields.pop() if fields and re.fullmatch(r"\d+", fields[-1]) else "1"
            kinds = [field for field in fields if field != "no_consume"]
            parsed.append(Gpus(kinds[0] if kinds else "", int(count)))
    return tuple(sorted((gpus for gpus in parsed if gpus.count), key=lambda gpus: -gpus.count))


# --- Settings for a job file


@dataclass(frozen=True)
class TemplateLine:
    """A line of a job spec: `value` as YAML, its comment `why`, and comment lines below."""

    key: str  # "cluster.slurm.partition"
    value: str
    why: str = ""
    below: tuple[str, ...] = ()
    commented: bool = False  # whether the line is commented out, as a suggestion for the user


def fill_template(template: str, site: Site) -> str:
    """Return the template with the site's values for its settings, including settings that are commented out."""
    return replace_setting_lines(template, list_site_settings(site))


def replace_setting_lines(template: str, settings: Iterable[TemplateLine]) -> str:
    """Return a job file with the lines of some keys replaced, including keys that are commented out."""
    lines = template.splitlines()
    for setting in settings:
        number, indent = _find_setting_line(lines, setting.key)
        name = setting.key.rpartition(".")[2]
        why = f" # {setting.why}" if setting.why else ""
        lines[number : number + 1] = [
            f"{indent}{'# ' * setting.commented}{name}: {setting.value}{why}",
            *(f"{indent}# {text}" for text in setting.below),
        ]
    return "\n".join(lines) + "\n"


_SETTING_LINE_PATTERN = re.compile(r"^(?P<indent> *)(?P<off># )?(?P<key>[a-z_]+):(?P<rest>.*)$")


def _find_setting_line(lines: Sequence[str], key: str) -> tuple[int, str]:
    """Return index and indentation of the line that sets a key, even if the line is commented out."""
    path: list[tuple[int, str]] = []  # enclosing sections: indentation, name
    for number, line in enumerate(lines):
        if not (match := _SETTING_LINE_PATTERN.match(line)):
            continue
        depth = len(match["indent"])
        path = [section for section in path if section[0] < depth]
        if ".".join([*(name for _, name in path), match["key"]]) == key:
            return number, match["indent"]
        if not match["off"] and not match["rest"].partition("#")[0].strip():
            path.append((depth, match["key"]))
    raise AssertionError(f"the template has no line for {key}")


def list_site_settings(site: Site) -> Iterator[TemplateLine]:
    """Yield the settings of a job spec for the default partition of a site, with other partitions as comments."""
    default_partition = site.default_partition
    others = [partition for partition in site.partitions if partition is not default_partition]
    below = ("others:", *(f"  {describe_partition(partition)}" for partition in others)) if others else ()
    if default_partition is None:
        names = ", ".join(partition.name for partition in site.partitions)
        why = f"SLURM has no default partition here: choose one of {names}"
        name = quote_yaml_name(site.partitions[0].name)
        yield TemplateLine("cluster.slurm.partition", name, why, below[1:], commented=True)
    else:
        why = f"the default: {_describe_size(default_partition)}"
        yield TemplateLine("cluster.slurm.partition", quote_yaml_name(default_partition.name), why, below)
        yield from _list_size_settings(default_partition)
    if len(site.accounts) == 1:
        yield TemplateLine("cluster.slurm.account", quote_yaml_name(site.accounts[0]), "your only one")
    elif site.accounts:
        why = f"yours: {', '.join(site.accounts)}"
        yield TemplateLine("cluster.slurm.account", quote_yaml_name(site.accounts[0]), why, commented=True)


def _list_size_settings(partition: Partition) -> Iterator[TemplateLine]:
    if partition.kinds:
        yield from _list_node_settings(partition.kinds[0])
    yield from list_search_settings(suggest_node_counts(partition), _choose_probe_job_minutes(partition))
    limit = partition.minutes
    if limit is not None and limit < _TRAINING_JOB_MINUTES:
        comment = "time limit of a training job, the maximum here; a longer training continues in the next job"
        yield TemplateLine("cluster.minutes", str(limit), comment)


def list_search_settings(
    nodes: Sequence[int], minutes: int, why: str = "numbers of nodes to measure"
) -> Iterator[TemplateLine]:
    """Yield the settings for the numbers of nodes to measure, minutes per measuring job, and total node-hours."""
    yield TemplateLine("search.nodes", f"[{', '.join(map(str, nodes))}]", why)
    yield TemplateLine(
        "search.max_minutes",
        str(minutes),
        f"maximum minutes of one profiling job; the job requests {minutes + EXTRA_MINUTES}",
    )
    hours = sum(nodes) * (minutes + EXTRA_MINUTES) / 60
    cap = math.ceil(12 * hours) / 10 if hours < 5 else math.ceil(1.2 * hours)
    sum_ = f"({' + '.join(map(str, nodes))}) nodes" if len(nodes) > 1 else format_count(nodes[0])
    comment = f"maximum node-hours of all profiling jobs: {sum_} x {minutes + EXTRA_MINUTES} minutes = {hours:.3g}"
    yield TemplateLine("search.max_node_hours", f"{cap:g}", comment)


_TRAINING_JOB_MINUTES = 120  # minutes of a training job, if the partition allows them
_PROBE_JOB_MINUTES = 20  # minutes of a measuring job, if the partition allows them
_DEFAULT_NODE_COUNTS = (2, 4, 8, 16)


def suggest_node_counts(partition: Partition) -> tuple[int, ...]:
    """Return the numbers of nodes to measure: powers of two within the partition's limits, and the least if they are few."""
    identical_nodes = partition.kinds[0].nodes if partition.kinds else 1
    max_nodes = min(identical_nodes, partition.usable or 1)
    least = partition.least_nodes
    choices = tuple(nodes for nodes in _DEFAULT_NODE_COUNTS if least <= nodes <= max_nodes)
    if least > 1:
        return choices or (least,)
    return choices if len(choices) > 1 else (1, *choices)


def _choose_probe_job_minutes(partition: Partition) -> int:
    if partition.minutes is None:
        return _PROBE_JOB_MINUTES
    return max(1, min(_PROBE_JOB_MINUTES, partition.minutes - EXTRA_MINUTES))


def _list_node_settings(kind: PartitionNodeType) -> Iterator[TemplateLine]:
    """Yield the settings that request all GPUs, CPUs and memory of a node, as whole nodes are used."""
    gpus = kind.gpus[0] if kind.gpus else Gpus("", 1)
    ranks = min(gpus.count, kind.cpus or gpus.count)
    cpus = max(1, kind.cpus // ranks)
    if kind.gpus:
        why = (
            "one process per GPU"
            if ranks == gpus.count
            else f"of {gpus.count} GPUs; a job can use {format_count(kind.cpus, 'CPU')} of a node"
        )
        yield TemplateLine("cluster.gpus_per_node", str(ranks), why)
    else:
        yield TemplateLine("cluster.device", "cpu", "the partition's nodes have no GPUs")
    if gpus.type:
        yield TemplateLine("cluster.slurm.gpu_type", quote_yaml_name(gpus.type), "the GPU's name in SLURM")
    yield TemplateLine("cluster.slurm.cpus_per_task", str(cpus), f"per rank; a node has {kind.cpus}")
    if cpus <= MIN_AUTO_WORKERS:
        why = "data-loader processes per GPU; the ranks share the node's CPUs"
        yield TemplateLine("train.workers", str(cpus - 1), why)
    if kind.limited_memory:
        yield TemplateLine("cluster.slurm.memory", f"{kind.memory}M", "per node; the maximum for a job here")
    elif kind.memory:
        yield TemplateLine("cluster.slurm.memory", '"0"', f"per node; 0: all memory of a node ({kind.memory} MB)")


def describe_partition(partition: Partition) -> str:
    """Return a one-line description of a partition: name, nodes, GPUs and time limit."""
    return f"{partition.name}: {_describe_size(partition)}"


def _describe_size(partition: Partition) -> str:
    kinds = " and ".join(_describe_node_type(kind) for kind in partition.kinds) or "no node can run jobs"
    max_nodes = partition.most_nodes
    limit_text = f", at most {max_nodes} per job" if max_nodes is not None and max_nodes < partition.nodes else ""
    limit = "no time limit" if partition.minutes is None else f"at most {_describe_minutes(partition.minutes)}"
    return f"{kinds}{limit_text}, {limit}{'' if partition.up else ', not up'}"


def _describe_node_type(kind: PartitionNodeType) -> str:
    gpus = " + ".join(" ".join([str(gpus.count), *filter(None, [gpus.type]), "GPUs"]) for gpus in kind.gpus)
    return f"{format_count(kind.nodes)} ({gpus or 'no GPUs'}, {kind.cpus} CPUs)"


def _describe_minutes(minutes: int) -> str:
    for unit, length in (("days", 1440), ("h", 60)):
        if minutes >= 2 * length:
            return f"{minutes / length:.3g} {unit}"
    return f"{minutes} min"


def quote_yaml_name(text: str) -> str:
    """Return a name as a YAML string, quoted if YAML could read it as another type."""
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*", text)
    reserved = ("true", "false", "null", "yes", "no", "on", "off", "y", "n", "none")
    return text if plain and text.lower() not in reserved else json.dumps(text)


def list_partitions_with_gpus(partitions: Iterable[Partition]) -> list[Partition]:
    """Return the partitions that are up and have nodes with GPUs."""
    return [partition for partition in partitions if partition.up and any(kind.gpus for kind in partition.kinds)]
