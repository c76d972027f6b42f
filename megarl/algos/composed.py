"""The policy-gradient algorithm as a composition of registered choices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.algos import cpo
from megarl.algos.advantages import ADVANTAGE_ESTIMATORS
from megarl.algos.aggregation import AGGREGATIONS, Aggregation, global_denominator
from megarl.algos.corrections import Correction, CorrectionInputs, compute_correction
from megarl.algos.entropy import initial_entropy_state, next_entropy_state
from megarl.algos.kl import KL_CONTROLLERS, KL_ESTIMATORS, KLObservation, apply_kl_penalty
from megarl.algos.masked import group_stats, masked_sum
from megarl.algos.mixed_groups import mixed_metrics, weight_advantages, without_truncated
from megarl.algos.off_policy import count_mixed
from megarl.algos.policy_losses import ROW_RATIO_LOSSES
from megarl.algos.rewards import reward_advantages, shape_rewards
from megarl.algos.summary import summary
from megarl.algos.token_losses import CORRECTION, TokenLosses, token_losses, trained_rows
from megarl.algos.token_rewards import KL_PENALTY
from megarl.algos.validate import check_algo_config
from megarl.config.algo import AlgoConfig
from megarl.types import (
    DEMONSTRATION,
    Advantages,
    AlgoState,
    Denominators,
    LossSums,
    PolicyOutputs,
    Row,
    RowBatch,
    Score,
    ScoredBatch,
)

_KL_SCORES: Mapping[str, frozenset[Score]] = {
    "none": frozenset(),
    "loss": frozenset({Score.REF_LOGPROBS}),
    "reward": frozenset({Score.REF_LOGPROBS, Score.OLD_LOGPROBS}),
}

# The reduced metric that the KL controller follows, by algo.kl.where.
KL_METRICS: Mapping[str, str] = {"loss": "actor/ref_kl", "reward": "actor/reward_kl_penalty"}
_KL_COEF_METRICS: Mapping[str, str] = {"loss": "actor/kl_coef", "reward": "actor/reward_kl_penalty_coeff"}
ENTROPY_METRIC = "actor/entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedAlgorithm:
    """`megarl.types.Algorithm` from an `AlgoConfig`.

    loss = agg(policy loss × correction) + kl_coef·agg(KL, if in the loss) − entropy_coef·agg(entropy), and with
    off_policy.loss=sft an imitation loss beside it.
    horizon_tokens: the length that some aggregations divide by. vocab_size: the model's, for CPO's uncertainty.
    """

    cfg: AlgoConfig
    horizon_tokens: int
    max_response_tokens: int
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_algo_config(self.cfg, max_response_tokens=self.max_response_tokens)

    @property
    def _aggregation(self) -> Aggregation:
        return AGGREGATIONS.get(self.cfg.aggregation)

    @property
    def entropy_needs_grad(self) -> bool:
        return self.cfg.entropy_coef != 0

    @property
    def token_local(self) -> bool:
        return self.cfg.policy_loss.name not in ROW_RATIO_LOSSES and not cpo.shapes_in_loss(self.cfg.cpo)

    @property
    def reads(self) -> frozenset[str]:
        scores = {"advantages", CORRECTION, DEMONSTRATION, "target_probs", Score.OLD_LOGPROBS, Score.REF_LOGPROBS}
        return frozenset(scores | (cpo.LOSS_SCORES if cpo.shapes_in_loss(self.cfg.cpo) else frozenset()))

    def requires(self) -> frozenset[Score]:
        scores = _KL_SCORES[self.cfg.kl.where] | cpo.required_scores(self.cfg.cpo)
        if self.cfg.reward.source == "critic" or ADVANTAGE_ESTIMATORS.get(self.cfg.advantage.estimator).needs_values:
            scores |= {Score.VALUES}
        if self.cfg.correction.name != "none" or self.cfg.off_policy.drop_above is not None:
            scores |= {Score.OLD_LOGPROBS}
        return scores

    def initial_state(self) -> AlgoState:
        kl_coef = 0.0 if self.cfg.kl.where == "none" else self.cfg.kl.coef
        return AlgoState(kl_coef=kl_coef, entropy=initial_entropy_state(self.cfg))

    # --- advantages, on the host

    def advantages(self, batch: ScoredBatch, state: AlgoState) -> Advantages:
        """Reward shaping → KL penalty → estimator → weights of demonstrations → CPO → correction.

        Metrics: of every stage; critic/advantages/{mean,max,min} over loss tokens, as the loss gets them; this step's
        KL coefficient. Scores: `returns` of a critic, and what the loss reads beside the advantages.
        """
        shaped = shape_rewards(batch, self.cfg.reward, max_response_tokens=self.max_response_tokens)
        metrics: dict[str, float] = dict(shaped.metrics)
        scored, batch = batch, replace(batch, rewards=shaped.rewards)
        if self.cfg.kl.where != "none":
            metrics[_KL_COEF_METRICS[self.cfg.kl.where]] = state.kl_coef
        if self.cfg.kl.where == "reward":
            batch, metrics[KL_METRICS["reward"]] = self._with_kl_penalty(batch, state)
        estimate = reward_advantages(batch, self.cfg.reward, self.cfg.advantage)
        metrics |= estimate.metrics
        scores: dict[str, Tensor] = {} if estimate.returns is None else {"returns": estimate.returns}
        values = weight_advantages(estimate.advantages, batch, self.cfg.off_policy)
        if DEMONSTRATION in batch.scores:
            metrics |= mixed_metrics(batch)
        if self.entropy_needs_grad:
            metrics["actor/entropy_coef"] = state.entropy.coef
        if self.cfg.cpo.method != "none":
            # Difficulty is judged by the scorer's rewards.
            values = self._shape(values, replace(batch, rewards=scored.rewards), scores, metrics)
            values = without_truncated(values, batch, self.cfg.off_policy)
        if self.cfg.correction.name != "none":
            correction = self._correct(values, batch)
            scores |= {CORRECTION: correction.weights, Score.OLD_LOGPROBS: correction.old_logprobs}
            metrics |= correction.metrics
        metrics |= summary("critic/advantages", values[batch.loss_mask]) | _spreads(values, batch)
        return Advantages(values=values, scores=scores, metrics=metrics)

    def _with_kl_penalty(self, batch: ScoredBatch, state: AlgoState) -> tuple[ScoredBatch, float]:
        """The batch with the penalty of every token, and the KL that it is for."""
        estimator = KL_ESTIMATORS.get(self.cfg.kl.estimator)
        kl = estimator(batch.score(Score.OLD_LOGPROBS), batch.score(Score.REF_LOGPROBS))
        mask = batch.loss_mask & ~batch.demonstration_mask
        penalised = apply_kl_penalty(torch.zeros_like(kl), kl, mask, coef=state.kl_coef)
        return replace(batch, scores={**batch.scores, KL_PENALTY: -penalised.token_level_rewards}), penalised.current_kl

    def _shape(
        self, values: Tensor, batch: ScoredBatch, scores: dict[str, Tensor], metrics: dict[str, float]
    ) -> Tensor:
        """CPO's shaping; where it needs the current entropy, what the loss needs for it goes to `scores`."""
        assert self.vocab_size is not None, "CPO needs the model's vocabulary size"
        excluded = batch.scores[cpo.EXCLUDED].bool() if cpo.EXCLUDED in batch.scores else None
        inputs = cpo.inputs_from_batch(batch, values, self.cfg.cpo, vocab_size=self.vocab_size, excluded=excluded)
        metrics |= cpo.difficulty_metrics(batch.uids, batch.correct)
        metrics["train/reward_mean"] = float(batch.rewards.mean())
        if cpo.shapes_in_loss(self.cfg.cpo):
            scores |= cpo.loss_scores(inputs, self.cfg.cpo)
            metrics |= cpo.hint_metrics(inputs, self.cfg.cpo)
            return values
        shaped = cpo.shape_advantages(inputs, self.cfg.cpo)
        metrics |= cpo.cpo_metrics(values, shaped, inputs, self.cfg.cpo)
        return shaped

    def _correct(self, values: Tensor, batch: ScoredBatch) -> Correction:
        inputs = CorrectionInputs(
            old_logprobs=batch.score(Score.OLD_LOGPROBS),
            rollout_logprobs=batch.score("rollout_logprobs"),
            advantages=values,
            loss_mask=batch.loss_mask,
            demonstration_mask=batch.demonstration_mask,
        )
        return compute_correction(inputs, self.cfg.correction)

    # --- the loss, per micro-batch

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        rows = trained_rows(rows, self.cfg.off_policy)
        counts = count_mixed(rows, self.cfg.off_policy)
        return Denominators(
            loss=global_denominator(self._aggregation, counts.policy_loss, horizon_tokens=self.horizon_tokens),
            tokens=float(max(counts.num_policy_tokens + counts.num_demonstration_tokens, 1)),
            policy_tokens=float(max(counts.num_policy_tokens, 1)),
            demonstration_tokens=float(max(counts.num_demonstration_tokens, 1)),
            imitated_tokens=float(max(counts.num_imitated_tokens, 1)),
        )

    def loss(self, rows: RowBatch, out: PolicyOutputs, state: AlgoState) -> LossSums:
        """Without `old_logprobs` in `rows` they are the current ones: right if, and only if, exactly one
        optimizer step uses the batch. Then every ratio is 1 and the gradient is the policy gradient."""
        if out.logprobs.shape != rows.loss_mask.shape:
            raise ValueError(f"logprobs: got shape {tuple(out.logprobs.shape)}, expected {tuple(rows.loss_mask.shape)}")
        shift: Mapping[str, Tensor] = {}
        advantages = rows.score("advantages")
        if cpo.shapes_in_loss(self.cfg.cpo):
            advantages, shift = self._shape_in_loss(rows, out)
        return self._summed(token_losses(rows, out, advantages, self.cfg), rows, out, state, shift)

    def _shape_in_loss(self, rows: RowBatch, out: PolicyOutputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        """CPO's shaping by the current entropy, and what it changed, per token."""
        assert out.entropy is not None, "the log-prob head answers entropies too"
        assert self.vocab_size is not None, "CPO needs the model's vocabulary size"
        inputs = cpo.inputs_from_rows(rows, out.entropy, vocab_size=self.vocab_size)
        shaped = cpo.shape_advantages(inputs, self.cfg.cpo)
        return shaped, cpo.shift_diagnostics(inputs.advantages, shaped)

    def _summed(
        self, terms: TokenLosses, rows: RowBatch, out: PolicyOutputs, state: AlgoState, shift: Mapping[str, Tensor]
    ) -> LossSums:
        local_sum, mask, policy_mask = self._aggregation.local_sum, terms.loss_mask, terms.policy_mask
        loss = local_sum(terms.loss, mask)
        loss_parts = {"actor/pg_loss": loss.detach()}
        per_token = dict(terms.policy_diagnostics)
        if self.cfg.kl.where == "loss":
            kl = KL_ESTIMATORS.get(self.cfg.kl.estimator)(out.logprobs, rows.score(Score.REF_LOGPROBS))
            kl_loss = local_sum(kl, mask & policy_mask)
            loss = loss + state.kl_coef * kl_loss
            loss_parts["actor/kl_loss"] = kl_loss.detach()
            per_token[KL_METRICS["loss"]] = kl
        if out.entropy is not None:
            per_token[ENTROPY_METRIC] = out.entropy
        if self.entropy_needs_grad:
            if out.entropy is None:
                raise ValueError(f"entropy: got none, expected [B, T] as entropy_coef is {self.cfg.entropy_coef}")
            entropy_loss = local_sum(out.entropy, mask & policy_mask)
            loss = loss - state.entropy.coef * entropy_loss
            loss_parts["actor/entropy_loss"] = entropy_loss.detach()
        imitation = None if terms.imitation is None else masked_sum(terms.imitation, terms.imitated_mask)
        return LossSums(
            loss=loss,
            imitation=None if imitation is None else self.cfg.off_policy.sft_coef * imitation,
            loss_parts=loss_parts,
            token_sums={name: masked_sum(value.detach(), rows.loss_mask) for name, value in shift.items()},
            policy_sums={name: masked_sum(value.detach(), policy_mask) for name, value in per_token.items()},
            demonstration_sums={
                name: masked_sum(value, terms.demonstration_mask)
                for name, value in terms.demonstration_diagnostics.items()
            },
            imitation_sums={} if imitation is None else {"actor/imitation_loss": imitation.detach()},
        )

    def after_step(self, state: AlgoState, metrics: Mapping[str, float], num_rows: int) -> AlgoState:
        """`metrics` are the step's, of the update and of `advantages`; the KL among them is `KL_METRICS`."""
        if self.cfg.kl.where != "none":
            seen = KLObservation(kl_nats=_measured(metrics, KL_METRICS[self.cfg.kl.where]), num_rows=num_rows)
            state = KL_CONTROLLERS.get(self.cfg.kl.controller)(state, seen, self.cfg.kl)
        if self.cfg.entropy.controller != "fixed":
            entropy = next_entropy_state(state.entropy, _measured(metrics, ENTROPY_METRIC), self.cfg)
            state = replace(state, entropy=entropy)
        return state


def _spreads(values: Tensor, batch: ScoredBatch) -> dict[str, float]:
    """Population deviation of the advantages over loss tokens, and mean over rows of their group's reward deviation."""
    if not batch.loss_mask.any():
        return {}
    return {
        "critic/advantages/std": float(values[batch.loss_mask].double().std(correction=0)),
        "critic/group_reward_std": float(group_stats(batch.rewards, batch.uids).std.mean()),
    }


def _measured(metrics: Mapping[str, float], name: str) -> float:
    if name not in metrics:
        raise KeyError(f"{name} is not among the step's metrics; pass those of the update and of advantages()")
    return metrics[name]
