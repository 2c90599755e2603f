"""Kills this process at one of its file calls in a run directory: python imports this file first where its folder is in PYTHONPATH.

KILLING holds the run directories' folder, a folder of marks, a seed, and how many kills there are in all. Which call it is
follows from the seed, the number of kills before, and the rank; supervisors have none and are killed too.
"""

import contextlib
import os
import random
import signal
import sys

RUNS, MARKS, SEED, MOST = os.environ["KILLING"].split("|")
CALLS = ("open", "os.rename", "os.remove", "os.mkdir", "os.utime", "os.symlink", "fsync")  # open: to write
LATEST, LATEST_OF_SUPERVISORS = 40, 60  # the call at which to kill is one of so many

_left: dict[tuple[int, str], int] = {}


def _seen(call: str, subject: object) -> None:
    """Count a call of this process, and kill it at the one that was drawn."""
    if call not in CALLS or RUNS not in str(subject):
        return
    rank = os.environ.get("RANK", "none")
    me = (os.getpid(), rank)
    kills = len(os.listdir(MARKS))
    if kills >= int(MOST):
        return
    latest = LATEST_OF_SUPERVISORS if rank == "none" else LATEST
    remaining = _left.setdefault(me, random.Random(f"{SEED} {kills} {rank}").randrange(1, latest))
    _left[me] = remaining - 1
    if remaining > 1:
        return
    with contextlib.suppress(FileExistsError):
        mark = os.open(f"{MARKS}/{kills:02d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(mark, f"{rank} {call} {subject}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def _audited(call: str, arguments: tuple[object, ...]) -> None:
    if call == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
        return
    if arguments and call in CALLS:
        _seen(call, arguments[-1] if call == "os.rename" and len(arguments) == 2 else arguments[0])


_fsync = os.fsync


def _seen_fsync(file: int) -> None:
    _seen("fsync", os.readlink(f"/proc/self/fd/{file}"))
    _fsync(file)


os.fsync = _seen_fsync  # type: ignore[assignment]
sys.addaudithook(_audited)
