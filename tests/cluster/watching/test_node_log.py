"""One log a node: whole lines of several ranks, and of each its own last words."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, BinaryIO

import make_runs
import pytest

from tula_cli.cluster import node_log
from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.node_log import RankOutput, get_log_path
from tula_cli.run.directory import RunDir
from tula_cli.words import parse_rank

SAYS = """
import os, sys, time
for part, times in {parts!r}:
    os.write(1, part * times)
    time.sleep(0.02)
"""


def rank(output: IO[bytes], *said: bytes | tuple[bytes, int]) -> "subprocess.Popen[bytes]":
    """A process that writes these words, each by itself and so many times."""
    parts = [item if isinstance(item, tuple) else (item, 1) for item in said]
    return subprocess.Popen([sys.executable, "-c", SAYS.format(parts=parts)], stdout=output, stderr=subprocess.STDOUT)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", make_runs.spec())


def test_lines_of_the_ranks_of_a_node_do_not_mix_and_each_keeps_its_own_last_words(run: RunDir) -> None:
    log = run.log_path("train-s-1", 1)
    first, second = RankOutput(shared=True), RankOutput(shared=True, rank=1)
    with first.write_into(run, log) as item, second.write_into(run, log) as two:
        began = rank(item, *[b"zer", b"o\n"] * 10, b"\r10 %", b"\r20 %", b"\n", b"no end")
        other = rank(
            two, *[b"o", b"n", b"e\r\n"] * 10, b"[rank1]: Traceback\n", b"[rank1]:[W1125 c10d]\n", b"ValueError: mine"
        )
        assert began.wait() == other.wait() == 0
    assert first.end_of_output(log).splitlines() == ["zero"] * 10 + ["", "10 %", "20 %", "no end"]
    assert second.end_of_output(log).splitlines() == ["one"] * 10 + [
        "[rank1]: Traceback",
        "[rank1]:[W1125 c10d]",
        "ValueError: mine",
    ]
    lines = log.read_text().splitlines()
    assert [line for line in lines if parse_rank(line) is None] == ["zero"] * 10 + ["", "10 %", "20 %", "no end"]
    value = [line for line in lines if parse_rank(line) == 1]
    assert value == ["[rank1]: one"] * 10 + ["[rank1]: Traceback", "[rank1]:[W1125 c10d]", "[rank1]: ValueError: mine"]
    assert len(lines) == 27
    first.close(), second.close()


def test_the_next_attempt_writes_into_its_own_log_and_what_is_remembered_begins_anew(run: RunDir) -> None:
    output, logs = RankOutput(shared=True, rank=3), [run.log_path("train-s-1", number) for number in (1, 2)]
    for number, log in enumerate(logs):
        with output.write_into(run, log) as pipe:
            rank(pipe, b"attempt %d\n" % number).wait()
        assert output.end_of_output(log) == f"attempt {number}\n"
    assert [log.read_text() for log in logs] == ["[rank3]: attempt 0\n", "[rank3]: attempt 1\n"]
    output.close()


def test_long_output_is_remembered_by_its_end_and_a_line_without_end_is_cut(run: RunDir) -> None:
    log, output = run.log_path("train-s-1", 1), RankOutput(shared=True, rank=1)
    with output.write_into(run, log) as pipe:
        rank(pipe, (b"x", 200_000), (b"\n", 30_000), b"last\n").wait()
    assert output.end_of_output(log).endswith("\nlast\n") and len(output.end_of_output(log)) == node_log.TAIL
    text = log.read_text()
    assert text.count("x") == 200_000 and text.count("\n") <= 30_006
    output.close()


class Elsewhere:
    """A run whose logs are other files."""

    def __init__(self, *files: BinaryIO) -> None:
        self.files = list(files)

    def open_log(self, _: Path) -> BinaryIO:
        return self.files.pop(0)


def test_a_rank_goes_on_where_its_log_finds_no_room(run: RunDir) -> None:
    output = RankOutput(shared=True, rank=1)
    with output.write_into(Elsewhere(open("/dev/full", "ab")), run.path) as pipe:  # type: ignore[arg-type]
        assert rank(pipe, *[(b"y", 50_000), b"\n"] * 5, b"OSError: no room\n").wait(timeout=20) == 0
    assert output.end_of_output(run.path).endswith("y\nOSError: no room\n")
    output.close()


def test_words_are_of_their_own_attempt_though_the_disk_hangs(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_log, "_MARK_TIMEOUT", 0.3)
    far, near = os.pipe()
    full = os.fdopen(near, "wb", buffering=0)
    full.write(bytes(65_536))  # nobody reads: whoever writes waits
    log = run.path / "second.log"
    output = RankOutput(shared=True, rank=1)
    elsewhere = Elsewhere(full, run.open_log(log))
    with output.write_into(elsewhere, log) as pipe:  # type: ignore[arg-type]
        for _ in range(2 * node_log._MAX_WAITING):
            pipe.write(b"step\n")
            time.sleep(0.0005)
        assert rank(pipe, b"OutOfMemoryError\n").wait(timeout=20) == 0, "a rank does not wait"
    assert output.end_of_output(log).endswith("step\nOutOfMemoryError\n")
    with output.write_into(elsewhere, log) as pipe:  # type: ignore[arg-type]
        rank(pipe, b"ValueError: mine\n").wait()
        os.read(far, 65_536)  # it hangs no more
    assert output.end_of_output(log) == "ValueError: mine\n"
    output.close()


def test_one_that_is_alone_on_its_node_lets_its_ranks_write_themselves(run: RunDir) -> None:
    log, output = run.log_path("train-s-1", 1), RankOutput()
    with output.write_into(run, log) as file:
        rank(file, b"half").wait()
        assert log.read_text() == "half"
    assert output.end_of_output(log) == "half"
    assert RankOutput().end_of_output(run.path / "none") == ""
    output.close()


def test_the_log_of_a_node_bears_the_index_of_its_first_supervisor(run: RunDir) -> None:
    def name(index: int, local: int, *near: int, count: int = 16, nodes: int | None = 2) -> str:
        allocation = Allocation(index, count, local, "7", nodes=nodes, neighbours=near)
        return get_log_path(run, allocation, "train-s-1", 2).name

    assert [name(0, 0), name(7, 7)] == ["train-s-1.002.log"] * 2
    assert [name(8, 0), name(15, 7)] == ["train-s-1.002.0008.log"] * 2
    assert name(1, 0, count=2) == "train-s-1.002.0001.log", "one a node"
    assert name(3, 3, nodes=None) == "train-s-1.002.0003.log", "nobody tells how many nodes there are"
    assert name(3, 1, 2, 3, count=4) == "train-s-1.002.0002.log"
    assert name(3, 1, 1, 3, count=4) == "train-s-1.002.0003.log", "srun --distribution=cyclic: each has its own"


def test_a_log_beyond_its_limit_keeps_its_beginning_and_its_end_and_says_what_was_dropped(tmp_path: Path) -> None:
    log, written = tmp_path / "log", 0
    with open(log, "ab", buffering=0) as rank_output:
        for number in range(40_000):
            written += rank_output.write(b"line %d\n" % number)
            if number % 1000 == 0:
                node_log.cap_log(log, most=2**16)
        lines = log.read_bytes().splitlines()
        node_log.cap_log(log, most=2**16)
        size = log.stat().st_size
        rank_output.write(b"after\n")
    assert size <= 2**16 and lines[0] == b"line 0" and log.read_bytes().endswith(b"line 39999\nafter\n")
    dropped = [line for line in log.read_bytes().splitlines() if line.startswith(b"tula: ")]
    assert len(dropped) == 1 and b"bytes of this log were dropped here" in dropped[0]
    kept = sum(len(line) + 1 for line in log.read_bytes().splitlines() if line.startswith(b"line "))
    assert int(dropped[0].split()[1]) == written - kept
    node_log.cap_log(tmp_path / "none")


def test_lines_of_metrics_are_kept_however_often_the_middle_is_dropped(tmp_path: Path) -> None:
    log, patterns = tmp_path / "log", (r"(?i)accuracy: (\d+)", r"^\[rank0\]: top1=(\S+)$")
    with open(log, "ab", buffering=0) as rank_output:
        for number in range(40_000):
            rank_output.write(b"line %d\n" % number)
            if number % 2000 == 1000:
                rank_output.write(b"Accuracy: %d\n[rank0]: top1=%d.5\nloss 1.0\n" % (number, number))
            if number % 1000 == 0:
                node_log.cap_log(log, most=2**16, keep=patterns)
    node_log.cap_log(log, most=2**16, keep=patterns)
    text = log.read_text()
    assert log.stat().st_size <= 2**16 and text.count("were dropped here") == 1
    assert [int(value) for value in re.findall("Accuracy: (.*)", text)] == list(range(1000, 40_000, 2000))
    assert text.count("top1=") == 20 and text.count("loss 1.0") < 20


def test_kept_lines_do_not_fill_the_disk_either(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for _ in range(3):
        with open(log, "ab") as file:
            file.write(b"".join(b"loss: %d\n" % number for number in range(40_000)))
        node_log.cap_log(log, most=2**16, keep=["loss: (.*)"])
        lines = log.read_bytes().splitlines()
        assert log.stat().st_size <= 2**16 and lines[0] == b"loss: 0" and lines[-1] == b"loss: 39999"
        assert all(line.startswith((b"loss: ", b"tula: ")) for line in lines)


def test_a_line_without_an_end_does_not_fill_the_disk(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\r42 %" * 2**16)
    node_log.cap_log(log, most=2**16)
    assert log.stat().st_size <= 2**15 and log.read_bytes().endswith(b"\r42 %")
