"""Classification of the texts of other programs (torch, drivers, NCCL, launchers, SLURM, Python) by what they report.

No other module searches messages; all others use the fields of a `Failure`.
"""

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import FaultName

# --- Messages of drivers about faulty devices and nodes, and about kernels that fail

_RUNTIME_ERROR_START = (
    r"(?:\b(?:CUDA|Cuda|HIP|XPU)(?: runtime| driver)? (?:error|failure)\b|\bTriton Error \[\w+\])[^\n]{0,40}?"
)
"""Start of messages in which torch, Triton, NCCL and RCCL report an error of the device runtime."""

_FAULT_PATTERNS: dict[FaultName, tuple[str, ...]] = {
    "memory": (r"(?i:\buncorrectable (?:ECC|memory) error\b)", r"(?i:\bECC_?UNCORRECTABLE\b)", r"\bcudaErrorECCUncorrectable\b",
         r"\bhipErrorECCNotCorrectable\b", r"\bCUDA_ERROR_ECC_UNCORRECTABLE\b",
         r"\[Errno 133\]|\bMemory page has hardware error\b"),
    "link": (r"\buncorrectable NVLink error\b", r"\bInvalid access of peer GPU memory over nvlink or a hardware error\b",
         r"(?i:\b(?:cudaError|CUDA_ERROR_)Nvlink_?Uncorrectable\b)"),
    "gpu_lost": (
        # Xids of the hardware and its link; Xids that a program causes are in DEVICE_ERRORS.
         r"\bXid\b[^\n]{0,40}: ?(?:46|48|54|6[1-4]|74|79|9[245]|1(?:09|10|19|2[0-4]|3[67]|4[0-9]|5[0-9]))\b",
         r"\bfallen off the bus\b", r"\bGPU is lost\b", r"(?:\b|_)GPU_IS_LOST\b", _RUNTIME_ERROR_START + r"\bunknown error\b",
         r"\bCUDA unknown error\b", r"\bNVML(?:Error)?\b[^\n]{0,30}\bUnknown Error\b", r"\bNVMLError_(?:Unknown|GpuIsLost|GPU_IS_LOST)\b",
         r"\bUnable to determine the device handle for \w+\b",
         r"\bGPU requires (?:a )?reset\b", r"\bamdgpu\b[^\n]*\b(?:GPU reset|ring \w+ timeout|uncorrectable)\b",
         _RUNTIME_ERROR_START + r"\boperation cannot be performed in the present state\b",
         r"\b(?:cudaErrorIllegalState|hipErrorIllegalState|CUDA_ERROR_ILLEGAL_STATE)\b",
         r"\b(?:cudaErrorUnknown|hipErrorUnknown|CUDA_ERROR_UNKNOWN)\b"),
    "gpu_busy": (r"\bdevice(?:\(s\)|s)? (?:is/are|is|are) busy or unavailable\b", r"\bcudaErrorDevices?Unavailable\b",
         r"\bCUDA_ERROR_DEVICE_UNAVAILABLE\b"),
    "fabric": (r"\bError 802:", r"\bsystem not yet initialized\b",
         r"\b(?:cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY)\b"),
    "driver": (r"\bFailed to initialize NVML\b", r"\bcouldn't communicate with the NVIDIA driver\b", r"\b(?:amdgpu not found in modules|ROCk module is NOT loaded)\b", r"\bNVMLError_(?:DriverNotLoaded|LibRmVersionMismatch)\b",
         r"\bError 80[34]:", r"\bforward compatibility was attempted on non supported HW\b",
         r"\b(?:cudaErrorCompatNotSupportedOnDevice|CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE)\b", r"\bunsupported display driver / cuda driver combination\b",
         r"\b(?:cudaErrorSystemDriverMismatch|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)\b",
         r"\bDriver/library version mismatch\b", r"\bnvml\w+\(\)[^\n]*\bDriver Not Loaded\b",
         r"^RuntimeError: (?:CUDA )?[Uu]nexpected error from cudaGetDeviceCount\(\)(?![^\n]*\bError 2:)"),
    "mps": (r"\bMPS (?:server|client|control daemon)\b[^\n]*(?:fail|not ready|terminat|exceed|reached|(?<!without )error)",
         r"\bMPS RPC\b[^\n]*fail",
         r"\bhardware resources required to support (?:MPS client|device)\b[^\n]*exhausted\b", r"\bcudaErrorMps\w+", r"\bCUDA_ERROR_MPS_\w+"),
    "locked_memory": (r"\bibv_\w+[^\n]*(?:Cannot allocate memory|ENOMEM|\b(?:errno|error):? 12\b)",
         # Not the limit's name alone: `ulimit -a` prints it, and libibverbs only warns about it.
         r"\b(?:failed|ERROR)\b[^\n]*\b(?:max locked memory|RLIMIT_MEMLOCK)\b"),
    # Last, because a message of the driver about the reason takes precedence.
    "no_gpu": (r"\bNo (?:CUDA|HIP) GPUs are available\b", r"\bFound no NVIDIA driver on your system\b", r"\bno (?:CUDA|ROCm)-capable device is detected\b",
     r"\b(?:cudaErrorNoDevice|hipErrorNoDevice|CUDA_ERROR_NO_DEVICE)\b", r"^(?:tula_cli\.errors\.)?NoGpu\b"),
}  # fmt: skip
"""Faults of a node or a device, not of the program, with patterns of the vendors' messages; the first match counts."""

