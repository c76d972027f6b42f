"""Ranks that connect to each other, among strangers who would like to be one of them."""

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megarl.errors import WorkerError
from megarl.host import peers
from megarl.host.peers import SECRET_VARIABLE, connect_peers
from tests.helpers.second_user import as_nobody, needs_second_user

ADDRESS = "127.0.0.2"
# How long ranks that cannot meet wait for each other.
SHORT_S = 0.3
Rank = Future[dict[int, socket.socket]]
Begin = Callable[..., Rank]


@pytest.fixture(params=["one host", "several hosts"])
def hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SECRET_VARIABLE, "the run's")
    monkeypatch.delenv("MEGARL_HOST_ADDRESS", raising=False)
    if request.param == "several hosts":
        monkeypatch.setenv("MEGARL_HOST_ADDRESS", ADDRESS)
    return str(request.param)


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Begins to connect a rank, in a thread of its own."""
    with ThreadPoolExecutor() as threads:
        yield lambda *arguments: threads.submit(connect_peers, *arguments)


def check(ranks: list[Rank]) -> None:
    """Check that every two ranks have the two ends of one socket, with nothing in it; close them."""
    found = [rank.result() for rank in ranks]
    for rank, others in enumerate(found):
        assert sorted(others) == [other for other in range(len(found)) if other != rank]
        for other, peer in others.items():
            peer.sendall(bytes([rank, other]))
    for rank, others in enumerate(found):
        for other, peer in others.items():
            assert peer.recv(9) == bytes([other, rank])
    for others in found:
        for peer in others.values():
            peer.close()


def place_of(store: dist.Store) -> tuple[str, int]:
    address, port, _ = store.get("0").decode().split()
    return address, int(port)


@pytest.mark.parametrize("size", [2, 4])
def test_every_two_ranks_are_connected(hosts: str, size: int, begin: Begin) -> None:
    store = dist.HashStore()
    check([begin(store, rank, size, 5.0) for rank in range(size)])


STRANGERS = {
    "says nothing": lambda caller: None,
    "leaves": lambda caller: caller.close(),
    "is slow": lambda caller: caller.sendall(bytes(3)),
    "says something else": lambda caller: caller.sendall(b"GET / HTTP/1.1\r\nHost: somebody else\r\n\r\n" + bytes(40)),
    "is gloo": lambda caller: caller.sendall(bytes(8)),
    "says that it is a rank": lambda caller: caller.sendall(bytes([0, 0, 0, 1]) + secrets.token_bytes(48)),
    "says that it is the rank itself": lambda caller: caller.sendall(bytes(52)),
}


@pytest.mark.parametrize("hosts", ["several hosts"], indirect=True)
@pytest.mark.parametrize("number", [1, pytest.param(600, id="flood")])
@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_turned_away_and_counted(
    hosts: str,
    kind: str,
    number: int,
    begin: Begin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, counted = dist.HashStore(), list[object]()
    monkeypatch.setattr(peers, "note_foreign", lambda *told: counted.append(told))
    with contextlib.ExitStack() as stack:
        ranks = [begin(store, 0, 2, 5.0)]
        for _ in range(number):
            STRANGERS[kind](stack.enter_context(socket.create_connection(place_of(store))))
        check([*ranks, begin(store, 1, 2, 5.0)])
    assert counted == [("gloo", number)]


@pytest.mark.parametrize("hosts", ["several hosts"], indirect=True)
def test_without_the_secret_nobody_is_a_rank(
    hosts: str,
    begin: Begin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank of another run calls, which knows the place; then one that was called by what said this in an earlier."""
    store, heard = dist.HashStore(), dist.HashStore()
    with socket.create_server((ADDRESS, 0)) as thief:
        # Rank 1 calls the thief, in whose store it is, and so tells how it would prove to be one to rank 0.
        heard.set("0", f"{ADDRESS} {thief.getsockname()[1]} 00")
        called = begin(heard, 1, 2, 5.0)
        with thief.accept()[0] as caller:
            hello = caller.recv(52)
            ranks = [begin(store, 0, 2, 5.0)]
            with socket.create_connection(place_of(store)) as replay:
                replay.sendall(hello)
                assert replay.recv(32) == b""
            # It takes no answer but the right one.
            caller.sendall(bytes(32))
            with pytest.raises(WorkerError, match="what answers in the place of rank 0 is not of this run"):
                called.result()
    check([*ranks, begin(store, 1, 2, 5.0)])


def test_a_rank_that_does_not_come_is_an_error(hosts: str) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 of 3 did not reach .* within 0.3 s \(2 of the ranks above"):
        connect_peers(dist.HashStore(), 0, 3, SHORT_S)


@needs_second_user
@pytest.mark.parametrize("hosts", ["one host"], indirect=True)
def test_on_one_host_another_user_does_not_even_reach_the_socket(hosts: str, begin: Begin) -> None:
    store = dist.HashStore()
    ranks = [begin(store, 0, 2, 60.0)]
    program = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    assert "PermissionError" in as_nobody(program, store.get("0").decode(), imports=["socket"]).stderr
    check([*ranks, begin(store, 1, 2, 5.0)])
