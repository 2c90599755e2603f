"""What became of a process, told from its words and its exit code: the one table of messages.

torchrun exits 1 whatever its workers exit with, allocators of different vendors and versions use different words, and
the ranks that did not fail report that a peer is gone. Callers keep the raw text: a class decides what happens next,
the text tells the user why.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tula_cli.host.device_faults import DEVICE_ERRORS, DEVICE_FAULTS, NO_GPU
from tula_cli.host.endings.outcomes import ENDINGS
from tula_cli.host.launchers import CHILD_KILLED, ENDED_BY_SIGNAL
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.jobs import Failure
from tula_cli.spec.resources import Cluster


@dataclass(frozen=True)
class FailurePattern:
    """Words that tell an outcome. Lines are matched with their rank prefixes cut off."""

    outcome: OutcomeClass
    pattern: re.Pattern[str]


def _pattern(outcome: OutcomeClass, *patterns: str) -> FailurePattern:
    return FailurePattern(outcome, re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.MULTILINE))


# A size that overflowed is a broken message or a bug, not a lack of memory.
_NOT_OVERFLOWN = r"(?![^\n]*more than 1EB)"

DECISIVE = (
    _pattern("diverged", r"^tula_cli\.errors\.Diverged\b"),
    # A failed assertion on the device leaves every later library call failing with words that look like memory.
    _pattern("user", r"device-side assert triggered", r"\bAssertion `[^\n]*` failed\.", r"\bhipErrorAssert\b"),
    # Before memory: ibverbs cannot lock enough of it, which is nothing that a batch or a loader could spare.
    _pattern("device_fault", *(words for _, forms in DEVICE_FAULTS for words in forms)),
    _pattern(
        "device_oom",
        rf"\btorch\.(?:cuda\.)?OutOfMemoryError\b{_NOT_OVERFLOWN}",
        rf"\b(?:CUDA|HIP|XPU|MPS)\b[^\n]{{0,40}}\bout of memory\b{_NOT_OVERFLOWN}",
        r"\b(?:Cuda|HIP) failure (?:\d+ )?'out of memory'",
        r"\bcudaErrorMemoryAllocation\b",
        r"\bCUDA_ERROR_OUT_OF_MEMORY\b",
        r"\bhipErrorOutOfMemory\b",
        r"\b(?:CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_ALLOC_FAILED\b",
        r"\brocblas_status_memory_error\b",
        r"\bmiopenStatusAllocFailed\b",
        r"\bCUFFT_ALLOC_FAILED\b",
        r"\bMIOpen\b[^\n]*(?:[Mm]emory not available|[Ff]ailed to allocate|out of memory)",
        r"\bFailed to CUDA (?:calloc|malloc)\b",
        r"\bCUDNN_STATUS_(?:INTERNAL_ERROR_)?(?:DEVICE|HOST)_ALLOCATION_FAILED\b",
        r"\bHSA_STATUS_ERROR_OUT_OF_RESOURCES\b",
        r"\b(?:UR_RESULT|ZE_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)\b",
    ),
    # Not about memory by their words, and yet what a nearly full device (or a tensor beyond 2^31 elements) gives: torch
    # tries every algorithm, each is refused its workspace, and the last refusal is what is told. A smaller batch either
    # cures it or shows the same words again, so they are taken for memory.
    _pattern(
        "device_oom",
        r"Unable to find a valid cuDNN algorithm to run convolution",
        r"\bunable to find an engine to execute this computation\b",
        r"\bCUDNN_STATUS_NOT_SUPPORTED\b",
        r"\bCUBLAS_STATUS_NOT_INITIALIZED\b[^\n]*\bcublasCreate\b",
        r"\bmiopenStatusUnknownError\b",
    ),
    _pattern(
        "host_oom",
        # oneDNN's words when memory for a kernel or its scratch space is refused.
        r"\bcould not (?:create|execute) a (?:primitive|memory)",
        # A thread's stack is the last straw: Python's words, and glibc's.
        r"\bcan't start new thread\b",
        r"\bfailed to register TLS destructor: out of memory\b",
        r"\bcannot allocate memory for thread-local data\b",
    ),
    _pattern(
        "host_oom",
        r"\bDefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
        r"^(?:numpy\.[\w.]*)?(?:_Array)?MemoryError\b",
        r"\bstd::bad_alloc\b",
        r"\bDataLoader worker \(pid(?:\(s\))? [^)]*\) (?:is killed by signal: (?:Killed|Bus error)|exited unexpectedly)",
        r"\binsufficient shared memory\b",
        r"\bunable to (?:open|write to|allocate|mmap)[^\n]*(?:shared memory|</torch_)",
        r"\bError while (?:creating|attaching to) shared memory segment\b",
        r"\b[Ff]ailed to extend /dev/shm/nccl-",
        r"\bDetected \d+ oom[-_]kill events?\b",
        r"\boom-kill\b",
        r"\btasks? [\d,-]+: Out Of Memory\b",
        r"\bexceeded memory limit \(\d+ > \d+\), being killed",
        r"\bOUT_OF_MEMORY\b",
        r"\bFailed to CUDA host alloc\b",
        r"\b(?:UR_RESULT|ZE_RESULT|PI)_ERROR_OUT_OF_HOST_MEMORY\b",
        r"\[Errno 12\]",
        r"\bCannot allocate memory\b",
    ),
    # After memory: a full device is told in many words, some of which are a library's own internal error.
    _pattern("device_error", *DEVICE_ERRORS),
    _pattern("port", r"\bEADDRINUSE\b", r"\bAddress already in use\b", r"\[Errno 98\]"),
    _pattern(
        "disk",
        r"\bNo space left on device\b",
        r"\bDisk quota exceeded\b",
        r"\[Errno (?:28|122)\]",
        r"\bPytorchStreamWriter failed writing\b",
        r"\binline_container\.cc:\d+\][^\n]*unexpected pos \d+ vs \d+",  # torch, which closes what it could not write
        r"^tula_cli\.errors\.DiskFull\b",
    ),
    # Of a file, whose name Python tells: a socket times out with the same number.
    _pattern(
        "storage",
        r"\[Errno (?:5|110|116|121)\] [^\n:]+: '",
        r"\b(?:Stale (?:NFS )?file handle|Remote I/O error)\b",
        r"^tula_cli\.errors\.StorageFailed\b",
    ),
    _pattern("signal", r"\bCANCELLED AT \S+ DUE TO\b"),
    # Only the job's line: a step is also cancelled where one of its tasks failed.
    _pattern("cancelled", r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ \*\*\*"),
)
"""Looked for in this order, before anything is read into a traceback."""

PEER = _pattern(
    "peer",
    r"\bgloo/transport/",
    r"\bGloo connect\w+ failed",
    r"\b(?:Read|Write|writev|readv) error \[[^\]]+\]:\d+",
    r"\bConnection closed by peer \[",
    r"\bTimed out waiting \d+ms for (?:recv|send) operation\b",
    r"\bWatchdog caught collective operation timeout\b",
    r"\bncclRemoteError\b",
    r"\bncclSystemError\b",
    r"\bProxy [Cc]all to rank \d+ failed\b",
    r"\bProcessGroupNCCL(?:'s)? watchdog (?:hang|got stuck)\b",
    r"\bNCCL communicator (?:was aborted|encountered error)",
    r"\bNCCL operations have failed or timed out\b",
    r"\bDistNetworkError\b",
    r"\bDistStoreError\b",
    r"\bRendezvous(?:Timeout|Connection|Closed)Error\b",
    r"\bTCPStore\b[^\n]*(?:Broken pipe|Connection (?:reset|refused)|timed out)",
    r"\bwait timeout after \d+ms\b",
    r"\bThe client socket has timed out\b",
    r"\b[Ff]ailed to recv, got 0 bytes",
    r"\bSocket Timeout\b",
)

SIGNAL = _pattern(
    "signal",
    *ENDED_BY_SIGNAL,
    r"\bSignalException: Process \d+ got signal\b",
    r"^KeyboardInterrupt\b",
    r"\bDUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)\b",
    r"\bNode failure on\b",
)

# Told by the process that started the ranks: it says that one failed, not why.
_MESSENGERS = re.compile(r"^(?:[\w.]*\.)?(?:ChildFailedError|SignalException|KeyboardInterrupt)\b")
_RANK_PREFIX = re.compile(r"^(?:\[(?:rank|default)\d+\]: ?|\d+: )+", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(r"^(?:[a-z_]\w*\.)*_?[A-Z]\w*(?::|$)")
_BARE_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)(?::|$)", re.MULTILINE)
_KILLED_BY_SHELL = re.compile(r"^(?:.*\s)?Killed(?:\s.*)?$", re.MULTILINE)


def classify(text: str, *, exit_code: int | None = None, device: str = "cuda") -> OutcomeClass:
    """Tell what a process died of.

    Args:
        text: what it wrote, or one exception with or without its traceback.
        exit_code: as the shell or subprocess gives it (137 and -9 both mean signal 9); None where it is not known.
        device: "cuda" or "cpu"; on the CPU the batch is in the host's memory, so every OOM is a device_oom.
    """
    found = _classify(_RANK_PREFIX.sub("", text), exit_code)
    return "device_oom" if found == "host_oom" and device == "cpu" else found


def _classify(text: str, exit_code: int | None) -> OutcomeClass:
    if decisive := _decisive(text):
        return decisive[0]
    if exit_code in (-9, 137) and _KILLED_BY_SHELL.search(text):
        return "host_oom"
    if any(_is_users(chain) for chain in _chains(text)):
        return "user"
    for failure in (PEER, SIGNAL):
        if failure.pattern.search(text):
            return failure.outcome
    if exit_code is not None and (exit_code < 0 or 128 < exit_code <= 192):
        return "signal"
    return "unknown"


def _decisive(text: str) -> tuple[OutcomeClass, re.Match[str]] | None:
    found = ((failure.outcome, failure.pattern.search(text)) for failure in DECISIVE)
    return next(((outcome, match) for outcome, match in found if match), None)


def telling_line(text: str) -> str:
    """Return the line of a text that tells of the device or the node; empty where none does."""
    found = _decisive(_RANK_PREFIX.sub("", text))
    if found is None or found[0] not in ("device_fault", "device_error"):
        return ""
    words, at = found[1].string, found[1].start()
    return words[words.rfind("\n", 0, at) + 1 :].split("\n", 1)[0].strip()


def _is_users(chain: list[str]) -> bool:
    """Return whether exceptions raised out of one another came from the user's code: none of them tells of a peer."""
    return bool(own := _own(chain)) and not any(PEER.pattern.search(error) for error in own)


