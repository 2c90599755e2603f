"""Damaged files of runs, and what commands say of them."""

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
from make_results import inspected
from quiet import quiet

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
OLDER, NEWER = f"{TRAINING}/checkpoints/000000002560.pt", f"{TRAINING}/checkpoints/000000005120.pt"
SHARES = f"{TRAINING}/checkpoints/000000006000.dcp"
PROBE = "results/probe-n001-l000032.json"
ROWS = 20  # steps


def make_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a finished training with all its files, whose commands ask no scheduler and build no model."""
    quiet(monkeypatch, tmp_path)
    monkeypatch.setattr(
        inspection, "inspect", lambda spec: inspected(dataset_size=300, eval_size=50, parameters=1000, hardware="cpu")
    )
    monkeypatch.setattr(cluster_launcher, "make_launcher", lambda spec, submits=True: make.FakeLauncher())
    return whole_run(tmp_path / "tula-runs")


def whole_run(root: Path) -> RunDir:
    run = RunDir.create(root, make.spec())
    for nodes in (1, 2):
        make.add_probes(run, nodes, (16, 32, 64))
        for local in (16, 32, 64):
            make.add_measured(run, nodes, local)
    make.add_training(run, rows=rows(), signature=SIGNATURE)
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
    training.write_evaluation(make.evaluated(task))
    training.write_script_saves(ScriptSaves())
    training.steps_path.write_text(format_rows(step_rows()))
    for name in (OLDER, NEWER):
        write_checkpoint(run.path / name)
    (training.path / "best").symlink_to("checkpoints/000000002560.pt")
    (training.path / "last").symlink_to("checkpoints/000000005120.pt")
    return run


def rows() -> list[dict[str, object]]:
    start, step, *_ = make.metrics()
    steps = [{**step, "time": make.START + k, "samples": 128 * k, "epoch": k / 10, "step": k} for k in range(1, ROWS)]
    return [start, *steps]


def step_rows() -> list[StepRow]:
    return [
        StepRow.from_step(samples=128 * k, batch=128 if k < 9 else 64, lr=0.1, norm=1.0 + k, delta=0.1)
        for k in range(1, ROWS)
    ]


def shares(edit: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return an edit of a run whose newest checkpoint is one in shares."""

    def edit_shares(run: Path) -> None:
        folder = run / SHARES
        folder.mkdir()
        files = {"rest.pt": b"rest" * 99, "__0_0.distcp": b"share" * 99, ".metadata": b"names" * 9}
        for name, data in files.items():
            (folder / name).write_bytes(data)
        (folder / "sums.json").write_text(json.dumps({name: zlib.crc32(data) for name, data in files.items()}))
        link(f"{TRAINING}/last", "checkpoints/000000006000.dcp")(run)
        edit(run)

    return edit_shares


def write_checkpoint(path: Path) -> None:
    """Write what torch.save would: an archive that is not compressed."""
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00." * 50)
        archive.writestr("archive/data/0", bytes(range(256)) * 40)


# --- ways to damage


def line(number: int, change: Callable[[bytes], bytes], name: str = METRICS) -> Callable[[Path], None]:
    """Return an edit of one line of a file (its number from 1; its line end included)."""

    def edit(run: Path) -> None:
        lines = (run / name).read_bytes().splitlines(keepends=True)
        lines[number - 1] = change(lines[number - 1])
        (run / name).write_bytes(b"".join(lines))

    return edit


