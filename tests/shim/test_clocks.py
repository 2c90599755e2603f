"""Time and memory are those of the device that the process has used. A GPU is played here; `make gpu` has real ones."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tula_cli.shim.tula_shim import clocks


class Event:
    """Records the moments 10, 20, ... (ms) of a stream."""

    moments = iter(range(10, 1000, 10))

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.waited = False

    def record(self) -> None:
        self.at = next(self.moments)

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: "Event") -> float:
        assert end.waited
        return end.at - self.at


def play(monkeypatch: pytest.MonkeyPatch, *, initialized: bool) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialized,
        Event=Event,
        max_memory_allocated=lambda: 3,
        max_memory_reserved=lambda: 5,
        get_device_name=lambda: "GPU",
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


def test_events_of_a_gpu_are_waited_for_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, initialized=True)
    clock = clocks.make_clock()
    begin, end = clock.mark(), clock.mark()
    assert (clock.device, clock.measure_seconds(begin, end)) == ("cuda", pytest.approx(0.01))
    assert clocks.read_peak_memory() == {"allocated": 3, "reserved": 5} and clocks.read_hardware_name() == "GPU"


def test_a_gpu_that_the_script_leaves_alone_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, initialized=False)
    clock = clocks.make_clock()
    begin = clock.mark()
    assert clock.device == "cpu" and 0 <= clock.measure_seconds(begin, clock.mark()) < 5


def test_a_peak_on_the_cpu_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    clocks.reset_peak_memory()
    before = clocks.read_peak_memory()["allocated"]
    for kept in (b"x" * 200_000_000,):
        assert clocks.read_peak_memory()["allocated"] > max(len(kept), before + 150_000_000)
    del kept
    clocks.reset_peak_memory()
    assert 1_000_000 < clocks.read_peak_memory()["allocated"] < before + 50_000_000


def test_the_age_of_a_process_counts_from_its_start() -> None:
    code = "import time; from tula_cli.shim.tula_shim.clocks import compute_process_age; time.sleep(0.3); print(compute_process_age())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert 0.29 < float(done.stdout) < time.monotonic() - began + 0.02  # the kernel counts in hundredths
