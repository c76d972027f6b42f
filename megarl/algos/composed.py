"""Compose a policy-gradient algorithm from an estimator, a policy loss, a KL and an aggregation chosen by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.algos import centering, cpo, distill, off_policy_losses  # noqa: F401 - the last one fills a registry
from megarl.algos.advantages import estimator_of
from megarl.algos.aggregation import AGGREGATIONS, global_denominator
from megarl.algos.corrections import CORRECTION, compares_policies
from megarl.algos.covariance import CHOSEN
from megarl.algos.entropy import next_entropy_state
from megarl.algos.kl import KL_CONTROLLERS, KL_ESTIMATORS, KLObservation, apply_kl_penalty
from megarl.algos.masked import group_stats, kept, masked_sum, token_summary
from megarl.algos.mixed_groups import demonstration_mask
from megarl.algos.off_policy import count_mixed
from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLoss
from megarl.algos.prefixes import DEMONSTRATION, TARGET_PROBS
from megarl.algos.rewards import reward_advantages, shape_rewards
from megarl.algos.shaping import ShapingInputs, shapers_of
from megarl.algos.token_losses import token_losses, trained_rows
from megarl.algos.token_rewards import KL_PENALTY
from megarl.algos.validate import check_algo_config
from megarl.config.algo import AlgoConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import (
    Advantages,
    AlgoState,
    Denominators,
    EntropyState,
    LossSums,
    PolicyOutputs,
    Row,
    RowBatch,
    ScoredBatch,
    TokenQuantity,
)
from megarl.types.rows import OBSERVED

_KL_QUANTITIES: Mapping[str, frozenset[TokenQuantity]] = {
    "none": frozenset(),
    "loss": frozenset({TokenQuantity.REF_LOGPROBS}),
    "reward": frozenset({TokenQuantity.REF_LOGPROBS, TokenQuantity.OLD_LOGPROBS}),
    "both": frozenset({TokenQuantity.REF_LOGPROBS, TokenQuantity.OLD_LOGPROBS}),
}

LOSS_KL_METRIC, REWARD_KL_METRIC = "actor/ref_kl", "actor/reward_kl_penalty"
ENTROPY_METRIC = "actor/entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedAlgorithm:
    """A policy-gradient algorithm made of the choices in an `AlgoConfig`; it implements `megarl.types.Algorithm`.

    loss = agg(policy loss × correction) + kl_coef·agg(KL) − entropy_coef·agg(entropy), where the KL term exists only
    with kl.where=loss or both. With off_policy.loss=sft, an imitation loss is added; with echo_coef, ECHO's
    (arXiv:2605.24517), −echo_coef · mean of logprobs over what environments said, in rows' quantity `observed`.
    horizon_tokens: a fixed length by which some aggregations divide. vocab_size: needed only for CPO, where
    formulas may compare a token's entropy with its maximum, ln(vocab_size). mini_batch_prompts: as in `ShapingInputs`.
    """

    cfg: AlgoConfig
    horizon_tokens: int
    max_response_tokens: int
    vocab_size: int | None = None
    mini_batch_prompts: int | None = None

    def __post_init__(self) -> None:
        check_algo_config(self.cfg, max_response_tokens=self.max_response_tokens)

    @property
    def _policy_loss(self) -> PolicyLoss:
        return POLICY_LOSSES.get(self.cfg.policy_loss.name)

    @property
    def entropy_needs_grad(self) -> bool:
        return self.cfg.entropy_coef != 0 or "entropy" in self._policy_loss.reads

    @property
    def token_local(self) -> bool:
        shapes_rows = cpo.shapes_in_loss(self.cfg.cpo) or self.cfg.distill.discount > 0
        return self._policy_loss.token_local and not shapes_rows

    @property
    def reads(self) -> frozenset[str]:
        quantities = {
            "advantages",
            CHOSEN,
            CORRECTION,
            DEMONSTRATION,
            TARGET_PROBS,
            TokenQuantity.OLD_LOGPROBS,
            TokenQuantity.REF_LOGPROBS,
        }
        quantities |= distill.LOSS_QUANTITIES | ({OBSERVED} if self.cfg.echo_coef else set())
        quantities |= {"rollout_logprobs", "clip_bounds", "log_z"} & set(self._policy_loss.reads)
        return frozenset(quantities | (cpo.LOSS_QUANTITIES if cpo.shapes_in_loss(self.cfg.cpo) else frozenset()))

    def requires(self) -> frozenset[TokenQuantity]:
        quantities = _KL_QUANTITIES[self.cfg.kl.where] | cpo.required_quantities(self.cfg.cpo)
        quantities |= distill.required_quantities(self.cfg.distill)
        if estimator_of(self.cfg).needs_values:
            quantities |= {TokenQuantity.VALUES}
        cfg, loss = self.cfg, self._policy_loss
        quantities |= {TokenQuantity(name) for name in estimator_of(cfg).reads}
        for shaper in shapers_of(cfg):
            quantities |= {TokenQuantity(name) for name in shaper.reads}
        if "ref_logprobs" in loss.reads:
            quantities |= {TokenQuantity.REF_LOGPROBS}
        is_bounded = cfg.off_policy.drop_above is not None or {"clip_bounds", "log_z"} & set(loss.reads)
        if loss.chooses or compares_policies(cfg) or is_bounded or cfg.step_scale_power is not None:
            quantities |= {TokenQuantity.OLD_LOGPROBS}
        if cfg.high_entropy_share is not None:
            quantities |= {TokenQuantity.OLD_ENTROPY}
        return quantities

    def _loss_kl_coef(self, state: AlgoState) -> float:
        return self.cfg.kl.loss_coef if self.cfg.kl.where == "both" else state.kl_coef

    def initial_state(self) -> AlgoState:
        kl_coef = 0.0 if self.cfg.kl.where == "none" else self.cfg.kl.coef
        return AlgoState(kl_coef=kl_coef, entropy=EntropyState(coef=self.cfg.entropy_coef))

    # --- advantages, on the host

    def advantages(self, batch: ScoredBatch, state: AlgoState) -> Advantages:
        """Compute advantages in this order: reward shaping → KL penalty → estimator → `shapers_of`.

        The metrics are those of each stage, this step's KL coefficient, critic/advantages/{mean,max,min,std} of the
        final advantages over loss tokens (population std), and critic/group_reward_std (the groups' std, averaged over
        rows). The quantities are a critic's `returns` and further tensors that the loss reads.
        """
        cfg, mask = self.cfg, batch.loss_mask
        shaped = shape_rewards(batch, cfg.reward, max_response_tokens=self.max_response_tokens)
        metrics: dict[str, float] = dict(shaped.metrics)
        scored_rewards, batch = batch.rewards, replace(batch, rewards=shaped.rewards)
        if cfg.kl.in_loss:
            metrics["actor/kl_coef"] = self._loss_kl_coef(state)
        if cfg.kl.in_reward:
            metrics["actor/reward_kl_penalty_coeff"] = state.kl_coef
            kl = KL_ESTIMATORS.get(cfg.kl.estimator).compute(
                batch.quantity(TokenQuantity.OLD_LOGPROBS), batch.quantity(TokenQuantity.REF_LOGPROBS)
            )
            policy_mask = mask & ~demonstration_mask(batch)
            penalised = apply_kl_penalty(torch.zeros_like(kl), kl, policy_mask, coef=state.kl_coef)
            batch = replace(batch, quantities={**batch.quantities, KL_PENALTY: -penalised.token_level_rewards})
            metrics[REWARD_KL_METRIC] = penalised.current_kl
        estimate = reward_advantages(batch, cfg.reward, cfg.advantage)
        metrics |= estimate.metrics
        if cfg.entropy_coef:
            metrics["actor/entropy_coef"] = state.entropy.coef
        quantities: dict[str, Tensor] = {} if estimate.returns is None else {"returns": estimate.returns}
        values = estimate.advantages
        inputs = ShapingInputs(
            batch=batch,
            scored_rewards=scored_rewards,
            cfg=cfg,
            vocab_size=self.vocab_size,
            mini_batch_prompts=self.mini_batch_prompts,
        )
        for shaper in shapers_of(cfg):
            change = shaper.shape(values, inputs)
            values = change.values
            quantities |= change.quantities
            metrics |= change.metrics
        spread = token_summary("critic/advantages", values, mask)
        metrics |= spread
        if spread:
            metrics["critic/group_reward_std"] = float(group_stats(batch.rewards, batch.uids).std.mean())
        return Advantages(values=values, quantities=quantities, metrics=metrics)

    # --- the loss, per micro-batch

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Compute a mini-batch's denominators by name. `loss` is that of the configured aggregation. The others are
        numbers of tokens: all loss tokens, those that the policy wrote, demonstration tokens, imitated tokens, and
        what environments said.
        """
        counts = count_mixed(trained_rows(rows, self.cfg.off_policy), self.cfg.off_policy)
        aggregation = AGGREGATIONS.get(self.cfg.aggregation)
        found = {
            "loss": global_denominator(aggregation, counts.policy_loss, horizon_tokens=self.horizon_tokens),
            "tokens": float(max(counts.num_policy_tokens + counts.num_demonstration_tokens, 1)),
            "policy_tokens": float(max(counts.num_policy_tokens, 1)),
            "demonstration_tokens": float(max(counts.num_demonstration_tokens, 1)),
            "imitated_tokens": float(max(counts.num_imitated_tokens, 1)),
        }
        if self.cfg.echo_coef:
            num_observed = sum(np.count_nonzero(row.quantities[OBSERVED]) for row in rows)
            found["observed_tokens"] = float(max(num_observed, 1))
        return found

    def loss(self, rows: RowBatch, out: PolicyOutputs, state: AlgoState) -> LossSums:
        """Compute the local sums of all loss terms over a micro-batch.

        Rows without `old_logprobs` use the current log-probs in their place. This is correct if and only if exactly one
        optimizer step uses the batch: every ratio is then 1, and the gradient is the policy gradient.
        """
        if not self.cfg.echo_coef:
            return self._loss(rows, out, state)
        # All else is computed as if the head had answered for loss tokens alone.
        entropy = None if out.entropy is None else kept(out.entropy, rows.loss_mask)
        sums = self._loss(rows, replace(out, logprobs=kept(out.logprobs, rows.loss_mask), entropy=entropy), state)
        echo = masked_sum(-out.logprobs, rows.quantity(OBSERVED) > 0)
        return LossSums(
            objective={**sums.objective, "observed_tokens": self.cfg.echo_coef * echo},
            metrics={**sums.metrics, "observed_tokens": {"actor/echo_loss": echo.detach()}},
        )

    def _loss(self, rows: RowBatch, out: PolicyOutputs, state: AlgoState) -> LossSums:
        cfg = self.cfg
        if out.logprobs.shape != rows.loss_mask.shape:
            raise ValueError(f"logprobs: got shape {tuple(out.logprobs.shape)}, expected {tuple(rows.loss_mask.shape)}")
        shift: Mapping[str, Tensor] = {}
        advantages = rows.quantity("advantages")
        if cpo.shapes_in_loss(cfg.cpo):
            assert out.entropy is not None, "the log-prob head answers entropies too"
            assert self.vocab_size is not None, "CPO needs the model's vocabulary size"
            inputs = cpo.inputs_from_rows(rows, out.entropy, vocab_size=self.vocab_size)
            advantages = cpo.shape_advantages(inputs, cfg.cpo)
            shift = cpo.shift_diagnostics(inputs.advantages, advantages)
        advantages, distilled = distill.distill_in_loss(advantages, rows, out, cfg)
        terms = token_losses(rows, out, advantages, cfg)
        local_sum, policy_mask = AGGREGATIONS.get(cfg.aggregation).local_sum, terms.policy_mask
        loss = local_sum(terms.loss, terms.loss_mask)
        parts, per_token = {"actor/pg_loss": loss.detach()}, {**terms.policy_diagnostics, **distilled}
        if cfg.kl.in_loss:
            estimator = cfg.kl.loss_estimator if cfg.kl.where == "both" else cfg.kl.estimator
            kl = KL_ESTIMATORS.get(estimator).compute(
                kept(out.logprobs, rows.loss_mask), kept(rows.quantity(TokenQuantity.REF_LOGPROBS), rows.loss_mask)
            )
            kl_loss = local_sum(kl, terms.loss_mask & policy_mask)
            loss = loss + self._loss_kl_coef(state) * kl_loss
            parts["actor/kl_loss"] = kl_loss.detach()
            per_token[LOSS_KL_METRIC] = kl
        if cfg.distill.is_dense:
            divergence = distill.weighed_divergence(rows, out, cfg.distill)
            distill_loss = local_sum(divergence, terms.loss_mask)
            loss = loss + distill_loss
            parts["distill/loss"] = distill_loss.detach()
            per_token |= distill.comparison(out, cfg.distill)
        if "max_head_error" in self._policy_loss.options and cfg.policy_loss.compared_with == "engine":
            per_token |= centering.comparison(out.comparison)
        if out.entropy is not None:
            per_token[ENTROPY_METRIC] = out.entropy
        if cfg.entropy_coef:
            if out.entropy is None:
                raise ValueError(f"entropy: got none, expected [B, T] as entropy_coef is {cfg.entropy_coef}")
            entropy_loss = local_sum(out.entropy, terms.loss_mask & policy_mask)
            loss = loss - state.entropy.coef * entropy_loss
            parts["actor/entropy_loss"] = entropy_loss.detach()
        objective = {"loss": loss}
        metrics = {"loss": parts}
        for denominator, values, mask in (
            ("tokens", shift, rows.loss_mask),
            ("policy_tokens", per_token, policy_mask),
            ("demonstration_tokens", terms.demonstration_diagnostics, terms.demonstration_mask),
        ):
            metrics[denominator] = {name: masked_sum(value.detach(), mask) for name, value in values.items()}
        if terms.imitation is not None:
            imitation = masked_sum(terms.imitation, terms.imitated_mask)
            objective["imitated_tokens"] = cfg.off_policy.sft_coef * imitation
            metrics["imitated_tokens"] = {"actor/imitation_loss": imitation.detach()}
        return LossSums(objective=objective, metrics=metrics)

    def after_step(self, state: AlgoState, metrics: Mapping[str, float], num_rows: int) -> AlgoState:
        """Return the state for the next step, with updated coefficients of KL and entropy.

        `metrics` holds the metrics of this step's update and of `advantages`. The KL coefficient follows the KL in the
        reward, or the KL in the loss if only the loss has one. A step in which only the critic learned has a KL in the
        rewards, but no KL in the loss and no entropy. A coefficient whose metric is missing stays.
        """
        cfg = self.cfg
        followed = REWARD_KL_METRIC if cfg.kl.in_reward else LOSS_KL_METRIC
        if cfg.kl.where != "none" and (kl_nats := metrics.get(followed)) is not None:
            seen = KLObservation(kl_nats=kl_nats, num_rows=num_rows)
            state = KL_CONTROLLERS.get(cfg.kl.controller)(state, seen, cfg.kl)
        elif cfg.kl.in_reward:
            raise KeyError(f"{REWARD_KL_METRIC} is not among the metrics; pass those of advantages()")
        if cfg.entropy.controller != "fixed" and ENTROPY_METRIC in metrics:
            state = replace(state, entropy=next_entropy_state(state.entropy, metrics[ENTROPY_METRIC], cfg))
        return state
