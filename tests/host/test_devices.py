"""Device files and GPU memory, with a file in place of a device and a script in place of nvidia-smi."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tula_cli.host import devices, leftovers
from tula_cli.host.leftovers import MARK_VARIABLE, GpuMemory, kill_leftovers, make_process_mark
from tula_cli.host.processes import read_start_time


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gpu0"
    path.touch()
    monkeypatch.setattr(devices, "DEVICE_FILES", [re.escape(str(path))])
    return path


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an nvidia-smi on PATH that tells the MiB in use by the lines of a file, each for one call; the last one stays."""
    path = tmp_path / "used"
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in *compute-apps*) echo "4711, 812, train, the model"; exit;; esac\n'
        f'echo "$@" >> {tmp_path}/asked\n'
        f'echo "GPU-1, $(head -n 1 {path})"\n'
        f'if [ $(wc -l < {path}) -gt 1 ]; then sed -i 1d {path}; fi\n'
    )  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return path


@pytest.mark.parametrize(
    ("target", "device"),
    [
        ("/dev/nvidia0", True), ("/dev/nvidiactl", True), ("/dev/nvidia-uvm", True), ("/dev/kfd", True),
        ("/dev/dri/renderD128", True), ("/dev/null", False), ("/dev/shm/nvidia", False), ("/home/me/dev/kfd", False),
    ],
)  # fmt: skip
def test_what_is_a_device_file(tmp_path: Path, target: str, device: bool) -> None:
    link = tmp_path / "3"
    link.symlink_to(target)
    assert devices._is_device(link) is device


