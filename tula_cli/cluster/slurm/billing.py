"""SLURM's billing: the cost of a job, the balance of an account, and the charges of finished jobs."""

import contextlib
import os
import pwd
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from tula_cli.cluster import messages
from tula_cli.cluster.slurm.allocations import (
    Node,
    compute_allocated_tres,
    list_requested_licenses,
    parse_config,
    parse_record,
)
from tula_cli.cluster.slurm.command import call_slurm
from tula_cli.cluster.slurm.site import ALL_PARTITIONS, ALL_QOS, COMMAND_TIMEOUT, Call, parse_first_fields
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SchedulerError, SpecError, TulaError
from tula_cli.models.tres import compute_billing, parse_flags, parse_tres, parse_weights
from tula_cli.plugins import suggest_nearest
from tula_cli.run.files import make_folder, read_record, write_record
from tula_cli.run.records.base import Record
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import Pricing, SiteBill
from tula_cli.spec.signature import compute_digest
from tula_cli.spec.slurm_options import Slurm
from tula_cli.words import format_count, format_number

# --- The bill of a job

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


def find_site_bill(spec: JobSpec, root: Path | None, *, ask: Ask | None = None) -> SiteBill:
    """Return the bill of SLURM for a job of this spec.

    Args:
        spec: job with pricing.kind billing, on one type of nodes.
        root: folder of the runs, in which the answer is cached for a day; None: no cache.
        ask: runs a command of SLURM and returns its output.

    Raises:
        SpecError: SLURM does not report its billing, and no answer is cached; or the job cannot be billed by SLURM.
    """
    spec = with_environment_defaults(spec)
    slurm = spec.cluster.slurm or Slurm()
    if spec.pricing.per_node is not None:
        factor = charge_factor(spec, qos=slurm.qos or "", partition=slurm.partition or "")
        return SiteBill(node=spec.pricing.per_node, charge_factor=factor, qos=slurm.qos or "", words="pricing.per_node")
    if spec.cluster.kind != "slurm":
        raise SpecError(
            f"pricing.kind billing: SLURM tells what a job is billed, and cluster.kind is {spec.cluster.kind}",
            "give what a whole node is billed: pricing.per_node",
        )
    path = None if root is None else root / FOLDER / f"bill-{_cache_key(spec)}.json"
    stored = None if path is None else read_record(path, _RECORD)
    now = time.time()
    if stored is not None and 0 <= now - stored.asked_at < KEPT_SECONDS:
        return stored.bill
    try:
        bill, unsure = ask_bill(spec, ask or ask_slurm)
    except SchedulerError as error:
        if stored is None:
            raise SpecError(
                f"pricing.kind billing: SLURM does not tell what it bills ({error.message})",
                "ask on a login node, or give what a whole node is billed: pricing.per_node",
            ) from None
        return _load_stored_bill(stored, "SLURM does not answer now")
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


def with_environment_defaults(spec: JobSpec) -> JobSpec:
    """Return a job with its unset options filled from sbatch's environment variables (e.g. SBATCH_ACCOUNT)."""
    if spec.cluster.kind != "slurm":
        return spec
    slurm = spec.cluster.slurm or Slurm()
    values = {
        name: value
        for name in ("partition", "account", "qos", "constraint")
        if not getattr(slurm, name) and (value := os.environ.get(f"SBATCH_{name.upper()}"))
    }
    cluster = spec.cluster.model_copy(update={"slurm": slurm.model_copy(update=values)})
    return spec.model_copy(update={"cluster": cluster}) if values else spec


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
            f"pricing.kind billing: no node of {where} gives what the job asks for",
            "scontrol show node tells Partitions, AvailableFeatures and Gres; pricing.per_node is without it",
        )
    qos, factor, unsure = find_usage_factor(spec, ask, config)
    times = {offer.partition: charge_factor(spec, qos=qos, partition=offer.partition) for offer in offers}
    dearest = max(offers, key=lambda offer: offer.node * times[offer.partition])
    least = min(offer.node for offer in offers)
    between = (
        f"; from {format_number(least)} on, by partition and kind of nodes: the dearest counts"
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
        words=f"{dearest.words}{by_qos}{between}{f'; {unsure}, and 1 is taken' if unsure else ''}",
    )
    return bill, unsure


