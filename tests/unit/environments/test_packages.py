"""Environments of packages by name: servers written by hand from their protocols, and, marked long, the real ones."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.server import serve
from websockets.datastructures import Headers
from websockets.http11 import Response

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments import open_environments
from megarl.errors import ConfigError
from tests.helpers.agent_talk import Talk, converse
from tests.helpers.own_venv import newer_python, python_with

HELPERS = Path(__file__).parents[2] / "helpers"
# A counter that ends at 3, or when it is asked to; its actions have one field.
COUNT_FORM = {"title": "CountAction", "properties": {"add": {}, "stop": {}}, "required": ["add"]}
TOOL_FORM = {"title": "CallToolAction", "properties": {}, "required": ["tool_name"]}
CALL = '<tool_call>{"name": "add", "arguments": {"number": 2}}</tool_call>'


def opened(kind: str, **arguments: Any) -> None:
    open_environments(EnvironmentConfig(entries={"mine": EnvironmentEntry(type=kind, arguments=arguments)}), ["mine"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("verifiers:gsm8k", r"arguments.python: .* has no package verifiers; make a virtual environment, run pip"),
        ("harbor:tasks", r"has no package harbor; make a virtual environment, run pip install harbor there"),
        ("openenv:here", "got openenv:here, expected openenv:http://HOST:PORT"),
        ("openenv:", "unknown environment 'openenv:'; .*openenv:NAME"),
        ("nemogym:x", "got nemogym:x, but there is no module nemogym"),
        ("verifiers", "unknown environment 'verifiers'; did you mean 'verifiers:NAME'?"),
    ],
)
def test_what_is_missing_is_said_at_the_start(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(kind)


def test_a_package_without_its_python_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no program '/nowhere/python'"):
        opened("verifiers:gsm8k", python="/nowhere/python")


def test_rows_name_no_package() -> None:
    """A server of somebody else's choice would see the policy's turns."""
    with pytest.raises(ConfigError, match="rows name code, which only the configuration may"):
        open_environments(EnvironmentConfig(), ["openenv:http://elsewhere"])


async def play_openenv(url: str, *turns: str, **arguments: Any) -> Talk:
    return await converse(arguments, *turns, kind=f"openenv:{url}", extra_info={"reset": {"start": 1}})


def openenv_talk(form: dict[str, Any], *turns: str) -> tuple[Talk, list[Any]]:
    """A conversation with a server that is written by hand, and what it was asked."""
    asked: list[Any] = []

    async def answer(socket: Any) -> None:
        count = 0
        async for text in socket:
            message = json.loads(text)
            asked.append(message)
            data = message["data"]
            if message["type"] == "reset":
                count = data["start"]
                said: dict[str, Any] = {"observation": {"count": count}, "reward": None, "done": False}
            elif data.get("type") == "list_tools":
                tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
                said = {"observation": {"tools": [tool]}, "reward": None, "done": False}
            elif data.get("type") == "call_tool":
                count += data["arguments"]["number"]
                result = {"tool_name": "add", "result": f"now {count}", "error": None}
                said = {"observation": result, "reward": 0.5, "done": count >= 3}
            elif not isinstance(data.get("add"), int):
                wrong = [{"loc": ["add"], "msg": "Input should be a valid integer"}]
                refusal = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": wrong}
                await socket.send(json.dumps({"type": "error", "data": refusal}))
                continue
            else:
                count += data["add"]
                said = {"observation": {"count": count}, "reward": 0.5, "done": count >= 3}
            await socket.send(json.dumps({"type": "observation", "data": said}))

    def schema(_: Any, request: Any) -> Response | None:
        if request.path != "/schema":
            return None
        body = json.dumps({"action": form, "observation": {}, "state": {}}).encode()
        return Response(
            200, "OK", Headers({"Content-Type": "application/json", "Content-Length": str(len(body))}), body
        )

    async def lead() -> Talk:
        async with serve(answer, "127.0.0.1", 0, process_request=schema) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            return await play_openenv(f"http://127.0.0.1:{port}", *turns)

    return asyncio.run(lead()), asked


COUNTED = (
    '<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>user\n{"count": 1}<|im_end|>\n<|im_start|>assistant\nhm<|im_end|>\n'
    "<|im_start|>user\nerror: add: Input should be a valid integer<|im_end|>\n"
    '<|im_start|>assistant\n```json\n{"add": 1}\n```<|im_end|>\n<|im_start|>user\n{"count": 2}<|im_end|>\n'
    "<|im_start|>assistant\n1<|im_end|>"
)
COUNTS = ("hm", '```json\n{"add": 1}\n```', "1")


def test_turns_are_actions_of_an_openenv_server() -> None:
    talk, asked = openenv_talk(COUNT_FORM, *COUNTS)
    assert talk.text == COUNTED
    assert [reply.reward for reply in talk.replies[1:]] == [0.0, 0.5, 0.5]
    assert (talk.last.done, talk.last.details) == (True, {"invalid_actions": 1})
    # CRC-32 of the prompt's id, a.
    assert asked[0] == {"type": "reset", "data": {"seed": 3904355907, "start": 1}}
    assert zlib.crc32(b"a") == 3904355907
    assert [message["data"] for message in asked[1:]] == [{"add": "hm"}, {"add": 1}, {"add": 1}]


def test_tools_of_an_openenv_server_are_called() -> None:
    talk, asked = openenv_talk(TOOL_FORM, CALL)
    assert talk.text == (
        '<|im_start|>tools\nadd<|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>user\n{"count": 1}<|im_end|>\n'
        f"<|im_start|>assistant\n{CALL}<|im_end|>"
    )
    assert (talk.last.done, talk.last.reward, talk.last.num_calls) == (True, 0.5, 1)
    assert asked[-1]["data"] == {"type": "call_tool", "tool_name": "add", "arguments": {"number": 2}}


ROW = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Count."}, {"role": "user", "content": "Add 1, then 2."}],
        "tools": [
            {"type": "function", "name": "increment_counter", "parameters": {"type": "object"}, "strict": True},
            {"type": "function", "name": "get_counter_value", "parameters": {"type": "object"}, "strict": True},
        ],
    },
    "expected_count": 6,
    "initial_count": 3,
}
STEPS = (
    'So <tool_call>{"name": "increment_counter", "arguments": {"count": 1}}</tool_call>',
    '<tool_call>{"name": "increment_counter", "arguments": {"count": 2}}</tool_call>'
    '<tool_call>{"name": "get_counter_value", "arguments": {}}</tool_call>',
    "<think>6</think>It is 6.",
)
NAME = "example_session_state_mgmt_resources_server"


def play_nemo_gym(head: str) -> Talk:
    return asyncio.run(converse({"head": head}, *STEPS, kind=f"nemo-gym:{NAME}", extra_info=ROW))


def check_nemo_gym(talk: Talk) -> None:
    assert (talk.last.done, talk.last.reward, talk.last.failure) == (True, 1.0, ""), talk.last
    assert talk.text == (
        "<|im_start|>tools\nincrement_counter get_counter_value<|im_end|>\n<|im_start|>system\nCount.<|im_end|>\n"
        f"<|im_start|>user\nAdd 1, then 2.<|im_end|>\n<|im_start|>assistant\n{STEPS[0]}<|im_end|>\n"
        f'<|im_start|>tool\n{{"success":true}}<|im_end|>\n<|im_start|>assistant\n{STEPS[1]}<|im_end|>\n'
        '<|im_start|>tool\n{"success":true}<|im_end|>\n<|im_start|>tool\n{"count":6}<|im_end|>\n'
        f"<|im_start|>assistant\n{STEPS[2]}<|im_end|>"
    )


class GymHandler(BaseHTTPRequestHandler):
    """A resources server and the head server of NeMo Gym in one, with one session by its cookie."""

    asked: list[tuple[str, str, Any]]
    count = 0

    def do_GET(self) -> None:
        place = f"http://127.0.0.1:{self.server.server_address[1]}"
        servers = {NAME: "resources_servers", "policy_model": "responses_api_models"}
        self.send([{"process_name": name, "server_type": kind, "url": place} for name, kind in servers.items()])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        kind.asked.append((self.path, self.headers.get("Cookie", ""), body))
        if self.path == "/seed_session":
            kind.count = body["initial_count"]
            self.send({}, cookie="session=mine; path=/")
        elif self.path == "/increment_counter":
            kind.count += body["count"]
            self.send({"success": True})
        elif self.path == "/get_counter_value":
            self.send({"count": kind.count})
        else:
            self.send(body | {"reward": float(kind.count == body["expected_count"]), "steps": 2})

    def send(self, value: Any, cookie: str = "") -> None:
        text = json.dumps(value, separators=(",", ":")).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def gym() -> Iterator[str]:
    GymHandler.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), GymHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_resources_server_of_nemo_gym_runs_tools_and_verifies(gym: str) -> None:
    talk = play_nemo_gym(gym)
    check_nemo_gym(talk)
    assert talk.last.details == {"steps": 2}
    assert [path for path, _, _ in GymHandler.asked] == [
        *("/seed_session", "/increment_counter", "/increment_counter", "/get_counter_value", "/verify")
    ]
    assert [cookie for _, cookie, _ in GymHandler.asked] == ["", *["session=mine"] * 4]
    verified = GymHandler.asked[-1][2]
    assert {name: verified[name] for name in ROW} == ROW
    said = [(item["type"], item.get("arguments") or item.get("output")) for item in verified["response"]["output"]]
    assert said == [
        ("message", None),
        ("function_call", '{"count": 1}'),
        ("function_call_output", '{"success":true}'),
        ("function_call", '{"count": 2}'),
        ("function_call_output", '{"success":true}'),
        ("function_call", "{}"),
        ("function_call_output", '{"count":6}'),
        ("reasoning", None),
        ("message", None),
    ]
    texts = [item["content"][0]["text"] for item in verified["response"]["output"] if item["type"] == "message"]
    assert texts == ["So", "It is 6."]


def test_a_server_that_nemo_gym_does_not_run_fails_the_sample(gym: str) -> None:
    talk = asyncio.run(converse({"head": gym}, kind="nemo-gym:weather", extra_info=ROW))
    assert talk.last.failure == "raised"
    assert f"NeMo Gym runs no resources server 'weather', expected one of: {NAME}" in talk.last.reason
    talk = asyncio.run(converse({"head": gym}, kind=f"nemo-gym:{NAME}"))
    assert "extra_info has no responses_create_params with input" in talk.last.reason


@contextlib.contextmanager
def served(python: Path, program: str) -> Iterator[str]:
    """A server's URL, which prints its port."""
    with subprocess.Popen([str(python), "-P", str(HELPERS / program)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        for _ in range(600):
            with contextlib.suppress(httpx.ConnectError):
                httpx.get(url, timeout=600)
                break
            time.sleep(0.1)
        try:
            yield url
        finally:
            process.kill()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["0.10.0", "0.2.3"])
def test_a_real_server_of_openenv(version: str) -> None:
    with served(python_with(f"openenv-{version}", f"openenv=={version}"), "openenv_server.py") as url:
        talk = asyncio.run(play_openenv(url, *COUNTS))
    assert talk.last.failure == "", talk.last
    # Its observations have metadata.
    assert talk.text.replace(', "metadata": {}', "").replace('"metadata": {}, ', "") == COUNTED.replace(
        "error: add: Input should be a valid integer",
        "error: add: Input should be a valid integer, unable to parse string as an integer",
    )
    assert [reply.reward for reply in talk.replies[1:]] == [0.0, 0.5, 0.5]
    assert talk.last.done


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_real_resources_server_of_nemo_gym() -> None:
    with served(python_with("nemo-gym", "nemo-gym==0.4.0", python=newer_python()), "nemo_gym_servers.py") as head:
        check_nemo_gym(play_nemo_gym(head))


PRODUCTS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Product(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))

