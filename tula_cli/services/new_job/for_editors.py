"""The JSON Schemas of job.yaml and site.yaml as files beside a job, and the line by which an editor finds them."""

import json
from pathlib import Path
from typing import get_args

from tula_cli.errors import SpecError
from tula_cli.run.files import MODE_FOR_ALL, write_atomic
from tula_cli.spec.schema.json_schema import Kind, json_schema

SCHEMA_FOLDER = ".tula"
"""Relative to the folder of the job: it is found without a network, from any machine, and hidden files are no part of the code
that a run holds."""
_TULA_SCHEMA = '"$id": "urn:tula:'


def schema_path(kind: Kind) -> Path:
    """Return the path of a schema, relative to the folder of the job."""
    return Path(SCHEMA_FOLDER, f"{kind}.schema.json")


def write_schema(kind: Kind, path: Path) -> None:
    """Write the schema, over an older one but nothing else.

    Raises:
        TulaError: this installation has no sources, and so no descriptions.
        SpecError: the file is there, and no schema of tula's.
        CannotWrite: it cannot be written.
    """
    if path.is_dir() or (path.exists() and _TULA_SCHEMA not in _read_beginning(path)):
        raise SpecError(f"{path} is there already, and is no schema that tula wrote", "remove it")
    text = json.dumps(json_schema(kind), indent=1, ensure_ascii=False) + "\n"
    write_atomic(path, text, mode=MODE_FOR_ALL)


def _read_beginning(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(400).decode(errors="replace")
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None


def with_schema(text: str, job: Path) -> str:
    """Write the schemas beside a job that is to be written, and return the job's text with the line that names its schema.

    Args:
        text: of the job.
        job: its path.

    Raises:
        TulaError, SpecError, CannotWrite: as of `write_schema`.
    """
    for kind in get_args(Kind):
        write_schema(kind, job.parent / schema_path(kind))
    return f"# yaml-language-server: $schema={schema_path('job').as_posix()}\n{text}"