def charge_factor(spec: JobSpec, *, qos: str, partition: str) -> float:
    """Return the site's factor on a bill beyond SLURM's (pricing.qos_factors, pricing.partition_factors)."""
    by_qos = {name.lower(): factor for name, factor in spec.pricing.qos_factors.items()}  # as SLURM reads their names
    by_partition = spec.pricing.partition_factors
    dearest = max(by_partition.get(name.strip(), 1.0) for name in partition.split(","))
    return by_qos.get(qos.lower(), 1.0) * dearest


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
        return named, 1.0, f"the usage factor of its QOS is not known ({error.message})"
    factors = {name.lower(): value for name, _, value in (row.partition("|") for row in rows)}
    try:
        return qos, float(factors[qos.lower()]), ""
    except (KeyError, ValueError):
        return qos, 1.0, f"the accounting tells no usage factor of QOS {qos}"


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


# --- The balance of an account
#
# `scontrol show assoc_mgr` tells it as the controller holds it; where a site shows that to no users, `sshare` does, without
# the QOS. Counts are minutes of each TRES (of memory MB-minutes).

_MAX_PARENT_ACCOUNTS = 20  # accounts above each other


@dataclass(frozen=True)
class TresLimit:
    """Limit and use of one TRES by an account, user or QOS, in TRES-minutes."""

    where: str  # "account proj"
    tres: str
    limit: float
    used: float
    running: float = 0.0  # that running jobs may still use, by their time limits

    @property
    def remaining(self) -> float:
        return max(0.0, self.limit - self.used - self.running)


@dataclass(frozen=True)
class Balance:
    """The balance of an account; unlimited if it has no limits and all limits could be read."""

    account: str
    limits: tuple[TresLimit, ...]
    unseen: str = ""  # why not all limits are known; empty where they are


def read_account_balance(spec: JobSpec, *, qos: str, ask: Ask) -> Balance:
    """Return the balance of the account of a job; errors are reported in the result, not raised.

    Args:
        spec: the job, of which account and partition are used.
        qos: QOS of the job.
        ask: runs a command of SLURM and returns its output.
    """
    spec = with_environment_defaults(spec)
    try:
        account = find_account(spec, ask)
    except SchedulerError as error:
        return Balance("", (), f"the accounting does not tell the account: {error.message}")
    if not account:
        return Balance("", (), "the accounting knows no default account of yours; set cluster.slurm.account")
    partition = (spec.cluster.slurm and spec.cluster.slurm.partition) or ""
    qos = qos.lower()
    limits, missing = _read_limits_of_controller(account, partition, ask)
    if missing and (shared := _read_limits_of_sshare(account, ask)) is not None:
        return Balance(account, tuple(shared), "" if not qos else f"of QOS {qos} nothing is shown")
    by_qos, hidden = ([], "") if missing else _read_limits_of_qos(qos, ask)
    return Balance(account, (*limits, *by_qos), missing or hidden)


# --- scontrol show assoc_mgr


def _read_limits_of_controller(account: str, partition: str, ask: Ask) -> tuple[list[TresLimit], str]:
    """Return the limits that the controller shows, and why some are missing (empty if none is)."""
    limits: list[TresLimit] = []
    above, name = [account], account
    while name and name != "root":
        try:
            blocks = list(parse_blocks(ask("scontrol", "show", "assoc_mgr", "flags=assoc", f"accounts={name}")))
        except SchedulerError as error:
            return limits, f"scontrol show assoc_mgr: {error.message}"
        blocks_of_account = [block for block in blocks if block.get("Account") == name]
        shared = next((block for block in blocks_of_account if not block.get("UserName")), None)
        if shared is None:
            return limits, f"account {name} is not shown (PrivateData?)"
        if name == account:
            for block in blocks_of_account:
                of_user = block.get("UserName", "").partition("(")[0] == get_user_name()
                if of_user and block.get("Partition", "") in ("", partition):
                    limits += parse_limits(block, f"{get_user_name()} in account {name}")
        limits += parse_limits(shared, f"account {name}")
        name = shared.get("ParentAccount", "").partition("(")[0]
        if name in above or len(above) > _MAX_PARENT_ACCOUNTS:
            break
        above.append(name)
    return limits, ""


