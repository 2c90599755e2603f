"""Reading checkpoints of shares without running what is in them; torch's own reader would unpickle whatever is there."""

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tula_cli.run import files

SAFE_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""What metadata names beside its own records and torch's types of numbers."""


class SafeShardReader(FileSystemReader):
    """A reader that makes nothing but records of metadata."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """Return a folder's metadata.

        Raises:
            pickle.UnpicklingError: there is something else in it, or it is damaged.
        """
        content = files.read_content(Path(self.path, ".metadata"))
        try:
            records = _MetadataUnpickler(io.BytesIO(content)).load()
        except (LookupError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise pickle.UnpicklingError(f"the metadata is damaged: {error}") from None
        if not isinstance(records, metadata.Metadata):
            raise pickle.UnpicklingError("the metadata is something else")
        if records.storage_meta is None:
            records.storage_meta = metadata.StorageMeta()
        records.storage_meta.load_id = self.load_id
        return records


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (
            "builtins",
            "getattr",
        ):  # by which Python 3.11.2 and others write a member of an enumeration
            return _allow_member
        is_metadata_class = module == metadata.__name__ and isinstance(vars(metadata).get(name), type)
        number = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_metadata_class and not number and (module, name) not in SAFE_CLASSES:
            raise pickle.UnpicklingError(f"the metadata names {module}.{name}")
        return super().find_class(module, name)


def _allow_member(kind: Any, name: str) -> Any:
    if not isinstance(kind, type) or not issubclass(kind, enum.Enum):
        raise pickle.UnpicklingError(f"the metadata asks for {name} of {kind!r}")
    return kind[name]


class SafeLoadPlanner(DefaultLoadPlanner):
    """A planner that takes plain values, of an optimizer's groups, where torch's own takes any object."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Take a value that is no tensor.

        Raises:
            pickle.UnpicklingError: it is more than a plain one.
        """
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
