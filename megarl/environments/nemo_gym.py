"""Play tasks of NeMo Gym: its resources servers seed a session, run tools and verify what the policy did."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from megarl.data.thoughts import split_thought
from megarl.environments.base import PACKAGES, Action, Reply
from megarl.environments.parsers import ToolCall, read_calls
from megarl.environments.tools import ToolEnvironment, ToolError
from megarl.errors import ConfigError, DataError
from megarl.host.http_replies import BOUNDED
from megarl.types import Message, Prompt

# Where Gym's head server is unless its configuration says otherwise.
HEAD = "http://127.0.0.1:11000"


@PACKAGES.register("nemo-gym")
class NemoGymEnvironment(ToolEnvironment):
    """An environment of a resources server that `gym env start` has started.

    The row's `extra_info` is a row of Gym's data: `responses_create_params` has the messages and tools. A turn without
    a call ends the conversation, and the server verifies it.
    """

    owns_prompt = True

    def __init__(self, name: str, *, head: str = HEAD, **arguments: Any) -> None:
        """Make the environment of one sample.

        name: of the server in Gym's configuration. head: the URL of Gym's head server. arguments: those of `tools`.
        """
        super().__init__(**arguments)
        self._name, self._head = name, head.rstrip("/")
        # Its cookies are the session.
        self._client = httpx.AsyncClient(
            trust_env=False, timeout=None, verify=head.startswith("https:"), event_hooks=BOUNDED
        )
        self._row: Mapping[str, Any] = {}
        self._schemas: Sequence[Mapping[str, Any]] = ()
        self._output: list[Mapping[str, Any]] = []

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:  # type: ignore[override]
        return self._schemas

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        asked = prompt.extra_info.get("responses_create_params")
        if not isinstance(asked, Mapping) or not asked.get("input"):
            raise DataError("extra_info has no responses_create_params with input; give the row of NeMo Gym's data")
        self._row = prompt.extra_info
        self._client.base_url = await self._find()
        (await self._client.post("seed_session", json=self._row)).raise_for_status()
        tools = asked.get("tools") or ()
        self._schemas = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in tools]
        self._functions = {tool["name"]: self._caller(tool["name"]) for tool in tools}
        said = [{"role": "user", "content": asked["input"]}] if isinstance(asked["input"], str) else asked["input"]
        first = [{"role": "system", "content": asked["instructions"]}] if asked.get("instructions") else []
        for each in (*first, *said):
            if not isinstance(each.get("content"), str):
                raise DataError(f"responses_create_params.input has {str(each)[:80]}, expected messages of text")
        roles = {"developer": "system"}
        return [Message(role=roles.get(m["role"], m["role"]), content=m["content"]) for m in (*first, *said)]

    async def _find(self) -> str:
        """Return the URL of the server. Raises ConfigError if Gym does not run it."""
        try:
            found = (await self._client.get(f"{self._head}/server_instances")).raise_for_status().json()
        except httpx.HTTPError as error:
            raise ConfigError(
                f"environment.entries.*.arguments.head: there is no head server of NeMo Gym at {self._head} "
                f"({error!r}); start its servers with gym env start"
            ) from error
        places = {each["process_name"]: each["url"] for each in found if each["server_type"] == "resources_servers"}
        if self._name not in places:
            raise ConfigError(
                f"environment.entries.*.type: NeMo Gym runs no resources server {self._name!r}, expected one of: "
                f"{', '.join(sorted(places))}"
            )
        return str(places[self._name])

    async def reply(self, action: Action) -> Reply:
        thought, text = split_thought(action.text)
        calls = [] if action.is_cut else read_calls(self._parse, action.text, lambda: self.tools)
        for call in calls:
            text = text.replace(call.source, "", 1)
        if thought:
            summary = {"type": "summary_text", "text": thought}
            self._output.append({"id": f"rs_{action.turn}", "type": "reasoning", "summary": [summary]})
        if text.strip() or not calls:
            content = {"type": "output_text", "text": text.strip(), "annotations": []}
            message = {"role": "assistant", "status": "completed", "content": [content]}
            self._output.append({"id": f"msg_{action.turn}", "type": "message", **message})
        return await super().reply(action)

    async def answer(self, action: Action) -> Reply:
        params = self._row["responses_create_params"]
        response = {
            "id": "resp_megarl",
            "object": "response",
            "created_at": 0,
            "model": "policy",
            "status": "incomplete" if action.is_cut else "completed",
            "output": self._output,
            "tools": params.get("tools") or [],
            "tool_choice": params.get("tool_choice", "auto"),
            "parallel_tool_calls": params.get("parallel_tool_calls", True),
        }
        verified = (await self._client.post("verify", json={**self._row, "response": response})).raise_for_status()
        found = verified.json()
        details = {k: v for k, v in found.items() if isinstance(v, int | float) and k not in ("reward", *self._row)}
        return Reply(done=True, reward=float(found["reward"]), details=details)

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        return False

    async def close(self) -> None:
        await self._client.aclose()

    async def _run(self, call: ToolCall) -> tuple[Message, bool]:
        said, is_error = await super()._run(call)
        name = f"call_{len(self._output)}"
        asked = {"type": "function_call", "call_id": name, "name": call.name, "arguments": json.dumps(call.arguments)}
        self._output += [asked, {"type": "function_call_output", "call_id": name, "output": said.content}]
        return said, is_error

    def _caller(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> str:
            answer = await self._client.post(name, json=arguments)
            if answer.is_error:
                raise ToolError(answer.text)
            return answer.text

        return call
