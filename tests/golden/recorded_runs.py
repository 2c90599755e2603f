"""Recorded run directories, one JSON file each: written by record.py, and copied to a new folder for each case.

A text file is stored as a list of lines, another file in base64, a symbolic link as its target. The folder of the recording
and the name of the machine are replaced by placeholders.
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
EXCLUDED = re.compile(
    r"(^|/)(\.inspections|\.reserve$|.*\.zip$|.*\.lock$|calls\.jsonl$|.*_log\.(out|err)$|shim-\w+/|.*_submitted\.pkl$)|^slurm/(bin|scripts|lock)|^tula-observed/\.shim/"
)
"""Caches, files of the product itself, and files that only the recording needed."""
FIRST_FILE_TIME = 1767225600.0  # 2026-01-01, the time of the first file of every recorded run


def store_run(folder: Path, name: str, subfolders: tuple[str, ...] = ("tula-runs",)) -> None:
    """Store the files of some subfolders of a recording as `runs/NAME.json`."""
    paths = sorted(
        path for sub in subfolders for path in (folder / sub).rglob("*") if path.is_symlink() or path.is_file()
    )
    files: dict[str, Any] = {}
    for path in sorted(paths, key=lambda path: (path.lstat().st_mtime_ns, str(path))):
        relative = str(path.relative_to(folder))
        if not EXCLUDED.search(relative):
            files[relative] = (
                {"link": os.readlink(path).replace(str(folder), FOLDER)}
                if path.is_symlink()
                else _encode_file(path.read_bytes(), folder)
            )
    RUNS.mkdir(exist_ok=True)
    (RUNS / f"{name}.json").write_text(json.dumps(files, indent=0) + "\n")


def _encode_file(content: bytes, folder: Path) -> Any:
    """Return the stored form of a file; JSON on one line needs a third of the size."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
    libraries = Path(yaml.__file__).parents[4]  # not under sys.prefix if environments share libraries
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


def copy_run(name: str, folder: Path) -> None:
    """Write the files of a recorded run into a folder, in the order and with the time differences of the recording."""
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
        os.utime(path, (FIRST_FILE_TIME + number,) * 2, follow_symlinks=False)


def copy_jobs(folder: Path) -> None:
    """Write the jobs, their modules and the script into a folder."""
    for path in WORK.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
            os.utime(folder / path.name, (FIRST_FILE_TIME, FIRST_FILE_TIME))
