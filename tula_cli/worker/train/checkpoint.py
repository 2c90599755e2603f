"""Checkpoints: named by samples seen, written atomically by rank 0, read with weights_only.

Checkpoints of sharded models (`train.parallel: fsdp`) are folders, which all ranks write and read
(`parallel/sharded_checkpoint.py`).
"""

import json
import os
import pickle
import re
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch.utils._pytree import tree_leaves

from tula_cli.errors import DiskFull, TulaError
from tula_cli.models.loss_level import LossLevel
from tula_cli.run.checkpoint_integrity import is_complete_archive
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_link_target, remove_path, wait_until_listed, write_file_atomically
from tula_cli.worker.build.loaders import TrainingPosition
from tula_cli.worker.device import count_tensor_bytes
from tula_cli.worker.parallel import sharded_checkpoint
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train.loop import Trainer

CHECKPOINTS_KEPT = 2
"""The newest checkpoints kept besides the best one: one more than needed, in case the newest is damaged."""


def make_checkpoint_state(
    trainer: Trainer, *, best: dict[str, float], evaluation_pending: bool = False, stop_reason: str = ""
) -> dict[str, Any]:
    """Return everything a resumed run needs.

    Args:
        evaluation_pending: whether the epoch that ends here is not yet evaluated.
        stop_reason: why the training ends here, before its last epoch; empty if it continues.
    """
    return {
        "model": trainer.method.get_model_state(trainer),
        "optimizer": trainer.optimizer.state_dict(),
        **_make_training_state(trainer, best=best, evaluation_pending=evaluation_pending, stop_reason=stop_reason),
    }


def _make_training_state(
    trainer: Trainer, *, best: dict[str, float], evaluation_pending: bool, stop_reason: str
) -> dict[str, Any]:
    """Return the state that a resumed run needs in addition to model and optimizer."""
    extra_state = trainer.method.own_state(trainer)
    return {
        "version": 1,
        "scaler": trainer.scaler.state_dict(),
        "position": asdict(trainer.position),
        "batch": trainer.batch,
        "world": trainer.ranks.world,
        "best": best,
        "owed": evaluation_pending,
        "ended": stop_reason,
        "losses": asdict(trainer.losses),
        **({"method": extra_state} if extra_state else {}),
    }


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write one checkpoint completely or not at all, tensor by tensor: no second copy is held in memory.

    Raises:
        DiskFull: there is no space for it; older checkpoints remain.
    """

    def save_content(file: BinaryIO) -> None:
        out = _FileRecorder(file)
        try:
            torch.save(content, cast("IO[bytes]", out))
        except Exception:
            if out.error is not None:  # torch replaces the error of a failed write by its own
                raise out.error from None
            raise

    try:
        write_file_atomically(path, save_content)
    except DiskFull as error:
        error.needed = count_tensor_bytes(tree_leaves(content))  # approximately the size of the file
        raise


class _FileRecorder:
    """A file that stores the error if it cannot be written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def save_checkpoint(
    run: RunDir,
    signature: str,
    trainer: Trainer,
    *,
    best: dict[str, float],
    is_best: bool,
    evaluation_pending: bool = False,
    stop_reason: str = "",
    keep: Collection[int] = (),
) -> Path:
    """Save the trainer's state, point `last` (and `best`) at it, and delete checkpoints that are no longer needed.

    Called on rank 0 alone, or on all ranks if the model is sharded (`Parallel.needs_all_ranks`). `keep` are the samples of
    checkpoints that must not be deleted.
    """
    is_sharded = trainer.parallel.needs_all_ranks
    path = run.get_training(signature).get_checkpoint_path(trainer.position.samples, sharded=is_sharded)
    if is_sharded:
        write_sharded_checkpoint(
            path, trainer, best=best, evaluation_pending=evaluation_pending, stop_reason=stop_reason
        )
    else:
        write_checkpoint(
            path,
            make_checkpoint_state(trainer, best=best, evaluation_pending=evaluation_pending, stop_reason=stop_reason),
        )
    if trainer.ranks.is_first:
        _update_links_and_remove_old(run, signature, path, is_best=is_best, keep=keep)
    return path


