"""Lead conversations of samples with environments: a turn of the policy, a reply, and so on, until one of them ends.

The driver has the state of every conversation, so checkpoints hold it, and the death of an engine or of a host costs no
more than what that process had not sent yet. Hosts only run environments; engines only see single requests.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, TypeAlias

from megarl.environments.host import HostReply, StartRequest, TurnRequest
from megarl.rollout.source import Batch
from megarl.types import (
    Episode,
    FinishReason,
    Prompt,
    Sample,
    SegmentSource,
    environment_segment,
    prompt_segment,
)

# Called with the reply to a request.
OnReply: TypeAlias = Callable[[HostReply], None]
# Called when the host of a conversation has died, with whether it owed a reply.
OnLost: TypeAlias = Callable[[bool], None]
# Asks an engine for the next turn of a conversation, of at most so many tokens.
AskTurn: TypeAlias = Callable[["Conversation", int], None]


class Episodes(Protocol):
    """The interface of the hosts of environments, as `Conversations` calls it."""

    def start(self, request: StartRequest, tell: OnReply, lost: OnLost) -> int:
        """Begin a conversation, and return its key. After `lost` was called, nobody is told anything of the key."""

    def act(self, key: int, request: TurnRequest, tell: OnReply) -> None: ...

    def end(self, key: int) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """One sample's conversation under way.

    key: that of its environment at the hosts; None: its host has died. engine: the one that has the sample's keys and
    values, if any has.
    """

    batch: Batch
    prompt: Prompt
    sample: Sample
    key: int | None = None
    engine: int | None = None

    @property
    def episode(self) -> Episode:
        assert self.sample.episode is not None, "the sample has a conversation"
        return self.sample.episode

    def note(self, **changes: Any) -> None:
        """Change what is known of the conversation."""
        self.sample = replace(self.sample, episode=replace(self.episode, **changes))

    def turns(self) -> list[tuple[int, ...]]:
        """Return the tokens of the policy's turns, the last of which may be under way or lack its reply."""
        own = groupby(self.sample.segments[1:], lambda segment: segment.source is SegmentSource.ENVIRONMENT)
        parts = (list(segments) for is_reply, segments in own if not is_reply)
        return [tuple(token for s in segments for token in s.token_ids.tolist()) for segments in parts]

    def num_replies(self) -> int:
        return sum(segment.source is SegmentSource.ENVIRONMENT for segment in self.sample.segments)


