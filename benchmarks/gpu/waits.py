"""Where the host waits for the device."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import operations
import torch


@contextmanager
def waits(device: str) -> Iterator[Counter[str]]:
    """Count the waits inside, by the place in the code.

    On a GPU torch itself warns of each (it is blind to what torch.distributed waits for); elsewhere the operations and
    functions count that would make the host wait on one.
    """
    counter: Counter[str] = Counter()
    if device != "cuda":
        with operations.watched() as seen:
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
