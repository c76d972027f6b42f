"""Connect each pair of ranks in a group by sockets that no other user can be at the other end of.

On one host they are Unix sockets in a directory that only this user can enter. Between hosts both ends of a TCP
connection prove that they know the run's secret, before anything else is read. Who proves nothing is turned away, and
the ranks go on waiting for each other; `multiprocessing.connection` would wait for the proof of one that sends nothing.
"""

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import tempfile
from typing import TYPE_CHECKING

from megarl.errors import WorkerError
from megarl.host.clock import MOST_S, awake_s
from megarl.host.listeners import LOOPBACK
from megarl.host.stage import note_foreign

if TYPE_CHECKING:
    import torch.distributed as dist

# The variable by which the processes of one run know each other.
SECRET_VARIABLE = "MEGARL_GROUP_SECRET"
# Who connects sends its rank, a nonce and a proof, and gets a proof back.
_RANK_BYTES, _NONCE_BYTES, _PROOF_BYTES = 4, 16, 32
_HELLO_BYTES = _RANK_BYTES + _NONCE_BYTES + _PROOF_BYTES
# How many connections may wait to be proven; beyond it, those that have waited longest are turned away.
_MOST_WAITING = 256


def connect_peers(store: "dist.Store", rank: int, size: int, timeout_s: float) -> dict[int, socket.socket]:
    """Return a socket to each other rank of a group, by rank. All ranks must call this together, with a store that has
    none of their keys.

    Raises WorkerError if this rank has not reached all others after `timeout_s`.
    """
    # It imports torch, which the driver does not need for a secret.
    from megarl.host.store import read_value

    deadline, peers, answers = awake_s() + timeout_s, dict[int, socket.socket](), dict[int, bytes]()
    with contextlib.ExitStack() as stack:
        door = _Door(stack, rank, size)
        store.set(str(rank), door.place)
        try:
            for other in range(rank):
                if (found := read_value(store, str(other), deadline - awake_s())) is None:
                    raise TimeoutError(f"rank {other} has not come")
                peers[other] = _connect(place := found.decode(), deadline)
                head = rank.to_bytes(_RANK_BYTES, "big") + secrets.token_bytes(_NONCE_BYTES)
                peers[other].sendall(head + _proof("asks", place, other, head))
                answers[other] = _proof("answers", place, other, head)
            peers |= door.accept(deadline)
            for other, answer in answers.items():
                if not hmac.compare_digest(_answer_of(peers[other], deadline), answer):
                    raise PermissionError(f"what answers in the place of rank {other} is not of this run")
        except OSError as error:
            for peer in peers.values():
                peer.close()
            raise WorkerError(
                f"rank {rank} of {size} did not reach every other rank within {timeout_s:g} s ({error}); look for the "
                f"first failure in the other ranks' logs"
            ) from error
    return peers


def _connect(place: str, deadline: float) -> socket.socket:
    address, *port = place.split()[:2]
    peer = socket.socket(socket.AF_INET if port else socket.AF_UNIX)
    peer.settimeout(max(0.01, deadline - awake_s()))
    peer.connect((address, int(port[0])) if port else place)
    return peer


def _answer_of(peer: socket.socket, deadline: float) -> bytes:
    """Wait for a proof; the socket's own time limit counts the time for which this process is stopped."""
    while (left_s := deadline - awake_s()) > 0:
        peer.settimeout(min(MOST_S, left_s))
        with contextlib.suppress(TimeoutError):
            return peer.recv(_PROOF_BYTES)
    raise TimeoutError("it does not answer")


def _proof(what: str, place: str, rank: int, head: bytes) -> bytes:
    """Return what only a process of this run can know: that it asks for, or answers as, the rank at a place."""
    secret = os.environ.get(SECRET_VARIABLE, "").encode()
    return hmac.digest(secret, f"{what}\0{place}\0{rank}\0".encode() + head, "sha256")


class _Door:
    """Where a rank listens for those above it. `place` is where they find it."""

    def __init__(self, stack: contextlib.ExitStack, rank: int, size: int) -> None:
        self._rank, self._size, self._num_strangers = rank, size, 0
        # The bytes so far of callers that have not proven anything yet.
        self._hellos = dict[socket.socket, bytes]()
        self._peers = dict[int, socket.socket]()
        if (address := os.environ.get("MEGARL_HOST_ADDRESS", LOOPBACK)) == LOOPBACK:
            # Nobody else can enter this directory.
            self.place = stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-")) + "/s"
            self._socket = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._socket.bind(self.place)
        else:
            self._socket = stack.enter_context(socket.create_server((address, 0)))
            self.place = f"{address} {self._socket.getsockname()[1]} {secrets.token_hex(_NONCE_BYTES)}"
        self._socket.listen(socket.SOMAXCONN)
        self._socket.setblocking(False)
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._selector.register(self._socket, selectors.EVENT_READ)

    def accept(self, deadline: float) -> dict[int, socket.socket]:
        """Accept the ranks above this one, and nobody else, in whatever order and company they come."""
        while left := self._size - 1 - self._rank - len(self._peers):
            left_s = deadline - awake_s()
            ready = {key.fileobj for key, _ in self._selector.select(min(MOST_S, max(0.0, left_s)))}
            if not ready and left_s <= 0:
                raise TimeoutError(f"{left} of the ranks above it have not come")
            for caller in self._hellos.keys() & ready:
                self._hear(caller)
            if self._socket in ready:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    caller, _ = self._socket.accept()
                    self._hellos[caller] = b""
                    self._selector.register(caller, selectors.EVENT_READ)
            for caller in list(self._hellos)[:-_MOST_WAITING]:
                self._turn_away(caller)
        for caller in list(self._hellos):
            self._turn_away(caller)
        if self._num_strangers:
            note_foreign("gloo", self._num_strangers)
        return self._peers

    def _hear(self, caller: socket.socket) -> None:
        """Read what a caller has sent; it is a rank, a stranger, or has more to say."""
        hello = self._hellos[caller]
        with contextlib.suppress(ConnectionError):
            hello += caller.recv(_HELLO_BYTES - len(hello))
        if len(self._hellos[caller]) < len(hello) < _HELLO_BYTES:
            self._hellos[caller] = hello
            return
        head, proof = hello[:-_PROOF_BYTES], hello[-_PROOF_BYTES:]
        rank = int.from_bytes(head[:_RANK_BYTES], "big")
        expected = self._rank < rank < self._size and rank not in self._peers
        if not (expected and hmac.compare_digest(proof, _proof("asks", self.place, self._rank, head))):
            self._turn_away(caller)
            return
        caller.sendall(_proof("answers", self.place, self._rank, head))
        self._forget(caller)
        self._peers[rank] = caller

    def _turn_away(self, stranger: socket.socket) -> None:
        self._num_strangers += 1
        self._forget(stranger)
        stranger.close()

    def _forget(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        del self._hellos[caller]
