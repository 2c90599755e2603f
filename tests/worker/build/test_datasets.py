"""Datasets, their split, their transforms, and augmentation that depends on (seed, epoch, index) alone."""

import pickle
import urllib.error
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import data
from tula_cli.worker.build.data import build_datasets, download_dataset, split_indices_by_class
from tula_cli.worker.build.transforms import build_transforms, check_sample, convert_to_tensor


def spec(dataset: dict, *, transforms: dict | None = None, seed: int = 0) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"name": "small_cnn"},
            "dataset": dataset,
            "transforms": transforms or {},
            "optimizer": {"lr": 0.1},
            "train": {"epochs": 1, "seed": seed},
        }
    )


def fake(size: int = 6, *, image_size=(3, 8, 8), num_classes: int = 5, **others) -> dict:
    args = {"size": size, "image_size": list(image_size), "num_classes": num_classes}
    return {"name": "FakeData", "args": args, **others}


def image(*, mode: str = "RGB", size=(5, 4)) -> PIL.Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels).convert(mode)


# --- datasets


def test_digits_are_split_by_class_without_overlap():
    datasets = build_datasets(spec({"name": "digits"}))
    assert (len(datasets.train), len(datasets.eval), datasets.classes) == (1438, 359, 10)
    labels = [datasets.eval[index][1] for index in range(len(datasets.eval))]
    assert min(labels.count(label) for label in range(10)) >= 34
    assert not set(datasets.train.samples.indices) & set(datasets.eval.samples.indices)


def test_digits_are_those_that_scikit_learn_tells_with_and_without_its_file(monkeypatch):
    from sklearn.datasets import load_digits

    known = load_digits()
    for hidden in (False, True):
        if hidden:
            monkeypatch.setattr(data.Path, "is_file", lambda path: False)
        table = data._read_digits_table()
        assert (table[:, :64].reshape(-1, 8, 8) == known.images).all()
        assert (table[:, 64] == known.target).all()


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match="scikit-learn, which is not installed"):
        build_datasets(spec({"name": "digits"}))


def test_digits_are_gray_images_in_zero_to_one():
    sample, label = build_datasets(spec({"name": "digits"})).train[(0, 0)]
    assert sample.shape == (1, 8, 8)
    assert sample.dtype is torch.float32
    assert 0 <= sample.min() < sample.max() <= 1
    assert isinstance(label, int)


def test_split_does_not_depend_on_the_seed():
    first, two = (build_datasets(spec({"name": "digits"}, seed=seed)) for seed in (1, 2))
    assert first.eval.samples.indices == two.eval.samples.indices


def test_fake_data_repeat_and_differ_between_train_and_eval():
    first, two = build_datasets(spec(fake(20))), build_datasets(spec(fake(20)))
    assert (len(first.train), len(first.eval), first.classes) == (20, 4, 5)
    assert torch.equal(first.train[(0, 3)][0], two.train[(0, 3)][0])
    assert not torch.equal(first.train[(0, 0)][0], first.eval[0][0])
    assert {first.train[(0, index)][1] for index in range(20)} <= set(range(5))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"image_size": [8, 8]}, "image_size"),
        ({"image_size": [2, 8, 8]}, "1 or 3 channels"),
        ({"size": 0}, "args.size"),
        ({"num_classes": "ten"}, "num_classes"),
        ({"sizes": 3}, "sizes"),
    ],
)
def test_wrong_arguments_of_fake_data_are_named(args, words):
    with pytest.raises(SpecError, match=words):
        build_datasets(spec({"name": "FakeData", "args": args}))


def test_unknown_dataset_answers_with_the_nearest():
    with pytest.raises(SpecError) as caught:
        build_datasets(spec({"name": "cifar100"}))
    assert "CIFAR100" in caught.value.hint


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100", "Caltech101", "Caltech256"])
def test_missing_files_name_the_folder_and_the_download(name, tmp_path):
    with pytest.raises(SpecError) as caught:
        build_datasets(spec({"name": name, "root": str(tmp_path)}))
    assert str(tmp_path) in caught.value.message
    assert "dataset.download: true" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "words"), [("ImageNet", "image-net.org"), ("ImageFolder", "sub-folder per class")])
def test_missing_files_that_nobody_downloads_name_their_source(name, words, tmp_path):
    with pytest.raises(SpecError) as caught:
        build_datasets(spec({"name": name, "root": str(tmp_path / "none")}))
    assert words in caught.value.hint


def test_prepare_refuses_what_cannot_be_downloaded():
    with pytest.raises(SpecError, match="cannot download ImageNet"):
        download_dataset(spec({"name": "ImageNet", "download": True}))
    download_dataset(spec({"name": "ImageNet"}))


