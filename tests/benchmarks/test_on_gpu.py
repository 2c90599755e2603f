"""The program for a machine with a GPU (benchmarks/on_gpu.py): its order, budget and results, and short dry runs."""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import on_gpu
import operations
import pytest
import torch
from gpu import product, provoke, trials, watch
from gpu.plan import STAGES, StagePlan
from gpu.rig import make_job
from gpu.stage import STAGE_VARIABLE, Stage
from gpu.stages import errors, machine, memory, steps, table
from gpu.trials import TrialFailed, Trials, find_largest_batch
from gpu.watch import MemorySampler
from on_gpu import CallSettings, Results, has_passed, run_stages
from PIL import Image

from tula_cli.host.failure_texts import classify_failure
from tula_cli.run.records.probes import Components, Footprint
from tula_cli.spec.job import JobSpec

STATES = {"parameters": 1, "gradients": 1, "optimizer": 1, "factors": 0, "batch": 1, "activations": 1}
FOOTPRINT = Footprint(local_batch=1, memory=Components(**STATES, peak=5, reserved=5))


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[CallSettings]:
    with open(tmp_path / "log.txt", "ab") as log:
        yield CallSettings("cuda", False, tmp_path / "work", None, "code", log)


def ok(row: StagePlan, setting: CallSettings) -> dict[str, Any]:
    return setting.entry("ok", "", told={"data": {"of": row.name}, "faults": [], "unjudged": []})


def test_every_stage_ends_within_five_minutes_and_has_a_function_of_its_own() -> None:
    assert len(STAGES) == 14 and max(row.limit for row in STAGES.values()) <= 300
    assert len({row.function() for row in STAGES.values()}) == 14
    assert all(row.usual < row.limit for row in STAGES.values())
    assert sum(row.usual for row in STAGES.values()) < 35 * 60  # three quarters of an hour, with starts


@pytest.mark.parametrize("path", sorted((on_gpu.HERE / "results").glob("h*.json")), ids=lambda path: path.stem)
def test_errors_that_a_card_has_shown_are_classified(path: Path) -> None:
    shown = json.loads(path.read_text())["errors"]["data"]["errors"]
    assert set(shown) == set(errors.EXPECTED_OUTCOMES)
    for kind, error in shown.items():
        assert classify_failure(error["text"], exit_code=error["exit"], device="cuda") == errors.EXPECTED_OUTCOMES[kind]


def test_results_are_whole_after_each_stage(tmp_path: Path, setting: CallSettings) -> None:
    path = tmp_path / "out" / "results.json"
    seen = []

    def one(row: StagePlan, setting: CallSettings) -> dict[str, Any]:
        seen.append(list(json.loads(path.read_text())) if path.exists() else [])
        return ok(row, setting)

    run_stages(["env", "syncs", "oom"], Results(path, {}), budget=1e9, again=False, setting=setting, one=one)
    assert seen == [[], ["env"], ["env", "syncs"]]
    assert json.loads(path.read_text())["oom"]["data"] == {"of": "oom"}


def test_nothing_starts_that_does_not_fit_the_budget_and_with_it_all_ends(
    tmp_path: Path, setting: CallSettings
) -> None:
    now, limits = [0.0], []

    def one(row: StagePlan, setting: CallSettings) -> dict[str, Any]:
        limits.append(setting.limit(row))
        now[0] += row.limit
        return ok(row, setting)

    results = Results(tmp_path / "results.json", {})
    run_stages(
        ["quickstart", "timing", "oom", "env"], results, budget=400, again=False, setting=setting, one=one,
        clock=lambda: now[0],
    )  # fmt: skip
    assert {name: entry["status"] for name, entry in results.entries.items()} == {
        "quickstart": "ok",
        "timing": "ok",
        "oom": "skipped",
        "env": "skipped",
    }
    assert limits == [220, 180]  # what is left of the budget bounds the second
    assert results.entries["env"]["why"] == "takes some 15 s, 0 s of the budget are left"


