"""The billing of a job by SLURM's TRES weights and the usage factor of its QOS, and the charges of finished jobs."""

import contextlib
import math
import os
import pwd
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from tula_cli.cluster.slurm.command import call_slurm_command, parse_record
from tula_cli.cluster.slurm.sbatch import get_slurm_section
from tula_cli.cluster.slurm.site import COMMAND_TIMEOUT
from tula_cli.errors import SchedulerError, SpecError, TulaError
from tula_cli.extras.slurm_site.tres import (
    BillingRule,
    compute_billing,
    parse_billing_rule,
    parse_count,
    parse_tres,
    parse_weights,
)
from tula_cli.models.cost import compute_hourly_charge
from tula_cli.run.files import make_folder, read_record, write_record
from tula_cli.run.records.base import Record
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services.site_charges import NODE_HOUR_ADVICE, SiteCharge
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import JobBilling
from tula_cli.spec.signature import compute_digest
from tula_cli.spec.slurm_options import Slurm, normalize_option_name
from tula_cli.words import format_count, format_local_time, format_number

# --- The resources that SLURM allocates to a job on each node, from its request and scontrol's partitions and nodes
#
# As observed with SLURM 22.05 and documented for 24.11: a job with exclusive nodes is allocated all their CPUs and GPUs,
# but only the memory that it requests; without a request, the default of the partition or cluster, or else all memory.


def parse_config(text: str) -> dict[str, str]:
    """Return the settings in the output of `scontrol show config`, one per line."""
    rows = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, separator, value in rows if separator}


@dataclass(frozen=True)
class Node:
    """The resources of one node that SLURM tracks."""

    tres: Mapping[str, float]  # from CfgTRES
    partitions: tuple[str, ...]
    features: tuple[str, ...]
    gres: str
    threads: int  # hardware threads per core

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> "Node":
        """Return the node from a record of `scontrol show node`."""
        tres = parse_tres(record.get("CfgTRES", ""))
        cpus = record.get("CPUEfctv") or record.get("CPUTot", "0")
        tres.setdefault("cpu", float(cpus) if cpus.isdecimal() else 0.0)
        tres.setdefault("mem", parse_count("mem", record.get("RealMemory", "0")) or 0.0)
        threads = record.get("ThreadsPerCore", "1")
        return cls(
            tres={**tres, "node": 1.0},
            partitions=tuple(filter(None, record.get("Partitions", "").split(","))),
            features=tuple(filter(None, record.get("AvailableFeatures", "").split(","))),
            gres=record.get("Gres", ""),
            threads=int(threads) if threads.isdecimal() else 1,
        )

    def can_run(self, spec: JobSpec, partition: str) -> bool:
        """Return whether a job can run on this node, by partition, GPU type and plain constraint (`a&b`)."""
        slurm = get_slurm_section(spec)
        constraint = slurm.constraint or ""
        plain = re.fullmatch(r"[\w.-]+(&[\w.-]+)*", constraint)
        featured = not plain or set(constraint.split("&")) <= set(self.features)
        kind = slurm.gpu_type.lower() if slurm.gpu_type and _requests_gpus(spec) else ""
        # such as "gpu:a100:4(S:0-1)"; a10 does not match a100
        types = re.findall(r"(?:^|,)gpu:([^:,(]+)", self.gres.lower())
        return partition in self.partitions and featured and (not kind or kind in types)


def _requests_gpus(spec: JobSpec) -> bool:
    return spec.cluster.device != "cpu" and get_slurm_section(spec).gpus != "none"


def compute_allocated_tres(
    spec: JobSpec, node: Node, partition: Mapping[str, str], config: Mapping[str, str]
) -> dict[str, float]:
    """Return the TRES that a job is allocated on one node of a partition; `config` holds the settings of the cluster."""
    slurm, ranks = get_slurm_section(spec), spec.cluster.gpus_per_node
    is_exclusive = slurm.exclusive or partition.get("OverSubscribe", "").startswith("EXCLUSIVE")
    gpus = ranks if _requests_gpus(spec) else 0
    if is_exclusive:
        tres = {name: count for name, count in node.tres.items() if name not in ("billing", "mem")}
        gpus = int(node.tres.get("gres/gpu", gpus))
    else:
        tres = {"cpu": _count_cpus_on_shared_node(spec, node, config), "node": 1.0, **_count_gpus(spec, node, gpus)}
    return {**tres, "mem": _compute_memory_on_shared_node(spec, node, partition, config, cpus=tres["cpu"], gpus=gpus)}