def _read_limits_of_qos(qos: str, ask: Ask) -> tuple[list[TresLimit], str]:
    """Return the limits of a QOS, and why they are unknown (empty if they are known)."""
    if not qos:
        return [], ""
    try:
        output = ask("scontrol", "show", "assoc_mgr", "flags=qos", f"qos={qos}")
    except SchedulerError as error:
        return [], f"of QOS {qos} nothing is shown ({error.message})"
    blocks = [block for block in parse_blocks(output) if block.get("QOS", "").partition("(")[0] == qos]
    return (parse_limits(blocks[0], f"QOS {qos}"), "") if blocks else ([], f"of QOS {qos} nothing is shown")


def parse_blocks(text: str) -> Iterator[dict[str, str]]:
    """Yield the records of `scontrol show assoc_mgr`; each starts with a line of `ClusterName=` or `QOS=`."""
    block: dict[str, str] = {}
    for line in text.splitlines():
        if re.match(r"(ClusterName|QOS)=", line):
            if block:
                yield block
            block = {}
        if block or re.match(r"(ClusterName|QOS)=", line):
            for field_text in line.split():
                name, equals, value = field_text.partition("=")
                if equals:
                    block.setdefault(name, value)
    if block:
        yield block


def parse_limits(block: Mapping[str, str], where: str) -> list[TresLimit]:
    """Return the limits of a record: "GrpTRESMins=cpu=N(12),billing=600(34)" means 600 billing-minutes, 34 used."""
    running = {name: used for name, _, used in _parse_entries(block.get("GrpTRESRunMins", ""))}
    return [
        TresLimit(where, name, limit, used, running.get(name, 0.0))
        for name, limit, used in _parse_entries(block.get("GrpTRESMins", ""))
        if limit is not None
    ]


def _parse_entries(text: str) -> Iterator[tuple[str, float | None, float]]:
    """Yield name, limit (None if unlimited) and use of each TRES."""
    for name, limit, used in re.findall(r"([^,=()]+)=(N|\d+)\((\d+(?:\.\d+)?)\)", text):
        yield name.lower(), None if limit == "N" else float(limit), float(used)


# --- sshare


def _read_limits_of_sshare(account: str, ask: Ask) -> list[TresLimit] | None:
    """Return the limits that `sshare` shows for a user's association and its parents; None if it does not show them."""
    try:
        output = ask("sshare", "--noheader", "--parsable2", "--format=Account,User,GrpTRESMins,GrpTRESRaw,TRESRunMins")
    except SchedulerError:
        return None
    path: list[list[str]] = []  # from the root on
    for line in output.splitlines():
        fields = line.split("|")
        depth = len(line) - len(line.lstrip(" "))
        path = [*path[:depth], [field.strip() for field in fields]]
        if len(fields) == 5 and path[-1][:2] == [account, get_user_name()]:
            return [limit for fields in path for limit in _parse_limits_of_row(fields)]
    return None


def _parse_limits_of_row(fields: list[str]) -> Iterator[TresLimit]:
    account, name, limits, used, running = fields
    where = f"{name} in account {account}" if name else f"account {account}"
    spent, open_ = parse_tres(used), parse_tres(running)
    for tres, limit in parse_tres(limits).items():
        yield TresLimit(where, tres, limit, spent.get(tres, 0.0), open_.get(tres, 0.0))


# --- Charges of finished jobs

_FIELDS = "JobIDRaw,State,ElapsedRaw,AllocTRES"
_OPEN = ("RUNNING", "PENDING", "REQUEUED", "SUSPENDED", "COMPLETING")


@dataclass(frozen=True)
class BilledJobs:
    """The billing of finished jobs."""

    jobs: int  # that had nodes
    billing_hours: float  # before usage and charge factors
    hours: float  # of all of them, one after the other
    open: bool  # whether some still wait or run
    billings: tuple[int, ...] = ()  # of one hour, of each kind of job among them


def read_billed_jobs(ids: Sequence[str]) -> BilledJobs | None:
    """Return the billing of jobs so far; None if the accounting does not report it.

    Args:
        ids: ids of allocations.
    """
    if not ids:
        return None
    answer = call_slurm(
        "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", f"--jobs={','.join(ids)}", f"--format={_FIELDS}",
        patience=COMMAND_TIMEOUT,
    )  # fmt: skip
    return parse_billed(answer.text) if answer.ok else None


