"""Kill this process at one of its file calls in a run directory; Python imports this file at start if its folder is in PYTHONPATH.

KILLING contains the folder of the run directories, a folder of marks, a seed, and the total number of kills, separated by `|`.
The seed, the number of earlier kills and the rank determine the call; supervisors, which have no rank, are killed as well.
"""

import contextlib
import os
import random
import signal
import sys

RUNS, MARKS, SEED, MOST = os.environ["KILLING"].split("|")
CALLS = ("open", "os.rename", "os.remove", "os.mkdir", "os.utime", "os.symlink", "fsync")  # open: for writing
LATEST, LATEST_OF_SUPERVISORS = 40, 60  # the process is killed at one of this many calls

_left: dict[tuple[int, str], int] = {}


def _seen(call: str, subject: object) -> None:
    """Count a call of this process, and kill the process at the drawn call."""
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
