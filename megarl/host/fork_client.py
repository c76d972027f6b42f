"""Let a fork server start a Python script, in place of this interpreter: `python -I -S fork_client.py SCRIPT ARG…`.

Ray starts this as its workers' Python. It imports next to nothing, hands its own descriptors, environment and arguments
to the server that listens at MEGARL_FORK_SERVER, and lives exactly as long as the process that the server forks: who
ends one of them ends the other. Without a server, the script runs here, slower but alike.
"""

import os
import signal
import socket
import sys

VARIABLE = "MEGARL_FORK_SERVER"


def request_of(argv: "list[str]") -> bytes:
    """Encode a request: the directory, the number of arguments, the arguments, and the environment."""
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    fields = [os.getcwd(), str(len(argv)), *argv, *environment]
    return b"\0".join(field.encode(errors="surrogateescape") for field in fields)


def main(argv: "list[str]") -> None:
    """Wait for the forked process, and end as it has ended."""
    try:
        server = socket.socket(socket.AF_UNIX)
        server.connect(os.environ[VARIABLE])
    except (KeyError, OSError):
        os.execv(sys.executable, [sys.executable, *argv])
    request = request_of(argv)
    socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
    server.sendall(request)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda signum, _: server.sendall(bytes([signum])))
    status = server.recv(4)
    while 0 < len(status) < 4:
        status += server.recv(4 - len(status))
    code = int.from_bytes(status, "little", signed=True) if status else -signal.SIGKILL
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1:])
