"""Checkpoints in which one of the pickles creates a file when it is unpickled."""

import io
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata


class Touches:
    """An object that creates the file `path` in whoever unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.open, (str(self.path), os.O_CREAT | os.O_WRONLY)


def write_role(directory: Path) -> None:
    """What ranks write of a role, with a tensor and an object, by torch itself."""
    checkpoint.save({"weight": torch.arange(6.0), "extra": {"step": 3}}, checkpoint_id=directory, no_dist=True)
    torch.save({"optimizer": {"step": 3}}, directory / "common.pt")


def spoil_metadata(role: Path, mark: Path) -> Path:
    (role / ".metadata").write_bytes(pickle.dumps(Touches(mark)))
    return role / ".metadata"


def spoil_within_metadata(role: Path, mark: Path) -> Path:
    """The index is whole, and has one value more."""
    metadata = pickle.loads((role / ".metadata").read_bytes())
    metadata.planner_data = Touches(mark)
    (role / ".metadata").write_bytes(pickle.dumps(metadata))
    return role / ".metadata"


def spoil_common(role: Path, mark: Path) -> Path:
    torch.save({"optimizer": Touches(mark)}, role / "common.pt")
    return role / "common.pt"


def spoil_rng(role: Path, mark: Path) -> Path:
    """As torch saved before zip archives."""
    file = role.parent / "rng_actor_00000.pt"
    torch.save({"host": Touches(mark)}, file, _use_new_zipfile_serialization=False)
    return file


def spoil_object(role: Path, mark: Path) -> Path:
    return replace_object(role, Touches(mark))


def replace_object(role: Path, value: object, *, key: str = "") -> Path:
    """Put a value in the place of every object that is stored among the chunks and has `key` in its own; return the
    last one's file.
    """
    metadata = pickle.loads((role / ".metadata").read_bytes())
    saved = io.BytesIO()
    torch.save(value, saved)
    for index, place in metadata.storage_data.items():
        if key in index.fqn and isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            file = role / place.relative_path
            with file.open("ab") as stream:
                metadata.storage_data[index] = _StorageInfo(
                    place.relative_path, stream.tell(), stream.write(saved.getvalue())
                )
    (role / ".metadata").write_bytes(pickle.dumps(metadata))
    return file


# Each spoils the checkpoint of a role, so that reading it creates the file `mark`, and returns which file is to blame.
ATTACKS: Mapping[str, Callable[[Path, Path], Path]] = {
    "metadata": spoil_metadata,
    "within metadata": spoil_within_metadata,
    "common.pt": spoil_common,
    "rng": spoil_rng,
    "object": spoil_object,
}
