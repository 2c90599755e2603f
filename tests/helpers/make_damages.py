"""Damaged files of runs, and the expected messages of commands."""

import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import make_runs as make
import pytest
from isolation import isolate_environment
from make_results import make_inspection

from tula_cli.cli import app
from tula_cli.cluster import inspection
from tula_cli.cluster import launcher as cluster_launcher
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import Cell, Comparison, CountedEnergy, ScriptSaves
from tula_cli.run.records.tasks import EvaluateTask
from tula_cli.run.step_series import StepRow, format_rows
from tula_cli.show import screen as show_screen

SIGNATURE = "ab12cd34"
TRAINING = f"train/{SIGNATURE}"
METRICS, STEPS = f"{TRAINING}/metrics.jsonl", f"{TRAINING}/steps.jsonl"
OLDER_CHECKPOINT, NEWER_CHECKPOINT = (
    f"{TRAINING}/checkpoints/000000002560.pt",
    f"{TRAINING}/checkpoints/000000005120.pt",
)
SHARDED_CHECKPOINT = f"{TRAINING}/checkpoints/000000006000.dcp"
PROBE = "results/probe-n001-l000032.json"
ROW_STEPS = 20  # steps


def make_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a finished training with all its files, for commands that need no scheduler and build no model."""
    isolate_environment(monkeypatch, tmp_path)
    monkeypatch.setattr(
        inspection,
        "inspect",
        lambda spec: make_inspection(dataset_size=300, eval_size=50, parameters=1000, hardware="cpu"),
    )
    monkeypatch.setattr(cluster_launcher, "make_launcher", lambda spec, submits=True: make.FakeLauncher())
    return write_whole_run(tmp_path / "tula-runs")


def write_whole_run(root: Path) -> RunDir:
    run = RunDir.create(root, make.spec())
    for nodes in (1, 2):
        make.add_probes(run, nodes, (16, 32, 64))
        for local in (16, 32, 64):
            make.add_measured(run, nodes, local)
    make.add_training(run, rows=make_rows(), signature=SIGNATURE)
    run.write_attempt(make.attempt(f"train-{SIGNATURE}-1", end=make.START + 300))
    run.write_recommendation(make.recommendation())
    run.write_train_result(make.train_result(SIGNATURE))
    run.write_summary(make.summary(signature=SIGNATURE))
    run.write_tuning(make.tuning((make.branch("lbt"), make.branch("x2")), chosen="x2"))
    run.write_energy(SIGNATURE, CountedEnergy(joules=7.2e6, seconds=300))
    cell = Cell(method="lbt", batch=64, seed=0, nodes=2, signature=SIGNATURE, reference=True)
    fields = {"methods": ("lbt",), "batches": (64,), "seeds": 1, "nodes": 2, "controls": False}
    run.write_comparison(Comparison(**fields, cells=(cell,), created_at=make.START))
    training = run.get_training(SIGNATURE)
    task = EvaluateTask(
        id=f"evaluate-{SIGNATURE}-00", job=f"evaluate-{SIGNATURE}-00", spec=run.read_spec(), workdir="/", nodes=1,
        signature=SIGNATURE, key="00", weights="best", path=str(training.path / "best"), samples=2560, local_batch=64,
    )  # fmt: skip
    training.write_evaluation(make.evaluation(task))
    training.write_script_saves(ScriptSaves())
    training.steps_path.write_text(format_rows(make_step_rows()))
    for name in (OLDER_CHECKPOINT, NEWER_CHECKPOINT):
        write_checkpoint(run.path / name)
    (training.path / "best").symlink_to("checkpoints/000000002560.pt")
    (training.path / "last").symlink_to("checkpoints/000000005120.pt")
    return run


def make_rows() -> list[dict[str, object]]:
    start, step, *_ = make.metrics()
    steps = [
        {**step, "time": make.START + k, "samples": 128 * k, "epoch": k / 10, "step": k} for k in range(1, ROW_STEPS)
    ]
    return [start, *steps]


def make_step_rows() -> list[StepRow]:
    return [
        StepRow.from_step(samples=128 * k, batch=128 if k < 9 else 64, lr=0.1, norm=1.0 + k, delta=0.1)
        for k in range(1, ROW_STEPS)
    ]


def damage_sharded_checkpoint(edit: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return an edit of a run whose newest checkpoint is sharded."""

    def edit_shares(run: Path) -> None:
        folder = run / SHARDED_CHECKPOINT
        folder.mkdir()
        files = {"rest.pt": b"rest" * 99, "__0_0.distcp": b"share" * 99, ".metadata": b"names" * 9}
        for name, data in files.items():
            (folder / name).write_bytes(data)
        (folder / "sums.json").write_text(json.dumps({name: zlib.crc32(data) for name, data in files.items()}))
        replace_by_link(f"{TRAINING}/last", "checkpoints/000000006000.dcp")(run)
        edit(run)

    return edit_shares


