"""The wire over the hosts' network: a TCP connection per pair and transfer, from shards into tensors without a copy.

A sink listens and says in the plan's store where; a source connects when it first has something for it. What a transfer
that failed left on its way goes with its connections.
"""

import contextlib
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.sync.plan.build import Message
from megarl.sync.wire.meetings import POLL_S, check_not_given_up, is_said
from megarl.sync.wire.scatter_gather import Memory, in_place
from megarl.sync.wire.wires import DEPTH, Arrival, Share

# What a source says first: the sink's secret, the transfer and who it is.
_HELLO = struct.Struct("!16sQQ")
# Connections that wait to be taken; the kernel may allow fewer.
_BACKLOG = 4096
# Of tensors that are read into in one call, as it costs more than small tensors do.
_AT_ONCE_BYTES = 8 << 20
# struct timeval.
_TIME = struct.Struct("@ll")


class _Clock:
    """Ends a wait in which nothing moves: when the transfer is given up, or has taken too long."""

    def __init__(self, share: Share) -> None:
        meeting = share.meeting
        self.timeout_s = meeting.timeout_s
        self.store = dist.TCPStore(
            meeting.address, meeting.port, is_master=False, timeout=timedelta(seconds=meeting.timeout_s)
        )
        self.transfer = 0

    def wind(self) -> None:
        """Something moved, or a wait begins."""
        self._last = time.monotonic()

    def check(self, waiting_for: str) -> None:
        check_not_given_up(self.store, self.transfer)
        if time.monotonic() - self._last > self.timeout_s:
            raise WeightSyncError(
                f"{waiting_for} did not answer within {self.timeout_s:.0f} s; see what it says in RUN/logs"
            )


