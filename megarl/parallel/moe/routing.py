"""Compute mixture-of-experts routing in plain tensors: the choice of experts, their load, and the balance loss.

For a layer with E experts, of which each token is routed to k, and a row of n tokens (prompt and response) that count,

    f_e = (number of the row's tokens routed to expert e) / (k·n),     P_e = (Σ_t p_{t,e}) / n,
    aux(row) = E · Σ_e f_e·P_e,

where p are the router's probabilities over all experts (Fedus et al. 2022, eq. 4, with k experts per token; taken per
sequence as in DeepSeek-V3, arXiv:2412.19437, eq. 17). aux is 1 under perfect balance; f has no gradient. An optimizer
mini-batch with rows r of n_r tokens, N in total, adds to the loss

    coef · Σ_layers Σ_r (n_r / N) · aux(r).

A token that rows of the mini-batch share, as part of a prefix, counts in one of them; n_r, f and P of the others are
those of their other tokens.

This equals Megatron-Core's loss with `moe_aux_loss_coeff=coef` and one row per micro-batch. In contrast, transformers'
`load_balancing_loss_func` takes one f and one P over all layers and rows. Which tokens count for a row depends on the
mini-batch only, so results do not depend on micro-batches, packing or parallelism.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """The rule that chooses each token's experts, in place of Megatron's top-k. The router's scores are unchanged.

    If experts form groups (group-limited routing), a group's rating is the sum of its `group_rating` best scores: 1 in
    DeepSeek-V2 (arXiv:2405.04434), 2 in DeepSeek-V3 (arXiv:2412.19437). Megatron would take k / (groups per token).

    forced: expert indices [T, k] to use, such as recorded ones, or −1 to choose by score; None: choose all by score.
    """

    group_rating: int
    forced: torch.Tensor | None

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: _TopK
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and indices of each token's experts, both [T, k]. Megatron's router calls this method."""
        rated = scores
        if num_groups is not None and group_topk is not None:
            ratings = scores.unflatten(1, (num_groups, -1)).topk(self.group_rating, dim=-1).values.sum(-1)
            best = ratings.topk(group_topk, dim=-1).indices
            # [T, E]: whether an expert is in one of a token's best groups.
            eligible = torch.zeros_like(ratings, dtype=torch.bool).scatter_(1, best, value=True)
            eligible = eligible.repeat_interleave(scores.shape[1] // num_groups, dim=1)
            rated = scores.masked_fill(~eligible, -torch.inf)
        _, indices = choose(rated, topk)
        if self.forced is not None:
            indices = torch.where(self.forced < 0, indices, self.forced)
        return scores.gather(1, indices), indices


def row_sums(
    routing_map: torch.Tensor, probabilities: torch.Tensor, members: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over the tokens of each row how often every expert was chosen, and its probabilities: both [num_rows, E].

    The sums are float32 matrix products, which no host waits for; those of probabilities have their gradients.

    Args:
        routing_map: [T, E] bool, the chosen experts of this rank's tokens.
        probabilities: [T, E] of the router over all experts.
        members: [T, num_rows] 1 where a token counts for a row, else 0.
    """
    return members.t() @ routing_map.float(), members.t() @ probabilities


def balance_loss(loads: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Compute Σ_r n_r · aux(r) = E · Σ_r Σ_e f_re · (Σ_t p_te), with one result per leading index.

    Args:
        loads: [..., num_rows, E] how often a row's tokens chose each expert, on all ranks.
        probabilities: [..., num_rows, E] sums over a row's tokens; of this rank's only, for its part of the loss.
    """
    fractions = loads / loads.sum(-1, keepdim=True).clamp(min=1)
    return loads.shape[-1] * (fractions * probabilities).sum((-2, -1))


def load_metrics(loads: torch.Tensor, balance: torch.Tensor, num_tokens: float) -> dict[str, float]:
    """Compute a mini-batch's metrics of expert load. They are means over layers unless their name says otherwise.

    Args:
        loads: [layers, E] the number of tokens routed to each expert.
        balance: [layers] Σ_r n_r · aux(r).
        num_tokens: N, the tokens of the mini-batch.
    """
    peaks = loads.amax(1) / loads.mean(1).clamp(min=torch.finfo(loads.dtype).tiny)
    return {
        "moe/load_max_over_mean": peaks.mean().item(),
        "moe/load_max_over_mean_worst_layer": peaks.max().item(),
        "moe/idle_experts": (loads == 0).to(loads.dtype).mean().item(),
        "moe/aux_loss": (balance / num_tokens).mean().item(),
    }