DEVICE_ERRORS = (
    r"\b(?:an )?illegal memory access was encountered\b",
    r"\b(?:cudaErrorIllegalAddress|hipErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS)\b",
    r"\bunspecified launch failure\b",
    r"\b(?:cudaErrorLaunchFailure|hipErrorLaunchFailure|CUDA_ERROR_LAUNCH_FAILED)\b",
    _RUNTIME_ERROR_START
    + r"(?:\bmisaligned address|\ban illegal instruction was encountered|\binvalid program counter)",
    r"\bhardware stack error\b",
    r"\b(?:Memory access fault|HW Exception) by GPU\b",
    r"\bHSA_STATUS_ERROR_(?:MEMORY_APERTURE_VIOLATION|MEMORY_FAULT|ILLEGAL_INSTRUCTION|EXCEPTION)\b",
    r"\bXid\b[^\n]{0,40}: ?(?:13|31|43|45)\b",
    _RUNTIME_ERROR_START
    + r"\b(?:the launch timed out and was terminated|operation not supported on global/shared address space)",
    _RUNTIME_ERROR_START + r"\binvalid device ordinal\b",
    r"\b(?:CUDNN|CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE)_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED)(?:_[A-Z]+)*\b",
    r"\bCUFFT_(?:INTERNAL_ERROR|EXEC_FAILED)\b",
    r"\bcuBLAS(?:Lt)? Error: (?:an internal operation failed|the GPU program failed to execute)",
    r"\bUR_RESULT_ERROR_DEVICE_LOST\b",
)
"""Errors caused by a faulty kernel or by a faulty device; only another attempt distinguishes them."""


# --- Messages of launchers about a child process that a signal killed

_SIGNAL_IN_PYTHON = r"\bdied with (?:<Signals\.SIG\w+: |unknown signal )(\d+)"  # a CalledProcessError
_SIGNAL_BY_NUMBER = (
    r"\bexit ?code *: *-(\d+)",
    r"\bSignal (\d+) \(SIG[A-Z]+\) received by PID\b",
    r"\bexits? with return ?code *=+ *-(\d+)",
    _SIGNAL_IN_PYTHON,
    r"\bexited on signal (\d+)\b",  # mpirun
    r"\bWITH THE EXIT STRING: [^\n]*\(signal (\d+)\)",  # MPICH
)
_SIGNAL_BY_DESCRIPTION = {str(signal.strsignal(number)): number.value for number in signal.Signals}
_DESCRIBED_SIGNAL = rf"^srun: error: \S+: tasks? [\d,-]+: ({'|'.join(map(re.escape, _SIGNAL_BY_DESCRIPTION))})\b"
_SIGNAL_IN_SHELL_STATUS = r"\breturned non-zero exit status 1(?:29|[3-8]\d|9[0-2])\b"  # 128 and the signal
ENDED_BY_SIGNAL = (*_SIGNAL_BY_NUMBER, _DESCRIBED_SIGNAL, _SIGNAL_IN_SHELL_STATUS)
"""Patterns of messages of launchers about a child process that a signal killed."""

CHILD_KILLED = re.compile(
    rf"^(?:subprocess\.)?CalledProcessError: [\s\S]*?(?:{_SIGNAL_IN_SHELL_STATUS}|{_SIGNAL_IN_PYTHON})", re.MULTILINE
)
"""An exception that only reports that a signal killed a child process."""

_FOLLOW_UP_SIGNALS = ("SIGTERM", "SIGABRT")
"""Signals by which launchers terminate the other ranks, and torch a process that lost a peer: not the root cause."""

_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}
_SIGNAL_NAME = re.compile(r"\bSIG[A-Z]{2,}\b")
_CRASH_PATTERN = re.compile(r"exitcode *: *-(?:11|6)\b")  # SIGSEGV, SIGABRT
_UNRELATED_LINE_PATTERN = re.compile(
    r"\b\w*Warning: |\bwarnings\.warn\(|\bresource_tracker\b|^\[?[IW]\d{4}[ :]|^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} epoch "
)
"""Lines that are unrelated to an exit, though they may be the last ones, such as tula's own lines of progress."""


def find_kill_signal(text: str) -> str:
    """Return the signal that killed a rank first, as reported by a launcher ("SIGKILL"); empty if none is."""
    return next((name for name in _list_signals(text) if name not in _FOLLOW_UP_SIGNALS), "")


