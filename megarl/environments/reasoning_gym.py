"""Ask the questions of reasoning-gym, which are made anew for each row and scored by the package."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.optional import import_optional
from megarl.data.thoughts import split_thought
from megarl.environments.base import PACKAGES, Action, Environment, Reply
from megarl.environments.calls import in_thread
from megarl.errors import ConfigError, DataError
from megarl.types import Message, Prompt

INSTRUCTION = "Think step by step, then give the answer alone in <answer> </answer> tags."
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def make_dataset(name: str, settings: Mapping[str, Any]) -> Any:
    """Return a dataset of reasoning-gym, with over two billion entries unless `size` is set.

    Raises ConfigError without the package, for an unknown name and for settings that the dataset does not take.
    """
    gym = import_optional("reasoning_gym", package="reasoning-gym", key="reasoning-gym")
    try:
        return gym.create_dataset(name, **{"size": 2**31 - 1, "seed": 0, **settings})
    except Exception as error:
        raise ConfigError(f"reasoning-gym: {name} with {dict(settings)}: {type(error).__name__}: {error}") from error


@PACKAGES.register("reasoning-gym")
class ReasoningGymEnvironment(Environment):
    """An environment of one turn, the answer to a question of reasoning-gym; its row says which, in `extra_info.task`.

    The score of the last `<answer>…</answer>` is the reward; 1 is correct.
    """

    owns_prompt = True

    def __init__(self, name: str, *, settings: Mapping[str, object] | None = None) -> None:
        """Make the environment of one sample. settings: those of the dataset; its `seed` is 0 by default."""
        self._data = _dataset(name, json.dumps(settings or {}, sort_keys=True))
        self._entry: Mapping[str, Any] = {}

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        if not isinstance(task := prompt.extra_info.get("task"), int):
            raise DataError(f"extra_info.task is {task!r}, expected the place of a question; add it to the row")
        self._entry = await in_thread(lambda: self._data[task])
        return (Message(role="user", content=f"{self._entry['question']}\n{INSTRUCTION}"),)

    async def reply(self, action: Action) -> Reply:
        answers = _ANSWER.findall(split_thought(action.text)[1])
        score = 0.0
        if answers:
            score = await in_thread(lambda: self._data.score_answer(answers[-1].strip(), self._entry))
        details = {"correct": score >= 1.0, "parse_failed": float(not answers)}
        return Reply(done=True, reward=min(1.0, max(0.0, float(score))), details=details)

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        await self.start(prompt)
        return True


@functools.cache
def _dataset(name: str, settings: str) -> Any:
    return make_dataset(name, json.loads(settings))
