"""The process group between hosts: what one grouped call holds, on which device, and how a wait in it ends early."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.host.device.groups import abort_group
from megarl.host.store import open_store
from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport.point_to_point import Exchange, Relay
from megarl.sync.transport.rendezvous import Rendezvous, give_up
from megarl.sync.transport.shared_memory import SHARED_MEMORY
from megarl.sync.transport.transports import ProcessPlan

CPU = torch.device("cpu")
BYTES = 8


def message_of(bucket: int, source: int, receiver: int, turn: int | None = None) -> WeightMessage:
    return WeightMessage(bucket, bucket if turn is None else turn, source, receiver, False, (), BYTES)


def share_of(rank: int, messages: list[WeightMessage], port: int, *, size: int = 3, **options: Any) -> ProcessPlan:
    return ProcessPlan(
        messages=tuple(messages),
        specs={},
        needs={},
        rendezvous=Rendezvous(
            address=f"tcp://127.0.0.1:{port}", rank=rank, size=size, timeout_s=300.0, secret=b"the run's"
        ),
        **{"segments": "", **options},
    )


class Group:
    """A group that coalesces, as NCCL's does; notes the calls."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls = list[Any]()

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append(f"group on {device}")

    def _end_coalescing(self, device: torch.device) -> "Group":
        self.calls.append("end")
        return self

    def send(self, buffers: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(f"send to {peer} from {buffers[0].device.type}")

    def recv(self, buffers: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(f"receive from {peer} to {buffers[0].device.type}")

    def wait(self) -> None:
        self.calls.append("wait")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, Group]:
    """The groups that processes join instead of NCCL's, by the device that they name."""
    groups: dict[torch.device, Group] = {}
    monkeypatch.setattr(Rendezvous, "join", lambda rendezvous, device: groups.setdefault(device, Group()))
    return groups


def test_a_bucket_is_one_grouped_call_on_the_workers_device(joined: Mapping[torch.device, Group]) -> None:
    """Of a worker on cuda:1, pretended by torch's meta device, from two ranks, of which one skips the second bucket."""
    store, device = open_store("127.0.0.1"), torch.device("meta", 1)
    first, second = [message_of(0, 0, 2), message_of(0, 1, 2)], [message_of(1, 1, 2)]
    receiver = Exchange(share_of(2, [*first, *second], store.port), device)
    receiver.start(1)
    receiver.expect([*first, *second])
    receiver.expect(second)
    opening = "group on meta:1"
    assert joined[device].calls == [
        opening, "receive from 0 to meta", "receive from 1 to meta", "end",
        opening, "receive from 1 to meta", "end",
    ]  # fmt: skip
    receiver.close()


def test_a_rank_sends_and_passes_on_in_one_group(joined: Mapping[torch.device, Group], tmp_path: Any) -> None:
    """Rank 0 has a message for the worker on rank 1's device, and passes one of rank 1's on to its own worker."""
    store, device = open_store("127.0.0.1"), torch.device("meta", 0)
    passed = message_of(4, 1, 2)
    process_plan = share_of(
        0, [message_of(0, 0, 3), passed], store.port, size=4, beside={2: 0, 3: 1}, segments=str(tmp_path / "s")
    )
    sender = Relay(process_plan, device, SHARED_MEMORY)
    sender.start(1)
    sender.send(message_of(0, 0, 3), [torch.zeros(BYTES, dtype=torch.uint8, device=device)])
    assert joined[device].calls == []
    sender.post(before=5)
    opening = "group on meta:0"
    assert joined[device].calls == [
        opening, "send to 1 from meta", "end",
        opening, "receive from 1 to meta", "end",
    ]  # fmt: skip
    sender.close()


def test_a_buffer_is_filled_again_when_its_last_bucket_has_been_sent(joined: Mapping[torch.device, Group]) -> None:
    """Two buckets are under way, whoever gets them; the third takes the place of the first, not of the second."""
    store, device = open_store("127.0.0.1"), torch.device("meta", 0)
    messages = [message_of(bucket, 0, receiver, 0) for bucket, receiver in ((3, 1), (4, 2), (7, 3), (8, 4))]
    sender = Exchange(share_of(0, messages, store.port, size=5), device)
    sender.start(1)
    for message in messages:
        sender.post(before=message.bucket)
        sender.send(message, [torch.zeros(BYTES, dtype=torch.uint8, device=device)])
    sender.post(before=9)
    group = [f"group on {device}", "send to {} from meta", "end"]
    assert joined[device].calls == [
        call.format(receiver)
        for receiver, waits in ((1, []), (2, ["wait"]), (3, ["wait"]), (4, []))
        for call in (*group, *waits)
    ]
    sender.flush()
    assert joined[device].calls[-2:] == ["wait", "wait"]
    sender.close()


@pytest.mark.parametrize("waits", ["sender", "receiver"])
def test_who_waits_for_a_process_that_has_died_is_woken_at_once(waits: str) -> None:
    """Long before the time-out of 300 s, by gloo as by NCCL. The peer lives, and knows of nothing."""
    store, message = open_store("127.0.0.1"), message_of(0, 0, 1)
    with ThreadPoolExecutor(2) as pool:
        opening = [pool.submit(Exchange, share_of(i, [message], store.port, size=2), None) for i in (0, 1)]
        ends: list[Exchange] = [each.result(timeout=30) for each in opening]
        waiting = ends[0 if waits == "sender" else 1]
        for end in ends:
            end.start(7)
        waiting.stage(message)
        waiting.post_staged()
        wait: Callable[[], None] = waiting.flush
        future = pool.submit(wait)
        with pytest.raises(TimeoutError):
            future.result(timeout=1.0)
        start = time.monotonic()
        give_up(share_of(0, [], store.port).rendezvous, 7)
        with pytest.raises(WeightSyncError, match="a process that took part in this sync has died"):
            future.result(timeout=30.0)
        assert time.monotonic() - start < 10
        for end in ends:
            end.close()


@pytest.mark.parametrize("is_given_up", [True, False])
def test_another_ends_abort_may_come_before_the_own_watch_has_looked(
    monkeypatch: pytest.MonkeyPatch, is_given_up: bool
) -> None:
    """Gloo then says that the connection was closed or reset, which has a reason of its own only if nobody gave up."""
    monkeypatch.setattr("megarl.sync.transport.rendezvous.POLL_S", 60.0)
    store, message = open_store("127.0.0.1"), message_of(0, 0, 1)
    with ThreadPoolExecutor(2) as pool:
        opening = [pool.submit(Exchange, share_of(i, [message], store.port, size=2), None) for i in (0, 1)]
        sender, receiver = (each.result(timeout=30) for each in opening)
    for end in (sender, receiver):
        end.start(7)
    receiver.stage(message)
    receiver.post_staged()
    if is_given_up:
        give_up(share_of(0, [], store.port).rendezvous, 7)
    abort_group(sender._group)
    expected = WeightSyncError if is_given_up else RuntimeError
    with pytest.raises(expected, match="has died" if is_given_up else "(?i)connection (closed|reset)") as error_info:
        receiver.flush()
    assert error_info.type is expected
    for end in (sender, receiver):
        end.close()
