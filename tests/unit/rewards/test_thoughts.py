"""Marks of thoughts as the model cards and chat templates of reasoning models publish them."""

import pytest

from megarl.data.thoughts import after_prompt, has_thought, opens_twice, unended_thought
from megarl.rewards import score
from megarl.rewards.code.scorer import extract_code
from megarl_answers.thoughts import after_thoughts

MARKS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel>thought", "<channel|>"),
    ("<unused94>", "<unused95>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
]
STATED = {
    "math": "\\boxed{{{}}}",
    "math/last_number": "So he has {} cars.",
    "strict": "\\boxed{{{}}}",
    "math_verify": "\\boxed{{{}}}",
    "answer_line": "Answer: {}",
    "openai/gsm8k": "#### {}",
    "short_answer": "<answer>{}</answer>",
}


@pytest.mark.parametrize(("opening", "closing"), MARKS)
def test_every_scorer_reads_only_what_follows_the_thoughts(opening: str, closing: str) -> None:
    for name, stated in STATED.items():
        seven, eight = stated.format(7), stated.format(8)
        assert score(name, f"{opening}{seven}{closing}{eight}", "8", {}).correct, name
        assert not score(name, f"{opening}{eight}{closing}{seven}", "8", {}).correct, name
        assert not score(name, f"{opening}{eight}{closing}I cannot tell.", "8", {}).correct, name
    assert extract_code(f"{opening}\n```python\na\n```\n{closing}\nno program") is None


@pytest.mark.parametrize(("opening", "closing"), MARKS[:-1])
def test_a_prompt_that_opens_a_thought_is_continued(opening: str, closing: str) -> None:
    assert opens_twice(f"{opening}\n{opening}")
    assert not opens_twice(f"{opening}a{closing}{opening}")
    assert has_thought(f"a{closing}")
    assert unended_thought("8", f"Q{opening}\n") == closing
    assert unended_thought(f"7{closing}8", f"Q{opening}\n") == ""
    assert after_prompt(f"{opening}\n7{closing}8", f"Q{opening}\n") == f"7{closing}8"
    assert after_prompt(f"{opening}{closing}8", f"Q{opening}{closing}") == "8"
    assert after_prompt(f"{opening}7{closing}8", f"Q{opening}{closing}") is None


def test_the_letter_of_a_thought_is_no_answer() -> None:
    assert score("letters", "[THINK]Answer: B[/THINK]Answer: C", "C", {}).correct
    assert not score("letters", "<think>\nAnswer: C\n</think>\nhm", "C", {}).correct


@pytest.mark.parametrize(
    "line", ["**Answer:** 40", "**Answer**: 40", "**Answer: 40**", "Answer: **40**", "__Answer:__ 40"]
)
def test_a_line_with_the_answer_may_be_emphasised(line: str) -> None:
    assert score("answer_line", line, "40", {}).correct
    assert not score("answer_line", line.replace("40", "41"), "40", {}).correct


def test_what_only_looks_like_the_end_of_a_thought_stays() -> None:
    for text in (r"\boxed{8}", "<b>7</b>8", "[7, 8] [/INST]", "7 <|im_end|>", "x < y </thinks>", "a|>b", "[think] 8"):
        assert after_thoughts(text) == text
