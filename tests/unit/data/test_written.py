"""Structures that files hold as text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.schema import DataConfig
from megarl.data.files import RowFiles
from megarl.data.messages import read_answer
from megarl.data.records import (
    parse_demonstration,
    parse_preference,
    parse_prompt,
    parse_target_probs,
    preference_columns,
)
from megarl.errors import DataError
from megarl.types import Message

TURNS = [{"role": "system", "content": 'You add, "exactly".\nIt\'s easy.'}, {"role": "user", "content": "1+1=? größe"}]
MESSAGES = tuple(Message(**turn) for turn in TURNS)
ROW = {"data_source": "mine", "reward_model": {"ground_truth": "2"}}


def prompt_of(prompt: Any, **changes: Any) -> tuple[Message, ...]:
    return parse_prompt({**ROW, "prompt": prompt, **changes}, "x row 0").messages


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(TURNS),
        json.dumps(TURNS, ensure_ascii=False, indent=2),
        f"\n {json.dumps(TURNS)}\n",
        str(TURNS),  # as pandas writes lists into CSV
        json.dumps(json.dumps(TURNS)),  # written twice
    ],
)
def test_turns_written_as_text_are_turns(text: str) -> None:
    assert prompt_of(text) == MESSAGES


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2] is a list; what is its sum?",
        "[1, 2]",
        '[{"a": 1}]',
        '{"a": 1}',
        "[]",
        "{}",
        "null",
        "12",
        '"Hello"',
        '[{"role": "admin", "name": "Bob"}]',  # data about roles
        '[{"role": "user", "content": "hi"}] What is wrong with this?',
        '[{"role": "user", "content": "hi"}, Complete this',
        '[{"role": "user", "content": "hi"}] Mend it, as in [this]',
        '[{"role": "user", "content": "hi"}, {"a": 1}]',
        "[INST] Hello [/INST]",
        "[{'a': 1}, nothing",
    ],
)
def test_a_prompt_that_only_begins_like_a_list_stays_a_prompt(text: str) -> None:
    assert prompt_of(text) == (Message(role="user", content=text),)


def test_malformed_turns_are_refused_as_those_of_a_list_are() -> None:
    text = json.dumps([*TURNS, {"role": "assistant", "tool_calls": []}])
    with pytest.raises(DataError, match=r"^x row 0: prompt\[2\]: content is missing, expected a string"):
        prompt_of(text)
    with pytest.raises(DataError, match=r"^x row 0: prompt is dict, expected a list of"):
        prompt_of(json.dumps(TURNS[1]))
    half = json.dumps([{"role": "user", "content": "happy \ud83d"}])
    with pytest.raises(DataError, match=r"^x row 0: prompt\[0\]\.content has '\\ud83d' at position 6"):
        prompt_of(half)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Cut within a turn, as by a spreadsheet's limit on cells.
        (json.dumps(TURNS)[:60], "turns of which the end is missing after 60 characters"),
        (str([TURNS[1]])[:30], "turns of which the end is missing after 30 characters"),
        (json.dumps(TURNS[1:]).replace('"', '\\"'), "turns whose quotes are escaped once too often"),
        (json.dumps(TURNS[1:]).replace('"', '""'), "turns whose quotes are escaped once too often"),
        (json.dumps({"messages": TURNS}), "a text of turns within a dict"),
        (json.dumps([TURNS]), "a text of turns within a list"),
    ],
)
def test_turns_that_are_not_whole_are_no_words(text: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"^x row 0: prompt is .*, {message}.*; write "):
        prompt_of(text)


ROLES = {
    "User": "write 'user'",
    "USER": "write 'user'",
    "Human": "write 'user'",
    "prompter": "write 'user'",
    "ASSISTANT ": "write 'assistant'",
    "gpt": "write 'assistant'",
    "model": "write 'assistant'",
    "ai": "write 'assistant'",
    "System": "write 'system'",
    "": "rename it to that of these which speaks there",
}


@pytest.mark.parametrize("role", ROLES)
def test_another_spelling_of_a_role_is_refused_with_the_one_that_is_meant(role: str) -> None:
    """ChatML's templates would write it as a speaker that the model has never seen."""
    said = rf" is '{role}', expected one of \['assistant', 'system', 'tool', 'user'\]; {ROLES[role]}$"
    with pytest.raises(DataError, match=r"^x row 0: prompt\[0\]: role" + said):
        prompt_of([{"role": role, "content": "?"}])
    if role != "gpt":
        with pytest.raises(DataError, match=r"^x: conversations\[0\]: from" + said):
            parse_demonstration({"conversations": [{"from": role, "value": "?"}]}, "x")
    assert prompt_of([{"role": "critic", "content": "?"}])[0].role == "critic"


def test_what_turns_and_rows_hold_besides_text_is_not_lost() -> None:
    answer = {"role": "assistant", "content": "2"}
    for key in ("tool_calls", "thinking", "reasoning"):
        turns = [TURNS[1], {**answer, key: [{"name": "add"}]}]
        with pytest.raises(DataError, match=rf"^x row 0: prompt\[1\]: {key} is not read here"):
            prompt_of(turns)
        with pytest.raises(DataError, match=rf"^x: chosen\[1\]: {key} is not read here"):
            parse_preference({"chosen": turns, "rejected": turns}, "x")


@pytest.mark.parametrize("speaker", [["human"], {}, 3])
def test_a_speaker_that_is_no_text_is_refused(speaker: Any) -> None:
    with pytest.raises(DataError, match=r"^x: conversations\[0\]: from is .*, expected one of"):
        parse_demonstration({"conversations": [{"from": speaker, "value": "?"}]}, "x")


