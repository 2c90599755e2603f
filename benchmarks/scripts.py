"""Training scripts of others, not a line changed: measured, chosen for, trained, killed and resumed by tula; a row each.

    python benchmarks/scripts.py --torchvision FOLDER --timm FOLDER --nanogpt FOLDER --transformers FOLDER --lightning FOLDER
        --examples FOLDER [--python PYTHON] [--only NAME ...] [--stages NAME ...] [--pairs 60] [--slurm] [--out build/scripts]
        [--keep FILE] [--json]

Each FOLDER is a checkout beside the project: pytorch/vision, huggingface/pytorch-image-models, karpathy/nanoGPT,
huggingface/transformers, Lightning-AI/pytorch-lightning, pytorch/examples. PYTHON is one that has what the scripts import
(and tula's dependencies). Of a checkout the part that is needed is copied, data are made, and then, with files that are as
they were:

    profile     nodes [1, 2] (one where the script cannot do without GPUs otherwise) x 3 batches
    recommend   by time
    rehearse    whether it goes on from its own checkpoint, at the same batch and at half of it
    killed      a training; once it has saved, its rank 0 is killed
    full        a training that runs out of memory after it has saved, once, on one rank
    overhead    CPU time of a step with the hooks of the shim against the next one without, in pairs, on one rank

Each stage is kept in OUT/results.json; the same call goes on where one was broken off. `--keep` writes its figures without
what commands said. With `--slurm` the jobs go to a SLURM cluster of two nodes that is brought up on this machine for the time
(tests/slurm; root), where stages profile, recommend and killed are for. Where there is no GPU, scripts that
ask for CUDA get it from `script_cases/stand_in/`, by PYTHONPATH.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from script_cases import step_cost
from script_cases.cases import CASES, Case

from tula_cli.host.leftovers import find_processes_with_variable
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.load import load_spec

HERE = Path(__file__).parent
MINUTES = 25  # that one command may take
SETTLED = 1.0  # seconds since a checkpoint was written, after which it is disturbed
ON_SLURM = "cluster: {kind: slurm, device: cpu, minutes: 30, slurm: {memory: 3000M}}"
TOLD = 400  # characters of what a command said


class Place:
    """Where a case works: `work`, the copy of its script, and `data` beside it."""

    def __init__(self, case: Case, checkout: Path, out: Path, python: str, *, slurm: bool = False) -> None:
        self.case, self.python, self.slurm = case, python, slurm
        self.source = checkout / case.inside
        self.root = out / case.name
        self.work, self.data = self.root / "work", self.root / "data"

    def make(self) -> None:
        if not (self.root / "made").exists():
            shutil.rmtree(self.root, ignore_errors=True)
            shutil.copytree(self.source, self.work, ignore=shutil.ignore_patterns(".git"), symlinks=True)
            self.case.make(self.data, self.python)
            (self.work / "job.yaml").write_text(self._job())
            (self.root / "made").touch()

    def _job(self) -> str:
        job = self.case.job.replace("{{data}}", str(self.data))
        return job.replace("cluster: {device: cpu}", ON_SLURM) if self.slurm else job

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
        wait = ("--wait",) if self.slurm and arguments[0] in ("profile", "train") else ()
        return subprocess.Popen(
            [self.python, "-m", "tula_cli", *arguments, *wait], cwd=self.work, env=self.environment(**environment), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self) -> RunDir:
        return RunDir.find_newest(self.work / "tula-runs")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _gpus() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def _ended(process: "subprocess.Popen[str]", most: int = TOLD) -> dict[str, Any]:
    """Wait for a command; return its exit code and the end of what it said."""
    output, errors = process.communicate(timeout=60 * MINUTES)
    return {"code": process.returncode, "said": output[-most:] if process.returncode == 0 else errors[-most:]}


def profile(place: Place) -> dict[str, Any]:
    ended = _ended(place.tula("profile", "job.yaml", "--yes"))
    rows = []
    for result in place.run().read_results():
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
    result = place.run().read_recommendation()
    return {**ended, "choice": result and {"nodes": result.choice.nodes, "batch": result.choice.batch}}


def rehearse(place: Place) -> dict[str, Any]:
    """Let tula find out how the script goes on, at the middle batch."""
    ended = _ended(place.tula("check", "job.yaml", "--rehearse", "--json"), most=3000)
    kept = sorted((place.run().path / "script").glob("rehearse-*.json"), key=lambda path: path.stat().st_mtime)
    result = json.loads(kept[-1].read_text()) if kept else {}
    return {**ended, "verdict": result.get("verdict"), "found": result.get("told")}


def _train(place: Place, seed: int, disturb: Callable[[RunDir, Path], None], **environment: str) -> dict[str, Any]:
    """Train with the middle batch on the most nodes, disturb it once it has saved, and tell how it ended."""
    before = set(place.run().list_train_signatures())
    batch = str(2 * place.case.batches[0])
    options = ("--nodes", str(place.case.most_nodes), "--batch", batch, "--yes", "--set", f"train.seed={seed}")
    process = place.tula("train", "job.yaml", *options, **environment)
    run = place.run()
    began, deadline = time.time(), time.monotonic() + 60 * MINUTES
    done = False
    while process.poll() is None and time.monotonic() < deadline and not done:
        time.sleep(0.2)
        new = [name for name in run.list_train_signatures() if name not in before]
        done = bool(new) and any(
            began < path.stat().st_mtime < time.time() - SETTLED
            for path in _checkpoints(place, run.get_training(new[0]).path)
        )
        if done:
            disturb(run, run.get_training(new[0]).path)
    ended = _ended(process)
    new = [name for name in run.list_train_signatures() if name not in before]
    training = run.get_training(new[0]) if new else None
    summary, result = (training.read_summary(), training.read_result()) if training else (None, None)
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
        task = run.get_training(training.name).read_newest_task()
        assert task is not None
        attempts = (ScriptAttempt(run.path, task.id, number) for number in range(9, 0, -1))
        plan = str(next(attempt for attempt in attempts if attempt.read_heartbeat(0)).plan_path)
        ranks = find_processes_with_variable(
            "RANK"
        )  # the pid that its heart tells is one of a node's own, where there are several
        for pid, of in find_processes_with_variable("TULA_PLAN").items():
            if of == plan and ranks.get(pid) == "0":
                os.kill(pid, signal.SIGKILL)

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
    """Return CPU milliseconds of a step of one rank at the middle batch, and what the shim adds, in percent."""
    spec = load_spec(place.work / "job.yaml")
    batch = 2 * place.case.batches[0]
    return step_cost.measure(
        spec, batch=batch, pairs=pairs, work=place.work, python=place.python, environment=place.environment
    )


def table(results: dict[str, Any]) -> str:
    """Return a line a script, in words a person reads."""
    lines = []
    for name, result in results.items():
        probes = result.get("profile", {}).get("rows", [])
        ran = [row for row in probes if row["kind"] == "measured"]
        parts = [
            f"{name} {result['commit'][:7]}{'' if result['unchanged'] else ' CHANGED'}",
            f"{len(ran)} of {len(probes)} probes",
        ]
        if ran:
            parts.append(", ".join(word for word, there in (
                ("step", True), ("wait", ran[0]["wait"]), ("sync", any(row["sync_ms"] for row in ran)),
                ("norms", any(row["norms"] for row in ran)), ("memory", ran[0]["memory"])) if there))  # fmt: skip
        if report := result.get("rehearse"):
            parts.append(f"resume {report['verdict']}")
        parts += [
            f"{stage}: exit {message['code']}, {message['attempts']} attempts, {message['samples']} samples at {message['batch']}"
            for stage in ("killed", "full")
            if (message := result.get(stage))
        ]
        if (cost := result.get("overhead")) and cost["code"] == 0:
            parts.append(
                f"{cost['percent']:+.2f} % ({cost['low_percent']:+.2f} to {cost['high_percent']:+.2f}) on"
                f" {cost['step_cpu_ms']:.0f} ms of CPU a step"
            )
        lines.append("; ".join(parts))
    return "\n".join(lines)


def figures(results: dict[str, Any]) -> dict[str, Any]:
    """Return what the results say without what commands said, and without places of this machine."""
    words = ("said", "seconds", "found", "error", "causes")

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kept(inner) for name, inner in value.items() if name not in words}
        if isinstance(value, list):
            return [kept(inner) for inner in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    result: dict[str, Any] = kept(results)
    return result


def cluster() -> AbstractContextManager[Any]:
    """Return a SLURM cluster of two nodes, for as long as it is entered."""
    sys.path.append(str(HERE.parent / "tests" / "slurm"))
    result: AbstractContextManager[Any] = import_module("cluster").SlurmCluster(
        2, prefix=f"b{os.getpid()}n", rate="1gbit"
    )
    return result


def _run(place: Place, result: dict[str, Any], stages: list[str], pairs: int, kept: Callable[[], None]) -> None:
    """Run the stages of a case that are not done, and keep each."""
    case = place.case
    needs = {
        "killed": case.saved,
        "full": case.saved,
        "rehearse": "resume:" in case.job,
        "overhead": not case.own_steps,
    }
    for name in stages:
        if name in result or not needs.get(name, True):
            continue
        print(f"{case.name}: {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        result[name] = STAGES[name](place, pairs)
        result[name]["seconds"] = round(time.monotonic() - began, 1)
        result["unchanged"] = place.unchanged()
        kept()


def _commit(checkout: Path) -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    arguments = _arguments()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with cluster() if arguments.slurm else nullcontext() as nodes:
        os.environ.update(nodes.env if nodes else {})
        for case in CASES:
            checkout = getattr(arguments, case.option)
            if checkout is None or (arguments.only and case.name not in arguments.only):
                continue
            place = Place(case, checkout.absolute(), out, arguments.python, slurm=arguments.slurm)
            place.make()
            result = results.setdefault(case.name, {})
            result["commit"] = _commit(checkout)
            _run(
                place, result, arguments.stages, arguments.pairs, lambda: path.write_text(json.dumps(results, indent=1))
            )
    if arguments.keep:
        arguments.keep.write_text(json.dumps(figures(results), indent=1) + "\n")
    print(json.dumps(results, indent=1) if arguments.json else table(results))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in sorted({case.option for case in CASES}):
        parser.add_argument(f"--{option}", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--slurm", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/scripts"))
    parser.add_argument("--keep", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


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
