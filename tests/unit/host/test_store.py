"""Stores by which processes find each other: where they listen, and what other users can do with them."""

import os
import stat
from pathlib import Path

import psutil
import pytest

from megarl.host.listeners import LOOPBACK
from megarl.host.store import connect_store, offer_store, open_store
from megarl.parallel.worker import RankWorker
from tests.helpers.second_user import as_nobody, needs_second_user


def listeners(port: int) -> list[str]:
    """The addresses at which this process listens on a port."""
    connections = psutil.Process().net_connections("tcp")
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_store_listens_on_its_address_alone(address: str) -> None:
    store = open_store(address)
    assert listeners(store.port) == [address]
    other = connect_store(f"tcp://{address}:{store.port}", world_size=2, timeout_s=10.0)
    store.set("key", "value")
    assert other.get("key") == b"value"


def test_ranks_of_several_hosts_meet_at_the_address_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_HOST_ADDRESS", "127.0.0.2")
    worker = RankWorker(0)
    scheme, _, place = worker.offer_rendezvous().partition("://")
    address, _, port = place.partition(":")
    assert scheme == "tcp"
    assert listeners(int(port)) == [address] == ["127.0.0.2"]


@pytest.mark.parametrize("given", [None, LOOPBACK])
def test_ranks_of_one_host_meet_in_a_file_and_nothing_listens(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("MEGARL_HOST_ADDRESS", raising=False)
    if given is not None:
        monkeypatch.setenv("MEGARL_HOST_ADDRESS", given)
    address = RankWorker(0).offer_rendezvous()
    (file,) = tmp_path.iterdir()
    assert address == f"file://{file}"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    stores = [connect_store(address, world_size=2, timeout_s=10.0) for _ in range(2)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    del stores
    assert not file.exists()


@needs_second_user
def test_another_user_can_neither_read_nor_write_the_file_in_which_ranks_meet() -> None:
    path = Path(offer_store("127.0.0.1")[1].removeprefix("file://"))
    try:
        program = "import os, sys\nfor flags in (os.O_RDONLY, os.O_WRONLY): os.open(sys.argv[1], flags)"
        assert "PermissionError" in as_nobody(program, path).stderr
        path.write_bytes(b"")
        assert path.stat().st_uid == os.geteuid()
    finally:
        path.unlink()
