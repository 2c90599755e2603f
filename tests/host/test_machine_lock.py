"""Probes that share a device run one after the other in the order of their arrival, and no other user can keep them from that."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tula_cli.host import devices, machine_lock
from tula_cli.host.machine_lock import (
    TicketHolder,
    UntrustedFolder,
    describe_queue_position,
    list_living_tickets,
    make_ticket_folder,
)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(machine_lock, "TEMPORARY_FOLDER", tmp_path)
    monkeypatch.setattr(machine_lock, "RUNTIME_FOLDER", tmp_path / "run-user")
    return tmp_path


def probe(name: str, *names: str) -> TicketHolder:
    return TicketHolder(f"{name} of /runs/one", names, measures=True)


def test_a_waiting_probe_says_for_whom_it_waits_and_its_place() -> None:
    first, second, third = probe("a", "gpu 0"), probe("b", "gpu 0", "gpu 1"), probe("c", "gpu 1")
    assert first.list_probes_to_wait_for() == [] and describe_queue_position("a of /runs/one") == ""
    assert second.list_probes_to_wait_for() == [first.ticket]
    assert third.list_probes_to_wait_for() == [second.ticket], "it shares no device with the first"
    assert (
        describe_queue_position("b of /runs/one")
        == f"waiting for a of /runs/one (process {os.getpid()}, GPU 0) to finish measuring; position 1 in the queue of this machine"
    )
    fourth = probe("d", "gpu 0")
    assert fourth.list_probes_to_wait_for() == [
        first.ticket,
        second.ticket,
    ] and "position 2 " in describe_queue_position("d of /runs/one")
    first.close()
    assert second.list_probes_to_wait_for() == [] and fourth.list_probes_to_wait_for() == [second.ticket]
    second.close()
    assert third.list_probes_to_wait_for() == [] == fourth.list_probes_to_wait_for()


# devices of two probes, and whether the later one waits
CONFLICTS = [
    (["gpu 0"], ["gpu 0"], True),
    (["gpu 0"], ["gpu 1"], False),
    (["gpu 0", "gpu 1"], ["gpu 1"], True),
    (["gpu 0", "gpu 1"], ["gpu 2", "gpu 3"], False),
    (["gpu GPU-8a"], ["gpu GPU-8a"], True),
    (["gpu GPU-8a"], ["gpu GPU-8b"], False),
    (["core 0", "core 1"], ["core 1", "core 2"], True),
    (["core 0", "core 1"], ["core 2", "core 3"], False),
    (["core 0"], ["gpu 0"], False),
    (["gpu MIG-1"], ["gpu MIG-2"], False),
    ([], ["gpu 0"], True),
]


@pytest.mark.parametrize(("first", "second", "waits"), CONFLICTS)
def test_only_probes_that_share_a_device_wait_for_each_other(first: list[str], second: list[str], waits: bool) -> None:
    earlier, later = probe("a", *first), probe("b", *second)
    assert bool(later.list_probes_to_wait_for()) is waits and not earlier.list_probes_to_wait_for()
    earlier.close()
    later.close()


def test_nobody_waits_for_a_training_and_a_probe_sees_it() -> None:
    training = TicketHolder("train-x of /runs/one", ["core 0", "core 1"], measures=False)
    measuring = probe("a", "core 1")
    assert measuring.list_probes_to_wait_for() == [] and [
        conflicting_training.holder for conflicting_training in measuring.list_conflicting_trainings()
    ] == ["train-x of /runs/one"]
    assert probe("b", "core 7").list_conflicting_trainings() == []
    training.close()
    assert measuring.list_conflicting_trainings() == []


def test_one_ticket_a_process_is_left_where_none_is_given_back() -> None:
    code = "import os, sys; sys.path[:0] = sys.argv[1].split(':'); from tula_cli.host.machine_lock import *; TicketHolder('x', ['gpu 0'], measures=True); print('drawn', flush=True); os.kill(os.getpid(), 9)"
    child = subprocess.run(
        [sys.executable, "-c", code, ":".join(sys.path)], capture_output=True, text=True, check=False
    )
    assert child.stdout == "drawn\n" and len(list(make_ticket_folder().iterdir())) == 1
    assert list_living_tickets() == [], "a dead one is passed over at once"
    assert probe("a", "gpu 0").list_probes_to_wait_for() == [] and len(list(make_ticket_folder().iterdir())) == 1


# what XDG_RUNTIME_DIR is, and whether the folder of tickets is in it
RUNTIMES = [
    ("private", True),
    ("unset", False),
    ("empty", False),
    ("missing", False),
    ("relative", False),
    ("open to all", False),
    ("a file", False),
    ("a link", False),
    ("read-only", False),
]


@pytest.mark.parametrize(("kind", "used"), RUNTIMES)
def test_tickets_are_under_the_session_folder_or_in_tmp_by_user(
    kind: str, used: bool, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = places / "runtime"
    if kind == "unset":
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    elif kind in ("empty", "missing", "relative"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", {"empty": "", "missing": str(places / "no"), "relative": "runtime"}[kind])
        monkeypatch.chdir(places)
    elif kind == "open to all":
        runtime.chmod(0o777)
    elif kind == "read-only":
        monkeypatch.setattr(Path, "mkdir", _refused(runtime, Path.mkdir))
    elif kind != "private":
        runtime.rmdir()
        (places / "elsewhere").mkdir(mode=0o700)
        runtime.touch() if kind == "a file" else runtime.symlink_to(places / "elsewhere")
    expected = runtime / "tula" if used else places / f"tula-{os.getuid()}"
    assert make_ticket_folder() == expected and expected.stat().st_mode & 0o777 == 0o700


def _refused(under: Path, make):
    def mkdir(self: Path, *arguments, **options):
        if self.parent == under:
            raise PermissionError(13, "Permission denied")
        return make(self, *arguments, **options)

    return mkdir


@pytest.mark.parametrize("kind", ["of another user", "a link", "a file", "a pipe", "open to all"])
def test_what_another_user_has_put_into_tmp_is_not_used(
    kind: str, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    place = places / f"tula-{os.getuid()}"
    if kind == "of another user":
        place = places / f"tula-{os.getuid() + 1}"
        place.mkdir(mode=0o700)
        monkeypatch.setattr(machine_lock.os, "getuid", lambda: os.geteuid() + 1)
    elif kind == "a link":
        (places / "precious").mkdir(mode=0o700)
        place.symlink_to(places / "precious")
    elif kind == "open to all":
        place.mkdir()
        place.chmod(0o777)
    else:
        place.touch() if kind == "a file" else os.mkfifo(place)
    with pytest.raises(UntrustedFolder, match="not a private folder of this user"):
        probe("a", "gpu 0")
    assert list_living_tickets() == [] and describe_queue_position("a of /runs/one") == ""


def test_a_session_folder_that_is_removed_at_logout_is_made_anew(places: Path) -> None:
    first, second = probe("a", "gpu 0"), probe("b", "gpu 0")
    for path in make_ticket_folder().iterdir():
        path.unlink()
    make_ticket_folder().rmdir()
    assert first.list_probes_to_wait_for() == [], "the first to look draws the first ticket"
    assert second.list_probes_to_wait_for() == [first.ticket]


def test_a_number_that_another_probe_has_drawn_anew_is_not_taken_for_the_old_ticket(places: Path) -> None:
    first, second = probe("a", "gpu 0"), probe("b", "gpu 0")
    shutil.rmtree(make_ticket_folder())
    assert second.list_probes_to_wait_for() == [] and second.ticket.number == 1, (
        "the first to look draws the first ticket"
    )
    assert first.list_probes_to_wait_for() == [second.ticket], "although its own old number is 1"
    first.close()
    assert list_living_tickets() == [second.ticket]


def test_a_ticket_that_cannot_be_drawn_anew_closes_no_file_of_others(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = probe("a", "gpu 0")
    shutil.rmtree(make_ticket_folder())
    with monkeypatch.context() as patch:
        patch.setattr(machine_lock, "make_ticket_folder", lambda: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            ticket.list_probes_to_wait_for()
        with open(os.devnull) as other:  # it gets the number of the descriptor that was closed
            with pytest.raises(OSError, match="no space"):
                ticket.list_probes_to_wait_for()
            ticket.close()
            assert other.read() == ""
    assert ticket.list_probes_to_wait_for() == [] and len(list_living_tickets()) == 1, "it is drawn once that works"
    ticket.close()


def test_a_ticket_of_another_version_is_waited_for(places: Path) -> None:
    other = probe("a", "gpu 0")
    (make_ticket_folder() / "1").write_text("{}")
    assert probe("b", "gpu 5").list_probes_to_wait_for()[0].holder == "another process"
    other.close()


# CUDA_VISIBLE_DEVICES, ranks, and the GPUs that are used of UUIDs A to D
VISIBLE = [
    (None, 1, ["GPU-A"]),
    (None, 2, ["GPU-A", "GPU-B"]),
    ("2", 1, ["GPU-C"]),
    ("2,0", 2, ["GPU-C", "GPU-A"]),
    ("GPU-D", 1, ["GPU-D"]),
    ("GPU-B,GPU-C", 1, ["GPU-B"]),
    ("1", 3, ["GPU-B"]),
    ("MIG-7", 1, ["MIG-7"]),
    ("-1", 1, []),
    ("", 1, []),
]


@pytest.mark.parametrize(("visible", "ranks", "expected"), VISIBLE)
def test_gpus_are_named_alike_in_all_processes(
    visible: str | None, ranks: int, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(devices, "GPU_DRIVER_FILES", (str(tmp_path / "nvidia0"),))
    monkeypatch.setattr(devices, "DEVICE_FOLDER", tmp_path)
    rows = [[str(number), f"GPU-{'ABCD'[number]}", "H100"] for number in range(4)]
    monkeypatch.setattr(devices, "_run_nvidia_smi", lambda *_: rows)
    assert devices.list_gpu_lock_names(ranks) == expected
    monkeypatch.setattr(devices, "_run_nvidia_smi", lambda *_: [])
    assert len(devices.list_gpu_lock_names(ranks)) == len(expected)
    if visible == "2":
        rows[3][2] = "T4"
        monkeypatch.setattr(devices, "_run_nvidia_smi", lambda *_: rows)
        assert len(devices.list_gpu_lock_names(ranks)) == 4, "CUDA may number them otherwise"


def test_processors_of_one_core_are_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, siblings in enumerate(("0,2", "1-3", "0,2")):
        (tmp_path / f"cpu{number}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(machine_lock, "CORES_FOLDER", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 7})
    assert machine_lock.list_core_devices() == ["core 0", "core 1", "core 7"]
    assert machine_lock.describe_devices(["core 0", "core 1", "core 2", "core 7"]) == "cores 0-2, 7"


_WORKER = """
import json, os, random, sys, time
sys.path[:0] = sys.argv[1].split(":")
from tula_cli.host.machine_lock import TicketHolder
log, seed, turns = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chance = random.Random(seed)
for turn in range(turns):
    names = chance.sample(["gpu 0", "gpu 1", "gpu 2", "gpu 3"], chance.choice([1, 1, 2, 3]))
    ticket = TicketHolder("x", names, measures=True)
    def note(what):
        line = json.dumps([what, ticket.ticket.number, os.getpid(), names, time.monotonic()]) + "\\n"
        os.write(out, line.encode())
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    note("drawn")
    while ticket.list_probes_to_wait_for():
        time.sleep(0.002)
    note("begin")
    time.sleep(chance.uniform(0, 0.02))
    note("end")
    ticket.close()
    os.close(out)
