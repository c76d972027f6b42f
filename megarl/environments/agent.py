"""Let an agent with a loop of its own lead the conversation: it requests turns from the policy as from any API."""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.environments.base import ENVIRONMENTS, Action, Environment, Reply, SideRequest, load_object
from megarl.environments.calls import AGENT_THREADS, contained
from megarl.environments.chat import Chat
from megarl.environments.endpoint import chat_server
from megarl.environments.parsers import PARSERS
from megarl.errors import ConfigError
from megarl.host.janitor import program_variables
from megarl.host.masking import require_no_secrets
from megarl.types import Message, Prompt

KEY = "environment.entries.*.arguments"
# The chat's URL is its secret; clients want some key all the same.
API_KEY = "megarl"
# This much of the end of a program's output is kept; its last line counts.
MOST_OUTPUT_BYTES, MOST_ERROR_BYTES = 1 << 20, 1 << 14


@ENVIRONMENTS.register("agent")
class AgentEnvironment(Environment):
    """An environment whose other side is an agent: a function or a program that uses OpenAI's or Anthropic's client.

    The agent's first request is the prompt; one that adds to an answered one brings the reply to that answer; any other
    is a branch of its own, see `Chat`; those that come together are answered together, and one with `n` is answered by
    so many branches. Its end ends the conversation. It returns the reward, or a mapping with `reward`, `rewards` of
    single turns by the ids of completions, and further findings.
    """

    owns_prompt = True

    def __init__(
        self,
        *,
        agent: str | Callable[..., Any] | None = None,
        command: Sequence[str] = (),
        parser: str | None = "hermes",
        untrained_models: Sequence[str] = ("side",),
    ) -> None:
        """Make the environment of one sample.

        agent: a function as MODULE:NAME or FILE.py:NAME, called with `prompt`, `base_url` and `api_key`; async ones
        share the host's event loop, others get a thread. command: instead, a program and its arguments. It gets
        OPENAI_BASE_URL, OPENAI_API_KEY and the same for ANTHROPIC, and reads the row as JSON; if its last line is a
        JSON object, that is what it returns. parser: how the policy writes calls of tools, see `tools`; null: a turn is
        text. untrained_models: turns that are asked for by such a name, as patterns with *, do not train.
        """
        if (agent is None) == (not command):
            raise ConfigError(f"{KEY}: got agent={agent!r} and command={list(command)}, expected one of them")
        require_no_secrets(command, f"{KEY}.command")
        if command and shutil.which(command[0]) is None:
            raise ConfigError(f"{KEY}.command: there is no program {command[0]!r}; name one on PATH, or its path")
        function = load_object(agent, f"{KEY}.agent") if isinstance(agent, str) else agent
        self._call: Callable[[Prompt, str], Awaitable[object]]
        if function is None:
            self._call = lambda prompt, url: _ask_program(command, prompt, url, self.process_environment)
        elif inspect.iscoroutinefunction(function):
            self._call = lambda prompt, url: function(prompt=prompt, base_url=url, api_key=API_KEY)
        else:
            self._call = lambda prompt, url: asyncio.get_running_loop().run_in_executor(
                AGENT_THREADS, functools.partial(function, prompt=prompt, base_url=url, api_key=API_KEY)
            )
        self._chat = Chat(PARSERS.get(parser) if parser else None, tuple(untrained_models))
        self._running: asyncio.Future[Any] | None = None

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self._chat.count_tokens, self._chat.read_image = self.count_tokens, self.read_image
        self._running = asyncio.ensure_future(contained(self._call(prompt, chat_server().open(self._chat))))
        self._running.add_done_callback(lambda _: self._chat.end())
        if (asked := await self._next_question(self._running)) is None:
            raise RuntimeError("the agent ended without a request")
        return asked.context

    async def reply(self, action: Action) -> Reply:
        return await self.choose([action])

    async def choose(self, actions: Sequence[Action]) -> Reply:
        assert self._running is not None, "it was started"
        num_calls = self._chat.answer(actions)
        if (asked := await self._next_question(self._running)) is not None:
            return Reply(
                messages=asked.messages, context=asked.context, after_turn=asked.after_turn, num_calls=num_calls
            )
        returned = self._running.result()
        found: dict[str, object] = {f"branches_{cause}": count for cause, count in self._chat.branches.items()}
        counts = {"refused_requests": self._chat.num_refused, "changed_calls": len(self._chat.messages.changed)}
        found |= {name: count for name, count in counts.items() if count}
        if returned is None or isinstance(returned, int | float):
            return Reply(done=True, reward=float(returned or 0), num_calls=num_calls, details=found)
        if not isinstance(returned, Mapping):
            raise TypeError(f"the agent returned {type(returned).__name__}, expected a number or a mapping with reward")
        details = found | {str(name): value for name, value in returned.items() if name not in ("reward", "rewards")}
        return Reply(
            done=True,
            reward=float(returned.get("reward", 0)),
            rewards=self._by_turn(returned.get("rewards") or {}),
            num_calls=num_calls,
            details=details,
        )

    def _by_turn(self, rewards: Mapping[str, Any]) -> dict[int, float]:
        """Return rewards by turn, given those by the id of a completion: a number, or one for each of its choices."""
        found: dict[int, float] = {}
        for name, of_choices in rewards.items():
            turns = self._chat.turns.get(name, [])
            each = [of_choices] if isinstance(of_choices, int | float) else list(of_choices)
            if (count := len(turns)) != len(each):
                raise ValueError(f"rewards[{name!r}] is {of_choices}, expected a number for each of {count} choices")
            found |= {turn: float(reward) for turn, reward in zip(turns, each, strict=True)}
        return found

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            chat_server().close(self._chat)
            await asyncio.wait([self._running])
            if not self._running.cancelled():
                # Nobody asks any more how it ended.
                self._running.exception()

    async def _next_question(self, running: asyncio.Future[Any]) -> SideRequest | None:
        """Wait for the agent's next requests, and return the first of them; None if the agent ended.

        Raises its error if it failed.
        """
        if not (asked := await self._chat.next_questions()):
            running.result()
            return None
        # An agent may end with an error because its request was wrong: the request says more.
        first, *self.beside = asked
        self.max_turn_tokens, self.num_tries = first.max_turn_tokens, first.num_tries
        self.tools, self.trains, self.stop = first.tools, first.trains, first.stop
        return first


