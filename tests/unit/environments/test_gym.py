"""Environments of the real Gymnasium, played in text."""

import asyncio
import string
from collections.abc import Sequence
from typing import Any

import gymnasium
import pytest

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments import Action, Reply, open_environments
from megarl.environments.gym import GymnasiumEnvironment
from megarl.errors import ConfigError
from megarl.types import Prompt

FIRM_LAKE = {"id": "FrozenLake-v1", "arguments": {"is_slippery": False}}


class Parrot(gymnasium.Env[str, str]):
    """Repeats a text; `bye` ends it."""

    action_space = gymnasium.spaces.Text(5)
    observation_space = gymnasium.spaces.Text(20, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return action, 0.5, False, action == "bye", {}


gymnasium.register("megarl/Parrot-v0", entry_point=Parrot)


def in_brackets(observation: Any) -> str:
    return f"<{observation}>"


def compass(text: str) -> int:
    if text not in ("west", "south", "east", "north"):
        raise ValueError(f"{text} is no direction")
    return ("west", "south", "east", "north").index(text)


def play(
    environment: GymnasiumEnvironment, *turns: str, uid: str = "a", past: Sequence[str] = (), **row: Any
) -> tuple[str, list[Reply]]:
    """What the environment says first, and its replies to these turns."""

    async def run() -> tuple[str, list[Reply]]:
        prompt = Prompt(uid=uid, token_ids=(1,), data_source="d", ground_truth="", extra_info=row)
        first = ""
        if past:
            assert await environment.resume(prompt, [Action(text=text, turn=i) for i, text in enumerate(past)])
        else:
            (message,) = await environment.start(prompt)
            assert message.role == "user"
            first = message.content
        replies = [await environment.reply(Action(text=text, turn=i)) for i, text in enumerate(turns)]
        await environment.close()
        return first, replies

    return asyncio.run(run())


def test_a_walk_over_the_lake() -> None:
    """The map of 4x4 is Gymnasium's own: 1 is down, 2 is right; the goal is at the lower right."""
    first, replies = play(GymnasiumEnvironment(**FIRM_LAKE), *"112", "I go down, so 1", "2", "2")
    assert first == "[S]FFF\nFHFH\nFFFH\nHFFG"
    down, *_, last = replies
    # The environment writes the last move above the map.
    assert down.messages[0].content.endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [reply.done for reply in replies] == [False] * 5 + [True]
    assert [reply.reward for reply in replies] == [0.0] * 5 + [1.0]
    assert last.details == {"invalid_actions": 0}


def test_a_hole_ends_the_walk_without_a_reward() -> None:
    _, replies = play(GymnasiumEnvironment(**FIRM_LAKE), "1", "2")
    assert (replies[-1].done, replies[-1].reward) == (True, 0.0)


def test_a_turn_that_is_no_action_changes_nothing() -> None:
    _, (none, outside, step) = play(GymnasiumEnvironment(**FIRM_LAKE), "hm", "go 7", "1")
    assert none.messages[0].content == "error: there is no number, expected one from 0 to 3"
    assert outside.messages[0].content == "error: 7 is not among the actions Discrete(4)"
    assert (outside.done, outside.details) == (False, {"invalid_actions": 2})
    assert "[F]HFH" in step.messages[0].content


def test_functions_of_your_own_render_and_parse() -> None:
    names = {"render": f"{__name__}:in_brackets", "parse": f"{__name__}:compass"}
    first, (south, error) = play(GymnasiumEnvironment(**FIRM_LAKE, **names), "south", "up")
    assert (first, south.messages[0].content) == ("<0>", "<4>")
    assert error.messages[0].content == "error: up is no direction"
    with pytest.raises(ConfigError, match="actions of Pendulum-v1 are neither discrete nor texts"):
        GymnasiumEnvironment(id="Pendulum-v1")
    assert GymnasiumEnvironment(id="Pendulum-v1", parse=compass)


def test_texts_are_actions_as_they_are() -> None:
    parrot = GymnasiumEnvironment(id="megarl/Parrot-v0")
    _, (hello, long, bye) = play(parrot, " hello\n", "too long", "bye")
    assert (hello.messages[0].content, hello.reward) == ("hello", 0.5)
    assert long.messages[0].content.startswith("error: 'too long' is not among the actions Text(1, 5")
    assert bye.done


def test_samples_of_a_prompt_start_alike() -> None:
    def first(**row: Any) -> str:
        return play(GymnasiumEnvironment(id="megarl/Parrot-v0"), **row)[0]

    assert first(seed=3) == "seed 3"
    # CRC-32 of the texts b and c.
    assert (first(uid="b"), first(uid="c")) == ("seed 1908338681", "seed 112844655")


def test_a_resume_plays_the_actions_again() -> None:
    _, (reply,) = play(GymnasiumEnvironment(**FIRM_LAKE), "2", past=["1", "hm", "1"])
    assert reply.messages[0].content.endswith("SFFF\nFHFH\nF[F]FH\nHFFG")
    assert reply.details == {"invalid_actions": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "FrozenLake-v99"}, "gymnasium makes no FrozenLake-v99 with {}: "),
        ({"id": "FrozenLake-v1", "arguments": {"depth": 3}}, "unexpected keyword argument 'depth'"),
        ({"id": "FrozenLake-v1", "parse": "no.module:f"}, "arguments.parse: no.module does not load"),
    ],
)
def test_what_is_wrong_is_said_at_the_start(arguments: dict[str, Any], message: str) -> None:
    config = EnvironmentConfig(entries={"mine": EnvironmentEntry(type="gymnasium", arguments=arguments)})
    with pytest.raises(ConfigError, match=message):
        open_environments(config, ["mine"])
