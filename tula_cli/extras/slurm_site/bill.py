"""The bill of a job by SLURM's TRES weights, and the usage factor of its QOS."""

import contextlib
import os
import pwd
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from tula_cli.cluster.slurm.command import call_slurm, parse_record
from tula_cli.cluster.slurm.site_factors import compute_charge_factor
from tula_cli.errors import SchedulerError, SpecError, TulaError
from tula_cli.extras.slurm_site.allocations import (
    Node,
    compute_allocated_tres,
    list_requested_licenses,
    parse_config,
)
from tula_cli.models.tres import compute_billing, parse_flags, parse_weights
from tula_cli.run.files import make_folder, read_record, write_record
from tula_cli.run.records.base import Record
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import SiteBill
from tula_cli.spec.signature import compute_digest
from tula_cli.spec.slurm_options import Slurm
from tula_cli.words import format_count, format_number

FOLDER = ".site"
"""Folder of cached answers, in the folder of the runs."""
KEPT_SECONDS = 86400.0
"""Seconds for which a cached answer is valid; weights and nodes may change in a maintenance."""
_PATIENCE = 30.0  # seconds; a large site prints megabytes of nodes


class StoredBill(Record):
    """A cached bill, with the time of the query."""

    bill: SiteBill
    asked_at: float  # Unix time


_RECORD: TypeAdapter[StoredBill] = TypeAdapter(StoredBill)
Ask = Callable[..., str]


def find_site_bill(spec: JobSpec, root: Path | None, *, ask: Ask) -> SiteBill:
    """Return the bill of SLURM for a job of this spec.

    Args:
        spec: job with pricing.kind billing, on one type of nodes.
        root: folder of the runs, in which the answer is cached for a day; None: no cache.
        ask: runs a command of SLURM and returns its output.

    Raises:
        SpecError: SLURM does not report its billing, and no answer is cached; or the job cannot be billed by SLURM.
    """
    path = None if root is None else root / FOLDER / f"bill-{_cache_key(spec)}.json"
    stored = None if path is None else read_record(path, _RECORD)
    now = time.time()
    if stored is not None and 0 <= now - stored.asked_at < KEPT_SECONDS:
        return stored.bill
    try:
        bill, unsure = ask_bill(spec, ask)
    except SchedulerError as error:
        if stored is None:
            raise SpecError(
                f"pricing.kind billing: SLURM does not report its billing ({error.message})",
                "run tula on a login node, or set pricing.per_node to the billing of a whole node",
            ) from None
        return _load_stored_bill(stored, "SLURM does not answer")
    if unsure:  # not kept: nothing would ask again for a day
        return bill if stored is None else _load_stored_bill(stored, unsure)
    if path is not None:
        with contextlib.suppress(TulaError, OSError):  # another user's folder, a full disk: it is asked again
            make_folder(path.parent)
            path.parent.chmod(0o700)  # an older tula made it by the umask
            write_record(path, StoredBill(bill=bill, asked_at=now))
    return bill


def _load_stored_bill(stored: StoredBill, why: str) -> SiteBill:
    day = time.strftime("%Y-%m-%d", time.localtime(stored.asked_at))
    return replace(stored.bill, words=f"{stored.bill.words}; as of {day}, {why}")


def _cache_key(spec: JobSpec) -> str:
    options = (spec.cluster.slurm or Slurm()).model_dump(
        mode="json", include={"partition", "account", "qos", "constraint", "memory", "cpus_per_task", "gpus", "gpu_type", "exclusive", "extra", "launcher"}
    )  # fmt: skip
    return compute_digest({
        "slurm": options, "gpus": spec.cluster.gpus_per_node, "device": spec.cluster.device, "one": spec.task_per_node,
        "site": os.environ.get("SLURM_CONF", ""),
        "factors": [spec.pricing.qos_factors, spec.pricing.partition_factors],
    })  # fmt: skip


def ask_slurm(*command: str) -> str:
    """Run a command of SLURM and return its output.

    Raises:
        SchedulerError: the command fails or does not answer.
    """
    answer = call_slurm(*command, patience=_PATIENCE)
    if not answer.ok:
        raise SchedulerError(answer.complaint.splitlines()[-1] if answer.complaint else f"{command[0]} tells nothing")
    return answer.text


@dataclass(frozen=True)
class _BillOption:
    """The billing of a job on one kind of node of a partition."""

    partition: str
    node: float
    job: float
    tres: dict[str, float]
    words: str


