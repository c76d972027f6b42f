"""Estimate advantages with a baseline per token that nearly minimises the variance of the gradient."""

from collections.abc import Sequence

from megarl.algos.advantages.estimator import ADVANTAGE_ESTIMATORS, Estimate
from megarl.algos.masked import group_index, kept
from megarl.algos.policy_losses import MAX_LOG_RATIO
from megarl.algos.token_rewards import returns_to_go, token_rewards
from megarl.config.algo import AdvantageConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import ScoredBatch, TokenQuantity

# Added to sums of weights before something is divided by them.
_EPS = 1e-8


def token_baseline(
    returns: Tensor, weights: Tensor, mask: Tensor, uids: Sequence[str], *, count_loss_tokens: bool = False
) -> Tensor:
    """Return the baselines [B, T]: the mean of `returns`, by `weights`, over the tokens at a place in the group's rows.

    A place is a column, or with `count_loss_tokens` the number of loss tokens up to it. Where only the longest row of a
    group goes on, and in groups of one row, the baseline is 0.

    >>> returns, mask = tensor([[1.0, 5.0], [4.0, 0.0]]), tensor([[True, True], [True, False]])
    >>> token_baseline(returns, tensor([[1.0, 1.0], [2.0, 0.0]]), mask, "aa").round(decimals=6).tolist()
    [[3.0, 0.0], [3.0, 0.0]]
    """
    if not mask.any():
        return torch.zeros_like(returns)
    group, num_groups = group_index(uids, mask.device)
    # Column 0 takes what lies outside the mask.
    columns = torch.arange(1 + mask.shape[1], device=mask.device)
    place = kept(mask.cumsum(-1) if count_loss_tokens else columns[1:].expand(mask.shape), mask)

    def of_group(values: Tensor) -> Tensor:
        return values.new_zeros(num_groups, len(columns)).index_add(0, group, values)[group].gather(1, place)

    def at_place(values: Tensor) -> Tensor:
        return of_group(values.new_zeros(len(place), len(columns)).scatter_add(1, place, kept(values, mask)))

    num_rows = of_group((columns <= place.amax(-1, keepdim=True)).to(returns.dtype))
    baseline = at_place(returns * weights) / (at_place(weights) + _EPS)
    return kept(baseline, mask & (num_rows > 1))


@ADVANTAGE_ESTIMATORS.register(
    "otb",
    options=("places", "weight_cap"),
    reads=(TokenQuantity.OLD_LOGPROBS, TokenQuantity.OLD_SQUARES),
)
def otb(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute A_t = G_t − B_t with the optimal token baseline (arXiv:2602.07078): G_t is the sum of later rewards.

    B_t is the mean of G_t at the place of the token over the rows of its group, by weights W_t = Σ_{j ≤ t} e_j·ρ̄_j².
    e = 1 − 2p + Σ p² is the squared norm of the gradient of ln p in the logits, by the policy at the start of the step.
    ρ̄ = min(ρ, `weight_cap`), or 1 without a cap; verl's code has this sum, its docstring ρ̄_t²·Σ e_j. The row itself is
    in its baseline, which biases the gradient by O(1/n) for n rows.

    >>> tokens = {"old_logprobs": [[-20.0], [-20.0]], "old_squares": [[0.0], [1.0]]}
    >>> otb(step("aa", [1.0, 0.0], **tokens), AdvantageConfig(estimator="otb")).advantages.round(decimals=4).tolist()
    [[0.6667], [-0.3333]]
    """
    old, mask = batch.quantity(TokenQuantity.OLD_LOGPROBS).double(), batch.loss_mask
    # Rounding must not make weights negative.
    energy = (1 - 2 * old.exp() + batch.quantity(TokenQuantity.OLD_SQUARES).double()).clamp(min=0)
    if cfg.weight_cap is not None:
        log_ratio = old - batch.quantity("rollout_logprobs").double()
        energy = energy * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cfg.weight_cap).square()
    returns = returns_to_go(token_rewards(batch))
    weights, by_count = kept(energy, mask).cumsum(-1), cfg.places == "loss"
    baseline = token_baseline(returns, weights, mask, batch.uids, count_loss_tokens=by_count)
    return Estimate(advantages=kept(returns - baseline, mask))
