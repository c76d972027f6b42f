"""What another user of the host can do to a run's Ray: nothing. Ray and the other user are real."""

import os
from pathlib import Path

import psutil
import ray

from megarl.cluster.roster import Process
from megarl.host.janitor import Janitor
from tests.helpers.listeners import listeners_of
from tests.helpers.second_user import as_nobody, needs_second_user

# Reads and writes where the code of actors and tasks lies, which Ray's workers fetch and run.
MEDDLE = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
keys = client.internal_kv_keys(b"", None)
client.internal_kv_put(b"planted", b"by another user", True, None)
print(len(keys), "keys read")
"""
# Of each port: what is answered to empty requests to services that start, steer and end processes, and to HTTP.
CALL = """
import sys, urllib.error, urllib.request, grpc
METHODS = [
    "NodeInfoGcsService/GetAllNodeInfo", "InternalKVGcsService/InternalKVGet", "ActorInfoGcsService/KillActorViaGcs",
    "NodeManagerService/RequestWorkerLease", "NodeManagerService/ShutdownRaylet", "ObjectManagerService/Push",
    "CoreWorkerService/PushTask", "CoreWorkerService/KillActor", "CoreWorkerService/Exit",
]
for port in sys.argv[1:]:
    answers = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=20)
                answers.add("OK")
            except grpc.RpcError as error:
                answers.add(error.code().name)
    if "UNAVAILABLE" in answers:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/get_or_create_runtime_env", data=b"", timeout=20)
            answers = {"OK"}
        except urllib.error.HTTPError as error:
            answers = {str(error.code)}
    print(port, *sorted(answers))
"""


def test_one_host_listens_on_loopback_alone(ray_session: Janitor, processes: list[Process]) -> None:
    listeners = listeners_of(ray_session.scope.run_id)
    assert {listener.address.removeprefix("::ffff:") for listener in listeners} == {"127.0.0.1"}
    assert {"gcs_server", "raylet", "RuntimeEnvAgent", "Worker"} <= {listener.process for listener in listeners}


@needs_second_user
def test_what_the_run_has_in_its_ray_is_neither_read_nor_written(
    ray_session: Janitor, processes: list[Process]
) -> None:
    address = ray.get_runtime_context().gcs_address
    done = as_nobody(MEDDLE, address, imports=["ray", "ray._raylet"])
    assert done.returncode != 0
    assert "Unauthenticated" in done.stderr, done.stderr
    assert "keys read" not in done.stdout
    assert ray.experimental.internal_kv._internal_kv_get(b"planted") is None


@needs_second_user
def test_every_port_asks_for_the_token(ray_session: Janitor, processes: list[Process]) -> None:
    # The monitor of Ray's autoscaler has numbers for whoever asks, and takes no commands.
    listeners = [each for each in listeners_of(ray_session.scope.run_id) if each.process != "_private/monitor.py"]
    ports = {listener.port for listener in listeners}
    done = as_nobody(CALL, *ports, imports=["grpc._channel", "urllib.request", "encodings.idna"], timeout_s=240)
    answers = {int(words[0]): set(words[1:]) for line in done.stdout.splitlines() if (words := line.split())}
    assert set(answers) == ports, done.stderr
    for port, found in answers.items():
        # No port has all of these services, and only the agent's has HTTP.
        assert found - {"UNIMPLEMENTED"} in ({"UNAUTHENTICATED"}, {"401"}), (port, found)


def test_nobody_else_sees_the_token(ray_session: Janitor, processes: list[Process]) -> None:
    token = os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 32
    for process in psutil.process_iter(["cmdline"]):
        assert token not in " ".join(process.info["cmdline"] or ())
    files = [file for file in ray_session.temp_dir.rglob("*") if file.is_file()]
    assert [file for file in files if token.encode() in file.read_bytes()] == []


@needs_second_user
def test_nobody_else_enters_the_runs_directory(ray_session: Janitor, processes: list[Process]) -> None:
    program = "import os, sys; print(os.path.exists(sys.argv[1])); os.listdir(sys.argv[2])"
    stacks = Path(processes[0].location.files)
    assert stacks.is_dir()
    done = as_nobody(program, stacks, ray_session.temp_dir)
    assert done.stdout == "False\n"
    assert "PermissionError" in done.stderr
