"""Play environments that an OpenEnv server keeps: a session by WebSocket for each sample."""

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from megarl.config.optional import import_optional
from megarl.environments.base import MOST_REPLY_CHARS, PACKAGES, Action, Reply, load_object
from megarl.environments.tools import KEY, ToolEnvironment, ToolError
from megarl.errors import ConfigError
from megarl.host.child_environment import proxy_of
from megarl.host.http_replies import BOUNDED
from megarl.types import Message, Prompt

_FENCE = re.compile(r"```\w*\s*(.*?)\s*```", re.DOTALL)
# The titles of schemas of servers whose only actions are to list and to call tools.
_TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")


@PACKAGES.register("openenv")
class OpenEnvEnvironment(ToolEnvironment):
    """An environment of an OpenEnv server. If it offers tools the policy calls them; else each turn is an action.

    The first observation follows the row's prompt. An action that the server cannot read is answered with what is
    wrong. Samples of a prompt start alike: the reset's seed follows from the prompt's id.
    """

    owns_prompt = True

    def __init__(
        self,
        url: str,
        *,
        render: str | Callable[[Any], str] | None = None,
        parse: str | Callable[[str], Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> None:
        """Make the environment of one sample.

        url: of the server. render: a function, or its name as MODULE:FUNCTION or FILE.py:FUNCTION, that writes an
        observation for the policy, by default as JSON. parse: such a function that reads an action from a turn, by
        default JSON, or a text for actions of one field. arguments: those of `tools` for the server's tools.
        """
        super().__init__(**arguments)
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"environment.entries.*.type: got openenv:{url}, expected openenv:http://HOST:PORT")
        import_optional("websockets", package="websockets", key="environment.entries.*.type=openenv")
        self._url, self._proxy = url.rstrip("/"), proxy_of(url, "environment.entries.*.type") or None
        self._render = load_object(render, f"{KEY}.render") if isinstance(render, str) else render or json.dumps
        self._read = load_object(parse, f"{KEY}.parse") if isinstance(parse, str) else parse
        self._schemas: Sequence[Mapping[str, Any]] = ()
        self._form: Mapping[str, Any] = {}
        self._socket: Any = None
        self._result: Mapping[str, Any] = {}
        self._num_invalid = 0

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:  # type: ignore[override]
        return self._schemas

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        from websockets.asyncio.client import connect

        async with httpx.AsyncClient(proxy=self._proxy, trust_env=False, timeout=None, event_hooks=BOUNDED) as client:
            self._form = (await client.get(f"{self._url}/schema")).raise_for_status().json()["action"]
        address = f"ws{self._url.removeprefix('http')}/ws"
        self._socket = await connect(address, proxy=self._proxy, max_size=4 * MOST_REPLY_CHARS, open_timeout=None)
        if self._form.get("title") in _TOOL_ACTIONS:
            listed = (await self._ask("step", {"type": "list_tools"}))["observation"]["tools"]
            names = {"name": "name", "description": "description", "parameters": "input_schema"}
            described = [{ours: tool[theirs] for ours, theirs in names.items()} for tool in listed]
            self._schemas = [{"type": "function", "function": each} for each in described]
            self._functions = {tool["name"]: self._caller(tool["name"]) for tool in listed}
        reset = {"seed": zlib.crc32(prompt.uid.encode()), **(prompt.extra_info.get("reset") or {})}
        first = await self._ask("reset", reset)
        return (*prompt.messages, Message(role="user", content=self._render(first["observation"])))

    async def reply(self, action: Action) -> Reply:
        if self._schemas:
            self._result = {}
            said = await super().reply(action)
            is_done = bool(said.done or self._result.get("done"))
            return replace(said, done=is_done, reward=float(self._result.get("reward") or 0.0))
        try:
            result = await self._ask("step", self._action(action.text))
        except (ValueError, ToolError) as error:
            self._num_invalid += 1
            message = Message(role="user", content=f"error: {error}")
            return Reply(messages=(message,), details={"invalid_actions": self._num_invalid}, warnings=(0,))
        return Reply(
            messages=(Message(role="user", content=self._render(result["observation"])),),
            done=bool(result.get("done")),
            reward=float(result.get("reward") or 0.0),
            details={"invalid_actions": self._num_invalid},
        )

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        return False

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    def _caller(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> Any:
            result = await self._ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
            reward = (self._result.get("reward") or 0.0) + (result.get("reward") or 0.0)
            self._result = {"reward": reward, "done": self._result.get("done") or result.get("done")}
            found = result["observation"]
            if found.get("error"):
                raise ToolError(f"error: {found['error'].get('message', found['error'])}")
            return found.get("result", found)

        return call

    def _action(self, text: str) -> Mapping[str, Any]:
        """Read an action from a turn. Raises ValueError if there is none."""
        if self._read is not None:
            return self._read(text)
        fenced, required = _FENCE.search(text), self._form.get("required", [])
        written = fenced[1] if fenced else text.strip()
        try:
            action = json.loads(written)
        except ValueError:
            action = written
        if not isinstance(action, dict):
            if len(required) != 1:
                raise ValueError(f"this is no action, expected JSON with {', '.join(self._form.get('properties', {}))}")
            action = {required[0]: action}
        return action

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message, and return the data of the answer. Raises ToolError for an action that the server refuses,
        and RuntimeError for its other errors.
        """
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        if answer["type"] != "error":
            return dict(answer["data"])
        said = answer["data"]
        if kind == "step" and said.get("code") == "VALIDATION_ERROR":
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in said.get("errors", ()))
            raise ToolError(wrong or said["message"])
        raise RuntimeError(f"the OpenEnv server answers {kind} with {said.get('code')}: {said.get('message')}")
