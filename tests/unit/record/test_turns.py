"""Conversations as text."""

from dataclasses import replace

from megarl.recipes.tiny_model import make_byte_tokenizer
from megarl.record.turns import Turn, last_turn, turns_of
from megarl.types import Episode, FinishReason, Sample, environment_segment, prompt_segment
from tests.helpers.segments import demonstration_segment, policy_segment

TOKENIZER = make_byte_tokenizer()


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return encoded


SAMPLE = Sample(
    uid="a",
    sample_index=0,
    seed=0,
    # A demonstration that the policy goes on from, in two parts since it was resumed; a reply; a last turn.
    segments=(
        prompt_segment([5]),
        demonstration_segment(ids("a")),
        policy_segment(ids("b")),
        replace(policy_segment(ids("c"), logprob=-2.0), reward=0.5),
        environment_segment(ids("é")),
        policy_segment(ids("d")),
    ),
    finish_reason=FinishReason.STOP,
    episode=Episode(environment="game"),
)


def test_turns_say_who_wrote_what() -> None:
    assert turns_of(SAMPLE, TOKENIZER) == (
        Turn(author="demonstration", text="a", num_tokens=1),
        Turn(author="policy", text="bc", reward=0.5, num_tokens=2),
        # Two bytes are one character.
        Turn(author="environment", text="é", num_tokens=2),
        Turn(author="policy", text="d", num_tokens=1),
    )
    assert turns_of(replace(SAMPLE, episode=None), TOKENIZER) == ()


def test_the_last_turn_is_what_follows_the_last_reply() -> None:
    turns = turns_of(SAMPLE, TOKENIZER)
    assert last_turn(turns, "") == "d"
    assert last_turn(turns[:2], "") == "abc"
    assert last_turn((), "whole") == "whole"
