"""Recorded run directories, one JSON file each: written by record.py, laid out again for every case.

A file is stored as its lines, or in base64 where it is not text; a symbolic link as its target. The folder of the
recording and the name of the machine stand there as placeholders.
"""

import base64
import contextlib
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RUNS, WORK = HERE / "runs", HERE / "work"
FOLDER, TULA, PYTHON, HOST = "@FOLDER@", "@TULA@", "@PYTHON@", "recorder"
LEFT_OUT = re.compile(
    r"(^|/)(\.inspections|\.reserve$|.*\.zip$|.*\.lock$|calls\.jsonl$|.*_log\.(out|err)$|shim-\w+/|.*_submitted\.pkl$)|^slurm/(bin|scripts|lock)|^tula-observed/\.shim/"
)
"""Caches, parts of the product itself, and what only the recording needed."""
DAY = 1767225600.0  # 2026-01-01, the time of the first file of every recorded run


def record(folder: Path, name: str, subfolders: tuple[str, ...] = ("tula-runs",)) -> None:
    """Store what lies in some folders of the folder of a recording as `runs/NAME.json`."""
    paths = sorted(
        path for sub in subfolders for path in (folder / sub).rglob("*") if path.is_symlink() or path.is_file()
    )
    files: dict[str, Any] = {}
    for path in sorted(paths, key=lambda path: (path.lstat().st_mtime_ns, str(path))):
        relative = str(path.relative_to(folder))
        if not LEFT_OUT.search(relative):
            files[relative] = (
                {"link": os.readlink(path).replace(str(folder), FOLDER)}
                if path.is_symlink()
                else _stored(path.read_bytes(), folder)
            )
    RUNS.mkdir(exist_ok=True)
    (RUNS / f"{name}.json").write_text(json.dumps(files, indent=0) + "\n")


def _stored(content: bytes, folder: Path) -> Any:
    """Return how a file is kept; JSON takes a third of its size on one line."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
    libraries = Path(yaml.__file__).parents[4]  # not under sys.prefix if environments share them
    places = (
        (folder, FOLDER),
        (sys.prefix, PYTHON),
        (libraries, PYTHON),
        (sys.base_prefix, PYTHON),
        (HERE.parents[1], TULA),
    )
    for path, name in places:
        text = text.replace(str(path), name)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", HOST, text)
    with contextlib.suppress(ValueError):
        text = json.dumps(json.loads(text), ensure_ascii=False) + "\n" if text.startswith("{") else text
    return text.split("\n")


def lay_out(name: str, folder: Path) -> None:
    """Write the files of a recorded run into a folder, in the order and with the distances of time of a recording."""
    files = json.loads((RUNS / f"{name}.json").read_text())
    for number, (relative, stored) in enumerate(files.items()):
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(stored, dict) and "link" in stored:
            path.symlink_to(stored["link"].replace(FOLDER, str(folder)))
        elif isinstance(stored, dict):
            path.write_bytes(base64.b64decode(stored["base64"]))
        else:
            path.write_text("\n".join(stored).replace(FOLDER, str(folder)))
        os.utime(path, (DAY + number,) * 2, follow_symlinks=False)


def copy_jobs(folder: Path) -> None:
    """Write the jobs, the modules that they name and the script into a folder."""
    for path in WORK.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
            os.utime(folder / path.name, (DAY, DAY))
