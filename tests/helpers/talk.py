"""Environments for whole runs with a model of random weights, whose turns say nothing."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megarl.environments import Action, Environment, Reply
from megarl.types import Message, Prompt

NUM_REPLIES = 5


def talk_settings(*, calls: Path | None = None, kind: str = "Talk") -> tuple[str, ...]:
    """Settings of a run whose samples all talk to such an environment; each reply adds a byte to `calls`."""
    arguments = f"arguments: {{calls: {calls}}}" if calls else "arguments: {}"
    entry = f"{{type: {Path(__file__).resolve()}:{kind}, {arguments}}}"
    return (f"environment.entries={{talk: {entry}}}", "environment.default=talk", "environment.max_turn_tokens=40")


class Talk(Environment):
    """Replies five times, each time with the length of the turn, after a moment."""

    delay_s = 0.02

    def __init__(self, *, calls: str | None = None) -> None:
        self._calls = calls

    async def reply(self, action: Action) -> Reply:
        if self._calls is not None:
            with Path(self._calls).open("a") as file:
                file.write(".")
        await asyncio.sleep(self.delay_s)
        reward = float(len(action.text) % 3)
        if action.turn == NUM_REPLIES:
            return Reply(done=True, reward=reward)
        message = Message(role="tool", content=f"{len(action.text)}!")
        return Reply(messages=(message,), reward=reward, num_calls=1, details={"chars": len(action.text)})

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        return True


class Forgetful(Talk):
    """Cannot go on where another object of it was."""

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        return False


class Search(Talk):
    """Tries the first turn three times, and goes on once from the first and once from the second try."""

    num_tries = 3

    async def choose(self, actions: Sequence[Action]) -> Reply:
        self.num_tries = 1
        rewards = {action.turn: float(len(action.text) % 3) for action in actions}
        return Reply(messages=(Message(role="tool", content="So?"),), after_turn=0, rewards=rewards)

    async def reply(self, action: Action) -> Reply:
        reward = float(len(action.text) % 3)
        messages = (Message(role="tool", content="Well?"),)
        return Reply(messages=messages, after_turn=1, reward=reward, done=action.turn == 4)

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        self.num_tries = 1 if actions else 3
        return True
