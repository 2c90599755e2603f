"""A part of Table I on CIFAR-10: what each method makes of a large batch. Three trainings share the card: no times."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu.product import finish, loader_processes, newest, start, write_job
from gpu.stage import Stage, share

PACKED = "cifar10-jpeg.npz"
"""JPEG files of all images: <split>_jpeg, their bytes one after the other; <split>_length; <split>_label."""
AT_ONCE = 3
IMAGE = 3 * 32 * 32 * 4  # bytes of one that is loaded
Cell = tuple[str, int]  # method, batch


@dataclass(frozen=True)
class Sizes:
    """What is trained."""

    model: str
    epochs: int
    batches: tuple[int, int]  # the reference, the large one
    methods: tuple[str, ...]
    precision: str
    workers: int

    @property
    def cells(self) -> list[Cell]:
        small, large = self.batches
        return [("lbt", small), *((method, large) for method in self.methods)]


WHOLE = Sizes("resnet18_cifar", 12, (128, 4096), ("lbt", "lrs", "ags", "robust", "ortho"), "bf16", 4)
TINY = Sizes("table1_networks:SmallNet", 1, (16, 32), ("lbt", "ortho"), "fp32", 0)


def table1(stage: Stage) -> None:
    """Train every cell, three at a time, each in a folder and with a lock of its own."""
    sizes = TINY if stage.tiny else WHOLE
    file = images(stage)
    if file is None:
        return stage.require(False, f"there are no images: --data DIR with {PACKED} in it")
    began, running, cells = time.monotonic(), list[tuple[Cell, Path, Any, float]](), sizes.cells
    while cells or running:
        while cells and len(running) < AT_ONCE:
            cell, *cells = cells
            folder = stage.inside(f"{cell[0]}-{cell[1]}")
            words = ["train", str(write_job(folder, job(stage, sizes, cell, file))), "--nodes", "1"]
            started = start(*words, "--batch", str(cell[1]), "--yes", folder=folder)
            running.append((cell, folder, started, time.monotonic()))
        for entry in [entry for entry in running if entry[2][0].poll() is not None]:
            running.remove(entry)
            kept(stage, *entry)
        time.sleep(0.2)
    stage.tell(minutes=share((time.monotonic() - began) / 60, 2))
    return judge(stage, sizes)


def kept(stage: Stage, cell: Cell, folder: Path, started: Any, began: float) -> None:
    """Keep what a training that has ended has reached."""
    ended = finish(started)
    run = newest(folder)
    results = [run.get_training(signature).read_result() for signature in run.list_train_signatures()]
    result = results[0] if results else None
    name = f"{cell[0]},{cell[1]}"
    stage.require(result is not None, f"{name}: train ended with {ended.code}: {ended.error}")
    if result is not None:
        tops = {name_: share(result.metrics.get(name_), 2) for name_ in ("top1", "top5")}
        stage.tell(table1={name: {**tops, "minutes": share((time.monotonic() - began) / 60, 2)}})


def judge(stage: Stage, sizes: Sizes) -> None:
    """Hold the methods against the plain large batch."""
    large = sizes.batches[1]
    record = {name: row["top1"] for name, row in stage.figures.get("table1", {}).items()}
    plain = record.get(f"lbt,{large}")
    for method in ("ags", "ortho"):
        if method in sizes.methods and plain is not None and (top := record.get(f"{method},{large}")) is not None:
            stage.require_on_card("top1", top >= plain, f"{method} reaches {top} %, the plain large batch {plain} %")


def job(stage: Stage, sizes: Sizes, cell: Cell, file: Path) -> dict[str, Any]:
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
            "workers": loader_processes(sizes.workers, batch=sizes.batches[1] * IMAGE, trainings=AT_ONCE),
            "precision": sizes.precision,
            "reference_batch": sizes.batches[0],
        },
        "search": {"nodes": [1], "min_batch": sizes.batches[0]},
        "cluster": {"kind": "local", "device": stage.device},
    }
    if method == "robust":
        content["ags"] = {"preset": "robust"}
    if sizes is TINY:
        content["schedule"]["warmup_epochs"] = 0
    return content


# --- the images


def images(stage: Stage) -> Path | None:
    """Return the file that the trainings read; None where there are no images."""
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
    elif stage.data is None or not (stage.data / PACKED).exists():
        return None
    else:
        arrays = decoded(stage.data / PACKED)
    np.savez(file, **arrays)
    return file


def decoded(packed: Path) -> dict[str, Any]:
    """Decode all JPEG files, by as many processes as there are cores."""
    from concurrent.futures import ProcessPoolExecutor

    arrays: dict[str, Any] = {}
    with np.load(packed) as data, ProcessPoolExecutor() as pool:
        for split in ("train", "test"):
            files = list(cut(data[f"{split}_jpeg"], data[f"{split}_length"]))
            pieces = [files[first : first + 500] for first in range(0, len(files), 500)]
            result = itertools.chain.from_iterable(pool.map(decode, pieces))
            arrays[f"{split}_images"] = np.stack(list(result)).transpose(0, 3, 1, 2)
            arrays[f"{split}_labels"] = np.asarray(data[f"{split}_label"])
    return arrays


def cut(joined: Any, lengths: Any) -> Iterator[bytes]:
    """Yield files out of bytes that hold them one after the other."""
    place = 0
    for length in lengths.tolist():
        yield joined[place : place + length].tobytes()
        place += length


def decode(files: Sequence[bytes]) -> list[Any]:
    """Return images (32, 32, 3)."""
    from io import BytesIO

    from PIL import Image

    return [np.asarray(Image.open(BytesIO(content)).convert("RGB")) for content in files]
