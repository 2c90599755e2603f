"""Checkpoints: what is in them, which are kept, and which can be trusted."""

import os
import pickle
import zipfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_jobs import are_equal, copy_weights, make_spec, make_trainer

from tula_cli.errors import TulaError
from tula_cli.run.directory import RunDir
from tula_cli.worker.build.loaders import TrainingPosition
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.loop import Trainer

NAME = "abcd1234"
AGS = {"train": {"method": "ags"}, "ags": {"delta": "inf"}}


def advanced(ranks: Ranks, *, steps: int = 8, batch: int = 16, **changes: Any) -> Trainer:
    subject = make_trainer(make_spec(**changes), ranks, batch=batch)
    for _ in islice(worker_train_loop.run_steps(subject), steps):
        pass
    return subject


def save(run: RunDir, subject: Trainer, samples: int, *, is_best: bool = False) -> Path:
    subject.position = TrainingPosition(samples=samples)
    return checkpoint.save_checkpoint(run, NAME, subject, best={"top1": 1.0}, is_best=is_best)


def names(run: RunDir) -> list[int]:
    return [int(path.stem) for path in run.get_training(NAME).list_checkpoints()]


def test_a_checkpoint_holds_all_that_goes_on(alone: Ranks, run: RunDir) -> None:
    old = advanced(alone, **AGS)
    path = checkpoint.save_checkpoint(run, NAME, old, best={"top1": 3.5, "epoch": 1.0}, is_best=False)
    new = make_trainer(make_spec(**AGS), alone)
    assert checkpoint.restore_checkpoint(new, torch.load(path, weights_only=True)) == {"top1": 3.5, "epoch": 1.0}
    assert are_equal(copy_weights(new), copy_weights(old))
    assert new.position == old.position == TrainingPosition(epoch=1, done=32, samples=128, steps=8)
    assert path == run.get_training(NAME).get_checkpoint_path(128)
    assert repr(new.optimizer.state_dict()) == repr(old.optimizer.state_dict())


def test_another_batch_keeps_momentum_and_drops_the_factors(alone: Ranks, run: RunDir) -> None:
    old = advanced(alone, batch=32, steps=5, **AGS)
    path = checkpoint.save_checkpoint(run, NAME, old, best={}, is_best=False)
    new = make_trainer(make_spec(**AGS), alone, batch=16)
    checkpoint.restore_checkpoint(new, torch.load(path, weights_only=True))
    assert old.ags is not None
    assert new.ags is not None
    assert old.ags.state_dict()["ags"]["factors"]["scale"]
    assert not new.ags.state_dict()["ags"]["factors"]["scale"]
    assert new.ags.state_dict()["ags"]["gate"]["prev_sq"] is None
    momenta = [[state["momentum_buffer"] for state in item.base.state.values()] for item in (old, new)]
    assert all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))
    assert new.position == old.position


def test_the_two_newest_and_the_best_are_kept(alone: Ranks, run: RunDir) -> None:
    subject = make_trainer(make_spec(), alone)
    for samples in (100, 200, 300, 400, 500):
        save(run, subject, samples, is_best=samples == 200)
    assert names(run) == [500, 400, 200]


@pytest.mark.promise(
    "the run directory", "the user has put files into the folder of checkpoints", "tula neither reads nor deletes them"
)
def test_a_copy_that_the_user_made_stays(alone: Ranks, run: RunDir) -> None:
    subject = make_trainer(make_spec(), alone)
    copy = save(run, subject, 100).with_name("my-backup.pt")
    copy.write_bytes(b"of the user's")
    for samples in (200, 300, 400):
        save(run, subject, samples)
    checkpoint.delete_checkpoints_after(run, NAME, 300)
    newest = checkpoint.load_newest_checkpoint(run, NAME)
    assert newest is not None
    assert newest[0] == run.get_training(NAME).get_checkpoint_path(300)
    assert names(run) == [300] and copy.read_bytes() == b"of the user's"


def test_links_are_relative_and_lead_to_a_checkpoint(alone: Ranks, run: RunDir, tmp_path: Path) -> None:
    subject = make_trainer(make_spec(), alone)
    save(run, subject, 100, is_best=True)
    save(run, subject, 200)
    folder = run.get_training(NAME).path
    assert os.readlink(folder / "best") == "checkpoints/000000000100.pt"
    assert os.readlink(folder / "last") == "checkpoints/000000000200.pt"
    moved = run.path.rename(tmp_path / "moved")
    assert torch.load(moved / "train" / NAME / "last", weights_only=True)["position"]["samples"] == 200


