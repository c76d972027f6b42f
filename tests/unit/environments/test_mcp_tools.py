"""Tools of a real MCP server, on its standard streams and by HTTP."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from mcp import Client, MCPError
from mcp_types import ListToolsResult, Tool, ToolAnnotations

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments import Action, Reply, mcp_tools, open_environments, tools_of
from megarl.environments.calls import LateError, attempt
from megarl.environments.mcp_tools import _SHARED, McpEnvironment, _Session
from megarl.errors import ConfigError
from megarl.host.clock import awake_s
from megarl.types import Prompt
from tests.helpers.waiting import wait_until

# A loaded machine imports the server for long.
START_S = 120.0
SERVER = [sys.executable, str(Path(__file__).parents[2] / "helpers" / "mcp_server.py")]
PROMPT = Prompt(uid="a", token_ids=(1,), data_source="d", ground_truth="")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def text(reply: Reply) -> str:
    return "|".join(message.content for message in reply.messages)


async def say(environment: McpEnvironment, *turns: str) -> list[Reply]:
    return [await environment.reply(Action(text=turn, turn=i)) for i, turn in enumerate(turns)]


def together(talk: Callable[[Sequence[McpEnvironment]], Awaitable[None]], *environments: McpEnvironment) -> None:
    """Run a conversation, or several, of environments that have started."""

    async def run() -> None:
        await asyncio.gather(*(each.start(PROMPT) for each in environments))
        await talk(environments)
        await asyncio.gather(*(each.close() for each in environments))

    asyncio.run(run())


def test_the_policy_is_told_of_the_tools() -> None:
    one = {"server": " ".join(SERVER), "only": ["add"], "start_timeout_s": START_S}
    entries = {
        "one": EnvironmentEntry(type="mcp", arguments=one),
        "none": EnvironmentEntry(type="mcp", arguments={"server": ["no-such-command"], "in_prompt": False}),
    }
    config = EnvironmentConfig(entries=entries)
    (schema,) = tools_of(config, "one")
    assert schema["type"] == "function"
    assert schema["function"]["description"] == "Add two numbers."
    assert schema["function"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert tools_of(config, "none") == ()


async def answers_side_by_side_and_tells_errors(tools: McpEnvironment) -> None:
    sums, error, unknown, late, last = await say(
        tools,
        call("doze", seconds=0.5) + call("doze", seconds=0.5) + call("add", a=2, b=40),
        call("add", a="two"),
        call("ad"),
        call("doze", seconds=60),
        "42",
    )
    assert text(sums) == "awake|awake|42"
    assert (sums.num_calls, sums.details) == (3, {"tool_errors": 0})
    assert text(error).startswith("error: Error executing tool add: 2 validation errors")
    assert error.details == {"tool_errors": 1}
    names = "add, note, doze, whoami, freeze, chatter, die, parts"
    assert text(unknown) == f"error: there is no tool 'ad'; there are: {names}"
    assert text(late) == "error: doze took longer than 5 s"
    assert last.done


async def reads_whatever_a_result_is_made_of(tools: McpEnvironment) -> None:
    kinds = ("contents", "structured", "failed", "shown", "empty")
    found = {kind: (await say(tools, call("parts", kind=kind)))[0] for kind in kinds}
    told = '{"code": "RATE_LIMITED", "retry_after": 30}'
    assert {kind: text(reply) for kind, reply in found.items()} == {
        "contents": "see\ninside\n[resource_link application/x-b file:///b.bin]\n[image image/png]",
        "structured": told,
        "failed": f"error: {told}",
        "shown": f"[image image/png]\n{told}",
        "empty": "",
    }
    assert [reply.details["tool_errors"] for reply in found.values()] == [0, 0, 1, 0, 0]
    # Where the run reads images.
    tools.read_image = lambda image: f"digest of {image!r}"
    for kind, content in {
        "contents": "see\ninside\n[resource_link application/x-b file:///b.bin]\n<image>",
        "shown": "<image>",
    }.items():
        (message,) = (await say(tools, call("parts", kind=kind)))[0].messages
        assert (message.content, message.images) == (content, ("digest of 'AAAA'",))


def test_a_server_that_samples_share_answers_them_and_is_started_again_when_it_died() -> None:
    """One process for all of it, since each takes seconds to import the real package."""

    async def talk(environments: Sequence[McpEnvironment]) -> None:
        tools, other = environments
        assert [text((await say(each, call("note", text="n")))[0]) for each in environments] == ["n", "n n"]
        assert await other.resume(PROMPT, [Action(text="x", turn=0)])
        await answers_side_by_side_and_tells_errors(tools)
        await reads_whatever_a_result_is_made_of(tools)
        died, after = await say(other, call("die") + call("add", a=1, b=2), call("note", text="new"))
        assert text(died) == "error: MCPError: Connection closed|3"
        assert text(after) == "new"
        # One that is gone for good fails the sample, and the policy does not read why.
        assert other._session is not None
        other._session.end()
        other._session.server = type(other._server)(("no-such-command",))
        with pytest.raises(ConfigError, match="no-such-command"):
            await say(other, call("add", a=1, b=2))

    # A new server may take longer than what a test waits for a late call.
    together(talk, *(McpEnvironment(server=SERVER, start_timeout_s=START_S, timeout_s=limit) for limit in (5, 120)))


def test_samples_may_have_sessions_of_their_own_with_the_variables_that_are_passed_on_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NAME", "mine")
    monkeypatch.setenv("KEY", "secret")
    arguments = {"server": SERVER, "start_timeout_s": START_S, "session": "sample", "env": {"OTHER": "x"}}
    config = EnvironmentConfig(entries={"mine": EnvironmentEntry(type="mcp", arguments=arguments)}, pass_env=("NAME",))
    processes: list[psutil.Process] = []

    async def own(environments: Sequence[McpEnvironment]) -> None:
        replies = [(await say(each, call("note", text=f"n{i}"), call("whoami"))) for i, each in enumerate(environments)]
        assert [text(first) for first, _ in replies] == ["n0", "n1"]
        pids, names, keys = zip(*(text(second).split() for _, second in replies), strict=True)
        assert (names, keys) == (("mine", "mine"), ("None", "None"))
        processes.extend(psutil.Process(int(pid)) for pid in pids)
        assert not await environments[0].resume(PROMPT, [Action(text="x", turn=0)])

    make = open_environments(config, ["mine"])["mine"]
    together(own, *(cast(McpEnvironment, make()) for _ in range(2)))
    assert len(set(processes)) == 2
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def test_a_line_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session ends, the policy is told by whom and why, and the next call has a new one."""
    monkeypatch.setattr(mcp_tools, "MOST_LINE_CHARS", 2 << 20)

    async def talk(environments: Sequence[McpEnvironment]) -> None:
        (tools,) = environments
        whole, after = await say(tools, call("chatter", count=8), call("add", a=1, b=2))
        assert text(whole) == (
            f"error: {tuple(SERVER)!r} wrote a line of over {2 << 20} characters; let it write less at a time"
        )
        assert text(after) == "3"

    together(talk, McpEnvironment(server=SERVER, start_timeout_s=START_S, timeout_s=60))


