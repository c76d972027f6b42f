"""Tokens of the final answer."""

from collections.abc import Sequence

import pytest
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
        (r"so |\boxed{4|2}.|", "\\boxed{4|2}."),
        (r"\boxed{|1|} then |\boxed{|2|}", "2"),
        (r"\boxed{|\frac{|1|}{|2|}|}| end", r"\frac{|1|}{|2|}"),
        (r"\boxed{|1|2", "1|2"),
        ("work |5+7|\n####| |12|\n", "12"),
        ("a <answer>|1+|2|</answer>| b", "1+|2"),
        ("<answer>|1", "1"),
        (r"\boxed{| 7 |}|#### ", " 7 "),
        ("####", ""),
    ],
)
def test_spans(text: str, expected: str) -> None:
    assert marked(pieces(text)) == expected


def test_special_tokens_and_split_characters(tokenizer: PreTrainedTokenizerBase) -> None:
    """× is two bytes and so two tokens; the end of the turn is no text and no answer."""
    ids = tokenizer("2×3 #### 2×3<|im_end|>")["input_ids"]
    mask = answer_mask(ids, response_decoder(tokenizer))
    assert mask.tolist() == [False] * (4 + 6) + [True] * 4 + [False]
