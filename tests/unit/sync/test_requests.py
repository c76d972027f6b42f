"""What a weight sync asks the key-value store: nothing per message."""

import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from megarl.sync.transport import rendezvous
from megarl.sync.transport.flags import Flag
from megarl.sync.transport.rendezvous import Rendezvous
from tests.unit.sync.test_ends import NUM_RANKS, make_plan, make_slices, open_ends, run


class CountingStore(dist.TCPStore):
    """Counts the requests of all clients, by kind."""

    requests: ClassVar[Counter[str]] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "check", "wait", "delete_key"):
            CountingStore.requests[name] += 1
        return super().__getattribute__(name)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Processes look whether a sync was given up only after a minute of waiting."""

    def client(rendezvous: Rendezvous) -> CountingStore:
        port = int(rendezvous.address.rpartition(":")[2])
        return CountingStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))

    monkeypatch.setattr(Rendezvous, "_client", client)
    monkeypatch.setattr(rendezvous, "POLL_S", 60.0)
    CountingStore.requests.clear()
    return CountingStore.requests


@pytest.mark.parametrize(("transport", "delta"), [("one host", True), ("two hosts", False)])
def test_messages_take_no_requests(transport: str, delta: bool, counted: Counter[str], tmp_path: Path) -> None:
    """However many there are; two of each transport at least."""
    ranks = make_slices()
    plan = make_plan(ranks, 200)
    senders, receivers = open_ends(plan, transport, tmp_path, delta=delta)
    assert len(plan.messages) > 2 * NUM_RANKS
    counted.clear()
    for transfer in (1, 2):
        run(senders, receivers, ranks, transfer)
    assert counted == {}


def test_processes_ask_nothing_between_two_syncs(
    counted: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While they send and receive, those between hosts look each 0.02 s whether the sync was given up."""
    monkeypatch.setattr(rendezvous, "POLL_S", 0.02)
    ranks = make_slices()
    senders, receivers = open_ends(make_plan(ranks, 200), "two hosts", tmp_path)
    run(senders, receivers, ranks, 1)
    # A look may be under way.
    time.sleep(0.2)
    counted.clear()
    time.sleep(0.5)
    assert counted == {}
    for end in (*senders, *receivers):
        end._transport.start(2)
    time.sleep(0.5)
    assert counted["check"] > 0
    run(senders, receivers, ranks, 3)


def test_what_is_passed_on_has_a_signal_per_bucket(
    counted: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sent and taken: once for each message that stays on its device, and for all others of a bucket to a worker.

    These go between devices, also those within a host, where the planner finds that no slower.
    """
    advanced = list[int]()
    advance = Flag.advance
    monkeypatch.setattr(Flag, "advance", lambda flag, *numbers: (advanced.append(1), advance(flag, *numbers)))
    ranks = make_slices()
    plan = make_plan(ranks, 300)
    senders, receivers = open_ends(plan, "passed on", tmp_path)
    passed_on = [message for message in plan.messages if not message.local]
    bundles = {(message.receiver, message.bucket) for message in passed_on}
    assert 0 < len(bundles) < len(passed_on) < len(plan.messages)
    counted.clear()
    run(senders, receivers, ranks, 1)
    assert len(advanced) == 2 * (len(plan.messages) - len(passed_on) + len(bundles))
    assert counted == {}