def _count_gpus(spec: JobSpec, node: Node, gpus: int) -> dict[str, float]:
    """Return the number of GPUs by TRES name, only for names that SLURM tracks on the node."""
    slurm = get_slurm_section(spec)
    typed = [name for name in node.tres if name.startswith("gres/gpu:")]
    matching = [name for name in typed if not slurm.gpu_type or name == f"gres/gpu:{slurm.gpu_type.lower()}"]
    names = [name for name in node.tres if name == "gres/gpu"] + matching[:1]
    return {name: float(gpus) for name in names if gpus}


def _count_cpus_on_shared_node(spec: JobSpec, node: Node, config: Mapping[str, str]) -> float:
    """Return the CPUs of a job on a shared node: those of its tasks, in whole cores unless SLURM allocates CPUs."""
    slurm, ranks = get_slurm_section(spec), spec.cluster.gpus_per_node
    per_gpu = _get_extra_option(slurm, "cpus-per-gpu")
    if not re.fullmatch(r"[0-9]*", per_gpu):
        raise SpecError(f"cluster.slurm.extra: cpus-per-gpu must be a number of cores, got {per_gpu!r}")
    cpus = ranks * (slurm.cpus_per_task or int(per_gpu or 1))
    if spec.starts_one_task_per_node and slurm.cpus_per_task is None and not per_gpu:
        cpus = 1
    allocates_cpus = "CR_CPU" in config.get("SelectTypeParameters", "").upper()
    return float(cpus if allocates_cpus else node.threads * math.ceil(cpus / node.threads))


def _compute_memory_on_shared_node(
    spec: JobSpec, node: Node, partition: Mapping[str, str], config: Mapping[str, str], *, cpus: float, gpus: int
) -> float:
    slurm = get_slurm_section(spec)
    requests = [
        ("Node", 1.0, slurm.memory),
        ("CPU", cpus, _get_extra_option(slurm, "mem-per-cpu")),
        ("GPU", float(gpus), _get_extra_option(slurm, "mem-per-gpu")),
    ]
    for _, times, text in requests:
        if text and (size := parse_count("mem", text)) is not None:
            return times * size or node.tres["mem"]  # 0 requests all memory
    for record in (partition, config):
        defaults = dict(re.findall(r"(\w+)=(\d+)", record.get("JobDefaults", "")))
        for name, times, _ in requests:
            text = defaults.get(f"DefMemPer{name}") or record.get(f"DefMemPer{name}", "")
            if (size := parse_count("mem", text)) and times:
                return min(times * size, node.tres["mem"])
    return node.tres["mem"]


def _get_extra_option(slurm: Slurm, name: str) -> str:
    values = [str(value) for key, value in slurm.extra.items() if normalize_option_name(key) == name and value]
    return values[0] if values else ""


def list_requested_licenses(spec: JobSpec) -> dict[str, float]:
    """Return the licenses that a job requests (`extra: {licenses: "matlab:2"}`), as TRES of the whole job."""
    text = _get_extra_option(get_slurm_section(spec), "licenses")
    entries: Iterable[str] = filter(None, re.split(r"[,;|\s]+", text.strip("[]'")))
    pairs = [entry.replace("=", ":").partition(":") for entry in entries]
    return {
        f"license/{name.partition('@')[0]}": float(count or 1) for name, _, count in pairs if (count or "1").isdigit()
    }


# --- The billing of a job

CACHE_FOLDER = ".site"
"""Folder of cached answers, in the folder of the runs."""
MAX_CACHE_AGE_SECONDS = 86400.0
"""Seconds for which a cached answer is valid; weights and nodes may change in a maintenance."""
_TIMEOUT = 30.0  # timeout in seconds; scontrol prints megabytes of nodes on large sites


