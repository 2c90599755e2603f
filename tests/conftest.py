"""Distribution of the tests over processes (`pytest -n 4`): long waits start first; tests that share a fixture run in one process."""

import gc
import os
import signal
import sys
import uuid
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile(
    "tula", deadline=None
)  # no time limit per example: a busy machine or a first import is no failure
settings.load_profile("tula")

GROUPS = {
    "tests/slurm/test_recovery.py": "cluster 1",
    "tests/slurm/": "cluster 2",
    "tests/e2e/": "e2e",
    "tests/shim/": "shim",
    "tests/test_examples.py": "examples",
    "tests/test_without_extras.py": "core alone",
    "tests/worker/measure/test_footprint.py": "two ranks",
    "tests/worker/measure/test_gradients.py": "two ranks",
    "tests/worker/measure/test_meter.py": "two ranks",
    "tests/worker/measure/test_node_report.py": "two ranks",
    "tests/worker/methods/test_methods_ranks.py": "two ranks",
    "tests/worker/parallel/test_sharded.py": "two ranks",
    "tests/worker/test_preemption.py": "two ranks",
    "tests/worker/test_two_ranks.py": "two ranks",
    "tests/optim/test_tula_ddp.py": "two ranks",
}
"""Path prefix -> group of tests that one process runs; every other module is a group of its own, in the order after these.
The tests of "cluster" and "e2e" wait more than they compute, "examples" are long, "two ranks" and "shim" share a process that forks ranks."""
LAST_IN_GROUP = ("tests/slurm/test_check_on_cluster.py",)
"""Tests that compare measured times with known ones. They run last in their group, when most other tests have finished."""


def group_of(nodeid: str) -> str:
    """Return the group of a test `tests/folder/test_module.py::test_case[parameter]`."""
    path = nodeid.partition("::")[0]
    return next((group for prefix, group in GROUPS.items() if path.startswith(prefix)), path)


@pytest.fixture(autouse=True)
def isolated_runtime_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own XDG_RUNTIME_DIR, so that its machine lock differs from that of other tests and of the user."""
    runtime = tmp_path_factory.getbasetemp() / f"runtime-{uuid.uuid4().hex}"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


@pytest.fixture(autouse=True)
def skip_disk_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make os.fsync do nothing in the process of the tests: only a power failure would show the difference, and it takes 5 ms."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def pytest_configure(config: pytest.Config) -> None:
    """Restore the default SIGINT handler, which some tests need: a shell ignores SIGINT in programs started with `&`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Write bytecode of the test modules even if PYTHONDONTWRITEBYTECODE is set, so that the other processes can read it."""
    previous, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = previous


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: the groups of the table, then the modules that import torch, then the others."""
    groups = list(dict.fromkeys(GROUPS.values()))

    def sort_key(item: pytest.Item) -> tuple[int, bool]:
        name = group_of(item.nodeid)
        if name in groups:
            return groups.index(name), item.nodeid.startswith(LAST_IN_GROUP)
        return len(groups) + (not item.nodeid.startswith("tests/worker/")), False

    items.sort(key=sort_key)
    gc.collect()
    gc.freeze()  # otherwise each garbage collection during the tests would scan a million objects of torch


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the garbage collector free the objects at exit; native code would report them as leaks."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole groups to processes, in the order of the collection; xdist calls this only with `-n`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # otherwise the groups with most tests would start first
    return ByGroup(config, log)