"""


def stress(places: Path, *, acquisitions: int, processes: int, seed: int) -> tuple[int, int]:
    """Let processes draw tickets while some are killed at random; return how many turns were had, and how many kills there were."""
    log, chance, kills, turns = places / "log", random.Random(seed), 0, max(1, acquisitions // processes)
    deadline, number = time.monotonic() + 240, 0

    def start() -> "subprocess.Popen[bytes]":
        nonlocal number
        number += 1
        words = [sys.executable, "-c", _WORKER, ":".join(sys.path), str(log), str(seed * 1000 + number), str(turns)]
        return subprocess.Popen(words)

    children = [start() for _ in range(processes)]
    killed = set()
    while children:
        assert time.monotonic() < deadline, "a process waits for ever"
        time.sleep(chance.uniform(0, 0.15))
        children = [child for child in children if child.poll() is None]
        if children and log.exists() and kills < acquisitions // 8:
            victim = chance.choice(children)
            victim.send_signal(signal.SIGKILL)
            killed.add(victim.pid)
            kills += 1
            children.append(start())
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    holds: dict[str, tuple[int, int]] = {}
    had = 0
    for what, ticket, pid, names, _ in rows:
        if what == "begin":
            had += 1
            for name in names:
                assert name not in holds or holds[name][1] in killed, f"{name} is held twice"
                holds[name] = (ticket, pid)
        elif what == "end":
            for name in names:
                assert holds.pop(name)[0] == ticket
    turns_had: list[list[Any]] = []  # each with when its ticket was drawn and when it began: numbers come again
    last: dict[int, list[Any]] = {}
    for what, ticket, pid, names, at in rows:
        if what == "drawn":
            last[pid] = [at, None, ticket, set(names)]
            turns_had.append(last[pid])
        elif what == "begin":
            last[pid][1] = at
    complete = [turn for turn in turns_had if turn[1] is not None]
    # of two that share a device and waited together the earlier one went first
    for drawn, begun, ticket, names in complete:
        for later_drawn, later_begun, later_ticket, later_names in complete:
            if ticket < later_ticket and drawn < later_drawn < begun and names & later_names:
                assert begun <= later_begun, "the later one went first"
    assert list_living_tickets() == []
    return had, kills


def test_random_kills_leave_nobody_waiting_and_no_device_held_twice(places: Path) -> None:
    had, kills = stress(places, acquisitions=48, processes=4, seed=1)
    assert had >= 24 and kills >= 3


@pytest.mark.proof
def test_eight_processes_and_random_kills(places: Path) -> None:
    had, kills = stress(places, acquisitions=240, processes=8, seed=int(os.environ.get("TULA_SEED", "0")))
    assert had >= 200 and kills >= 20