def find_signal(text: str, exit_code: int | None = None) -> str:
    """Return the signal that ended a process, from its exit code or else from a launcher's text; empty if none did."""
    number = _get_signal_number(exit_code)
    if number in _SIGNAL_NAMES:
        return _SIGNAL_NAMES[number]
    named = [name for name in _SIGNAL_NAME.findall(text) if name in _SIGNAL_NAMES.values()]
    return find_kill_signal(text) or next(iter([*_list_signals(text), *named]), "")


def _list_signals(text: str) -> list[str]:
    numbers = [int(number) for pattern in _SIGNAL_BY_NUMBER for number in re.findall(pattern, text)]
    numbers += [_SIGNAL_BY_DESCRIPTION[words] for words in re.findall(_DESCRIBED_SIGNAL, text, re.MULTILINE)]
    numbers += [int(status[-3:]) - 128 for status in re.findall(_SIGNAL_IN_SHELL_STATUS, text)]
    return [_SIGNAL_NAMES[number] for number in numbers if number in _SIGNAL_NAMES]


def has_crashed(summary: str, exit_code: int) -> bool:
    """Return whether native code ended a process (SIGSEGV, SIGABRT), by its exit code or torchrun's summary."""
    return bool(_CRASH_PATTERN.search(summary)) or exit_code in (-signal.SIGSEGV, -signal.SIGABRT)


def is_thread_refused(text: str) -> bool:
    """Return whether Python could not start a thread."""
    return "can't start new thread" in text


def find_launcher_summary(text: str) -> str:
    """Return torchrun's summary of the rank that failed first; the whole text without one."""
    return text.rpartition("Root Cause")[2]


def find_most_informative_line(text: str) -> str:
    """Return torchrun's exit codes, else a message with the signal that a launcher names, else the last useful line."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" =-~^")]
    if exit_lines := [line for line in lines if line.startswith(("exitcode", "rank"))]:
        return ", ".join(" ".join(line.split()) for line in exit_lines)
    if name := find_kill_signal(text):
        return f"the launcher reports that a rank was killed by {name}"
    useful = [line for line in lines if not _UNRELATED_LINE_PATTERN.search(line)]
    return (useful or lines or ["no output"])[-1]


# --- Classification of a process by its messages and its exit code
#
# torchrun exits 1 whatever its workers exit with, allocators of different vendors and versions use different words, and
# the ranks that did not fail report that a peer is gone. Callers keep the raw text: a class decides what happens next,
# the text tells the user why.

Scope = Literal["log", "error", "system error", "traceback"]
"""The part of a text in which a row of the table is searched.

    log: anywhere.
    error: the exceptions that ended the process, first cause first; without one, the last lines outside tracebacks.
    system error: the same without exceptions about values (ValueError, KeyError ...) and those of network clients.
    traceback: the exceptions that ended the process with the frames above them.
