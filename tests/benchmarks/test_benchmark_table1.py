"""Benchmark table1 (benchmarks/table1): its data, its jobs, how it resumes, its tables and goals."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import table1
import table1_networks
import table1_settings
import table1_summary
import torch
from PIL import Image
from table1_settings import METHODS, SETTINGS
from table1_summary import Key, Mean, Result

from tula_cli.errors import Diverged, TulaError
from tula_cli.spec.signature import compute_train_signature
from tula_cli.worker.ranks import Ranks

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
    file = table1_networks.prepare(data, tmp_path / "images.npz", size=16, per_class=(3, 1))
    with np.load(file) as arrays:
        assert arrays["train_images"].shape == (9, 3, 16, 16) and arrays["test_images"].shape == (3, 3, 16, 16)
        assert arrays["train_images"][:, 0, 0, 0].tolist() == [0, 1, 2, 50, 51, 52, 100, 101, 102]
        assert arrays["train_labels"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    written = file.stat().st_mtime_ns
    assert table1_networks.prepare(data / "nowhere", file, size=16).stat().st_mtime_ns == written


def test_boxes_are_averaged(tmp_path: Path) -> None:
    for split, name in itertools.product(("train", "test"), ("a", "b")):
        folder = tmp_path / split / name
        folder.mkdir(parents=True)
        checked = np.indices((32, 32)).sum(axis=0) % 2 * 200
        Image.fromarray(np.repeat(checked[:, :, None], 3, axis=2).astype(np.uint8)).save(folder / "0.png")
    with np.load(table1_networks.prepare(tmp_path, tmp_path / "x.npz", size=16)) as arrays:
        assert set(arrays["train_images"].flatten().tolist()) == {100}


def test_missing_images_are_an_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="train/<class>/"):
        table1_networks.prepare(tmp_path / "nothing", tmp_path / "x.npz")
    with pytest.raises(SystemExit, match="cat holds 4 images, 5 are needed"):
        table1_networks.prepare(data, tmp_path / "x.npz", per_class=(5, 1))
    assert not (tmp_path / "x.npz").exists()


def test_training_images_are_normalised_cropped_and_mirrored_test_images_only_normalised(
    data: Path, tmp_path: Path
) -> None:
    file = str(table1_networks.prepare(data, tmp_path / "images.npz"))
    train, test = (table1_networks.dataset(split, file) for split in (True, False))
    assert (len(train), len(test), train.num_classes) == (12, 6, 10)
    mean, deviation = torch.tensor(table1_networks.MEAN), torch.tensor(table1_networks.DEVIATION)
    assert torch.allclose(test[2][0][:, 3, 5], (50 / 255 - mean) / deviation) and test[2][1] == 1
    assert torch.equal(test[2][0], test[2][0])
    shapes, padded = zip(
        *((image.shape, (image == 0).any()) for image, _ in (train[5] for _ in range(20))), strict=True
    )
    assert set(shapes) == {(3, 32, 32)} and any(padded)
    whole = table1_networks.dataset(True, file, crop=False)
    assert not any((whole[5][0] == 0).any() for _ in range(20))


def test_half_of_the_images_are_mirrored() -> None:
    images = np.zeros((1, 3, 4, 4), dtype=np.uint8)
    images[..., 0] = 255
    samples = table1_networks.Images(images, np.array([0]), crop=False, mirror=True)
    torch.manual_seed(0)
    remaining = [bool(samples[0][0][0, 0, 0] > 0) for _ in range(200)]
    assert 70 < sum(remaining) < 130


@pytest.mark.parametrize(
    ("network", "parameters", "shape"),
    [
        (table1_networks.SmallNet(), 156_186, (3, 16, 16)),
        (table1_networks.SmallNet(batch_norm=False), 156_074, (3, 16, 16)),
        (table1_networks.resnet_gn(), 0, (1, 12, 12)),
        (table1_networks.SmallViT(), 0, (1, 8, 8)),
        (table1_networks.small_alexnet(), 0, (1, 8, 8)),
    ],
)
def test_networks_map_images_to_logits(network, parameters: int, shape: tuple[int, ...]) -> None:
    assert network(torch.rand(2, *shape)).shape == (2, 10)
    assert parameters in (0, sum(parameter.numel() for parameter in network.parameters()))


def test_placed_digits_are_the_same_each_time_and_differ_between_training_and_evaluation() -> None:
    first, again, held_out = (table1_networks.placed_digits(train, count=60) for train in (True, True, False))
    assert torch.equal(first.tensors[0], again.tensors[0])
    assert (len(first), len(held_out), first.num_classes) == (60, 30, 10)
    assert not torch.equal(first.tensors[0][:30], held_out.tensors[0])
    assert first.tensors[0].shape == (60, 1, 12, 12)
    assert set(first.tensors[1].tolist()) == set(range(10))


def test_the_table_has_large_entries() -> None:
    rows, target = table1_networks.heavy_tailed_table(True).tensors
    assert (rows.shape, target.shape) == ((8192, 24), (8192, 1))
    assert rows.abs().max() > 20 and abs(float(target.std()) - 1) < 0.1


# --- the jobs


def show(*words: str):
    return table1.parse_arguments(["--show", *words])


ALONE = [name for name, setting in SETTINGS.items() if not setting.needs_images]


@pytest.mark.parametrize("name", ALONE)
def test_every_method_of_a_setting_is_a_job_of_its_own(name: str) -> None:
    signatures = set()
    for method in SETTINGS[name].methods:
        try:
            spec = table1.make_job((name, method, 0), show())
        except TulaError:
            assert method.startswith("decay"), "the only rows that a version of tula may lack"
            continue
        signatures.add(compute_train_signature(spec, nodes=1, batch=table1_settings.choose_batch(name, method)))
        assert spec.train.reference_batch == SETTINGS[name].small
    assert len(signatures) >= len(SETTINGS[name].methods) - 2


def test_methods_change_what_they_are_named_after() -> None:
    jobs = {name: table1.make_job(("text", name, 0), show()) for name in METHODS if not name.startswith("decay")}
    lr = jobs["lbt"].optimizer.lr
    assert jobs["lbt-x4"].optimizer.lr == 4 * lr
    assert {jobs[name].schedule.decay_from for name in jobs if "late" in name} == {0.7}
    assert {jobs[name].optimizer.args["betas"][0] for name in jobs if name.endswith("beta1")} == {0.8}
    assert jobs["ramp-uncapped"].train.max_lr_factor is None
    assert jobs["small-ortho"].workload.warmup_epochs == 0 < jobs["ortho"].workload.warmup_epochs
    assert jobs["lbt-longer"].train.epochs == round(2.3 * jobs["lbt"].train.epochs)
    assert {table1_settings.choose_batch("text", name) for name in METHODS if name.startswith("small")} == {8}


def test_longer_trainings_take_the_steps_of_a_ramp() -> None:
    assert table1_settings.count_steps_ratio(32, 512) == pytest.approx(0.05 * (16 + 8 + 4 + 2) + 0.8)
    assert table1_settings.count_steps_ratio(32, 32) == 1


def test_every_control_with_the_same_tricks_is_trained_beside_its_methods() -> None:
    for setting in SETTINGS.values():
        tricks = {METHODS[name].same_tricks for name in setting.methods} - {""}
        assert all(METHODS[name].times == 1 for name in tricks)
        if setting.family != "paper":
            assert tricks <= set(setting.methods)


def test_milestones_are_shares_of_the_epochs() -> None:
    assert table1.make_job(("paper-256", "lbt", 0), show()).schedule.milestones == [25, 50, 75]
    assert table1.make_job(("digits", "lbt", 0), show()).schedule.milestones == [7.5, 11.25]


def test_the_networks_of_table_1_have_the_paper_s_recipes(data: Path, tmp_path: Path) -> None:
    options = show("--data", str(data), "--runs", str(tmp_path))
    jobs = {name: table1.make_job((f"{name}-1024", "lbt", 0), options) for name in ("resnet18", "alexnet")}
    assert {name: (job.model.name, job.optimizer.lr) for name, job in jobs.items()} == {
        "resnet18": ("resnet18_cifar", 0.05),
        "alexnet": ("alexnet_cifar", 0.01),
    }
    assert jobs["resnet18"].schedule.milestones == [15, 22.5]
    assert jobs["resnet18"].train.reference_batch == 128


def test_of_a_family_the_first_seed_of_all_settings_comes_before_the_second() -> None:
    options = show("--settings", "digits,vit,lstm", "--methods", "lbt", "--seeds", "2")
    assert [(key[0], key[2]) for key in table1.plan_trainings(options)] == [
        ("vit", 0), ("lstm", 0), ("vit", 1), ("lstm", 1), ("digits", 0), ("digits", 1),
    ]  # fmt: skip


def test_without_selection_all_settings_are_planned_whose_data_is_there() -> None:
    assert {key[0] for key in table1.plan_trainings(table1.parse_arguments([]))} == {
        name for name in ALONE if SETTINGS[name].by_default
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--settings", "lenet"), "'lenet' unknown; there are text-small"),
        (("--methods", "ags,agz"), "'agz' unknown; there are small"),
        (("--seeds", "0"), "at least 1"),
        (("--settings", "reduced"), "--data is required for reduced"),
    ],
)
def test_wrong_words_end_with_usage(words: tuple[str, ...], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        table1.parse_arguments(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# --- the trainings


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Options with a setting that trains two epochs of digits."""
    tiny = replace(SETTINGS["digits"], epochs=2, methods=("small", "lbt", "ramp"))
    monkeypatch.setitem(SETTINGS, "digits", tiny)
    words = (
        "--settings",
        "digits",
        "--seeds",
        "1",
        "--results",
        str(tmp_path / "t.csv"),
        "--runs",
        str(tmp_path / "r"),
    )
    return table1.parse_arguments(words)


