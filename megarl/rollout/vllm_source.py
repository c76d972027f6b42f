"""Produce samples with vLLM engines; `VllmSource.sample_one` is a sample's whole way from its prompt to the judges.

The policy may write several turns of a conversation at the same time, which make a tree: tries of one turn, or turns of
several chats, such as those of sub-agents. Each has a seed of its own, by its place among them, and reads nothing of
the others, so it can be sampled again whichever of them was written first.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from megarl.config.environments import EnvironmentConfig
from megarl.host import loop
from megarl.rollout.conversations import (
    CUTS,
    Conversation,
    Episodes,
    WorkerLostError,
    after_worker_died,
    asked_at_once,
    engine_of,
    episode_of,
    finished,
    limits_at_once,
    num_left,
    reading,
    replied,
    start_request,
    started,
    turn_ended,
    turn_limit,
    turn_request,
    turns_of,
    untrained,
    with_episode,
    with_facts,
)
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import Group, SamplingPlan
from megarl.rollout.turns import GIVEN
from megarl.types import (
    FinishReason,
    Prompt,
    Sample,
    Segment,
    SegmentSource,
    VersionSpan,
    environment_segment,
    prompt_segment,
)
from megarl.types.arrays import ExpertArray, with_unrouted
from megarl.types.episodes import EpisodeReply
from megarl.types.forks import Fork, path_before, path_to
from megarl.types.images import images_on
from megarl.types.sample_times import SAMPLE_TIMES
from megarl.types.seeds import sample_seed, try_seed
from megarl.types.turns import Tries


def written_at_once(sample: Sample, reply: EpisodeReply, parts: Sequence[Sequence[Sample]]) -> Sample:
    """Return the sample with all turns that were written at the same time; `parts` has, for each of `asked_at_once`,
    that sample with each of its tries at the end.

    They stand in this order, each on a branch of its own, with an empty reply between the tries of a turn.
    """
    episode, num_segments, place = episode_of(sample), len(sample.segments), 0
    number, tries, chat = episode.num_turns, list(episode.tries), list(episode.chat)
    after = tries.pop().after if tries and tries[-1].first == number else number - 1
    for asked, tries_of_it in zip((reply, *reply.beside), parts, strict=True):
        if place:
            sample, after = reading(sample, asked), number - 1 if asked.after_turn is None else asked.after_turn
            chat += [] if asked.part is None else [asked.part]
        context_end = int(path_before(sample.num_tokens, sample.forks)[-1])
        for i, part in enumerate(tries_of_it):
            segments, forks = sample.segments, sample.forks
            if i:
                segments, forks = (*segments, environment_segment([])), (*forks, Fork(sample.num_tokens, context_end))
            own = (part.segments if asked.trains else untrained(part.segments))[num_segments + bool(place) :]
            known, sample = sample.routed_experts, replace(sample, routed_experts=None)
            sample = _with_experts(replace(sample, segments=(*segments, *own), forks=forks), known, part)
        cut = (number + place + i for i, part in enumerate(tries_of_it) if part.finish_reason in CUTS)
        tries.append(Tries(number + place, len(tries_of_it), after, tuple(cut), place))
        place += len(tries_of_it)
    num_turns = number + place
    return with_facts(
        sample, num_turns=num_turns, awaits_reply=True, is_cut=False, tries=tuple(tries), chat=tuple(chat)
    )


def _with_experts(sample: Sample, known: ExpertArray | None, part: Sample) -> Sample:
    """Return a sample with the experts of its last tokens, and of those before them that nobody recorded.

    known: those of its first tokens. part: has the same last path, with the experts of its own request.
    """
    theirs = part.routed_experts
    if theirs is None:
        return sample
    known = np.empty((0, *theirs.shape[1:]), theirs.dtype) if known is None else known
    experts = with_unrouted(known, sample.num_tokens - len(known))
    assert experts is not None, "there are records"
    here, there = path_to(sample.num_tokens, sample.forks), path_to(part.num_tokens, part.forks)
    is_new = experts[here, -1, -1] < 0
    experts[here[is_new]] = theirs[there[is_new]]
    return replace(sample, routed_experts=experts)


class Engines(Protocol):
    """The interface of a group of engines, as `VllmSource` calls it."""

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]": ...

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]": ...


class VllmSource:
    """A source that samples from vLLM engines. Each sample has a seed of its own, so batching and order do not matter.

    A sample with a prefix starts with it. If the prefix ends the sample or fills its limit, nothing is generated.
    workers: those of the environments that prompts name; None: every sample is one answer. limits: of conversations.
    """

    def __init__(
        self, engines: Engines, workers: Episodes | None = None, limits: EnvironmentConfig | None = None
    ) -> None:
        self._engines, self._workers, self._limits = engines, workers, limits or EnvironmentConfig()

    async def sample(self, group: Group) -> None:
        await asyncio.gather(*(loop.spawn(self.sample_one(group, i)) for i in range(group.plan.num_samples)))

    async def sample_one(self, group: Group, i: int) -> None:
        """Sample the group's sample of index `i`, from where `group.parts` says it is, and hand it to the judges."""
        sample = group.parts.setdefault(i, _begin(group.prompt, group.plan, i))
        if group.prompt.environment:
            sample = await self._converse(group, i)
        engine: int | None = None
        # A request ends early when another engine takes over; a further one goes on there.
        while sample.finish_reason is FinishReason.ABORT:
            group.parts[i] = sample
            completion = await self._generate(group, sample, num_left(sample, group.plan), engine)
            sample, engine = extended(sample, completion), completion.engine
        await group.finish(sample)

    async def _converse(self, group: Group, i: int) -> Sample:
        """Lead a sample's conversation: turns of the policy and replies, until one of them ends it.

        After each, `group.parts` has the sample, from which a checkpoint goes on; all else can be found again.
        """
        assert self._workers is not None, "workers were started for prompts with environments"
        sample, plan = with_episode(group.prompt, group.parts[i]), group.plan
        conversation: Conversation | None = None
        wrote: dict[int, int] = {}
        while sample.finish_reason is FinishReason.ABORT:
            group.parts[i] = sample
            try:
                if conversation is None or conversation.is_lost:
                    conversation = self._workers.start(start_request(group.prompt, sample))
                    with SAMPLE_TIMES.part("tools", sample.uid, i):
                        sample = started(sample, reply := await conversation.reply)
                    if reply.is_anew:
                        wrote.clear()
                elif episode_of(sample).awaits_reply:
                    self._workers.act(conversation, turn_request(sample))
                    with SAMPLE_TIMES.part("tools", sample.uid, i):
                        sample = replied(sample, reply := await conversation.reply, plan, self._limits)
                elif (reply.num_tries > 1 or reply.beside) and sample.segments[-1].source in GIVEN:
                    sample = await self._write_at_once(group, sample, reply, wrote)
                else:
                    limit = turn_limit(sample, plan, self._limits, reply.max_turn_tokens)
                    engine = engine_of(sample, wrote)
                    completion = await self._generate(group, sample, limit, engine, reply.stop)
                    sample = extended(sample, completion)
                    if completion.engine is not None:
                        wrote[sample.num_tokens] = completion.engine
                    if sample.finish_reason is not FinishReason.ABORT:
                        sample = turn_ended(sample, trains=reply.trains)
            except WorkerLostError as lost:
                sample = sample if lost.is_blameless else after_worker_died(sample)
            if episode_of(sample).is_cut and num_left(sample, plan, self._limits.max_tokens) < 1:
                sample = finished(sample, FinishReason.LENGTH)
        if conversation is not None and not conversation.is_lost:
            self._workers.end(conversation)
        return sample

    async def _write_at_once(self, group: Group, sample: Sample, reply: EpisodeReply, wrote: dict[int, int]) -> Sample:
        """Let the policy write several turns at the same time; return the sample with all of them, or at its end if
        there is no room for them. wrote: as for `engine_of`; it is brought up to date.
        """
        asked = asked_at_once(sample, reply)
        limits = limits_at_once(sample, reply, group.plan, self._limits)
        counts, number = [reply.num_tries, *(each.num_tries for each in reply.beside)], episode_of(sample).num_turns
        if min(limits) < 1:
            return finished(sample, FinishReason.LENGTH)
        stops = [reply.stop, *(each.stop for each in reply.beside)]
        which = [i for i, count in enumerate(counts) for _ in range(count)]
        # They stand in this order, whichever is written first; a checkpoint has all of them or none.
        written = await asyncio.gather(
            *(
                self._try(group, replace(asked[i], seed=try_seed(sample.seed, place)), limits[i], wrote, stops[i])
                for place, i in enumerate(which)
            )
        )
        parts = [[part for (part, _), i in zip(written, which, strict=True) if i == each] for each in range(len(asked))]
        sample = written_at_once(sample, reply, parts)
        for turn, (_, engine) in zip(turns_of(sample)[number:], written, strict=True):
            wrote |= {} if engine is None else {turn.stop: engine}
        return sample

    async def _try(
        self, group: Group, sample: Sample, limit: int, wrote: Mapping[int, int], stop: Sequence[str]
    ) -> tuple[Sample, int | None]:
        """Write one of several turns; return the sample with it, and the engine that has its keys."""
        num_known, engine = sample.num_response_tokens, engine_of(sample, wrote)
        while sample.finish_reason is FinishReason.ABORT:
            most = max(1, limit - sample.num_response_tokens + num_known)
            with SAMPLE_TIMES.part("request", sample.uid, sample.sample_index):
                completion = await self._engines.generate(_request(group, sample, most, engine, stop))
            sample, engine = extended(sample, completion), completion.engine
        return sample, engine

    async def _generate(
        self, group: Group, sample: Sample, max_tokens: int, engine: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Ask an engine for more of a sample, of which a checkpoint has what is written so far."""
        request = _request(group, sample, max_tokens, engine, stop)
        asked = group.asked[sample.sample_index] = self._engines.generate(request)
        with SAMPLE_TIMES.part("request", sample.uid, sample.sample_index):
            completion = await asked
        del group.asked[sample.sample_index]
        return completion

    def parts(self, groups: Iterable[Group]) -> list[Sample]:
        written = self._engines.parts()
        found = []
        for group in groups:
            for i, sample in group.parts.items():
                if (asked := group.asked.get(i)) is not None and asked in written:
                    found.append(extended(sample, written[asked]))
                elif len(sample.segments) > 1:
                    found.append(sample)
        return found


def _request(
    group: Group, sample: Sample, max_tokens: int, engine: int | None, stop: Sequence[str] = ()
) -> GenerationRequest:
    """Return the request for more of a sample. engine: the one that has its keys and values, if any has.

    stop: further texts that end it.
    """
    sampling = group.plan.sampling_of(sample.sample_index)
    ids, images = group.prompt.token_ids, sample.images
    # Most requests are for the prompt of the data, and share its tuple.
    if len(sample.segments) > 1 or group.prompt.environment:
        ids = tuple(sample.context_ids.tolist())
        images = images_on(images, path_before(sample.num_tokens, sample.forks))
    return GenerationRequest(
        token_ids=ids,
        seed=sample.seed,
        sampling=replace(sampling, stop=(*sampling.stop, *stop)) if stop else sampling,
        max_tokens=max_tokens,
        num_before=sum(len(s.token_ids) for s in sample.segments if s.source is SegmentSource.POLICY),
        with_nucleus=group.plan.with_nucleus,
        head_tokens=group.plan.head_tokens,
        engine=engine,
        may_move=group.plan.may_move,
        num_routed=_num_routed(sample),
        images=images,
        whose=f"sample {sample.uid}/{sample.sample_index}",
    )


def extended(sample: Sample, completion: Completion) -> Sample:
    """Return a sample with the tokens of a completion of its request; each request has a segment of its own."""
    segment = Segment(
        source=SegmentSource.POLICY,
        token_ids=completion.token_ids,
        loss_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
        versions=completion.versions,
        rollout_logprobs=completion.logprobs,
        nucleus=completion.nucleus,
        head=completion.head,
    )
    experts, recorded = with_unrouted(sample.routed_experts, len(completion.token_ids)), completion.routed_experts
    if recorded is not None:
        num_tokens = sample.num_tokens + len(completion.token_ids)
        if experts is None:
            experts = np.full((num_tokens, *recorded.shape[1:]), -1, dtype=recorded.dtype)
        # No engine has computed the last token, nor those of other branches.
        read, start = path_to(num_tokens, sample.forks), _num_routed(sample)
        read = read[start : start + len(recorded)]
        # Each token was sampled with the experts of the request that sampled it, not with those of a later one.
        is_new = experts[read, -1, -1] < 0
        experts[read[is_new]] = recorded[is_new]
    return replace(
        sample,
        segments=(*sample.segments, segment),
        finish_reason=completion.finish_reason,
        routed_experts=experts,
    )


def _num_routed(sample: Sample) -> int:
    """Count the first tokens of a sample's context whose experts were all recorded, so that no engine repeats them."""
    if sample.routed_experts is None:
        return 0
    # Whoever records a token's experts does so in all layers.
    unknown = sample.routed_experts[path_before(len(sample.routed_experts), sample.forks), -1, -1] < 0
    return int(unknown.argmax()) if unknown.any() else len(unknown)


def _begin(prompt: Prompt, plan: SamplingPlan, sample_index: int) -> Sample:
    """Return a sample of which nothing was generated; it is finished if its prefix ends it or fills its limit."""
    prefix = plan.prefix(prompt.uid, sample_index)
    segments = [prompt_segment(prompt.token_ids, prompt.images)]
    if prefix.token_ids:
        # These tokens are trained on like the policy's own, but no engine sampled them: they have no weight version.
        n = len(prefix.token_ids)
        segments.append(
            Segment(
                source=SegmentSource.DEMONSTRATION,
                token_ids=np.asarray(prefix.token_ids, dtype=np.int32),
                loss_mask=np.ones(n, dtype=np.bool_),
                versions=(VersionSpan(-1, n),),
            )
        )
    is_full = len(prefix.token_ids) == plan.max_response_tokens
    cut = FinishReason.LENGTH if is_full else FinishReason.ABORT
    return Sample(
        uid=prompt.uid,
        sample_index=sample_index,
        seed=sample_seed(plan.run_seed, plan.step, prompt.uid, sample_index),
        segments=tuple(segments),
        finish_reason=FinishReason.STOP if prefix.is_complete else cut,
    )
