"""How a process ends: who tells an error, for whom it waits, what it leaves."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from script_ranks import ScriptRanks

from tula_cli.run.records.scripts import ShimPlan
from tula_cli.shim.tula_shim import stopping
from tula_cli.shim.tula_shim.failing import (
    find_batch_norm,
    get_class_name,
    install_excepthook,
    is_launcher_error,
    write_failure,
)
from tula_cli.shim.tula_shim.plan import read_plan
from tula_cli.shim.tula_shim.ranks import count_ranks, get_rank
from tula_cli.shim.tula_shim.recorder import EVAL, Recorder
from tula_cli.shim.tula_shim.stopping import wait_for_ranks

ChildFailed = type("ChildFailedError", (Exception,), {"__module__": "torch.distributed.elastic.multiprocessing.errors"})


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("kind", "launcher"), [(ChildFailed, True), (subprocess.CalledProcessError, True), (OSError, False)]
)
def test_a_launcher_only_tells_that_a_child_has_failed(tmp_path: Path, kind: type[Exception], launcher: bool) -> None:
    assert is_launcher_error(tmp_path, kind) is launcher


def test_a_rank_s_own_call_of_a_program_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert not is_launcher_error(tmp_path, subprocess.CalledProcessError)


def test_a_process_without_rank_is_silent_beside_one_that_has_told(tmp_path: Path) -> None:
    (tmp_path / "failure-3.json").touch()
    assert is_launcher_error(tmp_path, OSError)


@pytest.mark.torch
def test_an_error_of_the_shim_s_own_in_a_probe_is_reported_as_its_own(run: ScriptRanks, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"heartbeat-{rank}.json").mkdir()  # heartbeats cannot be written
    outcome = run("by_hand.py", 60, "--bare", plan=ShimPlan(task="probe", folder=str(tmp_path)), world=2)
    assert outcome.codes == [1, 1] and "IsADirectoryError" in outcome.output[0]
    messages = [
        (failure["where"], failure["error"]) for failure in map(outcome.json, ("failure-0.json", "failure-1.json"))
    ]
    assert messages == [("shim", "IsADirectoryError")] * 2


def test_what_a_script_makes_of_an_error_of_the_shim_s_own_is_not_the_script_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1, "task": "t", "folder": str(tmp_path)}))
    plan = read_plan(str(tmp_path / "plan.json"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    install_excepthook(plan, lambda: 7)
    failed, other = OSError("full"), RuntimeError("epoch 0 failed")
    write_failure(plan, failed, step=7, where="shim")
    other.__cause__ = failed
    sys.excepthook(type(other), other, None)
    assert json.loads((tmp_path / "failure-0.json").read_text())["where"] == "shim"
    value_error = ValueError("of the script's own")
    value_error.__cause__ = value_error
    sys.excepthook(ValueError, value_error, None)
    assert json.loads((tmp_path / "failure-0.json").read_text())["where"] == "script"


def test_classes_are_named_in_full() -> None:
    assert (get_class_name(ValueError), get_class_name(subprocess.TimeoutExpired)) == (
        "ValueError",
        "subprocess.TimeoutExpired",
    )


@pytest.mark.parametrize(
    ("variables", "rank", "ranks"),
    [
        ({}, None, 1),
        ({"RANK": "3", "WORLD_SIZE": "8"}, 3, 8),
        ({"SLURM_PROCID": "2"}, 2, 1),
        ({"RANK": "0", "SLURM_PROCID": "2"}, 0, 1),
        ({"RANK": ""}, None, 1),
    ],
)
def test_a_rank_without_a_group_is_reported_by_variables(
    variables: dict[str, str], rank: int | None, ranks: int
) -> None:
    assert get_rank(variables) == rank
    assert count_ranks(by_hand=True, environment=variables) == ranks
    assert count_ranks(environment=variables) == 1  # nothing joins them


def test_ranks_wait_for_each_other_and_not_for_ever(tmp_path: Path) -> None:
    (tmp_path / "result-0.json").touch()
    assert wait_for_ranks(tmp_path, 1, timeout=0.0)
    began = time.monotonic()
    assert not wait_for_ranks(tmp_path, 2, timeout=0.1)
    assert time.monotonic() - began >= 0.1


@pytest.mark.parametrize(("world", "looks"), [(2, 120), (64, 30), (4096, 20)])
def test_ranks_that_wait_for_one_look_a_few_dozen_times_a_second_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, looks: int
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(stopping, "time", clock)
    assert not wait_for_ranks(tmp_path, world, timeout=20.0)
    assert 20.0 <= sum(slept) < 20.1 and slept[0] <= 0.02, (
        "the timeout is respected, and the first looks are close together"
    )
    assert len(slept) <= looks


STUBBORN = """
import subprocess, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
print('ready', flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
from tula_cli.shim.tula_shim.stopping import terminate_children, list_descendants
before = len(list_descendants(os.getpid()))
terminate_children()
print(before, len(list_descendants(os.getpid())))
"""


def test_children_that_do_not_listen_and_their_children_are_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT, STUBBORN], text=True, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["2", "0"]


def test_a_disk_that_is_full_is_reported_at_the_next_step_and_not_within_the_script(tmp_path: Path) -> None:
    plan = {"version": 1, "task": "t", "folder": str(tmp_path), "mode": "train", "heartbeat": 0.0}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    recorder = Recorder(read_plan(str(tmp_path / "plan.json")))
    recorder.after_step(lr=0.1)
    (tmp_path / "heartbeat-0.json").unlink()
    (tmp_path / "heartbeat-0.json").mkdir()  # cannot be replaced by a file
    recorder.record_disturbance(EVAL)
    with pytest.raises(IsADirectoryError):
        recorder.after_step(lr=0.1)


class _BatchNorm:
    """Stands for torch's: the process of the tests may hold some of its own."""


class SyncBatchNorm(_BatchNorm):
    pass


@pytest.mark.parametrize(
    ("kinds", "found"),
    [([], ""), ([_BatchNorm], "batch"), ([SyncBatchNorm] * 2, "sync"), ([SyncBatchNorm, _BatchNorm], "batch")],
)
def test_a_failure_tells_which_batch_norm_the_process_held(
    kinds: list[type], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(_BatchNorm=_BatchNorm, SyncBatchNorm=SyncBatchNorm)
    monkeypatch.setitem(sys.modules, "torch.nn.modules.batchnorm", module)
    kept: list[object] = [kind() for kind in kinds]
    for norm in kept:
        vars(norm)["own"] = {}  # what has contents, as every module has, is known to the collector
    assert find_batch_norm() == found
    monkeypatch.delitem(sys.modules, "torch.nn.modules.batchnorm")
    assert find_batch_norm() == ""
