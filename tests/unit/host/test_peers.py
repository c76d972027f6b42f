"""Whose the other ends of a process's connections are."""

import socket
import subprocess

import pytest

from megarl.errors import WorkerError
from megarl.host.peers import check_peers
from tests.helpers.second_user import UID, needs_second_user, nobody_command

CONNECT = """
import socket, sys
connection = socket.create_connection((sys.argv[2], int(sys.argv[1])))
print("connected", flush=True)
sys.stdin.read()
"""


def test_the_own_users_connections_are_fine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            check_peers()


@needs_second_user
@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_a_connection_of_another_user_is_an_error_that_names_the_user_and_the_port(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = nobody_command(CONNECT, port, address, imports=["socket", "encodings.idna"])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"connected\n"
            connection, _ = listener.accept()
            with connection, pytest.raises(WorkerError, match=f"user {UID} of this host has connected to port {port} "):
                check_peers()
            other.communicate(timeout=10)
        check_peers()
