"""Demonstrations that a teacher writes: what its servers are asked, what the policy learns of answers, and when."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from megarl.config.algo import DemonstrationConfig
from megarl.config.generation import Sampling
from megarl.config.teacher import TeacherConfig
from megarl.data.stop_tokens import StopTokens
from megarl.errors import RunError
from megarl.host import loop
from megarl.rollout.source import Group, Prefix, SamplingPlan
from megarl.train.served_teacher import TeacherWriter
from megarl.train.taught_source import TaughtSource
from megarl.types import FinishReason, Prompt, Sample, prompt_segment
from tests.helpers.reward_server import RewardServer, reply

END = 9
ENDS = StopTokens(token_ids=(END,), tails=("",), declared=(END,), stop_token_ids=(END, 8), names=("end",))
PROMPT = Prompt(uid="a", token_ids=(1, 2), data_source="s", ground_truth="")
SAMPLING = Sampling(temperature=0.7, stop_token_ids=(END, 8))
PLAN = SamplingPlan(step=3, num_samples=2, sampling=SAMPLING, max_response_tokens=6, run_seed=0)
WHOLE = DemonstrationConfig(strategy="fixed", source="teacher", min_ratio=1.0, max_ratio=1.0, num_prefixed=1)


def writer_at(server: RewardServer, **settings: Any) -> TeacherWriter:
    cfg = TeacherConfig(model_path="t", writers=(server.url.replace("/get_reward", "/v1"),))
    return TeacherWriter(cfg, key="teacher", sampling=SAMPLING, end_ids=(END,), **settings)


@pytest.mark.parametrize(
    ("ids", "finish", "num_common", "expected"),
    [
        # Whichever token it stopped at, the policy's own end stands there.
        ([5, 6, 8], "stop", None, (5, 6, END)),
        ([5, 6, 7], "length", None, (5, 6, 7)),
        ([5, 20, 8], "stop", 20, (5,)),
        # Withheld or given up: no demonstration.
        ([5, 6, 7], "content_filter", None, ()),
        ([5, 6, 7], "abort", None, ()),
    ],
)
def test_an_answer_is_read_as_the_policys_tokens(
    ids: list[int], finish: str, num_common: int | None, expected: tuple[int, ...]
) -> None:
    with RewardServer(lambda body: reply(choices=[{"token_ids": ids, "finish_reason": finish}])) as server:
        writer = writer_at(server, num_common=num_common)
        assert loop.wait(writer.write(PROMPT, max_tokens=6, seed=4)) == expected
    body = server.requests[0]
    assert (body["prompt"], body["max_tokens"], body["seed"], body["temperature"]) == ([1, 2], 6, 4, 0.7)
    assert (body["stop_token_ids"], body["return_token_ids"], body["model"]) == ([END, 8], True, "t")


def test_a_server_that_returns_no_tokens_ends_the_run_with_the_remedy() -> None:
    refusal = r"teacher\.writers: no answer for prompt a in 3 tries, .*; check that they serve the model"
    with (
        RewardServer(lambda body: reply(choices=[{"text": "x", "finish_reason": "stop"}])) as server,
        pytest.raises(RunError, match=refusal),
    ):
        loop.wait(writer_at(server, num_common=None).write(PROMPT, max_tokens=6, seed=4))


@dataclass
class Writer:
    """A teacher that always writes the same, and keeps what it was asked."""

    answer: tuple[int, ...]
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    async def write(self, prompt: Prompt, *, max_tokens: int, seed: int) -> tuple[int, ...]:
        self.asked.append((prompt.uid, max_tokens, seed))
        return self.answer


class Live:
    """A source that samples nothing."""

    async def sample(self, group: Group) -> None: ...

    def parts(self, groups: Iterable[Group]) -> list[Sample]:
        return []


def taught(cfg: DemonstrationConfig, writer: Writer, group: Group) -> Group:
    source = TaughtSource(demonstrations=cfg, num_samples=2, live=Live(), writer_of=lambda _: writer, stop_tokens=ENDS)  # type: ignore[arg-type, return-value]
    loop.wait(source.sample(group))
    return group


def test_samples_start_with_what_the_teacher_wrote() -> None:
    writer = Writer((5, 6, 7, END))
    group = taught(WHOLE, writer, Group(prompt=PROMPT, plan=PLAN))
    assert group.prompt.demonstration_ids == (5, 6, 7, END)
    assert dict(group.plan.prefixes) == {("a", 0): Prefix(token_ids=(5, 6, 7, END), is_complete=True)}
    # Another step has another answer.
    taught(WHOLE, writer, Group(prompt=PROMPT, plan=replace(PLAN, step=4)))
    (first, limit, seed), (second, _, other) = writer.asked
    assert (first, limit, second) == ("a", 6, "a")
    assert seed != other
    # Half of it, for both samples.
    half = replace(WHOLE, min_ratio=0.5, max_ratio=0.5, num_prefixed=-1)
    group = taught(half, writer, Group(prompt=PROMPT, plan=PLAN))
    assert dict(group.plan.prefixes) == dict.fromkeys([("a", 0), ("a", 1)], Prefix(token_ids=(5, 6)))


def test_an_answer_that_was_cut_goes_on_or_is_dropped() -> None:
    group = taught(WHOLE, Writer((5, 6)), Group(prompt=PROMPT, plan=PLAN))
    assert dict(group.plan.prefixes) == {("a", 0): Prefix(token_ids=(5, 6))}
    group = taught(replace(WHOLE, on_long="drop"), Writer((5, 6)), Group(prompt=PROMPT, plan=PLAN))
    assert not group.plan.prefixes


def test_a_teacher_is_asked_only_for_what_is_missing() -> None:
    """Prompts that keep none, conversations, and samples that a resumed run goes on with ask nothing."""
    part = Sample(uid="a", sample_index=0, seed=0, segments=(prompt_segment((1, 2)),), finish_reason=FinishReason.ABORT)
    writer = Writer((5, END))
    taught(replace(WHOLE, keep_frac=0.0), writer, Group(prompt=PROMPT, plan=PLAN))
    taught(WHOLE, writer, Group(prompt=replace(PROMPT, environment="calculator"), plan=PLAN))
    taught(WHOLE, writer, Group(prompt=PROMPT, plan=PLAN, parts={0: part}))
    assert writer.asked == []
    taught(WHOLE, writer, Group(prompt=PROMPT, plan=PLAN, parts={1: part}))
    assert len(writer.asked) == 1
