"""Shared memory that devices copy to and from directly: both ends page-lock it, and say once if they cannot."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.host.store import open_store
from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport import shared_memory
from megarl.sync.transport.rendezvous import Rendezvous
from megarl.sync.transport.shared_memory import SHARED_MEMORY
from megarl.sync.transport.transports import ProcessPlan


class Device:
    """A platform that notes what it is asked for; `refuses`: why it does not page-lock."""

    def __init__(self, refuses: str | None) -> None:
        self.refuses, self.calls = refuses, list[Any]()

    def page_lock(self, buffer: torch.Tensor) -> str | None:
        self.calls.append(("lock", buffer.nbytes))
        return self.refuses

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.calls.append("copying")
        yield
        self.calls.append("copied")

    def synchronize(self) -> None:
        self.calls.append("synchronized")


def send_two(path: Path, device: Device) -> None:
    """Two messages from rank 0 to worker 1, whose segments have 8 and 16 bytes."""
    store = open_store("127.0.0.1")
    messages = tuple(WeightMessage(turn, turn, 0, 1, False, (), 8 * (turn + 1)) for turn in (0, 1))
    rendezvous = Rendezvous(
        address=f"tcp://127.0.0.1:{store.port}", rank=0, size=2, timeout_s=30.0, secret=b"the run's"
    )
    process_plan = ProcessPlan(
        messages=messages, specs={}, needs={}, segments=str(path / "segment"), rendezvous=rendezvous
    )
    cpu = torch.device("cpu")
    sender, receiver = SHARED_MEMORY.sender(process_plan, cpu), SHARED_MEMORY.receiver(process_plan, cpu)
    sender.start(1)
    receiver.start(1)
    for message in messages:
        sent = torch.arange(message.num_bytes, dtype=torch.uint8)
        sender.send(message, [sent])
        arrival = receiver.receive(message)
        assert arrival.stays
        assert torch.equal(arrival.data, sent)
        receiver.release(message)
    sender.flush()
    sender.close()


def test_segments_are_page_locked_on_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have finished before a message is said to be sent, and before it is said to be taken."""
    device = Device(None)
    monkeypatch.setattr(shared_memory, "platform", lambda: device)
    send_two(tmp_path, device)
    assert sorted(call for call in device.calls if isinstance(call, tuple)) == [("lock", 8)] * 2 + [("lock", 16)] * 2
    moves = [call for call in device.calls if isinstance(call, str)]
    assert moves == ["copying", "copied", "synchronized", "synchronized"] * 2


def test_a_failure_is_told_once_with_its_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Device("operation not permitted (800)")
    monkeypatch.setattr(shared_memory, "platform", lambda: device)
    send_two(tmp_path, device)
    said = capsys.readouterr()
    assert (said.out + said.err).count("warning: weight sync cannot page-lock shared memory: operation not") == 1
    assert "reach about 9 instead of 55 GB/s" in said.out + said.err
