"""Define how a sample's conversation with an environment grows: what each turn, reply and death makes of the sample.

The driver has the state of every conversation in its sample, so checkpoints hold it, and the death of an engine or of a
worker costs no more than what that process had not sent yet. Workers only run environments; engines only see single
requests.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from megarl.config.environments import EnvironmentConfig
from megarl.rollout.source import SamplingPlan
from megarl.rollout.turns import segment_turns
from megarl.types import (
    Episode,
    FinishReason,
    Prompt,
    Sample,
    Segment,
    SegmentSource,
    environment_segment,
    prompt_segment,
)
from megarl.types.arrays import with_unrouted
from megarl.types.episodes import EpisodeReply, StartRequest, TriesRequest, TurnRequest
from megarl.types.forks import Fork, longest_known, num_common, path_before, path_to
from megarl.types.images import first_other, shifted, told_apart
from megarl.types.turns import Tries

# A turn that repeats itself lacks its end as well.
CUTS = (FinishReason.LENGTH, FinishReason.REPETITION)


class WorkerLostError(Exception):
    """The worker of a conversation died while it owed a reply.

    is_blameless: the worker was lost with its node, which no conversation can have caused.
    """

    def __init__(self, is_blameless: bool = False) -> None:
        super().__init__()
        self.is_blameless = is_blameless


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """A conversation at an environment worker. reply: the latest it gave or still owes. is_lost: the worker died."""

    key: int
    worker: int
    reply: "asyncio.Future[EpisodeReply]"
    is_lost: bool = False


class Episodes(Protocol):
    """The interface of the environment workers, as a sample's coroutine calls it."""

    def start(self, request: StartRequest) -> Conversation:
        """Begin a conversation. Its first reply, as those to its turns, raises WorkerLostError if the worker dies."""

    def act(self, conversation: Conversation, request: TurnRequest | TriesRequest) -> None:
        """Pass a turn of the policy, or all tries of one, to the environment, which owes a reply."""

    def end(self, conversation: Conversation) -> None: ...


def episode_of(sample: Sample) -> Episode:
    """Return what is known of a sample's conversation."""
    assert sample.episode is not None, "the sample has a conversation"
    return sample.episode


def with_episode(prompt: Prompt, sample: Sample) -> Sample:
    """Return a sample that is about to begin a conversation; one that has begun stays as it is."""
    if sample.episode is not None:
        return sample
    # A prefix may be a whole turn, or fill the limit.
    is_whole = sample.finish_reason is not FinishReason.ABORT
    episode = Episode(
        environment=prompt.environment,
        num_turns=int(is_whole),
        awaits_reply=is_whole,
        is_cut=sample.finish_reason is FinishReason.LENGTH,
    )
    return replace(sample, episode=episode, finish_reason=FinishReason.ABORT)


def start_request(prompt: Prompt, sample: Sample) -> StartRequest:
    """Return the request that begins a sample's conversation, or goes on with the turns that have a reply."""
    episode, ids = episode_of(sample), sample.token_ids.tolist()
    num_replied = episode.num_turns - (len(_awaiting(episode)) if episode.awaits_reply else 0)
    turns = (ids[turn.start : turn.stop] for turn in turns_of(sample)[:num_replied])
    return StartRequest(prompt=prompt, turns=tuple(map(tuple, turns)), chat=episode.chat)


def turn_request(sample: Sample) -> TurnRequest | TriesRequest:
    """Return the request that passes the policy's last turn, or all written at the same time, to the environment."""
    episode = episode_of(sample)
    awaiting = _awaiting(episode)
    if len(awaiting) == 1:
        turn = tuple(sample.last_turn_ids.tolist())
        num_before = sample.num_context_tokens - len(turn)
        return TurnRequest(token_ids=turn, turn=awaiting[0], is_cut=episode.is_cut, num_before=num_before)
    ids, turns, cut = sample.token_ids.tolist(), turns_of(sample), {turn for each in episode.tries for turn in each.cut}
    return TriesRequest(
        tries=tuple(
            TurnRequest(
                token_ids=tuple(ids[turns[number].start : turns[number].stop]),
                turn=number,
                is_cut=number in cut,
                num_before=len(path_before(turns[number].start, sample.forks)),
            )
            for number in awaiting
        )
    )


def _awaiting(episode: Episode) -> range:
    """Return the numbers of the turns to which the environment owes a reply: all that were written with the last."""
    last = episode.num_turns - 1
    is_known = bool(episode.tries) and last in episode.tries[-1].turns
    return range(episode.tries[-1].first - episode.tries[-1].place if is_known else last, last + 1)


