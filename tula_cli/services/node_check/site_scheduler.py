"""Site settings held against what the scheduler tells: partitions, limits, GPUs, accounts, QOS."""

import math
import re
import time
from collections.abc import Generator, Iterator, Sequence

from tula_cli.cluster.slurm.accounting.factor_names import unknown_names
from tula_cli.cluster.slurm.partitions import Partition, describe_partition
from tula_cli.cluster.slurm.queue import describe_window
from tula_cli.cluster.slurm.site_facts import SiteFacts
from tula_cli.plugins import nearest
from tula_cli.services.node_check.site_finding import SiteFinding, ok, problem, warning
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import ROOM, Slurm
from tula_cli.words import plural

_NEEDED_COMMANDS = ("sinfo", "squeue", "sbatch")
_WITHOUT = {
    "sacct": "tula does without accounting, but a scancel may be taken for a lost allocation",
    "sacctmgr": "accounts and QOS are not checked",
    "scontrol": "reservations are not checked, and faulty nodes of waiting jobs cannot be excluded",
}
_SECTION = "cluster.slurm"


def command_findings(facts: SiteFacts) -> Iterator[SiteFinding]:
    """Yield which commands of SLURM answer."""
    for name, why in facts.silent.items():
        if name in _NEEDED_COMMANDS:
            yield problem(
                name, why, "nothing can be submitted or followed without it: is SLURM in PATH here?", "scheduler"
            )
        elif facts.answers:
            yield warning(name, why, _WITHOUT.get(name, "tula does without"), "scheduler")
    if facts.answers:
        names = ", ".join(partition.name for partition in facts.partitions)
        yield ok("scheduler", f"answers: {plural(len(facts.partitions), 'partition')}, {names}", "scheduler")


def setting_findings(spec: JobSpec, facts: SiteFacts) -> Iterator[SiteFinding]:
    """Yield how the settings of each type of node fit the site; the same thing of several types once.

    Args:
        spec: any job of the site.
        facts: of the scheduler, which answers.
    """
    seen_findings: set[SiteFinding] = set()
    for name, job in spec.by_type().items():
        if job.cluster.kind != "slurm":
            continue
        for finding in _findings_of_type(job, facts):
            where = finding if name is None else _for_node_type(finding, name)
            if finding not in seen_findings:
                seen_findings.add(finding)
                yield where


def _for_node_type(finding: SiteFinding, name: str) -> SiteFinding:
    return SiteFinding(finding.verdict, f"{finding.about} ({name})", finding.message, finding.advice, finding.source)


def _findings_of_type(spec: JobSpec, facts: SiteFacts) -> Iterator[SiteFinding]:
    slurm = spec.cluster.slurm or Slurm()
    partitions = yield from _partition_findings(slurm, facts)
    for partition in partitions:
        yield from _size_findings(spec, slurm, partition)
        yield from _limit_findings(spec, slurm, partition)
    yield from _maintenance_findings(slurm, facts)
    yield from _account_findings(slurm, facts)
    yield from _qos_findings(slurm, facts)
    yield from _constraint_findings(slurm, facts, partitions)
    for unknown in unknown_names(spec.pricing, qos=facts.qos, partitions=facts.all_partitions):
        yield warning(unknown.about, unknown.message, unknown.advice, "scheduler")
    if slurm.reservation and facts.reservations is not None and slurm.reservation not in facts.reservations:
        reservations = ", ".join(facts.reservations) or "none"
        yield problem(
            f"{_SECTION}.reservation",
            f"no reservation {slurm.reservation!r}",
            f"there are: {reservations}",
            "scheduler",
        )


