"""Define prompts, the samples that answer them (each a sequence of segments), and rewards."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from megarl.types.arrays import (
    BoolArray,
    ExpertArray,
    FloatArray,
    IdArray,
    IntArray,
    LikelyTokens,
    NucleusArray,
    VersionSpan,
    joined,
    require_experts_of_tokens,
    require_labels_in_nucleus,
    stacked,
    token_versions,
)
from megarl.types.forks import Fork, path_before
from megarl.types.images import RowImage, require_images, shifted
from megarl.types.turns import Message, Tries


class FinishReason(StrEnum):
    """The reason why the generation of a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    # The engine ended a response that only repeated itself. It is as finished as any other.
    REPETITION = "repetition"
    # The sample's environment failed; it must not train.
    FAILED = "failed"


class SegmentSource(StrEnum):
    """The author of a segment of a sample: prompt, policy, demonstration or environment."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"
    DEMONSTRATION = "demonstration"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPart:
    """Messages that an environment said: the policy read them before its turn of the number `turn`.

    after: the number of the turn that they follow; None: they are the whole chat up to there.
    """

    turn: int
    messages: tuple[Message, ...]
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question as the model reads it, with the data that a scorer needs to judge an answer.

    messages: the chat from which `token_ids` were made, for judges with a chat template of their own.
    demonstration_ids: an answer with which samples can start; it ends in the end token unless it was cut; empty: none.
    demonstration_probs: the demonstrator's probability of each of these tokens, -1 where unknown; empty: all unknown.
    target: the text of the data's own answer, where hints are made of it; empty: none. environment: the environment
    that replies to answers; empty: the first answer ends a sample. label: a truth that is not text. is_text: no chat.
    images: those that `token_ids` show, in order.
    """

    uid: str
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    demonstration_ids: tuple[int, ...] = ()
    demonstration_probs: tuple[float, ...] = ()
    target: str = ""
    environment: str = ""
    label: object = None
    is_text: bool = False
    images: tuple[RowImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A contiguous part of a sample with one author (`source`), in arrays of shape [n] with one entry per token.

    versions: the versions of the policy's weights that sampled the tokens; `weight_versions` has one for each token.
    nucleus: [n, K] int32, the ids of the tokens that top-k and top-p left to sample each token from, itself among them,
    then -1; `rollout_logprobs` are those of the distribution over these tokens. None: the whole vocabulary.
    head: the tokens that the engine found likeliest, if it was to record them; those of the nucleus where there is one.
    reward: what the environment gave for the policy's turn that ends with this segment. images: what its tokens show,
    with their places in the segment. observed: which tokens of a reply are the environment's own text; None: nobody
    asked.
    """

    source: SegmentSource
    token_ids: IdArray
    loss_mask: BoolArray
    versions: tuple[VersionSpan, ...]
    rollout_logprobs: FloatArray | None = None
    nucleus: NucleusArray | None = None
    head: LikelyTokens | None = None
    reward: float = 0.0
    images: tuple[RowImage, ...] = ()
    observed: BoolArray | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        require_images(self.images, n, "segment")
        if (count := sum(span.num_tokens for span in self.versions)) != n:
            raise ValueError(f"segment versions: got {count} tokens in spans, expected {n} like token_ids")
        for name in ("loss_mask", "rollout_logprobs", "observed"):
            value = getattr(self, name)
            if value is not None and value.shape != (n,):
                raise ValueError(f"segment {name}: got shape {value.shape}, expected ({n},) like token_ids")
        require_labels_in_nucleus(self.nucleus, self.token_ids, "segment")

    @property
    def weight_versions(self) -> IntArray:
        return token_versions(self.versions)


def prompt_segment(token_ids: Sequence[int], images: tuple[RowImage, ...] = ()) -> Segment:
    """Make the prompt segment that every sample starts with. It has no loss tokens, and weight versions -1.

    >>> prompt_segment([5, 6]).weight_versions.tolist()
    [-1, -1]
    """
    return _given_segment(SegmentSource.PROMPT, token_ids, images)


def environment_segment(
    token_ids: Sequence[int], observed: BoolArray | None = None, images: tuple[RowImage, ...] = ()
) -> Segment:
    """Make the segment of an environment's reply. It has no loss tokens, and weight versions -1.

    >>> environment_segment([5, 6]).loss_mask.tolist()
    [False, False]
    """
    return _given_segment(SegmentSource.ENVIRONMENT, token_ids, images, observed)


def _given_segment(
    source: SegmentSource,
    token_ids: Sequence[int],
    images: tuple[RowImage, ...] = (),
    observed: BoolArray | None = None,
) -> Segment:
    n = len(token_ids)
    return Segment(
        source=source,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        loss_mask=np.zeros(n, dtype=np.bool_),
        versions=(VersionSpan(-1, n),) if n else (),
        images=images,
        observed=observed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The facts about a sample's conversation with an environment.

    num_turns: the policy's turns that the environment has replied to, or that ended the sample. num_calls: the tools
    called. num_restarts: how often it began anew because a host died. seconds: the time that the environment took to
    reply. awaits_reply: whether the environment has yet to reply to the last turn. is_cut: whether a limit ended that
    turn. details: what the environment said besides, such as numbers for metrics. failure: the kind of a failure of the
    environment (`raised`, `timed_out`, `died`), which spoils the sample; empty: none. reason: the failure in one line.
    tries: the turns that do not follow the one before them, or that were written side by side, in order. chat: what the
    environment said so far, of an unfinished conversation whose history is rendered.
    """

    environment: str
    num_turns: int = 0
    num_calls: int = 0
    num_restarts: int = 0
    seconds: float = 0.0
    awaits_reply: bool = False
    is_cut: bool = False
    details: Mapping[str, object] = field(default_factory=dict)
    failure: str = ""
    reason: str = ""
    chat: tuple[ChatPart, ...] = ()
    tries: tuple[Tries, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A finished sequence: a prompt segment, then segments that a demonstration, the policy or an environment wrote.

    forks: where a segment does not follow the one before it, by tokens of all segments end to end; the sample is a tree
    (see `megarl.types.forks`).
    routed_experts: [tokens, layers, k] int16, the experts to which the engine sent each token of prompt and response in
    each layer (layers without experts may hold anything); -1 where unknown, as for a last token that the engine never
    read. None: not recorded. episode: the sample's conversation with an environment; None: there is none.
    """

    uid: str
    sample_index: int
    seed: int
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    routed_experts: ExpertArray | None = None
    episode: Episode | None = None
    forks: tuple[Fork, ...] = ()

    def __post_init__(self) -> None:
        if not self.segments or self.segments[0].source is not SegmentSource.PROMPT:
            raise ValueError(f"sample {self.uid}/{self.sample_index}: the first segment must be the prompt")
        if self.routed_experts is not None:
            num_tokens = sum(len(segment.token_ids) for segment in self.segments)
            require_experts_of_tokens(self.routed_experts, num_tokens, f"sample {self.uid}/{self.sample_index}")

    @property
    def token_ids(self) -> IdArray:
        """Return the tokens of all segments, end to end."""
        return joined([s.token_ids for s in self.segments], np.int32)

    @property
    def images(self) -> tuple[RowImage, ...]:
        """Return the images of all segments, with their places among the sample's tokens."""
        starts = np.cumsum([0, *(len(s.token_ids) for s in self.segments)])
        return tuple(each for s, start in zip(self.segments, starts, strict=False) for each in shifted(s.images, start))

    @property
    def context_ids(self) -> IdArray:
        """Return all tokens that a policy reads that goes on from the last one, or where the last branch begins."""
        ids = self.token_ids
        return ids[path_before(len(ids), self.forks)] if self.forks else ids

    @property
    def num_context_tokens(self) -> int:
        """Count the tokens of `context_ids`, without copies of all tokens."""
        return len(path_before(self.num_tokens, self.forks)) if self.forks else self.num_tokens

    @property
    def prompt_token_ids(self) -> IdArray:
        return self.segments[0].token_ids

    @property
    def response_token_ids(self) -> IdArray:
        return joined([s.token_ids for s in self.segments[1:]], np.int32)

    @property
    def num_tokens(self) -> int:
        """Count all tokens, of all branches, without a copy of them."""
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def num_response_tokens(self) -> int:
        return sum(self._lengths)

    @property
    def last_turn_ids(self) -> IdArray:
        """Return the tokens after the last reply of an environment: the whole response if there was none."""
        replies = [i for i, s in enumerate(self.segments) if s.source is SegmentSource.ENVIRONMENT]
        return joined([s.token_ids for s in self.segments[max(replies, default=0) + 1 :]], np.int32)

    @property
    def turn_rewards(self) -> FloatArray:
        """Return rewards [R] of the environment over the response: each at the last token of its turn, 0 elsewhere."""
        rewards = np.zeros(self.num_response_tokens, np.float32)
        ends = np.cumsum(self._lengths)
        for end, segment in zip(ends, self.segments[1:], strict=True):
            if segment.reward:
                rewards[end - 1] = segment.reward
        return rewards

    @property
    def loss_mask(self) -> BoolArray:
        """Return the loss mask [R] over the response."""
        return joined([s.loss_mask for s in self.segments[1:]], np.bool_)

    @property
    def observed(self) -> FloatArray:
        """Return 1 on the tokens [R] of the response that are an environment's own text, and 0 on all others."""
        parts = [np.zeros_like(s.loss_mask) if s.observed is None else s.observed for s in self.segments[1:]]
        return joined(parts, np.float32)

    @property
    def rollout_logprobs(self) -> FloatArray:
        """Return the engine's log-probs [R] over the response; they are 0 on tokens that the engine did not sample."""
        parts = [s.rollout_logprobs for s in self.segments[1:]]
        given = [
            np.zeros(n, np.float32) if part is None else part for part, n in zip(parts, self._lengths, strict=True)
        ]
        return joined(given, np.float32)

    @property
    def nucleus(self) -> NucleusArray | None:
        """Return the nuclei [R, K] of the response's tokens, -1 where a segment has none; None if no segment has."""
        return stacked([s.nucleus for s in self.segments[1:]], self._lengths, -1)

    @property
    def head(self) -> LikelyTokens | None:
        """Return the tokens that the engine found likeliest in place of the response's, as `nucleus` does nuclei."""
        return LikelyTokens.joined([s.head for s in self.segments[1:]], self._lengths)

    @property
    def _lengths(self) -> list[int]:
        return [len(s.token_ids) for s in self.segments[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The samples of one step, and the prompts that they answer, by uid."""

    prompts: Mapping[str, Prompt]
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if unknown := {s.uid for s in self.samples} - self.prompts.keys():
            raise ValueError(f"rollout batch: samples of unknown prompts {sorted(unknown)[:3]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward is a scorer's verdict on one sample: `score` trains, `correct` decides accuracy and difficulty.

    own_score: the scorer's number before a data source or a service turned it into the reward; None: `score` itself.
    details: the scorer's other numbers, by the names that they have in metrics.
    no_opinion: names of details that other samples have, but on which nobody has an opinion here.
    notes: its other findings, such as the answer it read, as JSON values; only the rollout files contain them.
    dropped: no scorer could judge the sample, so it must not train; its score is NaN, which all readers refuse.
    """

    score: float
    correct: bool
    details: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    dropped: bool = False
    own_score: float | None = None
    no_opinion: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Reward":
        """Make a reward of the fields of one that JSON carried, which has lists for tuples."""
        return cls(**{**fields, "no_opinion": tuple(fields["no_opinion"])})


DROPPED = Reward(score=math.nan, correct=False, dropped=True)
