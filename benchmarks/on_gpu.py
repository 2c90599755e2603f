"""Measurements that need a GPU, in stages of at most five minutes, the most useful first.

    python benchmarks/on_gpu.py [--stages env,quickstart] [--budget SECONDS] [--out DIR] [--done FILE] [--data DIR]
    python benchmarks/on_gpu.py --device cpu --tiny       a dry run of the same program without a GPU
    python benchmarks/on_gpu.py --prepare DIR             compute the memory estimates in advance, without a GPU

DIR/results.json is written after each stage:

    {stage: {"status": ok | fail | timeout | skipped, "seconds", "pass", "why", "data", "judged", "device", "tiny", "code"}}

`ok` means that the stage was measured, `pass` that all its checks hold; `why` names the checks that fail. The same command
continues an interrupted call: a stage that is ok in --done (default DIR/results.json) on the same device is not measured again,
unless --again is set. A stage whose typical duration exceeds the rest of the budget does not start, and a running stage is
terminated when the budget is used up. log.txt has the output of the stages, and runs.tgz the small files of their runs.

Each stage is a process in a separate session; at its time limit, it is terminated with all its child processes. No setting of the
GPU is changed. The exit code is 0 if each requested stage is ok and has passed all checks that are possible on this device.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOLDERS = (HERE, HERE / "operations", HERE / "overhead", HERE / "table1", ROOT)
"""Import paths of the stages; tula need not be installed."""
sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]
REQUIRED_MODULES = (
    "torch", "torchvision", "sklearn", "pydantic", "typer", "rich", "yaml", "numpy", "pandas", "statsmodels", "kneed",
    "submitit",
)  # fmt: skip
"""Modules imported by tula and its quickstart; all missing ones are reported before GPU time is used."""
if missing := [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]:
    raise SystemExit(f"{sys.executable} lacks {', '.join(missing)}: pip install '{ROOT}[torch,nvml,schedulefree]'")

from gpu.plan import STAGES, StagePlan  # noqa: E402
from gpu.stage import CPU_TIME_FACTOR, STAGE_VARIABLE  # noqa: E402

from tula_cli.errors import TulaError  # noqa: E402
from tula_cli.host.devices import has_gpu  # noqa: E402
from tula_cli.host.leftovers import find_processes_with_variable  # noqa: E402
from tula_cli.run.files import write_file_atomically  # noqa: E402

MAX_FILE_BYTES, MAX_ARCHIVE_BYTES = 2**20, 15 * 2**20  # bytes; of runs.tgz
POLL_SECONDS = 0.1  # seconds
Entry = dict[str, Any]


@dataclass
class Results:
    """The results of all stages; the file on disk is always current."""

    path: Path
    entries: dict[str, Entry]

    @classmethod
    def begin(cls, path: Path, earlier: Path) -> "Results":
        """Read earlier results, if there are any.

        Raises:
            SystemExit: they cannot be read.
        """
        if not earlier.exists():
            return cls(path, {})
        try:
            data = json.loads(earlier.read_text(encoding="utf-8"))
            return cls(path, {name: {**entry} for name, entry in {**data}.items() if name in STAGES})
        except (TypeError, ValueError) as error:
            raise SystemExit(f"{earlier} holds no results: {error}; name another with --done") from error

    def measured(self, name: str, *, device: str, tiny: bool) -> bool:
        """Return whether a stage need not be measured again."""
        entry = self.entries.get(name, {})
        return (entry.get("status"), entry.get("device"), entry.get("tiny")) == ("ok", device, tiny)

    def put(self, name: str, entry: Entry) -> None:
        """Store the result of a stage; `skipped` does not replace a measured result."""
        if entry["status"] != "skipped" or name not in self.entries:
            self.entries[name] = entry
        ordered = {key: self.entries[key] for key in STAGES if key in self.entries}
        write_file_atomically(self.path, json.dumps(ordered, indent=1) + "\n")


@dataclass(frozen=True)
class CallSettings:
    """Settings of a call that are common to all stages."""

    device: str
    tiny: bool
    work: Path
    data: Path | None
    code: str
    log: IO[bytes]

    @property
    def slower(self) -> float:
        """Factor of time limits on this device."""
        return 1.0 if self.device == "cuda" else CPU_TIME_FACTOR

    def limit(self, row: StagePlan) -> float:
        """Return the time limit of a stage in seconds."""
        return self.slower * row.limit

    def entry(self, status: str, why: str, *, seconds: float = 0.0, told: Entry | None = None) -> Entry:
        told = told or {"data": {}, "faults": [], "unjudged": []}
        remaining = [f"not judged: {', '.join(told['unjudged'])}"] if told["unjudged"] else []
        return {
            "status": status,
            "seconds": round(seconds, 1),
            "pass": status == "ok" and not told["faults"] and not told["unjudged"],
            "why": "; ".join([*([why] if why else []), *told["faults"], *remaining]),
            "data": told["data"],
            "judged": not told["unjudged"],
            "device": self.device,
            "tiny": self.tiny,
            "code": self.code,
        }


def run_stage(row: StagePlan, setting: CallSettings) -> Entry:
    """Measure one stage in a separate process."""
    folder = setting.work / row.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stage.json").unlink(missing_ok=True)
    command = [sys.executable, "-u", "-m", "gpu", row.name, str(folder), setting.device]
    command += ["--tiny"] if setting.tiny else []
    command += ["--data", str(setting.data)] if setting.data else []
    mark = uuid.uuid4().hex
    began = time.monotonic()
    start = setting.log.tell()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=make_environment(mark),
        stdin=subprocess.DEVNULL,
        stdout=setting.log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code: int | None = process.wait(setting.limit(row))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        terminate(process, mark)
    seconds = time.monotonic() - began
    with contextlib.suppress(OSError, ValueError):
        data = json.loads((folder / "stage.json").read_text(encoding="utf-8"))
        return make_entry(code, data, seconds, row=row, setting=setting, start=start)
    return setting.entry("fail", f"it told nothing: {read_last_line(setting.log, start)}", seconds=seconds)


def make_entry(
    code: int | None, told: Entry, seconds: float, *, row: StagePlan, setting: CallSettings, start: int
) -> Entry:
    if code is None:
        return setting.entry("timeout", f"ended after {setting.limit(row):.0f} s", seconds=seconds, told=told)
    if code:
        why = f"exit code {code}: {read_last_line(setting.log, start)}"
        return setting.entry("fail", why, seconds=seconds, told=told)
    return setting.entry("ok", "", seconds=seconds, told=told)


def make_environment(mark: str) -> dict[str, str]:
    """Return the environment of a stage: its mark and its import paths."""
    path = [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, STAGE_VARIABLE: mark, "PYTHONPATH": os.pathsep.join(path)}


def terminate(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Terminate a stage and all processes that it started, in any session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(50):
        remaining = [pid for pid, theirs in find_processes_with_variable(STAGE_VARIABLE).items() if theirs == mark]
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not remaining:
            return
        time.sleep(POLL_SECONDS)


def read_last_line(log: IO[bytes], start: int) -> str:
    """Return the last line of a stage's output."""
    with open(log.name, "rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:500] if lines else "no output"


def run_stages(
    stages: Sequence[str],
    results: Results,
    *,
    budget: float,
    again: bool,
    setting: CallSettings,
    one: Callable[[StagePlan, CallSettings], Entry] = run_stage,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure missing stages within the budget. Seconds."""
    ends = clock() + budget
    for name in stages:
        row = STAGES[name]
        if not again and results.measured(name, device=setting.device, tiny=setting.tiny):
            print_line(f"{name}: measured before")
            continue
        remaining = ends - clock()
        if setting.slower * row.usual > remaining:
            why = f"takes some {setting.slower * row.usual:g} s, {max(0.0, remaining):.0f} s of the budget are left"
            results.put(name, setting.entry("skipped", why))
            print_line(f"{name}: skipped: {why}")
            continue
        setting.log.write(f"=== {name}\n".encode())
        setting.log.flush()
        entry = one(replace(row, limit=min(row.limit, remaining / setting.slower)), setting)
        results.put(name, entry)
        how = "passed" if entry["pass"] else entry["why"]
        print_line(f"{name}: {entry['status']} in {entry['seconds']:.0f} s: {how}")


def pack_small_files(work: Path, archive: Path) -> None:
    """Pack the small files of the runs, up to a total size."""
    draft, total = archive.with_name(f".{archive.name}"), 0
    with tarfile.open(draft, "w:gz") as tar:
        for path in sorted(path for path in work.rglob("*") if path.is_file() and not path.is_symlink()):
            size = path.stat().st_size
            if size > MAX_FILE_BYTES or path.suffix in (".pt", ".npz", ".jpg") or total + size > 4 * MAX_ARCHIVE_BYTES:
                continue
            tar.add(path, path.relative_to(work).as_posix())
            total += size
    draft.replace(archive)
    if archive.stat().st_size > MAX_ARCHIVE_BYTES:
        print_line(f"{archive} has {archive.stat().st_size / 2**20:.0f} MiB")


def hash_code() -> str:
    """Return a hash of the measured code: that of tula and of the stages."""
    digest = hashlib.sha256()
    for folder in (ROOT / "tula_cli", HERE):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def print_line(text: str) -> None:
    print(text, flush=True)


def torch_finds_gpu() -> bool:
    """Return whether torch finds a GPU on a machine without the usual device files."""
    import torch

    return torch.cuda.is_available()


def parse_stages(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"none is named: there are {', '.join(STAGES)}")
    if unknown := [name for name in names if name not in STAGES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(STAGES)}")
    return names


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stages", type=parse_stages, default=list(STAGES), help=f"of {','.join(STAGES)} (all)")
    add("--out", type=Path, default=Path("build/gpu"), help="where results.json, log.txt and runs.tgz go (build/gpu)")
    add("--done", type=Path, help="results of an earlier call (results.json in --out)")
    add("--again", action="store_true", help="measure also what is ok in them")
    add("--budget", type=float, default=float("inf"), metavar="SECONDS", help="of this call (no limit)")
    add("--data", type=Path, help="what was prepared: footprints/ of --prepare, cifar10-jpeg.npz for stage table1")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--tiny", action="store_true", help="on sizes that a CPU does in seconds: a dry run")
    add("--prepare", type=Path, metavar="DIR", help="write footprints/ of all models for --data, and measure nothing")
    options = parser.parse_args(words)
    if options.device == "cpu" and not (options.tiny or options.prepare):
        parser.error("--device cpu goes with --tiny: the stages' sizes are those of a large card")
    if not options.budget > 0:  # nan too
        parser.error(f"--budget {options.budget:g}: must be seconds above 0")
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data {options.data}: no such folder")
    if options.device == "cuda" and not options.prepare and not (has_gpu() or torch_finds_gpu()):
        parser.error("this machine has no GPU; --device cpu --tiny is a dry run without one")
    options.data = options.data and options.data.absolute()
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    if options.prepare:
        from gpu.stages.memory import write_estimates

        write_estimates(options.prepare)
        return 0
    out = options.out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        results = Results.begin(out / "results.json", options.done or out / "results.json")
        with open(out / "log.txt", "ab") as log, tempfile.TemporaryDirectory(prefix="on-gpu-") as work:
            setting = CallSettings(options.device, options.tiny, Path(work), options.data, hash_code(), log)
            try:
                run_stages(
                    options.stages, results, budget=options.budget, again=options.again, setting=setting
                )  # fmt: skip
            finally:
                pack_small_files(Path(work), out / "runs.tgz")
    except (TulaError, OSError) as error:
        raise SystemExit(f"results cannot be kept in {out}: {error}; name another folder with --out") from error
    print_line(f"results: {results.path}")
    return int(not all(has_passed(results.entries.get(name)) for name in options.stages))


def has_passed(entry: Entry | None) -> bool:
    """Return whether a stage has no failed check, as far as its device allows."""
    if entry is None or entry["status"] != "ok":
        return False
    return bool(entry["pass"] or (not entry["judged"] and entry["why"].startswith("not judged")))


def leave_on_sigterm() -> None:
    """Make SIGTERM terminate the running stage before this process exits."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