def test_all_packages_that_are_missing_are_reported_at_once(tmp_path: Path) -> None:
    code = "import importlib.util as u; find = u.find_spec; u.find_spec = lambda n: None if n in ('kneed', 'submitit') else find(n); import on_gpu"
    environment = {**os.environ, "PYTHONPATH": str(on_gpu.HERE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "lacks kneed, submitit: pip install" in done.stderr


@pytest.mark.parametrize(
    ("known", "again", "measured"),
    [
        ({"status": "ok", "device": "cuda", "tiny": False}, False, []),
        ({"status": "ok", "device": "cuda", "tiny": False}, True, ["env"]),
        ({"status": "timeout", "device": "cuda", "tiny": False}, False, ["env"]),
        ({"status": "ok", "device": "cpu", "tiny": True}, False, ["env"]),  # a dry run is no measurement
    ],
)
def test_what_is_ok_is_not_measured_again(
    tmp_path: Path, setting: CallSettings, known: dict[str, Any], again: bool, measured: list[str]
) -> None:
    earlier, seen = tmp_path / "earlier.json", []
    earlier.write_text(json.dumps({"env": known}))

    def one(row: StagePlan, setting: CallSettings) -> dict[str, Any]:
        seen.append(row.name)
        return ok(row, setting)

    results = Results.begin(tmp_path / "results.json", earlier)
    run_stages(["env"], results, budget=1e9, again=again, setting=setting, one=one)
    assert seen == measured


def test_a_stage_that_is_left_out_keeps_what_was_measured_of_it(tmp_path: Path, setting: CallSettings) -> None:
    results = Results(tmp_path / "results.json", {"env": setting.entry("timeout", "ended after 20 s")})
    results.put("env", setting.entry("skipped", "no time"))
    assert results.entries["env"]["status"] == "timeout"


PROGRAM = """
import json, pathlib, subprocess, sys, time
name, folder, device = sys.argv[1:4]
told = {"data": {"before": 1}, "faults": [], "unjudged": ["speed"] if device == "cpu" else []}
pathlib.Path(folder, "stage.json").write_text(json.dumps(told))
if name == "oom":
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path(folder, "child").write_text(str(child.pid))
    time.sleep(600)
if name == "errors":
    raise ValueError("the reason")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that import nothing: one hangs and has a child in a session of its own, one fails."""
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "__init__.py").touch()
    (tmp_path / "gpu" / "__main__.py").write_text(PROGRAM)
    monkeypatch.setattr(on_gpu, "FOLDERS", (tmp_path,))


def test_a_stage_that_hangs_is_ended_with_all_it_started_and_keeps_its_figures(
    program: None, setting: CallSettings
) -> None:
    entry = on_gpu.run_stage(StagePlan("oom", 1.0, 1.0, ""), setting)
    assert (entry["status"], entry["pass"], entry["why"]) == ("timeout", False, "ended after 1 s")
    assert entry["data"] == {"before": 1}
    child = int((setting.work / "oom" / "child").read_text())
    assert not gone(lambda: Path(f"/proc/{child}/environ").read_bytes())


def test_a_program_that_is_ended_ends_its_stage(program: None, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--tiny", "--stages", "oom", "--out", str(tmp_path / "out")]
    start = f"on_gpu.FOLDERS = (pathlib.Path({str(tmp_path)!r}),); on_gpu.leave_on_sigterm(); on_gpu.main({words})"
    code = f"import on_gpu, pathlib; {start}"
    path = os.pathsep.join([str(on_gpu.HERE), str(on_gpu.ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    )  # fmt: skip
    while not (result := [file for file in tmp_path.glob("on-gpu-*/oom/child") if file.read_text()]):
        assert process.poll() is None
        time.sleep(0.05)
    child = int(result[0].read_text())
    process.terminate()
    assert process.wait() == 143
    assert not gone(lambda: Path(f"/proc/{child}/environ").read_bytes())
    assert (tmp_path / "out" / "runs.tgz").exists() and not list(tmp_path.glob("on-gpu-*"))


def gone(look: Callable[[], bytes]) -> bytes:
    """Return what is left to see of a process; a killed one may be a zombie for a moment."""
    for _ in range(50):
        try:
            if not (result := look()):
                return b""
        except OSError:
            return b""
        time.sleep(0.02)
    return result


def test_a_stage_that_fails_says_why(program: None, setting: CallSettings) -> None:
    entry = on_gpu.run_stage(StagePlan("errors", 20.0, 20.0, ""), setting)
    assert (entry["status"], entry["why"]) == ("fail", "exit code 1: ValueError: the reason")


def test_what_the_cpu_cannot_judge_has_not_passed_and_is_no_fault(
    program: None, setting: CallSettings, tmp_path: Path
) -> None:
    entry = on_gpu.run_stage(
        StagePlan("env", 20.0, 20.0, ""), CallSettings("cpu", True, tmp_path / "work", None, "code", setting.log)
    )
    assert (entry["status"], entry["pass"], entry["judged"]) == ("ok", False, False)
    assert entry["why"] == "not judged: speed" and has_passed(entry)
    assert not has_passed(entry | {"why": "a fault; not judged: speed"}) and not has_passed(None)


def test_a_stage_tells_as_it_goes(tmp_path: Path) -> None:
    stage = Stage("cuda", False, tmp_path)
    stage.tell(rows={"a": 1})
    stage.tell(rows={"b": 2}, n=3)
    stage.require(False, "too slow")
    stage.require_on_card("speed", False, "no card is that slow")
    assert json.loads((tmp_path / "stage.json").read_text()) == {
        "data": {"rows": {"a": 1, "b": 2}, "n": 3},
        "faults": ["too slow", "no card is that slow"],
        "unjudged": [],
    }


def test_small_files_of_the_runs_are_kept(tmp_path: Path) -> None:
    for name, size in (("a/result.json", 10), ("a/big.json", on_gpu.MAX_FILE_BYTES + 1), ("a/weights.pt", 10)):
        (tmp_path / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / name).write_bytes(b"0" * size)
    on_gpu.pack_small_files(tmp_path / "work", tmp_path / "runs.tgz")
    with tarfile.open(tmp_path / "runs.tgz") as tar:
        assert tar.getnames() == ["a/result.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stages", "env,ovens"], "ovens: there are env, quickstart"),
        (["--stages", " , "], "none is named: there are env, quickstart"),
        (["--device", "cpu"], "--device cpu goes with --tiny"),
        (["--device", "cpu", "--tiny", "--budget", "0"], "--budget 0"),
        (["--device", "cpu", "--tiny", "--budget", "nan"], "--budget nan"),
        (["--device", "cpu", "--tiny", "--data", "/no/such"], "no such folder"),
        ([], "this machine has no GPU"),
    ],
)
def test_wrong_input_is_answered_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "has_gpu", lambda: False)
    monkeypatch.setattr(on_gpu, "torch_finds_gpu", lambda: False)
    with pytest.raises(SystemExit) as error:
        on_gpu.parse_arguments(words)
    assert error.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"env": 5}'])
