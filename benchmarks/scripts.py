"""Profile, recommend, train, kill and resume unchanged third-party training scripts with tula; prints one row per script.

    python benchmarks/scripts.py --torchvision FOLDER --timm FOLDER --nanogpt FOLDER --transformers FOLDER --lightning FOLDER
        --examples FOLDER [--python PYTHON] [--only NAME ...] [--stages NAME ...] [--pairs 60] [--slurm] [--out build/scripts]
        [--keep FILE] [--json]

Each FOLDER is a checkout outside of the project: pytorch/vision, huggingface/pytorch-image-models, karpathy/nanoGPT,
huggingface/transformers, Lightning-AI/pytorch-lightning, pytorch/examples. PYTHON is an interpreter with the scripts' imports (and
tula's dependencies). The required part of a checkout is copied and data are generated. Then, with unchanged files:

    profile     nodes [1, 2] (only one if the script needs GPUs for more) x 3 batches
    recommend   by time
    rehearse    test whether it resumes from its own checkpoint, at the same batch and at half of it
    killed      a training whose rank 0 is killed after it has saved a checkpoint
    full        a training that runs out of memory once on one rank, after it has saved a checkpoint
    overhead    CPU time per step with the hooks of the shim compared with the next step without, in pairs, on one rank

Each stage is stored in OUT/results.json; the same call continues after an interruption. `--keep` writes the results without the
output of commands. With `--slurm`, the jobs run on a temporary SLURM cluster of two nodes on this machine (tests/slurm; root), for
stages profile, recommend and killed. On a machine without a GPU, scripts that request CUDA get it from `script_cases/stand_in/`,
by PYTHONPATH.
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
COMMAND_MINUTES = 25  # time limit of one command
SETTLED_SECONDS = 1.0  # seconds since a checkpoint was written, after which the training is disturbed
ON_SLURM = "cluster: {kind: slurm, device: cpu, minutes: 30, slurm: {memory: 3000M}}"
MAX_OUTPUT_CHARS = 400  # characters of a command's output that are stored


class CaseFolder:
    """The folders of a case: `work`, the copy of its script, and `data`."""

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
        """Return whether each file of the script equals that of the checkout."""
        files = [path for path in self.source.rglob("*.py") if ".git" not in path.parts]
        return bool(files) and all(
            _hash_file(path) == _hash_file(self.work / path.relative_to(self.source)) for path in files
        )

    def environment(self, **more: str) -> dict[str, str]:
        path = [str(HERE / "script_cases" / "stand_in"), str(HERE.parent)]
        stands_in = {"SCRIPTS_STAND_IN": "1"} if self.case.stand_in and not _has_gpu() else {}
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


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def _wait_for_command(process: "subprocess.Popen[str]", most: int = MAX_OUTPUT_CHARS) -> dict[str, Any]:
    """Wait for a command; return its exit code and the end of its output."""
    output, errors = process.communicate(timeout=60 * COMMAND_MINUTES)
    return {"code": process.returncode, "said": output[-most:] if process.returncode == 0 else errors[-most:]}


def profile(place: CaseFolder) -> dict[str, Any]:
    ended = _wait_for_command(place.tula("profile", "job.yaml", "--yes"))
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
            row["error"] = getattr(result, "message", "")[:MAX_OUTPUT_CHARS]
        rows.append(row)
    return {**ended, "rows": rows}


def recommend(place: CaseFolder) -> dict[str, Any]:
    ended = _wait_for_command(place.tula("recommend", "--objective", "time", "--json"))
    result = place.run().read_recommendation()
    return {**ended, "choice": result and {"nodes": result.choice.nodes, "batch": result.choice.batch}}


def rehearse(place: CaseFolder) -> dict[str, Any]:
    """Run the resume test of the script at the middle batch."""
    ended = _wait_for_command(place.tula("check", "job.yaml", "--rehearse", "--json"), most=3000)
    kept = sorted((place.run().path / "script").glob("rehearse-*.json"), key=lambda path: path.stat().st_mtime)
    result = json.loads(kept[-1].read_text()) if kept else {}
    return {**ended, "verdict": result.get("verdict"), "found": result.get("told")}


def _train(place: CaseFolder, seed: int, disturb: Callable[[RunDir, Path], None], **environment: str) -> dict[str, Any]:
    """Train with the middle batch on the largest number of nodes, disturb it once after a checkpoint, and return its outcome."""
    before = set(place.run().list_train_signatures())
    batch = str(2 * place.case.batches[0])
    options = ("--nodes", str(place.case.most_nodes), "--batch", batch, "--yes", "--set", f"train.seed={seed}")
    process = place.tula("train", "job.yaml", *options, **environment)
    run = place.run()
    began, deadline = time.time(), time.monotonic() + 60 * COMMAND_MINUTES
    done = False
    while process.poll() is None and time.monotonic() < deadline and not done:
        time.sleep(0.2)
        new = [name for name in run.list_train_signatures() if name not in before]
        done = bool(new) and any(
            began < path.stat().st_mtime < time.time() - SETTLED_SECONDS
            for path in _list_checkpoints(place, run.get_training(new[0]).path)
        )
        if done:
            disturb(run, run.get_training(new[0]).path)
    ended = _wait_for_command(process)
    new = [name for name in run.list_train_signatures() if name not in before]
    training = run.get_training(new[0]) if new else None
    summary, result = (training.read_summary(), training.read_result()) if training else (None, None)
    return {
        **ended, "disturbed": done, "attempts": summary and summary.attempts, "causes": summary and list(summary.causes),
        "batch": summary and summary.batch, "samples": result and result.samples,
    }  # fmt: skip


def _do_nothing(*_: object) -> None:
    """Do nothing, because the stand-in for a GPU disturbs the training."""


def _list_checkpoints(place: CaseFolder, training: Path) -> list[Path]:
    pattern = place.case.saved
    return list(place.work.glob(pattern[2:]) if pattern.startswith("./") else (training / "out").glob(pattern))


def killed(place: CaseFolder) -> dict[str, Any]:
    def kill(run: RunDir, training: Path) -> None:
        task = run.get_training(training.name).read_newest_task()
        assert task is not None
        attempts = (ScriptAttempt(run.path, task.id, number) for number in range(9, 0, -1))
        plan = str(next(attempt for attempt in attempts if attempt.read_heartbeat(0)).plan_path)
        ranks = find_processes_with_variable(
            "RANK"
        )  # on several nodes, the pid of its heartbeat belongs to the pid namespace of a node
        for pid, of in find_processes_with_variable("TULA_PLAN").items():
            if of == plan and ranks.get(pid) == "0":
                os.kill(pid, signal.SIGKILL)

    return _train(place, 1, kill)


def full(place: CaseFolder) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "full")
        mark.touch()
        pattern = place.case.saved
        where = (
            place.work / pattern[2:] if pattern.startswith("./") else place.work / "tula-runs/*/train/*/out" / pattern
        )
        return _train(place, 2, _do_nothing, SCRIPTS_FULL=str(mark), SCRIPTS_SAVED=str(where))


def overhead(place: CaseFolder, *, pairs: int) -> dict[str, Any]:
    """Return CPU milliseconds per step of one rank at the middle batch, and the additional time of the shim in percent."""
    spec = load_spec(place.work / "job.yaml")
    batch = 2 * place.case.batches[0]
    return step_cost.measure(
        spec, batch=batch, pairs=pairs, work=place.work, python=place.python, environment=place.environment
    )


def format_table(results: dict[str, Any]) -> str:
    """Return one line per script as text."""
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


def select_figures(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results without the output of commands and without paths of this machine."""
    words = ("said", "seconds", "found", "error", "causes")

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kept(inner) for name, inner in value.items() if name not in words}
        if isinstance(value, list):
            return [kept(inner) for inner in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    result: dict[str, Any] = kept(results)
    return result


def start_cluster() -> AbstractContextManager[Any]:
    """Return a SLURM cluster of two nodes as a context manager."""
    sys.path.append(str(HERE.parent / "tests" / "slurm"))
    result: AbstractContextManager[Any] = import_module("cluster").SlurmCluster(
        2, prefix=f"b{os.getpid()}n", rate="1gbit"
    )
    return result


def _run_stages(
    place: CaseFolder, result: dict[str, Any], stages: list[str], pairs: int, kept: Callable[[], None]
) -> None:
    """Run the stages of a case that are not done, and store each."""
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


def _read_commit(checkout: Path) -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    arguments = _parse_arguments()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with start_cluster() if arguments.slurm else nullcontext() as nodes:
        os.environ.update(nodes.env if nodes else {})
        for case in CASES:
            checkout = getattr(arguments, case.option)
            if checkout is None or (arguments.only and case.name not in arguments.only):
                continue
            place = CaseFolder(case, checkout.absolute(), out, arguments.python, slurm=arguments.slurm)
            place.make()
            result = results.setdefault(case.name, {})
            result["commit"] = _read_commit(checkout)
            _run_stages(
                place, result, arguments.stages, arguments.pairs, lambda: path.write_text(json.dumps(results, indent=1))
            )
    if arguments.keep:
        arguments.keep.write_text(json.dumps(select_figures(results), indent=1) + "\n")
    print(json.dumps(results, indent=1) if arguments.json else format_table(results))
    return 0


def _parse_arguments() -> argparse.Namespace:
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


STAGES: dict[str, Callable[[CaseFolder, int], dict[str, Any]]] = {
    "profile": lambda place, _: profile(place),
    "recommend": lambda place, _: recommend(place),
    "rehearse": lambda place, _: rehearse(place),
    "killed": lambda place, _: killed(place),
    "full": lambda place, _: full(place),
    "overhead": lambda place, pairs: overhead(place, pairs=pairs),
}

if __name__ == "__main__":
    sys.exit(main())