def started(sample: Sample, reply: EpisodeReply) -> Sample:
    """Return the sample after the reply to the start of its conversation."""
    sample = _noted(sample, reply)
    if reply.failure:
        return sample
    has_turns = any(segment.source is SegmentSource.POLICY for segment in sample.segments)
    # Tokens that the policy wrote after another prompt belong to that prompt.
    is_other = bool(reply.token_ids) and (
        list(reply.token_ids) != sample.prompt_token_ids.tolist()
        or first_other(reply.images, sample.segments[0].images) is not None
    )
    if reply.is_anew or (has_turns and is_other):
        kept = [s for s in sample.segments if s.source in (SegmentSource.PROMPT, SegmentSource.DEMONSTRATION)]
        rest = sample.segments[len(kept) :]
        # A demonstration may be a whole turn.
        is_whole = len(kept) > 1 and bool(rest) and rest[0].source is SegmentSource.ENVIRONMENT
        sample = replace(sample, segments=tuple(kept), forks=(), routed_experts=None)
        sample = with_facts(sample, num_turns=int(is_whole), num_calls=0, awaits_reply=is_whole, is_cut=False)
        sample = with_facts(sample, details={}, chat=(), tries=())
    if reply.part is not None:
        sample = with_facts(sample, chat=(reply.part,))
    if reply.token_ids:
        sample = replace(sample, segments=(prompt_segment(reply.token_ids, reply.images), *sample.segments[1:]))
    return sample


def turn_ended(sample: Sample, *, trains: bool = True) -> Sample:
    """Return the sample after an engine has written a turn of the policy; its finish reason is that of the turn."""
    is_cut = sample.finish_reason in CUTS
    if not trains:
        sample = replace(sample, segments=untrained(sample.segments))
    num_turns = episode_of(sample).num_turns + 1
    sample = replace(sample, finish_reason=FinishReason.ABORT)
    return with_facts(sample, num_turns=num_turns, awaits_reply=True, is_cut=is_cut)