def test_results_that_cannot_be_read_are_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(SystemExit, match=r"holds no results.*--done"):
        Results.begin(tmp_path / "out.json", tmp_path / "results.json")


# --- parts of stages


@pytest.mark.parametrize("true", [1, 37, 1000, 29_996])
@pytest.mark.parametrize("off", [0.5, 1.0, 1.4])
def test_the_largest_batch_is_found_in_few_trials(true: int, off: float) -> None:
    tried = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= true

    result = find_largest_batch(fits, round(true * off))
    assert true * 0.98 - 1 <= result <= true and len(tried) <= 16


def test_where_not_even_one_sample_fits_the_largest_batch_is_none() -> None:
    assert find_largest_batch(lambda batch: False, 64) == 0


ANSWERS = """
import json, sys
for line in sys.stdin:
    given = json.loads(line)
    if isinstance(given, dict):
        print("job", given["spec"]["train"]["precision"], file=sys.stderr, flush=True)
        most = given["capacity"]
    elif given == 13:
        sys.exit("RuntimeError: a mistake of one's own")
    elif given > most and most == 7:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory")
    else:
        print(json.dumps({"batch": given, "fits": given <= most, "memory": None}), flush=True)
"""


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., JobSpec]:
    """Processes that answer without training anything; returns what makes their jobs."""
    (tmp_path / "answers.py").write_text(ANSWERS)
    monkeypatch.setattr(trials, "__file__", str(tmp_path / "answers.py"))
    return lambda device, precision="fp32": make_job("resnet18", image=8, batch=4, device=device, precision=precision)


