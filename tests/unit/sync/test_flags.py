"""Flags between two processes: what they say, that they wake who waits, and that waiting costs no processor."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megarl.sync.transport.flags import FLAG_BYTES, Flag
from megarl.sync.transport.shared_memory import HostMemory


@pytest.fixture
def ends(tmp_path: Path) -> tuple[Flag, Flag]:
    """The flag as either process maps it."""
    ours = HostMemory().create(tmp_path / "flag", FLAG_BYTES)
    return Flag(ours, is_new=True), Flag(HostMemory().open(tmp_path / "flag", FLAG_BYTES), is_new=False)


def test_a_flag_advances_for_one_transfer_and_all_messages_so_far(ends: tuple[Flag, Flag]) -> None:
    """Number 5 after 7, as after a failed sync: what was said in the other one does not count."""
    writer, reader = ends
    assert not reader.wait(7, 1, 0.01)
    writer.advance(7, 2)
    assert [reader.wait(7, count, 0.01) for count in (1, 2, 3)] == [True, True, False]
    assert not reader.wait(5, 1, 0.01)
    writer.advance(5, 1)
    assert [reader.wait(5, count, 0.01) for count in (1, 2)] == [True, False]
    assert not reader.wait(7, 1, 0.01)


def test_many_messages_before_anybody_waits_are_all_seen(ends: tuple[Flag, Flag]) -> None:
    writer, reader = ends
    for count in range(1, 101):
        writer.advance(1, count)
    assert all(reader.wait(1, count, 0.0) for count in range(1, 101))


def test_another_process_wakes_who_waits_and_waiting_takes_no_processor(ends: tuple[Flag, Flag]) -> None:
    """What it wrote before is there; the wait would last a minute."""
    data = torch.zeros(1 << 20, dtype=torch.uint8).share_memory_()

    def wait() -> tuple[bool, float, int]:
        began = time.thread_time()
        woken = ends[1].wait(3, 1, 60.0)
        return woken, time.thread_time() - began, int(data.sum(dtype=torch.int64))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        time.sleep(1.0)
        began = time.monotonic()
        if (child := os.fork()) == 0:
            data.numpy()[:] = 1
            ends[0].advance(3, 1)
            os._exit(0)
        woken, seconds, total = waiting.result(timeout=30)
        assert os.waitpid(child, 0)[1] == 0
    assert woken
    assert total == 1 << 20
    assert seconds < 0.1
    assert time.monotonic() - began < 30
