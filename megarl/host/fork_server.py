"""Start Python processes by forking one that has imported their libraries, so that a host imports them once.

A server is a process that imports modules and then calls `serve_forks`; `fork_client` asks it for processes. It uses no
library that it imports, has one thread, and never touches a device, so that its children are like freshly started
interpreters. It ends when its standard input closes and no child is left; if it is killed, its children are, too.
Children of `multiprocessing`'s fork server have neither a script nor a directory and an environment of their own.
"""

import contextlib
import ctypes
import gc
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megarl.host import fork_client
from megarl.host.child_environment import python_module

_NUM_LENGTH_BYTES, _NUM_STATUS_BYTES = 8, 4
# A client that does not tell what it wants within this time is dropped.
_CLIENT_S = 10.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A request for a process: its working directory, arguments (the first is the script) and environment."""

    directory: str
    argv: Sequence[str]
    environment: Mapping[str, str]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Decode what `fork_client.request_of` has encoded."""
        directory, count, *fields = [field.decode(errors="surrogateescape") for field in data.split(b"\0")]
        variables = (field.partition("=") for field in fields[int(count) :])
        return cls(
            directory=directory, argv=fields[: int(count)], environment={name: value for name, _, value in variables}
        )


class ForkServers:
    """The handle of servers that fork processes of several kinds, until this process closes them or dies."""

    def __init__(self, directory: Path, module: str, kinds: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the servers, and return at once: each answers requests when it has imported its modules.

        directory: a private one of this user, for the sockets. module: is run with an argument `KIND=DESCRIPTOR` for
        each kind, and calls `serve_forks` with each descriptor in a process of its own.
        """
        self._addresses = {kind: directory / f"fork-{kind}" for kind in kinds}
        self._is_offered = False
        with contextlib.ExitStack() as stack:
            listeners = {kind: stack.enter_context(socket.socket(socket.AF_UNIX)) for kind in kinds}
            for kind, listener in listeners.items():
                listener.bind(str(self._addresses[kind]))
                # Requests queue up while the server imports.
                listener.listen(128)
            numbers = {kind: listener.fileno() for kind, listener in listeners.items()}
            self._process = subprocess.Popen(
                [*python_module(module), *(f"{kind}={number}" for kind, number in numbers.items())],
                pass_fds=list(numbers.values()),
                stdin=subprocess.PIPE,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def runtime_envs(self) -> dict[str, dict[str, object]]:
        """Return the runtime environment, by kind, of Ray actors whose processes are forked."""
        self._is_offered = True
        python = f"{sys.executable} -I -S {fork_client.__file__}"
        return {
            kind: {"py_executable": python, "env_vars": {fork_client.VARIABLE: str(address)}}
            for kind, address in self._addresses.items()
        }

    def close(self) -> None:
        """Let the servers end after their last children, or at once if nobody can have asked for any.

        Requests that come now are answered by new interpreters.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not self._is_offered and self._process.poll() is None:
            # They are still busy with imports, after which an error would otherwise wait.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for address in self._addresses.values():
            address.unlink(missing_ok=True)


class _ForkServer:
    """The server's side: its listening socket, and the client that waits for each child."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._clients = listener, dict[int, socket.socket]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        # A child's end writes a byte, which wakes the selector.
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def serve(self) -> ForkRequest | None:
        """Answer requests. Return None in the server at its end; in a forked child, at once, what it shall run."""
        owned = True
        while owned or self._clients:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    client, _ = self._listener.accept()
                    if (request := self._fork(client)) is not None:
                        return request
                elif key.fd == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                elif key.data is not None:
                    self._relay(key.data)
                else:
                    owned = bool(os.read(key.fd, 1))
                    if not owned:
                        self._selector.unregister(key.fd)
        return None

    def _fork(self, client: socket.socket) -> ForkRequest | None:
        """Fork a child for a client, and return its request in that child."""
        client.settimeout(_CLIENT_S)
        try:
            header, descriptors, _, _ = socket.recv_fds(client, _NUM_LENGTH_BYTES, 3)
            data = bytearray()
            while len(data) < int.from_bytes(header, "little"):
                if not (part := client.recv(1 << 16)):
                    raise ConnectionError("the client has gone")
                data += part
        except OSError:
            client.close()
            return None
        client.settimeout(None)
        if (child := os.fork()) == 0:
            self._selector.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._listener, client, *self._clients.values()):
                end.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.closerange(3, max(*descriptors, self._woken, self._wake) + 1)
            return ForkRequest.parse(bytes(data))
        for descriptor in descriptors:
            os.close(descriptor)
        self._clients[child] = client
        self._selector.register(client, selectors.EVENT_READ, child)
        return None

    def _relay(self, child: int) -> None:
        """Pass on the signals that a client has got; a client that has been killed takes its child along."""
        client = self._clients[child]
        for signum in client.recv(64) or [signal.SIGKILL]:
            if signum == signal.SIGKILL:
                self._selector.unregister(client)
            # It cannot be another process: the child's number is free only once it is reaped here.
            os.kill(child, signum)

    def _reap(self) -> None:
        """Tell the clients of children that have ended how they ended."""
        while self._clients:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            if (client := self._clients.pop(child, None)) is None:
                continue
            with contextlib.suppress(KeyError):
                self._selector.unregister(client)
            with client, contextlib.suppress(OSError):
                client.sendall(os.waitstatus_to_exitcode(status).to_bytes(_NUM_STATUS_BYTES, "little", signed=True))


def serve_forks(listener: int) -> None:
    """Answer requests on a listening descriptor until the server's end; in each forked child, run its script."""
    server = os.getpid()
    # Collections in a child would copy the pages that it shares with the others.
    gc.collect()
    gc.freeze()
    if (request := _ForkServer(socket.socket(fileno=listener)).serve()) is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return
    # Ray ends the whole process group of a worker that dies.
    os.setpgid(0, 0)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv[:] = request.argv
    runpy.run_path(request.argv[0], run_name="__main__")