def test_one_process_tries_all_batches_of_all_jobs_on_a_gpu(answering: Callable[..., JobSpec]) -> None:
    with Trials(answering("cuda"), capacity=10) as trial:
        assert [trial(batch).fits for batch in (4, 11, 9)] == [True, False, True]
        first = trial.process
        assert trial.of(answering("cuda", "bf16"), capacity=5)(9).fits is False
        assert trial.process is first
        trial.errors.seek(0)
        assert trial.errors.read().split() == ["job", "fp32", "job", "bf16"]


def test_on_the_cpu_each_batch_has_a_process_of_its_own(answering: Callable[..., JobSpec]) -> None:
    with Trials(answering("cpu"), capacity=10) as trial:
        assert trial(4).fits and trial.process is None
        assert not trial(11).fits and trial.process is None


def test_a_trial_that_dies_of_memory_is_an_answer_and_another_death_is_reported(
    answering: Callable[..., JobSpec],
) -> None:
    with Trials(answering("cuda"), capacity=7) as trial:
        died = trial(9)
        assert not died.fits and "out of memory" in died.text
        assert trial(5).fits  # by a new process
        with pytest.raises(TrialFailed, match="a mistake of one's own"):
            trial(13)


@pytest.mark.parametrize(("free", "processes"), [(18 * 2**20, 4), (18 * 2**20 - 1, 0), (None, 0)])
def test_loaders_have_processes_where_shared_memory_holds_what_they_make(
    monkeypatch: pytest.MonkeyPatch, free: int | None, processes: int
) -> None:
    monkeypatch.setattr(product, "read_shared_memory", lambda: free)
    assert product.limit_loader_processes(4, batch=2**19, trainings=2) == processes  # 2 x (2 x 4 + 1) batches each


def test_a_model_that_fails_is_a_fault_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(stage: Stage, key: tuple[str, str], *_: object) -> None:
        if key[0] == "vgg11":
            raise TrialFailed("Traceback\nRuntimeError: more elements than 2^31")
        stage.tell(largest={",".join(key): 1})

    wanted = [("vgg11", "fp32"), ("alexnet", "fp32")]
    monkeypatch.setattr(memory, "list_models", lambda _: wanted)
    monkeypatch.setattr(memory, "find_model_largest_batch", one)
    monkeypatch.setattr(memory, "read_or_make_estimates", lambda *_, **__: {key: [FOOTPRINT] for key in wanted})
    stage = Stage("cpu", True, tmp_path)
    memory.largest_of_all(stage)
    assert stage.faults == ["vgg11,fp32: RuntimeError: more elements than 2^31"]
    assert stage.figures["largest"] == {"alexnet,fp32": 1}


def test_an_error_that_could_not_be_provoked_is_left_open_and_one_that_is_misread_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {
        "allocator": "torch.OutOfMemoryError: CUDA out of memory.",
        "cublas": f"{watch.NO_ERROR_PREFIX} 7 blocks held",
    }
    monkeypatch.setattr(
        errors, "provoke_error", lambda kind, **_: (1, text.get(kind, "RuntimeError: the card is full"))
    )
    stage = Stage("cuda", False, tmp_path)
    errors.errors(stage)
    assert stage.unjudged == ["cublas: it could not be provoked"]
    assert [fault.partition(" is read as")[0] for fault in stage.faults] == ["cudnn", "nccl"]


def test_memory_is_held_until_a_sample_shows_it_back() -> None:
    watch = MemorySampler("cuda", [(10.0, 900), (10.4, 800), (10.8, 90), (11.2, 700)])
    assert watch.back_after(10.1, 100, until=12.0) == pytest.approx(0.7)
    assert watch.back_after(10.1, 100, until=10.5) is None  # the next attempt had begun
    assert watch.most(10.0, 11.0) == 900