def untrained(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return segments without loss tokens in the last turn, to which several segments belong if it was interrupted."""
    first = len(segments)
    while segments[first - 1].source is SegmentSource.POLICY:
        first -= 1
    own = (replace(each, loss_mask=np.zeros_like(each.loss_mask)) for each in segments[first:])
    return (*segments[:first], *own)


def replied(sample: Sample, reply: EpisodeReply, plan: SamplingPlan, limits: EnvironmentConfig) -> Sample:
    """Return the sample after the environment's reply to a turn."""
    sample = _noted(sample, reply)
    if reply.failure:
        return sample
    *earlier, turn = sample.segments
    sample = _rewarded(replace(sample, segments=(*earlier, replace(turn, reward=reply.reward))), reply.rewards)
    episode = episode_of(sample)
    details = {**episode.details, **reply.details}
    sample = with_facts(sample, awaits_reply=False, num_calls=episode.num_calls + reply.num_calls, details=details)
    if reply.done:
        return finished(sample, FinishReason.STOP)
    if reply.part is not None:
        sample = with_facts(sample, chat=(*episode.chat, reply.part))
    follows = reading(sample, reply)
    awaiting, named = _awaiting(episode), reply.after_turn
    if named is not None and (named != awaiting[-1] or len(awaiting) > 1):
        follows = with_facts(follows, tries=(*episode.tries, Tries(episode.num_turns, 1, named)))
    if min(limits_at_once(follows, reply, plan, limits)) < 1:
        # Without room for another turn, nobody would read the reply.
        return finished(sample, FinishReason.LENGTH)
    return follows


def _rewarded(sample: Sample, rewards: Mapping[int, float]) -> Sample:
    """Return the sample with rewards added to those of its turns, by their numbers."""
    if not rewards:
        return sample
    ends = {turn: i for i, turn in enumerate(segment_turns(sample))}
    segments = list(sample.segments)
    for turn, reward in rewards.items():
        end = segments[ends[turn]]
        segments[ends[turn]] = replace(end, reward=end.reward + reward)
    return replace(sample, segments=tuple(segments))


def reading(sample: Sample, reply: EpisodeReply) -> Sample:
    """Return the sample with what the policy reads next after its last token, or on a branch of its own.

    A reply that is a whole context goes on from the longest path of the sample that is a prefix of it.
    """
    known, token_ids = sample.token_ids, np.asarray(reply.token_ids, dtype=np.int32)
    after, observed, images = len(known) - 1, np.zeros(len(token_ids), dtype=np.bool_), reply.images
    for start, end in reply.observed or ():
        observed[start:end] = True
    if reply.is_context:
        count, after = longest_known(
            told_apart(known, sample.images), sample.forks, told_apart(token_ids, reply.images)
        )
        token_ids, observed = token_ids[count:], observed[count:]
        images = shifted([each for each in images if each.places[0] >= count], -count)
    elif reply.after_turn is not None:
        after = turns_of(sample)[reply.after_turn][-1]
    # A context that is read at the same time may end at a token of the tree, and then has a fork without tokens.
    forks = tuple(fork for fork in sample.forks if fork.start < len(known))
    forks = forks if after == len(known) - 1 else (*forks, Fork(len(known), after))
    # The next request's engine records the experts of these tokens.
    experts = with_unrouted(sample.routed_experts, len(token_ids))
    # An empty segment, too, separates the policy's turns.
    said = environment_segment(token_ids.tolist(), None if reply.observed is None else observed, images)
    segments = (*sample.segments, said)
    return replace(sample, segments=segments, forks=forks, routed_experts=experts)


def after_worker_died(sample: Sample) -> Sample:
    """Return the sample after its worker died. A second death ends it as failed, since it may be what kills workers."""
    if episode_of(sample).num_restarts:
        reason = "workers died twice while this conversation's environment worked"
        return finished(with_facts(sample, failure="died", reason=reason), FinishReason.FAILED)
    return with_facts(sample, num_restarts=1)


def finished(sample: Sample, reason: FinishReason) -> Sample:
    """Return the sample at the end of its conversation."""
    return replace(with_facts(sample, awaits_reply=False, is_cut=False, chat=()), finish_reason=reason)


def num_left(
    sample: Sample, plan: SamplingPlan, most: int | None = None, num_tries: int = 1, num_beside: int = 0
) -> int:
    """Return how many more tokens the response may have, with several tries each of them.

    most: those of all branches; None: as many as of a path. num_beside: what is read on further branches meanwhile.
    """
    on_path = sample.num_context_tokens - len(sample.prompt_token_ids)
    in_all = (most or plan.max_response_tokens) - sample.num_response_tokens - num_beside
    return min(in_all // num_tries, plan.max_response_tokens - on_path)


def engine_of(sample: Sample, wrote: Mapping[int, int]) -> int | None:
    """Return the engine whose cache has most of what the policy reads next, the latest of several; None without any.

    wrote: the engines of the requests so far, each by the number of tokens that the sample then had.
    """
    latest_first = [*wrote.items()][::-1]
    if len(set(wrote.values())) < 2 or not sample.forks:
        return latest_first[0][1] if latest_first else None
    context = path_before(sample.num_tokens, sample.forks)
    return max(latest_first, key=lambda each: num_common(path_to(each[0], sample.forks), context))[1]


def asked_at_once(sample: Sample, reply: EpisodeReply) -> list[Sample]:
    """Return the sample as the policy reads it for its next turn, and for each that it writes at the same time."""
    return [sample, *(reading(sample, each) for each in reply.beside)]


def limits_at_once(sample: Sample, reply: EpisodeReply, plan: SamplingPlan, limits: EnvironmentConfig) -> list[int]:
    """Return how many tokens each of the turns that `asked_at_once` returns may have, or each try of it.

    One of them is below 1 if there is no room for all.
    """
    told, together = (reply, *reply.beside), sample
    for each in reply.beside:
        together = reading(together, each)
    num_tries, num_read = sum(each.num_tries for each in told), together.num_response_tokens
    if episode_of(sample).num_turns + num_tries > limits.max_turns:
        return [0]
    return [
        turn_limit(each, plan, limits, one.max_turn_tokens, num_tries, num_read - each.num_response_tokens)
        for each, one in zip(asked_at_once(sample, reply), told, strict=True)
    ]


def turn_limit(
    sample: Sample,
    plan: SamplingPlan,
    limits: EnvironmentConfig,
    own: int | None,
    num_tries: int = 1,
    num_beside: int = 0,
) -> int:
    """Return how many more tokens the turn under way, or each try of it, may have.

    own: the environment's limit of it, if any. num_beside: as for `num_left`.
    """
    begun: list[Segment] = []
    for segment in reversed(sample.segments[1:]):
        if segment.source is SegmentSource.ENVIRONMENT:
            break
        begun.append(segment)
    num_begun = sum(len(segment.token_ids) for segment in begun)
    of_turn = [max(1, limit - num_begun) for limit in (limits.max_turn_tokens, own) if limit is not None]
    return min([num_left(sample, plan, limits.max_tokens, num_tries, num_beside), *of_turn])


def turns_of(sample: Sample) -> list[range]:
    """Return where the policy's turns stand in the sample; the last may be under way or lack its reply."""
    found, start = list[range](), len(sample.prompt_token_ids)
    for is_reply, segments in groupby(sample.segments[1:], lambda s: s.source is SegmentSource.ENVIRONMENT):
        end = start + sum(len(segment.token_ids) for segment in segments)
        if not is_reply:
            found.append(range(start, end))
        start = end
    return found


def _noted(sample: Sample, reply: EpisodeReply) -> Sample:
    """Return the sample with the time that a reply took; a reply that is a failure ends the sample."""
    sample = with_facts(sample, seconds=episode_of(sample).seconds + reply.seconds)
    if reply.failure:
        return finished(with_facts(sample, failure=reply.failure, reason=reply.reason), FinishReason.FAILED)
    return sample


def with_facts(sample: Sample, **changes: Any) -> Sample:
    return replace(sample, episode=replace(episode_of(sample), **changes))
