"""Short trainings through the command line: their outputs and their final weights."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cases import Case
from golden import HERE, Outcome, flatten
from run_cases import Commands

WEIGHTS = HERE / "weights"
TOLERANCE = 1e-5
"""Tolerance of weights and metrics under another torch or on another CPU type; if both are known, they are bitwise equal."""
PROGRAM = """
import hashlib, json, os, re, sys, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
def read(path):
    if os.path.isdir(path):
        dcp_to_torch_save(path, path + ".whole")
        path += ".whole"
    state = torch.load(path, weights_only=True, map_location="cpu")["model"]
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    weights = {name: value.double().flatten().tolist() for name, value in state.items()}
    key = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {cpu}"
    return {"key": key, "hash": digest.hexdigest()[:16], "weights": weights}
fields = dict(re.findall(r"^(cpu family|model|stepping)\\s*: (.*)", open("/proc/cpuinfo").read(), re.M))
cpu = "CPU " + "-".join(fields.values())  # of the same capability, another model sums in another order
for line in sys.stdin:
    try:
        answer = read(os.path.realpath(line.strip()))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Training:
    """A training of `work/training.yaml` with other settings.

    Args:
        name: of the case.
        settings: of `--set`.
        nodes: processes on this machine.
        batch: global.
        mended: the first start fails, and the second one resumes from its checkpoint.
        slow: runs only in `make proof`.
    """

    name: str
    settings: Mapping[str, str]
    nodes: int = 1
    batch: int = 32
    mended: bool = False
    slow: bool = True

    def command(self) -> str:
        words = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in self.settings.items())
        return f"train training.yaml --nodes {self.nodes} --batch {self.batch} --yes --json {words}"


def make_training(name: str, *, nodes: int = 1, slow: bool = True, **settings: str) -> Training:
    return Training(
        f"method-{name}",
        {"train.method": name} | {key.replace("__", "."): value for key, value in settings.items()},
        nodes,
        slow=slow,
    )


ADAM = {"optimizer__name": "AdamW", "optimizer__momentum": "null", "optimizer__lr": "0.01"}
ONE_WARMUP_EPOCH = {"schedule__warmup_epochs": "1"}
"""One warm-up epoch instead of five, for methods that only differ from others after it."""
TRAININGS = (
    make_training("ags", slow=False),
    make_training("lbt"),
    make_training("lrs", **ONE_WARMUP_EPOCH),
    make_training("lars", **ONE_WARMUP_EPOCH),
    make_training("lamb", **ADAM, **ONE_WARMUP_EPOCH),
    make_training("polo", nodes=2, train__epochs="7", **ONE_WARMUP_EPOCH),
    make_training("static"),
    make_training("ortho", **ONE_WARMUP_EPOCH),
    make_training("ramp"),
    make_training("schedule_free", **ONE_WARMUP_EPOCH),
    make_training("auto"),
    Training("precision-bf16", {"train.precision": "bf16"}),
    Training("precision-fp16", {"train.precision": "fp16"}),
    Training("accumulate-and-clip", {"train.accumulate": "2", "train.max_grad_norm": "0.5", "schedule.kind": "cosine"}),
    Training("robust-ags", {"train.method": "ags", "ags.preset": "robust"}, nodes=2),
    Training("out-of-memory", {"model.name": "tiny:Slow", "model.args": "{fits: 8}", "train.method": "ags"}),
    Training("parallel-fsdp", {"train.parallel": "fsdp", "train.method": "ags"}, nodes=2),
    Training("resumed", {"model.name": "mendable:Net", "model.args": "{}"}, batch=16, mended=True),
)


class Weights:
    """Reads checkpoints in a separate process, which imports torch once."""

    def __init__(self) -> None:
        self.reader = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self, path: str) -> dict[str, Any]:
        """Return `key` (torch version and CPU), `hash` and `weights` of a checkpoint, or `error`."""
        assert self.reader.stdin is not None and self.reader.stdout is not None
        self.reader.stdin.write(path + "\n")
        self.reader.stdin.flush()
        answer: dict[str, Any] = json.loads(self.reader.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.reader.stdin is not None
        self.reader.stdin.close()
        self.reader.wait()


def replace_measurements(value: Any) -> Any:
    """Return an output in which fractions, which are times or rounded by torch, are replaced by a constant."""
    if isinstance(value, Mapping):
        return {name: replace_measurements(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [replace_measurements(inner) for inner in value]
    return "<float>" if isinstance(value, float) else value


def run_training(training: Training, commands: Commands, weights: Weights) -> tuple[Outcome, dict[str, Any]]:
    """Train; return the output without measured values, and the weights with the metrics."""
    case = Case(f"train-{training.name}", words=training.command())
    codes = []
    if training.mended:
        codes.append(commands.case(case).data["exit_code"])
        (commands.case_folder / "work" / "mended").touch()
    outcome = commands.case(case, again=training.mended)
    answer = json.loads((commands.case_folder / "stdout").read_text())
    if outcome.data["exit_code"]:
        return outcome, {}
    state = weights.read(answer["data"]["weights"])
    if "error" in state:
        return Outcome(outcome.data, {"weights": state["error"]}), {}
    metrics = {name: answer["data"][name] for name in ("metrics", "best_loss", "best_top1", "best_epoch")}
    data = replace_measurements(outcome.data) | {"exit_codes_before": codes}
    sentences = {place: text for place, text in outcome.sentences.items() if place != "stderr"}  # stderr contains times
    return Outcome(data, sentences), state | {"metrics": dict(flatten(metrics))}


def list_weight_differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference of weights, compared by hash if torch and the CPU are known, else to 1e-5."""
    known = expected["hashes"].get(actual["key"])
    if known == actual["hash"]:
        return []
    pairs = [dict(flatten({part: state[part] for part in ("weights", "metrics")})) for state in (expected, actual)]
    lines = [f"the hash is {actual['hash']} with {actual['key']}, expected {known}"] if known else []
    changed: dict[str, list[float]] = {}
    for place in sorted({*pairs[0], *pairs[1]}):
        before, now = (flat.get(place) for flat in pairs)
        numbers = isinstance(before, int | float) and isinstance(now, int | float)
        if not numbers:
            lines.append(f"{place}: {before!r}, now {now!r}")
        elif not math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE):  # type: ignore[arg-type]
            changed.setdefault(place.partition("[")[0], []).append(abs(now - before))  # type: ignore[operator]
    return lines + [f"{name}: {len(by)} changed, by {max(by):.3g} at most" for name, by in changed.items()]


def load_weights(name: str) -> dict[str, Any] | None:
    path = WEIGHTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def save_weights(name: str, actual: Mapping[str, Any]) -> None:
    """Write the weights of a training; hashes of other torch versions and CPUs are kept if the weights are unchanged."""
    before = load_weights(name)
    kept = before["hashes"] if before and not list_weight_differences(before | {"hashes": {}}, actual) else {}
    WEIGHTS.mkdir(exist_ok=True)
    rounded = {part: _round_weights(actual[part]) for part in ("weights", "metrics")}
    content = {"hashes": kept | {actual["key"]: actual["hash"]}, **rounded}
    (WEIGHTS / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def _round_weights(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _round_weights(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_round_weights(inner) for inner in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value
