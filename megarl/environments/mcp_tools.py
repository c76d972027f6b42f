"""Let the policy call the tools of an MCP server, which runs beside the environment worker or anywhere."""

import asyncio
import contextlib
import json
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from megarl.environments.base import ENVIRONMENTS, Action
from megarl.environments.calls import AGENT_THREADS, LateError, LateRun, attempt
from megarl.environments.tools import KEY, ToolEnvironment, ToolError
from megarl.errors import ConfigError
from megarl.host.child_environment import proxy_of
from megarl.host.clock import awake_s, finished
from megarl.host.http_replies import BOUNDED
from megarl.host.masking import masked_text, require_no_secrets
from megarl.types import Message, Prompt

if TYPE_CHECKING:
    from anyio.streams.text import TextReceiveStream
    from mcp import Client
    from mcp_types import ContentBlock

T = TypeVar("T")
# Images come as text, too.
MOST_LINE_CHARS = 16 << 20


@dataclass(frozen=True, slots=True)
class _Server:
    """A server: its URL and the headers of requests to it, or the command that starts it and its environment."""

    where: str | tuple[str, ...]
    details: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return masked_text(repr(self.where))


@dataclass(slots=True, eq=False)
class _Session:
    """A session with a server, which begins when it is first asked for, and again after it broke.

    A task of its own holds it open, since a client must be left in the task that entered it.
    """

    server: _Server
    timeout_s: float
    _client: "asyncio.Future[Client] | None" = None
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None
    _check: "asyncio.Task[None] | None" = None
    _listed: "asyncio.Future[Client] | None" = None
    # Why it broke, if this client broke it.
    fault: str = ""
    _began: float = 0.0
    _late: LateRun = field(default_factory=LateRun)

    async def use(self, request: "Callable[[Client], Awaitable[T]]") -> T:
        """Make a request. Raises ConfigError if the server cannot be reached, and else what the request raises."""
        from mcp import MCPError

        if self._client is None:
            self._client, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = asyncio.create_task(self._hold(self._client, self._over))
            self._began = awake_s()
        opened, called_at = self._client, awake_s()
        try:
            # Calls have limits of their own, and none of them may begin this one anew.
            if not await finished([opened], max(0.1, self._began + self.timeout_s - called_at)):
                raise TimeoutError
            client = opened.result()
        except Exception as error:
            self.end(opened)
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            why = self.fault or f"{type(cause).__name__}: {masked_text(str(cause))}"
            proxy = isinstance(where := self.server.where, str) and proxy_of(where, f"{KEY}.server")
            through = f" through the proxy {masked_text(proxy)} (NO_PROXY names hosts that need none)" if proxy else ""
            raise ConfigError(
                f"{KEY}.server: got {self.server}, which does not answer as an MCP server within "
                f"{self.timeout_s:g} s{through}: {why}; give a URL of streamable HTTP, or a command on standard streams"
            ) from error
        try:
            result = await request(client)
        except BaseException as error:
            if isinstance(error, MCPError):
                self._late.end()
                if _is_over(error):
                    self.end(opened)
                    if self.fault:
                        raise ToolError(f"error: {self.server} {self.fault}") from error
            else:
                # Nobody has answered: in time, or in a way that can be read.
                if self._late.add(called_at):
                    self.end(opened)
                elif self._check is None or self._check.done():
                    self._check = asyncio.create_task(self._end_unless_alive(opened, client))
            raise
        self._late.end()
        return result

    async def _end_unless_alive(self, opened: "asyncio.Future[Client]", client: "Client") -> None:
        """End the session if its server does not list its tools either."""
        try:
            await attempt(client.list_tools, self.timeout_s)
        except Exception as error:
            if _is_over(error):
                self.end(opened)
        else:
            self._late.end()

    @property
    def is_listed(self) -> bool:
        """Return whether the tools have been listed in this session, as far as it has not ended."""
        return self._listed is not None and self._listed is self._client

    def end(self, opened: "asyncio.Future[Client] | None" = None) -> None:
        """End the session; with `opened` only if it is still this one."""
        if opened is None or opened is self._client:
            self._over.set()
            self._late.end()
            self._client = None

    async def _hold(self, client: "asyncio.Future[Client]", over: asyncio.Event) -> None:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client import stdio
        from mcp.client.streamable_http import streamable_http_client

        where, details = self.server.where, dict(self.server.details)
        self.fault = ""
        _OPENING.set(self)
        stdio.TextReceiveStream = _bounded_lines()  # type: ignore[misc]
        try:
            async with contextlib.AsyncExitStack() as stack:
                if isinstance(where, str):
                    # Answers are streams, which may be silent for long.
                    timeout = httpx2.Timeout(30.0, read=300.0)
                    direct = None if proxy_of(where, f"{KEY}.server") else httpx2.AsyncHTTPTransport()
                    http = await stack.enter_async_context(
                        httpx2.AsyncClient(headers=details, timeout=timeout, event_hooks=BOUNDED, transport=direct)
                    )
                    target: Any = streamable_http_client(where, http_client=http)
                else:
                    target = StdioServerParameters(command=where[0], args=list(where[1:]), env=details)
                opened = await stack.enter_async_context(Client(target))
                client.set_result(opened)
                await over.wait()
        except Exception as error:
            if not client.done():
                client.set_exception(error)


