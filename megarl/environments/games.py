"""Define the small environments that examples and tests train on: a calculator, a game, totals, and sub-agents."""

import re
from collections.abc import Sequence

from megarl.environments.base import ENVIRONMENTS, Action, Environment, Reply
from megarl.environments.tools import ToolEnvironment
from megarl.types import Message, Prompt
from megarl_answers import after_thoughts


def calc(a: str, b: str) -> str:
    """Multiply two numbers."""
    return str(int(a) * int(b))


@ENVIRONMENTS.register("calculator")
class Calculator(ToolEnvironment):
    """A calculator: a turn that is exactly `calc 37*48` is answered `1776`; any other turn ends the conversation."""

    def __init__(self) -> None:
        super().__init__(tools=[calc], patterns={"calc": r"calc (?P<a>\d{1,6})\*(?P<b>\d{1,6})"}, in_prompt=False)


@ENVIRONMENTS.register("guess")
class GuessingGame(Environment):
    """A game in which the policy guesses a number; after a wrong guess it reads the range that is left, as `32-63`.

    A row's `extra_info` has `number`, `low`, `high` and `guesses`, the number of guesses. The reward is 1 for a right
    guess. A turn that is not a number within the first range ends the game.
    """

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        row = prompt.extra_info
        self._number, self._low, self._high = int(row["number"]), int(row["low"]), int(row["high"])
        self._guesses = int(row["guesses"])
        return ()

    async def reply(self, action: Action) -> Reply:
        if not re.fullmatch(r"\d{1,6}", action.text.strip()):
            return Reply(done=True, details={"correct": False})
        guess = int(action.text)
        if guess == self._number or action.turn + 1 >= self._guesses:
            is_right = guess == self._number
            return Reply(done=True, reward=float(is_right), details={"correct": is_right})
        if guess < self._number:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        return Reply(messages=(Message(role="user", content=f"{self._low}-{self._high}"),))

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        await self.start(prompt)
        for action in actions:
            await self.reply(action)
        return True


@ENVIRONMENTS.register("tally")
class RunningTotal(Environment):
    """A total to which each message adds. A right total earns its share of 1; a wrong one ends the conversation.

    A row's ground truth has all messages, such as `5+7+3 +6+4`. A turn is a total, after a thought or not.
    """

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self._messages = prompt.ground_truth.split()
        return ()

    async def reply(self, action: Action) -> Reply:
        number = action.turn + 1
        total = sum(map(int, re.findall(r"\d+", "".join(self._messages[:number]))))
        is_right = after_thoughts(action.text) == str(total)
        is_last = number == len(self._messages)
        reward = is_right / len(self._messages)
        if is_last or not is_right:
            return Reply(done=True, reward=reward, details={"correct": is_right})
        return Reply(messages=(Message(role="user", content=self._messages[number]),), reward=reward)

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        await self.start(prompt)
        return True


@ENVIRONMENTS.register("delegate")
class Delegation(Environment):
    """Sub-agents that the policy may ask, which are the policy itself with a prompt of their own.

    After a turn that is exactly `ask 5+7+3` the policy reads `5+7+3=?` and nothing else; what it then writes after its
    last `#### ` is the reply to the turn that asked. Any other turn ends the conversation.
    """

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self._asked: int | None = None
        return ()

    async def reply(self, action: Action) -> Reply:
        if self._asked is not None:
            result = Message(role="user", content=action.text.rpartition("#### ")[2])
            asked, self._asked = self._asked, None
            return Reply(messages=(result,), after_turn=asked)
        if (task := re.fullmatch(r"ask ([\d+]{1,40})", action.text)) is None:
            return Reply(done=True)
        self._asked = action.turn
        return Reply(context=(Message(role="user", content=f"{task[1]}=?"),), num_calls=1)
