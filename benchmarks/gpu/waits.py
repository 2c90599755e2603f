"""Detects where the host waits for the device."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import operations
import torch


@contextmanager
def count_waits(device: str) -> Iterator[Counter[str]]:
    """Count the waits by code location.

    On a GPU, torch itself warns about each wait (except those in torch.distributed); elsewhere, operations and functions that would
    make the host wait for a GPU are counted.
    """
    counter: Counter[str] = Counter()
    if device != "cuda":
        with operations.count_operations() as seen:
            yield counter
        counter.update(seen.waits)
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as message:
            warnings.simplefilter("always")
            yield counter
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in message:
        if "synchroniz" in str(warning.message):
            counter[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
