"""Estimate advantages from a critic's values, and compute the metrics of those values."""

from collections.abc import Callable

from megarl.algos.advantages.estimator import ADVANTAGE_ESTIMATORS, Estimate
from megarl.algos.masked import masked_sum, summary
from megarl.algos.token_rewards import last_token, returns_to_go, token_rewards
from megarl.algos.trees import later_sums, next_sums, token_after, turn_tree
from megarl.config.algo import AdvantageConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import ScoredBatch, TokenQuantity

_VARIANCE_EPS = 1e-8
# Keeps the explained variance finite where all returns are equal.
_EXPLAINED_EPS = 1e-5


def masked_values(batch: ScoredBatch) -> Tensor:
    """Return the critic's values as float64 [B, T], set to 0 outside the loss mask.

    >>> masked_values(step("a", [1.0], [[1, 0]], values=[[0.5, 9.0]])).tolist()
    [[0.5, 0.0]]
    """
    return torch.where(batch.loss_mask, batch.quantity(TokenQuantity.VALUES).double(), 0.0)


def last_values(batch: ScoredBatch) -> Tensor:
    """Return [B]: the critic's value of each row's last loss token, or 0 for a row without loss tokens.

    >>> last_values(step("a", [1.0], [[1, 1, 0]], values=[[0.5, 0.25, 9.0]])).tolist()
    [0.25]
    """
    return masked_sum(masked_values(batch), last_token(batch.loss_mask), dim=-1)


def whitened(advantages: Tensor, batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Return (A − mean)·rsqrt(var + 1e-8) over the batch's loss tokens (unbiased var), or A unchanged without
    `whiten`.

    >>> whitened(tensor([[1.0], [3.0]]), step("aa", [1.0, 0.0]), AdvantageConfig()).round(decimals=2).tolist()
    [[-0.71], [0.71]]
    """
    if not cfg.whiten:
        return advantages
    num_tokens = batch.loss_mask.sum()
    centred = torch.where(batch.loss_mask, advantages - advantages.sum() / num_tokens.clamp(min=1), 0.0)
    variance = centred.square().sum() / (num_tokens - 1).clamp(min=1)
    return centred * (variance + _VARIANCE_EPS).rsqrt()


@ADVANTAGE_ESTIMATORS.register(
    "gae", normalise=whitened, options=("gamma", "lam", "lam_critic", "whiten", "credit"), needs_values=True
)
def gae(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute GAE (arXiv:1506.02438) over loss tokens only, as if the tokens between them did not exist.

    δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γλ·A_{t+1}, with V and A 0 after the last token. The returns are A + V
    with λ = `lam_critic`. Returns are not normalised, so they are in units of the reward.

    With `credit=path`, V_{t+1} and A_{t+1} are the sums over the next tokens of all branches that go on from t; where
    branches part, each of them has a return of its own. With λ = 1, A + V is the sum of all rewards on these branches,
    so the estimate is unbiased if no branch depends on what another one says, and if turns were given all of the reward
    (the last loss token has the rest).

    >>> batch = step("a", [1.0], values=[[0.5, 0.5]])
    >>> gae(batch, AdvantageConfig(estimator="gae", lam=0.5)).advantages.tolist()
    [[0.25, 0.5]]
    """
    mask, values = batch.loss_mask, masked_values(batch)
    if cfg.credit == "path":
        after = token_after(turn_tree(batch, paths=True))
        errors = torch.where(mask, token_rewards(batch) + cfg.gamma * next_sums(values, after) - values, 0.0)
        return _gae_of(lambda lam: later_sums(errors, after, cfg.gamma * lam), batch, cfg)
    # Move loss tokens to the front, in order, so that the next loss token is in the next column.
    order = (~mask).to(torch.int8).argsort(dim=-1, stable=True)
    packed_values = values.gather(-1, order)
    next_values = torch.cat([packed_values[:, 1:], torch.zeros_like(packed_values[:, :1])], dim=-1)
    delta = token_rewards(batch).gather(-1, order) + cfg.gamma * next_values - packed_values
    back = order.argsort(dim=-1)

    def discounted(lam: float) -> Tensor:
        sums = returns_to_go(torch.where(mask.gather(-1, order), delta, 0.0), cfg.gamma * lam)
        return torch.where(mask, sums.gather(-1, back), 0.0)

    return _gae_of(discounted, batch, cfg)


def _gae_of(discounted: Callable[[float], Tensor], batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Return the estimate of sums of δ [B, T], given for each λ."""
    mask, values = batch.loss_mask, masked_values(batch)
    advantages = discounted(cfg.lam)
    lam_critic = cfg.lam if cfg.lam_critic is None else cfg.lam_critic
    returns = values + (advantages if lam_critic == cfg.lam else discounted(lam_critic))
    return Estimate(advantages=advantages, returns=returns, metrics=value_metrics(values, returns, mask))


@ADVANTAGE_ESTIMATORS.register(
    "critic_value", normalise=whitened, options=("whiten",), needs_values=True, reads_rewards=False
)
def critic_value(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Use the critic's value of the last token as the reward: A_t = V_last − V_t, and returns V_last.

    This is GAE with γ = λ = 1 and the reward V_last. The rewards of the batch are not read.

    >>> batch = step("a", [1.0], values=[[0.5, 0.75]])
    >>> critic_value(batch, AdvantageConfig()).advantages.tolist()
    [[0.25, 0.0]]
    """
    values = masked_values(batch)
    returns = torch.where(batch.loss_mask, last_values(batch)[:, None], 0.0)
    return Estimate(
        advantages=returns - values, returns=returns, metrics=value_metrics(values, returns, batch.loss_mask)
    )


def value_metrics(values: Tensor, returns: Tensor, loss_mask: Tensor) -> dict[str, float]:
    """Compute critic/{values,returns}/{mean,max,min} and critic/vf_explained_var = 1 − Var(R − V) / (Var(R) + 1e-5).

    values V, returns R: [B, T], of which loss tokens count. One of them alone has no vf_explained_var.

    >>> metrics = value_metrics(tensor([[1.0, 2.0]]), tensor([[1.0, 3.0]]), torch.tensor([[True, True]]))
    >>> round(metrics["critic/vf_explained_var"], 2)
    0.75
    """
    kept_values, kept_returns = values[loss_mask].double(), returns[loss_mask].double()
    metrics = summary("critic/values", kept_values) | summary("critic/returns", kept_returns)
    if kept_returns.numel() > 1:
        unexplained = (kept_returns - kept_values).var() / (kept_returns.var() + _EXPLAINED_EPS)
        metrics["critic/vf_explained_var"] = 1 - float(unexplained.item())
    return metrics