# The session whose task this is, or has started this one.
_OPENING: ContextVar[_Session] = ContextVar("_OPENING")


@cache
def _bounded_lines() -> "type[TextReceiveStream]":
    """Return the stream by which a client reads what a command writes; the client's own keeps lines of any length."""
    import anyio
    from anyio.streams.text import TextReceiveStream

    class BoundedLines(TextReceiveStream):
        _held = 0

        async def receive(self) -> str:
            text = await super().receive()
            _, newline, last = text.rpartition("\n")
            self._held = len(last) if newline else self._held + len(text)
            if self._held > MOST_LINE_CHARS:
                # Else the client would read on until the server ends.
                _OPENING.get().end()
                _OPENING.get().fault = f"wrote a line of over {MOST_LINE_CHARS} characters; let it write less at a time"
                raise anyio.BrokenResourceError
            return text

    return BoundedLines


def _is_over(error: Exception) -> bool:
    """Return whether a session has ended: the server refuses it, in whatever words, or has said nothing."""
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED or "session" in str(error).lower()


# Sessions that all samples of an event loop share; the schemas of tools that were listed, and the names of those that
# only read.
_SHARED: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Server, _Session]]" = WeakKeyDictionary()
_SCHEMAS: dict[_Server, Sequence[Mapping[str, Any]]] = {}
_READ_ONLY: dict[_Server, set[str]] = {}


