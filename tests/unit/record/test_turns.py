"""Conversations as text."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.record.rollouts import JudgedAnswer, read_answers, write_answers
from megarl.record.turns import Turn, last_turn, prompt_text, read_turns, turns_of
from megarl.types import Episode, FinishReason, Prompt, Reward, RowImage, Sample, environment_segment, prompt_segment
from megarl.types.forks import Fork
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
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


def test_the_text_of_a_prompt_says_where_images_stand() -> None:
    """Of five tokens, the second and the third show one, and the last another."""
    shown = [RowImage(places=np.array(places), digest=digest) for places, digest in (([1, 2], "f0"), ([4], "c1"))]
    prompt = prompt_segment([*ids("a"), *ids("xx"), *ids("b"), *ids("x")], tuple(shown))
    assert prompt_text(replace(SAMPLE, segments=(prompt, *SAMPLE.segments[1:])), TOKENIZER) == "a<image f0>b<image c1>"
    assert prompt_text(replace(SAMPLE, segments=(prompt_segment(ids("aé")),)), TOKENIZER) == "aé"


def test_the_text_of_a_reply_says_where_images_stand() -> None:
    said = environment_segment([*ids("a"), *ids("xx")], images=(RowImage(places=np.array([1, 2]), digest="f0"),))
    assert turns_of(replace(SAMPLE, segments=(*SAMPLE.segments, said)), TOKENIZER)[-1].text == "a<image f0>"


def test_turns_say_who_wrote_what() -> None:
    assert turns_of(SAMPLE, TOKENIZER) == (
        Turn(author="demonstration", text="a", num_tokens=1),
        Turn(author="policy", text="bc", reward=0.5, num_tokens=2),
        # Two bytes are one character.
        Turn(author="environment", text="é", num_tokens=2),
        Turn(author="policy", text="d", num_tokens=1),
    )
    policy = (prompt_segment([5]), policy_segment(ids("b")))
    assert turns_of(replace(SAMPLE, episode=None, segments=policy), TOKENIZER) == ()
    # Without a conversation, a demonstration is told from what the policy sampled all the same.
    begun = (policy[0], demonstration_segment(ids("ab")), policy[1])
    assert [
        (turn.author, turn.text) for turn in turns_of(replace(SAMPLE, episode=None, segments=begun), TOKENIZER)
    ] == [
        ("demonstration", "ab"),
        ("policy", "b"),
    ]


def test_a_turn_that_begins_a_branch_names_its_parent() -> None:
    """Branches from within the policy's turn, the prompt, an empty reply's end, and from nothing."""
    segments = (
        prompt_segment([5, 6]),  # 0, 1
        policy_segment(ids("abc")),  # 2 to 4
        environment_segment(ids("x")),  # 5, after "ab"
        policy_segment(ids("d")),  # 6
        environment_segment([]),  # after the prompt's first token
        policy_segment(ids("e")),  # 7
        environment_segment(ids("yz")),  # 8, 9 with nothing before them
        policy_segment(ids("f")),  # 10
        environment_segment(ids("w")),  # 11, after "d"
    )
    forks = (Fork(5, 3), Fork(7, 0), Fork(8, -1), Fork(11, 6))
    turns = turns_of(replace(SAMPLE, segments=segments, forks=forks), TOKENIZER)
    found = [(turn.text, turn.parent, turn.num_kept) for turn in turns]
    assert found == [
        ("abc", None, 0),
        ("x", 0, 2),
        ("d", None, 0),
        ("", -1, 1),
        ("e", None, 0),
        ("yz", -1, 0),
        ("f", None, 0),
        ("w", 2, 1),
    ]


def test_turns_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Those without branches, and those with the texts of tokens."""
    turns = [{"author": "policy", "text": "ab", "reward": 0.5, "num_tokens": 2}]
    older = [{"author": "policy", "text": "ab", "reward": 0.5, "tokens": ["a", "b"]}]
    expected = (Turn(author="policy", text="ab", reward=0.5, num_tokens=2),)
    assert read_turns(turns) == read_turns(older) == expected
    answer = JudgedAnswer.of(
        Prompt(uid="a", token_ids=(5,), data_source="d", ground_truth=""),
        SAMPLE,
        Reward(score=1.0, correct=True),
        greedy=False,
        tokenizer=TOKENIZER,
    )
    path = tmp_path / "answers.parquet"
    write_answers(path, [replace(answer, turns=expected)])
    table = pq.read_table(path)
    place = table.schema.get_field_index("turns")
    pq.write_table(table.set_column(place, "turns", pa.array([turns])), path)
    assert "parent" not in str(pq.read_schema(path))
    assert read_answers(path)[0].turns == expected


def test_the_last_turn_is_what_follows_the_last_reply() -> None:
    turns = turns_of(SAMPLE, TOKENIZER)
    assert last_turn(turns, "") == "d"
    assert last_turn(turns[:2], "") == "abc"
    assert last_turn((), "whole") == "whole"
