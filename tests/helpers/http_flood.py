"""Connections that a server is to hold for nothing: idle ones, and bodies that never end, from another process."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

NUM_IDLE, NUM_SLOW = 500, 40
# What arrives of each body: a little more than 4 MiB of 8.
_PROGRAM = """
import resource, socket, sys, threading
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
address, path, num_idle, num_slow = (sys.argv[1], int(sys.argv[2])), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
held = [socket.create_connection(address) for _ in range(num_idle + num_slow)]

def begin(connection):
    connection.settimeout(20)
    try:
        head = f"POST {path} HTTP/1.1\\r\\nhost: a\\r\\ncontent-length: {8 << 20}\\r\\n\\r\\n".encode()
        connection.sendall(head + b" " * (17 << 18))
    except OSError:
        pass

threads = [threading.Thread(target=begin, args=(connection,)) for connection in held[num_idle:]]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def flood(url: str) -> Iterator[None]:
    """Hold `NUM_IDLE` idle connections to the server of a URL, and `NUM_SLOW` requests to it that do not end."""
    parts = urlsplit(url)
    command = [sys.executable, "-c", _PROGRAM, parts.hostname, parts.port, parts.path, NUM_IDLE, NUM_SLOW]
    with subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        try:
            assert attacker.stdout.readline() == "held\n"
            yield
        finally:
            attacker.stdin.close()