async def _ask_program(
    command: Sequence[str], prompt: Prompt, url: str, variables: Mapping[str, str]
) -> Mapping[str, object] | None:
    """Run an agent's program, which reads the row as JSON; return the JSON object in the last line that it writes, if
    there is one.

    Raises RuntimeError if it fails, and if the last line that it writes is too long.
    """
    messages: list[Mapping[str, object]] = [
        each.as_dict()
        | ({"content": each.parts(lambda url: {"type": "image_url", "image_url": {"url": url}})} if each.images else {})
        for each in prompt.messages
    ]
    row: dict[str, object] = {"uid": prompt.uid, "messages": messages}
    row |= {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth, "extra_info": prompt.extra_info}
    ended = await run_program(command, json.dumps(row, default=str), {**variables, **endpoint_variables(url)})
    ended.require_success("the agent's program")
    before, _, last = ended.output.strip().rpartition(b"\n")
    if len(ended.output) == MOST_OUTPUT_BYTES and not before:
        raise RuntimeError(f"the last line of the agent's program has over {MOST_OUTPUT_BYTES} bytes; shorten it")
    with contextlib.suppress(ValueError):
        found = json.loads(last.decode(errors="replace"))
        return found if isinstance(found, dict) else None
    return None


def endpoint_variables(url: str) -> dict[str, str]:
    """Return the environment variables by which clients of OpenAI and Anthropic find a chat's URL."""
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": API_KEY,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": API_KEY,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The result of a program: its exit code, and the last bytes of its output and of its errors."""

    exit_code: int
    output: bytes
    errors: bytes

    def require_success(self, name: str) -> None:
        """Raise RuntimeError if the program failed, with the last line of what it wrote that says `error`, or just the
        last.
        """
        if self.exit_code:
            lines = (self.errors.strip() or self.output.strip()).decode(errors="replace").splitlines() or [""]
            said = [line for line in lines if "error" in line.lower()] or lines
            raise RuntimeError(f"{name} ended with {self.exit_code}: {said[-1].strip()}")


async def run_program(
    command: Sequence[str],
    text: str,
    variables: Mapping[str, str],
    folder: Path | None = None,
    *,
    inherits: Sequence[socket.socket] | None = None,
) -> Ended:
    """Run a program that reads `text`. Whatever it started in its session ends with it.

    inherits: sockets that it has open, by default the one that holds the endpoint's port, through which a program can
    reach the network.
    """
    inherits = [chat_server().held] if inherits is None else inherits
    # A file, as a pipe breaks where a program ends without reading.
    with tempfile.TemporaryFile() as given:
        given.write(text.encode(errors="surrogateescape"))
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=given,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            env={**variables, **program_variables()},
            pass_fds=[each.fileno() for each in inherits],
            start_new_session=True,
        )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        reading = (_end_of(process.stdout, MOST_OUTPUT_BYTES), _end_of(process.stderr, MOST_ERROR_BYTES))
        output, errors = await asyncio.gather(*reading)
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return Ended(exit_code=code, output=output, errors=errors)


async def _end_of(stream: asyncio.StreamReader, most: int) -> bytes:
    """Read a stream to its end, and return its last bytes."""
    tail = bytearray()
    while part := await stream.read(1 << 16):
        tail += part
        del tail[:-most]
    return bytes(tail)
