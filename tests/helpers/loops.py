"""Turn the event loop in tests, whose engines and environment workers answer by themselves."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from megarl.host import loop
from megarl.rollout.source import Group, RolloutSource, SamplingPlan, begin
from megarl.types import Prompt, Sample

# More turns than any sample needs between two answers.
ENOUGH = 100


async def turns(n: int = ENOUGH) -> None:
    """Let all tasks go on for a few turns of the loop."""
    for _ in range(n):
        await asyncio.sleep(0)


async def answered(work: "asyncio.Future[None]", answer: Callable[[], None]) -> None:
    """Call `answer` whenever all tasks wait, until `work` is done."""
    for _ in range(1000):
        await turns()
        if work.done():
            return work.result()
        answer()
    raise AssertionError("the answers do not end the work")


def begin_groups(
    source: RolloutSource,
    prompts: Sequence[Prompt],
    plan: SamplingPlan,
    *,
    begun: Sequence[Sample] = (),
    judging: Any = None,
) -> list[Group]:
    """Begin to sample prompts, and let all samples go as far as they come without an answer.

    begun: samples that go on or have finished already. judging: takes each sample that finishes.
    """
    groups = [Group(prompt=prompt, plan=plan, judging=judging) for prompt in prompts]
    by_uid = {group.prompt.uid: group for group in groups}
    for sample in begun:
        by_uid[sample.uid].parts[sample.sample_index] = sample
    begin(source, groups)
    loop.wait(turns())
    return groups


def just_wait(work: "asyncio.Future[None]", **_: object) -> None:
    """Wait for samples of which none needs engines."""
    loop.wait(work)
