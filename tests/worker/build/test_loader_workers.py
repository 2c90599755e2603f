"""Data-loader workers, and files that they inherit, when their rank is killed during a batch."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tula_cli.host import devices
from tula_cli.host.processes import read_start_time

RANK = """if True:
    import re, sys, time
    from torch.utils.data import Dataset
    from tula_cli.host import devices
    from tula_cli.worker.build.loaders import build_fixed_loader

    class Slow(Dataset):  # a batch takes minutes
        def __len__(self):
            return 64
        def __getitem__(self, key):
            if key[1] >= 4:
                time.sleep(60)
            return key[1]

    devices.DEVICE_FILES[:] = [re.escape(sys.argv[1])]
    device = open(sys.argv[1])  # stands for /dev/nvidia0: CUDA has opened it before the loader forks
    batches = iter(build_fixed_loader(Slow(), [(0, index) for index in range(16)], batch=2, workers=2))
    next(batches), next(batches)
    print(*[worker.pid for worker in batches._workers], flush=True)
    time.sleep(60)
"""


def test_a_killed_rank_leaves_neither_workers_nor_open_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "gpu0"
    device.touch()
    monkeypatch.setattr(devices, "DEVICE_FILES", [str(device)])
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(device)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    with rank.stdout:
        workers = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(workers) == 2
    assert set(devices.find_device_holders()) == {rank.pid}, "the workers have closed it"
    rank.kill()
    rank.wait()
    assert devices.find_device_holders() == {}, "an overlap of 0 s with the next attempt"
    deadline = time.monotonic() + 10
    while any(read_start_time(pid) is not None for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [read_start_time(pid) for pid in workers] == [None, None], "they were minutes from the end of their batches"
