"""What a reward model is shown of samples, and how its scores come back."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.cluster import offloading
from megarl.cluster.offloading import Phase
from megarl.data.answers import Answers
from megarl.data.chat import encode_chats
from megarl.errors import DataError
from megarl.train.model_judge import ConversationEncoder, ModelJudge, ModelRewards
from megarl.types import (
    FinishReason,
    FloatArray,
    Message,
    Prompt,
    RolloutBatch,
    Row,
    Sample,
    environment_segment,
    prompt_segment,
)
from megarl.types.judged import FinishedSample
from megarl.types.messages import Role
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.segments import policy_segment

TOKENIZER = make_byte_tokenizer()
QUESTION = (Message(role="user", content="5+3=?"),)


def other_tokenizer(template: str | None = None) -> PreTrainedTokenizerBase:
    """Tokens of other numbers, and possibly another template."""
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens(["<verdict>"])
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def prompt(uid: str = "a") -> Prompt:
    return Prompt(
        uid=uid,
        token_ids=tuple(encode_chats(TOKENIZER, [QUESTION])[0]),
        data_source="megarl/sums",
        ground_truth="8",
        messages=QUESTION,
    )


def sample(text: str, index: int = 0) -> Sample:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    reason = FinishReason.STOP if text.endswith(TOKENIZER.eos_token) else FinishReason.LENGTH
    segments = (prompt_segment(prompt().token_ids), policy_segment(ids))
    return Sample(uid="a", sample_index=index, seed=0, segments=segments, finish_reason=reason)


def test_the_policys_own_tokens_ended_as_the_template_ends_turns() -> None:
    encoder = ConversationEncoder(TOKENIZER, make_byte_tokenizer())
    assert Answers(TOKENIZER).ending == TOKENIZER("\n")["input_ids"]
    assert encoder.num_extra_tokens == 1
    whole = encode_chats(
        TOKENIZER, [[*QUESTION, Message(role="assistant", content="#### 8")]], add_generation_prompt=False
    )[0]
    assert encoder.encode(prompt(), sample("#### 8<|im_end|>")).tolist() == whole
    # A response that was cut, and an empty one, are shown as they are.
    assert TOKENIZER.decode(encoder.encode(prompt(), sample("5+3"))) == (
        "<|im_start|>user\n5+3=?<|im_end|>\n<|im_start|>assistant\n5+3"
    )
    assert encoder.encode(prompt(), sample("")).tolist() == list(prompt().token_ids)


def test_another_tokenizer_reads_the_chat_in_its_own_template() -> None:
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}<verdict>"
    own = other_tokenizer(template)
    encoder = ConversationEncoder(TOKENIZER, own)
    assert encoder.num_extra_tokens is None
    ids = encoder.encode(prompt(), sample("5+3=8\n#### 8<|im_end|>"))
    assert own.decode(ids) == "[user] 5+3=?\n[assistant] 5+3=8\n#### 8\n<verdict>"
    assert ids[-1] == own.convert_tokens_to_ids("<verdict>")


def test_another_template_of_the_same_tokens_is_another_view() -> None:
    own = make_byte_tokenizer()
    own.chat_template = "{% for m in messages %}{{ m['content'] }}{{ '<|im_end|>' }}{% endfor %}"
    encoder = ConversationEncoder(TOKENIZER, own)
    assert own.decode(encoder.encode(prompt(), sample("#### 8<|im_end|>"))) == "5+3=?<|im_end|>#### 8<|im_end|>"


def test_a_conversation_is_read_as_it_is_or_as_its_last_turn() -> None:
    """Another model's template is never shown a tool's output as part of the answer."""
    whole = sample("calc 5+3<|im_end|>")
    reply = TOKENIZER("\n<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    answer = sample("#### 8<|im_end|>").segments[1]
    whole = replace(whole, segments=(*whole.segments, environment_segment(reply), answer))
    assert TOKENIZER.decode(ConversationEncoder(TOKENIZER, make_byte_tokenizer()).encode(prompt(), whole)) == (
        "<|im_start|>user\n5+3=?<|im_end|>\n<|im_start|>assistant\ncalc 5+3<|im_end|>\n"
        "<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n#### 8<|im_end|>\n"
    )
    own = other_tokenizer("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}")
    assert own.decode(ConversationEncoder(TOKENIZER, own).encode(prompt(), whole)) == "[user] 5+3=?[assistant] #### 8"


def test_a_template_that_rewrites_answers_is_applied() -> None:
    """As templates of reasoning models do, which put an empty thought into the answer."""
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message['content'] }}", "{{ '<think></think>' if message['role'] == 'assistant' }}{{ message['content'] }}"
    )
    assert Answers(tokenizer).ending is None
    encoder = ConversationEncoder(tokenizer, tokenizer)
    assert "assistant\n<think></think>#### 8<|im_end|>\n" in tokenizer.decode(
        encoder.encode(prompt(), sample("#### 8<|im_end|>"))
    )


class LastTokens:
    """A reward model that says the last token of a row, its place for the score aside."""

    phase = offloading.forward(Role.REWARD)

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def forward(self, rows: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        self.rows = list(rows)
        return {"values": [np.asarray(row.token_ids[row.num_prompt_tokens - 1 :][:1], np.float32) for row in rows]}


def rewards(passes: LastTokens, phases: list[Phase], max_tokens: int = 100) -> ModelRewards:
    encoder = ConversationEncoder(TOKENIZER, TOKENIZER)
    return ModelRewards(passes, encoder, max_tokens=max_tokens, enter=phases.append)  # type: ignore[arg-type]


def batch(*texts: str) -> RolloutBatch:
    return RolloutBatch(prompts={"a": prompt()}, samples=tuple(sample(text, i) for i, text in enumerate(texts)))


def test_scores_in_the_order_of_the_samples() -> None:
    passes, phases = LastTokens(), list[Phase]()
    found = rewards(passes, phases).score(batch("#### 8<|im_end|>", "x", "#### 9"))
    newline, x, nine = (TOKENIZER(text)["input_ids"][-1] for text in ("\n", "x", "9"))
    assert found == [newline, x, nine]
    assert [row.label for row in passes.rows] == ["a/0", "a/1", "a/2"]
    assert [phase.name for phase in phases] == ["score reward_model"]
    assert rewards(passes, phases).score(RolloutBatch(prompts={}, samples=())) == []


def test_as_a_judge_it_waits_for_the_whole_batch() -> None:
    entered: list[Phase] = []
    judge = ModelJudge(rewards(LastTokens(), entered))
    judging = judge.begin()
    answered = batch("8", "9")
    for sample in answered.samples:
        judging.add(FinishedSample(prompt=prompt(), sample=sample, prompt_text="", response=""))
        assert entered == []
    judged = judge.finish([judging])
    assert [reward.score for reward in judged.rewards] == [TOKENIZER(text)["input_ids"][0] for text in "89"]
    assert len(entered) == 1


def test_a_conversation_that_is_too_long_is_named() -> None:
    with pytest.raises(DataError, match=r"sample a/1: has 28 tokens for the reward model, expected <= 27; raise"):
        rewards(LastTokens(), [], max_tokens=27).score(batch("x", "x" * (28 - len(prompt().token_ids))))