class StoredBilling(Record):
    """A cached billing, with the time of the query."""

    bill: JobBilling
    asked_at: float  # Unix time


_RECORD: TypeAdapter[StoredBilling] = TypeAdapter(StoredBilling)
CommandRunner = Callable[..., str]
"""Runs a command of SLURM, given as its words, and returns its output; raises SchedulerError if SLURM does not answer."""


def find_job_billing(spec: JobSpec, root: Path | None, *, ask: CommandRunner) -> JobBilling:
    """Return the billing of SLURM for a job of this spec.

    Args:
        spec: job with pricing.kind billing, on one type of nodes.
        root: folder of the runs, in which the answer is cached for a day; None: no cache.

    Raises:
        SpecError: SLURM does not report its billing, and no answer is cached; or the job cannot be billed by SLURM.
    """
    path = None if root is None else root / CACHE_FOLDER / f"bill-{_make_cache_key(spec)}.json"
    stored = None if path is None else read_record(path, _RECORD)
    now = time.time()
    if stored is not None and 0 <= now - stored.asked_at < MAX_CACHE_AGE_SECONDS:
        return stored.bill
    try:
        billing, unsure = query_slurm_billing(spec, ask)
    except SchedulerError as error:
        if stored is None:
            raise SpecError(
                f"pricing.kind billing: SLURM does not report its billing ({error.message})",
                f"run tula on a login node, or {NODE_HOUR_ADVICE}",
            ) from None
        return _load_stored_billing(stored, "SLURM does not answer")
    if unsure:  # not cached, because the cache would be used for a day
        return billing if stored is None else _load_stored_billing(stored, unsure)
    if path is not None:
        with contextlib.suppress(TulaError, OSError):  # the cache may be unwritable; SLURM is then queried again
            make_folder(path.parent)
            path.parent.chmod(0o700)  # older versions used the umask
            write_record(path, StoredBilling(bill=billing, asked_at=now))
    return billing


def _load_stored_billing(stored: StoredBilling, why: str) -> JobBilling:
    day = format_local_time(stored.asked_at, "%Y-%m-%d")
    return replace(stored.bill, words=f"{stored.bill.words}; as of {day}, {why}")


def _make_cache_key(spec: JobSpec) -> str:
    options = get_slurm_section(spec).model_dump(
        mode="json", include={"partition", "account", "qos", "constraint", "memory", "cpus_per_task", "gpus", "gpu_type", "exclusive", "extra", "launcher"}
    )  # fmt: skip
    return compute_digest({
        "slurm": options, "gpus": spec.cluster.gpus_per_node, "device": spec.cluster.device, "one": spec.starts_one_task_per_node,
        "site": os.environ.get("SLURM_CONF", ""),
    })  # fmt: skip


def run_slurm_command(*command: str) -> str:
    """Run a command of SLURM and return its output.

    Raises:
        SchedulerError: the command fails or does not answer.
    """
    answer = call_slurm_command(*command, timeout=_TIMEOUT)
    if not answer.has_succeeded:
        raise SchedulerError(
            answer.error_message.splitlines()[-1] if answer.error_message else f"{command[0]} printed nothing"
        )
    return answer.text