def half(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[: (run / name).stat().st_size // 2])


def content(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(data) and None


def zeroed(name: str, start: int, count: int) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[start : start + count] = bytes(count)
        (run / name).write_bytes(data)

    return edit


def value(name: str, key: str, new: object) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        record = json.loads((run / name).read_bytes())
        assert key in record
        (run / name).write_text(json.dumps({**record, key: new}))

    return edit


def removed(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def becomes_folder(name: str) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return edit


def link(name: str, target: str) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        (run / name).unlink()
        (run / name).symlink_to(target)

    return edit


def edited(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(text: bytes) -> bytes:
        assert old in text
        return text.replace(old, new)

    return change


@dataclass(frozen=True)
class Damage:
    """An edit of a run and what has to be said of it: the file, and what follows."""

    edit: Callable[[Path], None]
    file: str
    words: tuple[str, ...]
    commands: tuple[str, ...] = ()  # that read it, beside status


CURVE = ("recommend",)
ROW = ("line 5", "charts")
DAMAGES: dict[str, Damage] = {
    # rows of metrics.jsonl
    "row cut in the middle": Damage(line(5, lambda row: row[: len(row) // 2] + b"\n"), METRICS, ROW),
    "row cut behind an inner brace": Damage(
        line(5, lambda row: b'{"kind": "step", "ags": {"scaled": 0.5}\n'), METRICS, ROW
    ),
    "row cut at its start": Damage(line(5, lambda row: row[len(row) // 2 :]), METRICS, ROW),
    "row without its last brace": Damage(line(5, lambda row: row[:-2] + b"\n"), METRICS, ROW),
    "two rows merged": Damage(line(5, lambda row: row[:-1]), METRICS, ROW, CURVE),
    "half a row and the next": Damage(line(5, lambda row: row[: len(row) // 2]), METRICS, ROW),
    "samples that are a text": Damage(
        line(5, edited(b'"samples": 512', b'"samples": "512"')), METRICS, ROW
    ),
    "loss that is a list": Damage(line(5, edited(b'"loss": 2.1', b'"loss": [2.1]')), METRICS, ROW),
    "row without samples": Damage(line(5, edited(b'"samples": 512, ', b"")), METRICS, ROW),
    "row of another kind of object": Damage(line(5, lambda row: b'{"id": 3}\n'), METRICS, ROW),
    "row of two objects": Damage(line(5, lambda row: row[:-1] + b" " + row), METRICS, ROW),
    "row with a number cut": Damage(line(5, edited(b'"lr": 0.1', b'"lr": 0.')), METRICS, ROW),
    "row with a sign lost": Damage(line(5, edited(b'"lr": 0.1', b'"lr": --0.1')), METRICS, ROW),
    "row with a key cut": Damage(line(5, edited(b'"lr": 0.1', b'"lr: 0.1')), METRICS, ROW),
    "row of a time that is a list": Damage(line(5, edited(b'"time": 17', b'"time": [], "t": 17')), METRICS, ROW),
    "warning without its text": Damage(line(5, lambda row: b'{"kind": "warning", "samples": 512}\n'), METRICS, ROW),
    "empty line": Damage(line(5, lambda row: b"\n"), METRICS, ROW),
    "first row cut": Damage(line(1, lambda row: row[9:]), METRICS, ("line 1 ", "charts")),
    "row that is a list": Damage(line(5, lambda row: b"[" + row[:-1] + b"]\n"), METRICS, ROW),
    "zeros in a row": Damage(line(5, lambda row: row[:20] + bytes(40) + row[60:]), METRICS, ROW),
    "zeros for several rows": Damage(
        line(5, lambda row: bytes(3 * len(row)) + b"\n"), METRICS, ROW
    ),
    "zeros joined with a row": Damage(line(5, lambda row: bytes(4096) + row), METRICS, ROW),
    "bytes that are no text": Damage(line(5, lambda row: b"\xff\xfe\x8f" + row[3:]), METRICS, ROW),
    "three rows": Damage(
        lambda run: [line(k, lambda row: row[:-9] + b"\n")(run) for k in (5, 6, 7)] and None,
        METRICS, ("lines 5-7", "charts"), CURVE,
    ),
    "end of a finished curve": Damage(half(METRICS), METRICS, ("line 11", "charts")),
    # rows of steps.jsonl
    "steps cut": Damage(line(1, lambda row: row[: len(row) // 2] + b"\n", STEPS), STEPS, ("line 1", "charts")),
    "steps with a text": Damage(line(2, edited(b'"batch":64', b'"batch":"64"'), STEPS), STEPS, ("line 2",)),
    "steps merged": Damage(line(1, lambda row: row[:-1], STEPS), STEPS, ("line 1",)),
    # checkpoints
    "best leads nowhere": Damage(removed(OLDER), f"{TRAINING}/best", ("the best weights", "000000002560.pt")),
    "last leads nowhere": Damage(removed(NEWER), f"{TRAINING}/last", ("the newest", "000000005120.pt")),
    "best is an empty file": Damage(
        lambda run: link(f"{TRAINING}/best", "x")(run) or removed(f"{TRAINING}/best")(run) or content(f"{TRAINING}/best", b"")(run),
        f"{TRAINING}/best", ("the best weights",),
    ),
    "best leads to itself": Damage(link(f"{TRAINING}/best", "best"), f"{TRAINING}/best", ("the best weights",)),
    "best cut": Damage(half(OLDER), OLDER, ("the best weights",)),
    "last cut": Damage(half(NEWER), NEWER, ("the newest weights",)),
    "last empty": Damage(content(NEWER, b""), NEWER, ("the newest weights",)),
    "last with zeros": Damage(zeroed(NEWER, 1000, 4096), NEWER, ("the newest weights",)),
    "last a folder": Damage(becomes_folder(NEWER), NEWER, ("the newest weights",)),
    "shares: a file cut": Damage(shares(half(f"{SHARES}/rest.pt")), SHARES, ("the newest weights", "rest.pt")),
    "shares: a file missing": Damage(shares(removed(f"{SHARES}/__0_0.distcp")), SHARES, ("the newest weights", "__0_0")),
    "shares: a file zeroed": Damage(shares(zeroed(f"{SHARES}/__0_0.distcp", 9, 9)), SHARES, ("overwritten",)),
    "shares: no sums": Damage(shares(removed(f"{SHARES}/sums.json")), SHARES, ("sums.json is missing",)),
    "shares: sums cut": Damage(shares(half(f"{SHARES}/sums.json")), SHARES, ("sums.json cannot be read",)),
    "shares: gone": Damage(shares(lambda run: shutil.rmtree(run / SHARES)), f"{TRAINING}/last", ("which is missing",)),
    # records of results
    "probe cut": Damage(half(PROBE), PROBE, ("not measured",), CURVE),
    "probe of wrong type": Damage(value(PROBE, "step_times", "fast"), PROBE, ("not measured",)),
    "probe of an unknown kind": Damage(value(PROBE, "kind", "other"), PROBE, ("not measured",)),
    "result cut": Damage(half(f"{TRAINING}/result.json"), f"{TRAINING}/result.json", ("not finished",), CURVE),
    "summary cut": Damage(half(f"{TRAINING}/summary.json"), f"{TRAINING}/summary.json", ("predicted",), CURVE),
    "summary empty": Damage(content(f"{TRAINING}/summary.json", b""), f"{TRAINING}/summary.json", ("predicted",)),
    "evaluation cut": Damage(half(f"{TRAINING}/evaluations/00.json"), f"{TRAINING}/evaluations/00.json", ("evaluate",)),
    "state of tuning cut": Damage(half(f"{TRAINING}/tuning.json"), f"{TRAINING}/tuning.json", ("settings that this training tried",)),
    "energy zeroed": Damage(zeroed(f"{TRAINING}/energy.json", 0, 9), f"{TRAINING}/energy.json", ("energy",)),
    "saves of a script cut": Damage(half(f"{TRAINING}/saves.json"), f"{TRAINING}/saves.json", ("lost",)),
    "recommendation cut": Damage(half("recommendation.json"), "recommendation.json", ("tula recommend",)),
    "comparison cut": Damage(half("comparison.json"), "comparison.json", ("compar",), ("compare --show",)),
    "task cut": Damage(half(f"tasks/train-{SIGNATURE}-1.json"), f"tasks/train-{SIGNATURE}-1.json", ("is damaged",)),
    "attempt cut": Damage(
        half(f"attempts/train-{SIGNATURE}-1.001.json"), f"attempts/train-{SIGNATURE}-1.001.json", ("attempt",)
    ),
}  # fmt: skip


def tula(*words: str) -> tuple[int, str, str]:
    screen = show_screen.Screen(out=io.StringIO(), err=io.StringIO())
    return app.run(list(words), screen=screen), screen.out.getvalue(), screen.err.getvalue()


def one_line(text: str) -> str:
    return " ".join(text.split())


def check_command(run: RunDir, damage: Damage, *words: str) -> None:
    """Check that a command names a damaged file of a run."""
    code, _, err = tula(*words, "--run", str(run.path))
    assert str(run.path / damage.file) in one_line(err), (words, code, err)
