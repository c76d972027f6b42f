"""What another user of the host can do to a run's Ray: nothing. Ray and the other user are real."""

import os
from pathlib import Path

import psutil
import ray

from megarl.cluster.remotes import Process
from megarl.host.janitor import Janitor
from tests.helpers.listeners import listeners_of
from tests.helpers.second_user import as_nobody, needs_second_user
from tests.helpers.strangers import REFUSED, answers_to_strangers

# Reads and writes where the code of actors and tasks lies, which Ray's workers fetch and run.
MEDDLE = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
keys = client.internal_kv_keys(b"", None)
client.internal_kv_put(b"planted", b"by another user", True, None)
print(len(keys), "keys read")
"""


def test_one_host_listens_on_loopback_alone(ray_session: Janitor, processes: list[Process]) -> None:
    listeners = listeners_of(ray_session.scope.run_id, os.getpid())
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
    others = {*listeners_of(ray_session.scope.run_id)}
    # In this process, stores of other tests listen too; unlike Ray, they do so for one family of addresses.
    own = {each for each in listeners_of(ray_session.scope.run_id, os.getpid()) if each.address != "127.0.0.1"}
    ports = {listener.port for listener in others | own if listener.process != "_private/monitor.py"}
    answers = answers_to_strangers({f"127.0.0.1:{port}" for port in ports})
    assert len(answers) >= 4
    assert {address: found for address, found in answers.items() if found not in REFUSED} == {}


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