def _partition_findings(slurm: Slurm, facts: SiteFacts) -> Generator[SiteFinding, None, list[Partition]]:
    """Yield whether the partitions are there; return those that are."""
    about = f"{_SECTION}.partition"
    partitions_by_name = {partition.name: partition for partition in facts.partitions}
    if slurm.partition is None:
        default_partition = next((one for one in facts.partitions if one.default), None)
        if default_partition is None and len(partitions_by_name) > 1:
            yield warning(
                about,
                "none is set, and the scheduler has no default",
                f"name one of {', '.join(partitions_by_name)}",
                "scheduler",
            )
        elif default_partition is not None:
            yield ok(about, f"none is set: the default, {describe_partition(default_partition)}", "scheduler")
        return [default_partition] if default_partition is not None else []
    partitions_found = []
    for name in slurm.partition.split(","):
        if name not in partitions_by_name:
            advice = nearest(name, partitions_by_name) or f"there are: {', '.join(partitions_by_name)}"
            yield problem(about, f"no partition {name!r}", advice, "scheduler")
        elif not partitions_by_name[name].up:
            yield problem(about, f"partition {name} is not up", "name another, or have it set up", "scheduler")
        else:
            partitions_found.append(partitions_by_name[name])
            yield ok(about, describe_partition(partitions_by_name[name]), "scheduler")
    return partitions_found


def _size_findings(spec: JobSpec, slurm: Slurm, partition: Partition) -> Iterator[SiteFinding]:
    """Yield whether some kind of the partition's nodes has what is asked of a node."""
    kinds, gpus = partition.kinds, spec.cluster.gpus_per_node
    if not kinds:
        yield problem(
            f"{_SECTION}.partition",
            f"{partition.name} has no node that can run a job",
            "sinfo --list-reasons tells why",
            "scheduler",
        )
        return
    if spec.cluster.device != "cpu" and slurm.gpus != "none":
        yield from _gpu_findings(spec, slurm, partition)
    cpus = max(kind.cpus for kind in kinds)
    if slurm.cpus_per_task and slurm.cpus_per_task * gpus > cpus:
        yield problem(
            f"{_SECTION}.cpus_per_task",
            f"{slurm.cpus_per_task} for each of {plural(gpus, 'rank')} is more than a node of {partition.name} has ({cpus})",
            f"set it to {max(1, cpus // gpus)}",
            "scheduler",
        )
    memory = max(kind.memory for kind in kinds)
    if slurm.memory == "0" and all(kind.limited_memory for kind in kinds):
        yield problem(
            f"{_SECTION}.memory",
            f"0 asks for all memory of a node, and a job in {partition.name} can have {memory} MB",
            f"set it to {memory}M",
            "scheduler",
        )
    most_nodes = max(spec.search.nodes)
    if "nodes" in spec.search.model_fields_set and most_nodes > partition.usable:
        yield problem(
            "search.nodes",
            f"{most_nodes} is more than a job can have in {partition.name} ({partition.usable})",
            "leave it to the jobs, or search fewer",
            "scheduler",
        )


def _gpu_findings(spec: JobSpec, slurm: Slurm, partition: Partition) -> Iterator[SiteFinding]:
    kinds, gpus = partition.kinds, spec.cluster.gpus_per_node
    most = max((own.count for kind in kinds for own in kind.gpus), default=0)
    types = sorted({own.type for kind in kinds for own in kind.gpus if own.type})
    if most == 0:
        yield problem(
            "cluster.gpus_per_node",
            f"the nodes of {partition.name} have no GPUs that SLURM knows of",
            f"set {_SECTION}.gpus: none, or cluster.device: cpu",
            "scheduler",
        )
    elif gpus > most:
        yield problem(
            "cluster.gpus_per_node",
            f"{gpus} is more than a node of {partition.name} has ({most})",
            f"set it to {most}",
            "scheduler",
        )
    elif gpus < most and slurm.exclusive:
        yield warning(
            "cluster.gpus_per_node",
            f"{gpus} of the {most} that a node of {partition.name} has, and whole nodes are paid for (exclusive)",
            f"set it to {most}",
            "scheduler",
        )
    if slurm.gpu_type and slurm.gpu_type not in types:
        advice = nearest(slurm.gpu_type, types) or (
            f"there are: {', '.join(types)}" if types else "leave it out: SLURM tells no types apart"
        )
        yield problem(f"{_SECTION}.gpu_type", f"no GPU {slurm.gpu_type!r} in {partition.name}", advice, "scheduler")