def _own(chain: list[str]) -> list[str]:
    return [error for error in chain if not (_MESSENGERS.match(error) or CHILD_KILLED.match(error))]


def users_line(text: str) -> str:
    """Return the last exception of the user's code, rather than that a child of it has failed; empty where there is none."""
    chains = [_own(chain) for chain in _chains(_RANK_PREFIX.sub("", text)) if _is_users(chain)]
    lines = [error.split("\n", 1)[0].strip() for chain in chains for error in chain]
    return next((line for line in reversed(lines) if "CalledProcessError:" not in line), (lines or [""])[-1])


def _chains(text: str) -> Iterator[list[str]]:
    """Yield the exceptions of each traceback; those raised while another was handled together with it."""
    if _TRACEBACK not in text:
        yield from ([text[match.start() :].split("\n\n")[0]] for match in _BARE_EXCEPTION.finditer(text))
        return
    before, *blocks = text.split(_TRACEBACK)
    chain: list[str] = []
    for block in blocks:
        linked = any(words in before for words in _CHAINED)
        if chain and not linked:
            yield chain
        chain = chain if linked else []
        # An exception in a destructor is printed and forgotten; it ends nothing.
        if "Exception ignored in" not in before.rstrip().rsplit("\n", 1)[-1]:
            chain = [*chain, *_exception(block)]
        before = block
    yield chain