KEYS: list[Key] = [("digits", method, 0) for method in ("small", "lbt", "ramp")]
ALONE_RANK = Ranks(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


def result(value: float, **changes: object) -> Result:
    return replace(Result(512, "top1", value, steps=10, samples=5120, seconds=5.0, restarts=0), **changes)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """Record what would be trained, each with a result."""
    keys: list[Key] = []

    def train(key: Key, *_: object) -> Result:
        if key[1] == "decay":
            raise TulaError("ramp: decay is unknown", "")
        keys.append(key)
        return result(90.0)

    monkeypatch.setattr(table1, "train", train)
    return keys


def test_what_the_results_have_is_not_trained_again(options, trained: list[Key], capsys) -> None:
    table1_summary.append_result(options.results, KEYS[0], result(98.0))
    table1.train_all(KEYS, options, ALONE_RANK)
    table1.train_all(KEYS, options, ALONE_RANK)
    assert trained == KEYS[1:]
    assert list(table1_summary.read_results(options.results)) == KEYS
    printed = capsys.readouterr().err
    assert "2 of 3, digits lbt, seed 0: top1 90, 10 steps, 5 s of CPU; about 5.00 s left for one process" in printed


def test_a_training_of_another_process_is_left_out(options, trained: list[Key]) -> None:
    with table1.lock_training(KEYS[1], options.runs) as is_claimed:
        assert is_claimed
        table1.train_all(KEYS, options, ALONE_RANK)
    assert trained == [KEYS[0], KEYS[2]]


def test_a_method_that_is_refused_is_skipped_with_its_reason(options, trained: list[Key], capsys) -> None:
    keys = [("digits", "decay", 0), ("digits", "decay", 1), KEYS[1]]
    table1.train_all(keys, options, ALONE_RANK)
    assert trained == [KEYS[1]]
    assert capsys.readouterr().err.count("digits decay, seed 0: skipped: ramp: decay is unknown") == 1


def test_nothing_is_started_that_does_not_fit_the_minutes(options, trained: list[Key], capsys) -> None:
    options.minutes = 0.1
    table1_summary.append_result(options.results, ("digits", "lbt", 7), result(1.0, seconds=4.0))
    table1_summary.append_result(options.results, ("digits", "small", 7), result(1.0, seconds=60.0))
    table1.train_all(KEYS, options, ALONE_RANK)
    assert trained == [KEYS[1]]
    assert "digits small, seed 0: not started, it takes about" in capsys.readouterr().err


def test_a_ramp_that_diverges_is_restarted_once_with_half_its_rate(options, monkeypatch, tmp_path: Path) -> None:
    limits = []

    def run_training(task, run, *_: object) -> None:
        limits.append(task.max_lr_factor)
        folder = run.get_training(task.signature).path
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "metrics.jsonl").open("a") as rows:
            rows.write('{"kind": "diverged", "message": "loss is nan", "sound": true, "lr_factor": 16.0}\n')
        raise Diverged("loss is nan", "")

    monkeypatch.setattr(table1, "run_training", run_training)
    ended = table1.train(KEYS[2], options, ALONE_RANK)
    assert limits == [None, 8.0]
    assert (ended.metric, ended.restarts) == ("diverged", 1) and math.isnan(ended.value)


