"""Table I on CIFAR-10 (benchmarks/table1/table1.py): its data, its jobs, what it prints."""

import itertools
import json
import os
import time
from pathlib import Path

import make_runs as make
import numpy as np
import pytest
import table1
import table1_data
import table1_kept
import table1_rows
import table1_told
import torch
from make_results import inspected
from PIL import Image

from tula_cli.cluster import inspection
from tula_cli.cluster import launcher as cluster_launcher
from tula_cli.run.directory import RunDir
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.results import Cell
from tula_cli.services import compare as services_compare
from tula_cli.services import status as services_status
from tula_cli.services.comparison import accuracy
from tula_cli.services.comparison.rows import known_methods
from tula_cli.spec.job import warmup_epochs
from tula_cli.spec.signature import train_signature

CLASSES = ("cat", "dog", "ship")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four images of each class to train on and two to test, each of one colour that tells its class and number."""
    for split, count in (("train", 4), ("test", 2)):
        for label, name in enumerate(CLASSES):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.full((32, 32, 3), 50 * label + number, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:05d}.png")
    return tmp_path / "data"


def test_images_are_read_class_by_class_and_only_once(data: Path, tmp_path: Path) -> None:
    file = table1_data.prepare(data, tmp_path / "images.npz", size=16, per_class=(3, 1))
    with np.load(file) as arrays:
        assert arrays["train_images"].shape == (9, 3, 16, 16) and arrays["test_images"].shape == (3, 3, 16, 16)
        assert arrays["train_images"][:, 0, 0, 0].tolist() == [0, 1, 2, 50, 51, 52, 100, 101, 102]
        assert arrays["train_labels"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    written = file.stat().st_mtime_ns
    assert table1_data.prepare(data / "nowhere", file, size=16).stat().st_mtime_ns == written


def test_boxes_are_averaged(tmp_path: Path) -> None:
    for split, name in itertools.product(("train", "test"), ("a", "b")):
        folder = tmp_path / split / name
        folder.mkdir(parents=True)
        checked = np.indices((32, 32)).sum(axis=0) % 2 * 200
        Image.fromarray(np.repeat(checked[:, :, None], 3, axis=2).astype(np.uint8)).save(folder / "0.png")
    with np.load(table1_data.prepare(tmp_path, tmp_path / "x.npz", size=16)) as arrays:
        assert set(arrays["train_images"].flatten().tolist()) == {100}


def test_missing_images_are_said(data: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="train/<class>/"):
        table1_data.prepare(tmp_path / "nothing", tmp_path / "x.npz")
    with pytest.raises(SystemExit, match="cat holds 4 images, 5 are needed"):
        table1_data.prepare(data, tmp_path / "x.npz", per_class=(5, 1))
    assert not (tmp_path / "x.npz").exists()


def test_training_images_are_normalised_cropped_and_mirrored_test_images_only_normalised(
    data: Path, tmp_path: Path
) -> None:
    file = str(table1_data.prepare(data, tmp_path / "images.npz"))
    train, test = (table1_data.dataset(split, lambda image: image, file) for split in (True, False))
    assert (len(train), len(test), train.num_classes) == (12, 6, 10)
    mean, deviation = torch.tensor(table1_data.MEAN), torch.tensor(table1_data.DEVIATION)
    assert torch.allclose(test[2][0][:, 3, 5], (50 / 255 - mean) / deviation) and test[2][1] == 1
    assert torch.equal(test[2][0], test[2][0])
    shapes, padded = zip(
        *((image.shape, (image == 0).any()) for image, _ in (train[5] for _ in range(20))), strict=True
    )
    assert set(shapes) == {(3, 32, 32)} and any(padded)
    whole = table1_data.dataset(True, lambda image: image, file, crop=False)
    assert not any((whole[5][0] == 0).any() for _ in range(20))


def test_half_of_the_images_are_mirrored() -> None:
    images = np.zeros((1, 3, 4, 4), dtype=np.uint8)
    images[..., 0] = 255
    samples = table1_data.Images(images, np.array([0]), crop=False, mirror=True)
    torch.manual_seed(0)
    left = [bool(samples[0][0][0, 0, 0] > 0) for _ in range(200)]
    assert 70 < sum(left) < 130


def test_the_small_network_is_that_of_the_study() -> None:
    net = table1_data.SmallNet()
    assert sum(p.numel() for p in net.parameters()) == 156_186
    assert net(torch.rand(2, 3, 16, 16)).shape == (2, 10)


# --- the runs


class Trains(make.FakeLauncher):
    """Trains each job at once."""

    def submit(self, run, task):
        job = super().submit(run, task).model_copy(update={"submitted_at": time.time()})
        self.says[task.job] = "ended"
        metrics = {"top1": 60.0 + task.spec.train.seed, "top5": 90.0, "eval_loss": 1.0}
        run.write_train_result(make.train_result(task.signature).model_copy(update={"metrics": metrics, "samples": 99}))
        run.write_summary(make.summary(signature=task.signature, batch=task.batch, metrics=metrics, actual_hours=0.1))
        return job


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path) -> Trains:
    launcher = Trains()
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster_launcher, "launcher_for", lambda spec, **_: launcher)
    monkeypatch.setattr(inspection, "inspect", inspect)
    monkeypatch.setitem(services_status.POLL, "local", (0.01, 0.01))
    return launcher


def inspect(spec) -> Inspection:
    return inspected(dataset_size=10_000, sample_shape=(3, 16, 16))


def main(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.chdir(Path(os.environ["HERE"]))  # main goes where the module for the workers is
    monkeypatch.setattr("sys.argv", ["table1.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        table1.main()
    return int(ended.value.code or 0)


REDUCED = (
    "--data",
    "data",
    "--reduced",
    "--models",
    "small",
    "--per-class",
    4,
    "--methods",
    "lbt,ags",
    "--batch",
    "1024",
    "--seeds",
    2,
)


def test_the_reduced_table(here: Trains, monkeypatch, capsys, tmp_path: Path) -> None:
    assert main(monkeypatch, *REDUCED, "--json", "out.json", "--html", "pages") == 0
    told = capsys.readouterr()
    assert "### small: 10 of 10 trainings" in told.out
    assert "| 128 | lbt (reference) | 2 | 60.50 ± 0.71 | 90.00 ± 0.00 |  |  |  | 60 | 99 | 6.00 | * |  |" in told.out
    assert "10 of 10, lbt-x4, batch 1024, seed 1 done" in told.err
    rows = json.loads((tmp_path / "out.json").read_text())["models"]["small"]["rows"]
    assert rows[1]["top1"]["n"] == 2 and rows[1]["batch"] == 1024
    assert (tmp_path / "pages" / "table1-small.html").exists()


def test_again_trains_nothing_and_show_needs_no_data(here: Trains, monkeypatch, capsys) -> None:
    main(monkeypatch, *REDUCED)
    submitted = len(here.submitted)
    assert main(monkeypatch, *REDUCED) == 0
    assert main(monkeypatch, "--show", *REDUCED[2:]) == 0
    assert len(here.submitted) == submitted == 10
    assert capsys.readouterr().out.count("10 of 10 trainings") == 3


def test_show_says_where_nothing_was_trained(here: Trains, monkeypatch, capsys) -> None:
    assert main(monkeypatch, "--show", *REDUCED[2:]) == 0
    told = capsys.readouterr()
    assert not told.out
    assert told.err.startswith("nothing trained in ") and told.err.endswith("table1-runs yet\n")


def test_unknown_methods_are_named_with_those_there_are(capsys) -> None:
    with pytest.raises(SystemExit):
        table1.arguments(["--show", "--methods", "ags,agz"])
    assert f"--methods: 'agz' unknown; there are {', '.join(known_methods())}" in capsys.readouterr().err


def test_the_jobs_are_the_paper_s_recipes(here: Trains, tmp_path: Path) -> None:
    options = table1.arguments(["--runs", str(tmp_path / "runs"), "--show"])
    specs = {name: table1.job(name, options) for name in table1.MODELS}
    assert {name: (spec.optimizer.lr, spec.optimizer.weight_decay) for name, spec in specs.items()} == {
        "resnet18": (0.05, 5e-4), "vgg11": (0.01, 5e-4), "mobilenet_v3": (0.01, 1e-4), "alexnet": (0.01, 5e-4),
        "resnet50": (0.05, 5e-4),
    }  # fmt: skip
    assert {spec.train.reference_batch for spec in specs.values()} == {128}
    assert specs["resnet18"].schedule.milestones == [15, 22.5]


def test_local_sgd_is_in_the_table_only_where_there_are_ranks() -> None:
    assert "polo" not in table1.arguments(["--show"]).methods
    assert "polo" in table1.arguments(["--show", "--ranks", "4"]).methods


# --- the reduced table


def reduced(*words: str):
    return table1.arguments(["--show", "--reduced", *words])


@pytest.mark.parametrize("name", table1.REDUCED)
def test_every_row_of_the_reduced_table_is_a_job_of_its_own(name: str) -> None:
    options = reduced()
    spec = table1.job(name, options)
    with table1_rows.known():
        rows = table1.grid(name, options).rows(spec.train.reference_batch)
        told = [(services_compare.cell_spec(spec, method, 0), batch) for method, batch in rows]
        assert not [method for method, _ in rows if services_compare.why_not(spec, method)]
    assert len({train_signature(own, nodes=1, batch=batch) for own, batch in told}) == len(rows)
    assert {batch for _, batch in rows} == {spec.train.reference_batch, *table1_rows.batches_of(name, options)}


def test_the_tricks_are_given_to_the_small_batch_too() -> None:
    with table1_rows.known():
        rows = table1.grid("small", reduced()).rows(128)
    assert {method for method, batch in rows if batch == 128} == {"lbt", *table1_rows.AT_REFERENCE}
    large = [method for method, batch in rows if batch == 2048]
    assert large == [*table1_rows.TABLE, "lbt-x2", "lbt-x4"]
    assert set(table1_rows.SAME_TRICKS) <= {*large, table1_rows.BY_NOISE}
    assert set(table1_rows.SAME_TRICKS.values()) <= set(table1_rows.AT_REFERENCE)


def test_rows_change_what_they_are_named_after() -> None:
    spec = table1.job("small", reduced())
    with table1_rows.known():
        own = {name: services_compare.cell_spec(spec, name, 0) for name in table1_rows.VARIANTS}
    assert {own[name].optimizer.weight_decay for name in own if name.endswith("decay4")} == {4 * 5e-4}
    assert (own["ramp-sgd"].train.method, own["ramp-sgd"].train.ramp) == ("lrs", "auto")
    assert own["lamb-adamw"].optimizer.name == "AdamW"
    assert own["schedule-free"].schedule.kind == "constant"
    assert warmup_epochs(own["ortho-small"]) == 0
    assert "ramp-sgd" not in known_methods(), "known while the table is made"


def test_seeds_come_before_the_second_batch_and_networks_before_seeds() -> None:
    options = reduced("--seeds", "2")
    found = [(turn.name, turn.batch, turn.seed) for turn in table1_rows.turns(options.models, options)]
    assert found == [
        ("small", 2048, 0), ("plain", 2048, 0), ("small", 2048, 1), ("plain", 2048, 1),
        ("digits", 512, 0), ("text", 512, 0), ("digits", 512, 1), ("text", 512, 1),
        ("small", 1024, 0), ("plain", 1024, 0), ("small", 1024, 1), ("plain", 1024, 1),
    ]  # fmt: skip


def test_the_reduced_table_is_trained_in_that_order(here: Trains, monkeypatch, capsys) -> None:
    words = [
        *REDUCED[:3],
        "--models",
        "small,plain",
        "--per-class",
        4,
        "--methods",
        "lbt",
        "--batch",
        "1024,512",
        "--seeds",
        1,
    ]
    assert main(monkeypatch, *words) == 0
    told = [line.split(": ") for line in capsys.readouterr().err.splitlines() if " done" in line]
    seen = [(name, int(words.split("batch ")[1].split(",")[0])) for name, words in told]
    order = [(name, batch) for batch in (1024, 512) for name in ("table1-small", "table1-plain")]
    assert list(dict.fromkeys(row for row in seen if row[1] != 128)) == order
    assert len(seen) == 2 * (1 + 2 * 3)


def test_hours_bound_the_reduced_table(here: Trains, monkeypatch, capsys) -> None:
    assert main(monkeypatch, *REDUCED, "--hours", 0.05) == 0  # each takes six minutes
    assert len(here.submitted) == 1
    assert "### small: 1 of 10 trainings" in capsys.readouterr().out


def told_row(method: str, batch: int, *values: float) -> accuracy.Row:
    cells = [
        accuracy.CellReport(Cell(method=method, batch=batch, seed=s, nodes=1, signature="x"), "done", top1=v)
        for s, v in enumerate(values)
    ]
    reference = (method, batch) == ("lbt", 128)
    return accuracy.Row(method, batch, reference, tuple(cells), accuracy.stat(values), None, None)


def told_report(*rows: accuracy.Row) -> accuracy.CompareReport:
    return accuracy.CompareReport(rows, "top1", ("top1", "top5"), 128, 1, 9, 9, None, ())


def test_a_row_is_held_against_the_small_batch_with_the_same_tricks_over_common_seeds() -> None:
    ramp = told_row("ramp", 2048, 60.0, 58.0)
    small, plain = told_row("ortho-small", 128, 62.0), told_row("lbt", 2048, 52.0, 40.0)
    report = told_report(told_row("lbt", 128, 61.0), small, plain, ramp)
    assert table1_told.same_tricks(ramp, report) == pytest.approx(0.8)  # (60 - 52) / (62 - 52), of the first seed
    assert table1_told.same_tricks(plain, report) is None
    assert table1_told.same_tricks(ramp, told_report(plain, ramp)) is None


def test_the_front_holds_what_nothing_beats_in_both_steps_and_accuracy() -> None:
    rows = (
        told_row("lbt", 128, 62.0),
        told_row("lbt", 2048, 52.0),
        told_row("ramp", 2048, 61.0),
        told_row("lrs", 2048, 60.0),
    )
    steps = {("lbt", 128): 1600.0, ("lbt", 2048): 100.0, ("ramp", 2048): 230.0, ("lrs", 2048): 240.0}
    assert table1_told.front(told_report(*rows), steps) == {("lbt", 128), ("lbt", 2048), ("ramp", 2048)}


def test_what_a_csv_has_is_not_trained_again_and_the_rest_is_added(here: Trains, monkeypatch, capsys, tmp_path) -> None:
    kept = "network,method,batch,seed,metric,value,steps\nsmall,lbt,1024,0,top1,52,8\nplain,lbt,2048,0,top1,17.5,100\n"
    (tmp_path / "kept.csv").write_text(kept)
    main(monkeypatch, *REDUCED, "--csv", "kept.csv")
    assert len(here.submitted) == 9
    lines = (tmp_path / "kept.csv").read_text().splitlines()
    assert len(lines) == 12 and set(kept.splitlines()) <= set(lines)
    assert "small,ags,1024,1,top1,61,60" in lines
    assert (
        "| 1024 | ags | 2 | 60.50 ± 0.71 | 100 |  | 0 of 2 | 60 |" in capsys.readouterr().out
    )  # lbt: 52, 61 of 60, 61


def test_a_csv_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("nodes,batch\n1,2\n")
    with pytest.raises(SystemExit, match=r"other\.csv does not hold trainings"):
        table1_kept.read(tmp_path / "other.csv")


def test_kept_losses_are_the_better_the_less_they_are() -> None:
    rows = {("lbt", 32): 2.0, ("lbt", 512): 3.0, ("ramp", 512): 2.1}
    kept = {("text", *row, seed): ("eval_loss", value, 9.0) for row, value in rows.items() for seed in (0, 1)}
    kept["text", "ramp", 512, 1] = ("eval_loss", 3.5, 9.0)
    assert "| 512 | ramp | 2 | 2.800 ± 0.990 | 20 |  | 1 of 2 | 9 |" in list(table1_kept.markdown(kept))


def test_digits_and_text_need_no_images() -> None:
    assert table1.arguments(["--reduced", "--models", "digits,text"]).data is None


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--show", "--batch", "1k"),
        ("--show", "--models", "lenet"),
        ("--show", "--seeds", "0"),
        ("--show", "--methods", "ags,agz"),
        ("--show", "--methods", ""),
    ],
)
def test_wrong_words_end_with_usage(words: tuple[str, ...], capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        table1.arguments(words)
    assert ended.value.code == 2


def test_nothing_is_started_that_does_not_fit_the_budget(here: Trains, monkeypatch, capsys) -> None:
    main(monkeypatch, *REDUCED, "--budget-minutes", 0)
    assert len(here.submitted) == 0
    main(monkeypatch, *REDUCED, "--budget-minutes", 3)  # the first tells that each takes six
    assert len(here.submitted) == 1
    assert "### small: 1 of 10 trainings" in capsys.readouterr().out


def test_a_grid_that_cannot_be_trained_is_an_error_with_the_tables_there_are(here: Trains, monkeypatch, capsys) -> None:
    main(monkeypatch, *REDUCED)
    assert main(monkeypatch, *REDUCED[:-4], "--batch", 65536, "--seeds", 1) == 1
    told = capsys.readouterr()
    assert "error: small: method lbt: batch 65536 is larger than the dataset" in told.err
    assert told.out.count("10 of 10 trainings") == 2


def test_every_run_is_a_comparison_that_tula_compare_can_show(here: Trains, monkeypatch, tmp_path: Path) -> None:
    main(monkeypatch, *REDUCED)
    run = RunDir.newest(tmp_path / "table1-runs")
    known = run.comparison()
    assert known is not None
    assert accuracy.report(run, known, run.spec()).complete
