"""Ctrl-C is held back while something is done that must not be left half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back to the end of the block; a second one goes through at once.

    Nothing is held outside the main thread, where Python raises no KeyboardInterrupt, nor where a program handles SIGINT
    in its own way.

    Raises:
        KeyboardInterrupt: at the end, where it was pressed meanwhile.
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
