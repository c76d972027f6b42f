"""Let a host serve a sandbox without network: open a port there, and send the socket that listens to the host.

The words of the command line are a descriptor of a Unix socket, the port, and the command that then runs. Whoever
accepts at the socket is reached through the sandbox's own loopback, and nothing else of the host is.
"""

import os
import socket
import sys

if __name__ == "__main__":
    descriptor, port, *command = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as way, socket.create_server(("127.0.0.1", int(port))) as listener:
        socket.send_fds(way, [b"d"], [listener.fileno()])
    os.execvp(command[0], command)