"""


@dataclass(frozen=True)
class FailurePattern:
    """One row of `FAILURE_PATTERNS`: a pattern, the part of a text in which it is searched, and the class of failure.

    Lines are matched without their rank prefixes.
    """

    outcome: OutcomeClass
    pattern: re.Pattern[str]
    scope: Scope = "log"


def _make_pattern(outcome: OutcomeClass, *patterns: str, scope: Scope = "log") -> FailurePattern:
    alternatives = "|".join(f"(?:{pattern})" for pattern in patterns)
    return FailurePattern(outcome, re.compile(alternatives, re.MULTILINE), scope)


def _make_errno_pattern(numbers: Iterable[int]) -> str:
    """Return a pattern for system errors by number, in the formats of Python, HDF5, Arrow, c10d, Rust and torch."""
    alternatives = "|".join(map(str, numbers))
    return rf"\[[Ee]rrno (?:{alternatives})\]|\berrno = (?:{alternatives})\b|\(errno: (?:{alternatives}) - |\(os error (?:{alternatives})\)"


def _make_texts_pattern(*texts: str) -> str:
    """Return a pattern for error texts at the end of a phrase: before a name, a bracketed number or a line end."""
    return rf"\b(?:{'|'.join(texts)})(?=\s*(?:$|[\[(:;'\",.]))"


_STORAGE_ERRNOS = {
    5: "Input/output error",
    30: "Read-only file system",
    67: "Link has been severed",
    70: "Communication error on send",
    107: "Transport endpoint is not connected",
    108: "Cannot send after transport endpoint shutdown",
    112: "Host is down",
    121: "Remote I/O error",
    116: "Stale (?:NFS )?file handle",
    37: "No locks available",
    16: "Device or resource busy",
    6: "No such device or address",
    # Kerberos tickets that expire while a job runs, and file systems that find their own data damaged.
    117: "Structure needs cleaning",
    126: "Required key not available",
    127: "Key has expired",
    128: "Key has been revoked",
    52: "Invalid exchange",
    123: "No medium found",
    # Texts that scripts may print as well are matched only by their numbers.
    19: "",
    61: "",
    71: "",
    74: "",
    78: "",
    124: "",
    125: "",
    **dict.fromkeys(range(512, 532), ""),  # numbers internal to the kernel, which some file systems return nevertheless
}
"""Error numbers of a failed or unavailable file system, with their texts."""
_HOST_LIMIT_ERRNOS = {
    24: "Too many open files",
    23: "Too many open files in system",
    11: "Resource temporarily unavailable",
    105: "No buffer space available",
    27: "File too large",
}
"""Error numbers of limits of the host (descriptors, processes and threads, buffers, file size), with their texts."""

# Lines about a loss or a gradient that is not finite.
_MENTIONS_LOSS = r"(?=[^\n]*\b(?i:loss|losses|grads?|gradients?|grad_norm|total norm)\b)"
_MENTIONS_NOT_FINITE = r"(?=[^\n]*\b(?i:nans?|infs?|infinite|infinity|non-?finite|not finite)\b)"

# A size that overflowed is a broken message or a bug, not a lack of memory.
_UNLESS_OVERFLOW = r"(?![^\n]*more than 1EB)"

FAILURE_PATTERNS = (
    _make_pattern("diverged", r"^tula_cli\.errors\.Diverged\b"),
    # After a failed assertion on the device, every later library call fails with messages that look like out of memory.
    _make_pattern("user", r"device-side assert triggered", r"\bAssertion `[^\n]*` failed\.", r"\bhipErrorAssert\b"),
    # Before the rows about memory: a smaller batch or fewer loaders do not help if ibverbs cannot lock memory.
    _make_pattern("device_fault", *(pattern for patterns in _FAULT_PATTERNS.values() for pattern in patterns)),
    _make_pattern(
        "device_oom",
        rf"\btorch\.(?:cuda\.)?OutOfMemoryError\b{_UNLESS_OVERFLOW}",
        rf"\b(?:CUDA|HIP|XPU|MPS|NPU|MLU|HPU|MUSA)\b[^\n]{{0,40}}\bout of memory\b{_UNLESS_OVERFLOW}",
        r"\bcuda runtime error \(2\)|\berror=2 : out of memory\b",
        r"\bRESOURCE_EXHAUSTED\b[^\n]*\b(?:(?:[Oo]ut of|[Rr]an out of) memory\b|Attempting to (?:reserve|allocate) \d|Failed to allocate request for \d)",
        r"\bOutOfMemoryError: Out of memory allocating\b",
        r"\bNo executable batch size found\b",
        r"\b(?:Cuda|HIP) failure (?:\d+ )?'out of memory'",
        r"\bcudaErrorMemoryAllocation\b",
        r"\bCUDA_ERROR_OUT_OF_MEMORY\b",
        r"\bhipErrorOutOfMemory\b",
        r"\b(?:CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_ALLOC_FAILED\b",
        r"\bcuBLAS(?:Lt)? Error: the resource allocation failed\b",
        r"^Error out of memory at line \d+ in file\b",
        r"\bout_of_memory: RMM failure\b",
        r"\bOOM when allocating tensor\b[^\n]*\ballocator GPU",
        r"\brocblas_status_memory_error\b",
        r"\bmiopenStatusAllocFailed\b",
        r"\bCUFFT_ALLOC_FAILED\b",
        r"\bMIOpen\b[^\n]*(?:[Mm]emory not available|[Ff]ailed to allocate|out of memory)",
        r"\bFailed to CUDA (?:calloc|malloc)\b",
        r"\bCUDNN_STATUS_(?:INTERNAL_ERROR_)?(?:DEVICE|HOST)_ALLOCATION_FAILED\b",
        r"\bHSA_STATUS_ERROR_OUT_OF_RESOURCES\b",
        r"\b(?:UR_RESULT|ZE_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)\b",
    ),
    # These messages do not mention memory, but occur on a nearly full device (or for a tensor beyond 2^31 elements):
    # torch tries every algorithm, none gets its workspace, and the last error is printed. They count as out of memory,
    # because a smaller batch either helps or shows the same message again.
    _make_pattern(
        "device_oom",
        r"Unable to find a valid cuDNN algorithm to run convolution",
        r"\bunable to find an engine to execute this computation\b",
        r"\bCUDNN_STATUS_NOT_SUPPORTED\b",
        r"\bCUBLAS_STATUS_NOT_INITIALIZED\b[^\n]*\bcublasCreate\b",
        r"\bmiopenStatusUnknownError\b",
    ),
    _make_pattern(
        "storage",
        _make_errno_pattern(_STORAGE_ERRNOS),
        _make_texts_pattern(*filter(None, _STORAGE_ERRNOS.values())),
        r"\bdisk I/O error\b",
        r"\bFSTimeoutError\b",
        r"\bPytorchStreamReader failed reading [^\n]*: file read failed\b",
        r"\bHDFS \w+ failed, errno: \d+",
        r"\bAWS Error (?:NETWORK_CONNECTION|SLOW_DOWN|THROTTLING|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT) during \w+ operation\b",
        r"\bgoogle::cloud::Status\((?:UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|INTERNAL): ",
        r"\[Errno (?:4|11|35|62|101|103|104|110|111|113)\] [^\n:]+: '",  # with a file name, unlike errors of sockets
        r"\bunable to lock file, errno = \d+",
        r"\[errno 110\]|\berrno = 110\b",
        r"^tula_cli\.errors\.StorageFailed\b",
        scope="system error",
    ),
    _make_pattern(
        "storage",
        r"\A(?=[\s\S]*^  File )(?![\s\S]*(?:\bsocket\.py|\bssl\.py|\bhttp/client|\burllib|\.connect\())[\s\S]*^(?:TimeoutError|OSError): \[Errno 110\]",
        scope="traceback",
    ),
    _make_pattern(
        "host_limit",
        r"\binotify (?:watch|instance) limit reached\b",
        _make_errno_pattern(_HOST_LIMIT_ERRNOS),
        _make_texts_pattern(*_HOST_LIMIT_ERRNOS.values()),
        r"\bcan't start new thread\b",
        r"\breceived \d+ items of ancdata\b",
        r"\bToo many open files\b",
        r"\bSystem unable to allocate necessary resources for OMP thread\b",
        scope="system error",
    ),
    _make_pattern(
        "signal",
        r"\bDataLoader worker \(pid[^\n]*\bis killed by signal: (?!Bus error)",
        r"\bDataLoader worker \(pid[^\n]*\bexited unexpectedly\b",
        r"\bBrokenProcessPool\b",
        r"\bTerminatedWorkerError\b",
        r"\bWorkerLostError\b",
        r"\bray\.exceptions\.(?:WorkerCrashed|NodeDied|ActorDied|RayActor)Error\b",
        r"\bsubprocesses has abruptly died during map operation\b",
        r"\bProcessExitedException: process \d+ terminated with signal\b",
        scope="error",
    ),
    _make_pattern(
        "signal",  # a loader process exited, so the other end of a queue is closed
        r"\b(?:torch/)?multiprocessing/(?:connection|queues|reductions|resource_sharer|managers)\.py[\s\S]*"
        r"^(?:ConnectionResetError|ConnectionRefusedError|ConnectionAbortedError|BrokenPipeError|EOFError)\b",
        scope="traceback",
    ),
    _make_pattern("peer", r"/torch/distributed/[\s\S]*^(?:Connection\w+Error|BrokenPipeError)\b", scope="traceback"),
    _make_pattern("hung", r"\bDataLoader timed out after\b", scope="error"),
    _make_pattern(
        "diverged",
        rf"^{_MENTIONS_LOSS}{_MENTIONS_NOT_FINITE}(?!KeyError|AttributeError|NameError|TypeError|IndexError|ImportError)"
        r"(?![^\n]*(?:\bskip|\bargument -|\binvalid (?:choice|\w+ value)\b))[^\n]+",
        r"^(?:\w+\.)*FloatingPointError\b(?![^\n]*(?<!\((?:nan|inf)\) )\bencountered in\b)",
        r"\b(?:[Mm]inimum loss scale reached|loss scale already at minimum)\b",
        r"\breturned nan values in its \d+th output\b",
        r"\bDetected nan and/or inf values\b",
        r"\bUnexpected result (?:nan|inf)\b",
        r"\bfound invalid values:\s+tensor\([^\n]*\b(?:nan|inf)\b",
        r"\binput matrix contained non-finite values\b",
        r"\bprobability tensor contains either `inf`, `nan`",
        r"(?i:\b(?:model|training|loss)(?: has)? diverged\b)",
        scope="error",
    ),
    _make_pattern(
        "diverged",  # an assertion without a message, recognised by its source line
        r"^ +assert [^\n]*\b(?:isnan|isfinite|isinf)\([^\n]*\n(?:[ ^~]*\n)?AssertionError\s*$",
        scope="traceback",
    ),
    _make_pattern(
        "host_oom",
        # oneDNN's message if it gets no memory for a kernel or its scratch space.
        r"\bcould not (?:create|execute) a (?:primitive|memory)",
        # glibc's message if there is no memory for a thread.
        r"\bfailed to register TLS destructor: out of memory\b",
        r"\bcannot allocate memory for thread-local data\b",
    ),
    _make_pattern(
        "host_oom",
        r"\bDefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
        r"^(?:numpy\.[\w.]*)?(?:_Array)?MemoryError\b",
        r"\bstd::bad_alloc\b",
        r"^memory allocation of \d+ bytes failed",
        r"\bDataLoader worker \(pid[^\n]*\bis killed by signal: Bus error",
        r"\binsufficient shared memory\b",
        r"\bunable to (?:open|write to|allocate|mmap)[^\n]*(?:shared memory|</torch_)",
        r"\bError while (?:creating|attaching to) shared memory segment\b",
        r"\b[Ff]ailed to extend /dev/shm/nccl-",
        r"\[Errno 28\][^\n]*'/dev/shm/",
        r"\bray\.exceptions\.OutOfMemoryError\b",
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
    _make_pattern(
        "host_oom",  # the file system of shared memory is full
        r"/multiprocessing/(?:synchronize|shared_memory|heap)\.py[^\n]*\n[^\n]*\n(?:[ ^~]*\n)?OSError: \[Errno 28\]",
        scope="traceback",
    ),
    # After the rows about memory: libraries report a full device in many ways, e.g. as an internal error.
    _make_pattern("device_error", *DEVICE_ERRORS),
    _make_pattern("port", r"\bEADDRINUSE\b", r"\bAddress already in use\b", r"\[Errno 98\]"),
    _make_pattern(
        "disk",
        r"\bNo space left on device\b",
        r"\bDisk quota exceeded\b",
        r"\[Errno (?:28|122)\]",
        r"\bPytorchStreamWriter failed writing\b",
        r"^OSError: \d+ requested and \d+ written",  # numpy and torch.save omit the error number
        r"\bbasic_ios::clear: iostream error\b",
        r"\bdatabase or disk is full\b",
        r"\binline_container\.cc:\d+\][^\n]*unexpected pos \d+ vs \d+",  # torch closes a file that it could not write
        r"^tula_cli\.errors\.DiskFull\b",
    ),
    _make_pattern("signal", r"\bCANCELLED AT \S+ DUE TO\b"),
    # Only the line about the job: a step is also cancelled if one of its tasks failed.
    _make_pattern("cancelled", r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ (?:DUE to SIGNAL \w+ )?\*\*\*"),
)
"""Patterns of failures and their classes (see `FAILURE_KINDS`). The first row that matches its scope decides."""

PEER_PATTERN = _make_pattern(
    "peer",
    r"\bgloo/transport/",
    r"\bGloo connect\w+ failed",
    r"\b(?:Read|Write|writev|readv) error \[[^\]]+\]:\d+",
    r"\bConnection closed by peer \[",
    r"\bTimed out waiting \d+ms for (?:recv|send) operation\b",
    r"\bWatchdog caught collective operation timeout\b",
    r"\bncclRemoteError\b",
    r"\bncclSystemError\b",
    r"\bncclInternalError\b",
    r"\bNCCL (?:error in: [^\n]*?, |Error \d+: )(?:unhandled system error|internal error)\b",
    r"\bProxy [Cc]all to rank \d+ failed\b",
    r"\bProcessGroupNCCL(?:'s)? watchdog (?:hang|got stuck)\b",
    r"\bNCCL communicator (?:was aborted|encountered error)",
    r"\bNCCL operations have failed or timed out\b",
    r"\bTerminating the process after attempting to dump debug info\b",
    r"\bdetected no heartbeat of its watchdog\b",
    r"\bUCX +ERROR\b[^\n]*(?i:retry count exceeded|timeout|timed out|unreachable|connection reset|remote peer)",
    r"\b(?:UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|INTERNAL): [^\n]*(?i:\bunhealthy\b|\bbarrier\b|\bheartbeat|\bcoordination service\b)",
    r"\bDistNetworkError\b",
    r"\bDistStoreError\b",
    r"\bRendezvous\w*Error\b",
    r"\bstore[- ]based barrier\b",
    r"\bmonitoredBarrier\b",
    r"\bc10d key-value store\b",
    r"\bremote process exited or there was a network error\b",
    r"\bApplication timeout caused pair closure\b",
    r"\bConnect timeout \[",
    r"\b(?:send|recv)\w+ failed on SocketImpl\b",
    # The store of torch before 2.1 only passes on the system's message.
    r"^RuntimeError: (?:Connection (?:reset by peer|refused|timed out|closed by peer)|Broken pipe)\s*$",
    r"\bTCPStore\b[^\n]*(?:Broken pipe|Connection (?:reset|refused)|timed out)",
    r"\bwait timeout after \d+ms\b",
    r"\bThe client socket has (?:timed out|failed to connect)\b",
    r"\bTimeout waiting for key: ",
    r"\bCaught collective operation timeout\b",
    r"\bHorovodInternalError\b",
    r"\bORTE has lost communication with a remote daemon\b",
    r"\b[Ff]ailed to recv, got 0 bytes",
    r"\bSocket Timeout\b",
)

SIGNAL_PATTERN = _make_pattern(
    "signal",
    *ENDED_BY_SIGNAL,
    r"\bSignalException: Process \d+ got signal\b",
    r"^KeyboardInterrupt\b",
    r"\bDUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)\b",
    r"\bNode failure on\b",
)

# Exceptions of the process that started the ranks, or that raises the exception of another process again.
_MESSENGER_EXCEPTIONS = re.compile(
    r"^(?:[\w.]*\.)?(?:ChildFailedError|SignalException|KeyboardInterrupt|ProcessRaisedException)\b"
    r"|^[\w.]+: Caught \w+ in (?:DataLoader worker process|replica|pin memory thread)\b"
)
# Exceptions that count as messengers only if there is another exception.
_LAST_RESORT_EXCEPTIONS = re.compile(
    r"^RuntimeError: (?:Pin memory thread|DataLoader worker \(pid[^\n]*) exited unexpectedly"
    r"|^(?:subprocess\.)?CalledProcessError:|^OSError: [^\n]*: exit \d+ \((?:read|write)\)"
)
# Errors of a connection that was closed because the process at its other end exited.
_LOST_PIPE_PATTERN = re.compile(r"^(?:BrokenPipeError: \[Errno 32\]|ConnectionResetError: \[Errno 104\])")
_KNOWN_PIPE_FRAMES = re.compile(r"/multiprocessing/|/torch/distributed/")
_RANK_PREFIX = re.compile(r"^(?:\[(?:rank|default)\d+\]: ?|\d+: )+", re.MULTILINE)
_TRACEBACK_HEADING = "Traceback (most recent call last):"
_CHAINED_HEADINGS = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION_LINE = re.compile(r"^(?:[a-z_]\w*\.)*_?[A-Z]\w*(?::|$)")
_BARE_EXCEPTION_LINE = re.compile(
    r"^(?:(?:[A-Za-z_]\w*\.)*(?:\w+Error|\w*Exception)|(?:[a-z_]\w*\.)+_?[A-Z]\w*)(?::|$)", re.MULTILINE
)
_VALUE_ERROR_LINE = re.compile(
    r"^(?:[a-z_]\w*\.)*(?:Value|Key|Index|Type|Attribute|Name|UnboundLocal|Assertion|NotImplemented|Syntax|ModuleNotFound"
    r"|Argument|JSONDecode|Unicode\w*)Error\b"
    r"|^(?:aiohttp|botocore|httpx|huggingface_hub|pymongo|redis|requests|urllib3?|wandb)\."
)
_KILLED_BY_SHELL = re.compile(r"^(?:.*\s)?Killed(?:\s.*)?$", re.MULTILINE)
_CUDA_WARNING = re.compile(r"^[^\n]*Warning: CUDA initialization:[^\n]*$", re.MULTILINE)
_USAGE_ERROR_PATTERN = re.compile(r"^usage: [\s\S]*^\S+: error: ", re.MULTILINE)
_MAX_LAST_LINES = 40
_FAILURE_SIGNALS = (4, 6, 7, 8, 11)  # signals caused by the process itself: its last lines may show why
_SINGLE_LINE_CLASSES = ("device_fault", "device_error", "storage", "host_limit", "signal", "hung", "diverged")
"""Classes for which a single line, anywhere in a text, shows what happened."""


@dataclass(frozen=True)
class _TracebackException:
    """An exception from a traceback: the first lines of its message, and the frames above them."""

    message: str
    frames: str = ""

    @property
    def is_messenger(self) -> bool:
        """Whether the exception only reports that another process has failed."""
        return bool(_MESSENGER_EXCEPTIONS.match(self.message) or CHILD_KILLED.match(self.message))

    @property
    def is_last_resort(self) -> bool:
        """Whether the exception may only report that another process failed; any other one takes precedence."""
        lost_pipe = _LOST_PIPE_PATTERN.match(self.message) and not _KNOWN_PIPE_FRAMES.search(self.frames)
        return bool(lost_pipe or _LAST_RESORT_EXCEPTIONS.match(self.message))


def classify_failure(text: str, *, exit_code: int | None = None, device: str = "cuda") -> OutcomeClass:
    """Return the class of a failure.

    Args:
        text: output of the process, or one exception with or without its traceback.
        exit_code: as given by the shell or subprocess (137 and -9 both mean signal 9); None if unknown.
        device: "cuda" or "cpu"; on the CPU the batch is in the host's memory, so every OOM is a device_oom.
    """
    text = _RANK_PREFIX.sub("", text)
    if device == "cpu":  # any process without a GPU may print this warning
        text = _CUDA_WARNING.sub("", text)
    outcome = _classify_text(text, exit_code)
    return "device_oom" if outcome == "host_oom" and device == "cpu" else outcome


def _classify_text(text: str, exit_code: int | None) -> OutcomeClass:
    if outcome_and_match := _find_first_match(text, exit_code):
        return outcome_and_match[0]
    if exit_code in (-9, 137) and _KILLED_BY_SHELL.search(text):
        return "host_oom"
    if _find_deciding_chain(text, exit_code) or (exit_code == 2 and _USAGE_ERROR_PATTERN.search(text)):
        return "user"
    for failure in (PEER_PATTERN, SIGNAL_PATTERN):
        if failure.pattern.search(text):
            return failure.outcome
    return "signal" if _get_signal_number(exit_code) else "unknown"


def _get_signal_number(exit_code: int | None) -> int:
    """Return the number of the signal in an exit code; 0 if it has none."""
    if exit_code is None:
        return 0
    return -exit_code if exit_code < 0 else exit_code - 128 if 128 < exit_code <= 192 else 0


def _is_killed(exit_code: int | None) -> bool:
    """Return whether another process killed this one, so that its last output need not show the cause."""
    return _get_signal_number(exit_code) not in (0, *_FAILURE_SIGNALS)


def _find_first_match(text: str, exit_code: int | None = None) -> tuple[OutcomeClass, re.Match[str]] | None:
    """Return the class of the first matching row of FAILURE_PATTERNS, and its match; None if no row matches."""
    texts = _split_by_scope(text, exit_code)
    has_signal = bool(_get_signal_number(exit_code))
    rows = [row for row in FAILURE_PATTERNS if not (has_signal and row.outcome == "diverged")]
    matches = ((row.outcome, row.pattern.search(texts[row.scope])) for row in rows)
    return next(((outcome, match) for outcome, match in matches if match), None)


def _split_by_scope(text: str, exit_code: int | None) -> dict[Scope, str]:
    """Return the parts of a log in which patterns are searched; without a cause in tracebacks, errors are the last lines."""
    chain = _find_deciding_chain(text, exit_code)
    is_explained = not all(error.is_last_resort for error in chain)
    last_lines = "" if is_explained or _is_killed(exit_code) else _find_last_lines(text)
    of_system = [error for error in chain if not _VALUE_ERROR_LINE.match(error.message)]
    return {
        "log": text,
        "error": "\n\n".join([*(error.message for error in chain), last_lines]),
        "system error": "\n\n".join([*(error.message for error in of_system), last_lines]),
        "traceback": "\n\n".join(f"{error.frames}{error.message}" for error in chain),
    }


def _find_last_lines(text: str) -> str:
    """Return the last lines outside tracebacks, without separators and NCCL INFO lines."""
    frames = ("  File ", "    ", "Traceback")
    lines = [line for line in text.splitlines() if line.strip(" =-~^") and not line.startswith(frames)]
    return "\n".join([line for line in lines if " NCCL INFO " not in line][-_MAX_LAST_LINES:])


def find_line_of_failure(text: str) -> str:
    """Return the line that shows the failure; empty if nothing matches, or no single line shows a failure of this class."""
    outcome, match = _find_first_match(_RANK_PREFIX.sub("", text)) or (None, None)
    if match is None or outcome not in _SINGLE_LINE_CLASSES:
        return ""
    # A pattern that begins with \A examines the text up to the line.
    at = match.end() if r"\A" in match.re.pattern else match.start()
    return match.string[match.string.rfind("\n", 0, at) + 1 :].split("\n", 1)[0].strip()


def _find_deciding_chain(text: str, exit_code: int | None = None) -> list[_TracebackException]:
    """Return the exceptions that ended the process, first cause first, from its last relevant traceback; empty if none.

    Tracebacks that only report a lost peer or the failure of another process are ignored.
    """
    if _is_killed(exit_code) and _TRACEBACK_HEADING not in text:
        return []
    chains = [[error for error in chain if not error.is_messenger] for chain in _list_exception_chains(text)]
    chains = [
        chain for chain in chains if chain and not any(PEER_PATTERN.pattern.search(error.message) for error in chain)
    ]
    causes = [chain for chain in chains if not all(error.is_last_resort for error in chain)]
    return (causes or chains or [[]])[-1]


def find_user_exception(text: str) -> str:
    """Return the line of the user's last exception, preferably not a CalledProcessError; empty if there is none."""
    chain = _find_deciding_chain(_RANK_PREFIX.sub("", text))
    lines = [error.message.split("\n", 1)[0].strip() for error in chain]
    return next((line for line in reversed(lines) if "CalledProcessError:" not in line), (lines or [""])[-1])