def query_slurm_billing(spec: JobSpec, ask: CommandRunner) -> tuple[JobBilling, str]:
    """Query SLURM for the billing of a job, for the most expensive of its possible partitions and kinds of nodes.

    Returns:
        The billing, and why it is uncertain (empty if it is certain).

    Raises:
        SchedulerError: SLURM does not answer.
        SpecError: no node of the partition offers the resources that the job requests.
    """
    config = parse_config(ask("scontrol", "show", "config"))
    records = [parse_record(line) for line in ask("scontrol", "--oneliner", "show", "partition").splitlines() if line]
    node_lines = ask("scontrol", "--oneliner", "show", "node").splitlines()
    nodes = _list_distinct_kinds([Node.from_record(parse_record(line)) for line in node_lines if line])
    offers = [
        offer
        for record in _list_partitions_of_job(spec, records)
        for offer in _list_billing_options(spec, record, nodes, config)
    ]
    if not offers:
        slurm = get_slurm_section(spec)
        where = f"partition {slurm.partition}" if slurm.partition else "the default partition"
        raise SpecError(
            f"pricing.kind billing: no node of {where} has the resources that the job requests",
            f"check Partitions, AvailableFeatures and Gres in the output of scontrol show node, or {NODE_HOUR_ADVICE}",
        )
    qos, factor, unsure = find_usage_factor(spec, ask, config)
    dearest = max(offers, key=lambda offer: offer.node)
    least, between = min(offer.node for offer in offers), ""
    if least < dearest.node:
        between = f" (the most expensive option; others cost at least {format_number(least)}, depending on partition and node type)"
    by_qos = "" if factor == 1 else f", usage factor {factor:g} of QOS {qos}"
    words = f"{dearest.words}{by_qos}{between}{f'; {unsure}, so 1 is assumed' if unsure else ''}"
    return replace(dearest, usage_factor=factor, qos=qos, words=words), unsure


