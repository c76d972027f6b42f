"""Collect the tensors that CPO reads to shape advantages, from a whole step on the host or from a micro-batch in the
loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megarl.algos.cpo.difficulty import group_difficulty
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.algos.masked import per_row
from megarl.config.algo import CpoConfig
from megarl.config.torch_later import Tensor
from megarl.types import RowBatch, ScoredBatch, TokenQuantity

PerToken: TypeAlias = Literal[
    "old_logprobs", "hint_logprobs", "shuffled_hint_logprobs", "hint_kl", "entropy", "excluded"
]
PerRow: TypeAlias = Literal["correct", "difficulty"]

# Names of the quantities that carry inputs to the loss; correctness and difficulty, one per row, repeat on every token.
CORRECT, DIFFICULTY, EXCLUDED = "cpo_correct", "cpo_difficulty", "cpo_excluded"
# The trainer's log-probs have a name of their own, because a correction may make the engine's the `old_logprobs`.
OLD = "cpo_old_logprobs"

# All names that `loss_quantities` may return.
LOSS_QUANTITIES: frozenset[str] = frozenset(
    {
        CORRECT,
        DIFFICULTY,
        EXCLUDED,
        OLD,
        TokenQuantity.HINT_LOGPROBS,
        TokenQuantity.SHUFFLED_HINT_LOGPROBS,
        TokenQuantity.HINT_KL,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpoInputs:
    """CPO's inputs for the rows of a step or a micro-batch, in tensors [B, T] read only on `loss_mask` (bool).

    advantages: from the estimator, before CPO. correct: [B] bool, whether the verifier accepts the row. difficulty: [B]
    int, the levels −1, 0 and 1 of `group_difficulty`. old_logprobs, hint_logprobs, shuffled_hint_logprobs: log-probs of
    the response under the same weights, without the hint, with it, and with another prompt's hint; in rows without a
    hint, all equal `old_logprobs`. hint_kl: KL(with hint ‖ without) over the vocabulary, in nats. entropy: nats,
    detached. vocab_size: without padding. excluded: [B, T] bool, tokens that keep their advantage. step: counts from 0.
    Tensors that the method does not read (see `required_quantities`) may be None.
    """

    advantages: Tensor
    loss_mask: Tensor
    correct: Tensor
    difficulty: Tensor
    vocab_size: int
    old_logprobs: Tensor | None = None
    hint_logprobs: Tensor | None = None
    shuffled_hint_logprobs: Tensor | None = None
    hint_kl: Tensor | None = None
    entropy: Tensor | None = None
    excluded: Tensor | None = None
    step: int = 0

    def __post_init__(self) -> None:
        shape = self.loss_mask.shape
        names: tuple[PerToken | Literal["advantages"], ...] = (
            "advantages",
            "old_logprobs",
            "hint_logprobs",
            "shuffled_hint_logprobs",
            "hint_kl",
            "entropy",
            "excluded",
        )
        rows: tuple[PerRow, ...] = ("correct", "difficulty")
        for name, expected in [*((n, shape) for n in names), *((n, shape[:1]) for n in rows)]:
            value = getattr(self, name)
            if value is not None and value.shape != expected:
                raise ValueError(f"cpo inputs: {name} has shape {tuple(value.shape)}, expected {tuple(expected)}")

    @property
    def active(self) -> Tensor:
        """Return [B, T] bool, true on the loss tokens whose advantage may change."""
        return self.loss_mask if self.excluded is None else self.loss_mask & ~self.excluded

    def need(self, name: PerToken) -> Tensor:
        """Return an optional input; raise ValueError if it was not given."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"cpo inputs: got no {name}, which the method uses; see required_quantities()")
        return value


