"""Delaying Ctrl-C during operations that must not be interrupted."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; a second Ctrl-C takes effect at once.

    Has no effect outside the main thread, where Python raises no KeyboardInterrupt, or if the program has another
    handler of SIGINT.

    Raises:
        KeyboardInterrupt: at the end, if Ctrl-C was pressed in the block.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous_handler is not signal.default_int_handler:
        yield
        return
    pressed = False

    def hold(_: int, __: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    if pressed:
        raise KeyboardInterrupt
