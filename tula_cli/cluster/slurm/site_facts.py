"""What the scheduler tells of a site beyond its partitions: QOS, accounts, features of nodes, reservations, and who is silent."""

import os
import pwd
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tula_cli.cluster.slurm.command import CommandResult, call_slurm
from tula_cli.cluster.slurm.partitions import COMMAND_TIMEOUT, Partition, ask_partitions, parse_minutes
from tula_cli.cluster.slurm.queue import RESERVATIONS, maintenance_windows

Call = Callable[..., CommandResult]
ALL_QOS = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,MaxWall")
"""What tells the QOS of a site, a line each, the name first."""
ALL_PARTITIONS = ("sinfo", "--all", "--noheader", "--format=%R")
"""What tells the names of all partitions, also of those that are hidden, or not for this user."""


@dataclass(frozen=True)
class SiteFacts:
    """What is known of a site; None is what nothing tells."""

    partitions: tuple[Partition, ...]
    silent: Mapping[str, str]  # command -> what it complains of: it is not there, hangs, or fails
    qos: Mapping[str, int | None] | None = None  # name -> the longest job, minutes; None: as long as one likes
    accounts: tuple[str, ...] | None = None  # all of the site's
    features: Mapping[str, frozenset[str]] = field(default_factory=dict)  # of the nodes, by partition
    reservations: tuple[str, ...] | None = None
    maintenance: tuple[tuple[float, float], ...] = ()  # begin and end (Unix times) of the windows, the first one first
    all_partitions: tuple[str, ...] | None = None  # by name, also those that are hidden, or not for this user

    @property
    def answers(self) -> bool:
        """Whether the controller answers at all."""
        return bool(self.partitions)


def ask_site_facts(ask: Call = call_slurm) -> SiteFacts:
    """Ask every command of SLURM that tula uses, each with little patience; nothing is submitted.

    Args:
        ask: what calls a command; tests give one of their own.
    """
    silent: dict[str, str] = {}

    def told(*command: str) -> str | None:
        answer = ask(*command, patience=COMMAND_TIMEOUT)
        if not answer.ok:
            silent.setdefault(command[0], answer.complaint.splitlines()[-1] if answer.complaint else "it says nothing")
        return answer.text if answer.ok else None

    told("sbatch", "--version")
    told("squeue", "--noheader", f"--user={pwd.getpwuid(os.getuid()).pw_name}", "--format=%i")
    told("sacct", "--noheader", "--parsable2", "--allocations", "--starttime=now", "--format=JobID")
    partitions = ask_partitions(lambda *command: told(*command) or "")
    if not partitions:
        silent.setdefault("sinfo", "it tells of no partition")
        return SiteFacts((), silent)
    return SiteFacts(
        partitions,
        silent,
        qos=_parse_qos(told(*ALL_QOS)),
        accounts=first_fields(told("sacctmgr", "--noheader", "--parsable2", "show", "account", "format=Account")),
        features=_parse_features(told("sinfo", "--noheader", "--exact", "--format=%P|%f") or ""),
        reservations=_parse_reservations(reservations := told(*RESERVATIONS)),
        maintenance=tuple(maintenance_windows(reservations or "")),
        all_partitions=first_fields(told(*ALL_PARTITIONS)),
    )


def _parse_qos(text: str | None) -> dict[str, int | None] | None:
    rows = [line.split("|") for line in (text or "").splitlines() if "|" in line]
    return {name: parse_minutes(limit) for name, limit, *_ in rows if name} or None


def first_fields(text: str | None) -> tuple[str, ...] | None:
    """Return the first field of each line, each once; None where there is none."""
    return (
        tuple(dict.fromkeys(name for line in (text or "").splitlines() if (name := line.split("|")[0].strip()))) or None
    )


def _parse_features(text: str) -> dict[str, frozenset[str]]:
    features_by_partition: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        name, _, feature_text = line.strip().partition("|")
        features = frozenset(
            feature.strip() for feature in feature_text.split(",") if feature.strip() not in ("", "(null)")
        )
        features_by_partition[name.rstrip("*")] = features_by_partition.get(name.rstrip("*"), frozenset()) | features
    return features_by_partition


def _parse_reservations(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    fields = [field for line in text.splitlines() for field in line.split()]
    return tuple(field.removeprefix("ReservationName=") for field in fields if field.startswith("ReservationName="))