def test_no_draft_is_left(alone: Ranks, run: RunDir) -> None:
    save(run, make_trainer(make_spec(), alone), 100, is_best=True)
    result = {path.name for path in run.get_training(NAME).path.rglob("*")}
    assert result == {"checkpoints", "000000000100.pt", "last", "best"}


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_checkpoint_is_passed_over(alone: Ranks, run: RunDir, share: float) -> None:
    subject = make_trainer(make_spec(), alone)
    older, newest = save(run, subject, 100), save(run, subject, 200)
    content = newest.read_bytes()
    newest.write_bytes(content[: int(share * len(content))])
    result = checkpoint.load_newest_checkpoint(run, NAME)
    assert result is not None
    assert result[0] == older


@pytest.mark.parametrize("place", [0.1, 0.5, 0.8])
def test_a_checkpoint_with_a_hole_is_passed_over(alone: Ranks, run: RunDir, place: float) -> None:
    path = save(run, make_trainer(make_spec(), alone), 100)
    content = bytearray(path.read_bytes())
    begin = int(place * len(content))
    content[begin : begin + 512] = bytes(512)
    path.write_bytes(content)
    assert checkpoint.load_newest_checkpoint(run, NAME) is None


class Attack:
    """Runs a command where it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.place}",)


def plain_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "of something else")


@pytest.mark.parametrize(
    "write",
    [
        plain_zip,
        lambda path: torch.save({"position": Attack(path.with_name("attacked"))}, path),
        lambda path: torch.save([1, 2], path),
        lambda path: path.write_bytes(pickle.dumps({"position": 1})),
        lambda path: path.write_bytes(b""),
    ],
    ids=["a zip of something else", "a command", "a list", "a bare pickle", "nothing"],
)
@pytest.mark.promise(
    "the run directory",
    "the newest checkpoint does not load",
    "tula sets it aside with a warning, and uses the previous one",
)
def test_what_holds_no_state_is_set_aside_with_a_word(
    alone: Ranks, run: RunDir, write: Callable[[Path], object]
) -> None:
    older, newest = save(run, make_trainer(make_spec(), alone), 100), run.get_training(NAME).get_checkpoint_path(200)
    message: list[str] = []
    for name in ("damaged-000000000200.pt", "damaged-2-000000000200.pt"):
        write(newest)
        content = newest.read_bytes()
        result = checkpoint.load_newest_checkpoint(run, NAME, message.append)
        assert result is not None and result[0] == older
        assert message[-1] == (
            f"the checkpoint {newest.name} (200 samples) is damaged, skipped and kept as checkpoints/{name}"
        )
        assert newest.with_name(name).read_bytes() == content
    assert names(run) == [100] and run.get_training(NAME).find_newest_checkpoint_samples() == 100
    assert not newest.with_name("attacked").exists()


def test_a_checkpoint_that_the_memory_does_not_hold_is_not_called_damaged(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, make_trainer(make_spec(), alone), 100)

    def load(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(RuntimeError, match="allocate memory"):
        checkpoint.load_newest_checkpoint(run, NAME)
    assert names(run) == [100]


def test_where_there_is_none_nothing_is_loaded(run: RunDir) -> None:
    assert checkpoint.load_newest_checkpoint(run, NAME) is None


def test_a_damaged_checkpoint_ahead_does_not_push_out_a_good_one(alone: Ranks, run: RunDir) -> None:
    subject = make_trainer(make_spec(), alone)
    save(run, subject, 100)
    save(run, subject, 300).write_bytes(b"")
    save(run, subject, 200)
    assert names(run) == [200, 100]


def test_a_checkpoint_of_another_model_is_refused(alone: Ranks) -> None:
    content = checkpoint.make_checkpoint_state(make_trainer(make_spec(), alone), best={})
    other = make_trainer(make_spec(model={"args": {"width": 4}}), alone)
    with pytest.raises(TulaError, match="does not fit the model"):
        checkpoint.restore_checkpoint(other, content)


def test_the_scale_of_half_precision_is_kept(alone: Ranks, tmp_path: Path) -> None:
    old = advanced(alone, train={"precision": "fp16"})
    old.scaler.update(2.0**7)
    new = make_trainer(make_spec(train={"precision": "fp16"}), alone)
    checkpoint.restore_checkpoint(new, checkpoint.make_checkpoint_state(old, best={}))
    assert new.scaler.get_scale() == 2.0**7