def parse_billed(output: str) -> BilledJobs | None:
    """Return the total billing of rows of sacct (id, state, seconds, allocated TRES); None if there are none."""
    rows = [line.split("|") for line in output.splitlines() if line.count("|") == 3]
    if not rows:
        return None
    jobs = [
        (int(seconds), parse_tres(tres).get("billing", 0.0))
        for _, _, seconds, tres in rows
        if seconds.isdigit() and tres
    ]
    jobs_states: dict[str, set[str]] = {}  # the start that was requeued stays REQUEUED in the accounting for ever
    for id_, state, _, _ in rows:
        jobs_states.setdefault(id_, set()).add(state.split(" ")[0].rstrip("+"))
    ran = [(seconds, billing) for seconds, billing in jobs if seconds]
    return BilledJobs(
        jobs=len(ran),
        billing_hours=sum(seconds * billing for seconds, billing in ran) / 3600,
        hours=sum(seconds for seconds, _ in ran) / 3600,
        open=any(state in _OPEN for states in jobs_states.values() for state in (states - {"REQUEUED"} or states)),
        billings=tuple(sorted({int(billing) for _, billing in ran})),
    )


def compute_price_of_billed(billed: BilledJobs, pricing: Pricing) -> float:
    """Return the price of billed jobs at a site, in the currency of the pricing."""
    billing = pricing.slurm_billing
    factor = 1.0 if billing is None else billing.usage_factor * billing.charge_factor
    return billed.billing_hours * factor * pricing.price


# --- Names of factors that SLURM does not know


@dataclass(frozen=True)
class UnknownFactor:
    """A name in pricing factors that does not exist at the site."""

    key: str  # of the spec
    kind: str  # QOS or partition
    name: str
    factor: float
    advice: str  # the nearest name, or all

    @property
    def message(self) -> str:
        return f"SLURM has no {self.kind} {self.name!r}, so the factor {self.factor:g} has no effect"


def list_unknown_factors(
    pricing: Pricing, *, qos: Collection[str] | None, partitions: Collection[str] | None
) -> Iterator[UnknownFactor]:
    """Yield the names in pricing factors that do not exist at the site.

    Args:
        pricing: pricing with the factors.
        qos: names of the QOS of the site; None: unknown, not checked.
        partitions: names of the partitions of the site; None: unknown, not checked.
    """
    any_case = {name.lower() for name in qos or ()}  # as SLURM reads names of QOS
    for name, factor in pricing.qos_factors.items():
        if qos and name.lower() not in any_case:
            yield _make_unknown_factor("qos_factors", "QOS", name, factor, qos)
    for name, factor in pricing.partition_factors.items():
        if partitions and name not in partitions:
            yield _make_unknown_factor("partition_factors", "partition", name, factor, partitions)


def _make_unknown_factor(key: str, kind: str, name: str, factor: float, known_names: Collection[str]) -> UnknownFactor:
    advice = suggest_nearest(name, known_names) or f"there are: {', '.join(known_names)}"
    return UnknownFactor(f"pricing.{key}", kind, name, factor, advice)


def warn_unknown_factors(spec: JobSpec, *, ask: Call = call_slurm) -> list[Diagnostic]:
    """Return warnings about unknown names in a job's pricing factors; empty if SLURM does not answer.

    Args:
        spec: the job; SLURM is queried only if it has factors.
        ask: function that runs a command.
    """
    pricing = spec.pricing
    if spec.cluster.kind != "slurm":
        return []
    unknown_factors = list_unknown_factors(
        pricing,
        qos=_read_known_names(ask, ALL_QOS) if pricing.qos_factors else None,
        partitions=_read_known_names(ask, ALL_PARTITIONS) if pricing.partition_factors else None,
    )
    return [
        messages.unknown_pricing_factor(
            key=unknown.key, kind=unknown.kind, name=unknown.name, factor=unknown.factor, advice=unknown.advice
        )
        for unknown in unknown_factors
    ]


def _read_known_names(ask: Call, command: tuple[str, ...]) -> tuple[str, ...] | None:
    answer = ask(*command, patience=COMMAND_TIMEOUT)
    return parse_first_fields(answer.text) if answer.ok else None
