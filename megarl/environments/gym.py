"""Play environments of Gymnasium in text: observations are written for the policy, and its turns read as actions."""

import functools
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from megarl.config.optional import import_optional
from megarl.environments.base import ENVIRONMENTS, Action, Environment, Reply, load_object
from megarl.environments.calls import in_thread
from megarl.errors import ConfigError
from megarl.host.masking import masked_text
from megarl.types import Message, Prompt

KEY = "environment.entries.*.arguments"
# Colours, by which environments in text mark where an agent is; `0` ends one.
_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")

# Writes an observation for the policy, and reads an action from a turn; ValueError says what is wrong with the turn.
Render: TypeAlias = Callable[[Any], str]
Parse: TypeAlias = Callable[[str], object]


@ENVIRONMENTS.register("gymnasium")
class GymnasiumEnvironment(Environment):
    """An environment of Gymnasium (the package `gymnasium`), made by its id.

    The first observation follows the prompt's messages, which should explain the game. A turn that is not an action is
    answered with what is wrong, and changes nothing. Samples of one prompt start from the same state: the seed is the
    row's `extra_info["seed"]`, or else follows from the prompt's id. A conversation goes on after a resume by playing
    its actions again, which assumes that the environment depends on nothing but its seed.
    """

    def __init__(
        self,
        *,
        id: str,
        arguments: Mapping[str, object] | None = None,
        render: str | Render | None = None,
        parse: str | Parse | None = None,
    ) -> None:
        """Make the environment of one sample.

        arguments: those of `gymnasium.make`. render: a function, or its name as MODULE:FUNCTION or FILE.py:FUNCTION, by
        default what the environment renders in the mode `ansi`, else the observation as Python writes it. parse: such a
        function, by default the last whole number of a turn for discrete actions, and the whole turn for texts.
        """
        self._id, self._arguments = id, dict(arguments or {})
        mode, has_parser = _look_up(id, json.dumps(self._arguments, sort_keys=True, default=repr))
        if mode and render is None:
            self._arguments.setdefault("render_mode", mode)
        if parse is None and not has_parser:
            raise ConfigError(
                f"{KEY}.parse: actions of {id} are neither discrete nor texts; name a function that reads them"
            )
        self._render = load_object(render, f"{KEY}.render") if isinstance(render, str) else render
        self._parse = load_object(parse, f"{KEY}.parse") if isinstance(parse, str) else parse
        self._env: Any = None
        self._num_invalid = 0

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        seed = int((prompt.extra_info or {}).get("seed", zlib.crc32(prompt.uid.encode())))

        def begin() -> str:
            self._env = _gymnasium().make(self._id, **self._arguments)
            observation, _ = self._env.reset(seed=seed)
            return self._written(observation)

        return (Message(role="user", content=await in_thread(begin)),)

    async def reply(self, action: Action) -> Reply:
        try:
            move = self._read(action.text)
        except ValueError as error:
            self._num_invalid += 1
            said = Message(role="user", content=f"error: {error}")
            return Reply(messages=(said,), details={"invalid_actions": self._num_invalid})

        def step() -> tuple[str, float, bool]:
            observation, reward, terminated, truncated, _ = self._env.step(move)
            return self._written(observation), float(reward), bool(terminated or truncated)

        text, reward, done = await in_thread(step)
        details = {"invalid_actions": self._num_invalid}
        return Reply(messages=(Message(role="user", content=text),), done=done, reward=reward, details=details)

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        await self.start(prompt)
        for action in actions:
            await self.reply(action)
        return True

    async def close(self) -> None:
        if self._env is not None:
            await in_thread(self._env.close)

    def _written(self, observation: object) -> str:
        if self._render is not None:
            return self._render(observation)
        if self._arguments.get("render_mode") != "ansi":
            return str(observation)
        return _COLOUR.sub(lambda found: "]" if found[1] in ("", "0") else "[", self._env.render()).strip("\n")

    def _read(self, text: str) -> object:
        """Return the action of a turn. Raises ValueError if there is none that the environment allows."""
        space = self._env.action_space
        if self._parse is not None:
            move = self._parse(text)
        elif type(space).__name__ == "Discrete":
            numbers = re.findall(r"-?\d+", text)
            if not numbers:
                raise ValueError(f"there is no number, expected one from {space.start} to {space.start + space.n - 1}")
            move = int(numbers[-1])
        else:
            move = text.strip()
        if not space.contains(move):
            raise ValueError(f"{move!r} is not among the actions {space}")
        return move


def _gymnasium() -> ModuleType:
    return import_optional("gymnasium", package="gymnasium", key="environment.entries.*.type=gymnasium")


@functools.cache
def _look_up(name: str, arguments: str) -> tuple[str | None, bool]:
    """Return the mode in which an environment renders text, if any, and whether actions are read without `parse`.

    Raises ConfigError if it cannot be made with these arguments.
    """
    gymnasium = _gymnasium()
    try:
        made = gymnasium.make(name, **json.loads(arguments))
    except Exception as error:
        raise ConfigError(
            f"{KEY}: gymnasium makes no {name} with {masked_text(arguments)}: {type(error).__name__}: {error}"
        ) from error
    is_simple = isinstance(made.action_space, gymnasium.spaces.Discrete | gymnasium.spaces.Text)
    modes = made.metadata.get("render_modes", ())
    made.close()
    return "ansi" if "ansi" in modes else None, is_simple
