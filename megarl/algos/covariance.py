"""Choose the few tokens whose log-prob and advantage are large together, as learning from them lowers entropy most."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megarl.algos.masked import masked_sum
from megarl.algos.policy_losses import POLICY_LOSSES
from megarl.config.algo import PolicyLossConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types.seeds import sample_seed

# Name of the quantity that is 1 on the chosen tokens and 0 elsewhere.
CHOSEN = "chosen_by_covariance"
# Makes these random choices independent of others with the same seed.
_SALT = "covariance"


def token_covariance(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Compute (logprobs − their mean)·(advantages − their mean) per token [B, T], with means over the mask.

    The mean of these numbers is the covariance of log-prob and advantage. Values outside the mask are 0.

    >>> token_covariance(tensor([[1.0, -1.0]]), tensor([[-1.0, -3.0]]), tensor([[True, True]])).tolist()
    [[1.0, 1.0]]
    """
    count = mask.sum().clamp(min=1)
    centred = [values.double() - masked_sum(values.double(), mask) / count for values in (advantages, logprobs)]
    return torch.where(mask, centred[0] * centred[1], 0.0)


def choose_tokens(covariance: Tensor, mask: Tensor, cfg: PolicyLossConfig, *, uids: Sequence[str], seed: int) -> Tensor:
    """Return [B, T] bool, true on the tokens chosen among those of the mask: a share `cov_share` of it, at least one.

    clip_cov: a random choice among the tokens with a covariance between `cov_low` and `cov_high`, or all of them if
    they are fewer. kl_cov: the tokens of the largest covariance. Draws are functions of the seed, a row's uid and its
    index within its group, and the token's index, so neither the order of groups nor padding has an influence.

    >>> mask, cfg = tensor([[True, True, True]]), PolicyLossConfig(name="kl_cov", cov_share=0.4)
    >>> choose_tokens(tensor([[0.1, 0.9, 0.5]]), mask, cfg, uids="a", seed=7).tolist()
    [[False, True, False]]
    """
    places: Counter[str] = Counter()
    draws = np.empty(mask.shape)
    for row, uid in zip(draws, uids, strict=True):
        row[:] = np.random.default_rng(sample_seed(seed, 0, f"{_SALT}/{uid}", places[uid])).random(len(row))
        places[uid] += 1
    is_random = POLICY_LOSSES.get(cfg.name).chooses == "drawn"
    allowed = mask & (covariance > cfg.cov_low) & (covariance < cfg.cov_high) if is_random else mask
    # Rounding errors must not decide between equal covariances, such as those of a batch without advantages.
    rank = torch.zeros_like(covariance) if is_random else -covariance.round(decimals=9)
    candidates = allowed.flatten().nonzero().flatten().numpy()
    # lexsort orders by its last key first; draws decide between equal ranks.
    order = np.lexsort((draws.ravel()[candidates], rank.flatten().numpy()[candidates]))
    chosen = torch.zeros(mask.numel(), dtype=torch.bool)
    chosen[candidates[order[: max(int(cfg.cov_share * mask.sum().item()), 1)]]] = True
    return chosen.view(mask.shape)
