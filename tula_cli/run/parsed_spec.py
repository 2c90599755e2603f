"""The job of a run as JSON next to its YAML, which takes a hundred times as long to read; it is used while both agree.

Only the standard library and similarly light modules are imported, because listing hundreds of runs reads nothing else
of their jobs.
"""

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.run import files, owner
from tula_cli.run.format import require_current_format, require_known_format, write_format

_YAML_FILE, _JSON_FILE = "spec.yaml", "spec.json"


@dataclass(frozen=True)
class ParsedSpec:
    """A job as plain values."""

    digest: str  # SHA-256 of the YAML file with which it was written
    spec: Mapping[str, Any]


def write_parsed_spec(run: Path, yaml: str, spec: Mapping[str, Any]) -> None:
    """Replace the job of a run in both forms, and record the format of a new run.

    Args:
        yaml: the job as text.
        spec: the same as plain values.

    Raises:
        OtherFormat: the run exists in a format of another version of tula.
        TulaError: the files cannot be written.
    """
    require_current_format(run)
    if get_change_time(run) is None:
        write_format(run)
    files.write_atomic(run / _YAML_FILE, yaml)
    files.write_atomic(run / _JSON_FILE, json.dumps(asdict(ParsedSpec(_compute_digest(yaml.encode()), spec))) + "\n")


def read_parsed_spec(run: Path) -> ParsedSpec | None:
    """Return the job of a run; None if the YAML was edited afterwards, or the JSON is missing or damaged.

    Raises:
        OtherFormat: the run is in a format of another version of tula.
        TulaError: a file cannot be read.
    """
    require_known_format(run)
    try:
        content = json.loads(files.read_content(run / _JSON_FILE))
        parsed = ParsedSpec(content["digest"], content["spec"])
        return parsed if parsed.digest == _compute_digest(files.read_content(run / _YAML_FILE)) else None
    except (FileNotFoundError, KeyError, ValueError, TypeError, RecursionError, BadMeasurements):
        return None  # the caller parses the YAML instead


def list_run_folders(root: Path) -> list[Path]:
    """Return the folders under `root` that hold a job, most recently changed first.

    Folders that may not be entered belong to other users and are left out.

    Raises:
        TulaError: `root` cannot be read.
    """
    changed_by_folder = {
        root / name: at for name in files.list_names(root) if (at := get_change_time(root / name)) is not None
    }
    return sorted(changed_by_folder, key=lambda run: changed_by_folder[run], reverse=True)


def find_newest_run(root: Path, latest: str) -> Path:
    """Return the most recently used readable run under `root`, preferring the user's own runs.

    Args:
        latest: name of the most recently used run, which need not exist; empty if unknown.

    Raises:
        SpecError: there is none.
        TulaError: `root` cannot be read.
    """
    if get_change_time(root / latest) is not None and not owner.find_other_owner(root / latest):
        return root / latest
    runs_found = list_run_folders(root)
    if not runs_found:
        others_text = owner.describe_left_out_runs(root / name for name in files.list_names(root))
        message = f"no run under {root}{others_text and f' ({others_text})'}"
        from tula_cli.run.observed import hint_at_observed_jobs

        hint = f"start one with tula profile job.yaml, or name one with --run DIR{hint_at_observed_jobs()}"
        raise SpecError(message, hint)
    return next((run for run in runs_found if not owner.find_other_owner(run)), runs_found[0])


def get_change_time(run: Path) -> int | None:
    """Return when the job of a run was last written (ns of Unix time); None if there is no visible job."""
    try:
        status = (run / _YAML_FILE).stat()
        return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None
    except OSError:  # no run, a run that is being removed, or one of another user
        return None


def _compute_digest(yaml: bytes) -> str:
    return hashlib.sha256(yaml).hexdigest()