@ENVIRONMENTS.register("mcp")
class McpEnvironment(ToolEnvironment):
    """An environment in which the policy calls the tools of an MCP server.

    All samples in one environment process share a session with the server, in which calls run concurrently. For a
    server that keeps state for its client, `session: sample` gives each sample a session of its own, with a process of
    its own if the server is a command. With `session: sample`, an unfinished conversation starts anew from its prompt
    when the run is resumed. If a session breaks, the next call opens a new one, and the policy is told.
    """

    def __init__(
        self,
        *,
        server: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        headers_env: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        session: Literal["host", "sample"] = "host",
        start_timeout_s: float = 30.0,
        **arguments: Any,
    ) -> None:
        """Make the environment of one sample.

        server: a URL, or a command with its arguments. env: environment variables of the command, besides the usual
        ones and those of `environment.pass_env`. headers_env: headers of requests to a URL, each by the name of a
        variable in `environment.pass_env` that holds its value. only: names of the tools that the policy may call, all
        by default. session: whose a session is. start_timeout_s: time to reach the server. arguments: those of
        `ToolEnvironment`, except `tools` and `patterns`.
        """
        super().__init__(**arguments)
        if session not in ("host", "sample"):
            raise ConfigError(f"{KEY}.session: got {session!r}, expected host or sample")
        is_url = isinstance(server, str) and server.startswith(("http://", "https://"))
        words = server if is_url else tuple(shlex.split(server) if isinstance(server, str) else server)
        if not words:
            raise ConfigError(f"{KEY}.server: got {server!r}, expected a URL or a command")
        if not is_url:
            require_no_secrets(words, f"{KEY}.server")
        self._where = words if isinstance(words, str) else tuple(words)
        self._env, self._headers_env = dict(env or {}), dict(headers_env or {})
        self._only, self._is_shared, self._start_timeout_s = only, session == "host", start_timeout_s
        self._session: _Session | None = None

    @cached_property
    def _server(self) -> _Server:
        """Return the server with what this object was given. Raises ConfigError if the value of a header is not set."""
        if isinstance(self._where, tuple):
            return _Server(self._where, tuple(sorted({**self.process_environment, **self._env}.items())))
        proxy_of(self._where, f"{KEY}.server")
        if missing := [name for name in self._headers_env.values() if name not in self.process_environment]:
            raise ConfigError(
                f"{KEY}.headers_env: {missing[0]} is not passed on; export it, and name it in environment.pass_env"
            )
        return _Server(
            self._where, tuple((header, self.process_environment[name]) for header, name in self._headers_env.items())
        )

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:  # type: ignore[override]
        """Return the schemas of the server's tools. Raises ConfigError if it cannot be reached."""
        if not self._in_prompt:
            return ()
        if self._server not in _SCHEMAS:
            # Tools may be asked for inside an event loop, which cannot run another one.
            AGENT_THREADS.submit(asyncio.run, self._list(_Session(self._server, self._start_timeout_s))).result()
        return self._chosen()

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        if self._is_shared:
            sessions = _SHARED.setdefault(asyncio.get_running_loop(), {})
            self._session = sessions.setdefault(self._server, _Session(self._server, self._start_timeout_s))
        else:
            self._session = _Session(self._server, self._start_timeout_s)
        # A server may have other tools than in an earlier session.
        if not self._session.is_listed:
            await self._list(self._session)
        self._side_by_side |= _READ_ONLY[self._server]
        names = [schema["function"]["name"] for schema in self._chosen()]
        self._functions = {name: partial(self._call, name) for name in names}
        return ()

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        if self._is_shared:
            await self.start(prompt)
        return self._is_shared

    async def close(self) -> None:
        if self._session is not None and not self._is_shared:
            self._session.end()

    async def _list(self, session: _Session) -> None:
        """Learn the schemas of the server's tools. Raises ConfigError if it does not list them in time."""
        try:
            # Half of it is for reaching the server, which has an error of its own.
            await attempt(partial(self._list_all, session), 2 * self._start_timeout_s)
        except LateError as late:
            raise ConfigError(
                f"{KEY}.server: got {self._server}: listing its tools {late}; look into the server, or raise "
                "start_timeout_s"
            ) from None

    async def _list_all(self, session: _Session) -> None:
        from mcp import Client

        schemas, read_only, cursor = list[Mapping[str, Any]](), set[str](), None
        while True:
            page = await session.use(partial(Client.list_tools, cursor=cursor))
            for tool in page.tools:
                if tool.annotations is not None and tool.annotations.read_only_hint:
                    read_only.add(tool.name)
                described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                schemas.append({"type": "function", "function": described})
            if not (cursor := page.next_cursor):
                break
        session._listed = session._client
        _SCHEMAS[self._server], _READ_ONLY[self._server] = schemas, read_only

    def _chosen(self) -> Sequence[Mapping[str, Any]]:
        found = {schema["function"]["name"]: schema for schema in _SCHEMAS[self._server]}
        if missing := [name for name in self._only or () if name not in found]:
            raise ConfigError(f"{KEY}.only: the server has no tool {missing[0]!r}; it has: {', '.join(found)}")
        return [found[name] for name in (found if self._only is None else self._only)]

    async def _call(self, name: str, /, **arguments: Any) -> str | list[dict[str, str]]:
        assert self._session is not None, "the conversation has started"
        result = await self._session.use(lambda client: client.call_tool(name, arguments))
        content, texts = result.content, [_text_of(part) for part in result.content]
        if self.read_image is not None and not result.is_error and any(each.type == "image" for each in content):
            return [
                {"type": "image", "data": each.data} if each.type == "image" else {"type": "text", "text": f"{text}\n"}
                for each, text in zip(content, texts, strict=True)
            ]
        if result.structured_content is not None and not any(each.type == "text" and each.text for each in content):
            texts.append(json.dumps(result.structured_content))
        if result.is_error:
            raise ToolError("error: " + "\n".join(texts))
        return "\n".join(texts)


def _text_of(part: "ContentBlock") -> str:
    """Return what the policy can read of a part of a result: its text, or what it is and where."""
    if part.type == "text":
        return part.text
    resource = part.resource if part.type == "resource" else part
    if text := getattr(resource, "text", ""):
        return str(text)
    said = (part.type, getattr(resource, "mime_type", None), getattr(resource, "uri", None))
    return f"[{' '.join(str(each) for each in said if each)}]"
