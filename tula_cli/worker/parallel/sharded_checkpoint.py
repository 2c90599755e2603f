"""Checkpoints of sharded models: a folder of torch.distributed.checkpoint, which any number of ranks can load."""

import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tula_cli.errors import CannotWrite, TulaError
from tula_cli.run import files
from tula_cli.run.checkpoint_integrity import CHECKSUM_FILE
from tula_cli.run.disk_space import find_full_disk_errno
from tula_cli.run.files import make_folder, make_write_error, write_file_atomically
from tula_cli.worker.ranks import Ranks

UNSHARDED_STATE_FILE = "rest.pt"
"""The file of torch.save with the state that is not sharded: position, best metrics, factors."""
_READ_BYTES = 2**24  # bytes read at a time to compute a check sum


def save_sharded_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, content: dict[str, Any], ranks: Ranks
) -> None:
    """Write a checkpoint completely or not at all: into a draft folder, which is renamed when all ranks have finished.

    Every rank must call this, and writes its own shards.

    Args:
        folder: folder of the checkpoint, on a file system shared by all ranks; an existing one is replaced.
        model: sharded by fully_shard; its buffers become rank 0's.
        content: the remaining state; rank 0's is written.

    Raises:
        TulaError: a rank cannot write; older checkpoints remain.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    # BatchNorm's statistics differ between ranks and torch may write those of any rank; rank 0's are evaluated.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    draft = folder.with_name(f".{folder.name}.draft")
    _run_on_first_rank(lambda: _create_draft(draft), folder, ranks)
    try:
        save(_make_sharded_state(model, optimizer), checkpoint_id=draft)
    except CheckpointException as error:
        why = _find_first_cause(error)
        if isinstance(why, OSError):
            raise make_write_error(folder, why) from error
        # torch's archive writer raises its own RuntimeError for a full disk.
        if code := find_full_disk_errno(folder.parent):
            raise make_write_error(folder, OSError(code, os.strerror(code))) from error
        first_line = next(iter(str(why).splitlines()), type(why).__name__)
        raise CannotWrite(
            f"cannot write {folder}: {first_line}", "check the free disk space; older checkpoints are still valid"
        ) from error
    _run_on_first_rank(
        lambda: write_file_atomically(draft / UNSHARDED_STATE_FILE, _serialize_content(content)), folder, ranks
    )
    names = sorted(path.name for path in draft.iterdir()) if ranks.is_first else []
    sums = _list_file_checksums(draft, json.loads(ranks.gather(json.dumps(names))[0]), ranks)
    if lost := [name for name, total in sums.items() if total < 0]:
        raise CannotWrite(f"cannot write {folder}: its files cannot be read back: {', '.join(lost)}")
    _run_on_first_rank(lambda: _publish_draft(draft, folder, sums), folder, ranks)


def is_complete_checkpoint(folder: Path, ranks: Ranks) -> bool:
    """Return on every rank whether a folder matches its check sums; every rank must call this, and reads some files."""
    text = json.dumps(_read_checksums(folder) if ranks.is_first else {})
    checksums: dict[str, int] = json.loads(ranks.gather(text)[0])
    return UNSHARDED_STATE_FILE in checksums and _list_file_checksums(folder, sorted(checksums), ranks) == checksums


def _read_checksums(folder: Path) -> dict[str, int]:
    """Return the check sums that were written with a checkpoint; empty if they cannot be read."""
    try:
        content = json.loads(files.read_content(folder / CHECKSUM_FILE))
    except (OSError, ValueError, TulaError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {name: total for name, total in content.items() if isinstance(total, int)}


def load_sharded_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into a sharded model, on any number of ranks, and its optimizer; every rank must call this.

    Raises:
        TulaError: the checkpoint does not fit the model.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    from tula_cli.worker.build.weights import SafeLoadPlanner, SafeShardReader

    state = _make_sharded_state(model, optimizer)
    states = state["optimizer"]["state"]
    try:
        untouched = _find_stateless_parameters(states, SafeShardReader(folder).read_metadata().state_dict_metadata)
        optimizer_state = {
            **state["optimizer"],
            "state": {name: states[name] for name in states if name not in untouched},
        }
        state_dict_loader.load(
            {"model": state["model"], "optimizer": optimizer_state},
            storage_reader=SafeShardReader(folder),
            planner=SafeLoadPlanner(),
        )
    except (CheckpointException, pickle.UnpicklingError) as error:
        why = _find_first_cause(error) if isinstance(error, CheckpointException) else error
        raise TulaError(
            f"the checkpoint {folder} does not fit the model: {why}", "check whether the code of the model has changed"
        ) from None
    set_model_state_dict(model, state["model"])
    # torch requires a state for each parameter and creates one before it loads.
    set_optimizer_state_dict(model, optimizer, {**optimizer_state, "state": states})
    for name, parameter in model.named_parameters():
        if name in untouched:
            optimizer.state.pop(parameter, None)


def _find_stateless_parameters(states: dict[str, Any], saved: Collection[str]) -> set[str]:
    """Return the parameters without optimizer state in a checkpoint: unused ones, which never received a gradient."""
    return {name for name in states if not any(key.startswith(f"optimizer.state.{name}.") for key in saved)}


def _make_sharded_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _list_file_checksums(folder: Path, names: list[str], ranks: Ranks) -> dict[str, int]:
    """Return the check sum of each file, -1 for one that cannot be read; each rank reads its share of the files."""
    local_checksums = {name: _compute_file_checksum(folder / name) for name in names[ranks.rank :: ranks.world]}
    checksums: dict[str, int] = {}
    for text in ranks.gather(json.dumps(local_checksums)):
        checksums |= json.loads(text)
    return checksums


def _compute_file_checksum(path: Path) -> int:
    total = 0
    try:
        with files.open_file(path) as file:
            while chunk := file.read(_READ_BYTES):
                total = zlib.crc32(chunk, total)
    except (OSError, TulaError):
        return -1
    return total


def _find_first_cause(error: Any) -> BaseException:
    """Return the error of the first rank that failed."""
    cause: BaseException = next((failure[0] for failure in error.failures.values()), error)
    return cause


def _run_on_first_rank(work: Callable[[], None], folder: Path, ranks: Ranks) -> None:
    """Run `work` on rank 0 while the others wait; if it fails, all ranks raise the error, so that none waits forever.

    Raises:
        TulaError: rank 0 could not write.
    """
    why: list[Any] = []
    if ranks.is_first:
        try:
            work()
        except (OSError, CannotWrite) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            assert isinstance(cause, OSError)  # raised by write_file_atomically
            why = [cause.errno, cause.strerror]
    problem = json.loads(ranks.gather(json.dumps(why))[0])
    if problem:
        raise make_write_error(folder, OSError(*problem))


def _create_draft(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    make_folder(draft)


def _serialize_content(content: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _publish_draft(draft: Path, folder: Path, sums: dict[str, int]) -> None:
    """Write the check sums, and rename the draft; an existing folder is moved aside first and deleted afterwards."""
    write_file_atomically(draft / CHECKSUM_FILE, json.dumps(sums))
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(handle)  # makes the new name durable
    finally:
        os.close(handle)
    shutil.rmtree(old, ignore_errors=True)