class _Outgoing:
    """A connection to a sink, and the messages that it has not taken."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.waiting = connection, deque[Memory]()

    def write(self) -> None:
        if self.waiting[0].send(self.connection) and self.waiting[0].moved:
            self.waiting.popleft()


class TcpSender:
    """`SendingEnd` that writes to all sinks as each of them takes it; at most `DEPTH` messages of a pair wait."""

    def __init__(self, share: Share) -> None:
        self._rank, self._clock = share.meeting.rank, _Clock(share)
        self._links = dict[int, _Outgoing]()
        # Where sinks listen, and their secrets.
        self._places = dict[int, tuple[str, int, bytes]]()

    def start(self, transfer: int) -> None:
        self.close()
        self._clock.transfer = transfer

    def send(self, message: Message, parts: Iterable[torch.Tensor]) -> None:
        with self._closing_on_error():
            if message.sink not in self._links:
                self._links[message.sink] = _Outgoing(self._connect(message.sink))
            waiting = self._links[message.sink].waiting
            self._write(lambda: len(waiting) < DEPTH)
            waiting.append(Memory([each if in_place(each) else each.cpu().contiguous() for each in parts]))
            self._write(lambda: True)

    def flush(self) -> None:
        with self._closing_on_error():
            self._write(lambda: not any(link.waiting for link in self._links.values()))
        self.close()

    def close(self) -> None:
        """Close the connections: sinks that wait for more than was sent fail."""
        for link in self._links.values():
            link.connection.close()
        self._links.clear()

    def _write(self, enough: Callable[[], bool]) -> None:
        """Write what sinks take at once, and until it is enough."""
        self._clock.wind()
        while True:
            busy = {link.connection.fileno(): (sink, link) for sink, link in self._links.items() if link.waiting}
            poll = select.poll()
            for number in busy:
                poll.register(number, select.POLLOUT)
            done = enough()
            ready = poll.poll(0 if done else POLL_S * 1000)
            for number, _ in ready:
                sink, link = busy[number]
                with _ended_early(f"engine worker {sink}"):
                    link.write()
                self._clock.wind()
            if not ready and done:
                return
            if not ready:
                self._clock.check(f"engine workers {sorted(sink for sink, _ in busy.values())}")

    def _connect(self, sink: int) -> socket.socket:
        if sink not in self._places:
            self._places[sink] = self._find(sink)
        address, port, secret = self._places[sink]
        with _ended_early(f"engine worker {sink} at {address}:{port}"):
            connection = socket.create_connection((address, port), timeout=self._clock.timeout_s)
            connection.sendall(_HELLO.pack(secret, self._clock.transfer, self._rank))
        return connection

    def _find(self, sink: int) -> tuple[str, int, bytes]:
        store, timeout_s = self._clock.store, self._clock.timeout_s
        if not is_said(store, _place(sink), self._clock.transfer, timeout_s):
            raise WeightSyncError(f"engine worker {sink} did not say where it listens within {timeout_s:.0f} s")
        address, port, secret = store.get(_place(sink)).decode().split()
        return address, int(port), bytes.fromhex(secret)

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Others would go on waiting for this process.
            self.close()
            raise


class TcpReceiver:
    """`ReceivingEnd` of `TcpSender`s."""

    def __init__(self, share: Share) -> None:
        self._clock, self._secret = _Clock(share), secrets.token_bytes(16)
        self._links = dict[int, socket.socket]()
        self._listener: socket.socket | None = None
        if share.messages:
            address = _own_address(share.meeting.address, share.meeting.port)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
            self._listener.settimeout(POLL_S)
            port = self._listener.getsockname()[1]
            self._clock.store.set(_place(share.meeting.rank), f"{address} {port} {self._secret.hex()}")

    def start(self, transfer: int) -> None:
        self._disconnect()
        self._clock.transfer = transfer

    def expect(self, messages: Iterable[Message]) -> None:
        """What arrives waits at the socket."""

    def receive(self, message: Message) -> Arrival:
        self._clock.wind()
        while message.source not in self._links:
            self._accept(message.source)
        return _Incoming(self._links[message.source], message.source, self._clock)

    def release(self, message: Message) -> None:
        """The next message follows in the same connection."""

    def close(self) -> None:
        """Close the connections, and listen no more: sources that have something to send fail."""
        self._disconnect()
        if self._listener is not None:
            self._listener.close()

    def _disconnect(self) -> None:
        for connection in self._links.values():
            connection.close()
        self._links.clear()

    def _accept(self, awaited: int) -> None:
        """The next connection; one of another transfer, or of a stranger, is closed."""
        assert self._listener is not None, "a message that is not of this share"
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            self._clock.check(f"trainer rank {awaited}")
            return
        # How long one call waits.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(0, int(POLL_S * 1e6)))
        hello = b""
        with contextlib.suppress(OSError):
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        secret, transfer, source = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0, 0)
        if secrets.compare_digest(secret, self._secret) and transfer == self._clock.transfer:
            self._links[source] = connection
            self._clock.wind()
        else:
            connection.close()


class _Incoming:
    """`Arrival` in a connection."""

    def __init__(self, connection: socket.socket, source: int, clock: _Clock) -> None:
        self._connection, self._source, self._clock = connection, source, clock

    def read(self, targets: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """From the socket to where the tensors lie."""
        group, num_bytes = list[torch.Tensor](), 0
        for target in targets:
            group.append(target)
            num_bytes += target.untyped_storage().nbytes()
            if num_bytes >= _AT_ONCE_BYTES:
                self._fill(group)
                yield from group
                group, num_bytes = [], 0
        self._fill(group)
        yield from group

    def _fill(self, targets: Sequence[torch.Tensor]) -> None:
        hosts = [each if in_place(each) else torch.empty(each.shape, dtype=each.dtype) for each in targets]
        memory = Memory(hosts)
        self._clock.wind()
        with _ended_early(f"trainer rank {self._source}"):
            while not memory.moved:
                if memory.receive(self._connection):
                    self._clock.wind()
                else:
                    self._clock.check(f"trainer rank {self._source}")
        for target, host in zip(targets, hosts, strict=True):
            if host is not target:
                target.copy_(host)


@contextlib.contextmanager
def _ended_early(who: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightSyncError(
            f"the connection to {who} broke in a weight sync: {error.strerror or error}; see what it says in RUN/logs"
        ) from error


def _place(sink: int) -> str:
    return f"sink {sink} listens at"


def _own_address(address: str, port: int) -> str:
    """This host's address in the network in which another one is. Nothing is sent: a datagram socket only binds."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        own: str = probe.getsockname()[0]
        return own