def _list_exception_chains(text: str) -> Iterator[list[_TracebackException]]:
    """Yield the exceptions of each traceback; chained exceptions are yielded together."""
    if _TRACEBACK_HEADING not in text:
        for match in _BARE_EXCEPTION_LINE.finditer(text):
            yield [_TracebackException(text[match.start() :].split("\n\n")[0])]
        return
    block_before, *blocks = text.split(_TRACEBACK_HEADING)
    chain: list[_TracebackException] = []
    for block in blocks:
        linked = any(marker in block_before for marker in _CHAINED_HEADINGS)
        if chain and not linked:
            yield chain
        chain = chain if linked else []
        # Python prints an exception in a destructor and continues.
        if "Exception ignored in" not in block_before.rstrip().rsplit("\n", 1)[-1]:
            chain = [*chain, *_parse_exception(block)]
        block_before = block
    yield chain


def _parse_exception(block: str) -> list[_TracebackException]:
    """Return the exception at the end of a traceback, with the first lines of its message; empty if it is cut off."""
    lines = block.split("\n")
    for number, line in enumerate(lines):
        if _EXCEPTION_LINE.match(line.rstrip()):
            message = "\n".join(lines[number : number + 8]).split("\n\n")[0]
            return [_TracebackException(message, "".join(f"{frame}\n" for frame in lines[:number]))]
    return []


def find_device_fault(message: str) -> FaultName | None:
    """Return the fault of a node or a device that a message reports; None if it reports none that is known."""
    for name, patterns in _FAULT_PATTERNS.items():
        if any(re.search(pattern, message, re.MULTILINE) for pattern in patterns):
            return name
    return None
