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
import torch
from make_results import inspected
from PIL import Image

from tula_cli.cluster import inspection
from tula_cli.cluster import launcher as cluster_launcher
from tula_cli.run.directory import RunDir
from tula_cli.run.records.inspections import Inspection
from tula_cli.services import compare as services_compare
from tula_cli.services import status as services_status
from tula_cli.services.comparison import accuracy

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
    assert "| 128 | lbt (reference) | 2 | 60.50 ± 0.71 | 90.00 ± 0.00 |  |  | 99 | 6.00 |  |" in told.out
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
    assert (
        f"--methods: 'agz' unknown; there are {', '.join(services_compare.known_methods())}" in capsys.readouterr().err
    )


def test_the_jobs_are_the_paper_s_recipes(here: Trains, tmp_path: Path) -> None:
    options = table1.arguments(["--runs", str(tmp_path / "runs"), "--show"])
    specs = {name: table1.job(name, recipe, options) for name, recipe in table1.MODELS.items()}
    assert {name: (spec.optimizer.lr, spec.optimizer.weight_decay) for name, spec in specs.items()} == {
        "resnet18": (0.05, 5e-4), "vgg11": (0.01, 5e-4), "mobilenet_v3": (0.01, 1e-4), "alexnet": (0.01, 5e-4),
        "resnet50": (0.05, 5e-4),
    }  # fmt: skip
    assert {spec.train.reference_batch for spec in specs.values()} == {128}
    assert specs["resnet18"].schedule.milestones == [15, 22.5]


def test_local_sgd_is_in_the_table_only_where_there_are_ranks() -> None:
    assert "polo" not in table1.arguments(["--show"]).methods
    assert "polo" in table1.arguments(["--show", "--ranks", "4"]).methods
    assert "polo" in table1.arguments(["--show", "--reduced"]).methods


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
