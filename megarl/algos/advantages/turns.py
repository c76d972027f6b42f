"""Estimate advantages of parts of responses: of turns, from the rewards after each, and of tokens, with a baseline for
each that nearly minimises the variance of the gradient.
"""

from collections.abc import Sequence

from megarl.algos.advantages.estimator import ADVANTAGE_ESTIMATORS, Estimate
from megarl.algos.advantages.group import leave_one_out
from megarl.algos.masked import group_index, group_stats, kept
from megarl.algos.policy_losses import MAX_LOG_RATIO
from megarl.algos.token_rewards import place_reward, returns_to_go, token_rewards, unplaced_rewards
from megarl.algos.trees import TurnTree, later_sums, turn_tree
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


def turn_rewards(batch: ScoredBatch, tree: TurnTree) -> Tensor:
    """Return [B, K]: what each turn earned by itself, without the rest of the row's reward that no turn was given.

    >>> batch = step("a", [1.0], [[1, 0, 1]], turn_rewards=[[0.25, 0.0, 0.5]])
    >>> turn_rewards(batch, turn_tree(batch, paths=True)).tolist()
    [[0.25, 0.5]]
    """
    rest = place_reward(unplaced_rewards(batch), batch.loss_mask)
    return tree.sums(torch.where(batch.loss_mask, token_rewards(batch) - rest, 0.0))


def others_at_depth(values: Tensor, tree: TurnTree, depths: Tensor, batch: ScoredBatch) -> Tensor:
    """Return [B, K]: the mean of `values` [B, K] of turns at the same depth over the other samples of the group.

    A sample with several turns at a depth counts once, with their mean. Where no other sample reached it: 0.

    >>> batch = step("aa", [1.0, 0.0], [[1, 0, 1], [1, 0, 0]])
    >>> tree = turn_tree(batch, paths=False)
    >>> others_at_depth(tensor([[1.0, 2.0], [3.0, 0.0]]), tree, tree.depths(), batch).tolist()
    [[3.0, 0.0], [1.0, 2.0]]
    """

    def by_depth(turns: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter_add(1, depths, torch.where(tree.reached, turns, 0.0))

    group, num_groups = group_index(batch.uids, values.device)

    def of_group(rows: Tensor) -> Tensor:
        return rows.new_zeros(num_groups, rows.shape[1]).index_add(0, group, rows)[group]

    counts = by_depth(torch.ones_like(values))
    means = by_depth(values) / counts.clamp(min=1)
    others = (of_group(means) - means) / (of_group((counts > 0).double()) - 1).clamp(min=1)
    return others.gather(1, depths)


@ADVANTAGE_ESTIMATORS.register("turn_returns", options=("gamma", "credit"), min_group=2)
def turn_returns(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute A_k = G_k − mean of G_k over the group's other samples that reached turn k, for all tokens of turn k.

    G_k = Σ_{j≥k} γ^{j−k}·r_j, with r_j the sum of the turn's token rewards (`token_rewards`). The baseline is 0 where
    no other sample reached the turn. It does not depend on what the sample did, so the estimate of the policy gradient
    is unbiased; a baseline of the rewards of single turns, summed afterwards, is not.

    With `credit=path`, G_k = r_k + γ·Σ G_j over the turns j that follow k on its branches. The rest of the reward,
    which no turn was given, is that of the whole conversation: it is added to every G_k. The baseline is that of turns
    with as many turns before them (`others_at_depth`). It is unbiased if no branch depends on what another one says.

    >>> mask = [[1, 0, 1], [1, 0, 1]]
    >>> batch = step("aa", [1.0, 0.0], mask, turn_rewards=[[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]])
    >>> turn_returns(batch, AdvantageConfig(estimator="turn_returns")).advantages.tolist()
    [[1.0, 0.0, 0.75], [-1.0, 0.0, -0.75]]
    """
    tree = turn_tree(batch, paths=cfg.credit == "path")
    if not tree.reached.numel():
        return Estimate(advantages=torch.zeros_like(batch.loss_mask, dtype=torch.float64))
    if cfg.credit == "path":
        depths = tree.depths()
        returns = later_sums(turn_rewards(batch, tree), tree.after, cfg.gamma) + unplaced_rewards(batch)[:, None]
    else:
        depths = torch.arange(tree.reached.shape[1], device=tree.reached.device).expand(tree.reached.shape)
        returns = returns_to_go(tree.sums(torch.where(batch.loss_mask, token_rewards(batch), 0.0)), cfg.gamma)
    returns = torch.where(tree.reached, returns, 0.0)
    return Estimate(advantages=tree.on_tokens(returns - others_at_depth(returns, tree, depths, batch)))


@ADVANTAGE_ESTIMATORS.register("tree_returns", options=("gamma",))
def tree_returns(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute A_k = G_k − mean of G over the other tries of turn k, those written beside it from the same context.

    G_k = r_k + γ·Σ G_j over the turns j that follow k on its branches. A turn that was written once is compared as by
    `turn_returns` with `credit=path`. The rest of the reward, which no turn was given, is compared with that of the
    group's other samples, and added. Tries are drawn independently, so the estimate is unbiased if no branch depends on
    what another one says. The mean over all n tries, the own one included, would scale A_k by (n − 1)/n.

    >>> batch = step("a", [3.0], turn_rewards=[[0.0, 2.0, 1.0]], turn=[[0, 1, 2]], after_turn=[[-1, 0, 0]],
    ...     first_try=[[0, 1, 1]])
    >>> tree_returns(batch, AdvantageConfig()).advantages.tolist()
    [[3.0, 1.0, -1.0]]
    """
    tree = turn_tree(batch, paths=True)
    if not tree.reached.numel():
        return Estimate(advantages=torch.zeros_like(batch.loss_mask, dtype=torch.float64))
    returns = torch.where(tree.reached, later_sums(turn_rewards(batch, tree), tree.after, cfg.gamma), 0.0)
    zeros = torch.zeros_like(returns)
    num_tries = zeros.scatter_add(1, tree.first_try, tree.reached.double()).gather(1, tree.first_try)
    other_tries = zeros.scatter_add(1, tree.first_try, returns).gather(1, tree.first_try) - returns
    baseline = torch.where(
        num_tries > 1,
        other_tries / (num_tries - 1).clamp(min=1),
        others_at_depth(returns, tree, tree.depths(), batch),
    )
    rest = unplaced_rewards(batch)
    compared = leave_one_out(rest, group_stats(rest, batch.uids))
    return Estimate(advantages=tree.on_tokens(returns - baseline + compared[:, None]))