def test_inherited_device_files_are_closed_and_nothing_else(stand_in: Path) -> None:
    program = """if True:
        import os, re, sys
        from tula_cli.host import devices
        devices.DEVICE_FILES[:] = [re.escape(sys.argv[1])]
        device, other = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_RDONLY)
        again = os.dup(device)
        devices.close_inherited_device_files()
        print([os.path.exists(f"/proc/self/fd/{fd}") for fd in (0, 1, 2, other, device, again)])
    """
    with stand_in.open() as as_stdin:
        command = [sys.executable, "-c", program, str(stand_in), __file__]
        ended = subprocess.run(command, stdin=as_stdin, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[True, True, True, True, False, False]\n", ended.stderr


def test_who_holds_a_device_is_seen_by_its_files(stand_in: Path) -> None:
    assert os.getpid() not in devices.find_device_holders()
    with stand_in.open():
        assert os.getpid() in devices.find_device_holders()
        assert any(holder.startswith(f"pid {os.getpid()} (") for holder in devices.describe_gpu_holders())


def test_the_memory_of_a_gpu_is_waited_for(nvidia_smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "POLL_SECONDS", 0.01)
    nvidia_smi.write_text("500\n9000\n9000\n540\n")
    memory = GpuMemory()
    assert memory.wait_until_memory_is_free(["3"], "r|t||0", give_up=lambda: False) == ""
    assert memory.wait_until_memory_is_free(["3"], "r|t||0", give_up=lambda: False) == ""
    lines = (tmp_path / "asked").read_text().splitlines()
    assert len(lines) == 4
    assert all("--id=3" in words for words in lines)


def test_where_it_does_not_come_back_it_is_said_who_holds_it(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "MEMORY_TIMEOUT", 0.0)
    nvidia_smi.write_text("500\n9000\n")
    memory = GpuMemory()
    memory.wait_until_memory_is_free([], "r|t||0", give_up=lambda: False)
    answer = memory.wait_until_memory_is_free([], "r|t||0", give_up=lambda: False)
    assert answer == "8500 MiB of GPU-1; held by pid 4711 (train, the model, 812 MiB)"


def test_without_nvidia_smi_its_holders_tell(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(leftovers, "MEMORY_TIMEOUT", 0.0)
    memory = GpuMemory()
    memory.wait_until_memory_is_free([], "r|t||0", give_up=lambda: False)
    assert memory.wait_until_memory_is_free([], "r|t||0", give_up=lambda: False) == ""
    with stand_in.open():
        answer = memory.wait_until_memory_is_free([], "r|t||0", give_up=lambda: False)
    assert f"pid {os.getpid()} (" in answer


def test_what_an_earlier_attempt_left_is_killed_and_no_other_process(tmp_path: Path) -> None:
    mark = make_process_mark(tmp_path, "train-s-1", "12.0", 1)
    marks = {
        "earlier attempt": mark,
        "earlier job of the chain": make_process_mark(tmp_path, "train-s-1", "11.0", 7),
        "another supervisor": make_process_mark(tmp_path, "train-s-1", "12.0", 0),
        "another training": make_process_mark(tmp_path, "train-z-1", "11.0", 1),
        "another run": make_process_mark(tmp_path / "other", "train-s-1", "11.0", 1),
        "no mark of ours": "train-s-1",
        "spared": mark,
    }
    running = {
        name: subprocess.Popen(
            ["sleep", "60"], env={MARK_VARIABLE: value, "PATH": "/usr/bin:/bin"}, start_new_session=True
        )
        for name, value in marks.items()
    }
    foreign = subprocess.Popen(["sleep", "60"], env={"PATH": "/usr/bin:/bin"})
    try:
        expected = {running["earlier attempt"].pid, running["earlier job of the chain"].pid}
        assert set(kill_leftovers(mark, spare=[running["spared"].pid])) == expected
        alive = {name for name, process in running.items() if read_start_time(process.pid) is not None}
        assert alive == {"another supervisor", "another training", "another run", "no mark of ours", "spared"}
        assert read_start_time(foreign.pid) is not None
        assert kill_leftovers(mark, spare=[running["spared"].pid]) == []
    finally:
        for process in (*running.values(), foreign):
            process.kill()
            process.wait()


def test_a_supervisor_that_was_started_under_a_mark_does_not_kill_itself(tmp_path: Path) -> None:
    mark = make_process_mark(tmp_path, "train-s-1", "", 0)
    program = (
        "import sys; from tula_cli.host.leftovers import kill_leftovers; print(kill_leftovers(sys.argv[1], spare=[]))"
    )
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", program, mark]
    ended = subprocess.run(command, env={**os.environ, MARK_VARIABLE: mark}, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


# --- how many there are


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev and of the kernel's list of AMD's nodes, with a driver at work."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(devices, "GPU_DRIVER_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(devices, "DEVICE_FOLDER", tmp_path)
    monkeypatch.setattr(devices, "KFD_FOLDER", tmp_path / "nodes")
    for name in devices.VISIBILITY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_gpus_are_counted_by_their_drivers_files(driver: Path) -> None:
    assert devices.count_gpus() == 1, "a driver that lists none, as under WSL"
    for name in ("nvidia0", "nvidia1", "nvidia-uvm", "nvidia-caps"):
        (driver / name).touch()
    assert devices.count_gpus() == 2


def test_amds_processors_are_no_gpus(driver: Path) -> None:
    for number, name in enumerate(("0", "4098", "51230", "1")):
        (driver / "nodes" / str(number)).mkdir(parents=True)
        (driver / "nodes" / str(number) / "gpu_id").write_text(f"{name}\n")
    assert devices.count_gpus() == 3


HIDDEN = [("0,2", 2), ("GPU-4ad7,", 1), ("", 0), ("-1", 0)]
NOT_THERE = [
    ("0,1,2,3,4,5,6,7", 4),
    ("7", 0),
    ("2,-1,3", 1),
    ("0,9,1", 1),
    ("NoDevFiles", 0),
    ("1,none", 1),
    ("MIG-8c", 1),
]


@pytest.mark.parametrize(("visible", "seen"), [*HIDDEN, *NOT_THERE])
def test_those_that_are_visible_and_there_count(
    driver: Path, monkeypatch: pytest.MonkeyPatch, visible: str, seen: int
) -> None:
    for number in range(4):
        (driver / f"nvidia{number}").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.count_gpus() == seen


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, 2),
        ({"HIP_VISIBLE_DEVICES": "3"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "1,2,3"}, 3),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}, 0),
        ({"ROCR_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "GPU-5ab1,GPU-77f0", "HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}, 0),
    ],
    ids=lambda value: ", ".join(f"{name[:4]}={ids}" for name, ids in value.items()) if isinstance(value, dict) else "",
)
def test_of_amds_gpus_hip_takes_from_what_its_driver_leaves(
    driver: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], seen: int
) -> None:
    for number in range(5):  # the first is a processor
        (driver / "nodes" / str(number)).mkdir(parents=True)
        (driver / "nodes" / str(number) / "gpu_id").write_text(f"{number}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert devices.count_gpus() == seen


def test_amds_variables_hide_none_of_nvidias(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        (driver / f"nvidia{number}").touch()
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert devices.count_gpus() == 2


def test_where_the_driver_lists_none_the_variable_tells(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert devices.count_gpus() == 2


def test_without_a_driver_there_is_none(driver: Path) -> None:
    (driver / "nvidia0").touch()
    (driver / "nvidiactl").unlink()
    assert devices.count_gpus() == 0