class Conversations:
    """The conversations of a run's samples.

    max_turns, max_turn_tokens: limits of a conversation, see `environment` in the configuration.
    """

    def __init__(self, episodes: Episodes, ask: AskTurn, *, max_turns: int, max_turn_tokens: int | None) -> None:
        self._episodes, self._ask = episodes, ask
        self._max_turns, self._max_turn_tokens = max_turns, max_turn_tokens
        self._live: set[Conversation] = set()

    def begin(self, batch: Batch, prompt: Prompt, sample: Sample) -> None:
        """Begin a sample's conversation, or go on with one that has turns already."""
        if sample.episode is None:
            # A prefix may be a whole turn, or fill the limit.
            is_whole = sample.finish_reason is not FinishReason.ABORT
            episode = Episode(
                environment=prompt.environment,
                num_turns=int(is_whole),
                awaits_reply=is_whole,
                is_cut=sample.finish_reason is FinishReason.LENGTH,
            )
            sample = replace(sample, episode=episode, finish_reason=FinishReason.ABORT)
        talk = Conversation(batch=batch, prompt=prompt, sample=sample)
        self._live.add(talk)
        self._start(talk)

    def unfinished(self) -> list[Sample]:
        """Return the samples of all conversations, without the tokens that engines have not sent yet."""
        return [talk.sample for talk in self._live]

    def turn_ended(self, talk: Conversation, sample: Sample) -> None:
        """Take a turn of the policy that an engine has written."""
        is_cut = sample.finish_reason is FinishReason.LENGTH
        talk.sample = replace(sample, finish_reason=FinishReason.ABORT)
        talk.note(num_turns=talk.episode.num_turns + 1, awaits_reply=True, is_cut=is_cut)
        self._act(talk)

    def _start(self, talk: Conversation) -> None:
        past = talk.turns()[: talk.num_replies()]
        talk.key = self._episodes.start(
            StartRequest(prompt=talk.prompt, turns=tuple(past)),
            lambda reply: self._started(talk, reply),
            lambda owed_reply: self._lost(talk, owed_reply=owed_reply),
        )

    def _started(self, talk: Conversation, reply: HostReply) -> None:
        """Take the reply to the start of a conversation: the policy speaks next, unless it just has."""
        if self._has_failed(talk, reply):
            return
        has_turns = any(segment.source is SegmentSource.POLICY for segment in talk.sample.segments)
        # What the policy wrote after another prompt belongs to that.
        is_other = bool(reply.token_ids) and list(reply.token_ids) != talk.sample.prompt_token_ids.tolist()
        if reply.is_anew or (has_turns and is_other):
            kept = [s for s in talk.sample.segments if s.source in (SegmentSource.PROMPT, SegmentSource.DEMONSTRATION)]
            rest = talk.sample.segments[len(kept) :]
            # A demonstration may be a whole turn.
            is_whole = len(kept) > 1 and bool(rest) and rest[0].source is SegmentSource.ENVIRONMENT
            talk.sample = replace(talk.sample, segments=tuple(kept))
            talk.note(num_turns=int(is_whole), num_calls=0, awaits_reply=is_whole, is_cut=False, details={})
        if reply.token_ids:
            talk.sample = replace(talk.sample, segments=(prompt_segment(reply.token_ids), *talk.sample.segments[1:]))
        if talk.episode.awaits_reply:
            self._act(talk)
        else:
            self._next_turn(talk, reply.max_turn_tokens)

    def _act(self, talk: Conversation) -> None:
        """Pass the policy's last turn to the environment."""
        episode = talk.episode
        if episode.is_cut and self._num_left(talk) < 1:
            self._finish(talk, FinishReason.LENGTH)
        elif talk.key is None:
            self._start(talk)
        else:
            turn = talk.turns()[-1]
            num_before = len(talk.sample.prompt_token_ids) + len(talk.sample.response_token_ids) - len(turn)
            request = TurnRequest(
                token_ids=turn, turn=episode.num_turns - 1, is_cut=episode.is_cut, num_before=num_before
            )
            self._episodes.act(talk.key, request, lambda reply: self._replied(talk, reply))

    def _replied(self, talk: Conversation, reply: HostReply) -> None:
        """Take the environment's reply to a turn."""
        if self._has_failed(talk, reply):
            return
        *earlier, turn = talk.sample.segments
        talk.sample = replace(talk.sample, segments=(*earlier, replace(turn, reward=reply.reward)))
        details = {**talk.episode.details, **reply.details}
        talk.note(awaits_reply=False, num_calls=talk.episode.num_calls + reply.num_calls, details=details)
        if reply.done:
            self._finish(talk, FinishReason.STOP)
        elif talk.episode.num_turns >= self._max_turns or self._num_left(talk) <= len(reply.token_ids):
            # Without room for a turn, a reply would only be read by nobody.
            self._finish(talk, FinishReason.LENGTH)
        else:
            talk.sample = replace(talk.sample, segments=(*talk.sample.segments, environment_segment(reply.token_ids)))
            self._next_turn(talk, reply.max_turn_tokens)

    def _next_turn(self, talk: Conversation, own_limit: int | None) -> None:
        """Ask an engine for the next turn, or for the rest of one under way. own_limit: that of the environment."""
        begun = talk.turns()[talk.num_replies() :]
        limits = [limit for limit in (self._max_turn_tokens, own_limit) if limit is not None]
        left = [max(1, limit - len(begun[0] if begun else ())) for limit in limits]
        self._ask(talk, min([self._num_left(talk), *left]))

    def _num_left(self, talk: Conversation) -> int:
        return talk.batch.plan.max_response_tokens - len(talk.sample.response_token_ids)

    def _has_failed(self, talk: Conversation, reply: HostReply) -> bool:
        """Note how long a reply took; if it is a failure, end the conversation with it."""
        talk.note(seconds=talk.episode.seconds + reply.seconds)
        if reply.failure:
            talk.note(failure=reply.failure, reason=reply.reason)
            self._finish(talk, FinishReason.FAILED)
        return bool(reply.failure)

    def _lost(self, talk: Conversation, *, owed_reply: bool) -> None:
        """Begin again after the death of a host. One that owed a reply in two deaths may be what kills hosts."""
        talk.key = None
        if not owed_reply:
            return
        if talk.episode.num_restarts:
            talk.note(failure="died", reason="hosts died twice while this conversation's environment worked")
            self._finish(talk, FinishReason.FAILED)
        else:
            talk.note(num_restarts=1)
            self._start(talk)

    def _finish(self, talk: Conversation, reason: FinishReason) -> None:
        if talk.key is not None:
            self._episodes.end(talk.key)
        self._live.discard(talk)
        talk.note(awaits_reply=False, is_cut=False)
        talk.batch.finish(talk.prompt, replace(talk.sample, finish_reason=reason))
