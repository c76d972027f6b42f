"""Tensors of any strides go from memory to memory through a socket."""

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megarl.sync.wire.scatter_gather import Memory, in_place


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def send_all(memory: Memory, connection: socket.socket) -> int:
    """How many calls did something."""
    return sum(memory.send(connection) for _ in iter(lambda: memory.moved, True))


def move(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pair: Sequence[socket.socket]) -> int:
    sender, receiver = Memory(sources), Memory(targets)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_all, sender, pair[0])
        while not receiver.moved:
            receiver.receive(pair[1])
        return sent.result(timeout=60)


FULL = numbered(6, 8, 10)
VIEWS = {
    "whole": FULL,
    "rows": FULL[2:5],
    "columns": FULL[:, :, 3:7],
    "every other row": FULL[::2],
    "a box": FULL[1:4, 2:6, 5:],
    "one of an axis": FULL[:, 3:4],
    "transposed": FULL.transpose(0, 2),
    "a number": FULL[1, 2, 3],
    "nothing": FULL[3:3],
}


@pytest.mark.parametrize("target", VIEWS)
@pytest.mark.parametrize("source", VIEWS)
def test_elements_arrive_in_row_major_order(
    source: str, target: str, pair: tuple[socket.socket, socket.socket]
) -> None:
    """From any strides to any; both ends hold a second tensor, so that what follows the first is seen too."""
    into = torch.full_like(FULL, -1.0)
    box = into.as_strided(VIEWS[target].shape, VIEWS[target].stride(), VIEWS[target].storage_offset())
    size = max(VIEWS[source].numel(), box.numel()) + 5
    following, rest = numbered(size - VIEWS[source].numel()), torch.empty(size - box.numel())
    move([VIEWS[source], following], [box, rest], pair)
    assert torch.equal(torch.cat([box.reshape(-1), rest]), torch.cat([VIEWS[source].reshape(-1), following]))
    assert int((into == -1.0).sum()) == into.numel() - box.numel()


def test_more_than_a_socket_holds_and_a_call_takes(pair: tuple[socket.socket, socket.socket]) -> None:
    """16 MiB in 4,096 pieces of 4 KiB: a call moves at most 1,024, and the socket holds less than that."""
    source, target = numbered(4096, 2048), torch.zeros(4096, 4096)
    assert move([source[:, :1024]], [target[:, 2048:3072]], pair) > 4
    assert torch.equal(target[:, 2048:3072], source[:, :1024])
    assert not target[:, :2048].any()
    assert not target[:, 3072:].any()


def test_nothing_is_moved_at_once() -> None:
    assert Memory([]).moved
    assert Memory([torch.empty(0, 3)]).moved


def test_an_end_that_is_closed_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"half")
    pair[0].close()
    memory = Memory([torch.empty(8, dtype=torch.uint8)])
    assert memory.receive(pair[1])
    assert not memory.moved
    with pytest.raises(ConnectionResetError, match="the other end closed the connection"):
        memory.receive(pair[1])
    with pytest.raises(BrokenPipeError):
        Memory([torch.empty(8, dtype=torch.uint8)]).send(pair[1])


def test_what_is_in_crumbs_is_copied_first() -> None:
    full = torch.empty(256, 512)
    assert in_place(full)
    assert in_place(full[:, 128:256])
    assert in_place(full[3, 5])
    assert in_place(full[:, 128:160])
    assert not in_place(full[:, 128:159])
    assert not in_place(full.t())
    assert not in_place(torch.empty(256, 512, device="meta"))