@pytest.mark.torch
def test_trainings_go_through_the_loop_of_tula(options) -> None:
    ranks = table1.start_process_group("cpu")
    try:
        table1.train_all(KEYS, options, ranks)
    finally:
        torch.distributed.destroy_process_group()
    results = table1_summary.read_results(options.results)
    assert {key[1]: row.steps for key, row in results.items()} == {"small": 88, "lbt": 4, "ramp": 13}
    assert {row.metric for row in results.values()} == {"top1"}
    assert results[KEYS[0]].value > 60
    assert [key for key, row in results.items() if row.batch == 32] == KEYS[:1]


# --- the tables


def table(**rows: tuple[float, ...]) -> dict[Key, Result]:
    """Return results of setting text-small, a loss for each seed of each method."""
    return {
        ("text-small", method.replace("_", "-"), seed): result(value, metric="loss")
        for method, values in rows.items()
        for seed, value in enumerate(values)
    }


def test_shares_are_paired_by_seed() -> None:
    results = table(small=(2.0, 2.2), lbt=(3.0, 3.2, 9.0), ramp=(2.1, 2.4))
    share = table1_summary.compute_recovered_share(results, "text-small", "ramp")
    assert share == Mean(pytest.approx(85), pytest.approx(5), 2)  # 90 and 80 %
    assert table1_summary.compute_recovered_share(results, "text-small", "ortho") is None


