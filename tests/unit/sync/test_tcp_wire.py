"""The wire between hosts when something goes wrong; ends are threads or take turns."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.sync.plan.build import Message, Run
from megarl.sync.wire.collective import Meeting, open_store
from megarl.sync.wire.meetings import give_up
from megarl.sync.wire.tcp import TcpReceiver, TcpSender
from megarl.sync.wire.wires import Share

# More than the buffers of a connection hold.
LARGE = 64 << 20


@pytest.fixture
def store() -> dist.TCPStore:
    return open_store("127.0.0.1")


def message(source: int, sink: int, turn: int, num_bytes: int) -> Message:
    runs = (Run(("a",), ((0, num_bytes),), num_bytes, 1),)
    return Message(turn, turn, source, sink, local=False, runs=runs, num_bytes=num_bytes)


def share(store: dist.TCPStore, rank: int, messages: Sequence[Message], timeout_s: float = 30.0) -> Share:
    meeting = Meeting(address="127.0.0.1", port=store.port, rank=rank, size=4, timeout_s=timeout_s)
    return Share(messages=tuple(messages), specs={}, needs={}, segments="", meeting=meeting, hosts=tuple("abcd"))


def of(value: int, num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def read(receiver: TcpReceiver, each: Message) -> torch.Tensor:
    (target,) = receiver.receive(each).read([torch.empty(each.num_bytes, dtype=torch.uint8)])
    return target


def test_a_sink_that_takes_nothing_holds_up_no_other(store: dist.TCPStore) -> None:
    first, second = message(0, 2, 0, LARGE), message(0, 3, 0, LARGE)
    slow, fast = TcpReceiver(share(store, 2, [first])), TcpReceiver(share(store, 3, [second]))
    sender = TcpSender(share(store, 0, [first, second]))
    for end in (slow, fast, sender):
        end.start(1)

    def send() -> None:
        sender.send(first, [of(1, LARGE)])
        sender.send(second, [of(2, LARGE)])
        sender.flush()

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        assert torch.equal(read(fast, second), of(2, LARGE))
        assert not sending.done()
        assert torch.equal(read(slow, first), of(1, LARGE))
        sending.result(timeout=30)


def test_two_messages_of_a_pair_may_wait_and_a_third_may_not(store: dist.TCPStore) -> None:
    """As over the other wires: with fewer, processes that wait for each other's lengths would wait in a circle."""
    messages = [message(0, 2, turn, LARGE) for turn in range(3)]
    receiver, sender = TcpReceiver(share(store, 2, messages)), TcpSender(share(store, 0, messages))
    receiver.start(1)
    sender.start(1)
    sender.send(messages[0], [of(0, LARGE)])
    sender.send(messages[1], [of(1, LARGE)])

    def third() -> None:
        sender.send(messages[2], [of(2, LARGE)])
        sender.flush()

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(third)
        with pytest.raises(TimeoutError):
            sending.result(timeout=0.5)
        for turn in range(3):
            assert torch.equal(read(receiver, messages[turn]), of(turn, LARGE))
        sending.result(timeout=30)


def test_a_sink_that_takes_nothing_is_an_error_after_a_time(store: dist.TCPStore) -> None:
    large = message(0, 2, 0, LARGE)
    receiver = TcpReceiver(share(store, 2, [large]))
    sender = TcpSender(share(store, 0, [large], timeout_s=1.0))
    receiver.start(1)
    sender.start(1)
    sender.send(large, [of(1, LARGE)])
    with pytest.raises(WeightSyncError, match=r"engine workers \[2\] did not answer within 1 s"):
        sender.flush()
    # What was under way is lost with the connection, which the sink is told of.
    with pytest.raises(WeightSyncError, match="the connection to trainer rank 0 broke in a weight sync"):
        read(receiver, large)


def test_a_source_that_sends_nothing_is_an_error_after_a_time(store: dist.TCPStore) -> None:
    """One that never connects, then one that stops within a message."""
    small = message(0, 2, 0, 8)
    receiver = TcpReceiver(share(store, 2, [small], timeout_s=1.0))
    receiver.start(1)
    with pytest.raises(WeightSyncError, match="trainer rank 0 did not answer within 1 s"):
        receiver.receive(small)
    sender = TcpSender(share(store, 0, [small]))
    sender.start(2)
    sender.send(small, [of(1, 4)])
    receiver.start(2)
    with pytest.raises(WeightSyncError, match="trainer rank 0 did not answer within 1 s"):
        read(receiver, small)


