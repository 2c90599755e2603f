"""Seeds made of integers, and seeding of the random generators."""

import functools
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.utils.data

from tula_cli.worker.device import seed_gpu


def compute_stable_seed(*parts: int) -> int:
    """Return a 63-bit seed, the same on every machine and in every process."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's CPU generator and, if the device is a GPU, that of the GPU; they draw as after torch.manual_seed.

    torch.manual_seed seeds every GPU of the node, and stores a stack trace for each kind of device that is not
    initialised, for which source files are looked up: 11 to 24 stat() calls.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        seed_gpu(device, seed)


@contextmanager
def seed_generators(*parts: int) -> Iterator[None]:
    """Seed torch's CPU generator, `random` and numpy from integers, and restore their states afterwards.

    In a data loader's worker process nothing else draws from these generators, so the states are not restored there.
    """
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    if torch.utils.data.get_worker_info() is not None:
        _seed_cpu_generators(seed)
        yield
        return
    torch_state, random_state, bits = torch.get_rng_state(), random.getstate(), np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        # Swap the generator, because np.random.set_state takes 70 us and more.
        np.random.set_bit_generator(_make_spare_bit_generator())  # type: ignore[attr-defined]
        _seed_cpu_generators(seed)
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(random_state)
        np.random.set_bit_generator(bits)  # type: ignore[attr-defined]


@functools.cache
def _make_spare_bit_generator() -> np.random.MT19937:
    return np.random.MT19937(0)


def _seed_cpu_generators(seed: int) -> None:
    seed_torch(seed, torch.device("cpu"))  # seeding the GPU would repeat a training step's dropout
    random.seed(seed)
    np.random.seed(seed % 2**32)
