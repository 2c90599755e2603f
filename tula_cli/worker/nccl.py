"""The algorithm and protocol that NCCL chooses for all-reduces, read from its debug output, as no call returns them.

NCCL picks an algorithm (ring, tree, NVLS ...) and a protocol by the size of each collective and by what it finds of the
hardware. With NCCL_DEBUG=INFO and the subsystem TUNING, rank 0 writes a line for each collective, to a file of its own
where NCCL_DEBUG_FILE names one.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tula_cli.run.files import read_end

SETTINGS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
PREFIX = "tula-nccl-"
_MAX_READ = 2**26  # bytes of what NCCL writes
MAX_SIZES = 8  # sizes that are kept, the largest: those of DDP's buckets, not of the counters between ranks
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
"""By NCCL's numbers (src/include/nccl_common.h), which its releases before 2.24 write in place of names."""
_LINE = re.compile(r"NCCL INFO (?:AllReduce: *)?(\d+) Bytes -> Algo (\w+) proto (\w+)")

_WARNING = re.compile(r"NCCL WARN (.*\S)")


@contextmanager
def record_nccl_output(*, enabled: bool, to: Literal["choices", "nccl_warnings"] = "choices") -> Iterator[None]:
    """Let NCCL write to a file, while this process is in a group; to be entered before NCCL starts.

    A user who has asked NCCL for anything of the kind gets that, and nothing is read then.

    Args:
        wanted: whether to.
        to: what it chooses, for `chosen`, or what it warns of, for `complaints`.
    """
    if not enabled or any(name in os.environ for name in SETTINGS):
        yield
        return
    handle, path = tempfile.mkstemp(prefix=PREFIX, suffix=".log")
    os.close(handle)
    settings = ("INFO", "TUNING", path) if to == "choices" else ("WARN", "ALL", path)
    os.environ.update(zip(SETTINGS, settings, strict=True))
    try:
        yield
    finally:
        for name in SETTINGS:
            os.environ.pop(name, None)
        Path(path).unlink(missing_ok=True)


def read_chosen_algorithms() -> dict[int, str]:
    """Return the algorithm and protocol ("ring, simple") of this process's largest all-reduces, by their bytes.

    Empty where NCCL was not listened to, or has told nothing: it did so from 2.21 on.
    """
    return parse_algorithms(_read_nccl_output())


def list_nccl_warnings() -> list[str]:
    """Return what NCCL has warned of, each once."""
    return list(dict.fromkeys(_WARNING.findall(_read_nccl_output())))


def _read_nccl_output() -> str:
    path = get_nccl_log_path(os.environ)
    return read_end(path, _MAX_READ) if path else ""


def get_nccl_log_path(environ: Mapping[str, str]) -> Path | None:
    """Return the file that NCCL writes to for `listening`; None where it does not."""
    path = Path(environ.get("NCCL_DEBUG_FILE", ""))
    return path if path.name.startswith(PREFIX) and path.is_file() else None


def parse_algorithms(log: str) -> dict[int, str]:
    """Return what `chosen` does, of what NCCL wrote.

    Args:
        log: lines of NCCL_DEBUG=INFO, of any release; of all-reduces where it names the collective, else of any.
    """
    choices = {
        int(size): f"{_find_choice_name(algorithm, ALGORITHMS)}, {_find_choice_name(protocol, PROTOCOLS)}"
        for size, algorithm, protocol in _LINE.findall(log)
    }
    return dict(sorted(choices.items())[-MAX_SIZES:])


def _find_choice_name(text: str, names: tuple[str, ...]) -> str:
    """Return the name in lower case that a word or a number stands for."""
    if not text.isdigit():
        return text.lower()
    return names[int(text)] if int(text) < len(names) else text
