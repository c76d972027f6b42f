"""Other users of the host: what they write into the store of a weight sync, or put where its memory will be."""

import base64
import os
import pickle
import secrets
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.host.store import connect_store, open_store
from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport.cuda_ipc import DeviceSegments
from megarl.sync.transport.rendezvous import Rendezvous, give_up
from megarl.sync.transport.shared_memory import HostMemory, SharedMemoryReceiver, SharedMemorySender
from megarl.sync.transport.transports import ProcessPlan
from tests.helpers.second_user import UID, as_nobody, needs_second_user

CPU = torch.device("cpu")
MESSAGE = WeightMessage(0, 0, 0, 1, False, (), 8)
SHM = Path("/dev/shm")
NOT_OURS = "is not from this run: somebody else writes there"
WRITE = """
import sys, datetime
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=datetime.timedelta(seconds=10))
for key, value in zip(sys.argv[2::2], sys.argv[3::2]): store.set(key, value)
"""


class Attack:
    """What runs a command of another user when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


def client(rendezvous: Rendezvous) -> dist.Store:
    """Of who does not know the secret."""
    return connect_store(rendezvous.address, world_size=-1, timeout_s=30.0)


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    store = open_store("127.0.0.1")
    yield Rendezvous(address=f"tcp://127.0.0.1:{store.port}", rank=1, size=2, timeout_s=5.0, secret=b"the run's")
    # Nobody else keeps the server.
    del store


def share_of(rendezvous: Rendezvous, path: Path) -> ProcessPlan:
    return ProcessPlan(messages=(MESSAGE,), specs={}, needs={}, segments=str(path), rendezvous=rendezvous)


@needs_second_user
def test_what_another_user_writes_into_the_store_is_not_acted_upon(rendezvous: Rendezvous, tmp_path: Path) -> None:
    """A pickle as a handle of device memory, and that the sync was given up."""
    code = tmp_path / "ran"
    attack = base64.b64encode(pickle.dumps(Attack(code))).decode()
    written = ["segment", attack, "7/given up", ""]
    done = as_nobody(WRITE, int(rendezvous.address.rpartition(":")[2]), *written, imports=["torch.distributed"])
    assert done.returncode == 0, done.stderr
    with pytest.raises(WeightSyncError, match=NOT_OURS):
        DeviceSegments(rendezvous.connect(), CPU, 5.0).open(Path("segment"), 8)
    assert not code.exists()
    hasty = replace(rendezvous, timeout_s=0.5)
    SharedMemorySender(share_of(hasty, tmp_path / "segment"), HostMemory())
    receiver = SharedMemoryReceiver(share_of(hasty, tmp_path / "segment"), HostMemory())
    receiver.start(7)
    # Nobody has given up, until one of the run's processes says so.
    with pytest.raises(WeightSyncError, match=r"engine worker 1 was not sent within"):
        receiver.receive(MESSAGE)
    give_up(rendezvous, 7)
    with pytest.raises(WeightSyncError, match="has died"):
        receiver.receive(MESSAGE)


def test_a_message_counts_under_its_own_key_and_with_its_own_secret_only(rendezvous: Rendezvous) -> None:
    store, raw = rendezvous.connect(), client(rendezvous)
    store.set("first", "8")
    assert store.get("first", 1.0) == "8"
    raw.set("second", raw.get("first").decode())
    raw.set("first", raw.get("first").decode()[:-1] + "9")
    for key in ("first", "second"):
        assert not store.is_set(key)
        with pytest.raises(WeightSyncError, match=NOT_OURS):
            store.get(key, 1.0)
    other = replace(rendezvous, secret=b"another run's").connect()
    store.set("third")
    with pytest.raises(WeightSyncError, match=NOT_OURS):
        other.get("third", 1.0)
    assert store.get("third", 1.0) == ""


def test_the_secret_is_not_printed(rendezvous: Rendezvous, tmp_path: Path) -> None:
    assert "the run's" not in repr(share_of(rendezvous, tmp_path))


@pytest.fixture
def segment() -> Iterator[Path]:
    """A path in shared memory, where all users may create files."""
    path = SHM / f"megarl-test-{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


@needs_second_user
def test_another_user_can_neither_read_weights_nor_raise_a_flag(rendezvous: Rendezvous, segment: Path) -> None:
    sender = SharedMemorySender(share_of(rendezvous, segment), HostMemory())
    files = {path.name.removeprefix(segment.name): path for path in SHM.glob(f"{segment.name}-*")}
    assert set(files) == {"-0-1-0", "-flags-0-1"}
    for path in files.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for mode in ("r", "r+"):
            assert "PermissionError" in as_nobody("import sys; open(*sys.argv[1:])", path, mode).stderr
    sender.close()
    assert not list(SHM.glob(f"{segment.name}-*"))


@needs_second_user
def test_flags_that_another_user_puts_there_are_an_error(rendezvous: Rendezvous, segment: Path) -> None:
    path = segment.with_name(f"{segment.name}-flags-0-1")
    plant = "os.fchmod(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), 0o666); os.truncate(sys.argv[1], 128)"
    assert as_nobody(f"import os, sys; {plant}", path).returncode == 0
    receiver = SharedMemoryReceiver(share_of(rendezvous, segment), HostMemory())
    receiver.start(7)
    with pytest.raises(WeightSyncError, match=f"cannot use {path}: it belongs to user {UID}"):
        receiver.receive(MESSAGE)
    path.unlink()


@needs_second_user
@pytest.mark.parametrize("what", ["link", "dangling link", "file"])
def test_what_another_user_puts_where_weights_will_be_is_an_error(what: str, segment: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if what == "link":
        target.write_bytes(b"precious")
    plant = "os.symlink(sys.argv[2], sys.argv[1])"
    if what == "file":
        plant = "os.fchmod(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), 0o666); os.truncate(sys.argv[1], 8)"
    done = as_nobody(f"import os, sys; {plant}", segment, target)
    assert done.returncode == 0, done.stderr
    with pytest.raises(WeightSyncError, match=f"cannot create {segment}: another process has put something there"):
        HostMemory().create(segment, 8)
    refusal = f"use {segment}: it belongs to user {UID}" if what == "file" else f"open {segment}: Too many levels"
    with pytest.raises(WeightSyncError, match=f"cannot {refusal}"):
        HostMemory().open(segment, 8)
    assert target.read_bytes() == b"precious" if what == "link" else not target.exists()


def test_a_segment_of_another_size_is_an_error(segment: Path) -> None:
    HostMemory().create(segment, 8)
    with pytest.raises(WeightSyncError, match=r"has 8 bytes, expected a file of user \d+ with 16 bytes"):
        HostMemory().open(segment, 16)


def test_both_ends_see_the_same_memory(segment: Path) -> None:
    ours, theirs = HostMemory().create(segment, 8), HostMemory().open(segment, 8)
    ours[3] = 77
    assert theirs.tolist() == [0, 0, 0, 77, 0, 0, 0, 0]
    theirs[4] = 5
    assert ours.tolist() == [0, 0, 0, 77, 5, 0, 0, 0]