def test_a_share_needs_a_loss_of_the_large_batch() -> None:
    assert (
        table1_summary.compute_recovered_share(table(small=(2.0,), lbt=(1.9,), ramp=(1.8,)), "text-small", "ramp")
        is None
    )


def test_accuracies_are_better_when_higher() -> None:
    results = {("digits", name, 0): result(value) for name, value in (("small", 98.0), ("lbt", 90.0), ("ramp", 96.0))}
    share = table1_summary.compute_recovered_share(results, "digits", "ramp")
    assert share is not None and share.value == pytest.approx(75)


def test_the_table_of_a_setting() -> None:
    results = table(small=(2.0, 2.2), small_ortho=(1.9, 2.0), lbt=(3.0, 3.2), ramp=(2.1, 2.4), lamb=(math.nan, 3.5))
    lines = list(table1_summary.format_tables(results))
    assert lines[0] == "### text-small: batch 8 to 128, 4 epochs"
    assert "| ramp | 2 | 2.250 ± 0.150 | 85 ± 5 | 74 ± 8 | 10 | 5 |  |" in lines
    assert "| lamb | 2 | 3.500 (1 diverged) | nan | | 10 | 5 |  |" not in lines
    assert any(line.startswith("| lamb | 2 | 3.500 (1 diverged) |") for line in lines)


def test_goals_that_are_missed_are_marked() -> None:
    results = table(small=(2.0, 2.2), small_ortho=(1.9, 2.0), lbt=(3.0, 3.2), ramp=(2.1, 3.3))
    lines = [line for line in table1_summary.format_tables(results) if line.startswith("- ")]
    assert lines[0].startswith("- **missed**: ramp with AdamW, of the small batch: 40 % on average (goal 90)")
    assert "- **missed**: ramp is never below lbt: below in 1 of 2 trainings text-small seed 1" in lines
    assert "- reached: no ramp diverges: 0 of 2" in lines


def test_a_decay_has_to_save_steps() -> None:
    results = table(small=(2.1,), decay=(2.1,))
    results["text-small", "decay", 0] = replace(results["text-small", "decay", 0], steps=6)
    assert any(
        "reached: text-small: decay takes 60% of the small batch's steps" in line
        for line in table1_summary.format_tables(results)
    )


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("nodes,batch\n1,2\n")
    with pytest.raises(SystemExit, match=r"other\.csv does not hold trainings"):
        table1_summary.read_results(tmp_path / "other.csv")


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = {("vit", "ramp", 0): result(90.5), ("vit", "lbt", 1): result(math.nan, metric="diverged", restarts=1)}
    for key, row in rows.items():
        table1_summary.append_result(tmp_path / "t.csv", key, row)
    assert str(table1_summary.read_results(tmp_path / "t.csv")) == str(rows)
