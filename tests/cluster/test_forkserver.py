"""The process that ranks are forked from, with ranks that are small scripts and a server that imports nothing."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tula_cli.cluster.rank_processes import (
    WORKER_ARGUMENTS,
    ForkedRank,
    ForkServer,
    ForkUnavailable,
    RankCommand,
    RankSpawner,
)
from tula_cli.host.processes import read_start_time

SERVER = """
import sys
del sys.path[0]
from tula_cli.worker import preloaded
from functools import partial
MODULES = []
preloaded.main(modules=MODULES, rank=lambda request: exec(request["command"][-1], {"request": request}))
"""
PATIENCE = 60.0  # seconds


def until(true, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Server:
    """A server that runs the script at the end of the command as a rank."""

    def __init__(self, folder: Path, program: str = SERVER) -> None:
        self.folder, self.log = folder, folder / "log"
        (folder / "user").mkdir()
        with open(self.log, "ab") as output:
            self.server = ForkServer(self.start("pass"), output, program=program)

    def start(self, script: str, **environment: str) -> RankCommand:
        command = (sys.executable, *WORKER_ARGUMENTS, "run", "task", "1", textwrap.dedent(script))
        return RankCommand(command, {**os.environ, **environment}, str(self.folder / "user"), str(self.log))

    def run(self, script: str, **environment: str) -> int:
        """Return the exit code of a rank."""
        return self.server.fork_rank(self.start(script, **environment), give_up=lambda: False).wait()

    def told(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    result = Server(tmp_path)
    yield result
    result.server.close()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise ValueError('mine')", 1),
        ("import os; os._exit(4)", 4),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_exit_codes_and_signals_are_the_ranks_own(server: Server, script: str, code: int) -> None:
    assert server.run(script) == code


def test_a_rank_has_its_own_environment_folder_path_arguments_and_log(server: Server, tmp_path: Path) -> None:
    (tmp_path / "user" / "mine.py").write_text("print('mine imported')")
    script = """
        import os, sys
        import mine
        print(os.environ["RANK"], "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ, os.getcwd())
        print(sys.path[0], sys.argv[1:4], os.getpid() == os.getsid(0) == os.getpgid(0), file=sys.stderr)
    """
    assert server.run(script, RANK="3") == 0
    folder = tmp_path / "user"
    assert server.told() == ["mine imported", f"3 False {folder}", f"{folder} ['run', 'task', '1'] True"]
    elsewhere = RankCommand(
        server.start("print('here')").command, dict(os.environ), str(tmp_path), str(tmp_path / "other")
    )
    assert server.server.fork_rank(elsewhere, give_up=lambda: False).wait() == 0
    assert (tmp_path / "other").read_text() == "here\n"


def test_a_rank_is_found_by_the_command_that_it_stands_for(server: Server) -> None:
    rank = server.server.fork_rank(server.start("import time; time.sleep(60)"), give_up=lambda: False)
    command = Path(f"/proc/{rank.pid}/cmdline")
    until(lambda: b"sleep" in command.read_bytes(), "the command line was not written")
    words = command.read_text().split("\0")
    assert words[:7] == [sys.executable, "-u", "-m", "tula_cli.worker", "run", "task", "1"]
    os.kill(rank.pid, signal.SIGTERM)
    assert rank.wait() == -signal.SIGTERM


def test_ranks_draw_other_random_numbers_and_measure_their_own_memory(server: Server) -> None:
    script = """
        import random, re, pathlib
        status = pathlib.Path("/proc/self/status").read_text()
        print(random.random(), int(re.search(r"VmHWM:\\s+(\\d+)", status).group(1)))
    """
    inflated = SERVER.replace("MODULES = []", "MODULES = []; len(bytearray(300_000_000))")
    (server.folder / "other").mkdir()
    other = Server(server.folder / "other", inflated)
    assert other.run(script) == other.run(script) == 0
    (first, peak), (two, _) = (line.split() for line in other.told())
    assert first != two
    assert int(peak) < 200_000, "kB; the server's own peak is none of the rank's"
    other.server.close()


def test_ranks_outlive_the_server_and_die_with_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    code = f"""
        import os, sys, time
        sys.path[:0] = {[*sys.path]!r}
        from pathlib import Path
        from test_forkserver import Server
        (folder := Path({str(tmp_path)!r}) / "server").mkdir()
        server = Server(folder)
        rank = server.server.fork_rank(server.start("import time; time.sleep(300)"), give_up=lambda: False)
        server.server.close()
        print(rank.pid, rank.poll(), flush=True)
        time.sleep(300)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as supervisor:
        assert supervisor.stdout is not None
        pid, ended = supervisor.stdout.readline().split()
        assert ended == "None"
        assert read_start_time(int(pid)) is not None, "the rank went with the server"
        supervisor.kill()
        until(lambda: read_start_time(int(pid)) is None, "the rank outlived its supervisor")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (SERVER.replace("[]", "['no_such_library']"), "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise SystemExit(5)", "exit code 5"),
        (SERVER.replace("[]", "[]; import threading; threading.Thread(target=input, daemon=True).start()"), "threads"),
    ],
    ids=["import", "death", "threads"],
)
def test_why_nothing_can_be_forked_is_reported(tmp_path: Path, program: str, words: str) -> None:
    if "threads" in words:
        program = program.replace("input", "__import__('time').sleep, args=(300,)")
    server = Server(tmp_path, program)
    with pytest.raises(ForkUnavailable, match=words):
        server.run("pass")
    server.server.close()


