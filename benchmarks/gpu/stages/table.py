"""A part of Table I on CIFAR-10: accuracy of each method at a large batch. Three trainings share the GPU, so times are not measured."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu.product import find_newest_run, limit_loader_processes, start_tula, wait_for_tula, write_job
from gpu.stage import Stage, round_result

PACKED_IMAGES_FILE = "cifar10-jpeg.npz"
"""JPEG files of all images: <split>_jpeg, concatenated bytes; <split>_length; <split>_label."""
PARALLEL_TRAININGS = 3
IMAGE_BYTES = 3 * 32 * 32 * 4  # bytes of a loaded image
Cell = tuple[str, int]  # method, batch


@dataclass(frozen=True)
class Sizes:
    """The trainings."""

    model: str
    epochs: int
    batches: tuple[int, int]  # the reference batch and the large batch
    methods: tuple[str, ...]
    precision: str
    workers: int

    @property
    def cells(self) -> list[Cell]:
        small, large = self.batches
        return [("lbt", small), *((method, large) for method in self.methods)]


FULL_SIZES = Sizes("resnet18_cifar", 12, (128, 4096), ("lbt", "lrs", "ags", "robust", "ortho"), "bf16", 4)
TINY_SIZES = Sizes("table1_networks:SmallNet", 1, (16, 32), ("lbt", "ortho"), "fp32", 0)


def table1(stage: Stage) -> None:
    """Train all cells, three at a time, each with its own folder and lock."""
    sizes = TINY_SIZES if stage.tiny else FULL_SIZES
    file = prepare_images(stage)
    if file is None:
        return stage.require(False, f"there are no images: --data DIR with {PACKED_IMAGES_FILE} in it")
    began, running, cells = time.monotonic(), list[tuple[Cell, Path, Any, float]](), sizes.cells
    while cells or running:
        while cells and len(running) < PARALLEL_TRAININGS:
            cell, *cells = cells
            folder = stage.inside(f"{cell[0]}-{cell[1]}")
            words = ["train", str(write_job(folder, make_job(stage, sizes, cell, file))), "--nodes", "1"]
            started = start_tula(*words, "--batch", str(cell[1]), "--yes", folder=folder)
            running.append((cell, folder, started, time.monotonic()))
        for entry in [entry for entry in running if entry[2][0].poll() is not None]:
            running.remove(entry)
            store_accuracy(stage, *entry)
        time.sleep(0.2)
    stage.tell(minutes=round_result((time.monotonic() - began) / 60, 2))
    return compare_methods(stage, sizes)


def store_accuracy(stage: Stage, cell: Cell, folder: Path, started: Any, began: float) -> None:
    """Store the accuracy of a finished training."""
    ended = wait_for_tula(started)
    run = find_newest_run(folder)
    results = [run.get_training(signature).read_result() for signature in run.list_train_signatures()]
    result = results[0] if results else None
    name = f"{cell[0]},{cell[1]}"
    stage.require(result is not None, f"{name}: train ended with {ended.code}: {ended.error}")
    if result is not None:
        tops = {name_: round_result(result.metrics.get(name_), 2) for name_ in ("top1", "top5")}
        stage.tell(table1={name: {**tops, "minutes": round_result((time.monotonic() - began) / 60, 2)}})


def compare_methods(stage: Stage, sizes: Sizes) -> None:
    """Compare the methods with the plain large batch."""
    large = sizes.batches[1]
    record = {name: row["top1"] for name, row in stage.figures.get("table1", {}).items()}
    plain = record.get(f"lbt,{large}")
    for method in ("ags", "ortho"):
        if method in sizes.methods and plain is not None and (top := record.get(f"{method},{large}")) is not None:
            stage.require_on_card("top1", top >= plain, f"{method} reaches {top} %, the plain large batch {plain} %")


def make_job(stage: Stage, sizes: Sizes, cell: Cell, file: Path) -> dict[str, Any]:
    """Return a cell's job."""
    method, _ = cell
    content: dict[str, Any] = {
        "name": "table1",
        "model": {"name": sizes.model},
        "dataset": {"name": "table1_networks:dataset", "args": {"file": str(file), "crop": not stage.tiny}},
        "optimizer": {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
        "schedule": {"kind": "multistep", "milestones": [sizes.epochs / 2, sizes.epochs * 3 / 4]},
        "train": {
            "epochs": sizes.epochs,
            "method": "ags" if method == "robust" else method,
            "workers": limit_loader_processes(
                sizes.workers, batch=sizes.batches[1] * IMAGE_BYTES, trainings=PARALLEL_TRAININGS
            ),
            "precision": sizes.precision,
            "reference_batch": sizes.batches[0],
        },
        "search": {"nodes": [1], "min_batch": sizes.batches[0]},
        "cluster": {"kind": "local", "device": stage.device},
    }
    if method == "robust":
        content["ags"] = {"preset": "robust"}
    if sizes is TINY_SIZES:
        content["schedule"]["warmup_epochs"] = 0
    return content


# --- the images


def prepare_images(stage: Stage) -> Path | None:
    """Return the file that the trainings read; None if there are no images."""
    file = stage.folder.parent / f"images-{'tiny' if stage.tiny else 'all'}.npz"
    if stage.tiny:
        drawn = np.random.default_rng(0)
        arrays: dict[str, Any] = {
            name: values
            for split in ("train", "test")
            for name, values in (
                (f"{split}_images", drawn.integers(0, 256, (64, 3, 16, 16), dtype=np.uint8)),
                (f"{split}_labels", np.arange(64) % 10),
            )
        }
    elif stage.data is None or not (stage.data / PACKED_IMAGES_FILE).exists():
        return None
    else:
        arrays = decode_all(stage.data / PACKED_IMAGES_FILE)
    np.savez(file, **arrays)
    return file


def decode_all(packed: Path) -> dict[str, Any]:
    """Decode all JPEG files with one process per core."""
    from concurrent.futures import ProcessPoolExecutor

    arrays: dict[str, Any] = {}
    with np.load(packed) as data, ProcessPoolExecutor() as pool:
        for split in ("train", "test"):
            files = list(split_files(data[f"{split}_jpeg"], data[f"{split}_length"]))
            pieces = [files[first : first + 500] for first in range(0, len(files), 500)]
            result = itertools.chain.from_iterable(pool.map(decode_images, pieces))
            arrays[f"{split}_images"] = np.stack(list(result)).transpose(0, 3, 1, 2)
            arrays[f"{split}_labels"] = np.asarray(data[f"{split}_label"])
    return arrays


def split_files(joined: Any, lengths: Any) -> Iterator[bytes]:
    """Split concatenated bytes into files."""
    place = 0
    for length in lengths.tolist():
        yield joined[place : place + length].tobytes()
        place += length


def decode_images(files: Sequence[bytes]) -> list[Any]:
    """Return images (32, 32, 3)."""
    from io import BytesIO

    from PIL import Image

    return [np.asarray(Image.open(BytesIO(content)).convert("RGB")) for content in files]
