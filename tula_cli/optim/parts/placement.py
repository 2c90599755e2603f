"""Which of two ways an optimizer goes: on the CPU the host reads a number, elsewhere it would wait for the device."""

from torch import Tensor


def on_device(tensor: Tensor) -> bool:
    """Whether the host would have to wait to read this."""
    return tensor.device.type != "cpu"
