"""A log that grows without end keeps its beginning, its end and its metrics."""

import re
from pathlib import Path

from tula_cli.cluster import attempt


def test_a_log_beyond_its_limit_keeps_its_beginning_and_its_end_and_says_what_was_dropped(tmp_path: Path) -> None:
    log, written = tmp_path / "log", 0
    with open(log, "ab", buffering=0) as rank_output:
        for number in range(40_000):
            written += rank_output.write(b"line %d\n" % number)
            if number % 1000 == 0:
                attempt.truncate_log(log, max_bytes=2**16)
        lines = log.read_bytes().splitlines()
        attempt.truncate_log(log, max_bytes=2**16)
        size = log.stat().st_size
        rank_output.write(b"after\n")
    assert size <= 2**16 and lines[0] == b"line 0" and log.read_bytes().endswith(b"line 39999\nafter\n")
    dropped = [line for line in log.read_bytes().splitlines() if line.startswith(b"tula: ")]
    assert len(dropped) == 1 and b"bytes of this log were dropped here" in dropped[0]
    kept = sum(len(line) + 1 for line in log.read_bytes().splitlines() if line.startswith(b"line "))
    assert int(dropped[0].split()[1]) == written - kept
    attempt.truncate_log(tmp_path / "none")


def test_lines_of_metrics_are_kept_however_often_the_middle_is_dropped(tmp_path: Path) -> None:
    log, patterns = tmp_path / "log", (r"(?i)accuracy: (\d+)", r"^\[rank0\]: top1=(\S+)$")
    with open(log, "ab", buffering=0) as rank_output:
        for number in range(40_000):
            rank_output.write(b"line %d\n" % number)
            if number % 2000 == 1000:
                rank_output.write(b"Accuracy: %d\n[rank0]: top1=%d.5\nloss 1.0\n" % (number, number))
            if number % 1000 == 0:
                attempt.truncate_log(log, max_bytes=2**16, keep=patterns)
    attempt.truncate_log(log, max_bytes=2**16, keep=patterns)
    text = log.read_text()
    assert log.stat().st_size <= 2**16 and text.count("were dropped here") == 1
    assert [int(value) for value in re.findall("Accuracy: (.*)", text)] == list(range(1000, 40_000, 2000))
    assert text.count("top1=") == 20 and text.count("loss 1.0") < 20


def test_kept_lines_do_not_fill_the_disk_either(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for _ in range(3):
        with open(log, "ab") as file:
            file.write(b"".join(b"loss: %d\n" % number for number in range(40_000)))
        attempt.truncate_log(log, max_bytes=2**16, keep=["loss: (.*)"])
        lines = log.read_bytes().splitlines()
        assert log.stat().st_size <= 2**16 and lines[0] == b"loss: 0" and lines[-1] == b"loss: 39999"
        assert all(line.startswith((b"loss: ", b"tula: ")) for line in lines)


def test_a_line_without_an_end_does_not_fill_the_disk(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\r42 %" * 2**16)
    attempt.truncate_log(log, max_bytes=2**16)
    assert log.stat().st_size <= 2**15 and log.read_bytes().endswith(b"\r42 %")
