"""Tokens of the final answer."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from megarl.data.answer_span import answer_mask
from megarl.data.answers import response_decoder


def pieces(text: str) -> list[str]:
    """Tokens of the tests: text cut at `|`."""
    return text.split("|")


def marked(tokens: list[str]) -> str:
    """Which tokens are in the answer, as their text."""

    def decode(ids: Sequence[int]) -> str:
        return "".join(tokens[i] for i in ids)

    mask = answer_mask(range(len(tokens)), decode)
    return "|".join(token for token, marked in zip(tokens, mask, strict=True) if marked)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so |\boxed|{|4|2|}|.", "4|2"),
        (r"so |\boxed{4|2}.|", "\\boxed{4|2}."),  # tokens that reach over both ends
        (r"\boxed{|1|} then |\boxed{|2|}", "2"),  # the last one
        (r"\boxed{|\frac{|1|}{|2|}|}| end", r"\frac{|1|}{|2|}"),
        (r"\boxed{|1|2", "1|2"),  # never closed
        ("work |5+7|\n####| |12|\n", "12"),
        ("#### |1| no, |#### |2", "2"),
        ("a <answer>|1+|2|</answer>| b", "1+|2"),
        ("<answer>|1|</answer><answer>|2|</answer>", "2"),
        ("<answer>|1", "1"),
        (r"\boxed{|7|} so |####| 7", "7| 7"),
        (r"\boxed{| 7 |}|#### ", " 7 "),
        (r"nothing |here", ""),
        (r"\boxed{|}", ""),
        ("####", ""),
    ],
)
def test_spans(text: str, expected: str) -> None:
    assert marked(pieces(text)) == expected


def test_no_tokens() -> None:
    assert answer_mask([], lambda ids: "").tolist() == []


def test_special_tokens_and_split_characters(tokenizer: PreTrainedTokenizerBase) -> None:
    """× is two bytes and so two tokens; the end of the turn is no text and no answer."""
    ids = tokenizer("2×3 #### 2×3<|im_end|>")["input_ids"]
    mask = answer_mask(ids, response_decoder(tokenizer))
    assert mask.tolist() == [False] * (4 + 6) + [True] * 4 + [False]


@given(st.integers(0, 40), st.integers(0, 20), st.integers(240, 300))
def test_long_responses(num_before: int, num_after: int, num_digits: int) -> None:
    """The shortcut that reads the end only finds what a search of everything would."""
    tokens = ["x"] * (600 + num_before) + [r"\boxed{"] + ["1"] * num_digits + ["}"] + ["y"] * num_after
    assert marked(tokens) == "|".join(["1"] * num_digits)
    tail = ["x"] * (600 + num_before) + ["#### "] + ["1"] * (num_digits // 10)
    assert marked(tail) == "|".join(["1"] * (num_digits // 10))
