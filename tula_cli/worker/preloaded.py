"""The process that imports torch once and forks ranks: the counterpart of `tula_cli.cluster.rank_processes`.

A forked rank must be equivalent to `python -m tula_cli.worker RUN TASK ATTEMPT` in its folder and with its environment.
Therefore the user's code is not imported before the fork, CUDA is not initialised, and no threads run (thread pools do
not survive a fork). If a file of the user's shadows a library that is already imported, the rank executes that command
instead.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import io
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tula_cli.host.processes import set_parent_death_signal

PRELOADED_MODULES = (
    "torch",
    "torch._dynamo",  # imported by the first optimizer
    "torchvision",
    "tula_cli.worker.__main__",
    "tula_cli.worker.measure.probe",
    "tula_cli.worker.measure.node_report",
    "tula_cli.worker.entry",
    "tula_cli.worker.train.auto_tune",
)
DRIVER_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd")
"""Device files that CUDA and ROCm open when they start; after that neither survives a fork."""
Request = Mapping[str, Any]


def run_worker(request: Request) -> None:
    """Run the requested rank in this process."""
    main = importlib.import_module("tula_cli.worker.__main__")
    sys.modules["__main__"] = main  # spawned data-loader processes import the main module by name
    main.main(entered=partial(_execute_if_modules_differ, request))


def main(*, modules: Iterable[str] = PRELOADED_MODULES, rank: Callable[[Request], None] = run_worker) -> None:
    """Import modules, then fork a rank for each request received.

    Returns in each rank once it has finished, and in this process when the connection is closed: a rank exits as every
    Python program does.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    finished: list[Request] = []
    atexit.register(_exit_without_cleanup, finished)  # registered before all libraries' handlers, so it is called last
    try:
        _import_modules(modules)
    except Exception as error:  # noqa: BLE001 - the process boundary: imports may raise anything
        _send_answer(connection, {"error": f"{type(error).__name__}: {error}"})
        return
    request = _serve_requests(connection)
    connection.close()
    if request is None:
        return
    _apply_request(request)
    try:
        rank(request)
        finished.append(request)
    finally:
        if not finished:  # frozen objects are not collected at exit, and native code would report leaks
            gc.unfreeze()


def _import_modules(modules: Iterable[str]) -> None:
    """Import modules with the garbage collector off; its collections free hardly anything and took 15 % of the time."""
    gc.disable()
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        gc.enable()


def _exit_without_cleanup(finished: Sequence[Request]) -> None:
    """Exit a finished rank without destroying its modules, which would first copy thousands of memory pages.

    Threads have been joined and exit handlers called by now. Of the interpreter's remaining work, only flushing files
    that nobody has closed matters.
    """
    if not finished:
        return
    for candidate in gc.get_objects():
        if issubclass(type(candidate), io.IOBase):
            with contextlib.suppress(ValueError, OSError):  # the file is closed or not writable
                candidate.flush()
    os._exit(0)


def _send_answer(connection: socket.socket, answer: Mapping[str, object]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _serve_requests(connection: socket.socket) -> Request | None:
    """Fork a rank for each request; return the request in the rank, and None in this process when there are no more."""
    # A garbage collection in a rank would write to, and so copy, every memory page with one of these objects. There is
    # no collection before: it would leave free heap memory, which a rank could use beyond its cluster.memory_per_gpu.
    gc.freeze()
    with connection.makefile("rb") as requests:
        for line in requests:
            request: Request = json.loads(line)
            if unfit := _describe_why_not_forkable():
                _send_answer(connection, {"error": unfit})
                return None
            try:
                pid = _fork_rank(int(request["parent"]))
            except OSError as error:
                _send_answer(connection, {"error": f"cannot fork: {error.strerror}"})
                return None
            if pid == 0:
                return request
            _send_answer(connection, {"pid": pid})
    return None


def _describe_why_not_forkable() -> str:
    """Return why a fork of this process would not work as a rank; empty if it would."""
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"a library started threads when it was imported: {names}"
    if "torch" in sys.modules:
        from tula_cli.worker.device import is_gpu_initialized  # imported here: imports torch, which is loaded by now

        if is_gpu_initialized() or any(map(_has_file_open, DRIVER_DEVICES)):
            return "a library initialised the GPU driver when it was imported"
    return ""


def _has_file_open(device: str) -> bool:
    """Return whether this process has opened a device file: then the driver is initialised, whatever torch reports."""
    return any(path.is_symlink() and str(path.readlink()) == device for path in Path("/proc/self/fd").iterdir())


def _fork_rank(parent: int) -> int:
    """Fork a rank that becomes a child of `parent`; return its process id, and 0 in the rank.

    An intermediate process between this one and the rank exits at once, and `parent` adopts the orphan.

    Raises:
        OSError: there is not enough memory, or no further process is allowed.
    """
    receive, send = os.pipe()
    intermediate_pid = os.fork()
    if intermediate_pid == 0:
        os.close(receive)
        _fork_orphan(parent, send)
        return 0
    os.close(send)
    os.waitpid(intermediate_pid, 0)
    with open(receive, "rb") as pipe:
        pid = pipe.read()
    if not pid:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return int(pid)


def _fork_orphan(parent: int, send: int) -> None:
    """Fork once more and exit; returns only in the orphan, once `parent` has adopted it and it dies with `parent`."""
    intermediate_pid = os.getpid()
    try:
        rank = os.fork()
    except OSError:
        os._exit(1)
    if rank:
        os._exit(0)
    os.setsid()
    while os.getppid() == intermediate_pid:
        time.sleep(0.001)
    set_parent_death_signal()
    if os.getppid() != parent:
        os._exit(1)
    os.write(send, str(os.getpid()).encode())
    os.close(send)


def _apply_request(request: Request) -> None:
    """Apply the environment, folder, log, arguments and random state that an executed rank would start with."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    command = request["command"]
    sys.argv = command[3:]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(Path.cwd()))
    _write_over_command_line(command)


def _write_over_command_line(command: Iterable[str]) -> None:
    """Overwrite the command line of this process, so that ps and pgrep find the rank by its command."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if not 0 < start < end:  # a sandbox may hide the position of the command line
        return
    command_bytes = b"".join(os.fsencode(argument) + b"\0" for argument in command)
    ctypes.memmove(start, command_bytes[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _execute_if_modules_differ(request: Request) -> None:
    """Execute the command instead of the fork if this rank would import another file than the preloaded one for some module.

    To be called once the user's folders are on `sys.path`.
    """
    if not _list_shadowed_modules():
        return
    os.chdir(request["folder"])
    os.execve(request["command"][0], request["command"], dict(request["environment"]))


def _list_shadowed_modules() -> list[str]:
    """Return the imported top-level modules for which `sys.path` now finds a different file."""
    imported = {name: module.__spec__ for name, module in sys.modules.items() if "." not in name}
    origins = {name: spec.origin for name, spec in imported.items() if spec and spec.has_location and spec.origin}
    return [name for name, origin in origins.items() if not _is_resolved_to(name, origin)]


def _is_resolved_to(name: str, origin: str) -> bool:
    spec = PathFinder.find_spec(name)
    if spec is None or spec.origin in (None, origin):  # found by another finder, or a namespace folder
        return True
    if not Path(origin).exists():
        # A module in an archive: tula's archive in the run is the version with which the job was submitted.
        return name == "tula_cli"
    return Path(str(spec.origin)).samefile(origin)
