"""The policy as a judge: what engines are asked, and that answers come back to their questions."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from megarl.config.judges import JudgeConfig, SamplingConfig
from megarl.config.load import from_dict
from megarl.data.chat import encode_chats
from megarl.host import loop
from megarl.rewards.llm import LlmJudge, Request
from megarl.rollout.source import Doing, Group, SamplingPlan, generating
from megarl.train.policy_judge import PolicyCompletions
from megarl.types import FinishReason, Message, Sample, prompt_segment
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.loops import answered
from tests.helpers.reward_items import item
from tests.helpers.segments import policy_segment

TOKENIZER = make_byte_tokenizer()


class Source:
    """Engines that write what `write` says about the text of a prompt."""

    def __init__(self, write: Callable[[str], str], ends: FinishReason = FinishReason.STOP) -> None:
        self.ends = ends
        self.write, self.plans, self.batches = write, list[SamplingPlan](), list[list[str]]()

        self.asked: list[asyncio.Future[None]] = []

    async def sample(self, group: Group) -> None:
        """Finish when it is waited for, the last group first."""
        text = TOKENIZER.decode(group.prompt.token_ids)
        if not self.plans or self.plans[-1] is not group.plan:
            self.plans.append(group.plan)
            self.batches.append([])
        self.batches[-1].append(text)
        self.asked.append(answer := asyncio.get_running_loop().create_future())
        await answer
        ids = TOKENIZER(self.write(text), add_special_tokens=False)["input_ids"]
        sample = Sample(
            uid=group.prompt.uid,
            sample_index=0,
            seed=0,
            segments=(prompt_segment(group.prompt.token_ids), policy_segment(ids)),
            finish_reason=self.ends,
        )
        await group.finish(sample)

    def wait(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing = generating) -> None:
        loop.wait(answered(work, self._answer))

    def _answer(self) -> None:
        while self.asked:
            self.asked.pop().set_result(None)

    def parts(self, groups: Iterable[Group]) -> list[Sample]:
        raise NotImplementedError


def policy(source: Source, *, context: int = 4096, **sampling: Any) -> PolicyCompletions:
    return PolicyCompletions(
        source,
        source.wait,
        TOKENIZER,
        SamplingConfig(**sampling),
        max_tokens=context,
        stop_token_ids=(2, 0),
        run_seed=3,
        timeout_s=1.0,
    )


def request(text: str) -> Request:
    return Request(messages=(Message(role="user", content=text),), seed=0)


def test_questions_are_asked_together_and_answers_come_back_to_them() -> None:
    source = Source(lambda text: "yes<|im_end|>" if "one" in text else "no<|im_end|>")
    asked = policy(source, temperature=0.5, max_tokens=7)
    first, second = asked.submit(request("one")), asked.submit(request("two"))
    assert not first.done()
    asked.flush()
    asked.flush()
    assert [pending.result(0).text for pending in (first, second)] == ["yes", "no"]
    assert source.batches == [[f"<|im_start|>user\n{t}<|im_end|>\n<|im_start|>assistant\n" for t in ("one", "two")]]
    (plan,) = source.plans
    assert (plan.sampling.temperature, plan.max_response_tokens, plan.num_samples, plan.run_seed) == (0.5, 7, 1, 3)
    assert plan.sampling.stop_token_ids == (2, 0)
    num_tokens = len(encode_chats(TOKENIZER, [request("one").messages])[0])
    assert first.result(0).tokens == num_tokens + len("yes") + 1


@pytest.mark.parametrize("mode", ["pointwise", "pairwise"])
def test_it_judges(mode: str) -> None:
    cfg = from_dict(JudgeConfig, {"use_policy": True, "mode": mode})
    source = Source(lambda text: ("Score: 0.25" if "<response>\nbad" in text else "Score: 1") + ", Winner: A")
    judge = LlmJudge(cfg, policy(source), name="self")
    judging = judge.begin()
    judging.add(item("p", "good", ""))
    judging.add(item("p", "bad", ""))
    # A run that waits for rewards may not wait for what only `finish` starts.
    assert judging.pending() == []
    judged = judge.finish([judging])
    assert len(source.batches) == 1
    # In pairs, the first place wins each time.
    assert [reward.score for reward in judged.rewards] == ([1.0, 0.25] if mode == "pointwise" else [0.5, 0.5])


def test_a_question_that_is_too_long_is_not_asked() -> None:
    source = Source(lambda text: "yes")
    limit = 64 + len(encode_chats(TOKENIZER, [request("").messages])[0])
    asked = policy(source, context=limit, max_tokens=64)
    fits, too_long = asked.submit(request("")), asked.submit(request("x"))
    asked.flush()
    assert fits.result(0).text == "yes"
    assert too_long.result(0).text is None
    assert f"sampling.max_tokens=64, more than the engine's {limit}" in too_long.result(0).reason


@pytest.mark.parametrize("ends", [FinishReason.LENGTH, FinishReason.REPETITION])
def test_a_cut_verdict_is_unread(ends: FinishReason) -> None:
    judge = LlmJudge(
        from_dict(JudgeConfig, {"use_policy": True}), policy(Source(lambda _: "Score: 1", ends)), name="self"
    )
    judging = judge.begin()
    judging.add(item("p", "good", ""))
    judged = judge.finish([judging])
    assert judged.rewards[0].dropped
    assert [trouble.outcome for trouble in judged.troubles] == ["unread"]
