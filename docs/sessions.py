"""Write the console sessions of README and the pages: the output of commands on a recorded run.

    python docs/sessions.py            # run by `make docs`; a test compares the committed pages with its output
    python docs/sessions.py --record   # records the quickstart again; leave the machine otherwise idle

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
SESSION_BLOCK = re.compile(r"(<!-- session: ([\w-]+) -->\n\n?```console\n)(.*?)```", re.DOTALL)
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
    """Run a command on the recorded run, and return the command line and its output."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve() / "work"
        folder.mkdir()
        if command.is_recorded:
            copy_recorded_run(folder, is_trained=command.is_trained)
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
        completed = subprocess.run(
            [sys.executable, "-m", "tula_cli", *shlex.split(command.words)],
            cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    if completed.returncode:
        raise SystemExit(f"tula {command.words}: exit {completed.returncode}\n{completed.stderr}")
    return f"$ tula {command.words}\n{cut_after(completed.stdout, command.until)}"


def copy_recorded_run(folder: Path, *, is_trained: bool) -> None:
    """Write the recorded run and its job into a folder, with its training if `is_trained`."""
    recorded_runs.copy_run(RECORDED, folder)
    if (folder / JOB).read_text() != (ROOT / JOB).read_text():
        raise SystemExit(f"{JOB} has changed since it was recorded: python docs/sessions.py --record")
    if not is_trained:
        for run in folder.glob("tula-runs/quickstart-*"):
            shutil.rmtree(run / "train")
            for path in [*run.glob("*/train-*"), *run.glob("train-*")]:
                path.unlink()


def cut_after(text: str, until: str) -> str:
    """Return the lines of a text without trailing blanks, up to the first one that begins with `until`."""
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    last = next((number for number, line in enumerate(lines) if until and line.startswith(until)), len(lines) - 1)
    return "\n".join([*lines[: last + 1], *(["..."] if last + 1 < len(lines) else []), ""])


def update_sessions(page: str) -> str:
    """Return a page with the current output of its sessions."""
    return SESSION_BLOCK.sub(lambda match: f"{match[1]}{make_session(match[2])}```", page)


def record_quickstart() -> None:
    """Run the quickstart and store it as the recorded run, without checkpoints."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / JOB).parent.mkdir(parents=True)
        shutil.copy(ROOT / JOB, folder / JOB)
        for words in (f"profile {JOB} --yes", "recommend", "train --yes"):
            subprocess.run([sys.executable, "-m", "tula_cli", *words.split()], cwd=folder, check=True)
        store_run(folder)


def store_run(folder: Path) -> None:
    """Store the run of a folder without checkpoints, which no session reads."""
    for path in folder.glob("tula-runs/*/train/*/checkpoints/*"):
        path.write_bytes(b"")
    recorded_runs.store_run(folder, RECORDED, ("configs", "tula-runs"))


def main() -> None:
    if "--record" in sys.argv:
        record_quickstart()
    for page in [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]:
        text = page.read_text(encoding="utf-8")
        if SESSION_BLOCK.search(text):
            page.write_text(update_sessions(text), encoding="utf-8")


if __name__ == "__main__":
    main()
