"""Commands that tula waits for: their exit ends the wait, and nothing of them is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tula_cli.host.processes import read_start_time, run_command

# what a program leaves behind when it exits; each writes its process id into the file `pid`
LEFT = {
    "a child": "subprocess.Popen([sys.executable, '-c', wait])",
    "a child in a session of its own": "subprocess.Popen([sys.executable, '-c', wait], start_new_session=True)",
    "a child without output": "subprocess.Popen([sys.executable, '-c', wait], stdout=-3, stderr=-3)",
    "a daemon": "os.fork() or (os.setsid(), os.fork() and os._exit(0), exec(wait))",
    "a child that ignores SIGTERM": "subprocess.Popen([sys.executable, '-c', 'import signal; signal.signal(15, signal.SIG_IGN);' + wait])",
    "a child with a child": "subprocess.Popen(['sh', '-c', f'{sys.executable} -c {shlex.quote(wait)}; true'])",
}
PROGRAM = """
import os, shlex, subprocess, sys, time
wait = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(1000)"
{left}
while not (os.path.exists("pid") and open("pid").read()):
    time.sleep(0.01)
print("answer", flush=True)
{ends}
"""


def program(left: str, *, ends: bool = True) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(left=left, ends="os._exit(0)" if ends else "time.sleep(1000)")]


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while read_start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    return read_start_time(pid) is None


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_the_exit_of_a_command_ends_the_wait_and_what_it_has_left(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    done = run_command(program(left), timeout=60, guarded=True)
    assert (done.returncode, done.stdout) == (0, "answer\n") and time.monotonic() - began < 30
    assert is_gone(int(Path("pid").read_text()))


@pytest.mark.parametrize("guarded", [True, False])
def test_a_command_that_takes_too_long_is_killed_with_its_children(
    guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        run_command(program(LEFT["a child"], ends=False), timeout=3, guarded=guarded)
    assert is_gone(int(Path("pid").read_text()))


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_dies_with_the_process_that_waits_for_it(kill: signal.Signals, tmp_path: Path) -> None:
    code = """
        import signal, sys; sys.path[:0] = sys.argv[1].split(":")
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        from tula_cli.host.processes import run_command
        run_command(eval(sys.argv[2]), timeout=60, guarded=True)
    """
    command = program(LEFT["a daemon"], ends=False)
    words = [sys.executable, "-c", textwrap.dedent(code), ":".join(sys.path), repr(command)]
    waiting = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    waiting.send_signal(kill)
    waiting.wait(30)
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_guard_that_is_sent_signals_again_and_again_leaves_nothing(tmp_path: Path) -> None:
    """The kernel sends one for each thread of the process that has waited."""
    command = [sys.executable, "-m", "tula_cli.host.guard", *program(LEFT["a daemon"], ends=False)]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as guard:
        deadline = time.monotonic() + 30
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        while guard.poll() is None:
            guard.send_signal(signal.SIGTERM)
    assert guard.returncode == 128 + signal.SIGTERM
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_command_that_prints_without_end_is_not_held_in_memory() -> None:
    code = "import sys\nfor _ in range(3000): sys.stdout.write('x' * 2**16)\nprint('the end')"
    done = run_command([sys.executable, "-c", code], timeout=60)
    assert done.stdout.endswith("xthe end\n") and len(done.stdout) <= 2**27


def test_what_a_command_reads_and_how_it_ends() -> None:
    code = "import os, sys; print(sys.stdin.read()); print('no', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    for guarded, exit_code in ((False, -9), (True, 137)):
        done = run_command([sys.executable, "-c", code], stdin="word", timeout=60, guarded=guarded)
        assert (done.returncode, done.stderr) == (exit_code, "no\n")
    assert run_command(["true"], stdin="x" * 2**20, timeout=60).returncode == 0
    with pytest.raises(OSError, match="No such file"):
        run_command(["/nosuch"], timeout=1)
    assert os.getpid()