def _list_partitions_of_job(spec: JobSpec, records: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    named = get_slurm_section(spec).partition
    if named:
        return [record for record in records if record.get("PartitionName") in named.split(",")]
    return [record for record in records if record.get("Default") == "YES"]


def _list_distinct_kinds(nodes: Sequence[Node]) -> list[Node]:
    """Return one node of each kind."""
    kinds = {(tuple(sorted(n.tres.items())), n.partitions, n.features, n.gres, n.threads): n for n in nodes}
    return list(kinds.values())


_RULE_DESCRIPTIONS: Mapping[BillingRule, str] = {
    "sum": "summed",
    "max": "the largest (MAX_TRES)",
    "max_gres": "the largest, and GRES (MAX_TRES_GRES)",
}


def _list_billing_options(
    spec: JobSpec, partition: dict[str, str], nodes: Sequence[Node], config: dict[str, str]
) -> Iterator[JobBilling]:
    """Yield the billing of a job, without its QOS, on each kind of node of a partition."""
    name, text = partition["PartitionName"], partition.get("TRESBillingWeights", "")
    weights = parse_weights(text)
    rule = parse_billing_rule(config.get("PriorityFlags", ""))
    by = f"{text}, {_RULE_DESCRIPTIONS[rule]}" if weights else "no TRESBillingWeights, so CPUs are billed"
    licenses = list_requested_licenses(spec)
    for node in nodes:
        if node.can_run(spec, name):
            tres = compute_allocated_tres(spec, node, partition, config)
            node_billing = compute_billing(tres, weights, rule)
            license_billing = compute_billing({**tres, **licenses}, weights, rule) - node_billing
            words = f"{name}: {by}; per node: {_describe_tres(tres)}"
            yield JobBilling(node_billing, license_billing, tres=tres, words=words)


def _describe_tres(tres: dict[str, float]) -> str:
    shown = [f"{tres['cpu']:g} CPUs", f"{tres['mem']:g} MB"]
    gpus = tres.get("gres/gpu", 0.0)
    return ", ".join([*shown, *([format_count(int(gpus), "GPU")] if gpus else [])])


# --- QOS


def find_usage_factor(spec: JobSpec, ask: CommandRunner, config: Mapping[str, str]) -> tuple[str, float, str]:
    """Return the QOS of a job, its UsageFactor, and the reason if that is unknown (empty if it is known).

    The factor is 1 if it is unknown, or if there is no accounting.
    """
    if config.get("AccountingStorageType", "").endswith(("/none", "(null)")):
        return "", 1.0, ""
    named = get_slurm_section(spec).qos or ""
    try:
        qos = named or find_default_qos(spec, ask, config)
        rows = ask("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,UsageFactor").splitlines()
    except SchedulerError as error:
        return named, 1.0, f"the usage factor of the job's QOS is unknown ({error.message})"
    factors = {name.lower(): value for name, _, value in (row.partition("|") for row in rows)}
    try:
        return qos, float(factors[qos.lower()]), ""
    except (KeyError, ValueError):
        return qos, 1.0, f"SLURM's accounting reports no usage factor for QOS {qos}"


def find_default_qos(spec: JobSpec, ask: CommandRunner, config: Mapping[str, str]) -> str:
    """Return the QOS of a job that names none."""
    cluster = config.get("ClusterName", "")  # one accounting database may contain several clusters
    output = ask(
        "sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={get_user_name()}",
        f"account={find_account(spec, ask)}", *([f"cluster={cluster}"] if cluster else []), "format=DefaultQOS,QOS,Partition",
    )  # fmt: skip
    partitions = (get_slurm_section(spec).partition or "").split(",")
    for default, allowed, partition in (line.split("|") for line in output.splitlines() if line.count("|") == 2):
        if (default or allowed) and partition in ("", *partitions):
            names = allowed.split(",")
            return default or ("normal" if "normal" in names or len(names) > 1 else names[0])
    return "normal"


def find_account(spec: JobSpec, ask: CommandRunner) -> str:
    """Return the account that a job is charged to; a name from the spec in lower case, as in the accounting."""
    named = get_slurm_section(spec).account
    if named:
        return named.lower()
    return (
        ask("sacctmgr", "--noheader", "--parsable2", "show", "user", get_user_name(), "format=DefaultAccount")
        .split("|")[0]
        .strip()
    )


def get_user_name() -> str:
    """Return the name of the submitting user."""
    return pwd.getpwuid(os.getuid()).pw_name


# --- Charges of jobs from SLURM's accounting

_SACCT_FIELDS = "JobIDRaw,State,ElapsedRaw,AllocTRES"
_OPEN_STATES = ("RUNNING", "PENDING", "REQUEUED", "SUSPENDED", "COMPLETING")


def query_site_charge(ids: Sequence[str], task: TrainTask) -> SiteCharge | None:
    """Return the charge of a training's jobs so far, by the ids of their allocations; None if nothing reports it."""
    if not ids:
        return None
    answer = call_slurm_command(
        "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", f"--jobs={','.join(ids)}", f"--format={_SACCT_FIELDS}",
        timeout=COMMAND_TIMEOUT,
    )  # fmt: skip
    return parse_site_charge(answer.text, task) if answer.has_succeeded else None


def parse_site_charge(output: str, task: TrainTask) -> SiteCharge | None:
    """Return the charge of a training's jobs from rows of sacct (id, state, seconds, allocated TRES); None without rows.

    Pricing and predicted cost are those of `task`, the last one of the training.
    """
    rows = [line.split("|") for line in output.splitlines() if line.count("|") == 3]
    if not rows:
        return None
    # a requeued start keeps the state REQUEUED, so all states of a job are collected
    jobs_states: dict[str, set[str]] = {}
    for id_, state, _, _ in rows:
        jobs_states.setdefault(id_, set()).add(state.split(" ")[0].rstrip("+"))
    # jobs that were allocated nodes
    billed_jobs = [
        (int(seconds), parse_tres(tres).get("billing", 0.0))
        for _, _, seconds, tres in rows
        if seconds.isdigit() and int(seconds) and tres
    ]
    billing_hours = sum(seconds * billing for seconds, billing in billed_jobs) / 3600
    pricing, predicted = task.spec.pricing, task.prediction
    assert pricing.slurm_billing is not None
    factor = pricing.slurm_billing.usage_factor
    return SiteCharge(
        cost=billing_hours * factor * pricing.price,
        currency=pricing.currency,
        predicted=None if predicted is None else predicted.cost,
        jobs=len(billed_jobs),
        billing_hours=billing_hours,
        predicted_billing=compute_hourly_charge(pricing, task.training_nodes) / factor if factor else None,
        billings=tuple(sorted({int(billing) for _, billing in billed_jobs})),
        open=any(
            state in _OPEN_STATES for states in jobs_states.values() for state in (states - {"REQUEUED"} or states)
        ),
    )
