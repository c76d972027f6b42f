"""Ranks that wait for each other while they are stopped for longer than their time limit."""

import signal
import subprocess
import sys
import time

import pytest

from megarl.host.listeners import LOOPBACK
from megarl.host.peers import SECRET_VARIABLE, connect_peers
from megarl.host.store import open_store, read_value

LIMIT_S, STOP_S = 1.0, 1.5
RANK = f"""
import sys
from megarl.host import clock
clock.TICK_S, clock.MOST_S = 0.05, 0.2
from megarl.host.peers import connect_peers
from megarl.host.store import connect_store
store, rank = connect_store(sys.argv[1], world_size=-1, timeout_s={LIMIT_S}), int(sys.argv[2])
store.set("ready", "yes")
(peer,) = connect_peers(store, rank, 2, {LIMIT_S}).values()
peer.sendall(b"there")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_time_of_a_stop_does_not_count(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for a connection, rank 1 for a place in the store."""
    monkeypatch.setenv(SECRET_VARIABLE, "the run's")
    monkeypatch.delenv("MEGARL_HOST_ADDRESS", raising=False)
    store = open_store(LOOPBACK)
    address = f"tcp://{LOOPBACK}:{store.port}"
    with subprocess.Popen([sys.executable, "-c", RANK, address, str(rank)]) as stopped:
        assert read_value(store, "ready", 60.0) == b"yes"
        stopped.send_signal(signal.SIGSTOP)
        # The machine's clock is the point: there is nothing to wait for.
        time.sleep(STOP_S)
        stopped.send_signal(signal.SIGCONT)
        (peer,) = connect_peers(store, 1 - rank, 2, 10.0).values()
        peer.settimeout(10.0)
        assert peer.recv(5) == b"there"
        peer.close()
    assert stopped.returncode == 0