def ask_bill(spec: JobSpec, ask: Ask) -> tuple[SiteBill, str]:
    """Query SLURM for the bill of a job, for the most expensive of its possible partitions and kinds of nodes.

    Args:
        spec: the job.
        ask: runs a command and returns its output.

    Returns:
        The bill, and why it is uncertain (empty if it is certain).

    Raises:
        SchedulerError: SLURM does not answer.
        SpecError: no node of the partition offers the resources that the job requests.
    """
    config = parse_config(ask("scontrol", "show", "config"))
    records = [parse_record(line) for line in ask("scontrol", "--oneliner", "show", "partition").splitlines() if line]
    nodes = [
        Node.from_record(parse_record(line))
        for line in ask("scontrol", "--oneliner", "show", "node").splitlines()
        if line
    ]
    offers = [
        offer
        for record in _list_partitions_of_job(spec, records)
        for offer in _list_bill_options(spec, record, _list_distinct_kinds(nodes), config)
    ]
    if not offers:
        slurm = spec.cluster.slurm or Slurm()
        where = f"partition {slurm.partition}" if slurm.partition else "the default partition"
        raise SpecError(
            f"pricing.kind billing: no node of {where} has the resources that the job requests",
            "compare Partitions, AvailableFeatures and Gres in scontrol show node, or set pricing.per_node",
        )
    qos, factor, unsure = find_usage_factor(spec, ask, config)
    times = {offer.partition: compute_charge_factor(spec, qos=qos, partition=offer.partition) for offer in offers}
    dearest = max(offers, key=lambda offer: offer.node * times[offer.partition])
    least = min(offer.node for offer in offers)
    between = (
        f"; at least {format_number(least)}, depending on partition and node type; the most expensive is used"
        if least < dearest.node
        else ""
    )
    by_qos = "" if factor == 1 else f", QOS {qos} counts {factor:g} times"
    bill = SiteBill(
        node=dearest.node,
        job=dearest.job,
        usage_factor=factor,
        charge_factor=times[dearest.partition],
        qos=qos,
        tres=dearest.tres,
        words=f"{dearest.words}{by_qos}{between}{f'; {unsure}, so 1 is assumed' if unsure else ''}",
    )
    return bill, unsure


def _list_partitions_of_job(spec: JobSpec, records: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    named = (spec.cluster.slurm or Slurm()).partition
    if named:
        return [record for record in records if record.get("PartitionName") in named.split(",")]
    return [record for record in records if record.get("Default") == "YES"]


def _list_distinct_kinds(nodes: Sequence[Node]) -> list[Node]:
    """Return one node of each kind."""
    kinds = {(tuple(sorted(n.tres.items())), n.partitions, n.features, n.gres, n.threads): n for n in nodes}
    return list(kinds.values())


def _list_bill_options(
    spec: JobSpec, partition: dict[str, str], nodes: Sequence[Node], config: dict[str, str]
) -> list[_BillOption]:
    name, text = partition["PartitionName"], partition.get("TRESBillingWeights", "")
    weights, count = parse_weights(text), parse_flags(config.get("PriorityFlags", ""))
    of_job = list_requested_licenses(spec)
    options = []
    for node in nodes:
        if node.can_run(spec, name):
            tres = compute_allocated_tres(spec, node, partition, config)
            alone = compute_billing(tres, weights, count)
            job = compute_billing({**tres, **of_job}, weights, count) - alone
            how = {
                "sum": "summed",
                "max": "the largest (MAX_TRES)",
                "max_gres": "the largest, and GRES (MAX_TRES_GRES)",
            }
            by = f"{text}, {how[count]}" if weights else "no TRESBillingWeights: its CPUs"
            options.append(_BillOption(name, alone, job, tres, f"{name}: {by}; of a node {_describe_tres(tres)}"))
    return options


def _describe_tres(tres: dict[str, float]) -> str:
    shown = [f"{tres['cpu']:g} CPUs", f"{tres['mem']:g} MB"]
    gpus = tres.get("gres/gpu", 0.0)
    return ", ".join([*shown, *([format_count(int(gpus), "GPU")] if gpus else [])])


# --- QOS


def find_usage_factor(spec: JobSpec, ask: Ask, config: Mapping[str, str]) -> tuple[str, float, str]:
    """Return the QOS of a job, its UsageFactor (1 if unknown or without accounting), and why it is unknown or empty."""
    if config.get("AccountingStorageType", "").endswith(("/none", "(null)")):
        return "", 1.0, ""
    named = (spec.cluster.slurm or Slurm()).qos or ""
    try:
        qos = named or find_default_qos(spec, ask, config)
        rows = ask("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,UsageFactor").splitlines()
    except SchedulerError as error:
        return named, 1.0, f"the usage factor of its QOS is unknown ({error.message})"
    factors = {name.lower(): value for name, _, value in (row.partition("|") for row in rows)}
    try:
        return qos, float(factors[qos.lower()]), ""
    except (KeyError, ValueError):
        return qos, 1.0, f"the accounting reports no usage factor of QOS {qos}"


def find_default_qos(spec: JobSpec, ask: Ask, config: Mapping[str, str]) -> str:
    """Return the QOS of a job that names none."""
    cluster = config.get("ClusterName", "")  # one accounting may hold several
    output = ask(
        "sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={get_user_name()}",
        f"account={find_account(spec, ask)}", *([f"cluster={cluster}"] if cluster else []), "format=DefaultQOS,QOS,Partition",
    )  # fmt: skip
    partitions = ((spec.cluster.slurm or Slurm()).partition or "").split(",")
    for default, allowed, partition in (line.split("|") for line in output.splitlines() if line.count("|") == 2):
        if (default or allowed) and partition in ("", *partitions):
            names = allowed.split(",")
            return default or ("normal" if "normal" in names or len(names) > 1 else names[0])
    return "normal"


def find_account(spec: JobSpec, ask: Ask) -> str:
    """Return the account that a job is charged to; a name from the spec in lower case, as in the accounting."""
    named = (spec.cluster.slurm or Slurm()).account
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
