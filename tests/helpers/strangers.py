"""Ask the ports of a run for what only its own processes may have, or take them, as another user of the host."""

from collections.abc import Iterable

from tests.helpers.second_user import as_nobody

# Of each address: what is answered to empty requests to services that start, steer and end processes, and to HTTP.
_CALL = """
import sys, urllib.error, urllib.request, grpc
METHODS = [
    "NodeInfoGcsService/GetAllNodeInfo", "InternalKVGcsService/InternalKVGet", "ActorInfoGcsService/KillActorViaGcs",
    "NodeManagerService/RequestWorkerLease", "NodeManagerService/ShutdownRaylet", "ObjectManagerService/Push",
    "CoreWorkerService/PushTask", "CoreWorkerService/KillActor", "CoreWorkerService/Exit", "RayletDriver/Init",
]
for address in sys.argv[1:]:
    answers = set()
    with grpc.insecure_channel(address) as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=100)
                answers.add("OK")
            except grpc.RpcError as error:
                answers.add(error.code().name)
    if "UNAVAILABLE" in answers:
        try:
            urllib.request.urlopen(f"http://{address}/get_or_create_runtime_env", data=b"", timeout=100)
            answers = {"OK"}
        except urllib.error.HTTPError as error:
            answers = {str(error.code)}
        except urllib.error.URLError:
            answers = {"closed"}
    print(address, *sorted(answers - {"UNIMPLEMENTED"}))
"""
# What a port may answer: over gRPC, and over HTTP.
REFUSED = ({"UNAUTHENTICATED"}, {"401"})


def answers_to_strangers(addresses: Iterable[str]) -> dict[str, set[str]]:
    """Return what each HOST:PORT answers to another user: codes of gRPC or HTTP, or `closed`."""
    imports = ["grpc._channel", "urllib.request", "encodings.idna"]
    done = as_nobody(_CALL, *addresses, imports=imports, timeout_s=500)
    assert done.returncode == 0, done.stderr
    return {words[0]: set(words[1:]) for line in done.stdout.splitlines() if (words := line.split())}


_TAKE = """
import socket, sys
for address in ("127.0.0.1", "0.0.0.0", "::"):
    for options in ((), ("SO_REUSEADDR",), ("SO_REUSEPORT",), ("SO_REUSEADDR", "SO_REUSEPORT")):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as taken:
            for option in options:
                taken.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
            try:
                taken.bind((address, int(sys.argv[1])))
                taken.listen()
                print(address, *options)
            except OSError as error:
                assert error.strerror == "Address already in use", error
"""


def ways_to_take(port: int) -> list[str]:
    """Return by which addresses and options of sockets another user can listen at a port at this moment."""
    done = as_nobody(_TAKE, port, imports=["socket"])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
