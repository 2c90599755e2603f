"""The shell lines with which a job opens its log, run by the shells that schedulers use."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tula_cli.cluster import scheduler
from tula_cli.cluster.scheduler import make_lines_to_open_log, quote_log_path

SHELLS = ("sh", "bash")


def start(shell: str, folder: Path, *, timeout: int, python: str = sys.executable) -> "subprocess.Popen[str]":
    """Start a job whose log is in `folder`/logs and which starts in `folder`/work."""
    lines = make_lines_to_open_log(
        quote_log_path(folder / "logs", "7", "log"),
        folder=shlex.quote(str(folder / "work")),
        timeout=timeout,
        python=python,
        on_wait=['echo "waits: $tula_why"'],
        on_give_up=['echo "gave up after $tula_waited s: $tula_why"'],
        on_resume=["echo resumed"],
    )
    script = folder.parent / "job.sh"
    script.write_text("\n".join([*lines, "echo done in $PWD", "echo complaint >&2"]))
    return subprocess.Popen([shell, script], cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what a job needs, whose name a shell would take apart."""
    path = tmp_path / "a user's (2nd) $HOME"
    for name in ("logs", "work"):
        (path / name).mkdir(parents=True)
    return path


@pytest.mark.parametrize("shell", SHELLS)
def test_a_job_whose_folders_are_there_writes_its_log_at_once(shell: str, folder: Path) -> None:
    assert start(shell, folder, timeout=0).communicate()[0] == ""
    assert (folder / "logs/7_log.out").read_text() == f"done in {folder / 'work'}\n"
    assert (folder / "logs/7_log.err").read_text() == "complaint\n"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("away", "words"),
    [
        ("logs", "logs/7_log.out"), ("work", "work"), ("", "work"), ("logs/7_log.err", "7_log.err"), ("python", "not executable"),
    ],
)  # fmt: skip
def test_a_job_waits_for_what_is_away_and_says_why(
    shell: str, folder: Path, away: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_RETRY_PAUSE_SECONDS", 1)
    place, python = folder / away, folder.parent / "python"
    python.symlink_to(sys.executable)
    hidden = folder.with_name("hidden")
    if away == "python":
        python.rename(hidden)
    elif away.endswith(".err"):
        place.mkdir()  # it cannot be written
    else:
        place.rename(hidden)
    job = start(shell, folder, timeout=60, python=str(python))
    assert job.stdout is not None
    answer = job.stdout.readline()
    assert answer.startswith("waits: ") and words in answer
    if away.endswith(".err"):
        place.rmdir()
    else:
        hidden.rename(python if away == "python" else place)
    assert job.wait(20) == 0
    log = (folder / "logs/7_log.out").read_text()
    assert log == f"resumed\ndone in {folder / 'work'}\n"
    assert words in (folder / "logs/7_log.err").read_text().splitlines()[0]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_job_gives_up_when_its_timeout_is_over(shell: str, folder: Path) -> None:
    (folder / "logs").rmdir()
    (folder / "logs").write_text("not a folder")
    began = time.monotonic()
    job = start(shell, folder, timeout=1)
    lines = job.communicate()[0].splitlines()
    assert job.returncode == 1 and time.monotonic() - began < 20
    assert [line.partition(":")[0] for line in lines] == ["waits", "gave up after 1 s"]
    assert "irectory" in lines[-1], "the cause, in the shell's words"
