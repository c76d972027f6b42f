"""Random conversations: whatever happens, each token of the policy trains once, under what its engine had read."""

import random
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from megarl.host import loop
from megarl.rollout.conversations import Conversation, episode_of
from megarl.types import FinishReason, Sample, SegmentSource, row_from_sample
from megarl.types.episodes import EpisodeReply
from megarl.types.forks import path_to, require_forks
from megarl.types.rows import paths_of
from tests.helpers.loops import turns
from tests.unit.rollout.test_conversations import PLAN, World, begin, sample_of

# What a request read, and what the policy wrote after it.
Written = tuple[tuple[int, ...], tuple[int, ...]]


def reply(rng: random.Random, world: World, sample: Sample) -> EpisodeReply:
    """Let the environment reply to all that is so far: after the last turn, an earlier one, or with a context that
    begins like a path of the sample, perhaps without a token of its own; perhaps several times at once. Return what
    another host says that goes on from there.
    """
    num_turns, first = episode_of(sample).num_turns, asked(rng, sample, may_be_last=True)
    beside = tuple(asked(rng, sample, may_be_last=False) for _ in range(rng.choice([0, 0, 0, 1, 2])))
    rewards = {rng.randrange(num_turns): 0.5} if rng.random() < 0.3 else {}
    done = rng.random() < 0.1
    world.owed[0].reply.set_result(replace(first, beside=beside, rewards=rewards, reward=1.0, done=done))
    world.owed.pop(0)
    loop.wait(turns())
    return replace(first, token_ids=(), after_turn=None, is_context=False, beside=beside)


def asked(rng: random.Random, sample: Sample, *, may_be_last: bool) -> EpisodeReply:
    """Return what the policy reads next."""
    num_turns, num_tries = episode_of(sample).num_turns, rng.choice([1, 1, 1, 2, 3])
    token_ids, after, is_context = [rng.randrange(3, 9) for _ in range(rng.randrange(4))], None, False
    where = rng.random() * (1.0 if may_be_last else 0.6)
    if where < 0.3:
        after = rng.randrange(num_turns)
    elif where < 0.6:
        path = sample.token_ids[path_to(rng.randint(1, sample.num_tokens), sample.forks)].tolist()
        token_ids, is_context = [*path[: rng.randint(0, len(path))], *token_ids] or [4], True
    return EpisodeReply(token_ids=tuple(token_ids), after_turn=after, is_context=is_context, num_tries=num_tries)


def speak(rng: random.Random, world: World, expert: int) -> Written:
    """Let an engine answer one of the requests: with whole or cut turns, or with a part of one, which may be empty."""
    place = rng.randrange(len(world.requests))
    most = world.requests[place][0].max_tokens
    token_ids, reason = [rng.randrange(3, 9) for _ in range(min(most, rng.randint(1, 3)))], FinishReason.STOP
    if len(token_ids) == most:
        reason = FinishReason.LENGTH
    elif rng.random() < 0.25:
        token_ids, reason = token_ids[: rng.randrange(3)], FinishReason.ABORT
    request = world.speak(
        *token_ids, reason=reason, engine=rng.randrange(2), place=place, expert=expert if token_ids else None
    )
    return request.token_ids, tuple(token_ids)


def converse(seed: int) -> tuple[Sample, Collection[Written]]:
    """Lead a conversation to its end, through checkpoints and deaths of hosts; return all that engines wrote, too."""
    rng = random.Random(seed)
    plan = replace(PLAN, max_response_tokens=rng.choice([10, 20, 60]))
    limits = {"max_tokens": rng.choice([15, 40, 200]), "max_turns": rng.choice([3, 8, 20])}
    world, source, group = begin(plan=plan, **limits)
    written, goes_on = set[Written](), EpisodeReply()
    opened: Conversation | None = None
    while not group.is_done:
        event, asked = rng.random(), [request for request, _ in world.requests]
        # A checkpoint adds a token to turns under way.
        if event < 0.05 and all(request.max_tokens > 1 for request in asked):
            written |= {(request.token_ids, (99,)) for request in asked}
            world, source, group = begin(plan=plan, begun=source.parts([group]), **limits)
            opened = None
        elif 0.05 < event < 0.07 and opened is not None:
            world.lose(opened.key, owes=opened in world.owed)
            opened = None
        elif not world.owed:
            written.add(speak(rng, world, len(written)))
        elif world.owed[0] is opened:
            goes_on = reply(rng, world, group.parts[0])
        else:
            opened = world.owed.pop(0)
            opened.reply.set_result(EpisodeReply() if episode_of(group.parts[0]).awaits_reply else goes_on)
            loop.wait(turns())
    sample = sample_of(group)
    assert sample.num_response_tokens <= limits["max_tokens"]
    assert episode_of(sample).num_turns <= limits["max_turns"]
    return sample, written


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 600), marks=pytest.mark.long)], ids=len)
def test_every_token_trains_once_under_what_its_engine_had_read(seeds: range) -> None:
    num_forked = 0
    for seed in seeds:
        sample, written = converse(seed)
        if sample.finish_reason is FinishReason.FAILED:
            continue
        row = row_from_sample(sample)
        require_forks(row.forks, num_given=row.num_prompt_tokens, num_tokens=row.num_tokens, whose=f"seed {seed}")
        wanted, start = [], 0
        before = {fork.start: fork.after for fork in row.forks}
        for segment in sample.segments:
            context, token = list[int](), before.get(start, start - 1)
            while token >= 0:
                context.insert(0, int(row.token_ids[token]))
                token = before.get(token, token - 1)
            own = segment.token_ids.tolist()
            if own and segment.source is SegmentSource.POLICY:
                assert (tuple(context), tuple(own)) in written, f"seed {seed}"
                wanted += [([*context, *own[:i]], token) for i, token in enumerate(own)]
            start += len(own)
        trained = [
            (path.row.token_ids[:place].tolist(), int(path.row.token_ids[place]))
            for path in paths_of([row])
            for place in np.flatnonzero(path.row.loss_mask) + path.row.num_prompt_tokens
        ]
        assert sorted(trained) == sorted(wanted), f"seed {seed}"
        num_forked += bool(row.forks)
    assert num_forked > len(seeds) // 3