def test_a_source_that_is_gone_is_an_error_at_once(store: dist.TCPStore) -> None:
    small = message(0, 2, 0, 8)
    receiver, sender = TcpReceiver(share(store, 2, [small])), TcpSender(share(store, 0, [small]))
    receiver.start(1)
    sender.start(1)
    sender.send(small, [of(1, 4)])
    sender.close()
    with pytest.raises(WeightSyncError, match="trainer rank 0 broke in a weight sync: the other end closed"):
        read(receiver, small)


def test_a_sink_that_is_gone_is_an_error_at_once(store: dist.TCPStore) -> None:
    large = message(0, 2, 0, LARGE)
    receiver, sender = TcpReceiver(share(store, 2, [large])), TcpSender(share(store, 0, [large]))
    receiver.start(1)
    sender.start(1)
    sender.send(large, [of(1, LARGE)])
    assert receiver.receive(large)
    receiver.close()
    with pytest.raises(WeightSyncError, match="the connection to engine worker 2 broke in a weight sync"):
        sender.flush()
    with pytest.raises(WeightSyncError, match=r"engine worker 2 at 127\.0\.0\.1:\d+ broke .*refused"):
        sender.send(large, [of(1, LARGE)])


@pytest.mark.parametrize("accepted", [False, True], ids=["not taken", "taken in part"])
def test_what_a_failed_transfer_left_is_not_taken_for_the_next(store: dist.TCPStore, accepted: bool) -> None:
    first, second = message(0, 2, 0, 8), message(0, 2, 1, 8)
    mine = [first, second]
    receiver, sender = TcpReceiver(share(store, 2, mine)), TcpSender(share(store, 0, mine))
    for transfer in (1, 2):
        sender.start(transfer)
        receiver.start(transfer)
        sender.send(first, [of(transfer, 8)])
        sender.send(second, [of(10 * transfer, 8)])
        if transfer == 1 and accepted:
            assert torch.equal(read(receiver, first), of(1, 8))
    assert torch.equal(read(receiver, first), of(2, 8))
    assert torch.equal(read(receiver, second), of(20, 8))


def test_strangers_are_turned_away(store: dist.TCPStore) -> None:
    small = message(0, 2, 0, 8)
    receiver, sender = TcpReceiver(share(store, 2, [small])), TcpSender(share(store, 0, [small]))
    receiver.start(1)
    _, port, _ = store.get("sink 2 listens at").decode().split()
    strangers = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(bytes(16) + (1).to_bytes(8, "big") + (0).to_bytes(8, "big"))
    sender.start(1)
    sender.send(small, [of(7, 8)])
    assert torch.equal(read(receiver, small), of(7, 8))
    for stranger in strangers:
        stranger.close()


def test_who_waits_in_a_transfer_that_is_given_up_fails(store: dist.TCPStore) -> None:
    """A source whose sink takes nothing, a sink whose source has not connected, and one whose source stopped."""
    large = message(0, 2, 0, LARGE)
    receiver, sender = TcpReceiver(share(store, 2, [large])), TcpSender(share(store, 0, [large]))

    def half() -> None:
        sender.start(3)
        sender.send(large, [of(1, 8)])

    def send() -> None:
        sender.start(1)
        sender.send(large, [of(1, LARGE)])
        sender.flush()

    with ThreadPoolExecutor(1) as pool:
        for transfer, before, call in (
            (1, lambda: None, send),
            (2, lambda: receiver.start(2), lambda: receiver.receive(large)),
            (3, lambda: [receiver.start(3), half()], lambda: read(receiver, large)),
        ):
            before()
            waiting = pool.submit(call)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.7)
            give_up("127.0.0.1", store.port, transfer)
            with pytest.raises(WeightSyncError, match="a process that took part in this sync has died"):
                waiting.result(timeout=10)
