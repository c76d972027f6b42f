"""Let the policy work on files by commands of a shell in a sandbox, and check what it has made of them."""

import asyncio
from collections.abc import Mapping, Sequence

from megarl.environments.base import ENVIRONMENTS, Action, Environment, Reply, SideRequest
from megarl.environments.calls import LateError, attempt
from megarl.environments.parsers import PARSERS, ToolCall, read_calls
from megarl.environments.sandboxes import WorkSandbox
from megarl.environments.tools import without_middle
from megarl.environments.work import Work
from megarl.types import Message, Prompt

_TOOL = {
    "name": "bash",
    "description": "Run a command in the workspace. Files last from one call to the next, processes do not.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The command, as for bash -c."}},
        "required": ["command"],
    },
}


@ENVIRONMENTS.register("shell")
class ShellEnvironment(Environment):
    """An environment in which the policy works on files of its own by a tool `bash`.

    A turn without a call ends the work, and `check` decides: the reward is 1 if it succeeds. With several tries, the
    first turn is written so often; each try works on a fork of the same files, and has its share of the reward.
    """

    tools = ({"type": "function", "function": _TOOL},)

    def __init__(
        self,
        *,
        check: Sequence[str],
        workspace: str | None = None,
        sandbox: str = "bubblewrap",
        sandbox_settings: Mapping[str, object] | None = None,
        patch: bool = False,
        tries: int = 1,
        parser: str = "hermes",
        timeout_s: float = 60.0,
        max_result_chars: int = 4096,
    ) -> None:
        """Make the environment of one sample.

        check, workspace, sandbox, sandbox_settings, patch: see `Work`. parser: how calls are written. timeout_s: of a
        command. max_result_chars: longer results are cut in the middle.
        """
        self._work = Work(
            check=check, workspace=workspace, sandbox=sandbox, sandbox_settings=sandbox_settings, patch=patch
        )
        self._parse, self._timeout_s, self._max_result_chars = PARSERS.get(parser), timeout_s, max_result_chars
        self.num_tries = self._tries = tries
        # Those of the branches that go on, in the order in which the policy is asked.
        self._sandboxes: list[WorkSandbox] = []
        self._reward = 0.0

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        first = await self._work.begin(prompt, self.process_environment)
        self._sandboxes = [first, *[await self._work.fork(first) for _ in range(self._tries - 1)]]
        return ()

    async def reply(self, action: Action) -> Reply:
        return await self.choose([action])

    async def choose(self, actions: Sequence[Action]) -> Reply:
        calls = [[] if each.is_cut else read_calls(self._parse, each.text, lambda: self.tools) for each in actions]
        done = await asyncio.gather(*map(self._step, self._sandboxes, calls))
        steps = [*zip(actions, self._sandboxes, done, strict=True)]
        rewards = {action.turn: said / self._tries for action, _, said in steps if isinstance(said, float)}
        self._reward += sum(rewards.values())
        going = [(action.turn, said) for action, _, said in steps if not isinstance(said, float)]
        self._sandboxes = [sandbox for _, sandbox, said in steps if not isinstance(said, float)]
        self.num_tries, details = 1, {"correct": self._reward > 0}
        self.beside = [SideRequest(messages=said, after_turn=turn, tools=self.tools) for turn, said in going[1:]]
        after, messages = going[0] if going else (None, ())
        return Reply(
            messages=messages,
            after_turn=after,
            done=not going,
            rewards=rewards,
            num_calls=sum(map(len, calls)),
            details=details,
        )

    async def close(self) -> None:
        await self._work.close()

    async def _step(self, sandbox: WorkSandbox, calls: Sequence[ToolCall]) -> tuple[Message, ...] | float:
        """Run what a turn calls; return what the policy reads of it, or the reward with which its branch ends."""
        if not calls:
            return float(await self._work.passes(sandbox))
        return tuple([Message(role="tool", content=await self._result(sandbox, call)) for call in calls])

    async def _result(self, sandbox: WorkSandbox, call: ToolCall) -> str:
        command = call.arguments.get("command")
        if call.error or call.name != "bash" or not isinstance(command, str):
            return f"error: {call.error or 'this is no call of bash with a command'}"
        variables = self.process_environment
        try:
            ended = await attempt(
                lambda: sandbox.run(["bash", "-c", f"exec 2>&1; {command}"], variables=variables), self._timeout_s
            )
        except LateError as late:
            return f"error: the command {late}"
        text = without_middle(ended.output.decode(errors="replace"), self._max_result_chars)
        return f"{text}[exit code {ended.exit_code}]" if ended.exit_code else text or "(no output)"