def _limit_findings(spec: JobSpec, slurm: Slurm, partition: Partition) -> Iterator[SiteFinding]:
    """Yield whether the partition lets jobs last as long as they ask for."""
    limit = partition.minutes
    if limit is None:
        return
    if slurm.minutes > limit:
        yield problem(
            f"{_SECTION}.minutes",
            f"{slurm.minutes} is more than {partition.name} allows ({limit})",
            f"set it to {limit} or less",
            "scheduler",
        )
    probes = math.ceil(spec.search.max_minutes) + ROOM
    if probes > limit:
        yield problem(
            "search.max_minutes",
            f"a measuring job asks for {probes} minutes, and {partition.name} allows {limit}",
            f"set it to {max(1, limit - ROOM)}",
            "scheduler",
        )


def _maintenance_findings(slurm: Slurm, facts: SiteFacts) -> Iterator[SiteFinding]:
    """Yield whether training jobs of this length would run into a maintenance window, and wait until it is over."""
    now = time.time()
    begin = next((begin for begin, _ in facts.maintenance if begin > now), math.inf)
    remaining = (begin - now) / 60
    if remaining < slurm.minutes:
        yield warning(
            f"{_SECTION}.minutes",
            f"a job of {slurm.minutes} minutes would not start before the maintenance: {describe_window(begin, now)}",
            f"set it below {max(1, int(remaining))} to start now" if remaining >= 2 else "jobs wait until it is over",
            "scheduler",
        )


def _account_findings(slurm: Slurm, facts: SiteFacts) -> Iterator[SiteFinding]:
    if slurm.account is None or facts.accounts is None:
        return
    about = f"{_SECTION}.account"
    if slurm.account.lower() in (name.lower() for name in facts.accounts):
        yield ok(about, f"{slurm.account} is known; all users of this file charge it", "scheduler")
    else:
        advice = nearest(slurm.account, facts.accounts) or "leave it to the users, or name one that sacctmgr knows"
        yield problem(about, f"accounting knows no account {slurm.account!r}", advice, "scheduler")


def _qos_findings(slurm: Slurm, facts: SiteFacts) -> Iterator[SiteFinding]:
    if slurm.qos is None or facts.qos is None:
        return
    about = f"{_SECTION}.qos"
    for name in slurm.qos.split(","):
        if name not in facts.qos:
            advice = nearest(name, facts.qos) or f"there are: {', '.join(facts.qos)}"
            yield problem(about, f"no QOS {name!r}", advice, "scheduler")
        elif (limit := facts.qos[name]) is not None and slurm.minutes > limit:
            yield problem(
                f"{_SECTION}.minutes",
                f"{slurm.minutes} is more than QOS {name} allows ({limit})",
                f"set it to {limit} or less",
                "scheduler",
            )
        else:
            yield ok(about, f"{name} is known", "scheduler")


def _constraint_findings(slurm: Slurm, facts: SiteFacts, partitions: Sequence[Partition]) -> Iterator[SiteFinding]:
    """Yield names in the constraint that no node of the partitions has; how they are combined is SLURM's own."""
    known_features = frozenset[str]().union(
        *(facts.features.get(partition.name, frozenset()) for partition in partitions)
    )
    names = [name for name in re.split(r"[&|\[\](),*\s]+", slurm.constraint or "") if name and not name.isdigit()]
    if unknown := [name for name in names if name not in known_features]:
        advice = nearest(unknown[0], known_features) or (
            f"there are: {', '.join(sorted(known_features))}" if known_features else "they have no features"
        )
        yield problem(f"{_SECTION}.constraint", f"no node here has {', '.join(unknown)}", advice, "scheduler")
