"""A checkpoint of a model in shares: a folder of torch.distributed.checkpoint, which any number of ranks can load."""

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
from tula_cli.run.damage import SUMS
from tula_cli.run.files import cannot_write, make_folder, write_atomic
from tula_cli.run.storage.space import refuses
from tula_cli.worker.ranks import Ranks

REST = "rest.pt"
"""What no rank has a share of: position, best metrics, factors. A file of torch.save."""
_CHUNK = 2**24  # bytes that are summed at a time


def write(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rest: dict[str, Any], ranks: Ranks) -> None:
    """Write a checkpoint, whole or not at all: beside its place, and renamed when all ranks have finished.

    Every rank takes part, and writes its own shares.

    Args:
        folder: its place, on a file system that all ranks share; one that is there already is replaced.
        model: that fully_shard has divided; its buffers become rank 0's.
        optimizer: of its shares.
        rest: what else belongs to it; rank 0's.
        ranks: all of them.

    Raises:
        TulaError: a rank cannot write; older checkpoints stand.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    # Each rank's BatchNorm has seen its own samples, and torch writes any rank's; what is evaluated is rank 0's.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    draft = draft_of(folder)
    _by_first(lambda: _begin(draft), folder, ranks)
    try:
        save(_state(model, optimizer), checkpoint_id=draft)
    except CheckpointException as error:
        why = _cause(error)
        if isinstance(why, OSError):
            raise cannot_write(folder, why) from error
        # torch's writer of archives tells a full disk as a RuntimeError of its own
        if code := refuses(folder.parent):
            raise cannot_write(folder, OSError(code, os.strerror(code))) from error
        first = next(iter(str(why).splitlines()), type(why).__name__)
        raise CannotWrite(f"cannot write {folder}: {first}", "is the disk full? older checkpoints stand") from error
    _by_first(lambda: write_atomic(draft / REST, _bytes(rest)), folder, ranks)
    files = sorted(path.name for path in draft.iterdir()) if ranks.first else []
    sums = _sums(draft, json.loads(ranks.gather(json.dumps(files))[0]), ranks)
    if lost := [name for name, total in sums.items() if total < 0]:
        raise CannotWrite(f"cannot write {folder}: what was written cannot be read again: {', '.join(lost)}")
    _by_first(lambda: _end(draft, folder, sums), folder, ranks)


def draft_of(folder: Path) -> Path:
    """Return where a folder is while it is written."""
    return folder.with_name(f".{folder.name}.draft")


def is_whole(folder: Path, ranks: Ranks) -> bool:
    """Return on every rank whether a folder is what was written; every rank takes part, and reads some of its files."""
    known: dict[str, int] = json.loads(ranks.gather(json.dumps(_known(folder) if ranks.first else {}))[0])
    return REST in known and _sums(folder, sorted(known), ranks) == known


def _known(folder: Path) -> dict[str, int]:
    """Return the check sums that were written; empty where they cannot be read."""
    try:
        content = json.loads(files.content(folder / SUMS))
    except (OSError, ValueError, TulaError):
        return {}
    return (
        {name: total for name, total in content.items() if isinstance(total, int)} if isinstance(content, dict) else {}
    )


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's state into a model in shares, of any number of ranks, and its optimizer; every rank takes part.

    Raises:
        TulaError: it is not of this model.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    from tula_cli.worker.build.finetune.shares_reader import SharesPlanner, SharesReader

    state = _state(model, optimizer)
    states = state["optimizer"]["state"]
    try:
        untouched = _without_state(states, SharesReader(folder).read_metadata().state_dict_metadata)
        asked = {**state["optimizer"], "state": {name: states[name] for name in states if name not in untouched}}
        state_dict_loader.load(
            {"model": state["model"], "optimizer": asked}, storage_reader=SharesReader(folder), planner=SharesPlanner()
        )
    except (CheckpointException, pickle.UnpicklingError) as error:
        why = _cause(error) if isinstance(error, CheckpointException) else error
        raise TulaError(
            f"the checkpoint {folder} does not fit the model: {why}", "was the model's code changed?"
        ) from None
    set_model_state_dict(model, state["model"])
    # torch wants a state of each, and gives each one before it loads
    set_optimizer_state_dict(model, optimizer, {**asked, "state": states})
    for name, parameter in model.named_parameters():
        if name in untouched:
            optimizer.state.pop(parameter, None)


def _without_state(states: dict[str, Any], saved: Collection[str]) -> set[str]:
    """Return the parameters of which a checkpoint has no optimizer state: no gradient had reached them (never used)."""
    return {name for name in states if not any(key.startswith(f"optimizer.state.{name}.") for key in saved)}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _sums(folder: Path, names: list[str], ranks: Ranks) -> dict[str, int]:
    """Return the check sum of each file, -1 of one that cannot be read; each rank reads its share of them."""
    mine = {name: _sum(folder / name) for name in names[ranks.rank :: ranks.world]}
    found: dict[str, int] = {}
    for text in ranks.gather(json.dumps(mine)):
        found |= json.loads(text)
    return found


def _sum(path: Path) -> int:
    total = 0
    try:
        with files.open_file(path) as file:
            while chunk := file.read(_CHUNK):
                total = zlib.crc32(chunk, total)
    except (OSError, TulaError):
        return -1
    return total


def _cause(error: Any) -> BaseException:
    """Return what went wrong on the first rank where anything did."""
    cause: BaseException = next((seen[0] for seen in error.failures.values()), error)
    return cause


def _by_first(work: Callable[[], None], folder: Path, ranks: Ranks) -> None:
    """Let rank 0 do something while the others wait; where it cannot, all ranks say so, and none waits in vain.

    Raises:
        TulaError: rank 0 could not write.
    """
    why: list[Any] = []
    if ranks.first:
        try:
            work()
        except (OSError, CannotWrite) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            assert isinstance(cause, OSError)  # of write_atomic
            why = [cause.errno, cause.strerror]
    told = json.loads(ranks.gather(json.dumps(why))[0])
    if told:
        raise cannot_write(folder, OSError(*told))


def _begin(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    make_folder(draft)


def _bytes(rest: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return buffer.getvalue()


def _end(draft: Path, folder: Path, sums: dict[str, int]) -> None:
    write_atomic(draft / SUMS, json.dumps(sums))
    _put(draft, folder)


def _put(draft: Path, folder: Path) -> None:
    """Rename a finished folder; what stands in its place goes out of the way first."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(handle)  # the name is on the disk
    finally:
        os.close(handle)
    shutil.rmtree(old, ignore_errors=True)
