"""The algorithm and protocol that NCCL chooses for all-reduces, read from its debug output because no API returns them.

NCCL chooses an algorithm (ring, tree, NVLS ...) and a protocol by the size of each collective and by the hardware that
it detects. With NCCL_DEBUG=INFO and the subsystem TUNING, rank 0 writes a line for each collective, to a separate file
if NCCL_DEBUG_FILE names one.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tula_cli.run.files import read_last_bytes

NCCL_DEBUG_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
NCCL_LOG_PREFIX = "tula-nccl-"
_MAX_READ_BYTES = 2**26  # bytes of NCCL's output that are read
MAX_SIZES = 8  # number of largest sizes kept: those of DDP's buckets, not of small collectives
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
"""Indexed by NCCL's numbers (src/include/nccl_common.h), which its releases before 2.24 write in place of names."""
_LINE = re.compile(r"NCCL INFO (?:AllReduce: *)?(\d+) Bytes -> Algo (\w+) proto (\w+)")

_WARNING = re.compile(r"NCCL WARN (.*\S)")


@contextmanager
def record_nccl_output(*, enabled: bool, to: Literal["choices", "nccl_warnings"] = "choices") -> Iterator[None]:
    """Make NCCL write its debug output to a temporary file inside the context; must be entered before NCCL starts.

    If the user has set any of NCCL's debug variables, they are left unchanged, and nothing is recorded.

    Args:
        to: "choices" records the chosen algorithms (`read_chosen_algorithms`), "nccl_warnings" the warnings
            (`list_nccl_warnings`).
    """
    if not enabled or any(name in os.environ for name in NCCL_DEBUG_VARIABLES):
        yield
        return
    handle, path = tempfile.mkstemp(prefix=NCCL_LOG_PREFIX, suffix=".log")
    os.close(handle)
    settings = ("INFO", "TUNING", path) if to == "choices" else ("WARN", "ALL", path)
    os.environ.update(zip(NCCL_DEBUG_VARIABLES, settings, strict=True))
    try:
        yield
    finally:
        for name in NCCL_DEBUG_VARIABLES:
            os.environ.pop(name, None)
        Path(path).unlink(missing_ok=True)


def read_chosen_algorithms() -> dict[int, str]:
    """Return the algorithm and protocol ("ring, simple") of this process's largest all-reduces, by their bytes.

    Empty if NCCL's output is not recorded or contains no choices: NCCL prints them from 2.21 on.
    """
    return parse_algorithms(_read_nccl_output())


def list_nccl_warnings() -> list[str]:
    """Return the warnings that NCCL has printed, without duplicates."""
    return list(dict.fromkeys(_WARNING.findall(_read_nccl_output())))


def _read_nccl_output() -> str:
    path = get_nccl_log_path(os.environ)
    return read_last_bytes(path, _MAX_READ_BYTES) if path else ""


def get_nccl_log_path(environ: Mapping[str, str]) -> Path | None:
    """Return the file that NCCL writes to inside `record_nccl_output`; None outside of it."""
    path = Path(environ.get("NCCL_DEBUG_FILE", ""))
    return path if path.name.startswith(NCCL_LOG_PREFIX) and path.is_file() else None


def parse_algorithms(log: str) -> dict[int, str]:
    """Return the algorithm and protocol of the largest all-reduces, by their bytes, from NCCL's debug output.

    Args:
        log: lines of NCCL_DEBUG=INFO, of any release. Only all-reduces count if the line names the collective; lines
            that name none count as all-reduces.
    """
    choices = {
        int(size): f"{_find_choice_name(algorithm, ALGORITHMS)}, {_find_choice_name(protocol, PROTOCOLS)}"
        for size, algorithm, protocol in _LINE.findall(log)
    }
    return dict(sorted(choices.items())[-MAX_SIZES:])


def _find_choice_name(text: str, names: tuple[str, ...]) -> str:
    """Return the lower-case name for a name or a number that NCCL printed; an unknown number is returned unchanged."""
    if not text.isdigit():
        return text.lower()
    return names[int(text)] if int(text) < len(names) else text