def test_the_import_is_not_waited_for_when_it_is_given_up(tmp_path: Path) -> None:
    server = Server(tmp_path, "import time; time.sleep(300)")
    with pytest.raises(ForkUnavailable, match="given up"):
        server.server.fork_rank(server.start("pass"), give_up=lambda: True)
    server.server.close()


def test_a_rank_that_is_done_ends_its_threads_handlers_and_files(server: Server, tmp_path: Path) -> None:
    script = """
        import atexit, builtins, threading, time
        atexit.register(lambda: print("handler", flush=True))
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        builtins.kept = open("open", "w")
        kept.write("not closed")
    """
    assert server.run(script) == 0
    assert server.told() == ["thread", "handler"]
    assert (tmp_path / "user" / "open").read_text() == "not closed"


# --- the spawner, which falls back


def test_where_nothing_can_be_forked_ranks_are_executed_with_their_true_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    command = (sys.executable, *WORKER_ARGUMENTS, str(tmp_path / "norun"), "task", "1")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    spawner, log = RankSpawner(), tmp_path / "log"
    start = RankCommand(command, environment, str(tmp_path), str(log))
    with open(log, "ab") as output:
        group = spawner.spawn_ranks([start, start], output, give_up=lambda: False)
        until(lambda: not group.is_running(), "the ranks do not end")
    assert spawner.executes
    assert group.find_first_failure() == (0, 1)
    assert log.read_text().count("has no task task\n") == 2
    assert capfd.readouterr().err.count("ImportError: this torch is broken") == 1


def test_what_is_not_the_worker_itself_is_executed(tmp_path: Path) -> None:
    worker = (sys.executable, *WORKER_ARGUMENTS, "run", "task", "1")
    start = RankCommand(worker, {"RANK": "0", "A": "b"}, str(tmp_path), "log")
    assert start.is_forkable
    assert start.shared_environment == {"A": "b"}
    assert not RankCommand(("numactl", "--localalloc", *worker), {}, str(tmp_path), "log").is_forkable
    assert not RankCommand((sys.executable, "-m", "torch.distributed.run"), {}, str(tmp_path), "log").is_forkable


def test_one_command_that_is_not_there_leaves_none_running(tmp_path: Path) -> None:
    log = tmp_path / "log"
    sleep = RankCommand(
        (sys.executable, "-c", f"import time; time.sleep(300)  # {tmp_path}"), dict(os.environ), "/", str(log)
    )
    missing = RankCommand(("no-such-wrapper",), dict(os.environ), "/", str(log))
    with open(log, "ab") as output, pytest.raises(FileNotFoundError):
        RankSpawner().spawn_ranks([sleep, missing], output, give_up=lambda: False)
    words = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout.split()
    assert [pid for pid in words if read_start_time(int(pid)) is not None] == []


# --- with torch


@pytest.mark.torch
def test_the_worker_is_forked_and_imports_nothing_again(tmp_path: Path) -> None:
    log, spawner = tmp_path / "log", RankSpawner()
    command = (sys.executable, *WORKER_ARGUMENTS, str(tmp_path / "norun"), "task", "1")
    start = RankCommand(command, dict(os.environ), str(tmp_path), str(log))
    with open(log, "ab") as output:
        group = spawner.spawn_ranks([start, start], output, give_up=lambda: False)
        until(lambda: not group.is_running(), "the ranks do not end")
    spawner.close()
    assert not spawner.executes
    assert all(isinstance(child, ForkedRank) for child in group.children)
    assert log.read_text().count("norun has no task task\n") == 2


@pytest.mark.torch
def test_a_file_that_hides_an_imported_library_is_what_the_rank_imports(tmp_path: Path) -> None:
    """The rank notices once it has the user's folders on its path, and becomes the command that it stands for."""
    script = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from tula_cli.worker import preloaded
        import torch, yaml
        assert preloaded._list_shadowed_modules() == [], "a plain environment hides nothing"
        sys.path.insert(0, sys.argv[2])
        assert preloaded._list_shadowed_modules() == ["yaml"]
        ran = [sys.executable, "-c", "import sys, os; print('executed', os.getcwd(), os.environ['A'])"]
        preloaded._execute_if_modules_differ({"folder": sys.argv[2], "command": ran, "environment": {**os.environ, "A": "b"}})
    """
    (tmp_path / "torch").mkdir()  # hides nothing: no module, and no package
    (tmp_path / "yaml.py").write_text("")
    root = str(Path(preloaded_path()).parents[2])
    command = [sys.executable, "-c", textwrap.dedent(script), root, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"executed {tmp_path} b\n", done.stderr


def preloaded_path() -> str:
    from tula_cli.worker import preloaded

    return preloaded.__file__
