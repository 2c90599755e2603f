"""A rank that a signal has ended is told by its launcher, each in words of its own."""

import signal
import subprocess
import traceback

import pytest

from tula_cli.host.failure_texts import classify_failure, find_kill_signal, find_user_exception

COMMAND = ["/usr/bin/python3", "train.py", "--note", "exit code: none"]
DEEPSPEED = "[2026-01-02 03:04:05,678] [ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = -9"
PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895"
USERS = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    fail()\nValueError: mine\n\n'


def accelerate(code: int) -> str:
    """Return what a launcher writes that raises what subprocess does."""
    try:
        raise subprocess.CalledProcessError(code, COMMAND)
    except subprocess.CalledProcessError:
        return traceback.format_exc()


@pytest.mark.parametrize("code", [-signal.SIGKILL, 128 + signal.SIGKILL])
def test_a_killed_child_of_accelerate_is_no_error_of_the_users(code: int) -> None:
    assert (classify_failure(accelerate(code), exit_code=1), find_kill_signal(accelerate(code))) == (
        "signal",
        "SIGKILL",
    )


def test_a_child_that_failed_by_itself_stays_the_users() -> None:
    assert (classify_failure(accelerate(2), exit_code=1), find_kill_signal(accelerate(2))) == ("user", "")
    assert classify_failure(USERS + accelerate(1), exit_code=1) == "user"
    assert find_user_exception(USERS + accelerate(-9)) == "ValueError: mine"


def test_a_killed_rank_of_deepspeed_is_reported_although_the_others_lost_it() -> None:
    assert (classify_failure(DEEPSPEED, exit_code=247), find_kill_signal(f"{PEER}\n{DEEPSPEED}")) == (
        "signal",
        "SIGKILL",
    )


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("  exitcode  : -9 (pid: 14750)", "SIGKILL"),
        ("traceback : Signal 11 (SIGSEGV) received by PID 5", "SIGSEGV"),
        ("exitcode : -15 (pid: 1)\nexitcode : -9 (pid: 2)", "SIGKILL"),  # the others are told to end
        ("exitcode : -6 (pid: 1)", ""),  # torch over a lost rank
        ("exits with return code = 1", ""),
        ("died with unknown signal 99", ""),
    ],
)
def test_the_signal_that_came_first_is_named(words: str, name: str) -> None:
    assert find_kill_signal(words) == name