def test_a_login_node_without_a_network_is_reported_where_to_put_the_data(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr("tula_cli.worker.build.data._construct_torchvision_dataset", offline)
    job = spec({"name": "CIFAR10", "root": str(tmp_path), "download": True})
    with pytest.raises(SpecError, match=r"CIFAR10 cannot be downloaded to .*Name or service not known") as refused:
        download_dataset(job)
    assert "dataset.download: false" in refused.value.hint


def test_prepare_downloads_both_splits(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("torchvision.datasets.CIFAR10", lambda root, **given: calls.append((root, given)))
    download_dataset(spec({"name": "CIFAR10", "root": str(tmp_path / "new"), "download": True}))
    assert [given for _, given in calls] == [{"download": True, "train": True}, {"download": True, "train": False}]
    assert (tmp_path / "new").is_dir()


def save_images(folder: Path, *, classes: dict[str, int]) -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            image(size=(8, 8)).save(folder / name / f"{index}.png")


def test_image_folder_without_a_split_is_split_by_class(tmp_path):
    save_images(tmp_path, classes={"a": 10, "b": 5})
    datasets = build_datasets(spec({"name": "ImageFolder", "root": str(tmp_path)}))
    assert (len(datasets.train), len(datasets.eval), datasets.classes) == (12, 3, 2)
    assert sorted(datasets.eval[index][1] for index in range(3)) == [0, 0, 1]


def test_image_folder_with_train_and_val_keeps_its_split(tmp_path):
    save_images(tmp_path / "train", classes={"a": 3, "b": 2})
    save_images(tmp_path / "val", classes={"a": 1, "b": 1})
    datasets = build_datasets(spec({"name": "ImageFolder", "root": str(tmp_path)}))
    assert (len(datasets.train), len(datasets.eval), datasets.classes) == (5, 2, 2)


def test_image_folder_with_different_classes_is_refused(tmp_path):
    save_images(tmp_path / "train", classes={"a": 1, "b": 1})
    save_images(tmp_path / "val", classes={"a": 1})
    with pytest.raises(SpecError, match="different classes: b"):
        build_datasets(spec({"name": "ImageFolder", "root": str(tmp_path)}))


def test_caltech101_is_split_and_gray_images_become_rgb(tmp_path):
    folder = tmp_path / "caltech101" / "101_ObjectCategories"
    for name, mode in (("ant", "L"), ("bass", "RGB"), ("BACKGROUND_Google", "RGB")):
        (folder / name).mkdir(parents=True)
        for index in range(1, 6):
            image(mode=mode).save(folder / name / f"image_{index:04d}.jpg")
    transforms = {"train": ["RGB", "ToTensor"], "eval": ["RGB", "ToTensor"]}
    datasets = build_datasets(spec({"name": "Caltech101", "root": str(tmp_path)}, transforms=transforms))
    assert (len(datasets.train), len(datasets.eval), datasets.classes) == (8, 2, 2)
    assert {datasets.train[(0, index)][0].shape for index in range(8)} == {(3, 4, 5)}


def test_imported_dataset_gets_train_transform_and_its_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("user_data.py").write_text(
        "class Numbers:\n"
        "    num_classes = 3\n"
        "    def __init__(self, train, transform, size):\n"
        "        self.train, self.transform, self.size = train, transform, size\n"
        "    def __len__(self):\n"
        "        return self.size if self.train else 2\n"
        "    def __getitem__(self, index):\n"
        "        import numpy, torch\n"
        "        return torch.full((1,), float(index)), numpy.int32(index % 3)\n"
        "def endless(train, transform):\n"
        "    return iter(())\n"
        "def strange(train):\n"
        "    return [1]\n",
        encoding="utf-8",
    )
    datasets = build_datasets(spec({"name": "user_data:Numbers", "args": {"size": 7}}))
    assert (len(datasets.train), len(datasets.eval), datasets.classes) == (7, 2, 3)
    assert type(datasets.train[(0, 4)][1]) is int
    with pytest.raises(SpecError, match="needs 'size'"):
        build_datasets(spec({"name": "user_data:Numbers"}))
    with pytest.raises(SpecError, match="no length"):
        build_datasets(spec({"name": "user_data:endless"}))
    assert build_datasets(spec({"name": "user_data:strange"})).train.samples == [1], "text has no transform"
    with pytest.raises(SpecError, match="takes no transforms, so they would have no effect"):
        build_datasets(spec({"name": "user_data:strange"}, transforms={"train": ["RandomHorizontalFlip"]}))


def test_labels_collate_to_int64():
    datasets = build_datasets(spec(fake()))
    _, targets = next(iter(DataLoader(datasets.eval, batch_size=1)))
    assert targets.dtype is torch.int64


# --- the split


def test_stratified_holds_out_the_same_share_of_each_class():
    labels = [0] * 50 + [1] * 10 + [2] * 2 + [3]
    kept, held_out = split_indices_by_class(labels, fraction=0.2)
    assert sorted(kept + held_out) == list(range(len(labels)))
    assert [sum(labels[index] == label for index in held_out) for label in range(4)] == [10, 2, 1, 0]
    assert split_indices_by_class(labels, fraction=0.2) == (kept, held_out)


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_stratified_leaves_every_class_something_to_train_on(fraction):
    labels = [0, 1] * 10
    kept, held_out = split_indices_by_class(labels, fraction=fraction)
    for indices in (kept, held_out):
        assert {labels[index] for index in indices} == {0, 1}


# --- seeding


AUGMENTED = {"train": [{"RandomCrop": {"size": 8, "padding": 4}}, "ToTensor", {"RandomErasing": {"p": 0.5}}]}


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    datasets = build_datasets(spec(fake(4), transforms=AUGMENTED))
    first = datasets.train[(2, 1)][0]
    torch.manual_seed(99)
    datasets.train[(0, 0)]
    assert torch.equal(datasets.train[(2, 1)][0], first)
    epochs = [datasets.train[(epoch, 1)][0] for epoch in range(8)]
    assert len({tuple(sample.flatten().tolist()) for sample in epochs}) > 4
    other = build_datasets(spec(fake(4), transforms=AUGMENTED, seed=1))
    assert any(not torch.equal(other.train[(epoch, 1)][0], sample) for epoch, sample in enumerate(epochs))


def test_augmentation_is_the_same_in_worker_processes():
    datasets = build_datasets(spec(fake(6), transforms=AUGMENTED))
    keys = [(3, index) for index in range(6)]
    here = [batch[0] for batch in DataLoader(datasets.train, sampler=keys, batch_size=2, num_workers=0)]
    there = [batch[0] for batch in DataLoader(datasets.train, sampler=keys, batch_size=2, num_workers=2)]
    assert torch.equal(torch.cat(here), torch.cat(there))


def test_evaluation_draws_nothing():
    datasets = build_datasets(spec(fake(6)))
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    datasets.eval[0]
    assert torch.equal(torch.rand(()), expected)


# --- transforms


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "CMYK"])
def test_to_tensor_is_to_image_and_to_dtype(mode):
    expected = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])(image(mode=mode))
    result = convert_to_tensor(image(mode=mode))
    assert type(result) is torch.Tensor
    assert result.is_contiguous()
    assert torch.allclose(result, expected.as_subclass(torch.Tensor))


