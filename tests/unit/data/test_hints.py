"""Hints: texts, where they stand, and rows with them. Ids of the byte tokenizer are derived in test_chat.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from megarl.config.algo import HintConfig
from megarl.data.chat import encode_chats
from megarl.data.hints import (
    UserTagNotFound,
    UserTags,
    encode_hints,
    hint_text,
    hinted_row,
    hinted_rows,
    insertion_place,
    require_hints,
    shuffled_hints,
    user_tags,
)
from megarl.data.records import Message
from megarl.data.tiny_model import make_byte_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.types import IntArray, Prompt, Row

GOLDEN = Path(__file__).parents[2] / "golden" / "algos.json"
LONG, SHORT = (102, 10, 101, 20, 10), (101, 20, 10)
TAGS = UserTags(after_turn=LONG, at_start=SHORT)
LINE_FEED = 201


def golden(case_id: str) -> dict[str, Any]:
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    return next(case for case in cases if case["id"] == case_id)


def ids(values: Any) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def prompt(uid: str = "q:0", ground_truth: str = "3", **extra_info: Any) -> Prompt:
    return Prompt(uid=uid, token_ids=(1,), data_source="q", ground_truth=ground_truth, extra_info=extra_info)


def make_row(prompt_ids: Any, response_ids: Any, uid: str = "q:0") -> Row:
    return Row(
        uid=uid,
        sample_index=0,
        token_ids=ids([*prompt_ids, *response_ids]),
        num_prompt_tokens=len(prompt_ids),
        loss_mask=np.arange(len(response_ids)) % 2 == 0,
        scores={"rollout_logprobs": np.zeros(len(response_ids), np.float32)},
    )


# --- texts


def test_text_of_a_solution_and_of_an_answer() -> None:
    solution, answer = HintConfig(template="Hint: {hint}\n"), HintConfig(source="answer")
    assert hint_text(prompt(gold_solution="1+2", solution="other"), solution) == "Hint: 1+2\n"
    assert hint_text(prompt(solution="1+{2}"), solution) == "Hint: 1+{2}\n"
    assert hint_text(prompt(ground_truth="3"), answer) == "3"
    assert hint_text(replace(prompt(), extra_info={"ground_truth": "4"}), answer) == "4"


@pytest.mark.parametrize("extra_info", [{}, {"gold_solution": ""}, {"gold_solution": None}, {"gold_solution": " \n"}])
def test_a_prompt_without_a_hint(extra_info: dict[str, Any]) -> None:
    bare = prompt(uid="gsm8k:7", **extra_info)
    assert hint_text(bare, HintConfig()) is None
    with pytest.raises(DataError, match=r"prompt gsm8k:7: has no hint, expected text in extra_info.gold_solution or"):
        hint_text(bare, HintConfig(on_missing="error"))


def test_a_hint_that_is_no_text() -> None:
    with pytest.raises(DataError, match=r"prompt q:0: extra_info.gold_solution is int, expected a string"):
        hint_text(prompt(gold_solution=3), HintConfig())


def test_a_column_that_no_prompt_has() -> None:
    have, lack = prompt(gold_solution="x"), prompt()
    require_hints([lack, have], HintConfig())
    with pytest.raises(DataError, match=r"data.train: no prompt has a hint, expected text in gold_solution or"):
        require_hints([lack, lack], HintConfig())
    with pytest.raises(DataError, match="prompt q:0: has no hint"):
        require_hints([have, lack], HintConfig(on_missing="error"))


def test_encoded_hints(tokenizer: PreTrainedTokenizerBase) -> None:
    got = encode_hints(tokenizer, [prompt("a", gold_solution="1+"), prompt("b")], HintConfig(template="Hint: {hint}\n"))
    assert {uid: h.tolist() for uid, h in got.items()} == {
        "a": [261, ord("1") - 30, ord("+") - 30, LINE_FEED],
        "b": [],
    }


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=8), st.integers(0, 5), st.randoms())
def test_shuffled_hints_are_other_prompts(lengths: dict[str, int], seed: int, random: Any) -> None:
    hints = {uid: np.full(n, i) for i, (uid, n) in enumerate(lengths.items())}
    got = shuffled_hints(hints, seed=seed)
    with_hint = [uid for uid in hints if len(hints[uid])]
    assert got.keys() == hints.keys()
    assert all(len(got[uid]) == 0 for uid in hints if uid not in with_hint)
    if len(with_hint) < 2:
        assert all(len(h) == 0 for h in got.values())
    else:
        owners = [int(got[uid][0]) for uid in with_hint]
        own = [int(hints[uid][0]) for uid in with_hint]
        assert sorted(owners) == sorted(own)
        assert all(a != b for a, b in zip(owners, own, strict=True))
    items = list(hints.items())
    random.shuffle(items)
    again = shuffled_hints(dict(items), seed=seed)
    assert all(np.array_equal(again[uid], got[uid]) for uid in hints)


# --- tags


def test_tags_of_the_byte_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    assert user_tags(tokenizer) == UserTags(after_turn=(2, LINE_FEED, 1, 259, LINE_FEED), at_start=(1, 259, LINE_FEED))


# Templates as model families have them, cut to what matters here.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
HEADERS = (
    "<|endoftext|>{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_start|>\n\n{{ m['content'] | trim }}"
    "<|im_end|>{% endfor %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "after_turn", "at_start"),
    [
        (DEFAULT_SYSTEM, "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>user\n"),
        (HEADERS, "<|im_end|><|im_start|>user<|im_start|>\n\n", "<|im_start|>user<|im_start|>\n\n"),
        (BRACKETS, "<|im_end|>[INST]", "[INST]"),
    ],
)
def test_tags_follow_the_template(template: str, after_turn: str, at_start: str) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    tags = user_tags(tokenizer)
    assert tokenizer.decode(tags.after_turn) == after_turn
    assert tokenizer.decode(tags.at_start) == at_start
    chat = (Message(role="user", content="1+1=?"),)
    prompt_ids = encode_chats(tokenizer, [chat])[0]
    assert tokenizer.decode(prompt_ids[insertion_place(prompt_ids, tags) :]).startswith("1+1=?")


def test_templates_without_a_tag() -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="which are not tokens of their own there"):
        user_tags(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | lower }}{% endfor %}"
    with pytest.raises(ConfigError, match="does not keep the contents of a chat"):
        user_tags(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('one turn only') }}"
    with pytest.raises(ConfigError, match="does not render user, assistant, user: one turn only"):
        user_tags(tokenizer)


def test_the_last_tag_counts() -> None:
    chat = [*SHORT, 31, *LONG, 32, *LONG, 33, 102, 10, 101, 22, 10]
    assert insertion_place(chat, TAGS) == 3 + 1 + 5 + 1 + 5


def test_no_tag(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserTagNotFound, match=r"the prompt of 2 tokens has no user tag, expected \[101, 20, 10\]"):
        insertion_place([1, 2], TAGS)
    with pytest.raises(UserTagNotFound, match="row q:0/0: the prompt"):
        hinted_row(make_row([1, 2], [3]), ids([7]), TAGS, max_hint_tokens=9, max_row_tokens=99)


# --- golden


@pytest.mark.parametrize("name", ["fits", "exact", "truncated", "no_room"])
def test_padded_golden(name: str) -> None:
    """A left-padded row, [L columns of prompt, then the response]: the hint takes the place of as many pads."""
    case = golden(f"A.hint.padded.{name}")
    inputs, expected = case["inputs"], case["expected"]
    pads = inputs["prompt_length"] - len(inputs["prompt"])
    assert pads + insertion_place(inputs["prompt"], TAGS) == expected["insert_index"]
    row = make_row(inputs["prompt"], inputs["response"])
    got = hinted_row(row, ids(inputs["hint"]), TAGS, max_hint_tokens=pads, max_row_tokens=99)
    pads_left = inputs["prompt_length"] - got.num_prompt_tokens
    assert [inputs["pad_id"]] * pads_left + got.token_ids.tolist() == expected["input_ids"]
    attention = [0] * pads_left + [1] * got.num_prompt_tokens + inputs["response_mask"]
    assert attention == expected["attention_mask"]
    assert np.maximum(np.arange(len(attention)) - pads_left, 0).tolist() == expected["position_ids"]


def test_missing_tag_golden() -> None:
    case = golden("A.hint.missing_tag")
    inputs = case["inputs"]
    prompt_ids = inputs["prompt"]
    long_only = UserTags(after_turn=LONG, at_start=LONG)
    row, pads = make_row(prompt_ids, inputs["response"]), inputs["prompt_length"] - len(prompt_ids)
    with pytest.raises(UserTagNotFound):
        hinted_row(row, ids(inputs["hint"]), long_only, max_hint_tokens=pads, max_row_tokens=99)
    assert case["expected"]["error"] == UserTagNotFound.__name__
    # With the tag of a chat's start it is found: two pads, then three tokens of tag.
    assert 2 + insertion_place(prompt_ids, TAGS) == 5


def test_packed_golden() -> None:
    case = golden("A.hint.packed")
    inputs, expected = case["inputs"], case["expected"]
    tags = UserTags(after_turn=tuple(inputs["user_tag_long"]), at_start=tuple(inputs["user_tag_short"]))
    rows = [make_row(p, r) for p, r in zip(inputs["prompts"], inputs["responses"], strict=True)]
    got = [
        hinted_row(row, ids(hint), tags, max_hint_tokens=99, max_row_tokens=99)
        for row, hint in zip(rows, inputs["hints"], strict=True)
    ]
    assert np.concatenate([g.token_ids for g in got]).tolist() == expected["input_ids"]
    starts = np.cumsum([0, *(g.num_tokens for g in got)])
    assert starts.tolist() == expected["cu_seqlens"]
    assert np.concatenate([np.arange(g.num_tokens) for g in got]).tolist() == expected["position_ids"]
    # The logits before a token predict it.
    predict = [
        (start + g.num_prompt_tokens - 1 + np.arange(g.num_response_tokens)).tolist()
        for start, g in zip(starts, got, strict=False)
    ]
    assert predict == expected["logit_index"]
    for row, hinted in zip(rows, got, strict=True):
        assert np.array_equal(hinted.loss_mask, row.loss_mask)
        assert np.array_equal(hinted.token_ids[hinted.num_prompt_tokens :], row.token_ids[row.num_prompt_tokens :])


# --- rows

PROMPT = [*SHORT, 41, 42, 102, 10, 101, 22, 10]


@settings(deadline=None)
@given(
    st.lists(st.integers(60, 69), max_size=9), st.lists(st.integers(50, 59), max_size=5),
    st.integers(1, 9), st.integers(0, 30),
)  # fmt: skip
def test_only_the_hint_is_cut(hint: list[int], response: list[int], max_hint: int, max_row: int) -> None:
    row = make_row(PROMPT, response)
    got = hinted_row(row, ids(hint), TAGS, max_hint_tokens=max_hint, max_row_tokens=max_row)
    kept = max(min(len(hint), max_hint, max_row - row.num_tokens), 0)
    assert got.token_ids.tolist() == [*SHORT, *hint[:kept], *PROMPT[3:], *response]
    assert got.num_response_tokens == row.num_response_tokens
    assert row.token_ids.tolist() == [*PROMPT, *response]
    assert not got.scores


def test_a_tag_in_the_response_is_not_the_users() -> None:
    row = make_row(PROMPT, [51, *LONG, 52])
    got = hinted_row(row, ids([61]), TAGS, max_hint_tokens=9, max_row_tokens=99)
    assert got.token_ids.tolist() == [*SHORT, 61, *PROMPT[3:], 51, *LONG, 52]


def test_rows_of_a_batch() -> None:
    """Prompts: with a hint, one that is cut, one without, one without a user tag."""
    rows = [make_row(PROMPT, [51], uid) for uid in "abc"] + [make_row([7, 8], [51], "d")]
    hints = {"a": ids([61, 62]), "b": ids([61] * 5), "c": ids([]), "d": ids([61])}
    cfg = HintConfig(max_tokens=4)
    got = hinted_rows(rows, hints, TAGS, cfg, max_row_tokens=99)
    assert got.has_hint.tolist() == [True, True, False, False]
    assert [h.num_tokens - r.num_tokens for h, r in zip(got.rows, rows, strict=True)] == [2, 4, 0, 0]
    assert [h.label for h in got.rows] == [r.label for r in rows]
    assert got.metrics() == {
        "cpo/hint_len_mean": 3.0,
        "cpo/hint_truncated_frac": 0.5,  # b's hint, and d's, none of which was put in
        "cpo/hint_missing_frac": 0.5,
    }
    with pytest.raises(UserTagNotFound, match="row d/0"):
        hinted_rows(rows, hints, TAGS, replace(cfg, on_missing="error"), max_row_tokens=99)
    assert hinted_rows([], hints, TAGS, cfg, max_row_tokens=99).metrics() == {}


def test_from_text_to_row(tokenizer: PreTrainedTokenizerBase) -> None:
    """The whole way with a real template: only the hint comes between the tag and the question."""
    chat = (Message(role="system", content="Add."), Message(role="user", content="1+2=?"))
    question = encode_chats(tokenizer, [chat])[0]
    row = make_row(question, tokenizer("3<|im_end|>")["input_ids"])
    hints = encode_hints(tokenizer, [prompt(gold_solution="1+2=3")], HintConfig(template="Hint: {hint}\n"))
    got = hinted_rows([row], hints, user_tags(tokenizer), HintConfig(), max_row_tokens=512).rows[0]
    assert tokenizer.decode(got.token_ids) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nHint: 1+2=3\n1+2=?<|im_end|>\n"
        "<|im_start|>assistant\n3<|im_end|>"
    )
