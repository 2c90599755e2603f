"""Training scripts of others, not a line changed: measured, chosen for, trained, killed and resumed by tula; a row each.

    python benchmarks/scripts.py --torchvision FOLDER --timm FOLDER --nanogpt FOLDER --transformers FOLDER --lightning FOLDER
        --examples FOLDER [--python PYTHON] [--only NAME ...] [--pairs 5] [--out build/scripts] [--json]

Each FOLDER is a checkout beside the project: pytorch/vision, huggingface/pytorch-image-models, karpathy/nanoGPT,
huggingface/transformers, Lightning-AI/pytorch-lightning, pytorch/examples. PYTHON is one that has what the scripts import
(and tula's dependencies). Of a checkout the part that is needed is copied, data are made, and then, with files that are as
they were:

    profile     nodes [1, 2] (one where the script cannot do without GPUs otherwise) x 3 batches
    recommend   by time
    rehearse    whether it goes on from its own checkpoint, at the same batch and at half of it
    killed      a training; once it has saved, its rank 0 is killed
    full        a training that runs out of memory after it has saved, once, on one rank
    overhead    CPU time of a step under the shim against one without, in pairs

Each stage is kept in OUT/results.json; the same call goes on where one was broken off. Where there is no GPU, scripts that
ask for CUDA get it from `script_cases/stand_in/`, by PYTHONPATH.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from script_cases.cases import CASES, Case

from tula_cli.cluster.scripts import values as cluster_values
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.shim import ShimPlan
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.load import load_spec
from tula_cli.spec.scripts.placeholders import render

HERE = Path(__file__).parent
MINUTES = 25  # that one command may take
SETTLED = 1.0  # seconds since a checkpoint was written, after which it is disturbed
TOLD = 400  # characters of what a command said


class Place:
    """Where a case works: `work`, the copy of its script, and `data` beside it."""

    def __init__(self, case: Case, checkout: Path, out: Path, python: str) -> None:
        self.case, self.python = case, python
        self.source = checkout / case.inside
        self.root = out / case.name
        self.work, self.data = self.root / "work", self.root / "data"

    def make(self) -> None:
        if not (self.root / "made").exists():
            shutil.rmtree(self.root, ignore_errors=True)
            shutil.copytree(self.source, self.work, ignore=shutil.ignore_patterns(".git"), symlinks=True)
            self.case.make(self.data, self.python)
            (self.work / "job.yaml").write_text(self.case.job.replace("{{data}}", str(self.data)))
            (self.root / "made").touch()

    def unchanged(self) -> bool:
        """Return whether every file of the script is what the checkout has."""
        files = [path for path in self.source.rglob("*.py") if ".git" not in path.parts]
        return bool(files) and all(
            _digest(path) == _digest(self.work / path.relative_to(self.source)) for path in files
        )

    def environment(self, **more: str) -> dict[str, str]:
        path = [str(HERE / "script_cases" / "stand_in"), str(HERE.parent)]
        stands_in = {"SCRIPTS_STAND_IN": "1"} if self.case.stand_in and not _gpus() else {}
        return {
            **os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "200", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(self.python).parent}{os.pathsep}{os.environ['PATH']}", **stands_in, **self.case.environment, **more,
        }  # fmt: skip

    def tula(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [self.python, "-m", "tula_cli", *arguments], cwd=self.work, env=self.environment(**environment), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self) -> RunDir:
        return RunDir.newest(self.work / "tula-runs")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _gpus() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def _ended(process: "subprocess.Popen[str]", most: int = TOLD) -> dict[str, Any]:
    """Wait for a command; return its exit code and the end of what it said."""
    said, told = process.communicate(timeout=60 * MINUTES)
    return {"code": process.returncode, "said": said[-most:] if process.returncode == 0 else told[-most:]}


def profile(place: Place) -> dict[str, Any]:
    ended = _ended(place.tula("profile", "job.yaml", "--yes"))
    rows = []
    for result in place.run().results():
        batch = result.nodes * result.gpus_per_node * result.local_batch
        row: dict[str, Any] = {"nodes": result.nodes, "batch": batch, "kind": result.kind}
        if isinstance(result, Measured):
            script = result.script
            row |= {
                "step_ms": 1e3 * statistics.median(result.step_times), "wait": result.data_wait is not None,
                "sync_ms": None if result.sync_time is None else 1e3 * result.sync_time,
                "norms": result.gradients is not None, "memory": result.memory is not None,
                "lr": script.lr.first if script is not None and script.lr is not None else None,
            }  # fmt: skip
        else:
            row["error"] = getattr(result, "message", "")[:TOLD]
        rows.append(row)
    return {**ended, "rows": rows}


def recommend(place: Place) -> dict[str, Any]:
    ended = _ended(place.tula("recommend", "--objective", "time", "--json"))
    found = place.run().recommendation()
    return {**ended, "choice": found and {"nodes": found.choice.nodes, "batch": found.choice.batch}}


def rehearse(place: Place) -> dict[str, Any]:
    """Let tula find out how the script goes on, at the middle batch."""
    ended = _ended(place.tula("check", "job.yaml", "--rehearse", "--json"), most=3000)
    kept = sorted((place.run().path / "script").glob("rehearse-*.json"), key=lambda path: path.stat().st_mtime)
    found = json.loads(kept[-1].read_text()) if kept else {}
    return {**ended, "verdict": found.get("verdict"), "found": found.get("told")}


def _train(place: Place, seed: int, disturb: Callable[[RunDir, Path], None], **environment: str) -> dict[str, Any]:
    """Train with the middle batch on the most nodes, disturb it once it has saved, and tell how it ended."""
    before = set(place.run().train_signatures())
    batch = str(2 * place.case.batches[0])
    options = ("--nodes", str(place.case.most_nodes), "--batch", batch, "--yes", "--set", f"train.seed={seed}")
    process = place.tula("train", "job.yaml", *options, **environment)
    run = place.run()
    began, deadline = time.time(), time.monotonic() + 60 * MINUTES
    done = False
    while process.poll() is None and time.monotonic() < deadline and not done:
        time.sleep(0.2)
        new = [name for name in run.train_signatures() if name not in before]
        done = bool(new) and any(
            began < path.stat().st_mtime < time.time() - SETTLED
            for path in _checkpoints(place, run.training(new[0]).path)
        )
        if done:
            disturb(run, run.training(new[0]).path)
    ended = _ended(process)
    new = [name for name in run.train_signatures() if name not in before]
    training = run.training(new[0]) if new else None
    summary, result = (training.summary(), training.result()) if training else (None, None)
    return {
        **ended, "disturbed": done, "attempts": summary and summary.attempts, "causes": summary and list(summary.causes),
        "batch": summary and summary.batch, "samples": result and result.samples,
    }  # fmt: skip


def _leave_alone(*_: object) -> None:
    """The training is disturbed by what stands in for a GPU."""


def _checkpoints(place: Place, training: Path) -> list[Path]:
    pattern = place.case.saved
    return list(place.work.glob(pattern[2:]) if pattern.startswith("./") else (training / "out").glob(pattern))


def killed(place: Place) -> dict[str, Any]:
    def kill(run: RunDir, training: Path) -> None:
        task = run.training(training.name).newest_task()
        assert task is not None
        beat = next(b for n in range(9, 0, -1) if (b := ScriptAttempt(run.path, task.id, n).heartbeat(0)))
        os.kill(beat.pid, signal.SIGKILL)

    return _train(place, 1, kill)


def full(place: Place) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "full")
        mark.touch()
        pattern = place.case.saved
        where = (
            place.work / pattern[2:] if pattern.startswith("./") else place.work / "tula-runs/*/train/*/out" / pattern
        )
        return _train(place, 2, _leave_alone, SCRIPTS_FULL=str(mark), SCRIPTS_SAVED=str(where))


def overhead(place: Place, *, pairs: int) -> dict[str, Any]:
    """Return CPU seconds of a step of one rank, plain, and how much dearer it is under the shim: median over the pairs."""
    spec = load_spec(place.work / "job.yaml")
    script = cluster_values.own(spec)
    if script.launch == "node":
        return {"code": None, "why": "its ranks are started by a launcher, whose CPU time is not a step's"}
    batch = 2 * place.case.batches[0]

    def once(long: bool, traced: bool) -> tuple[float, int]:
        """Return the CPU seconds of a whole start, and its steps where it was traced."""
        with tempfile.TemporaryDirectory() as folder:
            here = cluster_values.Place(1, 0, "127.0.0.1", 29_400, 0, 0)
            known = cluster_values.values(spec, here, batch=batch, out=Path(folder, "out"), run=Path(folder), workers=0)
            known["epochs"] = (script.length.epochs or 1) if long else 1
            known["steps"] = known.get("steps", 1) if long else 1
            environment = place.environment(
                CUDA_VISIBLE_DEVICES="" if not _gpus() else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
            )
            if traced:
                plan = ShimPlan(task="overhead", folder=folder, mode="train")
                Path(folder, "plan.json").write_text(plan.model_dump_json())
                environment["TULA_PLAN"] = str(Path(folder, "plan.json"))
                environment["PYTHONPATH"] = os.pathsep.join(
                    [str(HERE.parent / "tula_cli" / "shim"), environment["PYTHONPATH"]]
                )
            words = render(script.command, known)
            words = [place.python, *words] if words[0].endswith(".py") else words
            process = subprocess.Popen(
                words, cwd=place.work, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            assert process.stderr is not None
            told = process.stderr.read()
            _, status, used = os.wait4(process.pid, 0)
            if status:
                raise RuntimeError(f"{' '.join(words)}\n{told.decode(errors='replace')[-2000:]}")
            steps = 0
            if traced:
                found = json.loads(Path(folder, "result-0.json").read_text())
                steps = found["steps"]
            return used.ru_utime + used.ru_stime, steps

    draw = random.Random(0)
    _, few = once(False, True)
    _, many = once(True, True)
    more, plain = [], []
    for _ in range(pairs):
        order = [True, False]
        draw.shuffle(order)
        cpu = {traced: once(True, traced)[0] - once(False, traced)[0] for traced in order}
        plain.append(cpu[False] / (many - few))
        more.append(cpu[True] / cpu[False] - 1)
    return {
        "code": 0, "steps": many - few, "step_cpu_ms": 1e3 * statistics.median(plain),
        "more_percent": 100 * statistics.median(more), "pairs": [round(100 * value, 2) for value in more],
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Return a line a script, in words a person reads."""
    lines = []
    for name, found in results.items():
        probes = found.get("profile", {}).get("rows", [])
        ran = [row for row in probes if row["kind"] == "measured"]
        parts = [
            f"{name} {found['commit'][:7]}{'' if found['unchanged'] else ' CHANGED'}",
            f"{len(ran)} of {len(probes)} probes",
        ]
        if ran:
            parts.append(", ".join(word for word, there in (
                ("step", True), ("wait", ran[0]["wait"]), ("sync", any(row["sync_ms"] for row in ran)),
                ("norms", any(row["norms"] for row in ran)), ("memory", ran[0]["memory"])) if there))  # fmt: skip
        if told := found.get("rehearse"):
            parts.append(f"resume {told['verdict']}")
        parts += [
            f"{stage}: exit {told['code']}, {told['attempts']} attempts, {told['samples']} samples at {told['batch']}"
            for stage in ("killed", "full")
            if (told := found.get(stage))
        ]
        if (cost := found.get("overhead")) and cost["code"] == 0:
            parts.append(f"{cost['more_percent']:+.1f} % a step of {cost['step_cpu_ms']:.0f} ms")
        lines.append("; ".join(parts))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in sorted({case.option for case in CASES}):
        parser.add_argument(f"--{option}", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/scripts"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "results.json"
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for case in CASES:
        checkout = getattr(arguments, case.option)
        if checkout is None or (arguments.only and case.name not in arguments.only):
            continue
        place = Place(case, checkout.absolute(), out, arguments.python)
        place.make()
        found = results.setdefault(case.name, {})
        found["commit"] = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in arguments.stages:
            if name in found or (name in ("rehearse", "killed", "full") and not case.saved):
                continue
            print(f"{case.name}: {name}", file=sys.stderr, flush=True)
            began = time.monotonic()
            found[name] = STAGES[name](place, arguments.pairs)
            found[name]["seconds"] = round(time.monotonic() - began, 1)
            found["unchanged"] = place.unchanged()
            kept.write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1) if arguments.json else table(results))
    return 0


STAGES: dict[str, Callable[[Place, int], dict[str, Any]]] = {
    "profile": lambda place, _: profile(place),
    "recommend": lambda place, _: recommend(place),
    "rehearse": lambda place, _: rehearse(place),
    "killed": lambda place, _: killed(place),
    "full": lambda place, _: full(place),
    "overhead": lambda place, pairs: overhead(place, pairs=pairs),
}

if __name__ == "__main__":
    sys.exit(main())