def test_to_tensor_takes_tensors():
    assert convert_to_tensor(torch.full((1, 2, 2), 255, dtype=torch.uint8)).tolist() == [[[1.0, 1.0], [1.0, 1.0]]]


def test_empty_list_means_to_tensor():
    assert torch.equal(build_transforms([])(image()), convert_to_tensor(image()))


def test_names_arguments_and_enumerations_are_understood():
    transform = build_transforms(
        [
            {"Resize": {"size": [6, 6], "interpolation": "nearest"}},
            {"RandomApply": {"transforms": [{"RandomHorizontalFlip": {"p": 1.0}}], "p": 1.0}},
            "ToImage",
            {"ToDtype": {"dtype": "float32", "scale": True}},
            {"Normalize": {"mean": [0.0, 0.0, 0.0], "std": [2.0, 2.0, 2.0]}},
        ]
    )
    resized = image().resize((6, 6), PIL.Image.Resampling.NEAREST).transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
    assert torch.allclose(transform(image()).as_subclass(torch.Tensor), convert_to_tensor(resized) / 2)


def test_imported_functions_and_classes_are_transforms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("user_steps.py").write_text(
        "def invert(value):\n    return 1 - value\n"
        "class Add:\n"
        "    def __init__(self, by=1.0):\n        self.by = by\n"
        "    def __call__(self, value):\n        return value + self.by\n",
        encoding="utf-8",
    )
    steps = ["ToTensor", "user_steps:invert", "user_steps:Add", {"user_steps:Add": {"by": 2.0}}]
    assert torch.allclose(build_transforms(steps)(image()), 4 - convert_to_tensor(image()))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("RandomCorp", "unknown transform 'RandomCorp'"),
        ({"RandomCrop": {"sise": 8}}, r"transforms\[0\]\.RandomCrop\.sise"),
        ("RandomCrop", "needs 'size'"),
        ({"ToDtype": {"dtype": "float33"}}, "unknown dtype 'float33'"),
        ({"Resize": {"size": 8}, "CenterCrop": {"size": 8}}, "each entry must have one transform"),
        ({}, "each entry must have one transform"),
        ({"RandomCrop": {"size": [1, 2, 3]}}, "does not accept"),
    ],
)
def test_wrong_transform_is_named(item, words):
    with pytest.raises(SpecError, match=words):
        build_transforms([item])


def test_pipeline_must_end_in_a_float_tensor():
    check_sample(convert_to_tensor(image()), path="transforms.train")
    with pytest.raises(SpecError, match=r"transforms\.train returns Image"):
        check_sample(image(), path="transforms.train")
    with pytest.raises(SpecError, match="uint8"):
        check_sample(torch.zeros(3, dtype=torch.uint8), path="transforms.eval")


def test_datasets_can_be_sent_to_loader_processes_that_do_not_fork():
    datasets = build_datasets(spec(fake(3), transforms={"train": ["ToTensor"]}))
    again = pickle.loads(pickle.dumps(datasets.train))
    assert torch.equal(again[(0, 1)][0], datasets.train[(0, 1)][0])
