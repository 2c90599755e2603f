"""The folder of one start of a script."""

import json
import os
from pathlib import Path

from tula_cli.run import files, script_attempt
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_json_lines
from tula_cli.run.script_attempt import ScriptAttempt


def test_nothing_is_there_before_it_is_written(tmp_path: Path) -> None:
    attempt = ScriptAttempt(tmp_path, "p", 1)
    assert attempt.read_results() == attempt.read_failures() == attempt.read_rows(0) == []
    assert attempt.read_heartbeat(0) is None and attempt.read_end_time() is None and attempt.read_newest_row(0) == {}


def test_the_output_of_a_script_is_the_folder_that_was_written_last(tmp_path: Path) -> None:
    training = RunDir(tmp_path).get_training("ab12cd34")
    assert training.find_script_output() is None
    for age, name in ((20, "out"), (10, "out-64")):
        folder = training.path / name
        folder.mkdir(parents=True)
        os.utime(folder, (1e9 - age, 1e9 - age))
        assert training.find_script_output() == folder


def test_the_newest_row_is_found_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    attempt = ScriptAttempt(tmp_path, "t", 1)
    attempt.path.mkdir(parents=True)
    rows = [{"kind": "row" if step % 3 else "gap", "step": step} for step in range(5000)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (attempt.path / "steps-0.jsonl").write_text(text + '{"kind": "row", "st')
    assert len(text) > 2 * script_attempt.TAIL_BYTES
    assert attempt.read_newest_row(0) == {"kind": "row", "step": 4999}
    assert attempt.read_rows(0) == rows


def test_lines_of_the_end_begin_with_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text('{"a": 1}\n{"a": 2}\nnot json\n{"a": 3}\n')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert list(read_json_lines(path, last_bytes=12)) == [{"a": 3}]
    assert list(read_json_lines(path, last_bytes=1000)) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_the_end_that_is_near_is_reported_once(tmp_path: Path) -> None:
    attempt = ScriptAttempt(tmp_path, "t", 1)
    before = files.read_change_marker(attempt.run)
    attempt.write_allocation_end(1234.56)
    assert files.read_change_marker(attempt.run) not in (None, before), "followers look where there is news"
    attempt.write_allocation_end(9.0)
    assert attempt.read_end_time() == 1234.6
