"""Writes the console sessions of README and the pages: what commands print on a recorded run.

    python docs/sessions.py            # `make docs` runs it; a test compares the pages with what it would write
    python docs/sessions.py --record   # runs the quickstart again, in place of the recorded one; leave the machine idle

`<!-- session: NAME -->` above a console block marks the place of a session of `SESSIONS`.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [path for path in (str(ROOT / "tests/golden"), str(ROOT / "tests/helpers")) if path not in sys.path]

import recorded_runs  # noqa: E402

RECORDED = "quickstart"
JOB = Path("configs/quickstart.yaml")
PLACE = re.compile(r"(<!-- session: ([\w-]+) -->\n\n?```console\n)(.*?)```", re.DOTALL)
ENVIRONMENT = {"COLUMNS": "100", "LC_ALL": "C.UTF-8", "NO_COLOR": "1", "TZ": "UTC", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Command:
    """One command of a session.

    Args:
        words: the command line after `tula`.
        until: the output is cut after the first line that begins with this; empty: nothing is cut.
        is_trained: the recorded training has finished before the command.
        is_recorded: the command is about the recorded run; otherwise it runs in an empty folder.
    """

    words: str
    until: str = ""
    is_trained: bool = False
    is_recorded: bool = True


PROFILE = Command(f"profile {JOB} --yes", until="    1    128")
RECOMMEND = Command("recommend", until=" P")
TRAIN = Command("train --yes", until="  steps", is_trained=True)
FROM_COMMAND = Command(
    'init --from-command "torchrun --nproc-per-node 4 train.py --batch-size 64 --lr 0.1 --epochs 90 --output-dir out"',
    is_recorded=False,
)
SESSIONS = {
    "readme": (Command("recommend", until="2  "), Command("train --yes", until="time", is_trained=True)),
    "profile": (PROFILE,),
    "recommend": (RECOMMEND,),
    "train": (TRAIN,),
    "from-command": (FROM_COMMAND,),
}


def make_session(name: str) -> str:
    """Return the text of a session: each command with its output."""
    return "\n".join(run_command(command) for command in SESSIONS[name])


def run_command(command: Command) -> str:
    """Return a command and what it prints on the recorded run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve() / "work"
        folder.mkdir()
        if command.is_recorded:
            lay_out(folder, is_trained=command.is_trained)
        home = folder.parent / "home"
        environment = {
            **ENVIRONMENT,
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(home),
            "TMPDIR": str(folder.parent),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
        }
        home.mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "tula_cli", *shlex.split(command.words)],
            cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"tula {command.words}: exit {done.returncode}\n{done.stderr}")
    return f"$ tula {command.words}\n{cut(done.stdout, command.until)}"


def lay_out(folder: Path, *, is_trained: bool) -> None:
    """Write the recorded run, its job and, unless it comes later, its training into a folder."""
    recorded_runs.lay_out(RECORDED, folder)
    if (folder / JOB).read_text() != (ROOT / JOB).read_text():
        raise SystemExit(f"{JOB} has changed since it was recorded: python docs/sessions.py --record")
    if not is_trained:
        for run in folder.glob("tula-runs/quickstart-*"):
            shutil.rmtree(run / "train")
            for path in [*run.glob("*/train-*"), *run.glob("train-*")]:
                path.unlink()


def cut(text: str, until: str) -> str:
    """Return the lines of a text without trailing blanks, up to the first one that begins with `until`."""
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    last = next((number for number, line in enumerate(lines) if until and line.startswith(until)), len(lines) - 1)
    return "\n".join([*lines[: last + 1], *(["..."] if last + 1 < len(lines) else []), ""])


def fill_in(page: str) -> str:
    """Return a page with its sessions as the commands print them now."""
    return PLACE.sub(lambda place: f"{place[1]}{make_session(place[2])}```", page)


def record() -> None:
    """Run the quickstart and store it as the recorded run, without checkpoints."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / JOB).parent.mkdir(parents=True)
        shutil.copy(ROOT / JOB, folder / JOB)
        for words in (f"profile {JOB} --yes", "recommend", "train --yes"):
            subprocess.run([sys.executable, "-m", "tula_cli", *words.split()], cwd=folder, check=True)
        store(folder)


def store(folder: Path) -> None:
    """Store the run of a folder without checkpoints, which no session reads."""
    for path in folder.glob("tula-runs/*/train/*/checkpoints/*"):
        path.write_bytes(b"")
    recorded_runs.record(folder, RECORDED, ("configs", "tula-runs"))


def main() -> None:
    if "--record" in sys.argv:
        record()
    for page in [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]:
        text = page.read_text(encoding="utf-8")
        if PLACE.search(text):
            page.write_text(fill_in(text), encoding="utf-8")


if __name__ == "__main__":
    main()
