"""Hold a TCP port for this user.

A port is free before its server listens and once it has died. Another user's program could then take it, and would be
sent what the server is sent: keys, and what the policy writes. It could also answer.
"""

import socket


def hold_port(address: str) -> socket.socket:
    """Return a socket that holds a free port for this user while any process has it open; it accepts no connections.

    Only sockets of this user that share ports (SO_REUSEPORT) can listen there.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((address, 0))
    return held