@pytest.mark.parametrize("left", [0, 100 * 2**20])
def test_a_card_is_filled_to_what_is_to_be_left(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    free = 3 * 2**30 + 777 * 2**20 + 5

    def take(size: int, **_: object) -> int:
        nonlocal free
        if size == 2**29:  # no block so large is free in one piece
            raise torch.OutOfMemoryError
        free -= size
        return size

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * 2**30))
    monkeypatch.setattr(torch, "empty", take)
    kept = watch.allocate_until(left)
    assert left <= free < left + 2**21
    assert sum(map(int, kept)) + free == 3 * 2**30 + 777 * 2**20 + 5


def test_the_ranks_of_a_stage_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGE_VARIABLE, "mine")
    sleeps = "import sys, time; print(flush=True); time.sleep(60)"
    marks = {"rank": "mine", "another stage's": "mine too", "no rank": "mine"}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", sleeps, "x" if name == "no rank" else "tula_cli.worker"],
            env={**os.environ, STAGE_VARIABLE: value},
            stdout=subprocess.PIPE,
        )
        for name, value in marks.items()
    }
    try:
        for process in started.values():
            assert process.stdout is not None and process.stdout.readline()
        assert watch.list_rank_processes() == [started["rank"].pid]
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def test_packed_images_are_decoded_in_their_order(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {}
    for split, shades in (("train", (10, 200, 90)), ("test", (50,))):
        files = [jpeg(shade) for shade in shades]
        arrays[f"{split}_jpeg"] = np.frombuffer(b"".join(files), dtype=np.uint8)
        arrays[f"{split}_length"] = np.array([len(file) for file in files])
        arrays[f"{split}_label"] = np.arange(len(files))
    with np.load(save(tmp_path / table.PACKED_IMAGES_FILE, arrays)) as data:
        files = list(table.split_files(data["train_jpeg"], data["train_length"]))
    images = table.decode_images(files)
    assert [round(float(image.mean()), -1) for image in images] == [10, 200, 90]
    assert images[0].shape == (32, 32, 3)


def jpeg(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (shade, shade, shade)).save(file, "JPEG")
    return file.getvalue()


def save(path: Path, arrays: dict[str, Any]) -> Path:
    np.savez(path, **arrays)
    return path


# --- short dry runs


def test_dry_runs_measure_and_leave_to_a_card_what_only_a_card_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "list_cases", lambda: ["ags, clip", "lars"])
    env, syncs = (Stage("cpu", True, tmp_path / name) for name in ("env", "syncs"))
    machine.env(env)
    assert {"torch", "nccl", "driver", "copy_tbs", "bf16_tflops", "h2d_gbs", "shm_gib"} <= env.figures.keys()
    assert (
        env.figures["copy_tbs"] > 0
        and env.unjudged == ["copy_tbs (needs a GPU)", "bf16_tflops (needs a GPU)"]
        and not env.faults
    )
    steps.syncs(syncs)
    assert syncs.figures["syncs"].keys() == {"ags, clip,fp16", "lars,fp16"}  # fmt: skip
    assert syncs.unjudged == ["syncs (needs a GPU)"] and not syncs.faults


def test_a_host_that_waits_is_seen_and_where() -> None:
    import torch
    from gpu.waits import count_waits

    with count_waits("cpu") as result:
        float(torch.ones(2).sum())
        torch.ones(2).tolist()
    assert sum(result.values()) >= 2 and any(place.startswith("tolist ") for place in result)


def test_the_whole_program_runs_a_stage_and_keeps_its_results(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--tiny", "--stages", "env", "--out", str(tmp_path)]
    assert on_gpu.main(words) == 0
    entry = json.loads((tmp_path / "results.json").read_text())["env"]
    assert (entry["status"], entry["device"], entry["tiny"]) == ("ok", "cpu", True)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "log.txt", "runs.tgz"}


def test_a_table_of_stages_is_part_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        on_gpu.parse_arguments(["--help"])
    assert ",".join(STAGES) in "".join(capsys.readouterr().out.split())
    with pytest.raises(argparse.ArgumentTypeError):
        on_gpu.parse_stages("nothing")


def test_every_expected_error_can_be_provoked() -> None:
    expected = errors.EXPECTED_OUTCOMES.keys() | errors.EXPECTED_ON_CPU.keys()
    assert provoke.KINDS.keys() == expected