@pytest.mark.parametrize(
    ("code", "said", "over"),
    [
        (-32600, "Session terminated", True),
        (-32600, "Session not found", True),
        (-32000, "Bad Request: No valid session ID provided", True),
        (-32000, "Connection closed", True),
        (-32602, "Invalid params", False),
        (-32601, "Method not found", False),
        (-32603, "Server returned an error response", False),
    ],
)
def test_a_session_ends_by_any_refusal_that_names_it(code: int, said: str, over: bool) -> None:
    seen: list[str] = []

    async def refuse(client: object) -> None:
        seen.append("asked")
        raise MCPError(code, said)

    async def run() -> None:
        opened = asyncio.get_running_loop().create_future()
        opened.set_result(None)
        session = _Session(McpEnvironment(server=SERVER)._server, START_S, _client=opened, _began=awake_s())
        session._listed = session._client
        with pytest.raises(MCPError, match=said):
            await session.use(refuse)
        assert session.is_listed == (not over)

    asyncio.run(run())
    assert seen == ["asked"]


@pytest.mark.parametrize(
    ("num_at_once", "is_alive", "is_over"), [(1, False, True), (9, False, False), (1, True, False)]
)
def test_a_server_that_answers_nothing_is_given_up_with_the_third_late_call(
    num_at_once: int, is_alive: bool, is_over: bool
) -> None:
    """Calls that are late together count as one, and a server that lists its tools is only slow."""

    class Server:
        async def list_tools(self) -> None:
            if not is_alive:
                await asyncio.Event().wait()

    async def hang(client: object) -> None:
        await asyncio.Event().wait()

    async def run() -> bool:
        opened = asyncio.get_running_loop().create_future()
        opened.set_result(Server())
        session = _Session(McpEnvironment(server=SERVER)._server, START_S, _client=opened, _began=awake_s())
        for _ in range(3 if num_at_once == 1 else 1):
            late = [attempt(lambda: session.use(hang), 0.01) for _ in range(num_at_once)]
            assert all(isinstance(each, LateError) for each in await asyncio.gather(*late, return_exceptions=True))
            await asyncio.sleep(0)
        return session._client is None

    assert asyncio.run(run()) == is_over


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_by_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this host it is asked directly, whatever proxies there are elsewhere."""
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")

    async def talk(environments: Sequence[McpEnvironment]) -> None:
        (tools,) = environments
        assert text((await say(tools, call("add", a=20, b=22)))[0]) == "42"

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([*SERVER, str(port)]) as process:
        try:
            wait_until(lambda: answers(port), f"a server at port {port}", process=process)
            together(talk, McpEnvironment(server=f"http://127.0.0.1:{port}/mcp"))
        finally:
            process.kill()


def test_a_proxy_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://me:s3cret@127.0.0.1:9")
    arguments = {"server": "http://tools.example/mcp", "start_timeout_s": START_S}
    config = EnvironmentConfig(entries={"mine": EnvironmentEntry(type="mcp", arguments=arguments)})
    with pytest.raises(ConfigError, match=r"through the proxy \S+127.0.0.1:9 \(NO_PROXY") as failure:
        tools_of(config, "mine")
    assert "s3cret" not in str(failure.value)


def test_headers_have_the_values_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_AUTHORIZATION", "Bearer of the user")
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers["authorization"])
            self.send_error(401)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/mcp?api_key=s3cret"
        arguments = {"server": url, "headers_env": {"Authorization": "MCP_AUTHORIZATION"}}
        entries = {"mine": EnvironmentEntry(type="mcp", arguments=arguments)}
        with pytest.raises(
            ConfigError, match=r"headers_env: MCP_AUTHORIZATION is not passed on; export it, and name it"
        ):
            tools_of(EnvironmentConfig(entries=entries), "mine")
        with pytest.raises(ConfigError, match="which does not answer as an MCP server") as failure:
            tools_of(EnvironmentConfig(entries=entries, pass_env=("MCP_AUTHORIZATION",)), "mine")
        server.shutdown()
    assert set(seen) == {"Bearer of the user"}
    assert "s3cret" not in str(failure.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"server": "x --token abc"}, "server: has a secret, and every user of a host can read the command lines"),
        ({"server": []}, r"server: got \[\], expected a URL or a command"),
        ({"server": "x", "session": "mine"}, "session: got 'mine', expected host or sample"),
        ({"server": "x", "tool": 1}, "entries.mine.arguments: .*unexpected keyword argument 'tool'"),
        (
            {"server": ["no-such-command"]},
            r"server: got \('no-such-command',\), which does not answer .*no-such-command",
        ),
        ({"server": [sys.executable, "-c", ""]}, "which does not answer as an MCP server"),
        ({"server": SERVER, "only": ["ad"]}, "only: the server has no tool 'ad'; it has: add, note"),
    ],
)
def test_what_is_wrong_is_said_at_the_start(arguments: dict[str, Any], message: str) -> None:
    config = EnvironmentConfig(entries={"mine": EnvironmentEntry(type="mcp", arguments=arguments)})
    with pytest.raises(ConfigError, match=message):
        tools_of(config, "mine")


def test_opening_a_session_has_one_limit_for_all_calls_that_wait_for_it() -> None:
    """Each call gives up before that limit, so that none of them alone could find the server silent."""

    async def run() -> None:
        opened = asyncio.get_running_loop().create_future()
        session = _Session(McpEnvironment(server=SERVER)._server, 60.0, _client=opened, _began=awake_s() - 61.0)
        await session.use(Client.list_tools)

    with pytest.raises(ConfigError, match="does not answer as an MCP server within 60 s"):
        asyncio.run(run())


def test_tools_are_listed_again_after_a_session_has_ended_and_readers_run_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def page(*tools: tuple[str, bool]) -> ListToolsResult:
        return ListToolsResult(
            tools=[
                Tool(name=name, input_schema={"type": "object"}, annotations=ToolAnnotations(read_only_hint=reads))
                for name, reads in tools
            ]
        )

    pages = [page(("look", True), ("set", False)), page(("glance", True))]

    async def use(request: object) -> ListToolsResult:
        return pages.pop(0)

    async def run() -> None:
        environment = McpEnvironment(server=["listed-again"])
        first = asyncio.get_running_loop().create_future()
        session = _Session(environment._server, START_S, _client=first)
        monkeypatch.setattr(_Session, "use", lambda self, request: use(request))
        _SHARED.setdefault(asyncio.get_running_loop(), {})[environment._server] = session
        await environment.start(PROMPT)
        await environment.start(PROMPT)
        assert (list(environment._functions), environment._side_by_side) == (["look", "set"], {"look"})
        session.end()
        session._client = asyncio.get_running_loop().create_future()
        await environment.start(PROMPT)
        assert list(environment._functions) == ["glance"]

    asyncio.run(run())