def _exception(block: str) -> list[str]:
    """Return the exception at the end of a traceback with the lines of its message, or nothing where it is cut off."""
    lines = block.split("\n")
    for number, line in enumerate(lines):
        if _EXCEPTION.match(line.rstrip()):
            message = "\n".join(lines[number : number + 8])
            return [message.split("\n\n")[0]]
    return []


_TOLD_TO_END = re.compile(r"\bSIGTERM\b|\bsignal:? 15\b|-15\b", re.IGNORECASE)


def root(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure that the others follow from, or None where there is none.

    Memory and faulty devices beat everything, and peers that report a lost rank come last; among equals the earliest wins.
    A rank that was told to end (SIGTERM) says no more than one that lost its peer.
    """
    return min(failures, key=lambda failure: (_severity(failure), failure.failed_at, failure.rank), default=None)


def _severity(failure: Failure) -> int:
    told_to_end = failure.outcome == "signal" and _TOLD_TO_END.search(failure.message)
    return ENDINGS["peer" if told_to_end else failure.outcome].severity


_OF_A_SCRIPT = "correct the script or its section and run the same command again; tula logs shows what the script wrote"


def advice(outcome: OutcomeClass, words: str = "", *, script: bool = False, cluster: Cluster | None = None) -> str:
    """Return one line: what the user can do about it, by what was told of it where that says more than its class.

    Args:
        outcome: its class.
        words: what was told of it.
        script: whether a script of the user's own ran, not tula's loop.
        cluster: where it ran; None: where tula's own schedulers start jobs.
    """
    if script and outcome == "user":
        return _OF_A_SCRIPT
    told = ENDINGS[outcome].advised(cluster or Cluster())
    return next((what_to_do for what_to_do, _ in _faults(words)), told) if outcome == "device_fault" else told


def no_gpu(words: str) -> bool:
    """Return whether what was told of a fault is that no GPU is to be seen, and no word of why."""
    return next(_faults(words), None) is NO_GPU


def _faults(words: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield those of `DEVICE_FAULTS` that the words tell of."""
    yield from (fault for fault in DEVICE_FAULTS if any(re.search(form, words, re.MULTILINE) for form in fault[1]))
