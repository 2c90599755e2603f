"""Integrity of checkpoints: whether a file of torch.save or a sharded checkpoint is complete."""

import json
import stat
import zipfile
import zlib
from pathlib import Path

from tula_cli.errors import TulaError
from tula_cli.run.files import is_regular_file, read_content

CHECKSUM_FILE = "sums.json"
"""The file with the checksums of the other files of a sharded checkpoint."""
_MAX_VERIFIED_BYTES = 2**20
"""Bytes of a checkpoint whose checksums are verified; for the rest only the structure is checked, because it would take
minutes."""


def describe_checkpoint_problem(path: Path) -> str:
    """Describe why a checkpoint is damaged; empty if its structure and the verified checksums are right."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return _describe_sharded_problem(path)
        if not is_regular_file(path):
            return "it is not a file"
        if path.stat().st_size == 0:
            return "it is empty"
        is_complete = is_complete_archive(path, max_verified_bytes=_MAX_VERIFIED_BYTES)
        return "" if is_complete else "it is truncated or overwritten"
    except OSError as error:
        return error.strerror or str(error)


def is_complete_archive(path: Path, *, max_verified_bytes: float = float("inf")) -> bool:
    """Return whether a file of torch.save is complete, by its checksums (which torch does not verify).

    Args:
        max_verified_bytes: verify only the checksums of the first members up to this size.
    """
    try:
        if not is_regular_file(path):
            return False
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            # With damaged sizes, reading the members would exhaust the memory.
            if sum(member.file_size for member in members) > path.stat().st_size:
                return False
            total = 0
            for member in members:
                total += member.file_size
                if total > max_verified_bytes:
                    break
                with archive.open(member) as file:
                    while file.read(2**20):
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, UnicodeDecodeError, zlib.error):
        return False
    return True


def _describe_sharded_problem(folder: Path) -> str:
    """Describe the first missing or modified file of a sharded checkpoint; empty if no problem is found."""
    try:
        sums = json.loads(read_content(folder / CHECKSUM_FILE))
        for name, total in sums.items():
            path = folder / name
            size = path.stat().st_size
            if size == 0 or (size <= _MAX_VERIFIED_BYTES and zlib.crc32(read_content(path)) != total):
                return f"its {name} is truncated or overwritten"
    except FileNotFoundError as error:
        return f"its {Path(error.filename).name} is missing"
    except (OSError, ValueError, AttributeError, TulaError) as error:
        return f"its {CHECKSUM_FILE} cannot be read ({error})"
    return ""
