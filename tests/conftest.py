"""How the tests are shared out among processes (`pytest -n 4`): what waits begins first, what shares a fixture stays together."""

import gc
import signal
import sys
import uuid
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("tula", deadline=None)  # a busy machine is no failure, nor is the first call's import
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
    "tests/worker/test_preemption.py": "two ranks",
    "tests/worker/measure/test_meter.py": "two ranks",
    "tests/worker/test_two_ranks.py": "two ranks",
}
"""The beginning of a path -> the group that one process runs from beginning to end; any other module is its own group.
Those on a SLURM cluster and the whole jobs wait more than they compute, "examples" are long; "two ranks" share a fixture of the session, and so do "shim"."""
LAST = ("tests/slurm/test_check_on_cluster.py",)
"""They hold measured times against known ones: within their group they run when most others have finished."""


def group_of(nodeid: str) -> str:
    """Return the group of a test by its name `tests/folder/test_module.py::test_case[parameter]`."""
    path = nodeid.partition("::")[0]
    return next((group for beginning, group in GROUPS.items() if path.startswith(beginning)), path)


@pytest.fixture(autouse=True)
def session_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep from other tests and from this user who measures on this machine."""
    runtime = tmp_path_factory.getbasetemp() / f"runtime-{uuid.uuid4().hex}"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


def pytest_configure(config: pytest.Config) -> None:
    """Hear Ctrl-C, which a shell lets programs ignore that it starts with `&`: some tests send it to themselves."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what pytest makes of the tests' modules for its other processes, also where Python is told to keep nothing."""
    message, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = message


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the groups into the order of the table, then the modules that import torch, then the others."""
    groups = list(dict.fromkeys(GROUPS.values()))

    def place(item: pytest.Item) -> tuple[int, bool]:
        name = group_of(item.nodeid)
        if name in groups:
            return groups.index(name), item.nodeid.startswith(LAST)
        return len(groups) + (not item.nodeid.startswith("tests/worker/")), False

    items.sort(key=place)
    gc.collect()
    gc.freeze()  # torch's million objects, which collections during the tests would go through each time


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let native code find its objects collected at the end; it would tell of leaks."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole groups, in the order of the collection; under `-n 0` or without xdist nobody asks."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # or the groups with most tests would come first
    return ByGroup(config, log)
