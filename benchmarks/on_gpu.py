"""What only a GPU can show, in stages of at most five minutes, the ones worth most first.

    python benchmarks/on_gpu.py [--stages env,quickstart] [--budget SECONDS] [--out DIR] [--done FILE] [--data DIR]
    python benchmarks/on_gpu.py --device cpu --tiny       a dry run of the same program, without a GPU
    python benchmarks/on_gpu.py --prepare DIR             estimates of memory, made where there is no GPU to wait

DIR/results.json is written anew after each stage:

    {stage: {"status": ok | fail | timeout | skipped, "seconds", "pass", "why", "data", "judged", "device", "tiny", "code"}}

`ok` says that it was measured, `pass` that what was measured is as it should be; `why` tells what is not. The same command
goes on: a stage that is ok in --done (by default DIR/results.json) on the same device is not measured again, unless
--again. Nothing starts that usually takes longer than what is left of the budget, and with the budget it ends. Beside it
stand log.txt, what the stages wrote, and runs.tgz, the small files of their runs.

Each stage is a process in a session of its own; when its time is over it is ended with all that it has started. No setting
of the card is touched. The exit code is 0 where every stage that was asked for is ok and, as far as this device can judge,
has passed.
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
"""Where the stages import from; tula need not be installed."""
sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]
NEEDED = (
    "torch", "torchvision", "sklearn", "pydantic", "typer", "rich", "yaml", "numpy", "pandas", "statsmodels", "kneed",
    "submitit",
)  # fmt: skip
"""Modules that tula and its quickstart import; all that are missing are told at once, before a card's time is spent."""
if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    raise SystemExit(f"{sys.executable} lacks {', '.join(missing)}: pip install '{ROOT}[torch,nvml,schedulefree]'")

from gpu.plan import STAGES, Row  # noqa: E402
from gpu.stage import MARK, SLOWER  # noqa: E402

from tula_cli.errors import TulaError  # noqa: E402
from tula_cli.host.devices import has_gpu  # noqa: E402
from tula_cli.host.leftovers import find_processes_with_variable  # noqa: E402
from tula_cli.run.files import write_atomic  # noqa: E402

LARGEST_FILE, LARGEST_ARCHIVE = 2**20, 15 * 2**20  # bytes, of runs.tgz
POLL = 0.1  # seconds
Entry = dict[str, Any]


@dataclass
class Results:
    """What there is of each stage, on the disk at any time."""

    path: Path
    entries: dict[str, Entry]

    @classmethod
    def begin(cls, path: Path, earlier: Path) -> "Results":
        """Go on from earlier results, where there are any.

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
        """Keep what became of a stage; that it was left out takes the place of nothing that was measured."""
        if entry["status"] != "skipped" or name not in self.entries:
            self.entries[name] = entry
        ordered = {key: self.entries[key] for key in STAGES if key in self.entries}
        write_atomic(self.path, json.dumps(ordered, indent=1) + "\n")


@dataclass(frozen=True)
class Setting:
    """What every stage of a call has in common."""

    device: str
    tiny: bool
    work: Path
    data: Path | None
    code: str
    log: IO[bytes]

    @property
    def slower(self) -> float:
        """By what the seconds of a stage are stretched here."""
        return 1.0 if self.device == "cuda" else SLOWER

    def limit(self, row: Row) -> float:
        """Return the seconds that a stage may take."""
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


def run(row: Row, setting: Setting) -> Entry:
    """Measure one stage in a process of its own."""
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
        env=environment(mark),
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
        end(process, mark)
    seconds = time.monotonic() - began
    with contextlib.suppress(OSError, ValueError):
        data = json.loads((folder / "stage.json").read_text(encoding="utf-8"))
        return judged(code, data, seconds, row=row, setting=setting, start=start)
    return setting.entry("fail", f"it told nothing: {last_line(setting.log, start)}", seconds=seconds)


def judged(code: int | None, told: Entry, seconds: float, *, row: Row, setting: Setting, start: int) -> Entry:
    if code is None:
        return setting.entry("timeout", f"ended after {setting.limit(row):.0f} s", seconds=seconds, told=told)
    if code:
        why = f"exit code {code}: {last_line(setting.log, start)}"
        return setting.entry("fail", why, seconds=seconds, told=told)
    return setting.entry("ok", "", seconds=seconds, told=told)


def environment(mark: str) -> dict[str, str]:
    """Return the environment of a stage: its mark, and where it imports from."""
    path = [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(path)}


def end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """End a stage and everything it has started, in whatever session that is by now."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(50):
        remaining = [pid for pid, theirs in find_processes_with_variable(MARK).items() if theirs == mark]
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not remaining:
            return
        time.sleep(POLL)