@pytest.mark.parametrize("margin", [10**400, 1e39, float("nan")])
def test_a_margin_beyond_32_bits_is_refused(margin: float) -> None:
    with pytest.raises(DataError, match=r"^x: margin is .*, expected a finite number"):
        parse_preference({"prompt": "?", "chosen": "a", "rejected": "b", "margin": margin}, "x")


@pytest.mark.parametrize(
    "values",
    [
        pa.array([0, 1], pa.timestamp("ns")),
        pa.array([0, 1], pa.duration("ns")),
        pa.array([0, 2**62], pa.timestamp("us")),
        pa.array([0, 2**30], pa.date32()),
    ],
)
def test_a_value_that_python_lacks_is_named(values: pa.Array, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "when": values}), file)
    with pytest.raises(DataError, match=rf"^{file} row 1: when has a value that cannot be read: .*; correct or remove"):
        list(RowFiles([file], columns=("prompt", "when")))


def test_demonstrations_and_preferences_written_as_text() -> None:
    chat = [*TURNS, {"role": "assistant", "content": "2"}]
    shared = [{"from": "human", "value": "1+1=?"}, {"from": "gpt", "value": "2"}]
    assert parse_demonstration({"messages": json.dumps(chat)}, "x").trained == (2,)
    assert parse_demonstration({"conversations": str(shared)}, "x").messages[1] == Message(
        role="assistant", content="2"
    )
    row = {"prompt": json.dumps(TURNS), "response": json.dumps(chat[2:])}
    assert parse_demonstration(row, "x").messages == tuple(Message(**turn) for turn in chat)
    assert read_answer({"target": json.dumps(chat[2:])}, "target", "x").content == "2"
    assert parse_target_probs({"target_probs": "[0.5, -1]"}, "x") == (0.5, -1.0)
    other = json.dumps([*TURNS, {"role": "assistant", "content": "3"}])
    pair = parse_preference({"chosen": json.dumps(chat), "rejected": other}, "x")
    assert (pair.chosen[-1].content, pair.rejected[-1].content, pair.chosen[:-1]) == ("2", "3", MESSAGES)


def test_arrow_types_of_turns(tmp_path: Path) -> None:
    turn = pa.map_(pa.string(), pa.string())
    columns = {
        "chosen": pa.array([[[("role", "assistant"), ("content", "2")]]], pa.list_(turn)),
        "rejected": pa.array(["3"], pa.large_string()),
        "prompt": pa.array(["1+1=?"]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    (row,) = RowFiles([tmp_path / "x.parquet"], columns=preference_columns(DataConfig()))
    assert [turn.content for turn in parse_preference(row, "x").chosen] == ["1+1=?", "2"]


@pytest.mark.parametrize("text", ["\ufeff" + json.dumps(TURNS), str(tuple(TURNS)), f" {json.dumps(TURNS)[:-1]},]"])
def test_more_notations_of_turns_are_turns(text: str) -> None:
    assert prompt_of(text) == MESSAGES


def test_parts_written_as_text_are_refused() -> None:
    parts = json.dumps([{"type": "text", "text": "1+1=?"}])
    for prompt, place in ((parts, "prompt"), ([{"role": "user", "content": parts}], r"prompt\[0\]: content")):
        with pytest.raises(DataError, match=rf"^x row 0: {place} is .*, a list of parts written as text"):
            prompt_of(prompt)
    assert prompt_of('[{"type": "bool"}]')[0].content == '[{"type": "bool"}]'


@pytest.mark.parametrize("write", [json.dumps, str])
def test_objects_written_as_text_are_objects(write: Any) -> None:
    info = {"index": 3, "ok": True, "none": None, "solution": "it's 2"}
    label = {"style": "rule", "ground_truth": {"target": 2, "numbers": [1, 1]}}
    record = parse_prompt(
        {"prompt": "?", "extra_info": write({**info, "data_source": "mine"}), "reward_model": write(label)}, "x"
    )
    assert record.data_source == "mine"
    assert record.extra_info == {"index": 3, "ok": True, "solution": "it's 2", "data_source": "mine"}
    assert json.loads(record.ground_truth) == label["ground_truth"]


def test_a_text_that_is_no_object_is_refused() -> None:
    for name, text in (
        ("extra_info", "none given"),
        ("reward_model", "[1]"),
        ("reward_model", "{'ground_truth': nan}"),
    ):
        with pytest.raises(DataError, match=rf"^x row 0: {name} is .*, expected an object, or JSON of one"):
            prompt_of("?", **{name: text})
    assert parse_prompt({**ROW, "prompt": "?", "extra_info": "null"}, "x").extra_info == {}


def test_turns_as_the_text_of_a_turn_are_refused() -> None:
    with pytest.raises(DataError, match=r"^x row 0: prompt\[0\]: content is .*, turns written as the text of a turn"):
        prompt_of([{"role": "user", "content": json.dumps(TURNS)}])
    for text in ('[{"role": "user", "content": "hi"}] What\'s wrong?', '"null"', '[["a"]]'):
        assert prompt_of([{"role": "user", "content": text}])[0].content == text


def test_what_cannot_be_read_back_is_refused() -> None:
    array = np.array(TURNS, dtype=object)
    for text in (str(array), repr(array)):
        with pytest.raises(
            DataError, match=r"^x row 0: prompt is .*, which looks like turns as numpy .*; write a list"
        ):
            prompt_of(text)