def write_sharded_checkpoint(
    path: Path, trainer: Trainer, *, best: dict[str, float], evaluation_pending: bool = False, stop_reason: str = ""
) -> None:
    """Write one checkpoint of a sharded model completely or not at all; every rank must call this.

    Raises:
        TulaError: it cannot be written, for example because the disk is full; older checkpoints remain.
    """
    ags = {} if trainer.ags is None else {"ags": trainer.ags.ags_state_dict()}
    content = (
        _make_training_state(trainer, best=best, evaluation_pending=evaluation_pending, stop_reason=stop_reason) | ags
    )
    sharded_checkpoint.save_sharded_checkpoint(path, trainer.parallel.module, trainer.base, content, trainer.ranks)


def _update_links_and_remove_old(
    run: RunDir, signature: str, path: Path, *, is_best: bool, keep: Collection[int]
) -> None:
    """Point `last` (and `best`) at a new checkpoint, and delete those that are no longer needed."""
    folder = run.get_training(signature).path
    _replace_link(folder / "last", path)
    if is_best:
        _replace_link(folder / "best", path)
    # Checkpoints later than this one were found damaged, or the run would have resumed from them.
    checkpoints = run.get_training(signature).list_checkpoints()
    newest = [checkpoint for checkpoint in checkpoints if checkpoint <= path][:CHECKPOINTS_KEPT]
    kept = {*newest, read_link_target(folder / "best"), read_link_target(folder / "last")}
    for checkpoint in checkpoints:
        if checkpoint not in kept and int(checkpoint.stem) not in keep:
            remove_path(checkpoint)


def delete_checkpoints_after(run: RunDir, signature: str, samples: int) -> None:
    """Delete every checkpoint with more samples, so that the training resumes from the newest one left. Rank 0 alone.

    `last` then points at that one, and so does `best` if its checkpoint is deleted; if none is left, both links are
    removed.
    """
    folder, checkpoints = run.get_training(signature).path, run.get_training(signature).list_checkpoints()
    dropped = [path for path in checkpoints if int(path.stem) > samples]
    newest = next((path for path in checkpoints if path not in dropped), None)
    for link in (folder / "last", folder / "best"):
        if newest is None:
            link.unlink(missing_ok=True)
        elif link.name == "last" or read_link_target(link) in dropped:
            _replace_link(link, newest)
    for path in dropped:
        remove_path(path)