class Products(vf.Taskset[Product]):
    def load(self):
        for i in range(3):
            yield Product(Data(prompt=f"{i}*7?", answer=str(7 * i)), self.config.task)

__all__ = ["Products"]
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_taskset_of_the_real_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "products.py").write_text(PRODUCTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # verifiers makes environments with uv, which lies beside this Python.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    python = str(python_with("verifiers", "verifiers==0.4.0"))
    settings = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
    limits = {"reply_timeout_s": 600.0, "pass_env": ("PYTHONPATH",)}

    def play(task: int, answer: str) -> Talk:
        arguments = {"python": python, "settings": settings}
        return asyncio.run(converse(arguments, answer, kind="verifiers:products", extra_info={"task": task}, **limits))

    talk = play(2, "It is 14.")
    assert (talk.last.done, talk.last.reward, talk.last.failure) == (True, 1.0, ""), talk.last
    assert talk.last.details == {"length": 9.0}
    assert talk.text == "<|im_start|>user\n2*7?<|im_end|>\n<|im_start|>assistant\nIt is 14.<|im_end|>"
    assert play(1, "It is 14.").last.reward == 0.0
    assert play(5, "").last.reason.endswith("error: extra_info.task is 5, which products does not have")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_trial_of_the_real_harbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own agent terminus-2 writes to a terminal; a box of bubblewrap stands in for a container."""
    task = tmp_path / "tasks" / "greet"
    (task / "tests").mkdir(parents=True)
    (task / "environment").mkdir()
    (task / "environment" / "Dockerfile").write_text("FROM debian\n")
    (task / "instruction.md").write_text("Write hello into greeting.txt.")
    (task / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 300.0\n')
    check = 'grep -qx hello /app/greeting.txt && r=1 || r=0\necho "{\\"reward\\": $r, \\"words\\": 2}" > '
    (task / "tests" / "test.sh").write_text(f"#!/bin/bash\n{check}/logs/verifier/reward.json\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    # Else litellm looks for a price list in the network.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "harbor_box.py").write_text((HELPERS / "harbor_box.py").read_text())
    python = str(python_with("harbor", "harbor==0.26.0", python=newer_python()))
    agent = {"kwargs": {"record_terminal_session": False}}
    settings = {"environment": {"import_path": "harbor_box:BubblewrapBox"}, "agent": agent}

    def turn(keystrokes: str, is_complete: bool) -> str:
        commands = [{"keystrokes": keystrokes, "duration": 0.5}] if keystrokes else []
        return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": is_complete})

    def play(word: str) -> Talk:
        turns = (turn(f"echo {word} > /app/greeting.txt\n", False), turn("", True), turn("", True))
        limits = {"reply_timeout_s": 600.0, "pass_env": ("PYTHONPATH", "LITELLM_LOCAL_MODEL_COST_MAP")}
        arguments = {"python": python, "settings": settings}
        kind = f"harbor:{task.parent}"
        return asyncio.run(converse(arguments, *turns, kind=kind, extra_info={"task": "greet"}, **limits))

    talk = play("hello")
    assert (talk.last.done, talk.last.reward, talk.last.failure) == (True, 1.0, ""), talk.last
    assert talk.last.details["words"] == 2
    assert "Write hello into greeting.txt." in talk.text
    assert play("bye").last.reward == 0.0
