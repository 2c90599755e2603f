import errno
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import get_args

import pytest
import yaml

from tula_cli.errors import Diverged
from tula_cli.host.failure_texts import classify_failure
from tula_cli.host.failures import describe_advice, find_root_failure
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure

MESSAGES = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "oom_messages.yaml").read_text())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["name"])
def test_recorded_messages(message):
    result = classify_failure(message["text"], exit_code=message.get("exit_code"), device=message["device"])
    assert result == message["expect"]


def test_the_fixture_is_large_enough():
    memory = [message for message in MESSAGES if message["expect"].endswith("_oom")]
    assert len(memory) >= 24
    assert len(MESSAGES) - len(memory) >= 10
    assert {"CUDA", "HIP", "MIOpen", "NCCL", "cuBLAS", "cuDNN", "slurmstepd"} <= set(
        " ".join(f"{message['name']} {message['text']}" for message in memory)
        .replace(":", " ")
        .replace(",", " ")
        .split()
    )


@pytest.mark.parametrize("message", [m for m in MESSAGES if m["expect"] == "host_oom"], ids=lambda m: m["name"])
def test_on_the_cpu_every_out_of_memory_is_the_devices(message):
    assert classify_failure(message["text"], exit_code=message.get("exit_code"), device="cpu") == "device_oom"


@pytest.mark.torch
def test_torchs_cpu_allocator_under_a_real_limit():
    code = (
        "import resource, torch\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))\n"
        "kept = [torch.zeros(2**24) for _ in range(100)]\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert classify_failure(ended.stderr, exit_code=ended.returncode, device="cpu") == "device_oom"
    assert classify_failure(ended.stderr, exit_code=ended.returncode, device="cuda") == "host_oom"


def test_python_under_a_real_limit():
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)); bytearray(2**30)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert classify_failure(ended.stderr, exit_code=ended.returncode, device="cpu") == "device_oom"


def test_a_real_full_disk():
    try:
        Path("/dev/full").write_text("x")
    except OSError:
        assert classify_failure(traceback.format_exc(), exit_code=1) == "disk"
    else:
        pytest.fail("/dev/full took data")


def test_a_real_taken_port():
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        with pytest.raises(OSError) as caught:
            second.bind(first.getsockname())
    assert caught.value.errno == errno.EADDRINUSE
    assert classify_failure(str(caught.value)) == "port"


def test_a_real_killed_process():
    ended = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], capture_output=True, text=True)
    assert classify_failure(ended.stderr, exit_code=ended.returncode) == "signal"


@pytest.mark.parametrize(("exit_code", "expected"), [(143, "signal"), (-15, "signal"), (1, "unknown"), (255, "unknown"), (None, "unknown")])  # fmt: skip
def test_an_exit_code_alone(exit_code, expected):
    assert classify_failure("", exit_code=exit_code) == expected


def test_the_word_error_alone_tells_nothing():
    assert classify_failure("error: something\nERROR: no\n0 errors found", exit_code=1) == "unknown"


USERS = """Traceback (most recent call last):
  File "model.py", line 3, in forward
    return x @ y
RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)
"""
PEERS = """Traceback (most recent call last):
  File "loop.py", line 9, in step
    dist.all_reduce(x)
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895
"""


def test_the_users_error_among_those_of_peers():
    assert classify_failure(PEERS + USERS, exit_code=1) == "user"


def test_rank_prefixes_do_not_hide_a_traceback():
    prefixed = "".join(f"[rank3]: {line}\n" for line in USERS.splitlines())
    assert classify_failure(prefixed, exit_code=1) == "user"
    assert classify_failure("".join(f"2: {line}\n" for line in PEERS.splitlines()), exit_code=1) == "peer"


def test_what_is_raised_while_a_lost_peer_is_handled_is_the_peers():
    chained = f"{PEERS}\nDuring handling of the above exception, another exception occurred:\n\n{USERS}"
    assert classify_failure(chained, exit_code=1) == "peer"


def test_an_exception_in_a_destructor_ends_nothing():
    ignored = f"Exception ignored in: <function Loader.__del__ at 0x7f>\n{USERS}"
    assert classify_failure(ignored, exit_code=0) == "unknown"
    assert classify_failure(ignored + PEERS, exit_code=1) == "peer"


def test_an_exception_without_its_traceback():
    assert classify_failure("ValueError: Expected more than 1 value per channel when training") == "user"


def test_the_users_dropped_connection_is_not_a_peer():
    text = USERS.replace("RuntimeError: mat1", "ConnectionResetError: [Errno 104] Connection reset by peer: mat1")
    assert classify_failure(text, exit_code=1) == "user"


def test_a_size_that_overflowed_is_no_lack_of_memory():
    words = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory."
    assert classify_failure(words) == "user"


def failure(outcome, at, *, rank=0, signal=""):
    return Failure(task="t", attempt=1, rank=rank, host="h", pid=1, outcome=outcome, signal=signal, failed_at=at)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["peer", "device_oom", "user"], "device_oom"),
        (["peer", "user"], "user"),
        (["peer", "unknown"], "unknown"),
        (["peer", "signal"], "signal"),
        (["signal", "disk"], "disk"),
        (["host_oom", "device_oom"], "host_oom"),
        (["peer"], "peer"),
    ],
)
def test_the_root_of_several_failures(outcomes, expected):
    failures = [failure(outcome, at, rank=at) for at, outcome in enumerate(outcomes)]
    assert find_root_failure(failures).outcome == expected
    assert find_root_failure(reversed(failures)).outcome == expected


def test_among_equals_the_earliest_is_the_root():
    assert find_root_failure([failure("user", 5.0, rank=0), failure("user", 4.0, rank=7)]).rank == 7


def test_a_rank_that_was_reported_to_end_is_not_the_root():
    answer = failure("signal", 3.0, signal="SIGTERM")
    assert find_root_failure([answer, failure("peer", 2.0)]).outcome == "peer"


def test_a_divergence_is_known_by_its_error_whatever_was_handled_meanwhile():
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise Diverged("the loss is not finite at epoch 0.25, step 3, 48 samples")  # noqa: B904 - as in a handler
    except Diverged:
        assert classify_failure(traceback.format_exc(), exit_code=1) == "diverged"


def test_no_failure_has_no_root():
    assert find_root_failure([]) is None


@pytest.mark.parametrize("outcome", get_args(OutcomeClass))
def test_advice_is_one_line(outcome):
    assert describe_advice(outcome)
    assert "\n" not in describe_advice(outcome)