def inputs_from_batch(batch: ScoredBatch, advantages: Tensor, cfg: CpoConfig, *, vocab_size: int) -> CpoInputs:
    """Gather CPO's inputs for a whole step from the batch's quantities.

    >>> batch, advantages = step("ab", [1.0, 0.0]), tensor([[1.0], [0.0]])
    >>> inputs_from_batch(batch, advantages, CpoConfig(), vocab_size=10).difficulty.tolist()
    [1, -1]
    """
    excluded = batch.quantities.get(EXCLUDED)
    if cfg.difficulty == "data":
        values = batch.quantity(DIFFICULTY)
        # All tokens of a row carry its difficulty, so that rows without loss tokens have one, too.
        difficulty = values[:, :1].sum(-1).sign().long()
    else:
        difficulty = group_difficulty(batch.uids, batch.correct, batch.rewards, cfg)
    return CpoInputs(
        advantages=advantages,
        loss_mask=batch.loss_mask,
        correct=batch.correct,
        difficulty=difficulty,
        vocab_size=vocab_size,
        old_logprobs=batch.quantities.get(TokenQuantity.OLD_LOGPROBS),
        hint_logprobs=batch.quantities.get(TokenQuantity.HINT_LOGPROBS),
        shuffled_hint_logprobs=batch.quantities.get(TokenQuantity.SHUFFLED_HINT_LOGPROBS),
        hint_kl=batch.quantities.get(TokenQuantity.HINT_KL),
        entropy=batch.quantities.get(TokenQuantity.OLD_ENTROPY),
        excluded=None if excluded is None else excluded.bool(),
        step=max(batch.step - 1, 0),
    )


def loss_quantities(x: CpoInputs, cfg: CpoConfig) -> Mapping[str, Tensor]:
    """Return the tensors [B, T] that CPO needs when it shapes advantages inside the loss; `inputs_from_rows` reads
    them there.

    >>> quantities = loss_quantities(terms([[1.0, 2.0]], difficulty=1).inputs, CpoConfig())
    >>> sorted(quantities), quantities[DIFFICULTY].tolist()
    (['cpo_correct', 'cpo_difficulty', 'cpo_old_logprobs', 'hint_logprobs'], [[1.0, 1.0]])
    """
    like = x.advantages
    quantities = {
        CORRECT: x.correct.to(like.dtype)[:, None].expand_as(like),
        DIFFICULTY: x.difficulty.to(like.dtype)[:, None].expand_as(like),
        OLD: x.need("old_logprobs"),
        TokenQuantity.HINT_LOGPROBS.value: x.need("hint_logprobs"),
    }
    if x.excluded is not None:
        quantities[EXCLUDED] = x.excluded.to(like.dtype)
    if cfg.shuffled_baseline:
        quantities[TokenQuantity.SHUFFLED_HINT_LOGPROBS.value] = x.need("shuffled_hint_logprobs")
    if MI_ESTIMATORS.get(cfg.mi_estimator).uses_hint_kl:
        quantities[TokenQuantity.HINT_KL.value] = x.need("hint_kl")
    return quantities


def inputs_from_rows(rows: RowBatch, entropy: Tensor, *, vocab_size: int) -> CpoInputs:
    """Gather CPO's inputs for a micro-batch from `advantages`, `loss_quantities` and the current policy's `entropy`.

    >>> row = {DIFFICULTY: [[1.0, 1.0]], CORRECT: [[1.0, 1.0]], OLD: [[-1.0, -1.0]], "hint_logprobs": [[0.0, 0.0]]}
    >>> batch = rows([[1, 1]], advantages=[[0.5, 0.5]], **row)
    >>> inputs_from_rows(batch, tensor([[0.1, 0.2]]), vocab_size=10).difficulty.tolist()
    [1]
    """
    excluded = rows.quantities.get(EXCLUDED)
    return CpoInputs(
        advantages=rows.quantity("advantages"),
        loss_mask=rows.loss_mask,
        correct=per_row(rows.quantity(CORRECT), rows.loss_mask) > 0,
        difficulty=per_row(rows.quantity(DIFFICULTY), rows.loss_mask).long(),
        vocab_size=vocab_size,
        old_logprobs=rows.quantity(OLD),
        hint_logprobs=rows.quantity(TokenQuantity.HINT_LOGPROBS),
        shuffled_hint_logprobs=rows.quantities.get(TokenQuantity.SHUFFLED_HINT_LOGPROBS),
        hint_kl=rows.quantities.get(TokenQuantity.HINT_KL),
        entropy=entropy.detach(),
        excluded=None if excluded is None else excluded > 0,
    )
