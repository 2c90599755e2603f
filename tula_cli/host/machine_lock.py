"""The measuring lock of a machine: probes of a user that share a GPU or a core run one at a time, in order of arrival.

Each waiting or measuring probe has a ticket: a numbered file that names its devices, with a lock (flock) that the
kernel releases when the process exits. A probe measures once no living ticket with a smaller number names one of its
devices. So probes run in order of arrival, no two probes can wait for each other, and dead ones are skipped at once. A
training has a ticket for which no probe waits: it only shows that the training uses these devices.
"""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tula_cli.words import format_number_ranges

TEMPORARY_FOLDER, RUNTIME_FOLDER = Path("/tmp"), Path("/run/user")
"""Parents of the ticket folder: RUNTIME_FOLDER/<uid> without XDG_RUNTIME_DIR, TEMPORARY_FOLDER as fallback, not TMPDIR."""
CORES_FOLDER = Path("/sys/devices/system/cpu")


class UntrustedFolder(OSError):
    """The folder of tickets cannot be trusted: it is not private to this user."""


@dataclass(frozen=True)
class Ticket:
    """A process of this user that measures, waits to measure, or trains."""

    number: int
    holder: str  # description of the job: "<job> of <run>"
    pid: int
    devices: tuple[str, ...]  # devices in use: "gpu <UUID or number>", "core <number>"
    measures: bool = True  # False for a training, for which no probe waits

    def conflicts_with(self, other: "Ticket") -> bool:
        """Return whether two tickets share a device; a ticket without devices (unreadable) may use any."""
        return not (self.devices and other.devices) or bool(set(self.devices) & set(other.devices))

    def __str__(self) -> str:
        return f"{self.holder} (process {self.pid}, {describe_devices(self.devices)})"


def list_core_devices() -> list[str]:
    """Return the cores that this process may use; hyper-threads of a core are represented by the first one."""
    cores = set()
    for number in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1):
        try:
            siblings = (CORES_FOLDER / f"cpu{number}/topology/thread_siblings_list").read_text(encoding="ascii")
            cores.add(int(siblings.replace("-", ",").split(",")[0]))
        except (OSError, ValueError):
            cores.add(number)
    return [f"core {number}" for number in sorted(cores)]


def describe_devices(devices: Collection[str]) -> str:
    """Return a description of devices: "GPU 0, GPU 1", "cores 0-3"."""
    gpus = [device.replace("gpu", "GPU", 1) for device in devices if device.startswith("gpu ")]
    cores = sorted(int(device.split()[1]) for device in devices if device.startswith("core "))
    return ", ".join([*gpus, *([f"core{'s' * (len(cores) > 1)} {format_number_ranges(cores)}"] if cores else [])])


def make_ticket_folder() -> Path:
    """Return the folder of tickets, created if missing: under XDG_RUNTIME_DIR, else in /tmp by user id.

    Raises:
        UntrustedFolder: the folder is a link, belongs to another user or is open to others.
        OSError: the folder cannot be created.
    """
    user = os.getuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or RUNTIME_FOLDER / str(user))
    if runtime.is_absolute() and _is_private_folder(runtime):
        with contextlib.suppress(OSError):
            return _make_private_folder(runtime / "tula")
    return _make_private_folder(TEMPORARY_FOLDER / f"tula-{user}")