def load_newest_checkpoint(
    run: RunDir, signature: str, warn: Callable[[str], object] = lambda _: None
) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest readable checkpoint file, None if there is none; damaged ones are renamed, with a warning."""
    for path in run.get_training(signature).list_checkpoints():
        if path.suffix != ".pt":
            continue
        content = _read_checkpoint(path) if is_complete_archive(path) else None
        if content is not None:
            return path, content
        warn(_rename_damaged_checkpoint(path))
    return None


def load_newest_checkpoint_on_all_ranks(
    run: RunDir, signature: str, ranks: Ranks, warn: Callable[[str], object] = lambda _: None
) -> dict[str, Any] | None:
    """Return the newest readable checkpoint that rank 0 has found, on every rank; None if there is none.

    For a sharded model it holds the checkpoint's `folder` and the state that is not sharded. `warn` as in `load_newest_checkpoint`, called on
    rank 0.
    """
    training = run.get_training(signature)
    sharded = [path.name for path in training.list_checkpoints() if path.suffix != ".pt"] if ranks.is_first else []
    folders = [training.path / "checkpoints" / name for name in json.loads(ranks.gather(json.dumps(sharded))[0])]
    for folder in folders:
        if sharded_checkpoint.is_complete_checkpoint(folder, ranks) and (
            unsharded_state := _read_checkpoint(folder / sharded_checkpoint.UNSHARDED_STATE_FILE)
        ):
            return {**unsharded_state, "folder": folder}
        if ranks.is_first:
            warn(_rename_damaged_checkpoint(folder))
    newest = load_newest_checkpoint(run, signature, warn) if ranks.is_first else None
    samples = ranks.broadcast(-1 if newest is None else newest[1]["position"]["samples"])
    if samples < 0:
        return None
    if newest is not None:
        return newest[1]
    path = run.get_training(signature).get_checkpoint_path(samples)
    wait_until_listed(path)  # this node's file-system cache may still report it as missing
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def _rename_damaged_checkpoint(path: Path) -> str:
    """Rename a damaged checkpoint, so that no later start tries to read it; return a message about it."""
    path_aside = path.with_name(f"damaged-{path.name}")
    number = 1
    while path_aside.exists():
        number += 1
        path_aside = path.with_name(f"damaged-{number}-{path.name}")
    name = f"the checkpoint {path.name} ({int(path.stem)} samples)"
    try:
        path.rename(path_aside)
    except OSError as error:  # the checkpoint is skipped nevertheless
        return f"{name} is damaged and skipped ({error.strerror})"
    return f"{name} is damaged, skipped and kept as checkpoints/{path_aside.name}"


def _read_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the content of a torch.save file; None if it is none, no checkpoint, or holds more than plain data."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError):
        return None
    except RuntimeError as error:
        # Only errors of torch's archive reader show a damaged file; others, such as too little memory, do not.
        if not re.search("PytorchStreamReader|inline_container|file in archive", str(error)):
            raise
        return None
    return content if isinstance(content, dict) and "position" in content else None


def restore_checkpoint(trainer: Trainer, content: dict[str, Any]) -> dict[str, float]:
    """Load a checkpoint's state into a new trainer; return the best metrics so far.

    At another batch (after an out-of-memory error) position and base optimizer state are kept, the scaling factors are
    not.

    Raises:
        TulaError: the checkpoint does not fit the model.
    """
    trainer.move_to_position(
        TrainingPosition(**content["position"])
    )  # first, as the state depends on the batch of the position
    if "folder" in content:
        sharded_checkpoint.load_sharded_checkpoint(content["folder"], trainer.parallel.module, trainer.base)
        if trainer.ags is not None and "ags" in content:
            trainer.ags.load_ags_state_dict(content["ags"])
    else:
        _load_unsharded_state(trainer, content)
    if "method" in content:
        trainer.method.load_own_state(trainer, content["method"])
    trainer.scaler.load_state_dict(content["scaler"])
    trainer.losses = LossLevel(**content.get("losses", {}))
    best: dict[str, float] = content["best"]
    return best


def _load_unsharded_state(trainer: Trainer, content: dict[str, Any]) -> None:
    try:
        trainer.parallel.module.load_state_dict(content["model"])
    except RuntimeError as error:
        raise TulaError(
            f"the checkpoint does not fit the model: {error}", "check whether the code of the model has changed"
        ) from None
    settings = [(group.get("weight_decay"), group.get("betas")) for group in trainer.base.param_groups]
    _load_optimizer_state(trainer, content["optimizer"])
    # Keep the job's settings: those of an arm (method auto) differ from its checkpoint's; beta2 is set in each step.
    for group, (decay, betas) in zip(trainer.base.param_groups, settings, strict=True):
        if decay is not None:
            group["weight_decay"] = decay
        if betas is not None:
            group["betas"] = (betas[0], *group["betas"][1:])
    _match_parameter_strides(trainer.base)


def _load_optimizer_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Load the optimizer's state; if AGS starts at this checkpoint (method auto), it is that of the base alone."""
    if trainer.ags is None or "ags" in state:
        trainer.optimizer.load_state_dict(state)
        return
    trainer.base.load_state_dict(state)
    trainer.ags.request_refresh()


def _match_parameter_strides(optimizer: torch.optim.Optimizer) -> None:
    """Give the state the strides of its parameters, in case it was saved with others (channels_last).

    Fused kernels refuse other strides, and foreach kernels process such tensors one by one.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            matches_parameter = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if matches_parameter and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _replace_link(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, atomically replacing an existing one."""
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(os.path.relpath(target, link.parent))
    draft.replace(link)