def write_checkpoint(path: Path) -> None:
    """Write a checkpoint in the format of torch.save: an uncompressed archive."""
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00." * 50)
        archive.writestr("archive/data/0", bytes(range(256)) * 40)


# --- kinds of damage


def damage_line(number: int, change: Callable[[bytes], bytes], name: str = METRICS) -> Callable[[Path], None]:
    """Return an edit of one line of a file (numbered from 1, including its line end)."""

    def edit(run: Path) -> None:
        lines = (run / name).read_bytes().splitlines(keepends=True)
        lines[number - 1] = change(lines[number - 1])
        (run / name).write_bytes(b"".join(lines))

    return edit


def truncate_to_half(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[: (run / name).stat().st_size // 2])


def replace_content(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(data) and None


def zero_bytes(name: str, start: int, count: int) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[start : start + count] = bytes(count)
        (run / name).write_bytes(data)

    return edit


def set_value(name: str, key: str, new: object) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        record = json.loads((run / name).read_bytes())
        assert key in record
        (run / name).write_text(json.dumps({**record, key: new}))

    return edit


def remove_file(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def replace_by_folder(name: str) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return edit


def replace_by_link(name: str, target: str) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        (run / name).unlink()
        (run / name).symlink_to(target)

    return edit


def replace_bytes(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(text: bytes) -> bytes:
        assert old in text
        return text.replace(old, new)

    return change


@dataclass(frozen=True)
class Damage:
    """An edit of a run and the expected texts of the warning: the file and the consequence."""

    edit: Callable[[Path], None]
    file: str
    words: tuple[str, ...]
    commands: tuple[str, ...] = ()  # commands that read the file, besides status


CURVE_COMMANDS = ("recommend",)
ROW_TEXTS = ("line 5", "charts")
DAMAGES: dict[str, Damage] = {
    # rows of metrics.jsonl
    "row cut in the middle": Damage(damage_line(5, lambda row: row[: len(row) // 2] + b"\n"), METRICS, ROW_TEXTS),
    "row cut behind an inner brace": Damage(
        damage_line(5, lambda row: b'{"kind": "step", "ags": {"scaled": 0.5}\n'), METRICS, ROW_TEXTS
    ),
    "row cut at its start": Damage(damage_line(5, lambda row: row[len(row) // 2 :]), METRICS, ROW_TEXTS),
    "row without its last brace": Damage(damage_line(5, lambda row: row[:-2] + b"\n"), METRICS, ROW_TEXTS),
    "two rows merged": Damage(damage_line(5, lambda row: row[:-1]), METRICS, ROW_TEXTS, CURVE_COMMANDS),
    "half a row and the next": Damage(damage_line(5, lambda row: row[: len(row) // 2]), METRICS, ROW_TEXTS),
    "samples that are a text": Damage(
        damage_line(5, replace_bytes(b'"samples": 512', b'"samples": "512"')), METRICS, ROW_TEXTS
    ),
    "loss that is a list": Damage(damage_line(5, replace_bytes(b'"loss": 2.1', b'"loss": [2.1]')), METRICS, ROW_TEXTS),
    "row without samples": Damage(damage_line(5, replace_bytes(b'"samples": 512, ', b"")), METRICS, ROW_TEXTS),
    "row of another kind of object": Damage(damage_line(5, lambda row: b'{"id": 3}\n'), METRICS, ROW_TEXTS),
    "row of two objects": Damage(damage_line(5, lambda row: row[:-1] + b" " + row), METRICS, ROW_TEXTS),
    "row with a number cut": Damage(damage_line(5, replace_bytes(b'"lr": 0.1', b'"lr": 0.')), METRICS, ROW_TEXTS),
    "row with a sign lost": Damage(damage_line(5, replace_bytes(b'"lr": 0.1', b'"lr": --0.1')), METRICS, ROW_TEXTS),
    "row with a key cut": Damage(damage_line(5, replace_bytes(b'"lr": 0.1', b'"lr: 0.1')), METRICS, ROW_TEXTS),
    "row of a time that is a list": Damage(damage_line(5, replace_bytes(b'"time": 17', b'"time": [], "t": 17')), METRICS, ROW_TEXTS),
    "warning without its text": Damage(damage_line(5, lambda row: b'{"kind": "warning", "samples": 512}\n'), METRICS, ROW_TEXTS),
    "empty line": Damage(damage_line(5, lambda row: b"\n"), METRICS, ROW_TEXTS),
    "first row cut": Damage(damage_line(1, lambda row: row[9:]), METRICS, ("line 1 ", "charts")),
    "row that is a list": Damage(damage_line(5, lambda row: b"[" + row[:-1] + b"]\n"), METRICS, ROW_TEXTS),
    "zeros in a row": Damage(damage_line(5, lambda row: row[:20] + bytes(40) + row[60:]), METRICS, ROW_TEXTS),
    "zeros for several rows": Damage(
        damage_line(5, lambda row: bytes(3 * len(row)) + b"\n"), METRICS, ROW_TEXTS
    ),
    "zeros joined with a row": Damage(damage_line(5, lambda row: bytes(4096) + row), METRICS, ROW_TEXTS),
    "bytes that are no text": Damage(damage_line(5, lambda row: b"\xff\xfe\x8f" + row[3:]), METRICS, ROW_TEXTS),
    "three rows": Damage(
        lambda run: [damage_line(k, lambda row: row[:-9] + b"\n")(run) for k in (5, 6, 7)] and None,
        METRICS, ("lines 5-7", "charts"), CURVE_COMMANDS,
    ),
    "end of a finished curve": Damage(truncate_to_half(METRICS), METRICS, ("line 11", "charts")),
    # rows of steps.jsonl
    "steps cut": Damage(damage_line(1, lambda row: row[: len(row) // 2] + b"\n", STEPS), STEPS, ("line 1", "charts")),
    "steps with a text": Damage(damage_line(2, replace_bytes(b'"batch":64', b'"batch":"64"'), STEPS), STEPS, ("line 2",)),
    "steps merged": Damage(damage_line(1, lambda row: row[:-1], STEPS), STEPS, ("line 1",)),
    # checkpoints
    "best leads nowhere": Damage(remove_file(OLDER_CHECKPOINT), f"{TRAINING}/best", ("the best weights", "000000002560.pt")),
    "last leads nowhere": Damage(remove_file(NEWER_CHECKPOINT), f"{TRAINING}/last", ("the newest", "000000005120.pt")),
    "best is an empty file": Damage(
        lambda run: replace_by_link(f"{TRAINING}/best", "x")(run) or remove_file(f"{TRAINING}/best")(run) or replace_content(f"{TRAINING}/best", b"")(run),
        f"{TRAINING}/best", ("the best weights",),
    ),
    "best leads to itself": Damage(replace_by_link(f"{TRAINING}/best", "best"), f"{TRAINING}/best", ("the best weights",)),
    "best cut": Damage(truncate_to_half(OLDER_CHECKPOINT), OLDER_CHECKPOINT, ("the best weights",)),
    "last cut": Damage(truncate_to_half(NEWER_CHECKPOINT), NEWER_CHECKPOINT, ("the newest weights",)),
    "last empty": Damage(replace_content(NEWER_CHECKPOINT, b""), NEWER_CHECKPOINT, ("the newest weights",)),
    "last with zeros": Damage(zero_bytes(NEWER_CHECKPOINT, 1000, 4096), NEWER_CHECKPOINT, ("the newest weights",)),
    "last a folder": Damage(replace_by_folder(NEWER_CHECKPOINT), NEWER_CHECKPOINT, ("the newest weights",)),
    "shares: a file cut": Damage(damage_sharded_checkpoint(truncate_to_half(f"{SHARDED_CHECKPOINT}/rest.pt")), SHARDED_CHECKPOINT, ("the newest weights", "rest.pt")),
    "shares: a file missing": Damage(damage_sharded_checkpoint(remove_file(f"{SHARDED_CHECKPOINT}/__0_0.distcp")), SHARDED_CHECKPOINT, ("the newest weights", "__0_0")),
    "shares: a file zeroed": Damage(damage_sharded_checkpoint(zero_bytes(f"{SHARDED_CHECKPOINT}/__0_0.distcp", 9, 9)), SHARDED_CHECKPOINT, ("overwritten",)),
    "shares: no sums": Damage(damage_sharded_checkpoint(remove_file(f"{SHARDED_CHECKPOINT}/sums.json")), SHARDED_CHECKPOINT, ("sums.json is missing",)),
    "shares: sums cut": Damage(damage_sharded_checkpoint(truncate_to_half(f"{SHARDED_CHECKPOINT}/sums.json")), SHARDED_CHECKPOINT, ("sums.json cannot be read",)),
    "shares: gone": Damage(damage_sharded_checkpoint(lambda run: shutil.rmtree(run / SHARDED_CHECKPOINT)), f"{TRAINING}/last", ("which is missing",)),
    # records of results
    "probe cut": Damage(truncate_to_half(PROBE), PROBE, ("not measured",), CURVE_COMMANDS),
    "probe of wrong type": Damage(set_value(PROBE, "step_times", "fast"), PROBE, ("not measured",)),
    "probe of an unknown kind": Damage(set_value(PROBE, "kind", "other"), PROBE, ("not measured",)),
    "result cut": Damage(truncate_to_half(f"{TRAINING}/result.json"), f"{TRAINING}/result.json", ("not finished",), CURVE_COMMANDS),
    "summary cut": Damage(truncate_to_half(f"{TRAINING}/summary.json"), f"{TRAINING}/summary.json", ("predicted",), CURVE_COMMANDS),
    "summary empty": Damage(replace_content(f"{TRAINING}/summary.json", b""), f"{TRAINING}/summary.json", ("predicted",)),
    "evaluation cut": Damage(truncate_to_half(f"{TRAINING}/evaluations/00.json"), f"{TRAINING}/evaluations/00.json", ("evaluate",)),
    "state of tuning cut": Damage(truncate_to_half(f"{TRAINING}/tuning.json"), f"{TRAINING}/tuning.json", ("settings that this training tried",)),
    "energy zeroed": Damage(zero_bytes(f"{TRAINING}/energy.json", 0, 9), f"{TRAINING}/energy.json", ("energy",)),
    "saves of a script cut": Damage(truncate_to_half(f"{TRAINING}/saves.json"), f"{TRAINING}/saves.json", ("lost",)),
    "recommendation cut": Damage(truncate_to_half("recommendation.json"), "recommendation.json", ("tula recommend",)),
    "comparison cut": Damage(truncate_to_half("comparison.json"), "comparison.json", ("compar",), ("compare --show",)),
    "task cut": Damage(truncate_to_half(f"tasks/train-{SIGNATURE}-1.json"), f"tasks/train-{SIGNATURE}-1.json", ("is damaged",)),
    "attempt cut": Damage(
        truncate_to_half(f"attempts/train-{SIGNATURE}-1.001.json"), f"attempts/train-{SIGNATURE}-1.001.json", ("attempt",)
    ),
}  # fmt: skip


def run_tula(*words: str) -> tuple[int, str, str]:
    screen = show_screen.Screen(out=io.StringIO(), err=io.StringIO())
    return app.run(list(words), screen=screen), screen.out.getvalue(), screen.err.getvalue()


def join_lines(text: str) -> str:
    return " ".join(text.split())


def check_command(run: RunDir, damage: Damage, *words: str) -> None:
    """Check that a command names the damaged file of a run."""
    code, _, err = run_tula(*words, "--run", str(run.path))
    assert str(run.path / damage.file) in join_lines(err), (words, code, err)
