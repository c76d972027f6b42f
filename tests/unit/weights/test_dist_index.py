"""Checkpoints are data: whatever one of their pickles names is refused, and not run."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megarl.errors import DataError
from megarl.weights.dist_index import read_index, require_plain_data
from tests.helpers.hostile_pickles import ATTACKS, replace_object, write_role

# By torch, which writes here without processes that it could talk to.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def role(tmp_path: Path) -> Path:
    directory = tmp_path / "step_000001" / "actor"
    write_role(directory)
    return directory


def test_what_torch_writes_is_plain_data(role: Path) -> None:
    torch.save({"host": torch.get_rng_state(), "tracker": {}}, role.parent / "rng_actor_00000.pt")
    require_plain_data(role.parent)
    tensors, objects = read_index(role)
    assert {key: tuple(tensor.spec.shape) for key, tensor in tensors.items()} == {"weight": (6,)}
    assert objects == ["extra.step"]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_pickle_that_could_run_code_is_refused_and_not_run(role: Path, tmp_path: Path, attack: str) -> None:
    mark = tmp_path / "mark"
    file = ATTACKS[attack](role, mark)
    with pytest.raises(DataError) as error:
        require_plain_data(role.parent)
    text = str(error.value)
    assert text.startswith(f"{file}: ")
    assert "posix.open" in text
    assert "\n" not in text
    assert not mark.exists()


def test_a_role_whose_directory_is_a_link_is_checked_too(role: Path, tmp_path: Path) -> None:
    file = ATTACKS["within metadata"](role, tmp_path / "mark")
    role.rename(tmp_path / "elsewhere")
    role.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=rf"{file}: "):
        require_plain_data(role.parent)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("attack", ["metadata", "within metadata", "object"])
def test_torch_alone_runs_it(role: Path, tmp_path: Path, attack: str) -> None:
    """Why these are checked before torch reads them."""
    mark = tmp_path / "mark"
    ATTACKS[attack](role, mark)
    if attack == "metadata":
        with pytest.raises(AttributeError):
            FileSystemReader(role).read_metadata()
    else:
        state: dict[str, Any] = {"weight": torch.zeros(6), "extra": {"step": 0}}
        checkpoint.load(state, checkpoint_id=role, no_dist=True)
    assert mark.exists()


@pytest.mark.parametrize("place", ["../other.distcp", "/etc/hostname", "inner/file.distcp"])
def test_chunks_outside_of_the_directory_are_refused(role: Path, place: str) -> None:
    metadata = pickle.loads((role / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = place
    (role / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match=r"\.metadata: .*it places a chunk in .*, outside of the directory"):
        read_index(role)


def test_values_of_the_wrong_type_are_damage(role: Path) -> None:
    metadata = pickle.loads((role / ".metadata").read_bytes())
    metadata.storage_data = dict(enumerate(metadata.storage_data.values()))
    (role / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match=r"\.metadata: not the metadata of a torch_dist checkpoint"):
        require_plain_data(role.parent)


def test_a_bare_pickle_in_the_place_of_an_object_is_refused(role: Path) -> None:
    """torch reads no pickle of protocol 4, whatever is in it, as data."""
    file = replace_object(role, {})
    saved = io.BytesIO()
    torch.save({}, saved)
    data = file.read_bytes().removesuffix(saved.getvalue())
    file.write_bytes(data + pickle.dumps(b"x" * (len(saved.getvalue()) - 100), protocol=4))
    with pytest.raises(DataError, match=rf"{file}: "):
        require_plain_data(role.parent)