def _is_private_folder(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _make_private_folder(path: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_private_folder(path):
        raise UntrustedFolder(f"{path} is not a private folder of this user (mode 0700)")
    return path


@contextlib.contextmanager
def _lock_ticket_numbers(folder: Path) -> Iterator[None]:
    """Prevent other processes from drawing tickets in the block, so that numbers rise in order of arrival."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _list_ticket_numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def list_living_tickets() -> list[Ticket]:
    """Return the tickets of living processes in order of arrival; empty if no folder is trusted or readable."""
    try:
        return _list_living_tickets(make_ticket_folder())
    except OSError:
        return []


def _list_living_tickets(folder: Path) -> list[Ticket]:
    """Return the tickets of living processes in a folder.

    Raises:
        OSError: the tickets cannot be read, so that living processes are unknown.
    """
    return [ticket for number in _list_ticket_numbers(folder) if (ticket := _read_ticket(folder, number)) is not None]


def _read_ticket(folder: Path, number: int) -> Ticket | None:
    """Return a ticket; None if its process has ended."""
    try:
        handle = os.open(folder / str(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        content = json.loads(os.pread(handle, 2**20, 0))
        return Ticket(**{**content, "devices": tuple(content["devices"])})
    except (ValueError, TypeError, KeyError):  # a ticket of another version of tula
        return Ticket(number, "another process", 0, ())
    finally:
        os.close(handle)


class TicketHolder:
    """A ticket of this process, with fields as of `Ticket`.

    Raises:
        OSError: no ticket can be drawn: the folder is not private to this user, or its file system allows no files or
            locks.
    """

    def __init__(self, holder: str, devices: Collection[str], *, measures: bool) -> None:
        self.holder, self.devices, self.measures = holder, tuple(devices), measures
        self._handle: int | None = None
        self._draw_number()

    def _draw_number(self) -> None:
        self.folder = make_ticket_folder()
        draft = self.folder / f".{os.getpid()}"
        with _lock_ticket_numbers(self.folder):
            living = {ticket.number for ticket in _list_living_tickets(self.folder)}
            for number in _list_ticket_numbers(self.folder):
                if number not in living:
                    (self.folder / str(number)).unlink(missing_ok=True)
            self.ticket = Ticket(max(living, default=0) + 1, self.holder, os.getpid(), self.devices, self.measures)
            draft.unlink(missing_ok=True)  # a draft of a process that was killed before the rename
            handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                os.write(handle, json.dumps(asdict(self.ticket)).encode())
                draft.rename(self._path)  # visible only once it is locked and complete
            except OSError:
                os.close(handle)
                draft.unlink(missing_ok=True)
                raise
            self._handle = handle

    @property
    def _path(self) -> Path:
        return self.folder / str(self.ticket.number)

    def list_probes_to_wait_for(self) -> list[Ticket]:
        """Return the measuring and waiting probes that this probe has to wait for.

        If the ticket was removed, e.g. with the session's folder at logout, a new one is drawn first.

        Raises:
            OSError: the tickets cannot be read or drawn.
        """
        if not self._is_ticket_file_intact():  # the session's folder was removed at logout: all draw new tickets
            self._close_handle()
            self._draw_number()
        return list_probes_ahead(self.ticket, _list_living_tickets(self.folder))

    def list_conflicting_trainings(self) -> list[Ticket]:
        """Return the tickets of trainings that now use a device of this ticket."""
        return [
            ticket for ticket in list_living_tickets() if not ticket.measures and ticket.conflicts_with(self.ticket)
        ]

    def close(self) -> None:
        """Remove the ticket and release its lock."""
        with contextlib.suppress(OSError):
            if self._is_ticket_file_intact():
                self._path.unlink()
        self._close_handle()

    def _is_ticket_file_intact(self) -> bool:
        """Return whether the file with this number is this ticket, and not one in a folder created anew."""
        try:
            return self._handle is not None and os.path.samestat(os.fstat(self._handle), self._path.stat())
        except OSError:
            return False

    def _close_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:  # close once: another file may get the same descriptor
            os.close(handle)


def list_probes_ahead(ticket: Ticket, queue: Collection[Ticket]) -> list[Ticket]:
    """Return the probes of a queue that come before a ticket and share a device with it."""
    return [
        queued
        for queued in queue
        if queued.measures and queued.number < ticket.number and queued.conflicts_with(ticket)
    ]


def describe_queue_position(holder: str) -> str:
    """Describe the probes that a probe waits for, and its position in the queue; empty if it does not wait."""
    queue = list_living_tickets()
    for ticket in queue:
        if ticket.holder == holder and ticket.measures and (probes := list_probes_ahead(ticket, queue)):
            return f"waiting for {probes[0]} to finish measuring; position {len(probes)} in the queue of this machine"
    return ""
