"""The policy-gradient algorithm as a composition of registered choices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.algos.advantages import compute_advantages
from megarl.algos.aggregation import AGGREGATIONS, Aggregation, count_rows, global_denominator
from megarl.algos.kl import KL_CONTROLLERS, KL_ESTIMATORS, KLObservation, apply_kl_penalty
from megarl.algos.masked import masked_sum
from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLossInputs
from megarl.algos.validate import check_algo_config
from megarl.config.schema import AlgoConfig
from megarl.types import (
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

_REQUIRES: Mapping[str, frozenset[Score]] = {
    "none": frozenset(),
    "loss": frozenset({Score.REF_LOGPROBS}),
    "reward": frozenset({Score.REF_LOGPROBS, Score.OLD_LOGPROBS}),
}

# The reduced metric that the KL controller follows, by algo.kl.where.
KL_METRICS: Mapping[str, str] = {"loss": "actor/ref_kl", "reward": "actor/reward_kl_penalty"}
_KL_COEF_METRICS: Mapping[str, str] = {"loss": "actor/kl_coef", "reward": "actor/reward_kl_penalty_coeff"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedAlgorithm:
    """`megarl.types.Algorithm` from an `AlgoConfig`. Some aggregations divide by the length `horizon_tokens`.

    loss = agg(policy loss) + kl_coef·agg(KL, if in the loss) − entropy_coef·agg(entropy).
    """

    cfg: AlgoConfig
    horizon_tokens: int

    def __post_init__(self) -> None:
        check_algo_config(self.cfg)

    @property
    def _aggregation(self) -> Aggregation:
        return AGGREGATIONS.get(self.cfg.aggregation)

    @property
    def entropy_needs_grad(self) -> bool:
        return self.cfg.entropy_coef != 0

    def requires(self) -> frozenset[Score]:
        return _REQUIRES[self.cfg.kl.where]

    def initial_state(self) -> AlgoState:
        return AlgoState(kl_coef=0.0 if self.cfg.kl.where == "none" else self.cfg.kl.coef)

    def advantages(self, batch: ScoredBatch, state: AlgoState) -> Advantages:
        """Metrics: critic/{score,rewards,advantages}/{mean,max,min}, where rewards include the KL penalty and
        advantages are over loss tokens; this step's KL coefficient; with KL in the reward, that KL."""
        metrics = {} if self.cfg.kl.where == "none" else {_KL_COEF_METRICS[self.cfg.kl.where]: state.kl_coef}
        rewards = batch.rewards
        if self.cfg.kl.where == "reward":
            kl = KL_ESTIMATORS.get(self.cfg.kl.estimator)(
                batch.score(Score.OLD_LOGPROBS), batch.score(Score.REF_LOGPROBS)
            )
            # The score stays with the row, not on its last token: a row without loss tokens keeps it too.
            penalised = apply_kl_penalty(torch.zeros_like(kl), kl, batch.loss_mask, coef=state.kl_coef)
            rewards = rewards + penalised.token_level_rewards.sum(dim=-1)
            metrics[KL_METRICS["reward"]] = penalised.current_kl
        values = compute_advantages(replace(batch, rewards=rewards), self.cfg.advantage)
        metrics |= _summary("critic/score", batch.rewards) | _summary("critic/rewards", rewards)
        metrics |= _summary("critic/advantages", values[batch.loss_mask])
        return Advantages(values=values, metrics=metrics)

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        counts = count_rows(rows)
        return Denominators(
            loss=global_denominator(self._aggregation, counts, horizon_tokens=self.horizon_tokens),
            tokens=float(max(counts.num_tokens, 1)),
        )

    def loss(self, rows: RowBatch, out: PolicyOutputs, state: AlgoState) -> LossSums:
        """Without `old_logprobs` in `rows` they are the current ones: right if, and only if, exactly one
        optimizer step uses the batch. Then every ratio is 1 and the gradient is the policy gradient."""
        mask = rows.loss_mask
        if out.logprobs.shape != mask.shape:
            raise ValueError(f"logprobs: got shape {tuple(out.logprobs.shape)}, expected {tuple(mask.shape)}")
        terms = POLICY_LOSSES.get(self.cfg.policy_loss.name)(
            PolicyLossInputs(
                logprobs=out.logprobs,
                old_logprobs=rows.scores.get(Score.OLD_LOGPROBS, out.logprobs.detach()),
                advantages=rows.score("advantages"),
                loss_mask=mask,
            ),
            self.cfg.policy_loss,
        )
        local_sum = self._aggregation.local_sum
        loss = local_sum(terms.loss, mask)
        loss_parts = {"actor/pg_loss": loss.detach()}
        per_token = dict(terms.diagnostics)
        if self.cfg.kl.where == "loss":
            kl = KL_ESTIMATORS.get(self.cfg.kl.estimator)(out.logprobs, rows.score(Score.REF_LOGPROBS))
            kl_loss = local_sum(kl, mask)
            loss = loss + state.kl_coef * kl_loss
            loss_parts["actor/kl_loss"] = kl_loss.detach()
            per_token[KL_METRICS["loss"]] = kl
        if out.entropy is not None:
            per_token["actor/entropy"] = out.entropy
        if self.entropy_needs_grad:
            if out.entropy is None:
                raise ValueError(f"entropy: got none, expected [B, T] as entropy_coef is {self.cfg.entropy_coef}")
            entropy_loss = local_sum(out.entropy, mask)
            loss = loss - self.cfg.entropy_coef * entropy_loss
            loss_parts["actor/entropy_loss"] = entropy_loss.detach()
        token_sums = {name: masked_sum(value.detach(), mask) for name, value in per_token.items()}
        return LossSums(loss=loss, loss_parts=loss_parts, token_sums=token_sums)

    def after_step(self, state: AlgoState, metrics: Mapping[str, float], num_rows: int) -> AlgoState:
        """`metrics` are the step's, of the update and of `advantages`; the KL among them is `KL_METRICS`."""
        if self.cfg.kl.where == "none":
            return state
        name = KL_METRICS[self.cfg.kl.where]
        if name not in metrics:
            raise KeyError(f"{name} is not among the step's metrics; pass those of the update and of advantages()")
        seen = KLObservation(kl_nats=metrics[name], num_rows=num_rows)
        return KL_CONTROLLERS.get(self.cfg.kl.controller)(state, seen, self.cfg.kl)


def _summary(prefix: str, values: Tensor) -> dict[str, float]:
    """Mean, max and min of `values`; nothing if there are none."""
    if not values.numel():
        return {}
    stats = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{prefix}/{name}": float(value.item()) for name, value in stats.items()}