def last_line(log: IO[bytes], start: int) -> str:
    """Return the last line that a stage wrote."""
    with open(log.name, "rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:500] if lines else "no output"


def work_through(
    stages: Sequence[str],
    results: Results,
    *,
    budget: float,
    again: bool,
    setting: Setting,
    one: Callable[[Row, Setting], Entry] = run,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure what is missing, as far as the budget goes. Seconds."""
    ends = clock() + budget
    for name in stages:
        row = STAGES[name]
        if not again and results.measured(name, device=setting.device, tiny=setting.tiny):
            say(f"{name}: measured before")
            continue
        remaining = ends - clock()
        if setting.slower * row.usual > remaining:
            why = f"takes some {setting.slower * row.usual:g} s, {max(0.0, remaining):.0f} s of the budget are left"
            results.put(name, setting.entry("skipped", why))
            say(f"{name}: skipped: {why}")
            continue
        setting.log.write(f"=== {name}\n".encode())
        setting.log.flush()
        entry = one(replace(row, limit=min(row.limit, remaining / setting.slower)), setting)
        results.put(name, entry)
        how = "passed" if entry["pass"] else entry["why"]
        say(f"{name}: {entry['status']} in {entry['seconds']:.0f} s: {how}")


def pack(work: Path, archive: Path) -> None:
    """Keep the small files of the runs, as many as one may want to carry away."""
    draft, total = archive.with_name(f".{archive.name}"), 0
    with tarfile.open(draft, "w:gz") as tar:
        for path in sorted(path for path in work.rglob("*") if path.is_file() and not path.is_symlink()):
            size = path.stat().st_size
            if size > LARGEST_FILE or path.suffix in (".pt", ".npz", ".jpg") or total + size > 4 * LARGEST_ARCHIVE:
                continue
            tar.add(path, path.relative_to(work).as_posix())
            total += size
    draft.replace(archive)
    if archive.stat().st_size > LARGEST_ARCHIVE:
        say(f"{archive} has {archive.stat().st_size / 2**20:.0f} MiB")


def code_digest() -> str:
    """Return a name for the code that is measured: tula's and the stages'."""
    digest = hashlib.sha256()
    for folder in (ROOT / "tula_cli", HERE):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def say(text: str) -> None:
    print(text, flush=True)


def torch_sees_one() -> bool:
    """Return whether torch sees a GPU where there are none of the usual device files."""
    import torch

    return torch.cuda.is_available()


def listed(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"none is named: there are {', '.join(STAGES)}")
    if unknown := [name for name in names if name not in STAGES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(STAGES)}")
    return names


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stages", type=listed, default=list(STAGES), help=f"of {','.join(STAGES)} (all)")
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
    if options.device == "cuda" and not options.prepare and not (has_gpu() or torch_sees_one()):
        parser.error("this machine has no GPU; --device cpu --tiny is a dry run without one")
    options.data = options.data and options.data.absolute()
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    if options.prepare:
        from gpu.stages.memory import prepare

        prepare(options.prepare)
        return 0
    out = options.out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        results = Results.begin(out / "results.json", options.done or out / "results.json")
        with open(out / "log.txt", "ab") as log, tempfile.TemporaryDirectory(prefix="on-gpu-") as work:
            setting = Setting(options.device, options.tiny, Path(work), options.data, code_digest(), log)
            try:
                work_through(
                    options.stages, results, budget=options.budget, again=options.again, setting=setting
                )  # fmt: skip
            finally:
                pack(Path(work), out / "runs.tgz")
    except (TulaError, OSError) as error:
        raise SystemExit(f"results cannot be kept in {out}: {error}; name another folder with --out") from error
    say(f"results: {results.path}")
    return int(not all(satisfied(results.entries.get(name)) for name in options.stages))


def satisfied(entry: Entry | None) -> bool:
    """Return whether a stage shows nothing wrong, as far as its device can tell."""
    if entry is None or entry["status"] != "ok":
        return False
    return bool(entry["pass"] or (not entry["judged"] and entry["why"].startswith("not judged")))


def leave_on_sigterm() -> None:
    """Let SIGTERM end the stage under way first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
