"""Compute the loss of every token of a micro-batch, before aggregation: policy loss, LUFFY's mixed loss, imitation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megarl.algos.corrections import CORRECTION
from megarl.algos.covariance import CHOSEN
from megarl.algos.mixed_groups import demonstration_mask, kept_tokens
from megarl.algos.off_policy import imitation_masks, luffy_loss
from megarl.algos.policy_losses import FURTHER_INPUTS, POLICY_LOSSES, PolicyLossInputs, policy_loss
from megarl.algos.prefixes import TARGET_PROBS
from megarl.config.algo import AlgoConfig, OffPolicyConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import PolicyOutputs, Row, RowBatch, TokenQuantity


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Losses per token [B, T] with graph, and diagnostics [B, T] without graph, by metric name.

    loss: to be summed over `loss_mask`. policy_mask, demonstration_mask: loss tokens by who wrote them; diagnostics of
    each kind are averaged over its mask. imitation: −logprobs, to be summed over `imitated_mask`; None: no such term.
    """

    loss: Tensor
    loss_mask: Tensor
    policy_mask: Tensor
    demonstration_mask: Tensor
    policy_diagnostics: Mapping[str, Tensor]
    demonstration_diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    imitation: Tensor | None = None
    imitated_mask: Tensor


def token_losses(rows: RowBatch, out: PolicyOutputs, advantages: Tensor, cfg: AlgoConfig) -> TokenLosses:
    """Compute the configured loss of each token, times the correction weights if the rows carry any.

    >>> advantages = tensor([[0.5, 2.0]])
    >>> token_losses(rows([[1, 1]]), outputs([[-1.0, -1.0]]), advantages, AlgoConfig()).loss.tolist()
    [[-0.5, -2.0]]
    """
    mask, off_policy = rows.loss_mask, cfg.off_policy
    if (bound := off_policy.drop_above) is not None:
        mask = kept_tokens(rows.quantity(TokenQuantity.OLD_LOGPROBS), mask, bound)
    demonstrated = demonstration_mask(rows) & mask
    loss_mask, imitated = mask, torch.zeros_like(mask)
    if off_policy.loss == "sft":
        masks = imitation_masks(mask, demonstrated, off_policy.sft_tokens)
        loss_mask, imitated = masks.policy, masks.imitated
    loss = POLICY_LOSSES.get(cfg.policy_loss.name)
    further = {name: rows.quantity(name) for name in FURTHER_INPUTS if name in loss.reads and name != "entropy"}
    old_logprobs = rows.quantities.get(TokenQuantity.OLD_LOGPROBS, out.logprobs.detach())
    if cfg.policy_loss.compared_with == "trainer":
        old_logprobs = out.comparison["teacher_logprobs"]
        further |= {"rollout_logprobs": old_logprobs} if "rollout_logprobs" in further else {}
    x = PolicyLossInputs(
        logprobs=out.logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        # Imitated tokens, too, have diagnostics.
        loss_mask=mask,
        correction=rows.quantities.get(CORRECTION),
        chosen=rows.quantity(CHOSEN) > 0 if loss.chooses else None,
        **further,
        entropy=out.entropy if "entropy" in loss.reads else None,
        beside=None if loss.measure is None else out.divergence,
    )
    if off_policy.loss == "luffy":
        mixed = luffy_loss(
            x,
            demonstrated,
            off_policy,
            cfg.policy_loss,
            target_probs=rows.quantities.get(TARGET_PROBS) if off_policy.target_probs else None,
        )
        return TokenLosses(
            loss=mixed.loss,
            policy_diagnostics=mixed.policy,
            demonstration_diagnostics=mixed.demonstration,
            loss_mask=loss_mask,
            policy_mask=mask & ~demonstrated,
            demonstration_mask=demonstrated,
            imitated_mask=imitated,
        )
    terms = policy_loss(x, cfg.policy_loss)
    return TokenLosses(
        loss=terms.loss,
        policy_diagnostics=terms.diagnostics,
        imitation=-out.logprobs if off_policy.loss == "sft" else None,
        loss_mask=loss_mask,
        policy_mask=mask & ~demonstrated,
        demonstration_mask=demonstrated,
        imitated_mask=imitated,
    )


def trained_rows(rows: Sequence[Row], cfg: OffPolicyConfig) -> Sequence[Row]:
    """Return the rows without the loss tokens that `drop_above` removes, so that denominators do not count them.

    >>> kept, = trained_rows([row([1, 1], old_logprobs=[-0.01, -1.0])], OffPolicyConfig(drop_above=0.9))
    >>> kept.loss_mask.tolist()
    [False, True]
    """
    bound = cfg.drop_above
    if bound is None:
        return rows
    return [
        replace(row, loss_mask=row.loss_mask & (np.exp(row.quantities[TokenQuantity.OLD_LOGPROBS]) <= bound))
        for row in rows
    ]
