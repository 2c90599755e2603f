"""Fixtures of the tests of the worker: this process as the only rank of a group, and a run directory."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worker_rank_cases
from start_ranks import read_errors, start_ranks
from worker_jobs import make_spec

from tula_cli.run.directory import RunDir
from tula_cli.spec.methods import METHODS, TrainingMethod
from tula_cli.worker.device import Clock
from tula_cli.worker.methods import table
from tula_cli.worker.methods.plain import Plain
from tula_cli.worker.ranks import Ranks

Plant = Callable[..., None]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """This process as the only rank of a gloo group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Ranks(rank=0, world=1, local_rank=0, device=torch.device("cpu"))
    gc.collect()  # a living DDP object and gloo would wait for each other
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, make_spec())


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the two ranks of worker_rank_cases leave behind."""
    folder = tmp_path_factory.mktemp("ranks")
    assert start_ranks(worker_rank_cases.__file__, folder, world=2), read_errors(folder, 2)
    return folder


@pytest.fixture
def processor_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes count the processor time of this process, which other processes of a busy machine do not prolong."""
    monkeypatch.setattr(Clock, "mark", lambda _: time.process_time())


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Puts a method of the test's own in the place of one of the table: `plant(name, method, **properties)`."""

    def planted(name: str, method: type[Plain], **properties: Any) -> None:
        module: Any = ModuleType("planted")
        module.METHOD = method
        monkeypatch.setitem(sys.modules, f"{table.__package__}.planted", module)
        monkeypatch.setitem(METHODS, name, TrainingMethod(name, "planted", **properties))

    return planted
