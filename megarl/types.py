"""One typed batch per stage: Prompt → Sample → RolloutBatch → ScoredBatch → Row → RowBatch.

Per-token arrays cover the *response*: entry t belongs to token `prompt + t`, the label, not to the position
that predicts it. The shift by one happens in a single place, when rows are packed for the model.
Host-side types hold numpy arrays (they travel through Ray's shared memory without a copy); `ScoredBatch` and
`RowBatch`, which algorithms compute with, hold torch tensors padded to [B, T].

Glossary: `rollout_logprobs` are the sampling engine's, `old_logprobs` the trainer's at rollout time, `logprobs`
the current policy's, `ref_logprobs` a frozen reference's. A *group* is the samples of one prompt, keyed by uid,
never by position. `loss_mask` marks the tokens that the policy chose.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


class FinishReason(StrEnum):
    """Why the engine stopped a sample."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SegmentSource(StrEnum):
    """Who wrote a segment of a sample."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"
    DEMONSTRATION = "demonstration"


# The score that marks demonstration tokens of a row with 1.
DEMONSTRATION = "demonstration"


class Score(StrEnum):
    """Per-token quantities a scoring pass can compute before the update."""

    OLD_LOGPROBS = "old_logprobs"
    OLD_ENTROPY = "old_entropy"
    REF_LOGPROBS = "ref_logprobs"
    HINT_LOGPROBS = "hint_logprobs"
    # The same with the hint of another prompt.
    SHUFFLED_HINT_LOGPROBS = "shuffled_hint_logprobs"
    # KL(policy with the hint ‖ policy) over the whole vocabulary.
    HINT_KL = "hint_kl"
    VALUES = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question as the model reads it, with what a scorer needs to judge an answer.

    demonstration_ids: an answer to start samples with, ending in the end token unless it was cut; empty: none.
    demonstration_probs: the demonstrator's probability of each of them, -1 where unknown; empty: none is known.
    """

    uid: str
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    demonstration_ids: tuple[int, ...] = ()
    demonstration_probs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a sample written by one source. Arrays have one entry per token, shape [n].

    `weight_versions` is -1 where no policy weights were involved.
    """

    source: SegmentSource
    token_ids: IntArray
    loss_mask: BoolArray
    weight_versions: IntArray
    rollout_logprobs: FloatArray | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("loss_mask", "weight_versions", "rollout_logprobs"):
            value = getattr(self, name)
            if value is not None and value.shape != (n,):
                raise ValueError(f"segment {name}: got shape {value.shape}, expected ({n},) like token_ids")


def prompt_segment(token_ids: Sequence[int]) -> Segment:
    """The segment that every sample starts with: no loss, no policy weights."""
    n = len(token_ids)
    return Segment(
        source=SegmentSource.PROMPT,
        token_ids=np.asarray(token_ids, dtype=np.int64),
        loss_mask=np.zeros(n, dtype=np.bool_),
        weight_versions=np.full(n, -1, dtype=np.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One finished sample: a prompt segment, then what the policy (or an environment) wrote."""

    uid: str
    sample_index: int
    seed: int
    segments: tuple[Segment, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if not self.segments or self.segments[0].source is not SegmentSource.PROMPT:
            raise ValueError(f"sample {self.uid}/{self.sample_index}: the first segment must be the prompt")

    @property
    def prompt_token_ids(self) -> IntArray:
        return self.segments[0].token_ids

    @property
    def response_token_ids(self) -> IntArray:
        return np.concatenate([np.empty(0, np.int64), *(s.token_ids for s in self.segments[1:])])

    @property
    def loss_mask(self) -> BoolArray:
        """[R] over the response."""
        return np.concatenate([np.empty(0, np.bool_), *(s.loss_mask for s in self.segments[1:])])

    @property
    def has_demonstration(self) -> bool:
        """Whether some of the response was not sampled but given."""
        return any(segment.source is SegmentSource.DEMONSTRATION for segment in self.segments)

    @property
    def rollout_logprobs(self) -> FloatArray:
        """[R] over the response; 0 on tokens that the engine did not sample."""
        parts = [
            np.zeros(len(s.token_ids), np.float32) if s.rollout_logprobs is None else s.rollout_logprobs
            for s in self.segments[1:]
        ]
        return np.concatenate([np.empty(0, np.float32), *parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The samples of one step, with the prompts they answer; `prompts` are keyed by uid."""

    prompts: Mapping[str, Prompt]
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        unknown = {s.uid for s in self.samples} - self.prompts.keys()
        if unknown:
            raise ValueError(f"rollout batch: samples of unknown prompts {sorted(unknown)[:3]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A scorer's verdict on one sample: `score` trains, `correct` decides accuracy and difficulty."""

    score: float
    correct: bool
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample as the trainer's workers need it. R = response length; per-token arrays are [R].

    `scores` holds what was computed so far (`old_logprobs`, `ref_logprobs`, `rollout_logprobs`, `advantages`).
    """

    uid: str
    sample_index: int
    token_ids: IntArray
    num_prompt_tokens: int
    loss_mask: BoolArray
    scores: Mapping[str, FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_response = len(self.token_ids) - self.num_prompt_tokens
        if self.num_prompt_tokens < 1:
            raise ValueError(f"row {self.label}: needs at least one prompt token to predict the first label from")
        for name, value in {"loss_mask": self.loss_mask, **self.scores}.items():
            if value.shape != (num_response,):
                raise ValueError(f"row {self.label}: {name} has shape {value.shape}, expected ({num_response},)")

    @property
    def label(self) -> str:
        """How messages name this row."""
        return f"{self.uid}/{self.sample_index}"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_response_tokens(self) -> int:
        return len(self.loss_mask)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def with_scores(self, **scores: FloatArray) -> "Row":
        """The row with these scores besides, or in place of, its own."""
        return replace(self, scores={**self.scores, **scores})

    def only(self, names: Collection[str]) -> "Row":
        """The row with those of its scores that are named."""
        return replace(self, scores={name: score for name, score in self.scores.items() if name in names})


# Rows by their index in a batch: all of them, or those that one process needs.
Rows: TypeAlias = Sequence[Row] | Mapping[int, Row]


def row_from_sample(sample: Sample) -> Row:
    """Everything after the prompt segment is response; `loss_mask` says which of it the policy chose."""
    return Row(
        uid=sample.uid,
        sample_index=sample.sample_index,
        token_ids=np.concatenate([sample.prompt_token_ids, sample.response_token_ids]),
        num_prompt_tokens=len(sample.prompt_token_ids),
        loss_mask=sample.loss_mask,
        scores={"rollout_logprobs": sample.rollout_logprobs},
    )


def pad_rows(arrays: Sequence[npt.NDArray[Any]], *, dtype: torch.dtype) -> torch.Tensor:
    """Stack arrays of shapes [R_i] into a right-padded [B, max R_i] tensor, 0 on the padding."""
    width = max((len(a) for a in arrays), default=0)
    out = torch.zeros(len(arrays), width, dtype=dtype)
    for i, array in enumerate(arrays):
        out[i, : len(array)] = torch.from_numpy(np.array(array))
    return out


class _PaddedScores:
    """Padded [B, T] scores by name; reading one that was not computed raises and says how to get it."""

    __slots__ = ()
    loss_mask: torch.Tensor
    scores: Mapping[str, torch.Tensor]

    @property
    def demonstration_mask(self) -> torch.Tensor:
        """[B, T] bool: loss tokens that a demonstration put there, not the policy."""
        if DEMONSTRATION not in self.scores:
            return torch.zeros_like(self.loss_mask)
        return self.scores[DEMONSTRATION].bool() & self.loss_mask

    def score(self, name: str) -> torch.Tensor:
        if name in self.scores:
            return self.scores[name]
        if not len(self.loss_mask):  # A batch without rows lacks nothing.
            return torch.zeros(self.loss_mask.shape, device=self.loss_mask.device)
        raise KeyError(
            f"{name} was not computed for this batch (there are: {sorted(self.scores)}); "
            f"add it to the algorithm's requires()"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch(_PaddedScores):
    """All rows of a step, as advantage estimators see them: complete groups, padded to [B, T].

    uids: B group keys; rewards: [B] sequence scores; correct: [B] bool; loss_mask: [B, T] bool; truncated: [B] bool,
    responses cut at the length limit (None: none was). `seed` is that of this step's random choices.
    """

    uids: tuple[str, ...]
    rewards: torch.Tensor
    correct: torch.Tensor
    loss_mask: torch.Tensor
    scores: Mapping[str, torch.Tensor]
    truncated: torch.Tensor | None = None
    step: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        b = len(self.uids)
        if self.rewards.shape != (b,) or self.correct.shape != (b,) or self.loss_mask.shape[0] != b:
            raise ValueError(
                f"scored batch: {b} uids, rewards {tuple(self.rewards.shape)}, correct "
                f"{tuple(self.correct.shape)}, loss_mask {tuple(self.loss_mask.shape)} do not agree"
            )
        _check_shapes(self.scores, self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch(_PaddedScores):
    """Rows of one micro-batch as losses see them: complete rows padded to [B, T], whatever the layout."""

    labels: tuple[str, ...]
    loss_mask: torch.Tensor
    scores: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        _check_shapes(self.scores, self.loss_mask)


def _check_shapes(scores: Mapping[str, torch.Tensor], loss_mask: torch.Tensor) -> None:
    for name, value in scores.items():
        if value.shape != loss_mask.shape:
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {tuple(loss_mask.shape)}")


def scored_batch(
    rows: Sequence[Row],
    rewards: Sequence[Reward],
    *,
    truncated: Sequence[bool] | None = None,
    step: int = 0,
    seed: int = 0,
) -> ScoredBatch:
    """Pad the rows of a step for the advantage estimator (float32 scores on the host)."""
    return ScoredBatch(
        uids=tuple(r.uid for r in rows),
        rewards=torch.tensor([r.score for r in rewards], dtype=torch.float32),
        correct=torch.tensor([r.correct for r in rewards], dtype=torch.bool),
        loss_mask=pad_rows([r.loss_mask for r in rows], dtype=torch.bool),
        scores=_pad_scores(rows),
        truncated=None if truncated is None else torch.tensor(truncated, dtype=torch.bool),
        step=step,
        seed=seed,
    )


def _pad_scores(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """The scores of rows that all have the same ones."""
    names = rows[0].scores.keys() if rows else frozenset()
    for row in rows:
        if row.scores.keys() != names:
            differing = sorted(row.scores.keys() ^ names)
            raise ValueError(f"row {row.label}: {differing} are scores of some rows only; score all of a batch alike")
    return {name: pad_rows([row.scores[name] for row in rows], dtype=torch.float32) for name in names}


def row_batch(rows: Sequence[Row], *, device: torch.device) -> RowBatch:
    """Pad the rows of a micro-batch for the loss."""
    return RowBatch(
        labels=tuple(r.label for r in rows),
        loss_mask=pad_rows([r.loss_mask for r in rows], dtype=torch.bool).to(device),
        scores={name: values.to(device) for name, values in _pad_scores(rows).items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutputs:
    """What the current policy says of a `RowBatch`: log-probs of the labels and entropies in nats, [B, T].

    Both are 0 outside the loss mask. `entropy` carries a gradient only if the algorithm asked for it.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOutputs:
    """What a critic says of a `RowBatch`: float32 values [B, T], 0 outside the loss mask."""

    values: torch.Tensor


ModelOutputs: TypeAlias = PolicyOutputs | ValueOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """[B, T] advantages, 0 outside the loss mask, and what to log about them.

    scores: further [B, T] numbers that the updates need (`returns`, `correction`), by name.
    """

    values: torch.Tensor
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Global counts of one optimizer mini-batch (all micro-batches × data-parallel ranks), at least 1 each.

    loss: the aggregation's. tokens: loss tokens; policy_tokens, demonstration_tokens: those that the policy sampled,
    and the others. imitated_tokens: those of an imitation loss beside the policy loss.
    """

    loss: float
    tokens: float
    policy_tokens: float = 1.0
    demonstration_tokens: float = 1.0
    imitated_tokens: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Local sums over a micro-batch; one place divides them by the global `Denominators`.

    loss: scalar with graph, ÷ `Denominators.loss`. imitation: the same, ÷ `Denominators.imitated_tokens`.
    Detached scalars by metric name: loss_parts ÷ `Denominators.loss`, token_sums ÷ tokens, policy_sums ÷
    policy_tokens, demonstration_sums ÷ demonstration_tokens, imitation_sums ÷ imitated_tokens.
    """

    loss: torch.Tensor
    imitation: torch.Tensor | None = None
    loss_parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    policy_sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    demonstration_sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    imitation_sums: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def total(self, denominators: Denominators) -> torch.Tensor:
        """This micro-batch's share of the objective, with graph."""
        total = self.loss / denominators.loss
        return total if self.imitation is None else total + self.imitation / denominators.imitated_tokens

    def shares(self, denominators: Denominators) -> dict[str, float]:
        """This micro-batch's share of every metric."""
        return {
            name: float(value) / count
            for sums, count in (
                (self.loss_parts, denominators.loss),
                (self.token_sums, denominators.tokens),
                (self.policy_sums, denominators.policy_tokens),
                (self.demonstration_sums, denominators.demonstration_tokens),
                (self.imitation_sums, denominators.imitated_tokens),
            )
            for name, value in sums.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyState:
    """The coefficient of the entropy bonus, and the moments of its optimizer after `num_updates` updates."""

    coef: float = 0.0
    exp_avg: float = 0.0
    exp_avg_sq: float = 0.0
    num_updates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoState:
    """What an algorithm carries from one batch to the next."""

    kl_coef: float = 0.0
    entropy: EntropyState = field(default_factory=EntropyState)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "AlgoState":
        """The state of which `dataclasses.asdict` made `state`."""
        return cls(kl_coef=state["kl_coef"], entropy=EntropyState(**state["entropy"]))


OutputsT = TypeVar("OutputsT", contravariant=True)


class Objective(Protocol[OutputsT]):
    """What a worker differentiates: a picklable, stateless loss of a model's outputs."""

    @property
    def entropy_needs_grad(self) -> bool:
        """Whether the loss differentiates the entropy."""

    @property
    def reads(self) -> frozenset[str]:
        """Scores of rows that the loss reads where rows have them; the others stay with the driver."""

    def loss(self, rows: RowBatch, out: OutputsT, state: AlgoState) -> LossSums:
        """Local sums over a micro-batch."""


class Algorithm(Objective[PolicyOutputs], Protocol):
    """The seam between the trainer and what it optimises. Implementations are picklable and stateless."""

    def requires(self) -> frozenset[Score]:
        """Scores that must be computed before `advantages`, for the whole batch."""

    def initial_state(self) -> AlgoState:
        """State before the first step."""

    def advantages(self, batch: ScoredBatch, state: AlgoState) -> Advantages:
        """Advantages of complete groups, on the host."""

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Global counts of an optimizer mini-batch, known before its first backward."""

    def after_step(self, state: AlgoState, metrics: Mapping[str, float], num_rows: int) -> AlgoState:
        """State for the next step, from this step's reduced metrics."""
